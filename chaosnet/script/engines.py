"""Engines as the node of a script sees them (`ScriptEngine` in process.py)."""

from __future__ import annotations

from typing import Generic, TypeVar

from ..engines.data_parallel import DataParallel
from ..engines.pipelines import Pipelines
from ..protocols.messages import Range
from ..training.checkpointing import Checkpointing

Engine = TypeVar("Engine", DataParallel, Pipelines)


class _OfEngine(Generic[Engine]):
    """What both kinds of engines have in common."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine = engine
        self.close = engine.close

    @property
    def step(self) -> int:
        return self._engine.step

    @property
    def joined_step(self) -> int:
        return self._engine.joined_step

    @property
    def samples(self) -> float:
        return self._engine.samples

    @property
    def checkpointing(self) -> Checkpointing | None:
        return self._engine.checkpointing


class OfDataParallel(_OfEngine[DataParallel]):
    """Data parallelism: optimizer and gradients are the script's objects, and are given back to it."""

    @property
    def epoch(self) -> int:
        return self._engine.share.epoch

    @property
    def in_callback(self) -> bool:
        return bool(self._engine.rules.place)

    def blamed(self) -> tuple[Range, ...]:
        return tuple(self._engine.share.in_hand)

    def detach(self) -> None:
        self._engine.gradients.detach()

    def let_go(self) -> None:
        self._engine.rules.remove()


class OfPipelines(_OfEngine[Pipelines]):
    """Pipelines: of the script's functions only callbacks are called within a step."""

    @property
    def epoch(self) -> int:
        return self._engine.batches.epoch

    @property
    def in_callback(self) -> bool:
        return self._engine.calling.under_way

    def blamed(self) -> tuple[Range, ...]:
        return self._engine.batches.blamed(self._engine.runner.in_hand)

    def detach(self) -> None:
        """Nothing to do: this engine does not hold the script's gradients."""

    def let_go(self) -> None:
        """Nothing to do: this engine does not replace `step()`."""
