"""`chaosnet simulate`: many random lives of a virtual cluster, each from one seed."""

from __future__ import annotations

import json
import time
from pathlib import Path

import click

from .protocols.errors import ChaosnetError
from .simulator import Summary, run_many

TELL_EVERY_S = 5.0
COUNTS = ("steps", "crashes", "joins", "leaves", "rejoins")


class SimulationFailed(ChaosnetError):
    """A rule was broken; the seeds say how to see it again."""


def run_seeds(first: int, seeds: int, report: Path | None) -> None:
    """Run seeds first, first + 1, ... on all cores; tell what they did. Raises: SimulationFailed."""
    started_s = told_s = time.monotonic()

    def progress(summary: Summary) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            click.echo(f"{summary.runs} of {seeds} runs, {len(summary.violations)} broke a rule", err=True)

    summary = run_many(range(first, first + seeds), on_progress=progress)
    seconds = time.monotonic() - started_s
    totals = ", ".join(f"{summary.total(name)} {name}" for name in COUNTS)
    click.echo(f"{len(summary.outcomes)} of {summary.runs} runs kept all rules: {totals} in {seconds:.1f} s")
    if report is not None:
        report.parent.mkdir(parents=True, exist_ok=True)
        report.write_text(json.dumps(_found(summary, first, seeds, seconds), indent=2) + "\n")
    if summary.violations:
        click.echo(summary.describe(), err=True)
        seeds_named = ", ".join(map(str, sorted(summary.violations)[:10]))
        raise SimulationFailed(
            f"simulate: {len(summary.violations)} of {summary.runs} runs broke a rule (seeds {seeds_named})"
        )


def _found(summary: Summary, first: int, seeds: int, seconds: float) -> dict[str, object]:
    return {
        "from": first,
        "seeds": seeds,
        "seconds": round(seconds, 2),
        "totals": {name: summary.total(name) for name in COUNTS},
        "violations": {str(seed): story for seed, story in sorted(summary.violations.items())},
        "digest_by_seed": {str(outcome.seed): outcome.digest for outcome in summary.outcomes},
    }
