"""`trainer.evaluate` among real processes: one joins and one is killed meanwhile; the result is of all samples."""

import signal

import pytest
from scripts import scripts_in

pytestmark = pytest.mark.realtime

SCRIPT = """
import time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from chaosnet import Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(264, 8)
data = TensorDataset(x, x.sum(1, keepdim=True).sin())
train, valid = TensorDataset(*data[:64]), TensorDataset(*data[64:])
model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.SGD(model.parameters(), 0.1)
# Every evaluation but the first halves the rate.
halving = {"factor": 0.5, "patience": 0, "threshold": 9, "threshold_mode": "abs"}
plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, **halving)
trainer = Trainer(model, optimizer, plateau, lr_scheduler_every="evaluation")
loader = DataLoader(valid, 5, num_workers=1)
for epoch in trainer.epochs(4):
    for x, y in trainer.batches(train, 8):
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
    model.eval()
    step = trainer.step
    with torch.no_grad():
        for x, y in trainer.evaluate(loader):
            print("evaluating", epoch, len(trainer.members))
            time.sleep(0.08)
            trainer.mean(nn.functional.mse_loss(model(x), y), "loss")
        alone = nn.functional.mse_loss(model(valid[:][0]), valid[:][1])
    assert trainer.step == step, "nothing is trained meanwhile"
    model.train()
    plateau.step(trainer.metrics["loss"])
    print("rate", epoch, plateau.get_last_lr()[0])
    print("result", epoch, trainer.metrics["loss"], alone.item(), trainer.state_hash())
print("end", trainer.samples, trainer.state_hash())
"""


EPOCHS = """
for epoch in trainer.epochs(4):
    for x, y in trainer.batches(train, 8):
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
"""
STEPS = """
epoch = trainer.epoch - 1
for _ in trainer.steps(train, 4):
    if trainer.epoch == epoch + 1:
        continue
    epoch = trainer.epoch - 1
"""
PIPELINES = (
    SCRIPT.replace(EPOCHS, STEPS)
    .replace("import Trainer", "import PipelineTrainer")
    .replace(
        "Trainer(model, optimizer, plateau,",
        "PipelineTrainer(model, optimizer, nn.functional.mse_loss, plateau, batch=16, micro_batch=4, stages=2,",
    )
    .replace('    plateau.step(trainer.metrics["loss"])\n', "")
)
assert EPOCHS not in PIPELINES and "stages=2" in PIPELINES


@pytest.mark.slow
@pytest.mark.parametrize("script", [SCRIPT, PIPELINES], ids=["trainer", "pipelines"])
def test_all_nodes_have_the_result_of_all_samples_whoever_joins_and_dies_meanwhile(tmp_path, script):
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", script)
        first.address()
        second = scripts.start("n1", script)
        first.says("evaluating 0 2")
        late = scripts.start("n2", script)
        first.says("evaluating 1 3")
        second.signal(signal.SIGKILL)
        assert [first.exit_code(), late.exit_code()] == [0, 0], scripts.story()
        mine, others = first.lines("result"), late.lines("result")
        assert len(mine) == 4 and others == mine[-len(others) :], scripts.story()
        assert len(others) >= 2, scripts.story()
        for _, result, alone, _ in mine:
            assert float(result) == pytest.approx(float(alone), rel=1e-5)
        assert first.lines("rate") == [[str(each), str(0.1 * 0.5**each)] for each in range(4)], (
            scripts.story()
        )
        assert first.lines("end") == late.lines("end") == [["256.0", mine[-1][-1]]], scripts.story()
        both = [len(each.lines("evaluating")) for each in (first, late)]
        assert both[0] < 4 * 40, "n0 has not evaluated all by itself"
        assert both[1] >= 10, scripts.story()


HOLDING = """
import sys, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from chaosnet import Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(80, 8)
train = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.05))
apart, evaluated = len(sys.argv) > 1, -1
for epoch in trainer.epochs(6):
    for x, y in trainer.batches(train, 4):
        nn.functional.mse_loss(model(x), y).backward()
        wants = trainer.name == trainer.members[-1] if apart else True
        if wants and trainer.step % 3 == 0 and trainer.step > evaluated:
            evaluated = trainer.step
            with torch.no_grad():
                for v, _ in trainer.evaluate(train, 3):
                    trainer.mean(model(v).mean(), "valid")
                    print("evaluating", len(trainer.members))
                    time.sleep(0.02)
        trainer.update()
        print("trained", len(trainer.members))
print("end", trainer.samples, trainer.epoch, trainer.state_hash())
"""


@pytest.mark.parametrize(
    ("args", "does"),
    [((), "evaluating"), pytest.param(("apart",), "trained", marks=pytest.mark.slow)],
    ids=["all", "one"],
)
def test_samples_in_hand_are_counted_once_though_others_train_join_and_die_in_the_evaluation(
    tmp_path, args, does
):
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", HOLDING, *args)
        first.address()
        second = scripts.start("n1", HOLDING, *args)
        first.says(f"{does} 2")
        late = scripts.start("n2", HOLDING, *args)
        first.says(f"{does} 3")
        second.signal(signal.SIGKILL)
        assert [first.exit_code(), late.exit_code()] == [0, 0], scripts.story()
        assert first.lines("end") == late.lines("end"), scripts.story()
        assert first.lines("end")[0][:2] == ["480.0", "6"], scripts.story()


MODES = """
import sys, time, torch
from torch import nn
from torch.utils.data import TensorDataset
from chaosnet import Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
x = torch.randn(16, 4)
data = TensorDataset(x, x.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 1))
trainer = Trainer(model, torch.optim.Adafactor(model.parameters(), 0.01))
mode = {"inference": torch.inference_mode(), "autocast": torch.autocast("cpu", torch.bfloat16)}[sys.argv[1]]
while len(trainer.members) < 2:
    trainer.update(samples=0)
    time.sleep(0.01)
for evaluation in range(3 if trainer.name == "n1" else 0):
    with mode, torch.no_grad():
        for x, y in trainer.evaluate(data, 8):
            trainer.mean(nn.functional.mse_loss(model(x), y), "valid")
    print("evaluated at", trainer.step)
while trainer.step < 8:
    for x, y in trainer.batches(data, 8):
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
print("end", trainer.step, trainer.state_hash())
"""


@pytest.mark.parametrize("mode", ["inference", pytest.param("autocast", marks=pytest.mark.slow)])
def test_what_others_train_as_a_node_begins_an_evaluation_is_not_of_the_mode_that_it_evaluates_in(
    tmp_path, mode
):
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", MODES, mode)
        first.address()
        second = scripts.start("n1", MODES, mode)
        assert [first.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert second.lines("evaluated")[-1] != ["at", "0"], scripts.story()
        assert first.lines("end") == second.lines("end"), scripts.story()


SWAPPING = """
import time, torch
from pathlib import Path
from torch import nn
from torch.utils.data import TensorDataset
from chaosnet import Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
data = TensorDataset(torch.randn(16, 4))
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), 0.01)
optimizer.param_groups[0]["train_mode"] = True
trainer = Trainer(model, optimizer)
while len(trainer.members) < 2:
    trainer.update(samples=0)
    time.sleep(0.01)
for evaluation in range(3 if trainer.name == "n1" else 0):
    optimizer.param_groups[0]["train_mode"] = False
    with torch.no_grad():
        model.weight.mul_(2)
        for (x,) in trainer.evaluate(data, 1):
            trainer.mean(model(x).square().mean())
        model.weight.mul_(0.5)
    optimizer.param_groups[0]["train_mode"] = True
if trainer.name == "n1":
    Path("evaluated").touch()
while not Path("evaluated").exists():
    trainer.update(samples=0)
while trainer.step < 8:
    for (x,) in trainer.batches(data, 4):
        model(x).square().mean().backward()
        trainer.update()
print("end", trainer.step, trainer.state_hash())
"""


def test_a_node_that_waits_for_an_evaluation_keeps_the_weights_that_others_have_put_aside_for_it(tmp_path):
    """As optimizers without a schedule do in eval()."""
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", SWAPPING)
        first.address()
        second = scripts.start("n1", SWAPPING)
        assert [first.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert first.lines("end") == second.lines("end"), scripts.story()


@pytest.mark.parametrize(
    "script", [SCRIPT, pytest.param(PIPELINES, marks=pytest.mark.slow)], ids=["trainer", "pipelines"]
)
def test_the_state_is_copied_for_a_joiner_while_others_evaluate_in_inference_mode(tmp_path, script):
    script = script.replace("no_grad", "inference_mode")
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", script)
        first.says("evaluating 0 1")
        second = scripts.start("n1", script)
        assert [first.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert "joins: now 2 members" in first.text(), scripts.story()
        assert "no copy of the state" not in first.text(), scripts.story()
