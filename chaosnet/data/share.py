"""Batches for a cluster whose members come and go: each sample of an epoch exactly once."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, default_collate

from ..protocols.data_cursor import MAX_ASIDE, DataCursor, DealRules, positions
from ..protocols.errors import ConfigError
from ..protocols.messages import Contribution, Range, Strike

USUAL = DealRules()
OWN = ("samples", "last", "share", "data", "to")  # What a batch has besides fields.
PARTS = "its tensors are batch.x and batch.y, or those of a loop over it"
ARGUMENTS = {"in_order": "shuffle"}  # As `batches` calls its opposite.


class Batch(Sequence[Any]):
    """What a data set gave for a few indices, collated: `x, y = batch`, `batch.x`, `batch.y`, `len(batch)`.

    Attributes:
        samples: Number of samples; the weight of this node's gradient in the cluster's mean.
        data: The collated whole, in its own type; fields of a named tuple are the batch's, too.
        last: Call update() after this one. False only for the first of several batches that are accumulated.
        share: Its part of this node's samples in the step: what to multiply a mean loss with to accumulate.
    """

    def __init__(self, data: Any, samples: int) -> None:
        fields = getattr(data, "_fields", ())
        for name in fields:
            if name in OWN:
                raise ConfigError(
                    f"batches: items of the data set are named tuples with a field {name!r}, which a batch has of "
                    f"its own (expected fields other than {', '.join(OWN)})"
                )
            setattr(self, name, getattr(data, name))
        self.data, self.samples = data, samples
        self.last, self.share = True, 1.0
        self._parts = data if isinstance(data, list | tuple) else (data,)

    def __getattr__(self, name: str) -> Any:
        """x and y: the first two parts, unless the data has fields of these names."""
        place, parts = "xy".find(name) if len(name) == 1 else -1, self.__dict__.get("_parts", ())
        if not 0 <= place < len(parts):
            hint = f" ({PARTS})" if isinstance(self.__dict__.get("data"), torch.Tensor) else ""
            raise AttributeError(f"a batch has no {name!r}{hint}")
        return parts[place]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch was given a batch in the place of a tensor."""
        raise ConfigError(f"{getattr(func, '__name__', func)}: got a batch (expected a tensor; {PARTS})")

    def __getitem__(self, index: Any) -> Any:
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def to(self, device: torch.device | str) -> Batch:
        """The batch with its tensors on a device."""
        moved = Batch(_to(self.data, device), self.samples)
        moved.last, moved.share = self.last, self.share
        return moved


class NamedBatch(dict[Any, Any]):
    """A batch of items that are dictionaries: a dictionary, e.g. `model(**batch)`, with the attributes of `Batch`."""

    def __init__(self, data: Mapping[Any, Any], samples: int) -> None:
        super().__init__(data)
        self.samples = samples
        self.last, self.share = True, 1.0

    @property
    def data(self) -> NamedBatch:
        return self

    x = data

    def to(self, device: torch.device | str) -> NamedBatch:
        """The batch with its tensors on a device."""
        moved = NamedBatch(_to(dict(self), device), self.samples)
        moved.last, moved.share = self.last, self.share
        return moved


def check_dataset(dataset: Any, collate_fn: Any = None, caller: str = "batches") -> None:
    """Raises: ConfigError for what cannot be dealt out by index, and says what to give instead."""
    if isinstance(dataset, IterableDataset):
        expected = "len() and [index]" + (
            "; or iterate over it in the script, a part of it on each node, and call trainer.update(samples=...)"
            if caller == "batches"
            else ""
        )
        raise ConfigError(
            f"{caller}: {type(dataset).__name__} is an IterableDataset, so no sample of it can be dealt again when a "
            f"node dies (expected {expected})"
        )
    for what in ("__len__", "__getitem__"):
        if not hasattr(dataset, what):
            raise ConfigError(
                f"{caller}: {type(dataset).__name__} has no {what} (expected a data set with len() and [index])"
            )
    if collate_fn is not None and not callable(collate_fn):
        raise ConfigError(
            f"{caller}: collate_fn is {collate_fn!r} (expected a function of a list of samples)"
        )


class EpochOrder:
    """The order of samples in an epoch: a permutation from (seed, epoch), the same on all members.

    Args:
        in_order: No permutation.
    """

    def __init__(self, length: int, seed: int, in_order: bool = False) -> None:
        self.length, self.seed, self.in_order = length, seed, in_order
        self._epoch, self._order = -1, torch.empty(0, dtype=torch.int64, device="cpu")

    def indices(self, epoch: int, ranges: Iterable[Range]) -> list[int]:
        """Indices of the samples at these positions of the epoch."""
        if epoch != self._epoch and self.in_order:
            self._epoch, self._order = epoch, torch.arange(self.length, device="cpu")
        if epoch != self._epoch:
            mixed = random.Random(f"{self.seed}, {epoch}").getrandbits(32)  # torch uses no more bits.
            generator = torch.Generator("cpu").manual_seed(mixed)
            self._epoch, self._order = epoch, torch.randperm(self.length, generator=generator, device="cpu")
        indices: list[int] = self._order[list(positions(ranges))].tolist()
        return indices

    def positions(self, epoch: int, indices: Sequence[int]) -> list[int]:
        """The positions of these samples in an epoch, sorted."""
        self.indices(epoch, ())
        return torch.isin(self._order, torch.tensor(indices, device="cpu")).nonzero().flatten().tolist()


class DataShare:
    """The part of a data set that all members have which is dealt to node `name`, step by step.

    Attributes:
        length: Samples of the data set; 0 while the script brings its own.
        size: Samples that this node wants per step.
        deal: Each node's batch size, in the order in which the cursor deals; as of the last completed step.
        ranges: The samples dealt to this node for the step under way.
        in_hand: Those of them that the script is busy with: to blame if it ends with an error.
    """

    def __init__(self, name: str, seed: int) -> None:
        self.name, self.seed = name, seed
        self.length = self.size = 0
        self.deal: tuple[tuple[str, int], ...] = ()
        self.ranges: list[Range] = []
        self.in_hand: list[Range] = []
        self.rules = USUAL
        self._order: EpochOrder | None = None
        self.cursor: DataCursor | None = None  # Who joins gets the cluster's.

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        return self.cursor.epoch if self.cursor else 0

    def begin(self, length: int, size: int, rules: DealRules = USUAL) -> None:
        """The script wants `size` of `length` samples per step. Raises: ConfigError if the cluster has others."""
        if self.cursor is None:
            self.rules = rules
        if not length:
            raise ConfigError(f"batches: the data set has {length} samples (expected >= 1 sample per epoch)")
        if length < rules.min_samples:
            raise ConfigError(
                f"batches: the data set has {length} samples (expected at least min_samples={rules.min_samples})"
            )
        cursor = self._cursor_of(length)
        _expect_same(rules, cursor.rules)
        if cursor.length != length:
            raise ConfigError(
                f"batches: the data set has {length} samples here, {cursor.length} in the cluster (expected one data "
                "set for a whole run: on all nodes, in all of a script's loops over batches, and after a checkpoint)"
            )
        self.length, self.size, self.rules = length, size, rules

    @property
    def order(self) -> EpochOrder:
        """The order of samples in the cluster's epochs."""
        assert self.cursor is not None
        # The seed is of the run's beginning, whatever `seed` is now.
        settings = self.cursor.length, self.cursor.seed, self.cursor.in_order
        if self._order is None or (self._order.length, self._order.seed, self._order.in_order) != settings:
            self._order = EpochOrder(*settings)
        return self._order

    def take(self) -> list[Range]:
        """Take this node's samples for the step under way."""
        self.ranges = self.dealt()
        return self.ranges

    def dealt(self) -> list[Range]:
        """The samples that this node is dealt, as things are now."""
        assert self.cursor is not None
        return list(self.cursor.deal(self.deal).get(self.name, []))

    def ahead(self, target: int, accumulate: int) -> Iterator[list[int]]:
        """Indices of this node's batches from the step under way on, until `target` epochs, if nothing happens.

        A guess: whoever joins, leaves or dies changes what is dealt afterwards.
        """
        assert self.cursor is not None
        # Its own order, as the epoch is another one.
        order = EpochOrder(self.cursor.length, self.cursor.seed, self.cursor.in_order)
        for epoch, dealt in self.cursor.ahead(self.deal):
            if epoch >= target:
                return
            for part in parts(dealt.get(self.name, []), accumulate, self.rules.min_samples):
                yield order.indices(epoch, part)

    def completed(self, total: Contribution, settled: bool = True) -> list[str]:
        """A step is complete: note the samples that it used, and strikes.

        Args:
            settled: Does no node hold samples that it has not contributed yet?
        Returns: what was set aside, for people to read.
        Raises: ConfigError if our data set is another one, or nothing is left of it.
        """
        length = total.dataset
        if not length:
            return []
        if self.length and length != self.length:
            raise ConfigError(
                f"batches: this node's data set has {self.length} samples, the cluster's {length}"
            )
        rules = DealRules(max(total.min_samples, 1), total.drop_last, total.in_order, total.global_batch)
        if self.cursor is None:
            self.rules = rules
        cursor = self._cursor_of(length)
        if self.size:
            _expect_same(self.rules, rules)
        # Somebody may train on one in this step: where it is done over, a strike may be of a later one.
        condemned = cursor.strike(total.strikes)
        trained = set(positions(total.ranges)) if condemned else set()
        condemned = [each for each in condemned if each[0] not in trained]
        said = [self._verdict(position, strikes) for position, strikes in condemned]
        if condemned:
            cursor.aside += self.indices([position for position, _ in condemned])[
                : MAX_ASIDE - len(cursor.aside)
            ]
        epoch = cursor.epoch
        cursor.commit(total.ranges)
        cursor.set_aside([position for position, _ in condemned])
        if settled:
            self.ranges, self.in_hand = [], []
            cursor.end_if_left_over(sum(size for _, size in self.deal))
        if cursor.epoch != epoch and cursor.aside:
            self._begin_without_aside(cursor)
        return said

    def _begin_without_aside(self, cursor: DataCursor) -> None:
        """Begin an epoch: samples that earlier ones have set aside are passed over."""
        if cursor.length - len(cursor.aside) < cursor.min_samples:
            raise ConfigError(
                f"batches: {len(cursor.aside)} of {cursor.length} samples are set aside, as scripts ended with an "
                "error over them: nothing is left to train on"
            )
        cursor.set_aside(self.order.positions(cursor.epoch, cursor.aside))

    def indices(self, where: Iterable[int]) -> list[int]:
        """Indices in the data set of these positions of the present epoch."""
        assert self.cursor is not None
        return self.order.indices(self.cursor.epoch, [(each, each + 1) for each in where])

    def left_out(self) -> dict[str, int]:
        """How many samples nobody has trained on, by reason, without zeros."""
        if self.cursor is None:
            return {}
        found = {
            "samples_set_aside": self.cursor.samples_aside,
            "samples_dropped": self.cursor.samples_dropped,
        }
        return {what: count for what, count in found.items() if count}

    def blame(self, part: Sequence[Range], number: int) -> None:
        """The suspect is the sample at place `number` of `part`."""
        position = list(positions(part))[number]
        self.in_hand = [(position, position + 1)]

    def _verdict(self, position: int, strikes: Sequence[Strike]) -> str:
        assert self.cursor is not None
        names = " and ".join(dict.fromkeys(each.node for each in strikes))
        return (
            f"set aside sample {position} of epoch {self.cursor.epoch} (index {self.indices([position])[0]} of the "
            f"data set): {names} ended with {strikes[-1].reason or 'an error'}"
        )

    def _cursor_of(self, length: int) -> DataCursor:
        """The cluster's cursor, or a new one."""
        if self.cursor is None:
            self.cursor = DataCursor(length, self.seed, **self.rules._asdict())
        return self.cursor


def fetch(
    dataset: Any,
    indices: list[int],
    blame: Callable[[int], None] = lambda number: None,
    collate: Callable[[list[Any]], Any] | None = None,
) -> Batch | NamedBatch:
    """The samples at `indices`, collated as torch's DataLoader does, or by `collate`.

    Args:
        blame: Called with the place in `indices` of a sample that cannot be fetched, before its error is raised.
    """
    if hasattr(dataset, "__getitems__"):
        try:
            items = dataset.__getitems__(indices)
        except Exception:
            one_by_one(dataset, indices, blame)  # Which of them is it?
            raise
    else:
        items = one_by_one(dataset, indices, blame)
    return as_batch((collate or default_collate)(items), len(indices))


def as_batch(data: Any, samples: int) -> Batch | NamedBatch:
    """A batch of what a collate function has made of so many samples."""
    return (NamedBatch if isinstance(data, Mapping) else Batch)(data, samples)


def one_by_one(dataset: Any, indices: list[int], blame: Callable[[int], None]) -> list[Any]:
    items = []
    for number, index in enumerate(indices):
        try:
            items.append(dataset[index])
        except Exception:
            blame(number)
            raise
    return items


def _expect_same(ours: DealRules, theirs: DealRules) -> None:
    """Raises: ConfigError that names the first difference."""
    for what, mine, others in zip(DealRules._fields, ours, theirs, strict=True):
        if mine != others:
            here, there = (not mine, not others) if what == "in_order" else (mine, others)
            raise ConfigError(
                f"batches: {ARGUMENTS.get(what, what)} is {here} here, {there} in the cluster (expected the same)"
            )


def parts(mine: Sequence[Range], accumulate: int, least: int) -> list[list[Range]]:
    """What a node is dealt in a step, as the batches that its script gets."""
    return list(split(mine, accumulate, least)) if accumulate > 1 else [list(mine)] if mine else []


def split(ranges: Sequence[Range], count: int, least: int = 1) -> Iterator[list[Range]]:
    """Cut ranges into at most `count` lists of nearly equal size, in order; none has fewer than `least`."""
    every = list(positions(ranges))
    count = max(1, min(count, len(every) // least))
    if least > 1:
        bounds = [len(every) * part // count for part in range(count + 1)] if every else []
        for start, stop in itertools.pairwise(bounds):
            yield [(position, position + 1) for position in every[start:stop]]
        return
    size = -(-len(every) // count) if every else 0
    for start in range(0, len(every), max(size, 1)):
        yield [(position, position + 1) for position in every[start : start + size]]


def _to(data: Any, device: torch.device | str) -> Any:
    if isinstance(data, torch.Tensor):
        return data.to(device, non_blocking=True)
    if isinstance(data, dict):
        return {key: _to(value, device) for key, value in data.items()}
    if callable(getattr(data, "to", None)):  # Packed sequences, and what the script's own function collates.
        return data.to(device)
    if isinstance(data, tuple) and hasattr(data, "_fields"):
        return type(data)(*(_to(value, device) for value in data))
    if isinstance(data, list | tuple):
        return [_to(value, device) for value in data]
    return data
