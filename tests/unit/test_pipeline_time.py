"""The closed form of 1F1B against simulations of it; memory by stage."""

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.pipeline_time import (
    one_f_one_b,
    one_f_one_b_by_recurrence,
    one_f_one_b_lines,
    peak_bytes,
    peak_bytes_of_averages,
)
from chaosnet.scheduler.elastic.profile import uniform


def in_order(forward: list[float], backward: list[float], micro_batches: int) -> float:
    """1F1B from the lists of what each stage does, run until nothing is left: no slots, no formulas."""
    stages = len(forward)
    todo = []
    for s in range(stages):
        warm_up = min(stages - s, micro_batches)
        order = [("F", j) for j in range(warm_up)]
        for j in range(micro_batches):
            order += [("B", j)] + ([("F", j + warm_up)] if j + warm_up < micro_batches else [])
        todo.append(order)
    ends: dict[tuple[str, int, int], float] = {}
    free = [0.0] * stages
    while any(todo):
        for s in range(stages):
            while todo[s]:
                kind, j = todo[s][0]
                if kind == "F":
                    needed = ends.get(("F", s - 1, j)) if s else 0.0
                else:
                    needed = ends.get(("B", s + 1, j) if s + 1 < stages else ("F", s, j))
                if needed is None:
                    break
                free[s] = max(free[s], needed) + (forward if kind == "F" else backward)[s]
                ends[kind, s, j] = free[s]
                todo[s].pop(0)
    return max(free)


def whole_times(rng: np.random.Generator, splits: int, stages: int) -> tuple[np.ndarray, np.ndarray]:
    """Whole numbers, which floats add exactly: zeros, ties, and now and then a stage ten times as slow."""
    times = rng.integers(0, rng.choice([2, 4, 30]), (2, splits, stages)).astype(float)
    times[rng.random(times.shape) < 0.15] *= 10
    return times[0], times[1]


def test_the_recurrence_is_what_running_each_stages_list_in_order_gives():
    rng = np.random.default_rng(1)
    for _ in range(150):
        stages, micro_batches = int(rng.integers(1, 7)), int(rng.integers(1, 12))
        f, b = whole_times(rng, 3, stages)
        expected = [in_order(list(f[i]), list(b[i]), micro_batches) for i in range(3)]
        assert one_f_one_b_by_recurrence(f, b, micro_batches).tolist() == expected


def test_the_closed_form_is_the_recurrence_to_the_last_bit():
    rng = np.random.default_rng(2)
    for _ in range(1000):
        stages, micro_batches = int(rng.integers(1, 10)), int(rng.integers(1, 16))
        f, b = whole_times(rng, 40, stages)
        expected = one_f_one_b_by_recurrence(f, b, micro_batches)
        assert one_f_one_b(f, b, micro_batches).tolist() == expected.tolist(), (stages, micro_batches)


def test_beyond_as_many_micro_batches_as_stages_the_makespan_is_the_highest_of_one_line_per_stage():
    rng = np.random.default_rng(3)
    for _ in range(100):
        stages = int(rng.integers(1, 8))
        f, b = whole_times(rng, 20, stages)
        lines = one_f_one_b_lines(f, b)
        slopes, offsets = lines.slope, lines.offset
        assert slopes.tolist() == (f + b).tolist()
        for micro_batches in (stages + 1, stages + 2, 3 * stages):
            expected = one_f_one_b_by_recurrence(f, b, micro_batches)
            assert (slopes * micro_batches + offsets).max(axis=1).tolist() == expected.tolist()


def test_the_makespan_is_linear_from_the_stated_point_on_and_not_before():
    rng = np.random.default_rng(4)
    bent_before = 0
    for _ in range(300):
        stages = int(rng.integers(2, 7))
        f, b = rng.integers(1, 6, (2, stages)).astype(float)
        start = int(one_f_one_b_lines(f, b).linear_from())
        at = [float(one_f_one_b_by_recurrence(f, b, m)) for m in range(start - 1, start + 6)]
        steps = np.diff(at)
        assert (steps[1:] == (f + b).max()).all(), (f, b, start)
        bent_before += start > stages + 1 and steps[0] < (f + b).max()
    assert bent_before > 20  # The point is not merely late enough.


def test_a_stage_that_is_nearly_the_slowest_delays_the_linear_part():
    assert float(one_f_one_b_lines([10.0, 1.0, 1.0], [10.0, 1.0, 1.0]).linear_from()) == 4
    assert float(one_f_one_b_lines([10.0, 1.0, 9.99], [10.0, 1.0, 9.99]).linear_from()) > 100


def test_splits_are_timed_together_as_they_are_one_by_one():
    rng = np.random.default_rng(5)
    f, b = rng.random((2, 4, 3, 6))
    together = one_f_one_b(f, b, 9)
    assert together.shape == (4, 3)
    assert together[2, 1] == one_f_one_b(f[2, 1], b[2, 1], 9)


def test_of_equal_layers_the_peak_is_that_of_their_averages():
    profile = uniform(7, 1.0, 2.0, static_bytes=60.0, activation_bytes=5.0)
    assert peak_bytes(profile, [[3, 2, 2], [2, 2, 3]], samples=2).tolist() == (
        peak_bytes_of_averages([[3, 2, 2], [2, 2, 3]], 10.0, 40.0, 10.0, 10.0).tolist()
    )


def test_no_more_micro_batches_are_in_flight_than_there_are():
    assert peak_bytes_of_averages([1, 1, 1, 1], 0, 0, 0, 1.0).tolist() == [4, 3, 2, 1]
    assert peak_bytes_of_averages([1, 1, 1, 1], 0, 0, 0, 1.0, micro_batches=2).tolist() == [2, 2, 2, 1]


@pytest.mark.parametrize(("forward", "micro_batches"), [([], 1), ([1.0], 0), (3.0, 1), ([1.0, 2.0], 1)])
def test_a_pipeline_without_stages_or_micro_batches_is_refused(forward, micro_batches):
    with pytest.raises(PlanInfeasible):
        one_f_one_b(forward, [1.0], micro_batches)
