"""`chaosnet simulate --churn`: what an event costs in a cluster of many nodes."""

from __future__ import annotations

import time
from pathlib import Path

import click

from ..simulator.scale import CHURN, KINDS, EventCost, Findings, ScaleRun
from ..terminal.outputs import write_json

TELL_EVERY_S = 10.0
STEP_S = 0.5  # Virtual.
COLUMNS = "{:<16}{:>7}{:>10}{:>14}{:>15}{:>12}{:>13}{:>11}{:>11}"


def run_scale(nodes: int, churn_per_s: float, hours: float, seed: int, report: Path | None) -> None:
    """Simulate, and print what each kind of event has cost; after Ctrl+C, what was found so far."""
    seconds = 3600 * hours
    click.echo(
        f"{nodes} nodes, steps of {STEP_S:g} s: one each of {', '.join(KINDS)}; then {seconds:g} s of virtual"
        f" time with {churn_per_s:g} events a second ({', '.join(dict.fromkeys(CHURN))}), about"
        f" {churn_per_s * seconds:.0f} in all. Seed {seed}. Ctrl+C ends it early and tells what was found."
    )
    started_s = told_s = time.monotonic()

    def progress(text: str) -> None:
        nonlocal told_s
        if time.monotonic() - told_s > TELL_EVERY_S:
            told_s = time.monotonic()
            click.echo(f"[{told_s - started_s:.0f} s] {text}", err=True)

    sizes, times = (
        ("messages", "KB per node", "KB sent, most"),
        ("scheduler", "other nodes", "in force", "90 %"),
    )
    click.echo(COLUMNS.format("", "events", *sizes, *times))
    run = ScaleRun(nodes, churn_per_s, seconds, STEP_S, seed)
    found = run.run(progress, on_row=lambda row: click.echo(_line(row)))
    wall_s = time.monotonic() - started_s
    _tell(found, wall_s)
    write_json(report, {"seed": seed, "wall_s": round(wall_s, 1), **found.to_plain()})


def _tell(found: Findings, wall_s: float) -> None:
    click.echo(
        "per event: messages, each counted on every link it takes; bytes; processor time of the scheduler's core"
        " and, each, of the others'; virtual time until all act in the view, median and 90 %"
    )
    click.echo(
        f"at rest, per node: {found.step_bytes_per_node:.0f} bytes a step,"
        f" {found.report_bytes_per_node_and_s:.0f} bytes of reports a second,"
        f" {found.heartbeat_bytes_per_node_and_s:.0f} bytes of heartbeats a second (counted, not sent)"
    )
    unfinished = sum(row.unfinished for row in found.rows)
    click.echo(
        f"{found.views} views in {found.seconds:.0f} s and before, {unfinished} events not in force at the end,"
        f" {found.waiting_at_end} changes waiting; {wall_s:.0f} s ({found.cpu_s:.0f} s of processor time)"
    )


def _line(row: EventCost) -> str:
    return COLUMNS.format(
        row.kind,
        row.events,
        f"{row.messages_per_event:.0f}",
        f"{row.bytes_per_node_and_event / 1e3:.1f}",
        f"{row.most_bytes_of_one_node / 1e3:.1f}",
        f"{row.scheduler_ms_per_event:.1f} ms",
        f"{row.other_node_ms_per_event:.2f} ms",
        _seconds(row.converged_s),
        _seconds(row.converged_p90_s),
    )


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"
