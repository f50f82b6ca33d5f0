"""`PipelineTrainer`: members of a cluster that comes and goes compute the layers of one model, as pipelines."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from . import endings, exit_event
from .callbacks import Callbacks, StepDone
from .engines.pipelines import Pipelines, PipelineSettings
from .node.mailbox import Interrupted
from .node.outcomes import Ended
from .node.session import Hooks, Session
from .page.of_node import NodePage
from .protocols.errors import ConfigError, ScaleOutFailed, describe
from .protocols.messages import Contribution
from .protocols.status import Status
from .remembered import Remembered
from .scheduler.elastic.running import lengths_of
from .setting_groups import Checkpoints, Cluster
from .settings import checkpoint_settings, node_settings
from .settings_table import SETTINGS
from .teller import Teller


class PipelineTrainer:
    """A member of a cluster that trains one model in pipelines, synchronously, over whatever links there are.

    Every member holds all of the training state. What it computes of a step are the layers that the pipelines of the
    moment give it. Members may join, leave and die at any time: the others go on with other pipelines, and no step is
    lost. With `exact`, losses and weights are those of one process, to the bit.

    Args:
        model: An nn.Sequential, or a list of modules: each is a layer that takes what the one before gives, a tensor
            or a tuple of tensors. Layers may share parameters.
        optimizer: Any `torch.optim` over its parameters that steps without a closure.
        loss: Of the last layer's output and the targets: the mean over the samples that it is given.
        lr_scheduler: Stepped by the trainer, on all members alike.
        batch: Samples of a step, of all members together, however many there are.
        micro_batch: Samples that go through the layers at once; it divides `batch`.
        stages: No pipeline has fewer, if there are as many members.
        layout: The pipelines that are wanted, as long as there are members enough: "2+2", "4+2+1", "2x3" (two of
            three). Default: those that are predicted to be the fastest.
        exact: The same to the bit, whoever computes what; gradients take twice the bytes then.
        max_grad_norm: Clip the mean gradient to this norm before the optimizer steps.
        seed: Of the order of samples.
        lr_scheduler_every: "step", "epoch", or whenever so many samples more were trained.
        callbacks: As of `Trainer`.
        quiet: Print nothing.
        log_format: As of `Trainer`.
        cluster: As of `Trainer`.
        checkpoints: As of `Trainer`.
        dashboard: As of `Trainer`.
    All but the last six are the same on all members.
    Raises: As `Trainer`.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: torch.optim.Optimizer,
        loss: Callable[[Any, Any], torch.Tensor],
        lr_scheduler: Any = None,
        *,
        batch: int,
        micro_batch: int,
        stages: int = 1,
        layout: str = "",
        exact: bool = True,
        max_grad_norm: float | None = None,
        seed: int = 0,
        lr_scheduler_every: str | int = "step",
        callbacks: Callbacks | None = None,
        quiet: bool = False,
        log_format: str | None = None,
        cluster: Cluster | None = None,
        checkpoints: Checkpoints | None = None,
        dashboard: int | str | None = None,
    ) -> None:
        endings.check_alone()
        self.settings = node_settings(cluster)
        self.name = self.settings.name
        log_format = SETTINGS["log_format"].of(log_format)
        exit_event.speak(log_format, self.name)
        self._teller = Teller(quiet, callbacks or Callbacks(), self.name, log_format)
        self._members = Remembered(self.name, self.settings.listen, self._teller.say)
        self.driver = threading.current_thread()
        self._pid, self._closed = os.getpid(), False
        self._turn = threading.RLock()  # The main thread may end beside the one that trains.
        told = PipelineSettings(
            loss,
            batch,
            micro_batch,
            stages,
            layout,
            exact,
            max_grad_norm,
            seed,
            lr_scheduler_every,
            callbacks,
        )
        self.session = Session(self.settings, self._hooks())
        to_disk = checkpoint_settings(checkpoints)
        self.engine = Pipelines(self.session, model, optimizer, lr_scheduler, told, to_disk)
        self.model = self.engine.model
        self._ran = ""
        self._page = NodePage(SETTINGS["dashboard"].of(dashboard))
        self._enter()

    def _hooks(self) -> Hooks:
        teller = self._teller
        return Hooks(
            say=teller.say,
            wants_exit=exit_event.exit_wanted,
            ended=self._on_ended,
            notice=teller.notice,
            parked=teller.parked,
            view=self._members.entered,
        )

    def _enter(self) -> None:
        self.session.open(self.engine)
        self._page.start(self.session)
        exit_event.install(self.session.want_out)
        endings.opened(self)
        try:
            self.session.enter()
        except (ScaleOutFailed, SystemExit) as error:
            if self.session.ended is None:
                self.crash(describe(error))
            else:
                self._closed = isinstance(error, SystemExit)
                self._stop()
            raise

    # --- training ---

    def steps(
        self, dataset: Any, epochs: int, collate_fn: Callable[[list[Any]], Any] | None = None
    ) -> Iterator[StepDone]:
        """Train until the cluster has done so many epochs; gives each step, once it is done.

        Args:
            dataset: Anything with len() and [index], the same on all members; items are pairs, inputs of the first
                layer and targets of the loss.
            epochs: Of all members together. A late joiner begins with the present one.
            collate_fn: Makes such a pair of a list of samples. Default: as torch's DataLoader does.
        Raises: NodeExpelled if the cluster went on without this node and does not take it back.
        """
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs: {epochs!r} (expected a whole number from 1 on)")
        self.engine.batches.give(dataset, collate_fn)
        self.engine.wants = epochs
        while self.engine.batches.epoch < epochs and not self._leaves_if_wanted():
            done = self._step()
            if done is not None and done.applied:
                yield done

    def _leaves_if_wanted(self) -> bool:
        """Is this node out, or to leave? Ctrl+C with a script that never asks for it: leave, and end the script."""
        session = self.session
        if not session.done or exit_event.script_captures_exit():
            return session.done
        if exit_event.exit_wanted() and session.ended is None:
            self.request_node_exit()
            raise SystemExit(0)
        return True

    def _step(self) -> StepDone | None:
        """Take part in the step that is due. None: what this node had for it does not count."""
        self.driver = threading.current_thread()
        with self._turn:
            done = None if self.session.ended else self._take_part()
        endings.rest_if_all_ends()
        return done

    def _take_part(self) -> StepDone | None:
        session, engine = self.session, self.engine
        before, began_s = engine.step, time.monotonic()
        contribution = self._compute()
        waited_s = time.monotonic()
        outcome = session.hear() if contribution is None else session.step(contribution, engine.key)
        if outcome is None or session.ended is not None:
            return None
        session.rates.sync_delay_s = time.monotonic() - waited_s
        session.adopt(outcome)
        took_s = max(time.monotonic() - began_s, 1e-6)
        session.rates.samples_per_s = engine.sums.loss_samples / took_s if engine.step > before else 0.0
        return engine.last

    def _compute(self) -> Contribution | None:
        """This node's part of the step. None: it is void, and something else is to be heard."""
        try:
            contribution = self.engine.compute()
        except Interrupted:
            return None
        self._tell_pipelines()
        return contribution

    def _tell_pipelines(self) -> None:
        """Those of the step under way, if they are others."""
        running = self.engine.running
        if running is None or str(running.laid) == self._ran:
            return
        self._ran = self.session.rates.pipelines = str(running.laid)
        others = "".join(f"; {why} {us / 1000:.1f} ms" for why, us in running.others if why != running.why)
        self._teller.say(
            f"pipelines ({running.why}): {running.laid}; predicted {running.predicted_us / 1000:.1f} ms of computing"
            f" a step{others}"
        )

    # --- what runs ---

    @property
    def layout(self) -> str:
        """The pipelines of the last step: who has which layers, and how many micro-batches."""
        return self._ran

    def relayout(self, layout: str) -> None:
        """Ask for other pipelines, from the next step but one on; all members get them. Raises: ConfigError."""
        lengths_of(layout)
        self.engine.wish = layout

    @property
    def step(self) -> int:
        """Updates of the model, by the cluster, since it began."""
        return self.engine.step

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        return self.engine.batches.epoch

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the cluster's members, in the order in which they joined, as agreed with the last step."""
        return tuple(name for name, _ in self.engine.deal)

    @property
    def is_main(self) -> bool:
        """Has this node been a member for the longest? At most one is told yes after a step."""
        return self.members[:1] == (self.name,)

    @property
    def metrics(self) -> dict[str, float]:
        """The cluster's means of the last step: its loss."""
        return dict(self.engine.last.metrics) if self.engine.last else {}

    # --- leaving ---

    def request_node_exit(self) -> None:
        """Leave the cluster; the others go on. In a callback, it takes effect after the step under way."""
        if self._closed or self._pid != os.getpid():
            return
        session, engine = self.session, self.engine
        session.leave()
        if engine.calling.under_way and threading.current_thread() is self.driver:
            return  # A callback has asked for it: the step under way ends first, and then `steps`.
        while session.ended is None:
            if engine.is_wanted and not engine.batches.own_length:
                self.crash("it has no data")
                return
            self._step()
        self._closed = True
        engine.close(abandon=False)
        self._stop()
        if session.ended.last:
            self._members.forget()
        session.say(
            f"{self.name} left after step {engine.step} ({session.ended.reason}), joined at step "
            f"{session.joined_step}"
        )

    close = request_node_exit

    def crash(self, reason: str, blames: bool = False) -> None:
        """The script ends with an error: say so to the others, and compute nothing more."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        self.session.crash(reason, (), self.engine.batches.epoch)
        self._stop()
        self.engine.close(abandon=True)
        self.session.say(f"{self.name} left after step {self.engine.step}: its script ended with {reason}")

    def _on_ended(self, ended: Ended) -> None:
        if ended.how == "left":
            if not self.session.leaving:
                exit_event.want_exit()  # It was `chaosnet leave`: the script hears of it as of Ctrl+C.
            return
        self._stop()
        self.engine.close(abandon=True)

    def _stop(self) -> None:
        self.session.stop()
        self._page.stop()
        exit_event.remove(self.session.want_out)
        endings.closed(self)

    def __enter__(self) -> PipelineTrainer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.request_node_exit()
        else:
            self.crash(describe(error))

    # --- telling ---

    def state_hash(self) -> str:
        """A hash of the training state; equal on two members if and only if their states are, to the bit."""
        return self.engine.state.state_hash()

    def status(self, history: bool = False) -> Status:
        """The cluster as this node sees it. `history`: with all events and steps that this node has kept."""
        return self.session.status(history)
