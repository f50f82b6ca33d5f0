"""An interrupt while a node comes back into its cluster, as at a prompt: if the script goes on, it is back."""

import signal
import time

import pytest
from scripts import scripts_in

pytestmark = pytest.mark.realtime

SCRIPT = """
import sys, time, torch
from torch import nn
from chaosnet import Callbacks, PipelineTrainer, Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 1))
optimizer, fails = torch.optim.Adam(model.parameters(), 0.01), []
place = sys.argv[2]

def interrupt(where):
    if fails == [where]:
        fails.clear()
        raise KeyboardInterrupt

callbacks = Callbacks(on_loaded=lambda state: interrupt("on_loaded"))
data = [(torch.full((2,), index / 40), torch.full((1,), index / 20)) for index in range(40)]
if sys.argv[1] == "pipelines":
    trainer = PipelineTrainer(
        model, optimizer, nn.functional.mse_loss, batch=8, micro_batch=4, keepers=2, callbacks=callbacks
    )
else:
    trainer = Trainer(model, optimizer, callbacks=callbacks)
session = trainer._member().session

def get(queue=session.loop.outcomes):
    interrupt("waiting")
    return queue.get()

def steps():
    if sys.argv[1] == "pipelines":
        yield from trainer.steps(data, epochs=10**6)
    else:
        for x, y in trainer.batches(data, 8, epochs=10**6):
            nn.functional.mse_loss(model(x), y).backward()
            trainer.update()
            yield

session.rejoin_of_session = session.rejoin

def rejoin(reason):
    fails.append(place)
    session.rejoin_of_session(reason)

session.rejoin = rejoin
if place == "waiting":
    class Outcomes:
        get, put, empty = staticmethod(get), session.loop.outcomes.put, session.loop.outcomes.empty
    session.loop.outcomes = Outcomes
while trainer.name == "n0" or trainer.rejoins < 1 or len(trainer.members) < 2 or trainer.step < after + 5:
    try:
        for _ in steps():
            print("step", trainer.step, len(trainer.members))
            time.sleep(0.02)
            if trainer.rejoins < 1:
                after = trainer.step
            elif trainer.name == "n1" and trainer.step >= after + 5:
                break
    except KeyboardInterrupt:
        print("caught", trainer.step)
print("end", trainer.rejoins)
"""


@pytest.mark.parametrize("place", ["waiting", "on_loaded"])
@pytest.mark.parametrize("kind", ["trainer", "pipelines"])
def test_a_rejoin_that_an_interrupt_has_broken_off_goes_on(tmp_path, kind, place):
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", SCRIPT, kind, place)
        first.address()
        second = scripts.start("n1", SCRIPT, kind, place)
        scripts.until(lambda: second.lines("step")[-1:] > [["0", "2"]], "both train")
        second.signal(signal.SIGSTOP)
        first.says("n1 is lost")
        time.sleep(0.5)
        second.signal(signal.SIGCONT)
        assert second.exit_code() == 0, scripts.story()
        assert len(second.lines("caught")) == 1 and second.lines("end") == [["1"]], scripts.story()
