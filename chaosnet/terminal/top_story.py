"""What a watch of a cluster has told so far: events, and the curve of each figure. Pure."""

from __future__ import annotations

from collections import deque

from ..protocols.status import EventRow, Status

EVENTS_KEPT = 200
VALUES_KEPT = 1_000
RATE = "samples/s"


class Story:
    """Fed with one status after the other; the first may have the history.

    Attributes:
        curves: By name of a metric, or RATE: its values, the newest last.
        events: The newest last.
    """

    def __init__(self) -> None:
        self._cluster = ""
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, deque[float]] = {RATE: deque(maxlen=VALUES_KEPT)}
        self.events: deque[EventRow] = deque(maxlen=EVENTS_KEPT)
        self._step = -1  # The last one of which the metrics are known.

    def hear(self, status: Status) -> None:
        """The cluster, a moment later; or another one at the same addresses, of which nothing is known yet."""
        if status.cluster != self._cluster:
            self._cluster = status.cluster
            self._begin()
        for row in status.steps:
            self._metrics(row.step, row.metrics)
        self._metrics(status.step - 1, status.metrics)
        self.curves[RATE].append(status.samples_per_s)
        known = {*self.events}
        self.events.extend(event for event in status.events if event not in known)

    def _metrics(self, step: int, found: dict[str, float | None]) -> None:
        """Of a step that is complete. What is not finite has no place on a curve."""
        if step <= self._step:
            return
        self._step = step
        for name, value in found.items():
            if value is not None:
                self.curves.setdefault(name, deque(maxlen=VALUES_KEPT)).append(value)

    @property
    def names(self) -> list[str]:
        """Of the curves: that of a loss first, then other metrics, then the rate."""
        return sorted(self.curves, key=lambda name: (name == RATE, name != "loss", name))
