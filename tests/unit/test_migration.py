"""`chaosnet.scheduler.elastic.migration`: the step in which layers go to the next stage."""

import math
import random

import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.migration import of, transition
from chaosnet.scheduler.elastic.plan import Hop, Pipeline, check, cuts_of, of_pipelines, without

AB = Pipeline(("a", "b"), cuts_of((3, 3)))
CD = Pipeline(("c", "d"), cuts_of((3, 3)))


@pytest.mark.parametrize("seed", range(50))
def test_whoever_reaches_the_target_before_the_parameters_takes_the_shadow(seed):
    rng = random.Random(seed)
    arrival_s, first_s = rng.uniform(0, 12), rng.choice([0.0, rng.uniform(0, 2)])
    found = of(arrival_s, 1.0, 8, 100.0, 0.5, first_s)
    assert found.served == sum(first_s + j < arrival_s for j in range(8))
    assert found.payback_bytes == (100.0 if found.served else 0.0)


def test_a_payback_that_ends_before_the_step_adds_nothing():
    assert of(2.5, 1.0, 8, 100.0, 5.0).added_s == 0.0
    assert of(2.5, 1.0, 8, 100.0, 5.5).added_s == pytest.approx(0.5)


def test_not_blocking_never_adds_more_than_blocking_and_the_payback():
    rng = random.Random(1)
    for _ in range(200):
        payback_s = rng.uniform(0, 5)
        found = of(rng.uniform(0, 20), rng.uniform(0.1, 3), rng.randint(1, 9), 1.0, payback_s)
        assert 0 <= found.added_s <= found.blocked_s + payback_s


def test_parameters_that_come_after_the_step_are_waited_for():
    found = of(10.0, 1.0, 4, 100.0, 0.5)
    assert (found.served, found.blocked_s) == (4, 10.0)
    assert found.added_s == pytest.approx(6.5)


def test_late_micro_batches_run_the_layer_on_the_target_and_early_ones_on_the_shadow():
    plan = transition(of_pipelines([AB, CD], [3, 3], 2), range(2, 3), "a", "b", 2)
    routes = [each.route for each in plan.micro_batches if each.route[0].worker == "a"]
    late = (Hop("a", 0, 2), Hop("b", 2, 6))
    assert routes == [AB.stages, AB.stages, late]
    assert plan.placement == {"a": range(3), "b": range(2, 6), "c": range(3), "d": range(3, 6)}


def test_layers_move_to_the_stage_before_as_well():
    plan = transition(of_pipelines([AB], [2], 1), range(3, 5), "b", "a", 1)
    assert plan.micro_batches[1].route == (Hop("a", 0, 5), Hop("b", 5, 6))


def test_a_stage_may_give_all_it_has_away():
    plan = transition(of_pipelines([AB], [2], 1), range(3, 6), "b", "a", 1)
    assert [each.route for each in plan.micro_batches] == [AB.stages, (Hop("a", 0, 6),)]


@pytest.mark.parametrize("seed", range(20))
def test_the_step_of_the_move_is_a_valid_plan_in_which_source_and_target_sum_the_layer(seed):
    rng = random.Random(seed)
    pipelines = [
        Pipeline(tuple(f"w{i}.{s}" for s in range(3)), cuts_of((2, 3, 2))) for i in range(rng.randint(2, 4))
    ]
    counts = [rng.randint(2, 5) for _ in pipelines]
    lost = rng.sample(["w0.0", "w0.1"], rng.randint(0, 1))
    plan = without(pipelines, counts, 4, lost, resize=rng.random() < 0.5)
    for i in range(1, len(pipelines)):
        plan = transition(plan, range(4, 5), f"w{i}.1", f"w{i}.2", rng.randint(0, 4))
    check(plan, sum(counts) * 4)
    (bucket,) = (each for group in plan.sync for each in group if each.start <= 4 < each.stop)
    assert {f"w{i}.{s}" for i in range(1, len(pipelines)) for s in (1, 2)} <= set(bucket.holders)


@pytest.mark.parametrize(
    ("moved", "source", "target"),
    [
        (range(1, 2), "a", "b"),
        (range(2, 3), "a", "d"),
        (range(2, 2), "a", "b"),
        (range(2, 4), "a", "b"),
        (range(2, 3), "x", "b"),
    ],
)
def test_layers_that_do_not_adjoin_the_target_are_refused(moved, source, target):
    plan = of_pipelines([AB, Pipeline(("c", "d"), cuts_of((4, 2)))], [1, 1], 1)
    with pytest.raises(PlanInfeasible, match=f"cannot go from {source}"):
        transition(plan, moved, source, target, 1)


def test_micro_batches_that_take_no_time_are_refused():
    with pytest.raises(PlanInfeasible, match="3 micro-batches of 0 s"):
        of(1.0, 0.0, 3, 1.0, 1.0)
    assert math.isclose(of(0.0, 1.0, 3, 1.0, 1.0).added_s, 0.0)
