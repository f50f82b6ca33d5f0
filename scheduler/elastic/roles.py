"""Which worker takes which role of a new layout, so that the fewest bytes move (Chameleon, Sec. IV-B, Fig. 3).

Three departures from the paper. It costs what moves in layers; here it is bytes, so that layers may differ. Its
matrix is square; here some workers may be left over, and some may have come with nothing. And it runs
Kuhn-Munkres over everybody; here whoever finds a role with just the layers held takes it beforehand, which no
optimum is better than: if x holds R but is given S, and y holds T and is given R, then with both swapped

    |R n R| + |T n S|  >=  |R n S| + |T n R|,   as  |R n S| + |R n T| <= |R| + |R n S n T|.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ...protocols.errors import PlanInfeasible
from .plan import Pipeline


def costs(held: Sequence[range], roles: Sequence[range], state_bytes: Sequence[float]) -> NDArray[np.float64]:
    """Cost[i][j]: bytes that who holds `held[i]` must receive to have the layers of `roles[j]` (Fig. 3).

    Args:
        state_bytes: of layers [0, l), for every l (`Profile.state_bytes`).
    """
    before, until = np.asarray(state_bytes, np.float64), len(state_bytes) - 1
    old, new = _ends(held, until), _ends(roles, until)
    start = np.maximum(old[:, None, 0], new[None, :, 0])
    stop = np.maximum(np.minimum(old[:, None, 1], new[None, :, 1]), start)
    found: NDArray[np.float64] = before[new[:, 1]] - before[new[:, 0]] - (before[stop] - before[start])
    return found


def _ends(of: Sequence[range], layers: int) -> NDArray[np.int64]:
    for each in of:
        if each and not 0 <= each.start < each.stop <= layers:
            raise PlanInfeasible(
                f"layers [{each.start}, {each.stop}) (expected within the {layers} of the profile)"
            )
    return np.array([(each.start, each.stop) if each else (0, 0) for each in of], np.int64).reshape(-1, 2)


def assign(
    held: Mapping[str, range],
    roles: Sequence[range],
    state_bytes: Sequence[float],
    places: Mapping[str, int] | None = None,
) -> tuple[str, ...]:
    """Who takes each of `roles`, in their order; together they receive as few bytes as can be.

    Args:
        held: per worker that is there now, its layers; range(0) for one that has just come. Whoever gets no
            role stays idle.
        roles: layers of each, every one to be filled.
        state_bytes: of layers [0, l), for every l.
        places: the role that a worker has by its place (pipeline and stage) already. It stays, where that
            costs nothing: all places together weigh less than a byte.
    Raises: PlanInfeasible with fewer workers than roles, or layers that are not in the profile.
    """
    if len(held) < len(roles):
        raise PlanInfeasible(f"roles: {len(roles)} for {len(held)} workers (expected at most one for each)")
    places = places or {}
    taken = _unchanged(held, roles, places)
    workers = sorted(held.keys() - taken.values())
    open_roles = [role for role in range(len(roles)) if role not in taken]
    cost = costs([held[worker] for worker in workers], [roles[role] for role in open_roles], state_bytes)
    column = {role: j for j, role in enumerate(open_roles)}
    for row, worker in enumerate(workers):
        if (role := places.get(worker, -1)) in column:
            cost[row, column[role]] -= 0.5 / len(workers)
    chosen = linear_sum_assignment(cost)
    taken |= {open_roles[j]: workers[i] for i, j in zip(*chosen, strict=True)}
    return tuple(taken[role] for role in range(len(roles)))


def _unchanged(
    held: Mapping[str, range], roles: Sequence[range], places: Mapping[str, int]
) -> dict[int, str]:
    """By role, workers who hold its very layers: those in place first, then by name."""
    open_roles: defaultdict[range, list[int]] = defaultdict(list)
    for role in range(len(roles) - 1, -1, -1):
        open_roles[roles[role]].append(role)
    in_place = {
        places[worker]: worker
        for worker in sorted(held)
        if 0 <= places.get(worker, -1) < len(roles) and roles[places[worker]] == held[worker]
    }
    for role in in_place:
        open_roles[roles[role]].remove(role)
    others: Iterable[str] = sorted(held.keys() - in_place.values())
    return in_place | {open_roles[held[each]].pop(): each for each in others if open_roles.get(held[each])}


def staff(
    layouts: Sequence[Sequence[int]],
    held: Mapping[str, range],
    state_bytes: Sequence[float],
    before: Sequence[Pipeline] = (),
) -> tuple[Pipeline, ...]:
    """Pipelines with these cuts, and the workers in them for whom the fewest bytes move.

    Args:
        layouts: per pipeline its cuts, as `plan.cuts_of` makes them.
        before: the pipelines so far: stage s of pipeline i keeps its place, where that costs nothing.
    Raises: PlanInfeasible as `assign` does.
    """
    at = [(i, s) for i, cuts in enumerate(layouts) for s in range(len(cuts) - 1)]
    number = {place: role for role, place in enumerate(at)}
    places = {
        worker: number[i, s]
        for i, pipeline in enumerate(before)
        for s, worker in enumerate(pipeline.workers)
        if worker in held and (i, s) in number
    }
    roles = [range(layouts[i][s], layouts[i][s + 1]) for i, s in at]
    workers = iter(assign(held, roles, state_bytes, places))
    return tuple(Pipeline(tuple(next(workers) for _ in cuts[1:]), tuple(cuts)) for cuts in layouts)
