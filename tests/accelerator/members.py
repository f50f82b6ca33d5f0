"""Members of a cluster as threads of this process, each with a model on a device of its own choice."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from typing import Any

import sham
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Callbacks, Cluster, Trainer

CPU = torch.device("cpu")
PATIENCE_S = 60.0


def net(device: torch.device = CPU, dropout: float = 0.0, seed: int = 0) -> nn.Module:
    """Always the same numbers, whatever the device."""
    torch.manual_seed(seed)
    layers = nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 3)
    return nn.Sequential(*layers).to(device)


def data(samples: int = 24) -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(samples, 6, generator=generator), torch.arange(samples) % 3)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    device = next(model.parameters()).device
    return nn.functional.cross_entropy(model(batch[0].to(device)), batch[1].to(device))


def alone(**settings: Any) -> dict[str, Any]:
    """Settings of a cluster of one, and of whatever else."""
    return {"cluster": Cluster(new=True, listen="127.0.0.1:0"), "quiet": True, **settings}


def parameters(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().cpu().clone() for parameter in model.parameters()]


def assert_same(mine: list[torch.Tensor], theirs: list[torch.Tensor], device: torch.device) -> None:
    """To the bit on the sham device, whose arithmetic is the CPU's."""
    for a, b in zip(mine, theirs, strict=True):
        if device.type == sham.NAME:
            assert torch.equal(a, b)
        else:
            torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


class Member:
    """One thread's. `states`: parameters by step; `loaded`: the step that came, and the parameters then."""

    def __init__(self, name: str, device: torch.device, steps: int, optimizer: Callable[..., Any]) -> None:
        self.name, self.steps = name, steps
        self.model = net(device)
        self.optimizer = optimizer(self.model.parameters())
        self.states: dict[int, list[torch.Tensor]] = {}
        self.loaded: tuple[int, list[torch.Tensor]] | None = None
        self.of_two, self.is_left = 0, False  # Steps; and whether the other has had enough of them.

    def live(
        self, join: str, entered: queue.SimpleQueue[str], over: threading.Event, **settings: Any
    ) -> None:
        """Train until so many steps have been those of two, or the other has left, or all is over."""
        where = {"join": join} if join else {"new": True}
        cluster = Cluster(name=self.name, listen="127.0.0.1:0", **where)
        callbacks = Callbacks(on_step=self._stepped, on_loaded=self._loaded)
        with Trainer(
            self.model, self.optimizer, cluster=cluster, callbacks=callbacks, quiet=True, **settings
        ) as trainer:
            entered.put(trainer.session.loop.transport.address)
            for batch in trainer.batches(data(), 4, epochs=10**6):
                loss_of(self.model, batch).backward()
                trainer.update()
                if self.of_two >= self.steps or self.is_left or over.is_set():
                    break

    def _stepped(self, event: Any) -> None:
        self.states[event.step] = parameters(self.model)
        self.of_two += len(event.members) == 2
        self.is_left = self.of_two > 0 and len(event.members) == 1

    def _loaded(self, event: Any) -> None:
        self.loaded = event.step, parameters(self.model)


def results_of(*lives: Future[Any]) -> list[Any]:
    """Once all have ended, or the first has failed: the other would wait for it."""
    done, _ = wait(lives, timeout=PATIENCE_S, return_when=FIRST_EXCEPTION)
    for life in done:
        life.result()
    return [life.result(timeout=0) for life in lives]


@contextmanager
def together() -> Iterator[tuple[ThreadPoolExecutor, threading.Event]]:
    """Threads, and what tells them that it is over: at the end of the block, if only by an error."""
    over = threading.Event()
    with ThreadPoolExecutor() as threads:
        try:
            yield threads, over
        finally:
            over.set()


@contextmanager
def cluster_of_two(first: Member, second: Member, **settings: Any) -> Iterator[None]:
    """The first founds, the second joins while it trains. The block begins when both have ended."""
    entered: queue.SimpleQueue[str] = queue.SimpleQueue()
    with together() as (threads, over):
        lives: list[Future[None]] = [threads.submit(first.live, "", entered, over, **settings)]
        join = entered.get(timeout=PATIENCE_S)
        lives.append(threads.submit(second.live, join, entered, over, **settings))
        results_of(*lives)
    yield
