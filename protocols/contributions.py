"""What several nodes bring to a step, added up on its way to the root. Pure.

Sums, whoever adds them first: a node adds what its children have sent to its own, and the root has the total.
"""

from __future__ import annotations

from collections.abc import Mapping

from .messages import Contribution, Side, Sides, Strike

# Of replicas that differ (chaosnet/training/agreement.py): so many different ones, and names of each.
MAX_SIDES = 8
NAMED = 8


def merge(parts: list[Contribution]) -> Contribution:
    """What several nodes bring to a step, together."""
    shares: dict[str, int] = {}
    evaluates: dict[str, int] = {}
    checkpoints: dict[str, int] = {}
    metrics: dict[str, tuple[float, float]] = {}
    timings: dict[str, tuple[float, float]] = {}
    present = 0
    for part in parts:
        shares |= part.shares
        evaluates |= part.evaluates
        checkpoints |= part.checkpoints
        present |= int.from_bytes(part.present, "little")
        _add(metrics, part.metrics)
        _add(timings, part.timings)
    return Contribution(
        weight=sum(part.weight for part in parts),
        ranges=tuple(sorted(each for part in parts for each in part.ranges)),
        shares=shares,
        metrics=metrics,
        present=present.to_bytes(max((len(part.present) for part in parts), default=0), "little"),
        dataset=max(part.dataset for part in parts),
        leaving=all(part.leaving for part in parts),
        digests=merge_sides([part.digests for part in parts]),
        accounts=merge_sides([part.accounts for part in parts]),
        min_samples=max(part.min_samples for part in parts),
        drop_last=any(part.drop_last for part in parts),
        in_order=any(part.in_order for part in parts),
        global_batch=max(part.global_batch for part in parts),
        strikes=merge_strikes([part.strikes for part in parts]),
        evaluation=max(part.evaluation for part in parts),
        evaluates=evaluates,
        evaluated=tuple(sorted(each for part in parts for each in part.evaluated)),
        update=max(part.update for part in parts),  # Those that have one have the same.
        timings=timings,
        wish=max(part.wish for part in parts),
        pipelines=max(part.pipelines for part in parts),  # All have the same.
        norms=tuple(sorted(each for part in parts for each in part.norms)),
        keepers=max(part.keepers for part in parts),  # The same.
        checkpoints=checkpoints,
    )


def _add(sums: dict[str, tuple[float, float]], more: Mapping[str, tuple[float, float]]) -> None:
    for name, (total, weight) in more.items():
        old = sums.get(name, (0.0, 0.0))
        sums[name] = (old[0] + total, old[1] + weight)


def merge_sides(parts: list[Sides]) -> Sides:
    """Who has which hash, together. What all have alike stays one entry, with a few names."""
    merged: Sides = {}
    for part in parts:
        for kind, sides in part.items():
            ours = merged.setdefault(kind, {})
            for digest, side in sides.items():
                old = ours.get(digest)
                if old is not None:
                    names, items = tuple(sorted(old.names + side.names)[:NAMED]), old.items or side.items
                    ours[digest] = Side(nodes=old.nodes + side.nodes, names=names, items=items)
                else:
                    ours[digest] = side
    for kind, sides in merged.items():
        if len(sides) > MAX_SIDES:
            largest = sorted(sides, key=lambda digest: (-sides[digest].nodes, digest))[:MAX_SIDES]
            merged[kind] = {digest: sides[digest] for digest in largest}
    return merged


def merge_strikes(parts: list[tuple[Strike, ...]]) -> tuple[Strike, ...]:
    """Each life once, in an order that all agree on."""
    by_life = {(each.node, each.life): each for part in parts for each in part}
    return tuple(by_life[key] for key in sorted(by_life))
