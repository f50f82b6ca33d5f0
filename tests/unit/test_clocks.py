"""Bisection of clocks: noise, callbacks that fail, arguments."""

import math

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.clocks import Status, minimum_frequency


class Noisy:
    """1234 / clock seconds, and noise: a percent of it, and one mini-step in ten takes ten times as long."""

    def __init__(self, seed: int, other: float = 0.0) -> None:
        self.rng, self.clock, self.other = np.random.default_rng(seed), 1000.0, other

    def apply(self, clock: float) -> None:
        self.clock = clock

    def measure_s(self) -> float:
        seconds = (1234.0 / self.clock + self.other) * (1 + 0.01 * self.rng.standard_normal())
        return seconds * (10 if self.rng.random() < 0.1 else 1)


@pytest.mark.parametrize("seed", range(30))
def test_noise_and_spikes_do_not_fool_the_median(seed):
    stage = Noisy(seed)
    frequency, status, observations = minimum_frequency(
        1000.0, 1600.0, 1.0, 0.02, 5.0, stage.apply, stage.measure_s, window=25
    )
    assert status is Status.ACHIEVABLE
    assert 0.98 <= 1234.0 / frequency <= 1.03  # 2% are allowed for, a median of 25 is within 1%.
    assert stage.clock == frequency
    assert observations <= 2 + math.ceil(math.log2(600.0 / 5.0))


@pytest.mark.parametrize("seed", range(10))
def test_a_stage_that_waits_for_memory_is_unachievable_with_noise_too(seed):
    stage = Noisy(seed, other=0.5)
    found = minimum_frequency(1000.0, 1600.0, 1.0, 0.02, 5.0, stage.apply, stage.measure_s, window=15)
    assert found == (1600.0, Status.UNACHIEVABLE, 2)
    assert stage.clock == 1600.0


def test_a_step_below_what_numbers_can_tell_ends_the_bisection():
    clocks = [1.0]

    def measure_s():
        assert len(clocks) < 100, "it goes on for ever"
        return 1.0 / clocks[-1]

    found = minimum_frequency(1.0, 2.0, 0.6, 0.0, 1e-17, clocks.append, measure_s, window=1)
    assert found.frequency == pytest.approx(1 / 0.6)


@pytest.mark.parametrize("fails_at", [26, 50, 100])
def test_a_measurement_that_fails_leaves_the_old_clock(fails_at):
    stage = Noisy(1)
    calls = 0

    def measure_s() -> float:
        nonlocal calls
        calls += 1
        if calls == fails_at:
            raise ConnectionError("gone")
        return stage.measure_s()

    with pytest.raises(ConnectionError):
        minimum_frequency(1000.0, 1600.0, 1.0, 0.02, 5.0, stage.apply, measure_s, window=25)
    assert stage.clock == 1000.0


def test_a_clock_that_cannot_be_set_leaves_the_old_one():
    clock = 1000.0

    def apply(wanted: float) -> None:
        nonlocal clock
        clock = wanted
        if wanted > 1400:
            raise PermissionError("over the limit")

    with pytest.raises(PermissionError):
        minimum_frequency(1000.0, 1600.0, 1.0, 0.0, 5.0, apply, lambda: 1234.0 / clock)
    assert clock == 1000.0


def test_a_stage_faster_than_the_target_stays_as_it_is():
    found = minimum_frequency(1000.0, 1600.0, 1.0, 0.0, 5.0, pytest.fail, lambda: 0.5)
    assert found == (1000.0, Status.ACHIEVABLE, 1)


@pytest.mark.parametrize(
    ("current", "maximum", "step", "window"), [(0, 1, 1, 1), (2, 1, 1, 1), (1, 2, 0, 1), (1, 2, 1, 0)]
)
def test_bad_clocks_are_refused(current, maximum, step, window):
    with pytest.raises(PlanInfeasible, match="clock"):
        minimum_frequency(current, maximum, 1.0, 0.0, step, print, lambda: 1.0, window)
