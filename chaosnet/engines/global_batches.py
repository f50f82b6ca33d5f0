"""Which samples a step of pipelines takes: the next ones of the epoch's order, however many members there are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import default_collate

from ..data import EpochOrder, check_dataset
from ..protocols.errors import ConfigError
from ..randomness import seed_from, seed_generators
from .layer_runner import MicroBatches
from .tensor_bytes import moved

STEPS = "PipelineTrainer.steps"


class GlobalBatches:
    """Of one node; `epoch`, `position` and `length` are agreed.

    Args:
        batch: Samples of a step, of all members together; `micro_batch`: those that go through the layers at once.
        seed: Of the order.
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
        self.batch, self.micro_batch, self.seed = batch, micro_batch, seed
        self.epoch = self.position = self.length = 0
        self._dataset: Any = None
        self._collate: Callable[[list[Any]], Any] = default_collate
        self._order: EpochOrder | None = None

    @property
    def micro_batches(self) -> int:
        """Of a step."""
        return self.batch // self.micro_batch

    @property
    def own_length(self) -> int:
        """Samples of this node's data set; 0 before it has one."""
        return 0 if self._dataset is None else len(self._dataset)

    def give(self, dataset: Any, collate_fn: Callable[[list[Any]], Any] | None) -> None:
        """What there is to train on, the same on all members. Raises: ConfigError if it cannot be."""
        check_dataset(dataset, collate_fn, STEPS)
        if not len(dataset):
            raise ConfigError(f"{STEPS}: a data set of 0 samples (expected at least 1)")
        if self.length and len(dataset) != self.length:
            raise ConfigError(
                f"{STEPS}: a data set of {len(dataset)} samples (expected {self.length}, as the others have)"
            )
        self._dataset, self._collate, self._order = dataset, collate_fn or default_collate, None

    def agree(self, length: int) -> None:
        """The members have data sets of so many samples. Raises: ConfigError if ours is another."""
        if length and self.own_length not in (0, length):
            raise ConfigError(
                f"{STEPS}: a data set of {self.own_length} samples (expected {length}, as another member has)"
            )
        self.length = length or self.length

    def samples(self) -> list[int]:
        """How many each micro-batch of the step has: fewer, or none, at the end of an epoch."""
        left = self.length - self.position
        return [
            min(max(left - at, 0), self.micro_batch) for at in range(0, self.batch, self.micro_batch)
        ]  # fmt: skip

    def step(self, device: torch.device, key: int) -> MicroBatches:
        """Those of the step that is due. Raises: ConfigError if this node has no data set.

        `key`: of what the data set draws: the same for a micro-batch, on whatever member, however often. Generators
        are left as that leaves them.
        """
        if self._dataset is None:
            raise ConfigError("PipelineTrainer: this node has a part of the model, and no data (call steps)")
        return MicroBatches(self.samples(), lambda number: moved(self._pair(number, key), device))

    def advance(self) -> bool:
        """The step was trained. Returns: whether that was the last of an epoch."""
        self.position += sum(self.samples())
        if self.position < self.length:
            return False
        self.epoch, self.position = self.epoch + 1, 0
        return True

    def _pair(self, number: int, key: int) -> tuple[Any, Any]:
        """Inputs and targets of a micro-batch."""
        if self._order is None or self._order.length != self.length:
            self._order = EpochOrder(self.length, self.seed)
        start = self.position + number * self.micro_batch
        indices = self._order.indices(self.epoch, [(start, start + self.samples()[number])])
        seed_generators(seed_from("data", key, self.epoch, start))
        pair = self._collate([self._dataset[index] for index in indices])
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise ConfigError(
                f"{STEPS}: a batch is {type(pair).__name__} (expected a pair, inputs for the first layer and targets "
                "for the loss; collate_fn can make one)"
            )
        return pair[0], pair[1]

    def to_plain(self) -> list[int]:
        """What is agreed."""
        return [self.epoch, self.position, self.length]

    def from_plain(self, plain: Any) -> None:
        """Take over what is agreed."""
        epoch, position, length = plain
        self.epoch, self.position = epoch, position
        self.agree(length)
