"""Copies of the state for a joiner: who makes them, and when."""

import threading

import pytest
import torch
from torch import nn

from chaosnet.node.training_state import TrainingState
from chaosnet.protocols.effects import TakeSnapshot
from chaosnet.state_copies import StateCopies


class Served:
    """A session that remembers which thread has handed over which step's copy."""

    def __init__(self):
        self.by_step = {}
        self.done = threading.Event()

    def serve_snapshot(self, step, snapshot):
        self.by_step[step] = threading.current_thread(), snapshot
        self.done.set()


@pytest.mark.parametrize(("sizes", "at_once"), [([8] * 300, True), ([200_000] * 3, False)])
def test_many_small_tensors_are_copied_at_once_and_large_ones_beside_the_next_step(sizes, at_once):
    """Another thread would wait for Python's lock at each of them, and the joiner with it."""
    model = nn.ParameterList(torch.zeros(size) for size in sizes)
    state, session = TrainingState(model, torch.optim.SGD(model.parameters(), 0.1)), Served()
    copies = StateCopies(state, session, None, print)
    copies.take(4, {}, TakeSnapshot(step=4, blocking=False), None)
    assert session.done.wait(30.0)
    thread, snapshot = session.by_step[4]
    assert (thread is threading.current_thread()) == at_once
    assert copies.serve()  # Until the optimizer steps.
    copies.finish()
    assert snapshot is not None and not copies.serve()
