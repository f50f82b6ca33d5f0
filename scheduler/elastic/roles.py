"""Which worker takes which role of a new layout, so that the fewest bytes move (Chameleon, Sec. IV-B, Fig. 3).

Three departures from the paper. It costs what moves in layers; here it is bytes, so that layers may differ. Its
matrix is square; here some workers may be left over, and some may have come with nothing. And it runs
Kuhn-Munkres over everybody; here whoever finds a role with just the layers held takes it beforehand, which no
optimum is better than: if x holds R but is given S, and y holds T and is given R, then with both swapped

    |R n R| + |T n S|  >=  |R n S| + |T n R|,   as  |R n S| + |R n T| <= |R| + |R n S n T|.

And as workers who hold the same are alike, as roles are, many of them are matched by their ranges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TypeVar

import networkx as nx
import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment

from ...protocols.errors import PlanInfeasible
from .plan import Pipeline

Key = TypeVar("Key", bound=Hashable)

MOST_ARCS = 2000
"""Up to so many pairs of ranges, held and wanted, these are matched and not each worker; it takes milliseconds."""


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
            costs nothing and nobody holds that role's very layers: all places together weigh less than a byte.
    Raises: PlanInfeasible with fewer workers than roles, or layers that are not in the profile.
    """
    if len(held) < len(roles):
        raise PlanInfeasible(f"roles: {len(roles)} for {len(held)} workers (expected at most one for each)")
    places = places or {}
    taken = _unchanged(held, roles, places)
    left = {worker: held[worker] for worker in sorted(held.keys() - taken.values())}
    unfilled = {role: roles[role] for role in range(len(roles)) if role not in taken}
    alike = len(set(left.values())) * len(set(unfilled.values()))
    solve = _by_ranges if len(left) > 128 and alike <= MOST_ARCS else _by_workers
    taken |= solve(left, unfilled, state_bytes, places)
    return tuple(taken[role] for role in range(len(roles)))


def _by_workers(
    held: Mapping[str, range],
    roles: Mapping[int, range],
    state_bytes: Sequence[float],
    places: Mapping[str, int],
) -> dict[int, str]:
    """Kuhn-Munkres."""
    workers, column = list(held), {role: j for j, role in enumerate(roles)}
    cost = costs(list(held.values()), list(roles.values()), state_bytes)
    for row, worker in enumerate(workers):
        if (role := places.get(worker, -1)) in column:
            cost[row, column[role]] -= 0.5 / len(workers)
    of_column = list(roles)
    return {of_column[j]: workers[i] for i, j in zip(*linear_sum_assignment(cost), strict=True)}


def _by_ranges(
    held: Mapping[str, range],
    roles: Mapping[int, range],
    state_bytes: Sequence[float],
    places: Mapping[str, int],
) -> dict[int, str]:
    """The same, as a flow of least cost from the ranges that are held to those wanted: there are few of either.

    Costs are whole bytes here, so that the weight of places is exact.
    """
    workers_of, roles_of = _grouped(held), _grouped(roles)
    staying: defaultdict[tuple[range, range], list[str]] = defaultdict(list)
    for worker, old in held.items():
        if places.get(worker, -1) in roles:
            staying[old, roles[places[worker]]].append(worker)
    cost = costs(list(workers_of), list(roles_of), state_bytes)
    graph = nx.MultiDiGraph()
    graph.add_node("idle", demand=len(held) - len(roles))
    for new, numbers in roles_of.items():
        graph.add_node(("role", new), demand=len(numbers))
    for old, row in zip(workers_of, cost.tolist(), strict=True):
        graph.add_node(old, demand=-len(workers_of[old]))
        graph.add_edge(old, "idle", weight=0)
        for new, value in zip(roles_of, row, strict=True):
            weight = round(value) * (len(held) + 1)
            graph.add_edge(old, ("role", new), weight=weight)
            if (old, new) in staying:
                graph.add_edge(old, ("role", new), weight=weight - 1, capacity=len(staying[old, new]))
    flow = nx.network_simplex(graph)[1]
    taken: dict[int, str] = {}
    count = {
        (old, new): sum(flow[old].get(("role", new), {}).values()) for old in workers_of for new in roles_of
    }
    for pair, workers in staying.items():
        kept = workers[: count[pair]]
        count[pair] -= len(kept)
        taken |= {places[worker]: worker for worker in kept}
    busy = set(taken.values())
    free = {old: iter([each for each in workers if each not in busy]) for old, workers in workers_of.items()}
    open_roles = {
        new: iter([each for each in numbers if each not in taken]) for new, numbers in roles_of.items()
    }
    for (old, new), number in count.items():
        taken |= {next(open_roles[new]): next(free[old]) for _ in range(number)}
    return taken


def _grouped(of: Mapping[Key, range]) -> dict[range, list[Key]]:
    groups: dict[range, list[Key]] = {}
    for key, layers in of.items():
        groups.setdefault(layers, []).append(key)
    return groups


def _unchanged(
    held: Mapping[str, range], roles: Sequence[range], places: Mapping[str, int]
) -> dict[int, str]:
    """By role, workers who hold its very layers: those in place first, then by name."""
    open_roles: defaultdict[range, list[int]] = defaultdict(list)
    someones = {places[worker] for worker in held if worker in places}
    for role in sorted(range(len(roles)), key=lambda role: (role not in someones, -role)):
        open_roles[roles[role]].append(role)  # Taken from the end: what is nobody's place goes first.
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
        before: the pipelines so far: stage s of pipeline i keeps its place, as `assign` has it.
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
