"""Ctrl+C and SIGTERM where there are others beside the node: forked children, and who reads what it prints."""

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.realtime

PATIENCE_S = 60.0  # Importing torch takes long on a busy machine.

NODE = """
import multiprocessing, os, sys, time, torch
from chaosnet import Cluster, Trainer
torch.set_num_threads(1)
model = torch.nn.Linear(4, 2)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01), cluster=Cluster(name="solo"))
fork = multiprocessing.get_context("fork")
"""


@pytest.fixture
def start(tmp_path):
    """Starts scripts, each in a process group of its own, which is killed in the end."""
    processes = []

    def run(script, **settings):
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | settings
        command = [sys.executable, "-P", "-c", NODE + script]
        process = subprocess.Popen(command, text=True, cwd=tmp_path, start_new_session=True, **settings)
        processes.append(process)
        return process

    yield run
    for process in processes:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


TERMINATES = """
child = fork.Process(target=time.sleep, args=(60,))
child.start()
child.terminate()
child.join(10)
print(child.exitcode)
"""
POOLS = """
with fork.Pool(2) as pool:
    print(pool.map(abs, [-3]))
"""
FORKS = """
if (child := os.fork()) == 0:
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("script", "told"), [(TERMINATES, "-15"), (POOLS, "[3]"), (FORKS, "3")],
                         ids=["terminate", "pool", "fork"])  # fmt: skip
def test_a_forked_child_ends_as_it_would_without_a_trainer(start, script, told):
    node = start(script)
    out, err = node.communicate(timeout=PATIENCE_S)
    assert (node.returncode, out) == (0, told + "\n")
    assert err.count("solo left after step") == 1


LOADS = """
from torch.utils.data import DataLoader
for x in DataLoader(torch.ones(10_000, 4), 10, num_workers=2, multiprocessing_context="fork"):
    model(x).sum().backward()
    trainer.update()
    time.sleep(0.05)
    print(trainer.step, flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_in_a_terminal_finishes_the_step_although_workers_load_it(start):
    node = start(LOADS)
    node.stdout.readline()
    os.killpg(node.pid, signal.SIGINT)
    _, err = node.communicate(timeout=PATIENCE_S)
    assert node.returncode == 0, err
    assert err.count("finishing the step") == err.count("solo left after step") == 1
    assert "Traceback" not in err


TRAINS = """
while True:
    model(torch.ones(3, 4)).sum().backward()
    trainer.update()
    print("trains", flush=True)
    time.sleep(PAUSE)
"""


@pytest.mark.slow
@pytest.mark.parametrize(("pause_s", "signals", "code"), [(0.05, 1, 0), (60, 2, 130)])
def test_a_node_leaves_although_nobody_reads_what_it_says(start, pause_s, signals, code):
    """As `... 2>&1 | tee log`: Ctrl+C ends tee as well."""
    reader, writer = os.pipe()
    node = start(TRAINS.replace("PAUSE", str(pause_s)), stderr=writer)
    os.close(writer)
    node.stdout.readline()
    os.close(reader)
    for _ in range(signals):
        node.send_signal(signal.SIGINT)
        time.sleep(0.3)
    node.communicate(timeout=PATIENCE_S)
    assert node.returncode == code
