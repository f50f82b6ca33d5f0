"""Several models and optimizers in one run, e.g. a GAN's: updates with names, in a fixed order that all nodes share.

    Trainer({"D": d, "G": g}, {"D": opt_d, "G": opt_g})   then, again and again:   update(name="D"), update(name="G")

A round is one update of each name. The cluster's steps do one name after the other, so which one is due is part of
the training state; a node that comes in takes part without samples until the first one is. Samples of `batches`
count as used when the round's last update is done.

    Trainer(model, [muon, adamw])   steps both with each update(), which has no name
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn

from ..node.state.trainable import check_optimizer
from ..protocols.errors import ConfigError

Optimizers = torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | list[torch.optim.Optimizer]
MAX_NAME = 64
TURNS = 16  # Unnamed updates of disjoint sets of parameters in turn, from the first on: then they want names.

RECIPE = (
    "consecutive update() calls bring gradients of different parameters, in turn, so a node that joins in between "
    "would average those of one with those of the other. Give each a name: Trainer({'D': d, 'G': g}, "
    "{'D': opt_d, 'G': opt_g}) and trainer.update(name='D'), trainer.update(name='G'); or call update() once, after "
    "all backward passes"
)


class NamedOptimizers:
    """Several optimizers as one: their groups one after the other. step() steps the one that is `due`.

    Args:
        together: step() steps all of them, and none is due.
    Raises: ConfigError for one that cannot be, by its name.
    """

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer], together: bool = False) -> None:
        self.parts, self.together = dict(parts), together
        self.due = "" if together else next(iter(self.parts))
        self._schedulers = list(self.parts.values())  # As composites of torch have: what they are made of.
        owner: dict[int, str] = {}
        for name, part in self.parts.items():
            check_optimizer(part, f"optimizer[{name!r}]")
            for parameter in _parameters(part):
                other = owner.setdefault(id(parameter), name)
                if other != name:
                    raise ConfigError(
                        f"optimizer[{name!r}] has a parameter of shape {list(parameter.shape)} that "
                        f"optimizer[{other!r}] has, too (expected each in one of them)"
                    )

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return [group for part in self.parts.values() for group in part.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:
        return _States(self.parts)

    def step(self) -> None:
        for name, part in self.parts.items():
            if self.together or name == self.due:
                part.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts.values():
            part.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        """As of one optimizer: the parameters of all are numbered consecutively."""
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        first = 0
        for part in self.parts.values():
            told = part.state_dict()
            state |= {first + index: value for index, value in told["state"].items()}
            groups += [_shifted(group, first) for group in told["param_groups"]]
            first += sum(len(group["params"]) for group in told["param_groups"])
        return {"state": state, "param_groups": groups}

    def load_state_dict(self, told: Mapping[str, Any]) -> None:
        groups, first = iter(told["param_groups"]), 0
        for part in self.parts.values():
            mine = [_shifted(next(groups), -first) for _ in part.param_groups]
            count = sum(len(group["params"]) for group in mine)
            state = {i - first: value for i, value in told["state"].items() if first <= i < first + count}
            part.load_state_dict({"state": state, "param_groups": mine})
            first += count

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> _Handles:
        return _Handles([part.register_step_pre_hook for part in self.parts.values()], hook)

    def register_step_post_hook(self, hook: Callable[..., Any]) -> _Handles:
        return _Handles([part.register_step_post_hook for part in self.parts.values()], hook)


class NamedSchedulers:
    """LR schedulers by the names of their optimizers' updates; a name may have none. LRSchedule steps them."""

    def __init__(self, parts: Mapping[str, Any]) -> None:
        self.parts = dict(parts)
        self.due = ""
        self._schedulers = list(self.parts.values())

    def state_dict(self) -> dict[str, Any]:
        return {name: part.state_dict() for name, part in self.parts.items()}

    def load_state_dict(self, told: Mapping[str, Any]) -> None:
        for name, part in self.parts.items():
            part.load_state_dict(told[name])


class NamedUpdates:
    """Which update is due, in the cluster and in this node's script.

    Attributes:
        names: In order; () if updates have none.
        phase: Index of the one that is due in the cluster; a part of the training state.
        mine: Index of the one that this node's script calls next.
        void: Does the script have to end a round that the cluster has broken off for this node?
    """

    def __init__(self, names: tuple[str, ...], model: nn.Module, optimizer: Any, scheduler: Any) -> None:
        self.names, self._model, self._optimizer, self._scheduler = names, model, optimizer, scheduler
        self.phase = self.mine = 0
        self.void = False
        self._turns: list[int] | None = []  # Which parameters the first updates had gradients of.

    @property
    def is_settled(self) -> bool:
        """Is no round under way in the cluster?"""
        return self.phase == 0

    @property
    def is_last(self) -> bool:
        return not self.names or self.phase == len(self.names) - 1

    def check(self, name: str | None) -> str:
        """The script calls update(name=...). Returns: what to contribute as. Raises: ConfigError if not due."""
        if not self.names:
            if name is not None:
                raise ConfigError(
                    f"update: name={name!r}, but this trainer has one optimizer (expected none, or a dictionary "
                    "of optimizers to Trainer)"
                )
            return ""
        due = self.names[self.mine]
        if name != due:
            raise ConfigError(
                f"update: name={name!r}, but {due!r} is due (expected in turn: {', '.join(self.names)})"
            )
        self.mine = (self.mine + 1) % len(self.names)
        return due

    def completed(self, name: str) -> None:
        """A step of the cluster is complete.

        If it has no name in the middle of a round, nobody goes on with that round.
        """
        if self.names:
            self.phase = (self.phase + 1) % len(self.names) if name else 0

    def stepping(self, name: str) -> None:
        for each in (self._optimizer, self._scheduler):
            if name and hasattr(each, "due"):
                each.due = name

    def rejoined(self) -> None:
        """This node has rejoined: the script's own round ends without effect, as the cluster may have gone on."""
        self.void = self.mine != 0

    def end_void(self) -> None:
        self._optimizer.zero_grad(set_to_none=True)
        self.void = self.mine != 0

    def parameters(self) -> Iterable[nn.Parameter]:
        """The parameters that the update under way steps; with one optimizer in the model's order."""
        part = getattr(self._optimizer, "parts", {}).get(getattr(self._optimizer, "due", ""))
        if part is not None:
            return _parameters(part)
        mine = trained_by(self._optimizer)
        return (parameter for parameter in self._model.parameters() if parameter in mine)

    def watch(self, present: bytes, count: int) -> None:
        """Look at which of the `count` parameters an unnamed update had gradients of.

        Branches that are drawn at random may take turns for a while, too, but not for so long from the first on.
        Raises: ConfigError if updates take turns.
        """
        mask = int.from_bytes(present, "little") & ((1 << count) - 1)
        if self.names or not mask or self._turns is None:
            return
        self._turns.append(mask)
        if (len(self._turns) > 1 and mask & self._turns[-2]) or (
            len(self._turns) > 2 and mask != self._turns[-3]
        ):
            self._turns = None
        elif len(self._turns) == TURNS:
            raise ConfigError(f"update: {RECIPE}")


def named(
    model: Any, optimizer: Any, scheduler: Any, updates: tuple[str, ...] | None
) -> tuple[nn.Module, Any, Any, NamedUpdates]:
    """Dictionaries of models, and dictionaries or lists of optimizers and schedulers, become one of each.

    Raises: ConfigError.
    """
    if isinstance(model, Mapping) and not isinstance(model, nn.Module):
        for name, part in model.items():
            if not isinstance(part, nn.Module) or not isinstance(name, str) or not name or "." in name:
                raise ConfigError(
                    f"model: {name!r}: {type(part).__name__} (expected names, and modules for them)"
                )
        model = nn.ModuleDict(dict(model))
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"model: {model!r:.200} (expected a torch.nn.Module, or a dictionary of some by name)"
        )
    names: tuple[str, ...] = ()
    if isinstance(optimizer, Mapping):
        if not optimizer or not all(
            isinstance(name, str) and 0 < len(name) <= MAX_NAME for name in optimizer
        ):
            raise ConfigError(
                f"optimizer: names {list(optimizer)!r} (expected 1 to {MAX_NAME} characters each)"
            )
        names = tuple(optimizer if updates is None else updates)
        if updates is not None and (isinstance(updates, str) or set(names) != set(optimizer)):
            raise ConfigError(
                f"updates: {updates!r} (expected names of optimizers, each at least once: {', '.join(optimizer)})"
            )
        optimizer = NamedOptimizers(optimizer)
        if isinstance(scheduler, Mapping):
            if unknown := set(scheduler) - set(names):
                raise ConfigError(
                    f"lr_scheduler: {min(unknown)!r} (expected one of {', '.join(optimizer.parts)})"
                )
            scheduler = NamedSchedulers(scheduler)
        elif scheduler is not None:
            raise ConfigError(
                "lr_scheduler: one for several optimizers (expected a dictionary by their names)"
            )
    elif isinstance(optimizer, list | tuple) and optimizer and updates is None:
        optimizer = NamedOptimizers(_numbered(optimizer), together=True)
        if scheduler is not None:
            if not isinstance(scheduler, list | tuple) or len(scheduler) != len(optimizer.parts):
                raise ConfigError(
                    "lr_scheduler: expected a list of as many as there are optimizers in theirs; None for one without"
                )
            scheduler = NamedSchedulers(
                {name: each for name, each in _numbered(scheduler).items() if each is not None}
            )
    else:
        check_optimizer(optimizer)
        if updates is not None:
            raise ConfigError(
                "updates: given with one optimizer (expected a dictionary of optimizers by these names)"
            )
    return model, optimizer, scheduler, NamedUpdates(names, model, optimizer, scheduler)


def _numbered(several: Sequence[Any]) -> dict[str, Any]:
    return {str(number): each for number, each in enumerate(several)}


def parts_of(whole: Any) -> Mapping[str, Any]:
    """The script's optimizers, or its schedulers, by the names of their updates; one has the name ""."""
    return whole.parts if isinstance(whole, NamedOptimizers | NamedSchedulers) else {"": whole}


class _States(MutableMapping[Any, Any]):
    """The optimizers' states as one, by parameter."""

    def __init__(self, parts: Mapping[str, torch.optim.Optimizer]) -> None:
        self._parts = parts

    def _owner(self, parameter: Any) -> MutableMapping[Any, Any]:
        for part in self._parts.values():
            if any(parameter is each for each in _parameters(part)):
                return part.state
        raise KeyError(parameter)

    def __getitem__(self, parameter: Any) -> Any:
        return self._owner(parameter)[parameter]

    def __setitem__(self, parameter: Any, state: Any) -> None:
        self._owner(parameter)[parameter] = state

    def __delitem__(self, parameter: Any) -> None:
        del self._owner(parameter)[parameter]

    def __contains__(self, parameter: object) -> bool:
        return any(parameter in part.state for part in self._parts.values())

    def __iter__(self) -> Iterator[Any]:
        return (parameter for part in self._parts.values() for parameter in part.state)

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts.values())


class _Handles:
    """Several handles of torch's hooks, made together or not at all, and removed together."""

    def __init__(self, registers: list[Callable[..., Any]], hook: Callable[..., Any]) -> None:
        self._handles: list[Any] = []
        try:
            for register in registers:
                self._handles.append(register(hook))
        except BaseException:
            self.remove()
            raise

    def remove(self) -> None:
        for handle in self._handles:
            handle.remove()


def trained_by(optimizer: Any) -> set[nn.Parameter]:
    """The parameters that an optimizer has, or several as one."""
    return {*_parameters(optimizer)}


def _parameters(part: torch.optim.Optimizer) -> list[nn.Parameter]:
    return [parameter for group in part.param_groups for parameter in group["params"]]


def _shifted(group: Mapping[str, Any], by: int) -> dict[str, Any]:
    """A group with its parameters' numbers moved by `by`. A range stays one: torch looks for each number in it."""
    indices = group["params"]
    if isinstance(indices, range):
        return {**group, "params": range(indices.start + by, indices.stop + by)}
    return {**group, "params": [index + by for index in indices]}
