"""Recoveries ready before they are needed: how long they take to work out, and to look up (Chameleon, Sec. IV-A)."""

from __future__ import annotations

import random
import statistics
import time
from pathlib import Path
from typing import Any

import click

from ..scheduler.elastic.cluster import alike
from ..scheduler.elastic.plan import Pipeline, cuts_of, even
from ..scheduler.elastic.policy import RecoveryPolicy
from ..scheduler.elastic.profile import llama2
from ..scheduler.elastic.recoveries import Recoveries
from ..scheduler.elastic.state import State
from ..settings.options import Whole
from ..terminal.outputs import json_option, write_json

LOOKUPS = 500
MEMORY_BYTES = 64e9


def measure(pipelines: int, stages: int, losses: int, micro_batches: int, seed: int = 0) -> dict[str, Any]:
    """All kinds of up to `losses` losses of Llama-2 7B, then so many lookups of random workers."""
    profile = llama2("7b")
    cuts = cuts_of(even(len(profile.layers), stages))
    rows = tuple(Pipeline(tuple(f"p{i}s{s}" for s in range(stages)), cuts) for i in range(pipelines))
    workers = [worker for each in rows for worker in each.workers]
    state = State(rows, (micro_batches,) * pipelines, 1)
    policy = RecoveryPolicy(Recoveries(profile, alike(workers, MEMORY_BYTES)), state)
    started_s = time.perf_counter()
    kinds = max(policy.prepare(losses))
    prepared_s = time.perf_counter() - started_s
    rng, looked_up_s = random.Random(seed), []
    for _ in range(LOOKUPS):
        lost = rng.sample(workers, rng.randint(1, losses))
        started_s = time.perf_counter()
        assert policy.lost(*lost).recovery
        looked_up_s.append(time.perf_counter() - started_s)
    return {
        "workers": len(workers),
        "kinds": kinds,
        "prepared_s": prepared_s,
        "lookup_median_s": statistics.median(looked_up_s),
        "lookup_99_s": statistics.quantiles(looked_up_s, n=100)[98],
    }


@click.command("policy")
@click.option("--pipelines", type=Whole(1, 1000), default=64, show_default=True)
@click.option("--stages", type=Whole(1, 32), default=4, show_default=True)
@click.option("--losses", type=Whole(1, 8), default=2, show_default=True, help="At once, at most.")
@click.option(
    "--micro-batches", type=Whole(1, 10_000), default=8, show_default=True, help="Of each pipeline."
)
@json_option
def command(pipelines: int, stages: int, losses: int, micro_batches: int, json_file: Path | None) -> None:
    """Work out what to do after every loss, then look losses up."""
    if losses >= pipelines * stages:
        raise click.UsageError(
            f"--losses: {losses} of {pipelines * stages} workers (expected fewer than all)"
        )
    found = measure(pipelines, stages, losses, micro_batches)
    click.echo(
        f"{found['workers']} workers: {found['kinds']} kinds of up to {losses} losses in {found['prepared_s']:.2f} s;"
        f" looked up in {found['lookup_median_s'] * 1e3:.3f} ms (median), {found['lookup_99_s'] * 1e3:.3f} ms (99 %)"
    )
    write_json(json_file, found)
