"""The script that each node of `chaosnet demo` runs: a small convolutional net learns scanned digits.

An ordinary script with the lines that make it a node (examples/digits.py has only those), and for the demo's
sake three things more: it writes down every step, pauses a little in each so that a person can watch, and
goes on until the demo has seen enough.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Trainer, capture_exit_event

TRAIN_SHARE = 0.8


def main() -> None:
    options = _options()
    end_with_parent()
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    train, held_out = digits(options.seed)
    model = small_net()
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-4)
    trainer = Trainer(model, optimizer, seed=options.seed)
    log = options.log.open("w", buffering=1)
    write(
        log,
        joined_step=trainer.joined_step,
        seconds=trainer.join_seconds,
        bytes_by_source=trainer.join_bytes_by_source,
    )
    for batch in trainer.batches(train, batch_size=options.batch_size, epochs=1_000_000):
        # A mean over the cluster is the same on all members: they stop after the same step.
        if trainer.step >= options.steps and trainer.metrics.get("enough"):
            break
        loss = nn.functional.cross_entropy(model(batch.x), batch.y)
        loss.backward()
        trainer.mean(loss)
        trainer.mean(float(options.until.exists()), name="enough")
        time.sleep(options.pause)
        updates = trainer.updates_here
        trainer.update()
        if trainer.updates_here > updates:
            write(log, step=trainer.step, loss=trainer.metrics["loss"], samples=trainer.samples)
        trainer.check_state_replication()
        if capture_exit_event():
            trainer.request_node_exit()
            return
    write(log, final_step=trainer.step, hash=trainer.state_hash(), accuracy=accuracy(model, held_out))
    trainer.request_node_exit()


def digits(seed: int) -> tuple[TensorDataset, TensorDataset]:
    """Training and held-out part of scikit-learn's 1,797 scans of 8 x 8 pixels; the same on every node."""
    scans = load_digits()
    order = torch.randperm(len(scans.target), generator=torch.Generator().manual_seed(seed))
    images = torch.tensor(scans.images, dtype=torch.float32)[order, None] / 16
    labels = torch.tensor(scans.target)[order]
    cut = int(TRAIN_SHARE * len(order))
    return TensorDataset(images[:cut], labels[:cut]), TensorDataset(images[cut:], labels[cut:])


def small_net(width: int = 32) -> nn.Module:
    """88 thousand parameters, with BatchNorm, whose statistics are state, too. Half the width, a quarter of them."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1), nn.BatchNorm2d(2 * width), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(8 * width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 10),
    )  # fmt: skip


def accuracy(model: nn.Module, held_out: TensorDataset) -> float:
    """Share of the held-out scans that the model reads right."""
    images, labels = held_out.tensors
    model.eval()
    with torch.no_grad():
        return float((model(images).argmax(1) == labels).float().mean())


def write(log, **what) -> None:  # type: ignore[no-untyped-def]
    print(json.dumps({"time_s": time.time(), **what}), file=log)


def end_with_parent() -> None:
    """Standard input is a pipe from who started us. When it ends, even by kill -9, the pipe ends, and so do we."""

    def wait() -> None:
        os.read(0, 1)  # Not sys.stdin: a thread inside it makes the interpreter abort at its end.
        os._exit(1)

    threading.Thread(target=wait, name="end-with-parent", daemon=True).start()


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--log", type=Path, required=True, help="progress as JSON lines")
    parser.add_argument("--until", type=Path, required=True, help="go on until this file exists,")
    parser.add_argument("--steps", type=int, required=True, help="and this many steps are done")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--pause", type=float, default=0.02, help="seconds per step, to watch")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
