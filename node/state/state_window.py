"""A window that moves over the training state step by step, so that all of it is compared every EVERY steps.

Where the window lies is a function of the model's step and of the state's layout, so nodes at the same step hash the
same bytes. What is compared: parameters, the optimizer's state, tensors of `extra_state`, and the buffers as all
members hold them.
"""

from __future__ import annotations

import platform
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
import xxhash

from ..devices import name_of
from .flat_state import as_bytes, dtype_name
from .training_state import TrainingState

EVERY = 128  # Steps of the model in which all of the state is compared.
MAX_NAME = 30  # Characters of a kind of device, in messages.
LEAST_BYTES = 64 << 10  # Of a window: small states are read in fewer, larger windows, which costs less.


class Averaged(Protocol):
    """What is averaged beside gradients."""

    def agreed(self) -> list[tuple[str, torch.Tensor]]:
        """The buffers as all members hold them between two steps, by name."""
        ...


@dataclass(frozen=True, slots=True)
class _Row:
    """One tensor of the state. It may be another object at every step, so `find` looks it up."""

    name: str
    find: Callable[[], torch.Tensor]
    key: str  # What two nodes must have alike for its bytes to be comparable.
    start: int  # Of its bytes, among those of all rows.
    itemsize: int
    elements: int


@dataclass(frozen=True, slots=True)
class Reading:
    """One window. Only readings of one `kind` can be compared. `pieces`: (name, hash); `digest`: of all of them."""

    kind: str
    digest: str
    pieces: list[tuple[str, str]]


class Window(Protocol):
    """What of the state is compared in a step."""

    def read(self, step: int) -> Reading | None:
        """The window that is due before `step`; None if none is, or this node does not have that part."""
        ...

    def forget(self) -> None:
        """The state has been replaced."""


class StateWindow:
    """Reads this node's state, a piece at each step."""

    def __init__(self, state: TrainingState, averaged: Averaged) -> None:
        self._state, self._averaged = state, averaged
        self._device = arithmetic_of(state)
        self._rows: list[_Row] = []
        self._starts: list[int] = []  # `start` of each row.
        self._layout = ""
        self._total = 0
        self._in_state = -1  # Entries of the optimizer's state when the layout was made.

    def forget(self) -> None:
        """The state has been replaced."""
        self._in_state = -1

    @torch.no_grad()
    def read(self, step: int) -> Reading | None:
        """The window that is due before `step`; None if none is."""
        turn = step % EVERY
        # The layout is made, and compared, once a round, and at steps 1, 2, 4, ... of the first: on all nodes alike.
        anew = turn == 0 or (step < EVERY and step & (step - 1) == 0)
        if anew or self._in_state != len(self._state.optimizer.state):
            self._lay_out()
        windows = min(EVERY, max(1, -(-self._total // LEAST_BYTES)))
        index = turn * windows // EVERY
        due = turn == 0 or index != (turn - 1) * windows // EVERY
        if not due and not anew:
            return None
        pieces = []
        if due:
            try:
                pieces = list(
                    self._pieces(self._total * index // windows, self._total * (index + 1) // windows)
                )
            except (KeyError, IndexError, AttributeError, TypeError, RuntimeError):
                self.forget()  # The layout has changed since: this window is not compared.
                return None
        kind = f"state {self._device}"
        if anew:
            pieces.append(("the layout of the state", self._layout))
        else:
            kind += f" {self._layout}"
        digest = xxhash.xxh3_64_hexdigest("".join(each for _, each in pieces).encode())
        return Reading(kind, digest, pieces)

    def _pieces(self, start: int, stop: int) -> Iterator[tuple[str, str]]:
        """(name, hash) of the elements that begin in bytes [start, stop) of all rows, tensor by tensor."""
        begin = max(0, bisect_right(self._starts, start) - 1)
        for row in self._rows[begin : bisect_left(self._starts, stop)]:
            first = max(0, -(-(start - row.start) // row.itemsize))
            last = min(row.elements, -(-(stop - row.start) // row.itemsize))
            if first >= last:
                continue
            part = _flat(row.find())[first:last]
            digest = xxhash.xxh3_64_hexdigest(as_bytes(part).cpu().numpy().data)
            yield (row.name if last - first == row.elements else f"{row.name}[{first}:{last}]"), digest

    def _lay_out(self) -> None:
        self._rows, self._total = [], 0
        for name, find in self._tensors():
            tensor = find()
            if tensor.layout != torch.strided or not tensor.numel():
                continue
            strides = tensor.stride() if not tensor.is_contiguous() else ()
            key = f"{name} {dtype_name(tensor)} {list(tensor.shape)} {strides}"
            size = tensor.element_size()
            self._rows.append(_Row(name, find, key, self._total, size, tensor.numel()))
            self._total += tensor.numel() * size
        self._starts = [row.start for row in self._rows]
        keys = "\n".join(row.key for row in self._rows)
        self._layout = xxhash.xxh3_64_hexdigest(keys.encode(errors="backslashreplace"))
        self._in_state = len(self._state.optimizer.state)

    def _tensors(self) -> Iterator[tuple[str, Callable[[], torch.Tensor]]]:
        state = self._state
        names = {}
        for name, parameter in state.model.named_parameters():
            names[parameter] = name
            yield f"parameter {name!r}", partial(_same, parameter)
        optimizer = state.optimizer
        for number, group in enumerate(optimizer.param_groups):
            for key in sorted(group):
                if isinstance(group[key], torch.Tensor) and group[key].device.type != "cpu":
                    path = (number, key)
                    yield (
                        f"optimizer.param_groups[{number}][{key!r}]",
                        partial(_at, optimizer.param_groups, path),
                    )
            for parameter in group["params"]:
                if parameter in optimizer.state:
                    name = f"optimizer.state of {names.get(parameter, 'a parameter')!r}"
                    for path in _paths(optimizer.state[parameter]):
                        find = partial(_in_state, optimizer, parameter, path)
                        yield f"{name}{_subscript(path)}", find
        for path in _paths(state.extra_state):
            yield f"extra_state{_subscript(path)}", partial(_at, state.extra_state, path)
        for index, (name, _) in enumerate(self._averaged.agreed()):
            yield name, partial(_agreed, self._averaged, index)


def arithmetic_of(state: TrainingState) -> str:
    """The device and torch release that compute this state: under another one the last bit may differ."""
    device = min(map(name_of, state.accelerators()), default=_processor())[:MAX_NAME]
    return f"{device}-torch-{'.'.join(torch.__version__.split('.')[:2])}"


def _processor() -> str:
    """The kind of processor, by how it rounds: AVX2 and AVX512 round alike; ARM, and x86 without both, do not."""
    vectors = torch.backends.cpu.get_cpu_capability().replace("AVX512", "AVX2").replace(" ", "-")
    return f"{platform.machine()}-{vectors}"


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _at(holder: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        holder = holder[key]
    return holder


def _in_state(optimizer: torch.optim.Optimizer, parameter: Any, path: tuple[Any, ...]) -> Any:
    return _at(optimizer.state[parameter], path)


def _agreed(averaged: Averaged, index: int) -> torch.Tensor:
    return averaged.agreed()[index][1]


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to tensors in `value`; dicts in the order of their keys' texts, as loading may reorder them."""
    if isinstance(value, torch.Tensor):
        yield path
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            yield from _paths(value[key], (*path, key))
    elif isinstance(value, list | tuple):
        for index, each in enumerate(value):
            yield from _paths(each, (*path, index))


def _subscript(path: tuple[Any, ...]) -> str:
    return "".join(f"[{key!r}]" for key in path)


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as 1-D: in the order of memory if that has no gaps (channels_last), so that nothing is copied."""
    tensor = tensor.detach()
    if tensor.is_contiguous():
        return tensor.view(-1)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    if extent == tensor.numel() and all(tensor.stride()):
        return tensor.as_strided((extent,), (1,))
    return tensor.reshape(-1)
