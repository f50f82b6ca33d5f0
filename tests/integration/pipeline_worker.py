"""The script of tests of pipelines: a small language model with tied weights and dropout, in layers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable

import torch
import xxhash
from torch import nn
from torch.utils.data import TensorDataset
from worker import CHECKPOINTS, CLUSTER, Worker

from chaosnet import (
    Callbacks,
    Checkpoints,
    Cluster,
    EpochDone,
    PipelineTrainer,
    StateLoaded,
    StepDone,
    Validation,
    capture_exit_event,
)
from chaosnet.protocols.messages import Notice

WORDS, WIDTH, LENGTH = 32, 16, 12
BATCH, MICRO_BATCH = 24, 4


class Embedding(nn.Module):
    """Words and places; its weights are those of the head, too."""

    def __init__(self, words: nn.Embedding, dropout: float) -> None:
        super().__init__()
        self.words, self.places, self.drop = words, nn.Embedding(LENGTH, WIDTH), nn.Dropout(dropout)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        both = self.drop(self.words(ids) + self.places(torch.arange(ids.shape[1])))
        # With strides that it would not have over a link.
        return both.transpose(1, 2).contiguous().transpose(1, 2)


class Block(nn.Module):
    """Attention and a feed-forward part."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.attention = nn.MultiheadAttention(WIDTH, 2, dropout=dropout, batch_first=True)
        feed = nn.Linear(WIDTH, 32), nn.ReLU(inplace=True), nn.Dropout(dropout), nn.Linear(32, WIDTH)
        self.feed = nn.Sequential(*feed)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
        normed = self.norm(x)
        x = x + self.attention(normed, normed, normed, attn_mask=mask, is_causal=True, need_weights=False)[0]
        return x + self.feed(x)


class Head(nn.Module):
    def __init__(self, words: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.words = nn.LayerNorm(WIDTH), words

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x) @ self.words.weight.T


def make_layers(blocks: int = 5, dropout: float = 0.1) -> list[nn.Module]:
    """The same for whoever asks: embedding, blocks, and a head that shares the embedding's weights."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        words = nn.Embedding(WORDS, WIDTH)
        return [Embedding(words, dropout), *(Block(dropout) for _ in range(blocks)), Head(words)]


def make_functions(blocks: int, dropout: float, tell: Callable[[int], None]) -> list[nn.Module | Callable]:
    """The same layers, but functions build the blocks. `tell`: hears which is built with its parameters."""

    def function(number: int) -> Callable[[], nn.Module]:
        def build() -> nn.Module:
            block = Block(dropout)
            if not block.norm.weight.is_meta:
                tell(number)
            return block

        return build

    first, *_, last = make_layers(blocks, dropout)
    return [first, *(function(number + 1) for number in range(blocks)), last]


def next_word(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(out.flatten(0, 1), targets.flatten())


def hits(out: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return (out.argmax(-1) == targets).float().mean()


def make_data(samples: int = 100) -> TensorDataset:
    """Counting by threes, with some noise. Not a multiple of the batch: the end of an epoch has fewer samples."""
    generator = torch.Generator().manual_seed(3)
    start = torch.randint(WORDS, (samples, 1), generator=generator)
    ids = (start + 3 * torch.arange(LENGTH + 1)) % WORDS
    noise = torch.rand(ids.shape, generator=generator) < 0.1
    ids[noise] = torch.randint(WORDS, (int(noise.sum()),), generator=generator)
    return TensorDataset(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())


def make_optimizer(layers: Iterable[nn.Module]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(nn.ModuleList(layers).parameters(), lr=3e-3)


def make_plain(layers: list[nn.Module]) -> torch.optim.Optimizer:
    """Whose steps are in proportion to gradients, so that a rounding stays one."""
    return torch.optim.SGD(nn.ModuleList(layers).parameters(), lr=0.05, momentum=0.9)


def train(worker: Worker) -> None:
    """Train until the test says otherwise, and report as worker.train does."""
    settings = worker.settings
    sizes = settings.get("blocks", 5), settings.get("dropout", 0.1)
    layers = make_layers(*sizes)
    optimizer = make_plain(layers) if settings.get("plain") else make_optimizer(layers)
    schedule = None if settings.get("plain") else torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.9)
    if settings.get("functions"):
        layers = make_functions(*sizes, lambda layer: worker.tell("built", layer=layer))
        optimizer, schedule = make_optimizer, lambda made: torch.optim.lr_scheduler.StepLR(made, 50, 0.9)

    def on_step(event: StepDone) -> None:
        hash_every = settings.get("hash_every", 1)
        worker.tell(
            "step", round=event.round, step=event.step, applied=event.applied, weight=event.weight, by=event.members,
            means=event.metrics, epoch=event.epoch, is_main=False,
            hash=trainer_hash() if event.applied and event.step % hash_every == 0 else None, held=held(),
        )  # fmt: skip

    def trainer_hash() -> str | None:
        if not here or here[0].keeping is not None:
            return None  # It catches up while it joins, or has only a part.
        return here[0].state.state_hash()

    def held() -> dict[int, str]:
        """Of each group of layers that is kept here."""
        keeping = here[0].keeping if here else None
        return {group: keeping.parts.digest(group) for group in keeping.parts.held} if keeping else {}

    def there() -> list[int]:
        """Groups of layers whose parameters are here; none if nothing is kept in parts."""
        keeping = here[0].keeping
        return [g for g in range(len(keeping.parts.groups)) if keeping.parts.has(g)] if keeping else []

    def on_loaded(event: StateLoaded) -> None:
        worker.tell("loaded", round=event.round)
        if here:
            worker.tell("loaded again", step=event.step, there=there())

    def on_notice(notice: Notice) -> None:
        worker.tell("notice", kind=notice.kind, node=notice.node, detail=notice.detail, step=notice.step)

    def on_epoch(event: EpochDone) -> None:
        found = {name: value for name, value in event.metrics.items() if name.startswith("val_")}
        if found:
            worker.tell("validated", epoch=event.epoch, found=found)

    def dies(module: nn.Module, inputs: object) -> None:
        """In the second forward of a validation."""
        if not module.training:
            forwards.append(module)
        if len(forwards) == 2:
            worker.tell("dies")
            os.kill(os.getpid(), signal.SIGKILL)

    forwards: list[nn.Module] = []
    for layer in layers if settings.get("dies_as_it_validates") else ():
        layer.register_forward_pre_hook(dies)
    here: list = []
    trainer = PipelineTrainer(
        layers, optimizer, next_word, schedule, batch=BATCH, micro_batch=MICRO_BATCH,
        max_grad_norm=None if settings.get("plain") else 1.0,
        stages=settings.get("stages", 2), layout=settings.get("layout", ""), keepers=settings.get("keepers"),
        first_members=settings.get("first_members", 1),
        validation=Validation(make_data(30), {"hits": hits}) if settings.get("validates") else None,
        callbacks=Callbacks(on_step, on_loaded, on_notice, on_epoch=on_epoch),
        cluster=Cluster(name=worker.name, **{key: settings[key] for key in CLUSTER if key in settings}),
        checkpoints=Checkpoints(**{key: settings[key] for key in CHECKPOINTS if key in settings}),
    )  # fmt: skip
    here.append(trainer.engine)
    address = trainer.session.loop.transport.address
    worker.tell(
        "joined",
        step=trainer.step,
        hash=trainer_hash(),
        address=address,
        seconds=0.0,
        bytes_by_source={},
        there=there(),
    )
    if settings.get("gathers_first"):
        trainer.gather()
    told = ""
    for _ in trainer.steps(make_data(settings.get("samples", 100)), epochs=settings.get("epochs", 10**6)):
        if trainer.layout != told:
            told = trainer.layout
            worker.tell(
                "layout", layout=told, why=trainer.engine.running.why if trainer.engine.running else ""
            )
        if trainer.step == settings.get("saves_at"):
            torch.save(trainer.model.state_dict(), f"{settings['saves_to']}/{worker.name}.pt")
            worker.tell("saved")
        if trainer.step == settings.get("gathers_at"):
            trainer.gather()
            digest = xxhash.xxh3_64()
            for parameter in trainer.model.parameters():
                digest.update(parameter.detach().numpy().tobytes())
            worker.tell("gathered", parameters=digest.hexdigest())
        if settings.get("evaluates_every") and trainer.step % settings["evaluates_every"] == 0:
            model = nn.Sequential(*trainer.model).eval()
            for x, y in trainer.evaluate(make_data(30), batch_size=8):
                with torch.no_grad():
                    trainer.mean(next_word(model(x), y), "held out")
            model.train()
            worker.tell("evaluated", step=trainer.step, loss=trainer.metrics["held out"])
        if capture_exit_event() or worker.obey():
            break
        time.sleep(settings.get("pause_s", 0.05))
    trainer.request_node_exit()
