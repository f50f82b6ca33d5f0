"""`chaosnet.protocols.data_cursor`: each sample of an epoch exactly once."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import ConfigError, LocalProtocolError, RemoteProtocolError
from chaosnet.protocols.data_cursor import DataCursor, positions
from chaosnet.protocols.messages import Strike


@pytest.fixture
def cursor():
    cursor = DataCursor(length=100, seed=7)
    yield cursor
    cursor.check_invariants()


def test_members_are_dealt_the_first_positions_in_the_order_given(cursor):
    assert cursor.deal([("b", 4), ("a", 2)]) == {"b": [(0, 4)], "a": [(4, 6)]}


def test_dealing_consumes_nothing(cursor):
    first = cursor.deal([("a", 4)])
    assert cursor.deal([("a", 4)]) == first
    assert (cursor.epoch, cursor.remaining) == (0, 100)


def test_a_dead_members_positions_are_dealt_again_first(cursor):
    dealt = cursor.deal([("a", 4), ("dead", 4), ("c", 4)])
    cursor.commit(dealt["a"] + dealt["c"])
    assert cursor.consumed == [(0, 4), (8, 12)]
    assert cursor.deal([("a", 6), ("c", 6)]) == {"a": [(4, 8), (12, 14)], "c": [(14, 20)]}


def test_the_last_step_of_an_epoch_is_split_in_proportion(cursor):
    cursor.commit([(0, 93)])
    dealt = cursor.deal([("a", 8), ("b", 4), ("c", 2)])
    assert dealt == {"a": [(93, 97)], "b": [(97, 99)], "c": [(99, 100)]}


def test_the_largest_remainder_gets_the_odd_position_and_the_earlier_member_on_a_tie(cursor):
    cursor.commit([(0, 95)])
    assert cursor.deal([("a", 2), ("b", 6)]) == {"a": [(95, 96)], "b": [(96, 100)]}  # 1.25 and 3.75.
    assert cursor.deal([("b", 5), ("a", 5)]) == {"b": [(95, 98)], "a": [(98, 100)]}  # 2.5 and 2.5.


def test_a_member_with_batch_size_zero_is_dealt_nothing(cursor):
    assert cursor.deal([("a", 0), ("b", 3)]) == {"a": [], "b": [(0, 3)]}
    assert cursor.deal([]) == {}


def test_the_epoch_ends_when_its_last_position_is_committed(cursor):
    cursor.commit([(50, 100)])
    cursor.commit([(0, 49)])
    assert (cursor.epoch, cursor.remaining) == (0, 1)
    cursor.commit([(49, 50)])
    assert (cursor.epoch, cursor.remaining, cursor.consumed) == (1, 100, [])


def test_ranges_that_touch_are_kept_as_one(cursor):
    for start in (0, 20, 10, 30):
        cursor.commit([(start, start + 10)])
    assert cursor.consumed == [(0, 40)]


@pytest.mark.parametrize(
    "ranges",
    [
        [(5, 12)],  # Over the end of a consumed one.
        [(12, 13)],  # Inside it.
        [(0, 100)],  # Around it.
        [(30, 40), (39, 50)],  # Twice in one commit.
        [(30, 40), (30, 40)],
    ],
)
def test_no_position_is_consumed_twice_and_a_refused_commit_changes_nothing(cursor, ranges):
    cursor.commit([(10, 20)])
    with pytest.raises(LocalProtocolError, match="is consumed twice"):
        cursor.commit(ranges)
    assert cursor.consumed == [(10, 20)]


@pytest.mark.parametrize("bad", [(-1, 3), (99, 101), (5, 5), (6, 5)])
def test_a_range_that_is_empty_or_out_of_bounds_is_our_mistake(cursor, bad):
    with pytest.raises(LocalProtocolError, match="empty or out of bounds"):
        cursor.commit([(40, 50), bad])
    assert cursor.consumed == []


def test_batch_sizes_and_lengths_that_cannot_work_are_named(cursor):
    with pytest.raises(ConfigError, match="batch size of 'a': -1"):
        cursor.deal([("a", -1)])
    with pytest.raises(ConfigError, match="each member once"):
        cursor.deal([("a", 1), ("a", 2)])
    with pytest.raises(ConfigError, match="length: 0"):
        DataCursor(length=0, seed=0)


def test_a_replica_deals_what_the_original_deals(cursor):
    cursor.commit([(0, 10), (20, 30)])
    plain = cursor.to_plain()
    known = {"length": 100, "seed": 7, "epoch": 0, "consumed": [[0, 10], [20, 30]]}
    assert {key: plain[key] for key in known} == known
    replica = DataCursor.from_plain(plain)
    assert replica == cursor
    assert replica.deal([("a", 15)]) == cursor.deal([("a", 15)]) == {"a": [(10, 20), (30, 35)]}
    replica.commit([(10, 20)])
    assert cursor.consumed == [(0, 10), (20, 30)]


@pytest.mark.parametrize(
    "change",
    [
        {"length": 0},
        {"length": "many"},
        {"epoch": -1},
        {"consumed": [[0, 100]]},
        {"consumed": [[0, 101]]},
        {"consumed": [[-1, 5]]},
        {"consumed": [[5, 5]]},
        {"consumed": [[10, 20], [0, 5]]},
        {"consumed": [[0, 5], [5, 9]]},
        {"consumed": [[0, 5, 9]]},
        {"consumed": 3},
    ],
)
def test_a_cursor_that_cannot_be_is_the_senders_mistake(change):
    plain = DataCursor(length=100, seed=7).to_plain() | change
    with pytest.raises(RemoteProtocolError, match="describes none"):
        DataCursor.from_plain(plain)


def test_a_cursor_with_a_field_missing_is_the_senders_mistake():
    with pytest.raises(RemoteProtocolError, match="consumed"):
        DataCursor.from_plain({"length": 3, "seed": 0, "epoch": 0})


def test_positions_are_those_of_the_ranges_in_order():
    assert list(positions([(3, 5), (9, 10)])) == [3, 4, 9]


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=1).map(
    lambda sizes: list(sizes.items())
)


@given(st.integers(1, 60), st.lists(st.tuples(SHARES, st.sets(st.sampled_from("abcdef"))), max_size=40))
def test_whoever_joins_leaves_or_dies_each_position_is_used_once_per_epoch(length, steps):
    cursor = DataCursor(length=length, seed=0)
    used: Counter[tuple[int, int]] = Counter()
    for shares, dead in [*steps, *[([("last", 20)], set())] * (length + 1)]:
        epoch = cursor.epoch
        dealt = cursor.deal(shares)
        alive = [taken for member in dealt if member not in dead for taken in dealt[member]]
        used.update((epoch, position) for position in positions(alive))
        cursor.commit(alive)
        cursor.check_invariants()
    expected = {(epoch, position) for epoch in range(cursor.epoch) for position in range(length)}
    expected |= {(cursor.epoch, position) for position in positions(cursor.consumed)}
    assert used == Counter(expected)
    assert cursor.epoch > 0


@given(st.integers(1, 200), st.sets(st.integers(0, 199)), SHARES)
def test_a_deal_is_disjoint_in_order_and_as_large_as_it_can_be(length, consumed, shares):
    cursor = DataCursor(length=length, seed=0)
    taken = sorted(position for position in consumed if position < length)
    cursor.commit([(position, position + 1) for position in taken[: length - 1]])
    free = [position for position in range(length) if position not in set(positions(cursor.consumed))]
    dealt = cursor.deal(shares)
    given_out = [position for member, _ in shares for position in positions(dealt[member])]
    wanted = sum(size for _, size in shares)
    assert given_out == free[:wanted]
    for member, size in shares:
        exact = min(1.0, len(free) / wanted) * size
        assert abs(len(list(positions(dealt[member]))) - exact) < 1


# --- rules for the rest of an epoch, and strikes ---


def played(cursor, shares, epochs=2):
    """Deal and commit for so many epochs. Returns: the sizes of all batches, and how often each position was used."""
    sizes, used = [], Counter()
    while cursor.epoch < epochs:
        epoch, dealt = cursor.epoch, cursor.deal(shares)
        given = [each for ranges in dealt.values() for each in ranges]
        sizes += [size for ranges in dealt.values() if (size := len(list(positions(ranges))))]
        used.update((epoch, position) for position in positions(given))
        cursor.commit(given)
        cursor.end_if_left_over(sum(size for _, size in shares))
        cursor.check_invariants()
    return sizes, used


@given(st.integers(1, 80), SHARES, st.integers(1, 6))
def test_nobody_is_dealt_fewer_than_min_samples_and_less_than_that_is_dropped(length, shares, least):
    shares = [(member, max(size, least)) for member, size in shares]
    cursor = DataCursor(length=max(length, least), seed=0, min_samples=least)
    sizes, used = played(cursor, shares)
    assert min(sizes) >= least and set(used.values()) == {1}
    assert len(used) + cursor.samples_dropped == 2 * cursor.length
    assert cursor.samples_dropped <= 2 * (least - 1)


def test_a_step_before_the_last_leaves_enough_for_the_last():
    sizes, _ = played(DataCursor(length=41, seed=0, min_samples=2), [("a", 8)], epochs=1)
    assert sizes == [8, 8, 8, 8, 7, 2]


@given(st.integers(1, 80), SHARES)
def test_with_drop_last_all_batches_are_whole_unless_the_data_set_is_smaller_than_a_step(length, shares):
    cursor = DataCursor(length=length, seed=0, drop_last=True)
    sizes, _ = played(cursor, shares)
    wanted = sum(size for _, size in shares)
    if length >= wanted:
        assert sizes == [size for _, size in shares] * (len(sizes) // len(shares))
        assert cursor.samples_dropped == 2 * (length % wanted)
    else:
        assert sum(sizes) == 2 * length and cursor.samples_dropped == 0


@given(st.integers(20, 60), st.integers(0, 19), SHARES, st.integers(1, 3))
def test_a_bad_sample_ends_two_nodes_and_is_condemned_with_few_others(length, bad, shares, least):
    shares = [(member, max(size, least)) for member, size in shares]
    cursor = DataCursor(length=length, seed=0, min_samples=least)
    dead, condemned, used, life = 0, [], Counter(), 0
    while cursor.epoch == 0:
        dealt = cursor.deal(shares)
        strikes, given = [], []
        for member, ranges in dealt.items():
            if bad in positions(ranges):
                life, dead = life + 1, dead + 1
                strikes.append(Strike(node=member, life=life, ranges=tuple(ranges)))
            else:
                given += ranges
        used.update(positions(given))
        found = [position for position, _ in cursor.strike(strikes)]
        condemned += found
        cursor.commit(given)
        cursor.set_aside(found)
        cursor.end_if_left_over(sum(size for _, size in shares))
        cursor.check_invariants()
        assert DataCursor.from_plain(cursor.to_plain()) == cursor
    if dead == 2:
        assert bad in condemned
    else:  # Too little was left of the epoch to deal it, or once more.
        assert dead <= 1 and cursor.samples_dropped and not condemned
    assert bad not in used
    assert len(condemned) <= max(3, 2 * least, -(-max(size for _, size in shares) // 8))
    assert set(used.values()) == {1}
    assert len(used) + len(condemned) + cursor.samples_dropped == length


def test_the_same_life_strikes_once_and_what_is_trained_on_is_cleared(cursor):
    strike = Strike(node="a", life=7, ranges=((3, 6),))
    assert cursor.strike([strike]) == cursor.strike([strike]) == []
    cursor.commit([(3, 5)])
    assert [each.ranges for each in cursor.strikes] == [((5, 6),)]
    assert [position for position, _ in cursor.strike([Strike(node="a", life=8, ranges=((0, 9),))])] == [5]


def test_a_strike_of_another_epoch_is_none():
    cursor = DataCursor(length=4, seed=0)
    cursor.commit([(0, 4)])
    for life in (1, 2):
        late = Strike(node="a", life=life, ranges=((0, 1),), epoch=0)
        assert cursor.strike([late]) == [] and cursor.strikes == []
    assert cursor.strike([Strike(node="a", life=3, ranges=((0, 1),), epoch=1)]) == []
    assert [each for each, _ in cursor.strike([Strike(node="b", life=1, ranges=((0, 1),), epoch=1)])] == [0]


def test_a_global_batch_is_shared_in_proportion_however_many_take_part():
    cursor = DataCursor(length=100, seed=0, global_batch=12)
    for shares, sizes in (
        ((("a", 8), ("b", 16)), [4, 8]),
        ((("a", 8),), [8]),
        ((("a", 8), ("b", 4)), [8, 4]),
        ((("a", 8), ("b", 8), ("c", 8), ("d", 0)), [4, 4, 4, 0]),
    ):
        dealt = cursor.deal(shares)
        assert [sum(stop - start for start, stop in dealt[name]) for name, _ in shares] == sizes
    assert DataCursor.from_plain(cursor.to_plain()).rules == cursor.rules


def test_with_drop_last_an_epoch_ends_where_less_than_a_global_batch_is_left():
    cursor = DataCursor(length=20, seed=0, drop_last=True, global_batch=6)
    for _ in range(3):
        cursor.commit(cursor.deal([("a", 8)])["a"])
        cursor.end_if_left_over(8)
    assert (cursor.epoch, cursor.samples_dropped) == (1, 2)
