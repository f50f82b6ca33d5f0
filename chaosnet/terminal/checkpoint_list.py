"""`chaosnet checkpoints`: what is in a folder, and whether it could be loaded."""

from __future__ import annotations

import collections
import os
import time
from pathlib import Path
from typing import Any

from rich.table import Table

from ..node.state.checkpoint import open_checkpoint, read_tensors, scan
from ..node.state.checkpoint_plan import Checkpoint, describe
from ..protocols.errors import CheckpointError
from .console import console
from .progress import followed
from .tables import size


def rows(folder: Path, verify: bool) -> list[dict[str, Any]]:
    """One dict per checkpoint, by step. `problem`: what keeps it from being loaded, or "".

    Args:
        verify: Compare every tensor with its hash; else only indexes and sizes of files.
    Raises: CheckpointError if the folder cannot be read.
    """
    if not folder.exists():
        raise CheckpointError(f"{folder} does not exist")
    return [
        {
            "step": each.step,
            "shards": each.shards,
            "present": len(each.present),
            "bytes": each.size_bytes,
            "written_s": each.written_s,
            "complete": each.complete,
            "problem": _problem(each, verify),
            "path": str(each.path),
        }
        for each in scan(folder)
    ]


def _problem(checkpoint: Checkpoint, verify: bool) -> str:
    if not checkpoint.complete:
        return describe(checkpoint)
    try:
        opened = open_checkpoint(checkpoint)
        if verify:
            what = f"tensors of {checkpoint.path.name}"
            collections.deque(
                followed(read_tensors(opened), len(opened.tensors), what, in_pipe=False), maxlen=0
            )
    except CheckpointError as error:
        return str(error)
    return ""


def show(folder: Path, found: list[dict[str, Any]]) -> None:
    """Print these rows as a table."""
    screen = console()
    if not found:
        screen.print(f"no checkpoints in {folder}")
        return
    table = Table(box=None, pad_edge=False)
    for name in ("step", "shards", "size"):
        table.add_column(name, justify="right")
    table.add_column("written")
    table.add_column("state", overflow="fold")
    for row in found:
        table.add_row(
            f"{row['step']:,}",
            f"{row['present']} of {row['shards'] or '?'}",
            size(row["bytes"]),
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(row["written_s"])) if row["written_s"] else "",
            row["problem"].replace(f"{folder}{os.sep}", "") or "complete",
        )
    screen.print(table)
