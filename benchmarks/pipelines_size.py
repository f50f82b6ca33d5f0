"""Pipelines of GPT-2 small in true size, over shaped links (Linux, root): `chaosnet bench pipelines-size`.

124 million parameters, trained with AdamW: every byte of them, of their gradients and of what goes from layer to
layer is real and crosses the links. Computing is emulated: a layer takes the seconds that it is given. Workers are
network namespaces with a link between any two, started all at once. Then one is killed, one joins, and one link
becomes ten times as slow. Printed is, for each of these, what a step took, what was predicted for it when it began,
what had been predicted when these pipelines were chosen, the longest time between two steps, and whether any step was
lost. What a step takes beyond computing and its bytes is measured while it trains (chaosnet/engines/step_costs.py),
so the first prediction has none of it, or that of the pipelines before.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click
import psutil
import torch
from torch import nn

from ..emulated import Emulated
from ..netem.topology import LinkSpec, mesh
from ..protocols.errors import ConfigError
from ..settings.options import Amount, Whole
from ..terminal.outputs import json_option, write_json
from .figures import table
from .overlay import PlacedNode, namespaces, need_root
from .start import quiet

BATCH = 8
CALM, SLOW_CALM = 2, 5  # Steps after a change, or after a link has become slow, before steps count.
PATIENCE_S = 600.0


class Size(NamedTuple):
    """Of a GPT-2."""

    width: int = 768
    words: int = 50257
    places: int = 1024
    blocks: int = 12

    @property
    def block(self) -> int:
        """Parameters of one: attention, two linear layers, two norms."""
        return 12 * self.width**2 + 13 * self.width


SMALL, QUICK = Size(), Size(width=64, words=1000, places=64, blocks=6)


class TrueSize(Emulated):
    """An emulated layer with as many parameters as a true one: all have a gradient, and are stepped."""

    def __init__(self, elements: int, forward_s: float, backward_s: float) -> None:
        super().__init__(forward_s, backward_s)
        self.weight = nn.Parameter(torch.full((elements,), 0.01))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """As many numbers of the weight as a row has are added to each."""
        return super().forward(x + self.weight[: x.shape[-1]])


class Last(nn.Module):
    """The norm at the end, and the words' embeddings, which the first layer has, too."""

    def __init__(self, first: TrueSize, width: int, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.norm = TrueSize(2 * width, forward_s, backward_s)
        self.words = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.words[: x.shape[-1]]


def layers(size: Size, forward_s: float, backward_s: float) -> list[nn.Module]:
    """Embeddings, blocks, and the head, which is tied to the embeddings."""
    first = TrueSize((size.words + size.places) * size.width, forward_s, backward_s)
    blocks = [TrueSize(size.block, forward_s, backward_s) for _ in range(size.blocks)]
    return [first, *blocks, Last(first, size.width, forward_s, backward_s)]


class OneSequence:
    """A data set of one sample, many times: a sequence, and what it should become."""

    def __init__(self, size: Size) -> None:
        self._shape = size.places, size.width

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(self._shape), torch.zeros(self._shape)


# --- a node ---


def _serve() -> None:
    """Trains, and answers each line with what it has seen since it was asked before."""
    from ..pipeline_trainer import PipelineTrainer

    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    size = Size(*told["size"])
    model = layers(size, told["forward_s"], told["backward_s"])
    optimizer = torch.optim.AdamW(nn.ModuleList(model).parameters(), 1e-4)
    print(json.dumps({"parameters": sum(p.numel() for p in nn.ModuleList(model).parameters())}), flush=True)
    sys.stdin.readline()
    trainer = PipelineTrainer(
        model, optimizer, nn.functional.mse_loss, batch=BATCH, micro_batch=1, stages=2, exact=False,
        keepers=told["keepers"],
    )  # fmt: skip
    seen: list[dict[str, Any]] = []
    threading.Thread(target=_answer, args=(seen, trainer.engine.keeping), daemon=True).start()
    for done in trainer.steps(OneSequence(size), epochs=1000):
        predicted = trainer.engine.predicted
        seen.append(
            {
                "at_s": time.monotonic(),
                "step": done.step,
                "members": len(done.members),
                "layout": trainer.layout,
                "predicted_s": predicted.total_us / 1e6 if predicted else 0.0,
                "parts": str(predicted),
                "rates_mbit": {
                    f"{a} to {b}": mbit for (a, b), mbit in trainer.engine.costs.rates_mbit.items()
                },
            }
        )


def _answer(seen: list[dict[str, Any]], keeping: Any) -> None:
    for _ in sys.stdin:
        told, seen[:] = seen[:], []
        memory = psutil.Process().memory_info()
        here = {
            "process_mb": (memory.rss - getattr(memory, "shared", 0)) / 1e6,
            "kept_mb": keeping.parts.held_bytes / 1e6 if keeping is not None else 0.0,
        }
        print(json.dumps({"seen": told, **here}), flush=True)
    os._exit(0)  # The parent is gone.


# --- the parent ---


@dataclass(slots=True)
class Chapter:
    """Steps of the founder from a change on, until they are calm.

    `step_s`, `predicted_s`: medians of those that count; `ratio`: the median of the one by the other, step by step.
    `chosen_s`: predicted for the first step with these members.
    """

    what: str
    steps_s: list[float]
    step_s: float
    predicted_s: float
    ratio: float
    chosen_s: float
    parts: str
    rates_mbit: dict[str, int]  # Of links, as all have agreed on them.
    longest_s: float
    lost: int
    layout: str


class NodeMemory(NamedTuple):
    """Of a node at the end, in MB: its process without what it shares, and with `keepers` the state that it keeps."""

    node: str
    process_mb: float
    kept_mb: float


def _memory(node: PlacedNode) -> NodeMemory:
    node.tell({})
    told = node.hear(PATIENCE_S)
    return NodeMemory(node.name, told["process_mb"], told["kept_mb"])


class Watched:
    """What the founder has seen."""

    def __init__(self, founder: PlacedNode) -> None:
        self.founder = founder
        self.seen: list[dict[str, Any]] = []

    def read(self) -> None:
        self.founder.tell({})
        self.seen += self.founder.hear(PATIENCE_S)["seen"]

    def chapter(self, what: str, members: int, count: int, calm: int = CALM) -> Chapter:
        """Go on until so many steps of as many members have gone by after `calm` that do not count.

        Raises: ConfigError if that takes too long.
        """
        begin, end_s = len(self.seen), time.monotonic() + PATIENCE_S
        while time.monotonic() < end_s:
            self.read()
            fitting = [each for each in self.seen[begin:] if each["members"] == members]
            if len(fitting) > calm + count:
                return self._chapter(what, self.seen[max(begin - 1, 0) :], fitting, calm)
            time.sleep(0.5)
        raise ConfigError(f"bench pipelines-size: {what}: not {calm + count} steps in {PATIENCE_S:.0f} s")

    def _chapter(
        self, what: str, seen: Sequence[dict[str, Any]], fitting: Sequence[dict[str, Any]], calm: int
    ) -> Chapter:
        counted = fitting[calm:]
        lengths = [b["at_s"] - a["at_s"] for a, b in pairwise(counted)]
        lost = seen[-1]["step"] - seen[0]["step"] + 1 - len(seen)
        longest_s = max(b["at_s"] - a["at_s"] for a, b in pairwise(seen))
        predicted_s = [each["predicted_s"] for each in counted[1:]]
        each_s = ", ".join(f"{a:.2f} ({b:.2f})" for a, b in zip(lengths, predicted_s, strict=True))
        rates = ", ".join(f"{way} {mbit}" for way, mbit in counted[-1]["rates_mbit"].items())
        click.echo(f"  {what}: steps (predicted) {each_s} s", err=True)
        click.echo(f"    the last: {counted[-1]['parts']}", err=True)
        click.echo(f"    links, Mbit/s: {rates}", err=True)
        return Chapter(
            what=what,
            steps_s=lengths,
            step_s=statistics.median(lengths),
            predicted_s=statistics.median(predicted_s),
            ratio=statistics.median(a / b for a, b in zip(lengths, predicted_s, strict=True)),
            chosen_s=fitting[0]["predicted_s"],
            parts=counted[-1]["parts"],
            rates_mbit=counted[-1]["rates_mbit"],
            longest_s=longest_s,
            lost=lost,
            layout=counted[-1]["layout"],
        )


def measure(
    size: Size, mbit: float, forward_s: float, count: int, keepers: int | None = None
) -> tuple[int, list[Chapter], list[NodeMemory]]:
    """How many parameters the model has, all chapters, and what is in the nodes' memory at the end."""
    topology = mesh(4, LinkSpec(rate_mbit=mbit))
    with namespaces(topology, routes=True) as testbed, quiet() as (env, said), ExitStack() as stack:

        def ready(name: str) -> tuple[PlacedNode, int]:
            node = PlacedNode(testbed, name, "pipelines_size", stderr=said, env=env)
            stack.callback(node.kill)
            node.tell({"size": size, "forward_s": forward_s, "backward_s": 2 * forward_s, "keepers": keepers})
            return node, node.hear(PATIENCE_S)["parameters"]

        nodes = [ready(name)[0] for name in topology.nodes[:-1]]
        last, parameters = ready(topology.nodes[-1])
        nodes.append(last)
        for node in nodes:
            node.tell({})
        watched = Watched(nodes[0])
        found = [watched.chapter("four are started at once", 4, count)]
        nodes[-1].kill()
        found.append(watched.chapter("one is killed", 3, count))
        again, _ = ready(topology.nodes[-1])
        again.tell({})
        found.append(watched.chapter("one joins", 4, count))
        slow = min(topology.links)
        testbed.change({slow: LinkSpec(rate_mbit=mbit / 10)})
        found.append(
            watched.chapter(f"the link {slow[0]} - {slow[1]} has a tenth of its rate", 4, count, SLOW_CALM)
        )
        return parameters, found, [_memory(node) for node in [*nodes[:-1], again]]


@click.command("pipelines-size")
@click.option("--mbit", type=Amount(1, 100_000), default=1000.0, show_default=True, help="Of each link.")
@click.option(
    "--forward", "forward_s", type=Amount(0.001, 10), default=0.03, show_default=True,
    help="Seconds of one layer for one micro-batch; twice that backwards.",
)  # fmt: skip
@click.option(
    "--steps", type=Whole(2, 100), default=8, show_default=True, help="That count, after each change."
)
@click.option(
    "--keepers", type=Whole(2, 4), help="Members that keep each layer's state. Default: all keep all."
)
@click.option("--quick", is_flag=True, help="A small model, short layers and 2 steps: to see that it runs.")
@json_option
def size_command(
    mbit: float, forward_s: float, steps: int, keepers: int | None, quick: bool, json_file: Path | None
) -> None:
    """GPT-2 small in true size: a start, a kill, a join and a slow link (root)."""
    need_root("pipelines-size")
    told = (QUICK, mbit, 0.002, 2) if quick else (SMALL, mbit, forward_s, steps)
    parameters, found, memory = measure(*told, keepers)
    about = "; quick: none of this says how close it comes in true size" if quick else ""
    click.echo(f"{parameters:,} parameters, links of {mbit:g} Mbit/s{about}")
    head = [
        "",
        "step, s",
        "predicted, s",
        "measured / predicted",
        "predicted when chosen, s",
        "longest gap, s",
        "steps lost",
        "pipelines",
    ]
    table(head, [_row(each) for each in found])
    for each in found:
        click.echo(f"{each.what}: {each.parts}")
    for node, process_mb, kept_mb in memory:
        kept = f", {kept_mb:.0f} MB of it the state that it keeps" if keepers else ""
        click.echo(f"memory of {node}: {process_mb:.0f} MB{kept}")
    written = {
        "parameters": parameters,
        "mbit": mbit,
        "quick": quick,
        "keepers": keepers,
        "chapters": [asdict(each) for each in found],
        "memory": [each._asdict() for each in memory],
    }
    write_json(json_file, written)


def _row(each: Chapter) -> list[Any]:
    return [
        each.what,
        each.step_s,
        each.predicted_s,
        each.ratio,
        each.chosen_s,
        each.longest_s,
        each.lost,
        each.layout,
    ]


if __name__ == "__main__":
    _serve()
