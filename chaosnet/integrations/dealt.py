"""What other frameworks' loops need: batches dealt by the cluster, a schedule that it steps, a common end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

from torch.utils.data import DataLoader, IterableDataset

from ..data.loading import check_loader
from ..data.share import NamedBatch
from ..protocols.errors import ConfigError
from ..script.exit_event import exit_wanted, script_captures_exit
from ..settings.table import STEP
from ..trainer import Trainer

STOP = "stop"
"""The number that a node adds to a step which is to be the last one of all."""
RULES = ("global_batch", "min_samples")
"""Settings of `Trainer.batches`; the others are those of `Trainer`."""
SETTINGS = {setting.name for setting in STEP} | {"extra_state", "cluster", "checkpoints", "dashboard", *RULES}


def refuse(whose: str, what: str, value: Any, expected: str) -> NoReturn:
    """Raises: ConfigError."""
    raise ConfigError(f"{whose}: {what} is {value!r:.80} (expected {expected})")


def settings_and_rules(
    whose: str, given: Mapping[str, Any], elsewhere: Mapping[str, str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Those of `Trainer`, and those of its `batches`.

    Args:
        elsewhere: What to write instead, by setting.
    Raises: ConfigError for what chaosnet's Trainer does not know, or the framework has.
    """
    for name, value in given.items():
        if name in elsewhere:
            refuse(whose, name, value, elsewhere[name])
        if name not in SETTINGS:
            refuse(whose, name, value, f"one of {', '.join(sorted(SETTINGS - set(elsewhere)))}")
    rules = {name: given[name] for name in RULES if name in given}
    return {name: value for name, value in given.items() if name not in rules}, rules


def check_indexed(whose: str, what: str, loader: DataLoader[Any]) -> None:
    """Raises: ConfigError for data that cannot be dealt out by index, or that somebody else deals out."""
    if isinstance(loader.dataset, IterableDataset):
        indexed = "one of a data set with len() and [index], which all nodes have"
        refuse(whose, what, type(loader.dataset).__name__, indexed)
    check_loader(loader, whose)


def samples_a_step(loader: DataLoader[Any], accumulate: int) -> int:
    """Of a schedule that is made for the steps of one node that is alone: so it ends with the epochs, however many
    nodes there are. Where the last step of an epoch has less, all count as a little less. Rounded up: a schedule that
    is over too soon leaves the rest of the run with a learning rate of 0."""
    assert loader.batch_size is not None
    steps = max(1, -(-len(loader) // accumulate))
    return max(1, -(-min(len(loader.dataset), len(loader) * loader.batch_size) // steps))  # type: ignore[arg-type]


class DealtLoader:
    """A script's DataLoader, of which each pass is the rest of the cluster's epoch.

    It has no length: how many batches an epoch has for one node hangs on who is there.

    Args:
        loader: As for `Trainer.batches`.
        accumulate: At most so many batches a step; asked at each pass.
        is_over: Is training, though the epoch is not?
        rules: Of `Trainer.batches`.
    Attributes:
        batch: The last one that was handed out, with `last` and `share`; None before the first.
    """

    def __init__(
        self,
        cluster: Trainer,
        loader: DataLoader[Any],
        accumulate: Callable[[], int],
        is_over: Callable[[], bool],
        rules: Mapping[str, Any],
    ) -> None:
        self.loader, self._cluster, self._rules = loader, cluster, rules
        self._accumulate, self._is_over = accumulate, is_over
        self.batch: Any = None
        self._epoch: int | None = None  # Of the pass under way.

    @property
    def dataset(self) -> Any:
        return self.loader.dataset

    @property
    def batch_size(self) -> int | None:
        return self.loader.batch_size

    @property
    def epoch_is_over(self) -> bool:
        """Has the cluster completed the epoch of the pass under way?"""
        return self._epoch is not None and self._cluster.epoch > self._epoch

    def __iter__(self) -> Iterator[Any]:
        """Batches as the collate function has made them; the next one is there when the step is complete.

        Raises: SystemExit after Ctrl+C and the like, as a step does then: what else belongs to an epoch is left out.
        """
        self._epoch = self._cluster.epoch
        for batch in self._cluster.batches(self.loader, accumulate=self._accumulate(), **self._rules):
            if self._is_over():
                break
            self.batch = batch
            yield dict(batch) if isinstance(batch, NamedBatch) else batch.data
        if self._cluster.session.done and exit_wanted() and not script_captures_exit():
            raise SystemExit(0)


class ToldSchedule:
    """The LR scheduler as the framework sees it: read by all, and stepped by Trainer only.

    Attributes:
        scheduler: It.
    """

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __getattr__(self, name: str) -> Any:
        if name == "scheduler" or name.startswith("__"):  # Of a copy that has no attributes yet.
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Trainer has done it."""


class CommonEnd:
    """One node's decision to stop, such as early stopping, is for all: they stop after the same step.

    A node that joined late has not seen what the others judge by; it would go on alone.
    """

    def __init__(self) -> None:
        self._wanted = False

    def want(self) -> None:
        """With the next step."""
        self._wanted = True

    def before_step(self, cluster: Trainer) -> None:
        """Tell the others, if there is something to tell."""
        if self._wanted:
            cluster.mean(1.0, STOP, weight=1.0)

    @staticmethod
    def has_come(cluster: Trainer) -> bool:
        """Was the last step to be the last one of all?"""
        return STOP in cluster.metrics
