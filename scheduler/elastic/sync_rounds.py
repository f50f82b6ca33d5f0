"""Which gradients are summed at the same time (Chameleon, Sec. IV-B, asymmetric communication).

Where pipelines differ, so do the groups that hold a layer, and a worker is in several. The paper colours
layers, with an edge between any two on one device, and finds few colours greedily. Here neighbouring layers
with the same holders are one bucket, summed at once. As everybody holds one range of layers, the buckets
before b that share a holder with b are all shared with the one that holds b and reaches back farthest: they
are a clique. So giving each bucket, in the order of layers, the first round that is free, is not greedy luck
but a minimum: as many rounds as the buckets of who has most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping
from itertools import groupby
from typing import NamedTuple


class Bucket(NamedTuple):
    """Layers [start, stop), whose gradients the same workers sum among themselves."""

    start: int
    stop: int
    holders: tuple[str, ...]


def holders_by_layer(held: Mapping[str, Collection[int]]) -> dict[int, tuple[str, ...]]:
    """Who holds each layer, sorted, by layers that anybody holds."""
    names: defaultdict[int, list[str]] = defaultdict(list)
    for name in sorted(held):
        for layer in held[name]:
            names[layer].append(name)
    return {layer: tuple(holders) for layer, holders in names.items()}


def buckets(placement: Mapping[str, range], layers: int) -> list[Bucket]:
    """Neighbouring layers with the same holders, in the order of layers; those of one holder, too."""
    holders = holders_by_layer(placement)
    runs = groupby(range(layers), key=lambda layer: holders.get(layer, ()))
    return [Bucket(run[0], run[-1] + 1, names) for names, run in ((names, [*of]) for names, of in runs)]


def rounds(placement: Mapping[str, range], layers: int) -> tuple[tuple[Bucket, ...], ...]:
    """Buckets by round, as few rounds as can be; within a round no worker is asked twice.

    What one worker holds alone is in no bucket: there is nothing to sum.
    """
    found: list[list[Bucket]] = []
    busy: list[set[str]] = []
    for bucket in buckets(placement, layers):
        if len(bucket.holders) < 2:
            continue
        free = next((i for i, names in enumerate(busy) if names.isdisjoint(bucket.holders)), len(busy))
        if free == len(busy):
            found.append([])
            busy.append(set())
        found[free].append(bucket)
        busy[free].update(bucket.holders)
    return tuple(tuple(each) for each in found)
