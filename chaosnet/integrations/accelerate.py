"""`accelerate.Accelerator` as a node of a cluster: import it from here, and loop over `accelerator.epochs(N)`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for epoch in accelerator.epochs(10):
        for x, y in loader:
            with accelerator.accumulate(model): ...

The first DataLoader that is prepared is the one that the cluster deals out; others are each node's own. To
`accumulate`, the last batch of each step is the end of a data loader.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from pathlib import Path
from typing import Any

from ..extras import demand

demand("accelerate", "chaosnet.integrations.accelerate")

import accelerate
from accelerate.utils import DistributedType, send_to_device
from torch.optim.lr_scheduler import ReduceLROnPlateau
from torch.utils.data import DataLoader

from ..trainer import Trainer
from .dealt import DealtLoader, ToldSchedule, check_indexed, refuse, samples_a_step, settings_and_rules


class Accelerator(accelerate.Accelerator):
    """Prepared are a model, its optimizer, a DataLoader, and perhaps an LR scheduler. Then this process is a node.

    Args:
        chaosnet: Settings of `chaosnet.Trainer`, and `global_batch` and `min_samples` of its `batches`.
    Attributes:
        cluster: The chaosnet.Trainer, from the first epoch or batch on.
        rules: Those of `chaosnet` that are of `batches`.
    """

    def __init__(self, *args: Any, chaosnet: dict[str, Any] | None = None, **kwargs: Any) -> None:
        elsewhere = {"updates": "none, as there is one optimizer"}
        self._settings, self.rules = settings_and_rules("chaosnet", chaosnet or {}, elsewhere)
        self.cluster: Trainer | None = None
        self._loader: _Loader | None = None
        super().__init__(*args, **kwargs)
        if self.distributed_type != DistributedType.NO:
            one = "NO, as a process is a node: chaosnet run for each, without accelerate launch"
            refuse("Accelerator", "distributed_type", self.distributed_type.value, one)
        if not self.gradient_state.sync_with_dataloader:
            refuse("Accelerator", "sync_with_dataloader", False, "True")

    def prepare(self, *args: Any, **kwargs: Any) -> Any:
        """As ever, but the first DataLoader of all is one that the cluster deals out."""
        objects = list(args)
        for place, each in enumerate(objects):
            if isinstance(each, DataLoader) and self._loader is None:
                objects[place] = self._loader = _Loader(self, each)
        return super().prepare(*objects, **kwargs)

    def epochs(self, count: int) -> Iterator[int]:
        """What the cluster still has to do of `count` epochs; a late joiner begins with the present one."""
        yield from self.join().epochs(count)

    def join(self) -> Trainer:
        """Become a member, with what has been prepared. The first epoch or batch does it, too."""
        if self.cluster is not None:
            return self.cluster
        for name, found in {"model": self._models, "optimizer": self._optimizers}.items():
            if len(found) != 1:
                refuse("prepare", f"the number of {name}s", len(found), "one before the first epoch")
        if len(self._schedulers) > 1:
            refuse(
                "prepare", "the number of LR schedulers", len(self._schedulers), "one, e.g. a SequentialLR"
            )
        if self._loader is not None:
            check_indexed("prepare", "the first DataLoader", self._loader.loader)
        settings, optimizer = dict(self._settings), self._optimizers[0]
        prepared = self._schedulers[0] if self._schedulers else None
        scheduler = None if prepared is None else prepared.scheduler
        if isinstance(scheduler, ReduceLROnPlateau):
            refuse(
                "prepare",
                "the LR scheduler",
                "ReduceLROnPlateau",
                "another one, as nodes have losses of their own",
            )
        if prepared is not None and self._loader is not None:
            by_samples = samples_a_step(self._loader.loader, self.gradient_accumulation_steps)
            settings.setdefault("lr_scheduler_every", by_samples)
        self.cluster = Trainer(self.unwrap_model(self._models[0]), optimizer.optimizer, scheduler, **settings)
        if prepared is not None:
            by_epochs = settings.get("lr_scheduler_every") == "epoch"
            prepared.scheduler = _StepsSchedule(scheduler, self.cluster, by_epochs)
        if optimizer.scaler is not None:
            optimizer.__setstate__({})  # It keeps the step that the optimizer had.
        return self.cluster

    def backward(self, loss: Any, **kwargs: Any) -> None:
        """Accelerate divides the losses of a step by their number; in the cluster each counts by its samples."""
        batch = self._loader.batch if self._loader is not None else None
        if self.cluster is not None and batch is not None:
            self.cluster.mean(loss, weight=batch.samples)
            if self.gradient_accumulation_steps > 1:
                loss = loss * (self.gradient_accumulation_steps * batch.share)
        super().backward(loss, **kwargs)

    @property
    def is_main_process(self) -> bool:
        """Is this the node that writes files? The one that has been a member for the longest."""
        return self.cluster.is_main if self.cluster is not None else bool(super().is_main_process)

    def on_main_process(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A decorator: it runs on that node only. To accelerate itself each node is the main process."""

        @wraps(function)
        def there(*args: Any, **kwargs: Any) -> Any:
            return function(*args, **kwargs) if self.is_main_process else None

        return there

    def save(self, *args: Any, **kwargs: Any) -> None:
        """By that node; by each, if the project's configuration says `save_on_each_node`."""
        if self.is_main_process or self.project_configuration.save_on_each_node:
            super().save(*args, **kwargs)

    def save_state(self, output_dir: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As `save`. A node that writes for the first time numbers its folders after those that are there."""
        project = self.project_configuration
        numbered = project.automatic_checkpoint_naming
        if not self.is_main_process and not project.save_on_each_node:
            project.iteration += 1
            return None
        if numbered and self.cluster is not None:
            folders = Path(self.project_dir, "checkpoints").glob("checkpoint_*")
            there = [
                int(name) for each in folders if (name := each.name.removeprefix("checkpoint_")).isdigit()
            ]
            project.iteration = max([project.iteration, *(number + 1 for number in there)])
        return super().save_state(output_dir, *args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        """As `save`."""
        if self.is_main_process or self.project_configuration.save_on_each_node:
            super().save_model(*args, **kwargs)

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        to_disk = (
            "Accelerator(chaosnet={'checkpoints': Checkpoints(FOLDER, resume=True)}), from which all go on"
        )
        refuse("Accelerator", "load_state", args[0] if args else None, to_disk)

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        if dataloader is self._loader:
            refuse(
                "Accelerator", "skip_first_batches", num_batches, "none: a node goes on where the cluster is"
            )
        return super().skip_first_batches(dataloader, num_batches)


class _Loader:
    """The prepared DataLoader. Each pass has the rest of the cluster's epoch.

    Attributes:
        batch: The last one that was handed out; None outside of a pass.
        end_of_dataloader, remainder: As accelerate asks its own loaders.
    """

    remainder = -1

    def __init__(self, accelerator: Accelerator, loader: DataLoader[Any]) -> None:
        self.loader, self.dataset, self._accelerator = loader, loader.dataset, accelerator
        self.batch: Any = None
        self.end_of_dataloader = False

    def __len__(self) -> int:
        """For a node that is alone."""
        return len(self.loader)

    def __iter__(self) -> Iterator[Any]:
        accelerator = self._accelerator
        steps = accelerator.gradient_accumulation_steps
        dealt = DealtLoader(accelerator.join(), self.loader, lambda: steps, lambda: False, accelerator.rules)
        accelerator.gradient_state._add_dataloader(self)
        try:
            for data in dealt:
                self.batch, self.end_of_dataloader = dealt.batch, dealt.batch.last
                yield send_to_device(data, accelerator.device)
        finally:
            self.batch, self.end_of_dataloader = None, False
            accelerator.gradient_state._remove_dataloader(self)


class _StepsSchedule(ToldSchedule):
    """One that the script steps with each step of the optimizer, or with each epoch, as was said."""

    def __init__(self, scheduler: Any, cluster: Trainer, by_epochs: bool) -> None:
        super().__init__(scheduler)
        self._cluster, self._by_epochs = cluster, by_epochs
        self._called_at = cluster.updates_here

    def step(self, *args: Any, **kwargs: Any) -> None:
        before, self._called_at = self._called_at, self._cluster.updates_here
        if self._called_at > before + 1 and not self._by_epochs:
            often = "once after each; or for a schedule by epochs, chaosnet={'lr_scheduler_every': 'epoch'}"
            refuse(
                "scheduler.step()", "the number of optimizer steps before it", self._called_at - before, often
            )
