"""A simulation that finds nothing may look at nothing: it must notice when a rule is broken on purpose."""

import pytest

from chaosnet.simulator.mutants import MUTANTS, hunt

SLOW = {"answers-to-any-flush-count", "shards-of-any-step"}  # `chaosnet simulate --mutants` takes the time.


@pytest.mark.parametrize("name", sorted(MUTANTS.keys() - SLOW))
def test_a_broken_rule_is_noticed(name):
    assert hunt(name, seeds=()).by, MUTANTS[name].breaks


def test_there_are_enough_of_them():
    assert len(MUTANTS.keys() - SLOW) >= 20
