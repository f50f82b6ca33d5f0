"""One worker of three has gradients that are no numbers: real processes; what the others' model must not notice."""

from __future__ import annotations

import math
import time
from typing import Any

import pytest
from cluster import Cluster, cluster_of
from worker import Numbered, Worker, loss_of, make_model, make_optimizer

from chaosnet import capture_exit_event
from chaosnet.training.guard import Guard, Verdict

pytestmark = pytest.mark.realtime


class Credulous(Guard):
    """Of a faulty member that does not check itself."""

    def judge(self, norm: float) -> Verdict:
        return Verdict("pass")


def poisoning(worker: Worker) -> None:
    """As `worker.train`, but the gradients of node b are now and then no numbers."""
    settings = worker.settings
    model = make_model()
    trainer = worker.trainer(model, make_optimizer(model), guard=settings["guard"])
    poisons = worker.name == "b"
    if poisons and settings.get("credulous"):
        trainer.engine.guard = Credulous("skip", 10.0)
    for number, (x, y, indices) in enumerate(trainer.batches(Numbered(), 4, epochs=10**6)):
        worker.tell_batch(trainer, indices)
        loss = loss_of(model, x, y)
        # By number, not by step: one that is refused is done again.
        if poisons and number % 5 < settings.get("bad_steps", 2):
            loss = loss * math.nan
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if trainer.step % 10 == 0:
            finite = all(bool(p.isfinite().all()) for p in model.parameters())
            worker.tell("looked", finite=finite, counters=dict(trainer.session.counters))
        if capture_exit_event() or worker.obey():
            break
        time.sleep(0.002)
    trainer.request_node_exit()


def counted(cluster: Cluster, name: str) -> int:
    """The last that each node told of a counter, together."""
    looked = [node.told("looked") for node in cluster.nodes]
    return sum(records[-1]["counters"].get(name, 0) for records in looked if records)


def check(cluster: Cluster) -> dict[int, Any]:
    """All models finite, and all equal after every step."""
    looked = [record for node in cluster.nodes for record in node.told("looked")]
    assert looked and all(record["finite"] for record in looked)
    cluster.check_steps()
    return cluster.steps()


def test_a_node_keeps_its_own_bad_gradients_to_itself(tmp_path):
    with cluster_of(3, tmp_path, script=poisoning, guard="skip") as cluster:
        cluster.nodes[0].advance(40)
        cluster.leave()
        steps = check(cluster)
        assert all(math.isfinite(record["means"]["loss"]) for record in steps.values())
        assert counted(cluster, "guard_skip") >= 10
        assert counted(cluster, "guard_refused") == 0
        assert {record["weight"] for record in steps.values()} >= {8.0, 12.0}


def test_parts_of_a_node_that_does_not_check_itself_are_dropped_or_the_result_refused_by_all(tmp_path):
    with cluster_of(3, tmp_path, script=poisoning, guard="skip", credulous=True, bad_steps=1) as cluster:
        founder = cluster.nodes[0]
        cluster.until(
            lambda: counted(cluster, "guard_refused") + counted(cluster, "guard_dropped_parts") > 5,
            "something is dropped or refused",
        )
        founder.advance(1)
        cluster.leave()
        check(cluster)


def test_evict_puts_out_the_node_whose_gradients_stay_bad_and_nobody_else(tmp_path):
    with cluster_of(3, tmp_path, script=poisoning, guard="evict", bad_steps=5) as cluster:
        ended = cluster.nodes[1].ended()
        assert ended["how"] == "NodeExpelled"
        assert (
            "b has put itself out of the cluster: its gradient is not finite, the 3rd time" in ended["reason"]
        )
        cluster.nodes[0].advance(20)
        cluster.leave()
        check(cluster)
