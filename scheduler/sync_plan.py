"""Over which trees gradients are reduced and broadcast: the model synchronization policy (paper, Sec. IV-B).

Spanning trees come from networkx; shortest paths are searched in arrays, which takes half a millisecond from one
of 1,000 nodes, a twentieth of what networkx takes (more where paths are long: 13 ms in a ring of 1,000). Answers
do not depend on the order in which nodes and links were added.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence

import networkx as nx
import numpy as np

from ..protocols.errors import ConfigError, PlanInfeasible
from .sync_time import SyncTime
from .tree_packing import pack
from .trees import MAX_TREES, SpanningTree, measured, throughput_bps, validate

SyncPolicy = Callable[[nx.Graph], list[SpanningTree]]
Bundler = Callable[[Sequence[SpanningTree], nx.Graph], int]

MAX_PACKED_NODES, MAX_PACKED_LINKS = 64, 160
"""Packing takes 3 to 15 ms for 8 nodes, and up to 40 for as much as this; beyond, "packed" is "fapt"."""

PACKED_ROOTS = 4
"""Nodes from which trees to pack are grown; each tree is turned to its own centre then."""

SLOW = 4
"""Links so many times slower than those of the best tree add little, and a chunk takes long over them.

So a plan without them is tried, too.
"""

FAPT_ROOTS = 4
"""Roots of the "fapt" policy, unless the overlay has fewer nodes.

Random overlays of 6 and 8 nodes, median throughput over `packing_bound`: 0.36-0.52 with one root, 0.47-0.63
with two, 0.54-0.67 with three, 0.57-0.68 with five; each further root is one more stream of chunks.
"""

MAX_SEARCHES = 32
"""Roots from which shortest paths are searched for one plan.

Enough for an overlay of as many nodes to be looked through; beyond, a root that was not looked at has a path at
least as slow as the bounds say that led elsewhere. Overlays of 100 to 1,000 nodes, rates from 10 to 1,000 Mbit/s:
the slowest path of the four roots chosen was that of the four best of all (tests/unit/test_sync_plan.py).
"""

KEEP_ROOTS = 1.1
"""A root of the plan before stays if its slowest path is at most this many times as slow as that of the best.

Another root is another tree for everybody; that of the same root differs where the overlay does.
"""

MAX_RING_STEPS = 1_000
"""Nodes tried in one search for a Hamiltonian cycle before we say that there is none."""


def best_single_tree(graph: nx.Graph) -> list[SpanningTree]:
    """One tree whose slowest link is as fast as any spanning tree's, and of these the least deep.

    The bottleneck is that of a maximum spanning tree. Of the links that are no slower, the root is the
    centre and the tree that of its shortest paths by round-trip time: a chunk waits for the deepest leaf
    on its way up and again on its way down.
    Raises: PlanInfeasible if the overlay is empty or not connected, or a measurement is out of range.
    """
    overlay = measured(graph)
    links = nx.maximum_spanning_edges(overlay, weight="rate_bps")
    bottleneck_bps = min((data["rate_bps"] for *_, data in links), default=0.0)
    fast = _Paths(_links_from(overlay, bottleneck_bps), "hop_s")
    return [fast.tree(root, 1.0) for root in fast.centres(1)]


def ring(graph: nx.Graph) -> list[SpanningTree]:
    """As ring all-reduce: N paths along one Hamiltonian cycle, one ending at each node, of share 1/N.

    Each link of the cycle carries (N - 1)/N of the gradient in each direction. Of the cycles found, the one
    whose slowest link is fastest. One or two nodes count as a ring.
    Raises: PlanInfeasible above `MAX_TREES` nodes, if `MAX_RING_STEPS` find no cycle, or as `best_single_tree`.
    """
    if len(graph) > MAX_TREES:
        raise PlanInfeasible(f"ring: {len(graph)} nodes (expected at most {MAX_TREES}: one tree each)")
    cycle = _fastest_cycle(measured(graph))
    return [_path(cycle[at:] + cycle[:at], 1 / len(cycle)) for at in range(len(cycle))]


def fapt(graph: nx.Graph, roots: int = FAPT_ROOTS) -> list[SpanningTree]:
    """NetStorm's R-rooted FAPT: trees of fastest paths from `roots` roots, the gradient shared equally.

    The length of a link is the time of one bit, 1 / rate. Per root the tree of shortest paths; the R roots
    whose slowest leaf path is fastest, ties by name. `graph.graph["roots"]` may name those of the plan before:
    they stay first choice while they are nearly as good (`KEEP_ROOTS`).
    Args:
        roots: R, >= 1; an overlay with fewer nodes has one tree per node.
    Raises: ConfigError for no roots, PlanInfeasible as `best_single_tree`.
    """
    if roots < 1:
        raise ConfigError(f"roots: {roots} (expected >= 1)")
    paths = _Paths(measured(graph), "seconds_per_bit")
    chosen = paths.centres(roots, graph.graph.get("roots", ()))
    return [paths.tree(root, 1 / len(chosen)) for root in chosen]


def packed(graph: nx.Graph) -> list[SpanningTree]:
    """Trees packed so that all links carry what they can (tree_packing.py), or one tree where that takes no longer.

    `graph.graph["result"]` may tell the bytes that are summed in a step, and in how many chunks: with little to sum
    the depth of a tree is what counts. Overlays beyond the sizes above take what `fapt` plans.
    Raises: PlanInfeasible as `best_single_tree`.
    """
    overlay, single = measured(graph), best_single_tree(graph)
    if len(overlay) > MAX_PACKED_NODES or overlay.number_of_edges() > MAX_PACKED_LINKS:
        return fapt(graph)
    if len(overlay) == 2:
        return _both_ways(*overlay)
    if overlay.number_of_edges() < len(overlay):
        return single  # There is no other tree.
    best_bps = throughput_bps(single, overlay)
    plans = [single, _packed(overlay, best_bps)]
    swift = _links_from(overlay, best_bps / SLOW)
    if overlay.number_of_edges() > swift.number_of_edges() >= len(swift):
        plans.append(_packed(swift, best_bps))
    plans = [trees for trees in plans if trees]  # None, if all links but the slowest carry next to nothing.
    result_bytes, chunks = graph.graph.get("result", (0, 1))
    if not result_bytes:
        return max(plans, key=lambda trees: throughput_bps(trees, overlay))
    return min(plans, key=lambda trees: SyncTime(trees, overlay).best_bundle(result_bytes, chunks)[0])


def bundle(trees: Sequence[SpanningTree], graph: nx.Graph) -> int:
    """How many neighbouring chunks are to travel as one message, by `graph.graph["result"]` as of `packed`."""
    result_bytes, chunks = graph.graph.get("result", (0, 1))
    if not result_bytes or len(graph) < 2:
        return 1
    return SyncTime(trees, graph).best_bundle(result_bytes, chunks)[1]


def _both_ways(a: str, b: str) -> list[SpanningTree]:
    """The two trees of two nodes, one rooted at each: both directions of the link are busy from the start."""
    return [SpanningTree(a, {b: a}, 0.5), SpanningTree(b, {a: b}, 0.5)]


def _packed(overlay: nx.Graph, best_bps: float) -> list[SpanningTree]:
    return pack(overlay, _Paths(overlay, "seconds_per_bit").centres(PACKED_ROOTS), best_bps)


def custom(plan_trees: Callable[[nx.Graph], Iterable[SpanningTree]]) -> SyncPolicy:
    """A policy of the user's own: what `plan_trees` returns, once it has passed `validate`.

    Whatever it raises is PlanInfeasible: an error in it must not end the node that schedules, and then the next one.
    """

    def checked(graph: nx.Graph) -> list[SpanningTree]:
        try:
            trees = list(plan_trees(graph))
            validate(trees, graph)
        except PlanInfeasible:
            raise
        except Exception as error:
            raise PlanInfeasible(f"the callable raises {type(error).__name__}: {error}") from error
        return trees

    return checked


POLICIES: dict[str, SyncPolicy] = {"single": best_single_tree, "ring": ring, "fapt": fapt, "packed": packed}
"""Policies by the name that a user gives."""


def attach_leaf(trees: Sequence[SpanningTree], leaf: str, neighbours: Iterable[str]) -> list[SpanningTree]:
    """`trees` with an observer hung under one of its neighbours in each: it hears every broadcast.

    Each tree takes the neighbour that carries least for `leaf` so far, ties by name, so the neighbours
    share the extra sending. Neighbours that are not in a tree are passed over.
    Raises: PlanInfeasible if a tree holds none of `neighbours`, or holds `leaf` already.
    """
    share_by_neighbour = dict.fromkeys(sorted(neighbours), 0.0)
    grown = []
    for index, tree in enumerate(trees):
        nodes = {tree.root, *tree.parent}
        if leaf in nodes:
            raise PlanInfeasible(f"tree {index}, root {tree.root!r}: {leaf!r} is in it already")
        candidates = [node for node in share_by_neighbour if node in nodes]
        if not candidates:
            raise PlanInfeasible(
                f"tree {index}, root {tree.root!r}: no neighbour of {leaf!r} in it"
                f" (got {list(share_by_neighbour)!r})"
            )
        via = min(candidates, key=lambda node: (share_by_neighbour[node], node))
        share_by_neighbour[via] += tree.share
        grown.append(tree._replace(parent={**tree.parent, leaf: via}))
    return grown


def _links_from(overlay: nx.Graph, rate_bps: float) -> nx.Graph:
    """The overlay's nodes with those of its links that are no slower than `rate_bps`."""
    fast = nx.Graph()
    fast.add_nodes_from(overlay)
    fast.add_edges_from(each for each in overlay.edges(data=True) if each[2]["rate_bps"] >= rate_bps)
    return fast


class _Paths:
    """Shortest paths in an overlay with links of length > 0."""

    def __init__(self, overlay: nx.Graph, length: str) -> None:
        self.nodes = list(overlay)
        at = {node: index for index, node in enumerate(self.nodes)}
        ends = [(at[u], at[v]) for u, v in overlay.edges]
        both = np.array(ends + [(v, u) for u, v in ends], dtype=np.int32).reshape(-1, 2)
        lengths = [length_of for *_, length_of in overlay.edges(data=length)]
        by_child = np.lexsort(both.T)
        self.ends = both[by_child]
        self.lengths = np.array(2 * lengths, dtype=float)[by_child]
        self.first = np.unique(self.ends[:, 1], return_index=True)[1]
        self.found: dict[int, np.ndarray] = {}

    def distances(self, root: int) -> np.ndarray:
        """From one node to each: over one link, then over one more, until nothing changes (Bellman, Ford)."""
        if root not in self.found:
            before, distances = np.empty(0), np.full(len(self.nodes), np.inf)
            distances[root] = 0.0
            while len(self.first) and not np.array_equal(before, distances):
                before = distances
                distances = np.minimum.reduceat(before[self.ends[:, 0]] + self.lengths, self.first)
                distances[root] = 0.0
            self.found[root] = distances
        return self.found[root]

    def centres(self, count: int, before: Sequence[str] = ()) -> list[str]:
        """The `count` nodes whose longest shortest path is shortest, ties by name; those of `before` if near that.

        A node's longest path is no shorter than its path to any node whose distances are known. So the search
        goes on from where this bound is least, and from what is farthest from there, until no bound is below
        the best found (Takes and Kosters, 2011), or `MAX_SEARCHES` have been made.
        """
        at_least = np.zeros(len(self.nodes))
        longest: dict[int, float] = {}

        def look(root: int) -> int:
            """At the paths of one root. Returns: the node that is farthest from it."""
            distances = self.distances(root)
            longest[root] = float(distances.max())
            # They sum up otherwise from the other end.
            np.maximum(at_least, distances * (1 - 1e-12), out=at_least)
            at_least[root] = np.inf
            return int(distances.argmax())

        kept = [index for index, node in enumerate(self.nodes) if node in set(before)]
        for root in kept:
            look(root)
        while len(longest) < min(len(self.nodes), MAX_SEARCHES):
            ranked = sorted(longest.values())
            root = int(at_least.argmin())
            if len(ranked) >= count and at_least[root] > ranked[count - 1]:
                break
            farthest = look(root)
            if farthest not in longest:
                look(farthest)
        best = sorted(longest, key=lambda root: (longest[root], root))
        limit = KEEP_ROOTS * longest[best[:count][-1]]
        stay = [root for root in best if root in kept and longest[root] <= limit][:count]
        return [self.nodes[root] for root in (stay + [root for root in best if root not in stay])[:count]]

    def tree(self, root: str, share: float) -> SpanningTree:
        """The shortest paths from `root`. A node with several parents on such takes the one that sorts first."""
        distances = self.distances(self.nodes.index(root))
        parents, children = self.ends.T
        order = np.lexsort((parents, distances[parents] + self.lengths, children))
        nodes, first = np.unique(children[order], return_index=True)
        parent = {
            self.nodes[child]: self.nodes[parents[order[at]]]
            for child, at in zip(nodes.tolist(), first.tolist(), strict=True)
            if self.nodes[child] != root
        }
        return SpanningTree(root, parent, share)


def _path(nodes: list[str], share: float) -> SpanningTree:
    """The path through `nodes`, rooted at the first."""
    return SpanningTree(nodes[0], dict(zip(nodes[1:], nodes, strict=False)), share)


def _fastest_cycle(overlay: nx.Graph) -> list[str]:
    """A Hamiltonian cycle; its slowest link is as fast as bisection over the link rates finds."""
    rates_bps = sorted({rate_bps for _, _, rate_bps in overlay.edges(data="rate_bps")}) or [0.0]
    best = _hamiltonian_cycle(overlay)
    if best is None:
        raise PlanInfeasible(
            f"ring: no Hamiltonian cycle over {list(overlay)!r} found in {MAX_RING_STEPS} steps"
        )
    low, high = 0, len(rates_bps) - 1
    while low < high:
        middle = (low + high + 1) // 2
        cycle = _hamiltonian_cycle(_links_from(overlay, rates_bps[middle]))
        if cycle is None:
            high = middle - 1
        else:
            best, low = cycle, middle
    return best


def _hamiltonian_cycle(overlay: nx.Graph) -> list[str] | None:
    """Depth first, nodes with the fewest ways on first; None if not found in `MAX_RING_STEPS`."""
    if len(overlay) <= 2:
        return list(overlay)  # One link at most; `measured` has seen that it is there.
    if not nx.is_biconnected(overlay):
        return None  # Some node is the only way between two others; saves most of the hopeless searches.
    start = next(iter(overlay))
    path = [start]
    untried = [_ways_on(overlay, path)]
    for _ in range(MAX_RING_STEPS):
        node = next(untried[-1], None)
        if node is None:
            untried.pop()
            path.pop()
            if not path:
                return None
            continue
        path.append(node)
        if len(path) == len(overlay) and overlay.has_edge(node, start):
            return path
        untried.append(_ways_on(overlay, path))
    return None


def _ways_on(overlay: nx.Graph, path: list[str]) -> Iterator[str]:
    visited = set(path)
    unvisited = [node for node in overlay[path[-1]] if node not in visited]
    ways_by_node = {node: sum(1 for after in overlay[node] if after not in visited) for node in unvisited}
    return iter(sorted(unvisited, key=lambda node: (ways_by_node[node], node)))
