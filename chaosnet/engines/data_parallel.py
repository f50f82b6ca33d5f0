"""Synchronous data parallelism: all members hold all of the state, and step with the mean of their gradients."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import nn

from ..callbacks import Callbacks, EpochDone, StateLoaded, StepDone
from ..data.evaluation import average
from ..data.share import DataShare
from ..node.outcomes import StepOutcome
from ..node.session import Session
from ..node.state.flat_state import Arrival
from ..node.state.generators import get_generators, set_generators
from ..node.state.training_state import TrainingState
from ..node.sums.gradients import Gradients
from ..protocols.data_cursor import DataCursor
from ..protocols.errors import ReplicasDiffer
from ..protocols.events import Retracted
from ..protocols.messages import Contribution, Deal, Range, View
from ..script.means import Means
from ..script.rules import ScriptRules
from ..settings.resolved import CheckpointSettings, StepSettings
from ..training.agreement import Agreement, Divergence, Sides, judged
from ..training.checkpointing import checkpointing_of
from ..training.guard import Guard
from ..training.lr_schedule import LRSchedule
from ..training.named_updates import Optimizers, named, trained_by
from ..training.nan_watch import NanWatch
from ..training.randomness import Randomness
from ..training.state_copies import StateCopies
from .base import TrainingEngine


class DataParallel(TrainingEngine):
    """A model, its optimizer and all that belongs to them, in one cluster's life.

        contribute   this node's gradient, and what it says beside it
        adopt        the cluster's gradient: the optimizer steps, and all counters of steps go on
        capture      a copy of the agreed state, for a joiner or a checkpoint
        load         the agreed state of others

    Agreed: model, optimizer, LR scheduler, extra_state, and `_counters`. Local: this node's generators, the guard's
    memory, `healing`, what the script has not contributed yet.

    Args:
        settings: How the model is trained.
        on_step, on_schedule: See `ScriptLoop`.
    Attributes:
        weight: Samples behind this node's gradients in the step; None: nobody has said, so they are `own_weight`,
            what the script said last.
        healing: This node differs from the others, and is to pull the state anew.
        kinds: The types of devices that it computes on.
    Raises: ConfigError for what cannot be trained so, CheckpointError if it cannot be resumed.
    """

    optimizer: Any  # One of torch's, or several as one (named_updates.py).

    def __init__(
        self,
        session: Session,
        model: nn.Module | dict[str, nn.Module],
        optimizer: Optimizers,
        lr_scheduler: Any,
        extra_state: dict[str, Any] | None,
        settings: StepSettings,
        checkpoints: CheckpointSettings | None,
        share: DataShare,
        means: Means,
        on_step: Callable[[str | None, bool], None],
        on_schedule: Callable[[str, tuple[Any, ...]], None],
    ) -> None:
        super().__init__(session)
        self.share, self.means, self._settings = share, means, settings
        self._callbacks = settings.callbacks or Callbacks()
        self.weight: float | None = None
        self.own_weight = 1.0
        self._told_of_setting = False
        self.healing: Divergence | None = None
        self.model, self.optimizer, self.lr_scheduler, self.named = named(
            model, optimizer, lr_scheduler, settings.updates
        )
        self.schedule = LRSchedule(
            self.lr_scheduler, self.optimizer, settings.lr_scheduler_every, session.say
        )
        compression, chunk_bytes = session.settings.compression, session.settings.chunk_bytes
        trained = trained_by(self.optimizer)
        self.gradients = Gradients(self.model, chunk_bytes, self._chunks_ready, compression, trained)
        with ExitStack() as refused:
            refused.callback(self.gradients.detach)
            self.guard = None if settings.guard is None else Guard(settings.guard, settings.guard_factor)
            self.state = TrainingState(
                self.model, self.optimizer, self.lr_scheduler, extra_state, self._terms(compression)
            )
            self._devices = self.state.accelerators()
            self.kinds = {"cpu", *(device.type for device in self._devices)}
            self._generators = get_generators(self._devices)  # As of the last step, for its checkpoint.
            self.random = Randomness(settings.same_rng, self._devices)
            if self.guard is not None:
                self.gradients.judge_first()
            self.agreement = Agreement(self.state, self.gradients, session.name, settings.on_divergence)
            self.checkpointing = checkpointing_of(checkpoints, session)
            every = 0 if checkpoints is None else checkpoints.every
            self._nan = NanWatch(self.model, self.guard, every, session.say)
            saved = self.checkpointing if session.settings.may_found else None
            if saved is not None and saved.resume(self._load):
                self._run = secrets.token_hex(8)
                self.random.begins(self.round)
            self.copies = StateCopies(self.state, session, self.checkpointing, session.say)
            self.rules = ScriptRules(
                self.model, self.optimizer, self.lr_scheduler, self.gradients, session.say, on_step, on_schedule,
            )  # fmt: skip
            refused.pop_all()

    def _terms(self, compression: object) -> dict[str, str]:
        """What all members must have set alike."""
        settings = self._settings
        max_norm = None if settings.max_grad_norm is None else float(settings.max_grad_norm)
        terms = {"max_grad_norm": str(max_norm), "chunk_bytes": str(self.gradients.chunk_bytes)}
        terms |= {
            "on_divergence": settings.on_divergence,
            "lr_scheduler_every": str(settings.lr_scheduler_every),
        }
        terms |= {"same_rng": str(settings.same_rng), "compression": repr(compression)}
        if self.named.names:
            terms["updates"] = ", ".join(self.named.names)
        if self.guard is not None:
            terms["guard"] = self.guard.policy
        return terms

    # --- what the session asks ---

    @property
    def store(self) -> Gradients:
        return self.gradients

    def load(self, arrival: Arrival) -> None:
        """See `Engine`."""
        super().load(arrival)
        self.random.joined(self._run, self.session.name, self.round)

    def loaded(self) -> None:
        """See `Engine`."""
        assert self._loaded is not None
        with self.rules.within("on_loaded"):
            self._callbacks.on_loaded(self._loaded)

    def admitted(self, deal: Deal) -> None:
        """See `Engine`."""
        self.share.deal = deal

    def acts_in(self, view: View) -> None:
        """See `Engine`."""
        self.gradients.set_bundle_size(view.bundle)
        self.gradients.alone = view.node_ids == (self.session.name,)

    def entered(self, fetched: int | None) -> None:
        """See `Engine`."""
        super().entered(fetched)
        if self.checkpointing is not None:
            self._generators = get_generators(self._devices)

    def left_behind(self) -> None:
        """See `Engine`."""
        super().left_behind()
        self.optimizer.zero_grad(set_to_none=True)

    def rejoined(self) -> None:
        """See `Engine`."""
        self.named.rejoined()
        self.means.settle()
        super().rejoined()

    # --- what the script's node asks ---

    @property
    def epoch(self) -> int:
        """See `ScriptEngine`."""
        return self.share.epoch

    @property
    def in_callback(self) -> bool:
        """See `ScriptEngine`."""
        return bool(self.rules.place)

    def blamed(self) -> tuple[Range, ...]:
        """See `ScriptEngine`."""
        return tuple(self.share.in_hand)

    def detach(self) -> None:
        """See `ScriptEngine`."""
        self.gradients.detach()

    def let_go(self) -> None:
        """See `ScriptEngine`."""
        self.rules.remove()

    # --- the state ---

    def _load(self, arrival: Arrival) -> None:
        runtime = self._load_state(arrival)
        self.gradients.rebase()
        self._nan.forget()
        self.random.key = runtime.get("rng_key", self.random.key)
        self.named.phase = runtime.get("phase", 0)
        self.evaluation.from_plain(runtime.get("evaluation"))
        self.evaluation.load_past(runtime.get("evaluations"))
        cursor = runtime["cursor"]
        self.share.cursor = None if cursor is None else DataCursor.from_plain(cursor)
        self.schedule.from_plain(runtime.get("lr_schedule"), self.share.epoch, self.samples)
        self._loaded = StateLoaded(self.round, self.step, arrival.manifest.total_bytes)

    def _counters(self) -> dict[str, Any]:
        """The plain values of the training state that are neither the model's nor the optimizer's."""
        cursor = self.share.cursor
        return {
            "run": self._run,
            "round": self.round,
            "step": self.step,
            "samples": self.samples,
            "rng_key": self.random.key,
            "phase": self.named.phase,
            "cursor": None if cursor is None else cursor.to_plain(),
            "lr_schedule": self.schedule.to_plain(),
            "evaluation": self.evaluation.to_plain(),
            "evaluations": self.evaluation.past(),
        }

    def _capture(self, outcome: StepOutcome, applied: bool) -> None:
        """Copy the state as it is now, if a joiner or a checkpoint is to have it."""
        joiner, mark, final = outcome.snapshot, None, outcome.commit.total.leaving
        if self.healing is not None:  # What we hold is not what the others do.
            if joiner is not None:
                self.session.serve_snapshot(joiner.step, None)
            return
        if final:
            self._nan.look_again(self.step)
        if self.checkpointing is not None and (applied or final) and not self._nan.found:
            mark = self.checkpointing.due(self.step, self._run, outcome.commit)
            if applied:
                self._generators = get_generators(self._devices)
            elif mark is not None:  # Perhaps in the middle of a forward pass, which is not counted.
                self.gradients.revert_buffers()
                set_generators(self._generators, self._devices)
        if joiner is not None or mark is not None:
            self.copies.take(self.round, self._counters(), joiner, mark)
        if final:
            self.copies.finish()  # The script may change the model as soon as it is out.

    # --- this node's part of a step ---

    def _chunks_ready(self, chunks: range) -> None:
        """Backward has finished these chunks: they may leave."""
        self.session.contribute(chunks, self.weight if self.weight is not None else self.own_weight)

    def contribute(self, weight: float) -> bytes:
        """Send the gradients that have not left during backward. Returns: which parameters had a gradient, as bits.

        Raises: ConfigError, before they leave, if updates take turns.
        """
        finished = self.gradients.finish(weight)
        if weight > 0:
            self.rules.contributed()
        self.named.watch(finished.present, self.gradients.parameter_count)
        if finished.retracted:
            text = f"{self.session.name} changed gradients that were on their way"
            self.session.post(Retracted(weight, text))
        else:
            self.session.contribute(tuple(finished.chunks), weight)
        return finished.present

    def contribute_nothing(self) -> bytes:
        """As `contribute`, for a step without samples of this node."""
        finished = self.gradients.empty()
        if finished.retracted:
            self.session.post(Retracted(0.0, f"{self.session.name} took back its gradients"))
        self.session.contribute(range(len(self.gradients.chunks)), 0.0)
        return finished.present

    def contribution(self, weight: float, present: bytes, update: str, leaving: bool) -> Contribution:
        """What this node contributes beside its gradients: on its samples, numbers to average, and its state."""
        metrics, share = self.means.take(), self.share
        if self.checkpointing is not None:
            self.checkpointing.contribute(metrics)
        digests: Sides = {}
        accounts: Sides = {}
        if weight > 0 and not self._told_of_setting and (said := self.agreement.settings.set_by_script()):
            self._told_of_setting = True
            self.session.say(said)
        if self.gradients.alone:  # Nobody compares.
            self.agreement.forget()
        elif not leaving:
            evaluating = self.evaluation.size > 0
            digests, accounts = self.agreement.tell(self.round, self.step, weight > 0, evaluating)
        return self._dealt(
            weight=weight,
            ranges=tuple(share.ranges) if self.named.is_last else (),
            update=update,
            shares={self.session.name: 0 if leaving else share.size},
            metrics=metrics,
            present=present,
            leaving=leaving,
            digests=digests,
            accounts=accounts,
            **({} if leaving else self.evaluation.contribution()),
        )

    def withdrawal(self) -> Contribution:
        """The contribution of a node that leaves to come back. It has no share, so checkpoints need no part of it."""
        present = self.gradients.empty().present
        self.session.contribute(range(len(self.gradients.chunks)), 0.0)
        return self._dealt(present=present, leaving=True)

    def _dealt(self, **parts: Any) -> Contribution:
        """A contribution of these `parts`, and of how the data set is dealt out."""
        return Contribution(dataset=self.share.length, **self.share.rules._asdict(), **parts)

    def drop_gradient(self) -> None:
        """Drop what this node has for the step: gradients, changes of buffers, values to average."""
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.revert_buffers()
        self.means.take()

    # --- the cluster's step ---

    def adopt(self, outcome: StepOutcome) -> None:
        """What every member does with a completed step, to the same effect. Raises: ReplicasDiffer."""
        total, was_last = outcome.commit.total, self.named.is_last
        self.named.completed(total.update)
        if self.named.is_settled:
            self.share.in_hand = []  # What goes wrong from here on is not for the samples to answer for.
        if self.checkpointing is not None:
            self.checkpointing.next_step_done()
        applied = bool(total.weight) and self._is_acceptable(outcome)
        # First, as after_step may look at them.
        evaluates, evaluated = average(self.evaluation, self.means, outcome)
        epoch = self.share.epoch
        try:
            if applied:
                self._apply(total, outcome.results)
        finally:  # Also if after_step raises: the script may catch it, and the step is complete all the same.
            self._completed(outcome, applied, was_last, evaluated)
        done = StepDone(
            round=outcome.step, step=self.step, applied=applied, weight=total.weight, samples=self.samples,
            epoch=self.share.epoch, members=tuple(sorted(total.shares)), metrics=dict(self.means.last),
        )  # fmt: skip
        if applied or not evaluates:
            with self.rules.within("on_step"):
                self._callbacks.on_step(done)
        if self.share.epoch != epoch:
            with self.rules.within("on_epoch"):
                self._callbacks.on_epoch(EpochDone(done.epoch, done.step, done.samples, done.metrics))

    def _completed(
        self,
        outcome: StepOutcome,
        applied: bool,
        was_last: bool,
        evaluated: Mapping[str, tuple[float, float]] | None,
    ) -> None:
        """All counters of steps go on. Raises: ReplicasDiffer."""
        total = outcome.commit.total
        if applied:
            self._stepped()
            self.samples += total.weight if was_last else 0.0
        self.round = outcome.step + 1
        self.share.deal = outcome.deal
        for said in self.share.completed(total, self.named.is_settled):
            self.session.say(said)
        self.session.rates.left_out = self.share.left_out()
        with self.rules.our_step():
            self.schedule.progressed(self.share.epoch, self.samples, evaluated)
        if not self.evaluation.size:
            self.agreement.settings.settle()
        elif evaluated is not None:
            self.agreement.settings.forget()  # A schedule may have gone on, which is not the script's doing.
        self._judge(outcome)
        self._capture(outcome, applied)

    def _apply(self, total: Contribution, results: list[torch.Tensor] | None) -> None:
        """The optimizer steps with the cluster's mean gradient."""
        settings = self._settings
        self.gradients.adopt(total.present, results)
        self.named.stepping(total.update)
        if settings.max_grad_norm is not None:
            nn.utils.clip_grad_norm_(self.named.parameters(), settings.max_grad_norm)
        self.copies.finish()
        with self.rules.our_step():
            with self.random.stepping(self.optimizer, self.step):
                self.optimizer.step()
            self.schedule.stepped(total.metrics.get("loss", (0.0, 0.0)))
        self._nan.look(self.step + 1)
        self.optimizer.zero_grad(set_to_none=True)
        if settings.after_step is not None:
            with self.rules.within("after_step"), self.random.alike("after_step", self.step):
                settings.after_step()

    def _is_acceptable(self, outcome: StepOutcome) -> bool:
        """Is the cluster's gradient finite? All members see the same bits, so all refuse it, or nobody does."""
        if self.guard is None or outcome.results is None:  # Our own has been judged.
            return True
        if all(
            bool(result.isfinite().all())
            for chunk, result in zip(self.gradients.chunks, outcome.results, strict=True)
            if chunk.is_gradient  # A buffer may hold infinity on purpose, as causal masks do.
        ):
            return True
        self.session.counters["guard_refused"] += 1
        self.session.say(
            f"guard after step {self.step}: the cluster's gradient is not finite: nobody applies it"
        )
        self.optimizer.zero_grad(set_to_none=True)
        self.gradients.revert_buffers()
        return False

    def _judge(self, outcome: StepOutcome) -> None:
        """Judge whether all nodes hold the same; if not, do what `on_divergence` says."""
        verdict = judged(self.agreement, outcome, self.step - 1, self.session)
        if verdict is None:
            return
        if self._settings.on_divergence == "stop":
            raise ReplicasDiffer(verdict.sentence)
        self.session.say(verdict.sentence)
        if self._settings.on_divergence == "heal" and verdict.here and not self.session.leaving:
            self.healing = verdict
