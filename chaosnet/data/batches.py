"""The loop over a data set that the cluster shares: epochs, and this node's batches of them."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch.utils.data import DataLoader

from ..engines.data_parallel import DataParallel
from ..node.session import Session
from ..protocols.data_cursor import DealRules
from ..protocols.errors import ConfigError
from ..protocols.sentences import counted
from ..script.steps import ScriptSteps
from ..settings.resolved import expect
from .evaluation_loop import Collate, EvaluationLoop, Fetch, counts
from .loading import Ahead, check_loader
from .passes import Passes
from .share import Batch, NamedBatch, check_dataset, fetch, parts


class Batches:
    """What `trainer.epochs` and `trainer.batches` give out."""

    def __init__(self, session: Session, engine: DataParallel, steps: ScriptSteps) -> None:
        self._session, self._engine, self._steps, self._share = session, engine, steps, engine.share
        self._trained: Ahead | None = None  # Of the last pass: workers may be persistent.
        self._evaluation = EvaluationLoop(session, engine, steps)

    def epochs(self, count: int) -> Iterator[int]:
        """See `Trainer.epochs`."""
        share = self._share
        self._tell_nothing_left(count)
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
            if not self._session.done:
                raise ConfigError(self._left_early(before))

    def _tell_nothing_left(self, epochs: int) -> None:
        """Say so if all epochs are done already, as when a finished run is started again: the script ends at once."""
        done = self._share.epoch
        if done >= epochs and not self._steps.updates_here and not self._session.done:
            self._session.say(
                f"nothing is left to train: the cluster has done {counted(done, 'epoch')}, and this script asks for "
                f"{epochs}"
            )

    def _left_early(self, epoch: int) -> str:
        """For an error: the script has left the loop within `epoch`, and nodes could not agree what is left out."""
        cursor = self._share.cursor
        done = f" after {cursor.length - cursor.remaining} of {cursor.length} samples" if cursor else ""
        return (
            f"epochs: the loop inside left epoch {epoch}{done} (expected a loop over trainer.batches to its end; for "
            "fewer samples an epoch, give batches a torch.utils.data.Subset, the same on all nodes; to end training, "
            "leave the loop over epochs, too)"
        )

    def batches(
        self,
        dataset: Any,
        batch_size: int | None,
        epochs: int | None,
        accumulate: int,
        drop_last: bool,
        min_samples: int,
        collate_fn: Collate | None,
        shuffle: bool,
        global_batch: int | None,
    ) -> Passes:
        """See `Trainer.batches`."""
        loader = dataset if isinstance(dataset, DataLoader) else None
        if loader is not None:
            given = {
                "batch_size": batch_size,
                "collate_fn": collate_fn,
                "shuffle": None if shuffle else False,
            }
            for what, value in given.items():
                expect(value is None, what, value, "none beside a DataLoader, whose own counts")
            shuffle = check_loader(loader)
            dataset, batch_size = loader.dataset, loader.batch_size
            drop_last = drop_last or loader.drop_last
        for what, number in (("batch_size", batch_size), ("accumulate", accumulate)):
            expect(counts(number), what, number, "a whole number from 1")
        assert batch_size is not None
        fits = counts(min_samples) and min_samples <= batch_size
        expected = f"a whole number from 1 to batch_size, which is {batch_size}"
        expect(fits, "min_samples", min_samples, expected)
        for what, value in (("drop_last", drop_last), ("shuffle", shuffle)):
            expect(value in (True, False), what, value, "True or False")
        whole = global_batch is None or (counts(global_batch) and global_batch >= min_samples)
        expect(
            whole, "global_batch", global_batch, f"a whole number from min_samples, which is {min_samples}"
        )
        check_dataset(dataset, collate_fn)
        rules = DealRules(int(min_samples), bool(drop_last), not shuffle, int(global_batch or 0))
        source: Fetch | DataLoader[Any] = (
            loader if loader is not None else partial(fetch, dataset, collate=collate_fn)
        )
        size = int(batch_size) * accumulate
        return Passes(partial(self._run, dataset, size, epochs, accumulate, rules, source))

    def _run(
        self,
        dataset: Any,
        size: int,
        epochs: int | None,
        accumulate: int,
        rules: DealRules,
        source: Fetch | DataLoader[Any],
    ) -> Iterator[Any]:
        """One pass. `source`: what fetches a batch, or a DataLoader that does."""
        share = self._share
        share.begin(len(dataset), size, rules)  # As long as it is now: a script may keep the passes.
        self._steps.conclude()
        self._engine.gradients.arm(None)
        target = epochs if epochs is not None else share.epoch + 1
        self._tell_nothing_left(target)
        if not isinstance(source, DataLoader):
            yield from self._until(target, accumulate, source)
            return
        if self._trained is None or self._trained.loader is not source:
            self._trained = Ahead(source, self._engine.random.workers)
        ahead = self._trained
        ahead.begin(lambda: share.ahead(target, accumulate))
        try:
            yield from self._until(target, accumulate, ahead.fetch)
        finally:
            ahead.end()

    def evaluate(self, dataset: Any, batch_size: int | None, collate_fn: Collate | None) -> Passes:
        """See `Trainer.evaluate`."""
        return self._evaluation.batches(dataset, batch_size, collate_fn)

    def _until(self, target: int, accumulate: int, fetched: Fetch) -> Iterator[Any]:
        """Give out this node's batches until `target` epochs are complete."""
        while self._share.epoch < target and not self._session.done:
            yield from self._of_step(target, accumulate, fetched)
        self._engine.weight = self._steps.in_hand = None  # Whatever comes next is of none of these batches.
        if self._share.epoch < target:
            self._steps.cut_short()

    def _of_step(self, target: int, accumulate: int, fetched: Fetch) -> Iterator[Batch | NamedBatch]:
        steps, share = self._steps, self._share
        steps.check_trains("batches: the next batch was asked for")
        steps.await_round()
        if share.epoch >= target or self._session.done:
            return  # Others had the last samples, and the round's last update has come only now.
        mine, before = share.take(), steps.calls
        if not mine:
            steps.skip()
            return
        self._engine.weight, weight = None, float(sum(stop - start for start, stop in mine))
        several = parts(mine, accumulate, share.rules.min_samples)
        for index, part in enumerate(several):
            if steps.calls != before:
                raise ConfigError(
                    f"batches: update() after batch {index} of {len(several)} that belong together "
                    "(expected after the one that has `batch.last`)"
                )
            if index == len(several) - 1:
                self._engine.weight = weight
                self._engine.gradients.arm(weight)
            share.in_hand = list(part)
            batch = fetched(share.order.indices(share.epoch, part), partial(share.blame, part))
            batch.last, batch.share = index == len(several) - 1, batch.samples / weight
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
                "them after each batch, of the optimizer that Trainer was given; to accumulate gradients over "
                "several batches, pass accumulate=N; for a batch that is to be left out, trainer.update(samples=0))"
            )
