"""The last steps that this node has seen complete, for its status; pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Mapping, Reversible
from itertools import islice, takewhile

from ..protocols.messages import Contribution
from ..protocols.status import StepRow
from ..protocols.step_sync import means

STEPS_KEPT = 1000
STEPS_OF_PACE = 21
VALUES_KEPT = 8000  # Metrics of all these steps together: so many fit into one message, whatever their names.


class StepHistory:
    """The steps that one life of a node has seen. Times are its own; what steps brought is the same on all nodes."""

    def __init__(self) -> None:
        self.rows: deque[StepRow] = deque()
        self._values = 0
        self._last_s: float | None = None

    def completed(self, step: int, total: Contribution, now_s: float, time_s: float) -> None:
        """A step is complete. `now_s`: by the loop's clock; `time_s`: by the wall clock."""
        seconds = None if self._last_s is None else round(now_s - self._last_s, 6)
        self._last_s = now_s
        metrics = {
            name: value if math.isfinite(value) else None for name, value in means(total.metrics).items()
        }
        self.rows.append(
            StepRow(step=step, time_s=time_s, seconds=seconds, samples=total.weight, metrics=metrics)
        )
        self._values += len(metrics)
        while len(self.rows) > STEPS_KEPT or (self._values > VALUES_KEPT and len(self.rows) > 1):
            self._values -= len(self.rows.popleft().metrics)

    def since(self, step: int) -> tuple[StepRow, ...]:
        """The steps from this one on."""
        newer = takewhile(lambda row: row.step >= step, reversed(self.rows))
        return tuple(newer)[::-1]

    @property
    def pace_s(self) -> float | None:
        """See `pace_s`."""
        return pace_s(self.rows)

    @property
    def metrics(self) -> Mapping[str, float | None]:
        """The metrics of the last step; {} before the first."""
        return self.rows[-1].metrics if self.rows else {}


def pace_s(steps: Reversible[StepRow]) -> float | None:
    """What a step has taken of late: the median of the last STEPS_OF_PACE. None before two were seen."""
    took = [row.seconds for row in islice(reversed(steps), STEPS_OF_PACE) if row.seconds is not None]
    return statistics.median(took) if took else None
