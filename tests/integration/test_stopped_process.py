"""A process that is stopped, as by Ctrl+Z, and goes on much later: no thread takes the time for another's silence."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(not hasattr(signal, "SIGSTOP"), reason="signals that stop a process"),
]

PATIENCE_S = 1.0
STOPPED = f"""
import os, signal, time, torch
from torch import nn
from chaosnet import Trainer
from chaosnet.node import loop

loop.ASK_PATIENCE_S = {PATIENCE_S}
model = nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1), quiet=True)

def question():
    time.sleep(0.1)  # Until it is waited for.
    os.kill(os.getpid(), signal.SIGSTOP)
    for _ in range(30):  # It stops in one of them, and goes on with the others.
        time.sleep(0.01)
    return "answered"

print(trainer.session.loop.ask(question), flush=True)
trainer.close()
"""


@pytest.mark.slow
def test_a_question_to_the_loop_bears_that_its_process_is_stopped() -> None:
    """A source of a join asks its loop all the time; its script ended with "links have not been served"."""
    env = {key: value for key, value in os.environ.items() if not key.startswith("CHAOSNET_")}
    process = subprocess.Popen(
        [sys.executable, "-c", STOPPED],
        env=env | {"CHAOSNET_LISTEN": "127.0.0.1:0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        _, status = os.waitpid(process.pid, os.WUNTRACED)
        assert os.WIFSTOPPED(status)
        time.sleep(2 * PATIENCE_S)
        os.kill(process.pid, signal.SIGCONT)
        assert process.communicate(timeout=60) == ("answered\n", "")
    finally:
        process.kill()
        process.wait()
