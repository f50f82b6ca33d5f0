"""Who owns which bytes of the optimizer's state with ZeRO-1, before and after (ElasWave, Sec. 5 and 6.3).

Two layouts. *Interleaved*: every layer is cut into D parts, part j on the j-th of its D holders. *Contiguous*:
the layers of a stage, one after the other, are cut into D blocks. What moves is not a formula but the overlap of
intervals before and after, the matrix M_overlap of Sec. 5.2; what stays where it is lies on its diagonal.

Sec. 6.3 puts moving a layer of |O| bytes to the next stage at |O| interleaved, and (D + 1) / 2 |O| contiguous:
|O| across and (D - 1) / 2 |O| within a stage. That is so, but for each of the two stages: both of them together
send D |O|. The formula is right for time (both reshape at once), and low for bytes.

The paper always takes from a device what a device has. Here a worker that keeps the copy of a part on its own
host takes it from there first, as nothing then crosses a link; `own_host_first=False` is the paper's way.
"""

from __future__ import annotations

import bisect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from ...protocols.errors import PlanInfeasible


class Piece(NamedTuple):
    """Bytes [start, stop) of the optimizer's state of `layer`."""

    layer: int
    start: int
    stop: int


Parts = Mapping[str, Sequence[Piece]]
"""What each rank has."""

Layout = Callable[[Mapping[int, int], Sequence[str]], Parts]
"""(bytes by layer, ranks of the stage) -> parts."""

Where = Literal["device", "host"]


class Flow(NamedTuple):
    """An entry of M_overlap: `piece` from what `source` has on its device or host. It may stay where it is."""

    source: str
    destination: str
    piece: Piece
    where: Where = "device"


# --- layouts ---


def interleaved(sizes: Mapping[int, int], ranks: Sequence[str]) -> Parts:
    """Of every layer, part j of D to rank j (Sec. 6.3, Fig. 10b).

    Args:
        sizes: bytes of the optimizer's state, by layer.
    """
    return of_holders(sizes, dict.fromkeys(sizes, ranks))


def of_holders(sizes: Mapping[int, int], holders: Mapping[int, Sequence[str]]) -> Parts:
    """As `interleaved`, each layer with holders of its own: `dict(enumerate(Plan.holders))`."""
    parts: dict[str, list[Piece]] = {name: [] for names in holders.values() for name in names}
    for layer in sorted(sizes):
        cuts = _cuts(sizes[layer], len(holders[layer]))
        for j, name in enumerate(holders[layer]):
            if cuts[j] < cuts[j + 1]:
                parts[name].append(Piece(layer, cuts[j], cuts[j + 1]))
    return parts


def contiguous(sizes: Mapping[int, int], ranks: Sequence[str]) -> Parts:
    """Layers in a row, cut into D blocks; block j to rank j (Sec. 6.3, Fig. 10a)."""
    parts: dict[str, list[Piece]] = {name: [] for name in ranks}
    cuts = _cuts(sum(sizes.values()), len(ranks))
    at = 0
    for layer in sorted(sizes):
        end = at + sizes[layer]
        for j, name in enumerate(ranks):
            start, stop = max(at, cuts[j]), min(end, cuts[j + 1])
            if start < stop:
                parts[name].append(Piece(layer, start - at, stop - at))
        at = end
    return parts


def _cuts(size: int, parts: int) -> list[int]:
    if parts < 1:
        raise PlanInfeasible("optimizer state: nobody to own it (expected at least one rank)")
    return [size * j // parts for j in range(parts + 1)]


def moved_layer(
    layout: Layout, sizes: tuple[Mapping[int, int], Mapping[int, int]],
    ranks: tuple[Sequence[str], Sequence[str]], layer: int,
) -> tuple[Flow, ...]:  # fmt: skip
    """What moving `layer` from one stage to another takes, with the same layout before and after (Sec. 6.3).

    Args:
        sizes, ranks: of the stage it leaves, and of the one it goes to.
    """
    (old, new), (leaving, joining) = ranks, sizes
    rest = {each: size for each, size in leaving.items() if each != layer}
    before = {**layout(leaving, old), **layout(joining, new)}
    after = {**layout(rest, old), **layout({**joining, layer: leaving[layer]}, new)}
    return overlap(before, after)


# --- overlap ---


def overlap(devices: Parts, targets: Parts, hosts: Parts | None = None) -> tuple[Flow, ...]:
    """M_overlap: each byte of `targets`, once, from who has it (Sec. 5.2).

    First from the rank's own device, then its own host, then another's device, then another's host.
    Raises: PlanInfeasible for bytes that nobody has.
    """
    had: defaultdict[int, list[tuple[Piece, str, Where]]] = defaultdict(list)
    for name, pieces in devices.items():
        for piece in pieces:
            had[piece.layer].append((piece, name, "device"))
    for name, pieces in (hosts or {}).items():
        for piece in pieces:
            had[piece.layer].append((piece, name, "host"))
    wanted: defaultdict[int, list[tuple[Piece, str]]] = defaultdict(list)
    for name, pieces in targets.items():
        for piece in pieces:
            wanted[piece.layer].append((piece, name))
    return tuple(flow for layer in sorted(wanted) for flow in _overlap_of(layer, had[layer], wanted[layer]))


def _overlap_of(
    layer: int, had: Sequence[tuple[Piece, str, Where]], wanted: Sequence[tuple[Piece, str]]
) -> list[Flow]:
    """Between two neighbouring cuts nothing changes, so that one source is enough; equal neighbours join."""
    pieces = [piece for piece, *_ in had] + [piece for piece, _ in wanted]
    cuts = sorted({cut for piece in pieces for cut in (piece.start, piece.stop)})
    having: list[list[tuple[str, Where]]] = [[] for _ in cuts]
    for piece, name, where in had:
        for at in range(bisect.bisect_left(cuts, piece.start), bisect.bisect_left(cuts, piece.stop)):
            having[at].append((name, where))
    flows: list[Flow] = []
    for piece, name in wanted:
        for at in range(bisect.bisect_left(cuts, piece.start), bisect.bisect_left(cuts, piece.stop)):
            start, stop = cuts[at], cuts[at + 1]
            if not having[at]:
                raise PlanInfeasible(
                    f"optimizer state of layer {layer}: bytes [{start}, {stop}) are nowhere"
                    f" (needed by {name})"
                )
            source, where = min(having[at], key=lambda each: (each[0] != name, each[1] == "host", each[0]))
            last = flows[-1] if flows else None
            if last and last[:2] == (source, name) and last.piece.stop == start and last.where == where:
                flows[-1] = last._replace(piece=Piece(layer, last.piece.start, stop))
            else:
                flows.append(Flow(source, name, Piece(layer, start, stop), where))
    return flows


def sent_bytes(flows: Iterable[Flow]) -> Counter[tuple[str, str]]:
    """Bytes per link (source, destination): M_overlap without its diagonal."""
    sent: Counter[tuple[str, str]] = Counter()
    for flow in flows:
        if flow.source != flow.destination:
            sent[flow.source, flow.destination] += flow.piece.stop - flow.piece.start
    return sent


# --- snapshots ---


def keepers(ring: Sequence[str]) -> dict[str, str]:
    """Per worker, on whose host its snapshot is: worker i keeps that of (i + 1) mod n (Sec. 5.1)."""
    return {kept: ring[i - 1] for i, kept in enumerate(ring)}


def unrecoverable(ring: Sequence[str], lost: Collection[str]) -> tuple[str, ...]:
    """The integrity check: of which of `lost` the part is gone, as its keeper is lost, too (Sec. 5.2, step 1)."""
    keeper = keepers(ring)
    return tuple(worker for worker in ring if worker in lost and keeper[worker] in lost)


def remap(
    parts: Parts,
    ring: Sequence[str],
    lost: Collection[str],
    targets: Parts,
    own_host_first: bool = True,
) -> tuple[Flow, ...]:
    """Flows from what is left of `parts`, on devices and hosts, to `targets` (live remap, Sec. 5.2).

    Args:
        ring: workers in the order of `keepers`. Their parts together are the whole state.
        own_host_first: False: snapshots are used of lost parts only.
    Raises: PlanInfeasible, naming the workers whose parts are gone.
    """
    if gone := [worker for worker in unrecoverable(ring, lost) if parts.get(worker)]:
        keeper = keepers(ring)
        named = ", ".join(f"{worker} (kept by {keeper[worker]})" for worker in gone)
        raise PlanInfeasible(f"optimizer state: both copies are lost of the parts of {named}")
    devices = {worker: pieces for worker, pieces in parts.items() if worker not in lost}
    hosts = {
        keeper: parts.get(kept, ())
        for kept, keeper in keepers(ring).items()
        if keeper not in lost and (kept in lost or own_host_first)
    }
    return overlap(devices, targets, hosts)
