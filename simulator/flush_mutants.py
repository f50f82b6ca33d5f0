"""Rules for a joiner that a flush finds several steps behind (scheduler/flushes.py, `_late`), broken on purpose."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..protocols import sums
from ..scheduler.flushes import Flushes
from . import cluster
from .mutants import Patch, mutant


@mutant("Of the results that a joiner lacks after a flush, the last is sent.")
def _earlier_results_are_not_served(patch: Patch) -> None:
    original = sums.Sums.serve_result

    def serve_result(self: Any, step: int, weight: float) -> Any:
        return original(self, step, weight) if step == self.step - 1 else []

    patch(sums.Sums, "serve_result", serve_result)


@mutant("Of the results that a joiner lacks after a flush, those on the way to it pass on the last.")
def _earlier_results_are_not_passed_on(patch: Patch) -> None:
    original = sums.Sums.go_on

    def go_on(self: Any, behind: int, recovering: int) -> None:
        original(self, behind, min(recovering, 1))

    patch(sums.Sums, "go_on", go_on)


@mutant("A result is given up with the next step, though a flush counts on it for a joiner that is behind.")
def _earlier_results_are_given_up(patch: Patch) -> None:
    original = cluster.SimCluster._check_result

    def check_result(self: Any, node: Any, effect: Any) -> Any:
        return original(self, node, replace(effect, kept=1))

    patch(cluster.SimCluster, "_check_result", check_result)


@mutant("A flush takes joiners that lack results which nobody has kept.")
def _whoever_is_behind_is_taken(patch: Patch) -> None:
    def late(self: Any, base: Any, priors: Any, answers: Any, rest: Any) -> set[str]:
        top = self._top(answers)
        return {node for node, each in answers.items() if each.step < top - 1 and base.find(node)}

    patch(Flushes, "_late", late)
