"""`chaosnet simulate`: the protocol on a virtual network."""

from __future__ import annotations

from pathlib import Path

import click

from ..settings.options import Amount, NodeRange, PerSecond, Whole
from ..terminal.outputs import OutputFile, json_option

MAX_CRASH_NODES = 5  # As in simulator/crash_points.py: there are tens of thousands of points for more.
# By the option that says what to run: the options that may go with it.
SIMULATED = {
    "--schedules": ("--from", "--nodes", "--hard", "--rates", "--far", "--tensors", "--parts", "--json"),
    "--seed": ("--nodes", "--hard", "--rates", "--far", "--tensors", "--parts", "--trace"),
    "--crash-points": ("--nodes", "--seeds", "--restart", "--json"),
    "--crash-point": ("--trace",),
    "--mutants": ("--json",),
    "--churn": ("--nodes", "--hours", "--from", "--json"),
}


def _check_simulated(ctx: click.Context) -> None:
    """Raises: click.UsageError unless there is one thing to run, and only options that go with it."""
    given = [
        max(param.opts, key=len)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    chosen = [option for option in given if option in SIMULATED]
    if len(chosen) != 1:
        raise click.UsageError(
            f"{len(chosen)} things to run (expected exactly one of {', '.join(SIMULATED)})"
        )
    fitting = SIMULATED[chosen[0]]
    for option in given:
        if option not in (*chosen, *fitting):
            raise click.BadOptionUsage(
                option, f"means nothing with {chosen[0]} (expected {' or '.join(fitting)})"
            )


@click.command(short_help="Run the protocol on a virtual network that fails.")
@click.option("--schedules", type=Whole(1, 10**9), metavar="N", help="How many random lives.")
@click.option(
    "--from", "first", type=Whole(0, 10**12), default=0, metavar="SEED", help="Seed of the first. Default: 0."
)
@click.option(
    "--nodes", type=NodeRange(), help="How many nodes a life begins with. Default: 2..7; crash points: 2..4."
)
@click.option("--hard", is_flag=True, help="Random lives with more faults: 12 to 24 each.")
@click.option("--rates", is_flag=True, help="Bytes take time in all random lives, not in some.")
@click.option("--far", is_flag=True, help="Messages take up to 0.1 to 0.4 s, as between continents.")
@click.option(
    "--tensors", is_flag=True, help="Nodes need each other's tensors within a step, as in pipelines."
)
@click.option("--parts", is_flag=True, help="As --tensors, and each node keeps only a part of the state.")
@click.option("--seed", type=Whole(0, 10**12), metavar="SEED", help="Replay the life of one seed.")
@click.option("--crash-points", is_flag=True, help="Crash everybody at every message of every negotiation.")
@click.option(
    "--seeds", type=Whole(1, 1000), default=1, metavar="N", help="Networks per crash point. Default: 1."
)
@click.option(
    "--restart", is_flag=True, help="Who crashes at a crash point is started again half a second later."
)
@click.option("--crash-point", metavar="POINT", help="Replay one crash point.")
@click.option("--mutants", is_flag=True, help="Break the cores on purpose: is it noticed?")
@click.option("--trace", type=OutputFile(), help="Write the story of what is replayed.")
@click.option(
    "--churn", type=PerSecond(), help="Measure what events cost in one cluster of --nodes, so many of them."
)
@click.option(
    "--hours",
    type=Amount(0.0001, 1000),
    default=1.0,
    metavar="H",
    help="Of virtual time, with --churn. Default: 1.",
)
@json_option
def simulate(
    schedules: int | None, first: int, nodes: tuple[int, int] | None, hard: bool, rates: bool, far: bool,
    tensors: bool, parts: bool, seed: int | None, crash_points: bool, seeds: int, restart: bool,
    crash_point: str | None, mutants: bool, churn: float | None, hours: float, trace: Path | None,
    json_file: Path | None,
) -> None:  # fmt: skip
    """Run the real protocol on a virtual network with random crashes, joins, leaves and cut links.

    Exactly one of --schedules, --seed, --crash-points, --crash-point, --mutants and --churn says what to run.
    --churn is for large clusters: what each event costs, e.g. --nodes 1000 --churn 1/s --hours 0.01.
    """
    _check_simulated(click.get_current_context())
    if churn is not None:
        if nodes is None or nodes[0] != nodes[1] or nodes[0] < 10:
            raise click.UsageError(
                "--churn: expected one number of --nodes from 10 on with it, e.g. --nodes 1000"
            )
        from .simulate_scale import run_scale

        run_scale(nodes[0], churn, hours, first, json_file)
        return
    from . import simulation

    options = {
        "nodes": nodes or (2, 7), "hard": hard, "rates": rates, "far": far, "tensors": tensors, "parts": parts,
    }  # fmt: skip
    if schedules is not None:
        simulation.run_seeds(first, schedules, json_file, options)
    elif seed is not None:
        simulation.replay_seed(seed, trace, options)
    elif crash_points:
        if nodes is not None and nodes[1] > MAX_CRASH_NODES:
            raise click.BadOptionUsage(
                "--nodes", f"{nodes[0]}..{nodes[1]} with --crash-points (expected at most {MAX_CRASH_NODES})"
            )
        simulation.run_crash_points(nodes or (2, 4), seeds, restart, json_file)
    elif crash_point is not None:
        simulation.replay_point(crash_point, trace)
    else:
        simulation.run_mutants(json_file)
