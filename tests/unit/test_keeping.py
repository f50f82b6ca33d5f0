"""Who keeps which part of the training state, and what is sent before a step."""

import random
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
    assert not moves(SIZES, [()] * 6, table, table, MEMBERS)


def test_only_who_is_missing_is_replaced_while_nothing_is_computed():
    table = choose_keepers(SIZES, pipelines_of_two(), ((),) * 6, MEMBERS, 2)
    after = choose_keepers(SIZES, None, table, ["a", "b", "d"], 2)
    for old, new in zip(table, after, strict=True):
        assert {*old} - {"c"} <= {*new} and len(new) == 2


def test_few_members_keep_all():
    assert choose_keepers(SIZES, None, (("a",),) * 6, ["a", "b"], 3) == (("a", "b"),) * 6


def test_keepers_get_all_and_others_that_need_them_parameters():
    found = moves([1], [{"b", "c"}], (("a",),), (("a", "b"),), MEMBERS)
    assert found == [Move(0, "a", "b", True), Move(0, "a", "c", False)]


def test_what_has_to_be_sent_is_shared_by_those_who_have_it():
    found = moves([1] * 8, [{"d"}] * 8, (("a", "b"),) * 8, (("a", "b"),) * 8, MEMBERS)
    assert [each.source for each in found].count("a") == [each.source for each in found].count("b") == 4


def test_what_is_lost_is_not_sent():
    before = (("x",), ("a",))
    assert lost_groups(before, MEMBERS) == [0]
    assert moves([1, 1], [{"b"}, {"b"}], before, (("x",), ("a",)), MEMBERS) == [Move(1, "a", "b", False)]
    with pytest.raises(AssertionError, match="group 0 is to be kept"):
        moves([1, 1], [(), ()], before, (("a",), ("a",)), MEMBERS)


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
        moved = moves(sizes, computing or [()] * 7, table, after, members)
        assert all(each.source in table[each.group] and each.source in members for each in moved)
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
    table, each_step = kept.settled(placement, MEMBERS)
    assert replace(kept, table=table).settled(placement, MEMBERS) == (table, each_step)
    lacking = {
        (group, name) for group, who in enumerate(pipelines_of_two()) for name in who - {*table[group]}
    }
    assert {(each.group, each.target) for each in each_step} == lacking
    assert not any(each.whole for each in each_step)
