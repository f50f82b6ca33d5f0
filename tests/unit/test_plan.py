"""What a plan must be, and what is said of one that is not."""

import re
from dataclasses import replace

import pytest

from chaosnet.protocols.errors import PlanInfeasible
from chaosnet.scheduler.elastic.plan import Hop, MicroBatch, Pipeline, Plan, check, of_pipelines, without

PLACEMENT = {"a": range(2), "b": range(2, 4)}
ROUTE = (Hop("a", 0, 2), Hop("b", 2, 4))


def plan(*routes, placement=None):
    micro_batches = tuple(MicroBatch(turn, 2, route) for turn, route in enumerate(routes))
    return Plan(4, placement or PLACEMENT, micro_batches)


def test_a_plan_that_trains_all_layers_on_all_samples_passes():
    check(plan(ROUTE, ROUTE), 4)


@pytest.mark.parametrize(
    ("bad", "samples", "told"),
    [
        (plan(ROUTE, placement={"a": range(2)}), 2, "layer 2: held by nobody (expected at least one worker)"),
        (plan(ROUTE[:1]), 2, "micro-batch 0: ends after 2 layers (expected 4)"),
        (plan((Hop("a", 0, 1), Hop("b", 2, 4))), 2,
         "micro-batch 0: layers [2, 4) on b follow layer 0 (expected to go on with 1)"),
        (plan((Hop("a", 0, 3), Hop("b", 3, 4))), 2, "micro-batch 0: a runs layers [0, 3) (it holds [0, 2))"),
        (plan(ROUTE), 3, "samples: 2 in all micro-batches (expected 3)"),
        (replace(plan(), micro_batches=(MicroBatch(0, 0, ROUTE),)), 0,
         "micro-batch 0: 0 samples (expected at least 1)"),
        (plan((Hop("a", 0, 2), Hop("b", 2, 4)), (Hop("b", 0, 2), Hop("a", 2, 4)),
              placement={"a": range(4), "b": range(4)}), 4, "stage order: a -> b -> a is a cycle"),
    ],
)  # fmt: skip
def test_a_plan_that_does_not_says_what_is_wrong(bad, samples, told):
    with pytest.raises(PlanInfeasible, match="^" + re.escape(told) + "$"):
        check(bad, samples)


def test_micro_batches_of_a_lost_worker_go_to_its_peers_in_turn():
    pipelines = [Pipeline((f"{name}0", f"{name}1"), (0, 2, 4)) for name in "abc"]
    rerouted = without(pipelines, [4, 4, 4], 1, {"b1"}, resize=False)
    detours = [each.route[1].worker for each in rerouted.micro_batches if each.route[0].worker == "b0"]
    assert sorted(detours) == ["a1", "a1", "c1", "c1"]


def test_samples_that_cannot_be_cut_evenly_go_around():
    pipelines = [Pipeline((f"{name}0", f"{name}1"), (0, 2, 4)) for name in "abc"]
    resized = without(pipelines, [4, 4, 4], 1, {"b1"}, resize=True)
    by_turn = [
        sum(
            each.samples
            for each in resized.micro_batches
            if each.turn == turn and each.route[1].worker == "a1"
        )
        for turn in range(4)
    ]
    assert sorted(by_turn) == [1, 1, 2, 2]


def test_the_loss_of_all_that_hold_a_layer_is_named():
    with pytest.raises(PlanInfeasible, match="layer 2: nobody is left that holds it"):
        without([Pipeline(("a", "b"), (0, 2, 4))], [1], 1, {"b"}, resize=False)
    assert of_pipelines([Pipeline(("a", "b"), (0, 2, 4))], [1], 1).samples == 1
