"""Many random lives at once, over several processes."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from .random_run import Outcome, Violation, run

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
        """Sum of a count ("steps", "crashes", "joins", "leaves", "rejoins", "returns") over the outcomes."""
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
    for seed, result in _results(list(seeds), processes or os.cpu_count() or 1):
        if isinstance(result, Outcome):
            summary.outcomes.append(result)
        else:
            summary.violations[seed] = result
        if on_progress is not None:
            on_progress(summary)
    summary.outcomes.sort(key=lambda outcome: outcome.seed)
    return summary


def _results(seeds: list[int], processes: int) -> Iterable[tuple[int, Outcome | str]]:
    if processes == 1 or len(seeds) < 2:
        yield from map(_run, seeds)
        return
    # Not fork: whoever calls this may have threads.
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        yield from pool.imap_unordered(_run, seeds, chunksize=2)


def _run(seed: int) -> tuple[int, Outcome | str]:
    try:
        return seed, run(seed)
    except Violation as violation:
        return seed, str(violation)
