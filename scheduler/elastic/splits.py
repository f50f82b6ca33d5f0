"""Layers to stages of one pipeline, and how long it then takes (Chameleon, Sec. IV-A, "Layer Distribution").

Even, the remainder where it costs least; where layers are unequal, or memory is tight, uneven ones, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocols.errors import PlanInfeasible
from .partition import minimax
from .pipeline_time import Floats, in_flight, linear_from, one_f_one_b, one_f_one_b_lines, peak_bytes
from .profile import Profile

MAX_SPLITS = 20_000  # Of one length. 16 stages and half a layer each too many, the most for 16, are 12,870.
BEAM, MAX_MOVES = 4, 64  # Of the search among uneven splits, where there are more than MAX_SPLITS.


class _Splits(NamedTuple):
    sizes: npt.NDArray[np.int64]  # [splits, stages].
    forward: Floats
    backward: Floats


class PipelineTimes:
    """t[stages][micro-batches]: seconds of the best split that fits memory, computed as far as anybody asks.

    Keep one for a profile: it serves any number of workers and faults. Times never fall with micro-batches: every
    split's time grows, and so does what it needs of memory.
    """

    def __init__(self, profile: Profile, samples: int = 1, memory_bytes: float = math.inf) -> None:
        """`samples`: in a micro-batch. `memory_bytes`: of the smallest worker."""
        self.profile, self.samples, self.memory_bytes = profile, samples, memory_bytes
        self._splits: dict[int, _Splits] = {}
        self._tables: dict[int, tuple[Floats, npt.NDArray[np.int64]]] = {}  # Times and best splits.

    def time_s(self, stages: int, micro_batches: int) -> float:
        """Infinite where no split fits."""
        return float(self.column(stages, micro_batches)[micro_batches - 1])

    def split(self, stages: int, micro_batches: int) -> tuple[int, ...]:
        """Layers of each stage. Raises: PlanInfeasible if nothing fits memory."""
        if not math.isfinite(self.time_s(stages, micro_batches)):
            raise PlanInfeasible(self._too_large((stages,), micro_batches))
        chosen = self._tables[stages][1][micro_batches - 1]
        return tuple(int(size) for size in self._splits[stages].sizes[chosen])

    def column(self, stages: int, upto: int) -> Floats:
        """Seconds for 1..upto micro-batches, or more: [>= upto]."""
        times, chosen = self._tables.get(stages, (np.empty(0), np.empty(0, np.int64)))
        if len(times) < upto:
            more = self._table(stages, len(times) + 1, max(upto, 2 * len(times), 2 * stages))
            times, chosen = np.concatenate([times, more[0]]), np.concatenate([chosen, more[1]])
            self._tables[stages] = times, chosen
        return times

    def least_peak_bytes(self, stages: int, micro_batches: int) -> float:
        """Of all splits of the layers, even or not, the least that the fullest worker needs."""
        return minimax(self._memory_sums(stages, micro_batches), stages).cost

    def check(self, lengths: Sequence[int]) -> None:
        """Raises: PlanInfeasible if not even one micro-batch fits a pipeline of any of these lengths."""
        if not any(math.isfinite(self.time_s(stages, 1)) for stages in lengths):
            raise PlanInfeasible(self._too_large(lengths, 1))

    def _too_large(self, lengths: Sequence[int], micro_batches: int) -> str:
        peaks = [
            (self.least_peak_bytes(stages, micro_batches), stages)
            for stages in lengths
            if stages <= len(self.profile.layers)
        ]
        if not peaks:
            return f"stages: {min(lengths)} at least for {len(self.profile.layers)} layers"
        peak, stages = min(peaks)
        return (
            f"memory: {peak:.0f} bytes at least on a worker, with {stages} stages and {micro_batches}"
            f" micro-batches of {self.samples} samples, {peak - self.memory_bytes:.0f} over"
            f" {self.memory_bytes:.0f}, what the smallest has"
        )

    def _memory_sums(self, stages: int, micro_batches: int | None = None) -> Floats:
        activations = np.array(self.profile.activation_bytes) * self.samples
        return np.array(self.profile.static_bytes) + in_flight(stages, micro_batches)[:, None] * activations

    def _table(self, stages: int, start: int, stop: int) -> tuple[Floats, npt.NDArray[np.int64]]:
        """Best time and split for start..stop micro-batches."""
        width = stop - start + 1
        if stages > len(self.profile.layers):
            return np.full(width, np.inf), np.zeros(width, np.int64)
        splits = self._candidates(stages)
        times, chosen = np.empty(width), np.empty(width, np.int64)
        straight = int(linear_from(splits.forward, splits.backward).max())
        bent = range(start, min(stop, max(straight, stages + 1)) + 1)
        for m in bent:
            each = one_f_one_b(splits.forward, splits.backward, m)
            if m <= stages or m == start:  # From N_pp on memory no longer grows.
                peaks = peak_bytes(self.profile, splits.sizes, self.samples, m).max(axis=-1)
                too_large = peaks > self.memory_bytes
            each[too_large] = np.inf
            chosen[m - start] = each.argmin()
            times[m - start] = each[chosen[m - start]]
        if len(bent) < width:
            self._straight(splits, len(bent) + start, times[len(bent) :], chosen[len(bent) :])
        return times, chosen

    def _straight(self, splits: _Splits, start: int, times: Floats, chosen: npt.NDArray[np.int64]) -> None:
        """Where each split costs its slowest stage once more per micro-batch: only the best of a slope matter."""
        slopes, offsets = one_f_one_b_lines(splits.forward, splits.backward)
        slope = slopes.max(axis=-1)
        offset = np.where(slopes == slope[:, None], offsets, -np.inf).max(axis=-1)
        offset[peak_bytes(self.profile, splits.sizes, self.samples).max(axis=-1) > self.memory_bytes] = np.inf
        m = np.arange(start, start + len(times))
        times[:] = np.inf
        for each in np.unique(slope):
            among = np.flatnonzero(slope == each)
            best = among[offset[among].argmin()]
            line = offset[best] + each * m
            better = line < times
            times[better], chosen[better] = line[better], best

    def _candidates(self, stages: int) -> _Splits:
        if stages not in self._splits:
            layers = len(self.profile.layers)
            sizes = np.array(list(_even_splits(layers, stages)), dtype=np.int64)
            equal = all(layer == self.profile.layers[0] for layer in self.profile.layers)
            if not equal:
                sizes = self._with_uneven(sizes)
            elif (peak_bytes(self.profile, sizes, self.samples).max(axis=-1) > self.memory_bytes).all():
                sizes = np.concatenate([sizes, *self._leanest(stages)])
            self._splits[stages] = self._timed(sizes)
        return self._splits[stages]

    def _timed(self, sizes: npt.NDArray[np.int64]) -> _Splits:
        sums = [self.profile.seconds(0, stop, self.samples) for stop in range(len(self.profile.layers) + 1)]
        stops = np.cumsum(sizes, axis=-1)
        spent = np.array(sums)[stops] - np.array(sums)[stops - sizes]
        return _Splits(sizes, spent[..., 0], spent[..., 1])

    def _leanest(self, stages: int) -> Iterator[npt.NDArray[np.int64]]:
        """Uneven splits for tight memory: fastest worst stage among those that fit, by micro-batches in flight.

        Early stages keep more activations, so that an uneven split may fit where no even one does. The paper
        gives up there.
        """
        sums = np.array(
            [sum(self.profile.seconds(0, stop, self.samples)) for stop in range(len(self.profile.layers) + 1)]
        )
        for m in range(1, stages + 1):
            memory = self._memory_sums(stages, m)
            try:
                yield np.array([minimax(sums, stages, 0.0, memory, self.memory_bytes).sizes])
            except PlanInfeasible:
                return

    def _with_uneven(self, sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For unequal layers: all splits if they are few, else where moving single layers leads from the best.

        Starts are the even splits and the minimax partitions (ElasWave, Algorithm 1), for few micro-batches and
        for many; BEAM of them are followed at a time, and all that was tried is kept. Not proved to be best.
        """
        layers, stages = len(self.profile.layers), sizes.shape[-1]
        if stages == 1:
            return sizes
        if math.comb(layers - 1, stages - 1) <= MAX_SPLITS:
            cuts = np.array(list(itertools.combinations(range(1, layers), stages - 1)), dtype=np.int64)
            return np.diff(cuts.reshape(-1, stages - 1), prepend=0, append=layers)
        known = np.concatenate([sizes, *self._leanest(stages)])
        for micro_batches in (1, stages, 4 * stages):
            pool, best = known, math.inf
            for _ in range(MAX_MOVES):
                splits = self._timed(pool)
                each = one_f_one_b(splits.forward, splits.backward, micro_batches)
                peaks = peak_bytes(self.profile, pool, self.samples, micro_batches).max(axis=-1)
                each[peaks > self.memory_bytes] = np.inf
                if not each.min() < best:
                    break
                best = float(each.min())
                beam = pool[np.argsort(each, kind="stable")[:BEAM]]
                pool = np.unique(np.concatenate([_moves(start) for start in beam]), axis=0)
                known = np.concatenate([known, pool])
        return np.unique(known, axis=0)


def _even_splits(layers: int, stages: int) -> Iterator[tuple[int, ...]]:
    """Even, the remainder in all ways; of more than MAX_SPLITS, those with the larger stages at the end first."""
    size, larger = divmod(layers, stages)
    ways = itertools.combinations(range(stages - 1, -1, -1), larger)
    for chosen in itertools.islice(ways, MAX_SPLITS):
        yield tuple(size + (stage in chosen) for stage in range(stages))


def _moves(sizes: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """`sizes` with one layer less in one stage and one more in another, in all ways that leave none empty."""
    stages = len(sizes)
    moves = np.array(
        [
            np.eye(stages, dtype=int)[to] - np.eye(stages, dtype=int)[of]
            for of in range(stages)
            for to in range(stages)
        ]
    )
    moved = sizes + moves
    return moved[(moved > 0).all(axis=-1)]


def split_layers(
    profile: Profile, stages: int, micro_batches: int, samples: int = 1, memory_bytes: float = math.inf
) -> tuple[int, ...]:
    """Layers of each stage (Chameleon, Sec. IV-A, "Layer Distribution"): even, the remainder where it costs least.

    All ways to give it away are tried, up to MAX_SPLITS; what does not fit memory (Eq. 14) is left out; the paper
    ends here. If layers are unequal, splits that are uneven are tried, too, and so they are where no even one fits.
    Raises: PlanInfeasible if none fits.
    """
    return PipelineTimes(profile, samples, memory_bytes).split(stages, micro_batches)
