"""Where the Chaos paper's experiments take place: an overlay of namespaces; all nodes train, but one, which joins."""

from __future__ import annotations

import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import networkx as nx
import numpy as np

from ..netem.netns import PORT, Netns
from ..netem.topology import GOODPUT, Topology, random_overlay
from ..protocols.errors import ConfigError
from ..scheduler.shard_plan import Source, water_filling_bound
from .overlay import PATIENCE_S, PlacedNode, namespaces, scaled

WORKER = "chaos_worker"
WARM_UP_STEPS = 10  # Before a node joins; their median is what a step takes usually.
AFTER_STEPS = 2  # Of the new node: by then the others have completed the step that they were held up in.
POLL_S = 0.1
PIECE_BYTES = 64 << 20


class Case(NamedTuple):
    """One overlay, and who joins."""

    name: str
    topology: Topology
    joiner: str

    @property
    def members(self) -> list[str]:
        """All others, each after one of its neighbours."""
        graph = self.topology.graph.subgraph({*self.topology.nodes} - {self.joiner})
        first = self.topology.nodes[0]
        found = [first, *(node for _, node in nx.bfs_edges(graph, first))]
        assert len(found) == len(graph), "members reach each other without who joins"
        return found


class Work(NamedTuple):
    """What nodes hold, and do in a step."""

    state_bytes: int
    trained_bytes: int = 0  # Of the state.
    step_s: float = 0.2  # Asleep, in place of computing.


class Pull(NamedTuple):
    """How a new node gets the state."""

    strategy: str = "adaptive"  # Of shard_plan.STRATEGIES.
    from_all: bool = False  # Also from who is several links away, along the paths with the fewest links.
    steals: bool = True
    blocking: bool = False


class ScaleOutTimes(NamedTuple):
    """A scale-out: how long the new node waited, and how long every member was held up beyond its usual steps."""

    delay_s: float
    idle_by_member: dict[str, float]
    bytes: int
    phases_s: dict[str, float]  # What the delay went into; empty where it cannot be told.
    step_s: float  # What a member's step took before.

    @property
    def idle_s(self) -> float:
        """Of the whole cluster: that of members, and the new node's wait."""
        return self.delay_s + sum(self.idle_by_member.values())


def cases(members: int, overlays: int, seed: int, scale: float) -> list[Case]:
    """Random overlays of so many nodes and a joiner: it has three links or more, and connects nobody else."""
    found: list[Case] = []
    while len(found) < overlays:
        topology = random_overlay(members + 1, seed)
        joiner = _able_to_join(topology)
        if joiner:
            found.append(Case(f"seed {seed}", scaled(topology, scale), joiner))
        seed += 1
    return found


def _able_to_join(topology: Topology) -> str | None:
    for node in topology.nodes[1:]:
        rest = topology.graph.subgraph(set(topology.nodes) - {node})
        if topology.graph.degree[node] >= 3 and nx.is_connected(rest):
            return node
    return None


def bound_s(case: Case, size_bytes: int) -> float:
    """No scheme can be faster over the joiner's links, whose rates are those that were set."""
    around = case.topology.graph[case.joiner]
    rates = {peer: GOODPUT * case.topology.spec_from(peer, case.joiner).rate_mbit * 1e6 for peer in around}
    return water_filling_bound(size_bytes, {peer: Source(0.0, 8 / rate) for peer, rate in rates.items()})


@dataclass(slots=True)
class Stage:
    """Members of one case, which train."""

    case: Case
    testbed: Netns
    work: Work
    folder: Path
    members: dict[str, PlacedNode] = field(default_factory=dict)
    left_s: tuple[float, float] = (0.0, 0.0)  # When the last one that joined asked to leave, and was out.

    # --- nodes ---

    def start_members(self, **told: Any) -> None:
        """Processes at once, memberships one after the other."""
        shared = "" if told.get("checkpoint") else str(self._weights())
        order = self.case.members
        for place, name in enumerate(order):
            links = [peer for peer in order[:place] if self.case.topology.graph.has_edge(name, peer)]
            self.members[name] = self.start(name, links, Pull(), shared=shared, **told)
        for node in self.members.values():
            node.hear(PATIENCE_S)
            node.tell({})
            node.hear(PATIENCE_S)

    def start(self, name: str, links: Sequence[str], pull: Pull, **told: Any) -> PlacedNode:
        """A process that loads what it needs, says so, and waits for a word to join."""
        node = PlacedNode(self.testbed, name, WORKER)
        first = self.testbed.endpoints(name, self.case.topology.nodes[0], PORT)[1]
        node.tell(
            {
                "bytes": self.work.state_bytes, "trained_bytes": self.work.trained_bytes, "step_s": self.work.step_s,
                "links": links, "join": first if links else "", "strategy": pull.strategy, "steals": pull.steals,
                "blocking": pull.blocking, "shared": "", "checkpoint": "", "outside": False, **told,
            }
        )  # fmt: skip
        return node

    def ask_members(self, **command: Any) -> dict[str, dict[str, Any]]:
        """Tell all, then hear all."""
        for node in self.members.values():
            node.tell(command)
        return {name: node.hear(PATIENCE_S) for name, node in self.members.items()}

    def kill(self) -> None:
        """All."""
        for node in self.members.values():
            node.kill()
        self.members.clear()

    def _weights(self) -> Path:
        """Random bytes for all members, so that a machine holds them once."""
        file = self.folder / f"state-{self.work.state_bytes}"
        left = max(self.work.state_bytes, 4)
        if not file.exists():
            rng = np.random.default_rng(0)
            with file.open("wb") as out:
                while left > 0:
                    rng.random(min(PIECE_BYTES, left + 3) // 4, np.float32).tofile(out)
                    left -= PIECE_BYTES
        return file

    # --- a join ---

    def join(self, pull: Pull, barrier: bool = False) -> ScaleOutTimes:
        """The case's joiner joins by such a way, and leaves again. `barrier`: nobody trains meanwhile."""
        self.ask_members(do="plan", strategy=pull.strategy)
        near = self.case.topology.graph[self.case.joiner]
        links = [each for each in self.case.members if pull.from_all or each in near]
        node = self.start(self.case.joiner, links, pull)
        try:
            node.hear(PATIENCE_S)
            self.warm_up()
            node.tell({})
            if barrier:
                self.ask_members(do="train", on=False)
            joined = node.hear(PATIENCE_S)
            if barrier:
                self.ask_members(do="train", on=True)
            first_step_s = self._trains(node)
            reports = self.ask_members(do="report")
            node.tell({"do": "leave"})
            left = node.hear(PATIENCE_S)
            self.left_s = left["asked_s"], left["done_s"]
        finally:
            node.kill()
        if joined["bytes"] < self.work.state_bytes:
            raise ConfigError(
                f"bench chaos: {joined['bytes']} bytes came (expected {self.work.state_bytes} or more)"
            )
        called_s = joined["called_s"]
        times = {name: each["times_s"] for name, each in reports.items()}
        idle = {name: idle_s(each, called_s, first_step_s) for name, each in times.items()}
        step_s = statistics.median(usual_s(each, called_s) for each in times.values())
        return ScaleOutTimes(joined["member_s"] - called_s, idle, joined["bytes"], joined["phases_s"], step_s)

    def warm_up(self) -> None:
        """Until all members have made some steps with nobody who starts a process beside them."""
        before = {name: len(each["times_s"]) for name, each in self.ask_members(do="report").items()}
        self._until(
            lambda reports: all(
                len(each["times_s"]) >= before[name] + WARM_UP_STEPS for name, each in reports.items()
            )
        )

    def _until(self, holds: Any) -> None:
        end_s = time.monotonic() + PATIENCE_S
        while not holds(self.ask_members(do="report")):
            if time.monotonic() > end_s:
                raise ConfigError(
                    f"bench chaos: members made no {WARM_UP_STEPS} steps in {PATIENCE_S:.0f} s (is --scale too low?)"
                )
            time.sleep(POLL_S)

    def _trains(self, node: PlacedNode) -> float:
        """Wait until a new node has taken part in steps. Returns: when it had in its first."""
        end_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            node.tell({"do": "report"})
            times_s: list[float] = node.hear(PATIENCE_S)["times_s"]
            if len(times_s) >= AFTER_STEPS:
                return times_s[0]
            time.sleep(POLL_S)
        raise ConfigError(f"bench chaos: {node.name} joined and made no step in {PATIENCE_S:.0f} s")


def usual_s(times_s: Sequence[float], until_s: float) -> float:
    """Median of the last steps before."""
    before = [b - a for a, b in pairwise(times_s) if b <= until_s][-WARM_UP_STEPS:]
    return statistics.median(before) if before else 0.0


def idle_s(times_s: Sequence[float], begin_s: float, end_s: float) -> float:
    """How much longer the steps that touch [begin, end] took than usual ones, all together; 0 or more."""
    usual = usual_s(times_s, begin_s)
    during = [b - a for a, b in pairwise(times_s) if b > begin_s and a < end_s]
    return max(0.0, math.fsum(during) - usual * len(during))


@contextmanager
def stage(case: Case, work: Work) -> Iterator[Stage]:
    """Without members yet; processes and namespaces end with it."""
    with (
        namespaces(case.topology, routes=True) as testbed,
        tempfile.TemporaryDirectory(prefix="chaos-") as folder,
    ):
        made = Stage(case, testbed, work, Path(folder))
        try:
            yield made
        finally:
            made.kill()
