"""Bugs that random lives seldom show, as scripts: each ends well, and badly with its rule broken."""

import pytest

from chaosnet.simulator.hunt import MUTANTS
from chaosnet.simulator.stories import RULES


@pytest.mark.parametrize("story", RULES, ids=lambda story: story.__name__)
def test_a_story_ends_well(story):
    story()


@pytest.mark.parametrize("story", RULES, ids=lambda story: story.__name__)
def test_without_its_rule_it_does_not(story):
    with MUTANTS[RULES[story]].alive(), pytest.raises(AssertionError):
        story()
