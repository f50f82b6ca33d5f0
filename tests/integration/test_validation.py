"""Pipelines validate the model after each epoch, whoever is lost meanwhile, and no member needs all of it."""

from __future__ import annotations

import pipeline_worker
import pytest
from cluster import Cluster, cluster_of

pytestmark = pytest.mark.realtime

EPOCHS = 30  # More than any of these clusters trains.


def run_alone(folder, **settings) -> tuple[dict[int, dict[str, float]], dict[int, float]]:
    """What one process comes to: by epoch, its validation; by step, its loss."""
    with cluster_of(0, folder, script=pipeline_worker.train, keepers=2, **settings) as cluster:
        node = cluster.start(pause_s=0.0)
        cluster.until(lambda: node.last("step")["epoch"] >= EPOCHS, f"{EPOCHS} epochs", patience_s=120.0)
        cluster.leave()
        return validated(cluster), {step: each["means"]["loss"] for step, each in cluster.steps().items()}


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("alone"), validates=True)


@pytest.fixture(scope="module")
def alone_with_functions(tmp_path_factory):
    return run_alone(tmp_path_factory.mktemp("functions"), validates=True, functions=True)


def validated(cluster: Cluster) -> dict[int, dict[str, float]]:
    """By epoch; whoever told of it has told the same."""
    found: dict[int, dict[str, float]] = {}
    for node in cluster.nodes:
        for record in node.told("validated"):
            assert found.setdefault(record["epoch"], record["found"]) == record["found"], node.name
    return found


def check(cluster: Cluster, alone: tuple[dict[int, dict[str, float]], dict[int, float]]) -> None:
    """Each epoch was validated, and all was as with one process, to the bit."""
    cluster.check_steps()
    wanted, losses = alone
    found = validated(cluster)
    assert len(found) >= 3 and sorted(found) == list(range(1, len(found) + 1))
    assert found == {epoch: wanted[epoch] for epoch in found}
    for step, record in cluster.steps().items():
        assert record["means"]["loss"] == losses[step], f"step {step}"


@pytest.mark.slow
def test_a_validation_changes_nothing_that_is_trained(alone, tmp_path):
    _, losses = run_alone(tmp_path)
    both = losses.keys() & alone[1].keys()  # One of the two may have gone on for some steps before it left.
    assert len(both) >= 5 * EPOCHS, "five steps an epoch"
    assert {step: losses[step] for step in both} == {step: alone[1][step] for step in both}


def test_members_that_die_and_join_validate_as_one_process_does(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, keepers=2, validates=True) as cluster:
        a, b, c = cluster.grow(3)
        c.advance(4)
        cluster.without("b", b.kill())
        cluster.start().last("joined")
        a.advance(8)
        c.order(leave=True)
        assert c.exit_code() == 0
        a.advance(8)
        cluster.leave()
        check(cluster, alone)


def test_a_member_that_dies_as_it_validates_is_done_without(alone, tmp_path):
    with cluster_of(0, tmp_path, script=pipeline_worker.train, keepers=2, validates=True) as cluster:
        a, _ = cluster.grow(2)
        c = cluster.start(dies_as_it_validates=True)
        cluster.without("c", c.dies())
        a.advance(8)
        cluster.leave()
        check(cluster, alone)


def test_no_member_has_the_whole_model(alone_with_functions, tmp_path):
    settings = {"keepers": 2, "functions": True, "validates": True, "layout": "4", "first_members": 4}
    with cluster_of(0, tmp_path, script=pipeline_worker.train, **settings) as cluster:
        nodes = cluster.grow(4)
        nodes[0].advance(12)
        cluster.leave()
        check(cluster, alone_with_functions)
        for node in nodes:
            assert len({record["layer"] for record in node.told("built")}) < 5, node.name


def test_it_goes_on_from_a_checkpoint(alone, tmp_path):
    to_disk = {"directory": str(tmp_path / "saved"), "every": 2, "copies": "shard"}
    settings = {"script": pipeline_worker.train, "keepers": 2, "validates": True, **to_disk}
    with cluster_of(0, tmp_path, **settings) as cluster:
        a, *_ = cluster.grow(2)
        a.advance(7)
        cluster.leave()
        first = validated(cluster)
    with cluster_of(0, tmp_path, resume=True, **settings) as cluster:
        a, *_ = cluster.grow(2)
        a.advance(7)
        cluster.leave()
        found = {**first, **validated(cluster)}
    assert sorted(found) == list(range(1, len(found) + 1))
    assert found == {epoch: alone[0][epoch] for epoch in found}
