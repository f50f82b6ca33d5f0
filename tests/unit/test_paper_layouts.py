"""Chameleon, Sec. IV-A (Algorithm 1) and IV-C (Eq. 9 to 14), against pipeline_time and layouts."""

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.layouts import (
    best_layout,
    distribute_batch,
    get_execution_plan,
    get_parallel_strategy,
    integer_partition,
)
from chaosnet.scheduler.elastic.pipeline_time import (
    asymmetric_step_s,
    one_f_one_b,
    peak_bytes_of_averages,
    rerouted_step_after_failures_s,
    rerouted_step_s,
    symmetric_step_s,
)
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.splits import PipelineTimes


@pytest.mark.parametrize("stages", [1, 2, 5, 8])
@pytest.mark.parametrize("micro_batches", [1, 3, 8, 20])
def test_equation_9_is_equation_11_where_stages_are_equal(stages, micro_batches):
    expected = symmetric_step_s(stages, micro_batches, 3.0, 5.0)
    assert one_f_one_b([3.0] * stages, [5.0] * stages, micro_batches) == expected


def test_equation_10_is_the_slowest_pipeline():
    assert asymmetric_step_s([3.0, 7.0, 5.0]) == 7.0
    with pytest.raises(PlanInfeasible, match="pipelines: 0"):
        asymmetric_step_s([])


def test_equation_12_is_equation_13_with_one_failure():
    assert rerouted_step_s(4, 8, 3, 1.0, 2.0) == (4 + 8 - 1 + 8 / 2) * 3
    for stage in range(4):
        failed = [int(i == stage) for i in range(4)]
        assert rerouted_step_after_failures_s(failed, 8, 3, 1.0, 2.0) == rerouted_step_s(4, 8, 3, 1.0, 2.0)


def test_equation_13_counts_only_stages_that_lost_somebody():
    assert rerouted_step_after_failures_s([0, 2, 1], 6, 4, 1.0, 1.0) == (3 + 6 - 1 + 6 * 2 / 2 + 6 / 3) * 2
    assert rerouted_step_after_failures_s([0, 0, 0], 6, 4, 1.0, 1.0) == symmetric_step_s(3, 6, 1.0, 1.0)


@pytest.mark.parametrize("lost", [3, 4])
def test_after_equation_13_a_stage_without_workers_cannot_be_rerouted(lost):
    with pytest.raises(PlanInfeasible, match=rf"stage 1: {lost} of its 3 workers failed"):
        rerouted_step_after_failures_s([0, lost], 8, 3, 1.0, 1.0)


def test_equation_14_is_static_memory_and_activations_of_what_is_in_flight():
    # N_l (m_p + m_o + m_g) + (N_pp - i) N_l m_a, stages from 0.
    assert peak_bytes_of_averages([2, 3, 3], 1.0, 6.0, 1.0, 4.0).tolist() == [
        2 * 8 + 3 * 2 * 4,
        3 * 8 + 2 * 3 * 4,
        3 * 8 + 1 * 3 * 4,
    ]


def test_integer_partition_finds_the_pipelines_of_figure_12():
    # "symmetric parallelism (DP=4, PP=2) to asymmetric pipelines with length [2, 2, 3]".
    assert list(integer_partition(7, 3, [2, 3])) == [(3, 2, 2)]


def test_integer_partition_gives_each_set_of_lengths_once():
    found = list(integer_partition(20, 5, range(2, 8)))
    grid = np.stack(np.meshgrid(*[np.arange(2, 8)] * 5), -1).reshape(-1, 5)
    expected = {tuple(sorted(map(int, each), reverse=True)) for each in grid if each.sum() == 20}
    assert len(found) == len(set(found))
    assert set(found) == expected


def test_get_parallel_strategy_goes_through_1_to_n_f_faults():
    found = list(get_parallel_strategy(8, 2, [2, 3], [2, 3, 4]))
    assert set(found) == {(2, (4, 3)), (3, (3, 2, 2)), (2, (4, 2)), (2, (3, 3)), (3, (2, 2, 2))}


def test_distribute_batch_is_in_proportion_and_the_rest_one_by_one():
    assert distribute_batch(14, [3, 2, 2]) == (6, 4, 4)
    assert distribute_batch(16, [3, 2, 2]) == (7, 5, 4)  # 6, 4, 4, and two that are left.


def test_distribute_batch_fills_who_has_none_from_who_has_most():
    # "we reassign one micro-batch from the largest partition to fill these"
    assert distribute_batch(4, [16, 1, 1, 1]) == (1, 1, 1, 1)
    assert distribute_batch(7, [16, 2, 2]) == (5, 1, 1)
    with pytest.raises(PlanInfeasible, match="2 for 3 pipelines, 1 too few"):
        distribute_batch(2, [2, 2, 2])


def test_split_gives_nine_layers_to_four_stages_as_in_figure_3():
    # "DP = 2 and PP = 4, with the model layers distributed as (2,2,2,3)": one of the ways that are tried.
    sizes = PipelineTimes(uniform(9, 1.0, 2.0)).split(4, 8)
    assert sorted(sizes) == [2, 2, 2, 3]
    by_hand = {
        way: float(one_f_one_b(np.array(way), 2.0 * np.array(way), 8))
        for way in [(3, 2, 2, 2), (2, 3, 2, 2), (2, 2, 3, 2), (2, 2, 2, 3)]
    }
    assert by_hand[sizes] == min(by_hand.values())


def test_split_leaves_out_what_does_not_fit():
    # The first stage keeps activations of three micro-batches, the last of one.
    profile = uniform(4, 1.0, 2.0, static_bytes=1.0, activation_bytes=10.0)
    assert PipelineTimes(profile, memory_bytes=32.0).split(3, 8) == (1, 1, 2)


def test_algorithm_1_finds_the_pipelines_of_figure_12_after_a_failure():
    # Sec. V-D: 8 workers as (DP 4, PP 2), one fails; "asymmetric pipelines with length [2, 2, 3]".
    found = get_execution_plan(PipelineTimes(uniform(32, 1.0, 2.0)), 8, 1, [3], [2, 3], 32)
    assert sorted(len(group.sizes) for group in found.groups for _ in range(group.count)) == [2, 2, 3]
    assert found.workers == 7


def test_the_default_is_never_worse_than_algorithm_1():
    rng = np.random.default_rng(6)
    better = compared = infeasible = 0
    while compared < 500:
        layers, dp = int(rng.integers(4, 13)), int(rng.integers(1, 6))
        low = int(rng.integers(1, 4))
        stages = range(low, low + int(rng.integers(1, 5)))
        pipelines = [count for count in (dp - 1, dp, dp + 1) if count > 0]
        memory = float(rng.choice([np.inf, 300.0, 150.0, 100.0]))
        profile = uniform(
            layers,
            1.0,
            float(rng.integers(1, 4)),
            static_bytes=float(rng.integers(0, 40)),
            activation_bytes=4.0,
        )
        times = PipelineTimes(profile, memory_bytes=memory)
        workers, micro_batches = int(rng.integers(2, 26)), int(rng.integers(1, 24))
        try:
            reference = get_execution_plan(times, workers, 1, pipelines, stages, micro_batches)
        except PlanInfeasible:
            infeasible += 1
            continue
        found = best_layout(times, workers - 1, pipelines, stages, micro_batches)
        assert found.time_s <= reference.time_s
        better += found.time_s < reference.time_s
        compared += 1
    print(
        f"\nstrictly better than Algorithm 1 in {better} of {compared} cases ({infeasible} had no plan by it)"
    )
    assert better > 0
