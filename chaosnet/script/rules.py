"""What a script must leave to `Trainer`: if it does not, that is refused by name, or causes a notice."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ..node.state.state_window import EVERY
from ..node.sums.gradients import Gradients
from ..node.sums.lanes import whole_numbers
from ..protocols.errors import ConfigError
from ..training.named_updates import parts_of, trained_by
from .loop import ScriptLoop

MUCH_BYTES = 1_000_000  # Of what may be constants, in each step.
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
        self._call = ""  # By which of the two calls the script has stepped last.
        self._stepped = ""  # Name of the optimizer that it has stepped last, if they have names.
        if scheduler is None and hasattr(optimizer.step, "_wrapped_by_lr_sched"):
            say(
                "an LR scheduler was made for this optimizer, but not given to Trainer: nodes that join would train "
                "at other learning rates; write Trainer(model, optimizer, scheduler)"
            )
        mine = trained_by(optimizer)
        left = [name for name, p in model.named_parameters() if p.requires_grad and p not in mine]
        if left:
            say(
                f"{len(left)} of the model's parameters are in no optimizer, {left[0]!r} first: they stay as they "
                "are, and their gradients are not averaged"
            )
        _tell_constants(model, say)
        # With the parameters themselves, so that nothing made later gets one of these ids.
        self._parameters = {id(p): (name, p) for name, p in model.named_parameters()}
        self._groups = self._grouped()
        self._pid = os.getpid()
        self._dicts = [each for module in model.modules() for each in (module._parameters, module._modules)]
        self._entries = self._find_entries()
        self._empty: int | None = 0  # Steps with a backward and without a gradient; None: it has contributed.
        register = getattr(optimizer, "register_step_pre_hook", None)
        # From here on the script's objects are changed: all of them, or none.
        self._loop = ScriptLoop(optimizer, scheduler, on_step, on_schedule)
        try:
            self._hooks = [register(self._before_step)] if register is not None else []
        except BaseException:
            self._loop.remove()
            raise
        self._hooks.append(register_optimizer_step_pre_hook(self._before_any_step))

    def remove(self) -> None:
        """Stop watching: the script may step whatever it likes again."""
        self._loop.remove()
        while self._hooks:
            self._hooks.pop().remove()

    # Steps of the optimizer and of the scheduler are the cluster's.

    def our_step(self) -> AbstractContextManager[None]:
        """Inside, the optimizer and the scheduler may step."""
        return self._loop.ours()

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        if not self._loop.is_ours:
            raise ConfigError(
                "the optimizer was stepped past Trainer, e.g. by a step() that was kept from before Trainer was made "
                "(expected optimizer.step(), which is a step of the cluster, or trainer.update())"
            )

    def _before_any_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Refuse another optimizer that has parameters of this model.

        Other models, and forked children, are left alone.
        """
        if self._loop.is_ours or any(optimizer is each for each in parts_of(self._optimizer).values()):
            return
        ids = (id(p) for group in optimizer.param_groups for p in group["params"])
        stepped = next((self._parameters[each][0] for each in ids if each in self._parameters), None)
        if stepped is not None and os.getpid() == self._pid:
            raise ConfigError(
                f"optimizer: {type(optimizer).__name__}, which is not the one that Trainer has, was stepped, and has "
                f"the model's parameter {stepped!r}: this node's model alone would change (expected the optimizer "
                "that Trainer was given; several as a dictionary; for another phase of training, request_node_exit() "
                "and a Trainer with the new optimizer)"
            )

    @contextmanager
    def within(self, place: str) -> Iterator[None]:
        """Inside, a function of the script's runs in the middle of a step: after_step, or a callback."""
        before, self.place = self.place, place
        try:
            yield
        finally:
            self.place = before

    def check_place(self, call: str) -> None:
        """Raises: ConfigError if the script makes that call in a function that runs in the middle of a step."""
        if self.place:
            raise ConfigError(
                f"{self.place} called {call} (expected no step in it: Trainer has stepped the optimizer already, and "
                "steps the scheduler)"
            )

    def check_call(self, call: str) -> None:
        """The script asks for a step. Raises: ConfigError if it has just asked for this one by the other call."""
        before, self._call = self._call, call
        if before in ("", call) or self._gradients.had_backward or not self._gradients.is_zero():
            return
        raise ConfigError(
            f"{call} after {before}, with no backward() between them: each of them is a step of the cluster "
            "(expected one of them; delete the other)"
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
            "gradients of all (expected one backward() for each step; or a list of optimizers instead of the "
            "dictionary, which then step together; for an update that is to be left out, "
            "trainer.update(samples=0, name=...))"
        )

    # Before each step.

    def check(self, round: int) -> None:
        """Raises: ConfigError for parameters that came after the trainer."""
        if (groups := self._grouped()) != self._groups:
            now, before = list(map(len, groups)), list(map(len, self._groups))
            what = f"the sizes of the groups are {now}, and were {before}"
            if now == before:
                what = "the groups hold other parameters than"
            raise ConfigError(
                f"optimizer.param_groups: {what} when training began{self._newcomers()}; give the optimizer all "
                "parameters before Trainer is made, and hold those that are to wait with a learning rate of 0"
            )
        if (self._find_entries() != self._entries or round % EVERY == 0) and (
            names := self._gradients.strangers(self._model)
        ):
            raise ConfigError(
                f"parameter {names[0]!r} has a gradient, but was no part of the model when training began, so it is "
                "not averaged; make the model whole before Trainer is made"
            )

    def contributed(self) -> None:
        """This node has brought samples to a step. Say so if it never brings a gradient, though it runs backward."""
        if self._empty is None or not self._gradients.had_backward:
            return
        self._empty = self._empty + 1 if self._gradients.is_zero() else None
        if self._empty == TOLD_AFTER:
            self._say(
                f"this node has contributed no gradient in {TOLD_AFTER} steps, though it ran backward: does the "
                "script call optimizer.zero_grad() between backward() and the step? It belongs behind the step"
            )

    def _grouped(self) -> list[list[int]]:
        """The ids of the parameters in each group."""
        return [list(map(id, group["params"])) for group in self._optimizer.param_groups]

    def _find_entries(self) -> list[int]:
        """The ids of all parameters and modules of the model."""
        return [id(value) for entries in self._dicts for value in entries.values()]

    def _newcomers(self) -> str:
        before = {each for group in self._groups for each in group}
        added = {each for group in self._grouped() for each in group} - before
        names = [name for name, p in self._model.named_parameters() if id(p) in added]
        return f" ({', '.join(map(repr, names[:3]))} added)" if names else ""


def _tell_constants(model: nn.Module, say: Callable[[str], None]) -> None:
    """Say so if buffers of whole numbers (masks, say) take much of each step."""
    sizes = whole_numbers(model)
    if sum(sizes.values()) > MUCH_BYTES:
        largest = max(sizes, key=sizes.__getitem__)
        say(
            f"buffers of whole numbers and bools take {sum(sizes.values()) / 1e6:.1f} MB of each step, 8 bytes a "
            f"number, the largest {largest!r} {sizes[largest] / 1e6:.1f} MB: a constant that every script makes anew "
            "stays at home if it is registered with persistent=False"
        )
