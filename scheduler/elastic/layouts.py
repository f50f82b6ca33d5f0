"""Which pipelines: how many, how long, with how many micro-batches, how many layers a stage (Chameleon, Sec. IV-A).

Two searches over the same splits and times:

- `get_execution_plan`: Algorithm 1 as printed, which goes through all sets of lengths that use every worker,
  with one rule for the batch. Its number of sets explodes: it is the reference for tests and comparisons.
- `best_layout`, the default: exact over number of pipelines, lengths, batches and idle workers together, in time
  that does not depend on the number of workers except for writing the answer down. It bisects over the step
  times that occur; whether a time T can be reached is a knapsack, since a pipeline of p stages finishes so many
  micro-batches k_p in T and no more. See `_most`.

All workers are taken to be alike: as fast as the profile says, with the memory of the smallest.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocols.errors import PlanInfeasible
from .pipeline_time import Floats, asymmetric_step_s
from .plan import Pipeline, cuts_of
from .splits import PipelineTimes


@dataclass(frozen=True, slots=True)
class Group:
    """`count` pipelines alike: layers of each stage, micro-batches of each pipeline."""

    sizes: tuple[int, ...]
    micro_batches: int
    count: int


@dataclass(frozen=True, slots=True)
class Layout:
    """`groups`: the longest pipelines first. `time_s`: of a step. `workers`: in use."""

    groups: tuple[Group, ...]
    time_s: float
    workers: int

    @property
    def count(self) -> int:
        """Of pipelines, N_dp."""
        return sum(group.count for group in self.groups)

    def pipelines(self, names: Sequence[str]) -> tuple[list[Pipeline], list[int]]:
        """With workers in the places, in their order, and micro-batches by pipeline: as `of_pipelines` wants them.

        Raises: PlanInfeasible with fewer names than places.
        """
        if len(names) < self.workers:
            raise PlanInfeasible(f"workers: {len(names)} names for {self.workers} places")
        free = iter(names)
        found, counts = [], []
        for group in self.groups:
            for _ in range(group.count):
                workers = tuple(itertools.islice(free, len(group.sizes)))
                found.append(Pipeline(workers, cuts_of(group.sizes)))
                counts.append(group.micro_batches)
        return found, counts


# --- Algorithm 1 ---


def integer_partition(workers: int, pipelines: int, stages: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """All ways to write `workers` as a sum of `pipelines` lengths out of `stages`, each the longest first.

    The paper "recursively factorizes the current number of nodes" and counts divisors, but its pipelines may
    differ, as in Fig. 12, [2, 2, 3] of 7: these are partitions, and many more than divisors.
    """
    lengths = sorted(set(stages), reverse=True)
    if pipelines == 0:
        if workers == 0:
            yield ()
        return
    for number, length in enumerate(lengths):
        rest = workers - length
        if (pipelines - 1) * lengths[-1] <= rest <= (pipelines - 1) * length:
            for others in integer_partition(rest, pipelines - 1, lengths[number:]):
                yield (length, *others)


def distribute_batch(micro_batches: int, lengths: Sequence[int]) -> tuple[int, ...]:
    """Micro-batches of each pipeline (Chameleon, Sec. IV-A, "Batch Distribution").

    In proportion to nodes, rounded down; the rest one by one to all pipelines; who has none gets one of who has
    most. The text leaves open with whom the rest begins and which of several largest gives: here it is the
    order of `lengths`, in both.
    Raises: PlanInfeasible with fewer micro-batches than pipelines.
    """
    _check_batch(micro_batches, len(lengths))
    workers = sum(lengths)
    shares = [micro_batches * length // workers for length in lengths]
    for pipeline in range(micro_batches - sum(shares)):
        shares[pipeline % len(shares)] += 1
    while 0 in shares:
        shares[shares.index(max(shares))] -= 1
        shares[shares.index(0)] += 1
    return tuple(shares)


def get_parallel_strategy(
    workers: int, faults: int, pipelines: Sequence[int], stages: Sequence[int]
) -> Iterator[tuple[int, tuple[int, ...]]]:
    """(dp, L_pp) candidates, Chameleon, Algorithm 1, lines 1 to 7: for 1 to `faults` workers less than `workers`."""
    for lost in range(1, faults + 1):
        for dp in pipelines:
            for lengths in integer_partition(workers - lost, dp, stages):
                yield dp, lengths


def get_execution_plan(
    times: PipelineTimes,
    workers: int,
    faults: int,
    pipelines: Sequence[int],
    stages: Sequence[int],
    micro_batches: int,
) -> Layout:
    """Chameleon, Algorithm 1, lines 8 to 19, as printed: the best for any number of faults from 1 to `faults`.

    As printed, that is the plan for the fewest faults, since more workers are seldom worse: for a plan that
    works after two, ask with one less worker and faults=1.
    Args:
        pipelines, stages: R_dp and R_pp.
        micro_batches: N_m, the global batch.
    Raises: PlanInfeasible if there is no candidate, or none fits memory.
    """
    best: tuple[float, tuple[int, ...], tuple[int, ...]] = (math.inf, (), ())
    for dp, lengths in get_parallel_strategy(workers, faults, pipelines, stages):
        if dp > micro_batches:
            continue
        batch = distribute_batch(micro_batches, lengths)
        estimate = asymmetric_step_s(times.time_s(*each) for each in zip(lengths, batch, strict=True))
        if estimate < best[0]:
            best = estimate, lengths, batch
    time_s, lengths, batch = best
    if not lengths:
        _explain(times, workers - 1, pipelines, stages, micro_batches)
        raise PlanInfeasible(
            f"workers: no pipelines of {_span(stages)} stages use {workers - 1} exactly and fit"
        )
    groups = Counter(zip(lengths, batch, strict=True))
    return _layout({pair: times.split(*pair) for pair in groups}, groups, time_s)


# --- the default: exact and fast ---


def best_layout(
    times: PipelineTimes,
    workers: int,
    pipelines: Sequence[int],
    stages: Sequence[int],
    micro_batches: int,
) -> Layout:
    """The fastest of all layouts with at most `workers` workers; of equally fast ones, one that comes first in R_dp.

    Exact over the number of pipelines, their lengths, the batch of each, and workers left idle; for the splits of
    layers that `PipelineTimes` tries.
    Args:
        times: kept by the caller between searches: a search with a warm table costs only the bisection.
        pipelines, stages: R_dp and R_pp; the order of the first is a preference.
        micro_batches: N_m, the global batch, at least one for each pipeline.
    Raises: PlanInfeasible that says which constraint failed and by how much.
    """
    counts = [count for count in dict.fromkeys(pipelines) if 1 <= count <= micro_batches]
    lengths = sorted({length for length in stages if 1 <= length <= workers})
    if not counts or not lengths or min(counts) * lengths[0] > workers:
        _explain(times, workers, pipelines, stages, micro_batches)
    times.check(lengths)
    columns = _columns(times, workers, counts, lengths, micro_batches)
    values = np.unique(np.concatenate(list(columns.values())))
    low, high = 0, len(values)
    while low < high:
        middle = (low + high) // 2
        if _first(_capacities(columns, values[middle]), counts, workers, micro_batches) is None:
            low = middle + 1
        else:
            high = middle
    if low == len(values):
        _explain(times, workers, pipelines, stages, micro_batches)
        most = max(
            (_most(_capacities(columns, math.inf), count, workers) or 0 for count in counts), default=0
        )
        raise PlanInfeasible(
            f"memory: {most} micro-batches at most fit {workers} workers with {times.memory_bytes:.0f} bytes"
            f" (expected {micro_batches})"
        )
    capacities = _capacities(columns, values[low])
    count = _first(capacities, counts, workers, micro_batches)
    assert count is not None  # The bisection ended here.
    lengths_used = _choose(capacities, count, workers)
    batches = _trim(columns, capacities, lengths_used, micro_batches)
    # A length has one split, of its largest batch: a smaller one takes no longer and no more memory than that.
    largest = {length: max(m for each, m in batches if each == length) for length, _ in batches}
    splits = {(length, m): times.split(length, largest[length]) for length, m in batches}
    return _layout(splits, batches, float(values[low]))


def _columns(
    times: PipelineTimes, workers: int, counts: Sequence[int], lengths: Sequence[int], micro_batches: int
) -> dict[int, Floats]:
    """t[length], as far as it may matter: up to the time of some layout, or to all of the batch."""
    alike = [
        times.time_s(length, -(-micro_batches // count))
        for count in counts
        for length in lengths
        if length * count <= workers
    ]
    limit = min(alike, default=math.inf)
    columns = {}
    for length in lengths:
        # Ceiling of the mean: where every pipeline of the fastest layout alike ends; longer ones take more.
        upto = min(micro_batches, -(-micro_batches // max(counts)))
        column = times.column(length, upto)
        while len(column) < micro_batches and column[-1] <= limit and math.isfinite(column[-1]):
            column = times.column(length, min(micro_batches, 2 * len(column)))
        column = column[:micro_batches]
        columns[length] = column[np.isfinite(column) & (column <= limit)]
    return {length: column for length, column in columns.items() if len(column)}


def _capacities(columns: Mapping[int, Floats], limit_s: float) -> dict[int, int]:
    """k_p: the most micro-batches that a pipeline of p stages finishes in time, if any."""
    found = {
        length: int(np.searchsorted(column, limit_s, side="right")) for length, column in columns.items()
    }
    return {length: capacity for length, capacity in found.items() if capacity}


def _first(
    capacities: Mapping[int, int], counts: Sequence[int], workers: int, micro_batches: int
) -> int | None:
    """The first number of pipelines that can take the batch."""
    if not capacities:
        return None
    envelope = _envelope(capacities)
    for count in counts:
        most = _most(capacities, count, workers, micro_batches, envelope)
        if most is not None and most >= micro_batches:
            return count
    return None


def _envelope(capacities: Mapping[int, int]) -> list[int]:
    """Lengths on the upper concave envelope of (p, k_p), from the shortest to the first of the largest capacity."""
    peak = max(capacities, key=lambda length: (capacities[length], -length))
    hull: list[int] = []
    for p in sorted(length for length in capacities if length <= peak):
        while len(hull) >= 2:
            a, b = hull[-2:]
            if (capacities[b] - capacities[a]) * (p - a) > (capacities[p] - capacities[a]) * (b - a):
                break
            hull.pop()
        hull.append(p)
    return hull


def _most(
    capacities: Mapping[int, int],
    count: int,
    workers: int,
    enough: int | None = None,
    envelope: list[int] | None = None,
) -> int | None:
    """The most micro-batches of `count` pipelines on at most `workers` workers; None if they do not suffice.

    max sum of k_p x_p subject to sum of x_p = count, sum of p x_p <= workers, x whole numbers >= 0. Relaxed, it has
    a solution of two neighbours a, b on the envelope of (p, k_p), x_a and x_b. Some whole solution z
    differs little from it. Write z as floor(x) with pipelines taken out and put in: pairs of one out and one in,
    at most one in that is not paired (x_a + x_b is whole, so the floors lose one at most), and idle workers. A pair
    changes the workers used by some d with |d| < D + 1, D = longest - shortest; an idle worker counts as d = 1.
    All d together with the unpaired one make up for what the floors left, so their sum is within [-D, D].

    (1) No pairs and idle workers have d's that add up to 0: undoing them keeps z feasible, and it does not
        lower its capacity, as doing them is possible from x, which is optimal. So take z with fewest pairs.
    (2) Order them so that the running sum stays in [-D, D]: take a d < 0 while it is above 0, one > 0
        otherwise; once one kind has run out it moves towards the total. By (1) it takes no value twice.
    So there are at most 2 D of them, at most 2 D pipelines of each kind are taken out of floor(x), and all others are
    fixed: `_window` solves the other 4 D + 1 or fewer exactly, whatever `count` and `workers` are.

    `enough`: stop as soon as rounding reaches it, or the relaxation shows that nothing does: then what is returned
    is only known to be on the same side of it.
    """
    if not capacities or count * min(capacities) > workers:
        return None
    relaxed = _relaxed(capacities, count, workers, envelope or _envelope(capacities))
    fixed = sum(capacities[length] * number for length, number in relaxed.fixed.items())
    open_count, left = relaxed.open_count, relaxed.workers
    if not open_count:
        return fixed
    if enough is not None:
        a, b = relaxed.fixed  # Their lengths.
        spare = left - a * open_count
        at_least = fixed + capacities[a] * open_count
        bound = at_least + (spare * (capacities[b] - capacities[a])) // (b - a)
        if bound < enough:
            return bound
        rounded = at_least + min(spare // (b - a), open_count) * (capacities[b] - capacities[a])
        if rounded >= enough:
            return rounded
    return fixed + int(_window(capacities, open_count, left)[-1].max())


class _Relaxed(NamedTuple):
    """`fixed`: pipelines that are settled, by length; `open_count`: others to solve exactly, on `workers`."""

    fixed: dict[int, int]
    open_count: int
    workers: int


def _relaxed(capacities: Mapping[int, int], count: int, workers: int, envelope: Sequence[int]) -> _Relaxed:
    """The relaxed solution, as far as a whole one may be taken to agree with it (see `_most`).

    All is settled where all pipelines can have the length of the largest capacity: nothing is better.
    """
    if count * envelope[-1] <= workers:
        return _Relaxed({envelope[-1]: count}, 0, workers)
    index = next(i for i, b in enumerate(envelope) if count * b > workers)
    a, b = envelope[index - 1], envelope[index]
    b_count = (workers - a * count) // (b - a)
    a_count = count - b_count - (1 if (workers - a * count) % (b - a) else 0)
    margin = 2 * (max(capacities) - min(capacities))
    fixed_a, fixed_b = max(a_count - margin, 0), max(b_count - margin, 0)
    left = workers - fixed_a * a - fixed_b * b
    return _Relaxed({a: fixed_a, b: fixed_b}, count - fixed_a - fixed_b, left)


def _window(capacities: Mapping[int, int], count: int, workers: int) -> npt.NDArray[np.int64]:
    """f[c, e]: most micro-batches of c pipelines with e workers more than c of the shortest: the whole table.

    Beyond (longest - shortest) each, more workers are of no use.
    """
    shortest = min(capacities)
    extra = min(workers - count * shortest, count * (max(capacities) - shortest))
    f = np.full((count + 1, extra + 1), -(1 << 40), dtype=np.int64)
    f[0] = 0
    for c in range(1, count + 1):
        for length, capacity in capacities.items():
            more = length - shortest
            if more <= extra:
                f[c, more:] = np.maximum(f[c, more:], f[c - 1, : extra + 1 - more] + capacity)
    return f


def _choose(capacities: Mapping[int, int], count: int, workers: int) -> dict[int, int]:
    """How many of each length reach `_most`."""
    fixed, open_count, left = _relaxed(capacities, count, workers, _envelope(capacities))
    if not open_count:
        return fixed
    found = Counter(fixed)
    f = _window(capacities, open_count, left)
    extra, shortest = f.shape[1] - 1, min(capacities)
    for c in range(open_count, 0, -1):
        for length, capacity in capacities.items():
            more = length - shortest
            if more <= extra and f[c, extra] == f[c - 1, extra - more] + capacity:
                found[length] += 1
                extra -= more
                break
    return {length: number for length, number in found.items() if number}


def _trim(
    columns: Mapping[int, Floats],
    capacities: Mapping[int, int],
    lengths: Mapping[int, int],
    micro_batches: int,
) -> dict[tuple[int, int], int]:
    """(length, micro-batches): pipelines. From full ones, micro-batches in excess are taken where it is latest."""
    surplus = sum(capacities[length] * number for length, number in lengths.items()) - micro_batches
    batches = {(length, capacities[length]): number for length, number in lengths.items()}
    heap = [(-columns[length][m - 1], length, m) for length, m in batches if m > 1]
    heapq.heapify(heap)
    while surplus:
        _, length, m = heapq.heappop(heap)
        moved = min(surplus, batches[length, m])
        surplus -= moved
        batches[length, m] -= moved
        fewer = (length, m - 1)
        if fewer not in batches:
            batches[fewer] = 0
            if m > 2:
                heapq.heappush(heap, (-columns[length][m - 2], length, m - 1))
        batches[fewer] += moved
    return {pair: number for pair, number in batches.items() if number}


def _layout(
    splits: Mapping[tuple[int, int], tuple[int, ...]], groups: Mapping[tuple[int, int], int], time_s: float
) -> Layout:
    found = tuple(Group(splits[pair], pair[1], groups[pair]) for pair in sorted(groups, reverse=True))
    return Layout(found, time_s, sum(length * count for (length, _), count in groups.items()))


# --- why not ---


def _check_batch(micro_batches: int, pipelines: int) -> None:
    if micro_batches < pipelines:
        raise PlanInfeasible(
            f"micro-batches: {micro_batches} for {pipelines} pipelines, {pipelines - micro_batches} too few"
            " (expected one each at least)"
        )


def _explain(
    times: PipelineTimes, workers: int, pipelines: Sequence[int], stages: Sequence[int], micro_batches: int
) -> None:
    """Raise the first reason why there is no layout; return if none of these is one."""
    if not pipelines or min(pipelines) < 1 or not stages or min(stages) < 1:
        raise PlanInfeasible(
            f"pipelines: {_span(pipelines)} of {_span(stages)} stages (expected at least 1 each)"
        )
    _check_batch(micro_batches, min(pipelines))
    usable = sorted(length for length in stages if length <= len(times.profile.layers))
    times.check(usable or sorted(stages))
    fitting = [length for length in usable if math.isfinite(times.time_s(length, 1))]
    needed = min(pipelines) * fitting[0]
    if needed > workers:
        raise PlanInfeasible(
            f"workers: {workers} for {min(pipelines)} pipelines of {fitting[0]} stages, the shortest that fit:"
            f" {needed - workers} too few"
        )


def _span(values: Sequence[int]) -> str:
    return f"{min(values)} to {max(values)}" if values else "none"
