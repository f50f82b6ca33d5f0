"""`chaosnet.scheduler.elastic.running`: which pipelines the members of a cluster run."""

import random
from collections import Counter
from dataclasses import replace
from itertools import combinations, permutations

import pytest

from chaosnet.protocols.errors import ConfigError, PlanInfeasible
from chaosnet.scheduler.elastic import program, running
from chaosnet.scheduler.elastic.cluster import Cluster, Worker
from chaosnet.scheduler.elastic.estimator import ProfiledCosts
from chaosnet.scheduler.elastic.keeping import PartsKept
from chaosnet.scheduler.elastic.plan import Pipeline, check, cuts_of
from chaosnet.scheduler.elastic.profile import Layer, Profile
from chaosnet.scheduler.elastic.program import compile_plan
from chaosnet.scheduler.elastic.running import Facts, Laid, check_wish, choose, lengths_of
from chaosnet.scheduler.elastic.traffic import Traffic

LAYERS = 9
CLUSTER = Cluster({name: Worker() for name in "abcd"}, latency_s=0.0)
COSTS = ((100, 200),) * LAYERS


def facts(micro_batches=16, stages=2, **more):
    return Facts(COSTS, micro_batches, stages, **more)


def stages_of(running):
    return [len(each.workers) for each in running.laid.pipelines]


def test_pipelines_are_told_with_a_range_only_where_a_stage_has_several_layers():
    pipelines = Pipeline(("a", "b", "c"), cuts_of((2, 1, 3))), Pipeline(("d",), cuts_of((6,)))
    assert str(Laid(pipelines, (8, 4), frozenset("b"))) == "a 0-1 > b 2 (gone) > c 3-5 x8 | d 0-5 x4"


def test_without_a_least_length_every_member_has_all_layers():
    running = choose("abcd", facts(stages=1))
    assert stages_of(running) == [1, 1, 1, 1]
    assert running.predicted_us == 16 / 4 * LAYERS * 300


def test_no_pipeline_is_shorter_than_asked_unless_members_are_few():
    assert stages_of(choose("abcd", facts())) == [2, 2]
    assert stages_of(choose("a", facts())) == [1]


def test_micro_batches_of_all_pipelines_are_those_of_the_step():
    for members in ("a", "abc", "abcdefg"):
        running = choose(members, facts())
        check(running.plan, 16)
        assert sum(running.laid.counts) == 16


def test_after_a_loss_what_takes_the_shortest_step_runs_and_the_rest_is_told():
    before = choose("abcd", facts())
    after = choose("abd", facts(), before.laid)
    ways = {after.why: after.predicted_us, **dict(after.others)}
    assert ways.keys() == {"layout", "reroute"}
    assert after.predicted_us == min(ways.values())
    assert "c" not in after.program.instructions


def test_a_loss_is_rerouted_around_where_that_is_fastest():
    wanted = facts(micro_batches=8, wish="4x2")
    before = choose("abcdefgh", wanted)
    after = choose("bcdefgh", wanted, before.laid)
    assert after.why == "reroute"
    assert after.laid.lost == {"a"}


def test_what_runs_stays_while_nobody_comes_or_goes_and_nothing_is_much_better():
    before = choose("abcd", facts())
    assert choose("abcd", facts(), before.laid).laid == before.laid
    assert choose("abcd", facts(speeds={"a": 0.97}), before.laid).why == "stay"


def test_who_comes_is_given_work():
    before = choose("ab", facts())
    after = choose("abcd", facts(), before.laid)
    assert {*after.program.instructions} == {*"abcd"}


def test_a_slow_member_gets_less():
    before = choose("abcd", facts())
    after = choose("abcd", facts(speeds={"a": 0.5}), before.laid)
    slow = next(i for i, each in enumerate(after.laid.pipelines) if "a" in each.workers)
    assert after.laid.counts[slow] < after.laid.counts[1 - slow]
    kept = dict(after.others)["stay"]
    assert after.predicted_us < 0.85 * kept


def test_pipelines_that_are_asked_for_run_if_there_are_members_enough():
    wanted = facts(wish="4+2+1")
    assert stages_of(choose("abcdefg", wanted)) == [4, 2, 1]
    assert stages_of(choose("abc", wanted)) != [4, 2, 1]


def test_all_members_come_to_the_same_whatever_they_have_planned_before():
    """A joiner has planned nothing yet, and tables of others are warm."""
    before = choose("abcdef", facts())
    here = choose("abcde", facts(), before.laid)
    there = choose(tuple("abcde"), facts(), Laid.from_plain(before.laid.to_plain()))
    assert here.laid == there.laid and here.program == there.program


def test_more_pipelines_than_micro_batches_are_not_asked_for():
    assert sum(choose("abcdefgh", facts(micro_batches=2, stages=1)).laid.counts) == 2


@pytest.mark.parametrize(
    ("wish", "lengths"), [("2+2", (2, 2)), ("4+2+1", (4, 2, 1)), ("2x3", (3, 3)), ("5", (5,))]
)
def test_a_wish_says_how_long_pipelines_are(wish, lengths):
    assert lengths_of(wish) == lengths


@pytest.mark.parametrize("wish", ["", "2+", "two", "0+2", "2x", "2x2x2", "-1"])
def test_a_wish_that_says_nothing_is_refused_by_its_text(wish):
    with pytest.raises(ConfigError, match="layout: "):
        lengths_of(wish)


def test_nothing_that_could_run_is_an_error():
    with pytest.raises(PlanInfeasible):
        choose((), facts())


@pytest.mark.parametrize("wish", ["1", "2", "1+1", "3", "2+1"])
def test_a_layout_that_is_asked_for_runs_also_if_what_runs_is_faster(wish):
    slow = {"b": 0.1, "c": 0.1}
    alone = choose("abc", facts(wish="1", speeds=slow)).laid
    asked = choose("abc", facts(wish=wish, speeds=slow), alone)
    assert stages_of(asked) == list(lengths_of(wish))


@pytest.mark.parametrize("costs", [(3, 2, 2, 2), (2, 3, 2, 2), (1, 1, 1, 1), (1, 4, 2, 1)])
def test_one_more_forward_in_flight_never_makes_a_step_longer(costs):
    told = Facts(tuple((100 * each, 200 * each) for each in costs), 8, wish="4")
    running = choose("abcd", told)
    plain = compile_plan(replace(running.plan, sync=()), costs_of(costs)).computed_s
    assert running.predicted_us <= plain


def costs_of(layers):
    made = tuple(Layer({1: (100.0 * each, 200.0 * each)}, 0.0, 0.0, 0.0, 0.0, 0.0) for each in layers)
    return ProfiledCosts(Profile("equal", made), CLUSTER)


def test_a_wish_outlives_a_member_and_holds_again_when_there_are_enough():
    wanted = facts(wish="3+1")
    before = choose("abcd", wanted)
    assert stages_of(before) == [3, 1]
    without_d = choose("abc", wanted, before.laid)  # Whatever is the fastest of three.
    assert {without_d.why, *(why for why, _ in without_d.others)} == {"layout", "reroute"}
    assert without_d.predicted_us <= min(us for _, us in without_d.others)
    with_e = choose("abce", wanted, without_d.laid)
    assert stages_of(with_e) == [3, 1]
    assert stages_of(choose("abce", facts(), with_e.laid)) in (
        [2, 2],
        [3, 1],
    )  # Taken back: the fastest, or as it is.


@pytest.mark.parametrize(
    ("wish", "says"),
    [
        ("10", "a pipeline of 10 stages .expected at most 9, as the model has 9 layers"),
        ("1+1+1", "3 pipelines .expected at most 2, the micro-batches"),
        ("3+2", "takes 5 members .there are 4"),
        ("two", "expected stages of each pipeline"),
    ],
)
def test_what_is_wrong_with_a_wish_is_named(wish, says):
    with pytest.raises(ConfigError, match=f"layout: '{wish[0]}.*{says}"):
        check_wish(wish, LAYERS, 2, 4)


def test_what_can_run_and_the_fastest_are_no_wrong_wishes():
    for wish in ("2+2", "4", "2x1", "auto"):
        check_wish(wish, LAYERS, 2, 4)


# --- where members keep parts of the state ---

MB = 1_000_000


def parts(size_mb, members="abcd", copies=2, table=None):
    users = tuple((layer,) for layer in range(LAYERS))
    table = table or ((members[0],),) * LAYERS
    return PartsKept(users, (size_mb * MB,) * LAYERS, table, copies, tuple(members))


def links(members, mbit=800):
    """A byte takes 0.01 us."""
    return Traffic(
        out_bytes=(1,) * LAYERS,
        rates_mbit=dict.fromkeys(permutations(members, 2), mbit),
        links=tuple(combinations(members, 2)),
    )


def test_waiting_for_parameters_is_in_what_is_predicted():
    """Two pipelines of two: of each layer one of the two that compute it keeps it, and the other waits."""
    wanted = facts(wish="2+2", traffic=links("abcd"))
    free = choose("abcd", wanted)
    paid = choose("abcd", replace(wanted, parts=parts(1)))
    assert (free.parameters_us, paid.computing_us) == (0.0, free.computing_us)
    assert paid.predicted_us == paid.computing_us + paid.parameters_us
    # Who waits lacks half of its stage, which has up to five layers, and has it from two keepers.
    layer_us = MB / 100
    assert layer_us < paid.parameters_us <= 3 * layer_us


def test_a_layer_is_computed_while_the_next_ones_parameters_come():
    """Two members have all layers; what each lacks takes as long as a forward of its layers, or longer."""
    long = replace(facts(micro_batches=2, stages=1, wish="1+1"), costs_us=((10_000, 20_000),) * LAYERS)
    alternate = tuple(("a", "b")[layer % 2 :][:1] for layer in range(LAYERS))
    told = replace(long, traffic=links("ab"), parts=parts(1, "ab", 1, alternate))
    last_us = (
        4 * MB / 100
    )  # b waits for layers 0, 2, 4, 6 and 8 from a: the last one's turn comes after 8 others.
    assert 0 < choose("ab", told).parameters_us < last_us


def test_where_parameters_take_longest_fewer_members_compute_each_layer():
    cheap, dear = (replace(facts(stages=1), traffic=links("abcd"), parts=parts(mb)) for mb in (0.0001, 100))
    assert stages_of(choose("abcd", cheap)) == [1, 1, 1, 1]
    assert stages_of(choose("abcd", dear)) == [4]
    assert choose("abcd", dear).parameters_us == 0.0


def test_the_first_step_of_a_layout_is_predicted_with_the_state_that_moves():
    """a has all, and with what the optimizer knows each layer is three times its parameters."""
    wanted = facts(stages=2, wish="2", traffic=links("ab"))
    kept = replace(parts(1, "ab", 1), known=(2 * MB,) * LAYERS)
    first = choose("ab", replace(wanted, parts=kept))
    moved = list(first.plan.placement["b"])
    moved_us = len(moved) * 3 * MB / 100
    assert len(moved) > 2
    # Its first layers are computed while others come.
    assert 0.7 * moved_us < first.moving_us <= moved_us
    half = choose("ab", replace(wanted, parts=replace(kept, known=())))
    assert 0 < half.moving_us < 0.4 * first.moving_us
    slower = replace(wanted, traffic=links("ab", mbit=80))
    assert choose("ab", replace(slower, parts=kept)).moving_us > 8 * first.moving_us
    assert first.predicted_us == choose("ab", wanted).predicted_us  # Of a step as usual.


def test_nothing_moves_before_the_second_step_or_where_all_keep_all():
    wanted = facts(stages=2, wish="2", traffic=links("ab"))
    kept = replace(parts(1, "ab", 1), known=(2 * MB,) * LAYERS)
    running = choose("ab", replace(wanted, parts=kept))
    after, _ = kept.settled(running.plan.placement, "ab", wanted.traffic.rate_mbit)
    then = choose("ab", replace(wanted, parts=replace(kept, table=after)), running.laid)
    assert (then.laid, then.moving_us) == (running.laid, 0.0)
    assert choose("ab", wanted).moving_us == 0.0


def test_what_a_member_only_keeps_is_waited_for_as_well():
    """Each computes one half of the layers, and gets the other half's state to keep."""
    wanted = facts(stages=2, wish="2", traffic=links("ab", mbit=1))
    halves = tuple(("a",) if layer < LAYERS // 2 else ("b",) for layer in range(LAYERS))
    kept = replace(parts(1, "ab", 2, halves), known=(2 * MB,) * LAYERS)
    assert choose("ab", replace(wanted, parts=kept)).moving_us > 0.9 * LAYERS // 2 * 3 * MB * 8


# --- what is not worked out ---


def random_choices(seed):
    """Members, facts and what ran before: unlike members and links, wishes, losses and joins, parts or none."""
    rng = random.Random(seed)
    members = [f"m{number}" for number in range(rng.randint(1, 9))]
    costs = tuple((rng.randint(50, 150), rng.randint(100, 300)) for _ in range(LAYERS))
    pairs = list(permutations(members, 2))
    wanted = Facts(
        costs,
        rng.choice([1, 3, 8, 16]),
        rng.randint(1, 4),
        rng.choice(["", "", "2+2", "3x2", "2+1"]),
        {name: rng.choice([8, 12, 20]) / 16 for name in members if rng.random() < 0.5},
        Traffic(
            out_bytes=(rng.choice([100, 10_000]),) * LAYERS,
            sums=tuple(((layer,), rng.choice([100, 50_000])) for layer in range(LAYERS)),
            rates_mbit={pair: rng.choice([10, 100, 1000]) for pair in pairs},
            delays_us={pair: rng.choice([10, 500]) for pair in pairs},
            links=tuple(combinations(members, 2)),
            trees=((tuple((name, members[0]) for name in members[1:]), 1.0),),
            message_bytes=100,
        ),
        parts(1, members) if rng.random() < 0.3 else None,
    )
    left = [name for name in members if rng.random() < 0.8] or members
    return members, left, wanted


def test_pipelines_that_cannot_win_are_left_out_and_what_runs_is_the_same(monkeypatch):
    timed = {True: 0, False: 0}
    for seed in range(80):
        found = {}
        for prunes in (True, False):
            with monkeypatch.context() as patched:
                if not prunes:
                    patched.setattr(running, "_least_us", lambda *_: 0.0)
                count = Counter()
                patched.setattr(running, "Schedule", counted(running.Schedule, count))
                members, left, wanted = random_choices(seed)
                before = choose(members, wanted)
                kept = wanted.parts and replace(wanted.parts, staying=tuple(left))
                found[prunes] = before, choose(left, replace(wanted, parts=kept), before.laid)
                timed[prunes] += count["Schedule"]
        assert found[True] == found[False]
    assert timed[True] < 0.8 * timed[False]


def counted(made, count):
    def make(*args, **more):
        count[made.__name__] += 1
        return made(*args, **more)

    return make


def test_no_pipelines_take_less_than_what_they_are_left_out_by():
    for seed in range(80):
        members, _, wanted = random_choices(seed)
        costs = running._costs_of(members, wanted)
        for laid in running._laid_out(members, wanted):
            found = running._timed("layout", laid, members, wanted, costs)
            assert running._least_us(laid, wanted, costs) <= running.ROUNDED * found.predicted_us


def test_instructions_are_written_for_what_runs_alone(monkeypatch):
    wanted = facts(wish="2+2", speeds={"a": 0.5})
    before = choose("abcd", wanted).laid
    written = []
    monkeypatch.setattr(program, "_written", lambda worker: written.append(worker.name) or [])
    choose("abc", wanted, before)
    assert len(written) == len({*written}) <= 3
