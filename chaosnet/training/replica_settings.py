"""What of a replica is compared as text: settings of optimizer and LR scheduler, what is frozen, and extra_state."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import xxhash

from ..node.state.optimizer_loading import EXECUTION
from ..node.state.training_state import TrainingState

SCHEDULED = ("['lr']", "['momentum']", "['betas']")  # What torch's schedules change; not initial_lr.
MOST_TOLD = 3  # Settings that loading has replaced.
PLAIN = {int, float, bool, str, tuple, type(None)}

Items = Sequence[tuple[str, str]]  # Names of values, and the values as text.


class Values(NamedTuple):
    """Values as of now. `items`: they are put into words only for those who ask."""

    digest: str
    items: Callable[[], Items]


class ReplicaSettings:
    """The settings of the replica `state`; whatever is unchanged since the last reading keeps its digest."""

    def __init__(self, state: TrainingState) -> None:
        self._state = state
        self._parameters = list(state.model.parameters())
        self._names = [name for name, _ in state.model.named_parameters()]
        self._keys: list[tuple[str, ...]] = []  # Of each of the optimizer's groups.
        self._sizes: list[int] = []
        self._values: list[Any] = []
        self._digest = ""
        self._flags: list[bool] = []
        self._flags_digest = ""
        self._settled: Values | None = None  # After the last step.

    def forget(self) -> None:
        """The state was replaced."""
        self._settled = None

    def settle(self) -> None:
        """A step is over: until the next one, settings should stay what they are now."""
        self._settled = self.settings()

    def set_by_script(self) -> str:
        """What to tell people of a setting that the script has changed since; "" if it has not."""
        before, now = self._settled, self.settings()
        if before is None or before.digest == now.digest:
            return ""
        name, (old, new) = first_difference([before.items(), now.items()]) or ("a setting", ["?", "?"])
        return (
            f"{name} was {old} after the last step, and the script has made it {new}: a node that joins takes part "
            "in steps before its own script does so, and then all stop, as replicas differ; give the schedule to "
            "Trainer(lr_scheduler=...), e.g. as a LambdaLR, or set it in Trainer(after_step=...)"
        )

    def replaced(self, before: dict[str, str]) -> str:
        """For people: which of these `fixed` settings a loaded state has replaced; "" if none."""
        others = [
            (name, text, before[name])
            for name, text in self.fixed().items()
            if before.get(name, text) != text
        ]
        said = [f"{name} is {text} (this script: {own})" for name, text, own in others[:MOST_TOLD]]
        if len(others) > MOST_TOLD:
            said.append(f"and {len(others) - MOST_TOLD} more")
        return f"settings of the state that was loaded are used: {', '.join(said)}" if said else ""

    def fixed(self) -> dict[str, str]:
        """The optimizer's settings, by name, without those that a schedule changes."""
        moving = () if self._state.lr_scheduler is None else SCHEDULED
        return {
            name: text for name, text in self.settings().items() if not name.endswith((*moving, "last_epoch"))
        }

    def settings(self) -> Values:
        """All of the optimizer's settings, and how far the LR scheduler is."""
        groups = self._state.optimizer.param_groups
        try:
            values = self._values_of(groups)
        except KeyError:  # A group has other keys than before.
            self._sizes = []
            values = self._values_of(groups)
        if values != self._values or not self._digest:
            self._values, self._digest = values, digest_of(map(_plain, values))
        keys = self._keys

        def items() -> Items:
            names = [
                f"optimizer.param_groups[{number}][{key!r}]"
                for number, group in enumerate(keys)
                for key in group
            ]
            names = [name.replace("['params']", "['params'] (their number)") for name in names]
            names.append("lr_scheduler.last_epoch")
            return [(name, repr(_plain(value))) for name, value in zip(names, values, strict=True)]

        return Values(self._digest, items)

    def _values_of(self, groups: list[dict[str, Any]]) -> list[Any]:
        if self._sizes != list(map(len, groups)):
            self._sizes = list(map(len, groups))
            self._keys = [tuple(sorted(group.keys() - EXECUTION, key=_lr_first)) for group in groups]
        values: list[Any] = []
        for keys, group in zip(self._keys, groups, strict=True):
            for key in keys:
                value = group[key]
                values.append(value if type(value) in PLAIN else _read(key, value))
        values.append(getattr(self._state.lr_scheduler, "last_epoch", None))
        return values

    def requires_grad(self) -> Values:
        """Which parameters are frozen."""
        flags = [parameter.requires_grad for parameter in self._parameters]
        if flags != self._flags:
            self._flags, self._flags_digest = flags, xxhash.xxh3_64_hexdigest(bytes(flags))

        def items() -> Items:
            names = [f"requires_grad of {name!r}" for name in self._names]
            return [(name, str(flag)) for name, flag in zip(names, flags, strict=True)]

        return Values(self._flags_digest, items)

    def extra_state(self, most: int | None) -> Values | None:
        """The values of extra_state that are no tensors; None if it is not there, or they are more than `most`."""
        if self._state.extra_state is None:
            return None
        leaves = _leaves(self._state.extra_state, most)
        if leaves is None:
            return None
        return Values(digest_of(leaves), lambda: [(name, repr(value)) for name, value in leaves])


def first_difference(sides: Sequence[Items]) -> tuple[str, list[str]] | None:
    """The first item, in the order of the first side, that is not alike on all; its values there."""
    by_name = [dict(items) for items in sides]
    names = dict.fromkeys(name for items in sides for name, _ in items)
    for name in names:
        values = [items.get(name, "absent") for items in by_name]
        if len(set(values)) > 1:
            return name, values
    return None


def digest_of(values: Iterable[Any]) -> str:
    """A hash of plain values."""
    return xxhash.xxh3_64_hexdigest(repr(list(values)).encode(errors="backslashreplace"))


def _read(key: str, value: Any) -> Any:
    if key == "params":
        return len(value)
    if isinstance(value, torch.Tensor) and value.device.type != "cpu":
        return None  # It is in the window: looking at it here would wait for the device.
    return _plain(value)


def _lr_first(key: str) -> tuple[bool, str]:
    return key != "lr", key


def _plain(value: Any) -> Any:
    """The value as text: the same for equal numbers, and for lists and tuples, as loading may change their types."""
    if isinstance(value, bool | int) or value is None or isinstance(value, str | bytes):
        return int(value) if isinstance(value, bool) else value
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, dict):
        return tuple(sorted(((repr(key), _plain(each)) for key, each in value.items()), key=lambda p: p[0]))
    if hasattr(value, "tolist"):
        return _plain(value.tolist())  # A tensor, or numpy's.
    return type(value).__name__


def _leaves(value: Any, most: int | None) -> list[tuple[str, Any]] | None:
    """The plain values in it, by their place; None if they are more than `most`."""
    found: list[tuple[str, Any]] = []
    waiting: list[tuple[str, Any]] = [("extra_state", value)]
    while waiting:
        name, each = waiting.pop()
        if isinstance(each, dict):
            waiting += [(f"{name}[{key!r}]", each[key]) for key in sorted(each, key=repr, reverse=True)]
        elif isinstance(each, list | tuple):
            waiting += [(f"{name}[{index}]", each[index]) for index in reversed(range(len(each)))]
        elif not isinstance(each, torch.Tensor):  # Those are in the window.
            found.append((name, _plain(each)))
        if most is not None and len(found) + len(waiting) > most:
            return None
    return found
