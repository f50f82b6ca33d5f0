"""`chaosnet simulate`: many random lives of a virtual cluster, each from one seed."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import click

from .protocols.errors import ChaosnetError
from .simulator.random_run import Violation, run

TELL_EVERY_S = 5.0


@dataclass(slots=True)
class Totals:
    """What the runs that went well did."""

    runs: int = 0
    steps: int = 0
    crashes: int = 0
    joins: int = 0
    leaves: int = 0


class SimulationFailed(ChaosnetError):
    """An invariant broke."""


def run_seeds(first: int, seeds: int, report: Path | None) -> None:
    """Run seeds first, first + 1, ...; tell what they did. Raises: SimulationFailed if one broke a rule."""
    totals, story_by_seed = Totals(), dict[int, str]()
    digests: dict[int, str] = {}
    started_s = told_s = time.monotonic()
    for seed in range(first, first + seeds):
        try:
            outcome = run(seed)
        except Violation as violation:
            story_by_seed[seed] = str(violation)
            click.echo(str(violation), err=True)
        else:
            digests[seed] = outcome.digest
            totals.runs += 1
            for name in ("steps", "crashes", "joins", "leaves"):
                setattr(totals, name, getattr(totals, name) + getattr(outcome, name))
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            click.echo(f"{seed - first + 1} of {seeds} runs, {len(story_by_seed)} broke a rule", err=True)
    seconds = time.monotonic() - started_s
    click.echo(_line(totals, seconds))
    if report is not None:
        _write(report, first, seeds, totals, story_by_seed, digests, seconds)
    if story_by_seed:
        named = ", ".join(str(seed) for seed in sorted(story_by_seed)[:10])
        again = min(story_by_seed)
        raise SimulationFailed(
            f"{len(story_by_seed)} of {seeds} runs broke a rule (seeds {named}); "
            f"replay one with: chaosnet simulate --from {again} --seeds 1"
        )


def _line(totals: Totals, seconds: float) -> str:
    return (
        f"{totals.runs} runs kept all rules: {totals.steps} steps, {totals.crashes} crashes, "
        f"{totals.joins} joins, {totals.leaves} leaves in {seconds:.1f} s"
    )


def _write(
    report: Path, first: int, seeds: int, totals: Totals, story_by_seed: dict[int, str],
    digests: dict[int, str], seconds: float,
) -> None:  # fmt: skip
    found = {
        "from": first,
        "seeds": seeds,
        "seconds": round(seconds, 2),
        "totals": asdict(totals),
        "violations": {str(seed): story for seed, story in story_by_seed.items()},
        "digest_by_seed": {str(seed): digest for seed, digest in digests.items()},
    }
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps(found, indent=2) + "\n")
