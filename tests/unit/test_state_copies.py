"""`StateCopies`: who is copied for, and where there is no memory for it."""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from chaosnet.node.state import flat_state, training_state
from chaosnet.node.state.checkpoint_plan import Mark
from chaosnet.node.state.training_state import TrainingState
from chaosnet.script.means import NO_PART
from chaosnet.settings.resolved import CheckpointSettings
from chaosnet.training.checkpointing import Checkpointing
from chaosnet.training.state_copies import StateCopies


def no_memory(*args, **options):
    raise RuntimeError("not enough memory: you tried to allocate 1 byte")


@pytest.mark.parametrize(
    ("module", "name"),
    [(flat_state, "gather"), (training_state, "get_generators")],
    ids=["beside", "at once"],
)
@pytest.mark.parametrize("blocking", [False, True])
def test_a_joiner_is_told_that_there_is_no_copy_and_training_goes_on(monkeypatch, module, name, blocking):
    model = nn.Linear(3, 2)
    served, said = [], []
    session = SimpleNamespace(serve_snapshot=lambda *what: served.append(what), serves=lambda step: False)
    copies = StateCopies(
        TrainingState(model, torch.optim.SGD(model.parameters(), 0.1)), session, None, said.append
    )
    monkeypatch.setattr(module, name, no_memory)
    copies.take(7, {}, SimpleNamespace(step=7, blocking=blocking), None)
    copies.finish()
    assert served == [(7, None)]
    assert "not enough memory" in said[0]


@pytest.mark.parametrize("blocking", [False, True])
def test_for_a_blocking_joiner_the_state_is_sent_from_where_it_lies(blocking):
    model = nn.Linear(256, 256)
    served = []
    session = SimpleNamespace(
        serve_snapshot=lambda step, copy: served.append(copy), serves=lambda step: False
    )
    copies = StateCopies(TrainingState(model, torch.optim.SGD(model.parameters(), 0.1)), session, None, print)
    copies.take(7, {}, SimpleNamespace(step=7, blocking=blocking), None)
    copies.finish()
    sent = np.frombuffer(served[0].slice(0, 4), np.float32)
    assert np.shares_memory(sent, model.weight.detach().numpy()) == blocking


def no_thread(thread):
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("joins", [True, False])
def test_where_no_thread_can_be_started_a_joiner_is_served_and_a_checkpoint_is_left_out(
    tmp_path, monkeypatch, joins
):
    """A limit of processes and threads (pids.max, ulimit -u): the script of a member ended as another joined."""
    model = nn.Linear(3, 2)
    served, said, told = [], [], {}
    session = SimpleNamespace(serve_snapshot=lambda *what: served.append(what), serves=lambda step: False)
    checkpointing = Checkpointing(CheckpointSettings(directory=str(tmp_path)), "a", said.append)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))
    copies = StateCopies(state, session, checkpointing, said.append)
    mark = Mark(run="r", step=7, key=(1, 1), members=("a", "b"), shards=2)
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    copies.take(7, {}, SimpleNamespace(step=7, blocking=False) if joins else None, mark)
    copies.finish()
    assert [step for step, copy in served if copy is not None] == [7] * joins
    assert said[0].startswith("no checkpoint at step 7: can't start new thread; training goes on")
    checkpointing.contribute(told)
    assert told == {f"{NO_PART}0": (0.0, 0.0)}, "it is not busy, and the others hear why its part lacks"
    checkpointing.close(abandon=False)


def test_who_cannot_copy_the_state_for_a_checkpoint_tells_the_others(tmp_path, monkeypatch):
    """They said that it has another `every`, or another folder."""
    model = nn.Linear(3, 2)
    said, told = [], {}
    checkpointing = Checkpointing(CheckpointSettings(directory=str(tmp_path)), "b", said.append)
    state = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1))
    monkeypatch.setattr(training_state, "get_generators", no_memory)
    mark = Mark(run="r", step=7, key=(1, 1), members=("a", "b"), shards=2)
    StateCopies(state, None, checkpointing, said.append).take(7, {}, None, mark)
    assert said[0].startswith("the state cannot be copied for a checkpoint: not enough memory")
    checkpointing.contribute(told)
    assert told == {f"{NO_PART}1": (0.0, 0.0)}
