"""Lives in which nodes keep only parts of the state, as members of pipelines with `keepers` do."""

import pytest

from chaosnet.simulator import run_many
from chaosnet.simulator.coverage import expected
from chaosnet.simulator.random_run import AIMS, run


@pytest.mark.parametrize("seed", [1, 2, 5, 24, 52, 429, 602])
def test_seeds_that_catch_a_broken_rule_keep_all_of_them(seed):
    run(seed, nodes=(2, 5), parts=True)


@pytest.mark.parametrize("seed", [418, 436, 442, 696, 756, 870, 902, 207160])
def test_seeds_that_found_something_when_this_was_written(seed):
    """A joiner that was not told who was about to leave; a thread that told who keeps what after its part; joiners
    that died together, whose removal nothing could carry, so that nobody else was let in.
    """
    run(seed, parts=True)


@pytest.mark.parametrize("seed", [218516, 324087])
def test_a_life_is_blamed_for_copies_only_if_a_vote_let_their_keeper_go(seed):
    """218516: it had handed them on in a step that who asks has not heard of. 324087: it was put out, and went."""
    assert "all copies lost" in run(seed, parts=True).kinds


@pytest.mark.slow
def test_random_lives_keep_all_rules():
    summary = run_many(range(7000, 7200), parts=True)
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > 50 and summary.total("leaves") > 20
    assert 0 < summary.kinds["all copies lost"] < 20
    assert "delivered: Tensor" in summary.coverage and "crash: receiver of Tensor" in summary.coverage
    assert summary.coverage.keys() <= expected(AIMS, tensors=True)
