"""What a script must leave to `Trainer`: refused by name, or told, where it does not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn

from .node.gradients import Gradients
from .node.state_window import EVERY
from .protocols.errors import ConfigError
from .script_loop import ScriptLoop

TOLD_AFTER = 2  # Steps with a backward of which nothing was left.
UPDATE, STEP, SCHEDULE = "trainer.update()", "optimizer.step()", "scheduler.step()"


class ScriptRules:
    """Watches the optimizer and the model of a run.

    Args:
        on_step, on_schedule: See `ScriptLoop`.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: Any,
        gradients: Gradients,
        say: Callable[[str], None],
        on_step: Callable[[str | None, bool], None],
        on_schedule: Callable[[str, tuple[Any, ...]], None],
    ) -> None:
        self._model, self._optimizer, self._gradients, self._say = model, optimizer, gradients, say
        self.place = ""  # Which function of the script's runs in the middle of a step.
        self._way = ""  # By which of the two calls the script has stepped last.
        self._stepped = ""  # Name of the optimizer that it has stepped last, if they have names.
        if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            say(
                "an LR scheduler was made for this optimizer, but not given to Trainer: nodes that join would train "
                "at other learning rates; write Trainer(model, optimizer, scheduler)"
            )
        self._groups = self._group_sizes()
        self._dicts = [each for module in model.modules() for each in (module._parameters, module._modules)]
        self._entries = self._count_entries()
        self._empty: int | None = 0  # Steps with a backward and without a gradient; None: it has contributed.
        register = getattr(optimizer, "register_step_pre_hook", None)
        # From here on the script's objects are changed: all of them, or none.
        self._loop = ScriptLoop(optimizer, scheduler, on_step, on_schedule)
        try:
            self._hook = register(self._before_step) if register is not None else None
        except BaseException:
            self._loop.remove()
            raise

    def remove(self) -> None:
        """The script may do as it likes again."""
        self._loop.remove()
        if self._hook is not None:
            self._hook.remove()
            self._hook = None

    # Steps of the optimizer and of the scheduler are the cluster's.

    def our_step(self) -> AbstractContextManager[None]:
        """Within it the optimizer and the scheduler may step."""
        return self._loop.ours()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._loop.is_ours:
            raise ConfigError(
                "the optimizer was stepped past Trainer, e.g. by a step() that was kept from before Trainer was made "
                "(expected optimizer.step(), which is a step of the cluster, or trainer.update())"
            )

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """A function of the script's runs, in the middle of a step of the cluster: after_step, or a callback."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def check_place(self, way: str) -> None:
        """Raises: ConfigError within a function that is called in the middle of a step."""
        if self.place:
            raise ConfigError(
                f"{self.place} called {way} (expected no step in it: Trainer has stepped the optimizer already, and "
                "steps the scheduler)"
            )

    def check_way(self, way: str) -> None:
        """The script asks for a step. Raises: ConfigError if it has done so already, by the other call."""
        before, self._way = self._way, way
        if before in ("", way) or self._gradients.had_backward or not self._gradients.is_zero():
            return
        raise ConfigError(
            f"{way} after {before}, with no backward() between them: each of them is a step of the cluster (expected "
            "one of them; delete the other)"
        )

    def check_backward(self, name: str) -> None:
        """The script steps the optimizer of that name, with samples.

        Raises: ConfigError if there is nothing to step with: the last step has dropped the gradients of all.
        """
        before, self._stepped = self._stepped, name
        if not before or self._gradients.had_backward or not self._gradients.is_zero():
            return
        raise ConfigError(
            f"the optimizer {name!r} was stepped with no backward() since the step of {before!r}, which drops the "
            "gradients of all (expected one backward() for each step; or all parameters in one optimizer, as groups; "
            "for an update that is to be left out, trainer.update(samples=0, name=...))"
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
                "script call optimizer.zero_grad() between backward() and the step? It belongs behind the step"
            )

    def _group_sizes(self) -> list[int]:
        return [len(group["params"]) for group in self._optimizer.param_groups]

    def _count_entries(self) -> int:
        return sum(map(len, self._dicts))

    def _newcomers(self) -> str:
        added = [p for group in self._optimizer.param_groups[len(self._groups) :] for p in group["params"]]
        names = [name for name, p in self._model.named_parameters() if any(p is each for each in added)]
        return f" ({', '.join(map(repr, names[:3]))} added)" if names else ""
