"""`chaosnet plan`: what a cluster would do after a loss, and why."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from ..protocols.errors import ConfigError
from ..scheduler.elastic.estimator import Estimator
from ..scheduler.elastic.policy import FaultClock, RecoveryPolicy
from ..scheduler.elastic.recoveries import Recoveries
from ..scheduler.elastic.state import State
from ..simulator.scenario import profile_named, read_yaml
from ..terminal.console import console
from . import cluster_file


def explain(cluster_path: Path, profile_name: str, failed: Sequence[str], as_json: bool) -> None:
    """Print how the cluster would go on without the workers `failed`, and why.

    Raises: ConfigError for a bad file or name, PlanInfeasible if there is no way to go on.
    """
    profile = profile_named(profile_name)
    data = read_yaml(cluster_path)
    cluster, state, between_s = cluster_file.read(data, len(profile.layers), str(cluster_path))
    for worker in failed:
        if worker not in cluster.workers:
            raise ConfigError(f"--fail {worker}: unknown (expected one of {', '.join(cluster.workers)})")
    recoveries = Recoveries(profile, cluster)
    choice = RecoveryPolicy(recoveries, state, FaultClock(between_s)).lost(*failed)
    after = choice.recovery.state
    found = {
        "before": _figures(recoveries.estimator, state),
        "chosen": choice.recovery.family,
        "candidates": choice.explain(),
        "pipelines": _pipelines(after),
        "idle": sorted(after.idle),
        "between_faults_s": between_s,
    }
    click.echo(json.dumps(found, indent=2, allow_nan=False)) if as_json else _show(found, failed)


def _figures(estimator: Estimator, state: State) -> dict[str, float]:
    step_s = estimator.estimate(state.plan).step_s
    return {"step_s": step_s, "samples_per_s": state.batch / step_s}


def _pipelines(state: State) -> list[dict[str, Any]]:
    return [
        {
            "workers": [worker for worker in each.workers if worker not in state.lost],
            "lost": [worker for worker in each.workers if worker in state.lost],
            "layers": [hop.stop - hop.start for hop in each.stages],
            "micro_batches": count,
        }
        for each, count in zip(state.pipelines, state.counts, strict=True)
    ]


def _show(found: dict[str, Any], failed: Sequence[str]) -> None:
    out, before = console(), found["before"]
    out.print(
        f"before: {before['step_s']:.3f} s a step, {before['samples_per_s']:.2f} samples/s", highlight=False
    )
    table = Table(title=f"without {', '.join(failed)}", title_justify="left", box=None)
    for name in ("family", "step s", "samples/s", "stands s", "GB moved", "memory", "workers", "score"):
        table.add_column(name, justify="left" if name == "family" else "right")
    for row in found["candidates"]:
        if "reason" not in row:
            table.add_row(
                row["family"], f"{row['step_s']:.3f}", f"{row['samples_per_s']:.2f}", f"{row['transition_s']:.2f}",
                f"{row['bytes_moved'] / 1e9:.2f}", f"{row['memory_share']:.0%}", str(row["workers"]),
                f"{row['score']:.3f}",
            )  # fmt: skip
    out.print(table)
    shown = {row["family"] for row in found["candidates"] if "reason" not in row}
    for row in found["candidates"]:
        if "reason" in row:  # A family may have several forms.
            form = f"another form of {row['family']}" if row["family"] in shown else row["family"]
            out.print(f"  not {form}: {row['reason']}")
    hours = found["between_faults_s"] / 3600
    out.print(
        f"chosen: {found['chosen']}, with which most samples are trained until the next fault, expected in "
        f"{hours:g} h (docs/planner.md)"
    )
    _show_pipelines(found, out)


def _show_pipelines(found: dict[str, Any], out: Console) -> None:
    def looks(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["layers"], row["micro_batches"], bool(row["lost"])

    for (layers, micro_batches, hurt), rows in groupby(found["pipelines"], key=looks):
        of = list(rows)
        names = "; ".join(" ".join(row["workers"]) for row in of[:4]) + ("; ..." if len(of) > 4 else "")
        lost = f", without {' '.join(name for row in of for name in row['lost'])}" if hurt else ""
        out.print(
            f"  {len(of)} x layers {'+'.join(map(str, layers))}, {micro_batches} micro-batches{lost}: {names}"
        )
    if found["idle"]:
        out.print(f"  idle: {' '.join(found['idle'])}")
