"""`chaosnet simulate-training`: systems side by side through the same failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import msgspec
from rich.table import Table

from ..simulator.scenario import Scenario, load, runs_of, summary
from ..simulator.training import HOUR_S, TrainingRun
from ..terminal.console import console
from ..terminal.outputs import write_json
from ..terminal.progress import followed

PARTS = 72
"""Parts of the time, of which a picture shows the averages."""


def run_scenario(path: Path, seeds: int | None, report: Path | None, picture: Path | None) -> None:
    """Run a scenario and print a table; `report` gets it as JSON, `picture` the first run.

    Raises: ConfigError for a file that is no scenario, PlanInfeasible for one that cannot begin.
    """
    scenario = load(path)
    if seeds is not None:
        scenario = msgspec.structs.replace(scenario, seeds=seeds)
    runs = list(followed(runs_of(scenario), scenario.seeds, "runs"))
    found = summary(scenario, runs)
    show(found)
    write_json(report, found)
    if picture is not None:
        draw(scenario, runs, picture)
        click.echo(f"picture of the first run in {picture}")


def show(found: dict[str, Any]) -> None:
    """Print a table of averages and ratios."""
    table = Table(title=f"{found['scenario']}, {found['seeds']} runs", title_justify="left", box=None)
    for name in ("system", "samples/s", "chaosnet is", "stands still", "recoveries a run"):
        table.add_column(name, justify="left" if name in ("system", "recoveries a run") else "right")
    for name, row in found["systems"].items():
        ratio = found["ratios"].get(f"chaosnet/{name}")
        times = f"{ratio['mean']:.3f} ({ratio['low']:.3f} to {ratio['high']:.3f}) times" if ratio else ""
        recoveries = ", ".join(f"{count:.1f} {family}" for family, count in row["recoveries"].items())
        table.add_row(name, f"{row['samples_per_s']:.3f}", times, f"{row['stood_share']:.1%}", recoveries)
    console().print(table)


def draw(scenario: Scenario, runs: Sequence[dict[str, TrainingRun]], picture: Path) -> None:
    """Draw workers and throughput of the first run; in averages, as single drops to zero would hide the rest."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[1, 3])
    for name, one in runs[0].items():
        hours = [part * scenario.hours / PARTS for part in range(PARTS + 1)]
        speeds = one.averages(PARTS)
        below.step(
            hours, [*speeds, speeds[-1]], where="post", label=name, linewidth=2 if name == "chaosnet" else 1
        )
    spans = max(runs[0].values(), key=lambda each: len(each.spans)).spans
    hours = [each.from_s / HOUR_S for each in spans] + [scenario.hours]
    above.step(hours, [*(each.workers for each in spans), spans[-1].workers], where="post", color="black")
    above.set_ylabel("workers")
    above.set_title(scenario.name, fontsize=11)
    below.set_ylabel(f"samples/s, of {60 * scenario.hours / PARTS:.3g} min each")
    below.set_xlabel("hours")
    below.set_ylim(bottom=0)
    below.legend(fontsize=8, ncols=2)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
