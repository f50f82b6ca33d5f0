"""Writes gradients and buffers to their places in the lanes, from the CPU or from devices."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..devices import Crossing, Moment, has_streams
from ..state.flat_state import device_runs
from ..state.trainable import sparse_gradient
from .lanes import LaneLayout, Place, int_like, stage

COMPARED_AT_ONCE = 1 << 17  # Elements: so many fit into a cache twice, for a comparison.


@dataclass(slots=True)
class _Run:
    """Gradients [first, last) of those to be written, whose places are elements [start, stop) of a lane, in a row.

    `cut`: only these elements of the one gradient.
    """

    lane: int
    start: int
    stop: int
    first: int
    last: int
    cut: slice | None = None


class Staging:
    """Writes the gradients and buffers of one model. Parameters are numbered as in `LaneLayout.parameters`.

    Attributes:
        crossing: Copies from devices while both sides go on. None if there are no devices, or none with a stream for
            copies: then each copy is waited for.
    """

    def __init__(self, layout: LaneLayout) -> None:
        self._layout, self.lanes, self._parameters = layout, layout.lanes, layout.parameters
        crosses = bool(layout.devices) and all(map(has_streams, layout.devices))
        self.crossing = Crossing(layout.devices) if crosses else None
        self._known_runs: dict[tuple[tuple[int, ...], int], list[_Run]] = {}

    def write(
        self,
        indices: Sequence[int],
        grads: Sequence[torch.Tensor | None],
        weight: float,
        watched: bool = False,
        waits: bool = False,
    ) -> None:
        """Write weight * gradient for these parameters; zeros where there is none.

        Args:
            watched: `crossing` is to remember what these gradients were, so that it can tell whether they change.
            waits: Return when all is written. Else copies from devices may still be under way (`crossing.wait`).
        Raises: ConfigError for a gradient that cannot be averaged, by name.
        """
        for index, grad in zip(indices, grads, strict=True):
            if grad is None or weight == 0:  # 0 * inf would be nan.
                place = self._parameters[index]
                self.lanes[place.lane].contribution[place.start : place.stop].zero_()
        self.check(indices, grads)
        for lane, start, stop, group in self._runs(indices, grads) if weight else ():
            target = self.lanes[lane].contribution[start:stop]
            if self.crossing is None or waits:
                stage(target, group, weight)
            else:
                self._send(self.crossing, target, group, weight, watched)

    def check(self, indices: Sequence[int], grads: Sequence[torch.Tensor | None]) -> None:
        """Raises: ConfigError for a gradient that cannot be averaged, by name."""
        for index, grad in zip(indices, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise sparse_gradient(repr(self._parameters[index].name))

    @torch.no_grad()
    def write_late(self, grads: Sequence[torch.Tensor | None], weight: float, moment: Moment) -> None:
        """Write all gradients, final at `moment`, and multiply the buffers' part by `weight`; waits for devices."""
        with moment.streams():
            self.write(range(len(grads)), grads, weight, waits=True)
        for number, lane in enumerate(self.lanes):
            if lane.op == "mean":
                self._layout.buffers_part(number).mul_(weight)

    def differs(self, indices: Sequence[int], grads: Sequence[torch.Tensor | None], weight: float) -> bool:
        """Do these gradients, times `weight`, differ from what was written for them?"""
        if not indices:
            return False
        scratch = [torch.empty(COMPARED_AT_ONCE, dtype=lane.dtype, device="cpu") for lane in self.lanes]
        for number, start, stop, group in self._runs(indices, grads, COMPARED_AT_ONCE):
            as_int = int_like(self.lanes[number].dtype)
            written, expected = self.lanes[number].contribution[start:stop], scratch[number][: stop - start]
            stage(expected, group, weight)
            if not np.array_equal(written.view(as_int).numpy(), expected.view(as_int).numpy()):
                return True  # np.array_equal takes a third of the time of torch.equal.
        return False

    def write_buffers(self, agreed: Sequence[torch.Tensor], weight: float) -> list[int]:
        """Write the buffers' contributions, times `weight`.

        Args:
            agreed: By lane, the buffers as all members hold them.
        Returns: the bits (`Place.bit`) of averaged buffers that differ from that.
        """
        changed: list[int] = []
        for number, lane in enumerate(self.lanes):
            values = self._layout.gather_buffers(number)
            before, places = agreed[number], self._layout.buffers[number]
            if lane.op == "max" or not places:
                continue
            as_int = int_like(lane.dtype)  # As integers, one nan equals another of the same bits.
            differs = (values.view(as_int) != before.view(as_int)).numpy()
            starts = [place.start - places[0].start for place in places]
            any_differs = np.logical_or.reduceat(differs, starts)
            changed += [place.bit for place, yes in zip(places, any_differs, strict=True) if yes]
            if weight == 0:
                values.zero_()
            else:
                values.mul_(weight)
        return changed

    def _send(
        self,
        crossing: Crossing,
        target: torch.Tensor,
        tensors: list[torch.Tensor],
        weight: float,
        watched: bool,
    ) -> None:
        """As `stage`, but copies from devices are still under way on return."""
        start = 0
        for run in device_runs(tensors):
            stop = start + sum(tensor.numel() for tensor in run)
            if run[0].device in crossing.devices:
                crossing.send(target[start:stop], run, weight, watched)
            else:
                stage(target[start:stop], run, weight)
            start = stop

    def _runs(
        self, indices: Sequence[int], grads: Sequence[torch.Tensor | None], most: int = sys.maxsize
    ) -> Iterator[tuple[int, int, int, list[torch.Tensor]]]:
        """The gradients of these parameters, neighbours in a lane together: (lane, start, stop, tensors).

        `most`: elements of a run; a larger gradient is cut.
        """
        here = [grad for grad in grads if grad is not None]
        if len(here) < len(indices):
            indices = [index for index, grad in zip(indices, grads, strict=True) if grad is not None]
        key = (tuple(indices), most)
        runs = self._known_runs.get(key)
        if runs is None:  # Steps are alike, and there may be thousands of parameters.
            if len(self._known_runs) > 2 * len(self._layout.chunks) + 2:
                self._known_runs.clear()
            runs = self._known_runs[key] = _plan_runs(self._parameters, indices, most)
        for run in runs:
            group = here[run.first : run.last]
            if run.cut is not None:
                group = [group[0].detach().reshape(-1)[run.cut]]
            yield run.lane, run.start, run.stop, group


def _plan_runs(places: Sequence[Place], indices: Sequence[int], most: int) -> list[_Run]:
    """See `Staging._runs`."""
    runs: list[_Run] = []
    for number, index in enumerate(indices):
        place = places[index]
        size = place.stop - place.start
        if size > most:
            for at in range(0, size, most):
                cut = slice(at, min(at + most, size))
                runs.append(
                    _Run(place.lane, place.start + at, place.start + cut.stop, number, number + 1, cut)
                )
            continue
        last = runs[-1] if runs else None
        if (
            last is None or last.cut is not None or (last.lane, last.stop) != (place.lane, place.start)
            or place.stop - last.start > most
        ):  # fmt: skip
            runs.append(_Run(place.lane, place.start, place.stop, number, number + 1))
        else:
            last.stop, last.last = place.stop, number + 1
    return runs
