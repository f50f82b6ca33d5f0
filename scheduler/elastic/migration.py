"""Layers that move to the next stage while training goes on (ElasWave, Sec. 6.2, Fig. 9).

Until the parameters have come, the stage that gives layers away still runs them, for the first k micro-batches:
its *shadow*. That is a plan in which both hold the layers and the early micro-batches go the old way. The
*payback* gradient, which the paper ships and merges by a mechanism of its own, is then the shadow's share of the
sum over the holders of these layers, and the plan's `sync` has it already.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from ...protocols.errors import PlanInfeasible
from .plan import Hop, Plan, Route, with_sync


class Migration(NamedTuple):
    """`served`: k, the micro-batches of the shadow; 0 where the parameters are there before the first.

    `blocked_s`: how long training would stand still with a blocking copy.
    `added_s`: how much later the step ends without blocking, which is what payback or parameters take beyond
    its last micro-batch.
    """

    served: int
    payback_bytes: float
    blocked_s: float
    added_s: float


def of(
    arrival_s: float,
    mini_step_s: float,
    micro_batches: int,
    gradient_bytes: float,
    payback_s: float,
    first_s: float = 0.0,
) -> Migration:
    """Blocking and not (Sec. 6.2), for layers whose parameters start to move when a step starts.

    Micro-batch j = 0, 1... gets to the target at first_s + j mini_step_s, and has to take the shadow if that
    is before `arrival_s`. The payback goes when the last of these is done and the link is free. The paper says
    mb[0..k] and gives no k.
    Args:
        arrival_s: when the target has the parameters, from the start of the step.
        mini_step_s: from one micro-batch to the next (forward and backward of the slowest stage), > 0.
        micro_batches: of the pipeline in this step.
        gradient_bytes: of the layers that move, sent once if k > 0.
        payback_s: what these take over the link.
    """
    if not mini_step_s > 0 or micro_batches < 1:
        raise PlanInfeasible(
            f"migration: {micro_batches} micro-batches of {mini_step_s:g} s (expected at least one, > 0 s)"
        )
    early = max((arrival_s - first_s) / mini_step_s, 0.0)
    served = micro_batches if early >= micro_batches else math.ceil(early)
    end_s = first_s + micro_batches * mini_step_s
    if not served:
        return Migration(0, 0.0, arrival_s, 0.0)
    ready_s = max(arrival_s, first_s + served * mini_step_s)
    return Migration(served, gradient_bytes, arrival_s, max(ready_s + payback_s - end_s, 0.0))


def transition(plan: Plan, moved: range, source: str, target: str, served: int) -> Plan:
    """The plan of the step in which layers `moved` go from `source` to `target`.

    Both hold them. Of the micro-batches that go from one of the two to the other, those of the first `served`
    turns keep their route, through the shadow; in the others `target` runs the layers. A micro-batch that
    goes elsewhere after `source` keeps its route, too. Several moves, as of all pipelines, are one after
    the other.
    Args:
        plan: where `source` holds `moved` and `target` does not.
        moved: at the edge of the layers of `source`, next to those of `target`.
        served: k, as of `of`.
    Raises: PlanInfeasible if the two do not adjoin there, or the outcome is no valid plan.
    """
    placement = dict(plan.placement)
    placement[target] = _grown(plan, moved, source, target)
    late = [_late_route(each.route, moved, source, target) for each in plan.micro_batches]
    turns = sorted(
        {each.turn for each, new in zip(plan.micro_batches, late, strict=True) if new != each.route}
    )
    early = set(turns[:served])
    micro_batches = tuple(
        each if each.turn in early else type(each)(each.turn, each.samples, new)
        for each, new in zip(plan.micro_batches, late, strict=True)
    )
    return with_sync(Plan(plan.layers, placement, micro_batches), plan.samples)


def _grown(plan: Plan, moved: range, source: str, target: str) -> range:
    """What `target` holds with `moved`."""
    old, new = plan.placement.get(source, range(0)), plan.placement.get(target, range(0))
    if moved and old and new and moved.start >= old.start and moved.stop <= old.stop:
        if moved.stop == old.stop == new.start:
            return range(moved.start, new.stop)
        if moved.start == old.start == new.stop:
            return range(new.start, moved.stop)
    raise PlanInfeasible(
        f"layers [{moved.start}, {moved.stop}): cannot go from {source}, which holds [{old.start}, {old.stop}),"
        f" to {target}, which holds [{new.start}, {new.stop}) (expected where the two adjoin)"
    )


def _late_route(route: Route, moved: range, source: str, target: str) -> Route:
    """`route` with `moved` on the target; unchanged if it does not lead from one of the two to the other."""
    hops = list(route)
    for i in range(len(hops) - 1):
        first, second = hops[i], hops[i + 1]
        if (first.worker, second.worker) == (source, target) and first.stop == moved.stop:
            cut = moved.start
        elif (first.worker, second.worker) == (target, source) and second.start == moved.start:
            cut = moved.stop
        else:
            continue
        if first.start <= cut <= second.stop:
            hops[i : i + 2] = [Hop(first.worker, first.start, cut), Hop(second.worker, cut, second.stop)]
            return tuple(hop for hop in hops if hop.start < hop.stop)
    return route
