"""What a soak promises, computed from what its nodes wrote down (soak_digits.py): pure functions of that."""

from __future__ import annotations

import bisect
import itertools
import json
import statistics
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

WARM_UP_S = 30.0  # Of a process, until its memory is compared.
JUDGED_S = 60.0  # After that. Who lived shorter is not judged.
# The same of a large state: buffers as large as parts of it come with the first joins and faults of a life.
JUDGED_LARGE_S = 300.0
GROWTH_ALLOWED = 0.05
COPY = 3  # MB of a state to one of its parameters: with Adam's moments.
ELECTION_S = 1.0  # Median promised, from the kill of a scheduler to the next one.
INTERRUPTED = "interrupted"  # By Ctrl+C: its nodes are let go in good order all the same.
DEAD = ("killed", "expelled", "raised")


@dataclass(slots=True)
class ProcessLife:
    """One process of a node, as it wrote it down. Times by the wall clock.

    `steps` counts steps of the all-reduce from 0 (the trainer's rounds). A process that was out and has come
    back has `loads` beyond its first: from the step given on, its state is that of others.
    """

    node: str
    number: int = 1
    steps: array[int] = field(default_factory=lambda: array("q"))
    times_s: array[float] = field(default_factory=lambda: array("d"))
    losses: array[float] = field(default_factory=lambda: array("d"))
    samples: array[float] = field(default_factory=lambda: array("d"))  # In all, since the cluster began.
    hashes: dict[int, str] = field(default_factory=dict)  # Of the state after that step.
    rss: list[tuple[float, int]] = field(default_factory=list)  # Time, bytes.
    loads: list[tuple[int, int]] = field(default_factory=list)  # Length of `steps` then, the step to come.
    elections: list[tuple[float, str]] = field(default_factory=list)
    started_s: float = 0.0
    joined: bool = False
    final: tuple[int, str] | None = None
    diverged: list[int] = field(default_factory=list)  # Steps after which its state was changed, here alone.
    fate: str = ""  # "killed", "expelled", "left", "raised"; "" for one that lived to the end.

    @property
    def label(self) -> str:
        return f"{self.node}.{self.number}"

    def add(self, line: str) -> None:
        """Take in one line. A node killed while it wrote leaves half a one: that tells nothing."""
        try:
            told = json.loads(line)
        except ValueError:
            return
        match told:
            case {"step": step, "time_s": time_s}:
                self._add_step(step, time_s, told)
            case {"loaded": step, "hash": state}:
                self.loads.append((len(self.steps), step))
                self.hashes[step - 1] = state
            case {"diverged": step}:
                self.diverged.append(step)
            case {"elected": node, "elected_s": time_s}:
                self.elections.append((time_s, node))
            case {"final": step, "hash": state}:
                self.final = (step, state)
            case {"joined": _}:
                self.joined = True
            case {"started": _, "time_s": time_s}:
                self.started_s = time_s

    def _add_step(self, step: int, time_s: float, told: Mapping[str, Any]) -> None:
        self.steps.append(step)
        self.times_s.append(time_s)
        self.losses.append(-1.0 if told["loss"] is None else told["loss"])
        self.samples.append(told["samples"])
        if "hash" in told:
            self.hashes[step] = told["hash"]
        if "rss" in told:
            self.rss.append((time_s, told["rss"]))

    def stretches(self) -> list[range]:
        """Indices of what was done in one piece: between two loads of a state."""
        cuts = sorted({0, *(index for index, _ in self.loads), len(self.steps)})
        return [range(a, b) for a, b in itertools.pairwise(cuts)]

    def healed_at(self, diverged: int) -> int | None:
        """Of a divergence after that step: where the state that it pulled anew begins; None if it did not."""
        return next((step for _, step in self.loads if step > diverged), None)

    def is_astray(self, step: int) -> bool:
        """Is the state after that step not the others', and known not to be?"""
        ends = ((first, self.healed_at(first)) for first in self.diverged)
        return any(first <= step and (end is None or step < end) for first, end in ends)

    def step_at(self, time_s: float) -> int:
        """The newest step completed by then; -1 before the first."""
        index = bisect.bisect_right(self.times_s, time_s)
        return self.steps[index - 1] if index else -1

    def first_after(self, step: int, time_s: float) -> float | None:
        """When it first had a step beyond `step`, later than `time_s`."""
        for index in range(bisect.bisect_right(self.times_s, time_s), len(self.steps)):
            if self.steps[index] > step:
                return self.times_s[index]
        return None


@dataclass(frozen=True, slots=True)
class Audit:
    """What is wrong with steps; all but the counts should be empty.

    The last step of a process that was killed or left behind is not compared: it may have been the only one
    that had completed it, and then the others did it again among themselves. `undone` counts those.
    """

    last: int
    missing: tuple[int, ...]  # Between the first and the last, seen by nobody who lived on.
    skipped: tuple[str, ...]  # A process that went on from a step to another than the next.
    repeated: tuple[str, ...]  # A process that applied a step twice, or an old one again.
    disagreeing: tuple[str, ...]  # Steps that two processes saw differently: loss, samples or state.
    undone: int
    compared: int  # Steps that were seen by more than one process.
    hashes_compared: int


def audit(lives: Iterable[ProcessLife]) -> Audit:
    """Check the steps of all processes against each other."""
    ledger: dict[int, tuple[float, float, str]] = {}  # Step: loss, samples, who saw it first.
    states: dict[int, tuple[str, str]] = {}  # Step: hash, who had it first.
    skipped: list[str] = []
    repeated: list[str] = []
    disagreeing: list[str] = []
    lasts = []
    compared: set[int] = set()
    hashes_compared: set[int] = set()
    for life in lives:
        for stretch in life.stretches():
            last = stretch[-1] if stretch else -1
            abandoned = stretch and (life.fate in DEAD or last + 1 < len(life.steps))
            for index in stretch:
                step = life.steps[index]
                if index > stretch.start and step != life.steps[index - 1] + 1:
                    (skipped if step > life.steps[index - 1] else repeated).append(f"{life.label}: {step}")
                if abandoned and index == last:
                    lasts.append((life, index))
                    continue
                seen = (life.losses[index], life.samples[index], life.label)
                first = ledger.setdefault(step, seen)
                if first[2] != life.label:
                    compared.add(step)
                if first[:2] != seen[:2]:
                    disagreeing.append(f"step {step}: {first} and {seen}")
        skipped += _skipped_at_loads(life)
        dead_ends = {life.steps[index] for each, index in lasts if each is life}
        disagreeing += _compare_hashes(life, dead_ends, states, hashes_compared)
    undone = sum(
        life.steps[index] not in ledger
        or ledger[life.steps[index]][:2] != (life.losses[index], life.samples[index])
        for life, index in lasts
    )
    last_step = max(ledger, default=-1)
    return Audit(
        last=last_step,
        missing=tuple(sorted(set(range(last_step + 1)) - set(ledger))),
        skipped=tuple(skipped),
        repeated=tuple(repeated),
        disagreeing=tuple(disagreeing),
        undone=undone,
        compared=len(compared),
        hashes_compared=len(hashes_compared),
    )


def _skipped_at_loads(life: ProcessLife) -> list[str]:
    """Where it went on from a state that it had loaded to another step than the next."""
    return [
        f"{life.label}: {life.steps[index]} after the state before {step}"
        # Of several states with no step between them, the last.
        for index, step in dict(life.loads).items()
        if index < len(life.steps) and life.steps[index] != step
    ]


def _compare_hashes(
    life: ProcessLife, dead_ends: set[int], states: dict[int, tuple[str, str]], compared: set[int]
) -> list[str]:
    """Compare its states with those of processes before it, but for `dead_ends`. Returns: which differ.

    `states`, by step: hash, and who had it first; it and `compared` grow by this process's steps.
    """
    differ = []
    for step, state in life.hashes.items():
        if step in dead_ends or life.is_astray(step):
            continue
        first = states.setdefault(step, (state, life.label))
        if first[1] != life.label:
            compared.add(step)
        if first[0] != state:
            differ.append(f"state after step {step}: {first[1]} and {life.label} differ")
    return differ


def recovery_s(
    lives: Iterable[ProcessLife], survivors: Sequence[ProcessLife], fault_s: float
) -> float | None:
    """From the fault until every survivor had a step that nobody had before it; None while some have not."""
    before = max((life.step_at(fault_s) for life in lives), default=-1)
    firsts = [life.first_after(before, fault_s) for life in survivors]
    known = [first for first in firsts if first is not None]
    return max(known) - fault_s if known and len(known) == len(firsts) else None


def elected_after(lives: Iterable[ProcessLife], fault_s: float) -> tuple[float, str] | None:
    """Who was elected first after a fault, and how many seconds after."""
    later = [each for life in lives for each in life.elections if each[0] > fault_s]
    first = min(later, default=None)
    return None if first is None else (first[0] - fault_s, first[1])


@dataclass(frozen=True, slots=True)
class Growth:
    """Memory of a process that lived long enough: medians of the first and the last quarter after warm-up."""

    life: str
    seconds: float  # That it lived.
    first_mb: float
    last_mb: float

    @property
    def share(self) -> float:
        return self.last_mb / self.first_mb - 1


def growths(lives: Iterable[ProcessLife], judged_s: float = JUDGED_S) -> list[Growth]:
    """Of all processes that lived `judged_s` beyond `WARM_UP_S`, counted from their first step."""
    found = []
    for life in lives:
        if not life.rss:
            continue
        begin_s, end_s = life.rss[0][0] + WARM_UP_S, life.rss[-1][0]
        if end_s - begin_s < judged_s:
            continue
        quarter_s = (end_s - begin_s) / 4
        first = [size for time_s, size in life.rss if begin_s <= time_s <= begin_s + quarter_s]
        last = [size for time_s, size in life.rss if time_s >= end_s - quarter_s]
        if first and last:
            medians = [statistics.median(each) / 1e6 for each in (first, last)]
            found.append(Growth(life.label, round(end_s - life.rss[0][0], 1), *medians))
    return found


def replicas_identical(ended: Iterable[ProcessLife]) -> bool:
    """Did all that lived to the end stop after the same step with the same state, to the bit?"""
    finals = [life.final for life in ended]
    return bool(finals) and None not in finals and len(set(finals)) == 1


def summarize(
    lives: Sequence[ProcessLife], faults: Sequence[Mapping[str, Any]], is_large: bool = False
) -> dict[str, Any]:
    """All that is promised, from what was written down. `is_large`: is the state?"""
    found, grown = audit(lives), growths(lives, JUDGED_LARGE_S if is_large else JUDGED_S)
    ended = [life for life in lives if not life.fate and life.joined]
    astray = [(life, step) for life in lives for step in life.diverged]
    healed = [end - step for life, step in astray if (end := life.healed_at(step)) is not None]
    kinds = sorted({fault["kind"] for fault in faults})
    elections = [fault["election_s"] for fault in faults if fault.get("election_s") is not None]
    return {
        "steps": found.last + 1,
        "steps_lost": len(found.missing) + len(found.skipped),
        "steps_applied_twice": len(found.repeated),
        "steps_disagreeing": len(found.disagreeing),
        "steps_compared": found.compared,
        "states_compared": found.hashes_compared,
        "last_steps_of_the_dead_done_again": found.undone,
        "wrong": [*map(str, found.missing), *found.skipped, *found.repeated, *found.disagreeing][:20],
        "replicas_identical": replicas_identical(ended),
        "final_by_node": {life.label: life.final for life in ended},
        "faults": len(faults),
        "recovery_seconds_by_kind": {
            kind: spread([fault["recovery_s"] for fault in faults if fault["kind"] == kind]) for kind in kinds
        },
        "elections": spread(elections),
        "divergences": len(astray),
        "divergences_not_healed": sum(
            life.healed_at(step) is None and life.fate not in DEAD for life, step in astray
        ),
        "steps_until_healed": spread(healed),
        "processes": len(lives),
        "fates": {fate or "to the end": sum(life.fate == fate for life in lives) for fate in FATES},
        "memory": {
            "processes_judged": len(grown),
            "longest_life_seconds": max((each.seconds for each in grown), default=0.0),
            "largest_growth": round(max(each.share for each in grown), 4) if grown else None,
            "largest_growth_mb": round(max(each.last_mb - each.first_mb for each in grown), 1)
            if grown
            else None,
            "median_growth": round(statistics.median(each.share for each in grown), 4) if grown else None,
            "processes": [{**asdict(each), "growth": round(each.share, 4)} for each in grown],
        },
    }


FATES = ("", "killed", "expelled", "left", "raised")


def spread(values: Sequence[float]) -> dict[str, float]:
    """Count, median, 90th percentile and maximum."""
    if not values:
        return {"count": 0}
    ordered = sorted(values)
    return {
        "count": len(ordered),
        "median": round(statistics.median(ordered), 3),
        "p90": round(ordered[min(len(ordered) - 1, int(0.9 * len(ordered)))], 3),
        "max": round(ordered[-1], 3),
    }


def broken_promises(summary: Mapping[str, Any]) -> list[str]:
    """What the summary says that should not be; empty if all went well."""
    broken = [
        f"{name} is {summary[name]} (expected 0)"
        for name in ("steps_lost", "steps_applied_twice", "steps_disagreeing", "divergences_not_healed")
        if summary[name]
    ]
    if not summary["replicas_identical"] and summary.get("stopped", "") in ("", INTERRUPTED):
        broken.append("replicas_identical is false (expected the same state on all that lived to the end)")
    growth, grown_mb = summary["memory"]["largest_growth"], summary["memory"].get("largest_growth_mb")
    copy_mb = COPY * summary.get("mb", 0.0)  # A source holds one for joiners, for a while.
    if growth is not None and growth > GROWTH_ALLOWED and (not copy_mb or grown_mb > copy_mb):
        expected = f"{GROWTH_ALLOWED:.0%}" + (
            f", or {copy_mb:.0f} MB, a copy of the state" if copy_mb else ""
        )
        broken.append(f"memory of a process grew by {growth:.1%} (expected at most {expected})")
    median_s = summary["elections"].get("median", 0.0)
    if median_s > ELECTION_S:
        broken.append(f"a new scheduler took {median_s:.2f} s (median; expected at most {ELECTION_S:g} s)")
    return broken
