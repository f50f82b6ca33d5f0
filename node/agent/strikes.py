"""Strikes: lives that ended with an error while they trained on certain samples, which may be the reason.

All members are to know of a strike before those samples are dealt to somebody else: each that has heard of
one brings it to the step under way, whose commit tells all.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from ...protocols.messages import Farewell, Strike

MAX_STRIKES = 64  # Kept at once. More nodes that end with an error in one step are not told of.


class Strikes:
    """The strikes that one node has heard of."""

    def __init__(self) -> None:
        self.open: dict[tuple[str, int], Strike] = {}  # By node and life, until a step has told of them.
        self.told: deque[tuple[str, int]] = deque(maxlen=MAX_STRIKES)  # Told by a step: each counts once.

    def heard(self, told: Farewell) -> Strike | None:
        """A life has ended with an error. Returns: its strike; None if it names no samples, or is known."""
        known, full = (told.node, told.life) in self.told, len(self.open) >= MAX_STRIKES
        if not told.ranges or known or full:
            return None
        strike = Strike(
            node=told.node, life=told.life, ranges=told.ranges, reason=told.reason, epoch=told.epoch
        )
        self.open[told.node, told.life] = strike
        return strike

    def committed(self, strikes: Iterable[Strike]) -> None:
        """A commit has told all members of these strikes."""
        for each in strikes:
            self.open.pop((each.node, each.life), None)
            self.told.append((each.node, each.life))
