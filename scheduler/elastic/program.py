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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from .plan import Plan


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


@dataclass(slots=True)
class _Visit:
    """Micro-batches that pass through one worker as one: a forward and, later, a backward."""

    worker: str
    start: int
    stop: int
    number: int  # In the order of its worker.
    micro_batches: list[int] = field(default_factory=list)
    samples: int = 0
    before: list[tuple[int, _Visit]] = field(default_factory=list)  # A micro-batch, and where it comes from.
    after: list[tuple[int, _Visit]] = field(default_factory=list)  # And where it goes.
    activations_due: int = 0
    gradients_due: int = 1  # One is the end of its own forward.


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
    schedule = _Schedule(plan, costs or Unit(), split_backward, more_in_flight)
    schedule.run()
    instructions = schedule.instructions
    for each in plan.sync:
        for bucket in each:
            for worker in bucket.holders:
                instructions[worker].append(Instruction(Op.REDUCE, (bucket.start, bucket.stop)))
    for worker, held in plan.placement.items():
        instructions[worker].append(Instruction(Op.STEP, (held.start, held.stop)))
        if snapshot:
            instructions[worker].append(Instruction(Op.SNAPSHOT, (held.start, held.stop)))
    lines = {worker: tuple(instructions[worker]) for worker in plan.placement}
    return Program(plan, lines, schedule.ends_s)


def in_flight_bounds(plan: Plan) -> dict[str, int]:
    """Per worker, the most hops that any route through it has left, its own among them."""
    bounds: dict[str, int] = {}
    for route in {each.route for each in plan.micro_batches}:
        for position, hop in enumerate(route):
            bounds[hop.worker] = max(bounds.get(hop.worker, 0), len(route) - position)
    return bounds


def _visits(plan: Plan) -> dict[str, list[_Visit]]:
    """By worker, in the order of turns."""
    by_worker: dict[str, list[_Visit]] = {worker: [] for worker in plan.placement}
    found: dict[tuple[str, int, int, int], _Visit] = {}
    for number, each in sorted(enumerate(plan.micro_batches), key=lambda item: (item[1].turn, item[0])):
        before: _Visit | None = None
        for hop in each.route:
            visits = by_worker[hop.worker]
            key = (hop.worker, each.turn, hop.start, hop.stop)
            if key not in found:
                found[key] = _Visit(hop.worker, hop.start, hop.stop, len(visits))
                visits.append(found[key])
            visit = found[key]
            visit.micro_batches.append(number)
            visit.samples += each.samples
            if before is not None:
                visit.before.append((number, before))
                visit.activations_due += 1
                before.after.append((number, visit))
                before.gradients_due += 1
            before = visit
    return by_worker


class _Schedule:
    """The list scheduling: who is free, what is ready, what has been begun."""

    def __init__(self, plan: Plan, costs: Costs, split_backward: bool, more_in_flight: int) -> None:
        self.plan, self.costs, self.split_backward = plan, costs, split_backward
        self.visits = _visits(plan)
        self.bounds = {worker: most + more_in_flight for worker, most in in_flight_bounds(plan).items()}
        self.instructions: dict[str, list[Instruction]] = {worker: [] for worker in plan.placement}
        self.busy: set[str] = set()
        self.in_flight = dict.fromkeys(self.visits, 0)
        self.begun = dict.fromkeys(self.visits, 0)  # Forwards, in the order of turns.
        # Workers that did a backward last, not counting parts nobody waits for.
        self.went_back: set[str] = set()
        # Ready, as heaps of numbers.
        self.backwards: dict[str, list[int]] = {worker: [] for worker in self.visits}
        self.weights: dict[str, list[int]] = {worker: [] for worker in self.visits}
        # When, a running number, what happens, to what.
        self.queue: list[tuple[float, int, _Happening, _Visit]] = []
        self.queued = 0
        self.ends_s = dict.fromkeys(plan.placement, 0.0)

    def run(self) -> None:
        """Until nothing is left to do."""
        for worker in self.visits:
            self._start(worker, 0.0)
        while self.queue:
            now_s = self.queue[0][0]
            touched: dict[str, None] = {}
            while self.queue and self.queue[0][0] == now_s:  # All that is known, before anybody chooses.
                _, _, happened, visit = heapq.heappop(self.queue)
                happened(visit, now_s)
                touched[visit.worker] = None
            for worker in touched:
                self._start(worker, now_s)
        assert all(self.begun[worker] == len(visits) for worker, visits in self.visits.items())
        assert not any(self.in_flight.values())

    def _later(self, at_s: float, happening: _Happening, visit: _Visit) -> None:
        self.queued += 1
        heapq.heappush(self.queue, (at_s, self.queued, happening, visit))

    def _start(self, worker: str, now_s: float) -> None:
        """The next thing that `worker` does, if it is free and something is ready."""
        if worker in self.busy:
            return
        visits, begun = self.visits[worker], self.begun[worker]
        room = self.in_flight[worker] < self.bounds.get(worker, 0)
        may_go_on = begun < len(visits) and not visits[begun].activations_due and room
        if self.backwards[worker] and not (may_go_on and worker in self.went_back):
            self.went_back.add(worker)
            visit = visits[heapq.heappop(self.backwards[worker])]
            op, then = (
                (Op.BACKWARD_INPUT, self._input_ended)
                if self.split_backward
                else (Op.BACKWARD, self._backward_ended)
            )
        elif may_go_on:
            self.went_back.discard(worker)
            visit, op, then = visits[begun], Op.FORWARD, self._forward_ended
            self.begun[worker] += 1
            self.in_flight[worker] += 1
        elif self.weights[worker]:
            visit = visits[heapq.heappop(self.weights[worker])]
            op, then = Op.BACKWARD_WEIGHT, self._weight_ended
        else:
            return
        self.busy.add(worker)
        self._write(visit, op)
        took_s = self.costs.compute_s(worker, op, visit.start, visit.stop, visit.samples)
        self.ends_s[worker] = now_s + took_s
        self._later(now_s + took_s, then, visit)

    # --- what ends, and what arrives ---

    def _forward_ended(self, visit: _Visit, now_s: float) -> None:
        self.busy.discard(visit.worker)
        for number, each in visit.after:
            self._later(
                now_s + self._transfer_s(visit, each, visit.stop, number), self._activations_came, each
            )
        self._gradients_came(visit, now_s)

    def _backward_ended(self, visit: _Visit, now_s: float) -> None:
        self._send_back(visit, now_s)
        self.in_flight[visit.worker] -= 1

    def _input_ended(self, visit: _Visit, now_s: float) -> None:
        self._send_back(visit, now_s)
        heapq.heappush(self.weights[visit.worker], visit.number)

    def _weight_ended(self, visit: _Visit, now_s: float) -> None:
        self.busy.discard(visit.worker)
        self.in_flight[visit.worker] -= 1

    def _send_back(self, visit: _Visit, now_s: float) -> None:
        self.busy.discard(visit.worker)
        for number, each in visit.before:
            self._later(
                now_s + self._transfer_s(visit, each, visit.start, number), self._gradients_came, each
            )

    def _activations_came(self, visit: _Visit, now_s: float) -> None:
        visit.activations_due -= 1

    def _gradients_came(self, visit: _Visit, now_s: float) -> None:
        visit.gradients_due -= 1
        if visit.gradients_due == 0:
            heapq.heappush(self.backwards[visit.worker], visit.number)

    def _transfer_s(self, visit: _Visit, to: _Visit, boundary: int, number: int) -> float:
        samples = self.plan.micro_batches[number].samples
        return self.costs.transfer_s(visit.worker, to.worker, boundary, samples)

    # --- writing it down ---

    def _write(self, visit: _Visit, op: Op) -> None:
        """One computation: what it needs is received just before, and what it gives is sent right after."""
        lines, layers = self.instructions[visit.worker], (visit.start, visit.stop)
        computation = Instruction(op, layers, tuple(visit.micro_batches))
        if op is Op.BACKWARD_WEIGHT:
            lines.append(computation)
            return
        forward = op is Op.FORWARD
        kind = "a" if forward else "g"
        needs, needs_at = (visit.before, visit.start) if forward else (visit.after, visit.stop)
        gives, gives_at = (visit.after, visit.stop) if forward else (visit.before, visit.start)
        for number, each in needs:
            lines.append(Instruction(Op.RECV, layers, (number,), each.worker, Tag(kind, number, needs_at)))
        lines.append(computation)
        for number, each in gives:
            lines.append(Instruction(Op.SEND, layers, (number,), each.worker, Tag(kind, number, gives_at)))


_Happening = Callable[[_Visit, float], None]
