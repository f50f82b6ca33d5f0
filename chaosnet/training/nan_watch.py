"""Has the model become NaN? One gradient of one node is enough: it is averaged into all replicas."""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import nn

from .guard import Guard

LOOK_EVERY = 16  # Steps: a look reads all parameters.


class NanWatch:
    """Looks whether one node's model is NaN. As all hold the same, all say so, and none writes it to disk.

    Args:
        guard: What keeps such gradients out, if anything does.
        every: Steps from one checkpoint to the next; 0 without checkpoints.
    Attributes:
        found: The model is NaN.
    """

    def __init__(self, model: nn.Module, guard: Guard | None, every: int, say: Callable[[str], None]) -> None:
        self._model, self._guard, self._every, self._say = model, guard, every, say
        # Those that had a gradient: what has none may hold anything.
        self._trained: dict[str, torch.Tensor] = {}
        self.found = False

    def forget(self) -> None:
        """The state has been replaced."""
        self._trained, self.found = {}, False

    def look(self, step: int) -> None:
        """Look after step `step`, while its gradients are still there."""
        is_due = not self._trained or step % LOOK_EVERY == 0 or (self._every and step % self._every == 0)
        if is_due and not self.found:
            parameters = self._model.named_parameters()
            self._trained = {name: each.detach() for name, each in parameters if each.grad is not None}
            self.look_again(step)

    @torch.no_grad()
    def look_again(self, step: int) -> None:
        """Look once more at the parameters of the last look."""
        if self.found:
            return
        totals: dict[torch.device, torch.Tensor] = {}  # By device, so that each is waited for once.
        for each in self._trained.values():
            total = each.sum()
            totals[each.device] = totals[each.device] + total if each.device in totals else total
        if not any(total.isnan() for total in totals.values()):
            return
        name = next((name for name, each in self._trained.items() if each.isnan().any()), None)
        if name is not None:  # Else infinities have cancelled out.
            self.found = True
            self._say(self._told(name, step))

    def _told(self, name: str, step: int) -> str:
        told = f"the model has become NaN, on all nodes: {name!r}, seen after step {step}"
        if self._every:
            told += "; no more checkpoints are written, and those from before are kept: --resume goes back to them"
        if self._guard is None:
            told += '; Trainer(..., guard="skip") leaves out a gradient that is not finite'
        return told


class LossWatch:
    """One member's, of pipelines. All know the loss of a step: of a model that is NaN it never is finite again.

    Attributes:
        found: It is not finite. It may be for one step, of a model that is none the worse.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._has_said = say, False
        self.found = False

    def forget(self) -> None:
        """The state has been replaced."""
        self.found = self._has_said = False

    def look(self, loss: float, step: int, is_saved: bool) -> None:
        """`loss`: of that step. `is_saved`: checkpoints are written, as long as it is finite."""
        self.found = not math.isfinite(loss)
        if self.found and not self._has_said:
            self._has_said = True
            saved = "; no checkpoint is written while it is not finite, and those from before are kept"
            self._say(f"the loss of step {step} is {loss}{saved if is_saved else ''}")
