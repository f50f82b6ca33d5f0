"""What `chaosnet simulate` runs: random lives of a virtual cluster, crash points, and cores broken on purpose."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from ..protocols.errors import ChaosnetError
from ..simulator import Summary, run_many
from ..simulator.crash_points import Played, enumerate_points, play, play_all, point_named
from ..simulator.hunt import Hunt, hunt_all
from ..simulator.many_runs import COUNTS
from ..simulator.mutants import MUTANTS
from ..simulator.random_run import LifeOptions, RandomRun, Violation
from ..terminal.outputs import write_json

TELL_EVERY_S = 5.0
LIVES_OF_COVERAGE = 10_000  # Fewer lives miss rare states by chance, so what they miss is not listed.
NAMED = 5  # Crash points, not reached, that are named for each negotiation.


class SimulationFailed(ChaosnetError):
    """A rule was broken, or a mutant was not caught; the text says how to see it again."""


def run_seeds(first: int, schedules: int, report: Path | None, options: dict[str, Any]) -> None:
    """Run seeds first, first + 1, ... on all processors, and print what they did.

    Args:
        options: Those of `LifeOptions`.
    Raises: SimulationFailed if a run broke a rule, KeyboardInterrupt, after a summary, for Ctrl+C.
    """
    started_s, tell = time.monotonic(), _Teller()
    so_far, told = [Summary(LifeOptions(**options))], set[int]()

    def progress(summary: Summary) -> None:
        so_far[0] = summary
        for seed in summary.violations.keys() - told:
            told.add(seed)
            click.echo(summary.violations[seed].partition("\n")[0], err=True)
        tell(lambda: f"{summary.runs} of {schedules} runs, {len(summary.violations)} broke a rule")

    interrupted = False
    try:
        seeds = range(first, first + schedules)
        run_many(seeds, on_progress=progress, **options)
    except KeyboardInterrupt:
        interrupted = True
    summary, seconds = so_far[0], time.monotonic() - started_s
    found = _found(summary, first, seconds)
    write_json(report, found)
    _tell_summary(summary, found)
    if interrupted:
        rest = f"--schedules {schedules - summary.runs} --from {first + summary.runs}"
        done = f"seeds {first} to {first + summary.runs - 1} are done" if summary.runs else "no seed is done"
        click.echo(f"{done}; go on with: chaosnet simulate {rest}{summary.options.given}", err=True)
    if summary.violations:
        click.echo(summary.describe(), err=True)
        seeds_named = ", ".join(map(str, sorted(summary.violations)[:10]))
        raise SimulationFailed(
            f"simulate: {len(summary.violations)} of {summary.runs} runs broke a rule (seeds {seeds_named})"
        )
    if interrupted:
        raise KeyboardInterrupt


def _tell_summary(summary: Summary, found: dict[str, Any]) -> None:
    kept = summary.runs - len(summary.violations)
    totals = ", ".join(f"{summary.total(name)} {name}" for name in COUNTS)
    click.echo(
        f"{kept} of {summary.runs} runs kept all rules: {totals} in {found['seconds']:.1f} s"
        f" ({found['rate_per_s']:.1f} a second)"
    )
    kinds = "; ".join(f"{count} with {kind}" for kind, count in summary.kinds.most_common())
    click.echo(f"of these lives {kinds or 'none was out of the ordinary'}")
    reasons = ", ".join(f"{why}: {count}" for why, count in summary.waited.most_common())
    click.echo(
        f"in {summary.waiting} runs one of two waited for a person" + (f" ({reasons})" if reasons else "")
    )
    unreached = summary.unreached()
    few = summary.runs < LIVES_OF_COVERAGE
    usual = (
        f", which is usual: from {LIVES_OF_COVERAGE:,} lives on they are listed" if few and unreached else ""
    )
    click.echo(f"coverage: {len(summary.coverage)} reached, {len(unreached)} not{usual}")
    for name in () if few else unreached:
        click.echo(f"  not reached: {name}")


def _found(summary: Summary, first: int, seconds: float) -> dict[str, Any]:
    return {
        "from": first,
        "schedules": summary.runs,
        **asdict(summary.options),
        "kinds": dict(summary.kinds),
        "seconds": round(seconds, 2),
        "rate_per_s": round(summary.runs / seconds, 2),
        "totals": {name: summary.total(name) for name in COUNTS},
        "pairs_that_waited": {"runs": summary.waiting, "by_reason": dict(summary.waited)},
        "coverage": {
            "runs_by_name": dict(sorted(summary.coverage.items())),
            "unreached": summary.unreached(),
        },
        "violations": len(summary.violations),
        "stories": {str(seed): story for seed, story in sorted(summary.violations.items())},
        "digest": summary.digest,
    }


def replay_seed(seed: int, trace: Path | None, options: dict[str, Any]) -> None:
    """Run one seed, and write its story to `trace` if that is given. Raises: SimulationFailed with the story."""
    life = RandomRun(seed, LifeOptions(**options), trace is not None)
    try:
        outcome = life.run()
    except Violation as violation:
        raise SimulationFailed(f"simulate: {violation}") from None
    finally:
        _write_trace(trace, life.sim.told_lines)
    click.echo(f"seed {seed} kept all rules: " + ", ".join(f"{getattr(outcome, n)} {n}" for n in COUNTS))


def run_crash_points(nodes: tuple[int, int], seeds: int, restart: bool, report: Path | None) -> None:
    """Crash at every message of every negotiation; print how many there were. Raises: SimulationFailed."""
    started_s, tell = time.monotonic(), _Teller()
    points = enumerate_points(range(nodes[0], nodes[1] + 1), range(seeds), restart=restart)

    def progress(played: dict[str, Played]) -> None:
        tell(lambda: f"{sum(each.points for each in played.values())} of {len(points)} crash points")

    played = play_all(points, on_progress=progress)
    seconds = time.monotonic() - started_s
    violations = {name: story for each in played.values() for name, story in each.violations.items()}
    for name, each in played.items():
        kinds = ", ".join(f"{kind} {count}" for kind, count in sorted(each.by_kind.items()))
        click.echo(f"{name}: {each.points} crash points ({kinds})")
        for unreached in each.not_reached[:NAMED]:
            click.echo(f"  not reached: {unreached}")
        if len(each.not_reached) > NAMED:
            click.echo(f"  and {len(each.not_reached) - NAMED} more (--json names all)")
    reached = len(points) - sum(len(each.not_reached) for each in played.values())
    click.echo(
        f"{len(points)} crash points, {reached} reached, {len(violations)} broke a rule in {seconds:.0f} s"
    )
    write_json(
        report,
        {
            "nodes": list(nodes),
            "seeds": seeds,
            "restart": restart,
            "seconds": round(seconds, 2),
            "points": len(points),
            "reached": reached,
            "not_reached": [name for each in played.values() for name in each.not_reached],
            "points_by_negotiation": {name: each.points for name, each in played.items()},
            "points_by_kind": {name: dict(sorted(each.by_kind.items())) for name, each in played.items()},
            "violations": len(violations),
            "stories": violations,
        },
    )
    if violations:
        first = min(violations)
        click.echo(violations[first], err=True)
        raise SimulationFailed(
            f"simulate: {len(violations)} of {len(points)} crash points broke a rule;"
            f" replay with: chaosnet simulate --crash-point {first}"
        )


def replay_point(name: str, trace: Path | None) -> None:
    """Play one crash point, and write its story to `trace` if that is given.

    Raises: SimulationFailed with the story, ConfigError for a name of none.
    """
    point, stages = point_named(name), list[Any]()
    try:
        play(point, stages.append, record=trace is not None)
    except Violation as violation:
        raise SimulationFailed(f"simulate: {violation}") from None
    finally:
        _write_trace(trace, stages[0].told_lines)
    click.echo(f"{name} kept all rules ({point.sent.kind} from {point.sent.sender} to {point.sent.receiver})")


def run_mutants(report: Path | None) -> None:
    """Break the cores on purpose, each rule by itself. Raises: SimulationFailed naming those not caught."""
    hunts = []
    for each in hunt_all():
        hunts.append(each)
        caught = f"caught after {each.lives} lives by {each.by}: {each.why}" if each.by else "SURVIVED"
        click.echo(f"{each.mutant}: {MUTANTS[each.mutant].breaks}\n    {caught}")
    survivors = [each.mutant for each in hunts if not each.by]
    click.echo(f"{len(hunts) - len(survivors)} of {len(hunts)} mutants were caught")
    write_json(report, {"mutants": {each.mutant: _hunted(each) for each in hunts}, "survivors": survivors})
    if survivors:
        raise SimulationFailed(f"simulate: not caught: {', '.join(survivors)}")


def _hunted(each: Hunt) -> dict[str, Any]:
    return {"breaks": MUTANTS[each.mutant].breaks, "lives": each.lives, "by": each.by, "why": each.why}


def _write_trace(trace: Path | None, lines: Callable[[], list[str]]) -> None:
    if trace is not None:
        trace.write_text("\n".join(lines()) + "\n")


class _Teller:
    """Prints a line on progress, at most once in TELL_EVERY_S."""

    def __init__(self) -> None:
        self.told_s = time.monotonic()

    def __call__(self, text: Callable[[], str]) -> None:
        if time.monotonic() - self.told_s > TELL_EVERY_S:
            self.told_s = time.monotonic()
            click.echo(text(), err=True)
