"""The script that each node of `chaosnet soak` runs: a small net learns scanned digits until all have seen enough.

What it writes down is what the soak judges by: every completed step that is applied here, whether before this
node was a member (what others trained while its state arrived), with samples of its own or without; the hash of
the state and the memory in use every so often; and who was elected scheduler.

SIGUSR1 ends it with an error between backward and update(); SIGUSR2 changes one number of its state. With --workers
it reads noise through a DataLoader, whose forked processes outlive a `kill -9` of this one for some seconds.
"""

from __future__ import annotations

import argparse
import math
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from chaosnet import Callbacks, StateLoaded, StepDone, Trainer, capture_exit_event
from chaosnet.protocols.messages import Notice
from chaosnet.trials.demo_digits import digits, end_with_parent, small_net, write

WIDTH = 8  # 7 thousand parameters: without --mb the soak is about who comes and goes, not about bytes.
BATCH_SIZE = 16
ENOUGH = "enough"


class SoakError(Exception):
    """What the soak has asked for."""


class Noise(IterableDataset[torch.Tensor]):
    """Something to add to the scans, without end."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            yield 0.01 * torch.randn(1, 8, 8)


class Record:
    """Writes down what becomes of the training state. `final` once all members have seen enough.

    Attributes:
        trainer: Whose state it is; without a model until all of this is in place.
    """

    def __init__(self, log: Any, hash_every: int, **settings: Any) -> None:
        self.log, self.hash_every, self.final = log, hash_every, False
        self.process = psutil.Process()
        self.round = 0
        callbacks = Callbacks(on_step=self._on_step, on_loaded=self._on_loaded, on_notice=self._on_notice)
        self.trainer = Trainer(callbacks=callbacks, **settings)

    def _on_loaded(self, event: StateLoaded) -> None:
        write(self.log, loaded=event.round, hash=self.trainer.state_hash())

    def _on_step(self, event: StepDone) -> None:
        self.round = event.round
        told: dict[str, Any] = {"loss": event.metrics.get("loss"), "samples": event.samples}
        # A mean over the cluster is the same on all members: they stop after the same step.
        last = not self.final and bool(event.metrics.get(ENOUGH))
        if last or event.round % self.hash_every == 0:
            told["hash"] = self.trainer.state_hash()
            told["rss"] = self.process.memory_info().rss
        write(self.log, step=event.round, **told)
        if last:
            self.final = True
            write(self.log, final=event.round, hash=told["hash"])

    def _on_notice(self, notice: Notice) -> None:
        if notice.kind == "scheduler":
            write(self.log, elected=notice.node, elected_s=notice.time_s)


def main() -> None:
    options = _options()
    end_with_parent()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    train, _ = digits(options.seed)
    model = wide_net(options.mb) if options.mb else small_net(WIDTH)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    log = options.log.open("w", buffering=1)
    write(log, started=True)
    to_raise, to_diverge = _on_signal(signal.SIGUSR1), _on_signal(signal.SIGUSR2)
    record = Record(log, options.hash_every, seed=options.seed, on_divergence="heal")
    trainer = record.trainer
    trainer.attach(model, optimizer)
    write(log, joined=trainer.step, seconds=trainer.join_seconds)
    noise = iter(DataLoader(Noise(), batch_size=None, num_workers=options.workers))
    for batch in trainer.batches(train, batch_size=BATCH_SIZE, epochs=1_000_000):
        if record.final:
            break
        loss = nn.functional.cross_entropy(model(batch.x + next(noise)), batch.y)
        loss.backward()
        trainer.mean(loss)
        trainer.mean(float(options.until.exists()), name=ENOUGH)
        time.sleep(options.pause)
        if to_raise.is_set():
            raise SoakError("as the soak wanted")
        trainer.update()
        if to_diverge.is_set():
            to_diverge.clear()
            _change_one_number(record)
        trainer.check_state_replication()
        if capture_exit_event():
            break
    trainer.request_node_exit()


def wide_net(mb: float) -> nn.Module:
    """Three layers with so many MB of parameters in all, most of them in the middle one."""
    width = max(1, round(math.sqrt(mb * 1e6 / 4)) - 38)  # Of 64 inputs and 10 outputs, half each.
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear(64, width),
        nn.ReLU(),
        nn.Linear(width, width),
        nn.ReLU(),
        nn.Linear(width, 10),
    )


def _on_signal(number: int) -> threading.Event:
    """Set when the signal comes."""
    wanted = threading.Event()
    signal.signal(number, lambda *_: wanted.set())
    return wanted


def _change_one_number(record: Record) -> None:
    with torch.no_grad():
        next(record.trainer.model.parameters()).view(-1)[0] += 0.5
    write(record.log, diverged=record.round)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True, help="JSON lines")
    parser.add_argument("--until", type=Path, required=True, help="go on until this file exists")
    parser.add_argument("--mb", type=float, default=0.0, help="of parameters; 0: a small net")
    parser.add_argument("--pause", type=float, default=0.03, help="seconds per step")
    parser.add_argument("--hash-every", type=int, default=10, help="steps")
    parser.add_argument("--workers", type=int, default=0, help="processes of a DataLoader")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
