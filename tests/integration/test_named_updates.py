"""Several models and optimizers, whose updates take turns: a GAN. Real processes."""

from __future__ import annotations

import time

import pytest
import torch
from cluster import cluster_of
from torch import nn
from worker import FEATURES, Numbered, Worker

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime

NOISE = 4


def gan(worker: Worker) -> None:
    """Tells of each update which name it had and by how much each model has changed."""
    torch.manual_seed(0)
    d, g = nn.Linear(FEATURES, 1), nn.Linear(NOISE, FEATURES)
    optimizers = {
        "D": torch.optim.Adam(d.parameters(), 1e-3),
        "G": torch.optim.SGD(g.parameters(), 1e-3, 0.9),
    }
    trainer = worker.trainer({"D": d, "G": g}, optimizers)
    judge = nn.BCEWithLogitsLoss()

    def update(name: str) -> None:
        before = [model.weight.detach().clone() for model in (d, g)]
        trainer.update(name=name)
        moved = [not torch.equal(model.weight, old) for model, old in zip((d, g), before, strict=True)]
        worker.tell("updated", name=name, moved=moved, step=trainer.step)

    for x, _, indices in trainer.batches(Numbered(), 4, epochs=10**6):
        worker.tell("round", epoch=trainer.epoch, indices=indices.tolist())
        fake = g(torch.randn(len(x), NOISE))
        (judge(d(x), torch.ones(len(x), 1)) + judge(d(fake.detach()), torch.zeros(len(x), 1))).backward()
        update("D")
        time.sleep(0.003)
        judge(d(g(torch.randn(len(x), NOISE))), torch.ones(len(x), 1)).backward()
        update("G")
        if capture_exit_event() or worker.obey():
            break
        time.sleep(0.003)
    trainer.request_node_exit()


def alternating(worker: Worker) -> None:
    """The same with one optimizer and no names: right alone, and wrong as soon as somebody joins in between."""
    d, g = nn.Linear(FEATURES, 1), nn.Linear(NOISE, FEATURES)
    both = nn.ModuleList([d, g])
    trainer = worker.trainer(both, torch.optim.SGD(both.parameters(), 1e-3))
    while not (capture_exit_event() or worker.obey()):
        d(torch.randn(4, FEATURES)).mean().backward()
        trainer.update()
        g(torch.randn(4, NOISE)).mean().backward()
        trainer.update()
    trainer.request_node_exit()


def test_a_joiner_enters_at_the_first_name_and_no_gradients_of_two_names_are_averaged(tmp_path):
    with cluster_of(1, tmp_path, script=gan) as cluster:
        for count in range(2, 5):
            cluster.start().last("joined")
            cluster.nodes[0].advance(9 + count)
        cluster.nodes[0].advance(30)
        cluster.leave()
        cluster.check_steps()  # The states after each step, too.
        names: dict[int, set[str]] = {}
        for node in cluster.nodes:
            told = node.told("updated")
            assert len(told) > 10 and [each["name"] for each in told] == ["D", "G"] * (len(told) // 2)
            alone = [each for each in told if each["step"]]
            assert all(
                each["moved"] in ([True, False], [False, False]) for each in alone if each["name"] == "D"
            )
            assert all(
                each["moved"] in ([False, True], [False, False]) for each in alone if each["name"] == "G"
            )
            for each in told:
                names.setdefault(each["step"], set()).add(each["name"])
        last = max(names)
        assert all(len(found) == 1 for step, found in names.items() if step < last - 2), names


def test_a_killed_node_leaves_the_others_in_turn_and_no_round_is_lost(tmp_path):
    with cluster_of(3, tmp_path, script=gan) as cluster:
        for victim in (cluster.nodes[2], cluster.nodes[0]):
            cluster.nodes[1].advance(15)
            victim.kill()
        cluster.nodes[1].advance(20)
        late = cluster.start()
        late.last("joined")
        late.advance(20)
        cluster.leave()
        cluster.check_steps()


def test_updates_without_names_that_take_turns_are_refused_with_the_recipe(tmp_path):
    with cluster_of(0, tmp_path, script=alternating) as cluster:
        ended = cluster.start().ended()
        assert ended["how"] == "ConfigError"
        assert "trainer.update(name='D')" in ended["reason"] and "once, after all backward" in ended["reason"]
