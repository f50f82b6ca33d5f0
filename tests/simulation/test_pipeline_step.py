"""The step of a pipeline keeps its rules in random lives and at every crash, and a broken rule is noticed."""

import pytest

from chaosnet.simulator.pipeline_lives import search
from chaosnet.simulator.pipeline_step import PlacedSync, Sum, Up
from chaosnet.simulator.pipeline_view import grown

LIVES = 400
MUTANT_LIVES = 3000


class KeepersDoNotGate(PlacedSync):
    """Ready without the sums that a node keeps: a step is committed whose only sum dies with its root."""

    def _is_gated(self):
        return all(
            (chunk, self.step) in self.sums for chunk in self.kept if self.view.keepers[chunk][0] == self.me
        )


class OneNodeServesAll(PlacedSync):
    """Today's rule, where each node has all results: a flush drops what was summed. Here nobody else has it."""

    def _freeze(self, peer, message):
        self.sums = {}
        super()._freeze(peer, message)


class StepsBeforeCommit(PlacedSync):
    """STEP as soon as the sum is here: if the step is done over, it is applied twice, or to other versions."""

    def _may_step(self, version):
        return version <= self.step


def swapped(keepers, node):
    """Grow and shrink in one view: the sum that crosses the switch may be nowhere when a node dies."""
    return (*keepers[:-1], node)


class TakesOldContributions(PlacedSync):
    """Contributions of an older round count: after a loss the routes are others, so grains come twice or never."""

    def _is_of_now(self, message):
        return super()._is_of_now(message) or (isinstance(message, Up) and message.name[1] == self.step)


class TakesOldSums(PlacedSync):
    """Sums of an older round count: keepers of a chunk have the same value and yet another round's gradients."""

    def _is_of_now(self, message):
        return super()._is_of_now(message) or (isinstance(message, Sum) and message.name[1] == self.step)


class GathersTheLastVersion(PlacedSync):
    """A layer computes with the parameters that it has, without waiting for this step's."""

    def _reset(self):
        old = getattr(self, "params", {})
        super()._reset()
        self.params = old


class CountsAllCopies(PlacedSync):
    """A flush takes every keeper for a copy: one that lacks the last sum becomes root, and the step never ends."""

    def _full_copies(self, answers, step):
        return {(chunk, node) for node in answers for chunk in range(len(self.view.keepers))}


class ForgetsTheCommit(PlacedSync):
    """A flush that does not ask who knows of a commit: some have stepped, and the others do the step over."""

    def _install(self, message):
        if message.step > self.step and not self.kept:
            return
        super()._install(message)


class SumsWithoutAll(PlacedSync):
    """The root does not wait for the last holder: grains are missing in the sum."""

    def _on_up(self, peer, up):
        holders = self.view.holders(up.chunk // self.view.parts)
        if len(self.ups.setdefault(up.chunk, {})) == max(len(holders) - 2, 0):
            for holder in sorted(holders - {peer}):
                self.ups[up.chunk].setdefault(holder, ())
        super()._on_up(peer, up)


class DropsWhatIsEarly(PlacedSync):
    """A node drops what comes from a view that it has not heard of: it never comes again, and all wait."""

    def _of_step(self, peer, message):
        if message.name <= (self.view.key, self.step):
            super()._of_step(peer, message)


MUTANTS = [
    KeepersDoNotGate,
    OneNodeServesAll,
    StepsBeforeCommit,
    TakesOldContributions,
    TakesOldSums,
    GathersTheLastVersion,
    CountsAllCopies,
    SumsWithoutAll,
    DropsWhatIsEarly,
]


@pytest.mark.parametrize("core", MUTANTS, ids=lambda core: core.__name__)
def test_a_broken_rule_of_a_step_is_noticed(core):
    assert search(range(MUTANT_LIVES), core).broken


def test_growing_and_shrinking_in_one_view_is_noticed():
    assert search(range(MUTANT_LIVES), grow=swapped).broken
