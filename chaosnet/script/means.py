"""Numbers that the script has averaged over the cluster: they ride on the contributions to a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from ..protocols.errors import ConfigError
from ..protocols.step_sync import means

MAX_NAME = 64
VOID, WHOLE, UNDER_WAY = SIGNALS = "void", "whole model", "checkpoint under way"
"""What engines tell each other as metrics without weight, of which no mean is ever shown: the step counts for
nothing; somebody wants the parameters of all layers; a checkpoint is being written."""
NO_PART = "no part of the last checkpoint: "
"""As SIGNALS, before the number of a part that its node could not write. The value: the reason's errno, or 0."""
MAX_WEIGHT = 1e12  # Those of all nodes together still fit into a message.
# Of a gradient that counts: float32 has no 1 / 1e-39, and rounds what is multiplied by it.
MIN_WEIGHT = 1e-12


class ClusterMean:
    """A value averaged over the cluster by the next update(); `float()` of it once that has happened."""

    def __init__(self, name: str, too_early: Callable[[str], None]) -> None:
        self.name, self._too_early = name, too_early
        self.value, self.is_known = math.nan, False

    def __float__(self) -> float:
        if not self.is_known:
            self._too_early(self.name)
        return self.value

    def __format__(self, spec: str) -> str:
        return format(float(self), spec)

    def __repr__(self) -> str:
        return f"ClusterMean({self.value})"


class Means:
    """The values of this node for the step under way, and the means of the last completed step.

    Sums travel as (value * weight, weight) by name.
    """

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say, self._has_said = say, False
        self.last: dict[str, float] = {}
        self._pending: dict[str, list[tuple[float | torch.Tensor, float]]] = {}
        self._handles: list[ClusterMean] = []

    def add(self, name: str, value: Any, weight: float) -> ClusterMean:
        """Add a number, or a tensor of one, to the step under way. On a device, it is read when the step takes it.

        Raises: ConfigError for what would not reach the others.
        """
        number = value.detach() if isinstance(value, torch.Tensor) else value
        if isinstance(number, torch.Tensor) and number.device.type != "cpu":
            value = number.clone()  # Reading it now would wait for the device.
        else:
            value = float(number)
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME:
            raise ConfigError(f"mean: the name is {name!r:.80} (expected 1 to {MAX_NAME} characters)")
        if name in SIGNALS or name.startswith(NO_PART):
            raise ConfigError(f"mean: {name!r} is a signal of chaosnet's own (expected another name)")
        if not 0 <= weight <= MAX_WEIGHT:
            raise ConfigError(f"mean: the weight of {name!r} is {weight} (expected 0 to {MAX_WEIGHT:g})")
        self._pending.setdefault(name, []).append((value, weight))
        handle = ClusterMean(name, self._too_early)
        self._handles.append(handle)
        return handle

    def hold(self) -> tuple[dict[str, list[tuple[float | torch.Tensor, float]]], list[ClusterMean]]:
        """Take away what was added so far, to keep it out of an evaluation. Returns: what `give_back` puts back."""
        held = self._pending, self._handles
        self._pending, self._handles = {}, []
        return held

    def give_back(
        self, held: tuple[dict[str, list[tuple[float | torch.Tensor, float]]], list[ClusterMean]]
    ) -> None:
        """Put back what `hold` took: it belongs to the step under way again."""
        self._pending, handles = held
        self._handles += handles

    def take(self) -> dict[str, tuple[float, float]]:
        """The sums of what was added. What is added from now on belongs to the next step."""
        taken, self._pending = self._pending, {}
        return {
            name: (
                # What has no weight may be no number: of a batch of which nothing was left.
                sum((float(value) * weight for value, weight in pairs if weight), 0.0),
                sum(weight for _, weight in pairs),
            )
            for name, pairs in taken.items()
        }

    def came(self, totals: dict[str, tuple[float, float]]) -> None:
        """The step is completed; `totals`: the sums of all nodes."""
        self.last = means(totals)
        self.settle()

    def settle(self) -> None:
        """Give the open handles the newest means. If their own step is lost, these are of an earlier one."""
        for handle in self._handles:
            handle.value, handle.is_known = self.last.get(handle.name, math.nan), True
        self._handles.clear()

    def _too_early(self, name: str) -> None:
        """Say once that the script reads a mean before the update that brings it: its nan looks like a bad loss."""
        if not self._has_said:
            self._has_said = True
            self._say(
                f"trainer.mean(..., {name!r}) is nan until the next update(): call it before the step, and use what "
                "it returns after the step"
            )
