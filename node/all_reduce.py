"""What the all-reduce's effects do to tensors. Decides nothing: step_sync.py does.

Frames that arrive are memory of our own, so a child's part is added to in place and sent on without a copy.
Results live in one of two buffers a lane (gradients.py) and leave from there without a copy, too; that the
buffer is not written again too early is what step_sync.py guarantees.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import zmq

from ..protocols.codec import encode
from ..protocols.effects import (
    Accumulate,
    AdoptChunk,
    FinishChunk,
    RenewResults,
    ResetAttempt,
    SendDown,
    SendUp,
)
from ..protocols.errors import RemoteProtocolError
from ..protocols.messages import Down, Up

BLOCK_ELEMENTS = 32 << 10  # 128 KiB of float32: several of them fit into a core's cache.
MAX_PARTS = 4  # Of children, kept unadded per chunk.

AllReduceEffect = Accumulate | AdoptChunk | FinishChunk | RenewResults | ResetAttempt | SendDown | SendUp
SendBulk = Callable[..., bool]


class ChunkStore(Protocol):
    """Where contributions come from and results go: Gradients, or a bare vector in a benchmark."""

    @property
    def lanes(self) -> Sequence[Any]: ...

    @property
    def chunks(self) -> Sequence[Any]: ...

    def contribution(self, chunk: int) -> torch.Tensor: ...

    def result(self, chunk: int, step: int) -> torch.Tensor: ...

    def take(self, step: int) -> list[torch.Tensor]: ...


class AllReduce:
    """Adds, keeps and sends chunks. `send_bulk(peer, header, payload, copy=...)` is the transport's."""

    def __init__(self, store: ChunkStore, send_bulk: SendBulk) -> None:
        self.store, self.send_bulk = store, send_bulk
        self.parts: dict[int, list[torch.Tensor]] = {}  # Chunk: what children have sent.
        self.written = [-1, -1]  # By step % 2: the step whose results the buffer holds.
        self.lent = [False, False]  # A node that left may still be sent bytes of the buffer.

    def perform(self, effect: AllReduceEffect) -> None:
        """Do one effect."""
        match effect:
            case Accumulate(chunk, payload):
                self._accumulate(chunk, payload)
            case SendUp(key, step, chunk, parent, weight, own):
                header = encode(Up(key=key, step=step, chunk=chunk, weight=weight))
                self.send_bulk(parent, header, _bytes(self._sum(chunk, own)) if weight else None)
            case FinishChunk(step, chunk, weight, own):
                self._finish(step, chunk, weight, own)
            case AdoptChunk(step, chunk, payload):
                self._result(step, chunk).copy_(self._tensor(chunk, payload))
            case SendDown():
                self._send_down(effect)
            case ResetAttempt():
                self.parts.clear()
            case RenewResults(step):
                self.lent = [True, True]
                self.written[step % 2] = -1

    def _accumulate(self, chunk: int, payload: zmq.Frame) -> None:
        """Keep a child's part; adding is cheapest when all parts are there, and memory is bounded."""
        parts = self.parts.setdefault(chunk, [])
        parts.append(self._tensor(chunk, payload))
        if len(parts) > MAX_PARTS:
            self._add_up(chunk, parts, parts[0])
            del parts[1:]

    def _sum(self, chunk: int, own: bool) -> torch.Tensor:
        """What came in plus, if `own`, our contribution; in memory that the receiver may keep."""
        parts = self.parts.pop(chunk, [])
        if not parts:
            return self.store.contribution(chunk)
        total = parts[0]
        self._add_up(chunk, [*parts, self.store.contribution(chunk)] if own else parts, total)
        return total

    def _finish(self, step: int, chunk: int, weight: float, own: bool) -> None:
        result, parts = self._result(step, chunk), self.parts.pop(chunk, [])
        if own:
            parts.append(self.store.contribution(chunk))
        self._add_up(chunk, parts, result, 1.0 if self._op(chunk) == "max" else 1 / weight)

    def _add_up(self, chunk: int, parts: list[torch.Tensor], out: torch.Tensor, scale: float = 1.0) -> None:
        """out = scale * sum of `parts`, or their maximum; by blocks that stay in the cache."""
        combine = torch.maximum if self._op(chunk) == "max" else torch.add
        for start in range(0, out.numel(), BLOCK_ELEMENTS):
            blocks = [part[start : start + BLOCK_ELEMENTS] for part in parts]
            target = out[start : start + BLOCK_ELEMENTS]
            if len(blocks) == 1:
                target.copy_(blocks[0])
            else:
                combine(blocks[0], blocks[1], out=target)
            for block in blocks[2:]:
                combine(target, block, out=target)
            if scale != 1.0:
                target.mul_(scale)

    def _result(self, step: int, chunk: int) -> torch.Tensor:
        """Where the result of a chunk goes; new memory if the old is still lent to somebody who left."""
        parity = step % 2
        if self.written[parity] != step:
            self.written[parity] = step
            if self.lent[parity]:
                self.lent[parity] = False
                self.store.take(step)
        return self.store.result(chunk, step)

    def _send_down(self, effect: SendDown) -> None:
        header = encode(Down(key=effect.key, step=effect.step, chunk=effect.chunk, weight=effect.weight))
        payload = effect.payload
        for peer in effect.peers:
            if not effect.weight:
                self.send_bulk(peer, header, None)
            elif payload is not None:
                self.send_bulk(peer, header, payload)
            else:
                result = _bytes(self.store.result(effect.chunk, effect.step))
                self.send_bulk(peer, header, result, copy=peer in effect.copied)

    def _tensor(self, chunk: int, payload: zmq.Frame | None) -> torch.Tensor:
        place = self.store.chunks[chunk]
        dtype = self.store.lanes[place.lane].dtype
        size = (place.stop - place.start) * dtype.itemsize
        got = 0 if payload is None else len(payload.buffer)
        if payload is None or got != size:
            raise RemoteProtocolError(f"chunk {chunk} came with {got} bytes (expected {size})")
        return torch.frombuffer(payload.buffer, dtype=dtype)

    def _op(self, chunk: int) -> str:
        return str(self.store.lanes[self.store.chunks[chunk].lane].op)


def _bytes(tensor: torch.Tensor) -> memoryview:
    return memoryview(tensor.numpy().data).cast("B")
