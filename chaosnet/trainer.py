"""`Trainer`: three lines put a plain PyTorch script into a cluster that comes and goes (Chaos, Sec. V-B)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from .callbacks import Callbacks, given_trainer
from .data.batches import Batches
from .data.passes import Passes
from .data.share import DataShare
from .discovery.remembered import Remembered
from .engines.data_parallel import DataParallel
from .node.collector import held_off
from .node.outcomes import Ended
from .node.session import Hooks, Session
from .page.of_node import NodePage
from .protocols.errors import ConfigError
from .script import endings, exit_event
from .script.means import ClusterMean, Means
from .script.process import ScriptNode, hooks
from .script.rules import UPDATE
from .script.run_facts import Run, RunFacts
from .script.steps import ScriptSteps
from .script.teller import Teller
from .settings.groups import Checkpoints, Cluster
from .settings.resolved import checkpoint_settings, node_settings, step_settings
from .settings.table import SETTINGS, STEP
from .training.named_updates import Optimizers


class Trainer(RunFacts):
    """A member of a cluster that trains one model, synchronously, over whatever links there are.

    Joins the cluster that `join` (or CHAOSNET_JOIN) names, or starts one. Returns when this node is a member
    and holds the cluster's training state: parameters, buffers, optimizer, LR scheduler, RNG, epoch and step,
    `extra_state`. Model, optimizer and the rest may also be given later, to `attach`.

    When the cluster has gone on without this node (it was cut off, or slept), the next update() rejoins: it
    pulls the state anew and returns. This node's gradients for that step do not count.

    Args:
        model: Any module; all members have the same one. Several: a dictionary by name.
        optimizer: Any `torch.optim` over its parameters that steps without a closure (so not LBFGS). Several
            that step together, e.g. Muon and AdamW: a list. Several in turn: a dictionary by name; then each
            `update()` names the one that it steps, in that order.
        lr_scheduler: Trainer steps it on all nodes alike; the script's own calls of `step()` may stay.
            `ReduceLROnPlateau` follows `trainer.mean(loss)`.
        extra_state: A dictionary of your own plain data and tensors that joiners receive, in place.
        updates: With several optimizers: the order of updates in a round, e.g. ("D", "D", "G"). The same on
            all nodes.
        lr_scheduler_every: When the scheduler is stepped: "step", "epoch" (one of `batches`, by the cluster),
            "evaluation" (a loop over `evaluate`), or whenever the cluster has trained so many samples more.
            The same on all nodes.
        max_grad_norm: Clip the cluster's mean gradient to this norm before the optimizer steps. The same on
            all nodes.
        after_step: Called on every node after each step of the optimizer, also for the steps that a joiner
            catches up with. For whatever else changes the training state at every step, e.g. an average of
            weights.
        callbacks: Functions of yours that are called after steps, when state has arrived, and on events of
            the cluster.
        on_divergence: What happens when nodes' training states differ, which is checked at every step:
            "stop": all raise `ReplicasDiffer`. "heal": the minority pulls the state anew. "warn": the
            difference is printed, and training goes on. The same on all nodes.
        seed: Seed of the order in which `batches` deals out samples.
        same_rng: All nodes draw the same random numbers in a step. The same on all nodes. Else each node
            draws its own, and the founder's generators stay as the script has seeded them.
        guard: What to do with a gradient that is not finite, or far larger than usual: "skip", "clip" or
            "evict". The same on all nodes.
        guard_factor: "Far larger" is this many times the median of recent norms.
        quiet: Print nothing.
        log_format: What this node prints on stderr: "text", lines for people, or "json", an object per line.
        summary: Print what the run has come to when this node leaves.
        cluster: How this node meets the others, and what goes over its links.
        checkpoints: Where and when the state goes to disk, and whether training goes on from there.
        dashboard: Serve the cluster's page and metrics from this process, read-only: a port of 127.0.0.1 (0:
            any free one), or "HOST:PORT".
    Raises: ScaleOutFailed if the cluster cannot be reached or refuses, ConfigError for a setting or model
        that cannot work, CheckpointError if it cannot be resumed. SystemExit after Ctrl+C while it joins.
    """

    def __init__(
        self,
        model: nn.Module | dict[str, nn.Module] | None = None,
        optimizer: Optimizers | None = None,
        lr_scheduler: Any = None,
        extra_state: dict[str, Any] | None = None,
        *,
        updates: tuple[str, ...] | None = None,
        lr_scheduler_every: str | int = "step",
        max_grad_norm: float | None = None,
        after_step: Callable[..., None] | None = None,
        callbacks: Callbacks | None = None,
        on_divergence: str = "stop",
        seed: int = 0,
        same_rng: bool = False,
        guard: str | None = None,
        guard_factor: float = 10.0,
        quiet: bool = False,
        log_format: str | None = None,
        summary: bool = True,
        cluster: Cluster | None = None,
        checkpoints: Checkpoints | None = None,
        dashboard: int | str | None = None,
    ) -> None:
        arguments = locals()
        given = {setting.name: arguments[setting.name] for setting in STEP}
        self.settings, self._checkpoints = node_settings(cluster), checkpoint_settings(checkpoints)
        if callable(after_step):
            given["after_step"] = given_trainer(after_step, self)
        self._step_settings = step_settings(**given)
        self.name = self.settings.name
        exit_event.speak(self._step_settings.log_format, self.name)
        self._teller = Teller(
            self._step_settings.quiet,
            self._step_settings.callbacks or Callbacks(),
            self.name,
            self._step_settings.log_format,
            self._step_settings.summary,
        )
        self._members = Remembered(self.name, self.settings.listen, self._teller.say)
        self._share, self._means = DataShare(self.name, self._step_settings.seed), Means(self._teller.say)
        self._page_at = SETTINGS["dashboard"].of(dashboard)
        self._run = None
        if model is not None and optimizer is not None:
            self.attach(model, optimizer, lr_scheduler, extra_state)
        elif model is not None or optimizer is not None:
            raise ConfigError("Trainer: expected a model and an optimizer, or neither (then call attach)")

    @held_off()
    def attach(
        self,
        model: nn.Module | dict[str, nn.Module],
        optimizer: Optimizers,
        lr_scheduler: Any = None,
        extra_state: dict[str, Any] | None = None,
    ) -> None:
        """Take over a model and become a member. Arguments and errors as of the class."""
        if self._run is not None:
            raise ConfigError("attach: this trainer has a model already")
        endings.check_alone()
        session = self.make_session(hooks(self._teller, self._members, self._on_ended))
        engine = DataParallel(
            session, model, optimizer, lr_scheduler, extra_state, self._step_settings, self._checkpoints, self._share,
            self._means, self._on_optimizer_step, self._on_scheduler_step,
        )  # fmt: skip
        self.model, self.optimizer, self.lr_scheduler = engine.model, engine.optimizer, engine.lr_scheduler
        try:
            page = NodePage(self._page_at)
            node = ScriptNode(session, engine, self._members, page, self._teller)
            with page.unless_opened():
                session.open(engine, guarded=engine.guard is not None)
        except BaseException:  # If it cannot listen, the script may go on alone, or try again.
            engine.let_go()
            engine.detach()
            raise
        steps = ScriptSteps(session, engine, node)
        self._run = Run(session, engine, node, steps, Batches(session, engine, steps))
        node.enter(steps)

    def make_session(self, hooks: Hooks) -> Session:
        """This node's life in its cluster. Benchmarks make others."""
        return Session(self.settings, hooks)

    def _on_optimizer_step(self, name: str | None, overflow: bool) -> None:
        self._attached().steps.on_optimizer_step(name, overflow)

    def _on_scheduler_step(self, name: str, arguments: tuple[Any, ...]) -> None:
        self._attached().steps.on_scheduler_step(name, arguments)

    def _on_ended(self, ended: Ended) -> None:
        self._attached().node.ended(ended)

    # --- training ---

    def update(self, samples: float | None = None, name: str | None = None) -> None:
        """All-reduce, optimizer step, LR scheduler step, zero_grad. optimizer.step() in the script does the same.

        The gradient is the mean over all samples of the cluster: each node's counts by its samples.
        Args:
            samples: Behind this node's gradients since the last update. Default: those of the batches that
                `batches` gave out; with your own loader 1, so that all nodes count the same.
            name: Of the optimizer that it steps, if there are several.
        Raises: NodeExpelled if the cluster went on without this node and does not take it back (or with
            rejoin=False); ConfigError for a gradient that cannot be averaged.
        """
        self._attached().steps.requested(UPDATE, samples, name)

    def check_state_replication(self) -> bool:
        """Serve a joining node, if this one was chosen to (Chaos, Sec. V-B).

        Returns at once: a streaming join is served beside training, and for a blocking one update() has waited until
        the joiner had all of the state.
        Returns: whether a joiner is being served.
        """
        run = self._attached()
        return run.session.ended is None and run.engine.copies.serves

    def epochs(self, count: int) -> Iterator[int]:
        """What the cluster still has to do of `count` epochs; a late joiner begins with the present one."""
        yield from self._attached().batches.epochs(count)

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        epochs: int | None = None,
        accumulate: int = 1,
        *,
        drop_last: bool = False,
        min_samples: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        shuffle: bool = True,
        global_batch: int | None = None,
    ) -> Passes:
        """This node's share of a data set that all members have: each sample of an epoch exactly once.

        However members come, go and crash, what a crashed one had not contributed is dealt out again. What is
        returned may be kept: each loop over it is a new pass.
        Args:
            dataset: Anything with len() and [index]; or a DataLoader, whose workers fetch ahead: then its batch size,
                shuffle, drop_last and collate_fn count.
            batch_size: Samples per batch on this node; other nodes may choose others.
            epochs: Go on until the cluster has done that many in all. Default: to the end of this one.
            accumulate: At most so many batches between two calls of update(), which is due after each that
                has `batch.last`; scale each loss by `batch.share`.
            drop_last: An epoch ends where fewer samples are left than all nodes take in a step; these are not used.
            min_samples: No batch has fewer. What cannot be dealt so, less than this an epoch, is not used. What these
                two leave out is counted in `samples_dropped`.
            collate_fn: Makes a batch of a list of samples. Default: as torch's DataLoader does.
            shuffle: Else samples are dealt in their order.
            global_batch: So many samples are dealt to all nodes together in a step, however many nodes there are,
                in proportion to their batch sizes, which none exceeds. Default: each gets its batch size.
        drop_last, min_samples, shuffle and global_batch are the same on all nodes.
        Items that are dictionaries give a dictionary (`model(**batch)`), others a `Batch`.
        A sample over which the scripts of two nodes have ended with an error is set aside (`samples_set_aside`).
        """
        return self._attached().batches.batches(
            dataset, batch_size, epochs, accumulate, drop_last, min_samples, collate_fn, shuffle, global_batch
        )

    def evaluate(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Passes:
        """This node's share of an evaluation: all nodes together see each sample of a data set once.

        What the script averages in the loop, with `mean`, is in `metrics` after it: the same on all nodes, over all
        samples. Nothing is trained meanwhile. What a node that dies had in hand is dealt to the others.
        Args:
            dataset: As of `batches`; also a DataLoader. Nothing is shuffled.
            batch_size: As of `batches`.
            collate_fn: As of `batches`.
        Batches are as `batches` gives them. Gradients are the script's matter (torch.no_grad(), model.eval()).
        """
        return self._attached().batches.evaluate(dataset, batch_size, collate_fn)

    def mean(self, value: Any, name: str = "loss", weight: float | None = None) -> ClusterMean:
        """Average a number over the cluster, with the next update(); costs no message of its own.

        Args:
            value: A number or 0-dim tensor.
            name: One value a name and step; `metrics` has the means of the last step or evaluation.
            weight: Default: the samples of the batch in hand.
        Returns: A handle; `float()` of it after the update is the mean.
        """
        usual = self._run.steps.usual_weight if self._run else 1.0
        return self._means.add(name, value, float(weight if weight is not None else usual))
