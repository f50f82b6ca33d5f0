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

    def __len__(self) -> int:
        """Raises: TypeError, as scripts ask their DataLoader for it, to show how far they are."""
        raise TypeError(
            "what trainer.batches returns has no len(): how many batches of an epoch come to this node depends on "
            "who else is there (len() of the DataLoader is what a node alone would get)"
        )

    def __bool__(self) -> bool:
        return True

    def __next__(self) -> Any:
        if self._own is None:
            self._own = self._begin()
        return next(self._own)
