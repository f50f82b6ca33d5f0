"""Scripts that change what a joiner is being sent, or what cannot be sent: real processes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from cluster import cluster_of
from torch import nn
from worker import Numbered, Worker, loss_of, make_model, make_optimizer

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime


def averaging(worker: Worker) -> None:
    """A frozen copy of the model follows it, as in BYOL or MoCo, in a way that leaves no trace in its version."""
    model, teacher = make_model(), make_model().requires_grad_(False)

    def follow() -> None:
        for follower, leader in zip(teacher.parameters(), model.parameters(), strict=True):
            follower.data.mul_(0.9).add_(leader.data, alpha=0.1)

    both = nn.ModuleList([model, teacher])
    trainer = worker.trainer(both, make_optimizer(model), after_step=follow)
    for x, y, indices in trainer.batches(Numbered(), 4, epochs=10**6):
        worker.tell_batch(trainer, indices)
        loss = loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if worker.obey() or capture_exit_event():
            trainer.request_node_exit()
            break


def spoiling(worker: Worker) -> None:
    """Once it is told to, node a puts something into extra_state that cannot be sent."""
    model, extra = make_model(), {"best": 0.0}
    trainer = worker.trainer(model, make_optimizer(model), extra_state=extra, on_divergence="warn")
    for x, y, indices in trainer.batches(Numbered(), 4, epochs=10**6):
        worker.tell_batch(trainer, indices)
        if worker.name == "a" and Path(worker.settings["spoil"]).exists():
            extra["best"] = np.zeros(2)
        loss = loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if worker.obey() or capture_exit_event():
            extra["best"] = 0.0
            trainer.request_node_exit()
            break


@pytest.mark.slow
def test_a_frozen_parameter_that_changes_all_the_same_reaches_a_joiner_whole(tmp_path):
    with cluster_of(2, tmp_path, script=averaging) as cluster:
        cluster.start().last("joined")
        cluster.nodes[0].advance(20)
        cluster.finish()


def test_a_source_whose_state_cannot_be_sent_says_so_and_trains_on(tmp_path):
    with cluster_of(2, tmp_path, script=spoiling, hash_every=0, spoil=str(tmp_path / "spoil")) as cluster:
        (tmp_path / "spoil").touch()
        cluster.nodes[0].advance(30)
        cluster.start().last("joined")
        cluster.nodes[0].advance(20)
        cluster.finish()
