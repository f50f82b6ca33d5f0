"""What each family proposes, and what all of them have in common."""

import random

import pytest

from chaosnet.protocols.errors import PlanInfeasible
from chaosnet.scheduler.elastic.cluster import Cluster, Worker, alike
from chaosnet.scheduler.elastic.plan import Pipeline, check, cuts_of, even
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.recoveries import FAMILIES, Overheads, Recoveries, Recovery
from chaosnet.scheduler.elastic.state import State

LAYERS = 24
PROFILE = uniform(
    LAYERS, 0.25, 0.5, static_bytes=6e9, activation_bytes=1e8, boundary_bytes=1e6, model="made up"
)


def state_of(dp, pp, micro_batches=8, samples=2):
    pipelines = tuple(
        Pipeline(tuple(f"p{i}s{s}" for s in range(pp)), cuts_of(even(LAYERS, pp))) for i in range(dp)
    )
    return State(pipelines, (micro_batches,) * dp, samples)


def recoveries(state, more=(), **options):
    return Recoveries(PROFILE, alike([*state.held, *state.lost, *more]), **options)


def by_family(found):
    """The first of each: `clocks` comes on top of new pipelines, too."""
    return {each.family: each for each in reversed(found)}


@pytest.mark.slow
def test_every_recovery_is_a_valid_plan_of_the_same_batch_without_the_lost():
    rng = random.Random(5)
    seen = set()
    for _ in range(60):
        state = state_of(rng.randint(2, 4), rng.randint(1, 4), rng.randint(2, 6), rng.randint(1, 3))
        planner = recoveries(state, more=["new"])
        lost = rng.sample(sorted(state.held), rng.randint(0, 2))
        hit = state.after(lost, ["new"] if rng.random() < 0.5 else [])
        for each in planner.of(hit):
            if isinstance(each, Recovery):
                seen.add(each.family)
                check(each.plan, state.batch)
                assert each.state.held.keys() == hit.held.keys(), each.family
                assert not {*lost} & each.plan.placement.keys() and each.step_s > 0 and each.transition_s >= 0
    assert seen == {*FAMILIES}


def test_rerouting_and_resizing_move_nothing():
    state = state_of(3, 3)
    found = by_family(recoveries(state).of(state.after(["p1s1"], [])))
    assert found["reroute"].bytes_moved == found["resize"].bytes_moved == 0
    assert found["reroute"].transition_s == Overheads().edit_s


def test_layers_leave_the_stage_that_lost_a_worker():
    state = state_of(3, 3)
    found = by_family(recoveries(state).of(state.after(["p1s1"], [])))
    sizes = [hop.stop - hop.start for hop in found["layers"].state.pipelines[0].stages]
    assert sizes[1] < 8 < min(sizes[0], sizes[2])
    assert found["layers"].step_s < found["resize"].step_s


def test_clocks_take_the_slowest_stages_to_what_the_unhurt_need_and_no_further():
    state = state_of(8, 4)  # A layer more or less would be too much for any stage.
    found = by_family(recoveries(state, most_clock=2.0).of(state.after(["p1s1"], [])))
    raised = found["clocks"].state.clocks
    assert raised.keys() == {f"p{i}s1" for i in range(8) if i != 1}
    assert [*raised.values()] == pytest.approx([8 / 7] * 7)
    assert found["clocks"].step_s < found["layers"].step_s
    capped = by_family(recoveries(state, most_clock=1.05).of(state.after(["p1s1"], [])))["clocks"]
    assert [*capped.state.clocks.values()] == pytest.approx([1.05] * 7)


def test_a_stage_that_nobody_is_left_of_is_pulled_together_or_read_from_a_checkpoint():
    one = state_of(1, 3)
    found = by_family(recoveries(one).of(one.after(["p0s1"], [])))
    assert "layer 8: nobody" in found["reroute"].reason and isinstance(found["checkpoint"], Recovery)
    two = state_of(2, 3)
    found = by_family(recoveries(two).of(two.after(["p0s1"], [])))
    assert isinstance(found["layout"], Recovery) and isinstance(found["drop"], Recovery)


def test_whoever_comes_back_gets_the_place_it_had():
    state = state_of(2, 3).after(["p0s1"], [])
    rerouted = by_family(recoveries(state).of(state))["reroute"].state
    back = rerouted.after([], ["p0s1"])
    filled = by_family(recoveries(back).of(back))["fill"]
    assert filled.state.pipelines == rerouted.pipelines and not filled.state.lost and not filled.state.idle
    assert filled.bytes_moved > 0


def test_a_new_worker_takes_a_lost_ones_place():
    state = state_of(2, 3).after(["p0s1"], ["new"])
    filled = by_family(recoveries(state, more=["new"]).of(state))["fill"]
    assert filled.state.pipelines[0].workers == ("p0s0", "new", "p0s2")


def test_a_slow_worker_gets_less_to_do():
    state = state_of(2, 2)
    workers = dict.fromkeys(state.held, Worker()) | {"p1s1": Worker(speed=0.5)}
    found = by_family(Recoveries(PROFILE, Cluster(workers)).of(state))
    shrunk = found["shrink"].state
    layers = [hop.stop - hop.start for hop in shrunk.pipelines[1].stages]
    assert found["shrink"].step_s < found["stay"].step_s
    assert layers[1] < layers[0] and shrunk.counts[1] < shrunk.counts[0]


def test_what_does_not_fit_memory_is_refused_with_the_worker_and_the_excess():
    state = state_of(2, 2)
    hit = state.after(["p1s0"], [])
    found = by_family(Recoveries(PROFILE, alike(list(state.held), memory_bytes=12.2 * 6e9)).of(hit))
    assert "over its memory" in found["reroute"].reason and found["reroute"].reason.startswith(
        "worker p0s0: "
    )
    assert isinstance(found["layout"], Recovery)
    found = by_family(Recoveries(PROFILE, alike(list(state.held), memory_bytes=7 * 6e9)).of(hit))
    assert "memory" in found["layout"].reason


def test_transitions_that_are_not_hidden_take_as_long_as_their_transfers():
    state = state_of(3, 3)
    hit = state.after(["p1s1"], [])
    hidden = by_family(recoveries(state).of(hit))["layers"]
    shown = by_family(recoveries(state, overheads=Overheads(hidden=False)).of(hit))["layers"]
    assert shown.transition_s > hidden.transition_s and shown.bytes_moved == hidden.bytes_moved


def test_equation_8_is_throughput_times_the_share_of_time_that_is_not_transition():
    state = state_of(2, 2)
    found = by_family(recoveries(state).of(state.after(["p0s0"], [])))["layout"]
    expected = state.batch / found.step_s * (100.0 - found.transition_s) / 100.0
    assert found.score(100.0) == pytest.approx(expected)
    assert found.score(found.transition_s / 2) == 0


def test_the_last_copies_of_a_layer_count_with_what_their_loss_would_cost():
    state = state_of(3, 2)
    planner = recoveries(state)
    hit = state.after(["p1s0"], [])
    found = by_family(planner.of(hit))["resize"]  # Of five workers two hold the first layers, three the last.
    assert [found.fatal_share(together) for together in (0, 1, 2, 3)] == [0, 0, 1 / 10, (3 + 1) / 10]
    resort_s = planner.overheads.last_resort_s
    assert found.score(100.0, 1) == found.score(100.0)
    assert found.score(100.0, 2) == pytest.approx(found.score(100.0) * 100 / (100 + resort_s / 10))


def test_micro_batches_go_where_they_end_first():
    planner = recoveries(state_of(3, 3))
    pipelines = [Pipeline(("a",), (0, 24)), Pipeline(("b", "c", "d"), cuts_of((8, 8, 8)))]
    planner = Recoveries(PROFILE, alike("abcd"))
    counts = planner.balance.shares(pipelines, state_of(2, 2, micro_batches=6))
    assert sum(counts) == 12 and counts[1] > counts[0] >= 1
    with pytest.raises(PlanInfeasible, match="1 for 2 pipelines"):
        planner.balance.shares(pipelines, State((), (1,), 1))


def test_a_profile_of_another_model_or_with_negative_times_is_refused():
    state = state_of(2, 2)
    other = uniform(LAYERS + 1, 0.25, 0.5, model="another")
    with pytest.raises(
        PlanInfeasible, match=r"profile another: 25 layers \(expected 24, those of the plan\)"
    ):
        Recoveries(other, alike(list(state.held))).of(state)
    with pytest.raises(PlanInfeasible, match=r"layer 0: 0.25 and -1 s for 1 samples \(expected >= 0 s"):
        Recoveries(uniform(LAYERS, 0.25, -1.0), alike(list(state.held)))


def test_where_two_workers_have_no_link_plans_that_sum_gradients_over_it_are_the_worst():
    """A rate of 0 divided by zero in the first plan that needed it."""
    state = state_of(2, 2).after({"p0s1"}, ())
    cluster = Cluster(alike(list(state.held)).workers, rates_bps={("p0s0", "p1s0"): 0.0})
    found = by_family(Recoveries(PROFILE, cluster).of(state))
    assert found["reroute"].score(3600.0) == 0.0 < found["drop"].score(3600.0)


def test_a_profile_without_any_times_is_refused():
    with pytest.raises(PlanInfeasible, match="profile uniform: no layer takes any time"):
        Recoveries(uniform(4, 0.0, 0.0), alike(["a"]))


def test_over_slow_links_a_layout_has_fewer_pipelines_whose_gradients_are_summed():
    state = state_of(3, 2)
    hit = state.after(["p1s0"], [])
    found = {}
    for rate_bps in (1e12, 1e6):
        cluster = alike(list(state.held), rate_bps=rate_bps)
        found[rate_bps] = by_family(Recoveries(PROFILE, cluster, overheads=Overheads(hidden=False)).of(hit))[
            "layout"
        ]
    assert len(found[1e6].state.pipelines) == 1 < len(found[1e12].state.pipelines)
