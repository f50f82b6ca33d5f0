"""What the Chaos paper's nodes learn, small enough for a processor: pictures and text, and models for them.

Pictures are scikit-learn's handwritten digits, or CIFAR-10 from local files; text is made by a small grammar, or
WikiText-2 or DailyDialog from local files. The networks are built like ResNet, AlexNet and VGG, and like GPT-2 with
LoRA (to which the grammar, or the text, is new), with a few thousand to a hundred thousand parameters.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from ..extras import demand
from ..protocols.errors import ConfigError

HELD_OUT = 0.2
CLASSES = 10
BYTES = 256
"""Text is a sequence of bytes: no tokenizer is needed."""
CONTEXT, WIDTH, HEADS, LAYERS, RANK = 48, 64, 4, 2, 4
PRETRAIN_STEPS, PRETRAIN_BATCH = 150, 32
MADE_SENTENCES = 3000
CIFAR_ROW = 1 + 3 * 32 * 32
FILES = {
    "cifar-10": "cifar-10-batches-bin/data_batch_1.bin to _5.bin and test_batch.bin (CIFAR-10's binary version)",
    "wikitext-2": "wikitext-2/wiki.train.tokens and wiki.valid.tokens",
    "dailydialog": "dailydialog/dialogues_text.txt",
}


class LearningTask(NamedTuple):
    """Samples to learn from and to be judged by; `x` and `y` of one length."""

    x: torch.Tensor
    y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor

    def part(self, index: int, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One node's: every so-manieth sample, so that all are alike."""
        return self.x[index::parts], self.y[index::parts]


# --- pictures ---


def digits() -> LearningTask:
    """1797 of 8 x 8 pixels."""
    demand("demo", "the task of handwritten digits")
    from sklearn.datasets import load_digits

    found = load_digits()
    x = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 16
    return _held_out(x, torch.tensor(found.target))


def cifar_10(folder: Path) -> LearningTask:
    """60,000 of 3 x 32 x 32. Raises: ConfigError if they are not there."""
    at = folder / "cifar-10-batches-bin"
    x, y = zip(*(_cifar(at / f"data_batch_{number}.bin") for number in range(1, 6)), strict=True)
    return LearningTask(torch.cat(x), torch.cat(y), *_cifar(at / "test_batch.bin"))


def _cifar(file: Path) -> tuple[torch.Tensor, torch.Tensor]:
    _expect(file, "cifar-10")
    rows = torch.from_numpy(np.fromfile(file, np.uint8).reshape(-1, CIFAR_ROW))
    return rows[:, 1:].reshape(-1, 3, 32, 32).float() / 255, rows[:, 0].long()


# --- text ---


def made(seed: int) -> bytes:
    """Sentences of a small grammar, whose words are drawn from the seed."""
    rng = random.Random(seed)
    nouns, verbs, places = (
        ["".join(rng.choices("abdeiklmnorstu", k=5)) for _ in range(12)] for _ in range(3)
    )
    lines = []
    for _ in range(MADE_SENTENCES):
        subject, thing = rng.sample(nouns, 2)
        tail = f" in the {rng.choice(places)}" if rng.random() < 0.5 else ""
        lines.append(f"the {subject} {rng.choice(verbs)}s the {thing}{tail}.")
    return "\n".join(lines).encode()


def wikitext_2(folder: Path) -> LearningTask:
    """Raises: ConfigError if it is not there."""
    train, test = (folder / "wikitext-2" / f"wiki.{name}.tokens" for name in ("train", "valid"))
    return LearningTask(*_windows(_text(train, "wikitext-2")), *_windows(_text(test, "wikitext-2")))


def dailydialog(folder: Path) -> LearningTask:
    """Raises: ConfigError if it is not there."""
    return _held_out(*_windows(_text(folder / "dailydialog" / "dialogues_text.txt", "dailydialog")))


def _text(file: Path, task: str) -> bytes:
    _expect(file, task)
    return file.read_bytes()


def _windows(text: bytes) -> tuple[torch.Tensor, torch.Tensor]:
    """Cut into pieces; of each byte the next one is to be told."""
    whole = torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))
    pieces = whole[: len(whole) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1)
    return pieces[:, :-1], pieces[:, 1:]


def _held_out(x: torch.Tensor, y: torch.Tensor) -> LearningTask:
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    cut = int(len(x) * (1 - HELD_OUT))
    return LearningTask(x[order[:cut]], y[order[:cut]], x[order[cut:]], y[order[cut:]])


def _expect(file: Path, task: str) -> None:
    if not file.is_file():
        raise ConfigError(f"--data: there is no {file} (expected {FILES[task]})")


def load(task: str, folder: Path | None) -> LearningTask:
    """By its name. Raises: ConfigError if it needs files that are not there."""
    if task == "digits":
        return digits()
    if task == "made":
        return _held_out(*_windows(made(1)))
    if folder is None:
        raise ConfigError(f"--data: {task} is read from local files (expected a folder with {FILES[task]})")
    readers: dict[str, Callable[[Path], LearningTask]] = {
        "cifar-10": cifar_10, "wikitext-2": wikitext_2, "dailydialog": dailydialog,
    }  # fmt: skip
    return readers[task](folder)


# --- models ---


class Residual(nn.Module):
    """Two convolutions around which the input goes, too."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = functional.relu(self.norms[0](self.first(x)))
        return functional.relu(x + self.norms[1](self.second(inner)))


def _conv(inside: int, outside: int) -> list[nn.Module]:
    return [nn.Conv2d(inside, outside, 3, padding=1), nn.ReLU()]


def resnet(channels: int) -> nn.Module:
    """Like ResNet101: residual blocks, batch norms, a mean over the picture."""
    blocks = [Residual(16), nn.MaxPool2d(2), Residual(16)]
    return nn.Sequential(
        *_conv(channels, 16), *blocks, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(64, CLASSES)
    )


def alexnet(channels: int) -> nn.Module:
    """Like AlexNet: few convolutions, then wide layers with dropout."""
    body = [*_conv(channels, 12), nn.MaxPool2d(2), *_conv(12, 24), nn.AdaptiveAvgPool2d(4), nn.Flatten()]
    return nn.Sequential(*body, nn.Linear(24 * 16, 96), nn.ReLU(), nn.Dropout(0.5), nn.Linear(96, CLASSES))


def vgg(channels: int) -> nn.Module:
    """Like VGG11: pairs of convolutions between poolings."""
    body = [*_conv(channels, 12), *_conv(12, 12), nn.MaxPool2d(2), *_conv(12, 24), *_conv(24, 24)]
    return nn.Sequential(
        *body, nn.AdaptiveAvgPool2d(2), nn.Flatten(), nn.Linear(96, 48), nn.ReLU(), nn.Linear(48, CLASSES)
    )


class LoRA(nn.Module):
    """A linear layer that is frozen, and a product of two thin matrices that is trained; it begins at zero."""

    def __init__(self, inner: nn.Linear) -> None:
        super().__init__()
        self.inner = inner.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(inner.in_features, RANK) / inner.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(RANK, inner.out_features))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + x @ self.down @ self.up


class Block(nn.Module):
    """Attention to what came before, then two layers; norms first, as in GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.qkv: nn.Module = nn.Linear(WIDTH, 3 * WIDTH)
        self.out: nn.Module = nn.Linear(WIDTH, WIDTH)
        self.up: nn.Module = nn.Linear(WIDTH, 4 * WIDTH)
        self.down: nn.Module = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.norms[1](x))))


class GPT(nn.Module):
    """A small GPT-2 over bytes. x: int64 [batch, length] -> float32 [batch, bytes, length]."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(BYTES, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.blocks(self.bytes(x) + self.places.weight[: x.shape[1]])
        return functional.linear(self.norm(inner), self.bytes.weight).transpose(1, 2)

    def adapt(self) -> GPT:
        """Freeze all, and train LoRA's matrices in their place."""
        self.requires_grad_(False)
        for block in self.blocks:
            for name in ("qkv", "out", "up", "down"):
                setattr(block, name, LoRA(getattr(block, name)))
        return self


def pretrained(file: Path) -> None:
    """Write a GPT that has learnt another text of the same kind."""
    torch.manual_seed(0)
    model, (x, y) = GPT(), _windows(made(0))
    optimizer = torch.optim.Adam(model.parameters(), 3e-3)
    for _ in range(PRETRAIN_STEPS):
        some = torch.randint(len(x), (PRETRAIN_BATCH,))
        loss = functional.cross_entropy(model(x[some]), y[some])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    torch.save(model.state_dict(), file)


VISION_MODELS: dict[str, Callable[[int], nn.Module]] = {"ResNet": resnet, "AlexNet": alexnet, "VGG": vgg}


def make(model: str, task: LearningTask, weights: Path | None) -> nn.Module:
    """By its name; a GPT with these weights, and LoRA."""
    if model in VISION_MODELS:
        return VISION_MODELS[model](task.x.shape[1])
    gpt = GPT()
    if weights is not None:
        gpt.load_state_dict(torch.load(weights, weights_only=True))
    return gpt.adapt()


def judge(model: nn.Module, task: LearningTask, most: int = 2000) -> tuple[float, float]:
    """Loss and accuracy on (some of) what was held out."""
    model.eval()
    with torch.no_grad():
        told = model(task.test_x[:most])
        loss = float(functional.cross_entropy(told, task.test_y[:most]))
        right = float((told.argmax(1) == task.test_y[:most]).float().mean())
    model.train()
    return loss, right
