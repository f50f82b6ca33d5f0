"""What a program may be told while a cluster trains: `Trainer(callbacks=Callbacks(...))`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from .protocols.errors import ConfigError
from .protocols.messages import Notice, ViewKey


@dataclass(frozen=True, slots=True)
class StepDone:
    """A step of the cluster is complete, also here.

    Attributes:
        round: Number of the all-reduce. It counts those without samples, too, after which `step` is as before.
        step: Updates of the model since the cluster began.
        applied: Did the optimizer step?
        weight: Samples of this step, of all members.
        samples: Of all steps so far, of all members.
        epoch: Epochs of `batches` that the cluster has completed.
        members: Who took part.
        metrics: The cluster's means, by name.
    """

    round: int
    step: int
    applied: bool
    weight: float
    samples: float
    epoch: int
    members: tuple[str, ...]
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class EpochDone:
    """The cluster has completed an epoch of `batches`.

    Attributes:
        epoch: How many it has completed.
        step: As in the StepDone of its last step.
        samples: As in that.
        metrics: As in that.
    """

    epoch: int
    step: int
    samples: float
    metrics: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class StateLoaded:
    """The training state was replaced: it came from the cluster at a join or a rejoin, or from a checkpoint.

    Attributes:
        round: The next one.
        step: Updates of the model up to here.
        total_bytes: Of the state.
    """

    round: int
    step: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class LayersComputed:
    """This member of pipelines has computed layers of a micro-batch.

    Attributes:
        round: Of the step, as in its StepDone.
        view: In which it was computed. Of a step that was torn, what belongs to the last view counts, and the rest
            was for nothing.
        backward: Or forward.
        layers: [start, stop).
        micro_batch: Of the step.
        began_s: By time.monotonic(), which processes of one machine have in common on Linux.
        ended_s: By the same clock.
    """

    round: int
    view: ViewKey
    backward: bool
    layers: tuple[int, int]
    micro_batch: int
    began_s: float
    ended_s: float


def _nothing(event: Any) -> None:
    """Nobody wants to hear of it."""


@dataclass(frozen=True, slots=True)
class Callbacks:
    """Functions of the script's own, each called with one event.

    Those on the training thread are called in the middle of a step, perhaps before `Trainer(...)` has returned: they
    may read the trainer, and have it leave after the step, but not step. The step raises what they raise.
    on_notice and on_parked are called on the thread that serves the links, so return at once; errors are printed.

    Attributes:
        on_step: After each step of the cluster, also those that a joiner catches up with. On the training thread.
        on_epoch: After each epoch of `batches`, right after the on_step of its last step. On the training thread.
        on_loaded: The state has come from others, or from a checkpoint. On the training thread.
        on_notice: Something happened in the cluster: somebody joined, left, failed.
        on_parked: Training waits, for the reason given, or goes on (None).
        on_computed: With PipelineTrainer, after layers of a micro-batch were computed here. On the training thread.
    """

    on_step: Callable[[StepDone], None] = _nothing
    on_loaded: Callable[[StateLoaded], None] = _nothing
    on_notice: Callable[[Notice], None] = _nothing
    on_parked: Callable[[str | None], None] = _nothing
    on_epoch: Callable[[EpochDone], None] = _nothing
    on_computed: Callable[[LayersComputed], None] = _nothing


def given_trainer(function: Callable[..., None], trainer: Any) -> Callable[[], None]:
    """`after_step`, which may take the trainer. Raises: ConfigError if it needs more than that."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # Some that are not written in Python have none.
        return function
    positional = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    needed = [each.name for each in parameters if each.default is each.empty and each.kind in positional]
    if len(needed) > 1:
        raise ConfigError(
            f"after_step: takes {', '.join(needed)} (expected a function of nothing, or of the trainer)"
        )
    return partial(function, trainer) if needed else function
