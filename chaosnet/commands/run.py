"""`chaosnet run`: a script as a node of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from ..node.endpoint import shown
from ..protocols.errors import ChaosnetError
from ..settings.options import Script
from .node_options import into_environment, node_options


class Lasting(click.ClickException):
    """An error that another try would meet, too: its exit code, that of wrong usage, says so to a supervisor."""

    exit_code = 2


@click.command(context_settings={"allow_interspersed_args": False}, short_help="Run a script as a node.")
@click.option("-m", "module", is_flag=True, is_eager=True, help="SCRIPT is a module, as for `python -m`.")
@node_options
@click.argument("script", type=Script())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(script: Path | str, args: tuple[str, ...], module: bool, **given: Any) -> None:
    """Run SCRIPT as a node of a cluster: its Trainer takes these options where it is not given its own."""
    from ..launching.preflight import check_environment
    from ..script.runner import run_module, run_script

    check_together(given)
    into_environment(given)
    try:
        check_environment()
        if module:
            run_module(str(script), args)
        else:
            run_script(Path(script), args)
    except ChaosnetError as error:
        if error.lasting:
            raise Lasting(str(error)) from None
        raise


def check_together(given: Mapping[str, Any]) -> None:
    """Raises: click.BadOptionUsage for options that make no sense together."""
    links, neighbors, join = given["links"], given["neighbors"], given["join"]
    resumes = given["resume"] or given["resume_from"] is not None
    folder = given["directory"] or os.environ.get("CHAOSNET_CHECKPOINT_DIR")
    if links and neighbors is not None:
        raise click.BadOptionUsage(
            "--link", f"{links[0]!r} beside --neighbors {neighbors} (expected one of them)"
        )
    if resumes and not folder:
        raise click.BadOptionUsage(
            "--resume" if given["resume"] else "--resume-from",
            "without --checkpoint-dir (expected the folder to resume from)",
        )
    if given["every"] is not None and not folder:
        raise click.BadOptionUsage("--every", "without --checkpoint-dir (expected the folder to write to)")
    if links and not (join or given["cluster_name"]):
        raise click.BadOptionUsage(
            "--link", f"{links[0]!r} without --join or --cluster (a node that joins nobody has no links)"
        )
    if given["new"] and join:
        raise click.BadOptionUsage("--new", f"beside --join {shown(join)} (expected one of them)")
