"""Several models and optimizers, whose updates take turns: a GAN. Real processes."""

from __future__ import annotations

import time

import pytest
import torch
from cluster import cluster_of
from scripts import scripts_in
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


ODD = """
import sys, time, torch
from torch import nn
from torch.utils.data import DataLoader
from chaosnet import Trainer
torch.set_num_threads(1)
torch.manual_seed(0)
d, g = nn.Linear(4, 1), nn.Linear(4, 1)
optimizers = {name: torch.optim.SGD(each.parameters(), 1e-2) for name, each in (("D", d), ("G", g))}
data = [(torch.randn(4), index) for index in range(9)]
trainer = Trainer({"D": d, "G": g}, optimizers)
while trainer.world_size < 2:
    for name in optimizers:
        trainer.update(samples=0, name=name)
    time.sleep(0.01)
for epoch in trainer.epochs(3):
    for x, indices in trainer.batches(DataLoader(data, 4, num_workers=int(sys.argv[1]))):
        print("batch", epoch, trainer.epoch, len(indices))
        for model, optimizer in zip((d, g), optimizers.values()):
            model(x).square().mean().backward()
            optimizer.step()
print("end", trainer.samples, trainer.step, trainer.state_hash())
"""


@pytest.mark.parametrize("workers", [0, 1])
def test_an_epoch_ends_for_all_at_once_if_its_last_round_has_samples_for_one_only(tmp_path, workers):
    """The other one hears of the epoch's end with the last update of that round."""
    with scripts_in(tmp_path) as scripts:
        first = scripts.start("n0", ODD, str(workers))
        first.address()
        second = scripts.start("n1", ODD, str(workers))
        assert [first.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert first.lines("end") == second.lines("end"), scripts.story()
        assert first.lines("end")[0][:2] == ["27.0", "12"], scripts.story()
        dealt = sorted(first.lines("batch") + second.lines("batch"))
        assert dealt == sorted([str(epoch), str(epoch), size] for epoch in range(3) for size in "441")
