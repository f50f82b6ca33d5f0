"""How long a pipeline takes for a step, and how much memory its stages need (Chameleon, Sec. IV-C).

Stages count from 0, as in Eq. 14. Arrays of stages are [..., stages]: many candidate layer splits at once.

The paper times unequal stages by simulation, Eq. 11, O(N_pp * N_m) for each split and batch. We found a closed
form of the same number, `one_f_one_b`, which costs O(N_pp); tests hold it against Eq. 11, where times are whole
numbers to the last bit. Transfers between stages cost nothing here, as in the paper.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import EllipsisType

import numpy as np
import numpy.typing as npt

from ...protocols.errors import PlanInfeasible
from .profile import Profile

Floats = npt.NDArray[np.float64]
Index = npt.NDArray[np.int64] | EllipsisType


def one_f_one_b_by_recurrence(forward: npt.ArrayLike, backward: npt.ArrayLike, micro_batches: int) -> Floats:
    """Makespan of strict 1F1B, simulated operation by operation: the reference for `one_f_one_b`.

    Chameleon, Eq. 11: t_start(i, j) = max(t_end(i, j - 1), t_end(f_1(i), f_2(j))). Stage s starts with N_pp - s
    forwards (or all, if fewer) and then takes turns, backward first. Were all operations of length 1, forward
    j of stage s would run at s + j (warm-up) or s + 2j, and its backward at 2 N_pp - 1 - s + 2j; whatever the
    lengths, operations of one slot do not depend on each other, so slots in their order are one to compute in.
    Args:
        forward, backward: seconds of a micro-batch by stage, [..., stages], >= 0.
    Returns: seconds, [...].
    Raises: PlanInfeasible without stages or micro-batches.
    """
    f, b = _stage_times(forward, backward, micro_batches)
    stages = f.shape[-1]
    free = np.zeros_like(f)  # When each stage has done what came so far.
    forward_end = np.zeros((micro_batches, *f.shape))
    backward_end = np.zeros((micro_batches, *f.shape))
    for slot in range(2 * (stages + micro_batches - 1)):
        for s in range(stages):
            j, odd = divmod(slot - (2 * stages - 1 - s), 2)
            if not odd and 0 <= j < micro_batches:
                needed = backward_end[j, ..., s + 1] if s + 1 < stages else forward_end[j, ..., s]
                free[..., s] = backward_end[j, ..., s] = np.maximum(free[..., s], needed) + b[..., s]
                continue
            j = _forward_at(slot, s, stages)
            if 0 <= j < micro_batches:
                needed = forward_end[j, ..., s - 1] if s else np.zeros(f.shape[:-1])
                free[..., s] = forward_end[j, ..., s] = np.maximum(free[..., s], needed) + f[..., s]
    return np.asarray(free.max(axis=-1))


def _forward_at(slot: int, stage: int, stages: int) -> int:
    """Which forward a stage runs in a slot; -1 for none."""
    warm_up = stages - stage
    if 0 <= slot - stage < warm_up:
        return slot - stage
    j, odd = divmod(slot - stage, 2)
    return j if not odd and j >= warm_up else -1


def one_f_one_b(forward: npt.ArrayLike, backward: npt.ArrayLike, micro_batches: int) -> Floats:
    """Makespan of strict 1F1B, the number of Eq. 11 in closed form; arguments as `one_f_one_b_by_recurrence`.

    The makespan is the longest path through the operations. A path that is past the warm-up and before the
    drain is a walk: a forward of stage s leads one stage down, a backward one up, an operation per slot. So it
    passes each stage down as often as up, between where it left the warm-up and where it enters the drain,
    and spends every trip that it can spare on one stage k. With c = f + b, C(k) = c_0 + ... + c_k, C(-1) = 0,

        T(m) = max over k > N_pp - m of c_k (m - N_pp + k - 1) + S_f(k - 1) + S_b(k - 1) - C(k - 1),
        S_x(k) = max over s >= max(k, 0) of C(s) + (N_pp - 1 - s) max(x_0, ..., x_s)

    and, if m <= N_pp, at least C(l) + (m - 1)(max(f_0, ..., f_l) + max(b_0, ..., b_l)) with l = N_pp - m: paths that
    never leave the warm-up but into the drain.
    """
    return _lines(*_stage_times(forward, backward, micro_batches)).at(micro_batches)


@dataclass(frozen=True)
class Lines:
    """What of `one_f_one_b` is the same for all m, of many splits at once; all [..., stages].

    T(m) = max over k of offset_k + slope_k m for every m > N_pp; slopes are c. So T is exactly linear, one largest c
    per micro-batch, once the line of the slowest stage is on top: from `linear_from` on, which is late where another
    stage is nearly as slow. Of the stages up to each: `through`, the sum of c, and `head`, max f + max b.
    """

    slope: Floats
    offset: Floats
    through: Floats
    head: Floats

    def of(self, splits: Index) -> Lines:
        """These."""
        return Lines(self.slope[splits], self.offset[splits], self.through[splits], self.head[splits])

    def at(self, micro_batches: int, splits: Index = ...) -> Floats:
        """T of these, [...]."""
        stages = self.slope.shape[-1]
        slope, offset = self.slope[splits], self.offset[splits]
        usable = slice(max(stages - micro_batches + 1, 0), None)
        value = (offset[..., usable] + slope[..., usable] * micro_batches).max(axis=-1, initial=-np.inf)
        if micro_batches <= stages:
            last = stages - micro_batches
            through = slope[..., : last + 1].sum(axis=-1)
            value = np.maximum(value, through + (micro_batches - 1) * self.head[splits][..., last])
        return np.asarray(value)

    def least(self, micro_batches: int) -> Floats:
        """Not more than T, but for rounding, and seldom much less: of a few of its lines, [...]."""
        stages = self.slope.shape[-1]
        if micro_batches > stages:
            slope, offset = self.slowest
            return offset + slope * micro_batches
        last = stages - micro_batches
        value = self.through[..., last] + (micro_batches - 1) * self.head[..., last]
        if micro_batches > 1:
            value = np.maximum(value, self.offset[..., -1] + self.slope[..., -1] * micro_batches)
        return np.asarray(value)

    @cached_property
    def slowest(self) -> tuple[Floats, Floats]:
        """The line of the slowest stage: slope and offset, [...]."""
        slope = self.slope.max(axis=-1)
        return slope, np.where(self.slope == slope[..., None], self.offset, -np.inf).max(axis=-1)

    def linear_from(self) -> Floats:
        """The least number of micro-batches, > N_pp, from which on each further one costs max(f + b), [...]."""
        top, highest = (each[..., None] for each in self.slowest)
        with np.errstate(divide="ignore", invalid="ignore"):
            crossing = np.where(self.slope < top, (self.offset - highest) / (top - self.slope), 0.0)
        return np.maximum(np.ceil(crossing.max(axis=-1)), self.slope.shape[-1] + 1.0)


def joined(lines: Sequence[Lines]) -> Lines:
    """Of all of their splits, one after the other."""
    slope, offset, through, head = (
        np.concatenate([getattr(each, name) for each in lines])
        for name in ("slope", "offset", "through", "head")
    )
    return Lines(slope, offset, through, head)


def one_f_one_b_lines(forward: npt.ArrayLike, backward: npt.ArrayLike) -> Lines:
    """For `one_f_one_b` of any number of micro-batches."""
    return _lines(*_stage_times(forward, backward, 1))


def _lines(f: Floats, b: Floats) -> Lines:
    stages = f.shape[-1]
    c, most_f, most_b = f + b, np.maximum.accumulate(f, axis=-1), np.maximum.accumulate(b, axis=-1)
    through = np.cumsum(c, axis=-1)
    left = stages - 1 - np.arange(stages)
    reach = _suffix_max(through + left * most_f) + _suffix_max(through + left * most_b)
    before = np.concatenate([reach[..., :1], reach[..., :-1]], axis=-1)
    offset = c * (np.arange(stages) - 1 - stages) + before - (through - c)
    return Lines(c, offset, through, most_f + most_b)


def _suffix_max(values: Floats) -> Floats:
    return np.asarray(np.maximum.accumulate(values[..., ::-1], axis=-1)[..., ::-1])


def _stage_times(
    forward: npt.ArrayLike, backward: npt.ArrayLike, micro_batches: int
) -> tuple[Floats, Floats]:
    f, b = np.asarray(forward, dtype=float), np.asarray(backward, dtype=float)
    if f.ndim == 0 or f.shape != b.shape or f.shape[-1] == 0:
        raise PlanInfeasible(f"stages: times of shape {f.shape} and {b.shape} (expected [..., stages] twice)")
    if micro_batches < 1:
        raise PlanInfeasible(f"micro-batches: {micro_batches} in a pipeline (expected at least 1)")
    return f, b


# --- closed forms of the paper ---


def symmetric_step_s(stages: int, micro_batches: int, forward_s: float, backward_s: float) -> float:
    """Chameleon, Eq. 9: (N_pp + N_m - 1)(T_f + T_b), equal stages, every pipeline N_m micro-batches."""
    return (stages + micro_batches - 1) * (forward_s + backward_s)


def asymmetric_step_s(pipelines_s: Iterable[float]) -> float:
    """Chameleon, Eq. 10: the slowest pipeline, max of t_p. Raises: PlanInfeasible without pipelines."""
    slowest = max(pipelines_s, default=None)
    if slowest is None:
        raise PlanInfeasible("pipelines: 0 (expected at least one)")
    return slowest


def rerouted_step_s(
    stages: int, micro_batches: int, pipelines: int, forward_s: float, backward_s: float
) -> float:
    """Chameleon, Eq. 12: one failure, (N_pp + N_m - 1 + N_m / (N_dp - 1))(T_f + T_b).

    Raises: PlanInfeasible if that was the only pipeline.
    """
    failed = (1,) + (0,) * (stages - 1)
    return rerouted_step_after_failures_s(failed, micro_batches, pipelines, forward_s, backward_s)


def rerouted_step_after_failures_s(
    failed: Sequence[int], micro_batches: int, pipelines: int, forward_s: float, backward_s: float
) -> float:
    """Chameleon, Eq. 13: (N_pp + N_m - 1 + sum of [F_i > 0] N_m F_i / (N_dp - F_i))(T_f + T_b).

    Args:
        failed: F_i, workers lost of each stage i.
    Raises: PlanInfeasible if F_i >= N_dp. The paper stops where F_i is "larger than N_dp"; but with F_i = N_dp
    nobody is left of the stage either, and the equation divides by zero.
    """
    extra = 0.0
    for stage, lost in enumerate(failed):
        if not 0 <= lost < pipelines:
            raise PlanInfeasible(
                f"stage {stage}: {lost} of its {pipelines} workers failed (expected 0 to {pipelines - 1}:"
                " rerouting needs one that is left)"
            )
        extra += micro_batches * lost / (pipelines - lost)
    return (len(failed) + micro_batches - 1 + extra) * (forward_s + backward_s)


# --- memory ---


def peak_bytes_of_averages(
    layers: npt.ArrayLike,
    parameter_bytes: float,
    optimizer_bytes: float,
    gradient_bytes: float,
    activation_bytes: float,
    micro_batches: int | None = None,
) -> Floats:
    """Peak memory by stage, Chameleon, Eq. 14: N_l (m_p + m_o + m_g) + (N_pp - i) N_l m_a.

    Args:
        layers: N_l by stage, [..., stages].
        parameter_bytes, ...: averages of one layer; activations of one micro-batch.
        micro_batches: of the pipeline. With fewer than N_pp - i, that many are in flight: this cap is ours, the
            paper has none (None).
    """
    count = np.asarray(layers, dtype=float)
    flying = in_flight(count.shape[-1], micro_batches)
    return count * (parameter_bytes + optimizer_bytes + gradient_bytes) + flying * count * activation_bytes


def peak_bytes(
    profile: Profile, sizes: npt.ArrayLike, samples: float, micro_batches: int | None = None
) -> Floats:
    """Peak memory by stage, Chameleon, Eq. 14, with each layer's own bytes in place of averages.

    Args:
        sizes: layers of each stage, [..., stages].
        samples: in a micro-batch.
        micro_batches: as in `peak_bytes_of_averages`; the cap is ours.
    """
    stops = np.cumsum(np.asarray(sizes, dtype=int), axis=-1)
    starts = stops - np.asarray(sizes, dtype=int)
    static, activations = np.asarray(profile.static_bytes), np.asarray(profile.activation_bytes) * samples
    flying = in_flight(stops.shape[-1], micro_batches)
    return static[stops] - static[starts] + flying * (activations[stops] - activations[starts])


def in_flight(stages: int, micro_batches: int | None = None) -> Floats:
    """Micro-batches whose activations a stage keeps at its peak: N_pp - i, and not more than there are."""
    flying = stages - np.arange(stages, dtype=float)
    return flying if micro_batches is None else np.minimum(flying, micro_batches)
