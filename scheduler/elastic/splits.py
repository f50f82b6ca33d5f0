"""Layers to stages of one pipeline, and how long it then takes (Chameleon, Sec. IV-A, "Layer Distribution").

Even, the remainder where it costs least; where layers are unequal, or memory is tight, uneven ones, too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocols.errors import PlanInfeasible
from .partition import minimax
from .pipeline_time import Floats, Lines, in_flight, joined, one_f_one_b_lines, peak_bytes
from .profile import Profile

MAX_SPLITS = 20_000  # Of one length. 16 stages and half a layer each too many, the most for 16, are 12,870.
BEAM, MAX_MOVES = 4, 64  # Of the search among uneven splits, where there are more than MAX_SPLITS.
ROUNDED = 1 + 1e-9  # Numbers that are added in another order may differ by less.

Ints = npt.NDArray[np.int64]


class _Splits(NamedTuple):
    """`sizes`: layers of each stage. All [splits, stages]."""

    sizes: Ints
    forward: Floats
    backward: Floats
    lines: Lines

    def of(self, splits: Ints) -> _Splits:
        """These."""
        return _Splits(self.sizes[splits], self.forward[splits], self.backward[splits], self.lines.of(splits))


def _joined(pools: Sequence[_Splits]) -> _Splits:
    return _Splits(
        np.concatenate([each.sizes for each in pools]),
        np.concatenate([each.forward for each in pools]),
        np.concatenate([each.backward for each in pools]),
        joined([each.lines for each in pools]),
    )


class PipelineTimes:
    """t[stages][micro-batches]: seconds of the best split that fits memory, computed as far as anybody asks.

    Keep one for a profile: it serves any number of workers and faults. Times never fall with micro-batches: every
    split's time grows, and so does what it needs of memory.
    """

    def __init__(self, profile: Profile, samples: int = 1, memory_bytes: float = math.inf) -> None:
        """`samples`: in a micro-batch. `memory_bytes`: of the smallest worker."""
        self.profile, self.samples, self.memory_bytes = profile, samples, memory_bytes
        self._sizes: dict[int, Ints] = {}  # By number of stages, layers of each: all splits that are tried.
        self._tables: dict[int, tuple[Floats, Ints]] = {}  # Times and best splits.

    def time_s(self, stages: int, micro_batches: int) -> float:
        """Infinite where no split fits."""
        return float(self.column(stages, micro_batches)[micro_batches - 1])

    def split(self, stages: int, micro_batches: int) -> tuple[int, ...]:
        """Layers of each stage (Chameleon, Sec. IV-A, "Layer Distribution"): even, the rest where it costs least.

        All ways to give the rest away are tried, up to MAX_SPLITS; what does not fit memory (Eq. 14) is left out;
        the paper ends here. Uneven splits are tried, too, if layers are unequal, or if no even one fits.
        Raises: PlanInfeasible if none fits.
        """
        if not math.isfinite(self.time_s(stages, micro_batches)):
            raise PlanInfeasible(self._too_large((stages,), micro_batches))
        chosen = self._tables[stages][1][micro_batches - 1]
        return tuple(int(size) for size in self._sizes[stages][chosen])

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

    def _table(self, stages: int, start: int, stop: int) -> tuple[Floats, Ints]:
        """Best time and split for start..stop micro-batches."""
        width = stop - start + 1
        times, chosen = np.full(width, np.inf), np.zeros(width, np.int64)
        if stages > len(self.profile.layers):
            return times, chosen
        splits = self._candidates(stages)
        few = range(start, min(stop, stages) + 1)
        for m in few:
            best, best_s = self._fastest(splits, m, 1)
            chosen[m - start], times[m - start] = best[0], best_s[0]
        many = np.arange(max(start, stages + 1), stop + 1)
        if len(many):
            self._many(splits, many, times[len(few) :], chosen[len(few) :])
        return times, chosen

    def _fastest(self, splits: _Splits, micro_batches: int, count: int) -> tuple[Ints, Floats]:
        """The so many that take least, of equals the first, and their times: infinite for those too large.

        Few are timed: of most, one line alone is above what others take.
        """
        least_s = splits.lines.least(micro_batches)
        too_large = self._over_memory(splits, micro_batches)
        least_s[too_large] = np.inf
        count = min(count, len(least_s))
        tried = np.argpartition(least_s, count - 1)[:count]
        enough_s = np.inf if too_large[tried].any() else splits.lines.at(micro_batches, tried).max()
        near = np.flatnonzero(least_s <= ROUNDED * enough_s)
        each_s = splits.lines.at(micro_batches, near)
        each_s[too_large[near]] = np.inf
        order = np.argsort(each_s, kind="stable")[:count]
        return near[order], each_s[order]

    def _many(self, splits: _Splits, numbers: Ints, times: Floats, chosen: Ints) -> None:
        """Of these numbers of micro-batches, each more than there are stages; as `_fastest`, of all at once."""
        lines, stages = splits.lines, splits.sizes.shape[-1]
        fits = np.flatnonzero(~self._over_memory(splits, stages))  # From N_pp on memory no longer grows.
        if not len(fits):
            return
        slope, offset = (each[fits] for each in lines.slowest)
        least_s = offset + slope * numbers[:, None]
        tried = fits[np.unique(least_s.argmin(axis=-1))]
        enough_s = np.array([lines.at(m, tried).min() for m in numbers])
        may_win = least_s <= ROUNDED * enough_s[:, None]
        straight = max(int(lines.linear_from().max()), stages + 1)
        bent = numbers[numbers <= straight]
        for at, m in enumerate(bent):
            near = fits[may_win[at]]
            each_s = lines.at(m, near)
            best = each_s.argmin()
            times[at], chosen[at] = each_s[best], near[best]
        if len(bent) < len(numbers):
            near = fits[may_win[len(bent) :].any(axis=0)]
            best_of = self._straight(lines.of(near), numbers[len(bent) :], times[len(bent) :])
            chosen[len(bent) :] = near[best_of]

    def _straight(self, lines: Lines, numbers: Ints, times: Floats) -> Ints:
        """Where each split costs its slowest stage once more per micro-batch: only the best of a slope matter."""
        slope, offset = lines.slowest
        chosen = np.zeros(len(numbers), np.int64)
        for each in np.unique(slope):
            among = np.flatnonzero(slope == each)
            best = among[offset[among].argmin()]
            line = offset[best] + each * numbers
            better = line < times
            times[better], chosen[better] = line[better], best
        return chosen

    def _over_memory(self, splits: _Splits, micro_batches: int) -> npt.NDArray[np.bool_]:
        if math.isinf(self.memory_bytes):
            return np.zeros(len(splits.sizes), np.bool_)
        peaks = peak_bytes(self.profile, splits.sizes, self.samples, micro_batches)
        return np.asarray(peaks.max(axis=-1) > self.memory_bytes)

    def _candidates(self, stages: int) -> _Splits:
        # Times are large, so they are not kept: for more micro-batches they are worked out again.
        if stages in self._sizes:
            return self._timed(self._sizes[stages])
        layers = len(self.profile.layers)
        if any(layer != self.profile.layers[0] for layer in self.profile.layers):
            splits = self._uneven(stages)
        else:
            splits = self._timed(_even_splits(layers, stages))
            if self._over_memory(splits, stages).all():
                splits = self._timed(np.concatenate([splits.sizes, *self._leanest(stages)]))
        self._sizes[stages] = splits.sizes
        return splits

    def _timed(self, sizes: Ints) -> _Splits:
        stops = np.cumsum(sizes, axis=-1)
        forward, backward = (each[stops] - each[stops - sizes] for each in self._sums)
        return _Splits(sizes, forward, backward, one_f_one_b_lines(forward, backward))

    @cached_property
    def _sums(self) -> tuple[Floats, Floats]:
        """Seconds of forwards and of backwards of layers [0, l), for every l."""
        sums = [self.profile.seconds(0, stop, self.samples) for stop in range(len(self.profile.layers) + 1)]
        return np.array([f for f, _ in sums]), np.array([b for _, b in sums])

    def _leanest(self, stages: int) -> Iterator[Ints]:
        """Uneven splits for tight memory: fastest worst stage among those that fit, by micro-batches in flight.

        Early stages keep more activations, so that an uneven split may fit where no even one does. The paper
        gives up there.
        """
        sums, found = np.add(*self._sums), None
        for m in range(1, stages + 1):
            if found is None or math.isfinite(self.memory_bytes):
                memory = self._memory_sums(stages, m)
                try:
                    found = np.array([minimax(sums, stages, 0.0, memory, self.memory_bytes).sizes])
                except PlanInfeasible:
                    return
            yield found

    def _uneven(self, stages: int) -> _Splits:
        """For unequal layers: all splits if they are few, else where moving single layers leads from the best.

        Starts are the even splits and the minimax partitions (ElasWave, Algorithm 1), for few micro-batches and
        for many; BEAM of them are followed at a time, and all that was tried is kept. Not proved to be best.
        """
        layers = len(self.profile.layers)
        if math.comb(layers - 1, stages - 1) <= MAX_SPLITS:
            cuts = _combinations(layers - 1, stages - 1, MAX_SPLITS) + 1
            return self._timed(np.diff(cuts, prepend=0, append=layers))
        known = self._timed(np.concatenate([_even_splits(layers, stages), *self._leanest(stages)]))
        for micro_batches in (1, stages, 4 * stages):
            pools, best = [known], math.inf
            for _ in range(MAX_MOVES):
                found, each_s = self._fastest(pools[-1], micro_batches, BEAM)
                if not each_s[0] < best:
                    break
                best = float(each_s[0])
                moved = _moves(pools[-1].sizes[found])
                pools.append(self._timed(moved[_firsts(moved)]))
            known = _joined(pools)
        return known.of(_firsts(known.sizes))


def _even_splits(layers: int, stages: int) -> Ints:
    """Even, the remainder in all ways; of more than MAX_SPLITS, those with the larger stages at the end first."""
    size, larger = divmod(layers, stages)
    ways = stages - 1 - _combinations(stages, larger, MAX_SPLITS)
    sizes = np.full((len(ways), stages), size)
    np.put_along_axis(sizes, ways, size + 1, axis=-1)
    return sizes


def _combinations(items: int, chosen: int, most: int) -> Ints:
    """As of itertools, of range(items); the first so many."""
    found = np.zeros((1, 0), np.int64)
    for place in range(chosen):
        last = found[:, -1] if place else np.array([-1])
        ways = items - chosen + place - last  # Of the next one, so that enough are left for those after it.
        upto = int(np.searchsorted(np.cumsum(ways), most)) + 1
        found, last, ways = found[:upto], last[:upto], ways[:upto]
        firsts = np.repeat(np.cumsum(ways) - ways, ways)
        following = np.repeat(last, ways) + 1 + np.arange(len(firsts)) - firsts
        found = np.column_stack([np.repeat(found, ways, axis=0), following])[:most]
    return found


def _moves(sizes: Ints) -> Ints:
    """`sizes` with one layer less in one stage and one more in another, in all ways that leave none empty."""
    stages = sizes.shape[-1]
    one = np.eye(stages, dtype=np.int64)
    moved = (sizes[:, None, None] + one[None, None] - one[None, :, None]).reshape(-1, stages)
    return moved[(moved > 0).all(axis=-1)]


def _firsts(rows: Ints) -> Ints:
    """Where each row occurs first, in the order of rows."""
    as_bytes = f"S{2 * rows.shape[-1]}"  # Compared quickly.
    keys = np.ascontiguousarray(rows, dtype=">u2").view(as_bytes)
    _, index = np.unique(keys[:, 0], return_index=True)
    return index
