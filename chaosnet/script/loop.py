"""The usual loop: `optimizer.step()` and `scheduler.step()` of a script lead to the cluster's step.

    loss.backward(); optimizer.step(); scheduler.step(); optimizer.zero_grad()

`step` of the optimizer's object is replaced, and not hooked: a pre-hook cannot leave out a step in which the cluster
has nothing to apply. Whoever calls the class's own step past that meets the pre-hook of rules.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch

from ..protocols.errors import ConfigError
from ..training.lr_schedule import step_counts
from ..training.named_updates import NamedOptimizers, NamedSchedulers, parts_of

AMP = "_step_supports_amp_scaling"  # GradScaler then calls step() also where a gradient has overflowed.
SCALING = ("grad_scale", "found_inf")  # What it leaves at the optimizer for that call.


class ScriptLoop:
    """Calls of step() by the script become calls of ours, until `remove`.

    Args:
        on_step: With the name of the update (None if updates have none), and whether a GradScaler has found a
            gradient that is not finite.
        on_schedule: With the name of the update ("" if none), and what step() was given.
    Attributes:
        is_ours: Are steps those of chaosnet just now?
    """

    def __init__(
        self,
        optimizer: Any,
        scheduler: Any,
        on_step: Callable[[str | None, bool], None],
        on_schedule: Callable[[str, tuple[Any, ...]], None],
    ) -> None:
        self.is_ours = False
        self._steps: list[_OptimizerStep] = []
        self._schedules: list[_SchedulerStep] = []
        optimizers: Mapping[Any, Any] = (
            optimizer.parts if isinstance(optimizer, NamedOptimizers) else {None: optimizer}
        )
        schedulers = scheduler.parts if isinstance(scheduler, NamedSchedulers) else {"": scheduler}
        several = _Together(optimizer) if getattr(optimizer, "together", False) else None
        try:
            for name, part in optimizers.items():
                told = functools.partial(on_step, None if several else name)
                together = several or _Together(part)
                self._steps.append(_OptimizerStep(part, told, lambda: self.is_ours, together))
            for name, part in schedulers.items():
                called = functools.partial(on_schedule, name)
                if hasattr(part, "step") and not self._replace_step(part, called):  # None has no step.
                    _check_counted(part)
        except BaseException:  # Of one among several, perhaps: then none of them is ours.
            self.remove()
            raise

    def _replace_step(self, scheduler: Any, on_step: Callable[[tuple[Any, ...]], None]) -> bool:
        """Have the scheduler's step() call `on_step`. Returns: False if that cannot be; then it is left as it is."""
        if not hasattr(type(scheduler), "step") or "step" in getattr(scheduler, "__dict__", {}):
            return False  # It is the object's own, and not its class's.
        try:
            self._schedules.append(_SchedulerStep(scheduler, on_step, lambda: self.is_ours))
        except Exception:  # Nobody may derive from its class, or that says no in its own way.
            return False
        return True

    @contextmanager
    def ours(self) -> Iterator[None]:
        """Inside, step() is the object's own."""
        self.is_ours = True
        try:
            yield
        finally:
            self.is_ours = False

    def remove(self) -> None:
        """From now on step() is the object's own."""
        for step in self._steps:
            step.remove()
        for schedule in reversed(self._schedules):  # One may be there under two names.
            schedule.remove()


class _Together:
    """One optimizer, or several that step together: the first that the script steps leads, the others follow.

    The first, as a script may clear the gradients of each after its step.

    Args:
        whole: All of them as one.
    """

    def __init__(self, whole: Any) -> None:
        self.whole = whole
        self._parts = list(parts_of(whole).values())
        self._stepped: list[Any] = []  # Of the step that one of them has led.
        self._scaled = False

    @property
    def is_one(self) -> bool:
        return len(self._parts) == 1

    def led_by(self, part: Any, scaled: bool) -> None:
        """All of them have been stepped. `scaled`: a GradScaler had left its scale in the gradients."""
        self._stepped, self._scaled = [part], scaled

    def follows(self, part: Any) -> bool:
        """The script steps this one: has that been done? Raises: ConfigError if it leaves out another."""
        if len(self._stepped) in (0, len(self._parts)):
            return False
        if any(part is each for each in self._stepped):
            raise ConfigError(
                f"{type(part).__name__}.step() was called again before step() of all optimizers in Trainer's list "
                "(expected each once, after one backward(): they step together; or a dictionary of optimizers, with "
                "a backward() for each)"
            )
        if (getattr(part, SCALING[0], None) is not None) != self._scaled:
            raise ConfigError(
                "GradScaler.unscale_() was called for some of the optimizers in Trainer's list, which step together "
                "(expected for all of them, or for none, before the first step)"
            )
        self._stepped.append(part)
        return True


class _OptimizerStep:
    """Replaces the step() of one optimizer."""

    def __init__(
        self,
        optimizer: Any,
        on_step: Callable[[bool], None],
        ours: Callable[[], bool],
        together: _Together,
    ) -> None:
        self._optimizer, self._on_step, self._ours, self._together = optimizer, on_step, ours, together
        self._before = {key: optimizer.__dict__[key] for key in ("step", AMP) if key in optimizer.__dict__}
        self._active = True
        original = optimizer.step
        # In a function that is compiled, the step is no part of it.
        called = torch.compiler.disable(self._called)

        # As a method, with the attributes of the one before: LR schedulers wrap it, and look for their mark.
        @functools.wraps(original)
        def step(_: Any, *args: Any, **kwargs: Any) -> Any:
            if not self._active or self._ours():
                return original(*args, **kwargs)
            return called(args, kwargs)

        del step.__wrapped__  # Its signature, without `self` already, would be taken for that of `step`.
        self._step = MethodType(step, optimizer)
        optimizer.step = self._step
        setattr(optimizer, AMP, True)

    def _called(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The script has called step().

        Returns: the closure's result; torch's optimizers call it before anything else.
        """
        closure = args[0] if args else kwargs.get("closure")
        others = (*args[1:], *(value for name, value in kwargs.items() if name != "closure"))
        if any(value is not None for value in others) or not (closure is None or callable(closure)):
            raise ConfigError(
                "optimizer.step() was called with an argument (expected none, or a closure, which is called once "
                "before the step)"
            )
        if self._together.follows(self._optimizer):
            return None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        try:
            scale, overflow = self._scaling()
            if scale is not None and not overflow:
                unscale(self._together.whole, scale)
            self._on_step(overflow)
            self._together.led_by(self._optimizer, scale is not None)
            return loss
        except BaseException:
            for key in SCALING:  # The GradScaler does not come to that.
                self._optimizer.__dict__.pop(key, None)
            raise

    def _scaling(self) -> tuple[float | None, bool]:
        """What a GradScaler has left at the optimizer: its scale, if gradients still have it; did one overflow?

        It deletes the attributes after step(); a fused optimizer must not unscale once more.
        """
        scale, found = (getattr(self._optimizer, key, None) for key in SCALING)
        for key in SCALING:
            if hasattr(self._optimizer, key):
                setattr(self._optimizer, key, None)
        if found is None:
            return None, False
        overflow = float(found) > 0
        if not (overflow or self._together.is_one):  # It has looked at the gradients of this one only.
            overflow = not all(bool(grad.isfinite().all()) for grad in _gradients(self._together.whole))
        return None if scale is None else float(scale), overflow

    def remove(self) -> None:
        self._active = False  # If somebody has wrapped ours, it stays, and passes on.
        for key, ours in (("step", self._step), (AMP, True)):
            if self._optimizer.__dict__.get(key) is ours:
                del self._optimizer.__dict__[key]
                if key in self._before:
                    setattr(self._optimizer, key, self._before[key])


class _SchedulerStep:
    """Replaces the step() of one LR scheduler, by a derived class: an attribute would be in its state_dict()."""

    def __init__(
        self, scheduler: Any, on_step: Callable[[tuple[Any, ...]], None], ours: Callable[[], bool]
    ) -> None:
        self._scheduler, self._class = scheduler, type(scheduler)
        original: Any = self._class
        called = torch.compiler.disable(on_step)

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if self is not scheduler or ours():  # A copy of it is the script's own.
                return original.step(self, *args, **kwargs)
            return called((*args, *kwargs.values()))

        def reduce(self: Any, protocol: Any) -> Any:
            _, _, *rest = original.__reduce_ex__(self, protocol)
            return object.__new__, (original,), *rest  # What is pickled is of a class that others can find.

        names = {"step": functools.wraps(original.step)(step), "__reduce_ex__": reduce}
        names |= {"__module__": original.__module__, "__slots__": ()}  # Of the layout that it has.
        scheduler.__class__ = type(original.__name__, (original,), names)

    def remove(self) -> None:
        self._scheduler.__class__ = self._class


def _check_counted(scheduler: Any) -> None:
    """For a scheduler whose step() cannot be replaced: Trainer sees by `last_epoch` that the script has called it.

    Raises: ConfigError if that cannot be seen either; each such call would be one step too many, in silence.
    """
    if all(count is None for _, count in step_counts(scheduler)):
        name = type(scheduler).__name__
        raise ConfigError(
            f"lr_scheduler: {name}.step() cannot be watched, and it has no last_epoch that would tell of a step by "
            "the script (expected a class that defines step() and may be derived from; or an attribute last_epoch "
            "that counts its steps)"
        )


def _gradients(optimizer: Any) -> list[torch.Tensor]:
    return [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]


def unscale(optimizer: Any, scale: float) -> None:
    """Divide the gradients by what the loss was multiplied with."""
    if grads := _gradients(optimizer):
        torch._foreach_mul_(grads, 1 / scale)
