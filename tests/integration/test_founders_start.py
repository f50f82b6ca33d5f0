"""Founders for real: started again by the same command they find their cluster; of several at once, one founds."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Node, cluster_of

from chaosnet import client
from chaosnet.node.keys import KeyPair, save

pytestmark = pytest.mark.realtime

STARTS = int(os.environ.get("CHAOSNET_TEST_STARTS", "2"))  # Of three nodes at once.
RESUMES: dict[str, Any] = {"every": 5, "copies": "whole", "resume": True}
WAIT_S = 5.0  # Before those that start at once found a cluster: each has opened its port by then.


def free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


@contextmanager
def founded(folder: Path, key: str | None, **more: Any) -> Iterator[tuple[Cluster, dict[str, Any]]]:
    """A founder at a fixed port and two that have joined it; and how the founder was started."""
    settings = {"listen": f"127.0.0.1:{free_ports(1)[0]}", "join": ""} | more
    every: dict[str, Any] = {"env": {"CHAOSNET_STATE_DIR": str(folder / "members")}}
    if key:
        save(KeyPair.new(), folder / key)
        every["key"] = str(folder / key)
    with cluster_of(0, folder, **every) as cluster:
        cluster.start(**settings).last("joined")
        cluster.grow(2)
        cluster.nodes[0].advance(10)
        yield cluster, settings


@pytest.mark.parametrize("key", [None, "key"], ids=["no keys", "keys"])
@pytest.mark.parametrize("how", ["kill -9", "Ctrl+C"])
def test_a_founder_that_is_started_again_by_the_same_command_finds_its_cluster(tmp_path, how, key):
    with founded(tmp_path, key, directory=str(tmp_path / "disk"), **RESUMES) as (cluster, settings):
        first, other = cluster.nodes[0], cluster.nodes[1]
        if how == "kill -9":
            cluster.without(first.name, first.kill())
        else:
            first.order(leave=True)
            assert first.exit_code() == 0
        other.advance(10)
        before = other.step
        again = cluster.start(**settings)
        joined = again.last("joined")
        assert joined["step"] >= before, "it has the state of the cluster"
        again.advance(10)
        log = again.log.read_text()
        assert "was in a cluster when it last ran here" in log and "--new" in log
        assert "founds a cluster" not in log and "goes on from step" not in log
        members = {node.name for node in cluster.live()}
        cluster.until(lambda: set(other.told("step")[-1]["by"]) == members, "all train together")
        cluster.finish()


def test_once_all_have_left_nobody_is_remembered_and_a_first_start_does_not_wait(tmp_path):
    with founded(tmp_path, None) as (cluster, settings):
        assert list((tmp_path / "members").glob("*.json"))
        for node in reversed(cluster.nodes):
            node.order(leave=True)
            assert node.exit_code() == 0
        assert not list((tmp_path / "members").glob("*.json"))
        again = cluster.start(**settings)
        assert again.last("joined")["seconds"] < 2.0
        assert "founds a cluster" in again.log.read_text()


@pytest.mark.slow
def test_if_nobody_of_the_cluster_is_left_it_founds_another(tmp_path):
    with founded(tmp_path, None, directory=str(tmp_path / "disk"), **RESUMES) as (cluster, settings):
        for node in cluster.nodes:
            node.kill()
        for node in cluster.nodes:
            node.process.join()
        again = cluster.start(**settings)
        again.last("joined")
        log = again.log.read_text()
        assert "founds a cluster" in log and "goes on from step" in log


@pytest.mark.slow
def test_with_one_command_on_all_nodes_started_at_once_there_is_one_cluster_each_time(tmp_path):
    for start in range(STARTS):
        folder = tmp_path / str(start)
        folder.mkdir()
        addresses = [f"127.0.0.1:{port}" for port in free_ports(3)]
        with cluster_of(0, folder, join=",".join(addresses), found=True, join_patience_s=WAIT_S) as cluster:
            nodes = [cluster.start(listen=address) for address in reversed(addresses)]
            for node in nodes:
                node.last("joined")
            clusters = {client.status(address).cluster for address in addresses}
            assert len(clusters) == 1, f"start {start}\n{cluster.story()}"
            cluster.until(lambda nodes=nodes: all(together(node) for node in nodes), "all train together")
            assert sum("founds a cluster" in node.log.read_text() for node in nodes) == 1


def together(node: Node) -> bool:
    steps = node.told("step")
    return bool(steps) and len(steps[-1]["by"]) == 3


def test_what_one_remembers_is_told_if_it_cannot_be_joined(tmp_path):
    """Another script at the same port: its cluster lives, and is another model's."""
    with founded(tmp_path, None) as (cluster, settings):
        cluster.without("a", cluster.nodes[0].kill())
        again = cluster.start(**settings, chunk_bytes=4096)
        ended = again.ended()
        assert ended["how"] == "ScaleOutFailed"
        assert "the cluster that it was in (another one: --new)" in ended["reason"]
