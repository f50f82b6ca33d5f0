"""A simulation that finds nothing may look at nothing: it must notice when a rule is broken on purpose."""

import pytest

from chaosnet.simulator.crash_points import point_named
from chaosnet.simulator.hunt import KNOWN_POINTS, TRIED_FIRST, _known, hunt
from chaosnet.simulator.mutants import MUTANTS


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_rule_is_noticed(name):
    assert hunt(name, seeds=()).by, MUTANTS[name].breaks


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 20


def test_what_is_tried_first_is_there():
    """Else a name that changed would cost half a minute, and nobody would see."""
    assert TRIED_FIRST.keys() <= MUTANTS.keys()
    assert {*TRIED_FIRST.values()} <= {ground for ground, _ in _known()}
    assert [point_named(name).name for name in KNOWN_POINTS] == [*KNOWN_POINTS]
