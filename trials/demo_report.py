"""What the demo promises, computed from what its nodes wrote down: pure functions of their logs."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from ..protocols.status import LinkRow
from ..scheduler.shard_plan import Source, water_filling_bound

ACCURACY_PROMISED = 0.97
GAP_WINDOW_S = 2.0  # After something happened, in which its longest gap between two steps is looked for.
RATE_WINDOW_S = 1.0


class SeenStep(NamedTuple):
    """A committed step as one node saw it."""

    step: int
    time_s: float
    loss: float  # The cluster's mean.
    samples: float  # Behind the model, since the cluster began.


@dataclass(slots=True)
class NodeLog:
    """What one node wrote down."""

    name: str
    steps: list[SeenStep] = field(default_factory=list)
    joined: dict[str, Any] | None = None
    final: dict[str, Any] | None = None

    def add(self, line: str) -> None:
        """Take in one line. A node killed while it wrote leaves half a one: that tells nothing."""
        try:
            found = json.loads(line)
        except ValueError:
            return
        if "step" in found:
            self.steps.append(SeenStep(found["step"], found["time_s"], found["loss"], found["samples"]))
        elif "final_step" in found:
            self.final = found
        else:
            self.joined = found


@dataclass(frozen=True, slots=True)
class Deed:
    """Something the demo did. `time_s` by the wall clock."""

    kind: str
    node: str
    time_s: float


@dataclass(frozen=True, slots=True)
class StepAudit:
    """Step numbers that something is wrong with."""

    last: int
    missing: tuple[int, ...]  # No node committed it.
    repeated: tuple[int, ...]  # Some node applied it twice.
    disagreeing: tuple[int, ...]  # Two nodes saw two losses.


def audit(logs: Iterable[NodeLog], killed: Sequence[str] = ()) -> StepAudit:
    """Check the steps of all nodes against each other.

    A step without samples for a node (the end of an epoch) is not in its log, so only the union must be
    complete. The very last line of a `killed` node is not compared: it may have died as the only one that
    had completed that step, and then the others do it again among themselves.
    """
    losses: dict[int, set[float]] = {}
    seen: set[int] = set()
    repeated: set[int] = set()
    for log in logs:
        numbers = [step.step for step in log.steps]
        repeated |= {number for number, count in Counter(numbers).items() if count > 1}
        seen |= set(numbers)
        for step in log.steps[:-1] if log.name in killed else log.steps:
            losses.setdefault(step.step, set()).add(step.loss)
    last = max(seen, default=0)
    missing = tuple(sorted(set(range(1, last + 1)) - seen))
    disagreeing = tuple(sorted(number for number, values in losses.items() if len(values) > 1))
    return StepAudit(last, missing, tuple(sorted(repeated)), disagreeing)


def replicas_identical(survivors: Iterable[NodeLog]) -> bool:
    """Did all survivors end at the same step with the same state, to the bit?"""
    ends = [log.final for log in survivors]
    if not ends or any(end is None for end in ends):
        return False
    return len({(end["final_step"], end["hash"]) for end in ends if end}) == 1


def recovery_s(logs: Iterable[NodeLog], survivors: Sequence[str], killed_s: float) -> float:
    """From the kill until every survivor had committed a step that nobody had committed before the kill."""
    logs = list(logs)
    before = max((step.step for log in logs for step in log.steps if step.time_s <= killed_s), default=0)
    firsts = [
        next((step.time_s for step in log.steps if step.step > before and step.time_s > killed_s), math.inf)
        for log in logs
        if log.name in survivors
    ]
    return max(firsts, default=math.inf) - killed_s


def longest_gap_s(logs: Iterable[NodeLog], nodes: Sequence[str], from_s: float, until_s: float) -> float:
    """Longest time that any of `nodes` spent between two steps, one of them in the window; 0 if none is."""
    longest = 0.0
    for log in logs:
        times = [step.time_s for step in log.steps] if log.name in nodes else []
        for earlier, later in itertools.pairwise(times):
            if later >= from_s and earlier <= until_s:
                longest = max(longest, later - earlier)
    return longest


def join_bound_s(state_bytes: int, links: Iterable[LinkRow], joiner: str) -> float:
    """The water-filling bound over the joiner's links, as measured."""
    sources = {
        row.b if row.a == joiner else row.a: Source(row.rtt_min_ms / 2e3, 8 / (_rate_to(joiner, row) * 1e6))
        for row in links
        if joiner in (row.a, row.b) and _rate_to(joiner, row)
    }
    return water_filling_bound(state_bytes, sources) if sources else 0.0


def _rate_to(joiner: str, row: LinkRow) -> float:
    """Mbit/s of what comes to the joiner over one of its links."""
    return row.rate_mbit if row.b == joiner else row.rate_back_mbit


def broken_promises(summary: Mapping[str, Any]) -> list[str]:
    """What the summary says that should not be; empty if all went well."""
    broken = []
    if not summary["accuracy"] >= ACCURACY_PROMISED:
        broken.append(f"accuracy is {summary['accuracy']:.4f} (expected at least {ACCURACY_PROMISED})")
    for name in ("steps_lost", "steps_applied_twice", "steps_disagreeing"):
        if summary[name]:
            broken.append(f"{name} is {summary[name]} (expected 0)")
    if not summary["replicas_identical"]:
        broken.append("replicas_identical is false (expected the same state on all survivors)")
    if len(summary["events"]) != 6:
        broken.append(f"{len(summary['events'])} things happened (expected 6)")
    broken += [f"{node} ended with exit code {code}" for node, code in summary["exit_codes"].items() if code]
    return broken


def cluster_steps(logs: Iterable[NodeLog]) -> list[SeenStep]:
    """Each step once, when its first node had it."""
    first: dict[int, SeenStep] = {}
    for log in logs:
        for step in log.steps:
            if step.step not in first or step.time_s < first[step.step].time_s:
                first[step.step] = step
    return [first[number] for number in sorted(first)]


def samples_per_s(steps: Sequence[SeenStep]) -> list[float]:
    """At each step: samples of the last RATE_WINDOW_S seconds, per second."""
    rates, start = [], 0
    for step in steps:
        while steps[start].time_s < step.time_s - RATE_WINDOW_S:
            start += 1
        earlier = steps[max(start - 1, 0)]
        seconds = step.time_s - earlier.time_s
        rates.append((step.samples - earlier.samples) / seconds if seconds > 0 else 0.0)
    return rates
