"""Which workers have become slow, and how slow, from the time that each spends computing (ElasWave, Sec. 3).

ElasWave names the signal and not the method. Here a step's time is divided by what the worker is expected to take,
then by the median of these ratios over the cluster, so that a slowdown of everybody (another data mix, a hot
room) is nobody's. Of a worker's ratios, the median over a window counts: single spikes vanish. A window is bad
if it is too high by more than a set share and by more than the worker's own noise explains (median absolute
deviation); a few bad windows in a row make it slow, a few good ones well again.

A core without clock: times come from outside. They must be the worker's own compute, without waiting: in synchronous
training whole steps are equally long for everybody.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from ...protocols.errors import PlanInfeasible


@dataclass(frozen=True, slots=True)
class Slow:
    """`worker` takes `factor` times what it should; plan with speed 1 / factor. Again when it has become worse."""

    worker: str
    step: int
    factor: float


@dataclass(frozen=True, slots=True)
class Recovered:
    """`worker` is as fast as it should be."""

    worker: str
    step: int


@dataclass(frozen=True, slots=True)
class Settings:
    """`window`: steps whose median counts. `bad_windows`, `good_windows`: in a row, to enter and to leave.

    `share`: how much slower than expected is too slow; who is slow is well below half of that. `noises`: standard
    errors of a window's median that a bad one is above. `history`: windows of steps that tell noise and, without a
    profile, the expected time.
    """

    window: int = 5
    bad_windows: int = 2
    good_windows: int = 3
    share: float = 0.1
    noises: float = 5.0
    history: int = 10

    def __post_init__(self) -> None:
        if min(self.window, self.bad_windows, self.good_windows, self.history) < 1 or not self.share > 0:
            raise PlanInfeasible(f"fail-slow: {self} (expected counts of at least 1, a share > 0)")

    @property
    def steps_to_detect(self) -> int:
        """At most so many steps after a clear slowdown until it is known.

        A window in which it begins and that may still look good, then the bad ones, and the step after, with which
        the last one is complete if not everybody has reported.
        """
        return self.window - 1 + self.bad_windows * self.window + 1


@dataclass
class _Worker:
    expected_s: float | None
    first: list[float] = field(default_factory=list)  # Seconds, until there is an expected time.
    noise: deque[float] = field(default_factory=deque)  # Ratios of good windows.
    window: list[float] = field(default_factory=list)
    run: int = 0  # Windows in a row that speak for a change.
    factor: float | None = None  # None: well.


class FailSlow:
    """observe(worker, step, seconds) -> events. Workers are known from their first time, or `expect`."""

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self._workers: dict[str, _Worker] = {}
        self._step: int | None = None
        self._times: dict[str, float] = {}  # Of this step.

    def expect(self, worker: str, seconds: float | None) -> None:
        """From now on `worker` should take this long, by its profile; None: find out from what it takes.

        For when a plan changes its work: all that was known of it is forgotten.
        Raises: PlanInfeasible for a time that is none.
        """
        if seconds is not None and not seconds > 0:
            raise PlanInfeasible(f"worker {worker}: {seconds:g} s expected (expected > 0)")
        self._workers[worker] = _Worker(seconds)
        self._times.pop(worker, None)

    def forget(self, worker: str) -> None:
        """It has left."""
        self._workers.pop(worker, None)
        self._times.pop(worker, None)

    def factors(self) -> dict[str, float]:
        """Who is slow, and how many times slower than expected."""
        return {name: worker.factor for name, worker in self._workers.items() if worker.factor is not None}

    def observe(self, worker: str, step: int, seconds: float) -> list[Slow | Recovered]:
        """`worker` has spent `seconds` computing in `step`.

        A step is judged once everybody has reported it, or somebody a later one; what comes after that for an
        earlier step is ignored, and so is a second report.
        Raises: PlanInfeasible for a time that is none.
        """
        if not 0 <= seconds < float("inf"):
            raise PlanInfeasible(f"worker {worker}: {seconds:g} s in step {step} (expected >= 0 and finite)")
        self._workers.setdefault(worker, _Worker(None))
        events: list[Slow | Recovered] = []
        if self._step is not None and step < self._step:
            return events
        if self._step is None or step > self._step:
            events += self._close()
            self._step = step
        self._times.setdefault(worker, seconds)
        if len(self._times) == len(self._workers):
            events += self._close()
            self._step = step + 1
        return events

    def _close(self) -> list[Slow | Recovered]:
        times, self._times = self._times, {}
        ratios: dict[str, float] = {}
        for name in sorted(times):
            worker = self._workers[name]
            if worker.expected_s is None:
                self._learn(worker, times[name])
            else:
                ratios[name] = times[name] / worker.expected_s
        if not ratios or self._step is None:
            return []
        everybody = statistics.median(ratios.values())
        if everybody <= 0:
            return []
        events: list[Slow | Recovered] = []
        for name, ratio in ratios.items():
            events += self._judge(name, self._workers[name], ratio / everybody, self._step)
        return events

    def _learn(self, worker: _Worker, seconds: float) -> None:
        """Without a profile, a worker's first times say what to expect; who starts slow is not noticed."""
        worker.first.append(seconds)
        if len(worker.first) >= self.settings.history * self.settings.window:
            middle = statistics.median(worker.first)
            worker.expected_s = middle or None
            worker.noise.extend(each / middle for each in worker.first if middle)
            worker.first.clear()

    def _judge(self, name: str, worker: _Worker, ratio: float, step: int) -> list[Slow | Recovered]:
        worker.window.append(ratio)
        if len(worker.window) < self.settings.window:
            return []
        window, worker.window = worker.window, []
        middle = statistics.median(window)
        if worker.factor is None:
            if not self._bad(middle, worker.noise):
                worker.run = 0
                worker.noise.extend(window)
                while len(worker.noise) > self.settings.history * self.settings.window:
                    worker.noise.popleft()
                return []
            worker.run += 1
            if worker.run < self.settings.bad_windows:
                return []
            worker.run, worker.factor = 0, middle
            return [Slow(name, step, middle)]
        if middle <= 1 + self.settings.share / 2:
            worker.run += 1
            if worker.run < self.settings.good_windows:
                return []
            worker.run, worker.factor = 0, None
            return [Recovered(name, step)]
        worker.run = 0
        if middle > worker.factor * (1 + self.settings.share) and self._bad(
            middle / worker.factor, worker.noise
        ):
            worker.factor = middle
            return [Slow(name, step, middle)]
        return []

    def _bad(self, middle: float, noise: deque[float]) -> bool:
        if middle <= 1 + self.settings.share:
            return False
        if len(noise) < self.settings.window:
            return True
        center = statistics.median(noise)
        deviation = 1.4826 * statistics.median(abs(each - center) for each in noise)
        # The median of n normal values has the standard error 1.2533 sigma / sqrt(n).
        return bool(middle - 1 > self.settings.noises * 1.2533 * deviation / self.settings.window**0.5)
