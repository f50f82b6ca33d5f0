"""What the all-reduce's effects do to tensors. Decides nothing: step_sync.py does.

Frames that arrive are memory of our own. So a child's part is added to in place and sent on without a copy,
and a result stays in the frame that brought it until nobody needs it: the next hop, the training thread,
and whoever lacks it after a crash. Sums are numpy's: on one thread, torch's are slower by a fifth, and with
more they would take the cores that train. What goes over the wire may be shorter (compression.py): it is decoded
when it comes, and sums are encoded again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, cast

import numpy as np
import torch
import zmq

from ..protocols.codec import encode
from ..protocols.effects import (
    Accumulate,
    AdoptChunk,
    FinishChunk,
    ResetAttempt,
    SendDown,
    SendUp,
)
from ..protocols.errors import RemoteProtocolError
from ..protocols.messages import Down, Up
from .compression import Array, Buffer, Encoding
from .outgoing import Rank

BLOCK_ELEMENTS = 32 << 10  # 128 KiB of float32: several of them fit into a core's cache.
MAX_PARTS = 4  # Of children, kept unadded per chunk.

AllReduceEffect = Accumulate | AdoptChunk | FinishChunk | ResetAttempt | SendDown | SendUp
SendBulk = Callable[..., bool]


class ChunkStore(Protocol):
    """Where contributions come from: Gradients, or a bare vector in a benchmark."""

    @property
    def lanes(self) -> Sequence[Any]: ...

    @property
    def chunks(self) -> Sequence[Any]: ...

    def contribution(self, chunk: int) -> torch.Tensor: ...

    def encoding(self, chunk: int) -> Encoding: ...


class Result(NamedTuple):
    """Of a chunk: as it travels, and what it says; the same memory if that is exact."""

    data: Buffer
    values: Array


class AllReduce:
    """Adds, keeps and sends chunks.

    Args:
        send_bulk: The transport's: (peer, header, payload, rank=..., turn=..., tag=...).
        guarded: Look at what children send (docs/guard.md).
        counters: Where parts that are dropped are counted.
    """

    def __init__(
        self,
        store: ChunkStore,
        send_bulk: SendBulk,
        guarded: bool = False,
        counters: Counter[str] | None = None,
    ) -> None:
        self.send_bulk = send_bulk
        self.own = [cast(Array, store.contribution(chunk).numpy()) for chunk in range(len(store.chunks))]
        self.combine = [
            np.maximum if store.lanes[chunk.lane].op == "max" else np.add for chunk in store.chunks
        ]
        self.encodings = [store.encoding(chunk) for chunk in range(len(store.chunks))]
        # By chunk: what our encodings have lost up to the last step, and what they lose in this one.
        self.lost: dict[int, Array] = {}
        self.losing: dict[int, Array] = {}
        self.parts: dict[int, list[Array]] = {}  # Chunk: what children have sent.
        self.guarded = guarded
        self.counters: Counter[str] = Counter() if counters is None else counters
        self.results: dict[int, dict[int, Result]] = {}  # Step: chunk: mean (or maximum).

    def check(self, message: Up | Down, payload: zmq.Frame | None) -> None:
        """Before the core counts on it. Raises: RemoteProtocolError for a payload that is not that chunk's."""
        if message.chunk < len(self.own):
            elements = self.own[message.chunk].size
            expected = self.encodings[message.chunk].size(elements) if message.weight else 0
            got = 0 if payload is None else len(payload.buffer)
            if got != expected:
                raise RemoteProtocolError(
                    f"chunk {message.chunk} came with {got} bytes (expected {expected})"
                )

    def perform(self, effect: AllReduceEffect) -> None:
        """Do one effect."""
        match effect:
            case Accumulate(chunk, payload):
                self._accumulate(chunk, payload)
            case SendUp(key, step, chunk, parent, weight, own):
                payload = self._encoded(chunk, self._sum(chunk, own), 1.0) if weight else None
                if not weight:
                    self.losing.pop(chunk, None)
                self._send(parent, Up(key=key, step=step, chunk=chunk, weight=weight), payload)
            case FinishChunk(step, chunk, weight, own):
                self._finish(step, chunk, weight, own)
            case AdoptChunk(step, chunk, payload):
                self._keep(step, chunk, payload.buffer)
            case SendDown():
                self._send_down(effect)
            case ResetAttempt():
                self.parts.clear()  # But not what was lost: somebody may have the result of this attempt.

    def completed(self, step: int) -> list[torch.Tensor]:
        """The results of a step, by chunk; [] if nobody had samples. Those of earlier ones are let go."""
        self.parts.clear()
        results = self.results.get(step, {})
        if self.losing and not (self.guarded and self._is_refused(results)):
            self.lost |= self.losing
        self.losing.clear()
        self.results = {step: results}
        return [torch.from_numpy(results[chunk].values) for chunk in sorted(results)]

    def _is_refused(self, results: dict[int, Result]) -> bool:
        """Does nobody apply these (docs/guard.md)?"""
        return not all(_is_finite(result.values) for result in results.values())

    def _accumulate(self, chunk: int, payload: zmq.Frame) -> None:
        """Keep a child's part; adding is cheapest when all parts are there, and memory is bounded."""
        parts, part = self.parts.setdefault(chunk, []), self.encodings[chunk].decode(payload.buffer)
        if self.guarded and not _is_finite(part):
            part[:] = 0  # With its weight: all chunks of a step keep one total, whoever dropped what.
            self.counters["guard_dropped_parts"] += 1
        parts.append(part)
        if len(parts) > MAX_PARTS:
            self._add_up(chunk, parts, parts[0])
            del parts[1:]

    def _sum(self, chunk: int, own: bool) -> Array:
        """What came in plus, if `own`, our contribution; in memory that the receiver may keep."""
        parts = self.parts.pop(chunk, [])
        if not parts:
            return self.own[chunk]
        total = parts[0]
        self._add_up(chunk, [*parts, self.own[chunk]] if own else parts, total)
        return total

    def _finish(self, step: int, chunk: int, weight: float, own: bool) -> None:
        parts = self.parts.pop(chunk, [])
        total = parts[0] if parts else np.empty_like(self.own[chunk])
        if own:
            parts.append(self.own[chunk])
        self._add_up(chunk, parts, total, 1.0 if self.combine[chunk] is np.maximum else 1 / weight)
        self._keep(step, chunk, self._encoded(chunk, total, weight))

    def _encoded(self, chunk: int, values: Array, weight: float) -> Buffer:
        """What goes over the wire. What it loses is kept in the unit of contributions: `weight` times the values."""
        encoding = self.encodings[chunk]
        # A chunk without any gradient, as of the optimizer whose turn it is not, would bring to nobody what was lost.
        if not encoding.feeds_back or not values.any():
            self.losing.pop(chunk, None)
            return encoding.encode(values)
        if chunk in self.lost:
            values = values + self.lost[chunk] / np.float32(weight)
        data = encoding.encode(values)
        loss = (values - encoding.decode(data)) * np.float32(weight)
        if not _is_finite(loss):  # Or every later step would have it, too.
            loss[~np.isfinite(loss)] = 0
        self.losing[chunk] = loss
        return data

    def _add_up(self, chunk: int, parts: list[Array], out: Array, scale: float = 1.0) -> None:
        """out = scale * sum of `parts`, or their maximum; by blocks that stay in the cache."""
        combine, factor = self.combine[chunk], out.dtype.type(scale)
        for start in range(0, out.size, BLOCK_ELEMENTS):
            blocks = [part[start : start + BLOCK_ELEMENTS] for part in parts]
            target = out[start : start + BLOCK_ELEMENTS]
            total = blocks[0]
            for block in blocks[1:]:
                total = combine(total, block, out=target)
            if scale != 1.0:
                np.multiply(total, factor, out=target)
            elif total is not target:
                np.copyto(target, total)

    def _keep(self, step: int, chunk: int, data: Buffer) -> None:
        self.results.setdefault(step, {})[chunk] = Result(data, self.encodings[chunk].decode(data))

    def _send_down(self, effect: SendDown) -> None:
        message = Down(key=effect.key, step=effect.step, chunk=effect.chunk, weight=effect.weight)
        payload = effect.payload
        if payload is None and effect.weight:
            payload = self.results[effect.step][effect.chunk].data
        for peer in effect.peers:
            self._send(peer, message, payload if effect.weight else None)

    def _send(self, peer: str, message: Up | Down, payload: Any) -> None:
        """Earlier chunks overtake later ones: else results wait behind parts that nobody needs yet."""
        turn = message.step, message.chunk
        self.send_bulk(peer, encode(message), payload, rank=Rank.CHUNK, turn=turn, tag=message)


def _is_finite(part: Array) -> bool:
    """One fast pass, and a slow one only if the sum of finite numbers may have overflowed."""
    with np.errstate(all="ignore"):
        return bool(np.isfinite(part.sum()) or np.isfinite(part).all())
