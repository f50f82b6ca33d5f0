"""Whoever waits for another says so, for real: for whom, since when, and that it goes on; so does `status`."""

from __future__ import annotations

import re

import pytest
from cluster import cluster_of

from chaosnet import client

pytestmark = pytest.mark.realtime

IDLE_S = 7.0
LINE = re.compile(r"step \d+: all wait for b, \d+ s so far: its script has not called update\(\)")


@pytest.mark.slow
def test_one_idle_script_is_named_on_all_nodes_and_in_the_status_and_they_say_when_they_go_on(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        idle = cluster.nodes[1]
        address = cluster.nodes[0].last("joined")["address"]
        cluster.nodes[0].advance(20)
        rate = cluster.until(lambda: client.status(address).samples_per_s, "they report a rate")
        idle.order(rest_s=IDLE_S)
        idle.last("rests")
        for node in cluster.nodes:
            cluster.until(
                lambda node=node: len(LINE.findall(node.log.read_text())) == 2,
                f"{node.name} says for whom all wait",
            )
        status = client.status(address)
        assert status.waiting.whom == ("b",) and status.waiting.seconds >= 3.0
        assert next(row for row in status.members if row.node == "b").idle_s >= 2.0
        assert status.samples_per_s < 0.5 * rate, "no rate of before"
        for node in cluster.nodes:
            cluster.until(
                lambda node=node: "all waited for b, " in node.log.read_text(), f"{node.name} goes on"
            )
        cluster.nodes[0].advance(20)
        assert client.status(address).waiting is None
        assert len(LINE.findall(cluster.nodes[0].log.read_text())) <= 3, "ever more rarely"
        cluster.finish()


@pytest.mark.slow
def test_steps_that_are_not_held_up_are_not_talked_about(tmp_path):
    with cluster_of(3, tmp_path, pause_s=0.05) as cluster:
        cluster.nodes[0].advance(60)
        assert not cluster.notices("waits for", "waited for")
        cluster.finish()
