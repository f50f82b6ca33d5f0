"""SIGTERM to the first process of a container: the kernel hands it on only if there is a handler for it."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from lan import CHAOSNET, PATIENCE_S

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("unshare") is None, reason="a namespace of processes needs root"
    ),
]

LOADS = "import os, time\nprint('loads as', os.getpid(), flush=True)\ntime.sleep(600)\n"
FORKS = """import os, time
if (fork := os.fork()) == 0:
    print("loads as", os.getpid(), flush=True)
    time.sleep(600)
print("ended with", os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]), flush=True)
time.sleep(600)
"""
TRAINS = """import torch
from chaosnet import Trainer
model = torch.nn.Linear(4, 2)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
while True:
    model(torch.ones(3, 4)).sum().backward()
    trainer.update()
    print("trains", flush=True)
"""


class First:
    """A command that is process 1 of a namespace of its own, as of a container."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.log = folder / "log"
        env = {**os.environ, "CHAOSNET_NAME": "solo", "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as out:
            self.outside = subprocess.Popen(
                ["unshare", "--fork", "--pid", "--kill-child", *command], cwd=folder, env=env, stdout=out, stderr=out
            )  # fmt: skip

    def says(self, text: str) -> None:
        until(lambda: text in self.log.read_text(), lambda: f"{text!r}: {self.log.read_text()}")

    def inside(self) -> psutil.Process:
        return psutil.Process(self.outside.pid).children()[0]

    def ends(self) -> int:
        """Returns: its exit code, which unshare passes on."""
        return self.outside.wait(PATIENCE_S)


def until(happened: Callable[[], object], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not happened():
        assert time.monotonic() < deadline_s, what()
        time.sleep(0.05)


@pytest.fixture
def first(tmp_path: Path) -> Iterator[Callable[..., First]]:
    started: list[First] = []

    def start(script: str, *command: str) -> First:
        (tmp_path / "train.py").write_text(script)
        started.append(First(tmp_path, *command, "train.py"))
        return started[-1]

    yield start
    for each in started:
        each.outside.kill()
        each.outside.wait()


def test_before_there_is_a_trainer_it_ends_the_process(first: Callable[..., First]) -> None:
    plain = first(LOADS, sys.executable)
    plain.says("loads as 1")
    plain.inside().send_signal(signal.SIGTERM)
    node = first(LOADS, *CHAOSNET, "run")
    node.says("loads as 1")
    node.inside().send_signal(signal.SIGTERM)
    assert node.ends() == 128 + signal.SIGTERM
    assert plain.outside.poll() is None, "without a handler it was lost"


def test_a_fork_of_that_process_ends_as_any_other(first: Callable[..., First]) -> None:
    node = first(FORKS, *CHAOSNET, "run")
    node.says("loads as 2")
    (fork,) = node.inside().children()
    fork.send_signal(signal.SIGTERM)
    node.says("ended with -15")
    assert node.outside.poll() is None


@pytest.mark.slow
def test_with_a_trainer_the_node_leaves(first: Callable[..., First]) -> None:
    node = first(TRAINS, *CHAOSNET, "run")
    node.says("trains")
    node.inside().send_signal(signal.SIGTERM)
    assert node.ends() == 0, node.log.read_text()
    assert "solo left after step" in node.log.read_text()
