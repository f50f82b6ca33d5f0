"""What a soak may do to a cluster next: a seeded choice that never takes its quorum or cuts it in two.

Pure: no process, no clock. `choose` sees the cluster as its status and the soak's own book of processes tell.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import networkx as nx

MIN_RUNNING, USUAL, MAX_RUNNING = 4, 6, 8
MIN_LEFT = 3  # Members that live on after a fault; with one fault at a time that is a quorum of four.


class Kind(StrEnum):
    KILL = "kill"  # kill -9 of a member that is no scheduler.
    KILL_SCHEDULER = "kill-scheduler"
    KILL_JOINER = "kill-joiner"  # kill -9 of one that is about to join.
    PAUSE = "pause"  # SIGSTOP and SIGCONT, within the others' patience.
    FREEZE = "freeze"  # The same beyond it: the others go on without it.
    JOIN = "join"
    LEAVE = "leave"  # SIGINT, as by Ctrl+C.
    HANGUP = "hangup"  # SIGHUP, as of a terminal that is closed.
    RAISE = "raise"  # Its script ends with an error, between backward and update().
    DIVERGE = "diverge"  # One number of its state changes, on this node alone.
    CUT = "cut"  # A link of the overlay passes nothing for a while, and nobody is told.
    SLOW = "slow"  # A link that has a rate gets a tenth of it for a while, and nobody is told.


WEIGHTS: Mapping[Kind, float] = {
    Kind.KILL: 3, Kind.KILL_SCHEDULER: 2, Kind.KILL_JOINER: 1, Kind.PAUSE: 3, Kind.FREEZE: 2,
    Kind.JOIN: 2, Kind.LEAVE: 2, Kind.HANGUP: 1, Kind.RAISE: 3, Kind.DIVERGE: 4, Kind.CUT: 4,
    Kind.SLOW: 3,
}  # fmt: skip
RARELY = 0.5
SECONDS: Mapping[Kind, tuple[float, float]] = {
    Kind.PAUSE: (0.2, 0.7), Kind.FREEZE: (2.5, 6.0), Kind.CUT: (1.0, 8.0), Kind.SLOW: (5.0, 20.0),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Fault:
    """`node` is who it happens to, or one end of a link to `other`. `seconds`: how long it lasts, if it ends."""

    kind: Kind
    node: str
    other: str = ""
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Situation:
    """The cluster between two faults."""

    names: tuple[str, ...]  # All that there may be.
    running: frozenset[str]  # Those that have a process, or will in a moment.
    members: Mapping[str, float]  # Active and not stopped: since when, seconds.
    overlay: frozenset[tuple[str, str]]  # Links of the view.
    cuts: frozenset[tuple[str, str]] = field(default_factory=frozenset)
    scheduler: str = ""
    starting: frozenset[str] = frozenset()  # Of the running, those whose process is yet to be started.
    have_rates: bool = False  # Do links have a rate?
    slow: frozenset[tuple[str, str]] = frozenset()  # Links that have less than it now.

    @property
    def live(self) -> nx.Graph:
        """What carries between members."""
        graph = nx.Graph()
        graph.add_nodes_from(self.members)
        graph.add_edges_from((a, b) for a, b in self.overlay if a in graph and b in graph)
        graph.remove_edges_from([*self.cuts, *((b, a) for a, b in self.cuts)])
        return graph

    def survives_without(self, node: str) -> bool:
        """Do the other members have a quorum and live paths to each other?"""
        left = self.live
        left.remove_nodes_from([node])
        quorum = node not in self.members or 2 * len(left) > len(self.members)
        return quorum and len(left) >= MIN_LEFT and nx.is_connected(left)

    def survives_cut(self, a: str, b: str) -> bool:
        left = self.live
        if not left.has_edge(a, b):
            return False
        left.remove_edge(a, b)
        return bool(nx.is_connected(left))


def choose(rng: random.Random, now: Situation, only: Kind | None = None) -> Fault | None:
    """The next fault; None if there is none that the cluster must survive. `only`: of this kind."""
    possible = {kind: faults for kind in Kind if (faults := sorted(_of_kind(kind, now), key=_key))}
    if only is not None:
        possible = {kind: faults for kind, faults in possible.items() if kind is only}
    if not possible:
        return None
    kinds = list(possible)
    kind = rng.choices(kinds, [_weight(each, now) for each in kinds])[0]
    found = _prefer_young(rng, possible[kind], now)
    shortest_s, longest_s = SECONDS.get(kind, (0.0, 0.0))
    return Fault(kind, found.node, found.other, round(rng.uniform(shortest_s, longest_s), 3))


def _weight(kind: Kind, now: Situation) -> float:
    """Joins and leaves draw the number of processes back to the usual one."""
    if kind is Kind.DIVERGE and now.have_rates:
        return RARELY  # It takes up to 128 steps to be found, and nothing else happens meanwhile.
    surplus = len(now.running) - USUAL
    drawn = {Kind.JOIN: -surplus, Kind.LEAVE: surplus, Kind.HANGUP: surplus}.get(kind, 0)
    return WEIGHTS[kind] * 2.0**drawn


def _prefer_young(rng: random.Random, faults: list[Fault], now: Situation) -> Fault:
    """Of two drawn at random the younger, so that some processes live long enough to show a leak."""
    drawn = [rng.choice(faults), rng.choice(faults)]
    return max(drawn, key=lambda fault: now.members.get(fault.node, 0.0))


def _key(fault: Fault) -> tuple[str, str]:
    return (fault.node, fault.other)


def _of_kind(kind: Kind, now: Situation) -> Iterator[Fault]:
    match kind:
        case Kind.DIVERGE if now.running != set(now.members):
            return  # A joiner would get the state of the one that is about to go astray.
        case Kind.KILL | Kind.FREEZE | Kind.RAISE | Kind.DIVERGE:
            fates = (node for node in now.members if kind is not Kind.KILL or node != now.scheduler)
            yield from (Fault(kind, node) for node in fates if now.survives_without(node))
        case Kind.KILL_SCHEDULER:
            if now.scheduler in now.members and now.survives_without(now.scheduler):
                yield Fault(kind, now.scheduler)
        case Kind.KILL_JOINER:
            joiners = now.running - now.starting - set(now.members)
            yield from (Fault(kind, node) for node in joiners if now.survives_without(node))
        case Kind.PAUSE:
            yield from (Fault(kind, node) for node in now.members)
        case Kind.JOIN:
            if len(now.running) < MAX_RUNNING:
                yield from (Fault(kind, node) for node in now.names if node not in now.running)
        case Kind.LEAVE | Kind.HANGUP:
            if len(now.running) > MIN_RUNNING:
                yield from (Fault(kind, node) for node in now.members if now.survives_without(node))
        case Kind.CUT:
            cuttable = (ends for ends in now.overlay - now.cuts if now.survives_cut(*ends))
            yield from (Fault(kind, *ends) for ends in cuttable)
        case Kind.SLOW if now.have_rates:
            yield from (Fault(kind, *ends) for ends in now.overlay - now.cuts - now.slow)
