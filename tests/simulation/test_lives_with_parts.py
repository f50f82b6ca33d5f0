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


def test_who_kept_a_part_at_last_counts_and_not_who_handed_it_on():
    """218516: the third of three, which had not heard of that step, was told by a person to go on."""
    assert "all copies lost" in run(218516, parts=True).kinds


@pytest.mark.slow
def test_random_lives_keep_all_rules():
    summary = run_many(range(7000, 7200), parts=True)
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > 50 and summary.total("leaves") > 20
    assert 0 < summary.kinds["all copies lost"] < 20
    assert "delivered: Tensor" in summary.coverage and "crash: receiver of Tensor" in summary.coverage
    assert summary.coverage.keys() <= expected(AIMS, tensors=True)
