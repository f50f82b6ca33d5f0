"""Chameleon, Sec. V-F: how long the search for a plan takes."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..scheduler.elastic.layouts import best_layout, get_execution_plan
from ..scheduler.elastic.profile import llama2
from ..scheduler.elastic.splits import PipelineTimes
from ..settings.options import Several, Whole
from .chameleon_churn import NPU_GIB
from .figures import Found, outputs, publish, table

NUMBERS = Several(Whole(1, 100_000))
SEARCH_PAPER = {256: 1.152, 1024: 19.25, 2048: 40.48}
OPEN_SEARCH = (
    "the ranges of DP and PP, the batch, how many faults, the machine, and what is in the seconds; Algorithm 1 as"
    " printed goes through partitions, which explode with the range of lengths."
)


def measure_search(workers: Sequence[int], stages: int, reference: Sequence[int], limit_s: float) -> Found:
    """Seconds of a search for the loss of one worker: of everything (cold), and of the next loss (warm).

    R_pp is 1 to 16, R_dp as many pipelines as there were, give or take two. Algorithm 1 as printed is run at sizes
    `reference` until one takes longer than `limit_s`, as it goes through all partitions.
    """
    profile = llama2("7b")
    rows: list[Found] = []
    printed_s = 0.0
    for count in sorted({*workers, *reference}):
        before = count // stages
        micro_batches = 8 * before
        near = [each for each in (before, before - 1, before + 1, before - 2, before + 2) if each > 0]
        times = PipelineTimes(profile, 1, NPU_GIB * 2**30)
        search = functools.partial(
            best_layout, times, pipelines=near, stages=range(1, 17), micro_batches=micro_batches
        )
        cold_s, found = _timed(functools.partial(search, count - 1))
        warm_s, _ = _timed(functools.partial(search, count - 2))
        row: Found = {
            "workers": count, "cold_s": cold_s, "warm_s": warm_s, "step_s": found.time_s,
            "paper_s": SEARCH_PAPER.get(count),
        }  # fmt: skip
        if count in reference and printed_s < limit_s:
            printed = functools.partial(
                get_execution_plan, times, count, 1, near, range(1, 17), micro_batches
            )
            printed_s, plan = _timed(printed)
            row |= {"reference_s": printed_s, "reference_step_s": plan.time_s}
        rows.append(row)
    large = [row for row in rows if row["workers"] in workers]
    growth = {name: _growth(large, name) for name in ("cold_s", "warm_s", "paper_s")}
    growth["reference_s"] = _growth(rows, "reference_s")
    paper = {str(count): seconds for count, seconds in SEARCH_PAPER.items()}
    return {"rows": rows, "growth": growth, "paper": paper, "open": OPEN_SEARCH}


def _timed(search: Any) -> tuple[float, Any]:
    started = time.perf_counter()
    found = search()
    return time.perf_counter() - started, found


def _growth(rows: Sequence[Found], name: str) -> float | None:
    """Least squares of log seconds over log workers."""
    known = [
        (math.log(row["workers"]), math.log(row[name])) for row in rows if row.get(name) and row[name] > 0
    ]
    if len(known) < 2:
        return None
    mean_x = sum(x for x, _ in known) / len(known)
    mean_y = sum(y for _, y in known) / len(known)
    across = sum((x - mean_x) ** 2 for x, _ in known)
    return sum((x - mean_x) * (y - mean_y) for x, y in known) / across


def _draw_search(figure: Any, found: Found) -> None:
    axes = figure.subplots()
    labels = {"cold_s": "ours, cold", "warm_s": "ours, warm", "reference_s": "Algorithm 1 as printed",
              "paper_s": "paper"}  # fmt: skip
    for name, label in labels.items():
        drawn = [(row["workers"], row[name]) for row in found["rows"] if row.get(name)]
        if drawn:
            growth = found["growth"].get(name)
            power = f" (workers ^ {growth:.2f})" if growth is not None else ""
            colour = "black" if name == "paper_s" else None
            axes.loglog(*zip(*drawn, strict=True), "o-", label=label + power, color=colour)
    axes.set(xlabel="workers", ylabel="seconds of a search", title="Chameleon, Sec. V-F")
    counts = [row["workers"] for row in found["rows"]]
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()


@click.command("chameleon-search-time")
@click.option("--workers", type=NUMBERS, default="256,512,1024,2048,4096", show_default=True)
@click.option("--stages", type=Whole(1, 32), default=8, show_default=True, help="Of the pipelines so far.")
@click.option(
    "--reference",
    type=NUMBERS,
    default="16,24,32,40,48",
    show_default=True,
    help="Workers, for Algorithm 1 as printed.",
)
@outputs
def search_time_command(
    workers: Sequence[int],
    stages: int,
    reference: Sequence[int],
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """How long the search for a plan takes."""
    found = measure_search(workers, stages, reference, 10.0)
    rows = [
        (row["workers"], f"{row['cold_s']:.4f}", f"{row['warm_s']:.4f}", row.get("reference_s"), row["paper_s"],
         row["step_s"], row.get("reference_step_s"))
        for row in found["rows"]
    ]  # fmt: skip
    table(("workers", "cold s", "warm s", "as printed s", "paper s", "step s", "step s as printed"), rows)
    grown = {name: f"{of:.2f}" for name, of in found["growth"].items() if of is not None}
    click.echo(f"seconds grow as workers to the power of: {grown}")
    publish(found, json_file, plot_file, _draw_search)
