"""Sec. III of the paper, sentence by sentence, against `chaosnet.scheduler.shard_plan`."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import ConfigError, PlanInfeasible
from chaosnet.scheduler.shard_plan import (
    MAX_SHARDS,
    STRATEGIES,
    ShardPlan,
    Source,
    completion_s,
    even,
    exact_assignment,
    greedy,
    greedy_shard_assignment,
    ranges,
    shard_assignment_with_binary_search,
    single,
    water_filling_bound,
)

# Whole numbers of seconds: floats add and compare them exactly, so references may be compared with ==.
WHOLE_SOURCES = st.dictionaries(
    st.sampled_from("abcd"),
    st.builds(Source, st.integers(0, 20).map(float), st.integers(1, 9).map(float)),
    min_size=1,
)
REAL_SOURCES = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.builds(Source, st.floats(0, 2), st.floats(1e-9, 1e-6)),
    min_size=1,
)


def algorithm_2_as_printed(shards: int, shard_bytes: int, sources: dict[str, Source]) -> dict[str, int]:
    """Lines 1 to 9, one shard after the other."""
    load_s = {name: source.ready_s for name, source in sources.items()}
    count_by_source = dict.fromkeys(sources, 0)
    for _ in range(shards):
        chosen = min(
            sorted(sources), key=lambda name: load_s[name] + shard_bytes * sources[name].seconds_per_byte
        )
        count_by_source[chosen] += 1
        load_s[chosen] += shard_bytes * sources[chosen].seconds_per_byte
    return {name: count for name, count in count_by_source.items() if count}


def brute_force_p3(shards: int, shard_bytes: int, sources: dict[str, Source]) -> float:
    """Eq. 14-18 by trying every x_uj."""
    best_s = math.inf
    for owners in itertools.product(sources, repeat=shards):
        end_s = max(
            sources[name].ready_s + owners.count(name) * shard_bytes * sources[name].seconds_per_byte
            for name in set(owners)
        )
        best_s = min(best_s, end_s)
    return best_s


def scan_of_all_sizes(state_bytes: int, low: int, high: int, sources: dict[str, Source]) -> float:
    """P2 over all s from `low` to `high` that divide the state, each solved exactly."""
    return min(
        exact_assignment(state_bytes // s, s, sources).completion_s
        for s in range(low, high + 1)
        if state_bytes % s == 0
    )


# --- Fig. 1 and Sec. II-B ----------------------------------------------------------------------------


def test_a_single_fast_link_is_a_bottleneck_that_neighbours_relieve():
    """ "a new node 11 joins and picks the fastest neighbor to pull from [...] still takes 80 time units [...]
    With smart shard sizing, replication delay drops to 62 time units." (10 data units; the delays per unit
    are only in the picture: 8, 31 and 62 are one set that gives both numbers.)"""
    fig_1 = {"n3": Source(0, 8), "n5": Source(0, 31), "n9": Source(0, 62)}
    assert single(10, 1, 10, fig_1) == ShardPlan(10, {"n3": 1}, 80)
    plan = greedy_shard_assignment(10, 1, fig_1)
    assert plan.completion_s == 62
    assert plan.shards_by_source == {"n3": 7, "n5": 2, "n9": 1}


def test_single_picks_the_neighbour_that_ends_first_not_the_one_that_starts_first():
    """ "picks the fastest neighbor to pull from" """
    sources = {"near": Source(0, 9), "fast": Source(5, 8), "late": Source(50, 7)}
    assert single(10, 1, 10, sources).shards_by_source == {"fast": 1}


# --- Algorithm 2 -------------------------------------------------------------------------------------


@given(st.integers(0, 200), st.integers(1, 5), WHOLE_SOURCES)
def test_greedy_makes_the_picks_of_algorithm_2_as_printed(shards, shard_bytes, sources):
    """Algorithm 2, lines 5 to 9; we skip the picks that are forced."""
    plan = greedy_shard_assignment(shards, shard_bytes, sources)
    assert plan.shards_by_source == algorithm_2_as_printed(shards, shard_bytes, sources)


def test_the_least_estimated_load_counts_the_shard_about_to_be_assigned():
    """The text says "picks the neighbor u* with the lowest estimate load"; Algorithm 2, line 6, has
    argmin(l_u + s t_trans). They differ: idle `a` has the lower load, `b` ends earlier."""
    sources = {"a": Source(0, 10), "b": Source(1, 1)}
    assert greedy_shard_assignment(1, 1, sources).shards_by_source == {"b": 1}


def test_equal_loads_go_to_the_name_that_sorts_first():
    sources = {"c": Source(0, 1), "a": Source(0, 1), "b": Source(0, 1)}
    assert greedy_shard_assignment(4, 1, sources).shards_by_source == {"b": 1, "c": 1, "a": 2}


def test_the_initial_term_delays_a_neighbour_that_synchronises_late():
    """Eq. 19: t_prop + tau_sync is "the base delay before neighbor u can start transmitting a shard"."""
    sources = {"early": Source(0, 1), "late": Source(4, 1)}
    plan = greedy_shard_assignment(6, 1, sources)
    assert plan.shards_by_source == {"early": 5, "late": 1}
    assert plan.completion_s == 5


def test_a_neighbour_that_would_end_last_gets_nothing():
    """Eq. 7 has |K_u| > 0 for all u, Eq. 12 and 18 have not; neither has Algorithm 2, nor we."""
    sources = {"a": Source(0, 1), "slow": Source(0, 100)}
    assert greedy_shard_assignment(10, 1, sources) == ShardPlan(1, {"a": 10}, 10)


def test_a_hundred_thousand_shards_are_assigned_as_one_by_one():
    """ "a fast greedy algorithm": ours does not grow with K, and gives what K single picks give."""
    sources = {"a": Source(3, 7), "b": Source(0, 5), "c": Source(11, 2)}
    expected = algorithm_2_as_printed(100_000, 3, sources)
    assert greedy_shard_assignment(100_000, 3, sources).shards_by_source == expected


# --- Optimality gap ----------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 3), WHOLE_SOURCES.filter(lambda sources: len(sources) <= 3))
def test_greedy_equals_brute_force_and_so_keeps_grahams_bound(shards, shard_bytes, sources):
    """ "By Graham's bound, LPT achieves a makespan no worse than (4/3 - 1/(3|U|)) OPT." For the equal shards
    of P3 there is no gap at all."""
    optimum_s = brute_force_p3(shards, shard_bytes, sources)
    greedy_s = greedy_shard_assignment(shards, shard_bytes, sources).completion_s
    assert greedy_s <= (4 / 3 - 1 / (3 * len(sources))) * optimum_s
    assert greedy_s == optimum_s
    assert exact_assignment(shards, shard_bytes, sources).completion_s == optimum_s


@given(st.integers(0, 5000), st.integers(1, 100_000), REAL_SOURCES)
def test_greedy_equals_the_exact_assignment_on_any_rates(shards, shard_bytes, sources):
    by_greedy = greedy_shard_assignment(shards, shard_bytes, sources)
    exact = exact_assignment(shards, shard_bytes, sources)
    assert by_greedy.completion_s == exact.completion_s
    assert by_greedy.shards == exact.shards == shards


@given(st.integers(1, 5000), st.integers(1, 100_000), REAL_SOURCES)
def test_greedy_lies_between_the_water_filling_bound_and_one_shard_above_it(shards, shard_bytes, sources):
    """ "If s is set too large, shards are few and traffic stays uneven": by one shard of the slowest
    neighbour in use at most, so the gap goes to nothing as shards shrink."""
    bound_s = water_filling_bound(shards * shard_bytes, sources)
    slowest = max(source.seconds_per_byte for source in sources.values() if source.ready_s <= bound_s)
    end_s = greedy_shard_assignment(shards, shard_bytes, sources).completion_s
    assert bound_s * (1 - 1e-9) <= end_s <= (bound_s + shard_bytes * slowest) * (1 + 1e-9)


def test_smaller_shards_come_closer_to_the_water_filling_bound():
    sources = {"a": Source(0.5, 3), "b": Source(0, 7), "c": Source(2, 11)}
    bound_s = water_filling_bound(64_000, sources)
    gaps = [
        greedy_shard_assignment(64_000 // s, s, sources).completion_s / bound_s - 1 for s in (16_000, 500, 1)
    ]
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[0] > 0.1
    assert 0 <= gaps[-1] < 1e-4


# --- The water-filling bound -------------------------------------------------------------------------


@given(st.integers(1, 10**10), REAL_SOURCES)
def test_at_the_water_filling_level_all_neighbours_have_sent_the_state_exactly(state_bytes, sources):
    """theta: the least with sum_u max(0, theta - a_u) / c_u >= |w|."""
    theta_s = water_filling_bound(state_bytes, sources)
    sent = sum(max(0.0, theta_s - a) / c for a, c in sources.values())
    assert sent == pytest.approx(state_bytes, rel=1e-6, abs=1e-3)  # theta - a loses digits: not a byte.


def test_the_water_filling_level_ignores_a_neighbour_that_starts_too_late():
    sources = {"a": Source(0, 2), "b": Source(0, 2), "late": Source(100, 1)}
    assert water_filling_bound(10, sources) == 10
    assert water_filling_bound(0, sources) == 0


# --- Algorithm 1 -------------------------------------------------------------------------------------


def test_binary_search_goes_down_after_a_better_size_and_up_after_one_that_is_not():
    """Algorithm 1, lines 10 to 15, on [1, 15]: 8 ends at 8 s; down to 4, at 8 s, no better; up to 6, at 6 s;
    down to 5, at 7 s, no better."""
    sources = {"a": Source(0, 1), "b": Source(0, 1)}
    plan = shard_assignment_with_binary_search(12, 1, 15, sources)
    assert plan == ShardPlan(6, {"a": 1, "b": 1}, 6)


def test_of_sizes_that_are_as_good_the_first_tried_stays():
    """ "if theta < theta*", line 10: one source takes 12 s whatever the size."""
    plan = shard_assignment_with_binary_search(12, 1, 15, {"a": Source(0, 1)})
    assert plan == ShardPlan(8, {"a": 2}, 12)


@given(st.integers(1, 10**9), st.integers(1, 10**6), st.integers(0, 10**6), REAL_SOURCES)
def test_binary_search_stays_between_the_layer_sizes_and_above_the_bound(state_bytes, low, extra, sources):
    """ "s_l <- min_layer_size(w), s_h <- max_layer_size(w)" """
    plan = shard_assignment_with_binary_search(state_bytes, low, low + extra, sources, max_shards=10**9)
    assert low <= plan.shard_bytes <= low + extra
    assert plan.completion_s >= water_filling_bound(state_bytes, sources) * (1 - 1e-9)


def test_binary_search_never_tries_a_size_above_its_first_middle():
    """ "theta [...] often exhibits a quasi-monotonic trend [...] an effective way to quickly find a
    near-optimal s". The first try improves on infinity, so s_h falls to it for good: here sizes 7 to 9
    are never tried, though a state of 18 bytes would come in 9 s in shards of 9, and not in 10 s."""
    sources = {"a": Source(0, 1), "b": Source(0, 1)}
    plan = shard_assignment_with_binary_search(18, 4, 9, sources)
    assert plan == ShardPlan(4, {"b": 2, "a": 3}, 10)
    assert scan_of_all_sizes(18, 4, 9, sources) == 9


def test_the_number_of_shards_is_bounded_where_the_paper_would_split_to_the_byte():
    """ "if it is set small, transmission becomes inefficient": our departure is a floor on s_l."""
    sources = {"a": Source(0, 1e-8), "b": Source(0.1, 2e-8)}
    plan = shard_assignment_with_binary_search(10**9, 1, 10**6, sources)
    assert plan.shards <= MAX_SHARDS
    few = shard_assignment_with_binary_search(10**9, 1, 10, sources, max_shards=3)
    assert few.shards <= 3 and few.shard_bytes == 333_333_334


# --- Plans as byte ranges ----------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@given(
    state_bytes=st.integers(0, 10**10),
    low=st.integers(1, 10**6),
    extra=st.integers(0, 10**8),
    sources=REAL_SOURCES,
)
def test_every_strategy_covers_each_byte_once_and_ends_when_it_says(name, state_bytes, low, extra, sources):
    """ "These shard subsets are disjoint and their collection covers all shards" (Sec. III-A)"""
    plan = STRATEGIES[name](state_bytes, low, low + extra, sources)
    at = 0
    for source, (start, stop) in ranges(plan, state_bytes).items():
        assert start == at < stop
        assert stop - start <= plan.shards_by_source[source] * plan.shard_bytes
        at = stop
    assert at == state_bytes
    assert plan.completion_s == pytest.approx(completion_s(ranges(plan, state_bytes), sources))
    assert plan.completion_s >= water_filling_bound(state_bytes, sources) * (1 - 1e-9)


def test_the_short_last_shard_goes_to_the_source_that_would_end_last():
    """ "Assume s can divide the total data size |w|": we need not."""
    plan = greedy_shard_assignment(3, 4, {"a": Source(0, 2), "b": Source(0, 1)})
    assert ranges(plan, 10) == {"a": (0, 4), "b": (4, 10)}
    assert greedy(10, 4, 4, {"a": Source(0, 2), "b": Source(0, 1)}).completion_s == 8


def test_even_gives_every_neighbour_an_equal_range():
    """ "Assign model shards evenly across nodes" (Sec. VI-A)"""
    sources = {"a": Source(0, 1), "b": Source(0, 5), "c": Source(0, 1)}
    assert even(9, 1, 9, sources).completion_s == 15
    assert ranges(even(9, 1, 9, sources), 9) == {"a": (0, 3), "c": (3, 6), "b": (6, 9)}
    assert ranges(even(2, 1, 9, sources), 2) == {"a": (0, 1), "b": (1, 2)}


def test_a_plan_is_not_laid_out_over_a_state_of_another_size():
    with pytest.raises(ConfigError, match="13 is not 3 shards of 4 bytes"):
        ranges(ShardPlan(4, {"a": 3}, 0.0), 13)


# --- Input from outside ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", sorted(STRATEGIES))
def test_without_neighbours_there_is_no_plan(name):
    with pytest.raises(PlanInfeasible, match="sources: none"):
        STRATEGIES[name](10, 1, 10, {})


@pytest.mark.parametrize("name", sorted(STRATEGIES))
@pytest.mark.parametrize(
    ("state_bytes", "low", "high", "source", "text"),
    [
        (-1, 1, 2, Source(0, 1), "state_bytes: -1"),
        (9, 0, 2, Source(0, 1), "min_layer_bytes: 0"),
        (9, 3, 2, Source(0, 1), "max_layer_bytes: 2 .expected >= min_layer_bytes, 3"),
        (9, 1, 2, Source(0, -1e-9), "sources.'a'..seconds_per_byte: -1e-09"),
        (9, 1, 2, Source(0, 0), "sources.'a'..seconds_per_byte: 0"),
        (9, 1, 2, Source(0, math.inf), "sources.'a'..seconds_per_byte: inf"),
        (9, 1, 2, Source(-1, 1), "sources.'a'..ready_s: -1"),
        (9, 1, 2, Source(math.nan, 1), "sources.'a'..ready_s: nan"),
    ],
)
def test_a_number_out_of_range_is_named_with_what_was_expected(name, state_bytes, low, high, source, text):
    with pytest.raises(ConfigError, match=text):
        STRATEGIES[name](state_bytes, low, high, {"a": source})


def test_counts_out_of_range_are_named():
    for assign in (greedy_shard_assignment, exact_assignment):
        with pytest.raises(ConfigError, match="shards: -1"):
            assign(-1, 1, {"a": Source(0, 1)})
        with pytest.raises(ConfigError, match="shard_bytes: 0"):
            assign(1, 0, {"a": Source(0, 1)})
    with pytest.raises(ConfigError, match="max_shards: 0"):
        shard_assignment_with_binary_search(9, 1, 2, {"a": Source(0, 1)}, max_shards=0)
