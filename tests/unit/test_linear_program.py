"""`chaosnet.scheduler.linear_program`: how much each tree carries, held against a general solver."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.optimize import linprog

from chaosnet.scheduler.linear_program import most_carried


def random_trees(seed: int, links: int, trees: int) -> np.ndarray:
    """Each with half of the links, and one at least."""
    rng = np.random.default_rng(seed)
    uses = rng.integers(0, 2, (links, trees)).astype(float)
    uses[rng.integers(0, links, trees), np.arange(trees)] = 1.0
    return uses


def limits_of(seed: int, links: int, kind: str) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return {
        "alike": np.ones(links),
        "two kinds": rng.choice([0.1, 1.0], links),
        "even": rng.uniform(0.1, 1.0, links),
        "far apart": 10.0 ** rng.uniform(-4, 4, links),
    }[kind]


@given(
    st.integers(0, 10**6), st.integers(1, 40), st.integers(1, 40),
    st.sampled_from(["alike", "two kinds", "even", "far apart"]),
)  # fmt: skip
def test_it_is_the_optimum_and_its_prices_prove_it(seed, links, trees, kind):
    uses, limits = random_trees(seed, links, trees), limits_of(seed, links, kind)
    carried, prices = most_carried(uses, limits)
    assert (carried >= 0).all() and (prices >= 0).all()
    assert (uses @ carried <= limits * (1 + 1e-9) + 1e-9).all()
    assert (prices @ uses >= 1 - 1e-7).all()  # No tree brings more than its links cost.
    assert carried.sum() == pytest.approx(float(prices @ limits), rel=1e-7)  # So no plan carries more.


@pytest.mark.parametrize("kind", ["alike", "two kinds", "even"])
def test_a_general_solver_finds_the_same_optimum(kind):
    for seed in range(20):
        uses, limits = random_trees(seed, 30, 20), limits_of(seed, 30, kind)
        other = linprog(-np.ones(20), uses, limits, method="highs")
        assert most_carried(uses, limits)[0].sum() == pytest.approx(-other.fun, rel=1e-7)


def test_links_with_next_to_no_room_hold_up_none_of_the_others():
    """Steps that gain nothing come first."""
    uses = np.array([[1.0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1], [0, 0, 1, 1], [1, 0, 0, 1], [0, 1, 1, 0]])
    carried, prices = most_carried(uses, np.array([1e-300, 1e-300, 1.0, 1.0, 1.0, 1e-300]))
    assert carried.sum() == pytest.approx(1.0)
    assert prices.sum() > 0
