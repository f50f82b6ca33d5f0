"""What runs in the processes of a test cluster: a script that trains, reports and takes orders."""

from __future__ import annotations

import ctypes
import faulthandler
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from chaosnet import Callbacks, Checkpoints, Cluster, StateLoaded, StepDone, Trainer, capture_exit_event
from chaosnet.node.state import checkpoint
from chaosnet.node.state.replica import Replica
from chaosnet.node.sums.all_reduce import AllReduce
from chaosnet.protocols.messages import Notice

FEATURES, CLASSES = 8, 4
PR_SET_PDEATHSIG = 1
CLUSTER = (
    "join", "join_patience_s", "listen", "found", "links", "neighbors", "blocking", "chunk_bytes", "compression",
    "key", "allowed_keys",
)  # fmt: skip
CHECKPOINTS = ("directory", "every", "copies", "resume", "resume_from")
SABOTAGE = {
    "all-reduce": (AllReduce, "perform"),
    "serve": (Replica, "serve_shard"),
    "store": (Replica, "store_shard"),
    "checkpoint": (checkpoint, "_write_file"),  # Two a checkpoint: the tensors, and their index.
}


class Numbered(Dataset[tuple[torch.Tensor, torch.Tensor, int]]):
    """A small classification task; the third part of an item is its index, so that tests can follow it."""

    def __init__(self, length: int = 96) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(length, FEATURES, generator=generator)
        self.y = (self.x @ torch.randn(FEATURES, CLASSES, generator=generator)).argmax(1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor, int]:
        return self.x[index], self.y[index], index


def make_model(seed: int = 0) -> nn.Module:
    """Two layers, some hundred parameters; with little chunks that is a dozen of them."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(FEATURES, 16), nn.ReLU(), nn.Linear(16, CLASSES))


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), 5e-3)


def loss_of(model: nn.Module, x: torch.Tensor, y: torch.Tensor, node: str = "") -> torch.Tensor:
    """The mean over a batch."""
    return nn.functional.cross_entropy(model(x), y)


class Worker:
    """A script's line to the test, which chose its `settings`."""

    def __init__(self, name: str, settings: dict[str, Any], pipe: Connection) -> None:
        self.name, self.settings, self._pipe = name, settings, pipe
        self._lock = threading.Lock()

    def tell(self, what: str, **fields: Any) -> None:
        """Report; once this has returned the test will read it, even if we are killed."""
        record = {"what": what, "at_s": time.monotonic(), **fields}
        with self._lock:
            self._pipe.send_bytes(json.dumps(record).encode())

    def tell_batch(self, trainer: Trainer, indices: torch.Tensor) -> None:
        """Which samples the update to come is about; also what a node that dies now had in hand."""
        self.tell("batch", step=trainer.step + 1, epoch=trainer.epoch, indices=indices.tolist())

    def obey(self) -> bool:
        """Do what the test wants, if it wants something. Returns: whether to leave."""
        order = json.loads(self._pipe.recv_bytes()) if self._pipe.poll() else {}
        for place, call in order.get("die_in", {}).items():
            _sabotage(self, place, call)
        if "rest_s" in order:
            self.tell("rests")
            time.sleep(order["rest_s"])
        return bool(order.get("leave"))

    def trainer(self, *args: Any, **kwargs: Any) -> Trainer:
        """A trainer that reports every step it applies."""
        return _Reporting(self, *args, quiet=False, **kwargs)


class _Reporting(Trainer):
    def __init__(self, worker: Worker, *args: Any, **kwargs: Any) -> None:
        self.worker = worker
        told = worker.settings
        cluster = Cluster(name=worker.name, **{key: told[key] for key in CLUSTER if key in told})
        checkpoints = Checkpoints(**{key: told[key] for key in CHECKPOINTS if key in told})
        callbacks = Callbacks(self._on_step, self._on_loaded, self._on_told)
        super().__init__(*args, cluster=cluster, checkpoints=checkpoints, callbacks=callbacks, **kwargs)

    def attach(self, *args: Any, **kwargs: Any) -> None:
        super().attach(*args, **kwargs)
        address = self.session.loop.transport.address
        self.worker.tell("joined", step=self.step, hash=self.state_hash(), address=address, seconds=self.join_seconds,
                         bytes_by_source=self.join_bytes_by_source)  # fmt: skip

    def _on_loaded(self, event: StateLoaded) -> None:
        self.worker.tell("loaded", round=event.round)

    def _on_step(self, event: StepDone) -> None:
        hash_every = self.worker.settings.get("hash_every", 1)
        self.worker.tell(
            "step",
            round=event.round,
            step=event.step,
            applied=event.applied,
            weight=event.weight,
            by=event.members,
            means=event.metrics,
            epoch=event.epoch,
            is_main=self.is_main,
            hash=self.state_hash() if hash_every and event.step % hash_every == 0 else None,
        )

    def _on_told(self, notice: Notice) -> None:
        self.worker.tell("notice", kind=notice.kind, node=notice.node, detail=notice.detail, step=notice.step)


def train(worker: Worker) -> None:
    """The script of most tests: what a user writes, with reports and orders between its lines."""
    settings = worker.settings
    model = make_model()
    ballast = settings.get("ballast_bytes")  # Makes the state large, and the all-reduce not.
    extra = {"ballast": torch.zeros(ballast, dtype=torch.uint8)} if ballast else None
    trainer = worker.trainer(model, make_optimizer(model), extra_state=extra)
    data, batch_size = Numbered(settings.get("samples", 96)), settings.get("batch_size", 4)
    if "loader_workers" in settings:
        workers = settings["loader_workers"]
        data, batch_size = DataLoader(data, batch_size, shuffle=True, num_workers=workers), None
    for batch in trainer.batches(data, batch_size, epochs=settings.get("epochs", 10**6)):
        x, y, indices = batch
        worker.tell_batch(trainer, indices)
        loss = loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        trainer.check_state_replication()
        if capture_exit_event() or worker.obey():
            break
        time.sleep(settings.get("pause_s", 0.002))
    trainer.request_node_exit()


# --- the process ---


def run(
    script: Callable[[Worker], None], name: str, settings: dict[str, Any], pipe: Connection, log: str
) -> None:
    """Main function of a worker process."""
    die_with_parent()
    _redirect(log)
    os.environ.update(settings.get("env", {}))
    faulthandler.register(signal.SIGUSR1)  # For Cluster.story.
    torch.set_num_threads(1)
    worker = Worker(name, settings, pipe)
    for place, call in settings.get("die_in", {}).items():
        _sabotage(worker, place, call)
    how, reason = "returned", ""
    try:
        script(worker)
    except (Exception, SystemExit) as error:
        how, reason = type(error).__name__, str(error)
        traceback.print_exc()
        raise
    finally:
        worker.tell("ended", how=how, reason=reason)


def die_with_parent() -> None:
    """The fork server ends with the test run, and we with the fork server."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def spin(seconds: float) -> None:
    """Keep a core busy."""
    die_with_parent()
    until_s = time.monotonic() + seconds
    while time.monotonic() < until_s:
        pass


def _redirect(log: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for standard in (sys.stdout, sys.stderr):
        standard.flush()
    os.dup2(file, 1)
    os.dup2(file, 2)


def _sabotage(worker: Worker, place: str, call: int) -> None:
    """Be killed in the middle of it: at the `call`-th time from now that this process does `place`.

    "all-reduce" counts single effects, a handful a step.
    """
    owner, method = SABOTAGE[place]
    original = getattr(owner, method)
    calls: Counter[str] = Counter()

    def fatal(*args: Any) -> Any:
        calls[place] += 1
        if calls[place] == call:
            worker.tell("dies", place=place)
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args)

    setattr(owner, method, fatal)
