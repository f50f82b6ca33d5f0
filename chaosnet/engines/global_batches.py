"""Which samples a step of pipelines takes: the next ones of the epoch's order, however many members there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from msgspec.structs import replace
from torch.utils.data import default_collate

from ..data.share import DataShare, check_dataset, one_by_one
from ..protocols.data_cursor import DataCursor, joined, positions
from ..protocols.errors import ConfigError
from ..protocols.messages import Contribution, Range
from ..training.randomness import seed_from, seed_generators
from .layer_runner import MicroBatches
from .tensor_bytes import moved, no_tensor

STEPS = "PipelineTrainer.steps"


class GlobalBatches:
    """The samples of each step, on one node. `length`, and what `share` has consumed, are agreed.

    A sample over which the scripts of two members have ended with an error is set aside. In between, samples with one
    strike are taken a few at a time (protocols/data_cursor.py).

    Args:
        batch: Samples of a step, of all members together; `micro_batch`: those that go through the layers at once.
        seed: Of the order of samples.
    Raises: ConfigError for sizes that cannot be.
    """

    def __init__(self, batch: int, micro_batch: int, seed: int) -> None:
        for name, value in (("batch", batch), ("micro_batch", micro_batch)):
            if not isinstance(value, int) or value < 1:
                raise ConfigError(f"{name}: {value!r} (expected a whole number of samples from 1 on)")
        if batch % micro_batch:
            raise ConfigError(
                f"micro_batch: {micro_batch} does not divide the batch of {batch} (expected a divisor of it)"
            )
        self.batch, self.micro_batch = batch, micro_batch
        self.length = 0
        self.share = DataShare("", seed)  # All of it is one share.
        self._dataset: Any = None
        self._collate: Callable[[list[Any]], Any] = default_collate
        self._taken: list[int] | None = None
        self._bad: int | None = None  # The position whose sample could not be had.

    @property
    def micro_batches(self) -> int:
        """How many a step has."""
        return self.batch // self.micro_batch

    @property
    def own_length(self) -> int:
        """Samples of this node's data set; 0 before it has one."""
        return 0 if self._dataset is None else len(self._dataset)

    def give(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        """Set the data set, the same on all members. Raises: ConfigError if it cannot be used."""
        check_dataset(dataset, collate_fn, STEPS)
        if not len(dataset):
            raise ConfigError(f"{STEPS}: a data set of 0 samples (expected at least 1)")
        if self.length and len(dataset) != self.length:
            raise ConfigError(
                f"{STEPS}: a data set of {len(dataset)} samples (expected {self.length}, as the others have)"
            )
        self._dataset, self._collate = dataset, collate_fn or default_collate

    def agree(self, length: int) -> None:
        """Members have data sets of `length` samples. Raises: ConfigError if ours has another length."""
        if length and self.own_length not in (0, length):
            raise ConfigError(
                f"{STEPS}: a data set of {self.own_length} samples (expected {length}, as another member has)"
            )
        self.length = length or self.length
        if self.length and self.share.cursor is None:
            self.share.cursor = DataCursor(self.length, self.share.seed)

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self.share.epoch

    def samples(self) -> list[int]:
        """How many samples each micro-batch of the step has: at the end of an epoch fewer, or none."""
        left = len(self._positions())
        return [min(max(left - at, 0), self.micro_batch) for at in range(0, self.batch, self.micro_batch)]

    def _positions(self, number: int | None = None) -> list[int]:
        """Positions in the epoch that the step takes; with `number`, those of one of its micro-batches."""
        if self._taken is None:
            cursor = self.share.cursor
            dealt = cursor.deal((("", self.batch),))[""] if cursor is not None else []
            self._taken = list(positions(dealt))
        if number is None:
            return self._taken
        return self._taken[number * self.micro_batch :][: self.micro_batch]

    def blamed(self, number: int | None) -> tuple[Range, ...]:
        """The suspects when a script fails: the sample that could not be fetched, else micro-batch `number`."""
        if self._bad is not None:
            return ((self._bad, self._bad + 1),)
        return () if number is None else tuple(joined(self._positions(number)))

    def step(self, device: torch.device, key: int) -> MicroBatches:
        """The micro-batches of the step that is due. Raises: ConfigError if this node has no data set.

        `key`: seeds what the data set draws, so that a micro-batch is the same on any member, however often it is
        fetched. Generators stay as fetching leaves them.
        """
        if self._dataset is None:
            raise ConfigError("PipelineTrainer: this node has a part of the model, and no data (call steps)")
        return MicroBatches(self.samples(), lambda number: moved(self._pair(number, key), device))

    def completed(self, total: Contribution, applied: bool) -> list[str]:
        """A step is complete. `applied`: were its samples trained on? Returns: sentences on samples set aside."""
        self.agree(total.dataset)
        if self.share.cursor is None:
            return []
        ranges = tuple(joined(self._positions())) if applied else ()
        said = self.share.completed(replace(total, dataset=self.length, ranges=ranges))
        self._taken = self._bad = None
        return said

    def _pair(self, number: int, key: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch."""
        where = self._positions(number)
        indices = self.share.order.indices(self.epoch, joined(where))
        seed_generators(seed_from("data", key, self.epoch, where[0]))

        def blame(place: int) -> None:
            self._bad = where[place]

        return as_pair(self._collate(one_by_one(self._dataset, indices, blame)), STEPS)

    def to_plain(self) -> dict[str, Any] | None:
        """What is agreed."""
        return None if self.share.cursor is None else self.share.cursor.to_plain()

    def from_plain(self, plain: dict[str, Any] | None) -> None:
        """Take over what is agreed."""
        self._taken = None
        self.share.cursor = None if plain is None else DataCursor.from_plain(plain)
        self.agree(0 if self.share.cursor is None else self.share.cursor.length)


def as_pair(batch: Any, where: str) -> tuple[Any, Any]:
    """Inputs and targets. Raises: ConfigError if it is something else, given `where`."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        raise ConfigError(
            f"{where}: a batch is {type(batch).__name__} (expected a pair, inputs for the first layer and targets "
            "for the loss; collate_fn can make one)"
        )
    inputs, targets = batch
    if other := no_tensor(tuple(inputs) if isinstance(inputs, list) else inputs):
        raise ConfigError(
            f"{where}: the inputs of a batch are {other} (expected a tensor, or a tuple of tensors, for the first "
            "layer; collate_fn can make one)"
        )
    return inputs, targets
