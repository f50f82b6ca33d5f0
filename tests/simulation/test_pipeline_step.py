"""The step of a pipeline keeps its rules in random lives and at every crash, and a broken rule is noticed."""

import pytest

from chaosnet.simulator.pipeline_lives import TWO_BY_TWO, Crash, Life, crash_points, play_points, search
from chaosnet.simulator.pipeline_step import PlacedSync, Sum, Up

LIVES = 400
MUTANT_LIVES = 1000  # The slowest to be noticed takes about 300.
SEED = 1  # Of the life whose every message is a crash point: all that a view can change, changes in it.

# Who has added a keeper and dies before its last sum has gone out.
LAST_SUM_LOST = {161: Crash.RECEIVER_BEFORE}


def first_broken(found):
    """The story of the first rule that was broken, or nothing."""
    return next(iter(found.broken.values()), "")


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
    SumsWithoutAll,
    DropsWhatIsEarly,
]


class VotesForWhatItHas(CountsAllCopies):
    """Another rule: Ready waits for the sums of all that its sender keeps in the view that it votes for, too.

    Then who enters a view as a keeper has the last sum, and a flush need not ask for it.
    """

    def _is_gated(self):
        wanted = self.prepared[max(self.prepared)].keepers if self.prepared else ()
        mine = {*self.kept, *(chunk for chunk, nodes in enumerate(wanted) if self.me in nodes)}
        has = [self.states.get(chunk, (-1, 0))[0] == self.step for chunk in mine]
        return all(has) and all((chunk, self.step) in self.sums for chunk in mine)


def test_random_lives_keep_all_rules():
    found = search(range(LIVES))
    assert not found.broken, first_broken(found)
    assert found.crashes > LIVES / 3 and found.lost < LIVES / 4 and found.left > LIVES / 40
    assert {"Params", "Tensor", "Up", "Sum", "Ready", "Commit", "Pull", "State", "Install"} <= {*found.kinds}


@pytest.mark.slow
def test_many_random_lives_keep_all_rules():
    found = search(range(LIVES, 20_000))
    assert not found.broken, first_broken(found)


def test_whoever_crashes_at_whatever_message_of_the_steps_the_others_come_to_rest():
    calm = Life(SEED, shape=TWO_BY_TWO).run({})
    assert not calm.crashed and calm.kinds["State"] and len({*calm.before}) > 2
    found = play_points(SEED, TWO_BY_TWO, crash_points(SEED, TWO_BY_TWO))
    assert not found.broken, first_broken(found)
    assert found.lives == 4 * calm.delivered and not found.lost  # There are two copies.


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(4))
def test_whoever_crashes_as_the_second_the_others_come_to_rest(seed):
    for first in crash_points(seed, TWO_BY_TWO)[::97]:  # After each of these, at every fifth message.
        found = play_points(seed, TWO_BY_TWO, crash_points(seed, TWO_BY_TWO, first)[::5])
        assert not found.broken, first_broken(found)


@pytest.mark.parametrize("core", MUTANTS, ids=lambda core: core.__name__)
def test_a_broken_rule_of_a_step_is_noticed(core):
    assert search(range(MUTANT_LIVES), core).broken, core.__doc__


def test_growing_and_shrinking_in_one_view_is_noticed():
    assert search(range(MUTANT_LIVES), grow=swapped).broken


def test_a_copy_without_its_last_sum_that_counts_is_noticed():
    assert play_points(SEED, TWO_BY_TWO, [LAST_SUM_LOST], CountsAllCopies).broken


def test_who_votes_only_for_what_it_has_may_grow_and_shrink_in_one_view():
    found = search(range(LIVES), VotesForWhatItHas, swapped)
    assert not found.broken, first_broken(found)


@pytest.mark.slow
def test_who_votes_only_for_what_it_has_may_do_so_at_every_crash():
    found = search(range(LIVES, 10_000), VotesForWhatItHas, swapped)
    assert not found.broken, first_broken(found)
    points = crash_points(SEED, TWO_BY_TWO)
    assert not play_points(SEED, TWO_BY_TWO, points, VotesForWhatItHas, swapped).broken
