"""Pipelines of real processes: whatever members come, go and die, losses and weights are those of one process."""

from __future__ import annotations

import os
import random
import re
import signal
import time

import pipeline_worker
import pytest
from click.testing import CliRunner
from cluster import Cluster, cluster_of
from torch import nn

from chaosnet import Cluster as ClusterSettings
from chaosnet import PipelineTrainer, client
from chaosnet.cli import cli
from chaosnet.data.share import EpochOrder

pytestmark = pytest.mark.realtime

BATCH = pipeline_worker.BATCH
KILLS = int(os.environ.get("CHAOSNET_TEST_KILLS", "4"))
STEPS = max(200, 30 * KILLS)  # More than any of these clusters trains.


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """Step: loss and state of a run of one process."""
    with cluster_of(0, tmp_path_factory.mktemp("alone"), script=pipeline_worker.train) as cluster:
        node = cluster.start(pause_s=0.0)
        cluster.until(lambda: node.step >= STEPS, f"{STEPS} steps of one process", patience_s=STEPS)
        cluster.leave()
        return {step: (record["means"]["loss"], record["hash"]) for step, record in cluster.steps().items()}


def check(cluster: Cluster, alone: dict[int, tuple[float, str]]) -> None:
    """No step was lost, and each was the step of one process, to the bit."""
    cluster.check_steps()
    steps = cluster.steps()
    assert len(steps) < len(alone), "the run of one process was too short"
    for step, record in steps.items():
        loss, digest = alone[step]
        assert record["means"]["loss"] == loss, f"step {step}"
        assert record["hash"] in (digest, None), f"step {step}"


def layouts(cluster: Cluster) -> set[str]:
    return {record["layout"] for node in cluster.nodes for record in node.told("layout")}


def test_one_member_alone_trains_as_a_plain_loop_does():
    data, losses, plain = pipeline_worker.make_data(), [], []
    layers = pipeline_worker.make_layers(dropout=0.0)
    with PipelineTrainer(
        layers, pipeline_worker.make_optimizer(layers), pipeline_worker.next_word, batch=BATCH, micro_batch=4,
        max_grad_norm=1.0, cluster=ClusterSettings(new=True, listen="127.0.0.1:0"), quiet=True,
    ) as trainer:  # fmt: skip
        losses += [step.metrics["loss"] for step in trainer.steps(data, epochs=4)]
    model = nn.Sequential(*pipeline_worker.make_layers(dropout=0.0))
    optimizer = pipeline_worker.make_optimizer(list(model))
    order = EpochOrder(len(data), seed=0)
    for epoch in range(4):
        for start in range(0, len(data), BATCH):
            x, y = data[order.indices(epoch, [(start, min(start + BATCH, len(data)))])]
            loss = pipeline_worker.next_word(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            plain.append(float(loss.detach()))
    assert losses == pytest.approx(plain, rel=1e-4)


@pytest.mark.parametrize("layout", ["2+2", "3+1", "4+2+1"])
def test_a_layout_trains_as_one_process_does(layout, alone, tmp_path):
    count = sum(map(int, layout.split("+")))
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout=layout) as cluster:
        cluster.grow(count)
        wanted = [int(stages) for stages in layout.split("+")]
        cluster.until(
            lambda: any(
                [each.count(">") + 1 for each in told.split("|")] == wanted for told in layouts(cluster)
            ),
            f"pipelines of {layout} stages",
        )
        cluster.nodes[-1].advance(10)
        told = client.status(cluster.nodes[-1].last("joined")["address"]).pipelines
        assert [each.count(">") + 1 for each in told.split("|")] == wanted
        cluster.leave()
        check(cluster, alone)


def stages(told: str) -> list[int]:
    return [each.count(">") + 1 for each in told.split("|")]


def relayout(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(cli, ["relayout", *arguments])
    return done.exit_code, done.output.strip() or str(done.exception)


@pytest.mark.slow
def test_other_pipelines_are_asked_for_while_it_trains(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="2+2") as cluster:
        a, b, *_ = cluster.grow(4)
        address = b.last("joined")["address"]

        def runs(*wanted: int) -> None:
            cluster.until(lambda: stages(a.last("layout")["layout"]) == [*wanted], f"pipelines of {wanted}")

        code, said = relayout(address, "3+1")
        assert code == 0 and (found := re.fullmatch(r"from step (\d+) on: (.*); predicted .*", said)), said
        assert stages(found[2]) == [3, 1]
        runs(3, 1)
        assert a.last("layout")["layout"] == found[2]
        for wrong, says in (
            ("8", "has 7 layers"),
            ("3+2", "takes 5 members (there are 4)"),
            ("x", "expected stages"),
        ):
            code, said = relayout(address, wrong)
            assert code == 1 and says in said, said
        cluster.without("d", cluster.nodes[3].kill())
        a.advance(5)
        rest = a.last("layout")["layout"].replace("d 0-6 (gone)", "")
        assert a.last("layout")["layout"] != found[2] and not re.search(
            r"\bd \d", rest
        )  # As fast as three can.
        cluster.start().last("joined")
        runs(3, 1)  # It was not forgotten.
        assert relayout(address, "--auto")[0] == 0
        a.advance(5)
        cluster.leave()
        check(cluster, alone)


def test_a_checkpoint_of_one_layout_goes_on_in_another(alone, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 5}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="2+2", **to_disk) as cluster:
        for node in cluster.grow(4):
            node.reach(12)
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            node.process.join()
        cluster.settings["layout"] = "2+1"
        founder = cluster.start(resume=True)
        saved = founder.last("joined")["step"]
        assert saved >= 10 and saved % 5 == 0
        for _ in range(2):
            cluster.start().last("joined")
        cluster.until(lambda: stages(founder.last("layout")["layout"]) == [2, 1], "pipelines of 2 and 1")
        founder.advance(5)
        cluster.leave()
        for node in cluster.nodes:
            for record in node.told("step"):
                if record["applied"]:
                    loss, digest = alone[record["step"]]
                    assert (record["means"]["loss"], record["hash"] or digest) == (loss, digest)


def test_members_that_die_join_and_leave_change_no_bit(alone, tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train) as cluster:
        killed = cluster.nodes[1].kill()
        cluster.without("b", killed)
        cluster.start().last("joined")
        cluster.nodes[0].advance(5)
        cluster.nodes[2].order(leave=True)
        assert cluster.nodes[2].exit_code() == 0
        cluster.nodes[0].advance(5)
        killed = cluster.nodes[0].kill()  # The founder, which has the scheduler.
        cluster.without("a", killed)
        cluster.nodes[3].advance(5)
        cluster.leave()
        check(cluster, alone)


def test_who_joins_while_the_others_wait_takes_part_in_the_same_step(alone, tmp_path):
    """All must know alike whether the step trains: one that does not would leave the others waiting for tensors."""
    with cluster_of(1, tmp_path, script=pipeline_worker.train) as cluster:
        new = [cluster.start(blocking=True) for _ in range(2)]
        for node in new:
            node.last("joined")
        cluster.nodes[0].advance(5)
        cluster.leave()
        check(cluster, alone)


@pytest.mark.slow
def test_kills_at_random_moments_change_no_bit(alone, tmp_path):
    rng = random.Random(7)
    with cluster_of(
        4, tmp_path, script=pipeline_worker.train, pause_s=0.05 if KILLS <= 4 else 0.2
    ) as cluster:
        for number in range(KILLS):
            victim = rng.choice(cluster.live())
            if number % 2:
                victim.order(die_in={"all-reduce": rng.randint(1, 60)})
                died_s = victim.dies()
            else:
                time.sleep(rng.uniform(0, 0.5))
                died_s = victim.kill()
            cluster.without(victim.name, died_s)
            cluster.start().last("joined")
        cluster.live()[0].advance(5)
        cluster.leave()
        check(cluster, alone)


def test_members_without_a_link_between_them_pass_tensors_on(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, layout="4") as cluster:
        cluster.start(links=()).last("joined")
        for _ in range(3):
            cluster.start(links=("a",)).last("joined")
        cluster.until(
            lambda: any(told.count(">") == 3 for told in layouts(cluster)), "a pipeline of four stages"
        )
        cluster.nodes[0].advance(10)
        cluster.leave()
        check(cluster, alone)


@pytest.mark.slow
def test_a_member_that_is_stopped_holds_nobody_up_for_long(alone, tmp_path):
    with cluster_of(3, tmp_path, script=pipeline_worker.train) as cluster:
        stopped = cluster.nodes[1].signal(signal.SIGSTOP)
        try:
            survivors = [cluster.nodes[0], cluster.nodes[2]]
            cluster.until(
                lambda: all(
                    any(r["at_s"] > stopped and "b" not in r["by"] for r in n.told("step")) for n in survivors
                ),
                "steps without b",
            )
        finally:
            cluster.nodes[1].signal(signal.SIGCONT)
        cluster.nodes[1].reach(cluster.nodes[0].step + 3)  # It is in again.
        cluster.leave()
        check(cluster, alone)
