"""Pipelines and their recoveries: `chaosnet plan`, `simulate-training`."""

from __future__ import annotations

from pathlib import Path

import click

from ..extras import demand
from ..settings.options import Whole
from ..terminal.outputs import json_option, plot_option


@click.command(short_help="What a cluster of pipelines would do after a loss, and why.")
@click.argument(
    "cluster", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CLUSTER.yaml"
)
@click.argument("profile", metavar="PROFILE")
@click.option(
    "--fail", "failed", multiple=True, required=True, metavar="NODE", help="Who is lost; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan(cluster: Path, profile: str, failed: tuple[str, ...], as_json: bool) -> None:
    """Compare every recovery that could follow the loss of NODE in the cluster of CLUSTER.yaml.

    PROFILE is a file with what each layer costs, or a made-up one: llama2-7b, llama2-13b, llama2-34b.
    """
    demand("planner", "chaosnet plan")
    from .explanation import explain

    names = (name.strip() for each in failed for name in each.split(","))
    explain(cluster, profile, [*dict.fromkeys(names)], as_json)


@click.command(short_help="Simulate training under failures, with the recoveries of several systems.")
@click.argument(
    "scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SCENARIO.yaml"
)
@click.option("--seeds", type=Whole(1, 100_000), help="How many runs. Default: as the scenario says.")
@json_option
@plot_option("picture", "Draw the first run: a .png, .pdf or .svg.")
def simulate_training(
    scenario: Path, seeds: int | None, json_file: Path | None, picture: Path | None
) -> None:
    """Train on a virtual cluster that loses workers, once with each system's way to recover, and compare."""
    demand("planner", "chaosnet simulate-training")
    from .simulate_training import run_scenario

    run_scenario(scenario, seeds, json_file, picture)
