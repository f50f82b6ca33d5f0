"""`chaosnet.scheduler.tree_packing`: trees over all links of the overlay, near the bound."""

import itertools
import random
import statistics
import time

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.scheduler.sync_plan import MAX_PACKED_NODES, best_single_tree, bundle, fapt, packed
from chaosnet.scheduler.sync_time import HARDLY_MORE, MAX_BUNDLE_BYTES, SyncTime
from chaosnet.scheduler.tree_packing import MAX_TREES
from chaosnet.scheduler.trees import packing_bound, throughput_bps, validate

MBIT = 1e6


def random_overlay(seed: int, nodes: int, more_links: int, slowest=100.0, fastest=1000.0) -> nx.Graph:
    """A random tree and some links more, with rates in Mbit/s that are evenly spread."""
    rng = random.Random(seed)
    names = [f"n{index:02d}" for index in range(nodes)]
    links = {(rng.choice(names[:at]), names[at]) for at in range(1, nodes)}
    others = sorted({*itertools.combinations(names, 2)} - links)
    links |= {*rng.sample(others, min(more_links, len(others)))}
    graph = nx.Graph()
    graph.add_nodes_from(names)
    for u, v in sorted(links):
        graph.add_edge(u, v, rate_bps=rng.uniform(slowest, fastest) * MBIT)
    return graph


@given(st.integers(0, 10**6), st.integers(3, 8), st.integers(0, 12))
def test_trees_are_packed_near_the_bound(seed, nodes, more_links):
    graph = random_overlay(seed, nodes, more_links)
    trees = packed(graph)
    validate(trees, graph)
    assert len(trees) <= MAX_TREES
    assert 0.8 * packing_bound(graph) <= throughput_bps(trees, graph) <= packing_bound(graph) * (1 + 1e-6)


def test_they_carry_far_more_than_one_tree_or_fapt():
    graphs = [random_overlay(seed, 8, 5) for seed in range(20)]
    shares = {
        policy: [throughput_bps(policy(graph), graph) / packing_bound(graph) for graph in graphs]
        for policy in (packed, fapt, best_single_tree)
    }
    assert statistics.median(shares[packed]) > 0.99
    assert min(shares[packed]) > 0.9
    assert statistics.median(shares[fapt]) < 0.75
    assert statistics.median(shares[best_single_tree]) < 0.75


@pytest.mark.parametrize("slowest", [1e-3, 1e-1, 1e5])
def test_rates_that_lie_far_apart_do_not_overload_the_slow_links(slowest):
    for seed in range(5):
        graph = random_overlay(seed, 8, 6, slowest, 1e5)
        for link in sorted(graph.edges)[::2]:
            graph.edges[link]["rate_bps"] = slowest * MBIT
        assert throughput_bps(packed(graph), graph) >= 0.9 * packing_bound(graph)


def test_where_there_is_little_to_sum_one_shallow_tree_is_taken():
    graph = random_overlay(1, 8, 6)
    for link in graph.edges:
        graph.edges[link]["rtt_s"] = 0.05
    graph.graph["result"] = (20_000_000, 128)
    many = packed(graph)
    graph.graph["result"] = (1_000, 1)
    assert packed(graph) == best_single_tree(graph)
    assert len(many) > 1
    single_s = SyncTime(packed(graph), graph).expected_s(20_000_000, 128)
    assert SyncTime(many, graph).expected_s(20_000_000, 128) < single_s


def test_a_tree_is_its_only_plan():
    graph = nx.path_graph(["a", "b", "c", "d"])
    assert packed(graph) == best_single_tree(graph)


def test_beyond_its_size_it_is_fapt():
    graph = random_overlay(1, MAX_PACKED_NODES + 1, 60)
    assert packed(graph) == fapt(graph)


def test_the_largest_overlay_takes_no_longer_than_forty_of_fapt():
    """20 to 40 ms on an idle core, where fapt takes 1.5 to 2."""
    graph = random_overlay(1, MAX_PACKED_NODES, 2 * MAX_PACKED_NODES)
    took_s = {}
    for policy in (packed, fapt) * 3:
        started = time.process_time()
        policy(graph)
        took_s.setdefault(policy, []).append(time.process_time() - started)
    assert min(took_s[packed]) < 40 * min(took_s[fapt])


def test_the_time_of_one_tree_is_that_of_its_slowest_link_and_of_its_last_chunk():
    graph = nx.path_graph(["a", "b", "c"])
    nx.set_edge_attributes(graph, 8e6, "rate_bps")
    nx.set_edge_attributes(graph, 0.0, "rtt_s")
    (tree,) = best_single_tree(graph)
    assert tree.root == "b"
    assert SyncTime([tree], graph).expected_s(10_000_000, 10) == pytest.approx(10 + 1, rel=1e-3)


@given(
    seed=st.integers(0, 20),
    megabit=st.sampled_from([1, 10, 100, 1000, 10_000]),
    megabytes=st.sampled_from([0.1, 1, 20, 400]),
    chunks=st.integers(1, 300),
)
def test_a_message_has_as_many_chunks_as_suit_its_links(seed, megabit, megabytes, chunks):
    graph, result_bytes = random_overlay(seed, 5, 3), int(megabytes * 1e6)
    nx.set_edge_attributes(graph, megabit * MBIT, "rate_bps")
    trees = packed(graph)
    times = SyncTime(trees, graph)
    expected, size = times.best_bundle(result_bytes, chunks)
    assert 1 <= size <= chunks
    assert size == 1 or size * result_bytes / chunks <= MAX_BUNDLE_BYTES
    assert expected <= times.expected_s(result_bytes, chunks) * HARDLY_MORE * (1 + 1e-9)


def test_fast_links_take_few_messages_and_slow_ones_many():
    graph, sizes = nx.complete_graph(["a", "b", "c", "d"]), []
    for megabit in (10, 100, 1000, 10_000):
        nx.set_edge_attributes(graph, megabit * MBIT, "rate_bps")
        nx.set_edge_attributes(graph, 3e-4, "rtt_s")
        graph.graph["result"] = (20_000_000, 256)
        sizes.append(bundle(packed(graph), graph))
    assert sizes == [2, 4, 16, 32]


def test_of_two_nodes_each_is_the_root_of_one_half():
    trees = packed(nx.path_graph(["a", "b"]))
    assert [(tree.root, tree.share) for tree in trees] == [("a", 0.5), ("b", 0.5)]
