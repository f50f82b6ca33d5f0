"""The least clock at which a slow stage keeps up (ElasWave, Sec. 4.3, Algorithm 2).

Only measured step times decide: what a clock does to them is not modelled.
"""

from __future__ import annotations

import enum
import statistics
from collections.abc import Callable
from typing import NamedTuple

from ...protocols.errors import PlanInfeasible


class Status(enum.Enum):
    """Of Algorithm 2. Unachievable: even the highest clock is too slow, so compute is not what holds it up."""

    ACHIEVABLE = "achievable"
    UNACHIEVABLE = "unachievable"


class Scaling(NamedTuple):
    """`frequency` is the clock that is now applied. `observations`: windows that it took to find."""

    frequency: float
    status: Status
    observations: int


def minimum_frequency(
    current: float,
    maximum: float,
    target_s: float,
    tolerance_s: float,
    minimum_step: float,
    apply: Callable[[float], None],
    measure_s: Callable[[], float],
    window: int = 5,
) -> Scaling:
    """Raise the clock of a stage as far as needed, and no further, for mini-steps of `target_s`.

    ElasWave, Algorithm 2: minimum bisection. A time is observed as the median of `window` mini-steps, so that up to
    half of them may be disturbed. Departures: a stage that is already faster than the target stays as it is (as
    printed, it would be sent through the bisection to find that out), and the clock in the result is applied
    at the end, where the printed one leaves the last that was tried.
    Args:
        current, maximum: clocks in any unit, here and at most.
        target_s, tolerance_s: T* and epsilon.
        minimum_step: the bisection ends when it has the clock to within this, or as exactly as numbers can tell.
        apply: sets a clock; returns when it is in effect.
        measure_s: seconds of the next mini-step.
    Returns: after at most two observations, and one for each halving of maximum - current down to minimum_step.
    Raises: PlanInfeasible for bad arguments; what a callback raises, after going back to `current`.
    """
    if not 0 < current <= maximum:
        raise PlanInfeasible(f"clock: {current:g} now, {maximum:g} at most (expected 0 < now <= most)")
    if not minimum_step > 0 or window < 1 or tolerance_s < 0:
        raise PlanInfeasible(
            f"clock: step {minimum_step:g}, window {window}, tolerance {tolerance_s:g} s"
            " (expected > 0, at least 1, >= 0)"
        )
    observations = 0

    def keeps_up() -> bool:
        nonlocal observations
        observations += 1
        return statistics.median(measure_s() for _ in range(window)) <= target_s + tolerance_s

    if keeps_up():
        return Scaling(current, Status.ACHIEVABLE, observations)
    try:
        apply(maximum)
        if not keeps_up():
            return Scaling(maximum, Status.UNACHIEVABLE, observations)
        low, high = current, maximum  # Too slow; fast enough.
        while high - low > minimum_step and low < (middle := (low + high) / 2) < high:
            apply(middle)
            if keeps_up():
                high = middle
            else:
                low = middle
        apply(high)
    except BaseException:
        apply(current)
        raise
    return Scaling(high, Status.ACHIEVABLE, observations)
