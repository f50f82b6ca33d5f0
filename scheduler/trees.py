"""Spanning trees of the overlay, and what a plan of them is worth.

A sync plan is a list of spanning trees, each with a share of the gradient. A tree's share is reduced up to its root
and broadcast down again in pipelined chunks, so each link of the tree carries the share once in each direction, and
with full-duplex links

    step time  >=  gradient bits / throughput,   throughput = min over links of rate / (shares on the link),

which no plan can push above `packing_bound`. The overlay is an undirected `networkx.Graph` of node names. Its links
may carry `rate_bps` (measured, bits per second) and `rtt_s` (seconds); a link not measured yet counts with the
defaults below, so that there is an answer before the first measurement.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import networkx as nx

from ..protocols.errors import ConfigError, PlanInfeasible

DEFAULT_RATE_BPS = 100e6
"""Taken for a link without a measured rate, bits per second."""

DEFAULT_RTT_S = 0.010
"""Taken for a link without a measured round-trip time, seconds."""

HOP_S = 1e-4
"""Added to a link's round-trip time for the work of one more hop; keeps path lengths above zero."""

MAX_PACKING_NODES = 8
"""`packing_bound` goes through all partitions of the nodes: 4,140 for eight of them."""


MAX_TREES = 64
"""In one plan: a view has no room for more (protocols/messages/views.py)."""


class SpanningTree(NamedTuple):
    """One spanning tree of the overlay and what it carries."""

    root: str
    parent: dict[str, str]
    """Child -> parent, for every node but the root."""
    share: float
    """Of the gradient, > 0; the shares of a plan sum to 1."""


def validate(trees: Sequence[SpanningTree], graph: nx.Graph) -> None:
    """Raise PlanInfeasible, naming tree, node or link, unless `trees` is a plan for `graph`.

    Each tree spans all nodes, uses only links of the overlay and has no cycle; shares sum to 1; a view has room.
    """
    if len(trees) > MAX_TREES:
        raise PlanInfeasible(f"{len(trees)} trees (expected at most {MAX_TREES}, which is what a view holds)")
    for index, tree in enumerate(trees):
        _check_tree(f"tree {index}, root {tree.root!r}", tree, graph)
    total = sum(tree.share for tree in trees)
    if not math.isclose(total, 1.0, abs_tol=1e-9):
        raise PlanInfeasible(f"shares of {len(trees)} trees sum to {total:g} (expected 1)")


def throughput_bps(trees: Sequence[SpanningTree], graph: nx.Graph) -> float:
    """Gradient bits per second that `trees` reduce and broadcast once chunks flow; inf for one node.

    Each link carries the shares of the trees that use it, once in each direction: the least over links of
    rate / shares on the link.
    """
    overlay = measured(graph)
    share_by_link: dict[frozenset[str], float] = {}
    for tree in trees:
        for child, parent in tree.parent.items():
            link = frozenset((child, parent))
            share_by_link[link] = share_by_link.get(link, 0.0) + tree.share
    return min(
        (overlay.edges[tuple(link)]["rate_bps"] / share for link, share in share_by_link.items()),
        default=math.inf,
    )


def packing_bound(graph: nx.Graph) -> float:
    """The most gradient bits per second that any set of spanning trees can reach; inf for one node.

    Nash-Williams and Tutte: the fractional spanning-tree packing number is the least, over the partitions
    of the nodes into p >= 2 parts, of the rate between the parts / (p - 1). For reference only: it goes
    through all partitions.
    Raises: ConfigError above `MAX_PACKING_NODES` nodes, PlanInfeasible as `best_single_tree`.
    """
    if len(graph) > MAX_PACKING_NODES:
        raise ConfigError(f"packing_bound: {len(graph)} nodes (expected at most {MAX_PACKING_NODES})")
    overlay = measured(graph)
    at = {node: index for index, node in enumerate(overlay)}
    links = [(at[u], at[v], rate_bps) for u, v, rate_bps in overlay.edges(data="rate_bps")]
    return min(
        (
            sum(rate_bps for u, v, rate_bps in links if part[u] != part[v]) / max(part)
            for part in _partitions(len(overlay))
            if max(part) > 0
        ),
        default=math.inf,
    )


def measured(graph: nx.Graph) -> nx.Graph:
    """A copy in sorted order with all measurements filled in, checked to be connected."""
    overlay = nx.Graph()
    overlay.add_nodes_from(sorted(graph))
    for u, v in sorted((min(link), max(link)) for link in graph.edges):
        if u == v:
            continue
        rate_bps = _measured(graph, u, v, "rate_bps", DEFAULT_RATE_BPS)
        rtt_s = _measured(graph, u, v, "rtt_s", DEFAULT_RTT_S)
        if rate_bps == 0:
            raise PlanInfeasible(f"link {u!r} - {v!r}: rate_bps 0 (expected > 0; drop a dead link)")
        bit_s, hop_s = 1 / rate_bps, rtt_s + HOP_S
        overlay.add_edge(u, v, rate_bps=rate_bps, rtt_s=rtt_s, seconds_per_bit=bit_s, hop_s=hop_s)
    _check_connected(overlay)
    return overlay


def _measured(graph: nx.Graph, u: str, v: str, name: str, default: float) -> float:
    value = graph.edges[u, v].get(name)
    if value is None:
        return default
    if not (math.isfinite(value) and value >= 0):
        raise PlanInfeasible(f"link {u!r} - {v!r}: {name} {value} (expected finite and >= 0)")
    return float(value)


def _check_connected(overlay: nx.Graph) -> None:
    if not overlay:
        raise PlanInfeasible("overlay: no nodes (expected at least one)")
    first = next(iter(overlay))
    unreached = sorted(set(overlay) - nx.node_connected_component(overlay, first))
    if unreached:
        raise PlanInfeasible(f"overlay: no path from {first!r} to {unreached!r} (expected it connected)")


def _partitions(count: int) -> Iterator[list[int]]:
    """Every partition of `count` items, once: the part of each item, parts numbered by first use."""
    if count == 0:
        yield []
        return
    for part in _partitions(count - 1):
        for last in range(max(part, default=-1) + 2):
            yield [*part, last]


def _check_tree(label: str, tree: SpanningTree, graph: nx.Graph) -> None:
    if not (math.isfinite(tree.share) and tree.share > 0):
        raise PlanInfeasible(f"{label}: share {tree.share} (expected > 0)")
    if tree.root in tree.parent:
        raise PlanInfeasible(f"{label}: the root has a parent, {tree.parent[tree.root]!r}")
    nodes = {tree.root, *tree.parent}
    if nodes != set(graph):
        missing, unknown = sorted(set(graph) - nodes), sorted(nodes - set(graph))
        raise PlanInfeasible(f"{label}: misses {missing!r}, has {unknown!r} that the overlay has not")
    for child, parent in sorted(tree.parent.items()):
        if not graph.has_edge(child, parent):
            raise PlanInfeasible(f"{label}: no link {child!r} - {parent!r} in the overlay")
    _check_acyclic(label, tree)


def _check_acyclic(label: str, tree: SpanningTree) -> None:
    reaches_root = {tree.root}
    for node in sorted(tree.parent):
        walked = []
        while node not in reaches_root:
            if node in walked:
                raise PlanInfeasible(f"{label}: cycle through {node!r}")
            walked.append(node)
            node = tree.parent[node]
        reaches_root.update(walked)
