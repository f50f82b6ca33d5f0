"""Scripts whose replicas would differ: found, named, and stopped, healed or told. Real processes and joiners."""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from cluster import cluster_of
from torch import nn
from worker import Numbered, Worker, loss_of, make_model

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime


def drifting(worker: Worker) -> None:
    """Trains as the case says: each breaks the rule that all nodes do the same, or the same is handed over."""
    case, settings = worker.settings["case"], worker.settings
    model = make_model()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    extra: dict[str, Any] | None = {"updates": 0} if case == "extra_state after update" else None
    given = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9) if case == "given" else None
    own = None
    if case in ("a scheduler of its own", "in after_step", "linear in a callback"):
        # Another rate at every step: with StepLR who joins at a multiple of its steps would be equal by chance.
        own = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / 10_000))
    after = own.step if own is not None and case == "in after_step" else None
    every = {"lr_scheduler_every": settings["lr_every"]} if "lr_every" in settings else {}
    trainer = worker.trainer(
        model, optimizer, given, extra, after_step=after,
        on_divergence=settings.get("on_divergence", "stop"), **every,
    )  # fmt: skip
    count = 0
    for x, y, indices in trainer.batches(Numbered(), 4, epochs=10**6):
        worker.tell_batch(trainer, indices)
        if case == "freeze" and trainer.step == 10:
            model[0].weight.requires_grad_(False)
        if case == "counter":
            count += 1
            for group in optimizer.param_groups:
                group["lr"] = 5e-3 / (1 + count / 100)
        loss = loss_of(model, x, y)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
        if given is not None:
            worker.tell("rate", lr=optimizer.param_groups[0]["lr"], samples=trainer.samples)
        if own is not None and after is None:
            own.step()
        if extra is not None:
            extra["updates"] += 1
        if case == "unequal loaders":  # An epoch of each node's own loader.
            count += 1
            if count % (10 if worker.name == "a" else 7) == 0:
                optimizer.param_groups[0]["lr"] *= 0.9
        _inject(worker, case, model, optimizer)
        if capture_exit_event() or worker.obey():
            break
        time.sleep(settings.get("pause_s", 0.002))
    worker.tell("heals", heals=trainer.heals)
    trainer.request_node_exit()


def _inject(worker: Worker, case: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Once, on node c, or as often as the case says."""
    if worker.name != "c" or worker.settings.get("done"):
        return
    worker.settings["turn"] = worker.settings.get("turn", 0) + 1
    if worker.settings["turn"] < 15:
        return
    worker.settings["done"] = case != "lr again and again"
    if case.startswith("lr"):
        optimizer.param_groups[0]["lr"] = 1e-4
    elif case == "a weight":
        with torch.no_grad():
            model[0].weight[3, 2] += 1e-3


FOUND = {
    "a scheduler of its own": "optimizer.param_groups[0]['lr']",
    "in after_step": "optimizer.param_groups[0]['lr']",
    "linear in a callback": "optimizer.param_groups[0]['lr']",
    "counter": "optimizer.param_groups[0]['lr']",
    "unequal loaders": "optimizer.param_groups[0]['lr']",
    "freeze": "requires_grad of '0.weight'",
    "extra_state after update": "extra_state['updates']",
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FOUND)
def test_what_a_joiner_would_do_differently_is_named_and_stops_all(tmp_path, case):
    with cluster_of(0, tmp_path, script=drifting, case=case, hash_every=0) as cluster:
        cluster.start().last("joined")
        if case != "unequal loaders":
            cluster.nodes[0].reach(25)
        cluster.start()
        reasons = {node.name: node.ended() for node in cluster.nodes}
        for name, ended in reasons.items():
            assert ended["how"] == "ReplicasDiffer", f"{name}: {ended}\n{cluster.story()}"
            assert FOUND[case] in ended["reason"]
            assert " on b, " in ended["reason"]
            assert " on a. " in ended["reason"]
            assert ended["reason"].startswith("replicas differ after step ")
        assert len({ended["reason"] for ended in reasons.values()}) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "item"), [("lr", "optimizer.param_groups[0]['lr'] is 0.0001 on c"), ("a weight", "on c")]
)
def test_a_node_that_differs_pulls_the_state_anew_and_the_others_go_on(tmp_path, case, item):
    with cluster_of(3, tmp_path, script=drifting, case=case, on_divergence="heal") as cluster:
        a, b, c = cluster.nodes
        cluster.until(lambda: len(c.told("loaded")) == 2, "c has pulled the state anew", 40.0)
        cluster.until(lambda: "c" in a.told("step")[-1]["by"], "c takes part again")
        a.advance(10)
        since = max(record["at_s"] for record in c.told("loaded"))
        theirs = {record["step"]: record["hash"] for record in c.told("step") if record["at_s"] > since}
        ours = {record["step"]: record["hash"] for record in a.told("step")}
        assert len(theirs) > 5
        assert all(theirs[step] == ours[step] for step in theirs.keys() & ours.keys())
        log = c.log.read_text()
        assert "replicas differ after step" in log
        assert item in log
        assert "c is in again at step" in log
        a.order(rest_s=0.0)
        cluster.leave()
        assert c.told("heals")[-1]["heals"] == 1
        assert a.told("heals")[-1]["heals"] == b.told("heals")[-1]["heals"] == 0
        assert len(b.told("loaded")) == 1


def _two_run_the_example(folder: Path, of_b: dict[str, str]) -> list[str]:
    """Until both have ended well. `of_b`: its environment. Returns: what each has printed."""
    text = (Path(__file__).parents[2] / "examples" / "accumulate.py").read_text()
    script = folder / "accumulate.py"
    script.write_text(text.replace("epochs=100", "epochs=10"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    home = {**os.environ, "HOME": str(folder), "PYTHONUNBUFFERED": "1", "CHAOSNET_JOIN_PATIENCE_S": "30"}
    told = {name: (folder / name).open("w+") for name in "ab"}
    nodes = []
    try:
        for name, own in (("a", {"CHAOSNET_LISTEN": address}), ("b", {"CHAOSNET_JOIN": address, **of_b})):
            nodes.append(
                subprocess.Popen(
                    [sys.executable, str(script)],
                    env={**home, **own, "CHAOSNET_NAME": name},
                    stdout=told[name],
                    stderr=subprocess.STDOUT,
                )
            )
        codes = [node.wait(120) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
            node.wait()
    texts = [Path(told[name].name).read_text() for name in "ab"]
    assert codes == [0, 0], texts
    assert "replicas differ" not in texts[0] + texts[1]
    assert "joined b" in texts[0] or "b left after step" in texts[1], texts
    return texts


@pytest.mark.slow
def test_the_example_with_state_of_its_own_stays_equal_when_a_node_joins(tmp_path):
    for text in _two_run_the_example(tmp_path, {}):
        assert "round differently" not in text


@pytest.mark.slow
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() == "DEFAULT", reason="one kind of arithmetic here"
)
def test_nodes_that_round_differently_train_together_and_say_so(tmp_path):
    release = ".".join(torch.__version__.split(".")[:2])
    for text in _two_run_the_example(tmp_path, {"ATEN_CPU_CAPABILITY": "default"}):
        (told,) = (line for line in text.splitlines() if "round differently" in line)
        assert f"b: {platform.machine()}-DEFAULT-torch-{release}" in told


@pytest.mark.parametrize(("every", "unit"), [("epoch", 96), (50, 50)])
def test_a_schedule_by_epochs_or_samples_goes_on_alike_on_joiners(tmp_path, every, unit):
    with cluster_of(1, tmp_path, script=drifting, case="given", lr_every=every) as cluster:
        a = cluster.nodes[0]
        a.reach(30)
        joiners = [cluster.start() for _ in range(2)]
        for joiner in joiners:
            joiner.last("joined")
        a.advance(60)
        cluster.leave()
        cluster.check_steps()
        for node in cluster.nodes:
            rates = node.told("rate")
            assert rates
            for record in rates:
                assert record["lr"] == pytest.approx(5e-3 * 0.9 ** (record["samples"] // unit), rel=1e-9)


@pytest.mark.slow
def test_of_two_the_senior_is_right(tmp_path):
    with cluster_of(
        1, tmp_path, script=drifting, case="a scheduler of its own", on_divergence="heal", hash_every=0
    ) as cluster:
        a = cluster.nodes[0]
        a.reach(12)
        b = cluster.start()
        cluster.until(lambda: len(b.told("loaded")) >= 2, "b has pulled the state anew")
        a.advance(10)
        assert len(a.told("loaded")) == 0


@pytest.mark.slow
def test_a_node_that_differs_again_and_again_ends_with_the_sentence(tmp_path):
    with cluster_of(
        3, tmp_path, script=drifting, case="lr again and again", on_divergence="heal", hash_every=0
    ) as cluster:
        a, _, c = cluster.nodes
        ended = cluster.until(lambda: c.told("ended"), "c gives up", 60.0)[-1]
        assert ended["how"] == "ReplicasDiffer"
        assert "in vain" in ended["reason"]
        a.advance(10)
        assert a.alive


def test_a_warning_is_said_once_and_training_goes_on(tmp_path):
    with cluster_of(3, tmp_path, script=drifting, case="lr", on_divergence="warn", hash_every=0) as cluster:
        a = cluster.nodes[0]
        cluster.until(lambda: "replicas differ" in a.log.read_text(), "a says so")
        a.advance(60)
        log = a.log.read_text()
        assert log.count("replicas differ after step") == log.count("['lr'] is 0.0001 on c") + log.count(
            "not the same on c"
        )
        assert log.count("['lr'] is 0.0001 on c") == 1
        assert len(cluster.live()) == 3
