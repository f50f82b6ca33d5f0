"""A script with the usual loop of PyTorch, in a cluster that grows and loses a node: all nodes stay equal."""

import time
from typing import Any

import pytest
import torch
from cluster import cluster_of
from torch.utils.data import DataLoader, default_collate
from worker import Numbered, Worker, loss_of, make_model, make_optimizer

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime

OVERFLOWS = 7  # In one of so many batches.


def usual_loop(worker: Worker) -> None:
    """Mixed precision, clipping, a schedule by steps; its own loader, and no update()."""
    model = make_model()
    optimizer = make_optimizer(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    trainer = worker.trainer(model, optimizer, scheduler)
    done = 0
    while not (capture_exit_event() or worker.obey()):
        for x, y, _ in DataLoader(Numbered(), batch_size=8, shuffle=True):
            optimizer.zero_grad()
            overflows = done % OVERFLOWS == OVERFLOWS - 1
            scaler.scale(loss_of(model, x, y) * (float("inf") if overflows else 1.0)).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            done += 1
            worker.tell("rate", step=trainer.step, rate=optimizer.param_groups[0]["lr"], overflows=overflows)
            time.sleep(0.002)
    trainer.request_node_exit()


class Rows(Numbered):
    """Items that are dictionaries, as those of text data sets are."""

    def __getitem__(self, index: int) -> dict[str, Any]:  # type: ignore[override]
        x, y, index = super().__getitem__(index)
        return {"features": x, "labels": y, "index": index}


class Model(torch.nn.Module):
    """Takes the batch by names, and gives its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = make_model()

    def forward(self, features: torch.Tensor, labels: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return loss_of(self.layers, features, labels)


def collate(items: list[dict[str, Any]]) -> dict[str, Any]:
    return default_collate(items)


def named_batches(worker: Worker) -> None:
    model = Model()
    optimizer = make_optimizer(model)
    trainer = worker.trainer(model, optimizer)
    for batch in trainer.batches(Rows(), 4, epochs=10**6, collate_fn=collate):
        worker.tell_batch(trainer, batch["index"])
        loss = model(**batch)
        loss.backward()
        trainer.mean(loss)
        optimizer.step()
        optimizer.zero_grad()
        if capture_exit_event() or worker.obey():
            break
        time.sleep(0.002)
    trainer.request_node_exit()


def test_batches_by_name_are_each_sample_once_and_train_as_one_process_would(tmp_path):
    with cluster_of(2, tmp_path, script=named_batches) as cluster:
        cluster.nodes[0].advance(30)
        cluster.grow(1)[0].advance(30)
        cluster.finish()


def test_the_usual_loop_keeps_nodes_equal_though_one_joins_late_and_one_is_killed(tmp_path):
    with cluster_of(2, tmp_path, script=usual_loop) as cluster:
        cluster.nodes[0].advance(20)
        late, _ = cluster.grow(1)[0], cluster.nodes[1].kill()
        late.advance(30)
        cluster.leave()
        cluster.check_steps()  # The same hash on all nodes after each step.
        rates, weights = {}, set()
        for node in cluster.nodes:
            weights |= {record["weight"] for record in node.told("step")}
            for record in node.told("rate"):
                assert rates.setdefault(record["step"], record["rate"]) == record["rate"], record
        for step, rate in rates.items():
            assert rate == pytest.approx(5e-3 * 0.999**step), "stepped once with each step of the cluster"
        assert any(r["overflows"] for r in late.told("rate"))
        assert weights >= {1.0, 2.0}, "a node with an overflow brings nothing, and the others go on"
