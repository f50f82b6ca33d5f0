"""Who sends which bytes when a placement changes (Chameleon, Sec. IV-B, weight transfer).

What a worker of the new plan needs and does not hold comes from everybody who survived with it, in parts:
`shard_plan` with several joiners. All parts flow at once, each at a rate of its own, within links and NICs:

    minimize T   subject to   sum_s x_sdl = bytes_l           for each layer l that d needs
                              8 sum_l x_sdl <= rate_sd T      for each link
                              8 sum_dl x_sdl <= nic_out_s T,  8 sum_sl x_sdl <= nic_in_d T

For a given T this is a flow from sources through links to needs, and a cut that is too narrow says by how much T
must grow (Newton's method on the cuts: each T on the way is a lower bound). Layers with the same holders are one
need. The paper chooses no sources and counts layers, not seconds. Nobody forwards what has just come: with that,
a layer that many need and one holds would spread faster. Latency is added once.

`time_s` takes for granted that senders keep each part to its rate (its bytes over the plan's time). With nothing
but fair sharing the last part came later by 13 % in the worst of 400 random cases, and by 0.1 % on average.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import csr_array
from scipy.sparse.csgraph import breadth_first_order, maximum_flow

from ...protocols.errors import PlanInfeasible
from .cluster import Cluster, Worker, seconds
from .sync_rounds import holders_by_layer

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

SLACK = 1e-3
"""A plan may take this much longer than the bound, in proportion: it saves the last steps of the search."""

FLOW_UNITS = 1 << 29
"""All bytes together in a flow, whose capacities are 32-bit integers."""

UNLIMITED_BPS = 1e18
"""Of a link without a limit, so that shares in proportion to links are numbers."""


class Move(NamedTuple):
    """Bytes [start, stop) of the state of `layer`."""

    source: str
    destination: str
    layer: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Each byte that somebody needs, once.

    `flow_bound_s`: no direct transfer ends sooner (the program above), within `SLACK` of its optimum.
    """

    moves: tuple[Move, ...]
    bytes_total: int
    time_s: float
    flow_bound_s: float


def plan_transfers(
    held: Mapping[str, range],
    wanted: Mapping[str, range],
    state_bytes: Sequence[float],
    cluster: Cluster,
    elsewhere: Mapping[str, Collection[int]] | None = None,
) -> TransferPlan:
    """Moves from survivors until everybody has the layers of the new placement.

    Args:
        held: per survivor, its layers.
        wanted: per worker of the new plan, its layers.
        state_bytes: of layers [0, l), for every l (`Profile.state_bytes`); layers are rounded to whole bytes.
        elsewhere: who else has layers that no survivor holds: a host's snapshot, or a checkpoint under a
            name of its own. What a worker so has itself does not move.
    Raises: PlanInfeasible for a layer that nobody has, or nobody with a link to who needs it.
    """
    needs = _needs(held, wanted, state_bytes, elsewhere or {})
    if not needs:
        return TransferPlan((), 0, 0.0, 0.0)
    problem = _Problem(needs, cluster)
    shares, bound_s = problem.solve()
    sent = problem.whole_bytes(shares)
    time_s = problem.time_s(sent.astype(float))
    total = sum(need.bytes_total for need in needs)
    moves = tuple(problem.moves(sent))
    return TransferPlan(moves, total, cluster.latency_s + time_s, cluster.latency_s + min(bound_s, time_s))


def busiest_s(sent_bytes: Mapping[tuple[str, str], float], cluster: Cluster) -> float:
    """Seconds until all has come that is sent over these links (source, destination) at the same time.

    The load of the busiest link or NIC, and one latency; for transfers whose sources are given (`zero`).
    """
    load_s = [seconds(size, cluster.rate(*link)) for link, size in sent_bytes.items()]
    outgoing: defaultdict[str, float] = defaultdict(float)
    incoming: defaultdict[str, float] = defaultdict(float)
    for (source, to), size in sent_bytes.items():
        outgoing[source] += size
        incoming[to] += size
    known = cluster.workers
    load_s += [8 * size / known[name].nic_out_bps for name, size in outgoing.items() if name in known]
    load_s += [8 * size / known[name].nic_in_bps for name, size in incoming.items() if name in known]
    return cluster.latency_s + max(load_s) if load_s else 0.0


# --- what is needed ---


class _Need(NamedTuple):
    """Layers that `destination` lacks and `sources` all have."""

    destination: str
    sources: tuple[str, ...]
    layers: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def bytes_total(self) -> int:
        return sum(self.sizes)


def _needs(
    held: Mapping[str, range],
    wanted: Mapping[str, range],
    state_bytes: Sequence[float],
    elsewhere: Mapping[str, Collection[int]],
) -> list[_Need]:
    sources = holders_by_layer(elsewhere) | holders_by_layer(held)  # Survivors, if one has a layer.
    sizes = [round(stop - start) for start, stop in pairwise(state_bytes)]
    needs = []
    for destination in sorted(wanted):
        have = held.get(destination, range(0))
        lacking: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
        for layer in wanted[destination]:
            if layer not in have:
                lacking[_sources_of(layer, sources, sizes, destination)].append(layer)
        needs += [
            _Need(destination, names, tuple(layers), tuple(sizes[layer] for layer in layers))
            for names, layers in lacking.items()
            if destination not in names and any(sizes[layer] for layer in layers)
        ]
    return needs


def _sources_of(
    layer: int, sources: Mapping[int, tuple[str, ...]], sizes: Sequence[int], destination: str
) -> tuple[str, ...]:
    if layer >= len(sizes):
        raise PlanInfeasible(f"layer {layer} of {destination}: not one of the {len(sizes)} of the profile")
    if layer not in sources:
        raise PlanInfeasible(
            f"layer {layer}: no survivor holds it, but {destination} needs it (expected in `elsewhere`)"
        )
    return sources[layer]


# --- from whom ---


class _Problem:
    """Needs as arrays. An *offer* is a source for a need; offers on one link are a *pair*.

    Shares are bytes by offer, a need's in a row.
    """

    def __init__(self, needs: Sequence[_Need], cluster: Cluster) -> None:
        self.needs = needs
        self.names = sorted({name for need in needs for name in (need.destination, *need.sources)})
        number = {name: i for i, name in enumerate(self.names)}
        workers = [cluster.workers.get(name, Worker()) for name in self.names]
        self.out_bps = np.array([worker.nic_out_bps for worker in workers])
        self.in_bps = np.array([worker.nic_in_bps for worker in workers])
        rates = np.full((len(workers), len(workers)), float(cluster.rate_bps))
        for (name, to), rate_bps in cluster.rates_bps.items():
            if name in number and to in number:
                rates[number[name], number[to]] = rate_bps
        rows: dict[tuple[str, ...], Ints] = {}
        for need in needs:
            if need.sources not in rows:
                rows[need.sources] = np.array([number[name] for name in need.sources])
        self.sizes = np.array([need.bytes_total for need in needs], float)
        self.to = np.array([number[need.destination] for need in needs])
        source = np.concatenate([rows[need.sources] for need in needs])
        need_of = np.repeat(np.arange(len(needs)), [len(need.sources) for need in needs])
        linked = rates[source, self.to[need_of]] > 0
        self.source, self.need_of = source[linked], need_of[linked]
        self.destination = self.to[self.need_of]
        self.rate_bps = np.minimum(rates[self.source, self.destination], UNLIMITED_BPS)
        self._check_linked()

    def _check_linked(self) -> None:
        for i in np.flatnonzero(np.bincount(self.need_of, minlength=len(self.needs)) == 0):
            need = self.needs[int(i)]
            raise PlanInfeasible(
                f"layer {need.layers[0]}: none of {', '.join(need.sources)} has a link to {need.destination}"
            )

    @cached_property
    def pairs(self) -> tuple[Ints, Ints]:
        """First offer of each pair, and the pair of each offer."""
        keys = self.source * len(self.names) + self.destination
        _, first, pair = np.unique(keys, return_index=True, return_inverse=True)
        return first, pair

    def time_s(self, shares: Floats) -> float:
        """The load of the busiest link or NIC."""
        first, pair = self.pairs
        size = len(self.names)
        return 8 * max(
            float((np.bincount(pair, shares) / self.rate_bps[first]).max()),
            float((np.bincount(self.source, shares, size) / self.out_bps).max()),
            float((np.bincount(self.destination, shares, size) / self.in_bps).max()),
        )

    def in_proportion(self) -> Floats:
        rate_bps = np.minimum(self.rate_bps, self.out_bps[self.source])
        total_bps = np.bincount(self.need_of, rate_bps)
        shares: Floats = rate_bps * (self.sizes / total_bps)[self.need_of]
        return shares

    def simple_bound_s(self) -> float:
        """The longest of: a worker's needs over its NIC or its links; a need over its sources' links and NICs."""
        size = len(self.names)
        first, _ = self.pairs
        into_bps = np.bincount(self.destination[first], self.rate_bps[first], size)
        wanted = np.bincount(self.to, self.sizes, size)
        rate_bps = np.minimum(self.rate_bps, self.out_bps[self.source])
        alone_s = (self.sizes / np.bincount(self.need_of, rate_bps)).max()
        busy = wanted > 0
        return 8 * max(float((wanted[busy] / np.minimum(into_bps, self.in_bps)[busy]).max()), float(alone_s))

    def solve(self) -> tuple[Floats, float]:
        """Shares, and a time that no shares can do better than."""
        bound_s = self.simple_bound_s()
        shares = self.in_proportion()
        if self.time_s(shares) <= (1 + SLACK) * bound_s:
            return shares, bound_s
        network = _Network(self)
        while True:
            shares, next_s = network.flow((1 + SLACK) * bound_s)
            if next_s <= (1 + SLACK / 2) * bound_s:  # What is left over is the rounding to units.
                return shares, bound_s
            bound_s = next_s

    # --- whole bytes ---

    def whole_bytes(self, shares: Floats) -> Ints:
        """Shares cut at whole bytes, each need's adding up to its size."""
        ends = np.cumsum(shares)
        offers = np.bincount(self.need_of)
        last = np.cumsum(offers) - 1
        before = np.concatenate(([0.0], ends[last[:-1]]))
        cuts = np.rint(np.minimum(ends - before[self.need_of], self.sizes[self.need_of])).astype(np.int64)
        cuts[last] = self.sizes.astype(np.int64)
        starts = np.concatenate(([0], cuts[:-1]))
        starts[last[:-1] + 1] = 0
        return np.maximum(cuts - starts, 0)

    def moves(self, sent: Ints) -> Iterator[Move]:
        """Each need's layers in their order, cut where one source ends and the next starts."""
        used = np.flatnonzero(sent)
        at = -1
        for i, source, size in zip(
            self.need_of[used].tolist(), self.source[used].tolist(), sent[used].tolist(), strict=True
        ):
            if i != at:
                at, index, done = i, 0, 0
            need = self.needs[i]
            while size:
                step = min(size, need.sizes[index] - done)
                if step:
                    yield Move(self.names[source], need.destination, need.layers[index], done, done + step)
                size, done = size - step, done + step
                if done == need.sizes[index]:
                    index, done = index + 1, 0


class _Network:
    """The flow for a given T: start -> sources -> pairs -> needs -> end; the first two grow with T."""

    def __init__(self, problem: _Problem) -> None:
        self.problem = problem
        first, pair = problem.pairs
        sources, needs, pairs = len(problem.names), len(problem.needs), len(first)
        self.unit = problem.sizes.sum() / FLOW_UNITS
        self.units = np.maximum(np.rint(problem.sizes / self.unit), 1)
        self.nodes = 2 + sources + pairs + needs
        source_node = 2 + np.arange(sources)
        pair_node = 2 + sources + np.arange(pairs)
        need_node = 2 + sources + pairs + np.arange(needs)
        tail = (np.zeros(sources, int), source_node[problem.source[first]], pair_node[pair], need_node)
        head = (source_node, pair_node, need_node[problem.need_of], np.ones(needs, int))
        self.tail, self.head = np.concatenate(tail), np.concatenate(head)
        self.order = np.lexsort((self.head, self.tail))
        self.offers = slice(sources + pairs, sources + pairs + len(pair))
        # Per edge: bytes a second, and bytes. Edges to needs are never the narrow ones.
        rate = np.concatenate((problem.out_bps, problem.rate_bps[first])) / 8
        self.rate = np.concatenate((rate, np.zeros(len(pair) + needs)))
        self.fixed = np.concatenate((np.zeros(len(rate) + len(pair)), problem.sizes))
        self.fixed_units = np.concatenate((np.zeros(len(rate)), 2 * self.units[problem.need_of], self.units))

    def flow(self, time_s: float) -> tuple[Floats, float]:
        """Shares in `time_s`, and the least time that the narrowest cut allows (0 if all flows)."""
        room = np.floor(np.minimum(self.rate * (time_s / self.unit), 2 * FLOW_UNITS)) + self.fixed_units
        graph: Any = csr_array(
            (room[self.order].astype(np.int32), self.head[self.order], self._starts),
            (self.nodes, self.nodes),
        )
        found = maximum_flow(graph, 0, 1)
        through = np.zeros(len(room))
        flow = found.flow
        through = np.asarray(flow[self.tail[self.offers], self.head[self.offers]]).ravel()
        shares = self._shares(through.astype(float))
        if found.flow_value >= self.units.sum():
            return shares, 0.0
        left = graph - flow
        left.data = np.maximum(left.data, 0)
        left.eliminate_zeros()
        reached = np.zeros(self.nodes, bool)
        reached[breadth_first_order(left, 0, return_predecessors=False)] = True
        cut = reached[self.tail] & ~reached[self.head]
        missing = self.problem.sizes.sum() - self.fixed[cut].sum()
        return shares, float(missing / self.rate[cut].sum())

    @cached_property
    def _starts(self) -> Ints:
        return np.concatenate(([0], np.cumsum(np.bincount(self.tail, minlength=self.nodes))))

    def _shares(self, through: Floats) -> Floats:
        """Bytes by offer: what the rounding has left unsent is sent in proportion to what was, or to links."""
        problem = self.problem
        sent = np.bincount(problem.need_of, through)
        missing = np.maximum(problem.sizes / self.unit - sent, 0)
        share = problem.in_proportion() / problem.sizes[problem.need_of]
        total = through + share * missing[problem.need_of]
        scale = problem.sizes / np.bincount(problem.need_of, total)
        shares: Floats = total * scale[problem.need_of]
        return shares
