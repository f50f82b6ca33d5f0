"""The loop over a data set that the cluster shares: epochs, and this node's batches of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from numbers import Integral
from typing import Any

from .data import Batch, EpochOrder, NamedBatch, check_dataset, fetch, split
from .engines.data_parallel import DataParallel
from .node.session import Session
from .protocols.errors import ConfigError
from .script_steps import ScriptSteps
from .settings import expect

Collate = Callable[[list[Any]], Any]


class Batches:
    """What `trainer.epochs` and `trainer.batches` give out."""

    def __init__(self, session: Session, engine: DataParallel, steps: ScriptSteps) -> None:
        self._session, self._engine, self._steps, self._share = session, engine, steps, engine.share

    def epochs(self, count: int) -> Iterator[int]:
        """See `Trainer.epochs`."""
        share = self._share
        while share.epoch < count and not self._session.done:
            before, updates = share.epoch, self._steps.updates_here
            yield before
            if share.epoch != before:
                continue
            if self._steps.updates_here > updates and not share.length and not self._session.done:
                raise ConfigError(
                    "epochs: counts epochs of trainer.batches, and this script brings its own data "
                    "(expected `for epoch in range(N)`, or trainer.batches inside)"
                )
            return  # The loop inside was left early.

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int | None,
        accumulate: int,
        drop_last: bool,
        min_samples: int,
        collate_fn: Collate | None,
    ) -> Iterator[Any]:
        """See `Trainer.batches`."""
        for what, number in (("batch_size", batch_size), ("accumulate", accumulate)):
            expect(isinstance(number, Integral) and number >= 1, what, number, "a whole number from 1")
        fits = isinstance(min_samples, Integral) and 1 <= min_samples <= batch_size
        expected = f"a whole number from 1 to batch_size, which is {batch_size}"
        expect(fits, "min_samples", min_samples, expected)
        expect(drop_last in (True, False), "drop_last", drop_last, "True or False")
        check_dataset(dataset, collate_fn)
        share = self._share
        order = share.begin(len(dataset), batch_size * accumulate, int(min_samples), bool(drop_last))
        self._engine.gradients.arm(None)
        target = epochs if epochs is not None else share.epoch + 1
        while share.epoch < target and not self._session.done:
            yield from self._of_step(dataset, order, accumulate, collate_fn)

    def _of_step(
        self, dataset: Any, order: EpochOrder, accumulate: int, collate: Collate | None
    ) -> Iterator[Batch | NamedBatch]:
        steps, share = self._steps, self._share
        steps.await_round()
        mine, before = share.take(), steps.calls
        if not mine:
            steps.skip()
            return
        weight = float(sum(stop - start for start, stop in mine))
        parts = list(split(mine, accumulate, share.min_samples)) if accumulate > 1 else [list(mine)]
        for index, part in enumerate(parts):
            if steps.calls != before:
                raise ConfigError(
                    f"batches: update() after batch {index} of {len(parts)} that belong together "
                    "(expected after the one that has `batch.last`)"
                )
            if index == len(parts) - 1:
                self._engine.weight = weight
                self._engine.gradients.arm(weight)
            share.in_hand = list(part)
            batch = fetch(dataset, order.indices(share.epoch, part), partial(share.blame, part), collate)
            batch.last, batch.share = index == len(parts) - 1, batch.samples / weight
            steps.in_hand = float(batch.samples)
            yield batch
        self._check_stepped(before)

    def _check_stepped(self, calls_before: int) -> None:
        """Raises: ConfigError if the script has not stepped with the batches that it had."""
        named = self._engine.named
        if self._session.done:
            return
        if named.mine:
            raise ConfigError(
                f"batches: the next batch was asked for before update(name={named.names[named.mine]!r}) "
                f"(expected all of {', '.join(named.names)} after each batch)"
            )
        if self._steps.calls == calls_before:
            raise ConfigError(
                "batches: the next batch was asked for without optimizer.step() or trainer.update() (expected one of "
                "them after each batch; to accumulate gradients over several batches, pass accumulate=N; for a batch "
                "that is to be left out, trainer.update(samples=0))"
            )
