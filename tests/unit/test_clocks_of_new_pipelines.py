"""Clocks on top of pipelines that differ, which ElasWave does not have; and times that a schedule knows already."""

from dataclasses import replace

import pytest

from chaosnet.scheduler.elastic.cluster import alike
from chaosnet.scheduler.elastic.estimator import Estimator, Execution, ProfiledCosts, time_program
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, even, of_pipelines, without
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.program import compile_plan
from chaosnet.scheduler.elastic.recoveries import Recoveries, Recovery
from chaosnet.scheduler.elastic.state import State

PROFILE = uniform(10, 1.0, 2.0, static_bytes=600.0, activation_bytes=10.0, boundary_bytes=1e6)


def hit(stages=4, pipelines=3, count=12, families=("shrink", "layout", "clocks"), memory_bytes=float("inf")):
    names = [[f"p{i}s{s}" for s in range(stages)] for i in range(pipelines)]
    cuts = cuts_of(even(10, stages))
    state = State(tuple(Pipeline(tuple(each), cuts) for each in names), even(count, pipelines), 1)
    cluster = alike([name for each in names for name in each], memory_bytes)
    return Recoveries(PROFILE, cluster, families=families), state.after(("p0s1",), ())


def proposed(recoveries, state):
    return [each for each in recoveries.of(state) if isinstance(each, Recovery)]


def test_pipelines_that_differ_are_clocked_up_and_nothing_else_about_them_changes():
    recoveries, state = hit()
    found = proposed(recoveries, state)
    plain = [each for each in found if each.family in ("shrink", "layout")]
    clocked = [each for each in found if each.family == "clocks" and not each.state.lost]
    assert clocked
    for each in clocked:
        below = [other for other in plain if other.state == replace(each.state, clocks={})]
        assert below and each.step_s < below[0].step_s
        assert (each.transition_s, each.bytes_moved) == (below[0].transition_s, below[0].bytes_moved)
        assert all(1 < by <= recoveries.most_clock * (1 + 1e-9) for by in each.state.clocks.values())


def test_at_most_half_of_the_workers_are_clocked_up():
    recoveries, state = hit(stages=5, pipelines=2, count=7)
    for each in proposed(recoveries, state):
        if each.family == "clocks" and not each.state.lost:
            assert len(each.state.clocks) <= len(each.state.held) / 2


def test_who_has_no_other_layouts_has_no_clocks_on_top_of_them():
    recoveries, state = hit(families=("resize", "layers", "clocks"))
    assert {len(each.state.pipelines) for each in proposed(recoveries, state)} == {3}
    recoveries, state = hit(families=("shrink", "layout"))
    assert not any(each.state.clocks for each in proposed(recoveries, state))


@pytest.mark.parametrize("execution", [Execution(), Execution(True), Execution(True, 2)])
@pytest.mark.parametrize("resize", [False, True])
def test_a_schedule_ends_when_its_program_does_to_the_bit(execution, resize):
    _, state = hit()
    plan = without(state.pipelines, state.counts, 1, state.lost, resize)
    whole = of_pipelines([each for each in state.pipelines if "p0s1" not in each.workers], (5, 3), 1)
    for each in (plan, whole):
        bare = type(each)(each.layers, each.placement, each.micro_batches)  # Without sums.
        costs = ProfiledCosts(PROFILE, alike([*each.placement]))
        program = compile_plan(bare, costs, **execution._asdict())
        timing = time_program(program, costs)
        assert program.ends_s == timing.ends_s and program.computed_s == timing.step_s
        summed = Estimator(costs, executions=(execution,)).estimate(each).step_s
        assert summed > program.computed_s
