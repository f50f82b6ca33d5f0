"""Chameleon, Sec. IV-C: times and memory of compiled programs are those of the equations, where these apply."""

import random
from itertools import pairwise

import pytest

from chaosnet.protocols.errors import PlanInfeasible
from chaosnet.scheduler.elastic.cluster import Cluster, Worker, alike
from chaosnet.scheduler.elastic.estimator import (
    Estimator,
    Execution,
    ProfiledCosts,
    check_memory,
    excess_bytes,
    peak_bytes,
    time_program,
)  # fmt: skip
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, even, of_pipelines, without
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.program import Op, compile_plan

FORWARD_S, BACKWARD_S = 0.25, 0.5  # Sums of these are exact.


def pipelines(dp, pp, layers):
    return [Pipeline(tuple(f"p{i}s{s}" for s in range(pp)), cuts_of(even(layers, pp))) for i in range(dp)]


def costs_of(profile, plan, **options):
    return ProfiledCosts(profile, alike(list(plan.placement)), **options)


def test_equation_9_a_symmetric_pipeline_takes_n_pp_plus_n_m_minus_1_times():
    """t_step = (N_pp + N_m - 1) (T_f + T_b)"""
    for dp, pp, micro_batches in [(1, 1, 1), (2, 3, 4), (3, 4, 8), (4, 6, 2), (2, 8, 16)]:
        plan = of_pipelines(pipelines(dp, pp, 24), [micro_batches] * dp, 1)
        profile = uniform(24, FORWARD_S, BACKWARD_S)
        stage_s = 24 / pp * (FORWARD_S + BACKWARD_S)
        found = Estimator(costs_of(profile, plan)).estimate(plan)
        assert found.step_s == (pp + micro_batches - 1) * stage_s


def test_equation_10_the_slowest_pipeline_is_the_step():
    """t_step = max over pipelines of their times"""
    profile = uniform(12, FORWARD_S, BACKWARD_S)
    both = [pipelines(1, 3, 12)[0], Pipeline(("x", "y"), (0, 6, 12))]
    plan = of_pipelines(both, [5, 4], 1)
    costs = costs_of(profile, plan)
    alone = [
        Estimator(costs).estimate(of_pipelines([each], [count], 1))
        for each, count in zip(both, [5, 4], strict=True)
    ]
    assert Estimator(costs).estimate(plan).step_s == max(each.step_s for each in alone)
    assert alone[0].step_s != alone[1].step_s


def starts_by_equation_11(program, costs):
    """t_start = max(end of the one before on this stage, end of what it depends on), in plain recursion."""
    hops = {
        (hop.worker, number): position
        for number, each in enumerate(program.plan.micro_batches)
        for position, hop in enumerate(each.route)
    }
    order = {
        worker: [line for line in lines if line.op in (Op.FORWARD, Op.BACKWARD)]
        for worker, lines in program.instructions.items()
    }
    before = {
        (worker, line.op, line.micro_batches): (worker, previous.op, previous.micro_batches)
        for worker, lines in order.items()
        for previous, line in pairwise(lines)
    }
    lines = {(worker, line.op, line.micro_batches): line for worker in order for line in order[worker]}
    ends = {}

    def end_s(key):
        if key not in ends:
            worker, op, numbers = key
            route = program.plan.micro_batches[numbers[0]].route
            at = hops[worker, numbers[0]] + (-1 if op is Op.FORWARD else 1)
            depends = [before[key]] if key in before else []
            if 0 <= at < len(route):
                depends.append((route[at].worker, op, numbers))
            elif op is Op.BACKWARD:
                depends.append((worker, Op.FORWARD, numbers))
            start_s = max((end_s(each) for each in depends), default=0.0)
            samples = program.plan.micro_batches[numbers[0]].samples
            ends[key] = start_s + costs.compute_s(worker, op, *lines[key].layers, samples)
        return ends[key]

    return max(end_s(key) for key in lines)


def test_equation_11_uneven_pipelines_take_what_the_recursion_says():
    rng = random.Random(11)
    for _ in range(300):
        layers = rng.randint(4, 12)
        stages = rng.randint(1, 4)
        cuts = (0, *sorted(rng.sample(range(1, layers), stages - 1)), layers)
        plan = of_pipelines([Pipeline(tuple("abcd"[:stages]), cuts)], [rng.randint(1, 9)], 2)
        speeds = {worker: Worker(rng.choice([0.5, 1.0, 2.0])) for worker in "abcd"}
        costs = ProfiledCosts(uniform(layers, FORWARD_S, BACKWARD_S), Cluster(speeds))
        program = compile_plan(plan, costs)
        assert time_program(program, costs).step_s == starts_by_equation_11(program, costs)


def test_equation_14_peaks_are_static_memory_and_n_pp_minus_i_activations():
    """M_i = N_l (m_p + m_o + m_g) + (N_pp - i) N_l m_a, with i from 0."""
    pp, layers, static, activation = 4, 12, 600.0, 7.0
    plan = of_pipelines(pipelines(2, pp, layers), [8, 8], 1)
    profile = uniform(layers, FORWARD_S, BACKWARD_S, static_bytes=static, activation_bytes=activation)
    peaks = peak_bytes(compile_plan(plan, costs_of(profile, plan)), profile)
    for i in range(pp):
        expected = layers / pp * static + (pp - i) * layers / pp * activation
        assert peaks[f"p0s{i}"] == pytest.approx(expected)


def test_zero_divides_optimizer_state_among_the_holders_of_a_layer():
    plan = of_pipelines(pipelines(4, 2, 4), [2] * 4, 1)
    profile = uniform(4, FORWARD_S, BACKWARD_S, static_bytes=600.0)
    program = compile_plan(plan)
    assert peak_bytes(program, profile)["p0s0"] == pytest.approx(2 * 600)
    assert peak_bytes(program, profile, zero=True)["p0s0"] == pytest.approx(2 * (200 + 400 / 4))


def test_a_backward_in_two_parts_shortens_a_step_after_a_loss_and_holds_more():
    """ReCycle's decoupled backward, as Chameleon (Sec. IV-C, Data rerouting) describes it."""
    lost = without(pipelines(3, 4, 24), [8] * 3, 1, {"p1s1"}, resize=False)
    profile = uniform(24, FORWARD_S, BACKWARD_S, activation_bytes=1.0)
    costs = costs_of(profile, lost)
    whole, split = (Estimator(costs, executions=[Execution(each)]).estimate(lost) for each in (False, True))
    assert split.step_s < whole.step_s
    assert Estimator(costs, executions=[Execution(), Execution(True)]).estimate(lost).step_s == split.step_s


def test_of_several_executions_the_fastest_that_fits_is_taken():
    lost = without(pipelines(3, 4, 24), [8] * 3, 1, {"p1s1"}, resize=False)
    profile = uniform(24, FORWARD_S, BACKWARD_S, activation_bytes=1.0)
    both = [Execution(True, 0), Execution(True, 3)]
    roomy = Estimator(costs_of(profile, lost), executions=both).estimate(lost)
    assert roomy.execution == both[1]
    small = alike(list(lost.placement), memory_bytes=max(roomy.peak_bytes.values()) - 1)
    tight = Estimator(ProfiledCosts(profile, small), executions=both).estimate(lost)
    assert tight.execution == both[0] and not excess_bytes(tight.peak_bytes, small)


def test_pipelines_that_differ_in_names_only_are_timed_once():
    plan = of_pipelines(pipelines(16, 4, 8), [4] * 16, 1)
    estimator = Estimator(costs_of(uniform(8, FORWARD_S, BACKWARD_S), plan))
    estimator.estimate(plan)
    assert len(estimator._known) == 1


def test_sums_of_gradients_come_round_after_round():
    profile = uniform(12, FORWARD_S, BACKWARD_S, static_bytes=6.0)  # One byte of gradients a layer.
    even_plan = of_pipelines([Pipeline(("a", "b"), (0, 6, 12)), Pipeline(("c", "d"), (0, 6, 12))], [2, 2], 1)
    uneven = of_pipelines([Pipeline(("a", "b"), (0, 6, 12)), Pipeline(("c", "d"), (0, 4, 12))], [2, 2], 1)
    cluster = alike("abcd", rate_bps=8.0)  # A byte a second.
    took = []
    for plan in (even_plan, uneven):
        costs = ProfiledCosts(profile, cluster)
        without_sums = Estimator(ProfiledCosts(uniform(12, FORWARD_S, BACKWARD_S), cluster)).estimate(plan)
        took.append(Estimator(costs).estimate(plan).step_s - without_sums.step_s)
    assert took == [6.0, pytest.approx(6.0 + 2.0)]  # Layers 0-3 and 6-11 at once, then 4-5.


def test_the_worker_farthest_over_its_memory_is_named():
    cluster = Cluster({"a": Worker(memory_bytes=10.0), "b": Worker(memory_bytes=10.0), "c": Worker()})
    check_memory({"a": 10.0, "b": 9.0, "c": 1e12}, cluster)
    with pytest.raises(PlanInfeasible, match=r"^worker b: 22 bytes at its peak, 12 over its memory$"):
        check_memory({"a": 11.0, "b": 22.0, "c": 1e12}, cluster)
