"""What the papers say of their recoveries, of the plans that stand for them here."""

import random
from collections import Counter

import pytest

from chaosnet.scheduler.elastic.cluster import alike
from chaosnet.scheduler.elastic.estimator import (
    Estimator,
    Execution,
    ProfiledCosts,
    staggered_step_s,
    time_program,
)  # fmt: skip
from chaosnet.scheduler.elastic.pipeline_time import rerouted_step_after_failures_s, symmetric_step_s
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, even, of_pipelines, without
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.program import Op, compile_plan

LAYERS = 24
PROFILE = uniform(LAYERS, 0.25, 0.5)


def pipelines(dp, pp):
    return [Pipeline(tuple(f"p{i}s{s}" for s in range(pp)), cuts_of(even(LAYERS, pp))) for i in range(dp)]


def costs_of(plan):
    return ProfiledCosts(PROFILE, alike(list(plan.placement)))


def test_elaswave_sec_4_1_with_dp_3_and_size_2_a_failure_yields_dp_2_and_size_3():
    """The product DP x micro batch size remains constant (6)."""
    plan = without(pipelines(3, 3), [4] * 3, 2, {"p1s1"}, resize=True)
    program = compile_plan(plan)
    for worker, samples in (("p0s1", 3), ("p2s1", 3), ("p0s0", 2), ("p1s0", 2), ("p1s2", 2)):
        forwards = [line for line in program.instructions[worker] if line.op is Op.FORWARD]
        sizes = [
            sum(plan.micro_batches[number].samples for number in line.micro_batches) for line in forwards
        ]
        assert sizes == [samples] * 4, worker


def test_elaswave_sec_4_1_resizing_leaves_the_choreography_unchanged():
    """It only adjusts each micro batch's service time."""
    before = compile_plan(of_pipelines(pipelines(3, 3), [4] * 3, 2))
    after = compile_plan(without(pipelines(3, 3), [4] * 3, 2, {"p1s1"}, resize=True))
    for worker, lines in after.instructions.items():
        computed = [line.op for line in lines if line.op in (Op.FORWARD, Op.BACKWARD)]
        assert computed == [
            line.op for line in before.instructions[worker] if line.op in (Op.FORWARD, Op.BACKWARD)
        ]


def test_chameleon_sec_4_a_rerouting_distributes_micro_batches_evenly_to_data_parallel_peers():
    plan = without(pipelines(4, 3), [9] * 4, 1, {"p1s1"}, resize=False)
    detours = Counter(each.route[1].worker for each in plan.micro_batches if each.route[0].worker == "p1s0")
    assert detours == {"p0s1": 3, "p2s1": 3, "p3s1": 3}


def test_equations_12_and_13_beside_the_compiled_program():
    """No peer can do with less than its own work; with ReCycle's tricks the program needs no more than Eq. 13."""
    stage_s = LAYERS / 4 * 0.75
    for dp, lost in ((3, {"p1s1"}), (4, {"p1s1"}), (4, {"p1s1", "p2s3"}), (6, {"p0s0", "p1s0"})):
        plan = without(pipelines(dp, 4), [12] * dp, 1, lost, resize=False)
        failed = [sum(worker.endswith(f"s{stage}") for worker in lost) for stage in range(4)]
        printed_s = rerouted_step_after_failures_s(failed, 12, dp, 0.25 * LAYERS / 4, 0.5 * LAYERS / 4)
        executions = [Execution(True, more) for more in range(4)]
        found_s = Estimator(costs_of(plan), executions=executions).estimate(plan).step_s
        busiest = max(12 * dp / (dp - count) for count in failed)
        assert busiest * stage_s <= found_s <= printed_s
        assert printed_s > symmetric_step_s(4, 12, 0.25 * LAYERS / 4, 0.5 * LAYERS / 4)


def test_a_staggered_optimizer_is_never_later_than_a_barrier():
    rng = random.Random(7)
    earlier = 0
    for _ in range(40):
        dp, pp = rng.randint(2, 4), rng.randint(2, 4)
        lost = {f"p{rng.randrange(dp)}s{rng.randrange(pp)}"}
        plan = without(pipelines(dp, pp), [rng.randint(2, 6)] * dp, 1, lost, resize=False)
        program = compile_plan(plan, costs_of(plan), split_backward=True, more_in_flight=4)
        barrier_s = time_program(program, costs_of(plan)).step_s
        staggered_s = staggered_step_s(program, costs_of(plan))
        assert staggered_s <= barrier_s + 1e-9
        earlier += staggered_s < barrier_s - 1e-9
    assert earlier > 0


@pytest.mark.parametrize("resize", [False, True])
def test_a_lost_workers_micro_batches_keep_the_global_batch(resize):
    plan = without(pipelines(3, 3), [5] * 3, 2, {"p1s1", "p2s1"}, resize=resize)
    assert plan.samples == 30
