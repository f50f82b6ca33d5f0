"""On this machine alone: `chaosnet demo`, `soak`, `testbed`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from ..extras import demand
from ..protocols.errors import ConfigError
from ..settings.options import Amount, Folder, Whole
from ..settings.table import SETTINGS


@click.command(short_help="See it work on this machine (half a minute).")
@click.option(
    "--out", type=Folder(), metavar="DIR",
    help="Folder for the summary, the picture and the nodes' logs. [default: runs/demo, or runs/demo-pipeline]",
)  # fmt: skip
@click.option(
    "--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Of the model and the data split."
)
@click.option(
    "--pipeline", is_flag=True,
    help="Instead: six processes compute a GPT as two pipelines of three, and lose a worker, then a whole stage.",
)  # fmt: skip
def demo(out: Path | None, seed: int, pipeline: bool) -> None:
    """Train on this machine with nodes that join, leave and are killed. Takes half a minute."""
    demand("plot" if pipeline else "demo", "chaosnet demo --pipeline" if pipeline else "chaosnet demo")
    _without_settings("key", "insecure")
    if pipeline:
        from ..trials.demo_pipeline import run_demo as run_pipelines

        run_pipelines(out or Path("runs/demo-pipeline"), seed)
        return
    from ..trials.demo import run_demo

    run_demo(out or Path("runs/demo"), seed)


@click.command(short_help="Harm a cluster on this machine for a long time, and check that nothing is lost.")
@click.option("--minutes", type=Amount(0.1, 10_000), default=60.0, show_default=True, metavar="M")
@click.option(
    "--every", type=Amount(0.1, 600), default=5.0, show_default=True, metavar="SECONDS",
    help="Between two faults, on average.",
)  # fmt: skip
@click.option(
    "--kill-scheduler", "kills", type=Whole(1, 100_000), metavar="N",
    help="Nothing but kill -9 of whoever is the scheduler, N times, as fast as the cluster recovers.",
)  # fmt: skip
@click.option(
    "--mb", type=Amount(0, 10_000), default=0.0, metavar="MB",
    help="Of parameters, all trained with Adam. [default: a net of 0.03 MB]",
)  # fmt: skip
@click.option(
    "--rate", type=Amount(1, 100_000), metavar="MBIT",
    help="Of each link, in Mbit/s; then links may become slow, too. Network namespaces: Linux, root.",
)  # fmt: skip
@click.option("--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Of the choice of faults.")
@click.option(
    "--out", type=Folder(), default=Path("runs/soak"), show_default=True,
    help="Folder for the summary, the picture and the nodes' logs.",
)  # fmt: skip
def soak(
    minutes: float, every: float, kills: int | None, mb: float, rate: float | None, seed: int, out: Path
) -> None:  # fmt: skip
    """Train on six processes that are killed, stopped, cut off, that leave and join, every few seconds.

    Exit code 1 if a step was lost, states differ, memory grew, or a new scheduler took too long.
    """
    demand("demo", "chaosnet soak")
    _without_settings()
    from ..trials.soak import Wanted, run_soak

    run_soak(minutes, Wanted(seed, 0.0 if kills else every, mb, rate or 0.0), out, kills)


def _without_settings(*but: str) -> None:
    """Drop settings from the environment. They are for the user's nodes: ours would join their CHAOSNET_CLUSTER."""
    for each in SETTINGS.values():
        if each.name not in but:
            os.environ.pop(each.variable, None)


@click.command(
    short_help="Make links like the edge's on this machine.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def testbed(args: tuple[str, ...]) -> None:
    """Overlays of shaped links on this machine; see `chaosnet testbed --help`."""
    if sys.platform == "win32":
        from ..netem.store import NOT_HERE

        raise ConfigError(f"testbed: {NOT_HERE}")
    from .testbed import testbed as group  # Imports what --help need not wait for.

    group.main(list(args), prog_name="chaosnet testbed", standalone_mode=False)
