"""`StateCopies`: who is copied for, and where there is no memory for it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from chaosnet.node.state import flat_state, training_state
from chaosnet.node.state.training_state import TrainingState
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
