"""What `chaosnet top` has heard of a cluster so far: events, and the curve of each metric. Pure."""

from __future__ import annotations

from collections import deque

from ..protocols.status import EventRow, Status

EVENTS_KEPT = 200
VALUES_KEPT = 1_000
RATE = "samples/s"


class Story:
    """Collects from one status after the other; the first may have the history.

    Attributes:
        curves: By name of a metric, or RATE (samples/s): its values, the newest last.
        events: What has happened, the newest last.
    """

    def __init__(self) -> None:
        self._cluster = ""
        self._begin()

    def _begin(self) -> None:
        self.curves: dict[str, deque[float]] = {RATE: deque(maxlen=VALUES_KEPT)}
        self.events: deque[EventRow] = deque(maxlen=EVENTS_KEPT)
        self._step = -1  # The last step whose metrics are known.

    def hear(self, status: Status) -> None:
        """Take a newer status. If it is another cluster's, at the same addresses, begin anew."""
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
        """Add the metrics of a complete step to their curves; None, for what is not finite, is left out."""
        if step <= self._step:
            return
        self._step = step
        for name, value in found.items():
            if value is not None:
                self.curves.setdefault(name, deque(maxlen=VALUES_KEPT)).append(value)

    @property
    def names(self) -> list[str]:
        """The names of the curves: "loss" first, then other metrics, then the rate."""
        return sorted(self.curves, key=lambda name: (name == RATE, name != "loss", name))
