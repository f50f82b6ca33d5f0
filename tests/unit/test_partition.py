"""Minimax partition against brute force."""

import itertools
import math

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.partition import mini_step_s, mini_step_sums, minimax
from chaosnet.scheduler.elastic.profile import uniform


def running(values: np.ndarray) -> np.ndarray:
    return np.concatenate([np.zeros((len(values), 1)), np.cumsum(values, axis=1)], axis=1)


def test_the_partition_is_the_best_of_all_that_fit():
    rng = np.random.default_rng(1)
    none = 0
    for _ in range(1000):
        layers = int(rng.integers(1, 9))
        stages = int(rng.integers(1, min(layers, 5) + 1))
        cost, memory = (
            running(rng.integers(0, 9, (stages, layers))),
            running(rng.integers(0, 9, (stages, layers))),
        )
        constants, limits = rng.integers(0, 5, stages), rng.integers(4, 30, stages)
        best = least_excess = math.inf
        for inner in itertools.combinations(range(1, layers), stages - 1):
            cuts = (0, *inner, layers)
            spans = [(p, cuts[p], cuts[p + 1]) for p in range(stages)]
            excess = max(memory[p, b] - memory[p, a] - limits[p] for p, a, b in spans)
            least_excess = min(least_excess, excess)
            if excess <= 0:
                best = min(best, max(cost[p, b] - cost[p, a] + constants[p] for p, a, b in spans))
        if math.isinf(best):
            none += 1
            with pytest.raises(
                PlanInfeasible, match=f"stage . of {stages} needs .*, {least_excess:.0f} over"
            ):
                minimax(cost, stages, constants, memory, limits)
            continue
        sizes, found = minimax(cost, stages, constants, memory, limits)
        assert found == best
        assert sum(sizes) == layers
        assert min(sizes) >= 1
        cuts = np.concatenate([[0], np.cumsum(sizes)])
        of_sizes = [cost[p, cuts[p + 1]] - cost[p, cuts[p]] + constants[p] for p in range(stages)]
        assert max(of_sizes) == found
    assert none > 100


def test_a_slow_stage_gets_fewer_layers_and_larger_micro_batches_too():
    profile = uniform(12, 1.0, 2.0)
    sums = mini_step_sums(profile, samples=[2, 2, 3], speeds=[1.0, 0.5, 1.0])
    assert sums.shape == (3, 13)
    assert sums[:, 1].tolist() == [6.0, 12.0, 9.0]  # A layer on each.
    assert minimax(sums, 3).sizes == (5, 3, 4)
    assert minimax(sums, 3).cost == 36.0


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanInfeasible, match="stages: 4 for 3 layers"):
        minimax([0.0, 1.0, 2.0, 3.0], 4)


def test_overlap_hides_a_transfer_and_nothing_else():
    assert mini_step_s(10.0, 20.0, 4.0, 5.0) == 39.0
    assert mini_step_s(10.0, 20.0, 4.0, 5.0, forward_overlap=0.25, backward_overlap=0.1) == 34.5
    assert mini_step_s(10.0, 20.0, 4.0, 5.0, forward_overlap=1.0, backward_overlap=1.0) == 30.0
    with pytest.raises(PlanInfeasible, match="overlap"):
        mini_step_s(1.0, 1.0, forward_overlap=1.5)
