"""What an event costs in a large cluster: the real cores and real message sizes on the virtual clock.

First each kind of event alone, then joins, leaves, crashes and changes of links as a Poisson process. Counted
are messages and the bytes that the codec makes of them, the processor time of the scheduler's core, and the
virtual time from the event to the moment when the last node acts in the view that it led to.

The cluster is that of scale_cluster.py. Heartbeats are counted, not sent: each end of a link sends eight a second,
four of its own and four answers, for ever.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from ..protocols import events as ev
from ..protocols import liveness
from ..protocols.codec import encode
from ..protocols.messages import ConnectLinkRequest, DisconnectLinkRequest, Link, Ping, Pong, Routed, link
from ..scheduler.repairs import MIN_DEGREE
from .nodes import SimNode
from .scale_cluster import BACKGROUND, STEP_KINDS, Cost, Happening, ScaleCluster

DEGREE = 3
LEAST_LEFT = 0.8  # Of the nodes; with fewer, the next that happens is a join.
QUIET_S = 1.0
PATIENCE_S = 60.0  # For one event alone.


def overlay(names: list[str], rng: random.Random) -> set[Link]:
    """A ring in random order and a random matching: three links a node, and ways of logarithmic length."""
    ring, mixed = rng.sample(names, len(names)), rng.sample(names, len(names))
    links = {link(a, b) for a, b in zip(ring, ring[1:] + ring[:1], strict=True)}
    return links | {link(a, b) for a, b in zip(mixed[::2], mixed[1::2], strict=False)}


@dataclass(frozen=True, slots=True)
class EventCost:
    """What one kind of event costs. Bytes are those on the wire, summed over all links a message takes."""

    kind: str
    events: int
    messages_per_event: float
    bytes_per_node_and_event: float
    most_bytes_of_one_node: float  # Sent, per event.
    scheduler_ms_per_event: float
    other_node_ms_per_event: float
    converged_s: float | None  # Median, from the event to the last node that acts in its view.
    converged_p90_s: float | None
    converged_slowest_s: float | None
    unfinished: int = 0  # Not in force everywhere when the run ended.


@dataclass(slots=True)
class Findings:
    """What was found for one size of the cluster."""

    nodes: int
    links: int
    churn_per_s: float
    seconds: float
    step_s: float
    cpu_s: float = 0.0
    start_cpu_s: float = 0.0
    step_bytes_per_node: float = 0.0
    report_bytes_per_node_and_s: float = 0.0
    heartbeat_bytes_per_node_and_s: float = 0.0
    views: int = 0
    waiting_at_end: int = 0  # Changes in the scheduler's queue.
    rows: list[EventCost] = field(default_factory=list)
    bytes_by_type: dict[str, dict[str, int]] = field(default_factory=dict)  # Kind of event: type: bytes.

    def to_plain(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def _p90(ordered: list[float]) -> float | None:
    """The value that nine of ten do not exceed; None for an empty list."""
    return ordered[math.ceil(0.9 * len(ordered)) - 1] if ordered else None


Progress = Callable[[str], None]
KINDS = ("join", "leave", "crash", "link", "unlink", "scheduler crash")
CHURN = ("join", "join", "leave", "crash", "link", "unlink")  # As many come as go.


class ScaleRun:
    """One size, from one seed."""

    def __init__(self, nodes: int, churn_per_s: float, seconds: float, step_s: float, seed: int) -> None:
        self.rng = random.Random(f"scale {seed}")
        self.sim = ScaleCluster(seed, step_s)
        self.size = nodes
        self.names = [f"n{index:07d}" for index in range(nodes)]
        self.found = Findings(nodes, 0, churn_per_s, seconds, step_s)

    def run(
        self,
        progress: Progress,
        kinds: tuple[str, ...] = KINDS,
        on_row: Callable[[EventCost], None] = lambda row: None,
    ) -> Findings:
        """Each kind of event alone, one after the other, then all of them mixed.

        A KeyboardInterrupt while they are mixed ends the run; what was found until then is returned.
        """
        began_s = time.process_time()
        links = overlay(self.names, self.rng)
        self.found.links = len(links)
        self.sim.found(self.names, links)
        self.found.start_cpu_s = time.process_time() - began_s
        self._rest()
        progress(f"{self.size} nodes at rest: {len(self.sim.history)} steps")
        for kind in kinds:
            self._alone(kind)
            on_row(self.found.rows[-1])
        if self.found.churn_per_s and self.found.seconds:
            self._churn(progress)
            on_row(self.found.rows[-1])
        self.found.cpu_s = time.process_time() - began_s
        return self.found

    def _rest(self) -> None:
        """Measure what a step, and a second, cost when nothing happens."""
        sim, found = self.sim, self.found
        sim.run(sim.now_s + 2 * (found.step_s + 1.0))
        steps, before = len(sim.history), sim.cost.copy(sim.now_s)
        sim.run(sim.now_s + 2 * (found.step_s + 1.0))
        spent = sim.cost.copy(sim.now_s).since(before)
        step_bytes = sum(spent.bytes[kind] for kind in STEP_KINDS)
        found.step_bytes_per_node = step_bytes / self.size / max(len(sim.history) - steps, 1)
        found.report_bytes_per_node_and_s = spent.bytes["Report"] / self.size / spent.at_s
        beat = len(encode(Ping(sent_s=1.5))) + len(encode(Pong(sent_s=1.5)))
        found.heartbeat_bytes_per_node_and_s = 2 * found.links / self.size * beat / liveness.PING_EVERY_S

    def _alone(self, kind: str) -> None:
        sim = self.sim
        before, views = sim.cost.copy(sim.now_s), len(sim.views)
        happening = self._happen(kind)
        give_up_s = sim.now_s + PATIENCE_S
        while (happening.converged_s is None or self._busy()) and sim.now_s < give_up_s:
            sim.run(sim.now_s + 0.1)
        sim.run(sim.now_s + QUIET_S)
        self._note(kind, [happening], before)
        self.found.views += len(sim.views) - views

    def _churn(self, progress: Progress) -> None:
        sim, found = self.sim, self.found
        before, views = sim.cost.copy(sim.now_s), len(sim.views)
        began_s, until_s, due_s = sim.now_s, sim.now_s + found.seconds, sim.now_s
        happenings: list[Happening] = []
        try:
            while (due_s := due_s + self.rng.expovariate(found.churn_per_s)) < until_s:
                sim.run(due_s)
                few = len(self._members()) < LEAST_LEFT * self.size
                happenings.append(self._happen("join" if few else self.rng.choice(CHURN)))
                progress(
                    f"{sim.now_s - began_s:.1f} of {found.seconds:g} s, {len(happenings)} events,"
                    f" {len(sim.pending)} of them under way"
                )
            sim.run(until_s)
        except KeyboardInterrupt:
            found.seconds = sim.now_s - began_s
        self._note("mixed", happenings, before)
        found.views += len(sim.views) - views
        found.waiting_at_end = max((len(s.queue) for s in self._schedulers()), default=0)

    def _schedulers(self) -> list[Any]:
        return [node.agent.scheduler for node in self.sim.active() if node.agent.scheduler is not None]

    def _busy(self) -> bool:
        schedulers = self._schedulers()
        return not schedulers or any(scheduler.busy for scheduler in schedulers)

    def _happen(self, kind: str) -> Happening:
        sim = self.sim
        if kind == "join":
            name = f"n{len(sim.nodes):07d}"
            seeds = self.rng.sample([node.name for node in self._members()], 2)
            happening = sim.happens(kind, name)
            sim.add(name, seeds, degree=DEGREE)
            return happening
        if kind in ("link", "unlink"):
            return self._change_link(kind)
        role = [node.name for node in self._members() if node.agent.scheduler is not None]
        others = [node.name for node in self._members() if node.agent.scheduler is None]
        name = role[0] if kind == "scheduler crash" and role else self.rng.choice(others)
        happening = sim.happens(kind, name)
        if kind == "leave":
            sim.tell(name, ev.LeaveWanted())
        else:
            sim.crash(name)
        return happening

    def _change_link(self, kind: str) -> Happening:
        """Somebody asks for a link between two nodes, or, if there is one, for one that they can spare to go."""
        view = self.sim.views[max(self.sim.views)]
        there = [node.name for node in self._members() if node.name in view.member_set]
        free = {node for node in there if len(view.neighbors(node)) > MIN_DEGREE}
        spare = sorted(each for each in view.link_set if free.issuperset(each))
        if kind == "unlink" and spare:
            pair = self.rng.choice(spare)
            request: Routed = DisconnectLinkRequest(a=pair[0], b=pair[1], asker=pair[0])
        else:
            kind, pair = "link", link(*self.rng.sample(there, 2))
            while pair in view.link_set:
                pair = link(*self.rng.sample(there, 2))
            request = ConnectLinkRequest(a=pair[0], b=pair[1], asker=pair[0])
        happening = self.sim.happens(kind, pair[0], pair)
        self.sim.ask(pair[0], request)
        return happening

    def _members(self) -> list[SimNode]:
        """The nodes that a joiner may ask, and that may leave or crash: none on their way in or out."""
        going = {each.node for each in self.sim.pending}
        return [node for node in self.sim.active() if node.name not in going]

    def _note(self, kind: str, happenings: list[Happening], before: Cost) -> None:
        spent, count = self.sim.cost.since(before), max(len(happenings), 1)
        messages = sum(n for name, n in spent.messages.items() if name not in BACKGROUND)
        size = sum(n for name, n in spent.bytes.items() if name not in BACKGROUND)
        took = sorted(each.converged_s for each in happenings if each.converged_s is not None)
        row = EventCost(
            kind=kind,
            events=len(happenings),
            messages_per_event=messages / count,
            bytes_per_node_and_event=size / self.size / count,
            most_bytes_of_one_node=max(spent.sent_by.values(), default=0) / count,
            scheduler_ms_per_event=1e3 * spent.scheduler_s / count,
            other_node_ms_per_event=1e3 * spent.others_s / count / self.size,
            converged_s=statistics.median(took) if took else None,
            converged_p90_s=_p90(took),
            converged_slowest_s=took[-1] if took else None,
            unfinished=len(happenings) - len(took),
        )
        self.found.rows.append(row)
        self.found.bytes_by_type[kind] = {
            name: size for name, size in spent.bytes.most_common() if name not in BACKGROUND
        }
