"""The queue of one connection: the lower rank first, and within a rank the lower number.

libzmq is given little at a time (sockets.py, SEND_AHEAD): what it has can be neither overtaken nor taken back.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import zmq


class Rank(IntEnum):
    """Lower goes first."""

    TENSOR = 0  # A training thread waits for it.
    STATE = 1  # Its pieces, and probes: a joiner waits for them, and they are few beside a training's chunks.
    CHUNK = 2
    BYE = 3  # After all that is queued.


class Item(NamedTuple):
    rank: Rank
    turn: tuple[int, int]
    number: int
    first: bytes
    second: Any  # A buffer, held until libzmq has it.
    tag: Any  # What `forget` is asked about; None: it is never void.


class Outgoing:
    """The queue of one connection."""

    def __init__(self) -> None:
        self._heap: list[Item] = []
        self._numbers = itertools.count()
        # Since when libzmq has been full, apart from what it has just taken.
        self._full_s: float | None = None
        self.carried: tuple[int, float] = 0, 0.0
        """Bytes that libzmq has taken while it was full, and for how long it was: the connection's rate."""

    def __len__(self) -> int:
        return len(self._heap)

    def push(
        self, rank: Rank, first: bytes, second: Any = None, tag: Any = None, turn: tuple[int, int] = (0, 0)
    ) -> None:
        """`turn`: lower goes first within the rank; in the order of their coming if it is the same."""
        heapq.heappush(self._heap, Item(rank, turn, next(self._numbers), first, second, tag))

    def next(self) -> Item:
        return self._heap[0]

    def refused(self, now_s: float) -> None:
        """libzmq is full."""
        if self._full_s is None:
            self._full_s = now_s

    def taken(self, now_s: float) -> None:
        """libzmq has what was next."""
        item = heapq.heappop(self._heap)
        if self._full_s is not None:
            size = len(item.first) + (0 if item.second is None else size_of(item.second))
            total, took_s = self.carried
            self.carried = total + size, took_s + now_s - self._full_s
            self._full_s = now_s if self._heap else None

    def pop(self) -> Item:
        """What was next, which is not sent from here."""
        return heapq.heappop(self._heap)

    def clear(self) -> None:
        self._heap.clear()
        self._full_s = None

    def forget(self, is_void: Callable[[Any], bool]) -> int:
        """Drop what has a tag that is void. Returns: how many items."""
        kept = [item for item in self._heap if item.tag is None or not is_void(item.tag)]
        dropped = len(self._heap) - len(kept)
        if dropped:
            self._heap = kept
            heapq.heapify(self._heap)
            self._full_s = self._full_s if kept else None
        return dropped


def size_of(payload: Any) -> int:
    return len(payload) if isinstance(payload, (bytes, zmq.Frame)) else memoryview(payload).nbytes
