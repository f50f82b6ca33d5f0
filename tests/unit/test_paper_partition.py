"""ElasWave, Sec. 4.2 and 4.3: Eq. 1 to 3, Algorithm 1, Algorithm 2, as printed, against partition and clocks."""

import math

import numpy as np
import pytest

from chaosnet.scheduler.elastic.clocks import Status, minimum_frequency
from chaosnet.scheduler.elastic.partition import mini_step_s, mini_step_sums, minimax
from chaosnet.scheduler.elastic.profile import uniform


def algorithm_1_as_printed(t, memory, cap, layers: int, stages: int) -> tuple[float, list[int]]:
    """Lines 1 to 9; t(p, a, b) and memory(a, b) of layers a..b, all counted from 1."""
    f = {(1, length): t(1, 1, length) for length in range(1, layers + 1)}
    k_star = {}
    for p in range(2, stages + 1):
        for length in range(p, layers + 1):
            allowed = [k for k in range(p - 1, length) if memory(k + 1, length) <= cap[p]]
            if not allowed:
                f[p, length], k_star[p, length] = math.inf, p - 1
                continue
            k = min(allowed, key=lambda k: max(f[p - 1, k], t(p, k + 1, length)))
            k_star[p, length] = k
            f[p, length] = max(f[p - 1, k], t(p, k + 1, length))
    bounds = [layers]
    for p in range(stages, 1, -1):
        bounds.append(k_star[p, bounds[-1]])
    return f[stages, layers], bounds[:0:-1]


def test_algorithm_1_gives_the_boundaries_of_its_printed_form():
    rng = np.random.default_rng(1)
    compared = 0
    while compared < 200:
        layers = int(rng.integers(2, 10))
        stages = int(rng.integers(2, min(layers, 5) + 1))
        times = rng.integers(1, 20, (stages, layers)).astype(float)
        bytes_of = rng.integers(1, 10, layers).astype(float)
        limits = rng.integers(10, 40, stages).astype(float)
        limits[0] = np.inf  # Line 2 lets the first stage take anything.
        cost, bounds = algorithm_1_as_printed(
            lambda p, a, b, times=times: times[p - 1, a - 1 : b].sum(),
            lambda a, b, bytes_of=bytes_of: bytes_of[a - 1 : b].sum(),
            [0.0, *limits],
            layers,
            stages,
        )
        if math.isinf(cost):
            continue
        sums = np.concatenate([np.zeros((stages, 1)), times.cumsum(axis=1)], axis=1)
        sizes, found = minimax(sums, stages, 0.0, np.concatenate([[0], bytes_of.cumsum()]), limits)
        assert found == cost
        assert np.cumsum(sizes)[:-1].tolist() == bounds
        compared += 1


def test_equation_1_adds_what_compute_does_not_hide_of_transfers():
    # T = T_f + T_b + [T_p2p_f - sigma_f T_f] + [T_p2p_b - sigma_b T_b]
    assert mini_step_s(8.0, 16.0, 3.0, 5.0, 0.25, 0.125) == 8 + 16 + (3 - 0.25 * 8) + (5 - 0.125 * 16)


def test_equation_2_moves_layers_out_of_a_stage_that_lost_a_worker():
    # Sec. 4.1: DP 3 with 2 samples each, one failure: 3 samples each on that stage.
    profile = uniform(8, 1.0, 2.0)
    before = minimax(mini_step_sums(profile, [2, 2, 2, 2], [1.0] * 4), 4)
    resized_only = mini_step_sums(profile, [2, 3, 2, 2], [1.0] * 4)
    after = minimax(resized_only, 4)
    assert before.sizes == (2, 2, 2, 2)
    assert after.cost == 18.0
    assert min(after.sizes) >= 1
    assert after.sizes[1] <= 2
    nine = minimax(mini_step_sums(uniform(14, 1.0, 2.0), [2, 3, 2, 2], [1.0] * 4), 4)
    assert nine.sizes == (4, 2, 4, 4)
    assert nine.cost == 24.0


class Stage:
    """Mini-steps of `compute` / clock seconds, and `other` whatever the clock is; noise as wanted."""

    def __init__(self, compute: float, other: float = 0.0, clock: float = 1000.0, noise=lambda: 0.0) -> None:
        self.compute, self.other, self.clock, self.noise = compute, other, clock, noise
        self.applied: list[float] = []

    def apply(self, clock: float) -> None:
        self.clock = clock
        self.applied.append(clock)

    def measure_s(self) -> float:
        return self.compute / self.clock + self.other + self.noise()


def algorithm_2(stage: Stage, target_s: float, tolerance_s: float = 0.0):
    return minimum_frequency(stage.clock, 1600.0, target_s, tolerance_s, 10.0, stage.apply, stage.measure_s)


def test_algorithm_2_line_2_keeps_the_clock_of_a_stage_that_is_in_time():
    stage = Stage(compute=1000.0)
    assert algorithm_2(stage, 1.0) == (1000.0, Status.ACHIEVABLE, 1)
    assert stage.applied == []


def test_algorithm_2_line_5_a_stage_that_lags_at_the_highest_clock_is_unachievable():
    assert algorithm_2(Stage(compute=2000.0), 1.0) == (1600.0, Status.UNACHIEVABLE, 2)


def test_algorithm_2_a_gap_that_is_not_compute_bound_is_unachievable():
    # "the gap is not compute-bound and is marked UNACHIEVABLE"
    assert algorithm_2(Stage(compute=100.0, other=1.0), 1.0).status is Status.UNACHIEVABLE


@pytest.mark.parametrize("needed", [1003.0, 1234.0, 1300.0, 1599.0])
def test_algorithm_2_line_8_finds_the_lowest_clock_that_meets_the_target(needed):
    stage = Stage(compute=needed)
    frequency, status, _ = algorithm_2(stage, 1.0)
    assert status is Status.ACHIEVABLE
    assert needed <= frequency <= needed + 10.0
    assert stage.clock == frequency
