"""Layers that any member can make by itself, as long as nothing has been trained.

Functions build them with their first values (layer_builds.py); where the cluster goes on from a checkpoint,
they are read from there. Each member makes those that it needs, so none has to hold all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..node.state.checkpoint import Opened, read_tensors
from ..node.state.flat_state import DTYPES
from ..protocols.errors import CheckpointError
from ..scheduler.elastic.keeping import Table
from .layer_builds import LayerBuilds
from .state_parts import Slot, StateParts


class StoredParts:
    """Groups of parameters in one checkpoint, in the folder that all members share.

    Attributes:
        folder: The checkpoint's name there.
        stepped: Parameters of which the optimizer knows something in it, by number.
    """

    def __init__(self, opened: Opened, parts: StateParts) -> None:
        self.folder = opened.checkpoint.path.name
        self._opened, self._parts, self._tensors = opened, parts, opened.tensors
        self._slots = parts.slots_named([tensor.name for tensor in self._tensors])
        self.stepped = set(parts.numbers(slot.parameter for slot in self._slots if slot and slot.key))

    def values(self, group: int, whole: bool) -> Iterator[tuple[Slot, torch.Tensor]]:
        """The group's parameters, if `whole` with what the optimizer knows of them. Raises: CheckpointError."""
        wanted = {
            position: slot
            for position, slot in enumerate(self._slots)
            if slot and self._parts.group_of[slot.parameter] == group and (whole or not slot.key)
        }
        for position, data in read_tensors(self._opened, only=wanted):
            stored = self._tensors[position]
            dtype = DTYPES[stored.dtype]
            flat = torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
            yield wanted[position], flat.view(stored.shape)


class MadeLayers:
    """The layers that one member can make by itself.

    Args:
        users: By group of parameters, the layers that use it.
        opened: Opens a checkpoint, by its folder; None where there are none. Raises: CheckpointError.
    Attributes:
        layers: The layer of each group that functions build; no other layer uses it.
        fresh: Can they still be made? Agreed.
        stored: The checkpoint that has them; None if they have their first values. Agreed.
    """

    def __init__(
        self,
        users: Sequence[Collection[int]],
        parts: StateParts,
        builds: LayerBuilds,
        opened: Callable[[str], Opened] | None,
    ) -> None:
        self._parts, self._builds, self._opened = parts, builds, opened
        self.layers = {
            group: layer
            for group, layers in enumerate(users)
            for layer in layers
            if layer in builds.functions
        }
        self.fresh = bool(self.layers)
        self.stored: StoredParts | None = None

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of these layers: not loaded from a checkpoint with the rest, but made when needed."""
        return [parameter for group in self.layers for parameter in self._parts.groups[group]]

    def positions(self, names: Sequence[str]) -> list[int]:
        """Which of a checkpoint's tensors, called `names`, are of these layers."""
        slots = self._parts.slots_named(names)
        return [
            n for n, slot in enumerate(slots) if slot and self._parts.group_of[slot.parameter] in self.layers
        ]

    def present(self, table: Table, members: Collection[str]) -> Table:
        """`table`, but with all members for the groups that any of them can make."""
        if not self.fresh:
            return table
        return tuple(tuple(members) if group in self.layers else names for group, names in enumerate(table))

    def values(self, group: int, whole: bool) -> Iterator[tuple[Slot, torch.Tensor]]:
        """The values of the group's parameters; if `whole`, also of what the optimizer knows of them.

        Raises: ConfigError, CheckpointError.
        """
        if self.stored is not None:
            yield from self.stored.values(group, whole)
            return
        for parameter, value in self._builds.values(self.layers[group]):
            yield Slot(parameter, ""), value

    def loaded(self, folder: str) -> None:
        """The checkpoint in `folder` has been loaded, but for these layers. Raises: CheckpointError."""
        self.fresh = bool(self.layers)
        self.stored = self._open(folder) if self.fresh else None
        self._parts.loaded(self.layers, self.stored.stepped if self.stored is not None else ())

    def trained(self) -> None:
        """The model was updated: from now on only keepers have these layers, and nobody can make them."""
        self.fresh, self.stored = False, None

    def to_plain(self) -> dict[str, Any]:
        """For a joiner."""
        return {"fresh": self.fresh, "stored": self.stored.folder if self.stored is not None else ""}

    def from_plain(self, plain: Mapping[str, Any]) -> None:
        """Raises: CheckpointError if the checkpoint that others read is not to be had here."""
        self.fresh = plain["fresh"]
        self.stored = self._open(plain["stored"]) if plain["stored"] else None

    def _open(self, folder: str) -> StoredParts:
        if self._opened is None:
            raise CheckpointError(
                f"the cluster goes on from {folder}, of which each member reads its layers (expected a folder of "
                "checkpoints, the one that all members share)"
            )
        return StoredParts(self._opened(folder), self._parts)
