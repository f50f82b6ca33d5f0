"""What a node tells once a second: its readings, to the scheduler. The scheduler tells for whom all wait."""

from __future__ import annotations

from typing import Any

from ...protocols.effects import Effect, MeasureLink, Progress
from ...protocols.events import ReadingsTaken, Received
from ...protocols.messages import Notice, Report
from ...protocols.sentences import silent, waiting
from ...protocols.waiting import LEAST_S
from .node import Node, Phase
from .routes import Routes

REPORT_EVERY_S = 1.0


class Reports:
    """Sends a node's reports."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.taken: ReadingsTaken | None = None  # The last readings.
        self.wake_at_s: float | None = None
        self._told_silence_s = 0.0  # So long it had waited for a silent scheduler when it last told so.

    def routes(self) -> Routes:
        return Routes(events={ReadingsTaken: self.on_readings}, routed={Notice: self.on_notice})

    def begin(self, now_s: float) -> None:
        """This node has become a member: report from now on."""
        self.wake_at_s = now_s

    def on_readings(self, event: ReadingsTaken, now_s: float) -> list[Effect]:
        """Keep the readings for the next report."""
        self.taken = event
        self.node.readings.carried(event.carried, now_s, event.acknowledged)
        return []

    def on_notice(self, event: Received, now_s: float) -> list[Effect]:
        """A node tells of an event of the cluster."""
        assert isinstance(event.message, Notice)
        self.node.monitor.notice(event.message)
        if self.node.joiner is not None:
            self.node.joiner.told(event.message.step)
        return []

    def tick(self, now_s: float) -> list[Effect]:
        if self.wake_at_s is None or now_s < self.wake_at_s:
            return []
        self.wake_at_s = now_s + REPORT_EVERY_S
        return self._report(now_s) + self._tell_waits(now_s) + self._measure_again(now_s)

    def _report(self, now_s: float) -> list[Effect]:
        node, taken, view, clock = self.node, self.taken, self.node.sync.view, self.node.clock
        if taken is None or view is None:
            return []
        waits_s = clock.waits_s(now_s)
        report = Report(
            node=node.me,
            step=node.sync.step,
            readings={
                peer: node.readings.of(peer, now_s)
                for peer in view.neighbors(node.me)
                if peer in node.relay.peers
            },
            samples_per_s=taken.samples_per_s * clock.slowed(now_s),
            sync_delay_s=taken.sync_delay_s,
            counters=taken.counters,
            idle_s=clock.idle_s(now_s) if node.phase is Phase.MEMBER else 0.0,
            waits_s=waits_s,
            pulls_state=node.is_joining,
            **self._pull(),
            **_of_process(taken),
            lacks=node.sync.sums.lacks() if waits_s >= LEAST_S else (),
        )
        return node.relay.send(view.scheduler, report) if view.scheduler else []

    def of_pull(self) -> list[Effect]:
        """The report of a joiner that is no member yet: how far it is, once it knows how much there is to pull."""
        node, taken, pull = self.node, self.taken, self._pull()
        if node.phase is not Phase.JOINING or node.joiner is None or taken is None or not pull:
            return []
        scheduler = node.joiner.asking.scheduler
        report = Report(
            node=node.me,
            pulls_state=True,
            **pull,
            **_of_process(taken),
        )
        return node.relay.send(scheduler, report) if scheduler else []

    def _pull(self) -> dict[str, Any]:
        """The fields of a report that tell how much of the state this node has pulled; none if it pulls none."""
        pull = self.node.joiner.replication if self.node.joiner and self.node.is_joining else None
        if pull is None or pull.total_bytes is None:
            return {}
        return {"pulls_bytes": pull.total_bytes, "pulled": pull.bytes_by_source}

    def _tell_waits(self, now_s: float) -> list[Effect]:
        """As the scheduler, tell for whom all wait, if for anybody. A parked node tells that by itself."""
        node, view = self.node, self.node.sync.view
        if view is None or node.sync.frozen or node.parked:
            return []
        if node.scheduler is None:
            return self._tell_silence(view.scheduler, now_s)
        return node.waits.tick(view, node.sync.step, node.clock, node.monitor, now_s)

    def _tell_silence(self, scheduler: str, now_s: float) -> list[Effect]:
        """If the silent one is the scheduler, nobody tells all: this node tells its user."""
        node, clock = self.node, self.node.clock
        silent_s, waits_s = node.liveness.silent_s(scheduler, now_s), clock.waits_s(now_s)
        if min(silent_s, waits_s) < LEAST_S or clock.elapsed_s(now_s) < clock.patience_s:
            self._told_silence_s = 0.0
            return []
        if waits_s < 2 * self._told_silence_s:
            return []
        self._told_silence_s = waits_s
        return [Progress(f"waits for {scheduler}, {waiting(waits_s, silent(1, silent_s))}")]

    def _measure_again(self, now_s: float) -> list[Effect]:
        """Have links measured that carried nothing for long: they may be faster by now. One of the two ends asks."""
        node, view = self.node, self.node.sync.view
        if view is None or node.phase is not Phase.MEMBER or node.sync.frozen:
            return []
        if node.settings.probe != "in-band":
            return []
        ours = [peer for peer in view.neighbors(node.me) if peer > node.me and peer in node.relay.peers]
        return [MeasureLink(peer) for peer in node.readings.take_stale(ours, now_s)]


def _of_process(taken: ReadingsTaken) -> dict[str, Any]:
    """The fields of a report that are about the process and its machine."""
    names = (
        "state_bytes", "layer_bytes", "cpu_pct", "memory_bytes", "battery_pct", "nic_sent_bytes",
        "nic_received_bytes", "sent_bytes", "received_bytes", "page",
    )  # fmt: skip
    return {name: getattr(taken, name) for name in names}
