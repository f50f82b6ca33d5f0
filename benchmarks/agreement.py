"""What it costs to compare the replicas at every step.

Two processes train, and compare in every second block of steps only, so that both kinds of blocks are of one run.

    ratio        time of a block that compares by that of the one after it, which does not; the median of all pairs
    compare_us   processor time of a step that goes to hashing, and to looking at the sums
    share        of it in the mean step of the blocks that do not compare; and that of the state's window alone
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from ..settings.options import Amount, Whole
from ..terminal.outputs import json_option, write_json
from .processes import Pipe, Workers, own_address

LAYERS, BATCH = 4, 32


def _digits() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


def _large(size_bytes: int) -> nn.Module:
    width = max(1, int((size_bytes / 4 / LAYERS) ** 0.5))
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS)))


def _worker(pipe: Pipe, name: str, join: str, megabytes: float, steps: int, pairs: int) -> dict[str, Any]:
    """Trains `pairs` pairs of blocks. Returns: seconds of each block, and microseconds spent on comparing."""
    from chaosnet.settings.groups import Cluster
    from chaosnet.trainer import Trainer

    torch.set_num_threads(1)
    model = _large(int(megabytes * 1e6)) if megabytes else _digits()
    first = next(model.parameters()).shape[1]
    x, optimizer = torch.randn(BATCH, first), torch.optim.Adam(model.parameters(), 1e-4)
    trainer = Trainer(model, optimizer, cluster=Cluster(join=join, name=name), quiet=True)
    agreement, rules, spent = trainer.engine.agreement, trainer.engine.rules, list[float]()
    tell, judge, check, read = agreement.tell, agreement.judge, rules.check, agreement.window.read
    in_window = list[float]()

    def on() -> bool:
        return trainer.engine.round // steps % 2 == 0

    def timed(call: Any, nothing: Any, spent: list[float] = spent) -> Any:
        def measured(*args: Any) -> Any:
            if not on():
                return nothing
            start_s = time.thread_time()
            try:
                return call(*args)
            finally:
                spent.append(1e6 * (time.thread_time() - start_s))

        return measured

    agreement.tell = timed(tell, ({}, {}))  # type: ignore[method-assign]
    agreement.window.read = timed(read, None, in_window)  # type: ignore[method-assign]
    agreement.judge = timed(judge, None)  # type: ignore[method-assign]
    rules.check = timed(check, None)  # type: ignore[method-assign]
    pipe.send(own_address(trainer) if not join else "in")
    wanted, blocks, start_s = False, list[float](), 0.0
    done = None
    while done is None or trainer.engine.round < done:
        model(x).square().mean().backward()
        trainer.update()
        if join:
            if pipe.poll():
                break
            continue
        wanted = wanted or pipe.poll()
        if trainer.engine.round % (2 * steps) == 0 and wanted and done is None:
            done = trainer.engine.round + 2 * steps * pairs
            spent.clear()
            in_window.clear()
            start_s = time.monotonic()
        elif done is not None and trainer.engine.round % steps == 0:
            blocks.append(time.monotonic() - start_s)
            start_s = time.monotonic()
    size = trainer.engine.state.state_bytes()
    trainer.request_node_exit()
    return {"blocks": blocks, "spent": spent, "window": in_window, "state_bytes": size}


def measure(megabytes: float, steps: int, pairs: int) -> dict[str, Any]:
    """One run. `megabytes`: of parameters; 0: the digits model of the examples."""
    with Workers() as workers:
        workers.start("node0", _worker, "node0", "", megabytes, steps, pairs)
        workers.start("node1", _worker, "node1", workers.receive("node0"), megabytes, steps, pairs)
        workers.receive("node1")
        workers.tell("node0", "go")
        found = workers.receive("node0", timeout_s=1800)
        workers.tell("node1", "stop")
    blocks, spent = found["blocks"], found["spent"]
    compares, plain = blocks[0::2], blocks[1::2]
    step_us = 1e6 * statistics.mean(plain) / steps
    per_step_us = sum(spent) / (len(compares) * steps)
    return {
        "parameters_mb": megabytes,
        "state_bytes": found["state_bytes"],
        "pairs": len(plain),
        "steps_per_block": steps,
        "step_ms": round(step_us / 1e3, 3),
        "ratio": round(statistics.median(a / b for a, b in zip(compares, plain, strict=True)), 4),
        "compare_us_per_step": round(per_step_us, 1),
        "share_pct": round(100 * per_step_us / step_us, 3),
        "window_share_pct": round(100 * sum(found["window"]) / (len(compares) * steps) / step_us, 3),
    }


@click.command("agreement")
@click.option(
    "--megabytes", type=Amount(0, 10_000), default=0.0, show_default=True, help="Of parameters; 0: digits."
)
@click.option("--steps", type=Whole(1, 100_000), default=100, show_default=True, help="Per block.")
@click.option("--pairs", type=Whole(1, 10_000), default=20, show_default=True)
@json_option
def agreement_command(megabytes: float, steps: int, pairs: int, json_file: Path | None) -> None:
    """Steps that compare the replicas, and steps that do not, in one run."""
    found = measure(megabytes, steps, pairs)
    size_mb = found["state_bytes"] / 1e6
    click.echo(
        f"state {size_mb:.2f} MB, 2 processes, {found['pairs']} pairs of {steps} steps: "
        f"a step takes {found['step_ms']:g} ms, {found['compare_us_per_step']:g} us of it ({found['share_pct']:g} %, "
        f"of which the state's window {found['window_share_pct']:g} %) "
        f"for comparing; blocks that compare take {found['ratio']:g} times as long as those that do not (median)"
    )
    write_json(json_file, found)
