"""How long a node takes to join a training cluster, and what the others notice of it.

`sources` processes train; one more joins and pulls the state from all of them. The state is one large frozen
matrix (as the base model of a fine-tuning) and a small trained head, so that steps are short and the time
to join is that of the state (`--trained`: all of it is trained). Measured among processes on loopback:

    seconds                         from calling Trainer() to the first step that the joiner took part in
    bound_seconds                   water-filling bound with the measured rates of its links
    survivor_longest_gap_seconds    longest time between two steps of a survivor during the join, less
                                    the median time between its steps before, which is
    survivor_median_step_seconds    what a step takes
    allowed_seconds                 four steps and twice the bound: what we want a join of a trained state to take
    source_memory_bytes             by how much the most memory that a source has had grew during the join (Linux)

Of several joiners that are started at once (`--joiners`) it is the last to come in. With `--parameters` the state
is cut into so many, and in turns into a few of the same bytes: what a join takes for each tensor, not for each byte.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import torch
from torch import nn

from ..node.devices import wait_for_device
from ..settings.options import Whole
from ..terminal.outputs import json_option, write_json
from ..trials.demo_report import join_bound_s
from .accelerators import accelerator_option, device_for
from .processes import Pipe, Workers, own_address

WARM_UP_S = 2.0
AFTER_S = 0.5
ALLOWED_STEPS, ALLOWED_BOUNDS = 4, 2
FEW = 5  # Parameters, beside which many are measured.
STATUS = Path("/proc/self/status")


class FineTuned(nn.Module):
    """Frozen vectors and a small head that is trained; or all of it trained, with Adam's two moments."""

    def __init__(self, size_bytes: int, trained: bool, vectors: int) -> None:
        super().__init__()
        elements = max(size_bytes // 4 // (3 if trained else 1) // vectors, 1)
        self.base = nn.ParameterList(
            nn.Parameter(torch.zeros(elements), requires_grad=trained) for _ in range(vectors)
        )
        self.head = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x) + torch.stack([vector[0] for vector in self.base]).mean()


def _peak() -> int:
    """The most bytes of memory that this process has had so far; 0 where there is no telling."""
    try:
        line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    except (OSError, StopIteration):
        return 0
    return 1024 * int(line.split()[1])


def _worker(
    pipe: Pipe,
    name: str,
    size_bytes: int,
    join: str,
    neighbors: int,
    blocking: bool,
    trained: bool,
    vectors: int,
    device: str,
) -> dict[str, Any]:
    """Trains until told to stop. Returns: times of steps, and of the join."""
    from chaosnet.settings.groups import Cluster
    from chaosnet.trainer import Trainer

    torch.set_num_threads(1)
    model = FineTuned(size_bytes, trained, vectors).to(device)
    for vector in model.base:
        nn.init.constant_(vector, 0.5 if join else 1.5)  # Memory that is really there.
    optimizer = torch.optim.Adam(model.parameters() if trained else model.head.parameters(), 1e-3)
    x, y = torch.randn(64, 256, device=device), torch.randn(64, 64, device=device)
    pipe.send("ready")
    pipe.receive()  # Model and data are there: join now (Chaos, Sec. IV-B: "finishes initialization").
    called_s = time.monotonic()
    cluster = Cluster(join=join, name=name, neighbors=neighbors, blocking=blocking)
    trainer = Trainer(model, optimizer, cluster=cluster, quiet=True)
    member_s = time.monotonic()
    pipe.send(own_address(trainer) if not join else "in")
    times: list[float] = []
    peaks: list[int] = []
    while not pipe.poll():
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
        trainer.check_state_replication()
        wait_for_device()
        times.append(time.monotonic())
        peaks.append(_peak())
    links = trainer.status().links
    trainer.request_node_exit()
    return {
        "called_s": called_s,
        "member_s": member_s,
        "phases_s": dict(trainer.join_phases),
        "times_s": times,
        "bytes": trainer.join_bytes,
        "bytes_by_source": trainer.join_bytes_by_source,
        "links": links,
        "peaks": peaks,
    }


def measure(
    size_bytes: int,
    sources: int,
    blocking: bool,
    trained: bool,
    joiners: int,
    vectors: int,
    device: str = "cpu",
) -> dict[str, Any]:
    """`joiners` at once into a cluster of `sources` nodes."""
    task = trained, vectors, device
    with Workers() as workers:
        join = ""
        for index in range(sources):
            name = f"source{index}"
            workers.start(name, _worker, name, size_bytes, join, sources, False, *task)
            workers.receive(name)
            workers.tell(name, "join")
            address = workers.receive(name)
            join = join or address
        joining = [f"joiner{index}" for index in range(joiners)]
        for name in joining:
            links = sources + joiners - 1
            workers.start(name, _worker, name, size_bytes, join, links, blocking, *task)
            workers.receive(name)
        time.sleep(WARM_UP_S)
        for name in joining:
            workers.tell(name, "join")
        for name in joining:
            workers.receive(name)
        time.sleep(AFTER_S)
        names = [*(f"source{index}" for index in range(sources)), *joining]
        for name in names:
            workers.tell(name, "stop")
        return _figures({name: workers.receive(name) for name in names})


def _figures(results: dict[str, dict[str, Any]]) -> dict[str, Any]:
    joining = [name for name in results if name.startswith("joiner")]
    last = max(joining, key=lambda name: results[name]["times_s"][0])
    joiner = results[last]
    results = {name: result for name, result in results.items() if name not in joining}
    begin_s, end_s = joiner["called_s"], joiner["times_s"][0]
    gaps = {name: extra_gap(result["times_s"], begin_s, end_s) for name, result in results.items()}
    links = [each for each in results["source0"]["links"] if last in (each.a, each.b)]
    bound_s = join_bound_s(joiner["bytes"], links, last) or float("nan")
    step_s = max(usual for _, usual in gaps.values())
    grown = [_growth(result, begin_s, end_s) for result in results.values()]
    return {
        "seconds": end_s - begin_s,
        "seconds_to_membership": joiner["member_s"] - begin_s,
        "phases_s": joiner["phases_s"],
        "bytes": joiner["bytes"],
        "bytes_by_source": joiner["bytes_by_source"],
        "bound_seconds": bound_s,
        "ratio_to_bound": (end_s - begin_s) / bound_s,
        "survivor_longest_gap_seconds": max(gap for gap, _ in gaps.values()),
        "survivor_median_step_seconds": step_s,
        "allowed_seconds": ALLOWED_STEPS * step_s + ALLOWED_BOUNDS * bound_s,
        "source_memory_bytes": max((each for each in grown if each is not None), default=None),
        "link_rates_mbit": {f"{each.a} - {each.b}": [each.rate_mbit, each.rate_back_mbit] for each in links},
    }


def extra_gap(times_s: list[float], begin_s: float, end_s: float) -> tuple[float, float]:
    """The longest gap that touches [begin, end], less the median before; and that median. Seconds."""
    before = [b - a for a, b in pairwise(times_s) if b < begin_s]
    usual_s = statistics.median(before)
    during = [b - a for a, b in pairwise(times_s) if b >= begin_s and a <= end_s]
    return max(during) - usual_s, usual_s


def _growth(source: dict[str, Any], begin_s: float, end_s: float) -> int | None:
    """Of its peak; None where there is no telling."""
    peaks = list(zip(source["times_s"], source["peaks"], strict=True))
    before = max(int(peak) for at_s, peak in peaks if at_s < begin_s)
    after = max(int(peak) for at_s, peak in peaks if at_s <= end_s)
    return after - before if after else None


def _told(growth_bytes: int | None) -> str:
    return "unknown here" if growth_bytes is None else f"{growth_bytes / 1e6:+.0f} MB"


def _print(run: dict[str, Any], sources: int) -> None:
    click.echo(
        f"{run['bytes'] / 1e6:.0f} MB from {sources} sources: {run['seconds']:.2f} s to the first step "
        f"({run['ratio_to_bound']:.2f} x the bound of {run['bound_seconds']:.2f} s; "
        f"{ALLOWED_STEPS} steps + {ALLOWED_BOUNDS} bounds are {run['allowed_seconds']:.2f} s), longest extra gap of "
        f"a survivor {run['survivor_longest_gap_seconds']:.3f} s beside a step of "
        f"{run['survivor_median_step_seconds']:.3f} s, "
        f"memory of a source at most {_told(run['source_memory_bytes'])}"
    )


def _against_few(run: dict[str, Any], few: dict[str, Any], parameters: int) -> None:
    """Adds to `run` what the same bytes take in few parameters, and prints both."""
    ours_s, few_s = run["seconds_to_membership"], few["seconds_to_membership"]
    steps_s = [each["survivor_median_step_seconds"] for each in (run, few)]
    run |= {"few_seconds_to_membership": few_s, "ratio_to_few": ours_s / few_s}
    click.echo(
        f"to membership: {ours_s:.2f} s in {parameters} parameters, {few_s:.2f} s in {FEW}: "
        f"{run['ratio_to_few']:.1f} x (a step before: {steps_s[0]:.3f} s, {steps_s[1]:.3f} s)"
    )


@click.command("join")
@click.option(
    "--bytes",
    "size_bytes",
    type=Whole(1, 10**11),
    default=524_288_000,
    show_default=True,
    help="Size of the training state.",
)
@click.option(
    "--sources", type=Whole(1, 64), default=3, show_default=True, help="Nodes that train and serve."
)
@click.option("--blocking", is_flag=True, help="The paper's mode: sources wait.")
@click.option("--trained", is_flag=True, help="Train all of it: the state is copied while it changes.")
@click.option("--joiners", type=Whole(1, 64), default=1, show_default=True, help="Nodes that join at once.")
@click.option(
    "--parameters",
    type=Whole(0, 1_000_000),
    default=0,
    help=f"Cut the state into so many, and in turns into {FEW} of the same bytes.",
)
@click.option("--repeat", type=Whole(1, 1000), default=1, show_default=True)
@accelerator_option
@json_option
def join_command(
    size_bytes: int,
    sources: int,
    blocking: bool,
    trained: bool,
    joiners: int,
    parameters: int,
    repeat: int,
    accelerator: bool,
    json_file: Path | None,
) -> None:
    """A node joins a training cluster over loopback."""
    runs = []
    device = device_for("join", accelerator)
    for _ in range(repeat):
        run = measure(size_bytes, sources, blocking, trained, joiners, parameters or 1, device)
        _print(run, sources)
        if parameters:
            few = measure(size_bytes, sources, blocking, trained, joiners, FEW, device)
            _against_few(run, few, parameters)
        runs.append(run)
    write_json(json_file, middle(runs) if repeat == 1 else {**middle(runs), "runs": runs})


def middle(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """That of which as many are faster as slower; of an even count the slower of two."""
    return sorted(runs, key=lambda run: float(run["seconds"]))[len(runs) // 2]
