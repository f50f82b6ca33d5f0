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

AllReduceEffect = Accumulate | AdoptChunk | FinishChunk | RenewResults | ResetAttempt | SendDown | SendUp
SendBulk = Callable[..., bool]


class ChunkStore(Protocol):
    """Where contributions come from and results go: Gradients, or a bare vector in a benchmark."""

    lanes: Sequence[Any]
    chunks: Sequence[Any]

    def contribution(self, chunk: int) -> torch.Tensor: ...

    def result(self, chunk: int, step: int) -> torch.Tensor: ...

    def take(self, step: int) -> list[torch.Tensor]: ...


class AllReduce:
    """Adds, keeps and sends chunks. `send_bulk(peer, header, payload, copy=...)` is the transport's."""

    def __init__(self, store: ChunkStore, send_bulk: SendBulk) -> None:
        self.store, self.send_bulk = store, send_bulk
        self.sums: dict[int, torch.Tensor] = {}
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
                self.sums.clear()
            case RenewResults():
                self.lent = [True, True]

    def _accumulate(self, chunk: int, payload: zmq.Frame) -> None:
        part = self._tensor(chunk, payload)
        if chunk in self.sums:
            self._combine(chunk, self.sums[chunk], part)
        else:
            self.sums[chunk] = part

    def _combine(self, chunk: int, total: torch.Tensor, part: torch.Tensor) -> None:
        if self._op(chunk) == "max":
            torch.maximum(total, part, out=total)
        else:
            total.add_(part)

    def _sum(self, chunk: int, own: bool) -> torch.Tensor:
        total = self.sums.pop(chunk, None)
        if total is None:
            return self.store.contribution(chunk)
        if own:
            self._combine(chunk, total, self.store.contribution(chunk))
        return total

    def _finish(self, step: int, chunk: int, weight: float, own: bool) -> None:
        result, total = self._result(step, chunk), self.sums.pop(chunk, None)
        parts = [
            part for part in (total, self.store.contribution(chunk) if own else None) if part is not None
        ]
        if self._op(chunk) == "max":
            result.copy_(parts[0])
            for part in parts[1:]:
                torch.maximum(result, part, out=result)
            return
        if len(parts) == 2:
            torch.add(*parts, out=result)
            result.mul_(1 / weight)
        else:
            torch.mul(parts[0], 1 / weight, out=result)

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
    return memoryview(tensor.numpy()).cast("B")
