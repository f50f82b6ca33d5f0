"""The cluster as Prometheus reads it; names and units are in docs/dashboard.md, which a test compares; pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector

from ..node.step_history import pace_s
from ..protocols.status import MemberRow, Status
from ..scheduler.monitor import CHECKPOINT_AT_S, CHECKPOINT_STEP, CHECKPOINT_WRITING
from ..terminal.told_pipelines import micro_batches_per_s
from .picture import Picture

MBIT = 1e6
CONTENT_TYPE = CONTENT_TYPE_LATEST

OF_CHECKPOINTS = (  # Counters that tell of no fault.
    CHECKPOINT_AT_S, CHECKPOINT_STEP, CHECKPOINT_WRITING, "checkpoints", "checkpoint_ms", "checkpoint_bytes",
)  # fmt: skip
Sample = tuple[tuple[str, ...], float]


def exposition(picture: Picture) -> bytes:
    """The text that /metrics gives."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Told(picture))
    return generate_latest(registry)


class _Told(Collector):
    def __init__(self, picture: Picture) -> None:
        self._picture = picture

    def collect(self) -> Iterable[Metric]:
        return families(self._picture)


def families(picture: Picture) -> Iterator[Metric]:
    """All of them; of a cluster that does not answer only that it does not."""
    status = picture.status if picture.silent_s is None else None
    yield gauge("up", "1: the cluster has answered; 0: it has not.", (), [((), float(status is not None))])
    if status is None:
        return
    yield from _of_cluster(status, picture)
    yield from _of_pipelines(status, picture)
    yield from _of_members(status)
    yield from _of_pulls(status)
    yield from _of_links(status)


def gauge(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    family = GaugeMetricFamily(f"chaosnet_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def counter(name: str, text: str, labels: tuple[str, ...], samples: Iterable[Sample]) -> Metric:
    """`name`: without "_total"."""
    family = CounterMetricFamily(f"chaosnet_{name}", text, labels=labels)
    for values, value in samples:
        family.add_metric(values, value)
    return family


def _of_cluster(status: Status, picture: Picture) -> Iterator[Metric]:
    counts = dict.fromkeys(("active", "standby", "failed", "left"), 0)
    for row in status.members:
        counts[row.state] = counts.get(row.state, 0) + 1
    step_s, waiting = pace_s(picture.steps), status.waiting
    yield counter("steps", "Steps that the cluster has completed.", (), [((), status.step)])
    if step_s is not None:
        yield gauge("step_seconds", "What a step takes: the median of the last 21.", (), [((), step_s)])
    yield gauge("samples_per_second", "Of all members together.", (), [((), status.samples_per_s)])
    yield gauge(
        "members", "Nodes by state.", ("state",), [((each,), count) for each, count in counts.items()]
    )
    told = [((name,), value) for name, value in sorted(status.metrics.items()) if value is not None]
    yield gauge("metric", "Mean over the cluster that the script asks for.", ("name",), told)
    yield gauge("scheduler_info", "Who schedules.", ("node",), [((status.scheduler,), 1.0)])
    yield counter("elections", "Terms of schedulers so far.", (), [((), status.term)])
    yield gauge(
        "waiting_seconds",
        "How long the step waits for somebody.",
        (),
        [((), waiting.seconds if waiting else 0.0)],
    )
    yield gauge(
        "parked", "1: training waits for a person, or for a majority.", (), [((), float(bool(status.parked)))]
    )
    if newest := status.checkpoint:
        yield gauge("checkpoint_step", "Of the newest checkpoint; 0: none yet.", (), [((), newest.step)])
        yield gauge("checkpoint_timestamp_seconds", "When that was there.", (), [((), newest.time_s)])
        yield gauge("checkpoint_writers", "Members that write one now.", (), [((), len(newest.writing))])
    yield gauge("gradient_trees", "Trees that gradients travel over.", (), [((), len(status.trees))])
    yield counter("samples_dropped", "Left out at the ends of epochs.", (), [((), status.samples_dropped)])
    yield counter(
        "samples_set_aside", "Scripts ended with an error over them.", (), [((), status.samples_set_aside)]
    )
    refused = [((why,), count) for why, count in sorted(status.strangers_refused.items())]
    yield counter("strangers_refused", "Connections that all nodes refused.", ("reason",), refused)
    events = [((kind,), count) for kind, count in sorted(picture.events_by_kind.items())]
    yield counter("events", "Since this page began to look.", ("kind",), events)


def _of_pipelines(status: Status, picture: Picture) -> Iterator[Metric]:
    """Nothing where nobody computes by pipelines."""
    if not status.pipelines:
        return
    rate = micro_batches_per_s(status, pace_s(picture.steps))
    if status.predicted_s:
        yield gauge("step_predicted_seconds", "What a step should take.", (), [((), status.predicted_s)])
    if rate is not None:
        yield gauge("micro_batches_per_second", "Of all pipelines together.", (), [((), rate)])
    if status.keepers:
        yield gauge(
            "state_copies", "Members that keep the layer which the fewest do.", (), [((), status.keepers)]
        )


def _of_members(status: Status) -> Iterator[Metric]:
    told = [
        row for row in status.members if row.report_age_s is not None and row.state in ("active", "standby")
    ]

    def each(value: str, factor: float = 1.0) -> list[Sample]:
        return [((row.node,), getattr(row, value) * factor) for row in told]

    by_node = ("node",)
    yield gauge("member_samples_per_second", "Of this node.", by_node, each("samples_per_s"))
    yield gauge(
        "member_sync_seconds", "Its last step has waited for the all-reduce.", by_node, each("sync_delay_s")
    )
    yield gauge(
        "member_idle_seconds", "Its script lets the others wait for so long.", by_node, each("idle_s")
    )
    yield gauge("member_report_age_seconds", "Since it has reported.", by_node, each("report_age_s"))
    yield gauge("member_cpu_ratio", "Of one core, so that it may be above 1.", by_node, each("cpu_pct", 0.01))
    yield gauge("member_memory_bytes", "Resident, of the process.", by_node, each("memory_bytes"))
    yield gauge("member_state_bytes", "Parameters, buffers, optimizer.", by_node, each("state_bytes"))
    yield counter("member_network_sent_bytes", "By its process, over its links.", by_node, each("sent_bytes"))
    yield counter(
        "member_network_received_bytes", "By its process, over its links.", by_node, each("received_bytes")
    )
    charged = [((row.node,), row.battery_pct / 100) for row in told if row.battery_pct >= 0]
    yield gauge("member_battery_ratio", "Of nodes that have one.", by_node, charged)
    yield counter("member_faults", "What went wrong there, by name.", ("node", "what"), _faults(told))


def _faults(rows: list[MemberRow]) -> list[Sample]:
    return [
        ((row.node, what), count)
        for row in rows
        for what, count in sorted(row.counters.items())
        if what not in OF_CHECKPOINTS
    ]


def _of_pulls(status: Status) -> Iterator[Metric]:
    pulls = [row for row in status.members if row.pulls_bytes and row.state in ("standby", "active")]
    whole = [((row.node,), row.pulls_bytes) for row in pulls]
    yield gauge("join_state_bytes", "That a node pulls in all.", ("node",), whole)
    parts = [((row.node, name), count) for row in pulls for name, count in sorted(row.pulled.items())]
    yield gauge("join_pulled_bytes", "That are here, by who has sent them.", ("node", "from"), parts)


def _of_links(status: Status) -> Iterator[Metric]:
    ways = [
        way
        for row in status.links
        for way in (
            (row.a, row.b, row.rate_mbit, row.rate_age_s),
            (row.b, row.a, row.rate_back_mbit, row.rate_back_age_s),
        )
    ]
    both = ("from", "to")
    rates = [((one, other), rate * MBIT) for one, other, rate, age_s in ways if age_s is not None]
    yield gauge("link_rate_bits_per_second", "Measured, that way.", both, rates)
    ages = [((one, other), age_s) for one, other, _, age_s in ways if age_s is not None]
    yield gauge("link_rate_age_seconds", "Since it was measured.", both, ages)
    trips = [((row.a, row.b), row.rtt_min_ms / 1e3) for row in status.links if row.rtt_min_ms]
    yield gauge("link_round_trip_seconds", "The least of late.", ("a", "b"), trips)
    shares = [
        ((row.a, row.b), sum(status.trees[place].share for place in row.trees if place < len(status.trees)))
        for row in status.links
    ]
    yield gauge(
        "link_gradient_ratio", "Part of the gradients that goes over it, each way.", ("a", "b"), shares
    )
