"""Performs the all-reduce's effects on tensors. It decides nothing: protocols/sums.py does.

A frame that has arrived is memory of our own. So other parts are added to a child's in place, and the sum is sent on
without a copy; a result stays in the frame that brought it until neither the next hop, nor the training thread, nor a
node that lacks it after a crash needs it. Sums are numpy's: on one thread, torch's are slower by a fifth, and on more
they would take the cores that train. Chunks may be compressed on the wire (compression.py): each part is decoded
when it comes, and each sum is encoded again.

What is added and sent at once is a bundle: chunks that are neighbours in a lane (protocols/sums.py). The next view
may bundle chunks otherwise, so results and encoding losses are kept by chunk.
"""

from __future__ import annotations

import bisect
import functools
import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import zmq

from ...protocols.codec import encode
from ...protocols.effects import Accumulate, AdoptChunks, FinishChunks, ResetAttempt, SendDown, SendUp
from ...protocols.errors import RemoteProtocolError
from ...protocols.messages import Down, Up
from ..transport.outgoing import Rank
from ..transport.shared_memory import Payload
from .compression import Array, Buffer, Encoding

BLOCK_ELEMENTS = 32 << 10  # 128 KiB of float32: several of them fit into a core's cache.
MAX_PARTS = 4  # Of more parts per bundle, those that are neighbours are added before all have come.
FIRST_LEAF = 1 << 15  # In the tree of additions; it has as many leaves, more than a cluster has nodes.

AllReduceEffect = Accumulate | AdoptChunks | FinishChunks | ResetAttempt | SendDown | SendUp
SendBulk = Callable[..., bool]
Results = list[torch.Tensor] | None | Callable[[], list[torch.Tensor]]


class ChunkStore(Protocol):
    """Where contributions come from: Gradients, LayerSums, or a bare vector in a benchmark."""

    @property
    def lanes(self) -> Sequence[Any]:
        """Each with an `op`, "mean" or "max" (see `Lane`)."""
        ...

    @property
    def chunks(self) -> Sequence[Any]:
        """Each with the number of its `lane`, and `is_gradient` (see `Chunk`)."""
        ...

    @property
    def stays(self) -> bool:
        """May a result that is this node's contribution alone be left unread? Reading it may cost a copy."""
        ...

    def contribution(self, chunks: range) -> torch.Tensor:
        """This node's part of neighbouring chunks of one lane: 1-D, on the CPU, times its weight under "mean"."""
        ...

    def encoding(self, chunk: int) -> Encoding:
        """How values of a chunk travel."""
        ...


class Result(NamedTuple):
    """The result of a bundle: as bytes of the wire, and decoded; the same memory if the encoding is exact."""

    chunks: range
    data: Buffer
    values: Array


class InPlace(NamedTuple):
    """A result that is this node's contribution over `weight`, which is computed only when somebody asks for it."""

    chunks: range
    weight: float


def additions(parts: dict[int, Array], whole: bool) -> list[tuple[Array, Array]]:
    """The additions (to, what) that are due, in order; in `parts`, each sum takes the place of its two parts.

    Additions follow a binary tree over all children, in which node n is the sum of nodes 2n and 2n + 1. So a sum is
    the same to the bit whichever child comes first, and two neighbours can be added before the others come: of n
    children, at most half are kept until the last comes, and log2(n) if just one is late.
    Args:
        parts: By node of the tree.
        whole: No more parts come, so one without a neighbour moves up alone.
    """
    pairs, waiting = [], sorted(parts)
    while len(waiting) > 1:
        place = waiting.pop()
        if waiting[-1] == place ^ 1:
            other, place = parts.pop(place), waiting.pop()
            pairs.append((parts[place], other))
        elif not whole:
            continue
        parts[place >> 1] = parts.pop(place)
        bisect.insort(waiting, place >> 1)
    return pairs


class AllReduce:
    """Adds, keeps and sends chunks.

    Args:
        send_bulk: The transport's: (peer, header, payload, rank=..., turn=..., tag=...).
        guarded: Drop gradients of children that are not finite (docs/guard.md).
        counters: Where dropped parts are counted.
    """

    def __init__(
        self,
        store: ChunkStore,
        send_bulk: SendBulk,
        guarded: bool = False,
        counters: Counter[str] | None = None,
    ) -> None:
        self.send_bulk, self.store = send_bulk, store
        self.lanes = [chunk.lane for chunk in store.chunks]
        self.sizes = [len(store.contribution(range(chunk, chunk + 1))) for chunk in range(len(store.chunks))]
        self.encodings = [store.encoding(chunk) for chunk in range(len(store.chunks))]
        # By chunk: what our encodings have lost up to the last step, and what they lose in this one.
        self.lost: dict[int, Array] = {}
        self.losing: dict[int, Array] = {}
        # By bundle: what children have sent, by node of the tree of `additions`.
        self.parts: dict[range, dict[int, Array]] = {}
        self.guarded = guarded
        self.counters: Counter[str] = Counter() if counters is None else counters
        # By step and chunk: the mean (or maximum) of its bundle.
        self.results: dict[int, dict[int, Result | InPlace]] = {}
        self._computing = threading.Lock()  # One bundle's result, which the training thread may do, too.
        self.done = range(0)  # The last steps that are complete, and whose results are kept.

    def check(self, message: Up | Down, payload: zmq.Frame | Payload | None) -> None:
        """Check a message before the core acts on it.

        Raises: RemoteProtocolError if there are no such chunks of one lane, or the payload is not of their size.
        """
        chunks = _chunks_of(message)
        if chunks.stop > len(self.lanes) or self.lanes[chunks[0]] != self.lanes[chunks[-1]]:
            raise RemoteProtocolError(
                f"{len(chunks)} chunks from {chunks.start} on (expected some of one kind of {len(self.lanes)})"
            )
        expected = self._wire_bytes(chunks) if message.weight else 0
        got = 0 if payload is None else len(payload.buffer)
        if got != expected:
            raise RemoteProtocolError(
                f"{len(chunks)} chunks from {chunks.start} on came with {got} bytes (expected {expected})"
            )

    def perform(self, effect: AllReduceEffect) -> None:
        """Do one effect.

        Without numpy's warnings, which a script may turn into errors: what is not finite is the guard's business.
        """
        with np.errstate(all="ignore"):
            self._perform(effect)

    def _perform(self, effect: AllReduceEffect) -> None:
        match effect:
            case Accumulate(chunks, payload, place):
                self._accumulate(chunks, payload, place)
            case SendUp(key, step, chunks, parent, weight, own):
                payload = self._encoded(chunks, self._sum(chunks, own), 1.0) if weight else None
                if not weight:
                    self._forget_losing(chunks)
                up = Up(key=key, step=step, chunk=chunks.start, count=len(chunks), weight=weight)
                self._send(parent, up, payload)
            case FinishChunks(step, chunks, weight, own):
                self._finish(step, chunks, weight, own)
            case AdoptChunks(step, chunks, payload):
                self._keep(step, chunks, payload.buffer)
            case SendDown():
                self._send_down(effect)
            case ResetAttempt(but_sums=but_sums):
                # `losing` stays: if another node has this attempt's result, all will apply that one.
                self.parts.clear()
                if not but_sums:
                    self.results = {step: each for step, each in self.results.items() if step in self.done}

    def completed(self, step: int, kept: int = 1) -> Results:
        """End a step: from now on the results of the last `kept` steps are kept, this one among them.

        Returns: its results by chunk, each 1-D; [] if nobody had samples; None if they are this node's own
            contribution, left in place, and nobody else will ask for them. A function if they are to be computed from
            what was left in place, for the thread that trains to call before its next step: with large models that
            takes seconds, in which no heartbeat would leave here.
        """
        self.parts.clear()
        results = self.results.setdefault(step, {})
        in_place = [isinstance(each, InPlace) for each in results.values()]
        if self.losing and not self._is_refused(step):
            self.lost |= self.losing
        self.losing.clear()
        self.done = range(step + 1 - kept, step + 1)
        self.results = {each: found for each, found in self.results.items() if each in self.done}
        if kept == 1 and in_place and all(in_place):
            return None
        by_chunk = functools.partial(self._by_chunk, results)
        return by_chunk if any(in_place) else by_chunk()

    def results_of(self, step: int) -> list[torch.Tensor]:
        """A step's results by chunk, each 1-D: empty for a chunk that this node does not keep; [] if it has none."""
        return self._by_chunk(self.results.get(step, {}))

    def _by_chunk(self, left: dict[int, Result | InPlace]) -> list[torch.Tensor]:
        found = [torch.empty(0, device="cpu")] * len(self.lanes)
        results = self._whole(left)
        for result in _distinct(results):
            parts = torch.from_numpy(result.values).split(self._sizes(result.chunks))
            found[result.chunks.start : result.chunks.stop] = parts
        return found if results else []

    def _whole(self, results: dict[int, Result | InPlace], chunks: range | None = None) -> dict[int, Result]:
        """A step's results, after computing those of `chunks` (default: all) that were left in place."""
        for chunk in [*results] if chunks is None else chunks:
            with self._computing:
                result = results.get(chunk)
                if isinstance(result, InPlace):
                    results.update(dict.fromkeys(result.chunks, self._mean_of_own(result)))
        return cast(dict[int, Result], results)

    def _mean_of_own(self, left: InPlace) -> Result:
        own = self._own(left.chunks)
        with np.errstate(all="ignore"):
            mean = own * own.dtype.type(self._scale(left.chunks, left.weight))
        data = self._encoded(left.chunks, mean, left.weight)
        return Result(left.chunks, data, self._decode(left.chunks, data))

    def _is_refused(self, step: int) -> bool:
        """Is a gradient not finite in these results, so that all members refuse them (docs/guard.md)?"""
        judged = [each for each in _distinct(self._whole(self.results[step])) if self._is_judged(each.chunks)]
        return not all(_is_finite(each.values) for each in judged)

    def _is_judged(self, chunks: range) -> bool:
        """Does the guard look at them? Not at buffers, which may hold infinity on purpose, as causal masks do."""
        return self.guarded and self.store.chunks[chunks.start].is_gradient

    # --- what chunks look like ---

    def _own(self, chunks: range) -> Array:
        return cast(Array, self.store.contribution(chunks).numpy())

    def _combine(self, chunks: range) -> np.ufunc:
        return np.maximum if self.store.lanes[self.lanes[chunks.start]].op == "max" else np.add

    def _sizes(self, chunks: range) -> list[int]:
        """Elements of each chunk."""
        return self.sizes[chunks.start : chunks.stop]

    def _wire_bytes(self, chunks: range) -> int:
        return sum(map(self.encodings[chunks.start].size, self._sizes(chunks)))

    def _decode(self, chunks: range, data: Buffer) -> Array:
        encoding = self.encodings[chunks.start]
        if encoding.elementwise:
            return encoding.decode(data)
        return np.concatenate([encoding.decode(part) for part in self._cut(chunks, data)])

    def _cut(self, chunks: range, data: Buffer) -> list[Buffer]:
        """The bytes of each chunk in those of a bundle, for an encoding that is not elementwise."""
        ends = itertools.accumulate(map(self.encodings[chunks.start].size, self._sizes(chunks)), initial=0)
        return [memoryview(data)[start:stop] for start, stop in itertools.pairwise(ends)]

    def _encoded(self, chunks: range, values: Array, weight: float) -> Buffer:
        encoding = self.encodings[chunks.start]
        if encoding.elementwise:
            return encoding.encode(values)
        parts = np.split(values, list(itertools.accumulate(self._sizes(chunks)))[:-1])
        each = zip(chunks, parts, strict=True)
        return b"".join(self._encoded_with_loss(chunk, part, weight) for chunk, part in each)

    def _encoded_with_loss(self, chunk: int, values: Array, weight: float) -> Buffer:
        """One chunk as bytes, with what earlier encodings lost added (error feedback).

        Losses are kept in the unit of contributions: `weight` is 1 for a sum, the total for a mean.
        """
        encoding = self.encodings[chunk]
        # A chunk without any gradient, as of an optimizer whose turn it is not, is applied by nobody: keep the loss.
        if not values.any():
            self.losing.pop(chunk, None)
            return encoding.encode(values)
        if chunk in self.lost:
            values = values + self.lost[chunk] / np.float32(weight)
        data = encoding.encode(values)
        loss = (values - encoding.decode(data)) * np.float32(weight)
        if not _is_finite(loss):  # Or no later step would be finite.
            loss[~np.isfinite(loss)] = 0
        self.losing[chunk] = loss
        return data

    def _forget_losing(self, chunks: range) -> None:
        for chunk in chunks:
            self.losing.pop(chunk, None)

    # --- sums ---

    def _accumulate(self, chunks: range, payload: zmq.Frame | Payload, place: int) -> None:
        """Keep a child's part. Adding is cheapest once all parts are there; early additions only bound memory."""
        parts, part = self.parts.setdefault(chunks, {}), self._decode(chunks, payload.buffer)
        if self._is_judged(chunks) and not _is_finite(part):
            part[:] = 0  # Its weight still counts: all chunks of a step must have the same total.
            self.counters["guard_dropped_parts"] += 1
        parts[FIRST_LEAF + place] = part
        if len(parts) > MAX_PARTS:
            combine = self._combine(chunks)
            for into, other in additions(parts, whole=False):
                combine(into, other, out=into)

    def _sum(self, chunks: range, own: bool) -> Array:
        """What children sent plus, if `own`, our contribution; nobody writes to that memory before the next step."""
        parts = self.parts.pop(chunks, None)
        return self._add_up(chunks, parts, own) if parts else self._own(chunks)

    def _finish(self, step: int, chunks: range, weight: float, own: bool) -> None:
        parts = self.parts.pop(chunks, None)
        if parts:
            total = self._add_up(chunks, parts, own, self._scale(chunks, weight))
            self._keep(step, chunks, self._encoded(chunks, total, weight))
            return
        left = InPlace(chunks, weight)
        result = left if self.store.stays else self._mean_of_own(left)
        self.results.setdefault(step, {}).update(dict.fromkeys(chunks, result))

    def _scale(self, chunks: range, weight: float) -> float:
        """What turns the sum of all into the result: 1 for a maximum."""
        return 1.0 if self._combine(chunks) is np.maximum else 1 / weight

    def _add_up(self, chunks: range, parts: dict[int, Array], own: bool, scale: float = 1.0) -> Array:
        """scale * sum (or maximum) of `parts` and, if `own`, our contribution; in the memory of one of the parts.

        All is done to a block before the next, as it then is in the cache.
        """
        combine, pairs = self._combine(chunks), additions(parts, whole=True)
        (total,) = parts.values()
        if own:
            pairs.append((total, self._own(chunks)))
        factor = total.dtype.type(scale)
        for start in range(0, total.size, BLOCK_ELEMENTS):
            block = slice(start, start + BLOCK_ELEMENTS)
            for into, other in pairs:
                combine(into[block], other[block], out=into[block])
            if scale != 1.0:
                np.multiply(total[block], factor, out=total[block])
        return total

    # --- results ---

    def _keep(self, step: int, chunks: range, data: Buffer) -> None:
        result = Result(chunks, data, self._decode(chunks, data))
        self.results.setdefault(step, {}).update(dict.fromkeys(chunks, result))

    def _kept(self, step: int, chunks: range) -> Buffer:
        """The result of these chunks as bytes of the wire; it may have come in other bundles."""
        results = self._whole(self.results.get(step, {}), chunks)
        if results[chunks.start].chunks == chunks:
            return results[chunks.start].data
        return b"".join(
            part
            for result in _bundles(results, chunks)
            for chunk, part in zip(result.chunks, self._cut(result.chunks, result.data), strict=True)
            if chunk in chunks
        )

    def _send_down(self, effect: SendDown) -> None:
        chunks, payload, weight = effect.chunks, effect.payload, effect.weight
        if payload is None and weight:
            if chunks.start in self.results[effect.step]:
                payload = self._kept(effect.step, chunks)
            else:  # Other chunks gave the step its weight; these have no result, as it was found void in between.
                weight = 0.0
        message = Down(key=effect.key, step=effect.step, chunk=chunks.start, count=len(chunks), weight=weight)
        for peer in effect.peers:
            self._send(peer, message, payload if weight else None)

    def _send(self, peer: str, message: Up | Down, payload: Any) -> None:
        """Earlier chunks overtake later ones, or results would wait behind parts that nobody needs yet."""
        turn = message.step, message.chunk
        self.send_bulk(peer, encode(message), payload, rank=Rank.CHUNK, turn=turn, tag=message)


def _bundles(results: dict[int, Result], chunks: range) -> Iterator[Result]:
    """The results that have some of the chunks, each once, in order."""
    at = chunks.start
    while at < chunks.stop:
        yield results[at]
        at = results[at].chunks.stop


def _distinct(results: dict[int, Result]) -> Iterator[Result]:
    """All results, each once however many chunks it is of."""
    return (result for chunk, result in results.items() if chunk == result.chunks.start)


def _chunks_of(message: Up | Down) -> range:
    return range(message.chunk, message.chunk + message.count)


def _is_finite(part: Array) -> bool:
    """In one fast pass; a slow one follows only if the sum is not finite, as that of finite numbers may overflow."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(part.sum()) or np.isfinite(part).all())
