"""Rules of steps whose parts hang on the view (protocols/step_sync.py, `recomputes`), broken on purpose.

Not here, because breaking it breaks nothing that can be seen from outside: a tensor of an earlier view that is handed
over (the training thread asks for those of its attempt by name).
"""

from __future__ import annotations

from typing import Any

from ..protocols import courier, step_sync, sums
from ..protocols.effects import Effect, Recompute
from ..protocols.messages import Tensor, View
from .mutants import Patch, mutant


@mutant("What was contributed to a void attempt goes into the next, though another view computed it.")
def _parts_outlive_their_attempt(patch: Patch) -> None:
    patch(sums.Sums, "forget_own", lambda self: None)


@mutant("What is contributed late, to an attempt that is void by now, counts for the next.")
def _late_parts_count(patch: Patch) -> None:
    patch(step_sync.StepSync, "_is_void", lambda self, key: False)


@mutant("After a flush nobody computes anew.")
def _nothing_begins_anew(patch: Patch) -> None:
    original = step_sync.StepSync.start_installed

    def start_installed(self: Any, install: Any, view: View) -> list[Effect]:
        return [each for each in original(self, install, view) if not isinstance(each, Recompute)]

    patch(step_sync.StepSync, "start_installed", start_installed)


@mutant("A link that is lost takes tensors with it, and the step goes on.")
def _lost_tensors_tear_nothing(patch: Patch) -> None:
    original = step_sync.StepSync.depends_on

    def depends_on(self: Any, peer: str) -> bool:
        was, self.recomputes = self.recomputes, False
        depends = original(self, peer)
        self.recomputes = was
        return depends

    patch(step_sync.StepSync, "depends_on", depends_on)


@mutant("Tensors of a view that is not entered here yet are dropped.")
def _early_tensors_are_lost(patch: Patch) -> None:
    original = courier.Courier._forward

    def forward(self: Any, peer: str, message: Tensor, payload: Any) -> list[Effect]:
        return original(self, peer, message, payload) if message.key == self.key else []

    patch(courier.Courier, "_forward", forward)


@mutant("Tensors go to neighbours only.")
def _tensors_are_not_passed_on(patch: Patch) -> None:
    def drop(self: Any, peer: str, message: Tensor, payload: Any) -> list[Effect]:
        effects = original(self, peer, message, payload)
        return [] if self.view and message.target not in (self.me, *self.view.neighbors(self.me)) else effects

    original = courier.Courier._forward
    patch(courier.Courier, "_forward", drop)
