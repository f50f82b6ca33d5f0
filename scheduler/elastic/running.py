"""Which pipelines the members of a cluster run: a function of what all of them know, so no message carries them.

Members, in their order, come with the view; what layers cost and how fast members are, with the steps (ElasWave,
Sec. 4, measures both). Where every member has all of the training state, to go over to other pipelines moves no
bytes: of all that could be done after a loss, or a join, what takes the shortest step is best (Chameleon, Eq. 8,
without what a transition costs). Where members keep parts of it, it is chosen in the same way, by steps that begin
with sending parameters to whoever computes with them and does not keep them.

    stay      as before, if all its workers are there
    reroute   as before; what went through those who are gone goes through their peers (Chameleon, Sec. IV-A)
    layout    other pipelines (dynamic parallelism: Chameleon, Sec. IV-A)

Members need not be machines alike, and each decides by itself: so times are whole microseconds, whose sums no machine
rounds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from ...protocols.errors import ConfigError, PlanInfeasible
from ...protocols.messages import FASTEST
from .cluster import Cluster, Worker
from .estimator import ProfiledCosts, time_program
from .keeping import Move, PartsKept, Table
from .layouts import best_layout
from .plan import Pipeline, Plan, cuts_of, even, of_pipelines, without
from .profile import Layer, Profile
from .program import Op, Program, Schedule, visits_of
from .splits import PipelineTimes
from .traffic import NO_TRAFFIC, Traffic, order_by_links

AHEAD = 1, 0
"""Forwards that a member may begin beyond those of 1F1B, whose activations it keeps: what takes the shorter step.

Without, neighbours wait for each other in every micro-batch, there and back: in four stages with 16 micro-batches a
hop of a thirtieth of a forward and backward makes a step 5 % longer; with one, 1 % to 2 %. So of equals it is one.
"""
WORTH = 0.95  # Of the step's time: others are taken on while all are there only if they take less than this.
MOST_SAID, MOST_PIPELINES = 200, 10_000  # Characters of a layout that is asked for.
ROUNDED = 1 + 1e-9  # Numbers that are added in another order may differ by less.
SPEEDS = 0.05, 20.0  # No member is taken for slower, or faster, than this.


@dataclass(frozen=True, slots=True)
class Facts:
    """What a plan is made of.

    Attributes:
        costs_us: By layer, forward and backward of one micro-batch at speed 1, whole numbers from 1 on.
        micro_batches: Of a step.
        least_stages: No pipeline is shorter, if there are as many members.
        wish: Lengths of pipelines that somebody asks for, e.g. "2+2" (`lengths_of`); "": none.
        speeds: By member; 1 of those that are not named.
        traffic: What crosses links, and these.
        parts: Who keeps what of the state; None: all members keep all.
    """

    costs_us: tuple[tuple[int, int], ...]
    micro_batches: int
    least_stages: int = 1
    wish: str = ""
    speeds: Mapping[str, float] = field(default_factory=dict)
    traffic: Traffic = NO_TRAFFIC
    parts: PartsKept | None = None


@dataclass(frozen=True)
class _Costs(ProfiledCosts):
    """In microseconds, with what tensors take between members: the same few, asked for thousands of times."""

    traffic: Traffic = NO_TRAFFIC
    _known: dict[tuple[object, ...], float] = field(default_factory=dict, compare=False, repr=False)

    def compute_s(self, worker: str, op: Op, start: int, stop: int, samples: int) -> float:
        key = worker, op, start, stop, samples
        took_us = self._known.get(key)
        if took_us is None:
            took_us = self._known[key] = super().compute_s(worker, op, start, stop, samples)
        return took_us

    def transfer_s(self, source: str, to: str, boundary: int, samples: int) -> float:
        key = source, to, boundary
        took_us = self._known.get(key)
        if took_us is None:
            took_us = self._known[key] = float(self.traffic.transfer_us(source, to, boundary))
        return took_us


@dataclass(frozen=True, slots=True)
class Laid:
    """Pipelines, how many micro-batches each runs, and those of their workers that are gone."""

    pipelines: tuple[Pipeline, ...]
    counts: tuple[int, ...]
    lost: frozenset[str] = frozenset()

    @property
    def workers(self) -> frozenset[str]:
        """All of them, gone or not."""
        return frozenset(worker for each in self.pipelines for worker in each.workers)

    def to_plain(self) -> list[Any]:
        """In plain data, equal on all members."""
        pipelines = [[[*each.workers], [*each.cuts]] for each in self.pipelines]
        return [pipelines, [*self.counts], sorted(self.lost)]

    @classmethod
    def from_plain(cls, plain: Any) -> Laid:
        """What `to_plain` gave."""
        pipelines, counts, lost = plain
        return cls(
            tuple(Pipeline(tuple(workers), tuple(cuts)) for workers, cuts in pipelines),
            tuple(counts),
            frozenset(lost),
        )

    def __str__(self) -> str:
        return " | ".join(
            " > ".join(
                f"{stage.worker} {stage.start}"
                + f"-{stage.stop - 1}" * (stage.stop - stage.start > 1)
                + " (gone)" * (stage.worker in self.lost)
                for stage in pipeline.stages
            )
            + f" x{count}"
            for pipeline, count in zip(self.pipelines, self.counts, strict=True)
        )


@dataclass(frozen=True, slots=True)
class Running:
    """Pipelines that run. `why`: see the module.

    `predicted_us`: of a step, until all sums are everywhere; `computing_us`: of that, until the last computation is
    over, if all had their parameters when the step began; `parameters_us`: what waiting for these adds. `moving_us`:
    by how much the first of these steps is longer, as other members are to keep parts of the state.
    `others`: what else could be done, by its `why`, and what it would take.
    """

    laid: Laid
    why: str
    predicted_us: float
    program: Program
    others: tuple[tuple[str, float], ...] = ()
    computing_us: float = 0.0
    parameters_us: float = 0.0
    moving_us: float = 0.0

    @property
    def plan(self) -> Plan:
        """Its routes."""
        return self.program.plan


class _Timed(NamedTuple):
    """What could run; see `Running`. Instructions are written for what does."""

    laid: Laid
    why: str
    predicted_us: float
    schedule: Schedule
    parameters_us: float

    def running(self, others: tuple[tuple[str, float], ...]) -> Running:
        program = self.schedule.program()
        return Running(
            self.laid, self.why, self.predicted_us, program, others,
            computing_us=program.computed_s, parameters_us=self.parameters_us,
        )  # fmt: skip


def lengths_of(wish: str) -> tuple[int, ...]:
    """Stages of each pipeline: "4+2+1", or "2x3" for two of three. Raises: ConfigError for what says neither."""
    try:
        if not isinstance(wish, str) or len(wish) > MOST_SAID:
            raise ValueError
        if "x" in wish:
            count, length = map(int, wish.split("x"))
            lengths = (length,) * min(count, MOST_PIPELINES)
        else:
            lengths = tuple(map(int, wish.split("+")))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ConfigError(
            f"layout: {wish!r} (expected stages of each pipeline, as '2+2' or '4+2+1', or '2x3' for two of three)"
        )
    return lengths


def check_wish(wish: str, layers: int, micro_batches: int, members: int | None = None) -> None:
    """Raises: ConfigError for pipelines that cannot run; without `members`, however many there are."""
    if wish == FASTEST:
        return
    lengths = lengths_of(wish)
    if max(lengths) > layers:
        raise ConfigError(
            f"layout: {wish!r} has a pipeline of {max(lengths)} stages (expected at most {layers}, as the model has "
            f"{layers} layers)"
        )
    if len(lengths) > micro_batches:
        raise ConfigError(
            f"layout: {wish!r} has {len(lengths)} pipelines (expected at most {micro_batches}, the micro-batches of "
            "a step)"
        )
    if members is not None and sum(lengths) > members:
        raise ConfigError(f"layout: {wish!r} takes {sum(lengths)} members (there are {members})")


def choose(members: Sequence[str], facts: Facts, before: Laid | None = None) -> Running:
    """What takes the shortest step. What runs `before` stays, if nobody is missing and nothing is much better.

    Raises: PlanInfeasible if there is nothing that could run.
    """
    found: list[_Timed] = []
    reasons: list[str] = []
    costs = _costs_of(members, facts)
    for propose in (_stay, _reroute, _layouts):
        try:
            found += propose(members, facts, costs, before)
        except PlanInfeasible as error:
            reasons.append(str(error))
    if not found:
        raise PlanInfeasible("; ".join(dict.fromkeys(reasons)))
    if any(each.why == "layout" and suits(each.laid, facts.wish) for each in found):
        # Also if it is slower: it was asked for.
        found = [each for each in found if suits(each.laid, facts.wish)]
    best = min(found, key=lambda each: each.predicted_us)
    stays = [each for each in found if each.why == "stay" and suits(each.laid, facts.wish)]
    if stays and best.predicted_us > WORTH * stays[0].predicted_us and not _newcomers(members, stays[0]):
        best = stays[0]
    others: dict[str, float] = {}
    for each in found:
        if each.why != best.why:
            others[each.why] = min(each.predicted_us, others.get(each.why, math.inf))
    running = best.running(tuple(sorted(others.items())))
    return replace(running, moving_us=_moving_us(running, members, facts, costs))


def _newcomers(members: Sequence[str], found: _Timed) -> bool:
    """Is somebody there who was not when these pipelines were laid out?"""
    return not {*members} <= found.laid.workers


def suits(laid: Laid, wish: str) -> bool:
    """Are these the pipelines that were asked for, if any were?"""
    return not wish or tuple(len(each.workers) for each in laid.pipelines) == lengths_of(wish)


def _stay(members: Sequence[str], facts: Facts, costs: _Costs, before: Laid | None) -> Iterator[_Timed]:
    if before is not None and not before.lost and before.workers <= {*members}:
        yield _timed("stay", before, members, facts, costs)


def _reroute(members: Sequence[str], facts: Facts, costs: _Costs, before: Laid | None) -> Iterator[_Timed]:
    if before is None or not suits(before, facts.wish):
        return
    lost = before.workers.difference(members)
    if lost:
        yield _timed("reroute", Laid(before.pipelines, before.counts, lost), members, facts, costs)


def _layouts(members: Sequence[str], facts: Facts, costs: _Costs, before: Laid | None) -> Iterator[_Timed]:
    """Those that were asked for, else the best; without what cannot take the shortest step: most, as a rule."""
    laid = list(dict.fromkeys(_laid_out(members, facts)))
    least_us = [_least_us(each, facts, costs) for each in laid]
    timed: dict[int, _Timed] = {}
    best_us = math.inf
    for number in sorted(range(len(laid)), key=least_us.__getitem__):
        if least_us[number] > ROUNDED * best_us:
            break
        timed[number] = _timed("layout", laid[number], members, facts, costs)
        best_us = min(best_us, timed[number].predicted_us)
    yield from (timed[number] for number in sorted(timed))


def _laid_out(members: Sequence[str], facts: Facts) -> Iterator[Laid]:
    """With members in their order, the fastest first, or by their links."""
    shapes = _wished(members, facts) or _best(members, facts)
    orders = [tuple(members)]
    if facts.speeds:
        orders.append(tuple(sorted(members, key=lambda name: (-_speed(facts, name), members.index(name)))))
    for sizes, counts in shapes:
        lengths = [len(each) for each in sizes]
        near = [order_by_links(order, lengths, facts.traffic) for order in orders]
        for order in dict.fromkeys([*orders, *near]):
            pipelines, at = [], 0
            for each in sizes:
                pipelines.append(Pipeline(order[at : at + len(each)], cuts_of(each)))
                at += len(each)
            shares = {counts, _by_speed(pipelines, facts)} if facts.speeds else {counts}
            for share in sorted(shares):
                yield Laid(tuple(pipelines), share)


def _least_us(laid: Laid, facts: Facts, costs: _Costs) -> float:
    """No step of these pipelines, all of whose workers are there, takes less.

    A worker begins when the first forward has come, and has all of its micro-batches to compute; or, as it begins no
    more forwards than so many before one has come back, they go down the pipeline and back so many times. What the
    next worker gives back last has to go back through it.
    """
    over_us = [0.0] * len(facts.costs_us)
    for pipeline, count in zip(laid.pipelines, laid.counts, strict=True):
        comes_us, chain = 0.0, []
        stages = pipeline.stages if count else ()
        for (name, start, stop), after in zip(stages, (*stages[1:], None), strict=False):
            forward_us, backward_us = (
                costs.compute_s(name, op, start, stop, 1) for op in (Op.FORWARD, Op.BACKWARD)
            )
            there_us = costs.transfer_s(name, after.worker, stop, 1) if after else 0.0
            back_us = costs.transfer_s(after.worker, name, stop, 1) if after else 0.0
            chain.append(
                (
                    range(start, stop),
                    comes_us,
                    forward_us + backward_us,
                    there_us + back_us,
                    back_us + backward_us,
                )
            )
            comes_us += forward_us + there_us
        ends_us = round_us = 0.0
        for left, (held, comes_us, own_us, hop_us, back_us) in enumerate(reversed(chain), 1):
            round_us += own_us + hop_us
            rounds = 1 + (count - 1) // (left + max(AHEAD))
            ends_us = max(comes_us + max(count * own_us, rounds * round_us), ends_us + back_us)
            for layer in held:
                over_us[layer] = max(over_us[layer], ends_us)
    # With keepers sums of unlike groups end in an order of their own.
    summed_us = facts.traffic.summed_us(over_us) if facts.parts is None else 0
    return max(*over_us, float(summed_us))


def _wished(members: Sequence[str], facts: Facts) -> list[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
    """The shape that somebody asks for, if there are members enough, and layers."""
    if not facts.wish:
        return []
    try:
        check_wish(facts.wish, len(facts.costs_us), facts.micro_batches, len(members))
    except ConfigError:
        return []  # As long as that is so.
    lengths = lengths_of(facts.wish)
    return [([_cut(facts, each) for each in lengths], even(facts.micro_batches, len(lengths)))]


def _best(members: Sequence[str], facts: Facts) -> list[tuple[list[tuple[int, ...]], tuple[int, ...]]]:
    """By computing; where links take time, of pipelines that are as short as they may be, too.

    And where members keep parts, of those that are as long: the fewer compute a layer, the fewer lack its parameters.
    """
    layers = len(facts.costs_us)
    most = min(len(members), layers)
    least = min(facts.least_stages, most)
    lengths = [range(least, most + 1)]
    if facts.traffic.out_bytes:
        lengths += [range(least, least + 1)] + [range(most, most + 1)] * (facts.parts is not None)
    times, shapes = _times(facts.costs_us), []
    for allowed in dict.fromkeys(lengths):
        layout = best_layout(times, len(members), range(1, len(members) + 1), allowed, facts.micro_batches)
        sizes = [group.sizes for group in layout.groups for _ in range(group.count)]
        counts = tuple(group.micro_batches for group in layout.groups for _ in range(group.count))
        shapes.append((sizes, counts))
    return [each for number, each in enumerate(shapes) if each not in shapes[:number]]


def _cut(facts: Facts, stages: int) -> tuple[int, ...]:
    """Layers of each of so many stages, by what they cost."""
    return _times(facts.costs_us).split(stages, facts.micro_batches)


def _by_speed(pipelines: Sequence[Pipeline], facts: Facts) -> tuple[int, ...]:
    """Micro-batches of each pipeline, so that all end at the same time: one by one to whoever would end first."""
    slowest = [
        max(
            sum(f + b for f, b in facts.costs_us[stage.start : stage.stop]) / _speed(facts, stage.worker)
            for stage in each.stages
        )
        for each in pipelines
    ]
    counts = [0] * len(pipelines)
    for _ in range(facts.micro_batches):
        counts[min(range(len(counts)), key=lambda i: ((counts[i] + 1) * slowest[i], i))] += 1
    return tuple(counts)


def _speed(facts: Facts, name: str) -> float:
    least, most = SPEEDS
    return min(max(facts.speeds.get(name, 1.0), least), most)


@functools.lru_cache(maxsize=4)
def _times(costs_us: tuple[tuple[int, int], ...]) -> PipelineTimes:
    """Warm tables make the next search a matter of milliseconds."""
    layers = tuple(Layer({1: (float(f), float(b))}, 0.0, 0.0, 0.0, 0.0, 0.0) for f, b in costs_us)
    return PipelineTimes(Profile("running", layers))


def _timed(why: str, laid: Laid, members: Sequence[str], facts: Facts, costs: _Costs) -> _Timed:
    pipelines, counts = laid.pipelines, laid.counts
    if sum(counts) != facts.micro_batches:
        raise PlanInfeasible(f"micro-batches: {sum(counts)} laid out (expected {facts.micro_batches})")
    plan = (
        without(pipelines, counts, 1, laid.lost, resize=False)
        if laid.lost
        else of_pipelines(pipelines, counts, 1)
    )
    table, begins_us = Table(), dict[str, int]()
    if facts.parts is not None:
        table, moved = facts.parts.settled(plan.placement, members, facts.traffic.rate_mbit)
        begins_us, _ = _begins_us(plan, moved, costs, facts)
    plan = replace(plan, sync=())
    visits = visits_of(plan)
    schedules = [Schedule(plan, costs, more_in_flight=ahead, visits=visits) for ahead in AHEAD]
    ends_us = [
        time_program(each.program(), costs, begins_us).ends_s if begins_us else each.ends_s
        for each in schedules
    ]
    summed_us = [_summed_us(plan, each, facts, table) for each in ends_us]
    best = summed_us.index(min(summed_us))
    waited_us = max(ends_us[best].values(), default=0.0) - max(schedules[best].ends_s.values(), default=0.0)
    return _Timed(laid, why, summed_us[best], schedules[best], waited_us)


def _costs_of(members: Sequence[str], facts: Facts) -> _Costs:
    workers = {name: Worker(_speed(facts, name)) for name in members}
    cluster = Cluster(workers, latency_s=0.0)
    return _Costs(_times(facts.costs_us).profile, cluster, traffic=facts.traffic)


def _moving_us(running: Running, members: Sequence[str], facts: Facts, costs: _Costs) -> float:
    """See `Running`."""
    parts, plan, rate = facts.parts, running.plan, facts.traffic.rate_mbit
    if parts is None:
        return 0.0
    table, usual = parts.settled(plan.placement, members, rate)
    moved = parts.first(plan.placement, members, rate)
    if moved == usual:
        return 0.0
    begins_us, last_us = _begins_us(plan, moved, costs, facts)
    first_us = _summed_us(plan, time_program(running.program, costs, begins_us).ends_s, facts, table)
    return max(first_us, last_us, running.predicted_us) - running.predicted_us


def _begins_us(plan: Plan, moved: Sequence[Move], costs: _Costs, facts: Facts) -> tuple[dict[str, int], int]:
    """When members can begin, as they must wait for parameters; and when all is there that they only keep.

    A layer is computed as soon as its own are there: so who waits for the last ones has computed those before.
    """
    assert facts.parts is not None
    begins_us, last_us = dict[str, int](), 0
    for (name, group), came_us in facts.traffic.came_us(moved, facts.parts.sizes, facts.parts.known).items():
        held = plan.placement.get(name, range(0))
        computed = [layer for layer in facts.parts.users[group] if layer in held]
        if not computed:
            last_us = max(last_us, came_us)
            continue
        first = min(computed)
        computed_us = round(costs.compute_s(name, Op.FORWARD, held.start, first, 1))
        begins_us[name] = max(begins_us.get(name, 0), came_us - computed_us)
    return begins_us, last_us


def _summed_us(plan: Plan, ends_us: Mapping[str, float], facts: Facts, table: Table) -> float:
    """When all is computed, and all sums are where they are due. Members end with a backward of all their layers."""
    over_us = [0.0] * plan.layers
    for worker, held in plan.placement.items():
        for layer in held:
            over_us[layer] = max(over_us[layer], ends_us[worker])
    return max([*ends_us.values(), float(facts.traffic.summed_us(over_us, table))])
