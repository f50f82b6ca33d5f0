"""Loops over a data set that a script makes once and goes through many times, as those over a DataLoader."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class Passes(Iterator[Any]):
    """Each `iter()` is a new pass. `next()` goes on with one of its own.

    Args:
        begin: A pass.
    """

    def __init__(self, begin: Callable[[], Iterator[Any]]) -> None:
        self._begin = begin
        self._own: Iterator[Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        self._own = None  # It ends here, as only one can be under way.
        return self._begin()

    def __next__(self) -> Any:
        if self._own is None:
            self._own = self._begin()
        return next(self._own)
