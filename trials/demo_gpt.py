"""The script that each node of `chaosnet demo --pipeline` runs: a small GPT learns to write the demo's source code.

An ordinary script of `PipelineTrainer`, and for the demo's sake three things more: it writes down what it computes
and every step, its blocks take a little longer than they need so that a person can watch, and it goes on until the
demo says at which step to stop.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import msgspec
import torch
import xxhash
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Callbacks, Emulated, LayersComputed, PipelineTrainer
from chaosnet.trials.demo_digits import end_with_parent

LENGTH, WIDTH, HEADS, BLOCKS = 32, 32, 2, 9
BATCH, MICRO_BATCH = 32, 4


class GptFirst(nn.Module):
    """Bytes and their places, then a block."""

    def __init__(self, words: nn.Embedding, block: nn.Module) -> None:
        super().__init__()
        self.words, self.places, self.block = words, nn.Embedding(LENGTH, WIDTH), block

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.block(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        return out


class GptBlock(nn.Module):
    """Attention and a feed-forward part, with dropout. It takes `pause_s` forwards, and twice that backwards."""

    def __init__(self, pause_s: float) -> None:
        super().__init__()
        self.norm, self.in_out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.feed = nn.Sequential(
            nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Dropout(0.1)
        )  # fmt: skip
        self.pause = Emulated(pause_s, 2 * pause_s)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.in_out(self.norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + mixed.transpose(1, 2).flatten(2)
        out: torch.Tensor = self.pause(x + self.feed(x))
        return out


class GptLast(nn.Module):
    """A block, then which byte comes next. Its weights are those of the embedding."""

    def __init__(self, words: nn.Embedding, block: nn.Module) -> None:
        super().__init__()
        self.words, self.block, self.norm = words, block, nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.block(x)) @ self.words.weight.T
        return out


def make_layers(pause_s: float, seed: int) -> list[nn.Module]:
    """The same numbers for whoever asks, however long they take."""
    torch.manual_seed(seed)
    words = nn.Embedding(256, WIDTH)
    nn.init.normal_(words.weight, std=0.1)
    first, *middle, last = (GptBlock(pause_s) for _ in range(BLOCKS))
    return [GptFirst(words, first), *middle, GptLast(words, last)]


def own_source() -> TensorDataset:
    """Pieces of the source code beside this file, each with what comes one byte later."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    text = b"".join(file.read_bytes() for file in files)
    pieces = torch.frombuffer(bytearray(text), dtype=torch.uint8).long().unfold(0, LENGTH + 1, LENGTH)
    return TensorDataset(pieces[:, :-1], pieces[:, 1:])


def next_byte(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean over samples and places."""
    return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


def hash_of(model: nn.Module) -> str:
    """Of all parameters."""
    digest = xxhash.xxh3_128()
    for parameter in model.parameters():
        digest.update(parameter.detach().numpy().tobytes())
    return digest.hexdigest()


def main() -> None:
    options = _options()
    end_with_parent()
    torch.set_num_threads(1)
    log = options.log.open("w", buffering=1)

    def write(**what: object) -> None:
        print(json.dumps({"at_s": time.monotonic(), **what}), file=log)

    def computed(event: LayersComputed) -> None:
        write(computed=msgspec.to_builtins(event))

    layers = make_layers(options.pause, options.seed)
    optimizer = torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=3e-3)
    with PipelineTrainer(
        layers, optimizer, next_byte, batch=BATCH, micro_batch=MICRO_BATCH, layout=options.layout, stages=3,
        max_grad_norm=1.0, seed=options.seed, keepers=2, callbacks=Callbacks(on_computed=computed),
    ) as trainer:  # fmt: skip
        write(joined=trainer.step)
        for step in trainer.steps(own_source(), epochs=1_000_000):
            write(
                step=step.step, round=step.round, loss=step.metrics["loss"], members=len(step.members),
                layout=trainer.layout, why=trainer.engine.running.why if trainer.engine.running else "",
            )  # fmt: skip
            if options.until.exists() and step.step >= int(options.until.read_text()):
                break
        trainer.gather()
        write(final_step=trainer.step, hash=hash_of(trainer.model))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True, help="progress as JSON lines")
    parser.add_argument("--until", type=Path, required=True, help="a file: stop at the step that it names")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that a block takes forwards")
    parser.add_argument("--layout", default="")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
