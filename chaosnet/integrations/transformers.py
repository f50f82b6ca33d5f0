"""`transformers.Trainer` as a node of a cluster: import `Trainer` from here.

Its loop counts batches, steps and epochs, each process by itself; here the cluster counts. So its data loader is one
whose batches the cluster deals out, and its state is told after each step what the cluster has come to. The loop
fetches all batches of a step before the first is computed, and wants as many in each.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from ..extras import demand

demand("transformers", "chaosnet.integrations.transformers")

import torch
import transformers as theirs
from torch.utils.data import DataLoader, IterableDataset

from ..trainer import Trainer as ClusterTrainer
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
    "max_grad_norm": "TrainingArguments(max_grad_norm=...), to which the cluster's mean is clipped here",
    "updates": "none, as there is one optimizer",
}
"""Settings of chaosnet's Trainer that transformers has, too."""
NOTHING: dict[str, Any] = {}
"""Fills up a step that has fewer batches than the loop counts on."""
Base: Any = theirs.Trainer if TYPE_CHECKING else object


class ChaosnetMixin(Base):
    """Before a trainer of transformers' kind, it makes one that is a node: `class Mine(ChaosnetMixin, Theirs)`.

    Args:
        chaosnet: Settings of `chaosnet.Trainer`, and `global_batch` and `min_samples` of its `batches`.
    Attributes:
        cluster: The chaosnet.Trainer, once `train` has begun to train.
    """

    get_train_dataloader: Callable[[], Any]  # Of the class that comes after this one, or of a derived one.

    def __init__(self, *args: Any, chaosnet: dict[str, Any] | None = None, **kwargs: Any) -> None:
        self._settings, self._rules = settings_and_rules("chaosnet", chaosnet or {}, ELSEWHERE)
        self.cluster: ClusterTrainer | None = None
        self._run: _Run | None = None  # While it trains.
        self._was_main = True  # Before this node was a member, and when it left.
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: Any = None, trial: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As ever. This node joins when its first batch is due, and leaves at the end."""
        check_arguments(self, resume_from_checkpoint, trial)
        self._run = _Run(self, dict(self._settings), self._rules)
        self.callback_handler.callbacks.insert(0, self._run)  # What it tells, the others are to see.
        make = self.get_train_dataloader
        self.get_train_dataloader = partial(self._dealt_loader, make)
        error: BaseException | None = None
        try:
            return super().train(None, trial, *args, **kwargs)
        except BaseException as raised:
            error = raised
            raise
        finally:
            self._was_main = self.is_world_process_zero()
            self.get_train_dataloader = make
            self.callback_handler.callbacks.remove(self._run)
            run, self._run = self._run, None
            run.end(error)

    # --- what the loop asks, in this order ---

    def _dealt_loader(self, make: Callable[[], Any]) -> Any:
        """What the class makes, or one derived from it. Accelerate prepares nothing: it would put its own around."""
        assert self._run is not None
        self.accelerator.prepare = lambda loader: loader
        try:
            return _Loader(self._run, make())
        finally:
            del self.accelerator.prepare

    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Steps of the whole run are those of a node that is alone, for schedules; nothing ends by counting."""
        epochs, _, *examples, _, max_steps = super().set_initial_training_values(args, dataloader)
        steps = sys.maxsize // args.gradient_accumulation_steps
        batches = steps * args.gradient_accumulation_steps
        return (sys.maxsize if args.max_steps > 0 else epochs, steps, *examples, batches, max_steps)

    def get_batch_samples(self, epoch_iterator: Iterator[Any], num_batches: int, device: Any) -> Any:
        """All batches of a step, filled up at the front so that the last one steps."""
        assert self._run is not None
        batches = self._run.of_step(epoch_iterator)
        _, items = super().get_batch_samples(iter(batches), len(batches), device)
        missing = num_batches - len(batches) if batches else 0
        return [NOTHING] * missing + batches, items

    def training_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Its loss counts by the samples of the batch, and not as one of so many batches."""
        assert self._run is not None
        if inputs is NOTHING:
            return torch.zeros((), device=self.args.device)
        self.current_gradient_accumulation_steps = 1 / self._run.next_share()  # The loss is divided by it.
        loss = super().training_step(model, inputs, *args, **kwargs)
        self._run.loss += loss
        return loss

    def _clip_grad_norm(self, model: Any) -> None:
        """The cluster's mean is clipped, and not what this node brings to it."""

    # --- what is for one node, or for all ---

    def evaluate(self, *args: Any, **kwargs: Any) -> Any:
        """As ever. If a callback stops training over it, all nodes stop with the next step."""
        stops = self.control.should_training_stop
        metrics = super().evaluate(*args, **kwargs)
        if self._run is not None and self.control.should_training_stop and not stops:
            self.control.should_training_stop = False
            self._run.common_end.want()
        return metrics

    def is_world_process_zero(self) -> bool:
        """Is this the node that writes files? The one that has been a member for the longest."""
        if self._run is None or self._run.dealt is None or self.cluster is None:
            return self._was_main
        return self.cluster.is_main

    def _save_checkpoint(self, *args: Any, **kwargs: Any) -> None:
        if self.is_world_process_zero():
            super()._save_checkpoint(*args, **kwargs)


class Trainer(ChaosnetMixin, theirs.Trainer):
    """`transformers.Trainer` whose `train` is the life of a node in a cluster. See ChaosnetMixin."""


class _Run(theirs.TrainerCallback):
    """One call of `train`: this node's life in the cluster, and what the loop is to think of where it is.

    Attributes:
        dealt: The batches; None before it has joined.
        loss: Of the step under way.
        common_end: When all stop.
    """

    def __init__(self, trainer: Any, settings: dict[str, Any], rules: dict[str, Any]) -> None:
        self._trainer, self._settings, self._rules = trainer, settings, rules
        self.dealt: DealtLoader | None = None
        self.common_end = CommonEnd()
        self.loss: Any = 0.0
        self._shares: list[float] = []  # Of the step's batches that are to be computed.
        self._length = 0  # Samples of an epoch, as the loader has them: there may be no train_dataset.
        self._told_step = 0  # Of the cluster, as the loop knows it.
        self._told_samples, self._told_epoch, self._samples_a_step = 0.0, 0, 0.0

    def join(self, loader: DataLoader[Any]) -> DealtLoader:
        """Become a member, once. All else has been set up, so what a founder has now is what others get."""
        if self.dealt is not None:
            return self.dealt
        trainer, settings = self._trainer, self._settings
        args, scheduler, optimizer = trainer.args, trainer.lr_scheduler, trainer.optimizer
        if not isinstance(loader, DataLoader):
            kind = "one that returns a DataLoader, which the nodes share"
            refuse("Trainer", "get_train_dataloader", type(loader).__name__, kind)
        check_indexed("Trainer", "get_train_dataloader", loader)
        self._length = len(loader.dataset)  # type: ignore[arg-type]
        settings.setdefault("seed", args.seed if args.data_seed is None else args.data_seed)
        by_samples = samples_a_step(loader, args.gradient_accumulation_steps)
        settings.setdefault("lr_scheduler_every", "step" if args.max_steps > 0 else by_samples)
        if args.max_grad_norm > 0:
            settings["max_grad_norm"] = float(args.max_grad_norm)
        trainer.cluster = ClusterTrainer(
            trainer.model, getattr(optimizer, "optimizer", optimizer), scheduler, **settings
        )
        trainer.lr_scheduler = ToldSchedule(scheduler)
        if getattr(optimizer, "scaler", None) is not None:
            optimizer.__setstate__({})  # It keeps the step that the optimizer had.
        self.dealt = DealtLoader(
            trainer.cluster, loader, lambda: args.gradient_accumulation_steps, self.is_over, self._rules
        )
        return self.dealt

    def end(self, error: BaseException | None) -> None:
        """Leave, or tell the others of the error."""
        if self.dealt is not None:
            self._trainer.lr_scheduler = self._trainer.lr_scheduler.scheduler
            self._trainer.cluster.__exit__(type(error), error, None)

    def is_over(self) -> bool:
        """Has the cluster done what was asked for, or has this node left?"""
        args, cluster = self._trainer.args, self._trainer.cluster
        if self.common_end.has_come(cluster) or cluster.session.done:
            return True
        if args.max_steps > 0:
            return bool(cluster.step >= args.max_steps)
        samples = args.num_train_epochs * self._length
        return bool(cluster.epoch >= args.num_train_epochs or cluster.samples >= samples)

    # --- batches ---

    def of_step(self, batches: Iterator[Any]) -> list[Any]:
        """All of the next step; none if the epoch is over."""
        found, self._shares, self.loss = [], [], 0.0
        for inputs in batches:
            assert self.dealt is not None, "the first batch comes with the cluster"
            found.append(inputs)
            self._shares.append(self.dealt.batch.share)
            if self.dealt.batch.last:
                break
        if len(found) > 1:  # Gradients leave during the last backward, and not during the first.
            self._trainer.cluster.engine.gradients.arm(None)
        if not found:
            control = self._trainer.control
            control.should_epoch_stop, control.should_training_stop = True, self.is_over()
            self._count(0)  # Others may have had samples in further steps.
        return found

    def next_share(self) -> float:
        """Of the next batch in its step."""
        share = self._shares.pop(0)
        if share < 1 and not self._shares:
            engine = self._trainer.cluster.engine
            engine.gradients.arm(engine.weight)
        return share

    # --- what the loop is told, before its other callbacks are ---

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        cluster = self._trainer.cluster
        cluster.mean(self.loss, weight=cluster.engine.weight)
        self.common_end.before_step(cluster)

    def on_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.max_steps <= 0:
            state.max_steps = self._whole_run()
        self._count(1)  # The loop counts the step next, and is over where it comes to max_steps.
        step = self._trainer.cluster.step
        state.max_steps = step if self.is_over() else max(state.max_steps, step + 1)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._count(0)  # It has said another epoch.
        for callback in self._trainer.callback_handler.callbacks:
            if isinstance(callback, theirs.ProgressCallback) and callback.training_bar is not None:
                callback.training_bar.total = state.max_steps

    def _whole_run(self) -> int:
        """About how many steps it has: the more nodes there are, the more samples has a step."""
        cluster, data = self._trainer.cluster, self._length
        a_step = (cluster.samples - self._told_samples) / max(1, cluster.step - self._told_step)
        # The last one of an epoch may be short.
        if cluster.epoch == self._told_epoch or not self._samples_a_step:
            self._samples_a_step = a_step or self._samples_a_step
        self._told_samples, self._told_epoch = cluster.samples, cluster.epoch
        epochs, rest = divmod(max(0.0, self._trainer.args.num_train_epochs * data - cluster.samples), data)
        a_step = max(1.0, self._samples_a_step)
        return int(cluster.step + epochs * math.ceil(data / a_step) + math.ceil(rest / a_step))

    def _count(self, ahead: int) -> None:
        """`ahead`: steps that the loop is about to count. The others had no losses here: its means leave them out."""
        trainer = self._trainer
        without = trainer.cluster.step - ahead - self._told_step
        if hasattr(trainer, "_initial_global_step"):  # From 5.19 on; `train_loss` was by all steps before.
            trainer._initial_global_step += without
        trainer._globalstep_last_logged += without
        self._told_step = trainer.cluster.step
        trainer.state.global_step = trainer.cluster.step - ahead
        trainer.state.epoch = trainer.cluster.samples / self._length


class _Loader:
    """What the loop takes for its DataLoader. Each pass has the rest of one of the cluster's epochs."""

    def __init__(self, run: _Run, loader: DataLoader[Any]) -> None:
        self.dataset, self._run, self._loader = getattr(loader, "dataset", None), run, loader

    def __len__(self) -> int:
        """For a node that is alone."""
        return len(self._loader)

    def __iter__(self) -> Iterator[Any]:
        dealt, is_empty = self._run.join(self._loader), True
        while is_empty and not self._run.is_over():
            for data in dealt:  # The loop takes a pass without batches for the end.
                is_empty = False
                yield data


def check_arguments(trainer: Any, resume_from_checkpoint: Any, trial: Any) -> None:
    """Raises: ConfigError for what cannot be meant in a cluster, by its name and with what to write instead."""
    args = trainer.args
    if resume_from_checkpoint not in (None, False):
        to_disk = "chaosnet={'checkpoints': Checkpoints(FOLDER, resume=True)}, from which all nodes go on"
        refuse(
            "train",
            "resume_from_checkpoint",
            resume_from_checkpoint,
            f"{to_disk}; for weights, from_pretrained",
        )
    if trial is not None:
        refuse("train", "trial", trial, "none, as a search starts runs by itself")
    if isinstance(trainer.train_dataset, IterableDataset):
        indexed = "one with len() and [index], which the nodes share"
        refuse("Trainer", "train_dataset", type(trainer.train_dataset).__name__, indexed)
    one = "1, as a process is a node: chaosnet run for each, with CUDA_VISIBLE_DEVICES"
    whole = "none, as each node holds the whole model"
    refused = {
        "world_size": (args.world_size, 1, one),
        "n_gpu": (max(args.n_gpu, 1), 1, one),
        "deepspeed": (trainer.is_deepspeed_enabled, False, whole),
        "fsdp": (trainer.is_fsdp_enabled, False, whole),
        "auto_find_batch_size": (
            args.auto_find_batch_size,
            False,
            "False; nodes may have different batch sizes",
        ),
        "load_best_model_at_end": (
            args.load_best_model_at_end,
            False,
            "False, as only one node has the file",
        ),
    }
    for name, (value, usual, expected) in refused.items():
        if value != usual:
            refuse("TrainingArguments", name, value, expected)
    if (how := str(args.train_sampling_strategy)) not in ("random", "sequential"):
        refuse("TrainingArguments", "train_sampling_strategy", how, "'random' or 'sequential'")
    if (kind := args.lr_scheduler_type) in ("reduce_lr_on_plateau", "greedy"):
        other = "another one: each node evaluates by itself, and in this it would step by itself"
        refuse("TrainingArguments", "lr_scheduler_type", str(getattr(kind, "value", kind)), other)
