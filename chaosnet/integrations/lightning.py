"""`lightning.Trainer` as a node of a cluster: `Trainer(strategy=ChaosnetStrategy())`.

Lightning's loops count batches, steps and epochs, each process by itself; here the cluster counts. So the strategy
hands them batches that the cluster deals out, and tells them after each step what it has come to. To them it looks
like an IterableDataset: an epoch has no length that is known before its end. They must not fetch ahead, as the next
batch is known only when the step is complete.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from ..extras import demand

demand("lightning", "chaosnet.integrations.lightning")

import torch
from lightning.pytorch import callbacks as theirs
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities import GradClipAlgorithmType
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..trainer import Trainer
from .dealt import (
    CommonEnd,
    DealtLoader,
    ToldSchedule,
    check_indexed,
    refuse,
    samples_a_step,
    settings_and_rules,
)

ELSEWHERE = {
    "max_grad_norm": "lightning.Trainer(gradient_clip_val=...), which clips the cluster's mean here",
    "updates": "none, as there is one optimizer",
}
"""Settings of chaosnet's Trainer that Lightning has, too."""
EVERY_STEP = (
    "what changes weights at each step as after_step of ChaosnetStrategy, with its tensors as extra_state"
)
CALLBACKS = {
    "BatchSizeFinder": "a batch_size; that of each node may be another",
    "LearningRateFinder": "a learning rate",
    "StochasticWeightAveraging": EVERY_STEP,
    "WeightAveraging": EVERY_STEP,
}
"""Those that change the training state between steps, and what to write instead."""


class ChaosnetStrategy(SingleDeviceStrategy):
    """This process is a node of a cluster, whose nodes join, leave and die while the others train.

    Args:
        settings: As of `chaosnet.Trainer`, and `global_batch` and `min_samples` of its `batches`.
    Attributes:
        cluster: The chaosnet.Trainer, once `fit` has begun to train.
    """

    strategy_name = "chaosnet"

    def __init__(self, **settings: Any) -> None:
        super().__init__()
        self._settings, self._rules = settings_and_rules("ChaosnetStrategy", settings, ELSEWHERE)
        self.cluster: Trainer | None = None
        self._batches: _Batches | None = None  # While it trains.
        self._end = CommonEnd()
        self._was_main = True  # Before this node was a member, and when it left.
        self._changed: list[tuple[Any, str, Any]] = []  # What is to be as it was when `fit` is over.

    # --- what lightning.Trainer asks when it is made ---

    @property
    def parallel_devices(self) -> Sequence[torch.device]:
        """None yet; the trainer then says which."""
        return ()

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device]) -> None:
        if len(devices) != 1:
            one = "one, as a process is a node: a process for each, with devices=[0], devices=[1] and so on"
            refuse("lightning.Trainer", "devices", len(devices), one)
        self._root_device = devices[0]

    @property
    def num_nodes(self) -> int:
        return 1

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        if number != 1:
            refuse("lightning.Trainer", "num_nodes", number, "none, as nodes come and go")

    # --- what its parts ask ---

    @property
    def is_global_zero(self) -> bool:
        """Is this the node that writes files? The one that has been a member for the longest."""
        return (
            self.cluster.is_main if self.cluster is not None and self._batches is not None else self._was_main
        )

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trainer.state.fn == TrainerFn.FITTING:
            cluster = (
                "ChaosnetStrategy(checkpoints=Checkpoints(FOLDER, resume=True)), from which all nodes go on"
            )
            refuse(
                "fit", "ckpt_path", str(checkpoint_path), f"{cluster}; for its weights, load_from_checkpoint"
            )
        try:
            return super().load_checkpoint(checkpoint_path, *args, **kwargs)
        except FileNotFoundError:
            if self.cluster is None:
                raise
            here = "a file of this machine; the node that writes files has it: if trainer.is_global_zero"
            refuse(str(self._trainer.state.fn.value), "ckpt_path", str(checkpoint_path), here)

    @property
    def _trainer(self) -> Any:
        assert self.lightning_module is not None
        return self.lightning_module.trainer

    # --- fit ---

    def setup_environment(self) -> None:
        """The first of all calls: some callbacks train by themselves in the next ones."""
        if self._trainer.state.fn == TrainerFn.FITTING:
            check_callbacks(self._trainer.callbacks)
            for logger in self._trainer.loggers:
                take_folder(logger)
        super().setup_environment()

    def on_train_start(self) -> None:
        """Become a member. All else has been set up, so what a founder has now is what others get."""
        super().on_train_start()
        trainer = self._trainer
        check_trainer(trainer)
        scheduler, settings = self._schedule(trainer), dict(self._settings)
        loader = trainer.fit_loop._combined_loader.flattened[0]
        if scheduler is not None:
            settings.setdefault("lr_scheduler_every", self._schedule_every(trainer, loader))
        if trainer.gradient_clip_val is not None and not _clips_by_itself(self.lightning_module):
            settings["max_grad_norm"] = float(trainer.gradient_clip_val)
            self._change(trainer, "gradient_clip_val", None)
        self.cluster = Trainer(self.lightning_module, self.optimizers[0], scheduler, **settings)
        self._end, self._batches = CommonEnd(), _Batches(self.cluster, trainer, loader, self._rules)
        self._batches.begin()
        for callback in trainer.early_stopping_callbacks:
            check = callback._run_early_stopping_check
            self._change(callback, "_run_early_stopping_check", partial(self._check_early, check))
        if scheduler is not None and self.lightning_module.automatic_optimization:
            self._change(self.lr_scheduler_configs[0], "scheduler", ToldSchedule(scheduler))

    def _schedule(self, trainer: Any) -> Any:
        """The one LR scheduler, if there is any. Raises: ConfigError for what a cluster cannot step alike."""
        if len(self.optimizers) != 1 or not self.optimizers[0].param_groups:
            few = "one; for several, a loop of your own as in examples/gan.py"
            refuse("configure_optimizers", "the number of optimizers", len(self.optimizers), few)
        configs = self.lr_scheduler_configs
        if len(configs) > 1:
            refuse(
                "configure_optimizers",
                "the number of LR schedulers",
                len(configs),
                "one, e.g. a SequentialLR",
            )
        for config in configs:
            if isinstance(config.scheduler, ReduceLROnPlateau):
                other = "another one: each node validates by itself, and in this it would step by itself"
                refuse("configure_optimizers", "the LR scheduler", "ReduceLROnPlateau", other)
            if config.frequency != 1:
                refuse(
                    "configure_optimizers", "frequency", config.frequency, "1, or a scheduler that is as slow"
                )
        return configs[0].scheduler if configs else None

    def _schedule_every(self, trainer: Any, loader: Any) -> Any:
        """By what it counts: what Lightning would step it by, or so many samples."""
        if not self.lightning_module.automatic_optimization:
            return "step"
        if self.lr_scheduler_configs[0].interval == "epoch":
            return "epoch"
        return "step" if trainer.max_steps != -1 else samples_a_step(loader, trainer.accumulate_grad_batches)

    def _check_early(self, check: Any, trainer: Any) -> None:
        """An EarlyStopping's decision is for all."""
        stops = trainer.should_stop
        check(trainer)
        if trainer.should_stop and not stops:
            trainer.should_stop = False
            self._end.want()

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        output = super().training_step(*args, **kwargs)
        if output is None and self._batches is not None and self.lightning_module.automatic_optimization:
            refuse(
                "lightning.Trainer", "the output of training_step", None, "a loss: its samples count as used"
            )
        return output

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Lightning divides the losses of a step by their number; in the cluster each counts by its samples."""
        if self._batches is not None and optimizer is not None:  # Else the script does it.
            assert self.cluster is not None
            batches, batch = self._trainer.accumulate_grad_batches, self._batches.batch
            self.cluster.mean(closure_loss * batches, weight=batch.samples)
            if batches > 1:
                closure_loss = closure_loss * (batches * batch.share)
        return super().backward(closure_loss, optimizer, *args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        """A step of the cluster, with what the precision plugin does around it."""
        if self._batches is None:
            return super().optimizer_step(*args, **kwargs)
        assert self.cluster is not None
        self._end.before_step(self.cluster)
        result = super().optimizer_step(*args, **kwargs)
        self._batches.stepped()
        return result

    def on_train_end(self) -> None:
        super().on_train_end()
        self._leave(None)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._leave(exception)

    def _leave(self, error: BaseException | None) -> None:
        if self._batches is not None:
            assert self.cluster is not None
            self._was_main, self._batches = self.cluster.is_main, None
            self.cluster.__exit__(type(error), error, None)

    def teardown(self) -> None:
        for owner, name, value in reversed(self._changed):
            setattr(owner, name, value)
        self._changed = []
        super().teardown()

    def _change(self, owner: Any, name: str, value: Any) -> None:
        self._changed.append((owner, name, getattr(owner, name)))
        setattr(owner, name, value)


class _Batches(DealtLoader):
    """Those of this node, and what Lightning's loops are to think of them."""

    def __init__(
        self, cluster: Trainer, trainer: Any, loader: DataLoader[Any], rules: dict[str, Any]
    ) -> None:
        super().__init__(cluster, loader, lambda: trainer.accumulate_grad_batches, self._has_ended, rules)
        self._of, self._trainer, self._loop = cluster, trainer, trainer.fit_loop
        self._fetcher = self._loop._data_fetcher

    def begin(self) -> None:
        """In place of the script's loader, whose workers have begun already."""
        combined = self._loop._combined_loader
        combined.reset()
        combined.flattened, combined.limits = [self], None
        self._loop.max_batches = self._trainer.val_check_batch = math.inf
        self._fetcher.prefetch_batches = 0
        iter(self._fetcher)
        self._tell(in_step=False)

    def __iter__(self) -> Iterator[Any]:
        for data in super().__iter__():
            # The last one of a step steps, whichever it is; that it is not of the epoch is said before the next.
            self._fetcher.done = self._trainer.accumulate_grad_batches > 1 and self.batch.last
            yield data
        self._tell(in_step=False)  # Others had the last samples of the epoch: no step of ours has told it.
        progress = self._loop.epoch_loop
        if self._of.session.done:  # A callback has let this node leave.
            self._trainer.should_stop, self._loop.min_epochs, progress.min_steps = True, 0, None
        progress._batches_that_stepped -= 1
        progress.on_advance_end(self._fetcher)  # Which validates.

    def stepped(self) -> None:
        """A step is complete, but Lightning has not counted it yet."""
        progress = self._loop.epoch_loop.batch_progress
        if missing := -progress.current.ready % self._trainer.accumulate_grad_batches:
            progress.increment_by(missing)  # A step had fewer batches, as the data set has no more.
        self._tell(in_step=True)

    def _tell(self, in_step: bool) -> None:
        """What the cluster has come to."""
        loop, cluster = self._loop.epoch_loop, self._of
        by_hand = not self._trainer.lightning_module.automatic_optimization
        steps = (
            loop.manual_optimization.optim_step_progress
            if by_hand
            else loop.automatic_optimization.optim_progress.optimizer.step
        )
        loop._batches_that_stepped = steps.total.completed = cluster.step - in_step
        if (epochs := cluster.epoch - self._loop.epoch_progress.current.ready) > 0:
            self._loop.epoch_progress.increment_by(epochs)  # This node was not there.
        if CommonEnd.has_come(cluster):
            self._trainer.should_stop = True
        self._fetcher.done = loop.batch_progress.is_last_batch = self.epoch_is_over

    def _has_ended(self) -> bool:
        return self._of.step >= self._trainer.max_steps != -1 or (
            self._trainer.should_stop and self._loop._can_stop_early
        )


def check_trainer(trainer: Any) -> None:
    """Raises: ConfigError for what cannot be meant in a cluster, by its name and with what to write instead."""
    one_epoch = (
        "1.0, as an epoch ends when the cluster has trained on all of it; max_steps, or a smaller data set"
    )
    usual = {
        "overfit_batches": (0.0, "0, and a data set with these samples"),
        "limit_train_batches": (1.0, one_epoch),
        "val_check_interval": (1.0, "1.0: after epochs of the cluster, when all have the same weights"),
        "reload_dataloaders_every_n_epochs": (0, "0: all nodes have the same data set, for the whole run"),
    }
    for name, (value, expected) in usual.items():
        given = getattr(trainer, name)
        if given != value and not trainer.fast_dev_run:
            refuse("lightning.Trainer", name, given, expected)
    loaders = trainer.fit_loop._combined_loader.flattened
    if len(loaders) != 1 or not isinstance(loaders[0], DataLoader):
        kinds = ", ".join(type(loader).__name__ for loader in loaders)
        refuse("fit", "train_dataloaders", kinds, "one DataLoader, which the nodes share")
    check_indexed("fit", "train_dataloaders", loaders[0])
    if type(trainer.fit_loop._data_fetcher) is not _PrefetchDataFetcher:
        refuse(
            "lightning.Trainer", "an argument of training_step", "dataloader_iter", "batch, as a step has one"
        )
    if (
        trainer.gradient_clip_val is not None
        and trainer.gradient_clip_algorithm == GradClipAlgorithmType.VALUE
    ):
        refuse("lightning.Trainer", "gradient_clip_algorithm", "value", "'norm'")


def take_folder(logger: Any) -> None:
    """Nodes that share a folder each log to another `version_N`: Lightning's next free one, made here. Two that look
    at the same time would find the same one, and the later one would remove what the earlier one has written."""
    if not isinstance(logger, CSVLogger | TensorBoardLogger) or logger._version is not None:
        return
    while "://" not in logger.log_dir:  # A folder of this machine, or of a file system that is mounted.
        try:
            os.makedirs(logger.log_dir)
            return
        except FileExistsError:
            logger._version = None  # So that it looks again.


def check_callbacks(callbacks: Sequence[Any]) -> None:
    """Raises: ConfigError for one that changes the training state between steps."""
    for callback in callbacks:
        for name, expected in CALLBACKS.items():
            if isinstance(callback, getattr(theirs, name, ())):
                refuse("lightning.Trainer", "a callback", type(callback).__name__, expected)


def _clips_by_itself(module: Any) -> bool:
    return is_overridden("configure_gradient_clipping", module)
