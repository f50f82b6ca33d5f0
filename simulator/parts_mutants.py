"""Rules of members that keep parts of the state (protocols/step_sync.py, `parts`), broken on purpose."""

from __future__ import annotations

from typing import Any

from ..protocols import step_sync, sums
from ..protocols.effects import Effect
from ..scheduler.elastic import keeping
from . import kept
from .mutants import Patch, mutant


@mutant("A member is ready when its own part is done, whether what it keeps is summed or not.")
def _ready_before_it_is_summed(patch: Patch) -> None:
    original = step_sync.StepSync.handle

    def handle(self: Any, event: Any) -> list[Effect]:
        effects = original(self, event)
        told = self.attempt.summed_told or self.frozen or not self.sums.kept.is_told
        if isinstance(event, step_sync.Contributed) and not told:
            self.attempt.summed_told = True
            effects.append(step_sync.Summed(self.view.key, self.step))
        return effects

    patch(step_sync.StepSync, "handle", handle)
    patch(sums.Sums, "is_lacking", False)


@mutant("A flush drops what is summed, though the step may have been committed.")
def _a_flush_drops_sums(patch: Patch) -> None:
    original = sums.Sums.freeze

    def freeze(self: Any) -> None:
        original(self)
        self.has_all = False

    patch(sums.Sums, "freeze", freeze)


@mutant("A result goes to a neighbour only if that keeps it, not if it is on the way to one that does.")
def _results_are_not_passed_through(patch: Patch) -> None:
    original = sums._place

    def place(*arguments: Any) -> Any:
        found = original(*arguments)
        found.reached = {peer: frozenset((peer,)) for peer in found.reached}
        return found

    patch(sums, "_place", place)


@mutant("Who is to go votes for that, though it still keeps something.")
def _whoever_leaves_takes_its_parts_along(patch: Patch) -> None:
    patch(step_sync.StepSync, "_own_vote", lambda self: self.vote)


@mutant("Who keeps something from now on is taken to have it.")
def _nothing_is_handed_on(patch: Patch) -> None:
    patch(kept, "moves", lambda *arguments: [])


@mutant("Only who has something keeps it: no copy is made anew.")
def _copies_are_not_made_anew(patch: Patch) -> None:
    def choose(sizes: Any, computing: Any, before: keeping.Table, members: Any, copies: int) -> keeping.Table:
        return tuple(tuple(name for name in names if name in members) or names for names in before)

    patch(kept, "choose_keepers", choose)


@mutant("A joiner is not told who is about to leave.")
def _joiners_do_not_know_who_leaves(patch: Patch) -> None:
    patch(kept.KeptTensors, "agreed", lambda self, node: (self.tables[node], set()))
