"""Batches for a cluster whose members come and go: each sample of an epoch exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from .protocols.data_cursor import DataCursor, positions
from .protocols.errors import ConfigError
from .protocols.messages import Range


class Batch(Sequence[Any]):
    """What a data set gave for a few indices, collated: `x, y = batch`, `batch.x`, `batch.y`, `len(batch)`.

    Attributes:
        samples: Number of samples; the weight of this node's gradient in the cluster's mean.
        data: The collated whole, e.g. a dictionary if the items are dictionaries.
        last: Call update() after this one. False only for the first of several batches that are accumulated.
        share: Its part of this node's samples in the step: what to multiply a mean loss with to accumulate.
    """

    def __init__(self, data: Any, samples: int) -> None:
        self.data, self.samples = data, samples
        self.last, self.share = True, 1.0
        self._parts = data if isinstance(data, list | tuple) else (data,)

    @property
    def x(self) -> Any:
        return self._parts[0]

    @property
    def y(self) -> Any:
        return self._parts[1]

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on a device."""
        moved = Batch(_to(self.data, device), self.samples)
        moved.last, moved.share = self.last, self.share
        return moved


class EpochOrder:
    """The order of samples in an epoch: a permutation from (seed, epoch), the same on all members."""

    def __init__(self, length: int, seed: int) -> None:
        self.length, self.seed = length, seed
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64)

    def indices(self, epoch: int, ranges: Iterable[Range]) -> list[int]:
        """Indices of the samples at these positions of the epoch."""
        if epoch != self._epoch:
            mixed = random.Random(f"{self.seed}, {epoch}").getrandbits(32)  # torch uses no more bits.
            generator = torch.Generator().manual_seed(mixed)
            self._epoch, self._order = epoch, torch.randperm(self.length, generator=generator)
        indices: list[int] = self._order[list(positions(ranges))].tolist()
        return indices


class DataShare:
    """The part of a data set that all members have which is dealt to node `name`, step by step.

    Attributes:
        length: Samples of the data set; 0 while the script brings its own.
        size: Samples that this node wants per step.
        deal: Who wants how many, in the order in which the cursor deals; as of the last completed step.
        ranges: Dealt to this node for the step under way.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.length = self.size = 0
        self.deal: tuple[tuple[str, int], ...] = ()
        self.ranges: list[Range] = []
        self.cursor: DataCursor | None = None  # Who joins gets the cluster's.

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        return self.cursor.epoch if self.cursor else 0

    def begin(self, length: int, size: int) -> EpochOrder:
        """The script wants `size` of `length` samples per step. Raises: ConfigError if the cluster has others."""
        cursor = self._cursor_of(length)
        if cursor.length != length:
            raise ConfigError(
                f"batches: the data set has {length} samples here, {cursor.length} in the cluster"
            )
        self.length, self.size = length, size
        return EpochOrder(length, cursor.seed)  # Of the run's beginning, whatever `seed` is now.

    def take(self) -> list[Range]:
        """Our part of the step under way."""
        assert self.cursor is not None
        self.ranges = list(self.cursor.deal(self.deal).get(self.name, []))
        return self.ranges

    def completed(self, length: int, ranges: tuple[Range, ...]) -> None:
        """A step consumed `ranges` of the cluster's data set. Raises: ConfigError if ours is another one."""
        if not length:
            return
        if self.length and length != self.length:
            raise ConfigError(
                f"batches: this node's data set has {self.length} samples, the cluster's {length}"
            )
        self._cursor_of(length).commit(ranges)

    def _cursor_of(self, length: int) -> DataCursor:
        """The cluster's, or a new one."""
        if self.cursor is None:
            self.cursor = DataCursor(length, self.seed)
        return self.cursor


def fetch(dataset: Any, indices: list[int]) -> Batch:
    """The samples at `indices`, collated as torch's DataLoader does."""
    if hasattr(dataset, "__getitems__"):
        items = dataset.__getitems__(indices)
    else:
        items = [dataset[index] for index in indices]
    return Batch(default_collate(items), len(indices))


def split(ranges: Sequence[Range], parts: int) -> Iterator[list[Range]]:
    """Cut ranges into at most `parts` lists of nearly equal size, in order; none is empty."""
    every = list(positions(ranges))
    size = -(-len(every) // parts) if every else 0
    for start in range(0, len(every), max(size, 1)):
        yield [(position, position + 1) for position in every[start : start + size]]


def _to(data: Any, device: torch.device | str) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: _to(value, device) for key, value in data.items()}
    if isinstance(data, list | tuple):
        return [_to(value, device) for value in data]
    return data
