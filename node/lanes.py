"""Lanes: the flat vectors that gradients and buffers travel in, what lies where in them, and where chunks begin."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch._utils import _unflatten_dense_tensors

from ..protocols.errors import ConfigError
from .flat_state import device_runs
from .training_state import BufferSlot, buffer_slots, check_parameter

# As small as slow links need them, to be busy from the first to the last. Where links are fast, several travel as one
# message (protocols/sums.py), for each message costs its handling.
USUAL_CHUNKS, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 256, 64 << 10, 2 << 20
MAX_CHUNK_BYTES = 32 << 20  # One frame: half of what a peer takes (sockets.py).


def chunk_bytes_of(total: int) -> int:
    """What the all-reduce of so many bytes of gradients moves as one, unless the user says otherwise."""
    return min(max(-(-total // USUAL_CHUNKS), LEAST_CHUNK_BYTES), MOST_CHUNK_BYTES)


@dataclass(frozen=True, slots=True)
class Chunk:
    """The smallest piece that travels by itself: elements [start, stop) of lane number `lane`."""

    index: int
    lane: int
    start: int
    stop: int
    is_gradient: bool  # Else it is of buffers.


@dataclass(eq=False, slots=True)
class Lane:
    """One flat vector per element type.

    Attributes:
        op: How members' contributions combine: "mean" (sum, then divide by the total weight) or "max".
        contribution: This node's part, times its weight under "mean"; on the CPU, [elements].
    """

    dtype: torch.dtype
    op: Literal["mean", "max"]
    contribution: torch.Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where a parameter or a buffer lies: elements [start, stop) of lane number `lane`."""

    name: str
    holder: nn.Parameter | BufferSlot
    bit: int  # In `present`; -1 for a buffer of a "max" lane, which everybody always adopts.
    lane: int
    start: int
    stop: int

    def buffer(self) -> torch.Tensor:
        """The numbers of the tensor there now; modules may put in another one at any forward."""
        assert isinstance(self.holder, BufferSlot)
        tensor = self.holder.tensor
        if tensor is None or _reals(tensor).numel() != self.stop - self.start:
            now = "None" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ConfigError(
                f"buffer {self.name!r} had {self.stop - self.start} numbers when training began and is "
                f"now {now}, so it cannot be averaged; register it with persistent=False if it is a cache"
            )
        return _reals(tensor)


class Layout:
    """What lies where; a function of the model alone.

    Parameters lie in the reverse of their order in `model.parameters()`, as backward reaches the last layers
    first, and buffers follow in chunks of their own. Up to 32 bits travel as float32, float64 as it is, integers
    and bools as int64 under "max". Parameters with requires_grad=False at construction and buffers with
    persistent=False, which are caches, are left out.

    Attributes:
        bits: So many parameters and averaged buffers there are, each with a bit of its own in `present`.
    Raises: ConfigError for a parameter that cannot be averaged, by name.
    """

    def __init__(self, model: nn.Module, chunk_bytes: int) -> None:
        self.lanes: list[Lane] = []
        self.chunks: list[Chunk] = []
        self.parameters: list[Place] = []  # In lane order, hence neighbors are neighbors in memory.
        self.buffers: list[list[Place]] = []  # By lane.
        parameters = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        buffers = [slot for slot in buffer_slots(model) if slot.persistent and slot.tensor is not None]
        pinned = any(p.device.type != "cpu" for p in model.parameters()) and torch.accelerator.is_available()
        for name, parameter in parameters:
            check_parameter(name, parameter)
        bit_by_name = {name: bit for bit, (name, _) in enumerate(parameters)}
        for slot in buffers:
            assert slot.tensor is not None
            if _lane_dtype(slot.tensor) != torch.int64:
                bit_by_name[slot.name] = len(bit_by_name)
        self.bits = len(bit_by_name)

        for dtype in (torch.float32, torch.float64, torch.int64):
            mine: list[tuple[str, nn.Parameter | BufferSlot, int]] = [
                (name, p, p.numel()) for name, p in reversed(parameters) if _lane_dtype(p) == dtype
            ]
            border = sum(elements for _, _, elements in mine)
            for slot in buffers:
                tensor = slot.tensor
                if tensor is not None and tensor.numel() and _lane_dtype(tensor) == dtype:
                    mine.append((slot.name, slot, _reals(tensor).numel()))
            if not mine:
                continue
            lane, start = len(self.lanes), 0
            self.buffers.append([])
            for name, holder, elements in mine:
                place = Place(name, holder, bit_by_name.get(name, -1), lane, start, start + elements)
                (self.parameters if isinstance(holder, nn.Parameter) else self.buffers[lane]).append(place)
                start += elements
            self._add_lane(dtype, border, start, chunk_bytes // dtype.itemsize, pinned)
        places = itertools.chain(self.parameters, *self.buffers)
        self._chunks_of = {place: [chunk.index for chunk in self.chunks_at(place)] for place in places}

    def _add_lane(self, dtype: torch.dtype, border: int, stop: int, step: int, pinned: bool) -> None:
        op: Literal["mean", "max"] = "max" if dtype == torch.int64 else "mean"
        for first, last in ((0, border), (border, stop)):
            for start in range(first, last, step):
                stop_here, of_gradients = min(start + step, last), last == border
                self.chunks.append(Chunk(len(self.chunks), len(self.lanes), start, stop_here, of_gradients))
        self.lanes.append(Lane(dtype, op, torch.zeros(stop, dtype=dtype, pin_memory=pinned)))

    @property
    def borders(self) -> tuple[int, ...]:
        """The chunks that are of another lane than the one before them, or of buffers after gradients."""
        return tuple(
            chunk.index
            for before, chunk in itertools.pairwise(self.chunks)
            if (before.lane, before.is_gradient) != (chunk.lane, chunk.is_gradient)
        )

    def chunks_at(self, place: Place) -> Iterator[Chunk]:
        """The chunks that a parameter or buffer lies in: one, or several in a row."""
        index = bisect_left(self.chunks, (place.lane, place.start + 1), key=lambda c: (c.lane, c.stop))
        while index < len(self.chunks) and _overlap(self.chunks[index], place):
            yield self.chunks[index]
            index += 1

    def gather_buffers(self, lane: int) -> torch.Tensor:
        """The buffers of a lane as they are, in their place of its contribution."""
        places, contribution = self.buffers[lane], self.lanes[lane].contribution
        if not places:
            return contribution[:0]
        values = contribution[places[0].start : places[-1].stop]
        stage(values, [place.buffer() for place in places], 1)
        return values

    def spread(
        self, places: Sequence[Place], targets: Sequence[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """Copy results to `targets`, which lie at `places`. What goes to a device crosses chunk by chunk.

        Places one behind the other in a chunk are copied together: there may be thousands.
        """
        groups: dict[tuple[int, torch.device], list[tuple[Place, torch.Tensor]]] = {}
        for place, target in zip(places, targets, strict=True):
            for index in self._chunks_of[place]:
                groups.setdefault((index, target.device), []).append((place, target))
        halves: list[tuple[torch.Tensor, torch.Tensor]] = []
        flat_of: dict[Place, torch.Tensor] = {}  # Of what lies in several chunks, and is put together first.
        for (index, device), group in groups.items():
            chunk, result = self.chunks[index], results[index].to(device)
            run: list[torch.Tensor] = []
            begin = stop = chunk.start
            for place, target in group:
                whole = chunk.start <= place.start and place.stop <= chunk.stop
                if run and (not whole or place.start != stop):
                    _unpack(result[begin - chunk.start : stop - chunk.start], run)
                    run = []
                if whole:
                    begin, stop = (begin if run else place.start), place.stop
                    run.append(target)
                    continue
                if place not in flat_of:
                    flat_of[place] = (
                        target.view(-1) if target.is_contiguous() else target.new_empty(target.numel())
                    )
                    halves.append((target, flat_of[place]))
                first, last = max(chunk.start, place.start), min(chunk.stop, place.stop)
                flat_of[place][first - place.start : last - place.start] = result[
                    first - chunk.start : last - chunk.start
                ]
            if run:
                _unpack(result[begin - chunk.start : stop - chunk.start], run)
        for target, flat in halves:
            if not target.is_contiguous():
                target.copy_(flat.view(target.shape))


def _unpack(values: torch.Tensor, targets: list[torch.Tensor]) -> None:
    """Values that lie one behind the other, to tensors of one device."""
    torch._foreach_copy_(targets, _unflatten_dense_tensors(values, targets))


@torch.no_grad()
def stage(contribution: torch.Tensor, tensors: Sequence[torch.Tensor], weight: float) -> None:
    """Write weight * tensor, one behind the other, to the beginning of `contribution`.

    Widened before it is multiplied: float16 would overflow.
    """
    start, dtype = 0, contribution.dtype
    for run in device_runs(tensors):
        flat = [tensor.detach().reshape(-1) for tensor in run]
        stop = start + sum(map(torch.Tensor.numel, flat))
        target = contribution[start:stop]
        if run[0].device.type != "cpu":
            joined = torch.cat(flat) if len(flat) > 1 else flat[0]
            target.copy_(joined.to(dtype) * weight)
        elif len(flat) == 1 and flat[0].dtype == dtype:
            torch.mul(flat[0], weight, out=target)
        else:
            torch.cat(flat, out=target)
            if weight != 1:
                target.mul_(weight)
        start = stop


def _lane_dtype(tensor: torch.Tensor) -> torch.dtype:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.int64
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def int_like(dtype: torch.dtype) -> torch.dtype:
    """Of the same size, so that values can be compared to the bit: nan is nan then."""
    return torch.int32 if dtype == torch.float32 else torch.int64


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _overlap(chunk: Chunk, place: Place) -> bool:
    common = min(chunk.stop, place.stop) - max(chunk.start, place.start)
    return chunk.lane == place.lane and common > 0
