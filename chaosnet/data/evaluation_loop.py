"""The loop over an evaluation that the cluster shares: this node's batches of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from functools import partial
from numbers import Integral
from typing import Any, Protocol

from torch.utils.data import DataLoader

from ..node.session import Session
from ..settings.resolved import expect
from ..training.randomness import Randomness
from .evaluation import Evaluation
from .loading import Ahead, check_loader
from .passes import Passes
from .share import Batch, NamedBatch, check_dataset, fetch

Collate = Callable[[list[Any]], Any]
Fetch = Callable[[list[int], Callable[[int], None]], Batch | NamedBatch]


class EvaluationSteps(Protocol):
    """What an evaluation needs of a node's steps."""

    @property
    def has_model(self) -> bool:
        """Has this node the whole model?"""
        ...

    def await_round(self) -> None:
        """Take part in steps until nothing else is under way."""

    def aside(self) -> AbstractContextManager[None]:
        """Inside, steps belong to an evaluation. What the script has in hand for a step of its own stays valid."""
        ...

    def skip(self) -> bool:
        """Take part in a step without training in it."""
        ...

    def cut_short(self) -> None:
        """The loop ends before its time. Raises: SystemExit if the script is to end with it, after Ctrl+C."""
        ...

    def has_missed(self) -> bool:
        """Was this node away while the others evaluated what its script asks for? Then it gets their result."""
        ...


class EvaluatingEngine(Protocol):
    """What an evaluation needs of an engine."""

    evaluation: Evaluation
    random: Randomness


class EvaluationLoop:
    """Gives out one node's batches of evaluations."""

    def __init__(self, session: Session, engine: EvaluatingEngine, steps: EvaluationSteps) -> None:
        self._session, self._evaluation, self._steps = session, engine.evaluation, steps
        self._workers = engine.random.workers
        self._ahead: Ahead | None = None  # Of the last pass: workers may be persistent.

    def batches(self, dataset: Any, batch_size: int | None, collate_fn: Collate | None) -> Passes:
        """See `Trainer.evaluate`."""
        loader = dataset if isinstance(dataset, DataLoader) else None
        if loader is not None:
            for what, value in {"batch_size": batch_size, "collate_fn": collate_fn}.items():
                expect(value is None, what, value, "none beside a DataLoader, whose own counts")
            check_loader(loader, "evaluate")
            dataset, batch_size = loader.dataset, loader.batch_size
        expect(counts(batch_size), "batch_size", batch_size, "a whole number from 1")
        assert batch_size is not None
        check_dataset(dataset, collate_fn, "evaluate")
        expect(len(dataset) > 0, "dataset", dataset, "one with samples")
        return Passes(partial(self._run, dataset, int(batch_size), collate_fn, loader))

    def _run(
        self, dataset: Any, batch_size: int, collate_fn: Collate | None, loader: DataLoader[Any] | None
    ) -> Iterator[Batch | NamedBatch]:
        """One evaluation."""
        steps, evaluation, session = self._steps, self._evaluation, self._session
        fetched: Fetch = partial(fetch, dataset, collate=collate_fn)
        if loader is not None:
            if self._ahead is None or self._ahead.loader is not loader:
                self._ahead = Ahead(loader, self._workers)
            self._ahead.begin(evaluation.ahead)
            fetched = self._ahead.fetch
        with steps.aside():
            steps.await_round()
            if steps.has_missed():
                return
            evaluation.enter(len(dataset), batch_size)
            rejoins = session.rejoins
            try:
                if not session.done:
                    steps.skip()  # With it, all hear of the evaluation.
                while evaluation.under_way and not session.done:
                    if steps.has_model and (indices := evaluation.take()):
                        yield fetched(indices, lambda number: None)
                    steps.skip()
                if session.rejoins != rejoins:
                    steps.has_missed()
            finally:
                evaluation.leave()
                if self._ahead is not None:
                    self._ahead.end()
        if session.done:
            steps.cut_short()


def counts(number: Any) -> bool:
    """Is it a whole number from 1 on?"""
    return isinstance(number, Integral) and int(number) >= 1
