"""One seeded life of a cluster: it grows, suffers, heals, and must come to rest in good order.

Crashes aim at the rare messages (flush, install, votes, prepare, shards): uniform ones miss them.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..protocols import events as ev
from ..protocols.messages import ConnectLinkRequest, DisconnectLinkRequest, Envelope, Message, Tree, link
from .cluster import SimCluster
from .coverage import crashed, delivered, watched
from .kept import AllCopiesLost
from .nodes import Clock, SimNode
from .rates import CHANGES, LinkRates

NODES = 2, 7  # At first; as many and four more may join.
PAUSES_S = (0.1, 0.8, 4.0)
SLEEPS_S = (5.0, 5.0, 10.0, 10.0, 20.0, 30.0)
WAITED_S = 30.0
PATIENCE_S = 65.0  # A joiner that is left alone asks for 27 s and knocks for 20 s, perhaps twice.
FAULTS = (
    "join", "leave", "crash", "cut", "heal", "pause", "restart", "nothing", "link", "partition", "one-way", "flap",
    "sleep", "reset",
)  # fmt: skip
AIMS = (
    "Prepare", "Flush", "FlushOk", "Install", "VoteRequest", "VoteReply", "NegotiationPlan", "NeighborsReady",
    "ReplicationPlan", "ScaleOutReady", "ScaleInRequest", "Up", "Down", "Ready", "Commit", "Shard", "ManifestReply",
    "LinkNews",
)  # fmt: skip
FREQUENT = {"Up", "Down", "Ready", "Commit", "Shard", "LinkNews", "Tensor"}
RATED = 0.15  # Of lives have links with rates.
FAR_S = 0.1, 0.25, 0.4  # That a message takes at most.
CHANGES_ODDS, TRANSFER_ODDS, MORE_ODDS = 0.3, 0.3, 0.1  # In those, at each fault.
JOIN_TIMES = (
    8.0  # A join may take longer than the state over its fastest link: others fetch before it and beside it.
)
RESULTS_KEPT = 4, 16, 64, None  # By a joiner that has no state yet.
SILENCES_S = 0.2, 3.0
PERSONS = 4  # Nodes that are told in the end to go on: one may wait for more than the one before.
RARE_ODDS = 0.3  # Of a crash at a message that most runs see only a few times.


class Violation(AssertionError):
    """An invariant broke; the text holds the seed and the story."""


@dataclass(slots=True)
class LifeOutcome:
    """What happened in one run."""

    seed: int
    steps: int
    crashes: int
    joins: int
    leaves: int
    rejoins: int
    returns: int
    digest: str
    waited: tuple[str, ...] = ()  # Why nodes of a pair waited for a person at the end of the faults.
    persons: int = 0  # How often one said that the others are dead.
    coverage: set[str] = field(default_factory=set)  # Names of coverage.py.
    kinds: tuple[str, ...] = ()  # What it had that not all lives have.


@dataclass(frozen=True, slots=True)
class LifeOptions:
    """What all lives of a search have; without an option, some lives have it, or none."""

    nodes: tuple[int, int] = NODES  # The least and the most that it may begin with.
    hard: bool = False  # 12 to 24 faults.
    rates: bool = False  # Bytes take time; else in some lives only.
    far: bool = False  # Messages take up to 0.1 to 0.4 s.
    tensors: bool = False  # Nodes need each other's within a step (tensors.py).
    parts: bool = False  # That, and they keep only parts of the state (kept.py).

    @property
    def given(self) -> str:
        """The options of `chaosnet simulate` that say the same."""
        kinds = ("hard", "rates", "far", "tensors", "parts")
        return " --nodes {}..{}".format(*self.nodes) + "".join(f" --{k}" for k in kinds if getattr(self, k))


class RandomRun:
    """All choices come from the seed."""

    def __init__(self, seed: int, options: LifeOptions = LifeOptions(), record: bool = False) -> None:
        self.seed = seed
        self.rng = random.Random(f"run {seed}")
        chunks = self.rng.choice([1, 1, 2, 3])
        policy = self.rng.choice(["single", "fapt"])
        self.sim = SimCluster(seed, chunks, policy, record)
        self.sim.clocks = _clocks(random.Random(f"clocks {seed}"))
        if options.far:
            self.sim.take(random.Random(f"far {seed}").choice(FAR_S))
        self.links = random.Random(f"links {seed}")
        self.rates: LinkRates | None = None
        # Bytes take time, and the trees follow what links carry.
        if self.links.random() < RATED or options.rates:
            self._lay_links(policy)
        bundles = random.Random(f"bundles {seed}")
        if bundles.random() < 0.5:  # Views differ in how many chunks travel as one message.
            self.sim.bundler = lambda trees, graph: bundles.choice([1, 2, 6])
            self.sim.borders = bundles.choice([(), *((each,) for each in range(1, self.sim.chunks))])
        # The smaller ones are quicker.
        self.size = min(self.rng.randint(*options.nodes), self.rng.randint(*options.nodes))
        self.crashes = self.joins = self.leaves = self.rejoins = 0
        self.max_crashes = self.rng.choice([0, 1, 2, 4])
        self.hunted = set(self.rng.sample(AIMS, 3))
        self.hunt_odds = self.rng.choice([0.0, 0.01, 0.1])
        if options.tensors or options.parts:
            self.sim.compute_together(2 * options.parts)
            self.hunted |= set(random.Random(f"tensors {seed}").choice([(), ("Tensor",)]))
        self.lost = False  # All copies of something.
        self.struck: set[str] = set()
        self.sim.on_message = self._maybe_strike
        self.faults = self.rng.choice([3, 5, 8, 12])
        self.faults_per_s = self.rng.choice([0.7, 2.0, 5.0])
        if options.hard:  # What needs three faults at once is rare in a life with as many.
            self.faults, self.max_crashes = 12 + 4 * (seed % 4), (1, 2, 4, 6)[seed // 4 % 4]
        self.grows = self.rng.random() < 0.2  # One by one, or all are there from the start.
        self.calm = False
        odd = random.Random(f"odd {seed}")  # What only some lives have.
        slowest = odd.choice([1.0, 1.0, 1.0, 5.0])
        self.sim.slowness = lambda: odd.choice([1.0, slowest])
        self.one_sided = odd.random() < 0.25  # Partitions cut one direction only.
        self.anybody = odd.random() < 0.25  # Crashes strike joiners, too, and those who wait.
        self.crowds = odd.random() < 0.4  # Several nodes join at once, perhaps through each other.
        self.tried_again: set[str] = set()  # Who could not join while there were faults.
        self._ways_to_die(random.Random(f"deaths {seed}"))
        self.waited: tuple[str, ...] = ()
        self.plain_s = 1.0 + 12 * self.sim.max_bulk_delay_s + (slowest - 1.0) * self.sim.compute_s
        self.sim.going_s = self.plain_s + self._longest_s()
        self.awake_at_s = 0.0  # When the last of those asleep has woken.

    def _lay_links(self, policy: str) -> None:
        """Links with rates."""
        sim = self.sim
        self.rates = sim.rates = LinkRates(random.Random(f"rates {self.seed}"))
        sim.compute_s = self.rates.compute_s
        sim.state_bytes, sim.result_bytes = self.rates.state_bytes, self.rates.result_bytes
        sim.policy = self.links.choice([policy, "packed"])
        sim.chunks = self.links.choice([sim.chunks, sim.chunks, 6])  # Some wait while others are on the wire.
        kept = self.links.choice(RESULTS_KEPT)
        sim.results_kept = kept * sim.result_bytes if kept else math.inf

    @property
    def quiet_s(self) -> float:
        """The longest time of a step, unless the cluster waits for a joiner."""
        return self.plain_s + self._sums_s()

    def _sums_s(self) -> float:
        """The time of all parts and then all results, one tree after the other, in the slowest view."""
        if self.rates is None:
            return 0.0
        views = {node.view.key: node.view for node in self.sim.active()}
        return max((sum(self._tree_s(tree) for tree in view.trees) for view in views.values()), default=0.0)

    def _tree_s(self, tree: Tree) -> float:
        """The time of a tree's sum: up its slowest branch, and down its slowest."""
        assert self.rates is not None
        up_s, down_s = 0.0, 0.0
        for node in tree.parent:
            to_root_s, from_root_s = 0.0, 0.0
            while node in tree.parent:
                parent = tree.parent[node]
                to_root_s += 1 / self.rates.of(node, parent)
                from_root_s += 1 / self.rates.of(parent, node)
                node = parent
            up_s, down_s = max(up_s, to_root_s), max(down_s, from_root_s)
        return self.sim.result_bytes * (up_s + down_s)

    def _longest_s(self) -> float:
        """The longest time without a step in a cluster that goes on: while a joiner pulls over the slowest link."""
        if self.rates is None:
            return 0.0
        return 2 * (self.rates.state_bytes + 2 * self.rates.result_bytes) / self.rates.slowest

    @property
    def patience_s(self) -> float:
        """Time until all must have come to rest.

        Some things wait for one step after another, and joiners for bytes.
        """
        return PATIENCE_S + 30 * self.quiet_s + JOIN_TIMES * self._states_s()

    def _states_s(self) -> float:
        """The time to fetch all states that are lacking, one after the other, over each joiner's fastest link."""
        if self.rates is None:
            return 0.0
        sim, members = self.sim, [node.name for node in self.sim.active()]
        joining = [node for node in sim.nodes.values() if node.alive and not node.done and not node.loaded]
        total_s = 0.0
        for node in joining:
            linked = [name for name in members if link(name, node.name) in sim.connections]
            fastest = max((self.rates.of(name, node.name) for name in linked), default=self.rates.slowest)
            total_s += sim.state_bytes / fastest
        return total_s

    def _ways_to_die(self, rng: random.Random) -> None:
        """In half of all lives, nodes die after a silence or with a goodbye, and are proved dead late or never."""
        self.dying = rng
        self.silent_odds, self.goodbye_odds = rng.choice([(0.0, 0.0), (0.0, 0.0), (0.6, 0.0), (0.4, 0.3)])
        self.person_odds = rng.choice([0.0, 0.0, 0.3])  # At each fault.
        self.how: dict[str, str] = {}  # Who has died, and how.
        if not self.silent_odds:
            return
        late_s = rng.choice([(0.0,), (0.0, 0.0, 0.05, 0.3, 1.0), (0.0, 0.5, 2.0, None)])
        self.sim.refuses_after_s = lambda: rng.choice(late_s)
        lag_s = rng.choice([0.0, 0.0, 1.0])
        self.sim.reset_lag_s = lambda: rng.uniform(0.0, lag_s)

    def run(self) -> LifeOutcome:
        """Grow, suffer, heal, rest. Raises Violation with the story."""
        try:
            with watched() as transitions:
                self._live()
        except AllCopiesLost as error:
            self._check_lost(error)
        except Exception as error:
            raise Violation(
                f"seed {self.seed}: {type(error).__name__}: {error}\n{self.sim.story()}"
            ) from error
        sim = self.sim
        return LifeOutcome(
            self.seed,
            len(sim.history),
            self.crashes,
            self.joins,
            self.leaves,
            self.rejoins,
            sim.returns,
            sim.digest(),
            self.waited,
            sim.persons,
            transitions | self.struck | {delivered(kind.__name__) for kind in sim.delivered} | sim.met,
            self._kinds(),
        )

    def _check_lost(self, error: AllCopiesLost) -> None:
        """Check that faults explain a loss of all copies: a node that was let go has handed on what it kept."""
        gone = [self.sim.nodes[name] for name in error.last]
        self.lost = True
        if any(node.was_let_go for node in gone):
            raise Violation(f"seed {self.seed}: {error}\n{self.sim.story()}")

    def _kinds(self) -> tuple[str, ...]:
        kinds = {
            "silent deaths": self.silent_odds > 0,
            "a person": self.person_odds > 0,
            "one-way partitions": self.one_sided,
            "crowds of joiners": self.crowds,
            "tensors of each other": self.sim.tensors is not None,
            "all copies lost": self.lost,
        }
        if self.rates is not None:
            kinds["links with rates"] = True
            kinds[f"links with rates, {self.rates.class_of()}"] = True
        return tuple(kind for kind, has in kinds.items() if has)

    def _live(self) -> None:
        self.calm = True
        if self.grows:
            self._grow()
        else:
            self._found()
        self.calm = False
        for _ in range(self.faults):
            self.sim.run(self.sim.now_s + self.rng.expovariate(self.faults_per_s))
            self._fault()
        self.calm = True
        # A script that goes on starting steps anew is no calm, and steps are short here.
        if self.rates is not None:
            self.sim.retract_odds = 0.0
        for pair in sorted(self.sim.cuts):
            self.sim.heal(*pair)
        self._rest()
        self._note_pairs()
        if self.person_odds:
            for _ in range(PERSONS):
                if not self._person():
                    break
                self.tried_again.clear()  # Who asked a cluster that waited may ask once more.
                self._rest()
            assert not any(self._person_could_help(node) for node in self.sim.active()), "a person said go on"
        complaints = self.sim.unsettled(self.sim.now_s - self.quiet_s)
        assert not complaints, "; ".join(complaints)

    def _grow(self) -> None:
        self.sim.add("n0")
        for index in range(1, self.size):
            self.sim.run(self.sim.now_s + self.rng.uniform(0.0, 0.5))
            self._join(f"n{index}", counts=False)
        self.sim.run(self.sim.now_s + 2.0)

    def _found(self) -> None:
        """Found a cluster with a random connected overlay: a random tree, and some more links."""
        names = [f"n{index}" for index in range(self.size)]
        links = {link(name, self.rng.choice(names[:index])) for index, name in enumerate(names) if index}
        for _ in range(self.rng.randint(0, self.size)):
            links.add(link(*self.rng.sample(names, 2)))
        self.sim.found(names, links)
        self.sim.run(self.rng.uniform(0.2, 1.0))

    def _rest(self) -> None:
        """Run until nothing but training goes on any more, for `patience_s` at most."""
        sim = self.sim
        calm_s = max(sim.now_s, self.awake_at_s)
        bound_s = self.patience_s
        while sim.now_s < calm_s + bound_s:
            if sim.now_s >= self.awake_at_s and self._join_again():
                calm_s = sim.now_s
            bound_s = max(bound_s, self.patience_s)
            sim.run(sim.now_s + 0.25)
            quiet_s = self.quiet_s
            if sim.now_s > calm_s + quiet_s and sim.is_quiet(sim.now_s - quiet_s):
                return
            patient = sim.now_s > calm_s + WAITED_S and not sim.unsettled(sim.now_s - WAITED_S)
            if patient and not sim.unsettled(sim.now_s - quiet_s):
                return  # All the others wait, and must.

    def _join_again(self) -> bool:
        """Start nodes again that could not join while there were faults, once: now they must get in."""
        nodes = self.sim.nodes.values()
        failed = sorted(node.name for node in nodes if node.alive and node.done == "JoinFailed")
        failed = [name for name in failed if name not in self.tried_again]
        for name in failed:
            self.tried_again.add(name)
            self._join(name, counts=False)
        return bool(failed)

    def _fault(self) -> None:
        rng, sim = self.rng, self.sim
        active = sorted(node.name for node in sim.active())
        kind = rng.choice(FAULTS)
        if self.person_odds and self.dying.random() < self.person_odds:
            self._person()
        if not active:
            return
        if self.rates is not None:
            self._trouble_transfers(active)
        if kind == "join" and self.joins < self.size + 4:
            self._crowd()
        elif kind == "leave" and len(active) > 1:
            self.leaves += 1
            sim.tell(rng.choice(active), ev.LeaveWanted())
        elif kind == "crash":
            running = sorted(node.name for node in sim.nodes.values() if node.alive and not node.done)
            self._crash(rng.choice(running if self.anybody else active))
        elif kind == "restart":
            self._restart()
        elif kind == "cut" and len(active) > 2 and len(sim.cuts) < 4:
            sim.cut(*rng.sample(active, 2))
        elif kind == "heal" and sim.cuts:
            sim.heal(*rng.choice(sorted(sim.cuts)))
        elif kind == "partition" and len(sim.nodes) > 1:
            self._cut_for_a_while(self._two_sides(), one_way=self.one_sided)
        elif kind == "one-way" and len(active) > 1:
            sim.cut_one_way(*rng.sample(active, 2))
        elif kind == "flap" and len(active) > 1:
            self._flap(rng.choice([[tuple(rng.sample(active, 2))], self._two_sides()]), rng.randint(2, 6))
        elif kind in ("pause", "sleep"):
            self._pause(rng.choice(active), rng.choice(PAUSES_S if kind == "pause" else SLEEPS_S))
        elif kind == "reset" and sim.connections:
            pair = rng.choice(sorted(sim.connections))
            sim.reset(*pair)
            # Its end breaks first; it may have gone on alone.
            if self.silent_odds and self.dying.random() < 0.7:
                sim.later(self.dying.uniform(0.1, 1.0), lambda: self._strike_down(pair[0]))
        elif kind == "link" and len(active) > 2:
            self._change_link(*rng.sample(active, 2))

    def _trouble_transfers(self, active: list[str]) -> None:
        """In lives with rates: links become faster or slower, more nodes join, and those who pull lose sources."""
        links, sim = self.links, self.sim
        if len(active) > 1 and links.random() < CHANGES_ODDS:
            self._change_rate(*links.sample(active, 2))
        if links.random() < MORE_ODDS and self.joins < self.size + 4:
            self._crowd()
        pulling = [
            (node.name, source)
            for node in sim.nodes.values()
            if node.alive and not node.done and (joiner := node.agent.joiner) and joiner.replication
            for source in joiner.replication.sources
        ]
        if not pulling or links.random() >= TRANSFER_ODDS:
            return
        joiner_name, source = links.choice(pulling)
        match links.choice(["crash", "cut", "slow", "slow"]):
            case "crash":
                self._crash(source)
            case "cut":
                self._cut_for_a_while([(joiner_name, source)])
            case "slow":
                self._change_rate(source, joiner_name)

    def _change_rate(self, a: str, b: str) -> None:
        """Of one direction of the link between two nodes, or of both."""
        factor = self.links.choice(CHANGES)
        for way in ((a, b), (b, a))[: self.links.randint(1, 2)]:
            self.sim.change_rate(*way, factor)

    def _pause(self, name: str, seconds: float) -> None:
        if not self.sim.nodes[name].paused:
            self.awake_at_s = max(self.awake_at_s, self.sim.now_s + seconds)
            self.sim.pause(name, seconds)

    def _two_sides(self) -> list[tuple[str, ...]]:
        """Divide the nodes at random. Returns: all pairs with a node on each side."""
        names = sorted(self.sim.nodes)
        side = set(self.rng.sample(names, self.rng.randint(1, len(names) - 1)))
        return [(a, b) for a in sorted(side) for b in names if b not in side]

    def _cut_for_a_while(
        self, pairs: list[tuple[str, ...]], seconds: float | None = None, one_way: bool = False
    ) -> None:
        """All of these links, or those that are not cut yet; they heal together."""
        for pair in pairs:
            (self.sim.cut_one_way if one_way else self.sim.cut)(*pair)
        self.sim.later(seconds or self.rng.choice([0.5, 2.0, 6.0, 15.0]), lambda: self._heal(pairs))

    def _heal(self, pairs: list[tuple[str, ...]]) -> None:
        for pair in pairs:
            self.sim.heal(*pair)

    def _flap(self, pairs: list[tuple[str, ...]], times: int) -> None:
        if self.calm or not times:
            return
        self._cut_for_a_while(pairs, self.rng.uniform(0.1, 2.0))
        self.sim.later(self.rng.uniform(2.0, 4.0), lambda: self._flap(pairs, times - 1))

    def _change_link(self, a: str, b: str) -> None:
        if self.rng.random() < 0.5:
            self.sim.ask(a, ConnectLinkRequest(a=a, b=b, asker=a))
        else:
            self.sim.ask(a, DisconnectLinkRequest(a=a, b=b, asker=a))

    def _crowd(self) -> None:
        """One or several nodes join at once; some of several know nobody but another of them."""
        names = [f"j{self.joins + index}" for index in range(self.rng.randint(2, 4) if self.crowds else 1)]
        for index, name in enumerate(names):
            through = names[:index] if self.rng.random() < 0.5 else []
            self._join(name, through=through)

    def _join(
        self, name: str, counts: bool = True, clock_s: float | None = None, through: Sequence[str] = ()
    ) -> None:
        alive = sorted(node.name for node in self.sim.active()) or ["n0"]
        seeds = [self.rng.choice(through)] if through else []
        seeds = seeds or self.rng.sample(alive, min(len(alive), self.rng.randint(1, 2)))
        self.joins += counts
        blocking = self.rng.random() < 0.3
        self.sim.add(name, seeds, degree=self.rng.randint(1, 3), blocking=blocking, clock_s=clock_s)

    def _restart(self) -> None:
        """A dead process is started again under the same name, as Docker would; perhaps with its clock set back."""
        dead = sorted(n.name for n in self.sim.nodes.values() if not n.alive or n.done == "Left")
        if dead and self.rejoins < self.size:
            self.rejoins += 1
            clock_s = self.rng.choice(
                [None, self.rng.uniform(0.0, 1e-4), self.rng.uniform(0.0, self.sim.now_s)]
            )
            self._join(self.rng.choice(dead), clock_s=clock_s)

    def _crash(self, name: str) -> bool:
        """Crash a node, if the rest can bear it: a majority is left, or the last two were."""
        if self.crashes >= self.max_crashes or len(self.sim.active()) < 2:
            return False
        self.crashes += 1
        draw = self.dying.random() if self.silent_odds else 1.0
        if draw < self.silent_odds and not self.sim.nodes[name].paused:
            silent_s = self.dying.uniform(*SILENCES_S)
            self.how[name] = (
                f"died after {'up to 1' if silent_s < 1 else 'up to 2' if silent_s < 2 else '2 to 3'} s of silence"
            )
            self.awake_at_s = max(self.awake_at_s, self.sim.now_s + silent_s)
            self.sim.fall_silent(name, silent_s)
            return False  # It is not dead yet.
        if self.silent_odds <= draw < self.silent_odds + self.goodbye_odds and not self._cannot_speak(name):
            self.how[name] = "said goodbye"
            self.sim.later(0.0, lambda: self._say_goodbye(name))
            return False
        self.how[name] = "was killed while cut off" if self._is_cut_off(name) else "was killed"
        self.sim.crash(name)
        return True

    def _strike_down(self, name: str) -> None:
        node = self.sim.nodes[name]
        if node.alive and not node.done and not node.paused and self.crashes < self.max_crashes:
            self.crashes += 1
            self.how[name] = "was killed after a reset"
            self.sim.crash(name)

    def _is_cut_off(self, name: str) -> bool:
        return any(name in pair for pair in self.sim.cuts)

    def _cannot_speak(self, name: str) -> bool:
        """Is the node no member that could say goodbye?"""
        return self.sim.nodes[name] not in self.sim.active() or self.sim.nodes[name].paused

    def _say_goodbye(self, name: str) -> None:
        if not self._cannot_speak(name):
            self.sim.says_goodbye(name)

    # --- who waits, and the person ---

    def _waits_for(self, node: SimNode) -> list[str]:
        """The voters that a waiting node does not reach."""
        agent = node.agent
        if not agent.parked or node.done:
            return []
        voters = {voter for electorate in agent.sync.electorates() for voter in electorate.members}
        return sorted(voters - agent.overlay.reachable)

    def _is_gone(self, name: str, life: int) -> bool:
        """Is that life over for good?"""
        there = self.sim.nodes.get(name)
        return there is None or not there.alive or bool(there.done) or there.life != life

    def _person(self) -> bool:
        """Tell one node that waits to go on, if all whom it waits for are dead. Returns: whether somebody did."""
        for node in self.sim.active():
            doubted = node.agent.parking.doubted() if node.agent.parked else ()
            if doubted and not node.paused and all(self._is_gone(*each) for each in doubted):
                if any(key[0] > node.view.key[0] for key in self.sim.views):
                    continue  # A person looks whether others have gone on.
                self.sim.go_on(node.name)
                return True
        return False

    def _person_could_help(self, node: SimNode) -> bool:
        """Does the node still wait, though only for nodes that were declared dead?"""
        waits, agent, voters = self._waits_for(node), node.agent, {*node.view.voter_ids}
        decides = node.name in voters or not (agent.lacks_state or agent.overlay.reachable & voters)
        return decides and bool(waits) and all(name in agent.overlay.lives.declared for name in waits)

    def _note_pairs(self) -> None:
        """Note which pairs wait for a person, and why."""
        why = set()
        for node in self.sim.active():
            if node.agent.parked and len(node.view.voter_ids) == 2:
                for name in self._waits_for(node):
                    there = self.sim.nodes.get(name)
                    lives = there is not None and there.alive and not there.done
                    why.add(
                        "the other went on, or lives" if lives else f"the other {self.how.get(name, 'left')}"
                    )
        self.waited = tuple(sorted(why))

    def _maybe_strike(self, sender: str, receiver: str, message: Message) -> None:
        kind = type(message.body if isinstance(message, Envelope) else message).__name__
        if self.calm or kind not in self.hunted:
            return
        if self.rng.random() >= (self.hunt_odds if kind in FREQUENT else RARE_ODDS):
            return
        victim = self.rng.choice([sender, receiver])
        if self.sim.nodes[victim].alive and self._crash(victim):
            self.struck.add(crashed("sender" if victim == sender else "receiver", kind))


def _clocks(rng: random.Random) -> Callable[[], Clock]:
    """The clocks of machines: they begin anywhere, and in some clusters they drift, more than real ones do."""
    drift = rng.choice([0.0, 1e-4, 0.01])
    return lambda: Clock(rng.uniform(0.0, 1e6), 1.0 + rng.uniform(-drift, drift))


def run(seed: int, record: bool = False, **options: Any) -> LifeOutcome:
    """One life from one seed. `options`: those of `LifeOptions`."""
    return RandomRun(seed, LifeOptions(**options), record).run()
