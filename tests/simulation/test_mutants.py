"""A simulation that finds nothing may look at nothing: it must notice when a rule is broken on purpose.

`chaosnet simulate --mutants` hunts all of them; here are those that a few lives catch.
"""

import pytest

from chaosnet.simulator.mutants import MUTANTS, hunt

QUICK = (
    "no-quorum",
    "silence-proves-a-crash",
    "several-votes-a-term",
    "sums-survive-a-flush",
    "attempts-have-no-name",
    "results-are-not-passed-on",
    "results-are-given-up-early",
    "parts-are-added-twice",
    "samples-are-dealt-twice",
    "hashes-are-not-checked",
)


@pytest.mark.parametrize("name", QUICK)
def test_a_broken_rule_is_noticed(name):
    assert hunt(name, seeds=()).by, MUTANTS[name].breaks


def test_there_are_enough_of_them():
    assert len(MUTANTS) >= 20
