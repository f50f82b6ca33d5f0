"""A whole cluster of real cores under one seed: virtual clock, network, training threads and state.

Everything a node decides is production code (node/agent/). Replaced are: sockets by a virtual network (network.py),
tensors by sets of who contributed, and training by random compute times. So a part that was counted
twice, or mixed between attempts, shows as a wrong set. Invariants are checked after every event.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..node.agent.core import Agent, CoreSettings, Phase
from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols.asking import Otherwise
from ..protocols.data_cursor import DataCursor
from ..protocols.messages import (
    Contribution,
    Deal,
    Down,
    Envelope,
    GoOnCommand,
    Link,
    ManifestReply,
    Member,
    Notice,
    Probe,
    Routed,
    ScaleOutRefused,
    Shard,
    Up,
    View,
    ViewKey,
)
from ..protocols.scale_in import LeaverState
from ..protocols.scale_out import LIFE_STEP
from ..scheduler.monitor import ClusterMonitor
from ..scheduler.sync_plan import POLICIES, Bundler, bundle
from ..scheduler.views import with_trees
from . import coverage
from .history import History
from .kept import KeptTensors
from .nodes import DATASET, Applied, Clock, SimNode, SimResult, whose
from .tensors import Tensors
from .training_thread import train

PROBE_PART = bytes(64 << 10)
PROBE_PARTS, WHOLE_PROBE_PARTS = 2, 16  # Where bytes take time, together as many as in production.
READ_EVERY_S = 1.0
INTACT, DAMAGED = b"as sent", b"damaged"  # What a piece of state holds.
TIMED_BYTES = 8 << 20
CLOCK_HZ = 1000 * LIFE_STEP  # Of lives. A restart comes later than the messages of the life before it.


class SimCluster(History):
    """Runs cores on a virtual clock. Faults are methods; a run is `run(until_s)`."""

    def __init__(self, seed: int, chunks: int = 3, policy: str = "fapt", record: bool = False) -> None:
        super().__init__(seed, record)
        self.chunks, self.policy = chunks, policy
        self.borders: tuple[int, ...] = ()
        self.bundler: Bundler = bundle
        self.results_kept = math.inf  # Bytes of those that a joiner has no state for yet.
        self.returns = 0  # Nodes that were told that they are out, and have begun to rejoin.
        self.compute_s = self.rng.choice([0.03, *7 * [0.1, 0.3]])
        self.state_bytes = self.rng.choice([100, 3 << 20, 40 << 20])
        self.retract_odds = self.rng.choice([0.0, 0.0, 0.01])
        self.clocks: Callable[[], Clock] = Clock  # Of the machines to come.
        self.slowness: Callable[[], float] = lambda: 1.0  # So much longer they take for a step.
        self.result_bytes = 0  # That a step sums; 0: nobody knows, so nobody plans by it.
        self.tensors: Tensors | None = None  # Of lives in which nodes need each other's within a step.
        # By sender and receiver, as links are timed.
        self.carried: dict[tuple[str, str], tuple[int, float]] = {}

    def compute_together(self, parts: int = 0) -> None:
        """Nodes that are added from now on need tensors of each other within a step.

        `parts`: copies of each part of the state, if they keep only parts (kept.py).
        """
        self.tensors = Tensors(self.later, self._event)
        if parts:
            self.chunks = max(self.chunks, 2)
            self.borders = tuple(range(1, self.chunks))
            self.tensors = KeptTensors(self.later, self._event, groups=self.chunks - 1, copies=parts)

    @property
    def kept(self) -> KeptTensors | None:
        """What nodes keep, in lives in which they keep parts of the state; else None."""
        return self.tensors if isinstance(self.tensors, KeptTensors) else None

    # --- building ---

    def add(
        self,
        name: str,
        seeds: Iterable[str] = (),
        degree: int = 2,
        blocking: bool = False,
        neighbors: tuple[str, ...] = (),
        otherwise: Otherwise = Otherwise.FAIL,
        clock_s: float | None = None,
    ) -> SimNode:
        """A new machine: founds a cluster, or joins through `seeds` (names). `clock_s`: what its clock says."""
        node = self._machine(name, int((self.now_s if clock_s is None else clock_s) * CLOCK_HZ) + 1)
        self._say(name, f"starts, seeds {sorted(seeds)}")
        node.ways = tuple(f"{seed}:1" for seed in seeds)
        if node.ways:
            self._join(node, neighbors, degree, blocking, otherwise)
        else:
            self._give_state([node])
            self._perform_all(node, node.agent.found(node.clock.reads(self.now_s)))
        return node

    def found(self, names: Iterable[str], links: Iterable[Link]) -> None:
        """New machines that are a cluster from the start: each is given the first view, with these links."""
        nodes = [self._machine(name, LIFE_STEP) for name in names]
        members = tuple(Member(id=node.name, addresses=(f"{node.name}:1",), life=node.life) for node in nodes)
        alone = View(term=1, seq=1, scheduler=members[0].id, members=members, links=tuple(sorted(links)))
        graph = ClusterMonitor().graph(alone.member_ids, alone.links)
        view = with_trees(alone, graph, POLICIES[self.policy])
        for pair in view.links:
            self._open_first(pair)
        self._give_state(nodes)
        for node in nodes:
            self._perform_all(node, node.agent.found(node.clock.reads(self.now_s), view))

    def _give_state(self, nodes: list[SimNode]) -> None:
        """The founders of a cluster have its state."""
        for node in nodes:
            node.loaded = True
        if self.kept is not None:
            self.kept.found(nodes)

    def _open_first(self, pair: Link) -> None:
        """A link of the first view."""
        self._open(pair, dialler=pair[0])

    def _machine(self, name: str, life: int) -> SimNode:
        settings = CoreSettings(
            addresses=(f"{name}:1",),
            chunks=self.chunks,
            borders=self.borders,
            policy=POLICIES[self.policy],
            bundler=self.bundler,
            result_bytes=self.result_bytes,
            recomputes=self.tensors is not None,
            parts=self.kept is not None,
            life=life,
        )
        agent = Agent(name, settings, random.Random(self.rng.random()))
        node = self.nodes[name] = SimNode(name, agent, self.rng.choice([1, 8, 32]))
        node.clock, node.slowness = self.clocks(), self.slowness()
        node.last_progress_s = node.goes_on_s = node.was_away_s = self.now_s
        if self.rates is not None:
            self.later(READ_EVERY_S, lambda: self._read(node))
        return node

    def _join(
        self,
        node: SimNode,
        neighbors: tuple[str, ...],
        degree: int,
        blocking: bool,
        otherwise: Otherwise,
    ) -> None:
        now_s = node.clock.reads(self.now_s)
        effects = node.agent.join(node.ways, neighbors, degree, blocking, 20.0, now_s, otherwise)
        self._perform_all(node, effects)

    def _return(self, out: SimNode) -> None:
        """A process that was put out comes back by itself, as a later life."""
        if not out.alive or self.nodes[out.name] is not out:
            return
        if out.paused:
            self.later(0.1, lambda: self._return(out))
            return
        self.returns += 1
        self._say(out.name, f"rejoins through {out.agent.ways_back}")
        node = self._machine(out.name, out.agent.next_life)
        node.ways = out.agent.ways_back
        self._join(node, (), self.rng.randint(1, 3), self.rng.random() < 0.3, Otherwise.KEEP_TRYING)

    # --- what people do ---

    def tell(self, name: str, event: ev.Event) -> None:
        """Hand an event to the core of a node, as its loop would."""
        self._event(self.nodes[name], event)

    def carries(self, name: str, rates_bps: Mapping[str, float]) -> None:
        """A node has found out what its links carry, and reports from now on."""
        for peer, rate_bps in rates_bps.items():
            sent, took_s = self.carried.get((name, peer), (0, 0.0))
            self.carried[name, peer] = sent + TIMED_BYTES, took_s + 8 * TIMED_BYTES / rate_bps
        totals = {peer: total for (sender, peer), total in self.carried.items() if sender == name}
        self.tell(name, ev.ReadingsTaken(1.0, 0.0, 100, (1, 100), 0.0, 0, -1.0, 0, 0, {}, totals))

    def _read(self, node: SimNode) -> None:
        """Once a second a node reads what its links have carried, as node/loop.py does."""
        if not node.alive or node.done:
            return
        if not node.paused:
            sizes = self.state_bytes, (max(self.state_bytes // 100, 1), max(self.state_bytes // 10, 1))
            totals = self.carried_by(node.name)
            self._event(node, ev.ReadingsTaken(1.0, 0.0, *sizes, 0.0, 0, -1.0, 0, 0, {}, totals))
        self.later(READ_EVERY_S, lambda: self._read(node))

    def ask(self, name: str, request: Routed) -> None:
        """Send a request to all, the scheduler among them, from a node."""
        node = self.nodes[name]
        for effect in node.agent.note(request, node.clock.reads(self.now_s)):
            self._perform(node, effect)

    def go_on(self, name: str) -> None:
        """A person tells a waiting node that those it cannot reach are dead."""
        node = self.nodes[name]
        self._say(name, "is told by a person to GO ON")
        self.persons += 1
        command = GoOnCommand(asker=name)
        self._perform_all(node, node.agent.note(command, node.clock.reads(self.now_s), target=name))

    # --- faults ---

    def says_goodbye(self, name: str) -> None:
        """A node's script ends with an error: its farewell says so."""
        node = self.nodes[name]
        self._say(name, "ENDS with an error")
        self._perform_all(node, node.agent.end("its script has failed", node.clock.reads(self.now_s)))

    def fall_silent(self, name: str, seconds: float) -> None:
        """A node stops answering, and dies after `seconds`."""
        node = self.nodes[name]
        node.paused = True
        self._say(name, f"falls SILENT for {seconds:.2f} s")
        self.later(seconds, lambda: self.crash(name) if self.nodes[name] is node and node.alive else None)

    def crash(self, name: str, arrives: float | None = None) -> None:
        """Kill -9: what is in flight from it is cut off, per connection; then its peers notice.

        `arrives`: the share of it that gets through, in time; default: drawn, often nothing.
        """
        node = self.nodes[name]
        node.alive = node.paused = False
        self._say(name, "CRASHES")
        self._cut_off(name, arrives)

    def pause(self, name: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT later."""
        node = self.nodes[name]
        node.paused = True
        self._say(name, f"PAUSED for {seconds:.2f} s")
        self.later(seconds, lambda: self._resume(node))

    def _resume(self, node: SimNode) -> None:
        node.paused, node.was_away_s = False, self.now_s
        self._say(node.name, "resumed")
        deferred, node.deferred = node.deferred, []
        for event in deferred:
            self._event(node, event)

    # --- running ---

    def _event(self, node: SimNode, event: ev.Event) -> None:
        if not node.alive or node.done:
            return
        if node.paused:
            node.deferred.append(event)
            return
        if not isinstance(event, ev.Tick):
            self._say(node.name, event)
        if isinstance(event, ev.Received) and isinstance(envelope := event.message, Envelope):
            node.refused |= isinstance(envelope.body, ScaleOutRefused) and envelope.target == node.name
        if isinstance(event, ev.Contributed | ev.Retracted):
            chunks = event.chunks if isinstance(event, ev.Contributed) else range(self.chunks)
            earlier = {each for each in node.contributed if each[0] == node.step}
            node.contributed = earlier | {(node.step, chunk) for chunk in chunks}
            node.taken_back += isinstance(event, ev.Retracted)
        frozen = node.agent.sync.frozen
        self._perform_all(node, node.agent.handle(event, node.clock.reads(self.now_s)))
        if frozen and not node.agent.sync.frozen and node.agent.phase is Phase.MEMBER:
            node.installed = max(node.installed, node.view.key)
        if self.rates is not None and node.agent.sync.sums.catching_up > 1:
            self.met.add(coverage.SEVERAL_LACKED)

    def _perform_all(self, node: SimNode, effects: list[fx.Effect]) -> None:
        only_chunks = bool(effects)
        for effect in effects:
            if isinstance(effect, fx.ChunkEffect):
                self._perform_chunk(node, effect)
            else:
                only_chunks = False
                self._perform(node, effect)
        if not only_chunks:
            self._post_tick(node)
        self._check(node)

    def _post_tick(self, node: SimNode) -> None:
        wake = node.agent.wake_at_s
        if wake is None or node.done or not node.alive:
            return
        due = max(node.clock.at(wake), self.now_s + 1e-6)
        if node.tick_at_s is not None and self.now_s < node.tick_at_s <= due:
            return
        node.tick_at_s = due
        self.later(due - self.now_s, lambda: self._tick(node, due))

    def _tick(self, node: SimNode, due: float) -> None:
        if node.tick_at_s == due:
            node.tick_at_s = None
            self._event(node, ev.Tick())

    # --- effects ---

    def _perform(self, node: SimNode, effect: fx.Effect) -> None:
        if not node.alive:
            return
        match effect:
            case fx.Transmit(peer, message):
                self._send(node.name, peer, message, None)
            case fx.Dial(address):
                self._dial(node, address)
            case fx.ClosePeer(peer, reason):
                self._close(node.name, peer, reason)
            case fx.CheckReach(address):
                self._check_reach(node, address)
            case fx.MeasureLink() | fx.Measured() | fx.FellBehind():
                pass  # From core to core.
            case fx.SendProbe(peer):
                count = PROBE_PARTS if self.rates is None else WHOLE_PROBE_PARTS
                for index in range(count):
                    self._send(node.name, peer, Probe(index=index, count=count), PROBE_PART)
            case fx.Happened():
                self._happened(node, effect)
            case fx.Left(reason) | fx.Out(reason):
                self._finish(node, type(effect).__name__, reason)
            case fx.JoinFailed(reason):
                self._check_gives_up(node, reason)
                self._finish(node, "JoinFailed", reason)
            case fx.Misheard(text):
                self._say(node.name, f"dropped: {text}")
            case fx.Parked(reason):
                node.goes_on_s = self.now_s
                self._say(node.name, f"parked: {reason}")
            case fx.Progress(text):
                self._say(node.name, text)
            case fx.ViewEntered(view, step):
                self._check_view(node, view)
            case fx.Founded():
                self._give_state([node])
            case fx.Joined(step, deal, view):
                node.training = True
                if self.rates is not None and self.now_s - node.was_away_s > 100 * self.compute_s:
                    self.met.add(coverage.LONG_JOIN)
                node.admitted = step
                if node.loaded and step == len(node.log):  # Else it adopts those before first.
                    self._compute(node, step, deal, view)
            case fx.StepCompleted():
                self._completed(node, effect)
            case fx.Recompute() | fx.PassOn() | fx.HandOver() | fx.Summed():
                self._perform_tensors(node, effect)
            case fx.AnswerStatus() | fx.LayoutAsked():
                pass
            case fx.ResetAttempt(before, but_sums):
                node.sums.clear()
                if not but_sums:
                    node.let_results_go()
                if before is not None and self.rates is not None:
                    self.forget_bulk(node.name, before)
            case fx.DropResults(peers, before):
                if self.rates is not None:
                    self.forget_bulk(node.name, before, peers)
            case _:
                self._perform_replication(node, effect)

    def _perform_tensors(self, node: SimNode, effect: fx.Effect) -> None:
        match effect:
            case fx.Recompute(view, step) if node.loaded and node.training:
                self._compute(node, step, node.agent.sync.deal, view)
            case fx.PassOn(peer, message, payload):
                self._send(node.name, peer, message, payload)
            case fx.HandOver(message, payload):
                assert self.tensors is not None
                self.tensors.handed_over(node, message, payload)
            case fx.Summed(key, step):
                assert self.kept is not None
                self.kept.summed(node, (key, step))

    def _perform_chunk(self, node: SimNode, effect: fx.Effect) -> None:
        if not node.alive:
            return
        match effect:
            case fx.Accumulate(chunks, payload, _):
                old = node.sums.get(chunks, frozenset())
                assert not old & payload, f"{sorted(old & payload)} counted twice"
                node.sums[chunks] = old | payload
            case fx.SendUp(key, step, chunks, parent, weight, own):
                payload = self._sum(node, step, chunks, own, key)
                up = Up(key=key, step=step, chunk=chunks.start, count=len(chunks), weight=weight)
                self._send(node.name, parent, up, payload if weight else None)
            case fx.FinishChunks(step, chunks, weight, own):
                alone, total = chunks not in node.sums, self._sum(node, step, chunks, own)
                self._check_weight(node, step, total, weight)
                node.store(chunks, SimResult(step, total, in_place=alone))
            case fx.AdoptChunks(step, chunks, payload):
                assert payload.step == step, f"result of step {payload.step} taken for that of {step}"
                node.store(chunks, payload)
            case fx.SendDown(key, step, chunks, peers, weight, payload):
                down = Down(key=key, step=step, chunk=chunks.start, count=len(chunks), weight=weight)
                content = (payload or node.kept(step, chunks)) if weight else None
                for peer in peers:
                    self._send(node.name, peer, down, content)

    def _sum(
        self, node: SimNode, step: int, chunks: range, own: bool, key: ViewKey | None = None
    ) -> frozenset[str]:
        total = node.sums.pop(chunks, frozenset())
        if own and self.tensors is not None:
            self.tensors.check_part(node, step, key)
        if own:
            assert node.loaded and len(node.log) == step, (
                f"{node.name} adds to step {step} what it computed with no state, or another"
            )
            early = [chunk for chunk in chunks if (step, chunk) not in node.contributed]
            assert not early, (
                f"{node.name} sends chunks {early} of step {step} before backward has reached them"
            )
        assert not (own and node.name in whose(total)), f"{node.name} counted twice"
        return total | {node.part} if own else total

    def _perform_replication(self, node: SimNode, effect: fx.Effect) -> None:
        match effect:
            case fx.TakeSnapshot(step, _):
                assert len(node.log) == step, f"snapshot of step {step} while at {len(node.log)}"
                agreed = self.kept.agreed(node) if self.kept is not None else ()
                node.snapshots[step] = (list(node.log), node.cursor.to_plain(), agreed)
                self.later(self._delay(), lambda: self._event(node, ev.SnapshotReady(step)))
            case fx.DropSnapshot(step):
                node.snapshots.pop(step, None)
            case fx.ServeManifest(peer, step):
                self._send(
                    node.name, peer, ManifestReply(step=step, digest=b""), self._state_of(node, step, peer)
                )
            case fx.ServeShard(peer, step, start, stop):
                if step not in node.snapshots:
                    assert (start, stop) in node.stored, "asked of a fellow that has not got it"
                shard = Shard(step=step, start=start, stop=stop, digest=INTACT)
                self._send(node.name, peer, shard, (step, len(self._state_of(node, step, peer)[0]), INTACT))
            case fx.ReadManifest(_, step, _, payload, attempt):
                node.arrived, node.damaged, node.stored = (step, payload), 0, set()
                self._soon(node, ev.ManifestKnown(step, self.state_bytes, attempt))
            case fx.StoreShard(source, start, stop, digest, payload, attempt):
                *steps, content = payload
                assert steps == [node.arrived[0], node.arrived[0]], "bytes of another step"
                content = DAMAGED if self.rng.random() < 0.01 else content
                whole = is_whole(content, digest)
                node.damaged += whole and content == DAMAGED
                if whole:
                    node.stored.add((start, stop))
                self._soon(node, (ev.ShardStored if whole else ev.ShardBad)(source, start, stop, attempt))
            case fx.StateWhole(step):
                stored = sum(stop - start for start, stop in node.stored)
                assert stored == self.state_bytes, (
                    f"{stored} of {self.state_bytes} bytes of the state are here"
                )
                assert not node.damaged, f"{node.damaged} damaged pieces in the state"
                log, cursor, agreed = node.arrived[1]
                if self.kept is not None:
                    self.kept.loaded(node, agreed)
                node.log, node.cursor, node.loaded = list(log), DataCursor.from_plain(cursor), True
                node.samples = sum(_samples(each.ranges) for each in node.log)
                self._check_state(node)
                backlog, node.backlog = node.backlog, []
                for completed, who in backlog:
                    if completed.step >= step:
                        self._apply(node, completed, who)
                self._soon(node, ev.CaughtUp())
                if node.training:
                    self._compute(node, len(node.log), node.agent.sync.deal, node.view)
            case fx.DiscardState():
                node.loaded, node.training, node.backlog, node.log, node.arrived = False, False, [], [], None
            case _:
                raise TypeError(f"nobody performs {effect!r}")

    def _state_of(self, node: SimNode, step: int, peer: str) -> tuple[list[Any], Any, Any]:
        """The state that a node serves: a copy, or what has arrived, which must not change before `peer` has it."""
        if step in node.snapshots:
            return node.snapshots[step]
        assert node.arrived[0] == step, "the state of another step"
        assert len(node.log) in (0, step) or self.nodes[peer].loaded, "it trains on what fellows fetch"
        return node.arrived[1]

    def _soon(self, node: SimNode, event: ev.Event) -> None:
        self.later(self.rng.uniform(0, 0.001), lambda: self._event(node, event))

    # --- training ---

    def _completed(self, node: SimNode, effect: fx.StepCompleted) -> None:
        node.sums.clear()
        self._check_departed(node)
        if self.now_s - node.last_progress_s > self.going_s:
            node.goes_on_s = self.now_s
        node.last_progress_s = self.now_s
        who = self._check_result(node, effect)
        self._check_history(node, effect.step, (who, effect.commit.total.ranges))
        if not node.loaded:
            node.backlog.append((effect, who))
            if (
                node.agent.phase is Phase.JOINING
                and len(node.backlog) * self.result_bytes > self.results_kept
            ):
                self.met.add(coverage.TOO_MANY)
                self._soon(node, ev.BacklogFull())
            return
        self._apply(node, effect, who)
        if node.training and node.agent.phase is Phase.MEMBER and effect.step + 1 >= node.admitted:
            self._compute(node, effect.step + 1, effect.deal, effect.view)

    def _check_result(self, node: SimNode, effect: fx.StepCompleted) -> frozenset[str]:
        node.completed = range(effect.step + 1 - effect.kept, effect.step + 1)
        node.let_results_go()
        if not effect.commit.total.weight:
            return frozenset()
        results = node.results[effect.step]
        assert self.kept is not None or len(results) == self.chunks, (
            f"{len(results)} of {self.chunks} results"
        )
        sets = {each.who for each in results.values()}
        assert all(each.step == effect.step for each in results.values()), "mixed steps"
        assert len(sets) == 1, f"chunks of one step differ in who contributed: {sets}"
        if self.tensors is None and self.kept is None:
            node.adopts(effect.step, effect.kept)
        return sets.pop()

    def _apply(self, node: SimNode, effect: fx.StepCompleted, who: frozenset[str]) -> None:
        assert len(node.log) == effect.step, f"step {effect.step} applied on top of {len(node.log)} steps"
        ranges = effect.commit.total.ranges
        if self.kept is not None:
            self.kept.applied(node, effect.step, effect.commit.total)
        before = node.log[-1].state if node.log else 0
        node.log.append(Applied(who, ranges, hash((before, who, ranges))))
        self._check_state(node)
        node.cursor.commit(ranges)  # Raises if a sample is consumed twice.
        node.samples += _samples(ranges)
        so_far = (node.cursor.epoch + 1) * DATASET - node.cursor.remaining
        assert node.samples == so_far, f"{node.samples} samples were used, and {so_far} count as used"

    def _compute(self, node: SimNode, step: int, deal: Deal, view: View) -> None:
        """Forward and backward: some chunks are handed over before the step is ready."""
        ranges = tuple(node.cursor.deal(deal).get(node.name, ())) if deal else ()
        weight = float(sum(stop - start for start, stop in ranges))
        if node.agent.leaver.state is not LeaverState.STAYING:
            ranges, weight = (), 0.0
        contribution = Contribution(
            weight=weight,
            ranges=ranges,
            shares={node.name: node.batch},
            leaving=node.agent.leaver.state is not LeaverState.STAYING,
        )
        self.dealt[step, node.name] = ranges
        node.step, node.taken_back = step, 0
        eager = self.rng.randint(0, self.chunks)
        took_s = self.rng.uniform(0.2, 1.0) * self.compute_s * node.slowness
        if self.tensors is not None:
            self.tensors.compute(node, view, step, self.chunks, contribution, took_s)
        else:
            train(self, self._event, node, step, contribution, took_s, eager)

    # --- what ends, and what is told ---

    def _finish(self, node: SimNode, how: str, reason: str) -> None:
        node.done = how
        self._say(node.name, f"{how}: {reason}")
        if how == "Left" and node.agent.was_last:
            self.ended = max(self.ended or 0, node.agent.sync.step)
        for pair in list(self.connections):
            if node.name in pair:
                self._close(node.name, pair[0] if pair[1] == node.name else pair[1], reason)
        if how == "Out":
            self.later(self.rng.uniform(0.0, 1.0), lambda: self._return(node))

    def _happened(self, node: SimNode, effect: fx.Happened) -> None:
        if effect.kind == "new-plan" and self.rates is not None:
            self.met.add(coverage.NEW_TREES)
        self._say(node.name, f"EVENT {effect.kind} {effect.node}: {effect.detail} (step {effect.step})")
        notice = Notice(
            kind=effect.kind, node=effect.node, detail=effect.detail, step=effect.step, time_s=self.now_s
        )
        for each in node.agent.note(notice, node.clock.reads(self.now_s)):
            self._perform(node, each)


def _samples(ranges: Iterable[tuple[int, int]]) -> int:
    return sum(stop - start for start, stop in ranges)


def is_whole(content: bytes, digest: bytes) -> bool:
    """Does a piece of state match its hash? Stands for node/state/replica.py, with bytes that are their own hash."""
    return content == digest
