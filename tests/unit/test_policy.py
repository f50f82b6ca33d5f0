"""The choice among recoveries, made beforehand for roles and looked up for names."""

import random
import time

import pytest

from chaosnet.protocols.errors import PlanInfeasible
from chaosnet.scheduler.elastic.cluster import Cluster, Worker, alike
from chaosnet.scheduler.elastic.plan import Pipeline, check, cuts_of, even
from chaosnet.scheduler.elastic.policy import Choice, FaultClock, RecoveryPolicy, choose
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.recoveries import Recoveries, Refusal
from chaosnet.scheduler.elastic.state import State

LAYERS = 12
PROFILE = uniform(LAYERS, 0.25, 0.5, static_bytes=6e9, boundary_bytes=1e6)


def state_of(dp, pp, idle=()):
    pipelines = tuple(
        Pipeline(tuple(f"p{i}s{s}" for s in range(pp)), cuts_of(even(LAYERS, pp))) for i in range(dp)
    )
    return State(pipelines, (6,) * dp, 1, idle=frozenset(idle))


def policy_of(state, **options):
    return RecoveryPolicy(Recoveries(PROFILE, alike(list(state.held)), **options), state)


def test_faults_seen_so_far_say_how_long_until_the_next():
    clock = FaultClock(expected_s=100.0)
    assert clock.between_s == 100.0
    clock.watched(300.0, lost=1)
    assert clock.between_s == 200.0 and clock.together == 1
    clock.watched(100.0)
    clock.watched(100.0, lost=2)
    assert clock.between_s == 200.0 and clock.together == 2
    with pytest.raises(PlanInfeasible, match=r"seconds between faults: 0 \(expected > 0\)"):
        FaultClock(0.0)


def test_frequent_faults_favour_short_transitions():
    state = state_of(3, 3)
    policy = policy_of(state)
    calm = policy.lost("p1s1").recovery
    policy.faults = FaultClock(3.0)
    stormy = policy.lost("p1s1").recovery
    assert stormy.transition_s < calm.transition_s and stormy.step_s > calm.step_s


def test_what_was_worked_out_for_a_role_is_what_would_be_for_any_of_its_workers():
    state = state_of(4, 3, idle=["x", "y"])
    ahead, fresh = policy_of(state), policy_of(state)
    kinds = [*ahead.prepare(2)][-1]
    rng = random.Random(3)
    for _ in range(40):
        lost = rng.sample(sorted(state.held), rng.choice([1, 2]))
        found = ahead.lost(*lost)
        expected = choose(fresh.recoveries.of(state.after(lost, ())), fresh.faults.between_s)
        assert found.recovery.step_s == expected.recovery.step_s
        assert found.recovery.transition_s == pytest.approx(expected.recovery.transition_s)
        check(found.recovery.plan, state.batch)
        assert found.recovery.state.held.keys() == state.held.keys() - {*lost}
    assert len(ahead._known) == kinds, "nothing had to be worked out on the spot"


def test_a_loss_without_a_way_to_go_on_is_prepared_for_like_others():
    policy = policy_of(state_of(1, 2), families=("reroute", "resize"))
    assert [*policy.prepare(1)] == [1, 2]
    with pytest.raises(PlanInfeasible, match="no way to go on: reroute: layer 0: nobody is left"):
        policy.lost("p0s0")


def test_kinds_of_losses_do_not_grow_with_the_number_of_pipelines():
    counts = [[*policy_of(state_of(dp, 3)).prepare(2)][-1] for dp in (3, 12)]
    # One of 3 stages; two of one pipeline: 3; two of two: 6.
    assert counts == [12, 12]


def test_measured_links_make_every_worker_one_of_its_own():
    state = state_of(3, 2)
    cluster = Cluster(alike(list(state.held)).workers, rates_bps={("p0s0", "p0s1"): 1e9})
    policy = RecoveryPolicy(Recoveries(PROFILE, cluster, families=("reroute",)), state)
    assert [*policy.prepare(1)][-1] == 6


def test_the_loss_of_an_idle_worker_is_not_taken_for_that_of_one_that_is_slower():
    """The place of p0s0 is filled by whoever is left: prepared with the fast one, it was predicted to be as fast."""
    state = state_of(2, 1, idle=["a-slow", "b-fast"])
    workers = alike(list(state.held)).workers | {"a-slow": Worker(0.5)}
    policy = RecoveryPolicy(Recoveries(PROFILE, Cluster(workers), families=("fill",)), state)
    assert [*policy.prepare(2)][-1] == 7, "one of three kinds; two of one pipeline each, or of two kinds"
    for lost in (("p0s0", "a-slow"), ("p0s0", "b-fast")):
        expected = choose(policy.recoveries.of(state.after(lost, ())), 3600.0)
        assert policy.lost(*lost).recovery.step_s == expected.recovery.step_s


def test_looking_up_a_loss_takes_little_of_what_working_it_out_takes():
    state = state_of(8, 4)
    policy = policy_of(state)
    started_s = time.perf_counter()
    assert [*policy.prepare(1)][-1] == 4
    worked_out_s = time.perf_counter() - started_s
    looked_up_s = []
    for worker in sorted(state.held):
        started_s = time.perf_counter()
        assert policy.lost(worker).recovery
        looked_up_s.append(time.perf_counter() - started_s)
    assert sorted(looked_up_s)[16] < worked_out_s / 4 / 20


def test_the_explanation_ranks_candidates_and_names_the_workers_that_were_lost():
    policy = policy_of(state_of(3, 3))
    [*policy.prepare(1)]
    rows = policy.lost("p2s1").explain()
    scores = [row["score"] for row in rows if "score" in row]
    assert scores == sorted(scores, reverse=True) and len(scores) > 4
    assert {"family": "stay", "reason": "p2s1 lost (expected nobody)"} in rows


def test_the_loss_of_who_is_not_there_is_refused():
    policy = policy_of(state_of(2, 2))
    with pytest.raises(PlanInfeasible, match="worker 'z': not there"):
        policy.lost("z")


def test_without_any_way_to_go_on_all_reasons_are_told():
    with pytest.raises(PlanInfeasible, match="no way to go on: reroute: a; layout: b"):
        choose([Refusal("reroute", "a"), Refusal("layout", "b")], 100.0)


def test_whoever_comes_is_given_a_role():
    state = state_of(2, 2)
    policy = RecoveryPolicy(Recoveries(PROFILE, alike([*state.held, "new"])), state)
    choice = policy.came("new")
    assert isinstance(choice, Choice) and {each.family for each in choice.ranking} >= {"stay", "layout"}
