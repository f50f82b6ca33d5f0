"""A training step, simulated from scratch, to hold the estimator against: no code of theirs in common.

Machines take what is ready, a forward and a backward in turns where both are, and at most so many
micro-batches at once, as in 1F1B. What the estimator leaves out is here: each machine sends one thing at a time,
a sum of gradients goes around its ring in 2 (D - 1) rounds, each with a latency, and a computation takes more or
less than the profile says (`jitter`, log-normal).
"""

from __future__ import annotations

import heapq
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple


class Leg(NamedTuple):
    """What a micro-batch does on a machine; `sends_bytes` of activations to the next, gradients of that size back."""

    machine: str
    forward_s: float
    backward_s: float
    sends_bytes: float


class Sum(NamedTuple):
    """Of so many bytes of gradients, among these."""

    machines: tuple[str, ...]
    size_bytes: float


class Step:
    """One training step; `run` gives its seconds.

    Args:
        routes: by micro-batch, in the order in which they are to be begun.
        sums: rounds of them, one after another.
    """

    def __init__(
        self, routes: Sequence[Sequence[Leg]], sums: Sequence[Sequence[Sum]], rate_bps: float,
        latency_s: float, jitter: float = 0.0, seed: int = 0,
    ) -> None:  # fmt: skip
        self.routes, self.sums, self.rate_bps, self.latency_s = routes, sums, rate_bps, latency_s
        self.rng, self.jitter = random.Random(seed), jitter
        self.events: list[tuple[float, int, str, int, int]] = []
        self.number = 0
        self.room: dict[str, int] = defaultdict(int)
        self.line: dict[str, list[tuple[int, int]]] = defaultdict(list)  # (micro-batch, leg), in their order.
        for number, route in enumerate(routes):
            for place, leg in enumerate(route):
                self.line[leg.machine].append((number, place))
                self.room[leg.machine] = max(self.room[leg.machine], len(route) - place)
        self.here = {(number, 0) for number, _ in enumerate(routes)}  # Activations that have come.
        self.due: dict[str, list[tuple[int, int]]] = defaultdict(list)  # Backwards that can begin.
        self.working: set[str] = set()
        self.went_back: set[str] = set()  # Machines that did a backward last.
        self.sending_until_s: dict[str, float] = defaultdict(float)
        self.idle_since_s: defaultdict[str, float] = defaultdict(float)

    def run(self) -> float:
        for machine in self.line:
            self._look(machine, 0.0)
        while self.events:
            at_s, _, what, number, place = heapq.heappop(self.events)
            machine = self.routes[number][place].machine
            self._happened(what, number, place, machine, at_s)
            if not self.events or self.events[0][0] > at_s:  # Until all news of this instant are known.
                for each in self.line:
                    self._look(each, at_s)
        assert not any(self.line.values()) and not any(self.due.values()), "a machine was left with work"
        return self._summed_s()

    def _happened(self, what: str, number: int, place: int, machine: str, at_s: float) -> None:
        route = self.routes[number]
        if what == "activations":
            self.here.add((number, place))
        elif what == "gradients":
            self.due[machine].append((number, place))
        elif what == "forward":
            self._free(machine, at_s)
            if place + 1 < len(route):
                self._send(machine, route[place].sends_bytes, "activations", number, place + 1, at_s)
            else:
                self.due[machine].append((number, place))
        else:
            self._free(machine, at_s)
            self.room[machine] += 1
            if place:
                self._send(machine, route[place - 1].sends_bytes, "gradients", number, place - 1, at_s)

    def _free(self, machine: str, at_s: float) -> None:
        self.working.discard(machine)
        self.idle_since_s[machine] = at_s

    def _look(self, machine: str, at_s: float) -> None:
        """For something to do."""
        if machine in self.working:
            return
        may_go_on = self.line[machine] and self.line[machine][0] in self.here and self.room[machine]
        if self.due[machine] and not (may_go_on and machine in self.went_back):
            self.went_back.add(machine)
            self.due[machine].sort()
            number, place = self.due[machine].pop(0)
            self._work(machine, "backward", number, place, self.routes[number][place].backward_s, at_s)
        elif may_go_on:
            self.went_back.discard(machine)
            number, place = self.line[machine].pop(0)
            self.room[machine] -= 1
            self._work(machine, "forward", number, place, self.routes[number][place].forward_s, at_s)

    def _work(self, machine: str, what: str, number: int, place: int, seconds: float, at_s: float) -> None:
        self.working.add(machine)
        noise = self.rng.lognormvariate(0.0, self.jitter) if self.jitter else 1.0
        self._later(at_s + seconds * noise, what, number, place)

    def _send(self, machine: str, size: float, what: str, number: int, place: int, at_s: float) -> None:
        begins_s = max(at_s, self.sending_until_s[machine])
        self.sending_until_s[machine] = begins_s + 8 * size / self.rate_bps
        self._later(self.sending_until_s[machine] + self.latency_s, what, number, place)

    def _later(self, at_s: float, what: str, number: int, place: int) -> None:
        self.number += 1
        heapq.heappush(self.events, (at_s, self.number, what, number, place))

    def _summed_s(self) -> float:
        """Rounds of rings, each as soon as all of its machines have ended what they had."""
        ends_s = self.idle_since_s.copy()
        for each in self.sums:
            for machines, size_bytes in each:
                hops = 2 * (len(machines) - 1)
                took_s = hops * (self.latency_s + 8 * size_bytes / len(machines) / self.rate_bps)
                begins_s = max(ends_s[machine] for machine in machines)
                ends_s.update(dict.fromkeys(machines, begins_s + took_s))
        return max(ends_s.values())
