"""Samples beside those of the training, which the pipelines validate the model with after each epoch.

Each member computes its layers, forward only, so no member needs the whole model. The rounds are steps of the cluster
in which nothing is trained. Which samples are due is agreed: it follows from the steps that are complete.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch.utils.data import Dataset, default_collate

from ..data.evaluation import Sums
from ..data.share import check_dataset, one_by_one
from ..protocols.errors import ConfigError
from ..protocols.messages import Contribution
from ..protocols.step_sync import means
from ..script.means import MAX_NAME
from ..training.randomness import seed_from, seed_generators
from .global_batches import as_pair
from .layer_runner import MicroBatches
from .tensor_bytes import moved

WHERE = "PipelineTrainer, validation"
LOSS, PREFIX = "loss", "val_"  # Before a measure's name among the metrics.
# Sums are of multiples of 2**-24: exact up to 5e8, so the same in whatever order members' are added.
GRID_BITS = 24


@dataclass(frozen=True)
class Validation:
    """What `PipelineTrainer` validates the model with after each epoch; the same on all members.

    Attributes:
        dataset: As that of `steps`: items are pairs of inputs and targets.
        measures: Functions of the last layer's output and the targets, by name: means over the given samples, as
            numbers or tensors of one. The loss is measured anyway.
        collate_fn: As of `steps`.
    """

    dataset: Dataset[Any] | Sequence[Any]
    measures: Mapping[str, Callable[[Any, Any], Any]] = field(default_factory=dict)
    collate_fn: Callable[[list[Any]], Any] | None = None

    @property
    def samples(self) -> int:
        """How many samples the data set has."""
        return len(cast(Sized, self.dataset))


class Validating:
    """The validations of one member. What is under way, and how far, is agreed.

    Args:
        loss: As of `PipelineSettings`.
    Attributes:
        last: The results of the last validation, by name: {"loss": 0.3}; empty before the first.
    Raises: ConfigError for what cannot be validated with.
    """

    def __init__(
        self,
        validation: Validation | None,
        loss: Callable[[Any, Any], torch.Tensor],
        batch: int,
        micro_batch: int,
    ) -> None:
        self._validation, self._loss, self._batch, self._micro_batch = validation, loss, batch, micro_batch
        self.last: dict[str, float] = {}
        self._epoch = self._at = 0  # Epochs validated, and samples of the next validation.
        self._sums: Sums = {}
        self._followed: dict[str, float] = {}  # Local: empty if the epoch has ended before this member came.
        self._own: Sums = {}  # Of what this member has measured in the step under way.
        if validation is not None:
            if not isinstance(validation, Validation):
                raise ConfigError(f"validation: {type(validation).__name__} (expected a chaosnet.Validation)")
            check_dataset(validation.dataset, validation.collate_fn, WHERE)
            if not validation.samples:
                raise ConfigError(f"{WHERE}: a data set of 0 samples (expected at least 1)")
            for name, each in validation.measures.items():
                if (
                    not isinstance(name, str)
                    or not 0 < len(name) <= MAX_NAME - len(PREFIX)
                    or name == LOSS
                    or not callable(each)
                ):
                    raise ConfigError(
                        f"{WHERE}: measures: {name!r}: {each!r} (expected a function of outputs and targets, by a "
                        "name other than 'loss')"
                    )

    @property
    def _length(self) -> int:
        return 0 if self._validation is None else self._validation.samples

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all that is measured, as among metrics."""
        if self._validation is None:
            return ()
        return tuple(f"{PREFIX}{each}" for each in (LOSS, *self._validation.measures))

    @property
    def metrics(self) -> dict[str, float]:
        """The results of the last validation, named as among metrics, and the metrics of the epoch before it."""
        return {**self._followed, **{f"{PREFIX}{name}": value for name, value in self.last.items()}}

    def is_due(self, epoch: int) -> bool:
        """Has the model still to be validated after so many epochs?"""
        return self._epoch < epoch and self._validation is not None

    # --- this member's part of a step ---

    def begin(self, device: torch.device, key: int) -> MicroBatches:
        """Begin a step of the validation. `key`: as in `GlobalBatches.step`. Returns: the samples that are due."""
        self._own = {}
        starts = range(self._at, self._at + self._batch, self._micro_batch)
        samples = [min(max(self._length - start, 0), self._micro_batch) for start in starts]
        return MicroBatches(
            samples, lambda number: moved(self._pair(starts[number], samples[number], key), device)
        )

    def _pair(self, start: int, samples: int, key: int) -> tuple[Any, Any]:
        assert self._validation is not None
        seed_generators(seed_from("validation", key, self._epoch, start))
        items = one_by_one(self._validation.dataset, list(range(start, start + samples)), lambda place: None)
        return as_pair((self._validation.collate_fn or default_collate)(items), WHERE)

    def measure(self, out: Any, targets: Any, samples: int) -> None:
        """Measure outputs of the last layer for a micro-batch. Raises: ConfigError for a result that is no number."""
        assert self._validation is not None
        for name, function in {LOSS: self._loss, **self._validation.measures}.items():
            found = function(out, targets)
            try:
                value = float(found)
            except (TypeError, ValueError, RuntimeError):
                raise ConfigError(
                    f"{WHERE}: {name!r} is {type(found).__name__} (expected one number, the mean over the samples)"
                ) from None
            before, weight = self._own.get(f"{PREFIX}{name}", (0.0, 0.0))
            self._own[f"{PREFIX}{name}"] = before + _on_grid(value * samples), weight + samples

    def take(self) -> Sums:
        """What this member has measured in the step under way, to be told with it."""
        own, self._own = self._own, {}
        return own

    # --- the cluster's ---

    def follows(self, metrics: Mapping[str, float]) -> None:
        """An epoch is complete, with these metrics of its last step."""
        self._followed = dict(metrics)

    def completed(self, total: Contribution, epoch: int) -> Sums | None:
        """A step is complete. Returns: sums and weights by name, if that was the last of a validation."""
        _, weight = total.metrics.get(f"{PREFIX}{LOSS}", (0.0, 0.0))
        if weight != min(self._batch, self._length - self._at):
            return None  # Some of it was void: the step is done again.
        for name in self.names:
            (before, weight), (more, added) = self._sums.get(name, (0.0, 0.0)), total.metrics[name]
            self._sums[name] = before + more, weight + added
        self._at += self._batch
        if self._at < self._length:
            return None
        sums = {name.removeprefix(PREFIX): each for name, each in self._sums.items()}
        self.last = means(sums)
        self._epoch, self._at, self._sums = epoch, 0, {}
        return sums

    # --- replication ---

    def to_plain(self) -> dict[str, Any] | None:
        """What is agreed; None without a validation."""
        if self._validation is None:
            return None
        return {
            "epoch": self._epoch,
            "at": self._at,
            "sums": {name: [*each] for name, each in self._sums.items()},
            "last": dict(self.last),
        }

    def from_plain(self, plain: Mapping[str, Any] | None, epoch: int) -> None:
        """Take over what is agreed. If the run before validated otherwise, or not at all, none is under way."""
        self._epoch, self._at, self._sums, self.last = epoch, 0, {}, {}
        if plain is not None and self._validation is not None:
            self._epoch, self.last = plain["epoch"], dict(plain["last"])
            is_same = not plain["at"] % self._batch and plain["sums"].keys() == {*self.names}
            if is_same and plain["at"] < self._length:
                self._at = plain["at"]
                self._sums = {name: (value, weight) for name, (value, weight) in plain["sums"].items()}


def _on_grid(value: float) -> float:
    """The nearest multiple of 2**-GRID_BITS."""
    return math.ldexp(round(math.ldexp(value, GRID_BITS)), -GRID_BITS) if math.isfinite(value) else value
