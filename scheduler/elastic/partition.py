"""Layers to stages so that the slowest stage is as fast as can be (ElasWave, Sec. 4.2, Algorithm 1).

Costs are running sums over layers by stage, [stages, layers + 1] (or [layers + 1], for all stages the same):
what stage p needs for layers [a, b) is sums[p, b] - sums[p, a] + constants[p]. A slow stage or one with larger
micro-batches has sums times a factor; the transfers of Eq. 1 are constants. Memory likewise.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ...protocols.errors import PlanInfeasible
from .profile import Profile

Floats = npt.NDArray[np.float64]


class Partition(NamedTuple):
    """`sizes`: layers of each stage. `cost`: of the worst stage, f[P, L]."""

    sizes: tuple[int, ...]
    cost: float


def mini_step_s(
    forward_s: float,
    backward_s: float,
    send_forward_s: float = 0.0,
    send_backward_s: float = 0.0,
    forward_overlap: float = 0.0,
    backward_overlap: float = 0.0,
) -> float:
    """A stage's forward and backward of one micro-batch, ElasWave, Eq. 1:

        T = T_f + T_b + [T_p2p_f - sigma_f T_f] + [T_p2p_b - sigma_b T_b]

    A bracket is what of a transfer no compute hides. As printed it can be negative, a step faster than its
    compute; we take 0 then.
    Args:
        forward_overlap, backward_overlap: sigma, the share of compute that hides transfers, 0 to 1.
    Raises: PlanInfeasible for another sigma.
    """
    for sigma in (forward_overlap, backward_overlap):
        if not 0 <= sigma <= 1:
            raise PlanInfeasible(f"overlap: {sigma:g} (expected 0 to 1)")
    shown_forward_s = max(send_forward_s - forward_overlap * forward_s, 0.0)
    shown_backward_s = max(send_backward_s - backward_overlap * backward_s, 0.0)
    return forward_s + backward_s + shown_forward_s + shown_backward_s


def mini_step_sums(profile: Profile, samples: Sequence[float], speeds: Sequence[float]) -> Floats:
    """Running sums of forward and backward by stage, for `minimax`: [stages, layers + 1].

    Args:
        samples: m_i, in the micro-batches of each stage (a stage that lost workers has larger ones).
        speeds: of each stage's slowest worker.
    """
    layers = range(len(profile.layers) + 1)
    return np.array(
        [
            [sum(profile.seconds(0, stop, size)) / speed for stop in layers]
            for size, speed in zip(samples, speeds, strict=True)
        ]
    )


def minimax(
    sums: npt.ArrayLike,
    stages: int,
    constants: npt.ArrayLike = 0.0,
    memory_sums: npt.ArrayLike | None = None,
    memory_limits: npt.ArrayLike = np.inf,
) -> Partition:
    """The split of all layers, at least one a stage, whose worst stage costs least, of those that fit memory.

    ElasWave, Eq. 2, by Algorithm 1 with Eq. 3, as printed, all l and k of a stage at once:

        f[p, l] = min over k in [p - 1, l - 1] of max(f[p - 1, k], t_p([k + 1 .. l])),  Mem[k + 1 .. l] <= cap[p]

    The paper checks memory from stage 2 on; line 2 would let stage 1 take anything. Here it is checked, too.
    Costs may fall with more layers (they need not be times): nothing is pruned by their growth. Of equal
    values of k the least is taken. O(P L^2).
    Raises: PlanInfeasible with fewer layers than stages, or if no split fits: then it names the stage that is
    over its memory in the split that comes closest, and by how much.
    """
    costs = _segments(sums, stages, constants)
    layers = costs.shape[-1] - 1
    if not 1 <= stages <= layers:
        raise PlanInfeasible(f"stages: {stages} for {layers} layers (expected 1 to {layers})")
    if memory_sums is None:
        return _minimax(costs)
    over = _segments(memory_sums, stages, -_by_stage(memory_limits, stages))
    costs[over > 0] = np.inf
    found = _minimax(costs)
    if np.isfinite(found.cost):
        return found
    sizes, excess = _minimax(over)
    stage, start = 0, 0
    for p, size in enumerate(sizes):
        if over[p, start, start + size] == excess:
            stage = p
            break
        start += size
    limit = _by_stage(memory_limits, stages)[stage]
    raise PlanInfeasible(
        f"memory: stage {stage} of {stages} needs {excess + limit:.0f} bytes, {excess:.0f} over its {limit:.0f},"
        f" even in the split that comes closest, {sizes}"
    )


def _by_stage(values: npt.ArrayLike, stages: int) -> Floats:
    return np.broadcast_to(np.asarray(values, dtype=float), (stages,))


def _segments(sums: npt.ArrayLike, stages: int, constants: npt.ArrayLike) -> Floats:
    """[stages, start, stop]: costs of layers [start, stop); infinite where there are none."""
    running = np.asarray(sums, dtype=float)
    running = np.broadcast_to(running, (stages, running.shape[-1]))
    costs = running[:, None, :] - running[:, :, None] + _by_stage(constants, stages)[:, None, None]
    at = np.arange(running.shape[-1])
    return np.where(at[:, None] < at[None, :], costs, np.inf)


def _minimax(costs: Floats) -> Partition:
    stages, width, _ = costs.shape
    best = costs[0, 0]  # f[1, .].
    choices = []
    for p in range(1, stages):
        worst = np.maximum(best[:, None], costs[p])  # [k, l].
        choice = worst.argmin(axis=0)
        choices.append(choice)
        best = worst[choice, np.arange(width)]
    cuts = [width - 1]
    for choice in reversed(choices):
        cuts.append(int(choice[cuts[-1]]))
    cuts.append(0)
    sizes = tuple(stop - start for stop, start in pairwise(cuts))[::-1]
    return Partition(sizes, float(best[-1]))
