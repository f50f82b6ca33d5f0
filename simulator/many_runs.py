"""Many random lives at once, over several processes."""

from __future__ import annotations

import functools
import hashlib
import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from .coverage import expected
from .random_run import AIMS, LifeOptions, LifeOutcome, Violation, run

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[["Summary"], None]
COUNTS = ("steps", "crashes", "joins", "leaves", "rejoins", "returns", "persons")


@dataclass(slots=True)
class Summary:
    """What many runs came to, so far or at the end. Seeds are counted in order, so what is done is a range."""

    options: LifeOptions = field(default_factory=LifeOptions)
    runs: int = 0
    totals: Counter[str] = field(default_factory=Counter)  # Of those that kept all rules.
    waited: Counter[str] = field(default_factory=Counter)  # Why a pair waited for a person: in how many runs.
    waiting: int = 0  # Runs in which one did.
    kinds: Counter[str] = field(default_factory=Counter)  # What only some lives have: how many of these.
    coverage: Counter[str] = field(default_factory=Counter)  # Name: in how many runs it was reached.
    violations: dict[int, str] = field(default_factory=dict)  # Seed: which rule broke, and the story.
    digest: str = ""  # Of all that happened in all runs.

    def total(self, what: str) -> int:
        """Sum of a count ("steps", "crashes", "joins", "leaves", "rejoins", "returns", "persons") over the runs."""
        return self.totals[what]

    def add(self, seed: int, result: LifeOutcome | str) -> None:
        """One more run, and what came of it."""
        self.runs += 1
        if isinstance(result, str):
            self.violations[seed] = result
            return
        self.totals.update({name: getattr(result, name) for name in COUNTS})
        self.coverage.update(result.coverage)
        self.waited.update(result.waited)
        self.kinds.update(result.kinds)
        self.waiting += bool(result.waited)
        self.digest = hashlib.sha256(f"{self.digest} {result.digest}".encode()).hexdigest()

    def unreached(self) -> list[str]:
        """Names of what no run has come by."""
        return sorted(expected(AIMS, self.options.tensors or self.options.parts) - self.coverage.keys())

    def describe(self, most: int = 3) -> str:
        """How many runs broke a rule, with the stories of the first of them and the commands that replay them."""
        told = [self.violations[seed] for seed in sorted(self.violations)[:most]]
        where = "" if self.options == LifeOptions() else self.options.given
        again = [
            f"replay with: chaosnet simulate --seed {seed}{where}" for seed in sorted(self.violations)[:1]
        ]
        return "\n\n".join([f"{len(self.violations)} of {self.runs} runs broke a rule", *told, *again])


def run_many(
    seeds: Iterable[int], processes: int | None = None, on_progress: Progress | None = None, **options: Any
) -> Summary:
    """Run each seed once. `on_progress` is called after each run, in the calling process.

    Args:
        processes: default: one per core; 1 runs everything here.
        options: those of `LifeOptions`.
    """
    summary = Summary(LifeOptions(**options))
    run_one = functools.partial(_run, options=options)
    for seed, result in in_processes(run_one, _listed(seeds), processes):
        summary.add(seed, result)
        if on_progress is not None:
            on_progress(summary)
    return summary


def in_processes(
    run_one: Callable[[Item], Result], items: Sequence[Item], processes: int | None = None
) -> Iterator[Result]:
    """`run_one` of each item, in order, over several processes. Default: one per core; 1 runs all here."""
    processes = processes or os.cpu_count() or 1
    if processes == 1 or len(items) < 2:
        yield from map(run_one, items)
        return
    # Not fork: whoever calls this may have threads.
    with multiprocessing.get_context("spawn").Pool(processes, _ignore_interrupts) as pool:
        yield from pool.imap(run_one, items, chunksize=2)


def _listed(seeds: Iterable[int]) -> Sequence[int]:
    return seeds if isinstance(seeds, range) else list(seeds)


def _ignore_interrupts() -> None:
    """Ctrl+C reaches all processes of a terminal; the first of them ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(seed: int, options: dict[str, Any]) -> tuple[int, LifeOutcome | str]:
    try:
        return seed, run(seed, **options)
    except Violation as violation:
        return seed, str(violation)
