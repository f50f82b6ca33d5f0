"""How long the all-reduce over some trees takes, and how many of its chunks are best sent as one message. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

import networkx as nx
import numpy as np

from ..protocols.sums import chunk_trees
from .trees import SpanningTree, measured

MESSAGE_S = 5e-4
"""What one message costs a node's processor, besides its bytes: measured 0.1 to 0.6 ms."""

HARDLY_MORE = 1.02
"""Times the shortest time. Fewer messages leave more of the processor to training."""

MAX_BUNDLE_BYTES = 8 << 20
"""A larger message saves little, and what is sent is copied and freed as one."""


class SyncTime:
    """The time of sums over `trees` of `graph`. The trees share the messages by `chunk_trees`."""

    def __init__(self, trees: Sequence[SpanningTree], graph: nx.Graph) -> None:
        overlay = measured(graph)
        at = {frozenset(link): index for index, link in enumerate(overlay.edges)}
        self.trees = trees
        self.rates_bps = np.array([rate_bps for *_, rate_bps in overlay.edges(data="rate_bps")])
        self.uses = np.zeros((len(trees), len(at)))  # 1 where a tree has that link.
        for index, tree in enumerate(trees):
            self.uses[index, [at[frozenset(edge)] for edge in tree.parent.items()]] = 1
        self.paths = [_paths(tree, overlay) for tree in trees]

    def expected_s(self, result_bytes: int, messages: int) -> float:
        """Seconds to reduce and broadcast so many bytes in equal messages.

        The most loaded link works all the time. The last message still has to go up the slowest tree, and down again;
        its own time on the link is counted already.
        """
        bits = 8 * result_bytes
        counts = np.bincount(chunk_trees(messages, self.trees), minlength=len(self.trees))
        busy_s = bits * float((counts / messages @ self.uses / self.rates_bps).max(initial=0.0))
        used = (path for path, count in zip(self.paths, counts, strict=True) if count)
        last_s = max(float((each_s * bits / messages + hops_s).max()) for each_s, hops_s in used)
        return busy_s * (1 - 1 / messages) + 2 * last_s + messages * MESSAGE_S

    def best_bundle(self, result_bytes: int, chunks: int) -> tuple[float, int]:
        """How many chunks to send as one message: the most that take hardly longer than the best number.

        Returns: (seconds that are expected then, how many chunks).
        """
        most = max(chunks * MAX_BUNDLE_BYTES // max(result_bytes, 1), 1)
        rounds = (1 << doubled for doubled in range(chunks.bit_length() + 1))
        sizes = {min(math.ceil(chunks / (len(self.trees) * each)), most) for each in rounds}
        expected = {size: self.expected_s(result_bytes, math.ceil(chunks / size)) for size in sizes}
        size = max(size for size in sizes if expected[size] <= HARDLY_MORE * min(expected.values()))
        return expected[size], size


def _paths(tree: SpanningTree, overlay: nx.Graph) -> tuple[np.ndarray, np.ndarray]:
    """From each node to the root: seconds for a bit, and for the hops."""
    paths = {tree.root: (0.0, 0.0)}
    for node in tree.parent:
        way = []
        while node not in paths:
            way.append(node)
            node = tree.parent[node]
        for child in reversed(way):
            link, (bit_s, hops_s) = overlay.edges[child, tree.parent[child]], paths[tree.parent[child]]
            paths[child] = bit_s + link["seconds_per_bit"], hops_s + link["hop_s"] / 2
    both = np.array(list(paths.values()))
    return both[:, 0], both[:, 1]
