"""Who keeps which part of the training state, and what is sent before a step."""

import random
from collections import Counter
from dataclasses import replace

import pytest

from chaosnet.scheduler.elastic.keeping import Move, PartsKept, choose_keepers, lost_groups, moves

MEMBERS = ["a", "b", "c", "d"]
SIZES = [4, 1, 1, 1, 1, 4]


def pipelines_of_two():
    """Two of two stages: the first half of the groups in a and c, the second in b and d."""
    return [{"a", "c"}] * 3 + [{"b", "d"}] * 3


def test_of_two_keepers_one_computes_and_one_does_not():
    computing = pipelines_of_two()
    table = choose_keepers(SIZES, computing, ((),) * 6, MEMBERS, 2)
    for group, (first, second) in enumerate(table):
        assert first in computing[group] and second not in computing[group]


def test_a_stage_may_be_lost_whole():
    table = choose_keepers(SIZES, pipelines_of_two(), ((),) * 6, MEMBERS, 2)
    assert not lost_groups(table, {"a", "c"}) and not lost_groups(table, {"b", "d"})


def test_load_is_spread():
    table = choose_keepers(SIZES, pipelines_of_two(), (("a",),) * 6, MEMBERS, 2)
    load = {
        name: sum(size for size, names in zip(SIZES, table, strict=True) if name in names) for name in MEMBERS
    }
    assert sum(load.values()) == 2 * sum(SIZES) and max(load.values()) <= sum(SIZES) / 2 + max(SIZES)


def test_where_all_compute_all_they_share_it():
    table = choose_keepers([1] * 8, [{*MEMBERS}] * 8, (("a",),) * 8, MEMBERS, 2)
    kept = [sum(name in names for names in table) for name in MEMBERS]
    assert sum(kept) == 16 and max(kept) <= 5


def test_what_is_good_stays():
    table = choose_keepers(SIZES, pipelines_of_two(), ((),) * 6, MEMBERS, 2)
    assert choose_keepers(SIZES, pipelines_of_two(), table, MEMBERS, 2) == table
    assert choose_keepers(SIZES, None, table, MEMBERS, 2) == table
    assert not moves([()] * 6, table, table, MEMBERS, alike)


def test_only_who_is_missing_is_replaced_while_nothing_is_computed():
    table = choose_keepers(SIZES, pipelines_of_two(), ((),) * 6, MEMBERS, 2)
    after = choose_keepers(SIZES, None, table, ["a", "b", "d"], 2)
    for old, new in zip(table, after, strict=True):
        assert {*old} - {"c"} <= {*new} and len(new) == 2


def test_few_members_keep_all():
    assert choose_keepers(SIZES, None, (("a",),) * 6, ["a", "b"], 3) == (("a", "b"),) * 6


def alike(source, to):
    return 1


def test_keepers_get_all_and_others_that_need_them_parameters():
    found = moves([{"b", "c"}], (("a",),), (("a", "b"),), MEMBERS, alike)
    assert found == [Move(0, "b", True, (("a", 1),)), Move(0, "c", False, (("a", 1),))]


def shares(move, size=1000):
    return Counter(move.source_of(at, size) for at in range(size))


def test_what_has_to_be_sent_is_shared_by_those_who_have_it():
    rates = {"a": 300, "b": 100}
    table = (("a", "b"),)
    [found] = moves([{"d"}], table, table, MEMBERS, lambda source, to: rates[source])
    assert shares(found) == {"a": 750, "b": 250}
    assert shares(found, 1) == {"a": 1}


def test_what_is_too_small_to_be_shared_comes_from_each_in_turn():
    table = (("a", "b", "c"),) * 30
    found = moves([{"d"}] * 30, table, table, MEMBERS, alike)
    assert Counter(each.source_of(50, 100) for each in found) == {"a": 10, "b": 10, "c": 10}


def test_what_is_lost_is_not_sent():
    before = (("x",), ("a",))
    assert lost_groups(before, MEMBERS) == [0]
    found = moves([{"b"}, {"b"}], before, (("x",), ("a",)), MEMBERS, alike)
    assert found == [Move(1, "b", False, (("a", 1),))]
    with pytest.raises(AssertionError, match="group 0 is to be kept"):
        moves([(), ()], before, (("a",), ("a",)), MEMBERS, alike)


def test_at_any_time_there_are_copies_enough_and_each_has_a_source():
    rng, members, next_name = random.Random(0), ["n0"], 1
    sizes = [rng.randint(1, 9) for _ in range(7)]
    table = (("n0",),) * 7
    for _ in range(300):
        computing = [{rng.choice(members)} for _ in sizes] if rng.random() < 0.8 else None
        after = choose_keepers(sizes, computing, table, members, 2)
        for old, new in zip(table, after, strict=True):
            assert len(new) == len({*new}) == min(2, len(members)) and {*new} <= {*members}
            assert {*old} & {*members}
        moved = moves(computing or [()] * 7, table, after, members, alike)
        sources = [(each.group, name) for each in moved for name, _ in each.sources]
        assert all(name in table[group] and name in members for group, name in sources)
        table = after
        if rng.random() < 0.5 and len(members) > 2:
            members.remove(rng.choice(members))
        else:
            members.append(f"n{next_name}")
            next_name += 1


def test_a_settled_table_is_what_two_steps_come_to():
    users = tuple((group,) for group in range(6))
    kept = PartsKept(users, tuple(SIZES), (("a",),) * 6, 2, tuple(MEMBERS))
    placement = {"a": range(3), "b": range(3, 6), "c": range(3), "d": range(3, 6)}
    table, each_step = kept.settled(placement, MEMBERS, alike)
    assert replace(kept, table=table).settled(placement, MEMBERS, alike) == (table, each_step)
    lacking = {
        (group, name) for group, who in enumerate(pipelines_of_two()) for name in who - {*table[group]}
    }
    assert {(each.group, each.target) for each in each_step} == lacking
    assert not any(each.whole for each in each_step)
