"""The part of a step that crosses links, computed alike by all members: tensors between stages, sums of gradients.

    parameters go from those who keep them to others who compute with them when a step begins (keeping.py)
    transfer   a tensor takes, hop by hop, the delay of the link and its bytes at the link's rate; sends run beside
               computing (program.py), so only who waits for a tensor loses time
    sums       the chunks of a layer leave when its last backward is over everywhere. From there on all trees
               together take as long as the link that carries most for its rate; what was ready before has gone
               already, and the last message goes up the deepest tree and down again

All are whole microseconds, as in running.py. Not modelled: tensors and sums that share a link, and what a node's
processor does for a message. That is measured, as what a step takes beyond all this (chaosnet/engines/step_costs.py).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .keeping import Move

Pair = tuple[str, str]


@dataclass(frozen=True)
class Traffic:
    """Bytes of a step, and the links that they go over.

    Attributes:
        out_bytes: By layer, what it gives to the next for one micro-batch; the gradient that comes back is
            as large, or less. () if nobody has measured that.
        sums: The layers that have a part in it, and the bytes of what is summed, for all groups of parameters.
        rates_mbit: From the first to the second, > 0. A link without one is as links usually are.
        delays_us: One way.
        links: Between members.
        trees: Children and their parents, and the tree's share of the sums.
        message_bytes: Of sums, that travel as one.
    """

    out_bytes: tuple[int, ...] = ()
    sums: tuple[tuple[tuple[int, ...], int], ...] = ()
    rates_mbit: Mapping[Pair, int] = field(default_factory=dict)
    delays_us: Mapping[Pair, int] = field(default_factory=dict)
    links: tuple[Pair, ...] = ()
    trees: tuple[tuple[tuple[Pair, ...], float], ...] = ()
    message_bytes: int = 0

    @functools.cached_property
    def _usual_mbit(self) -> int:
        """0: nothing is known of any link, so nothing takes time on one."""
        return statistics.median_low(self.rates_mbit.values()) if self.rates_mbit else 0

    @functools.cached_property
    def _usual_us(self) -> int:
        return statistics.median_low(self.delays_us.values()) if self.delays_us else 0

    def _us_of_byte(self, pair: Pair) -> float:
        mbit = self.rates_mbit.get(pair, self._usual_mbit)
        return 8 / mbit if mbit else 0.0

    # --- tensors ---

    def transfer_us(self, source: str, to: str, boundary: int) -> int:
        """Of one micro-batch's tensor that enters layer `boundary`, or its gradient, between two members."""
        if source == to or not self.out_bytes:
            return 0
        byte_us, delay_us = self.way_us(source, to)
        return delay_us + round(self.out_bytes[boundary - 1] * byte_us)

    def rate_mbit(self, source: str, to: str) -> int:
        """Of the way from one to the other; 1 if nothing is known of any link."""
        byte_us, _ = self.way_us(source, to)
        return max(round(8 / byte_us), 1) if byte_us else 1

    @functools.cached_property
    def _ways(self) -> dict[Pair, tuple[float, int]]:
        return {}

    def way_us(self, source: str, to: str) -> tuple[float, int]:
        """Microseconds of a byte, and of the hops, on a shortest way (protocols/courier.py)."""
        if (source, to) not in self._ways:
            before = {source: source}
            edge = [source]
            while edge and to not in before:
                fresh = {
                    peer: node for node in edge for peer in self._around.get(node, ()) if peer not in before
                }
                before |= fresh
                edge = sorted(fresh)
            way = [to]
            while way[-1] != source and to in before:
                way.append(before[way[-1]])
            hops = [(a, b) for b, a in pairwise(way)] or [(source, to)]
            self._ways[source, to] = (
                sum(map(self._us_of_byte, hops)),
                sum(self.delays_us.get(hop, self._usual_us) for hop in hops),
            )
        return self._ways[source, to]

    @functools.cached_property
    def _around(self) -> dict[str, list[str]]:
        around: dict[str, list[str]] = {}
        for a, b in self.links:
            around.setdefault(a, []).append(b)
            around.setdefault(b, []).append(a)
        return around

    # --- parameters ---

    def came_us(
        self, moves: Iterable[Move], sizes: Sequence[int], known: Sequence[int] = ()
    ) -> dict[tuple[str, int], int]:
        """When who lacks a group of parameters has it, by member and group; all are sent when the step begins.

        `sizes`: of the groups, in bytes; `known`: of what the optimizer knows of them, which moves as well where all
        of the state does. What goes between two members goes one by one.
        """
        sent_us: dict[Pair, int] = {}
        came_us: dict[tuple[str, int], int] = {}
        for each in moves:
            weights, size = sum(weight for _, weight in each.sources), sizes[each.group]
            if each.whole and known:
                size += known[each.group]
            for source, weight in each.sources:
                pair = source, each.target
                byte_us, delay_us = self.way_us(*pair)
                sent_us[pair] = sent_us.get(pair, 0) + round(size * weight / weights * byte_us)
                at = each.target, each.group
                came_us[at] = max(came_us.get(at, 0), sent_us[pair] + delay_us)
        return came_us

    # --- sums ---

    def summed_us(self, over_us: Sequence[float], keepers: Sequence[Collection[str]] = ()) -> int:
        """When all results are everywhere, since the step began. 0 without trees, or with nothing to sum.

        Args:
            over_us: By layer, when its last backward is over on all members.
            keepers: Of each of `sums`, those who get the result; () if all get all.
        """
        if not self.sums:
            return 0
        who = [frozenset(names) for names in keepers] if keepers else [None] * len(self.sums)
        parts = sorted(
            (max(over_us[layer] for layer in users), size, self._byte_us(each))
            for (users, size), each in zip(self.sums, who, strict=True)
            if size
        )
        if not parts or not max(byte_us for _, _, byte_us in parts):
            return 0
        now_us = 0.0
        for ready, size, byte_us in parts:
            now_us = max(now_us, ready) + size * byte_us
        return round(now_us + self._last_us - self._message_bytes * parts[-1][2])

    @functools.cached_property
    def _carrying_us(self) -> dict[frozenset[str] | None, float]:
        return {}

    def _byte_us(self, keepers: frozenset[str] | None) -> float:
        """What the slowest link takes for a byte: parts go up all trees, and results down to these, or to all."""
        if keepers in self._carrying_us:
            return self._carrying_us[keepers]
        carried: dict[Pair, float] = {}
        for edges, share in self.trees:
            parents = dict(edges)
            down = {node for each in keepers or () for node in _up_from(each, parents)}
            for child, parent in edges:
                carried[child, parent] = carried.get((child, parent), 0.0) + share
                if keepers is None or child in down:
                    carried[parent, child] = carried.get((parent, child), 0.0) + share
        most_us = max((share * self._us_of_byte(pair) for pair, share in carried.items()), default=0.0)
        self._carrying_us[keepers] = most_us
        return most_us

    @functools.cached_property
    def _message_bytes(self) -> int:
        """Of the last message: it has nothing of two groups."""
        return min(self.message_bytes, max((size for _, size in self.sums), default=0))

    @functools.cached_property
    def _last_us(self) -> float:
        """Of the last message, up and down."""
        return max((self._deepest_us(dict(edges)) for edges, _ in self.trees), default=0.0)

    def _deepest_us(self, parents: Mapping[str, str]) -> float:
        up_and_down_us: dict[str, float] = {}
        for node in parents:
            way = []
            while node in parents and node not in up_and_down_us:
                way.append(node)
                node = parents[node]
            for child in reversed(way):
                pairs = (child, parents[child]), (parents[child], child)
                hop_us = sum(
                    self.delays_us.get(pair, self._usual_us) + self._message_bytes * self._us_of_byte(pair)
                    for pair in pairs
                )
                up_and_down_us[child] = up_and_down_us.get(parents[child], 0.0) + hop_us
        return max(up_and_down_us.values(), default=0.0)


def _up_from(node: str, parents: Mapping[str, str]) -> list[str]:
    """It, and all above it in a tree but the root."""
    way = []
    while node in parents:
        way.append(node)
        node = parents[node]
    return way


NO_TRAFFIC = Traffic()

# --- who is next to whom ---

MOST_TRIES = 1000  # Places that are looked at for a better one: some milliseconds.


def order_by_links(order: Sequence[str], lengths: Sequence[int], traffic: Traffic) -> tuple[str, ...]:
    """Members in another order, so that tensors between neighbours in pipelines of these lengths take less time.

    Two members change places as long as that makes the worst hop better, or with the same worst one all together.
    As one of the worst hop's ends must move, only these are tried. Who is left over at the end has no pipeline, and
    can be taken in.
    """
    if not traffic.out_bytes or max(lengths, default=1) < 2:
        return tuple(order)
    found, typical = [*order], max(traffic.out_bytes)
    starts, at = [], 0
    for length in lengths:
        starts += [at + place for place in range(length - 1)]
        at += length

    def hop_us(place: int) -> float:
        byte_us, delay_us = traffic.way_us(found[place], found[place + 1])
        back_us, back_delay_us = traffic.way_us(found[place + 1], found[place])
        return round((byte_us + back_us) * typical) + delay_us + back_delay_us

    hops = {place: hop_us(place) for place in starts}
    tries = 0
    while tries < MOST_TRIES:
        worst = max(starts, key=lambda place: (hops[place], -place))
        best, changed = (max(hops.values()), sum(hops.values())), None
        for here in (worst, worst + 1):
            for there in range(len(found)):
                tries += 1
                found[here], found[there] = found[there], found[here]
                near = {p for p in (here - 1, here, there - 1, there) if p in hops}
                after = hops | {place: hop_us(place) for place in near}
                score = max(after.values()), sum(after.values())
                if score < best:
                    best, changed = score, (here, there, after)
                found[here], found[there] = found[there], found[here]
        if changed is None:
            break
        here, there, hops = changed
        found[here], found[there] = found[there], found[here]
    return tuple(found)
