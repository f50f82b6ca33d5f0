"""Batches for a cluster whose members come and go: each sample of an epoch exactly once."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import default_collate

from .protocols.data_cursor import positions


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

    def indices(self, epoch: int, ranges: Iterable[tuple[int, int]]) -> list[int]:
        """Indices of the samples at these positions of the epoch."""
        if epoch != self._epoch:
            mixed = random.Random(f"{self.seed}, {epoch}").getrandbits(32)  # torch uses no more bits.
            generator = torch.Generator().manual_seed(mixed)
            self._epoch, self._order = epoch, torch.randperm(self.length, generator=generator)
        return [int(self._order[position]) for position in positions(ranges)]


def fetch(dataset: Any, indices: list[int]) -> Batch:
    """The samples at `indices`, collated as torch's DataLoader does."""
    if hasattr(dataset, "__getitems__"):
        items = dataset.__getitems__(indices)
    else:
        items = [dataset[index] for index in indices]
    return Batch(default_collate(items), len(indices))


def split(ranges: Sequence[tuple[int, int]], parts: int) -> Iterator[list[tuple[int, int]]]:
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
