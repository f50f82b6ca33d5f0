"""What checkpoints cost the steps of training.

`nodes` processes train a stack of linear layers with Adam, and write a checkpoint every 2 * `steps` steps. So
steps come in pairs of blocks in the same run: the first half begins with a checkpoint, the second has none.

    ratio              time of a block with a checkpoint by that of the one after it; the median over all pairs
    seconds            of one checkpoint's delay, so many of which are to be shared by the steps between two
    write_seconds      how long the write took, beside training
"""

from __future__ import annotations

import statistics
import tempfile
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from ..node.devices import wait_for_device
from ..settings.options import Whole
from ..terminal.outputs import json_option, write_json
from .accelerators import accelerator_option, device_for
from .processes import Pipe, Workers, own_address

BATCH = 64
LAYERS = 4


def _worker(
    pipe: Pipe,
    name: str,
    size_bytes: int,
    join: str,
    folder: str,
    copies: str,
    steps: int,
    pairs: int,
    device: str,
) -> dict[str, Any]:
    """Trains until all pairs of blocks are done. Returns: when each step was, and what the writes took."""
    import time

    from chaosnet.settings.groups import Checkpoints, Cluster
    from chaosnet.trainer import Trainer

    torch.set_num_threads(1)
    width = max(8, int((size_bytes / 4 / 3 / LAYERS) ** 0.5))  # Adam keeps two more numbers per parameter.
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))).to(device)
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    x, y = torch.randn(BATCH, width, device=device), torch.randn(BATCH, width, device=device)
    cluster, checkpoints = Cluster(join=join, name=name), Checkpoints(folder, every=2 * steps, copies=copies)
    trainer = Trainer(model, optimizer, cluster=cluster, checkpoints=checkpoints, quiet=True)
    pipe.send(own_address(trainer) if not join else "in")
    start, wanted = None, False
    at_s: dict[int, float] = {}
    while start is None or (trainer.step <= start + 2 * steps * pairs if not join else not pipe.poll()):
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
        wait_for_device()
        at_s[trainer.step] = time.monotonic()
        wanted = wanted or pipe.poll()
        if start is None and wanted and trainer.step % (2 * steps) == 0:
            start = trainer.step  # Its checkpoint begins now.
            pipe.receive()
    counters, size = dict(trainer.session.counters), trainer.engine.state.state_bytes()
    trainer.request_node_exit()
    return {"start": start, "at_s": at_s, "counters": counters, "state_bytes": size}


def measure(
    size_bytes: int, nodes: int, copies: str, steps: int, pairs: int, folder: str, device: str
) -> dict[str, Any]:
    """One run of `pairs` checkpoints."""
    names = [f"node{index}" for index in range(nodes)]
    with Workers() as workers:
        join = ""
        for name in names:
            where = folder if copies == "shard" else f"{folder}/{name}"
            workers.start(name, _worker, name, size_bytes, join, where, copies, steps, pairs, device)
            join = join or workers.receive(name)
            if name != names[0]:
                workers.receive(name)
        for name in names:
            workers.tell(name, "go")
        found = workers.receive(names[0], timeout_s=1800)
        for name in names[1:]:
            workers.tell(name, "stop")
            workers.receive(name)
    return _figures(found, steps, pairs)


def _figures(found: dict[str, Any], steps: int, pairs: int) -> dict[str, Any]:
    start, at_s, counters = found["start"], found["at_s"], found["counters"]
    borders = [at_s[start + block * steps] for block in range(2 * pairs + 1)]
    blocks = [b - a for a, b in pairwise(borders)]
    ratios = [a / b for a, b in zip(blocks[::2], blocks[1::2], strict=True)]
    every = range(start, start + 2 * steps * pairs)
    return {
        "state_bytes": found["state_bytes"],
        "steps": steps,
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "seconds": statistics.median(a - b for a, b in zip(blocks[::2], blocks[1::2], strict=True)),
        "step_seconds": statistics.median(at_s[step + 1] - at_s[step] for step in every),
        "write_seconds": counters.get("checkpoint_ms", 0) / 1e3,
        "written": counters.get("checkpoints", 0),
        "left_out": counters.get("checkpoints_left_out", 0),
    }


@click.command("checkpoint")
@click.option(
    "--bytes",
    "size_bytes",
    type=Whole(1, 10**11),
    default=100_000_000,
    show_default=True,
    help="Parameters and Adam's.",
)
@click.option("--nodes", type=Whole(1, 64), default=1, show_default=True)
@click.option("--copies", type=click.Choice(["shard", "whole"]), default="shard", show_default=True)
@click.option(
    "--steps",
    type=Whole(1, 100_000),
    default=20,
    show_default=True,
    help="From a checkpoint to the block without one.",
)
@click.option(
    "--pairs",
    type=Whole(1, 10_000),
    default=8,
    show_default=True,
    help="Of blocks with and without a checkpoint.",
)
@click.option(
    "--dir", "folder", type=click.Path(exists=True, file_okay=False, writable=True), metavar="DIR",
    help="On the disk to measure. Default: a temporary folder.",
)  # fmt: skip
@accelerator_option
@json_option
def checkpoint_command(
    size_bytes: int,
    nodes: int,
    copies: str,
    steps: int,
    pairs: int,
    folder: str | None,
    accelerator: bool,
    json_file: Path | None,
) -> None:
    """Steps with and without a checkpoint under way, in one run."""
    device = device_for("checkpoint", accelerator)
    with tempfile.TemporaryDirectory(dir=folder) as place:
        found = measure(size_bytes, nodes, copies, steps, pairs, place, device)
    click.echo(
        f"{found['state_bytes'] / 1e6:.0f} MB, {nodes} nodes ({copies}): {steps} steps of "
        f"{found['step_seconds'] * 1e3:.0f} ms with a checkpoint take {found['ratio']:.3f} times as long as without "
        f"(+{found['seconds']:.3f} s; the write took {found['write_seconds']:.2f} s beside them; "
        f"{found['written']} written, {found['left_out']} left out)"
    )
    if found["write_seconds"] > steps * found["step_seconds"]:
        click.echo(
            "a write took longer than these steps, so those without share its cost (expected more --steps)"
        )
    write_json(json_file, found)
