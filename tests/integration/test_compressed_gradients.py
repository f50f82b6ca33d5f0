"""Compressed gradients in real clusters: equal states through crashes, what they do to training, and to wires."""

import statistics
from pathlib import Path

import pytest
from cluster import cluster_of
from overlay import HAS_NAMESPACES, overlay

from chaosnet.netem.netns import Netns
from chaosnet.netem.relay import RelayTestbed
from chaosnet.netem.topology import LinkSpec, mesh

WORKER = Path(__file__).with_name("large_worker.py")
MBIT = 60.0
STEPS = 8

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


@pytest.mark.parametrize("nodes", [2, 3])
@pytest.mark.parametrize("compression", ["bf16", "int8"])
def test_nodes_that_come_and_die_stay_equal_and_learn_what_others_do(tmp_path, compression, nodes):
    with cluster_of(nodes, tmp_path, compression=compression, chunk_bytes=256) as cluster:
        for effect in (2, 8):  # Of the dozen that make a step.
            victim = cluster.live()[-1]
            victim.order(die_in={"all-reduce": effect})
            cluster.without(victim.name, victim.dies())
            cluster.grow(1)
        cluster.leave()
        cluster.check_steps()
        cluster.check_losses(tolerance=0.05)


def test_who_compresses_otherwise_is_refused(tmp_path):
    with cluster_of(1, tmp_path, compression="bf16") as cluster:
        ended = cluster.start(compression="int8").ended()
        assert ended["how"] == "ScaleOutFailed"
        assert "'compression' is 'int8' here, 'bf16' there" in ended["reason"]


def steps_s(folder, compression, monkeypatch):
    """Of a mesh of three over slow links."""
    topology, backend = mesh(3, LinkSpec(rate_mbit=MBIT)), Netns if HAS_NAMESPACES else RelayTestbed
    folder.mkdir()
    with overlay(backend, topology, folder, monkeypatch, routes=False) as run:
        for node in topology.nodes:
            run.start(node, WORKER, CHAOSNET_COMPRESSION=compression)
        run.until_told(1, topology.nodes, patience_s=120.0)
        (folder / "go").touch()
        run.until_told(2 + STEPS, topology.nodes, patience_s=120.0)
        run.stop()
    assert run.hashes() and all(len(each) == 1 for each in run.hashes())
    return statistics.median(record["step_s"] for record in run.told("n0")[-STEPS // 2 :])


def test_slow_wires_are_that_much_faster(tmp_path, monkeypatch):
    """12 MB of gradients; 0.1 s of each step is sleep. Run with -s for the figures."""
    took_s = {each: steps_s(tmp_path / each, each, monkeypatch) - 0.1 for each in ("none", "bf16", "int8")}
    print({each: f"{seconds:.2f} s a step beside the sleep" for each, seconds in took_s.items()})
    assert took_s["bf16"] <= 0.65 * took_s["none"]
    assert took_s["int8"] <= 0.45 * took_s["none"]
