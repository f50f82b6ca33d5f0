"""Lives in which nodes need each other's tensors within a step, as members of pipelines do."""

import pytest

from chaosnet.simulator import run_many
from chaosnet.simulator.coverage import expected
from chaosnet.simulator.random_run import AIMS, run


@pytest.mark.parametrize("seed", [0, 2, 3, 15, 56, 61])
def test_seeds_that_catch_a_broken_rule_keep_all_of_them(seed):
    run(seed, nodes=(2, 4), tensors=True)


def test_a_result_and_a_view_that_come_in_one_turn_are_told_apart():
    """A step completed, a joiner let in and lost, and a flush: what was begun in the view between is void."""
    run(53, tensors=True)


@pytest.mark.slow
def test_random_lives_keep_all_rules():
    summary = run_many(range(5000, 5200), tensors=True)
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > 50 and summary.total("joins") > 50
    assert "delivered: Tensor" in summary.coverage and "crash: receiver of Tensor" in summary.coverage
    assert summary.coverage.keys() <= expected(AIMS, tensors=True)
