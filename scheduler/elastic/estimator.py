"""How long a step of a plan takes, and how much memory (Chameleon, Sec. IV-C).

The time is that of the compiled program: every instruction begins when its worker has ended the one before
and what it waits for has come (Eq. 11, over the order of execution); the step is as long as its slowest
worker (Eq. 10). The closed forms of the papers are in `pipeline_time`; on the plans that they are for, the
two agree to the bit.

Not modelled: contention of transfers that share a link, and a host's work between instructions.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import networkx as nx

from ...protocols.errors import PlanInfeasible
from .cluster import Cluster, seconds
from .plan import MicroBatch, Plan
from .profile import Profile
from .program import Instruction, Op, Program, Tag, compile_plan
from .sync_rounds import Bucket


@dataclass(frozen=True)
class ProfiledCosts:
    """Costs of a profiled model on a cluster.

    A transfer hides behind no computation. `step_s`: one STEP, wherever.
    """

    profile: Profile
    cluster: Cluster
    step_s: float = 0.0

    def compute_s(self, worker: str, op: Op, start: int, stop: int, samples: int) -> float:
        forward_s, backward_s = self.profile.seconds(start, stop, samples)
        if op is Op.FORWARD:
            took_s = forward_s
        elif op is Op.BACKWARD:
            took_s = backward_s
        else:
            took_s = backward_s / 2  # Of weights, or of inputs: one product each.
        return took_s / self.cluster.workers[worker].speed

    def transfer_s(self, source: str, to: str, boundary: int, samples: int) -> float:
        size_bytes = samples * self.profile.boundary_bytes(boundary)
        return self.cluster.transfer_s(source, to, size_bytes) if size_bytes else 0.0

    def reduce_s(self, bucket: Bucket) -> float:
        """A ring's all-reduce: each holder sends and receives 2 (D - 1) / D of the gradients, at the slowest link."""
        size_bytes = sum(layer.gradient_bytes for layer in self.profile.layers[bucket.start : bucket.stop])
        holders, count = bucket.holders, len(bucket.holders)
        ring = zip(holders, holders[1:] + holders[:1], strict=True)
        slowest_bps = min(self.cluster.rate(a, b) for a, b in ring)
        return 2 * (count - 1) / count * seconds(size_bytes, slowest_bps) if size_bytes else 0.0


@dataclass(frozen=True)
class Timing:
    """Seconds since the step began. `ends_s`: by worker, the end of its last instruction."""

    ends_s: Mapping[str, float]
    busy_s: Mapping[str, float]

    @property
    def step_s(self) -> float:
        return max(self.ends_s.values(), default=0.0)


@dataclass
class _Clock:
    """A worker on its way through its instructions."""

    lines: tuple[Instruction, ...]
    at: int = 0
    now_s: float = 0.0
    busy_s: float = 0.0


def time_program(
    program: Program, costs: ProfiledCosts, begins_s: Mapping[str, float] | None = None
) -> Timing:
    """Execute `program` on a clock of its own per worker.

    Args:
        begins_s: by worker, when it may begin, if not at 0: with ReCycle's staggered optimizer, the end of
            its last step.
    Raises: PlanInfeasible if a worker waits for what nobody sends, which no compiled plan does.
    """
    return _Execution(program, costs, begins_s or {}).run()


def staggered_step_s(program: Program, costs: ProfiledCosts, steps: int = 4) -> float:
    """Seconds from one step to the next with a staggered optimizer (ReCycle, as Chameleon tells it, Sec. IV-C).

    Whoever has done its STEP goes on with the next step at once: no barrier, only what its instructions wait for.
    Of several steps the last counts, when the pace is steady.
    """
    ends_s: Mapping[str, float] = {}
    took_s = 0.0
    for _ in range(steps):
        timing = time_program(program, costs, ends_s)
        took_s = timing.step_s - max(ends_s.values(), default=0.0)
        ends_s = timing.ends_s
    return took_s


class _Execution:
    """All workers of a program, each as far as it has come."""

    def __init__(self, program: Program, costs: ProfiledCosts, begins_s: Mapping[str, float]) -> None:
        self.plan, self.costs = program.plan, costs
        self.clocks = {
            worker: _Clock(lines, now_s=begins_s.get(worker, 0.0))
            for worker, lines in program.instructions.items()
        }
        self.came_s: dict[tuple[str, Tag], float] = {}
        self.waiting: set[tuple[str, Tag]] = set()
        self.buckets = {
            (worker, (bucket.start, bucket.stop)): bucket
            for each in program.plan.sync
            for bucket in each
            for worker in bucket.holders
        }
        self.at_bucket: dict[Bucket, list[str]] = defaultdict(list)
        self.ready = deque(self.clocks)

    def run(self) -> Timing:
        while self.ready:
            worker = self.ready.popleft()
            clock = self.clocks[worker]
            while clock.at < len(clock.lines) and self._do(worker, clock, clock.lines[clock.at]):
                clock.at += 1
        for worker, clock in self.clocks.items():
            if clock.at < len(clock.lines):
                raise PlanInfeasible(f"worker {worker}: waits for ever at {clock.lines[clock.at]}")
        return Timing(
            {worker: clock.now_s for worker, clock in self.clocks.items()},
            {worker: clock.busy_s for worker, clock in self.clocks.items()},
        )

    def _do(self, worker: str, clock: _Clock, line: Instruction) -> bool:
        """Returns: False if it must wait."""
        match line.op:
            case Op.SEND:
                assert line.tag is not None
                self._send(worker, clock.now_s, line.peer, line.tag)
            case Op.RECV:
                assert line.tag is not None
                came_s = self.came_s.get((worker, line.tag))
                if came_s is None:
                    self.waiting.add((worker, line.tag))
                    return False
                clock.now_s = max(clock.now_s, came_s)
            case Op.REDUCE:
                return self._reduce(worker, line)
            case Op.STEP:
                clock.now_s += self.costs.step_s
            case Op.SNAPSHOT:
                pass  # In the background (ElasWave, Fig. 6b).
            case _:
                samples = sum(self.plan.micro_batches[number].samples for number in line.micro_batches)
                took_s = self.costs.compute_s(worker, line.op, *line.layers, samples)
                clock.now_s += took_s
                clock.busy_s += took_s
        return True

    def _send(self, worker: str, now_s: float, peer: str, tag: Tag) -> None:
        samples = self.plan.micro_batches[tag.micro_batch].samples
        self.came_s[peer, tag] = now_s + self.costs.transfer_s(worker, peer, tag.boundary, samples)
        if (peer, tag) in self.waiting:
            self.waiting.remove((peer, tag))
            self.ready.append(peer)

    def _reduce(self, worker: str, line: Instruction) -> bool:
        """All holders begin together, and end together: the last to come takes the others along."""
        bucket = self.buckets[worker, line.layers]
        there = self.at_bucket[bucket]
        there.append(worker)
        if len(there) < len(bucket.holders):
            return False
        ends_s = max(self.clocks[each].now_s for each in there) + self.costs.reduce_s(bucket)
        for each in there:
            self.clocks[each].now_s = ends_s
            if each != worker:
                self.clocks[each].at += 1
                self.ready.append(each)
        return True


# --- a step of a plan ---


_Signature = tuple[object, ...]
_Signed = list[tuple[Plan, _Signature]]


class Execution(NamedTuple):
    """How a plan is executed; see `compile_plan`."""

    split_backward: bool = False
    more_in_flight: int = 0


@dataclass(frozen=True)
class Estimate:
    """Of a plan: seconds of a step, and by worker the most bytes that it holds at once."""

    step_s: float
    peak_bytes: Mapping[str, float]
    execution: Execution


class Estimator:
    """Steps of plans for one model on one cluster; what pipelines have in common is worked out once.

    Args:
        zero: optimizer state is divided among the holders of a layer (ZeRO-1).
        executions: of those that fit into memory the fastest is taken, if none fits the smallest.
    """

    def __init__(
        self, costs: ProfiledCosts, zero: bool = False, executions: Sequence[Execution] = (Execution(),)
    ) -> None:
        self.costs, self.zero, self.executions = costs, zero, tuple(executions)
        self._known: dict[tuple[object, ...], tuple[float, tuple[float, ...]]] = {}

    def on(self, cluster: Cluster) -> Estimator:
        """The same for a cluster that has changed; what was worked out stays known."""
        if cluster is self.costs.cluster:
            return self
        other = Estimator(replace(self.costs, cluster=cluster), self.zero, self.executions)
        other._known = self._known
        return other

    def estimate(self, plan: Plan) -> Estimate:
        """The slowest part of the plan (Eq. 10), then the sums of gradients, round after round, then STEP."""
        static = static_bytes(plan, self.costs.profile, self.zero)
        rounds_s = sum(max(self.costs.reduce_s(bucket) for bucket in each) for each in plan.sync)
        signed = [(part, self._signature(part)) for part in parts(plan)]
        found = [
            self._under(execution, signed, static, rounds_s + self.costs.step_s)
            for execution in self.executions
        ]
        fitting = [each for each in found if not excess_bytes(each.peak_bytes, self.costs.cluster)]
        if fitting:
            return min(fitting, key=lambda each: each.step_s)
        return min(found, key=lambda each: max(excess_bytes(each.peak_bytes, self.costs.cluster).values()))

    def _under(
        self, execution: Execution, signed: _Signed, static: Mapping[str, float], sums_s: float
    ) -> Estimate:
        computed_s, peaks = 0.0, dict(static)
        for part, signature in signed:
            part_s, activations = self._part(execution, part, signature)
            computed_s = max(computed_s, part_s)
            for worker, size in zip(part.placement, activations, strict=True):
                peaks[worker] += size
        return Estimate(computed_s + sums_s, peaks, execution)

    def _part(
        self, execution: Execution, part: Plan, signature: _Signature
    ) -> tuple[float, tuple[float, ...]]:
        """Seconds without STEP; activations of each worker at most, in the order of its placement."""
        key = (execution, *signature)
        if key not in self._known:
            program = compile_plan(part, self.costs, **execution._asdict())
            peaks = tuple(
                peak_activations(program.instructions[worker], part, self.costs.profile)
                for worker in part.placement
            )
            self._known[key] = program.computed_s, peaks
        return self._known[key]

    def _signature(self, part: Plan) -> _Signature:
        """Equal for parts that differ only in the names of workers: then, and only then, they take as long."""
        number = {worker: index for index, worker in enumerate(part.placement)}
        cluster = self.costs.cluster
        speeds = tuple(cluster.workers[worker].speed for worker in part.placement)
        turns = {turn: index for index, turn in enumerate(sorted({each.turn for each in part.micro_batches}))}
        routes = tuple(
            (
                turns[each.turn],
                each.samples,
                tuple((number[hop.worker], hop.start, hop.stop) for hop in each.route),
            )
            for each in part.micro_batches
        )
        return speeds, routes, self._rates(part, number)

    def _rates(self, part: Plan, number: Mapping[str, int]) -> tuple[object, ...]:
        cluster = self.costs.cluster
        if not cluster.rates_bps:
            return ()
        routes = {each.route for each in part.micro_batches}
        links = {(a.worker, b.worker) for route in routes for a, b in pairwise(route)}
        return tuple(sorted((number[a], number[b], cluster.rate(a, b), cluster.rate(b, a)) for a, b in links))


def parts(plan: Plan) -> list[Plan]:
    """What no route connects: each pipeline by itself, unless micro-batches of one pass through another."""
    graph: nx.Graph = nx.Graph()
    graph.add_nodes_from(plan.placement)
    for route in {each.route for each in plan.micro_batches}:
        nx.add_path(graph, [hop.worker for hop in route])
    part_of = {
        worker: index for index, found in enumerate(nx.connected_components(graph)) for worker in found
    }
    placement: dict[int, dict[str, range]] = defaultdict(dict)
    micro_batches: dict[int, list[MicroBatch]] = defaultdict(list)
    for each in plan.micro_batches:
        micro_batches[part_of[each.route[0].worker]].append(each)
        for hop in each.route:  # In the order of routes, which is the same in pipelines that are alike.
            placement[part_of[hop.worker]].setdefault(hop.worker, plan.placement[hop.worker])
    return [Plan(plan.layers, placement[index], tuple(found)) for index, found in micro_batches.items()]


# --- memory ---


def peak_bytes(program: Program, profile: Profile, zero: bool = False) -> dict[str, float]:
    """By worker, the most it holds at once: its layers, and activations from their forward until released.

    Eq. 14 with the release of activations as the program has it: a backward lets go of what its forward has
    kept; one in two parts when the second is done.
    Args:
        zero: optimizer state is divided among the holders of a layer (ZeRO-1).
    """
    static = static_bytes(program.plan, profile, zero)
    return {
        worker: static[worker] + peak_activations(lines, program.plan, profile)
        for worker, lines in program.instructions.items()
    }


def static_bytes(plan: Plan, profile: Profile, zero: bool = False) -> dict[str, float]:
    """By worker, parameters, gradients and optimizer state of its layers, or its parts of the latter."""
    spared = [0.0] * (plan.layers + 1)  # Of layers [0, l), what each holder need not have.
    for layer in range(plan.layers if zero else 0):
        rest = 1 - 1 / max(len(plan.holders[layer]), 1)
        spared[layer + 1] = spared[layer] + profile.layers[layer].optimizer_bytes * rest
    whole = profile.static_bytes
    return {
        worker: whole[held.stop] - whole[held.start] - (spared[held.stop] - spared[held.start])
        for worker, held in plan.placement.items()
    }


def peak_activations(lines: Sequence[Instruction], plan: Plan, profile: Profile) -> float:
    """The most bytes of activations that are kept at once on the way through `lines`."""
    now, most, kept = 0.0, 0.0, profile.activation_bytes
    released = {Op.BACKWARD, Op.BACKWARD_WEIGHT}
    for line in lines:
        if line.op is Op.FORWARD or line.op in released:
            samples = sum(plan.micro_batches[number].samples for number in line.micro_batches)
            size = samples * (kept[line.layers[1]] - kept[line.layers[0]])
            now += size if line.op is Op.FORWARD else -size
            most = max(most, now)
    return most


def excess_bytes(peaks: Mapping[str, float], cluster: Cluster) -> dict[str, float]:
    """By worker that has too little memory, how much."""
    found = {worker: peak - cluster.workers[worker].memory_bytes for worker, peak in peaks.items()}
    return {worker: excess for worker, excess in found.items() if excess > 0}


def check_memory(peaks: Mapping[str, float], cluster: Cluster) -> None:
    """Raise PlanInfeasible, naming the worker that is farthest over its memory, and by how much, if one is."""
    excess = excess_bytes(peaks, cluster)
    if excess:
        worst = max(excess, key=lambda worker: (excess[worker], worker))
        raise PlanInfeasible(
            f"worker {worst}: {peaks[worst]:.3g} bytes at its peak, {excess[worst]:.3g} over its memory"
        )
