"""What nodes tell of their run when they leave, whatever became of the others."""

import json
import signal

import pytest
from scripts import scripts_in

pytestmark = pytest.mark.realtime

TRAINS = """
import os, sys, time, torch
from chaosnet import Cluster, Trainer
torch.set_num_threads(1)
model = torch.nn.Linear(4, 1)
data = torch.utils.data.TensorDataset(torch.ones(600, 4), torch.ones(600, 1))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01), log_format=sys.argv[1])
for x, y in trainer.batches(data, 2, epochs=10_000):
    loss = (model(x) - y).square().mean()
    loss.backward()
    trainer.mean(loss)
    trainer.update()
    print("step", trainer.step, flush=True)
    time.sleep(0.005)
"""


def test_who_leaves_tells_its_run_also_that_another_was_killed_and_nothing_was_lost(tmp_path):
    with scripts_in(tmp_path) as scripts:
        stays, killed, leaves = [
            scripts.start(f"n{n}", TRAINS, log_format)
            for n, log_format in enumerate(("text", "text", "json"))
        ]
        for script in scripts.started:
            script.says("step ")
        stays.says("n2 joins")
        killed.advance()
        killed.signal(signal.SIGKILL)
        for script in (stays, leaves):
            script.says("n1 is lost")
            script.advance()
        leaves.signal(signal.SIGINT)
        assert leaves.exit_code() == 0
        stays.says("n2 leaves")
        stays.advance()
        stays.signal(signal.SIGTERM)
        assert stays.exit_code() == 0
        first, last = leaves.text(), stays.text()
    told = [json.loads(line) for line in first.splitlines() if not line.startswith("step ")]
    assert {"joined", "node-failure", "summary"} <= {each.get("event") for each in told}
    figures = [each for each in told if each.get("event") == "summary"][-1]
    assert (figures["event"], figures["node"]) == ("summary", "n2")
    assert (figures["lost"], figures["left"]) == (["n1"], [])
    assert figures["lost_updates"] == figures["samples_set_aside"] == figures["samples_dropped"] == 0
    assert 0 < figures["dealt_again"] <= 2
    assert 0 < figures["samples_here"] <= figures["samples"]
    assert 0 < figures["computing"] + figures["summing"] + figures["updating"] <= figures["seconds"]
    assert figures["metrics"]["loss"]["history"]
    steps = int(stays.lines("step")[-1][0])
    assert f"[chaosnet] run: {steps:,} steps, " in last
    joined = ("n1, n2", "n2, n1")
    assert any(f"members: n0 at the end; joined {each}; left n2; lost n1\n" in last for each in joined)
    assert "[chaosnet] work lost: none; done over: at most 2 samples of others\n" in last
    assert "[chaosnet] loss: " in last and "[chaosnet] time " in last
