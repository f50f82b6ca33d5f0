"""A node whose standard input, output or error is closed, before or while it runs, ends as any other."""

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.realtime

SCRIPT = """
import os, sys, torch
from chaosnet import Cluster, Trainer
torch.set_num_threads(1)
for number in map(int, sys.argv[1:]):
    os.close(number)
model = torch.nn.Linear(4, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1))
for _ in range(3):
    model(torch.ones(8, 4)).sum().backward()
    trainer.update()
trainer.request_node_exit()
with open("done", "w") as file:
    print(trainer.step, file=file)
"""


@pytest.mark.slow
@pytest.mark.parametrize("closed", ["0", "1", "2", "0 1 2"])
def test_a_closed_descriptor_is_not_taken_for_the_nodes_own(tmp_path, closed):
    (tmp_path / "train.py").write_text(SCRIPT)
    command = [sys.executable, "train.py", *closed.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, (tmp_path / "done").read_text()) == (0, "3\n"), done.stderr


@pytest.mark.slow
def test_a_command_that_is_started_without_them_goes_on(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    shell = f"{sys.executable} -m chaosnet run --listen 127.0.0.1:0 train.py <&- >&- 2>&-"
    done = subprocess.run(shell, shell=True, cwd=tmp_path, timeout=60, check=False, env={**os.environ})
    assert (done.returncode, (tmp_path / "done").read_text()) == (0, "3\n")
