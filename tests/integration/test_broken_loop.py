"""A node whose own thread ends by an error, or never starts: nothing of it stays open, and its process goes on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from chaosnet.node.keys import make

pytestmark = pytest.mark.realtime

BROKEN = """
import gc, psutil, torch
from torch import nn
from torch.utils.data import TensorDataset
from chaosnet import Trainer
from chaosnet.node.vitals import Vitals

read = Vitals.readings
def once(self, *args):
    Vitals.readings = broken
    return read(self, *args)
def broken(self, *args):
    raise RuntimeError("a bug")
Vitals.readings = once

def train():
    model = nn.Linear(4, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), quiet=True)
    try:
        while True:
            model(torch.randn(2, 4)).sum().backward()
            trainer.update()
    except RuntimeError as error:
        print(error)

train()
print(sum(each.status == "LISTEN" for each in psutil.Process().net_connections()), "listening")
gc.collect()
print("collected")
"""

TAKEN = """
import gc, os, socket, torch
from torch import nn
from chaosnet import Trainer

taken = socket.create_server(("127.0.0.1", 0))
os.environ["CHAOSNET_LISTEN"] = f"127.0.0.1:{taken.getsockname()[1]}"

def start():
    model = nn.Linear(4, 1)
    try:
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1), quiet=True)
    except Exception as error:
        print(type(error).__name__)

start()
gc.collect()
print("collected")
"""


def run(script: str, **env: str) -> list[str]:
    """The lines that it prints."""
    made = {key: value for key, value in os.environ.items() if not key.startswith("CHAOSNET_")} | env
    done = subprocess.run(
        [sys.executable, "-c", script], env=made, capture_output=True, text=True, timeout=180, check=True
    )
    return done.stdout.splitlines()


def test_a_node_whose_loop_breaks_listens_no_more() -> None:
    """Its peers would wait for a node whose links are open; and sockets that nobody closes stop a collection."""
    assert run(BROKEN, CHAOSNET_LISTEN="127.0.0.1:0") == ["a bug", "0 listening", "collected"]


@pytest.mark.slow
def test_a_process_goes_on_whose_port_was_taken(tmp_path: Path) -> None:
    make(tmp_path / "key")
    assert run(TAKEN, CHAOSNET_KEY=str(tmp_path / "key")) == ["CannotListen", "collected"]
