"""How a node that joins or leaves in the middle changes what is learnt (Chaos, Sec. VI-E, Fig. 11 to 14).

Data are split evenly among five nodes, each of which has its own part alone: who joins brings data, who leaves takes
it away. Three runs: with four nodes, with five, and with a change from one to the other at an epoch. Nodes are
processes on loopback; the models are small ones, built like the paper's (chaos_tasks.py).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import torch
from torch.nn import functional

from ..protocols.errors import ConfigError
from ..settings.options import Amount, Folder, OneOf, Several, Whole
from . import chaos_options as options
from .chaos_tasks import FILES, VISION_MODELS, judge, load, make, pretrained
from .figures import legend_below, publish, table
from .processes import Pipe, Workers, own_address

NEAR_EPOCHS = 3
"""After a change, in which a fall would be its doing."""
WAIT_S = 0.02  # Between empty steps, until all are there.
EPOCH_PATIENCE_S = 300.0
OPEN = "batches, learning rates, how many epochs; the curves' values: its text says that they stay smooth"


class Learning(NamedTuple):
    """What all nodes of a run share."""

    model: str
    task: str
    data: Path | None
    weights: Path | None  # Of a GPT.
    epochs: int
    batch: int
    rate: float
    seed: int
    parts: int


# --- a node ---


def _learn(pipe: Pipe, what: Learning, index: int, first: int, verdicts: bool) -> dict[str, Any]:
    """Until the last epoch, or the word to leave. `first`: nodes that there are when it begins."""
    from chaosnet.settings.groups import Cluster
    from chaosnet.trainer import Trainer

    torch.set_num_threads(1)
    torch.manual_seed(what.seed + 1000 * index)
    task = load(what.task, what.data)
    x, y = task.part(index, what.parts)
    torch.manual_seed(what.seed)
    model = make(what.model, task, what.weights)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], what.rate)
    pipe.send("ready")
    join = pipe.receive()
    cluster = Cluster(join=join, name=f"node{index}", new=not join)
    trainer = Trainer(model, optimizer, cluster=cluster, quiet=True, seed=what.seed)
    began = trainer.step
    pipe.send(own_address(trainer) if not join else "in")
    while trainer.step == 0 and len(trainer.status().members) < first:
        trainer.update(samples=0)
        time.sleep(WAIT_S)
    steps = steps_per_epoch(what, len(task.x))
    while trainer.step < steps * what.epochs and not pipe.poll():
        some = _batch(trainer.step, steps, len(x), what, index)
        functional.cross_entropy(model(x[some]), y[some]).backward()
        before = trainer.step
        trainer.update(samples=len(some))
        if verdicts and trainer.step > before and trainer.step % steps == 0:
            pipe.send({"epoch": trainer.step // steps, "verdict": judge(model, task)})
    done = {"began_epoch": began / steps, "ended_epoch": trainer.step / steps}
    trainer.close()
    return done


def steps_per_epoch(what: Learning, samples: int) -> int:
    """Of which every node takes a batch from its part in each."""
    return max(1, samples // what.parts // what.batch)


def _batch(step: int, steps: int, samples: int, what: Learning, index: int) -> torch.Tensor:
    """Which samples of its own part a node takes in this step: each at most once an epoch, in a new order."""
    epoch, place = divmod(step, steps)
    shuffled = torch.Generator().manual_seed(what.seed + 7919 * epoch + index)
    return torch.randperm(samples, generator=shuffled)[place * what.batch : (place + 1) * what.batch]


# --- a run ---


def run(what: Learning, before: int, after: int, change_at: int) -> dict[str, Any]:
    """Train with `before` nodes, from epoch `change_at` on with `after`. Returns: by epoch, loss and accuracy."""
    names = [f"node{index}" for index in range(max(before, after))]
    with Workers() as workers:
        for index, name in enumerate(names):
            workers.start(name, _learn, what, index, before, index == 0)
        for name in names:
            workers.receive(name)
        join = ""
        for name in names[:before]:
            workers.tell(name, join)
            address = workers.receive(name)
            join = join or address
        verdicts = []
        for epoch in range(1, what.epochs + 1):
            verdicts.append(workers.receive("node0", EPOCH_PATIENCE_S))
            if epoch == change_at and after > before:
                for name in names[before:]:
                    workers.tell(name, join)
            if epoch == change_at and after < before:
                for name in names[after:]:
                    workers.tell(name, "leave")
        for name in names[before:after]:
            workers.receive(name)
        ended = {name: workers.receive(name) for name in names}
    losses, accuracies = zip(*(each["verdict"] for each in verdicts), strict=True)
    return {"nodes": [before, after], "loss": losses, "accuracy": accuracies, "ended": ended}


def curves(what: Learning, fewer: int, grows: bool, change_at: int) -> dict[str, dict[str, Any]]:
    """By what they are called."""
    before, after = (fewer, fewer + 1) if grows else (fewer + 1, fewer)
    return {
        f"{fewer} nodes": run(what, fewer, fewer, 0),
        f"{fewer + 1} nodes": run(what, fewer + 1, fewer + 1, 0),
        f"{before} to {after}": run(what, before, after, change_at),
    }


def worst_rise(loss: Sequence[float], after: int) -> float:
    """Of the loss from one epoch to the next, in the first epochs after one; negative if it only fell."""
    near = loss[max(after - 1, 0) : after + NEAR_EPOCHS]
    return max((b - a for a, b in pairwise(near)), default=0.0)


# --- commands ---


class ConvergenceFigure(NamedTuple):
    """One of the four."""

    number: int
    grows: bool
    models: tuple[str, ...]
    tasks: tuple[str, ...]  # The first is there without files.
    shows: str  # "accuracy" or "loss".
    epochs: int
    change_at: int
    rate: float


def _options(figure: ConvergenceFigure) -> options.Option:
    files = "; ".join(f"{task}: {FILES[task]}" for task in figure.tasks[1:])
    return options.add(
        options.shown("--models", type=Several(OneOf(figure.models)), default=",".join(figure.models)),
        options.shown("--task", type=OneOf(figure.tasks), default=figure.tasks[0]),
        click.option("--data", type=Folder(), help=f"Where local files are. {files}."),
        options.shown("--nodes", type=Whole(1, 15), default=4, help="The fewer; the others are one more."),
        options.shown("--epochs", type=Whole(2, 1000), default=figure.epochs),
        options.shown("--change-at", type=Whole(1, 999), default=figure.change_at, help="Epoch."),
        options.shown("--batch", type=Whole(1, 10_000), default=16, help="Samples of a node in a step."),
        options.shown("--rate", type=Amount(1e-6, 10), default=figure.rate, help="Of learning, by Adam."),
        options.SEED,
        options.quick("The first model, four epochs"),
    )


def _command(figure: ConvergenceFigure, text: str) -> click.Command:
    @click.command(f"chaos-fig{figure.number}", help=text)
    @_options(figure)
    def command(
        models: Sequence[str], task: str, data: Path | None, nodes: int, epochs: int, change_at: int, batch: int,
        rate: float, seed: int, quick: bool, json_file: Path | None, plot_file: Path | None,
    ) -> None:  # fmt: skip
        if quick:
            models, epochs, change_at = models[:1], 4, 2
            click.echo("--quick: four epochs of one model, so no figure means anything.")
        if change_at >= epochs:
            raise ConfigError(
                f"--change-at: {change_at} (expected an epoch before the last, which is {epochs})"
            )
        load(task, data)  # What is missing is told before anything begins.
        found = {}
        with tempfile.TemporaryDirectory(prefix="chaos-") as folder:
            for model in models:
                weights = None
                if model not in VISION_MODELS:
                    pretrained(weights := Path(folder) / "weights.pt")
                what = Learning(model, task, data, weights, epochs, batch, rate, seed, nodes + 1)
                found[model] = curves(what, nodes, figure.grows, change_at)
        _show(figure, found, change_at, json_file, plot_file)

    return command


def _show(
    figure: ConvergenceFigure, found: Mapping[str, Mapping[str, Mapping[str, Any]]], change_at: int,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    rows = []
    for model, by_name in found.items():
        for name, curve in by_name.items():
            joined = [each["began_epoch"] for each in curve["ended"].values()]
            rows.append(
                [
                    f"{model}, {name}", curve[figure.shows][change_at - 1], curve[figure.shows][-1],
                    worst_rise(curve["loss"], change_at), max(joined) if max(joined) > 1 else None,
                ]
            )  # fmt: skip
    head = ["", f"{figure.shows} at {change_at}", f"{figure.shows} at the end"]
    table([*head, f"loss rises by, {NEAR_EPOCHS} epochs", "joined at epoch"], rows)
    click.echo("the paper: the curve of the change goes from the one to the other, smoothly")

    def draw(drawn: Any, _: Any) -> None:
        places = drawn.subplots(1, len(found), squeeze=False)[0]
        for axes, (model, by_name) in zip(places, found.items(), strict=True):
            for (name, curve), colour in zip(
                by_name.items(), ("tab:blue", "tab:orange", "tab:green"), strict=True
            ):
                values = curve[figure.shows]
                axes.plot(range(1, len(values) + 1), values, color=colour, label=name)
            axes.axvline(change_at, color="black", linestyle=":")
            axes.set_title(f"Chaos, Fig. {figure.number}: {model}")
            axes.xaxis.get_major_locator().set_params(integer=True)
            axes.set_xlabel("epoch")
            axes.set_ylabel(f"held-out {figure.shows}")
            axes.grid(alpha=0.3)
        legend_below(drawn, places[0])

    publish({"curves": found, "change_at": change_at, "open": OPEN}, json_file, plot_file, draw)


VISION = (tuple(VISION_MODELS), ("digits", "cifar-10"), "accuracy", 30, 15, 2e-3)
TEXT = (("GPT",), ("made", "wikitext-2", "dailydialog"), "loss", 8, 3, 2e-3)
fig11_command = _command(
    ConvergenceFigure(11, True, *VISION), "Chaos, Fig. 11: accuracy with a node that joins."
)
fig12_command = _command(
    ConvergenceFigure(12, False, *VISION), "Chaos, Fig. 12: accuracy with a node that leaves."
)
fig13_command = _command(
    ConvergenceFigure(13, True, *TEXT), "Chaos, Fig. 13: fine-tuning with a node that joins."
)
fig14_command = _command(
    ConvergenceFigure(14, False, *TEXT), "Chaos, Fig. 14: fine-tuning with a node that leaves."
)
