"""`chaosnet.scheduler.elastic.roles`: who takes which role of a new layout."""

import itertools
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linear_sum_assignment, linprog

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.plan import cuts_of, of_pipelines
from chaosnet.scheduler.elastic.roles import assign, costs, staff

LAYERS = 6


@st.composite
def ranges_of(draw, empty=False):
    start = draw(st.integers(0, LAYERS - 1))
    return range(start, draw(st.integers(start if empty else start + 1, LAYERS)))


@st.composite
def cases(draw, most=5):
    """Workers with what they hold, no more roles than workers, and bytes of layers [0, l)."""
    held = draw(st.lists(ranges_of(empty=True), min_size=1, max_size=most))
    roles = draw(st.lists(ranges_of(), min_size=1, max_size=len(held)))
    sizes = draw(st.lists(st.integers(0, 10**10), min_size=LAYERS, max_size=LAYERS))
    return {f"w{i}": each for i, each in enumerate(held)}, roles, list(itertools.accumulate(sizes, initial=0))


def received(held, roles, state_bytes, workers):
    """Bytes, counted layer by layer."""
    return sum(
        state_bytes[layer + 1] - state_bytes[layer]
        for worker, role in zip(workers, roles, strict=True)
        for layer in role
        if layer not in held[worker]
    )


@given(cases())
def test_no_other_assignment_moves_fewer_bytes(case):
    held, roles, state_bytes = case
    workers = assign(held, roles, state_bytes)
    assert len(set(workers)) == len(roles)
    least = min(received(held, roles, state_bytes, each) for each in itertools.permutations(held, len(roles)))
    assert received(held, roles, state_bytes, workers) == least


@pytest.mark.parametrize("seed", range(5))
def test_bytes_are_the_optimum_of_the_linear_program_over_assignments(seed):
    rng = random.Random(seed)
    layers, count = 24, 30
    state_bytes = [*itertools.accumulate((rng.randint(1, 10**6) for _ in range(layers)), initial=0)]
    cuts = [sorted(rng.sample(range(layers + 1), 2)) for _ in range(2 * count)]
    held = {f"w{i:02}": range(*each) for i, each in enumerate(cuts[:count])}
    roles = [range(*each) for each in cuts[count : 2 * count - rng.randint(0, 5)]]
    cost = costs(list(held.values()), roles, state_bytes)
    rows = np.kron(np.eye(count), np.ones(len(roles)))
    columns = np.kron(np.ones(count), np.eye(len(roles)))
    found = linprog(cost.ravel(), rows, np.ones(count), columns, np.ones(len(roles)))
    assert received(held, roles, state_bytes, assign(held, roles, state_bytes)) == pytest.approx(found.fun)


@given(cases(), st.randoms(use_true_random=False))
def test_a_preference_for_places_costs_no_byte(case, rng):
    held, roles, state_bytes = case
    places = dict(zip(rng.sample(sorted(held), len(roles)), range(len(roles)), strict=True))
    bytes_of = [
        received(held, roles, state_bytes, assign(held, roles, state_bytes, p)) for p in (None, places)
    ]
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.parametrize("seed", range(10))
def test_many_workers_are_matched_by_their_ranges_as_well_as_one_by_one(seed):
    rng = random.Random(seed)
    state_bytes = [*itertools.accumulate((rng.randint(0, 100) for _ in range(LAYERS)), initial=0)]
    some = [range(*sorted(rng.sample(range(LAYERS + 1), 2))) for _ in range(9)]
    held = {f"w{i:03}": rng.choice([range(0), *some[:5]]) for i in range(300)}
    roles = [rng.choice(some[4:]) for _ in range(280 + seed)]
    places = dict(zip(rng.sample(sorted(held), 250), rng.sample(range(len(roles)), 250), strict=True))
    workers = assign(held, roles, state_bytes, places)
    assert len(set(workers)) == len(roles)
    cost = costs(list(held.values()), roles, state_bytes)
    assert received(held, roles, state_bytes, workers) == cost[linear_sum_assignment(cost)].sum()


def test_of_many_workers_too_all_keep_their_places_where_that_costs_nothing():
    held = {f"w{i:03}": range(4 + i % 2) for i in range(200)}
    roles = [range(2), range(2, 4)] * 100
    places = {f"w{i:03}": 199 - i for i in range(200)}
    assert assign(held, roles, range(6), places) == tuple(sorted(held, reverse=True))
    shifted = {f"w{i:03}": (i + 2) % 200 for i in range(200)}
    assert assign(held, roles, range(6), shifted) == tuple(sorted(held, key=shifted.__getitem__))


def test_workers_keep_their_places_where_that_costs_nothing():
    held = dict.fromkeys("abcd", range(4))
    roles = [range(2), range(2, 4), range(2), range(2, 4)]
    places = {"d": 0, "c": 1, "b": 2, "a": 3}
    assert assign(held, roles, range(5), places) == ("d", "c", "b", "a")


def test_of_two_who_hold_the_same_the_one_in_place_stays():
    assert assign({"a": range(2), "b": range(2)}, [range(2)], range(3), {"b": 0}) == ("b",)


def test_who_comes_from_elsewhere_leaves_places_to_those_who_have_them():
    held = {"a": range(3), "b": range(2)}
    assert assign(held, [range(2), range(2)], range(4), {"a": 0}) == ("a", "b")


def test_who_has_come_with_nothing_gets_the_role_that_nobody_is_near():
    held = {"new": range(0), "a": range(2), "b": range(2, 4)}
    assert assign(held, [range(4, 6), range(2), range(2, 4)], range(7)) == ("new", "a", "b")


def test_who_is_farthest_from_all_roles_stays_idle():
    held = {"a": range(2), "b": range(2, 4), "c": range(4, 6)}
    assert assign(held, [range(2), range(3, 6)], range(7)) == ("a", "c")


def test_pipelines_are_staffed_in_the_order_of_their_cuts():
    held = {"a": range(2, 4), "b": range(2), "c": range(4)}
    pipelines = staff([cuts_of((2, 2)), cuts_of((4,))], held, range(5))
    assert [each.workers for each in pipelines] == [("b", "a"), ("c",)]
    assert of_pipelines(pipelines, [1, 1], 1).placement == held


def test_more_roles_than_workers_are_refused():
    with pytest.raises(PlanInfeasible, match="roles: 2 for 1 workers"):
        assign({"a": range(1)}, [range(1), range(1, 2)], range(3))


def test_layers_beyond_the_profile_are_refused():
    with pytest.raises(PlanInfeasible, match=r"layers \[1, 3\)"):
        assign({"a": range(1)}, [range(1, 3)], range(3))
