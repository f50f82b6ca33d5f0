"""A simulation that finds nothing may look at nothing: it must notice when a rule is broken on purpose."""

import pytest

from chaosnet.simulator.hunt import hunt
from chaosnet.simulator.mutants import MUTANTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name):
    assert hunt(name, seeds=()).by, MUTANTS[name].breaks


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 20
