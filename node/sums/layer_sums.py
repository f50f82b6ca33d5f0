"""Gradients of layers, added up over micro-batches, as chunks of the all-reduce.

Which member computes which micro-batch changes with every plan, and floating-point sums depend on their order. So
that training is the same to the bit whoever computes what, the gradient of each micro-batch is rounded to a multiple
of u (the grid, the same on all members), so coarse that float64 holds every sum of such multiples exactly. Then no
order matters (docs/design.md, "Sums that hang on no order: a grid").

    u = 2^(top + s - 52)     for gradients, times their samples, below 2^top in size; at most 2^s of them are added

For the largest gradients of a group, that is finer than float32; for those of a ten-thousandth of their size, as
fine. After each step, `top` is set from its gradients. A gradient that reaches 2^top makes the step count for
nothing, and raises `top`.

Parameters that the same layers use form a group. Each layer that uses a tied parameter adds a part to its sum.

Gradients on a device are added up there, and only their sum crosses to this machine's memory.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from ...protocols.errors import ConfigError
from ..devices import has_doubles
from ..state.trainable import check_parameter, sparse_gradient, thawed
from .compression import Encoding, Exact
from .lanes import Chunk, Lane, chunk_bytes_of

# Of `top`: at first; how far it is above the last gradients; by how much one that does not fit raises it.
FIRST_TOP, ROOM, GROWS = 10, 6, 16
MANTISSA = 52


@dataclass(eq=False, slots=True)
class _Place:
    """A parameter: elements [start, stop) of lane 0. Bit number `bit` of `present` says that it has a gradient."""

    parameter: nn.Parameter
    bit: int
    start: int
    stop: int


class _OnDevice(NamedTuple):
    """What a step has added of a group so far, on its device: the sum, and a bool: was any gradient too large?"""

    total: torch.Tensor
    over: torch.Tensor


@dataclass(eq=False, slots=True)
class _Group:
    """Parameters that the same layers (`users`) use, in these chunks. `top`: see the module."""

    users: tuple[int, ...]
    places: list[_Place]
    chunks: range
    top: int = FIRST_TOP
    samples: float = 0.0  # Behind what was added here in this step, once for each layer.
    due: set[int] = field(default_factory=set)  # Users whose gradients this node has yet to add in this step.
    has_memory: bool = False
    on_device: _OnDevice | None = None

    @property
    def start(self) -> int:
        """Where it begins in its lane."""
        return self.places[0].start

    @property
    def stop(self) -> int:
        """Where it ends there."""
        return self.places[-1].stop


Norms = dict[int, tuple[float, float]]
"""By group, of its mean gradient: the largest absolute value, and the sum of squares."""


@dataclass(frozen=True, slots=True)
class Adopted:
    """What a step has brought.

    Attributes:
        fits: Were all gradients below 2^top? If not, the step counts for nothing.
        losses: By micro-batch, each times its samples.
    """

    fits: bool
    losses: list[float] = field(default_factory=list)


class LayerSums:
    """The store of an engine whose members compute different layers (ChunkStore).

    Args:
        layers: The model's, in their order.
        micro_batches: At most so many a step.
        exact: Sum in float64, on a grid. Else in float32, in the order of the trees, which rounds.
    Raises: ConfigError for a parameter that cannot be summed, by name.
    """

    def __init__(self, layers: Sequence[nn.Module], micro_batches: int, exact: bool = True) -> None:
        self.exact, self.micro_batches = exact, micro_batches
        dtype = torch.float64 if exact else torch.float32
        users = _users(layers)
        self._bit = {parameter: bit for bit, parameter in enumerate(users)}
        self._place: dict[nn.Parameter, tuple[_Group, _Place]] = {}
        self.groups: list[_Group] = []
        self.chunks: list[Chunk] = []
        self.borders: tuple[int, ...] = ()
        elements = sum(parameter.numel() for parameter in users)
        most = chunk_bytes_of(elements * dtype.itemsize) // dtype.itemsize
        at = 0
        # Last layers first: backward comes to them first, and the first chunks are sent first.
        for group in sorted(set(users.values()), key=lambda each: (-max(each), each)):
            mine = [parameter for parameter, those in users.items() if those == group]
            at = self._add_group(group, mine, at, most)
        last = Chunk(len(self.chunks), 1, 0, micro_batches, True)
        self.borders += (last.index,) if self.chunks else ()
        self.chunks.append(last)
        # Pages that nobody writes to take no memory, and pages no longer written to are given back.
        size = max(at * dtype.itemsize, mmap.PAGESIZE)
        self._memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.lanes = [
            Lane(dtype, "mean", torch.frombuffer(self._memory, dtype=dtype)[:at]),
            Lane(torch.float64, "mean", torch.zeros(micro_batches, dtype=torch.float64, device="cpu")),
        ]
        # A bit for each parameter that has a gradient here, then one for each group with one that does not fit.
        self._present = np.zeros(len(users) + len(self.groups), dtype=bool)
        self.loss_samples = 0.0

    def _add_group(self, users: tuple[int, ...], parameters: list[nn.Parameter], at: int, most: int) -> int:
        first, start = len(self.chunks), at
        group = _Group(users, [], range(0))
        for parameter in parameters:
            place = _Place(parameter, self._bit[parameter], at, at + parameter.numel())
            group.places.append(place)
            self._place[parameter] = group, place
            at = place.stop
        for begin in range(start, at, most):
            self.chunks.append(Chunk(len(self.chunks), 0, begin, min(begin + most, at), True))
        group.chunks = range(first, len(self.chunks))
        self.borders += (first,) if first and group.chunks else ()
        self.groups.append(group)
        return at

    # --- what the all-reduce asks ---

    stays = False  # `begin` clears the sums, so results must not lie in them.

    def contribution(self, chunks: range) -> torch.Tensor:
        """See ChunkStore."""
        first, last = self.chunks[chunks[0]], self.chunks[chunks[-1]]
        return self.lanes[first.lane].contribution[first.start : last.stop]

    def encoding(self, chunk: int) -> Encoding:
        """See ChunkStore."""
        return Exact(self.lanes[self.chunks[chunk].lane].contribution.numpy().dtype)

    @property
    def total_bytes(self) -> int:
        """Bytes of all that a step sums."""
        return sum(lane.contribution.nbytes for lane in self.lanes)

    # --- a step ---

    def begin(self, layers: Collection[int]) -> list[range]:
        """Start a step in which this node adds gradients of these layers. The last step's sums must have been sent.

        Returns: the chunks to which this node adds nothing.
        """
        for parameter in self._place:
            parameter.grad = None  # The script may have gone back through the model by itself.
        self._present[:] = False
        self.loss_samples = 0.0
        self.lanes[1].contribution.zero_()
        for group in self.groups:
            group.samples, group.due = 0.0, {*group.users} & {*layers}
            group.on_device = None
            if group.due and group.places:
                self._make_room(group)
                group.has_memory = True
            elif group.has_memory:
                self._let_go(group)
        return [group.chunks for group in self.groups if group.chunks and not group.due]

    def _make_room(self, group: _Group) -> None:
        """Set a group's sum to zero: on its parameters' device if that can add in this type, else in the lane."""
        dtype, device = self.lanes[0].dtype, group.places[0].parameter.device
        if device.type != "cpu" and (dtype != torch.float64 or has_doubles(device)):
            total = torch.zeros(group.stop - group.start, dtype=dtype, device=device)
            group.on_device = _OnDevice(total, torch.zeros((), dtype=torch.bool, device=device))
        else:
            self._contribution(group).zero_()

    def _contribution(self, group: _Group) -> torch.Tensor:
        return self.lanes[0].contribution[group.start : group.stop]

    def _let_go(self, group: _Group) -> None:
        """Give back the memory of a group whose layers other members compute: the pages that are all its own."""
        size = self.lanes[0].dtype.itemsize
        start = -(-group.start * size // mmap.PAGESIZE) * mmap.PAGESIZE
        length = group.stop * size // mmap.PAGESIZE * mmap.PAGESIZE - start
        if length > 0 and hasattr(mmap, "MADV_DONTNEED"):
            self._memory.madvise(mmap.MADV_DONTNEED, start, length)
        group.has_memory = False

    def finish(self, layers: Collection[int]) -> list[tuple[range, float]]:
        """All gradients of these layers have been added. Waits for their device.

        Returns: (chunks, samples behind them) of each group whose sum is complete now.
        """
        whole = []
        for group in self.groups:
            if group.chunks and group.due:
                group.due -= {*layers}
                if not group.due:
                    self._cross(group)
                    whole.append((group.chunks, group.samples))
        return whole

    def _cross(self, group: _Group) -> None:
        """Copy a group's sum from its device to the lane."""
        if (there := group.on_device) is not None:
            self._contribution(group).copy_(there.total)
            if there.over:
                self._does_not_fit(group)
            group.on_device = None

    def _does_not_fit(self, group: _Group) -> None:
        self._present[len(self._bit) + self.groups.index(group)] = True

    def abandon(self) -> list[range]:
        """Give the step up: nothing more is added. Returns: the chunks whose sums are not complete."""
        left = [group.chunks for group in self.groups if group.chunks and group.due]
        for group in self.groups:
            group.due, group.on_device = set(), None
        return left

    @torch.no_grad()
    def add(self, layer: nn.Module, samples: int) -> None:
        """Take the mean gradients of one micro-batch out of `.grad`, and add them, times its samples.

        Raises: ConfigError for a gradient that cannot be added, by name.
        """
        groups = set[int]()
        for name, parameter in layer.named_parameters():
            if parameter not in self._place:
                if parameter.requires_grad and parameter.grad is not None:
                    raise thawed(f"{name!r} of a layer")
                continue
            group, place = self._place[parameter]
            if id(group) not in groups:
                groups.add(id(group))
                group.samples += samples
            grad, parameter.grad = parameter.grad, None
            if grad is not None:
                if grad.layout is not torch.strided:
                    raise sparse_gradient(f"{name!r} of a layer")
                self._present[place.bit] = True
                self._add(group, place, grad.detach(), samples)

    def has_strays(self) -> bool:
        """Is there a gradient that `add` has not taken?"""
        return any(parameter.grad is not None for parameter in self._place)

    def _add(self, group: _Group, place: _Place, grad: torch.Tensor, samples: int) -> None:
        there = group.on_device
        whole = self._contribution(group) if there is None else there.total
        total = whole[place.start - group.start : place.stop - group.start]
        here = grad.reshape(-1).to(total.device)
        values = here.to(total.dtype)
        if not self.exact:
            total.add_(values, alpha=samples)
            return
        if there is not None:  # `over` is read when the sum is complete: each look would wait for the device.
            there.over.logical_or_(samples * _largest_there(values) >= 2.0**group.top)
        elif samples * _largest(here) >= 2.0**group.top:
            self._does_not_fit(group)
            return
        if values.data_ptr() == grad.data_ptr():
            values = values.clone()
        unit = 2.0 ** (group.top + self._sum_bits(group) - MANTISSA)
        # To add this and take it off again rounds to a multiple of the unit, the spacing of float64 near it.
        shift = 1.5 * 2.0**MANTISSA * unit
        total.add_(values.mul_(samples).add_(shift).sub_(shift))

    def _sum_bits(self, group: _Group) -> int:
        return math.ceil(math.log2(self.micro_batches * len(group.users))) + 2

    def tell_loss(self, micro_batch: int, loss: float, samples: int) -> None:
        """Take the mean loss of a micro-batch with so many samples, to be summed beside the gradients."""
        self.lanes[1].contribution[micro_batch] = loss * samples
        self.loss_samples += samples

    def loss_sum(self) -> float:
        """The sum of the losses of this node's micro-batches in this step, each times its samples."""
        return float(self.lanes[1].contribution.sum())

    def loss_chunks(self) -> tuple[range, float]:
        """The chunk of the losses, as a range, and the samples behind it."""
        last = len(self.chunks) - 1
        return range(last, last + 1), self.loss_samples

    @property
    def present(self) -> bytes:
        """A bit for each parameter, set if it had a gradient here, then for each group, set if one did not fit."""
        return np.packbits(self._present, bitorder="little").tobytes()

    # --- what has come ---

    def norms(self, results: Sequence[torch.Tensor], groups: Iterable[int], squares: bool) -> Norms:
        """The norms of the mean gradients of these groups; {} if nobody had samples.

        Args:
            results: By chunk; those of these groups must be here.
            squares: Compute the sums of squares? Else they are 0.
        """
        found = {}
        for number in groups if results else ():
            users = len(self.groups[number].users)
            values = [results[chunk] for chunk in self.groups[number].chunks]
            total = sum(_squares(each) for each in values) if squares else 0.0
            if values:
                found[number] = users * max(map(_largest, values)), users**2 * total
        return found

    @torch.no_grad()
    def adopt(
        self,
        present: bytes,
        results: Sequence[torch.Tensor],
        samples: float,
        norms: Norms,
        kept: Collection[int] | None = None,
    ) -> Adopted:
        """Write a step's mean gradients to `.grad`, unless one did not fit the grid: then only make that coarser.

        Args:
            present: The bitwise or of all members' masks.
            results: By chunk.
            samples: All samples of the step.
            norms: Of all groups, whoever has computed them.
            kept: Groups whose parameters this node keeps; others get no gradient. None: all.
        """
        bits = self._bits(present)
        too_large = [group for group, over in zip(self.groups, bits[len(self._bit) :], strict=False) if over]
        for group in too_large:
            group.top += GROWS
        if too_large:
            return Adopted(False)
        for number, group in enumerate(self.groups):
            if kept is None or number in kept:
                self._spread(group, results, bits)
            else:
                for place in group.places:
                    place.parameter.grad = None
            most, _ = norms.get(number, (0.0, 0.0))
            if most:
                group.top = math.frexp(most * samples)[1] + ROOM
        losses = results[len(self.chunks) - 1]
        return Adopted(True, [float(loss) * samples for loss in losses])

    def with_gradient(self, present: bytes) -> list[nn.Parameter]:
        """The parameters that had a gradient, by the mask of all members."""
        bits = self._bits(present)
        return [parameter for parameter, bit in self._bit.items() if bits[bit]]

    def _bits(self, present: bytes) -> np.ndarray:
        return np.unpackbits(np.frombuffer(present, dtype=np.uint8), bitorder="little").astype(bool)

    def _spread(self, group: _Group, results: Sequence[torch.Tensor], bits: np.ndarray) -> None:
        if not group.chunks:
            return
        values = torch.cat([results[chunk] for chunk in group.chunks])
        if len(group.users) > 1:
            values *= len(group.users)  # Each of its layers has added a part, and counted the samples again.
        start = group.places[0].start
        for place in group.places:
            parameter = place.parameter
            if not bits[place.bit]:
                parameter.grad = None
                continue
            mine = values[place.start - start : place.stop - start].view(parameter.shape)
            parameter.grad = mine.to(parameter.device, parameter.dtype)

    # --- what all have alike ---

    @property
    def tops(self) -> list[int]:
        """The `top` of each group."""
        return [group.top for group in self.groups]

    def set_tops(self, tops: Sequence[int]) -> None:
        """Take these for ours, unless they are of other groups, as in a checkpoint with other layers frozen."""
        if len(tops) == len(self.groups):
            for group, top in zip(self.groups, tops, strict=True):
                group.top = top


@torch.no_grad()
def clip(parameters: Iterable[nn.Parameter], max_norm: float, norms: Norms) -> None:
    """Scale gradients in place as torch's clip_grad_norm_ does, by the norm over all groups, kept here or not."""
    norm = math.sqrt(sum(norms[group][1] for group in sorted(norms)))
    scale = max_norm / (norm + 1e-6)
    if scale >= 1.0:
        return
    for parameter in parameters:
        if parameter.grad is not None:
            parameter.grad.mul_(scale)


def _squares(values: torch.Tensor) -> float:
    """The sum of squares of 1-D `values`, in double precision."""
    doubles = values.double()
    return float(doubles.dot(doubles))


def _largest(values: torch.Tensor) -> float:
    """The largest absolute value of those that are finite; others go into the sum as they are."""
    if not values.numel():
        return 0.0
    least, most = map(float, torch.aminmax(values))
    if math.isfinite(least) and math.isfinite(most):
        return max(-least, most)
    finite = values[values.isfinite()]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _largest_there(values: torch.Tensor) -> torch.Tensor:
    """As `_largest`, but as a tensor on the device of `values`, which is not waited for."""
    if not values.numel():
        return values.new_zeros(())
    return torch.where(values.isfinite(), values.abs(), 0.0).amax()


def _users(layers: Sequence[nn.Module]) -> dict[nn.Parameter, tuple[int, ...]]:
    """The numbers of the layers that use each trained parameter. Raises: ConfigError."""
    users: dict[nn.Parameter, list[int]] = {}
    for number, layer in enumerate(layers):
        for name, parameter in layer.named_parameters():
            check_parameter(f"{name} of layer {number}", parameter)
            if not parameter.requires_grad:
                continue
            if parameter.dtype == torch.float64:
                raise ConfigError(
                    f"parameter {name!r} of layer {number} is float64 (expected 32 bits or less)"
                )
            users.setdefault(parameter, []).append(number)
    return {parameter: tuple(numbers) for parameter, numbers in users.items()}
