"""Dropped items, malformed or foreign: counted by the place that they came from, and reported to the sink."""

from __future__ import annotations

from collections import Counter
from functools import partial

from .turns import Sink, Turns

FOREIGN_PLACES = 64  # Places that are counted one by one.


class Foreign:
    """Counts dropped items, in `by_place`, and reports them. Places beyond FOREIGN_PLACES count as "elsewhere"."""

    def __init__(self, turns: Turns, sink: Sink) -> None:
        self.by_place: Counter[str] = Counter()
        self._turns, self._sink = turns, sink

    def drop(self, place: str, reason: str) -> None:
        """Count an item that came from `place`, and report why it is dropped."""
        if place not in self.by_place and len(self.by_place) >= FOREIGN_PLACES:
            place = "elsewhere"
        self.by_place[place] += 1
        self._turns.tell(partial(self._sink.foreign, place, reason))
