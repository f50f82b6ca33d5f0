"""Who sends how much of the training state to a joining node (paper, Sec. III).

A neighbour u of the joiner can start sending at a_u = t_prop + tau_sync seconds and then needs
c_u = t_trans seconds per byte, so k shards of s bytes from u have arrived at (Eq. 1, 2 and 16)

    l_u(k) = a_u + k * s * c_u.

Problem P3 (Eq. 14-18) gives K shards of one size s to the neighbours so that the last of them ends as
early as possible; P2 (Eq. 8-12) chooses s too. Algorithm 2 is the paper's answer to P3, Algorithm 1 puts a
binary search on s around it. What the paper says and what we found to hold differ in four places:

- P3 is called NP-hard. That is so for shards of unequal size. For equal ones, the only ones P3 has,
  Algorithm 2 takes the K earliest of all the l_u(k), which is an exact optimum: `exact_assignment`
  finds the same completion by another way, and the Graham bound of Sec. III-B never comes into play.
- Eq. 3 and 7 want a shard from every neighbour; P2 and P3 (Eq. 12, 18) and Algorithm 2 do not. We do not:
  a neighbour that would end last gets nothing, and is left out of the plan.
- The paper assumes |w| = K s. Here K = ceil(|w| / s), and the last shard may be short.
- Algorithm 1 never looks at a size above the middle of its first interval (the first try always
  improves on infinity), and takes completion as quasi-monotone in s, though it is a sawtooth. We
  keep it as printed; tests/unit/test_paper_shard_plan.py has what that costs.
"""

import heapq
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from ..protocols.errors import ConfigError, PlanInfeasible

MAX_SHARDS = 1 << 16
"""Algorithm 1 tries no shard size that would cut the state into more shards than this."""

DEFAULT_SHARD_BYTES = 1 << 20
"""Shard size of the "greedy" strategy, which does not search for one."""


class Source(NamedTuple):
    """A neighbour that can send state to the joiner, as measured."""

    ready_s: float
    """t_prop + tau_sync, the initial term of Eq. 19: seconds from now until its first byte could arrive."""
    seconds_per_byte: float
    """t_trans: transmission delay, seconds per byte, > 0."""


@dataclass(frozen=True, slots=True)
class ShardPlan:
    """How many shards of one size each neighbour sends.

    Shards are byte ranges of a flat state, so counts are enough; `ranges` turns them into bytes.
    """

    shard_bytes: int
    shards_by_source: dict[str, int]
    """Only neighbours that send something; the one that ends last comes last, for `ranges`."""
    completion_s: float
    """Objective of P2 and P3: seconds from now until the last shard has arrived."""

    @property
    def shards(self) -> int:
        """K, the number of shards."""
        return sum(self.shards_by_source.values())


Strategy = Callable[[int, int, int, Mapping[str, Source]], ShardPlan]
"""(state_bytes, min_layer_bytes, max_layer_bytes, sources) -> plan."""


def ranges(plan: ShardPlan, state_bytes: int) -> dict[str, tuple[int, int]]:
    """Lay `plan` out over [0, state_bytes): one half-open byte range per source, each byte exactly once.

    Sources follow one another in the plan's order, so that the short last shard goes to the source that
    would end last.
    Raises: ConfigError if the plan's shards are not those of `state_bytes` bytes.
    """
    if plan.shards != _shards_of(state_bytes, plan.shard_bytes):
        raise ConfigError(
            f"state_bytes: {state_bytes} is not {plan.shards} shards of {plan.shard_bytes} bytes"
            f" (expected {_shards_of(state_bytes, plan.shard_bytes)} shards)"
        )
    range_by_source: dict[str, tuple[int, int]] = {}
    start = 0
    for name, count in plan.shards_by_source.items():
        stop = min(start + count * plan.shard_bytes, state_bytes)
        range_by_source[name] = (start, stop)
        start = stop
    return range_by_source


def completion_s(range_by_source: Mapping[str, tuple[int, int]], sources: Mapping[str, Source]) -> float:
    """Seconds until the last byte of `range_by_source` has arrived; 0 if there are none (Eq. 2)."""
    return max(
        (
            sources[name].ready_s + (stop - start) * sources[name].seconds_per_byte
            for name, (start, stop) in range_by_source.items()
        ),
        default=0.0,
    )


def greedy_shard_assignment(shards: int, shard_bytes: int, sources: Mapping[str, Source]) -> ShardPlan:
    """Algorithm 2: give each shard in turn to the neighbour with the least estimated load.

        u* = argmin_u (l_u + s * c_u),   then   l_u* += s * c_u*,   from   l_u = a_u  (Eq. 19)

    Ties go to the name that sorts first. The picks before the water-filling level of K s bytes are forced,
    whatever their order, so they are counted by a division and only the last few are made one by one:
    O(U log U) instead of the paper's O(K U), with the same result.
    Args:
        shards: K, >= 0; 0 gives an empty plan.
        shard_bytes: s, >= 1.
        sources: per neighbour, at least one.
    Returns: a plan whose completion counts every shard as full.
    Raises: PlanInfeasible without sources, ConfigError for a number out of range.
    """
    _check_counts(shards, shard_bytes)
    _check_sources(sources)
    count_by_source = _forced_picks(shards, shard_bytes, sources)
    heap = [
        (_load_s(source, count_by_source[name] + 1, shard_bytes), name) for name, source in sources.items()
    ]
    heapq.heapify(heap)
    for _ in range(shards - sum(count_by_source.values())):
        _, name = heap[0]
        count_by_source[name] += 1
        heapq.heapreplace(heap, (_load_s(sources[name], count_by_source[name] + 1, shard_bytes), name))
    return _plan(count_by_source, shard_bytes, sources)


def shard_assignment_with_binary_search(
    state_bytes: int,
    min_layer_bytes: int,
    max_layer_bytes: int,
    sources: Mapping[str, Source],
    *,
    max_shards: int = MAX_SHARDS,
) -> ShardPlan:
    """Algorithm 1: the shard size by binary search, the assignment for each size by Algorithm 2.

        s = floor((s_l + s_h) / 2);   better: s_h = s - 1;   not better: s_l = s + 1;   while s_l <= s_h

    Departure: the search starts at s_l = max(min_layer_bytes, ceil(state_bytes / max_shards)), because the
    smallest layer may be a bias of four bytes, and a shard costs a hash and a message. Completion
    counts the last shard with the bytes that it really has.
    Args:
        state_bytes: |w|, parameters and optimizer state together; 0 gives an empty plan.
        min_layer_bytes, max_layer_bytes: first s_l and s_h, 1 <= min <= max.
        sources: per neighbour, at least one.
        max_shards: most shards to cut the state into, >= 1.
    Raises: PlanInfeasible without sources, ConfigError for a number out of range.
    """
    _check_sizes(state_bytes, min_layer_bytes, max_layer_bytes)
    _check_sources(sources)
    if max_shards < 1:
        raise ConfigError(f"max_shards: {max_shards} (expected >= 1)")
    low = max(min_layer_bytes, -(-state_bytes // max_shards))
    high = max(max_layer_bytes, low)
    best: ShardPlan | None = None
    while low <= high:
        shard_bytes = (low + high) // 2
        plan = _greedy_of_state(state_bytes, shard_bytes, sources)
        if best is None or plan.completion_s < best.completion_s:
            best = plan
            high = shard_bytes - 1
        else:
            low = shard_bytes + 1
    assert best is not None, "low <= high held at the start"
    return best


def exact_assignment(shards: int, shard_bytes: int, sources: Mapping[str, Source]) -> ShardPlan:
    """An optimum of P3 (Eq. 14-18), found without Algorithm 2, to compare it with.

    The optimum is some l_u(k), and the least one by which all sources together can have sent K shards:

        theta = min { l_u(k) : sum_v max { j : l_v(j) <= l_u(k) } >= K }

    For each u, k is bisected: O(U^2 log K). Arguments and errors as for `greedy_shard_assignment`.
    """
    _check_counts(shards, shard_bytes)
    _check_sources(sources)
    if shards == 0:
        return ShardPlan(shard_bytes, {}, 0.0)
    theta_s = min(_least_theta_s(name, shards, shard_bytes, sources) for name in sorted(sources))
    count_by_source = {name: _shards_by(theta_s, sources[name], shard_bytes) for name in sorted(sources)}
    surplus = sum(count_by_source.values()) - shards
    for name in count_by_source:  # Several may end at theta together, of which fewer are needed.
        if surplus > 0 and count_by_source[name] > 0:
            count_by_source[name] -= 1
            surplus -= 1
    assert surplus == 0, "at most one shard per source ends at theta exactly"
    return _plan(count_by_source, shard_bytes, sources)


def water_filling_bound(state_bytes: int, sources: Mapping[str, Source]) -> float:
    """No plan can deliver `state_bytes` in fewer seconds than this.

    The least theta with sum_u max(0, theta - a_u) / c_u >= state_bytes: shards of no size at all, and every
    neighbour that could start before the end sends until the end. 0 bytes give 0.
    Raises: PlanInfeasible without sources, ConfigError for a number out of range.
    """
    _check_sources(sources)
    if state_bytes < 0:
        raise ConfigError(f"state_bytes: {state_bytes} (expected >= 0)")
    if state_bytes == 0:
        return 0.0
    bytes_per_s, head_start_bytes = 0.0, 0.0
    theta_s = math.inf
    for ready_s, seconds_per_byte in sorted(sources.values()):
        if theta_s <= ready_s:
            break  # It could only start when the others are done, and so could all after it.
        bytes_per_s += 1.0 / seconds_per_byte
        head_start_bytes += ready_s / seconds_per_byte
        theta_s = (state_bytes + head_start_bytes) / bytes_per_s
    return theta_s


def single(
    state_bytes: int, min_layer_bytes: int, max_layer_bytes: int, sources: Mapping[str, Source]
) -> ShardPlan:
    """Everything from the one neighbour that would deliver it first, as EDL+ does (Sec. II-B, Fig. 1b)."""
    _check_sizes(state_bytes, min_layer_bytes, max_layer_bytes)
    _check_sources(sources)
    if state_bytes == 0:
        return ShardPlan(1, {}, 0.0)
    fastest = min(sources, key=lambda name: (_load_s(sources[name], 1, state_bytes), name))
    return _plan({fastest: 1}, state_bytes, sources)


def even(
    state_bytes: int, min_layer_bytes: int, max_layer_bytes: int, sources: Mapping[str, Source]
) -> ShardPlan:
    """One shard of equal size from every neighbour: the upper bound of the paper's Fig. 16."""
    _check_sizes(state_bytes, min_layer_bytes, max_layer_bytes)
    _check_sources(sources)
    shard_bytes = max(1, -(-state_bytes // len(sources)))
    used = sorted(sources)[: _shards_of(state_bytes, shard_bytes)]  # Fewer bytes than neighbours: not all.
    return _plan_of_state(dict.fromkeys(used, 1), state_bytes, shard_bytes, sources)


def greedy(
    state_bytes: int, min_layer_bytes: int, max_layer_bytes: int, sources: Mapping[str, Source]
) -> ShardPlan:
    """Algorithm 2 alone, at `DEFAULT_SHARD_BYTES` or the layer size nearest to it."""
    _check_sizes(state_bytes, min_layer_bytes, max_layer_bytes)
    _check_sources(sources)
    shard_bytes = min(max(DEFAULT_SHARD_BYTES, min_layer_bytes), max_layer_bytes)
    return _greedy_of_state(state_bytes, shard_bytes, sources)


def optimal(
    state_bytes: int, min_layer_bytes: int, max_layer_bytes: int, sources: Mapping[str, Source]
) -> ShardPlan:
    """The lower bound of the paper's Fig. 16, with shards as small as we make them."""
    _check_sizes(state_bytes, min_layer_bytes, max_layer_bytes)
    _check_sources(sources)
    shard_bytes = max(1, -(-state_bytes // MAX_SHARDS))
    plan = exact_assignment(_shards_of(state_bytes, shard_bytes), shard_bytes, sources)
    return _plan_of_state(plan.shards_by_source, state_bytes, shard_bytes, sources)


STRATEGIES: dict[str, Strategy] = {
    "single": single,
    "even": even,
    "greedy": greedy,
    "optimal": optimal,
    "adaptive": shard_assignment_with_binary_search,
}
"""Interchangeable ways to plan a scale-out; "adaptive" is the paper's Algorithms 1 and 2 together."""


def _load_s(source: Source, count: int, shard_bytes: int) -> float:
    """l_u after `count` shards. One expression for all planners, so that equal loads compare equal."""
    return source.ready_s + count * (shard_bytes * source.seconds_per_byte)


def _shards_of(state_bytes: int, shard_bytes: int) -> int:
    return -(-state_bytes // shard_bytes)


def _forced_picks(shards: int, shard_bytes: int, sources: Mapping[str, Source]) -> dict[str, int]:
    """Shards per source that Algorithm 2 gives out before any that ends at the water-filling level.

    By that level the sources together can have sent at most K whole shards, so whatever ends earlier is
    among the K earliest. One less per source leaves room for rounding.
    """
    level_s = water_filling_bound(shards * shard_bytes, sources)
    return {
        name: max(0, math.floor((level_s - source.ready_s) / (shard_bytes * source.seconds_per_byte)) - 1)
        for name, source in sources.items()
    }


def _shards_by(theta_s: float, source: Source, shard_bytes: int) -> int:
    """Most shards that `source` can have sent by `theta_s`, exact with respect to `_load_s`."""
    count = max(0, math.floor((theta_s - source.ready_s) / (shard_bytes * source.seconds_per_byte)))
    while _load_s(source, count + 1, shard_bytes) <= theta_s:
        count += 1
    while count > 0 and _load_s(source, count, shard_bytes) > theta_s:
        count -= 1
    return count


def _least_theta_s(name: str, shards: int, shard_bytes: int, sources: Mapping[str, Source]) -> float:
    """The first end of a shard from `name` by which all sources together can have sent `shards`."""
    low, high = 1, shards
    while low < high:
        count = (low + high) // 2
        theta_s = _load_s(sources[name], count, shard_bytes)
        if sum(_shards_by(theta_s, source, shard_bytes) for source in sources.values()) >= shards:
            high = count
        else:
            low = count + 1
    return _load_s(sources[name], low, shard_bytes)


def _plan(count_by_source: Mapping[str, int], shard_bytes: int, sources: Mapping[str, Source]) -> ShardPlan:
    """A plan of full shards, sources in the order in which they end."""
    end_by_source = {
        name: _load_s(sources[name], count, shard_bytes)
        for name, count in count_by_source.items()
        if count > 0
    }
    ordered = sorted(end_by_source, key=lambda name: (end_by_source[name], name))
    shards_by_source = {name: count_by_source[name] for name in ordered}
    return ShardPlan(shard_bytes, shards_by_source, max(end_by_source.values(), default=0.0))


def _plan_of_state(
    count_by_source: Mapping[str, int], state_bytes: int, shard_bytes: int, sources: Mapping[str, Source]
) -> ShardPlan:
    """As `_plan`, with the completion of the bytes that there are: the last shard may be short."""
    full = _plan(count_by_source, shard_bytes, sources)
    end_s = completion_s(ranges(full, state_bytes), sources)
    return ShardPlan(shard_bytes, full.shards_by_source, end_s)


def _greedy_of_state(state_bytes: int, shard_bytes: int, sources: Mapping[str, Source]) -> ShardPlan:
    plan = greedy_shard_assignment(_shards_of(state_bytes, shard_bytes), shard_bytes, sources)
    return _plan_of_state(plan.shards_by_source, state_bytes, shard_bytes, sources)


def _check_counts(shards: int, shard_bytes: int) -> None:
    if shards < 0:
        raise ConfigError(f"shards: {shards} (expected >= 0)")
    if shard_bytes < 1:
        raise ConfigError(f"shard_bytes: {shard_bytes} (expected >= 1)")


def _check_sizes(state_bytes: int, min_layer_bytes: int, max_layer_bytes: int) -> None:
    if state_bytes < 0:
        raise ConfigError(f"state_bytes: {state_bytes} (expected >= 0)")
    if min_layer_bytes < 1:
        raise ConfigError(f"min_layer_bytes: {min_layer_bytes} (expected >= 1)")
    if max_layer_bytes < min_layer_bytes:
        raise ConfigError(
            f"max_layer_bytes: {max_layer_bytes} (expected >= min_layer_bytes, {min_layer_bytes})"
        )


def _check_sources(sources: Mapping[str, Source]) -> None:
    if not sources:
        raise PlanInfeasible("sources: none (expected at least one neighbour that can send the state)")
    for name, source in sources.items():
        if not (math.isfinite(source.ready_s) and source.ready_s >= 0):
            raise ConfigError(f"sources[{name!r}].ready_s: {source.ready_s} (expected finite and >= 0)")
        if not (math.isfinite(source.seconds_per_byte) and source.seconds_per_byte > 0):
            raise ConfigError(
                f"sources[{name!r}].seconds_per_byte: {source.seconds_per_byte} (expected finite and > 0)"
            )
