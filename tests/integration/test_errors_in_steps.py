"""Of two nodes one meets an error in the middle of a step, catches it, and trains on: nothing counts twice."""

import pytest
from scripts import scripts_in

pytestmark = pytest.mark.realtime

SCRIPT = """
import os, signal, sys, threading, time, torch
from torch import nn
from chaosnet import Callbacks, Trainer
torch.set_num_threads(1)
model = nn.Linear(1, 1, bias=False)
nn.init.zeros_(model.weight)
optimizer = torch.optim.SGD(model.parameters(), 1.0)
place, fails = sys.argv[1], []

def fail(where):
    if where in fails:
        fails.clear()
        raise ValueError("of the script")

trainer = Trainer(
    model, optimizer, after_step=lambda: fail("after_step"), callbacks=Callbacks(on_step=lambda step: fail("on_step"))
)
signal.signal(signal.SIGINT, signal.default_int_handler)  # As a notebook has it while a cell runs.
while len(trainer.members) < 2:
    trainer.update(samples=0)
    time.sleep(0.01)
is_second, pull = trainer.name == "n1", 0
while trainer.step < 6:
    before, pull = model.weight.item(), pull + 1
    if is_second and pull == 2:
        fails.append(place)
        if place == "interrupt":
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    elif pull == 2:
        time.sleep(1.0)
    (10.0**pull * is_second * model(torch.ones(1, 1))).sum().backward()
    try:
        trainer.update(samples=1)
    except (ValueError, KeyboardInterrupt) as error:
        print("caught", type(error).__name__)
        if place == "interrupt":
            continue  # The step is not complete.
    print("moved", trainer.step, round(before - model.weight.item()))
print("end", trainer.step, trainer.samples, trainer.state_hash())
"""


@pytest.mark.parametrize("place", ["on_step", "after_step", "interrupt"])
def test_a_step_in_which_the_script_has_caught_an_error_counts_once_and_the_next_brings_its_own_gradient(
    tmp_path, place
):
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", SCRIPT, place)
        first.address()
        second = scripts.start("n1", SCRIPT, place)
        assert [first.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        caught = "KeyboardInterrupt" if place == "interrupt" else "ValueError"
        assert second.lines("caught") == [[caught]], scripts.story()
        # With the interrupt, the third gradient is of the state before the second step, and dropped.
        pulls = [1, 2, 4, 5, 6, 7] if place == "interrupt" else [1, 2, 3, 4, 5, 6]
        moved = [[str(step), str(10**pull // 2)] for step, pull in enumerate(pulls, 1)]
        assert first.lines("moved") == moved, scripts.story()
        assert second.lines("moved") == moved, scripts.story()
        assert first.lines("end") == second.lines("end"), scripts.story()
        assert first.lines("end")[0][:2] == ["6", "12.0"], scripts.story()
