"""How long a step takes on this node, usually and this time: by that a wait differs from work.

Each node reports it to the scheduler, which reports come to once a second anyway; scheduler/waits.py makes of them
whom all wait for. So a run in which nobody waits costs no message.
"""

from __future__ import annotations

import statistics
from collections import deque

STEPS_KEPT = 15  # Whose median is the usual one.
LEAST_S = 2.0  # Nobody is told of shorter waits.
TIMES_USUAL = 2.0
# In place of twice the usual, as long as no step is known: the first compiles, and loads data.
FIRST_S = 10.0


class StepClock:
    """Of one node. A step begins when the one before it is complete, and is *given* once update() was called."""

    def __init__(self) -> None:
        self.began_s: float | None = None
        self.given_s: float | None = None
        self.took_s: deque[float] = deque(maxlen=STEPS_KEPT)
        self.is_usual = True

    def begin(self, now_s: float) -> None:
        """From now on a step is under way."""
        self.began_s, self.given_s, self.is_usual = now_s, None, True

    def counts(self, is_usual: bool) -> None:
        """Whether the step under way counts for the usual time."""
        self.is_usual = is_usual

    def give(self, now_s: float) -> None:
        """This node has done its part."""
        self.given_s = now_s

    def complete(self, now_s: float) -> None:
        """And so have all others."""
        if self.began_s is not None and self.is_usual:
            self.took_s.append(now_s - self.began_s)
        self.begin(now_s)

    @property
    def usual_s(self) -> float | None:
        """Median of the last steps; None before the first."""
        return statistics.median(self.took_s) if self.took_s else None

    @property
    def patience_s(self) -> float:
        """A step that takes longer is worth a word."""
        return FIRST_S if self.usual_s is None else max(LEAST_S, TIMES_USUAL * self.usual_s)

    def elapsed_s(self, now_s: float) -> float:
        """Since the step began."""
        return 0.0 if self.began_s is None else max(now_s - self.began_s, 0.0)

    def idle_s(self, now_s: float) -> float:
        """For so long others may have waited for this node; 0 once it has done its part."""
        return self.elapsed_s(now_s) if self.given_s is None else 0.0

    def waits_s(self, now_s: float) -> float:
        """For so long it waits for others."""
        return 0.0 if self.given_s is None else max(now_s - self.given_s, 0.0)

    def slowed(self, now_s: float) -> float:
        """Share of its usual rate that is left, if the step under way ended now; 1 within the patience."""
        if self.usual_s is None or self.elapsed_s(now_s) <= self.patience_s:
            return 1.0
        return self.usual_s / self.elapsed_s(now_s)
