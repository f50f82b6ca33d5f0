"""The part of the training state that a member has, if members keep only parts of it.

What it does not have takes no memory: in the place of parameters, and of what the optimizer knows of them, is one
NaN, shown in their shape. Whoever reads it sees that nothing is there.
"""

from __future__ import annotations

import re
from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import xxhash
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ..node.state.flat_state import Manifest, as_bytes
from ..node.state.state_window import EVERY, Reading
from ..node.state.trainable import is_expanded
from ..protocols.errors import ConfigError
from .layer_builds import nothing_like

Held = dict[str, torch.Tensor]

# What TrainingState calls a tensor that the optimizer keeps: the parameter's number, and the key.
KNOWN = re.compile(r"optimizer\.state\[(\d+)\]\['([^'\\]+)'\]")


class Slot(NamedTuple):
    """A parameter, or with a `key` what the optimizer knows of it under that."""

    parameter: nn.Parameter
    key: str


class StateParts:
    """The parts of the state that one node has. Parameters come in groups, which are kept whole.

    Args:
        names: The groups' names, for people. `arithmetic`: the kind of the numbers (`arithmetic_of`).
        unbuilt: Parameters that are not here yet, and their layout once they are (`LayerBuilds.shapes`).
    Attributes:
        held: Groups of which all is here, as of the last step.
        sizes: The bytes of each group's parameters.
        stepped: Parameters that the optimizer knows something of, by number. Agreed.
    Raises: ConfigError if the optimizer's state cannot be divided.
    """

    def __init__(
        self, model: nn.Module, groups: Sequence[Sequence[nn.Parameter]], optimizer: torch.optim.Optimizer,
        names: Sequence[str] = (), arithmetic: str = "", unbuilt: Mapping[nn.Parameter, torch.Tensor] | None = None,
    ) -> None:  # fmt: skip
        unbuilt = unbuilt or {}
        self.groups, self.optimizer, self.names, self.arithmetic = groups, optimizer, names, arithmetic
        # Of an earlier trainer of this process, which kept only parts.
        absent = {p for group in groups for p in group if p in unbuilt or is_expanded(p)}
        self.held = {number for number, group in enumerate(groups) if absent.isdisjoint(group)}
        self.sizes = [sum(parameter.nbytes for parameter in group) for group in groups]
        self.parameters = [parameter for group in groups for parameter in group]
        self.group_of = {parameter: number for number, group in enumerate(groups) for parameter in group}
        self._named = {name: p for name, p in model.named_parameters() if p in self.group_of}
        self._numbers = {parameter: number for number, parameter in enumerate(self.parameters)}
        self.stepped = self._with_state()
        # As they are where they are whole; no values.
        self._meta = {
            p: unbuilt[p] if p in unbuilt else torch.empty_like(p, device="meta") for p in self.parameters
        }
        self._known_bytes: tuple[int, ...] | None = None  # None: it is to be counted.
        self._known: dict[tuple[object, ...], Held] = {}  # What the optimizer keeps of a parameter, likewise.
        # Have values, those after the last step.
        self._here: set[nn.Parameter] = {*self.parameters} - absent
        # Memory of others that is likely to be needed again.
        self._room: dict[nn.Parameter, torch.Tensor] = {}
        self._has_state = set(self.held)  # Groups of whose optimizer's state something is here.

    # --- what there is ---

    @property
    def held_bytes(self) -> int:
        """Bytes of the parameters and of the optimizer's state that are here, as of the last step."""
        state = (each for group in self.held for p in self.groups[group] for each in self._state(p).values())
        return sum(p.nbytes for p in self._here) + sum(each.nbytes for each in state)

    def known_bytes(self) -> tuple[int, ...]:
        """By group, bytes of what the optimizer knows of its parameters, here or elsewhere."""
        if self._known_bytes is None:
            self._known_bytes = tuple(
                sum(
                    each.nbytes
                    for p in group
                    if self._numbers[p] in self.stepped
                    for each in self._probed(p).values()
                )
                for group in self.groups
            )
        return self._known_bytes

    def slots(self, group: int, whole: bool) -> list[Slot]:
        """What is sent of a group, in order: its parameters; if `whole`, each with what the optimizer knows of it.

        Raises: ConfigError if it knows something else of one that is held than what a first step makes.
        """
        found: list[Slot] = []
        for parameter in self.groups[group]:
            found.append(Slot(parameter, ""))
            if whole and self._numbers[parameter] in self.stepped:
                known = self._probed(parameter)
                if group in self.held:
                    self._check_known(known, self._state(parameter))
                found += [Slot(parameter, key) for key in sorted(known)]
        return found

    def _check_known(self, first: Held, now: Held) -> None:
        """Of a parameter: what the optimizer makes in a first step, and what it has now. Raises: ConfigError."""
        for key in sorted(first.keys() | now.keys()):
            if key not in now or key not in first or _kind(first[key]) != _kind(now[key]):
                raise ConfigError(
                    f"optimizer: {type(self.optimizer).__name__} has made or changed {key!r} of a parameter in a "
                    "later step (expected all tensors from the first step on, of one type and shape, where members "
                    "keep parts of the state)"
                )

    def content(self, slot: Slot) -> torch.Tensor:
        """The tensor of a slot that is held here, not copied."""
        held: torch.Tensor = self.optimizer.state[slot.parameter][slot.key] if slot.key else slot.parameter
        return held.detach()

    def _state(self, parameter: nn.Parameter) -> Held:
        state = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}

    def are_in(self, manifest: Manifest) -> bool:
        """Has the state of `manifest` parameters that are kept in parts?"""
        return not self._named.keys().isdisjoint(entry.name for entry in manifest.entries)

    def owners(self) -> dict[str, int]:
        """The group of each tensor, by the name that TrainingState gives it."""
        found = {name: self.group_of[p] for name, p in self._named.items()}
        for index, parameter in enumerate(self._in_order()):
            for key in self._state(parameter) if parameter in self.group_of else ():
                found[f"optimizer.state[{index}][{key!r}]"] = self.group_of[parameter]
        return found

    def slots_named(self, names: Sequence[str]) -> list[Slot | None]:
        """The slots of tensors that TrainingState calls so; None for one that is not kept in parts."""
        numbered = dict(enumerate(self._in_order()))

        def find(name: str) -> Slot | None:
            key = KNOWN.fullmatch(name)
            parameter = self._named.get(name) if key is None else numbered.get(int(key[1]))
            if parameter is None or parameter not in self.group_of:
                return None
            return Slot(parameter, key[2] if key else "")

        return list(map(find, names))

    def _in_order(self) -> Iterator[nn.Parameter]:
        """The parameters in the order in which the optimizer's state_dict() counts them."""
        return (parameter for settings in self.optimizer.param_groups for parameter in settings["params"])

    # --- it comes and goes ---

    @torch.no_grad()
    def bring(self, slot: Slot, tensor: torch.Tensor) -> None:
        """The tensor of a slot has come from another member, or was made here: put it in its place."""
        parameter, key = slot
        if not key:
            if parameter not in self._here:
                parameter.data = self._room_for(parameter)
                self._here.add(parameter)
            parameter.data.copy_(tensor)
            return
        self._has_state.add(self.group_of[parameter])
        known = self._probed(parameter)
        if self.optimizer.state[parameter].keys() != known.keys():
            self._forget(parameter)  # In the optimizer's order, as tensors are numbered by it.
        device = _device(parameter, known[key])
        self.optimizer.state[parameter][key] = torch.empty_like(known[key], device=device).copy_(tensor)

    def has(self, group: int) -> bool:
        """Are the group's parameters here, as of the last step?"""
        return self._here.issuperset(self.groups[group])

    def brought(self, group: int) -> None:
        """All slots of the group are here."""
        self.held.add(group)
        self._has_state.add(group)

    @torch.no_grad()
    def keep(self, groups: Collection[int], needed: Collection[int] = ()) -> None:
        """Let go of all but these groups. Memory for parameters of groups that are `needed` again is not freed."""
        for number, group in enumerate(self.groups):
            if number in groups:
                continue
            self.held.discard(number)
            for parameter in group:
                if parameter in self._here:
                    self._room[parameter] = parameter.data
                    parameter.data = nothing_like(self._meta[parameter], parameter.device)
                    self._here.discard(parameter)
                if number not in needed:
                    self._room.pop(parameter, None)
                if number in self._has_state:
                    self._forget(parameter)
            self._has_state.discard(number)

    def _room_for(self, parameter: nn.Parameter) -> torch.Tensor:
        room = self._room.pop(parameter, None)
        return torch.empty_like(self._meta[parameter], device=parameter.device) if room is None else room

    def _forget(self, parameter: nn.Parameter) -> None:
        """Replace what the optimizer knows of a parameter by empty tensors of the same names and shapes."""
        if self._numbers[parameter] in self.stepped:
            known = self._probed(parameter)
            self.optimizer.state[parameter] = {
                key: nothing_like(each, _device(parameter, each)) for key, each in known.items()
            }

    def numbers(self, parameters: Iterable[nn.Parameter]) -> list[int]:
        """The numbers of these parameters among all that are kept in parts."""
        return [self._numbers[parameter] for parameter in parameters]

    def note_stepped(self, numbers: Collection[int]) -> None:
        """Note that the optimizer has stepped these parameters, wherever they are kept."""
        for number in {*numbers} - self.stepped:
            self.stepped.add(number)
            self._known_bytes = None
            parameter = self.parameters[number]
            if self.group_of[parameter] not in self.held:
                self._forget(parameter)

    def start_over(self, stepped: Collection[int]) -> None:
        """Forget all that is here. `stepped`: the parameters that have been stepped in the state that is to come."""
        self._known.clear()  # Settings of the optimizer may have come with the rest.
        self.stepped, self._has_state = {*stepped}, set(range(len(self.groups)))
        self._known_bytes = None
        self.keep(())

    @torch.no_grad()
    def make_room(self, without: Collection[nn.Parameter] = ()) -> None:
        """Make memory for all parameters but these, as they are about to be loaded."""
        for parameter in {*self.parameters} - self._here - {*without}:
            parameter.data = self._room_for(parameter)

    def loaded(self, without: Collection[int] = (), stepped: Collection[int] = ()) -> None:
        """All has been loaded but these groups. `stepped`: their parameters that have been stepped."""
        self.held, self._here = set(range(len(self.groups))), set(self.parameters)
        self._has_state = set(self.held)
        self._known.clear()
        self.stepped, self._known_bytes = self._with_state() | {*stepped}, None
        if without:
            self.keep(self.held - {*without})

    def _with_state(self) -> set[int]:
        return {self._numbers[p] for p in self.parameters if self.optimizer.state.get(p)}

    # --- what the optimizer keeps of a parameter ---

    def _probed(self, parameter: nn.Parameter) -> Held:
        """Names, types and shapes of what the optimizer keeps of a parameter, found by stepping zeros of its shape.

        Raises: ConfigError for what would not be known where the parameter is not.
        """
        meta, groups = self._meta[parameter], enumerate(self.optimizer.param_groups)
        index = next((i for i, each in groups if any(p is parameter for p in each["params"])), None)
        if index is None:
            raise ConfigError(
                "optimizer: it lacks a trained parameter (expected all, where members keep parts)"
            )
        key = index, meta.dtype, tuple(meta.shape), meta.stride(), parameter.device
        if key not in self._known:
            self._known[key] = self._stepped_alone(parameter, self.optimizer.param_groups[index])
        return self._known[key]

    def _stepped_alone(self, parameter: nn.Parameter, settings: Mapping[str, object]) -> Held:
        alone = nn.Parameter(torch.zeros_like(self._meta[parameter], device=parameter.device))
        alone.grad = torch.zeros_like(alone)
        kind = type(self.optimizer)
        other = object.__new__(kind)
        vars(other).update(vars(self.optimizer))
        other.param_groups = [{**settings, "params": [alone]}]
        other.state = defaultdict(dict)
        vars(other).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
        with torch.enable_grad(), _DrawsNothing(kind.__name__):
            try:
                kind.step(other)  # Not the instance's: an LR scheduler counts the calls of that.
            except KeyError as error:
                # torch 2.6's Adagrad looks for what its constructor has made; that of 2.13 makes it in a step, too.
                raise ConfigError(
                    f"optimizer: the step of {kind.__name__} does not make {error} of a parameter (expected one that "
                    "makes what is not there, where members keep parts of the state)"
                ) from error
        found: Held = {}
        for name, value in other.state.get(alone, {}).items():
            if isinstance(value, torch.Tensor):
                device = "meta" if value.device == parameter.device and value.dim() else value.device
                found[name] = torch.empty_like(value, device=device)
            elif value is not None:
                raise ConfigError(
                    f"optimizer: {kind.__name__} keeps {name!r} of a parameter as {type(value).__name__} (expected "
                    "tensors only, where members keep parts of the state)"
                )
        return found

    def check_optimizer(self) -> None:
        """Raises: ConfigError if its state cannot be divided, by name."""
        for parameter in self.parameters:
            self._probed(parameter)

    # --- comparing it ---

    def digest(self, group: int) -> str:
        """A hash of the whole state of a group that is held here: the same on all its keepers."""
        digest = xxhash.xxh3_64()
        for slot in self.slots(group, whole=True):
            digest.update(as_bytes(self.content(slot)).cpu().numpy().data)
        return digest.hexdigest()

    def read(self, step: int) -> Reading | None:
        """The reading of the group whose turn it is, if it is kept here, to be compared with its other keepers'."""
        group = step % max(EVERY, len(self.groups))
        if group not in self.held:
            return None
        digest = self.digest(group)
        return Reading(f"state {self.arithmetic} {group}", digest, [(self.names[group], digest)])

    def forget(self) -> None:
        """See `StateWindow`: nothing is remembered here."""


class _DrawsNothing(TorchDispatchMode):
    """Inside, an optimizer steps in this thread, whatever others do meanwhile.

    Raises: ConfigError where it would draw random numbers, before it has drawn any.
    """

    def __init__(self, optimizer: str) -> None:
        super().__init__()
        self._optimizer = optimizer

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ConfigError(
                f"optimizer: {self._optimizer} draws random numbers (expected none, where members keep parts)"
            )
        return func(*args, **(kwargs or {}))


def _kind(known: torch.Tensor) -> tuple[torch.dtype, torch.Size]:
    return known.dtype, known.shape


def _device(parameter: nn.Parameter, known: torch.Tensor) -> torch.device:
    """Where the optimizer keeps that: a count of steps may lie elsewhere than its parameter."""
    return parameter.device if known.is_meta else known.device
