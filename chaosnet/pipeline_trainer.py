"""`PipelineTrainer`: members of a cluster that comes and goes compute the layers of one model, as pipelines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from .callbacks import Callbacks, StepDone
from .data.evaluation_loop import EvaluationLoop
from .data.passes import Passes
from .discovery.remembered import Remembered
from .engines.layers import Model
from .engines.pipeline_settings import PipelineSettings
from .engines.pipelines import Pipelines
from .engines.validation import Validation
from .node.outcomes import Ended
from .node.session import Session
from .page.of_node import NodePage
from .protocols.errors import ConfigError, NodeExpelled
from .protocols.messages import FASTEST
from .script import endings, exit_event
from .script.means import ClusterMean
from .script.member import ScriptMember
from .script.pipeline_steps import PipelineSteps
from .script.process import ScriptNode, hooks
from .script.teller import Teller
from .settings.groups import Checkpoints, Cluster
from .settings.resolved import CheckpointSettings, checkpoint_settings, node_settings
from .settings.table import SETTINGS


class PipelineTrainer(ScriptMember):
    """A member of a cluster that trains one model in pipelines, synchronously, over whatever links there are.

    In a step a member computes the layers that the present pipelines give it. Every member holds all of the training
    state, or with `keepers` a part of it. Members may join, leave and die at any time: the others go on with other
    pipelines, and no step is lost. With `exact`, losses and weights are those of one process, to the
    bit.

    Args:
        model: An nn.Sequential, or a list of modules: each is a layer that takes what the one before gives, a tensor
            or a tuple of tensors. Layers may share parameters. In the place of a module may be a function that builds
            it; with `keepers` a member builds those that it needs.
        optimizer: Any `torch.optim` over its parameters that steps without a closure, or a function that makes one
            for the model.
        loss: A function of the last layer's output and the targets: the mean over the given samples.
        lr_scheduler: Stepped by the trainer, on all members alike; or a function that makes one for the optimizer.
        batch: Samples of a step, of all members together, however many there are.
        micro_batch: Samples that go through the layers at once; it divides `batch`.
        stages: Minimum stages of a pipeline, if there are as many members.
        layout: The pipelines to run as long as there are enough members: "2+2", "4+2+1", "2x3" (two of three).
            Default: those that are predicted to be the fastest.
        exact: Equal to the bit, whoever computes what; gradients then take twice the bytes.
        max_grad_norm: Clip the mean gradient to this norm before the optimizer steps.
        seed: Of the order of samples, and of first values in layers that functions build.
        lr_scheduler_every: "step", "epoch", "evaluation", or whenever so many samples more were trained.
        keepers: Members that keep each layer's parameters and the optimizer's state of them, at least 2. Default: all
            members keep all. With it no member has the whole model between steps: see `gather`.
        first_members: Training begins once so many members are there.
        validation: Samples and measures with which the members validate the model together after each epoch, each
            with its layers: `Validation(dataset, {"accuracy": function})`.
        callbacks: As of `Trainer`.
        quiet: Print nothing.
        log_format: As of `Trainer`.
        summary: As of `Trainer`.
        cluster: As of `Trainer`.
        checkpoints: As of `Trainer`.
        dashboard: As of `Trainer`.
    All but the last seven are the same on all members.
    Raises: As `Trainer`.
    """

    def __init__(
        self,
        model: Model,
        optimizer: torch.optim.Optimizer | Callable[[nn.Module], torch.optim.Optimizer],
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
        keepers: int | None = None,
        first_members: int = 1,
        validation: Validation | None = None,
        callbacks: Callbacks | None = None,
        quiet: bool = False,
        log_format: str | None = None,
        summary: bool = True,
        cluster: Cluster | None = None,
        checkpoints: Checkpoints | None = None,
        dashboard: int | str | None = None,
    ) -> None:
        endings.check_alone()
        self.settings = node_settings(cluster)
        self.name = self.settings.name
        log_format = SETTINGS["log_format"].of(log_format)
        exit_event.speak(log_format, self.name)
        callbacks = SETTINGS["callbacks"].of(callbacks)
        teller = Teller(
            quiet, callbacks or Callbacks(), self.name, log_format, SETTINGS["summary"].of(summary)
        )
        remembered = Remembered(self.name, self.settings.listen, teller.say)
        _check_whole(stages=stages, first_members=first_members)
        settings = PipelineSettings(
            loss, batch, micro_batch, stages, layout, exact, SETTINGS["max_grad_norm"].of(max_grad_norm),
            SETTINGS["seed"].of(seed), SETTINGS["lr_scheduler_every"].of(lr_scheduler_every), keepers, first_members,
            callbacks, validation,
        )  # fmt: skip
        self.session = Session(self.settings, hooks(teller, remembered, self._on_ended))
        _check_keepers(keepers, to_disk := checkpoint_settings(checkpoints))
        self.engine = Pipelines(self.session, model, optimizer, lr_scheduler, settings, to_disk)
        self.model = self.engine.model
        page = NodePage(SETTINGS["dashboard"].of(dashboard))
        self._node = ScriptNode(self.session, self.engine, remembered, page, teller)
        self._steps = PipelineSteps(self.session, self.engine, self._node, teller.say)
        self._evaluation = EvaluationLoop(self.session, self.engine, self._steps)
        with page.unless_opened():
            self.session.open(self.engine)
        self._node.enter(self._steps)

    def _on_ended(self, ended: Ended) -> None:
        self._node.ended(ended)

    @property
    def _is_attached(self) -> bool:
        return True

    def _member(self) -> ScriptNode:
        return self._node

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
        A sample over which the scripts of two members have ended with an error is set aside (`samples_set_aside`).
        Raises: NodeExpelled if the cluster went on without this node and does not take it back.
        """
        if not isinstance(epochs, int) or epochs < 1:
            raise ConfigError(f"epochs: {epochs!r} (expected a whole number from 1 on)")
        self.engine.batches.give(dataset, collate_fn)
        self.engine.wants = epochs
        engine = self.engine
        while engine.batches.epoch < epochs or engine.validates:
            if self._node.leave_if_wanted() or self.session.done:
                break
            done = self._steps.next()
            if done is not None and done.applied:
                yield done

    def evaluate(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Passes:
        """As of `Trainer`: members evaluate the whole model, each with its share of the samples."""
        return self._evaluation.batches(dataset, batch_size, collate_fn)

    def mean(self, value: Any, name: str = "loss", weight: float | None = None) -> ClusterMean:
        """As of `Trainer`: of an evaluation's batch in hand, or of the next step, whose own "loss" goes first."""
        if name in self.engine.validation.names:
            raise ConfigError(f"mean: {name!r} is what the validation comes to (expected another name)")
        counts = weight if weight is not None else self.engine.evaluation.in_hand or 1.0
        return self.engine.means.add(name, value, float(counts))

    # --- what runs ---

    @property
    def layout(self) -> str:
        """The pipelines of the last step: who has which layers, and how many micro-batches."""
        return self._steps.ran

    def relayout(self, layout: str | None) -> None:
        """Ask for other pipelines ("3+1"), from the next step but one on; all members get them.

        They run as long as there are members enough, until others are asked for. None: the fastest, as if nobody had
        asked for any, `layout` of the class included.
        Raises: ConfigError for what cannot run with the layers, micro-batches and members of now.
        """
        self.engine.wishes.ask(FASTEST if layout is None else layout, max(len(self.members), 1))

    @property
    def step(self) -> int:
        """Updates of the model, by the cluster, since it began."""
        return self.engine.step

    @property
    def samples(self) -> float:
        """Samples behind the updates of `step`, of all nodes."""
        return self.engine.samples

    @property
    def epoch(self) -> int:
        """Epochs that the cluster has completed."""
        return self.engine.batches.epoch

    @property
    def members(self) -> tuple[str, ...]:
        """Names of the cluster's members, in the order in which they joined, as agreed with the last step."""
        return tuple(name for name, _ in self.engine.deal)

    @property
    def metrics(self) -> dict[str, float]:
        """Of the last step: its loss, and what scripts averaged; or of the last evaluation."""
        return self.engine.means.last

    @property
    def validated(self) -> dict[str, float]:
        """What the last validation came to, the same on all members: {"loss": 0.3, "accuracy": 0.9}; before, {}."""
        return self.engine.validation.last

    @property
    def samples_set_aside(self) -> int:
        """Samples that the whole cluster passes over as scripts failed over them, each once an epoch."""
        return self.engine.batches.share.left_out().get("samples_set_aside", 0)

    def gather(self) -> None:
        """With `keepers`: have the parameters of all layers here, until the next step; other members take part by
        themselves. Else they are here anyway. Raises: NodeExpelled if this node is out before it has them.
        """
        keeping = self.engine.keeping
        if keeping is None:
            return
        keeping.wants_whole = True
        try:
            while not keeping.has_model and self._steps.skip():
                pass
        finally:
            keeping.wants_whole = False
        if not keeping.has_model:
            self._steps.cut_short()
            raise NodeExpelled(f"{self.name} is out of the cluster, and has not got the whole model")

    def state_hash(self) -> str:
        """A hash of the training state; equal on two members if and only if their states are, to the bit.

        Raises: ConfigError with `keepers`, as this member has only a part of it.
        """
        if self.engine.keeping is not None:
            raise ConfigError(
                "state_hash: this member keeps a part of the training state (expected no `keepers`; the parameters "
                "can be compared after gather(), all of the state in a checkpoint)"
            )
        return self.engine.state.state_hash()


def _check_whole(**given: Any) -> None:
    for name, value in given.items():
        if not isinstance(value, int) or value < 1:
            raise ConfigError(f"{name}: {value!r} (expected a whole number from 1 on)")


def _check_keepers(keepers: int | None, to_disk: CheckpointSettings | None) -> None:
    if keepers is None:
        return
    if not isinstance(keepers, int) or keepers < 2:
        raise ConfigError(
            f"keepers: {keepers!r} (expected at least 2: who alone keeps a layer takes it along when it is lost)"
        )
    if to_disk is not None and to_disk.copies != "shard":
        raise ConfigError(
            f"copies of checkpoints: {to_disk.copies!r} (expected 'shard' with keepers={keepers}: nobody has all)"
        )
    if to_disk is not None and to_disk.kept < 2:
        raise ConfigError(
            f"kept checkpoints: {to_disk.kept} (expected at least 2 with keepers={keepers}: when layers are lost, "
            "all go back to the same one, and one member may have a newer one already)"
        )
