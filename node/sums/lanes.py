"""Lanes: the flat vectors that gradients and buffers travel in, what lies where in them, and where chunks begin."""

from __future__ import annotations

import itertools
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors

from ...protocols.errors import ConfigError
from ...protocols.sums import bundles
from ..devices import accelerators, to_device, widened
from ..state.flat_state import device_runs, dtype_name
from ..state.trainable import BufferSlot, buffer_slots, check_buffer, check_parameter

# Small enough that slow links are busy all the time. On fast links several chunks travel as one message
# (protocols/sums.py), as handling has a price per message.
USUAL_CHUNKS, LEAST_CHUNK_BYTES, MOST_CHUNK_BYTES = 256, 64 << 10, 2 << 20
SMALL = 4096  # Elements. Of smaller tensors on average, torch's flattening is faster than a view of each.
CROSSING_BYTES = 8 << 20  # Of results, to a device at once: each crossing takes several calls of its driver.
MAX_CHUNK_BYTES = 32 << 20  # One frame: half of what a peer takes (sockets.py).

_KINDS = {torch.float32: "floats of 32 bits or less", torch.float64: "float64", torch.int64: "whole numbers"}


def averaged(
    model: nn.Module, trained: Collection[nn.Parameter] | None = None
) -> list[tuple[str, nn.Parameter]]:
    """The parameters whose gradients travel, by name: not frozen, and in `trained` (default: all).

    Raises: ConfigError for one that cannot be averaged, by name.
    """
    named = model.named_parameters()
    found = [(name, p) for name, p in named if p.requires_grad and (trained is None or p in trained)]
    for name, parameter in found:
        check_parameter(name, parameter)
    return found


def averaged_buffers(model: nn.Module) -> list[BufferSlot]:
    """The buffers that travel. Raises: ConfigError for one that cannot be averaged, by name."""
    slots = [slot for slot in buffer_slots(model) if slot.persistent and slot.tensor is not None]
    kinds: dict[tuple[torch.dtype, torch.device], set[torch.dtype]] = defaultdict(set)
    for slot in slots:
        assert slot.tensor is not None
        check_buffer(slot.name, slot.tensor)
        if slot.tensor.numel():
            kinds[_lane_dtype(slot.tensor), slot.tensor.device].add(_reals(slot.tensor).dtype)
    for slot in slots:
        assert slot.tensor is not None
        lane, dtype = _lane_dtype(slot.tensor), _reals(slot.tensor).dtype
        if len(kinds[lane, slot.tensor.device]) > 1 and not _promotes(dtype, lane):
            raise ConfigError(
                f"buffer {slot.name!r} is {dtype_name(slot.tensor)}, which torch does not convert beside other "
                f"types, so it cannot be averaged (expected {str(lane).removeprefix('torch.')}, or persistent=False "
                "if it is a constant)"
            )
    return slots


def whole_numbers(model: nn.Module) -> dict[str, int]:
    """Bytes that each buffer of integers or bools adds to every step, changed or not: 8 a number. By name."""
    tensors = [(slot.name, slot.tensor) for slot in averaged_buffers(model)]
    return {name: 8 * t.numel() for name, t in tensors if t is not None and _lane_dtype(t) == torch.int64}


def chunk_bytes_of(total: int) -> int:
    """The size of a chunk, in bytes, for `total` bytes of gradients, unless the user sets one."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """Where a parameter or a buffer lies: elements [start, stop) of lane number `lane`. Compared by identity."""

    name: str
    holder: nn.Parameter | BufferSlot
    bit: int  # In `present`; -1 for a buffer of a "max" lane, which everybody always adopts.
    lane: int
    start: int
    stop: int
    dtype: torch.dtype  # Of the lane.

    @property
    def is_flat(self) -> bool:
        """Is it 1-D for good? A module may replace a buffer by one of another shape."""
        return isinstance(self.holder, nn.Parameter) and self.holder.dim() == 1

    def buffer(self) -> torch.Tensor:
        """The real numbers of the tensor that is there now: modules may put in another one at any forward.

        Raises: ConfigError if that has another size or kind than at construction.
        """
        assert isinstance(self.holder, BufferSlot)
        tensor = self.holder.writable
        if tensor is None or _reals(tensor).numel() != self.stop - self.start:
            now = "None" if tensor is None else f"of shape {list(tensor.shape)}"
            raise ConfigError(
                f"buffer {self.name!r} had {self.stop - self.start} numbers when training began and is "
                f"now {now}, so it cannot be averaged; run the model once before Trainer is made if its first "
                "forward gives it its size, or register it with persistent=False if it is a cache"
            )
        if _lane_dtype(tensor) != self.dtype:
            raise ConfigError(
                f"buffer {self.name!r} is now {dtype_name(tensor)}, so it cannot be averaged (expected "
                f"{_KINDS[self.dtype]}, as when training began)"
            )
        return _reals(tensor)


@dataclass(slots=True)
class _Copy:
    """A copy in `LaneLayout.spread`: elements [start, stop) of these joined chunks, to targets [first, last).

    Attributes:
        is_part: Fills only a part of one target, from its element `offset` on.
        sizes: Elements for each target.
        is_flat: Are all targets 1-D?
    """

    chunks: range
    device: torch.device
    start: int
    stop: int
    first: int
    last: int
    is_part: bool
    offset: int
    sizes: list[int]
    is_flat: bool


class LaneLayout:
    """What lies where in the lanes; a function of the model and `chunk_bytes` alone, so equal on all nodes.

    Parameters lie in the reverse of their order in `model.parameters()`, as backward reaches the last layers
    first, and buffers follow in chunks of their own. Up to 32 bits travel as float32, float64 as it is, integers
    and bools as int64 under "max". Parameters with requires_grad=False at construction, those that are not in
    `trained`, and buffers with persistent=False, which are caches, are left out.

    Attributes:
        devices: Accelerators that the model lies on; then lanes are in pinned memory.
        bits: Number of parameters and averaged buffers; each has a bit of its own in `present`.
    Raises: ConfigError for a parameter or buffer that cannot be averaged, by name.
    """

    def __init__(
        self, model: nn.Module, chunk_bytes: int, trained: Collection[nn.Parameter] | None = None
    ) -> None:
        self.lanes: list[Lane] = []
        self.chunks: list[Chunk] = []
        self.parameters: list[Place] = []  # In lane order: neighbours here are neighbours in memory.
        self.buffers: list[list[Place]] = []  # By lane.
        parameters = averaged(model, trained)
        buffers = averaged_buffers(model)
        self.devices = accelerators(model.parameters())
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
                place = Place(name, holder, bit_by_name.get(name, -1), lane, start, start + elements, dtype)
                (self.parameters if isinstance(holder, nn.Parameter) else self.buffers[lane]).append(place)
                start += elements
            self._add_lane(dtype, border, start, chunk_bytes // dtype.itemsize)
        self._crossings = bundles(len(self.chunks), max(CROSSING_BYTES // chunk_bytes, 1), self.borders)
        self._copies: list[_Copy] = []  # Of the last `spread`, to these places on these devices.
        self._copies_to: tuple[list[Place], list[torch.device]] = [], []
        ends = [(chunk.lane, chunk.stop) for chunk in self.chunks]
        places = itertools.chain(self.parameters, *self.buffers)
        self._chunks_of = {place: _chunks_at(place, ends) for place in places}

    def _add_lane(self, dtype: torch.dtype, border: int, stop: int, step: int) -> None:
        op: Literal["mean", "max"] = "max" if dtype == torch.int64 else "mean"
        for first, last in ((0, border), (border, stop)):
            for start in range(first, last, step):
                stop_here, of_gradients = min(start + step, last), last == border
                self.chunks.append(Chunk(len(self.chunks), len(self.lanes), start, stop_here, of_gradients))
        zeros = torch.zeros(stop, dtype=dtype, device="cpu", pin_memory=bool(self.devices))
        self.lanes.append(Lane(dtype, op, zeros))

    @property
    def borders(self) -> tuple[int, ...]:
        """The chunks with which another lane begins, or buffers after gradients."""
        return tuple(
            chunk.index
            for before, chunk in itertools.pairwise(self.chunks)
            if (before.lane, before.is_gradient) != (chunk.lane, chunk.is_gradient)
        )

    def chunks_at(self, place: Place) -> range:
        """The chunks that a parameter or buffer lies in: one, or several in a row; none if it is empty."""
        return self._chunks_of[place]

    def gather_buffers(self, lane: int) -> torch.Tensor:
        """Copy the buffers of a lane, unweighted, to their place in its contribution. Returns: that place, 1-D."""
        values = self.buffers_part(lane)
        stage(values, [place.buffer() for place in self.buffers[lane]], 1)
        return values

    def buffers_part(self, lane: int) -> torch.Tensor:
        """The part of a lane's contribution in which its buffers lie, 1-D."""
        places, contribution = self.buffers[lane], self.lanes[lane].contribution
        return contribution[places[0].start : places[-1].stop] if places else contribution[:0]

    def spread(
        self, places: list[Place], targets: list[torch.Tensor], results: Sequence[torch.Tensor]
    ) -> None:
        """Copy `results`, by chunk, to `targets`, the tensors of `places`.

        To a device, neighbouring chunks cross together.
        """
        wanted = ([*places], [target.device for target in targets])
        if self._copies_to != wanted:  # Hardly ever: steps are alike, and there may be thousands of places.
            self._copies_to, self._copies = wanted, self._plan(*wanted)
        partial: dict[int, torch.Tensor] = {}  # By target: one that lies in several chunks, flat.
        # By device: the last chunks that have crossed, once for all that lies in them, and their values there.
        crossed: dict[torch.device, tuple[range, torch.Tensor]] = {}
        for copy in self._copies:
            if copy.device.type == "cpu":
                joined = results[copy.chunks[0]]
            else:
                if copy.device not in crossed or crossed[copy.device][0] != copy.chunks:
                    crossed[copy.device] = copy.chunks, self._joined_on(copy.device, results, copy.chunks)
                _, joined = crossed[copy.device]
            values = joined[copy.start : copy.stop]
            if copy.is_part:
                target = targets[copy.first]
                if copy.first not in partial:
                    is_flat = target.is_contiguous()
                    partial[copy.first] = target.view(-1) if is_flat else target.new_empty(target.numel())
                partial[copy.first][copy.offset : copy.offset + values.numel()] = values
            else:
                run = targets[copy.first : copy.last]
                # split() takes a third of the time, but gives flat tensors.
                each = values.split(copy.sizes) if copy.is_flat else _unflatten_dense_tensors(values, run)
                torch._foreach_copy_(run, list(each))
        for index, flat in partial.items():
            if not targets[index].is_contiguous():
                targets[index].copy_(flat.view(targets[index].shape))

    def _joined_on(
        self, device: torch.device, results: Sequence[torch.Tensor], chunks: range
    ) -> torch.Tensor:
        """The results of these chunks on `device`, joined."""
        parts = results[chunks.start : chunks.stop]
        return to_device(parts, device) if device in self.devices else torch.cat([*parts]).to(device)

    def _plan(self, places: Sequence[Place], devices: Sequence[torch.device]) -> list[_Copy]:
        """The copies that fill these places; those in a row, in the same chunks and on one device, are one copy."""
        copies: list[_Copy] = []
        for target, (place, device) in enumerate(zip(places, devices, strict=True)):
            for chunks in self._chunks_crossing_to(place, device):
                origin, end = self.chunks[chunks[0]].start, self.chunks[chunks[-1]].stop
                start, stop = max(origin, place.start), min(end, place.stop)
                is_part = stop - start < place.stop - place.start
                before = copies[-1] if copies else None
                if (
                    before is not None and not is_part and not before.is_part
                    and (before.chunks, before.device, before.last) == (chunks, device, target)
                    and before.stop == start - origin
                ):  # fmt: skip
                    before.last, before.stop = target + 1, stop - origin
                    before.sizes.append(stop - start)
                    before.is_flat &= place.is_flat
                    continue
                copies.append(
                    _Copy(
                        chunks, device, start - origin, stop - origin, target, target + 1, is_part,
                        start - place.start, [stop - start], place.is_flat,
                    )
                )  # fmt: skip
        return copies

    def _chunks_crossing_to(self, place: Place, device: torch.device) -> list[range]:
        """The chunks that a place lies in, grouped as they are copied to `device` at once."""
        here = self.chunks_at(place)
        if device.type == "cpu":
            return [range(chunk, chunk + 1) for chunk in here]
        return [chunks for chunks in self._crossings if chunks.start < here.stop and here.start < chunks.stop]


@torch.no_grad()
def stage(contribution: torch.Tensor, tensors: Sequence[torch.Tensor], weight: float) -> None:
    """Write weight * tensor, one behind the other, to the beginning of `contribution`; waits for devices.

    Widened before it is multiplied: float16 would overflow.
    """
    start, dtype = 0, contribution.dtype
    for run in device_runs(tensors):
        stop = start + sum(map(torch.Tensor.numel, run))
        target = contribution[start:stop]
        # To make a view of each small tensor would take longer than to copy it.
        small = stop - start < SMALL * len(run)
        if run[0].device.type != "cpu":
            target.copy_(widened(run, dtype, weight))
        elif len(run) == 1 or small:
            joined = run[0].detach().reshape(-1) if len(run) == 1 else _flatten_dense_tensors(run)
            if joined.dtype == dtype:
                torch.mul(joined, weight, out=target)
            else:
                torch.mul(target.copy_(joined), weight, out=target)
        else:  # In two passes over `target`: fresh memory would cost more.
            torch.cat([tensor.detach().reshape(-1) for tensor in run], out=target)
            if weight != 1:
                target.mul_(weight)
        start = stop


def _lane_dtype(tensor: torch.Tensor) -> torch.dtype:
    if not tensor.is_floating_point() and not tensor.is_complex():
        return torch.int64
    return torch.float64 if tensor.dtype in (torch.float64, torch.complex128) else torch.float32


def _promotes(dtype: torch.dtype, to: torch.dtype) -> bool:
    try:
        torch.promote_types(dtype, to)
    except RuntimeError:
        return False
    return True


def int_like(dtype: torch.dtype) -> torch.dtype:
    """The integer type of the same size, to compare values by their bits: then nan equals nan."""
    return torch.int32 if dtype == torch.float32 else torch.int64


def _reals(tensor: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _chunks_at(place: Place, ends: Sequence[tuple[int, int]]) -> range:
    """The chunks that `place` lies in. `ends`: (lane, stop) of each chunk."""
    if place.start == place.stop:
        return range(0)
    first = bisect_left(ends, (place.lane, place.start + 1))
    return range(first, bisect_left(ends, (place.lane, place.stop), first) + 1)
