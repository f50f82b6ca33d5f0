"""`chaosnet checkpoints`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import click

from ..settings.options import Folder


@click.command(short_help="List the checkpoints in a folder.")
@click.argument("folder", type=Folder(), metavar="DIR")
@click.option("--verify", is_flag=True, help="Read all of them and compare every tensor with its hash.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def checkpoints(folder: Path, verify: bool, as_json: bool) -> None:
    """List the checkpoints in DIR: which are complete, and what the others lack. Exit code 1 if one is damaged."""
    from ..terminal import checkpoint_list

    rows = checkpoint_list.rows(folder, verify)
    click.echo(json.dumps(rows, indent=2)) if as_json else checkpoint_list.show(folder, rows)
    if any(row["problem"] for row in rows if row["complete"]):
        sys.exit(1)
