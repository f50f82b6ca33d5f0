"""A plan: who holds which layers, which way each micro-batch takes through them, who sums which gradients.

Data parallelism is the plan whose routes have one hop. Rerouting (ReCycle, Chameleon), micro-batches of
another size (ElasWave), asymmetric pipelines (Oobleck, Chameleon) and the shadow of a layer that moves
(ElasWave, Sec. 6.2) are other routes, and nothing else. What must move between two plans is the difference of
their placements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import networkx as nx

from ...protocols.errors import PlanInfeasible
from .sync_rounds import Bucket, holders_by_layer, rounds


class Hop(NamedTuple):
    """A share of a route: `worker` runs layers [start, stop)."""

    worker: str
    start: int
    stop: int


Route = tuple[Hop, ...]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """Samples that take one route.

    Where micro-batches of one `turn` meet on a worker, over the same layers, they run as one: that is how one
    of another size is made of parts (ElasWave, Sec. 4.1). Workers take turns in their order.
    """

    turn: int
    samples: int
    route: Route


@dataclass(frozen=True)
class Plan:
    """What a view says of a training step. Build one with `of_pipelines` or `without`.

    `placement`: the layers that each worker holds; one range, as everybody's stages are.
    `sync`: rounds of buckets; the buckets of one round have no worker in common (`sync_rounds`).
    """

    layers: int
    placement: Mapping[str, range]
    micro_batches: tuple[MicroBatch, ...]
    sync: tuple[tuple[Bucket, ...], ...] = ()

    @property
    def samples(self) -> int:
        """The global batch."""
        return sum(each.samples for each in self.micro_batches)

    @cached_property
    def holders(self) -> tuple[tuple[str, ...], ...]:
        """Per layer, who holds it, sorted: with ZeRO-1, the j-th of D holders has part j of D of its optimizer."""
        found = holders_by_layer(self.placement)
        return tuple(found.get(layer, ()) for layer in range(self.layers))


class Pipeline(NamedTuple):
    """`workers` in the order of their stages; stage s runs layers [cuts[s], cuts[s + 1])."""

    workers: tuple[str, ...]
    cuts: tuple[int, ...]

    @property
    def stages(self) -> tuple[Hop, ...]:
        return tuple(
            Hop(worker, start, stop)
            for worker, start, stop in zip(self.workers, self.cuts, self.cuts[1:], strict=False)
        )


def cuts_of(sizes: Iterable[int]) -> tuple[int, ...]:
    """Layers of each stage: (2, 2, 3) gives (0, 2, 4, 7)."""
    return tuple(accumulate(sizes, initial=0))


def even(total: int, parts: int) -> tuple[int, ...]:
    """`total` in `parts` that differ by one at most, the larger first."""
    size, larger = divmod(total, parts)
    return tuple(size + (index < larger) for index in range(parts))


def of_pipelines(pipelines: Sequence[Pipeline], counts: Sequence[int], samples: int) -> Plan:
    """Pipeline i runs `counts[i]` micro-batches of `samples` each.

    Raises: PlanInfeasible if that is no valid plan.
    """
    placement = {stage.worker: range(stage.start, stage.stop) for each in pipelines for stage in each.stages}
    turns = sorted((j, i) for i, count in enumerate(counts) for j in range(count))
    routes = [each.stages for each in pipelines]
    micro_batches = tuple(MicroBatch(turn, samples, routes[i]) for turn, (_, i) in enumerate(turns))
    layers = max((each.cuts[-1] for each in pipelines), default=0)
    return with_sync(Plan(layers, placement, micro_batches), sum(counts) * samples)


def with_sync(plan: Plan, samples: int) -> Plan:
    """`plan` with rounds for its gradients, checked against the global batch."""
    check(plan, samples)
    return Plan(plan.layers, plan.placement, plan.micro_batches, rounds(plan.placement, plan.layers))


# --- what makes a plan one ---


def check(plan: Plan, samples: int) -> None:
    """Raise PlanInfeasible, naming what is wrong, unless `plan` trains all layers on `samples` samples a step.

    Whether it fits memory is `estimator.check_memory`.
    """
    for layer, holders in enumerate(plan.holders):
        if not holders:
            raise PlanInfeasible(f"layer {layer}: held by nobody (expected at least one worker)")
    for number, each in enumerate(plan.micro_batches):
        _check_route(plan, number, each)
    if plan.samples != samples:
        raise PlanInfeasible(f"samples: {plan.samples} in all micro-batches (expected {samples})")
    _check_order(plan)


def _check_route(plan: Plan, number: int, each: MicroBatch) -> None:
    at = 0
    for hop in each.route:
        if hop.start != at or hop.stop <= hop.start:
            raise PlanInfeasible(
                f"micro-batch {number}: layers [{hop.start}, {hop.stop}) on {hop.worker} follow layer {at - 1}"
                f" (expected to go on with {at})"
            )
        held = plan.placement.get(hop.worker, range(0))
        if hop.start not in held or hop.stop - 1 not in held:
            raise PlanInfeasible(
                f"micro-batch {number}: {hop.worker} runs layers [{hop.start}, {hop.stop})"
                f" (it holds [{held.start}, {held.stop}))"
            )
        at = hop.stop
    if at != plan.layers:
        raise PlanInfeasible(f"micro-batch {number}: ends after {at} layers (expected {plan.layers})")
    if each.samples < 1:
        raise PlanInfeasible(f"micro-batch {number}: {each.samples} samples (expected at least 1)")


def _check_order(plan: Plan) -> None:
    """No two workers may each come before the other: who is late on one way would be early on the other."""
    graph = nx.DiGraph(
        (before.worker, after.worker)
        for route in dict.fromkeys(each.route for each in plan.micro_batches)
        for before, after in pairwise(route)
    )
    if not nx.is_directed_acyclic_graph(graph):
        cycle = [edge[0] for edge in nx.find_cycle(graph)]
        raise PlanInfeasible(f"stage order: {' -> '.join([*cycle, cycle[0]])} is a cycle")


# --- without some workers ---


def without(
    pipelines: Sequence[Pipeline], counts: Sequence[int], samples: int, lost: Collection[str], resize: bool
) -> Plan:
    """The same layout after a loss: what passed through a lost worker passes through peers that hold its layers.

    Args:
        resize: False: whole micro-batches go to the peers in turn (data rerouting: ReCycle; Chameleon,
            Sec. IV-A);
            True: each is cut up among the peers, who add the parts to their own (ElasWave, Sec. 4.1). Where
            its samples cannot be cut evenly, the larger parts go around.
    Raises: PlanInfeasible if nobody is left that holds a layer.
    """
    routes_before = [each.stages for each in pipelines]
    stages = [stage for each in routes_before for stage in each]
    placement = {each.worker: range(each.start, each.stop) for each in stages if each.worker not in lost}
    peers = {(each.start, each.stop): _ways(placement, each) for each in stages if each.worker in lost}
    micro_batches: list[MicroBatch] = []
    handed_on: Counter[tuple[int, int]] = Counter()
    for j, i in sorted((j, i) for i, count in enumerate(counts) for j in range(count)):
        routes = Counter[Route]()
        for _ in range(samples if resize else 1):
            routes[_detour(routes_before[i], lost, peers, handed_on)] += 1 if resize else samples
        turn = j if resize else len(micro_batches)
        micro_batches += [MicroBatch(turn, count, route) for route, count in routes.items()]
    layers = max(each.cuts[-1] for each in pipelines)
    return with_sync(Plan(layers, placement, tuple(micro_batches)), sum(counts) * samples)


def _ways(placement: Mapping[str, range], lost: Hop) -> list[Route]:
    """Ways through the layers of a lost stage: over a peer that holds them all, else over several in a row."""
    covering: list[Route] = [
        (Hop(worker, lost.start, lost.stop),)
        for worker, held in sorted(placement.items())
        if held.start <= lost.start and lost.stop <= held.stop
    ]
    exact = [way for way in covering if placement[way[0].worker] == range(lost.start, lost.stop)]
    if found := exact or covering:
        return found
    way: list[Hop] = []
    at = lost.start
    while at < lost.stop:
        reach, worker = max(
            ((held.stop, worker) for worker, held in placement.items() if at in held), default=(at, "")
        )
        if not worker:
            raise PlanInfeasible(f"layer {at}: nobody is left that holds it")
        way.append(Hop(worker, at, min(reach, lost.stop)))
        at = reach
    return [tuple(way)]


def _detour(
    stages: Route,
    lost: Collection[str],
    peers: Mapping[tuple[int, int], list[Route]],
    handed_on: Counter[tuple[int, int]],
) -> Route:
    route: list[Hop] = []
    for stage in stages:
        if stage.worker not in lost:
            route.append(stage)
            continue
        layers = (stage.start, stage.stop)
        route += peers[layers][handed_on[layers] % len(peers[layers])]
        handed_on[layers] += 1
    return _joined(route)


def _joined(route: Iterable[Hop]) -> Route:
    """Hops on one worker that follow each other as one."""
    joined: list[Hop] = []
    for hop in route:
        if joined and joined[-1].worker == hop.worker:
            hop = Hop(hop.worker, joined.pop().start, hop.stop)
        joined.append(hop)
    return tuple(joined)
