"""When the LR scheduler is stepped: by steps, epochs, samples or evaluations of the cluster; and how it ends."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import lr_scheduler as torch_schedulers

from ..node.state.trainable import check_optimizer
from ..protocols.errors import ConfigError
from ..protocols.step_sync import means
from .named_updates import parts_of

STEP, EPOCH, EVALUATION = "step", "epoch", "evaluation"
LOSS = "loss"  # What trainer.mean averages, unless the script gives it a name.
TORCHS_OWN = (torch_schedulers.LRScheduler, torch_schedulers.ReduceLROnPlateau)
MOST_INSIDE = 64  # A longer list is no list of schedulers, and is not looked through at each step.
_METHODS = ("step", "state_dict", "load_state_dict")
LEAST_SHARE = 1e-9  # Of the initial learning rate: what is below was not meant.


class LRSchedule:
    """The script's scheduler, stepped to the same effect on every node.

    Args:
        scheduler: Anything with torch's step(); None for none.
        every: "step": with every step of the optimizer. "epoch": with every epoch of `batches` that the cluster
            completes. "evaluation": with every evaluation. A number: whenever the cluster has trained so many samples
            more.
    Raises: ConfigError for what is no scheduler, or one of another optimizer.
    """

    def __init__(
        self,
        scheduler: Any,
        optimizer: torch.optim.Optimizer,
        every: str | int,
        say: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.scheduler, self._optimizer, self._every, self._say = scheduler, optimizer, every, say
        self._at = 0.0  # Epochs, samples or evaluations up to which it has been stepped.
        self._judged = math.nan  # What the last evaluation came to.
        self._own: dict[str, _Own] = {}
        self._parts: dict[str, _Part] = {}
        if scheduler is not None:
            self._check_owner()
            optimizers = parts_of(optimizer)
            self._parts = {
                name: _Part(each, optimizers[name], self._warn) for name, each in parts_of(scheduler).items()
            }
        self._counts = step_counts(scheduler)
        for each, _ in self._counts:
            if every == STEP and isinstance(each, torch_schedulers.ReduceLROnPlateau):
                say(
                    f"ReduceLROnPlateau looks at the mean loss of each step of the cluster, so its patience of "
                    f"{each.patience} counts steps (see Trainer(lr_scheduler_every='epoch') and 'evaluation')"
                )

    def _check_owner(self) -> None:
        """Raises: ConfigError if it is no scheduler, or steps the learning rates of another optimizer."""
        check_optimizer(self._optimizer)
        mine = [id(group) for group in self._optimizer.param_groups]
        for name, scheduler in parts_of(self.scheduler).items():
            what = f"lr_scheduler[{name!r}]" if name else "lr_scheduler"
            missing = [each for each in _METHODS if not callable(getattr(scheduler, each, None))]
            if missing or isinstance(scheduler, type):
                raise ConfigError(
                    f"{what}: {scheduler!r:.200} (expected a scheduler made for the optimizer, as of "
                    "torch.optim.lr_scheduler)"
                )
            for each, _ in step_counts(scheduler):
                theirs = getattr(each, "optimizer", None)
                if isinstance(theirs, torch.optim.Optimizer) and not any(
                    id(group) in mine for group in theirs.param_groups
                ):
                    raise ConfigError(
                        f"{what}: this {type(each).__name__} was made for another optimizer, of class "
                        f"{type(theirs).__name__}, than the one that Trainer is given, so it would change nothing "
                        "(expected one made for that)"
                    )

    # What joiners and checkpoints get, beside the scheduler's own state.

    def to_plain(self) -> list[Any]:
        """How far the schedule is, as plain data."""
        return [self._at, {name: list(part.loss) for name, part in self._parts.items()}, str(self._every)]

    def from_plain(self, plain: Any, epoch: int = 0, samples: float = 0.0) -> None:
        """Go on from there, with the scheduler as it is now. None: from the beginning.

        Args:
            epoch, samples: As of `progressed`. Where a checkpoint was counted in another unit, what has been done
                before it was stepped for: the schedule is not to run after all of that in this one.
        """
        at, losses, *every = plain or (0.0, {})
        if every and every[0] != str(self._every):
            at = {EPOCH: float(epoch), STEP: 0.0, EVALUATION: 0.0}.get(str(self._every), samples)
            losses = {}
        if not isinstance(losses, Mapping):  # Older checkpoints have one, as of one schedule.
            losses = {"": losses}
        self._at = at
        for name, part in self._parts.items():
            total, weight = losses.get(name, (0.0, 0.0))
            part.loss = (total, weight)
        for own in self._own.values():
            own.called_at = -1.0  # After a rejoin to an older state the script comes to the same epoch again.
        self._counts = step_counts(self.scheduler)

    # What happens.

    def check(self, counts_epochs: bool = True) -> None:
        """Raises: ConfigError if the script has stepped the scheduler itself, or nobody counts the epochs."""
        if self.scheduler is not None and self._every == EPOCH and not counts_epochs:
            raise ConfigError(
                "lr_scheduler_every='epoch' counts epochs of trainer.batches, and this script brings its own data "
                "(expected 'step', or a number of samples)"
            )
        before, self._counts = self._counts, step_counts(self.scheduler)
        if any(each is other and count != was for each, count in self._counts for other, was in before):
            name = type(self.scheduler).__name__
            raise ConfigError(
                f"{name} was stepped past Trainer, or given another state, and Trainer steps it on all nodes alike "
                "(expected no call of step(), and load_state_dict() before Trainer is made; or, where the class "
                f"{name} defines step(), scheduler.step() once after each step of the optimizer)"
            )

    # The script's own calls of step(): Trainer has done it already, on all nodes. Is that what the script means?

    def own_step(self, name: str, counts: bool) -> None:
        """The script has stepped the optimizer of that name ("": all); if it `counts`, with a gradient."""
        for each in {"", *([name] if name else self._parts)}:
            own = self._own.setdefault(each, _Own())
            own.steps += counts
            own.empty += not counts

    def called(self, name: str, arguments: tuple[Any, ...]) -> None:
        """The script calls step() of the scheduler of that name. Raises: ConfigError if it means another schedule."""
        parts = parts_of(self.scheduler)
        kind, own = type(parts[name]).__name__, self._own.setdefault(name, _Own())
        if isinstance(parts[name], torch_schedulers.ReduceLROnPlateau):
            self._check_judged(kind, arguments[0] if arguments else None)
            arguments = arguments[1:]
        if any(value is not None for value in arguments):
            raise ConfigError(f"{kind}.step() was called with {arguments!r} (expected no argument)")
        if self._every not in (STEP, EPOCH, EVALUATION):
            raise ConfigError(
                f"{kind}.step() was called by the script, but Trainer steps it by samples: lr_scheduler_every="
                f"{self._every} (expected no call; delete that line)"
            )
        steps, calls, at = own.steps, own.steps + own.empty, own.called_at
        own.steps, own.empty, own.called_at = 0, 0, self._at
        if self._every == EVALUATION and self._at in (0, at):
            raise ConfigError(
                f"{kind}.step() was called by the script without an evaluation before it, but lr_scheduler_every="
                "'evaluation' (expected once after each loop over trainer.evaluate, or no call)"
            )
        if self._every == EPOCH and at == self._at:
            raise ConfigError(
                f"{kind}.step() was called by the script within an epoch, but lr_scheduler_every='epoch' (expected "
                "once after each epoch of trainer.batches; for each step: Trainer(lr_scheduler_every='step'))"
            )
        if self._every == STEP and not calls:
            raise ConfigError(
                f"{kind}.step() was called without a step of the optimizer before it (expected once after each "
                "optimizer.step(), or no call: Trainer steps it)"
            )
        if self._every == STEP and steps > 1:
            raise ConfigError(
                f"{kind}.step() was called after {steps} steps of the optimizer, but Trainer has stepped it with "
                "each (expected for a schedule by epochs: Trainer(lr_scheduler_every='epoch') and trainer.batches; "
                "or a number of samples, and no call)"
            )

    def _check_judged(self, kind: str, value: Any) -> None:
        """The script steps a plateau with that value. Raises: ConfigError if other nodes may do so with another."""
        if self._every != EVALUATION:
            raise ConfigError(
                f"{kind}.step() was called by the script with what this node has measured (expected for a loss of "
                "validation: Trainer(lr_scheduler_every='evaluation'), trainer.evaluate and trainer.mean(loss); for "
                "that of training: trainer.mean(loss) before optimizer.step(), and no call)"
            )
        said = self._judged if value is None else float(value)
        is_same = said == self._judged or (math.isnan(said) and math.isnan(self._judged))
        if not is_same:
            raise ConfigError(
                f"{kind}.step() was called with {said!r}, and the cluster's evaluation has come to "
                f"{self._judged!r} (expected that, which trainer.metrics has after trainer.evaluate; or no call)"
            )

    def stepped(self, loss: tuple[float, float]) -> None:
        """The optimizer has stepped. `loss`: weighted sum and weight of trainer.mean(loss)."""
        # Of several, that of the update that is due, which may have none; or all, if they step together.
        due = getattr(self.scheduler, "due", "")
        parts = [part for name, part in self._parts.items() if due in ("", name)]
        for part in parts:
            part.trained()
            if self._every != EVALUATION:
                part.loss = (part.loss[0] + loss[0], part.loss[1] + loss[1])
        if parts and self._every == STEP:
            self._step(*parts)

    def progressed(
        self, epoch: int, samples: float, evaluated: Mapping[str, tuple[float, float]] | None = None
    ) -> None:
        """Epochs completed and samples trained by the cluster, ever; and what an evaluation has just come to."""
        if self.scheduler is None or self._every == STEP:
            return
        if self._every == EVALUATION:
            if evaluated is not None:
                self._evaluated({name: sums for name, sums in evaluated.items() if sums[1]})
            return
        now, unit = (epoch, 1) if self._every == EPOCH else (samples, float(self._every))
        while self._at + unit <= now:
            self._at += unit
            self._step(*self._parts.values())

    def _evaluated(self, sums: Mapping[str, tuple[float, float]]) -> None:
        """An evaluation has come to these weighted sums, and their weights."""
        name = LOSS if len(sums) != 1 else next(iter(sums))
        self._judged = means(sums).get(name, math.nan)
        self._at += 1
        for part in self._parts.values():
            part.loss = sums.get(name, (0.0, 0.0))
        self._step(*self._parts.values())

    def _step(self, *parts: _Part) -> None:
        for part in parts:
            part.step()
        self._counts = step_counts(self.scheduler)

    def _warn(self, text: str) -> None:
        unit = f"{self._every}s" if self._every in (STEP, EPOCH, EVALUATION) else f"{self._every} samples"
        self._say(f"{text} (it counts {unit} of the cluster; see lr_scheduler_every)")


class _Part:
    """One scheduler, and the optimizer whose rates are its own: of several optimizers each has its schedule.

    Attributes:
        loss: Sum and weight since its last step, for ReduceLROnPlateau.
    """

    def __init__(self, scheduler: Any, optimizer: torch.optim.Optimizer, warn: Callable[[str], None]) -> None:
        self.loss = (0.0, 0.0)
        self._scheduler, self._optimizer, self._say = scheduler, optimizer, warn
        self._is_over = self._has_come_to_0 = self._said = False

    def trained(self) -> None:
        """The optimizer has stepped."""
        if self._has_come_to_0 and not any(self._rates()):
            # Told with the first step that it spoils: most schedules come to 0 with the last one.
            name = type(self._scheduler).__name__
            self._warn(
                f"the schedule {name} has come to a learning rate of 0: nothing is learned from here on"
            )

    def step(self) -> None:
        name, before = type(self._scheduler).__name__, self._rates()
        (total, weight), self.loss = self.loss, (0.0, 0.0)
        if finished(self._scheduler):
            # Told one call late: OneCycleLR takes a step more than changes something.
            if self._is_over:
                self._warn(f"the schedule {name} is over: the learning rate stays at {max(before):g}")
            self._is_over = True
            return
        if isinstance(self._scheduler, torch_schedulers.ReduceLROnPlateau):
            if weight:
                self._scheduler.step(total / weight)
            else:
                self._warn(f"{name} changes nothing without trainer.mean(loss)")
        else:
            self._scheduler.step()
        self._keep_above(before, name)

    def _keep_above(self, before: list[float], name: str) -> None:
        """A learning rate that has shrunk to nothing is told, and not taken; of one that is 0, steps tell."""
        now, initial = max(self._rates()), max(self._initial())
        if now == 0 < max(before):
            self._has_come_to_0 = True
        elif 0 < now < LEAST_SHARE * initial and now < max(before):
            for group, rate in zip(self._optimizer.param_groups, before, strict=True):
                if isinstance(group["lr"], torch.Tensor):
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate
            self._warn(
                f"the schedule {name} went from a learning rate of {initial:g} down to {now:g}: it stays at "
                f"{max(before):g}"
            )

    def _rates(self) -> list[float]:
        return [float(group["lr"]) for group in self._optimizer.param_groups]

    def _initial(self) -> list[float]:
        return [float(group.get("initial_lr", group["lr"])) for group in self._optimizer.param_groups]

    def _warn(self, text: str) -> None:
        """Say it once."""
        if not self._said:
            self._said = True
            self._say(text)


@dataclass(slots=True)
class _Own:
    """What the script has done since it last called step() of a scheduler."""

    steps: int = 0  # Of the optimizer, with a gradient.
    empty: int = 0  # Without one: a GradScaler has found an overflow. Scripts call step() then, or do not.
    called_at: float = -1.0  # The epoch.


def finished(scheduler: Any) -> bool:
    """Whether one more step() would raise, or leave the schedule that was asked for; never if it goes in cycles."""
    at = getattr(scheduler, "last_epoch", 0)
    if isinstance(scheduler, torch_schedulers.OneCycleLR):
        return bool(at >= scheduler.total_steps - 1)
    if isinstance(scheduler, torch_schedulers.CosineAnnealingLR):
        return bool(at >= scheduler.T_max)
    if isinstance(scheduler, torch_schedulers.PolynomialLR):
        return bool(at >= scheduler.total_iters)
    if isinstance(scheduler, torch_schedulers.SequentialLR):
        last = bisect_right(scheduler._milestones, at) == len(scheduler._milestones)
        return last and finished(scheduler._schedulers[-1])
    if isinstance(scheduler, torch_schedulers.ChainedScheduler):  # Goes on as long as any of them does.
        inner = scheduler._schedulers
        return all(map(finished, inner)) or any(
            isinstance(each, torch_schedulers.OneCycleLR) and finished(each) for each in inner
        )
    return False


def step_counts(scheduler: Any) -> list[tuple[Any, Any]]:
    """It, and each that it is made of now, with how often it was stepped, by whomever; None if that is not known."""
    found = [scheduler]
    for each in found:  # It grows meanwhile.
        for inner in _inside(each):
            if not any(inner is other for other in found):
                found.append(inner)
    return [(each, getattr(each, "last_epoch", None)) for each in found]


def _inside(scheduler: Any) -> Iterator[Any]:
    """Those that step with it: of a composite, or the one that a class of the script's own passes its steps on to."""
    yield from getattr(scheduler, "_schedulers", ())
    slots = [slot for kind in type(scheduler).__mro__ for slot in _names(vars(kind).get("__slots__", ()))]
    for name in (*getattr(scheduler, "__dict__", {}), *slots):
        value = getattr(scheduler, name, None)
        if isinstance(value, dict):
            value = list(value.values())
        values = value if isinstance(value, list | tuple) else [value]
        if len(values) <= MOST_INSIDE:
            yield from (each for each in values if isinstance(each, TORCHS_OWN))


def _names(slots: Any) -> Iterable[str]:
    return [slots] if isinstance(slots, str) else slots
