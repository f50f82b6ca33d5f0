"""Pipelines of GPT-2 small in true size, over shaped links (Linux, root): `chaosnet bench pipelines-size`.

124 million parameters, trained with AdamW: every byte of them, of their gradients and of what goes from layer to
layer is real and crosses the links. Computing is emulated: a layer takes the seconds that it is given. Workers are
network namespaces with a link between any two, started all at once. Then one is killed, one joins, and one link
becomes ten times as slow. Printed is, for each of these, what a step took, what the planner predicted for it, the
longest time between two steps, and whether any step was lost.
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
from typing import Any

import click
import torch
from torch import nn

from ..emulated import Emulated
from ..netem.backend import TestbedError
from ..netem.topology import LinkSpec, mesh
from ..options import Amount, Whole
from ..outputs import json_option, write_json
from ..protocols.errors import ConfigError
from .figures import table
from .overlay import PlacedNode, namespaces
from .start import quiet

WIDTH, WORDS, PLACES, BLOCKS, TOKENS = 768, 50257, 1024, 12, 1024  # GPT-2 small.
BLOCK = 12 * WIDTH**2 + 13 * WIDTH  # Parameters of one: attention, two linear layers, two norms.
BATCH = 8
CALM = 3  # Steps after a change, before steps count.
PATIENCE_S = 600.0


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

    def __init__(self, first: TrueSize, forward_s: float, backward_s: float) -> None:
        super().__init__()
        self.norm = TrueSize(2 * WIDTH, forward_s, backward_s)
        self.words = first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) * self.words[:WIDTH]


def layers(forward_s: float, backward_s: float) -> list[nn.Module]:
    """Of GPT-2 small: embeddings, twelve blocks, and the head, which is tied to the embeddings."""
    first = TrueSize((WORDS + PLACES) * WIDTH, forward_s, backward_s)
    blocks = [TrueSize(BLOCK, forward_s, backward_s) for _ in range(BLOCKS)]
    return [first, *blocks, Last(first, forward_s, backward_s)]


class OneSequence:
    """A data set of one sample, many times: a sequence, and what it should become."""

    def __len__(self) -> int:
        return 1_000_000

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.ones(TOKENS, WIDTH), torch.zeros(TOKENS, WIDTH)


# --- a node ---


def _serve() -> None:
    """Trains, and answers each line with what it has seen since it was asked before."""
    from ..pipeline_trainer import PipelineTrainer

    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    model = layers(told["forward_s"], told["backward_s"])
    optimizer = torch.optim.AdamW(nn.ModuleList(model).parameters(), 1e-4)
    print(json.dumps({"parameters": sum(p.numel() for p in nn.ModuleList(model).parameters())}), flush=True)
    sys.stdin.readline()
    trainer = PipelineTrainer(
        model, optimizer, nn.functional.mse_loss, batch=BATCH, micro_batch=1, stages=2, exact=False
    )
    seen: list[dict[str, Any]] = []
    threading.Thread(target=_answer, args=(seen,), daemon=True).start()
    for done in trainer.steps(OneSequence(), epochs=1000):
        running = trainer.engine.running
        seen.append(
            {
                "at_s": time.monotonic(),
                "step": done.step,
                "members": len(done.members),
                "layout": trainer.layout,
                "predicted_s": running.predicted_us / 1e6 if running else 0.0,
            }
        )


def _answer(seen: list[dict[str, Any]]) -> None:
    for _ in sys.stdin:
        told, seen[:] = seen[:], []
        print(json.dumps({"seen": told}), flush=True)
    os._exit(0)  # The parent is gone.


# --- the parent ---


@dataclass(slots=True)
class Chapter:
    """Steps of the founder from a change on, until they are calm."""

    what: str
    steps_s: list[float]
    step_s: float
    predicted_s: float
    longest_s: float
    lost: int
    layout: str


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
                return self._chapter(what, self.seen[max(begin - 1, 0) :], fitting[calm:])
            time.sleep(0.5)
        raise ConfigError(f"bench pipelines-size: {what}: not {calm + count} steps in {PATIENCE_S:.0f} s")

    def _chapter(
        self, what: str, seen: Sequence[dict[str, Any]], counted: Sequence[dict[str, Any]]
    ) -> Chapter:
        lengths = [b["at_s"] - a["at_s"] for a, b in pairwise(counted)]
        lost = seen[-1]["step"] - seen[0]["step"] + 1 - len(seen)
        longest_s = max(b["at_s"] - a["at_s"] for a, b in pairwise(seen))
        last = counted[-1]
        return Chapter(
            what, lengths, statistics.median(lengths), last["predicted_s"], longest_s, lost, last["layout"]
        )


def measure(mbit: float, forward_s: float, count: int) -> tuple[int, list[Chapter]]:
    """All chapters, and how many parameters the model has."""
    topology = mesh(4, LinkSpec(rate_mbit=mbit))
    with namespaces(topology, routes=True) as testbed, quiet() as (env, said), ExitStack() as stack:

        def ready(name: str) -> tuple[PlacedNode, int]:
            node = PlacedNode(testbed, name, "pipelines_size", stderr=said, env=env)
            stack.callback(node.kill)
            node.tell({"forward_s": forward_s, "backward_s": 2 * forward_s})
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
        found.append(watched.chapter(f"the link {slow[0]} - {slow[1]} has a tenth of its rate", 4, count, 10))
        return parameters, found


@click.command("pipelines-size")
@click.option("--mbit", type=Amount(1, 100_000), default=1000.0, show_default=True, help="Of each link.")
@click.option(
    "--forward", "forward_s", type=Amount(0.001, 10), default=0.03, show_default=True,
    help="Seconds of one layer for one micro-batch; twice that backwards.",
)  # fmt: skip
@click.option(
    "--steps", type=Whole(2, 100), default=8, show_default=True, help="That count, after each change."
)
@json_option
def size_command(mbit: float, forward_s: float, steps: int, json_file: Path | None) -> None:
    """GPT-2 small in true size: a start, a kill, a join and a slow link (root)."""
    if os.geteuid() != 0:
        raise ConfigError("bench pipelines-size: network namespaces need root")
    try:
        parameters, found = measure(mbit, forward_s, steps)
    except TestbedError as error:
        raise ConfigError(f"bench pipelines-size: {error}") from None
    click.echo(f"{parameters:,} parameters, links of {mbit:g} Mbit/s")
    head = [
        "",
        "step, s",
        "predicted, s",
        "measured / predicted",
        "longest gap, s",
        "steps lost",
        "pipelines",
    ]
    table(head, [_row(each) for each in found])
    write_json(
        json_file, {"parameters": parameters, "mbit": mbit, "chapters": [asdict(each) for each in found]}
    )


def _row(each: Chapter) -> list[Any]:
    ratio = each.step_s / each.predicted_s if each.predicted_s else None
    return [each.what, each.step_s, each.predicted_s, ratio, each.longest_s, each.lost, each.layout]


if __name__ == "__main__":
    _serve()
