"""Lives over far links: a message takes up to 0.1 to 0.4 s, and a round trip twice as long."""

import pytest

from chaosnet.simulator import run_many
from chaosnet.simulator.hunt import KNOWN_FAR
from chaosnet.simulator.random_run import run


@pytest.mark.parametrize("seed", KNOWN_FAR)
def test_seeds_that_catch_a_broken_rule_keep_all_of_them(seed):
    run(seed, far=True)


@pytest.mark.slow
def test_random_lives_keep_all_rules():
    summary = run_many(range(9000, 9100), far=True)
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > 50 and summary.total("joins") > 50
