"""Costs of layers and speeds of members: all members measure them in some steps, and agree on them with the commit.

Costs and speeds choose the pipelines (scheduler/elastic/running.py), so members take them over only where they have
changed by more than noise would.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from ..scheduler.elastic.running import SPEEDS
from .layer_runner import Done

EVERY, AT_FIRST = 8, 4  # Steps from one measurement to the next; the first so many are all measured.
NOTABLE = 1.2  # A cost, or a speed, that has changed by less is as it was.
TRIED_AGAIN = 8  # Measurements without a member.
STEPS_OF_SPEED = 16.0  # Speeds are told apart by a sixteenth.


class Pace:
    """What layers cost, and how fast members are; equal on all members."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        # Before anything was measured: in proportion to parameters.
        sizes = [1 + sum(p.numel() for p in layer.parameters()) // 1000 for layer in layers]
        self._guess: tuple[tuple[int, int], ...] = tuple((size, 2 * size) for size in sizes)
        self.costs_us = self._guess
        self.speeds: dict[str, float] = {}
        # Who was slow, and for how many measurements it has had nothing to do.
        self._idle: dict[str, int] = {}
        self._seen: dict[str, float] = {}  # In the last measurement: a speed counts when two in a row agree.

    @property
    def is_measured(self) -> bool:
        """Is the cost of layers measured, rather than guessed?"""
        return self.costs_us != self._guess

    def is_due(self, round: int) -> bool:
        """Do all members tell in this round what they have measured?"""
        return round < AT_FIRST or round % EVERY == 0

    def measured(self, me: str, done: Done) -> dict[str, tuple[float, float]]:
        """What this node has measured in a step: (sum, number) by name."""
        said: dict[str, tuple[float, float]] = {}
        expected_us = 0.0
        for layer, count in sorted(done.micro_batches.items()):
            forward_us, backward_us = self.costs_us[layer]
            expected_us += count * (forward_us + backward_us)
            said[f"{layer} forward"] = done.forward_s[layer], float(count)
            said[f"{layer} backward"] = done.backward_s[layer], float(count)
        took_us = 1e6 * (sum(done.forward_s.values()) + sum(done.backward_s.values()))
        if expected_us:
            said[f"pace {me}"] = took_us / expected_us, 1.0
        return said

    def agree(self, timings: Mapping[str, tuple[float, float]], members: Sequence[str]) -> None:
        """Take over what all have told."""
        self.speeds = {name: speed for name, speed in self.speeds.items() if name in members}
        self._seen = {name: speed for name, speed in self._seen.items() if name in members}
        if self._take_costs(timings):
            self._seen.clear()  # Paces were by other costs, which members with other layers feel otherwise.
            return
        paces = {
            name: timings[f"pace {name}"][0]
            for name in members
            if timings.get(f"pace {name}", (0.0, 0.0))[0] > 0
        }
        self._forget_idle(paces)
        if len(paces) > 1:
            usual = statistics.median_low(paces.values())
            for name, pace in paces.items():
                self._take_speed(name, usual / pace)

    def _forget_idle(self, paces: Collection[str]) -> None:
        """Forget the speed of slow members that have had nothing to compute for long: they may be faster by now."""
        self._idle = {name: self._idle.get(name, 0) + 1 for name in self.speeds if name not in paces}
        for name, times in self._idle.items():
            if times >= TRIED_AGAIN:
                del self.speeds[name]

    def _take_costs(self, timings: Mapping[str, tuple[float, float]]) -> bool:
        """Take over costs that have changed. Returns: whether any has."""
        costs = [
            (_us(timings.get(f"{layer} forward"), f), _us(timings.get(f"{layer} backward"), b))
            for layer, (f, b) in enumerate(self.costs_us)
        ]
        pairs = [pair for each in zip(self.costs_us, costs, strict=True) for pair in zip(*each, strict=True)]
        changed = any(differ(old, new) for old, new in pairs)
        if changed:
            self.costs_us = tuple(costs)
        return changed

    def _take_speed(self, name: str, speed: float) -> None:
        least, most = SPEEDS
        speed = max(round(min(max(speed, least), most) * STEPS_OF_SPEED), 1) / STEPS_OF_SPEED
        before, self._seen[name] = self._seen.get(name), speed
        if before is None or differ(before, speed):
            return
        if differ(self.speeds.get(name, 1.0), speed):
            self.speeds[name] = speed
        if not differ(1.0, self.speeds.get(name, 1.0)):
            self.speeds.pop(name, None)

    def to_plain(self) -> list[Any]:
        """All of it as plain data."""
        return [[list(each) for each in self.costs_us], dict(self.speeds), dict(self._seen), dict(self._idle)]

    def from_plain(self, plain: Any) -> None:
        """Take over what `to_plain` gave."""
        costs, speeds, seen, idle = plain
        if len(costs) == len(self.costs_us):  # A checkpoint may be of the same parameters in other layers.
            self.costs_us = tuple((f, b) for f, b in costs)
        self.speeds, self._seen, self._idle = dict(speeds), dict(seen), dict(idle)


def differ(old: float, new: float) -> bool:
    """Do they differ by more than noise would make them?"""
    return not old / NOTABLE < new < old * NOTABLE


def _us(timed: tuple[float, float] | None, before: int) -> int:
    """The mean as whole microseconds; the value before if nobody has measured it."""
    if timed is None or not timed[1] or not math.isfinite(timed[0]):
        return before
    return max(round(1e6 * timed[0] / timed[1]), 1)
