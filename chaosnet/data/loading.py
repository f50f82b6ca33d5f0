"""A script's DataLoader over this node's share of its data set: its workers fetch ahead what will probably be dealt.

What a node is dealt in a step is known when the step before is complete; but as long as nobody joins, leaves or dies,
it is known long before (`DataShare.ahead`). So torch's own DataLoader is made again, and is told, as its sampler, the
batches that are expected. Where others are dealt, what was fetched in vain is dropped.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, RandomSampler, SequentialSampler

from ..protocols.errors import ConfigError
from .share import Batch, NamedBatch, as_batch, one_by_one

WHY = "Trainer divides the data among the nodes by itself"


def check_loader(loader: DataLoader[Any], caller: str = "batches") -> bool:
    """Check that samples of a DataLoader can be dealt out.

    Returns: does it shuffle?
    Raises: ConfigError for a sampler that has its own idea of who gets what, with what to write instead.
    """
    if type(loader).__iter__ is not DataLoader.__iter__:
        raise ConfigError(
            f"{caller}: {type(loader).__name__} iterates in a way of its own, which nothing would come through here "
            "(expected a DataLoader, and what it does in the data set, in collate_fn or in the loop)"
        )
    sampler, batches = loader.sampler, loader.batch_sampler
    if isinstance(loader.dataset, IterableDataset):
        return False  # Refused with the data set.
    if loader.batch_size is None or type(batches) is not BatchSampler:
        named = type(batches).__name__ if batches is not None else "no batch_size"
        raise ConfigError(
            f"{caller}: the DataLoader has {named} ({WHY}; expected DataLoader(dataset, batch_size=...))"
        )
    how = ""
    if type(sampler) is SequentialSampler:
        if _is_whole(sampler, loader.dataset):
            return False
        how = f" of {len(sampler)} samples, where the data set has {len(loader.dataset)}"  # type: ignore[arg-type]
    if isinstance(sampler, RandomSampler):
        drawn = not sampler.replacement and sampler.num_samples == len(sampler.data_source)
        if drawn and _is_whole(sampler, loader.dataset):
            return True
        how = " that draws with replacement, or not as many samples as there are"
    raise ConfigError(
        f"{caller}: the DataLoader has a {type(sampler).__name__}{how} ({WHY}; expected shuffle=True or False and no "
        "sampler)"
    )


def _is_whole(sampler: Any, dataset: Any) -> bool:
    """Does the sampler go through all of the data set? One of `range(1000)` takes the first 1000 only."""
    return sampler.data_source is dataset or len(sampler.data_source) == len(dataset)


class Ahead:
    """The batches that a DataLoader like the script's fetches, and those that are expected next."""

    def __init__(self, loader: DataLoader[Any], generator: torch.Generator) -> None:
        """`generator`: of the seeds of workers, unless the script's loader has one of its own."""
        self.loader = loader
        self._expected: Callable[[], Iterator[list[int]]] = lambda: iter(())
        self._guesses: Iterator[list[int]] = iter(())
        self._asked: deque[list[int]] = deque()  # Given to the workers, and not taken from them yet.
        self._fetched: Iterator[Any] | None = None
        # Torch draws a seed for each iterator; from the usual generator that would part replicas that share one.
        self._made = DataLoader(
            loader.dataset, batch_sampler=_Guesses(self._next_guess), num_workers=loader.num_workers,
            collate_fn=loader.collate_fn, pin_memory=loader.pin_memory, timeout=loader.timeout,
            worker_init_fn=loader.worker_init_fn, multiprocessing_context=loader.multiprocessing_context,
            generator=loader.generator or generator, prefetch_factor=loader.prefetch_factor,
            persistent_workers=loader.persistent_workers,
        )  # fmt: skip

    def begin(self, expected: Callable[[], Iterator[list[int]]]) -> None:
        """A pass over the data. `expected`: indices of the batches from now on, if nothing happens."""
        self._expected = expected

    def end(self) -> None:
        """A pass ends. As in torch, workers live on only if they are persistent."""
        self._guesses, self._fetched = iter(()), None

    def fetch(self, indices: list[int], blame: Callable[[int], None]) -> Batch | NamedBatch:
        """The batch of these samples. Arguments and errors as of `share.fetch`."""
        if not self.loader.num_workers:
            self._guesses = iter([indices])
        elif self._asked and self._asked[0] != indices:
            self._guess_from(indices)
        for _ in range(len(self._asked) + 2):  # Those in vain, then this one; perhaps from a new iterator.
            try:
                if self._fetched is None:
                    self._asked.clear()
                    self._guess_from(indices)
                    # The seed is drawn where torch makes tensors, which the script may have set to another device.
                    with torch.device(self._made.generator.device):
                        self._fetched = iter(self._made)
                data = next(self._fetched)
            except Exception as error:
                self._fetched = None  # It may bring later on what it could not bring in time.
                if isinstance(error, StopIteration) and not self._asked:
                    continue  # All that was expected has come, and more is dealt.
                if self._asked and self._asked[0] != indices:
                    continue  # Nobody needs what could not be fetched.
                one_by_one(self.loader.dataset, indices, blame)  # Which of them is it?
                raise
            if self._asked.popleft() == indices:
                return as_batch(data, len(indices))
        raise AssertionError(f"{indices} are dealt and not expected")

    def _guess_from(self, indices: list[int]) -> None:
        """Have these fetched now, and then what is expected after them."""
        self._guesses = itertools.dropwhile(lambda guess: guess != indices, self._expected())

    def _next_guess(self) -> list[int] | None:
        guess = next(self._guesses, None)
        if guess is not None:
            self._asked.append(guess)
        return guess


class _Guesses:
    """The batch sampler of torch's loader: gives the indices of the next batch to fetch."""

    def __init__(self, next_guess: Callable[[], list[int] | None]) -> None:
        self._next_guess = next_guess

    def __iter__(self) -> Iterator[list[int]]:
        while (guess := self._next_guess()) is not None:
            yield guess
