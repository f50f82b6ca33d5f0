"""Each sample of an epoch exactly once, whoever joins, leaves or dies.

The cursor counts positions in the epoch's permutation of the data set, not samples: the permutation is a
function of (seed, epoch) that every node computes for itself. Dealing changes nothing; only a committed
step consumes. What a dead member held was never committed, so it is dealt again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .errors import ConfigError, LocalProtocolError, RemoteProtocolError

Range = tuple[int, int]
"""[start, stop), positions in the epoch's permutation."""


@dataclass(slots=True)
class DataCursor:
    """How far a cluster has come in its data: the epoch, and which positions of it are consumed.

    Replicated like the training state, and equal on all members that have committed the same steps.
    """

    length: int
    """Samples per epoch, >= 1."""
    seed: int
    """Of the permutations; the cursor only carries it."""
    epoch: int = 0
    consumed: list[Range] = field(default_factory=list)
    """Sorted, disjoint, not touching; never the whole epoch."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length: {self.length} (expected >= 1 sample per epoch)")

    @property
    def remaining(self) -> int:
        """Positions of this epoch that no committed step has consumed, >= 1."""
        return self.length - sum(stop - start for start, stop in self.consumed)

    def deal(self, shares: Sequence[tuple[str, int]]) -> dict[str, list[Range]]:
        """Give the first unconsumed positions to the members, in the order given, each up to its batch size.

        The last step of an epoch may find fewer positions than the batches hold. It splits them in
        proportion to the batch sizes (largest remainder, the earlier member first), so that nobody
        starves while another has a full batch; with fewer positions than members some get none.
        Args:
            shares: (member, batch size >= 0), each member once.
        Returns: per member of `shares`, sorted ranges; an empty list where there is nothing for it.
        Raises: ConfigError for a negative batch size or a member named twice.
        """
        sizes = _split(min(self.remaining, _total(shares)), shares)
        unconsumed = self._unconsumed()
        rest: Range = (0, 0)
        ranges_by_member: dict[str, list[Range]] = {}
        for member, size in sizes.items():
            taken: list[Range] = []
            while size > 0:
                start, stop = rest if rest[0] < rest[1] else next(unconsumed)
                cut = min(stop, start + size)
                taken.append((start, cut))
                rest = (cut, stop)
                size -= cut - start
            ranges_by_member[member] = taken
        return ranges_by_member

    def commit(self, ranges: Iterable[Range]) -> None:
        """Mark `ranges` consumed; when the epoch is, start the next one. On an error nothing changes.

        Raises: LocalProtocolError if a range is empty or out of bounds, or a position is consumed twice.
        """
        merged: list[Range] = []
        for start, stop in sorted([*self.consumed, *ranges]):
            if not 0 <= start < stop <= self.length:
                raise LocalProtocolError(
                    f"data cursor, epoch {self.epoch}: range [{start}, {stop}) is empty or out of bounds"
                    f" (expected 0 <= start < stop <= {self.length})"
                )
            if merged and start < merged[-1][1]:
                raise LocalProtocolError(
                    f"data cursor, epoch {self.epoch}: position {start} is consumed twice"
                )
            if merged and start == merged[-1][1]:
                merged[-1] = (merged[-1][0], stop)
            else:
                merged.append((start, stop))
        self.consumed = merged
        if self.consumed == [(0, self.length)]:
            self.epoch += 1
            self.consumed = []

    def to_plain(self) -> dict[str, Any]:
        """The whole cursor as a dict of ints and lists, for replication."""
        return {
            "length": self.length,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": [list(interval) for interval in self.consumed],
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "DataCursor":
        """The cursor that `to_plain` described.

        Raises: RemoteProtocolError if it describes none; it has come from a peer.
        """
        try:
            consumed = [(int(start), int(stop)) for start, stop in plain["consumed"]]
            cursor = cls(int(plain["length"]), int(plain["seed"]), int(plain["epoch"]), consumed)
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise RemoteProtocolError(f"data cursor: {plain!r} describes none ({error!r})") from None
        if flaw := cursor._flaw():
            raise RemoteProtocolError(f"data cursor: {plain!r} describes none ({flaw})")
        return cursor

    def check_invariants(self) -> None:
        """What holds between any two calls."""
        flaw = self._flaw()
        assert not flaw, flaw

    def _flaw(self) -> str:
        """The first thing about this cursor that cannot be, or ""."""
        if self.epoch < 0:
            return f"epoch {self.epoch} (expected >= 0)"
        previous_stop = -1
        for start, stop in self.consumed:
            if not previous_stop < start < stop <= self.length:
                return f"interval [{start}, {stop}) is out of bounds, or overlaps or touches the one before"
            previous_stop = stop
        return "" if self.remaining else "every position is consumed (expected the next epoch)"

    def _unconsumed(self) -> Iterator[Range]:
        start = 0
        for consumed_start, consumed_stop in self.consumed:
            if start < consumed_start:
                yield start, consumed_start
            start = consumed_stop
        if start < self.length:
            yield start, self.length


def positions(ranges: Iterable[Range]) -> Iterator[int]:
    """Every position of `ranges`, in order."""
    for start, stop in ranges:
        yield from range(start, stop)


def _total(shares: Sequence[tuple[str, int]]) -> int:
    for member, size in shares:
        if size < 0:
            raise ConfigError(f"batch size of {member!r}: {size} (expected >= 0)")
    if len({member for member, _ in shares}) < len(shares):
        raise ConfigError(f"shares: {list(shares)!r} (expected each member once)")
    return sum(size for _, size in shares)


def _split(count: int, shares: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Largest remainder, in whole numbers; `count` equal to the sum of the shares gives each its own."""
    total = max(1, sum(size for _, size in shares))
    size_by_member = {member: count * size // total for member, size in shares}
    by_remainder = sorted(shares, key=lambda share: -(count * share[1] % total))
    for member, _ in by_remainder[: count - sum(size_by_member.values())]:
        size_by_member[member] += 1
    return size_by_member
