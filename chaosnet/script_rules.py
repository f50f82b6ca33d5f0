"""What a script must leave to `Trainer.update`: refused by name, or told, where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .node.gradients import Gradients
from .node.state_window import EVERY
from .protocols.errors import ConfigError

TOLD_AFTER = 2  # Steps with a backward of which nothing was left.


class ScriptRules:
    """Watches the optimizer and the model of a run."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: Gradients,
        say: Callable[[str], None],
    ) -> None:
        self._model, self._optimizer, self._gradients, self._say = model, optimizer, gradients, say
        self._stepping = False
        self._groups = self._group_sizes()
        self._dicts = [each for module in model.modules() for each in (module._parameters, module._modules)]
        self._entries = self._count_entries()
        self._empty: int | None = 0  # Steps with a backward and without a gradient; None: it has contributed.
        register = getattr(optimizer, "register_step_pre_hook", None)
        self._hook = register(self._before_step) if register is not None else None

    def remove(self) -> None:
        """The script may do as it likes again."""
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # optimizer.step() belongs to update().

    @contextmanager
    def our_step(self) -> Iterator[None]:
        """Within it the optimizer may step."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._stepping:
            raise ConfigError(
                "optimizer.step() was called by the script (or by scaler.step(optimizer)), but update() steps the "
                "optimizer, with the gradient of the whole cluster; delete that line"
            )

    # Before each step.

    def check(self, round: int) -> None:
        """Raises: ConfigError for parameters that came after the trainer."""
        if self._group_sizes() != self._groups:
            raise ConfigError(
                f"optimizer.param_groups: the sizes of the groups are {self._group_sizes()}, and were {self._groups} "
                f"when training began{self._newcomers()}; give the optimizer all parameters before Trainer is made, "
                "and hold those that are to wait with a learning rate of 0"
            )
        if (self._count_entries() != self._entries or round % EVERY == 0) and (
            names := self._gradients.strangers(self._model)
        ):
            raise ConfigError(
                f"parameter {names[0]!r} has a gradient, but was no part of the model when training began, so it is "
                "not averaged; make the model whole before Trainer is made"
            )

    def contributed(self) -> None:
        """This node has brought samples to a step: does it bring a gradient, too?"""
        if self._empty is None or not self._gradients.had_backward:
            return
        self._empty = self._empty + 1 if self._gradients.is_zero() else None
        if self._empty == TOLD_AFTER:
            self._say(
                f"this node has contributed no gradient in {TOLD_AFTER} steps, though it ran backward: does the "
                "script call optimizer.zero_grad() between backward() and update()? Delete it: update() does it"
            )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _count_entries(self) -> int:
        return sum(map(len, self._dicts))

    def _newcomers(self) -> str:
        added = [p for group in self._optimizer.param_groups[len(self._groups) :] for p in group["params"]]
        names = [name for name, p in self._model.named_parameters() if any(p is each for each in added)]
        return f" ({', '.join(map(repr, names[:3]))} added)" if names else ""
