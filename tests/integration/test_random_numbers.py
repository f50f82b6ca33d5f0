"""Whose random numbers: each node draws its own, unless the script wants them alike. Real processes."""

from __future__ import annotations

import random
import time
from collections import defaultdict

import numpy as np
import pytest
import torch
from cluster import Cluster, Node, cluster_of
from torch import nn
from torch.utils.data import DataLoader
from worker import Numbered, Worker, make_model, make_optimizer

from chaosnet import capture_exit_event

pytestmark = pytest.mark.realtime

KINDS = ("dropout", "noise", "python", "numpy", "shuffle")


def draw(worker: Worker) -> None:
    """A script that seeds itself, as many do, and tells what it draws in each step."""
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    model, dropout = make_model(), nn.Dropout(0.5)
    noisy = worker.settings.get("noisy_after_step", False)

    def add_noise() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1e-4 * torch.randn_like(parameter) * (1 + random.random() + np.random.rand()))

    settings = {"same_rng": True} if worker.settings.get("same_rng") else {}
    after_step = add_noise if noisy else None
    trainer = worker.trainer(model, make_optimizer(model), after_step=after_step, **settings)
    data, loader = Numbered(), iter(())
    while not (capture_exit_event() or worker.obey()):
        mask, noise = dropout(torch.ones(64)).ne(0).int().tolist(), torch.randn(2).tolist()
        batch = next(loader, None)
        shuffle = None
        if batch is None:
            loader = iter(DataLoader(data, batch_size=48, shuffle=True))
            batch = next(loader)
            shuffle = batch[2][:12].tolist()
        worker.tell(
            "drawn",
            step=trainer.step,
            dropout=mask,
            noise=noise,
            python=random.random(),
            numpy=float(np.random.rand()),
            shuffle=shuffle,
        )
        nn.functional.cross_entropy(model(dropout(batch[0])), batch[1]).backward()
        trainer.update()
        time.sleep(0.002)
    trainer.request_node_exit()


def drawn(cluster: Cluster) -> dict[int, dict[str, dict[str, object]]]:
    """Step: node: what it drew while that step was under way."""
    found: dict[int, dict[str, dict[str, object]]] = defaultdict(dict)
    for node in cluster.nodes:
        for record in node.told("drawn"):
            found[record["step"]][node.name] = record
    return found


def shared(cluster: Cluster, kind: str) -> tuple[int, int]:
    """Of the pairs of nodes in one step that both drew this kind: how many there are, and how many are equal."""
    pairs = equal = 0
    for by_node in drawn(cluster).values():
        values = [record[kind] for record in by_node.values() if record[kind] is not None]
        for index, value in enumerate(values):
            pairs += len(values) - index - 1
            equal += sum(other == value for other in values[index + 1 :])
    return pairs, equal


def test_joiners_draw_numbers_of_their_own(tmp_path):
    with cluster_of(3, tmp_path, script=draw, hash_every=10) as cluster:
        cluster.nodes[0].advance(40)
        cluster.leave()
        cluster.check_steps()
        counts = {kind: shared(cluster, kind) for kind in KINDS[:4]}
        assert all(pairs > 50 and equal == 0 for pairs, equal in counts.values()), counts
        permutations = [
            str(r["shuffle"]) for node in cluster.nodes for r in node.told("drawn") if r["shuffle"]
        ]
        assert len(permutations) > 20
        assert len(set(permutations)) == len(permutations), "two epochs were shuffled alike"


def test_with_same_rng_all_nodes_draw_the_same_in_each_step(tmp_path):
    with cluster_of(3, tmp_path, script=draw, same_rng=True, hash_every=10) as cluster:
        cluster.nodes[0].advance(40)
        cluster.leave()
        counts = {kind: shared(cluster, kind) for kind in KINDS[:4]}
        assert all(pairs > 50 and equal == pairs for pairs, equal in counts.values()), counts
        own = [str(r["python"]) for r in cluster.nodes[0].told("drawn")]
        assert len(set(own)) == len(own), "each step draws others"


def test_a_node_that_comes_back_does_not_repeat_itself(tmp_path):
    """Its script seeds as it did before, and it has the same name; only the step is another."""
    with cluster_of(2, tmp_path, script=draw, hash_every=10) as cluster:
        second = cluster.nodes[1]
        second.advance(10)
        second.kill()
        cluster.nodes[0].advance(10)
        seed = cluster.nodes[0].last("joined")["address"]
        again = Node(cluster, second.name, draw, {"join": seed, **cluster.settings})
        cluster.nodes.append(again)
        cluster._by_pipe[again.pipe] = again
        again.last("joined")
        again.advance(10)
        cluster.leave()
        masks = [str(r["dropout"]) for node in cluster.nodes for r in node.told("drawn")]
        assert len(masks) > 40 and len(set(masks)) == len(masks)


def test_noise_in_after_step_is_the_same_on_all_nodes(tmp_path):
    """It changes the training state, so it has to be; also where a joiner catches up."""
    with cluster_of(3, tmp_path, script=draw, noisy_after_step=True) as cluster:
        cluster.nodes[0].advance(40)
        cluster.leave()
        cluster.check_steps()  # Compares the states of all nodes after every step.
        _, equal = shared(cluster, "dropout")
        assert equal == 0
