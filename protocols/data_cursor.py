"""Each sample of an epoch exactly once, whoever joins, leaves or dies.

The cursor counts positions in the epoch's permutation of the data set, not samples: the permutation is a
function of (seed, epoch) that every node computes for itself. Dealing changes nothing; only a committed
step consumes. What a dead member held was never committed, so it is dealt again.

A member whose script ended with an error says what it had in hand: a strike against these positions. They are dealt
again to one member a step, an eighth of them at a time and first of all that it gets, beside others. A position with
strikes of two lives is condemned: it counts as consumed, and nobody trains on it. Who trains on one clears it.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from msgspec.structs import replace

from .errors import ConfigError, LocalProtocolError, RemoteProtocolError
from .messages import Strike

SMALLEST_BATCH = 2  # When it is known that a sample may be bad, and not before.
MAX_ASIDE = 1000  # Indices of the data set that are kept out of later epochs; of more, only of theirs.

Range = tuple[int, int]
"""[start, stop), positions in the epoch's permutation."""


class DealRules(NamedTuple):
    """How a data set is dealt out. The same on all nodes, from the run's beginning on."""

    min_samples: int = 1
    """Nobody is dealt fewer."""
    drop_last: bool = False
    """Is the rest of an epoch that is less than all take in a step left out?"""
    in_order: bool = False
    """Is an epoch dealt as the data set numbers its samples, and not shuffled?"""
    global_batch: int = 0
    """Samples that all members together are dealt in a step, if their batches hold so many; 0: what those hold."""


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
    min_samples: int = 1
    drop_last: bool = False
    in_order: bool = False
    global_batch: int = 0
    """The rules: see DealRules."""
    strikes: list[Strike] = field(default_factory=list)
    """In order of (node, life), each once; of positions of this epoch that are not consumed."""
    aside: list[int] = field(default_factory=list)
    """What has been condemned, as the data set numbers it: in later epochs it is not dealt, either."""
    samples_aside: int = 0
    """Positions, of all epochs, that were consumed so."""
    samples_dropped: int = 0
    """Positions, of all epochs, that were left over at the end."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise ConfigError(f"length: {self.length} (expected >= 1 sample per epoch)")

    @property
    def rules(self) -> DealRules:
        """How it deals."""
        return DealRules(self.min_samples, self.drop_last, self.in_order, self.global_batch)

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
        shares = self._limited(shares)
        wanted, suspects = _total(shares), list(positions(self.suspects()))
        if not suspects:
            return _deal_out(self._sizes(self.remaining, wanted, shares), self._unconsumed())
        others = list(_without(self._unconsumed(), self.suspects()))
        count = sum(stop - start for start, stop in others)
        first = _few(len(suspects), count, self.min_samples)
        sizes = self._sizes(first + count, wanted, shares)
        taster = next((member for member, size in sizes.items() if size), None)
        if taster is None:
            return _deal_out(sizes, iter(()))
        few = min(first, sizes[taster])
        if sum(sizes.values()) - few > count:  # Not enough that is not struck: the others get nothing.
            few = min(first, dict(shares)[taster])
            sizes = dict.fromkeys(sizes, 0) | {taster: min(few + count, dict(shares)[taster])}
        tasted = joined(suspects[:few])
        sizes[taster] -= few
        dealt = _deal_out(sizes, iter(others))
        dealt[taster] = sorted([*tasted, *dealt[taster]])
        return dealt

    def ahead(self, shares: Sequence[tuple[str, int]]) -> Iterator[tuple[int, dict[str, list[Range]]]]:
        """The epoch, and what each member is dealt, step by step from this one on, if nothing happens.

        Ends where nobody is dealt anything. `shares`: as of `deal`.
        """
        cursor = DataCursor.from_plain(self.to_plain())
        while True:
            dealt = cursor.deal(shares)
            yield cursor.epoch, dealt
            if not any(dealt.values()):
                return
            cursor.commit(itertools.chain(*dealt.values()))
            cursor.end_if_left_over(_total(shares))

    def _limited(self, shares: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
        """In proportion to their batch sizes, if these are more together than the cluster is to take in a step."""
        few = 0 < self.global_batch < _total(shares)
        return tuple(_split(self.global_batch, shares).items()) if few else shares

    def _sizes(self, count: int, wanted: int, shares: Sequence[tuple[str, int]]) -> dict[str, int]:
        """How many of `count` positions each gets: none or `min_samples` at least; so is the rest, if it can be."""
        least = self.min_samples
        sizes = _split_at_least(least, min(count, wanted), shares)
        if 0 < count - sum(sizes.values()) < least:
            fewer = _split_at_least(least, count - least, shares)
            return fewer if any(fewer.values()) else sizes
        return sizes

    def suspects(self) -> list[Range]:
        """Positions with a strike, sorted and disjoint."""
        return joined(sorted({each for strike in self.strikes for each in positions(strike.ranges)}))

    def strike(self, strikes: Iterable[Strike]) -> list[tuple[int, list[Strike]]]:
        """Take note of members that have ended. Returns: positions that are condemned now, each with its strikes."""
        known = {(each.node, each.life): each for each in self.strikes}
        for each in strikes:
            if each.epoch != self.epoch:
                continue  # Its epoch has ended, or that step is done over. Positions mean other samples now.
            inside = [
                (start, min(stop, self.length))
                for start, stop in each.ranges
                if start < min(stop, self.length)
            ]
            known.setdefault((each.node, each.life), replace(each, ranges=tuple(inside)))
        self.strikes = [known[key] for key in sorted(known)]
        self._clear_consumed()
        against: dict[int, list[Strike]] = {}
        for each in self.strikes:
            for position in set(positions(each.ranges)):
                against.setdefault(position, []).append(each)
        return [(position, against[position]) for position in sorted(against) if len(against[position]) > 1]

    def set_aside(self, condemned: Sequence[int]) -> None:
        """Consume these positions; nobody has trained on them. Raises: as `commit`."""
        self.samples_aside += len(condemned)
        self.commit(joined(condemned))

    def end_if_left_over(self, wanted: int) -> None:
        """Leave out the rest of the epoch, if it is too little to be dealt. `wanted`: what all take in a step.

        An epoch of which nobody has trained anything is not left out.
        """
        wanted = min(wanted, self.global_batch or wanted)
        untouched = self.remaining >= self.length - len(self.aside)
        if self.remaining < self.min_samples or (
            self.drop_last and self.remaining < wanted and not untouched
        ):
            self.samples_dropped += self.remaining
            self.commit(list(self._unconsumed()))

    def _clear_consumed(self) -> None:
        left = [
            replace(each, ranges=tuple(_without(joined(sorted(set(positions(each.ranges)))), self.consumed)))
            for each in self.strikes
        ]
        self.strikes = [each for each in left if each.ranges]

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
            self.strikes = []
        elif self.strikes:
            self._clear_consumed()

    def to_plain(self) -> dict[str, Any]:
        """The whole cursor as a dict of ints and lists, for replication."""
        return {
            "length": self.length,
            "seed": self.seed,
            "epoch": self.epoch,
            "consumed": [list(interval) for interval in self.consumed],
            "min_samples": self.min_samples,
            "drop_last": self.drop_last,
            "in_order": self.in_order,
            "global_batch": self.global_batch,
            "strikes": [[s.node, s.life, [list(each) for each in s.ranges], s.reason] for s in self.strikes],
            "aside": list(self.aside),
            "samples_aside": self.samples_aside,
            "samples_dropped": self.samples_dropped,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> "DataCursor":
        """The cursor that `to_plain` described.

        Raises: RemoteProtocolError if it describes none; it has come from a peer.
        """
        try:
            consumed = [(int(start), int(stop)) for start, stop in plain["consumed"]]
            cursor = cls(int(plain["length"]), int(plain["seed"]), int(plain["epoch"]), consumed)
            cursor.min_samples = int(plain.get("min_samples", 1))  # A checkpoint may be older than these.
            cursor.drop_last = bool(plain.get("drop_last", False))
            cursor.in_order = bool(plain.get("in_order", False))
            cursor.global_batch = int(plain.get("global_batch", 0))
            cursor.strikes = [_strike(*each) for each in plain.get("strikes", ())]
            cursor.aside = [int(each) for each in plain.get("aside", ())]
            cursor.samples_aside = int(plain.get("samples_aside", 0))
            cursor.samples_dropped = int(plain.get("samples_dropped", 0))
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
        if self.min_samples < 1 or min(self.samples_aside, self.samples_dropped, self.global_batch) < 0:
            return (
                f"{self.min_samples} samples at least, {self.global_batch} in all, {self.samples_aside} aside, "
                f"{self.samples_dropped} dropped"
            )
        if any(not 0 <= start < stop <= self.length for each in self.strikes for start, stop in each.ranges):
            return "a strike is out of bounds"
        if any(not 0 <= index < self.length for index in self.aside):
            return "what is set aside is out of bounds"
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


def joined(ordered: Sequence[int]) -> list[Range]:
    """Sorted positions, each once, as ranges."""
    ranges: list[Range] = []
    for position in ordered:
        if ranges and ranges[-1][1] == position:
            ranges[-1] = (ranges[-1][0], position + 1)
        else:
            ranges.append((position, position + 1))
    return ranges


def _without(ranges: Iterable[Range], taken: Sequence[Range]) -> Iterator[Range]:
    """What of sorted `ranges` is not in sorted, disjoint `taken`."""
    for start, stop in ranges:
        for taken_start, taken_stop in taken:
            if taken_stop <= start or taken_start >= stop:
                continue
            if start < taken_start:
                yield start, taken_start
            start = taken_stop
        if start < stop:
            yield start, stop


def _few(suspects: int, others: int, min_samples: int) -> int:
    """How many of the struck positions to deal: an eighth, but neither one sample alone, nor that one left alone.

    One sample by itself may be what a script cannot bear (BatchNorm), and none is to be condemned for that.
    """
    least = max(min_samples, SMALLEST_BATCH)
    few = max(-(-suspects // 8), min(suspects, least - others))
    return suspects if others < least and suspects - few < least else few


def _deal_out(sizes: Mapping[str, int], unconsumed: Iterator[Range]) -> dict[str, list[Range]]:
    """To each so many of the positions, in order."""
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


def _strike(node: str, life: int, ranges: Iterable[Range], reason: str) -> Strike:
    where = tuple((int(start), int(stop)) for start, stop in ranges)
    return Strike(node=str(node), life=int(life), ranges=where, reason=str(reason))


def _total(shares: Sequence[tuple[str, int]]) -> int:
    for member, size in shares:
        if size < 0:
            raise ConfigError(f"batch size of {member!r}: {size} (expected >= 0)")
    if len({member for member, _ in shares}) < len(shares):
        raise ConfigError(f"shares: {list(shares)!r} (expected each member once)")
    return sum(size for _, size in shares)


def _split_at_least(least: int, count: int, shares: Sequence[tuple[str, int]]) -> dict[str, int]:
    """`_split`, but whoever would get fewer than `least` gets nothing, and the others up to their batch size."""
    if least <= 1:
        return _split(max(count, 0), shares)
    taking = [(member, size) for member, size in shares if size >= least]
    sizes: dict[str, int] = {}
    while taking:
        sizes = _split(min(max(count, 0), sum(size for _, size in taking)), taking)
        if min(sizes.values()) >= least:
            break
        taking.remove(min(reversed(taking), key=lambda share: share[1]))
    return {member: sizes.get(member, 0) if taking else 0 for member, _ in shares}


def _split(count: int, shares: Sequence[tuple[str, int]]) -> dict[str, int]:
    """Largest remainder, in whole numbers; `count` equal to the sum of the shares gives each its own."""
    total = max(1, sum(size for _, size in shares))
    size_by_member = {member: count * size // total for member, size in shares}
    by_remainder = sorted(shares, key=lambda share: -(count * share[1] % total))
    for member, _ in by_remainder[: count - sum(size_by_member.values())]:
        size_by_member[member] += 1
    return size_by_member
