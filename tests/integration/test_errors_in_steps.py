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


@pytest.mark.slow
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


PIPELINES = """
import os, signal, sys, threading, time, torch
from torch import nn
from chaosnet import Callbacks, PipelineTrainer
torch.set_num_threads(1)
place, members, fails, slow = sys.argv[1], int(sys.argv[2]), [], []

def fail(where):
    if where in fails:
        fails.clear()
        raise ValueError("of the script")

class Layer(nn.Linear):
    def forward(self, x):
        fail("layer")
        return super().forward(x)

class Data:
    def __len__(self):
        return 40
    def __getitem__(self, index):
        fail("data")
        return torch.full((3,), index / 40), torch.full((1,), index / 20)

class Adam(torch.optim.Adam):
    def step(self, closure=None):
        fail("optimizer")
        return super().step(closure)

def computed(told):
    fail("on_computed")
    if (told.backward, told.micro_batch) in slow:
        slow.clear()
        time.sleep(1.0)

torch.manual_seed(0)
model = nn.Sequential(Layer(3, 8), Layer(8, 8), Layer(8, 1))
trainer = PipelineTrainer(
    model, Adam(model.parameters(), 0.01), nn.functional.mse_loss, batch=8, micro_batch=4, stages=members,
    keepers=2, first_members=members, callbacks=Callbacks(on_step=lambda step: fail("on_step"), on_computed=computed),
)
signal.signal(signal.SIGINT, signal.default_int_handler)  # As a notebook has it while a cell runs.
while trainer.step < 8:
    try:
        for step in trainer.steps(Data(), epochs=100):
            print("loss", step.step, step.metrics["loss"])
            if step.step == 3 and place.startswith("interrupt"):
                if trainer.name == "n1":
                    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
                else:  # So that the other one waits: for the second micro-batch, or for what becomes of the step.
                    slow.append((False, 1) if "within" in place else (True, 1))
            elif step.step == 3 and trainer.name == sys.argv[3]:
                fails.append(place)
            if step.step == 8:
                break
    except (ValueError, KeyboardInterrupt) as error:
        print("caught", type(error).__name__, trainer.step)
        if place == "optimizer":
            break
print("end", trainer.step, trainer.samples)
"""


def run_pipelines(scripts, members: int, place: str, where: str) -> list[dict[str, str]]:
    """Returns: losses by step, of each member."""
    started = []
    for number in range(members):
        started.append(scripts.start(f"n{number}", PIPELINES, place, str(members), where))
        started[0].address()
    assert [each.exit_code() for each in started] == [0] * members, scripts.story()
    assert [each.lines("end") for each in started] == [[["8", "64.0"]]] * members, scripts.story()
    return [dict(each.lines("loss")) for each in started]


@pytest.fixture(scope="module")
def losses_alone(tmp_path_factory):
    with scripts_in(tmp_path_factory.mktemp("alone")) as scripts:
        return run_pipelines(scripts, 1, "nowhere", "")[0]


@pytest.mark.parametrize("where", ["n0", "n1"])
@pytest.mark.parametrize("place", ["on_step", "on_computed", "layer", "data"])
def test_a_step_of_pipelines_in_which_a_script_has_caught_an_error_is_done_once(
    tmp_path, place, where, losses_alone
):
    with scripts_in(tmp_path) as scripts:
        losses = run_pipelines(scripts, 2, place, where)
        caught = [each.lines("caught") for each in scripts.started]
        mine = int(where[1])
        # What the last stage is given is targets, and the first stage inputs: each of them takes samples.
        done = "4" if place == "on_step" else "3"
        assert caught[mine] == [["ValueError", done]] and caught[1 - mine] == [], scripts.story()
        assert losses[1 - mine] == losses_alone, scripts.story()
        assert losses[mine].items() <= losses_alone.items(), scripts.story()


@pytest.mark.parametrize("place", ["interrupt", "interrupt within"])
def test_a_step_of_pipelines_that_an_interrupt_has_broken_off_is_done_once(tmp_path, place, losses_alone):
    with scripts_in(tmp_path) as scripts:
        losses = run_pipelines(scripts, 2, place, "")
        assert scripts.started[1].lines("caught") == [["KeyboardInterrupt", "3"]], scripts.story()
        assert losses == [losses_alone] * 2, scripts.story()


@pytest.mark.parametrize("where", ["n0", "n1"])
def test_a_member_whose_optimizer_fails_is_out_even_if_its_script_catches_that(tmp_path, where, losses_alone):
    with scripts_in(tmp_path) as scripts:
        started = {}
        for name in ("n0", "n1"):
            started[name] = scripts.start(name, PIPELINES, "optimizer", "2", where)
            started["n0"].address()
        failed = started.pop(where)
        (other,) = started.values()
        assert [failed.exit_code(), other.exit_code()] == [0, 0], scripts.story()
        assert failed.lines("caught") == [["ValueError", "3"]], scripts.story()
        assert f"{where} leaves: its script ended with ValueError: of the script" in other.text(), (
            scripts.story()
        )
        assert dict(other.lines("loss")) == losses_alone, scripts.story()
