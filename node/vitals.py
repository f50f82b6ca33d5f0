"""What a node knows of itself: readings for its reports, and its status."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

import msgspec
import psutil

from ..protocols.events import Event, ReadingsTaken, Received
from ..protocols.messages import (
    REFUSED,
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Envelope,
    ScaleInRequest,
)
from ..protocols.status import EVENTS_TOLD, EventRow, MemberRow, Status
from . import clock, interfaces
from .agent.core import Agent
from .outcomes import Rates
from .step_history import StepHistory
from .transport.transport import Transport

TIMES_KEPT = 50
NEW_TREES = "new-plan"  # The kind of such an event.
TIMED = (ScaleInRequest, ConnectLinkRequest, DisconnectLinkRequest)


class Vitals:
    """Figures that go on over all of a node's lives."""

    def __init__(self) -> None:
        self.handling_ms: dict[str, deque[float]] = {}
        self._process = psutil.Process()

    def handled(self, event: Event, took_ms: float) -> None:
        """Note how long the scheduler took for an event, if it is one that the paper times (Table I)."""
        if not isinstance(event, Received) or not isinstance(event.message, Envelope):
            return
        body = event.message.body
        if isinstance(body, TIMED):
            times = self.handling_ms.setdefault(type(body).__name__, deque(maxlen=TIMES_KEPT))
            times.append(took_ms)

    def readings(self, rates: Rates, counters: Mapping[str, int], transport: Transport) -> ReadingsTaken:
        """The readings of now. `counters`: what went wrong here so far, by name, without refused strangers."""
        traffic, (cpu_pct, memory_bytes) = interfaces.traffic(), interfaces.used(self._process)
        sent_bytes, received_bytes = transport.moved_bytes
        refused = {f"{REFUSED}{reason}": count for reason, count in transport.refused.items()}
        return ReadingsTaken(
            samples_per_s=rates.samples_per_s,
            sync_delay_s=rates.sync_delay_s,
            state_bytes=rates.state_bytes,
            layer_bytes=rates.layer_bytes,
            page=rates.page,
            cpu_pct=cpu_pct,
            memory_bytes=memory_bytes,
            battery_pct=interfaces.battery_pct(),
            nic_sent_bytes=traffic.sent,
            nic_received_bytes=traffic.received,
            counters={**counters, **refused},
            carried=transport.carried(),
            acknowledged=transport.acknowledged(),
            sent_bytes=sent_bytes,
            received_bytes=received_bytes,
        )

    def status(
        self, agent: Agent, steps: StepHistory, rates: Rates, cluster: str, history: bool, since: int
    ) -> Status:
        """The cluster as this agent sees it; whole on the scheduler. `history`: with all kept from `since` on."""
        now_s, view, events = clock.now_s(), agent.sync.view, agent.monitor.event_rows()
        newest = max(len(events) - EVENTS_TOLD, 0)
        return Status(
            node=agent.me,
            phase=agent.phase.value,
            cluster=cluster,
            scheduler=view.scheduler if view else "",
            term=agent.election.term,
            view=view.key if view else (),
            step=agent.sync.step,
            samples_per_s=round(_samples_per_s(agent), 1),
            metrics=dict(steps.metrics),
            pipelines=rates.pipelines,
            predicted_s=rates.predicted_s,
            step_s=steps.pace_s,
            keepers=rates.keepers,
            checkpoint=agent.monitor.checkpoint_row(),
            **rates.left_out,
            parked=agent.why_it_waits(now_s),
            waiting=agent.waits.row(now_s),
            handling_ms={name: tuple(values) for name, values in self.handling_ms.items()},
            members=_with_kept(agent.monitor.member_rows(now_s), rates.kept),
            links=agent.monitor.link_rows(now_s),
            events=events[min(_first(events, since), newest) :] if history else lately(events),
            steps=steps.since(since) if history else (),
            trees=agent.monitor.tree_rows(),
            strangers_refused=agent.monitor.refused(),
        )


def lately(events: tuple[EventRow, ...]) -> tuple[EventRow, ...]:
    """The newest events; of those about new trees, which may come often, only the last."""
    told: list[EventRow] = []
    for event in reversed(events):
        if event.kind != NEW_TREES or all(each.kind != NEW_TREES for each in told):
            told.append(event)
        if len(told) == EVENTS_TOLD:
            break
    return tuple(reversed(told))


def _with_kept(rows: tuple[MemberRow, ...], kept: Mapping[str, str]) -> tuple[MemberRow, ...]:
    """The rows of members, with what each keeps of the training state, as agreed."""
    return tuple(
        msgspec.structs.replace(row, keeps=kept[row.node])
        if row.node in kept and row.state == "active"
        else row
        for row in rows
    )


def _first(events: tuple[EventRow, ...], since: int) -> int:
    """The place of the first event at step `since` or later."""
    return next((place for place, each in enumerate(events) if each.step >= since), len(events))


def _samples_per_s(agent: Agent) -> float:
    """Samples a second of the whole cluster."""
    records = agent.monitor.nodes.values()
    return sum(r.report.samples_per_s for r in records if r.report and r.state == "active")
