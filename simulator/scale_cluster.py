"""A large cluster on the virtual clock, whose messages, bytes and processor time are counted.

Its heartbeats are not simulated: a link that is up always carries, and a dead process closes its connections. Nor
are samples dealt out: every step has positions of its own.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import Any

from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols import liveness
from ..protocols.codec import encode
from ..protocols.messages import Contribution, Deal, Down, Envelope, Link, Message, Ready, Shard, Up, View
from .cluster import SimCluster
from .network import Connection
from .nodes import Applied, SimNode
from .training_thread import hand_over

BATCH = 8
HOP_S = 0.01  # No message takes longer over one link.
STEP_KINDS = ("Up", "Down", "Ready", "Commit")
BACKGROUND = (*STEP_KINDS, "Report")  # What nodes send while nothing happens.
LIFE = 1_700_000_000_000_000_000  # First serials are clocks in nanoseconds, and count in every message.
SIZES_KEPT = 4096
READINGS = ev.ReadingsTaken(
    100.0, 0.01, 400 << 20, (4096, 8 << 20), 40.0, 2 << 30, -1.0, 1 << 40, 1 << 40, {}
)


@dataclass(slots=True)
class Cost:
    """What was sent and computed, so far or between two moments."""

    at_s: float = 0.0
    messages: Counter[str] = field(default_factory=Counter)  # By type; a flood is one for each link and way.
    bytes: Counter[str] = field(default_factory=Counter)
    sent_by: Counter[str] = field(default_factory=Counter)  # Node: bytes, without those of steps.
    scheduler_s: float = 0.0  # Processor time of the cores that had the role, without steps.
    others_s: float = 0.0

    def since(self, before: Cost) -> Cost:
        """What has been added since `before`."""
        return Cost(
            self.at_s - before.at_s,
            self.messages - before.messages,
            self.bytes - before.bytes,
            self.sent_by - before.sent_by,
            self.scheduler_s - before.scheduler_s,
            self.others_s - before.others_s,
        )

    def copy(self, now_s: float) -> Cost:
        """A copy of the cost so far."""
        counts = Counter(self.messages), Counter(self.bytes), Counter(self.sent_by)
        return Cost(now_s, *counts, self.scheduler_s, self.others_s)


@dataclass(slots=True)
class Happening:
    """One join, leave, crash or change of a link, and when everybody acted on it."""

    kind: str
    node: str  # Of a link, the end that asks.
    at_s: float
    link: Link | None = None
    converged_s: float | None = None  # From the event on.

    def is_in(self, view: View) -> bool:
        """Is it done in this view?"""
        if self.link is not None:
            return (self.link in view.link_set) == (self.kind == "link")
        return self.node in view.member_set if self.kind == "join" else self.node not in view.node_set


class QuietLinks(liveness.Liveness):
    """Heartbeats of links that always carry: none is sent, and a connection that closes is proof of a death."""

    def opened(self, peer: str, now_s: float) -> None:
        pass

    def received(self, peer: str, message: Message, now_s: float) -> list[fx.Effect]:
        return []

    def doubt(self, peer: str, now_s: float) -> list[fx.Effect]:
        return []

    def spoke_lately(self, peer: str, now_s: float) -> bool:
        return True

    def tick(self, now_s: float) -> tuple[list[str], list[str], list[fx.Effect]]:
        return [], [], []


class ScaleCluster(SimCluster):
    """A cluster from a given first view, whose traffic is counted."""

    def __init__(self, seed: int, step_s: float) -> None:
        super().__init__(seed, chunks=1)
        self.max_delay_s = self.max_bulk_delay_s = HOP_S
        self.compute_s, self.state_bytes, self.retract_odds = step_s, 1 << 20, 0.0
        self.cost = Cost()
        self.sizes: OrderedDict[int, tuple[Message, int]] = OrderedDict()
        self.size_by_kind: dict[str, int] = {}
        self.key_of: dict[str, tuple[int, int]] = {}  # Node: the view that it acts in.
        self.nodes_at: Counter[tuple[int, int]] = Counter()
        self.pending: list[Happening] = []
        self.max_actions = 10**12

    # --- building ---

    def _open_first(self, pair: Link) -> None:
        """Open a link of the first view without telling cores: they would send news of it."""
        self.connections[pair] = Connection(pair, self._lives(pair), {*pair})
        for end, other in (pair, pair[::-1]):
            self.nodes[end].agent.relay.opened(other, client=False)

    def _machine(self, name: str, life: int) -> SimNode:
        node = super()._machine(name, LIFE + life)
        node.batch = BATCH
        node.agent.liveness = node.agent.readings.liveness = QuietLinks()
        node.agent.reports.on_readings(READINGS, 0.0)
        self._clock(node)
        return node

    def _clock(self, node: SimNode) -> None:
        """Count the processor time that this core takes."""
        agent, handle = node.agent, node.agent.handle

        def timed(event: ev.Event, now_s: float) -> list[fx.Effect]:
            if isinstance(event, (ev.Contributed, ev.LocalReady)) or (
                isinstance(event, ev.Received) and isinstance(event.message, (Up, Down, Ready))
            ):
                return handle(event, now_s)
            started_s = time.process_time()
            had_role = agent.scheduler is not None
            try:
                return handle(event, now_s)
            finally:
                spent_s = time.process_time() - started_s
                if had_role or agent.scheduler is not None:
                    self.cost.scheduler_s += spent_s
                else:
                    self.cost.others_s += spent_s

        agent.handle = timed  # type: ignore[method-assign]

    # --- what happens ---

    def happens(self, kind: str, node: str, link: Link | None = None) -> Happening:
        """Something happens: it is pending until all act in a view that shows it."""
        happening = Happening(kind, node, self.now_s, link)
        self.pending.append(happening)
        return happening

    def crash(self, name: str, arrives: float | None = None) -> None:
        """Crash a node, which does not count any more."""
        super().crash(name, arrives)
        self._forget(name)

    def _finish(self, node: SimNode, how: str, reason: str) -> None:
        super()._finish(node, how, reason)
        self._forget(node.name)

    def _check_view(self, node: SimNode, view: View) -> None:
        super()._check_view(node, view)
        self._forget(node.name, settle=False)
        self.key_of[node.name] = view.key
        self.nodes_at[view.key] += 1
        self._settle()

    def _forget(self, name: str, settle: bool = True) -> None:
        key = self.key_of.pop(name, None)
        if key is not None:
            self.nodes_at[key] -= 1
            if not self.nodes_at[key]:
                del self.nodes_at[key]
        if settle:
            self._settle()

    def _settle(self) -> None:
        """Note which pending events are done in the view that all have reached."""
        if not self.pending or not self.nodes_at:
            return
        view = self.views.get(min(self.nodes_at))
        for each in [each for each in self.pending if view is not None and each.is_in(view)]:
            each.converged_s = self.now_s - each.at_s
            self.pending.remove(each)

    # --- counting ---

    def _send(self, sender: str, receiver: str, message: Message, payload: Any) -> None:
        kind, size = self._measure(message)
        self.cost.messages[kind] += 1
        self.cost.bytes[kind] += size
        if kind not in BACKGROUND:
            self.cost.sent_by[sender] += size
        super()._send(sender, receiver, message, payload)

    def _measure(self, message: Message) -> tuple[str, int]:
        """Type and bytes on the wire, without payload; each distinct message is encoded once."""
        if isinstance(message, (Up, Down, Shard)):
            kind = type(message).__name__
            if kind not in self.size_by_kind:
                self.size_by_kind[kind] = len(encode(message))
            return kind, self.size_by_kind[kind]
        kind = type(message.body if isinstance(message, Envelope) else message).__name__
        known = self.sizes.get(id(message))
        if known is not None and known[0] is message:
            return kind, known[1]
        size = len(encode(message))
        self.sizes[id(message)] = (message, size)
        if len(self.sizes) > SIZES_KEPT:
            self.sizes.popitem(last=False)
        return kind, size

    def _say(self, node: str, what: str | ev.Event) -> None:
        pass  # Nobody reads a story of a million lines.

    # --- training ---

    def _compute(self, node: SimNode, step: int, deal: Deal, view: View) -> None:
        """Every member has `BATCH` samples of the step, at positions that no two of them share."""
        leaving = node.agent.leaver.state.value != "staying"
        at = BATCH * int(node.name[1:])
        contribution = Contribution(
            weight=0.0 if leaving else float(BATCH),
            ranges=() if leaving else ((at, at + BATCH),),
            shares={node.name: BATCH},
            leaving=leaving,
        )
        node.step = step
        took_s = self.rng.uniform(0.9, 1.0) * self.compute_s
        contributed = ev.Contributed((0,), contribution.weight)
        at_s = self.now_s + took_s
        hand_over(self, self._event, node, step, [(at_s, contributed), (at_s, ev.LocalReady(contribution))])

    def _check_samples(self, node: SimNode, step: int, what: tuple[frozenset[str], Any]) -> None:
        pass  # Nobody dealt them.

    def _check_weight(self, node: SimNode, step: int, who: frozenset[str], weight: float) -> None:
        assert weight == BATCH * len(who), (
            f"{node.name} divides a sum of step {step}, of {len(who)}, by {weight:g}"
        )

    def _apply(self, node: SimNode, effect: fx.StepCompleted, who: frozenset[str]) -> None:
        assert len(node.log) == effect.step, f"step {effect.step} applied on top of {len(node.log)} steps"
        node.log.append(Applied(who, effect.commit.total.ranges, 0))
