"""In which order chunks go over links, and in how many: an all-reduce over packed trees, link by link, simulated.

What the links of real processes show is `chaosnet bench overlay`'s to say; run with -s for the figures.
"""

import heapq
import statistics
import sys

import pytest
from test_tree_packing import random_overlay

from chaosnet.protocols.sums import chunk_trees
from chaosnet.scheduler import tree_packing
from chaosnet.scheduler.sync_plan import packed
from chaosnet.scheduler.trees import packing_bound

RESULT_BYTES = 20_000_000
AHEAD = 2  # Chunks of a link that nothing can overtake.
HOP_S = 0.001


class Flow:
    """Chunks on their way up and down trees, over links that send one after the other."""

    def __init__(self, graph, trees, chunks, turn_of):
        self.trees, self.turn_of = trees, turn_of
        self.seconds = {
            link: 8 * RESULT_BYTES / chunks / graph.edges[link]["rate_bps"] for link in graph.edges
        }
        self.below = [{} for _ in trees]
        for below, tree in zip(self.below, trees, strict=True):
            for child, parent in tree.parent.items():
                below.setdefault(parent, []).append(child)
        self.tree_of = chunk_trees(chunks, tuple(trees))
        self.queues, self.given, self.free_s, self.events, self.count = {}, {}, {}, [], 0
        self.missing = {
            (node, chunk): len(self.below[tree].get(node, ()))
            for chunk, tree in enumerate(self.tree_of) for node in graph
        }  # fmt: skip

    def took_s(self):
        """Until the last node has the last result. All parts are there at the beginning."""
        for node, chunk in [place for place, missing in self.missing.items() if not missing]:
            self.whole(0.0, node, chunk)
        now_s = 0.0
        while self.events:
            now_s, _, node, chunk, is_part, link = heapq.heappop(self.events)
            self.given[link] -= 1
            if is_part:
                self.missing[node, chunk] -= 1
                if not self.missing[node, chunk]:
                    self.whole(now_s, node, chunk)
            else:
                self.down(now_s, node, chunk)
            self.pump(now_s, link)
        return now_s

    def whole(self, now_s, node, chunk):
        tree = self.trees[self.tree_of[chunk]]
        if node == tree.root:
            self.down(now_s, node, chunk)
        else:
            self.send(now_s, node, tree.parent[node], chunk, True)

    def down(self, now_s, node, chunk):
        for child in self.below[self.tree_of[chunk]].get(node, ()):
            self.send(now_s, node, child, chunk, False)

    def send(self, now_s, node, peer, chunk, is_part):
        self.count += 1
        entry = (self.turn_of(chunk, is_part), self.count, chunk, is_part)
        heapq.heappush(self.queues.setdefault((node, peer), []), entry)
        self.pump(now_s, (node, peer))

    def pump(self, now_s, link):
        while self.queues.get(link) and self.given.get(link, 0) < AHEAD:
            *_, chunk, is_part = heapq.heappop(self.queues[link])
            seconds = self.seconds.get(link) or self.seconds[link[::-1]]
            self.free_s[link] = max(now_s, self.free_s.get(link, 0.0)) + seconds
            self.given[link] = self.given.get(link, 0) + 1
            self.count += 1
            event = (self.free_s[link] + HOP_S, self.count, link[1], chunk, is_part, link)
            heapq.heappush(self.events, event)


def reached(chunks, turn_of=lambda chunk, is_part: chunk):
    """Throughput of ten overlays of eight nodes, as a share of what no trees can beat; the median."""
    shares = []
    for seed in range(10):
        graph = random_overlay(seed, 8, 5)
        graph.graph["result"] = RESULT_BYTES, chunks
        took_s = Flow(graph, packed(graph), chunks, turn_of).took_s()
        shares.append(8 * RESULT_BYTES / packing_bound(graph) / took_s)
    return statistics.median(shares)


ORDERS = {
    "as they come": lambda chunk, is_part: 0,
    "results first": lambda chunk, is_part: is_part,
    "earlier chunks first": lambda chunk, is_part: chunk,
}


@pytest.mark.parametrize("chunks", [10, 64, 128])
def test_a_link_that_sends_earlier_chunks_first_is_used_best(chunks):
    found = {name: reached(chunks, turn_of) for name, turn_of in ORDERS.items()}
    print(chunks, {name: round(share, 2) for name, share in found.items()})
    assert found["earlier chunks first"] >= max(found.values()) - 0.01
    if chunks >= 64:
        assert found["earlier chunks first"] > 1.1 * found["as they come"]


def test_few_chunks_leave_links_idle():
    shares = [reached(chunks) for chunks in (10, 64, 128)]
    assert shares == sorted(shares)
    assert shares[0] < 0.75 * shares[1]


def test_what_nothing_can_overtake_costs_throughput(monkeypatch):
    found = {}
    for ahead in (2, 5, 12):
        monkeypatch.setattr(sys.modules[__name__], "AHEAD", ahead)
        found[ahead] = reached(256)
    print({ahead: round(share, 3) for ahead, share in found.items()})
    assert found[2] > found[5] > found[12]


def test_a_hop_has_a_price_that_suits(monkeypatch):
    found = {}
    for price in (0.0, 0.2, tree_packing.HOP_PRICE, 1.0, 2.0):
        monkeypatch.setattr(tree_packing, "HOP_PRICE", price)
        found[price] = reached(64)
    print({price: round(share, 3) for price, share in found.items()})
    assert max(found, key=found.__getitem__) not in (0.0, 2.0)
