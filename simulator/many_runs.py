"""Many random lives at once, over several processes."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from .random_run import Outcome, Violation, run

Item = TypeVar("Item")
Result = TypeVar("Result")
Progress = Callable[["Summary"], None]


@dataclass(slots=True)
class Summary:
    """What many runs came to, so far or at the end."""

    outcomes: list[Outcome] = field(default_factory=list)  # Of those that kept all rules.
    violations: dict[int, str] = field(default_factory=dict)  # Seed: which rule broke, and the story.

    @property
    def runs(self) -> int:
        return len(self.outcomes) + len(self.violations)

    def total(self, what: str) -> int:
        """Sum of a count ("steps", "crashes", "joins", "leaves", "rejoins") over the outcomes."""
        return sum(getattr(outcome, what) for outcome in self.outcomes)

    def describe(self, most: int = 3) -> str:
        """How many broke a rule; the stories of the first of them, and how to see them again."""
        told = [self.violations[seed] for seed in sorted(self.violations)[:most]]
        again = [
            f"replay with: chaosnet simulate --from {seed} --seeds 1" for seed in sorted(self.violations)[:1]
        ]
        return "\n\n".join([f"{len(self.violations)} of {self.runs} runs broke a rule", *told, *again])


def run_many(
    seeds: Iterable[int], processes: int | None = None, on_progress: Progress | None = None
) -> Summary:
    """Run each seed once. `on_progress` is called after each run, in the calling process.

    Args:
        processes: default: one per core; 1 runs everything here.
    Returns: outcomes in the order of their seeds.
    """
    summary = Summary()
    for seed, result in in_processes(_run, list(seeds), processes):
        if isinstance(result, Outcome):
            summary.outcomes.append(result)
        else:
            summary.violations[seed] = result
        if on_progress is not None:
            on_progress(summary)
    summary.outcomes.sort(key=lambda outcome: outcome.seed)
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


def _ignore_interrupts() -> None:
    """Ctrl+C reaches all processes of a terminal; the first of them ends the others."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _run(seed: int) -> tuple[int, Outcome | str]:
    try:
        return seed, run(seed)
    except Violation as violation:
        return seed, str(violation)
