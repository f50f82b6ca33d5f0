"""What is decided about checkpoints: who writes which tensors, which one to load, which ones to remove. No I/O.

No message asks a member to write. All members apply the same committed step, so all derive the same `Mark` from it,
and from that and the state's manifest what each of them writes. A checkpoint is complete when all of its shards are
there; nothing else marks it. So a complete checkpoint also proves that all members had that step.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from ...protocols.errors import CheckpointError

DIGITS = 8  # Of the step in a folder's name; more where they are needed.


class Mark(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a checkpoint is of: equal on all members that write it, and in no other history of the same run.

    Attributes:
        run: Drawn anew whenever a cluster is founded or resumed.
        step: Number of updates that the model has had.
        key: The view in which that step was committed.
        members: Those that write it, sorted: all of that view, or one that writes all of it. Two members that are
            wrongly told to write whole copies to one directory so get a folder each.
        shards: Number of files that make it up.
        layout: Hash of the names, types and shapes of the tensors that are spread over them. As it is part of the
            folder's name, shards that do not fit together are in two folders, both incomplete. "" until the
            state is at hand.
    """

    run: str
    step: int
    key: tuple[int, int]
    members: tuple[str, ...]
    shards: int
    layout: str = ""

    @property
    def folder(self) -> str:
        """Its folder's name: unique, so that neither two histories of one step mix, nor two layouts."""
        return f"step-{self.step:0{DIGITS}}-{xxhash.xxh3_64_hexdigest(msgspec.json.encode(self))[:8]}"


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint as its folder's list of files shows it.

    Attributes:
        shards: How many it should have; 0 if none is there.
        present: Numbers of the shards that are there.
        written_s: When the last of them was written, in seconds since 1970.
    """

    path: Path
    step: int
    shards: int
    present: frozenset[int]
    size_bytes: int
    written_s: float

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self.shards)) - self.present)

    @property
    def complete(self) -> bool:
        return self.shards > 0 and not self.missing


def assign(sizes: Sequence[int], shards: int) -> list[list[int]]:
    """Spread tensors over `shards` files: the largest first, each to the file that has least so far.

    Graham's rule: the largest file exceeds the best possible by a third at most. A tensor is never cut.
    Args:
        sizes: Bytes by position.
    Returns: by shard, its positions in order; a function of the arguments alone.
    """
    loads = [(0, shard) for shard in range(shards)]
    positions: list[list[int]] = [[] for _ in range(shards)]
    for position in sorted(range(len(sizes)), key=lambda position: (-sizes[position], position)):
        load, shard = loads[0]
        positions[shard].append(position)
        heapq.heapreplace(loads, (load + sizes[position], shard))
    return [sorted(each) for each in positions]


def layout_of(rows: Sequence[tuple[str, str, tuple[int, ...]]]) -> str:
    """A hash of tensors' names, types and shapes, in order."""
    return xxhash.xxh3_128_hexdigest(msgspec.json.encode(rows))


def part_of_keeper(keeper: str, names: Sequence[str], keepers: Mapping[str, str], first: str) -> list[int]:
    """Which tensors `keeper` writes where members keep parts of the state, by position.

    Args:
        keepers: By name of a tensor that not all members keep, the member that writes it.
        first: The member that writes all others.
    """
    return [position for position, name in enumerate(names) if keepers.get(name, first) == keeper]


def part_of(shard: int, sizes: Sequence[int], alike: int, shards: int) -> list[int]:
    """Which tensors `shard` holds, by position: its part of those that all nodes have alike.

    Shard 0 also holds all other tensors. Only the node that writes it knows their sizes, so these decide nothing.
    Args:
        sizes: Bytes of the tensors that this node has, by position; the first `alike` are the same on all nodes.
    """
    part = assign(sizes[:alike], shards)[shard]
    return part if shard else [*part, *range(alike, len(sizes))]


def order(checkpoint: Checkpoint) -> tuple[int, float]:
    """Sorts checkpoints by step, and those of one step in two histories by time."""
    return checkpoint.step, checkpoint.written_s


def choose(found: Iterable[Checkpoint], step: int | None = None) -> Checkpoint:
    """The newest complete checkpoint, or that of `step`. Raises: CheckpointError if there is none."""
    found = sorted(found, key=order)
    wanted = [each for each in found if step is None or each.step == step]
    complete = [each for each in wanted if each.complete]
    if complete:
        return complete[-1]
    if wanted:
        raise CheckpointError(f"{describe(wanted[-1])}; {_others(found)}")
    raise CheckpointError(f"there is no checkpoint of step {step}; {_others(found)}")


def describe(checkpoint: Checkpoint) -> str:
    """What a checkpoint lacks to be complete, for people."""
    if not checkpoint.shards:
        return f"{checkpoint.path} holds nothing whole"
    missing = ", ".join(map(str, checkpoint.missing))
    many = "s" if len(checkpoint.missing) > 1 else ""
    return f"{checkpoint.path} lacks shard{many} {missing} of {checkpoint.shards}"


def _others(found: Sequence[Checkpoint]) -> str:
    steps = sorted({each.step for each in found if each.complete})
    return f"complete: {', '.join(f'step {step}' for step in steps)}" if steps else "none is complete"


def superseded(found: Iterable[Checkpoint], keep: int, before: int = 0) -> list[Checkpoint]:
    """The checkpoints that the newest `keep` complete ones replace: older ones, and incomplete ones not newer.

    One that is newer than all complete ones may still be under way, unless its step is `before` that one.
    """
    ordered = sorted(found, key=order)
    kept = [each for each in ordered if each.complete][-keep:]
    last = max([before - 1, *(each.step for each in kept)])
    return [each for each in ordered if each not in kept and each.step <= last]
