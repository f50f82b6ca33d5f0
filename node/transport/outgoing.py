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
    STATE = 1  # Pieces of the state, and probes: a joiner waits for them, and they are few beside chunks.
    CHUNK = 2  # Of the all-reduce.
    BYE = 3  # After all that is queued.


class Item(NamedTuple):
    """What waits to be sent: one or two frames. Items are sent in the order of (rank, turn, number)."""

    rank: Rank
    turn: tuple[int, int]
    number: int
    first: bytes
    second: Any  # A buffer, kept until libzmq has it; None for an item of one frame.
    tag: Any  # By which `forget` decides; an item without one (None) is kept.


class Outgoing:
    """The queue of one connection."""

    def __init__(self) -> None:
        self._heap: list[Item] = []
        self._numbers = itertools.count()
        # When libzmq was last found full, or took an item while more waited; None while nothing waits.
        self._full_s: float | None = None
        self.carried: tuple[int, float] = 0, 0.0
        """Bytes that libzmq has taken while it was full, and for how many seconds it was: their ratio is the rate."""

    def __len__(self) -> int:
        return len(self._heap)

    def push(
        self, rank: Rank, first: bytes, second: Any = None, tag: Any = None, turn: tuple[int, int] = (0, 0)
    ) -> None:
        """Add an item. Within a rank, a lower `turn` goes first; of equal turns, what was pushed first."""
        heapq.heappush(self._heap, Item(rank, turn, next(self._numbers), first, second, tag))

    def next(self) -> Item:
        """The item to send next, which stays in the queue."""
        return self._heap[0]

    def refused(self, now_s: float) -> None:
        """libzmq has no room for the next item."""
        if self._full_s is None:
            self._full_s = now_s

    def taken(self, now_s: float) -> None:
        """libzmq has taken the next item."""
        item = heapq.heappop(self._heap)
        if self._full_s is not None:
            size = len(item.first) + (0 if item.second is None else size_of(item.second))
            total, took_s = self.carried
            self.carried = total + size, took_s + now_s - self._full_s
            self._full_s = now_s if self._heap else None

    def pop(self) -> Item:
        """Take out the next item, which is not sent over this connection."""
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
    """Bytes of a buffer or a frame."""
    return len(payload) if isinstance(payload, (bytes, zmq.Frame)) else memoryview(payload).nbytes
