"""Clusters of real processes over loopback: what happens to nodes, and what it must not do to training."""

from __future__ import annotations

import pytest
from cluster import cluster_of

pytestmark = pytest.mark.realtime


def test_nodes_that_join_while_others_train_train_on_with_them(tmp_path):
    with cluster_of(1, tmp_path) as cluster:
        cluster.grow(3)
        for node in cluster.nodes:
            node.advance(50)
            print(node.name, node.step, node.told("joined"))
        cluster.finish()
