"""What each worker does in a step, in its order: a plan compiled to instructions (1F1B).

One global list scheduling over all workers: each in turn starts, as soon as it is free, a backward that is
ready, or its next forward, if what it needs has come and fewer are in flight than hops are left to the end; if
it could do either, the other of what it did last. Else it does, with a backward in two parts, the part that nobody
waits for (the weights' gradients: ReCycle's decoupled backward).

Backwards must not come first always: a slow first stage to which several have come would do them all, while those
behind it run out of forwards, and would wait for those later (25 % of a step, with stages that cost 3, 2, 2, 2).

No order of messages can stop it. Forwards are taken in the order of turns by everybody, so of all turns that
are not finished the first has been begun wherever it is due, before any later one, and finds every worker on
its way with nothing unfinished before it. Instructions of a worker are those of that schedule, and SEND does
not wait, so time in the schedule orders all of them and all messages: nobody waits in a circle.
"""

from __future__ import annotations

import enum
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .plan import Hop, Plan


class Op(enum.Enum):
    __hash__ = object.__hash__  # Enum's own hashes the name, in Python, a million times in a simulated day.

    FORWARD = "forward"
    BACKWARD = "backward"  # Whole: of inputs and weights.
    BACKWARD_INPUT = "backward-input"
    BACKWARD_WEIGHT = "backward-weight"
    SEND = "send"
    RECV = "recv"
    REDUCE = "reduce"
    STEP = "step"
    SNAPSHOT = "snapshot"


class Tag(NamedTuple):
    """Names what is sent, whoever sends it: a view and a step come before it on the wire."""

    kind: str
    """"a": activations, on the way forward; "g": their gradients, back."""
    micro_batch: int
    boundary: int
    """The layer that the activations enter."""


@dataclass(frozen=True, slots=True)
class Instruction:
    """`layers`: [start, stop) that it is about. `peer`, `tag`: of SEND and RECV. `micro_batches`: run as one."""

    op: Op
    layers: tuple[int, int]
    micro_batches: tuple[int, ...] = ()
    peer: str = ""
    tag: Tag | None = None


@dataclass(frozen=True)
class Program:
    """Instructions by worker; `plan` says what their micro-batches are.

    `ends_s`: when each worker's last computation ends, by the costs that the order was chosen for. With these costs
    `time_program` finds the same to the bit, before sums of gradients and STEP.
    """

    plan: Plan
    instructions: Mapping[str, tuple[Instruction, ...]]
    ends_s: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def computed_s(self) -> float:
        """When the last computation of all ends."""
        return max(self.ends_s.values(), default=0.0)


class Costs(Protocol):
    """Seconds that things take, to the scheduling here and to the estimator."""

    def compute_s(self, worker: str, op: Op, start: int, stop: int, samples: int) -> float:
        """One FORWARD or BACKWARD of layers [start, stop)."""

    def transfer_s(self, source: str, to: str, boundary: int, samples: int) -> float:
        """Activations that enter layer `boundary`, or their gradients, from one worker to another."""


class Unit:
    """Equal layers without links: a forward of one takes 1, a backward 2; of any number of samples."""

    def compute_s(self, worker: str, op: Op, start: int, stop: int, samples: int) -> float:
        return (2.0 if op is Op.BACKWARD else 1.0) * (stop - start)

    def transfer_s(self, source: str, to: str, boundary: int, samples: int) -> float:
        return 0.0


@dataclass(slots=True, eq=False)
class _Visit:
    """Micro-batches that pass through one worker as one: a forward and, later, a backward."""

    name: str  # Of its worker.
    start: int
    stop: int
    number: int  # In the order of its worker.
    micro_batches: list[int] = field(default_factory=list)
    samples: int = 0
    before: list[tuple[int, _Visit]] = field(default_factory=list)  # A micro-batch, and where it comes from.
    after: list[tuple[int, _Visit]] = field(default_factory=list)  # And where it goes.
    # Of the schedule under way.
    activations_due: int = 0
    gradients_due: int = 0  # One is the end of its own forward.


Visits = Mapping[str, list[_Visit]]
"""By worker, in the order of turns."""


@dataclass(slots=True, eq=False)
class _Worker:
    """What it has to do, and how far it is."""

    name: str
    visits: list[_Visit]
    room: int  # Forwards that it may begin before it goes back.
    begun: int = 0  # Forwards.
    busy: bool = False
    until_s: float = 0.0  # When its last computation so far ends, or has ended.
    went_back: bool = False  # Last, not counting parts nobody waits for.
    # Ready, as heaps of numbers.
    backwards: list[int] = field(default_factory=list)
    weights: list[int] = field(default_factory=list)
    done: list[tuple[Op, _Visit]] = field(default_factory=list)


def compile_plan(
    plan: Plan,
    costs: Costs | None = None,
    *,
    split_backward: bool = False,
    more_in_flight: int = 0,
    snapshot: bool = False,
) -> Program:
    """Instructions for all workers of a valid `plan`.

    Args:
        costs: what the order is chosen for; default: `Unit`.
        split_backward: gradients of weights apart from those of inputs, which others wait for.
        more_in_flight: forwards that may be in flight beyond the hops that are left to the end.
        snapshot: end with a SNAPSHOT (ElasWave, Sec. 5.1).
    """
    schedule = Schedule(plan, costs, split_backward=split_backward, more_in_flight=more_in_flight)
    return schedule.program(snapshot)


def in_flight_bounds(plan: Plan) -> dict[str, int]:
    """Per worker, the most hops that any route through it has left, its own among them."""
    bounds: dict[str, int] = {}
    for route in {each.route for each in plan.micro_batches}:
        for position, hop in enumerate(route):
            bounds[hop.worker] = max(bounds.get(hop.worker, 0), len(route) - position)
    return bounds


def visits_of(plan: Plan) -> Visits:
    """What all schedules of a plan have in common."""
    by_worker: dict[str, list[_Visit]] = {name: [] for name in plan.placement}
    found: dict[tuple[int, Hop], _Visit] = {}
    for number, each in sorted(enumerate(plan.micro_batches), key=lambda item: (item[1].turn, item[0])):
        before: _Visit | None = None
        for hop in each.route:
            visit = found.get((each.turn, hop))
            if visit is None:
                visits = by_worker[hop.worker]
                visit = found[each.turn, hop] = _Visit(hop.worker, hop.start, hop.stop, len(visits))
                visits.append(visit)
            visit.micro_batches.append(number)
            visit.samples += each.samples
            if before is not None:
                visit.before.append((number, before))
                before.after.append((number, visit))
            before = visit
    return by_worker


class _Event(enum.IntEnum):
    ENDED = 0  # A computation.
    ACTIVATIONS = 1  # Have come.
    GRADIENTS = 2


class Schedule:
    """The list scheduling, done; arguments as of `compile_plan`. Instructions are written for who asks for them.

    `visits`: of the plan, if known; one schedule at a time is made of them. `ends_s`: as of `Program`.
    """

    def __init__(
        self,
        plan: Plan,
        costs: Costs | None = None,
        *,
        split_backward: bool = False,
        more_in_flight: int = 0,
        visits: Visits | None = None,
    ) -> None:
        self.plan, self.costs = plan, costs or Unit()
        self.back = Op.BACKWARD_INPUT if split_backward else Op.BACKWARD
        self.bounds = {name: most + more_in_flight for name, most in in_flight_bounds(plan).items()}
        self.workers: dict[str, _Worker] = {}
        for name, own in (visits or visits_of(plan)).items():
            self.workers[name] = _Worker(name, own, self.bounds.get(name, 0))
            for visit in own:
                visit.activations_due, visit.gradients_due = len(visit.before), 1 + len(visit.after)
        # When, a running number, what happens, to what.
        self.queue: list[tuple[float, int, _Event, _Visit]] = []
        self.numbers = itertools.count()
        self._run()
        self.ends_s = {name: worker.until_s for name, worker in self.workers.items()}

    def _run(self) -> None:
        """Until nothing is left to do."""
        queue = self.queue
        for worker in self.workers.values():
            self._start(worker, 0.0)
        while queue:
            now_s = queue[0][0]
            touched: dict[_Worker, None] = {}
            while queue and queue[0][0] == now_s:  # All that is known, before anybody chooses.
                _, _, event, visit = heapq.heappop(queue)
                worker = self.workers[visit.name]
                touched[worker] = None
                if event is _Event.ENDED:
                    self._ended(worker, visit, now_s)
                else:
                    _came(worker, visit, event)
            for worker in touched:
                if not worker.busy:
                    self._start(worker, now_s)
        assert all(worker.begun == len(worker.visits) for worker in self.workers.values())
        assert all(self.workers[name].room == most for name, most in self.bounds.items())

    def _start(self, worker: _Worker, now_s: float) -> None:
        """The next thing that `worker` does, which is free, if something is ready."""
        visits, begun = worker.visits, worker.begun
        may_go_on = worker.room > 0 and begun < len(visits) and not visits[begun].activations_due
        if worker.backwards and not (may_go_on and worker.went_back):
            worker.went_back = True
            visit, op = visits[heapq.heappop(worker.backwards)], self.back
        elif may_go_on:
            worker.went_back = False
            visit, op = visits[begun], Op.FORWARD
            worker.begun += 1
            worker.room -= 1
        elif worker.weights:
            visit, op = visits[heapq.heappop(worker.weights)], Op.BACKWARD_WEIGHT
        else:
            return
        worker.busy = True
        worker.done.append((op, visit))
        worker.until_s = now_s + self.costs.compute_s(worker.name, op, visit.start, visit.stop, visit.samples)
        heapq.heappush(self.queue, (worker.until_s, next(self.numbers), _Event.ENDED, visit))

    def _ended(self, worker: _Worker, visit: _Visit, now_s: float) -> None:
        op, _ = worker.done[-1]
        worker.busy = False
        if op is Op.FORWARD:
            for number, each in visit.after:
                self._send(visit, each, visit.stop, number, now_s, _Event.ACTIVATIONS)
            _came(worker, visit, _Event.GRADIENTS)
            return
        if op is Op.BACKWARD_INPUT:
            heapq.heappush(worker.weights, visit.number)
        else:
            worker.room += 1
        if op is not Op.BACKWARD_WEIGHT:
            for number, each in visit.before:
                self._send(visit, each, visit.start, number, now_s, _Event.GRADIENTS)

    def _send(
        self, visit: _Visit, to: _Visit, boundary: int, number: int, now_s: float, event: _Event
    ) -> None:
        samples = self.plan.micro_batches[number].samples
        came_s = now_s + self.costs.transfer_s(visit.name, to.name, boundary, samples)
        there = self.workers[to.name]
        if there.busy and came_s <= there.until_s:  # It chooses after that, whenever that was.
            _came(there, to, event)
        else:
            heapq.heappush(self.queue, (came_s, next(self.numbers), event, to))

    # --- writing it down ---

    def program(self, snapshot: bool = False) -> Program:
        """What was chosen, as instructions."""
        instructions = {name: _written(worker) for name, worker in self.workers.items()}
        for each in self.plan.sync:
            for bucket in each:
                for name in bucket.holders:
                    instructions[name].append(Instruction(Op.REDUCE, (bucket.start, bucket.stop)))
        for name, held in self.plan.placement.items():
            instructions[name].append(Instruction(Op.STEP, (held.start, held.stop)))
            if snapshot:
                instructions[name].append(Instruction(Op.SNAPSHOT, (held.start, held.stop)))
        lines = {name: tuple(instructions[name]) for name in self.plan.placement}
        return Program(self.plan, lines, self.ends_s)


def _came(worker: _Worker, visit: _Visit, event: _Event) -> None:
    if event is _Event.ACTIVATIONS:
        visit.activations_due -= 1
        return
    visit.gradients_due -= 1
    if not visit.gradients_due:
        heapq.heappush(worker.backwards, visit.number)


def _written(worker: _Worker) -> list[Instruction]:
    """Its computations: what one needs is received just before, and what it gives is sent right after."""
    lines: list[Instruction] = []
    for op, visit in worker.done:
        layers = visit.start, visit.stop
        computation = Instruction(op, layers, tuple(visit.micro_batches))
        if op is Op.BACKWARD_WEIGHT:
            lines.append(computation)
            continue
        forward = op is Op.FORWARD
        kind = "a" if forward else "g"
        needs, needs_at = (visit.before, visit.start) if forward else (visit.after, visit.stop)
        gives, gives_at = (visit.after, visit.stop) if forward else (visit.before, visit.start)
        for number, each in needs:
            tag = Tag(kind, number, needs_at)
            lines.append(Instruction(Op.RECV, layers, (number,), each.name, tag))
        lines.append(computation)
        for number, each in gives:
            tag = Tag(kind, number, gives_at)
            lines.append(Instruction(Op.SEND, layers, (number,), each.name, tag))
    return lines
