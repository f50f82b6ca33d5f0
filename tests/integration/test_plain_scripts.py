"""Scripts as people write them, within the documented rules: a third node joins in the middle, and all end equal.

Each process goes through all of them, one Trainer after the other. Every node has data of its own.
"""

from __future__ import annotations

import copy
import socket
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from typing import Any

import pytest
import torch
from cluster import Cluster
from torch import nn
from worker import Worker

from chaosnet import Cluster as ClusterSettings
from chaosnet import Trainer

pytestmark = pytest.mark.realtime

TOGETHER = 12  # Steps that all three train.
PATIENCE_S = 120.0
Step = Callable[[Trainer], Any]  # Forward and backward.


class Script:
    """What one of them sets up: arguments of its Trainer, and what it does in a step."""

    def __init__(
        self, step: Step, model: nn.Module, optimizer: torch.optim.Optimizer, **settings: Any
    ) -> None:
        self.step, self.settings = step, {"model": model, "optimizer": optimizer, **settings}


class Attention(nn.Module):
    """A small transformer with dropout, and input and output embeddings tied."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 16)
        self.layers = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 32, 0.1, batch_first=True), 2)
        self.out = nn.Linear(16, 32, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.out(self.layers(self.embedding(tokens)))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(8, 16, 2, dropout=0.2, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x)[0][:, -1])


class LowRank(nn.Module):
    """A frozen layer and a low-rank addition to it."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.down, self.up = (
            nn.Linear(8, 4),
            nn.Linear(8, 2, bias=False),
            nn.Linear(2, 4, bias=False),
        )
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.frozen(x) + self.up(self.down(x))


def classify(model: nn.Module, shape: tuple[int, ...] = (6, 8), classes: int = 4) -> Step:
    def step(_: Trainer) -> None:
        nn.functional.cross_entropy(model(torch.randn(shape)), torch.randint(classes, shape[:1])).backward()

    return step


def dense() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 4))


def with_optimizer(make: Callable[..., torch.optim.Optimizer], **options: Any) -> Callable[[], Script]:
    def script() -> Script:
        model = dense()
        return Script(classify(model), model, make(model.parameters(), **options))

    return script


def transformer() -> Script:
    model = Attention()

    def step(_: Trainer) -> None:
        tokens = torch.randint(32, (3, 9))
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()

    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)
    return Script(step, model, optimizer, max_grad_norm=1.0)


def recurrent() -> Script:
    model = Recurrent()
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10_000)
    return Script(classify(model, (6, 5, 8)), model, optimizer, lr_scheduler=scheduler)


def convolutional() -> Script:
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )  # fmt: skip
    model(torch.randn(2, 1, 6, 6))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, nesterov=True, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    return Script(classify(model, (6, 1, 6, 6)), model, optimizer, lr_scheduler=scheduler)


def low_rank() -> Script:
    model = LowRank()
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return Script(classify(model), model, torch.optim.AdamW(trained, 1e-2))


def averaged() -> Script:
    """An exponential average of the weights, kept by `after_step` and handed over in `extra_state`."""
    model = dense()
    average = copy.deepcopy(model).requires_grad_(False)
    state = {"average": dict(average.state_dict(keep_vars=True))}

    def after_step() -> None:
        with torch.no_grad():
            torch._foreach_lerp_(list(average.parameters()), list(model.parameters()), 0.1)

    settings: dict[str, Any] = {"extra_state": state, "after_step": after_step}
    return Script(classify(model), model, torch.optim.Adam(model.parameters()), **settings)


def accumulated() -> Script:
    model = dense()
    backward = classify(model)

    def step(trainer: Trainer) -> None:
        for _ in range(3):
            backward(trainer)

    return Script(step, model, torch.optim.Adam(model.parameters()))


def autocast() -> Script:
    model = dense()

    def step(_: Trainer) -> None:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
        loss.backward()

    return Script(step, model, torch.optim.Adam(model.parameters()))


def groups() -> Script:
    model = dense()
    two = [
        {"params": model[0].parameters(), "lr": 1e-3},
        {"params": model[3].parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(two, 1e-2)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda n: 0.99**n, lambda n: 1 / (1 + n)])
    return Script(classify(model), model, optimizer, lr_scheduler=scheduler)


def plateau() -> Script:
    model = dense()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)

    def step(trainer: Trainer) -> None:
        loss = nn.functional.cross_entropy(model(torch.randn(6, 8)), torch.randint(4, (6,)))
        loss.backward()
        trainer.mean(loss)

    return Script(step, model, optimizer, lr_scheduler=scheduler)


def unused_parameters() -> Script:
    """A branch that only some batches take, on some nodes."""
    model = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)])

    def step(_: Trainer) -> None:
        branch = model[int(torch.randint(2, ()))]
        nn.functional.cross_entropy(branch(torch.randn(6, 8)), torch.randint(4, (6,))).backward()

    return Script(step, model, torch.optim.Adam(model.parameters()))


OPTIMIZERS = {
    "sgd": with_optimizer(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": with_optimizer(torch.optim.Adagrad, lr=0.1),
    "rmsprop": with_optimizer(torch.optim.RMSprop, lr=1e-3, momentum=0.5, centered=True),
    "nadam": with_optimizer(torch.optim.NAdam, lr=1e-3),
    "radam": with_optimizer(torch.optim.RAdam, lr=1e-3),
    "adamax": with_optimizer(torch.optim.Adamax, lr=1e-3),
    "adafactor": with_optimizer(torch.optim.Adafactor, lr=1e-2),
    "adam amsgrad": with_optimizer(torch.optim.Adam, lr=1e-3, amsgrad=True),
    "asgd": with_optimizer(torch.optim.ASGD, lr=1e-2),
    "rprop": with_optimizer(torch.optim.Rprop, lr=1e-2),
}
SCRIPTS: dict[str, Callable[[], Script]] = {
    each.__name__: each
    for each in (
        transformer, recurrent, convolutional, low_rank, averaged, accumulated, autocast, groups, plateau,
        unused_parameters,
    )
} | OPTIMIZERS  # fmt: skip


def go_through_all(worker: Worker) -> None:
    """The third node comes later to each, and starts from other weights, as all do."""
    for number, (name, make) in enumerate(SCRIPTS.items()):
        torch.manual_seed(ord(worker.name))
        script = make()
        where = f"127.0.0.1:{worker.settings['ports'][number]}"
        found = {"listen": where} if worker.name == "a" else {"join": where}
        time.sleep(0.3 * (worker.name == "c"))
        cluster = ClusterSettings(name=worker.name, neighbors=2, join_patience_s=60.0, **found)
        trainer = Trainer(cluster=cluster, quiet=True, **script.settings)
        together = 0
        while together < TOGETHER:
            script.step(trainer)
            trainer.mean(float(len(trainer.status().active) == 3), name="all")
            trainer.update(samples=6)
            together += (
                trainer.metrics["all"] == 1.0
            )  # The same on all of them, and so is the step they end at.
            time.sleep(0.005)
        worker.tell("case", name=name, step=trainer.step, hash=trainer.state_hash())
        trainer.close()


def free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(closing(socket.socket())) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


@pytest.mark.slow
def test_scripts_that_keep_to_the_rules_end_equal_though_a_node_joins_in_the_middle(tmp_path):
    ports = free_ports(len(SCRIPTS))
    cluster = Cluster(tmp_path, script=go_through_all, ports=ports)
    try:
        nodes = [cluster.start_alone() for _ in "abc"]
        for node in nodes:
            cluster.until(lambda node=node: node.told("ended"), f"{node.name} is through", PATIENCE_S)
        story = cluster.story()
        assert [node.ended()["how"] for node in nodes] == 3 * ["returned"], story
        results = [{r["name"]: (r["step"], r["hash"]) for r in node.told("case")} for node in nodes]
        assert list(results[0]) == list(SCRIPTS)
        differ = [name for name in SCRIPTS if len({result[name] for result in results}) != 1]
        assert not differ, f"{differ}\n{story}"
    finally:
        cluster.close()
