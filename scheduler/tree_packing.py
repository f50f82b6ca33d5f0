"""Spanning trees packed into an overlay, so that all of its links carry gradients at once.

How much each tree carries is a linear program: as much as possible in all, and over no link more than its rate,

    max sum_T x_T    with    sum of x_T over the trees with link e  <=  rate_e    for each link e.

Its optimum is `trees.packing_bound` (Nash-Williams, Tutte). There are too many trees to list; only some are put in.
First those that multiplicative weights lead to: each tree avoids the links that those before it have filled (Garg and
Koenemann, 2007). Then, while the program's prices say that another would help, that one (column generation).

Trees are grown with a price on depth, for a chunk travels the depth of its tree twice. What this costs of the optimum
is little (tests/unit/test_tree_packing.py).
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from .linear_program import most_carried
from .trees import SpanningTree

HOP_PRICE = 0.5
"""Of one more hop from the root, as a share of what a link costs on average.

Simulated all-reduces over random overlays are as fast with 0.5 to 2, within 1 %, and 1 % slower with 0, 4 % with 0.2
(tests/unit/test_chunk_order.py).
"""

WEIGHT_ROUNDS = 24
STEEPNESS = 8.0
"""How much a full link costs: exp of this, times an empty one."""

IMPROVEMENTS = 3
"""Rounds of column generation, at most; each is a linear program of 0.1 to 0.5 ms."""

FASTEST = 1e4
"""Beyond so many times the best tree's rate a link is as good as any; slow ones are not lost in rounding."""

MAX_TREES = 24
"""In one plan. Overlays of up to 16 nodes with three links each need fewer."""

LEAST_SHARE = 1 / 256
"""Of a tree: with less it would carry less than a chunk."""


@dataclass(frozen=True, slots=True)
class _Found:
    """A tree, as it was grown."""

    parent: dict[str, str]
    links: tuple[int, ...]


class _Packing:
    """Trees of one overlay, and what each of them carries."""

    def __init__(self, overlay: nx.Graph, roots: Sequence[str], best_bps: float) -> None:
        self.roots = roots
        self.ends = [(min(link), max(link)) for link in overlay.edges]
        rates_bps = np.array([overlay.edges[link]["rate_bps"] for link in self.ends])
        self.rates = np.minimum(rates_bps / best_bps, FASTEST)
        self.around: dict[str, list[tuple[str, int]]] = {node: [] for node in overlay}
        for index, (u, v) in enumerate(self.ends):
            self.around[u].append((v, index))
            self.around[v].append((u, index))
        self.found: dict[tuple[int, ...], _Found] = {}

    def spread(self) -> None:
        """Tree after tree, each over the links that those before it have loaded least."""
        load = np.zeros(len(self.ends))
        for _ in range(WEIGHT_ROUNDS):
            filled = load / self.rates
            prices = np.exp(STEEPNESS * filled / max(filled.max(), 1e-300)) / self.rates
            best = min(self._grown(prices), key=lambda tree: (prices[list(tree.links)].sum(), tree.links))
            self.found.setdefault(best.links, best)
            load[list(best.links)] += 1

    def solve(self) -> tuple[np.ndarray, np.ndarray]:
        """What each tree found so far carries, the best alone being 1; and what it costs to load each link more."""
        uses = np.zeros((len(self.ends), len(self.found)))
        for column, links in enumerate(self.found):
            uses[list(links), column] = 1
        return most_carried(uses, self.rates)

    def improve(self) -> None:
        """Add trees that the program lacks: those whose links cost less than they would bring."""
        for _ in range(IMPROVEMENTS):
            _, prices = self.solve()
            cheap = [tree for tree in self._grown(prices) if prices[list(tree.links)].sum() < 1 - 1e-9]
            new = {tree.links: tree for tree in cheap if tree.links not in self.found}
            if not new:
                return
            self.found |= new

    def trees(self) -> list[SpanningTree]:
        """The trees that carry most, each rooted at its centre."""
        carried, _ = self.solve()
        used = [
            tree
            for _, tree in sorted(zip(-carried, self.found.values(), strict=True), key=lambda pair: pair[0])
        ]
        enough = np.count_nonzero(carried >= LEAST_SHARE * carried.sum())
        self.found = {tree.links: tree for tree in used[: min(int(enough), MAX_TREES)]}
        carried, _ = self.solve()
        total = carried.sum()
        return [
            self._from_centre(tree, share / total)
            for tree, share in zip(self.found.values(), carried, strict=True)
            if share > 0
        ]

    def _grown(self, prices: np.ndarray) -> list[_Found]:
        """A cheap and shallow tree from each root."""
        hop = HOP_PRICE * float(prices.sum()) / len(self.ends)
        return [self._grow(root, prices.tolist(), hop) for root in self.roots]

    def _grow(self, root: str, prices: list[float], hop: float) -> _Found:
        """Between Prim's minimum spanning tree and Dijkstra's shortest paths (Alpert et al., 1995)."""
        parent, links, depth = dict[str, str](), list[int](), {root: 0}
        border = [(prices[index], node, root, index) for node, index in self.around[root]]
        heapq.heapify(border)
        while border:
            _, node, above, index = heapq.heappop(border)
            if node in depth:
                continue
            depth[node] = depth[above] + 1
            parent[node] = above
            links.append(index)
            for other, way in self.around[node]:
                if other not in depth:
                    heapq.heappush(border, (prices[way] + hop * depth[node], other, node, way))
        return _Found(parent, tuple(sorted(links)))

    def _from_centre(self, found: _Found, share: float) -> SpanningTree:
        """The tree rooted at the node from which its farthest leaf is nearest."""
        graph = nx.Graph(found.parent.items())
        root = min(nx.center(graph))
        return SpanningTree(root, {child: above for above, child in nx.bfs_edges(graph, root)}, float(share))


def pack(overlay: nx.Graph, roots: Sequence[str], best_bps: float) -> list[SpanningTree]:
    """Trees whose throughput is near the bound, the shallowest first.

    Args:
        overlay: As `trees.measured` returns it, with at least two nodes.
        roots: From which trees are grown; each tree is then turned to its own centre.
        best_bps: What one tree can carry alone.
    """
    packing = _Packing(overlay, roots, best_bps)
    packing.spread()
    packing.improve()
    return sorted(packing.trees(), key=lambda tree: (_depth(tree), -tree.share, tree.root))


def _depth(tree: SpanningTree) -> int:
    depths = {tree.root: 0}
    for child, above in tree.parent.items():  # Breadth first: a parent comes before its children.
        depths[child] = depths[above] + 1
    return max(depths.values())
