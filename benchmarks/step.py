"""A training step with chaosnet beside one with DistributedDataParallel over Gloo, in the same processes.

Every process trains two copies of one model: one with a Trainer, one wrapped in DDP. They take turns in blocks of
steps, so both see the same machine. A step is forward, backward, all-reduce and Adam. Ours also does what DDP's does
not: the vote on the next view, the commit, results that can be sent again if somebody dies. What update() takes
beside the optimizer's own step() and zero_grad() is told, too: with one process, what it adds to a plain loop.

On an accelerator all processes share one device, and the device is waited for where a clock is read.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
import torch.distributed as dist
from torch import nn

from ..netem import commands
from ..node.devices import wait_for_device
from ..settings.options import Amount, Several, Whole
from ..terminal.outputs import json_option, write_json
from ..trials.demo_digits import small_net
from .accelerators import accelerator_option, device_for
from .figures import middle_half
from .machines import Loopback, switched
from .overlay import need_root
from .processes import Pipe, Workers

WARM_UP, BLOCKS, UPDATES = 2, 12, 40
CLONE_NEWNET = 0x40000000
LAYERS = 4
BATCH = 32
STEP_S_PER_BLOCK = 0.5  # So long a block is to last, at least.


class Pieces(nn.Module):
    """Many small parameters, of so many bytes in all, each with its share in the output."""

    def __init__(self, parameter_bytes: int, count: int) -> None:
        super().__init__()
        size = max(parameter_bytes // 4 // count, 1)
        self.pieces = nn.ParameterList(torch.randn(size) for _ in range(count))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(list(self.pieces)) * x


def net(parameter_bytes: int, parameters: int) -> tuple[nn.Module, torch.Tensor]:
    """Linear layers of that size in all, or, for 0, the demo's convolutional net; and a batch for it.

    Args:
        parameters: Or so many small ones, unless it is 0.
    """
    if parameters:
        return Pieces(parameter_bytes, parameters), torch.ones(())
    if not parameter_bytes:
        return small_net(), torch.randn(BATCH, 1, 8, 8)
    width = round((parameter_bytes / 4 / LAYERS) ** 0.5)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(LAYERS))), torch.randn(BATCH, width)


class StepPlace(NamedTuple):
    """Where a worker runs."""

    address: str
    variables: Mapping[str, str]
    namespace: str = ""  # Of the network; "": this machine's.

    def enter(self) -> None:
        """Of all threads that this one starts from now on. Raises: OSError."""
        os.environ.update(self.variables)
        if not self.namespace:
            return
        with Path("/var/run/netns", self.namespace).open() as file:  # os.setns is there from Python 3.12 on.
            if ctypes.CDLL(None, use_errno=True).setns(file.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"cannot enter the network namespace {self.namespace}")


def _worker(
    pipe: Pipe,
    place: StepPlace,
    rank: int,
    nodes: int,
    parameter_bytes: int,
    parameters: int,
    store: str,
    join: str,
    device: str,
) -> tuple[list[tuple[float, float]], float]:
    """Returns: seconds a step of ours and of DDP's, block by block; and of an update, beside the optimizer."""
    from chaosnet.settings.groups import Cluster
    from chaosnet.trainer import Trainer

    place.enter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    ours, x = net(parameter_bytes, parameters)
    theirs, _ = net(parameter_bytes, parameters)
    ours, theirs, x = ours.to(device), theirs.to(device), x.to(device)
    optimizers = [torch.optim.Adam(each.parameters(), 1e-4) for each in (ours, theirs)]
    cluster = Cluster(
        join=join,
        name=f"n{rank}",
        listen=f"{place.address}:0",
        insecure=bool(place.namespace),
        neighbors=nodes,
    )
    trainer = Trainer(ours, optimizers[0], cluster=cluster, quiet=True)
    pipe.send(trainer.status().members[0].addresses[0] if not join else "in")

    def our_step() -> None:
        ours(x).square().mean().backward()
        trainer.update()

    while trainer.metrics.get("all") != 1.0:
        trainer.mean(float(len(trainer.status().active) == nodes), name="all")
        our_step()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nodes)
    wrapped = nn.parallel.DistributedDataParallel(theirs)

    def their_step() -> None:
        wrapped(x).square().mean().backward()
        optimizers[1].step()
        optimizers[1].zero_grad(set_to_none=True)

    count = _steps_per_block(our_step, their_step)
    blocks = [(_block(our_step, count), _block(their_step, count)) for _ in range(WARM_UP + BLOCKS)]
    dist.destroy_process_group()
    beside_s = _beside_optimizer(lambda: ours(x).square().mean().backward(), trainer.update, optimizers[0])
    trainer.request_node_exit()
    return blocks[WARM_UP:], beside_s


def _beside_optimizer(
    backward: Callable[[], None], update: Callable[[], None], optimizer: torch.optim.Optimizer
) -> float:
    """Seconds of an update() less those of the optimizer's step() and zero_grad() in it, in the median."""
    own_s = 0.0

    def timed(call: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            nonlocal own_s
            began_s = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                own_s += time.perf_counter() - began_s

        return called

    optimizer.step = timed(optimizer.step)  # type: ignore[method-assign]
    optimizer.zero_grad = timed(optimizer.zero_grad)  # type: ignore[method-assign]
    beside_s = []
    for _ in range(UPDATES):
        backward()
        wait_for_device()
        began_s, own_s = time.perf_counter(), 0.0
        update()
        beside_s.append(time.perf_counter() - began_s - own_s)
    return statistics.median(beside_s)


def _steps_per_block(*steps: Callable[[], None]) -> int:
    """The same in all processes: of the slowest of these kinds of steps, and of the processes."""
    for step in steps:
        _block(step, 2)
    took = torch.tensor(max(_block(step, 2) for step in steps))
    dist.all_reduce(took, dist.ReduceOp.MAX)
    return max(2, round(STEP_S_PER_BLOCK / float(took)))


def _block(step: Callable[[], None], count: int) -> float:
    """Seconds a step."""
    dist.barrier()
    started = time.perf_counter()
    for _ in range(count):
        step()
    wait_for_device()
    return (time.perf_counter() - started) / count


@contextmanager
def places(nodes: int, rate_mbit: float | None) -> Iterator[Sequence[StepPlace]]:
    """So many: on loopback, or (with `rate_mbit`) each with a link of that rate to a switch."""
    names = [f"n{rank}" for rank in range(nodes)]
    if rate_mbit is None:
        here = Loopback()
        yield [StepPlace(here.address(name), here.variables(name)) for name in names]
        return
    with switched(names, rate_mbit) as on:
        yield [
            StepPlace(on.address(name), on.variables(name), commands.namespace(on.testbed, name))
            for name in names
        ]


def measure(
    parameter_bytes: int, parameters: int, nodes: int, folder: Path, at: Sequence[StepPlace], device: str
) -> dict[str, Any]:
    """Compare among `nodes` processes with their models on `device`. A block takes as long as its slowest process."""
    store = folder / f"gloo-{nodes}-{time.time_ns()}"
    with Workers() as workers:
        join = ""
        for rank in range(nodes):
            sizes = nodes, parameter_bytes, parameters
            workers.start(f"n{rank}", _worker, at[rank], rank, *sizes, str(store), join, device)
            join = join or workers.receive(f"n{rank}")
        for rank in range(1, nodes):
            workers.receive(f"n{rank}")
        found = [workers.receive(f"n{rank}", timeout_s=600.0) for rank in range(nodes)]
    ours, theirs = ([max(each[b][k] for each, _ in found) for b in range(BLOCKS)] for k in (0, 1))
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return {
        "ours_s": statistics.median(ours),
        "ddp_s": statistics.median(theirs),
        "ratio": statistics.median(ratios),
        "update_beside_optimizer_s": max(beside_s for _, beside_s in found),
        "middle_half": middle_half(ratios),
    }


@click.command("step")
@click.option(
    "--mb",
    type=Several(Amount(0, 100_000)),
    default="0,45",
    show_default=True,
    help="Sizes of the model; 0: the demo's net (0.4 MB).",
)
@click.option(
    "--nodes",
    type=Several(Whole(1, 64)),
    default="2,4",
    show_default=True,
    help="Numbers of processes to try.",
)
@click.option(
    "--parameters",
    default=0,
    type=Whole(0, 1_000_000),
    metavar="N",
    help="As so many small tensors. Default: four layers.",
)
@click.option(
    "--rate",
    type=Amount(1, 100_000),
    metavar="MBIT",
    help="Each process in a network namespace with a link of so many Mbit/s to a switch (root). Default: loopback.",
)
@accelerator_option
@json_option
def step_command(
    mb: tuple[float, ...],
    nodes: tuple[int, ...],
    parameters: int,
    rate: float | None,
    accelerator: bool,
    json_file: Path | None,
) -> None:
    """Steps with chaosnet and with DDP + Gloo, in turns."""
    figures: dict[str, Any] = {}
    if rate:
        need_root("step --rate")
    device = device_for("step", accelerator)
    with tempfile.TemporaryDirectory() as folder:
        for size in mb:
            for count in nodes:
                with places(count, rate) as at:
                    found = measure(round(size * 1e6), parameters, count, Path(folder), at, device)
                figures[f"{size:g} MB, {count}"] = found
                click.echo(_line(size, count, found))
    write_json(json_file, figures)


def _line(mb: float, nodes: int, found: Mapping[str, Any]) -> str:
    ours, ddp, (low, high) = 1e3 * found["ours_s"], 1e3 * found["ddp_s"], found["middle_half"]
    return (
        f"{nodes} nodes, {f'{mb:g} MB' if mb else 'small net'}: a step of ours {ours:.1f} ms, of DDP + Gloo "
        f"{ddp:.1f} ms, ratio {found['ratio']:.2f} (middle half of {BLOCKS}: {low:.2f} to {high:.2f}); "
        f"update() takes {1e3 * found['update_beside_optimizer_s']:.1f} ms beside the optimizer"
    )
