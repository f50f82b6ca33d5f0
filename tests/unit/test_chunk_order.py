"""In which order chunks go over links, and in how many: an all-reduce over packed trees, link by link, simulated.

What the links of real processes show is `chaosnet bench overlay`'s to say; run with -s for the figures.
"""

import heapq
import itertools
import statistics
import sys
from functools import partial

import pytest

from chaosnet.benchmarks.overlay import measured, scaled
from chaosnet.netem.topology import random_overlay
from chaosnet.node.sums.lanes import chunk_bytes_of
from chaosnet.protocols.sums import chunk_trees
from chaosnet.scheduler import tree_packing
from chaosnet.scheduler.sync_plan import bundle, packed
from chaosnet.scheduler.trees import packing_bound

RESULT_BYTES = 20_000_000
HOP_S = 0.001
# What nothing can overtake: of chunks, in libzmq; of bytes, in the kernel; of time, in the testbed's queue.
CHUNKS_AHEAD, BYTES_AHEAD, SECONDS_AHEAD = 2, 64 << 10, 0.02


class Flow:
    """Chunks on their way up and down trees, over links that send one after the other."""

    def __init__(self, graph, trees, chunks, turn_of, result_bytes=None):
        self.trees, self.turn_of, self.rate_bps = trees, turn_of, {}
        for u, v, rate_bps in graph.edges(data="rate_bps"):
            self.rate_bps[u, v] = self.rate_bps[v, u] = rate_bps
        self.bits = 8 * (result_bytes or RESULT_BYTES) / chunks
        self.below = [{} for _ in trees]
        for below, tree in zip(self.below, trees, strict=True):
            for child, parent in tree.parent.items():
                below.setdefault(parent, []).append(child)
        self.tree_of = chunk_trees(chunks, tuple(trees))
        self.queues, self.free_s, self.looks_s, self.events = {}, {}, {}, []
        self.count, self.last_s = itertools.count(), 0.0
        self.missing = {
            (node, chunk): len(self.below[tree].get(node, ()))
            for chunk, tree in enumerate(self.tree_of) for node in graph
        }  # fmt: skip

    def took_s(self):
        """Until the last node has the last result. All parts are there at the beginning."""
        for node, chunk in [place for place, missing in self.missing.items() if not missing]:
            self.whole(0.0, node, chunk)
        while self.events:
            now_s, _, act = heapq.heappop(self.events)
            act(now_s)
        return self.last_s

    def later(self, at_s, act):
        heapq.heappush(self.events, (at_s, next(self.count), act))

    def arrives(self, node, chunk, is_part, now_s):
        self.last_s = now_s
        if not is_part:
            self.down(now_s, node, chunk)
            return
        self.missing[node, chunk] -= 1
        if not self.missing[node, chunk]:
            self.whole(now_s, node, chunk)

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
        entry = (self.turn_of(chunk, is_part), next(self.count), chunk, is_part)
        heapq.heappush(self.queues.setdefault((node, peer), []), entry)
        self.pump((node, peer), now_s)

    def pump(self, link, now_s):
        """Give a link as much as may be ahead, and look again when there is room for more."""
        chunk_s, queue = self.bits / self.rate_bps[link], self.queues[link]
        ahead_s = SECONDS_AHEAD + 8 * BYTES_AHEAD / self.rate_bps[link] + CHUNKS_AHEAD * chunk_s
        while queue and self.free_s.get(link, 0.0) < now_s + ahead_s:
            *_, chunk, is_part = heapq.heappop(queue)
            self.free_s[link] = max(now_s, self.free_s.get(link, 0.0)) + chunk_s
            self.later(self.free_s[link] + HOP_S, partial(self.arrives, link[1], chunk, is_part))
        if queue and self.looks_s.get(link, 0.0) <= now_s:
            self.looks_s[link] = self.free_s[link] - ahead_s + 1e-9
            self.later(self.looks_s[link], partial(self.pump, link))


def shares(chunks, turn_of=lambda chunk, is_part: chunk, scale=0.25, result_bytes=RESULT_BYTES):
    """Throughput in the ten overlays of `bench overlay --random 10`, as shares of what no trees can beat.

    `chunks`: None for as many messages as the scheduler chooses.
    """
    found = []
    for seed in range(10):
        graph = measured(scaled(random_overlay(8, seed), scale))
        small = -(-result_bytes // chunk_bytes_of(result_bytes))
        graph.graph["result"] = result_bytes, chunks or small
        trees = packed(graph)
        messages = chunks or -(-small // bundle(trees, graph))
        took_s = Flow(graph, trees, messages, turn_of, result_bytes).took_s()
        found.append(8 * result_bytes / packing_bound(graph) / took_s)
    return found


def reached(*args, **options):
    return statistics.median(shares(*args, **options))


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
    found = [reached(chunks) for chunks in (10, 64, 128)]
    assert found == sorted(found)
    assert found[0] < 0.75 * found[1]


def test_what_nothing_can_overtake_costs_throughput(monkeypatch):
    found = {}
    for ahead in (0, 2, 5, 12):
        monkeypatch.setattr(sys.modules[__name__], "CHUNKS_AHEAD", ahead)
        found[ahead] = reached(256)
    print({ahead: round(share, 3) for ahead, share in found.items()})
    assert found[0] > found[2] > found[5] > found[12]


@pytest.mark.parametrize("megabytes", [20, 100])
def test_the_scheduler_chooses_enough_messages(megabytes):
    found = {
        messages: shares(messages, result_bytes=megabytes * 10**6) for messages in (None, 64, 128, 256, 512)
    }
    for messages, each in found.items():
        print(megabytes, messages or "chosen", f"{statistics.median(each):.3f}, {min(each):.3f}")
    best = max(statistics.median(each) for each in found.values())
    assert statistics.median(found[None]) > 0.9 * best  # Here messages cost nothing.


def test_a_hop_has_a_price_that_suits(monkeypatch):
    found = {}
    for price in (0.0, 0.2, tree_packing.HOP_PRICE, 1.0, 2.0):
        monkeypatch.setattr(tree_packing, "HOP_PRICE", price)
        found[price] = reached(64)
    print({price: round(share, 3) for price, share in found.items()})
    assert max(found, key=found.__getitem__) not in (0.0, 2.0)
