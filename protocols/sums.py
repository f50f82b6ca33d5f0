"""What a step adds up: chunks up the trees as sums, and down them as results.

    up:   when its own part and those of all member children are in, a node sends the sum to its parent
    down: the root divides by the weight and passes the result on; who gets it keeps it and passes it on

Which attempt is under way, and when it is over, the vote decides (step_sync.py). It asks: may this node say that it
is ready, is all here; and it tells what a flush ends, and who serves the result of a step that only some completed.

Chunks are the same in every view. How many neighbouring ones travel as one message, a *bundle*, is the view's choice:
few and large messages are cheap, many small ones fill slow links better.

Where members keep only a part of the state (`parts`), a result goes down only to those who keep its chunk, through
those on the way. Each is told before its part of a step who keeps what. Chunks from the last border on are for
everybody.

Source: Chaos, Sec. IV-B.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Protocol

from .effects import Accumulate, AdoptChunks, Effect, FinishChunks, ResetAttempt, SendDown, SendUp
from .errors import RemoteProtocolError
from .messages import Down, Lack, Tree, Up, View

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


@dataclass(slots=True)
class _Place:
    """Where this node stands in one tree."""

    parent: str | None
    children: dict[str, int]  # Members only: who contributes, numbered in order of their names.
    below: tuple[str, ...]  # Children and observers: who listens.
    neighbors: tuple[str, ...]  # Parent and all below.
    reached: dict[str, frozenset[str]]  # By each of `below`: it, and all whom results reach through it.


@dataclass(slots=True)
class _Bundle:
    missing: set[str]  # Member children whose part has not come.
    weights: dict[str, float] = field(default_factory=dict)  # Of those whose part has.
    sent: bool = False
    done: bool = False


class Kept:
    """Who keeps the results of a step, as node `me` knows. Those of chunks from `common` on are for everybody.

    `by_chunk`: the keepers of each chunk before that; {}: not told.
    """

    def __init__(self, me: str, common: int) -> None:
        self.me, self.common = me, common
        self.by_chunk: Mapping[int, frozenset[str]] = {}

    @property
    def is_told(self) -> bool:
        """Has this node been told who keeps what?"""
        return bool(self.by_chunk)

    @property
    def any_here(self) -> bool:
        """Does this node keep something that is not for everybody?"""
        return any(self.me in keepers for keepers in self.by_chunk.values())

    def by_all(self, chunk: int) -> bool:
        """Is the chunk's result for everybody?"""
        return chunk >= self.common

    def here(self, chunk: int) -> bool:
        """Does this node keep the chunk's result?"""
        return self.by_all(chunk) or self.me in self.by_chunk.get(chunk, ())

    def among(self, nodes: frozenset[str], chunk: int) -> bool:
        """Does any of `nodes` keep the chunk's result?"""
        return self.by_all(chunk) or not nodes.isdisjoint(self.by_chunk.get(chunk, ()))


class Sums:
    """The sums of one node, attempt after attempt.

    `chunks` is the same on all nodes of one model, and so are `borders`, over which no bundle goes, and `parts`: see
    the module.
    """

    def __init__(self, me: str, chunks: int, borders: tuple[int, ...] = (), parts: bool = False) -> None:
        self.me, self.chunk_count, self.borders, self.parts = me, chunks, borders, parts
        # Who keeps the results in the attempt under way.
        self.kept = Kept(me, borders[-1] if parts and borders else 0)
        self.has_all = False  # After a flush: all that this node keeps of the attempt that it ended.
        self.view: View | None = None
        self.step = 0
        self.own_weight: dict[int, float] = {}  # Chunk: weight of our own part, once contributed.
        self.tainted = False  # Own chunks changed after they had gone out.
        self.catching_up = 0  # Behind by so many steps; their results are on the way.
        self.recovering = 0  # Results of so many steps, the last ones, some node still adopts.
        self.places: list[_Place] = []
        self.bundles: list[range] = []
        self.bundle_of: dict[int, int] = {}  # By chunk.
        self.tree_of: list[int] = []  # By bundle.
        self.progress: list[_Bundle] = []
        self.wanted: list[bool] = []  # By bundle: does this node keep its result?
        self.results = 0  # Of these, how many are here.

    # --- asked and told by the vote -----------------------------------------------------------------------

    @property
    def may_go_out(self) -> bool:
        """May our own parts, and our Ready, be sent?"""
        return not (self.tainted or self.catching_up)

    @property
    def complete(self) -> bool:
        """Have all results come that this node keeps?"""
        return self.results == self.wanted.count(True)

    @property
    def is_lacking(self) -> bool:
        """Does this node lack a result that it keeps, so that it may not say yet that it is ready?"""
        return self.kept.is_told and not self.complete

    def keep(self, keepers: Mapping[int, frozenset[str]]) -> None:
        """Set who keeps the result of each chunk in the attempt that begins; {}: not told any more."""
        self.kept.by_chunk = keepers
        self.wanted = [self.kept.here(chunks.start) for chunks in self.bundles]

    def enter(self, view: View, step: int) -> None:
        """Add up along the trees of `view`."""
        self.view = view
        self.places = [_place(tree, self.me, view.member_set, self.parts) for tree in view.trees]
        self.bundles = bundles(self.chunk_count, view.bundle, self.borders)
        self.bundle_of = {chunk: index for index, chunks in enumerate(self.bundles) for chunk in chunks}
        self.tree_of = chunk_trees(len(self.bundles), view.trees)
        self.restart(step)

    def restart(self, step: int) -> None:
        """A new attempt. What we have contributed to its step is kept."""
        self.step, self.results = step, 0
        self.progress = [_Bundle(set(self.places[tree].children)) for tree in self.tree_of]
        self.keep(self.kept.by_chunk)

    def observe(self) -> None:
        """Forget what an earlier membership has left open."""
        self.recovering = self.catching_up = 0
        self.forget_own()

    def freeze(self) -> None:
        """The attempt is void, unless it turns out that it was committed (`go_on`)."""
        self.has_all |= self.kept.is_told and self.complete
        self.tainted = False
        self.restart(self.step)

    def forget_own(self) -> None:
        """What we have contributed to this step is void."""
        self.own_weight = {}

    def go_on(self, behind: int, recovering: int) -> None:
        """After a flush, at which this node is `behind` by so many steps, and others by up to `recovering`.

        Who is behind keeps its own part, and sends it if the step is done over.

        Where members keep parts, one that is behind has what it keeps, as it has said that it is ready. One that only
        listened has nothing, and gets the chunks that are for everybody.
        """
        self.catching_up, self.recovering = behind, recovering
        if behind and self.has_all:
            for index, bundle in enumerate(self.progress):
                bundle.done = self.wanted[index]
            self.results = self.wanted.count(True)
        else:
            self.keep({})
        self.has_all = False

    def completed(self) -> None:
        """The vote has gone on to the next step."""
        self.own_weight, self.has_all = {}, False
        self.keep({})
        if not self.catching_up:
            self.recovering = 0
        self.catching_up = max(self.catching_up - 1, 0)

    def resume(self) -> list[Effect]:
        """Put our own contributions into the new attempt."""
        return self.send_up(range(len(self.bundles)))

    def serve_result(self, step: int, weight: float) -> list[Effect]:
        """Send a step's results to all around, who pass them on, as some lack them."""
        return [
            self._send_down(index, step, self.places[tree].neighbors, weight, None)
            for index, tree in enumerate(self.tree_of)
            if self.places[tree].neighbors and self.kept.by_all(self.bundles[index].start)
        ]

    # --- parts and results --------------------------------------------------------------------------------

    def contributed(self, chunks: Sequence[int], weight: float) -> Iterable[int]:
        """Our own part of these chunks is here. Returns: the bundles that they belong to."""
        self.own_weight |= dict.fromkeys(chunks, weight)
        return dict.fromkeys(self.bundle_of[chunk] for chunk in chunks if chunk in self.bundle_of)

    def retracted(self, weight: float, frozen: bool) -> list[Effect]:
        """Our own part has changed: until the flush nothing may go out, as that would mix old and new."""
        self.own_weight = dict.fromkeys(range(self.chunk_count), weight)
        # Frozen, or catching up: nothing of ours is in this attempt.
        self.tainted = not (frozen or self.catching_up)
        return [ResetAttempt()] if self.tainted else []

    def send_up(self, indices: Iterable[int]) -> list[Effect]:
        """Send those of these bundles up that are whole."""
        return [effect for index in indices for effect in self._forward_up(index)]

    def on_up(self, peer: str, up: Up, payload: Any) -> list[Effect]:
        index = self._index(up)
        bundle = self.progress[index]
        if peer not in bundle.missing:
            return []  # Not a child, or a second copy.
        bundle.missing.discard(peer)
        bundle.weights[peer] = up.weight
        place = self.places[self.tree_of[index]].children[peer]
        effects: list[Effect] = [Accumulate(self.bundles[index], payload, place)] if up.weight else []
        return effects + self._forward_up(index)

    def _forward_up(self, index: int) -> list[Effect]:
        """If the sum of our subtree is whole, send it up; at the root, it is the result."""
        if not self.may_go_out:
            return []
        bundle, chunks = self.progress[index], self.bundles[index]
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

    def on_down(self, peer: str, down: Down, payload: Any) -> list[Effect]:
        index = self._index(down)
        if self.progress[index].done:
            return []
        keeps = down.weight and self.wanted[index]
        adopt: list[Effect] = [AdoptChunks(self.step, self.bundles[index], payload)] if keeps else []
        return adopt + self._result(index, down.weight, payload, came_from=peer)

    def _result(self, index: int, weight: float, payload: Any, came_from: str | None) -> list[Effect]:
        self.progress[index].done = True
        self.results += self.wanted[index]
        place = self.places[self.tree_of[index]]
        peers = tuple(p for p in place.neighbors if p != came_from)
        if not self.catching_up and came_from is None:
            peers = place.below
        first = self.bundles[index].start
        if not self.kept.by_all(first):
            peers = tuple(p for p in peers if p in place.reached and self.kept.among(place.reached[p], first))
        return [self._send_down(index, self.step, peers, weight, payload)] if peers else []

    def pass_on_recovered(self, peer: str, down: Down, payload: Any) -> list[Effect]:
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
        """The index of the bundle that a message of this view brings."""
        first, count = message.chunk, message.count
        index = self.bundle_of.get(first)
        if index is None or self.bundles[index] != range(first, first + count):
            raise RemoteProtocolError(
                f"{self.me}: {count} chunks from {first} of {self.chunk_count} on are no bundle of this view"
            )
        return index

    def depends_on(self, peer: str) -> bool:
        """Does the attempt under way need what only this peer can send, or does this peer need us?"""
        return any(peer in place.neighbors for place in self.places)

    def _is_due(self, index: int, place: _Place) -> bool:
        """Is the bundle's result to come here, to be kept or passed on?"""
        first = self.bundles[index].start
        return self.wanted[index] or any(self.kept.among(nodes, first) for nodes in place.reached.values())

    def lacks(self) -> tuple[Lack, ...]:
        """What has not come of the attempt under way: parts from children, and then results from parents."""
        of: Counter[tuple[str, bool]] = Counter()
        missing: Counter[tuple[str, bool]] = Counter()
        each = zip(self.bundles, self.progress, self.tree_of, strict=True)
        for index, (chunks, bundle, tree) in enumerate(each):
            place, count = self.places[tree], len(chunks)
            for child in place.children:
                of[child, True] += count
                missing[child, True] += count * (child in bundle.missing and not bundle.done)
            if place.parent is not None:
                of[place.parent, False] += count
                due = not bundle.done and not bundle.missing and self._is_due(index, place)
                missing[place.parent, False] += count * due
        return tuple(
            Lack(peer=peer, came=of[peer, up] - count, of=of[peer, up], up=up)
            for (peer, up), count in sorted(missing.items())
            if count
        )[:MAX_LACKS]

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert self.results <= len(self.bundles) <= self.chunk_count
        kept = [bundle.done for bundle, wanted in zip(self.progress, self.wanted, strict=True) if wanted]
        assert self.results == kept.count(True)


def _place(tree: Tree, me: str, members: frozenset[str], parts: bool) -> _Place:
    below, parent = tree.children.get(me, ()), tree.parent.get(me)
    around = below if parent is None else (parent, *below)
    children = {child: place for place, child in enumerate(sorted(members.intersection(below)))}
    return _Place(
        parent, children, below, around, {peer: tree.reached(peer) for peer in below} if parts else {}
    )
