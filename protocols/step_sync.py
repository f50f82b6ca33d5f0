"""One training step's all-reduce: chunks up and down the trees, the vote that switches views, and retries.

    up:    when its own part and those of all member children are in, a node sends the sum to its parent
    down:  the root divides by the weight and passes the result on; who gets it keeps it and passes it on
    ready: like a chunk, over the first tree, once the training thread has called update(): carries the vote
    commit: the root's answer to all Readys: totals, and the view that the next step runs in

A step is *complete* at a node that has the commit and all results. Nobody contributes to step s+1 before
it has completed s. So the first result of s+1 is proof that every member has completed s, and a node needs
to keep just two results: those of the step it has completed and of the one under way. No message says
"all have s"; the next step does.

Chunks are the same in every view. How many neighbouring ones travel as one message, a *bundle*, is the view's choice:
few and large messages are cheap, many small ones fill slow links better.

An attempt is named by (view key, step), because every retry happens in a new view. Chunks of another
attempt are dropped by that name, or kept for a moment if they are ahead of us.

Source: Chaos, Sec. IV-B ("plans after the current all-reduce"; "restart all-reduce" after a failure).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise, repeat
from typing import Any, Protocol

import msgspec

from .contributions import merge, merge_strikes
from .effects import (
    Accumulate,
    AdoptChunks,
    DropResults,
    Effect,
    FellBehind,
    FinishChunks,
    Left,
    Out,
    ResetAttempt,
    SendDown,
    SendUp,
    StepCompleted,
    Transmit,
    ViewEntered,
)
from .errors import LocalProtocolError, RemoteProtocolError
from .events import Contributed, Event, LocalReady, Received, Retracted
from .messages import (
    Commit,
    Contribution,
    Deal,
    Down,
    Electorate,
    Install,
    Lack,
    Ready,
    Strike,
    Tree,
    Up,
    View,
    ViewKey,
)

STEP_MESSAGES = (Up, Down, Ready, Commit)
# What is kept of one peer because it is ahead of us. In chunks a neighbour can be one step ahead.
EARLY_STEPS = 4
# Commits come to an observer over a slow link long before the results, which wait in memory of whoever sends them. An
# observer that is further behind begins anew, and then the cluster waits for it.
EARLY_COMMITS = 8, 1024
EARLY_RESULTS_BYTES = 1 << 30
MAX_LACKS = 128  # As a Report may have.


def bundles(chunks: int, size: int, borders: tuple[int, ...] = ()) -> list[range]:
    """The chunks by `size` at most; none of them spans one of the `borders`, chunks that begin something else."""
    edges = (0, *borders, chunks)
    return [
        range(first, min(first + size, stop))
        for start, stop in pairwise(edges)
        for first in range(start, stop, size)
    ]


class HasShare(Protocol):
    """What `chunk_trees` has to know of a tree: which share of all chunks it carries."""

    @property
    def share(self) -> float: ...


def chunk_trees(count: int, trees: Sequence[HasShare]) -> list[int]:
    """Which tree carries each of so many bundles: in turn, so that all trees are busy from the first chunk on."""
    given = [0] * len(trees)
    owner = []
    for done in range(1, count + 1):
        best = max(range(len(trees)), key=lambda t: (trees[t].share * done - given[t], -t))
        given[best] += 1
        owner.append(best)
    return owner


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Of the sums of (value * weight, weight), by name; what nobody gave any weight has none."""
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def merge_votes(votes: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The view that all are prepared for. None unless all name the same one.

    Same and not least: who has prepared a later proposal need not have the earlier one.
    """
    return votes[0] if all(vote == votes[0] for vote in votes) else None


@dataclass(slots=True)
class _Place:
    """Where this node stands in one tree."""

    parent: str | None
    children: dict[str, int]  # Members only: who contributes, numbered in order of their names.
    below: tuple[str, ...]  # Children and observers: who listens.
    neighbors: tuple[str, ...]  # Parent and all below.


@dataclass(slots=True)
class _Bundle:
    missing: set[str]  # Member children whose part has not come.
    weights: dict[str, float] = field(default_factory=dict)  # Of those whose part has.
    sent: bool = False
    done: bool = False


@dataclass(slots=True)
class _Attempt:
    bundles: list[_Bundle]
    readies: dict[str, Ready] = field(default_factory=dict)
    ready_sent: bool = False
    commit: Commit | None = None
    results: int = 0


class StepSync:
    """The all-reduce of one node, step after step.

    `chunks` is the same on all nodes of one model, and so are `borders`, over which no bundle goes.
    `result_bytes`: of what a step sums, 0 if that is not known.
    """

    def __init__(self, me: str, chunks: int, result_bytes: int = 0, borders: tuple[int, ...] = ()) -> None:
        self.me, self.chunk_count, self.result_bytes, self.borders = me, chunks, result_bytes, borders
        self.view: View | None = None
        self.priors: tuple[Electorate, ...] = ()  # Views that others may still be in, older than ours.
        self.step = 0  # Steps completed; the number of the one under way.
        self.deal: Deal = ()
        self.last_commit: Commit | None = None  # Of step - 1.
        self.began_here = False  # As a joiner: without a result of step - 1.
        self.prepared: dict[ViewKey, View] = {}
        self.vote: tuple[int, int] | None = None
        self.tainted = False  # Own chunks changed after they had gone out.
        self.frozen = True  # Between a flush and its install, and before the first view.
        self.own_weight: dict[int, float] = {}  # Chunk: weight of our own part, once contributed.
        self.local: Contribution | None = None
        self.install: Install | None = None  # While some node still adopts the result of step - 1.
        self.early: list[Received] = []
        self.early_from: Counter[tuple[str, bool]] = Counter()  # Peer, with a payload or not.
        self.places: list[_Place] = []
        self.bundles: list[range] = []
        self.bundle_of: dict[int, int] = {}  # By chunk.
        self.tree_of: list[int] = []  # By bundle.
        self.attempt = _Attempt([])
        self.catching_up = False  # Behind by one step; its result is on the way.

    # --- entering views -----------------------------------------------------------------------------

    def enter(
        self, view: View, step: int, priors: tuple[Electorate, ...] = (), deal: Deal = ()
    ) -> list[Effect]:
        """Act in `view`, whose first step here is `step`."""
        self.view, self.step, self.priors, self.frozen = view, step, priors, False
        self.deal = deal or self.deal
        self.prepared = {key: each for key, each in self.prepared.items() if key > view.key}
        self.places = [_place(tree, self.me, view.member_set) for tree in view.trees]
        self.bundles = bundles(self.chunk_count, view.bundle, self.borders)
        self.bundle_of = {chunk: index for index, chunks in enumerate(self.bundles) for chunk in chunks}
        self.tree_of = chunk_trees(len(self.bundles), view.trees)
        self._restart()
        return [ViewEntered(view, step)]

    def begin(self, view: View, step: int) -> list[Effect]:
        """Act in the first view, in which others may act already."""
        return [*self.enter(view, step), *self._replay_early()]

    def observe(self, view: View, step: int) -> list[Effect]:
        """A joiner listens from `step` on; what came before the plan did is taken now."""
        self.install, self.catching_up = None, False  # What an earlier membership has left open.
        self.last_commit, self.began_here = None, True
        return [ResetAttempt(), *self.enter(view, step), *self._replay_early()]

    def freeze(self) -> list[Effect]:
        """A flush: the attempt under way is void. Own contributions are kept for the next."""
        self.frozen, self.tainted = True, False
        self._restart()
        return [ResetAttempt()]

    def start_installed(self, install: Install, view: View) -> list[Effect]:
        """INSTALL: go on in `view`, which it told; adopt, serve or pass on the result of the step before it."""
        behind = install.step - self.step
        if behind not in (0, 1):
            raise RemoteProtocolError(f"{self.me}: installed at step {install.step} while at {self.step}")
        self.prepared, self.vote = {}, None
        effects = self.enter(view, self.step, install.priors)
        effects.append(ResetAttempt(before=view.key))
        self.install = install if install.holder else None
        self.deal = install.deal
        self.catching_up = behind == 1
        if self.catching_up:  # Our own part stays: if the holder dies, the step is done over.
            self.attempt.commit = install.commit
            effects += self._complete_if_done()
        else:
            if install.holder == self.me:
                effects += self._serve_last_result()
            effects += self._resume()
        return effects + self._replay_early()

    def _serve_last_result(self) -> list[Effect]:
        assert self.view is not None and self.last_commit is not None
        step, weight = self.step - 1, self.last_commit.total.weight
        return [
            self._send_down(index, step, self.places[tree].neighbors, weight, None)
            for index, tree in enumerate(self.tree_of)
            if self.places[tree].neighbors
        ]

    def _restart(self) -> None:
        """A new attempt of the step under way."""
        members = [set(self.places[tree].children) for tree in self.tree_of]
        self.attempt = _Attempt([_Bundle(missing) for missing in members])

    def _resume(self) -> list[Effect]:
        """Put our own contributions into the new attempt."""
        effects = [effect for index in range(len(self.bundles)) for effect in self._forward_up(index)]
        return effects + self._forward_ready()

    # --- events ---------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """One event of this step: from the training thread or from a neighbour."""
        match event:
            case Received(_, message) if isinstance(message, STEP_MESSAGES):
                return self._received(event)
            case Contributed(chunks, weight):
                self.own_weight |= dict.fromkeys(chunks, weight)
                touched = dict.fromkeys(self.bundle_of[chunk] for chunk in chunks if chunk in self.bundle_of)
                return [effect for index in touched for effect in self._forward_up(index)]
            case LocalReady(contribution):
                if self.local is not None:
                    raise LocalProtocolError(f"{self.me}: ready twice for step {self.step}")
                self.local = contribution
                return self._forward_ready()
            case Retracted(weight, _):  # Nothing may go out until the flush: it would mix old and new.
                self.own_weight = dict.fromkeys(range(self.chunk_count), weight)
                # Frozen, or catching up: nothing of ours is in this attempt.
                self.tainted = not (self.frozen or self.catching_up)
                return [ResetAttempt()] if self.tainted else []
        raise LocalProtocolError(f"{self.me}: {type(event).__name__} is not for the all-reduce")

    def _received(self, event: Received) -> list[Effect]:
        message = event.message
        assert isinstance(message, STEP_MESSAGES)
        here = (self.view.key if self.view else (0, 0), self.step)
        there = (message.key, message.step)
        if self.install and isinstance(message, Down) and there == (here[0], self.step - 1):
            return self._pass_on_recovered(event.peer, message, event.payload)
        if there > here or (self.frozen and message.key > here[0]):
            return self._keep_for_later(event)
        if there != here or self.frozen:
            return []  # Of an attempt that is over: normal after a flush.
        match message:
            case Up():
                return self._on_up(event.peer, message, event.payload)
            case Down():
                return self._on_down(event.peer, message, event.payload)
            case Ready():
                self.attempt.readies[event.peer] = message
                return self._forward_ready()
            case Commit():
                return self._on_commit(event.peer, message)

    # --- bundles ----------------------------------------------------------------------------------------

    def _on_up(self, peer: str, up: Up, payload: Any) -> list[Effect]:
        index = self._index(up)
        bundle = self.attempt.bundles[index]
        if peer not in bundle.missing:
            return []  # Not a child, or a second copy.
        bundle.missing.discard(peer)
        bundle.weights[peer] = up.weight
        place = self.places[self.tree_of[index]].children[peer]
        effects: list[Effect] = [Accumulate(self.bundles[index], payload, place)] if up.weight else []
        return effects + self._forward_up(index)

    def _forward_up(self, index: int) -> list[Effect]:
        """If the sum of our subtree is whole: up with it, or it is the result."""
        if self.frozen or self.tainted or self.catching_up:
            return []
        bundle, chunks = self.attempt.bundles[index], self.bundles[index]
        if bundle.missing or bundle.sent or not all(chunk in self.own_weight for chunk in chunks):
            return []
        assert self.view is not None
        bundle.sent = True
        own = self.own_weight[chunks.start]
        below = sum((bundle.weights[child] for child in sorted(bundle.weights)), 0.0)
        weight, parent = below + own, self.places[self.tree_of[index]].parent
        if parent is not None:
            return [SendUp(self.view.key, self.step, chunks, parent, weight, own > 0)]
        finish: list[Effect] = [FinishChunks(self.step, chunks, weight, own > 0)] if weight else []
        return finish + self._result(index, weight, None, came_from=None)

    def _on_down(self, peer: str, down: Down, payload: Any) -> list[Effect]:
        index = self._index(down)
        if self.attempt.bundles[index].done:
            return []
        adopt: list[Effect] = [AdoptChunks(self.step, self.bundles[index], payload)] if down.weight else []
        return adopt + self._result(index, down.weight, payload, came_from=peer)

    def _result(self, index: int, weight: float, payload: Any, came_from: str | None) -> list[Effect]:
        self.attempt.bundles[index].done = True
        self.attempt.results += 1
        peers = tuple(p for p in self.places[self.tree_of[index]].neighbors if p != came_from)
        if not self.catching_up and came_from is None:
            peers = self.places[self.tree_of[index]].below
        effects: list[Effect] = [self._send_down(index, self.step, peers, weight, payload)] if peers else []
        return effects + self._complete_if_done()

    def _pass_on_recovered(self, peer: str, down: Down, payload: Any) -> list[Effect]:
        """A result that we have and a node beyond us lacks."""
        index = self._index(down)
        peers = tuple(p for p in self.places[self.tree_of[index]].neighbors if p != peer)
        return [self._send_down(index, down.step, peers, down.weight, payload)] if peers else []

    def _send_down(
        self, index: int, step: int, peers: tuple[str, ...], weight: float, payload: Any
    ) -> SendDown:
        assert self.view is not None
        return SendDown(self.view.key, step, self.bundles[index], peers, weight, payload)

    def _index(self, message: Up | Down) -> int:
        """Of the bundle that a message of this view brings."""
        first, count = message.chunk, message.count
        index = self.bundle_of.get(first)
        if index is None or self.bundles[index] != range(first, first + count):
            raise RemoteProtocolError(
                f"{self.me}: {count} chunks from {first} of {self.chunk_count} on are no bundle of this view"
            )
        return index

    # --- ready and commit -----------------------------------------------------------------------------------

    def _forward_ready(self) -> list[Effect]:
        """If our subtree is ready: tell the parent, or commit."""
        if self.frozen or self.tainted or self.catching_up or self.local is None or self.attempt.ready_sent:
            return []
        place, readies = self.places[0], self.attempt.readies
        if not place.children.keys() <= readies.keys():
            return []
        assert self.view is not None
        self.attempt.ready_sent = True
        below = [readies[child] for child in place.children]  # In one order, whoever came first.
        total = merge([self.local, *(ready.contribution for ready in below)])
        vote = merge_votes([self.vote, *(ready.vote for ready in below)])
        key, step = self.view.key, self.step
        if place.parent is not None:
            return [Transmit(place.parent, Ready(key=key, step=step, vote=vote, contribution=total))]
        switch = vote if vote and vote > key else None
        return self._on_commit(None, Commit(key=key, step=step, switch=switch, total=total))

    def _on_commit(self, peer: str | None, commit: Commit) -> list[Effect]:
        if self.attempt.commit is not None:
            return []
        self.attempt.commit = commit
        passed_on: list[Effect] = [Transmit(below, commit) for below in self.places[0].below if below != peer]
        return passed_on + self._complete_if_done()

    def _complete_if_done(self) -> list[Effect]:
        commit = self.attempt.commit
        if commit is None or self.attempt.results < len(self.bundles):
            return []
        assert self.view is not None
        if commit.switch and not self.catching_up and commit.switch not in self.prepared:
            if self.me in self.view.member_set:
                raise LocalProtocolError(f"{self.me}: never prepared view {commit.switch}, but voted for it")
            self.frozen = True
            return [Out("the cluster switched to a view that this joiner had not prepared")]
        following = self.view
        if commit.switch and not self.catching_up:
            following = self.prepared[commit.switch]
        return self._complete(commit, following)

    def _complete(self, commit: Commit, following: View) -> list[Effect]:
        assert self.view is not None
        before, settled = self.view, not self.catching_up
        self.step += 1
        self.last_commit, self.began_here = commit, False
        self.own_weight, self.local = {}, None
        if not self.catching_up:
            self.install = None
            ids, shares = following.member_ids, commit.total.shares
            self.deal = tuple(zip(ids, map(shares.get, ids, repeat(0)), strict=True))
        self.catching_up = False
        effects: list[Effect] = [StepCompleted(self.step - 1, commit, self.deal)]
        if commit.total.leaving:
            self.frozen = True
            return [*effects, Left("all have finished")]
        if following is not before:
            effects += self._switch(before, following)
        else:
            self.priors = () if settled else self.priors
            self._restart()
        return effects + self._replay_early()

    def _switch(self, before: View, following: View) -> list[Effect]:
        if self.me not in following.node_set:
            self.frozen, self.view, self.prepared = True, following, {}
            if self.me in before.member_set:
                return [Left("it asked to")]
            return [Out("the cluster dropped this node before it had joined")]
        prior = Electorate(key=before.key, members=before.voter_ids)
        return [*_void(before, following), *self.enter(following, self.step, (prior,), self.deal)]

    def _keep_for_later(self, event: Received) -> list[Effect]:
        """What is dropped never comes again, so whoever falls too far behind has to begin anew."""
        is_bulk = isinstance(event.message, Up | Down)
        most = EARLY_STEPS * 2 * self.chunk_count if is_bulk else self.early_commits
        self.early_from[event.peer, is_bulk] += 1
        self.early.append(event)
        if self.early_from[event.peer, is_bulk] <= most:
            return []
        self.early.clear()
        self.early_from.clear()
        return [FellBehind(event.peer)]

    @property
    def early_commits(self) -> int:
        """So many are kept."""
        least, most = EARLY_COMMITS
        return max(min(EARLY_RESULTS_BYTES // max(self.result_bytes, 1), most), least)

    def is_far_behind(self, state_bytes: int) -> bool:
        """Do more results wait for us, say the commits that have come, than a new copy of the state would be?"""
        later = {event.message.step for event in self.early if isinstance(event.message, Commit)}
        steps = 1 + len(later)
        return steps > EARLY_COMMITS[0] and steps * self.result_bytes > state_bytes

    def _replay_early(self) -> list[Effect]:
        early, self.early = self.early, []
        self.early_from.clear()
        effects: list[Effect] = []
        for event in early:
            # A bad one is dropped, as one that comes in time is; the effects of the others are not lost with it.
            with suppress(RemoteProtocolError):
                effects += self._received(event)
        return effects

    # --- for the vote, the flush and invariants

    def prepare(self, view: View) -> None:
        """All that `view` needs is open: vote for it from now on."""
        self.prepared[view.key] = view
        self.vote = max(view.key, self.vote or view.key)

    def depends_on(self, peer: str) -> bool:
        """Does the attempt under way need what only this peer can send, or does this peer need us?"""
        assert self.view is not None
        if self.frozen or (peer in self.view.observer_ids and peer not in self.view.member_set):
            return False
        return any(peer in place.neighbors for place in self.places)

    def lacks(self) -> tuple[Lack, ...]:
        """What has not come of the attempt under way: parts from children, and then results from parents."""
        of: Counter[tuple[str, bool]] = Counter()
        missing: Counter[tuple[str, bool]] = Counter()
        for chunks, bundle, tree in zip(self.bundles, self.attempt.bundles, self.tree_of, strict=True):
            place, count = self.places[tree], len(chunks)
            for child in place.children:
                of[child, True] += count
                missing[child, True] += count * (child in bundle.missing and not bundle.done)
            if place.parent is not None:
                of[place.parent, False] += count
                missing[place.parent, False] += count * (not bundle.done and not bundle.missing)
        return tuple(
            Lack(peer=peer, came=of[peer, up] - count, of=of[peer, up], up=up)
            for (peer, up), count in sorted(missing.items())
            if count
        )[:MAX_LACKS]

    def told_of(self, strike: Strike) -> None:
        """A member has ended over its samples. It is part of the step under way, which is done over without it."""
        if self.local is not None:
            strikes = merge_strikes([self.local.strikes, (strike,)])
            self.local = msgspec.structs.replace(self.local, strikes=strikes)

    def forget_prepared(self) -> None:
        """A new term: no more votes for what an older scheduler proposed.

        The views stay: a vote that was given may still be counted, and be followed by all.
        """
        self.vote = None

    def electorates(self) -> list[Electorate]:
        """All whose quorum a decision needs: of our view and of those that others may be in."""
        assert self.view is not None
        present = Electorate(key=self.view.key, members=self.view.voter_ids)
        return [present, *self.priors, *self.without_us()]

    def without_us(self) -> tuple[Electorate, ...]:
        """Views that the other of two voters may be in as soon as we have voted for them.

        A view that we are in waits for us; one without us does not. Who leaves and is a quorum of the present one
        by itself, as the senior of two is, must not go on while the other does.
        """
        if self.view is None or len(self.view.voter_ids) > 2:
            return ()
        views = [view for view in self.prepared.values() if self.me not in view.member_set]
        return tuple(Electorate(key=view.key, members=view.voter_ids) for view in views)

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert self.attempt.results <= len(self.bundles) <= self.chunk_count
        assert len(self.early) <= len(self.early_from) * max(
            self.early_commits, EARLY_STEPS * 2 * self.chunk_count
        )
        if self.view and not self.frozen and self.attempt.bundles:
            assert self.attempt.results == [bundle.done for bundle in self.attempt.bundles].count(True)
        if self.prepared:
            assert min(self.prepared) > (self.view.key if self.view else (0, 0))


def _void(before: View, following: View) -> list[Effect]:
    """Results that observers of before do not want any more: they have gone, or get a later state."""
    anew = {each.node for each in following.joining if each.sources}
    peers = [each for each in before.observer_ids if each in anew or each not in following.node_set]
    return [DropResults(tuple(peers), following.key)] if peers else []


def _place(tree: Tree, me: str, members: frozenset[str]) -> _Place:
    below, parent = tree.children.get(me, ()), tree.parent.get(me)
    around = below if parent is None else (parent, *below)
    children = {child: place for place, child in enumerate(sorted(members.intersection(below)))}
    return _Place(parent, children, below, around)
