"""Tensors that the training thread waits for, and what tells it to wait no longer."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from ..protocols.messages import Tensor, ViewKey


class TensorName(NamedTuple):
    """What names a tensor within a step, as in its message."""

    way: str
    micro_batch: int
    layer: int


class Interrupted(Exception):
    """The step that is being computed is over, or void: the training thread is told something else."""


class Mailbox:
    """The tensors that have come to one node. `put` and `wake` are for the loop's thread, the rest for training.

    `is_called`: has the training thread something else to hear?
    """

    def __init__(self, is_called: Callable[[], bool]) -> None:
        self._is_called = is_called
        self._changed = threading.Condition()
        self._at: tuple[ViewKey, int] = ((0, 0), 0)
        self._parts: dict[tuple[ViewKey, int, TensorName], dict[int, tuple[Tensor, Any]]] = {}
        self._summed: tuple[ViewKey, int, list[torch.Tensor]] | None = None

    def begin(self, key: ViewKey, step: int) -> None:
        """Begin an attempt: what belongs to an earlier one is void."""
        with self._changed:
            self._at = key, step
            if self._summed is not None and self._summed[:2] < self._at:
                self._summed = None
            self._parts = {name: parts for name, parts in self._parts.items() if name[:2] >= self._at}

    def put(self, message: Tensor, payload: Any) -> None:
        """A part of a tensor has come."""
        name = message.key, message.step, TensorName(message.way, message.micro_batch, message.layer)
        with self._changed:
            if name[:2] >= self._at:
                self._parts.setdefault(name, {})[message.part] = message, payload
                self._changed.notify()

    def put_sums(self, key: ViewKey, step: int, sums: list[torch.Tensor]) -> None:
        """All that this node keeps of an attempt is summed."""
        with self._changed:
            self._summed = key, step, sums
            self._changed.notify()

    def take_sums(self) -> list[torch.Tensor]:
        """Wait for the sums of the attempt under way, by chunk. May be called again. Raises: Interrupted."""
        with self._changed:
            while True:
                self.check()
                if self._summed is not None and self._summed[:2] >= self._at:
                    return self._summed[2]
                self._changed.wait()

    def wake(self) -> None:
        """The training thread may have something else to hear."""
        with self._changed:
            self._changed.notify()

    def check(self) -> None:
        """Raises: Interrupted if the training thread has something else to hear."""
        if self._is_called():
            raise Interrupted

    @contextmanager
    def taken(self, name: TensorName) -> Iterator[list[tuple[Tensor, Any]]]:
        """As `take`, but the parts stay if what is done with them inside fails."""
        yield self.take(name, keep=True)
        with self._changed:
            self._parts.pop((*self._at, name), None)

    def take(self, name: TensorName, keep: bool = False) -> list[tuple[Tensor, Any]]:
        """The parts of that tensor of the attempt under way, in order, once all have come. Raises: Interrupted."""
        with self._changed:
            while True:
                self.check()
                if parts := self._whole(name):
                    if not keep:
                        del self._parts[(*self._at, name)]
                    return [parts[index] for index in sorted(parts)]
                self._changed.wait()

    def has(self, name: TensorName) -> bool:
        """Would `take` not wait? Raises: Interrupted."""
        with self._changed:
            self.check()
            return bool(self._whole(name))

    def _whole(self, name: TensorName) -> dict[int, tuple[Tensor, Any]]:
        """The parts of a tensor if all have come, else none."""
        parts = self._parts.get((*self._at, name), {})
        return parts if parts and len(parts) == next(iter(parts.values()))[0].parts else {}
