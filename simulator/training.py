"""Training while workers fail and come back, as a sequence of states with a step time each (Chameleon, Sec. V-B).

Between two events a system trains at its global batch over its step time; after one it stands still for the
transition of the recovery that it chose. An event during a transition begins another one; training goes on when
both have ended, as what the first has not restored yet the second needs, too.
"""

from __future__ import annotations

import csv
import itertools
import math
import random
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, Protocol

from ..protocols.errors import ConfigError

HOUR_S = 3600.0


class Incident(NamedTuple):
    """At `at_s`, `gone` are lost and `come` are there (again); `slow`: by worker, its speed from now on."""

    at_s: float
    gone: tuple[str, ...] = ()
    come: tuple[str, ...] = ()
    slow: tuple[tuple[str, float], ...] = ()


class Decision(NamedTuple):
    """How a system goes on: `samples_per_s` from `transition_s` after the event; 0 if it cannot."""

    samples_per_s: float
    transition_s: float
    family: str


class System(Protocol):
    """What decides; it keeps the state of training itself."""

    name: str

    def began(self) -> Decision:
        """The decision before anything has happened."""

    def met(self, event: Incident) -> Decision:
        """The decision after an event."""


class Span(NamedTuple):
    """A time of one speed (0 while training stands still), until the next one begins."""

    from_s: float
    samples_per_s: float
    workers: int


@dataclass
class TrainingRun:
    """What a system got done."""

    system: str
    seconds: float
    samples: float = 0.0
    stood_s: float = 0.0
    spans: list[Span] = field(default_factory=list)
    families: Counter[str] = field(default_factory=Counter)

    @property
    def samples_per_s(self) -> float:
        """On average, transitions included."""
        return self.samples / self.seconds

    def averages(self, parts: int) -> list[float]:
        """Samples/s in each of so many equal parts of the time, transitions included."""
        length_s = self.seconds / parts
        found = [0.0] * parts
        ends_s = [span.from_s for span in self.spans[1:]] + [self.seconds]
        for span, end_s in zip(self.spans, ends_s, strict=True):
            first, last = int(span.from_s / length_s), min(math.ceil(end_s / length_s), parts)
            for part in range(first, last):
                within_s = min(end_s, (part + 1) * length_s) - max(span.from_s, part * length_s)
                found[part] += span.samples_per_s * max(within_s, 0.0) / length_s
        return found


def train(
    system: System, workers: Collection[str], events: Sequence[Incident], seconds: float
) -> TrainingRun:
    """Let `system` train for so long while `events`, in their order, happen."""
    run = TrainingRun(system.name, seconds)
    there = {*workers}
    decision, ready_s = system.began(), 0.0
    run.spans.append(Span(0.0, decision.samples_per_s, len(there)))
    last_s = 0.0
    for event in [*(each for each in events if each.at_s < seconds), Incident(seconds)]:
        worked_s = max(event.at_s - max(last_s, ready_s), 0.0) if decision.samples_per_s else 0.0
        run.samples += worked_s * decision.samples_per_s
        run.stood_s += event.at_s - last_s - worked_s
        last_s = event.at_s
        if event.at_s >= seconds:
            break
        there = (there | {*event.come}) - {*event.gone}
        decision = system.met(event)
        ready_s = max(event.at_s + decision.transition_s, ready_s)
        if decision.samples_per_s:  # Else it is no recovery.
            run.families[decision.family] += 1
        if run.spans[-1].from_s > event.at_s:  # It did not come to that.
            run.spans.pop()
        if decision.transition_s:
            run.spans.append(Span(event.at_s, 0.0, len(there)))
        run.spans.append(Span(min(ready_s, seconds), decision.samples_per_s, len(there)))
    return run


# --- what happens ---


def failures(
    workers: Sequence[str], per_hour: float, hours: float, seed: int, repair_hours: float = 0.0
) -> list[Incident]:
    """Each worker fails with probability `per_hour` in any hour, all alike (Chameleon, Sec. V-B: 10 %).

    Args:
        repair_hours: mean time until it is back, exponential; 0: never.
    """
    if not 0 <= per_hour < 1 or hours <= 0 or repair_hours < 0:
        raise ConfigError(
            f"failures: {per_hour:g} per hour, {hours:g} h, repair {repair_hours:g} h"
            " (expected a probability below 1, > 0, >= 0)"
        )
    rng = random.Random(seed)
    found: list[Incident] = []
    rate = -math.log1p(-per_hour) / HOUR_S
    for worker in workers:
        at_s = rng.expovariate(rate) if rate else float("inf")
        while at_s < hours * HOUR_S:
            found.append(Incident(at_s, gone=(worker,)))
            if not repair_hours:
                break
            at_s += rng.expovariate(1 / (repair_hours * HOUR_S))
            found.append(Incident(at_s, come=(worker,)))
            at_s += rng.expovariate(rate)
    return sorted(each for each in found if each.at_s < hours * HOUR_S)


def read_trace(path: Path) -> list[tuple[float, int]]:
    """A spot trace: CSV with the columns time_s and nodes, how many nodes there are from then on.

    Raises: ConfigError that names file and line.
    """
    rows: list[tuple[float, int]] = []
    try:
        lines = path.read_text("utf-8").splitlines()
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror} (expected a CSV file: time_s,nodes)") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: no UTF-8 text ({error.reason} at byte {error.start})") from None
    reader = csv.DictReader(line for line in lines if not line.startswith("#"))
    if reader.fieldnames != ["time_s", "nodes"]:
        raise ConfigError(f"{path}: columns {reader.fieldnames} (expected time_s,nodes)")
    for row in reader:
        try:
            rows.append((float(row["time_s"]), int(row["nodes"])))
        except (TypeError, ValueError):
            raise ConfigError(f"{path}: line {reader.line_num}: {row} (expected two numbers)") from None
    if not rows or rows[0][0] != 0 or any(a[0] >= b[0] for a, b in itertools.pairwise(rows)):
        raise ConfigError(f"{path}: times (expected from 0, and growing)")
    return rows


def trace_events(
    trace: Sequence[tuple[float, int]], nodes: Sequence[Sequence[str]], seed: int, name: str = "trace"
) -> list[Incident]:
    """Which workers come and go where a trace only says how many nodes there are: drawn from `seed`.

    Args:
        nodes: workers by node; those of one go together. The trace begins with all of them.
    """
    if trace[0][1] != len(nodes) or any(not 0 <= count <= len(nodes) for _, count in trace):
        raise ConfigError(f"{name}: from {trace[0][1]} nodes on (expected {len(nodes)}, and never more)")
    rng, there = random.Random(seed), list(range(len(nodes)))
    away: list[int] = []
    found = []
    for at_s, count in trace[1:]:
        going = rng.sample(there, max(len(there) - count, 0))
        coming = rng.sample(away, max(count - len(there), 0))
        there = [each for each in there if each not in going] + coming
        away = [each for each in away if each not in coming] + going
        if going or coming:
            found.append(Incident(at_s, _workers(nodes, going), _workers(nodes, coming)))
    return found


def _workers(nodes: Sequence[Sequence[str]], chosen: Iterable[int]) -> tuple[str, ...]:
    return tuple(worker for each in chosen for worker in nodes[each])


def made_trace(kind: str, nodes: int, seconds: float, seed: int) -> Iterator[tuple[float, int]]:
    """A made-up spot trace. "plateau": mostly full, with dips; "shrink": twice as often down as up, to a half.

    Nothing here is from a provider's records.
    """
    rng = random.Random(seed)
    count, at_s = nodes, 0.0
    yield 0.0, count
    while True:
        at_s += rng.expovariate(12 / seconds)
        if at_s >= seconds:
            return
        if kind == "plateau":
            count = nodes - rng.randint(1, max(1, nodes // 6)) if count == nodes else nodes
        else:
            count += -1 if rng.random() < 2 / 3 else 1
            count = min(max(count, nodes // 2), nodes)
        yield round(at_s, 1), count
