"""Pipelines times data parallelism: members compute layers, and all hold the training state, or parts of it.

    compute   the member's part of a step, by the pipelines that run now (layer_runner.py); its sums leave meanwhile
    adopt     the cluster's sums are here: the optimizer steps on every member, as far as that has the state

Which pipelines run is a function of the view and of what all have agreed on (scheduler/elastic/running.py): after a
loss, a join or a measurement, each member works it out for itself. A step that is torn begins anew. Where all hold
the state, nothing has to move first; where members keep parts, what is missing is sent then (keeping.py).
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import xxhash

from ..callbacks import Callbacks, EpochDone, StateLoaded, StepDone
from ..data.evaluation import average
from ..node.collector import held_off
from ..node.outcomes import StepOutcome
from ..node.session import Offer, Session
from ..node.state.flat_state import Arrival
from ..node.state.plain import decode, encode
from ..node.state.training_state import TrainingState
from ..node.sums.layer_sums import LayerSums, Norms, clip
from ..protocols.errors import ChaosnetError, CheckpointError, ConfigError, LayersLost, ReplicasDiffer
from ..protocols.events import KeepersChosen, TensorMade
from ..protocols.messages import Contribution, Deal, Range, Tensor, View, ViewKey
from ..protocols.sentences import counted
from ..scheduler.elastic.program import Instruction
from ..scheduler.elastic.running import Facts, Laid, Running, choose
from ..scheduler.elastic.traffic import Traffic
from ..script.means import VOID, Means
from ..settings.resolved import CheckpointSettings
from ..training.agreement import Agreement, judged
from ..training.checkpointing import checkpointing_of
from ..training.lr_schedule import LRSchedule
from ..training.nan_watch import LossWatch
from ..training.randomness import Randomness
from ..training.state_copies import StateCopies
from .base import TrainingEngine
from .global_batches import GlobalBatches
from .keeping import Keeping, keeping_of
from .layer_runner import Done, LayerRunner, MicroBatches, due, forward_only, layers_in, needs_nothing
from .layers import Model, built, device_of, layers_of, made_for
from .layout_wishes import LayoutWishes, check_layout
from .pace import Pace
from .pipeline_settings import PipelineSettings, terms_of
from .step_costs import Predicted, StepCosts, timings_of
from .validation import Validating

Event = TypeVar("Event")


class Calling:
    """Inside, functions of the script's may run, in the middle of a step."""

    def __init__(self) -> None:
        self.under_way = self._before = False

    def __enter__(self) -> None:
        self._before, self.under_way = self.under_way, True

    def __exit__(self, *error: object) -> None:
        self.under_way = self._before

    def tell(self, function: Callable[[Event], None], event: Event) -> None:
        """Call a function of the script's."""
        with self:
            function(event)


class Pipelines(TrainingEngine):
    """A model in layers, its optimizer and all that belongs to them, in one cluster's life.

    Agreed: model, optimizer, LR scheduler, and `_counters`. Local: nothing that outlives a step.

    Attributes:
        running: The pipelines of the step under way; None before the first, and while nobody wants to train.
        predicted: What a step of them should take.
        wants: Epochs that this node wants to see trained in all; 0: none any more.
        wishes: Layouts that were asked for.
        last: What the last step came to.
    Raises: ConfigError for what cannot be trained so, CheckpointError if it cannot be resumed.
    """

    def __init__(
        self,
        session: Session,
        model: Model,
        optimizer: Any,
        lr_scheduler: Any,
        settings: PipelineSettings,
        checkpoints: CheckpointSettings | None,
    ) -> None:
        super().__init__(session)
        self._settings = settings
        self._callbacks = settings.callbacks or Callbacks()
        whole, builds = built(model, settings.seed, settings.keepers is not None)
        self.model, self.layers = layers_of(whole)
        self.optimizer, self._device = made_for(optimizer, self.model), device_of(self.model)
        lr_scheduler = made_for(lr_scheduler, self.optimizer)
        self.means = Means(session.say)
        self.batches = GlobalBatches(settings.batch, settings.micro_batch, settings.seed)
        self.sums = LayerSums(self.layers, self.batches.micro_batches, settings.exact)
        self.validation = Validating(settings.validation, settings.loss, settings.batch, settings.micro_batch)
        check_layout(settings.stages, settings.layout, len(self.layers), self.batches.micro_batches)
        self.schedule = LRSchedule(lr_scheduler, self.optimizer, settings.lr_scheduler_every, session.say)
        terms = terms_of(settings, self._device, builds)
        self.state = TrainingState(self.model, self.optimizer, lr_scheduler, None, terms)
        send = _sender(session)
        self.checkpointing = checkpointing_of(checkpoints, session)
        self.keeping: Keeping | None = None
        if settings.keepers is not None:
            self.keeping = keeping_of(
                self.state, self.sums, settings.keepers, self.evaluation, send, builds, self.checkpointing
            )
        self.runner = LayerRunner(
            self.layers, settings.loss, self.sums, send, self._layers_done,
            lambda event: self.calling.tell(self._callbacks.on_computed, event),
            self.keeping.await_layer if self.keeping is not None else needs_nothing, self._device,
        )  # fmt: skip
        self.random = Randomness(False, self.state.accelerators())
        window = None if self.keeping is None else self.keeping.parts
        self.agreement = Agreement(self.state, self, session.name, "stop", window)
        self.pace, self.costs = Pace(self.layers), StepCosts(len(self.layers))
        self.wants = 0
        # Agreed: epochs that members want to see trained, the most; has this cluster trained anything?
        self._goal, self._begun = 0, False
        self.wishes = LayoutWishes(session, settings.layout, len(self.layers), self.batches.micro_batches)
        self.running: Running | None = None
        self.predicted: Predicted | None = None
        self.view: View | None = None
        self.key: ViewKey = (0, 0)  # Of the attempt under way.
        self._tried, self._torn = -1, False  # The round that was last begun, and whether it was begun anew.
        self._attempt: tuple[ViewKey, int] | None = None  # The attempt that others have a part of.
        self.deal, self.calling, self._nan = Deal(), Calling(), LossWatch(session.say)
        self.last: StepDone | None = None
        self._laid: Laid | None = None  # Of the last step that was trained.
        self._planned: tuple[Any, Running] | None = None  # Of what it was made, and what came of it.
        if self.checkpointing is not None and session.settings.may_found:
            self.checkpointing.resume(self._load)
            self._run = secrets.token_hex(8)  # Not that of the checkpoint.
        self.copies = StateCopies(self.state, session, self.checkpointing, session.say)

    def agreed(self) -> list[tuple[str, torch.Tensor]]:
        """See `state_window.Averaged`: nothing is averaged beside gradients."""
        return []

    # --- what the session asks ---

    @property
    def store(self) -> LayerSums:
        return self.sums

    def offer(self) -> Offer:
        """See `Engine`."""
        return replace(super().offer(), recomputes=True, parts=self.keeping is not None)

    def founded(self) -> None:
        """See `Engine`."""
        if self.keeping is not None:
            if absent := self.keeping.absent:
                raise ConfigError(
                    f"model: no values of {absent} are here, as an earlier trainer of this process kept only a part "
                    "(expected a model with values: build it anew, or load it)"
                )
            self.keeping.begin_anew([self.session.name])
        # Whoever wanted to train when a checkpoint was written is not here.
        self._begun, self._goal = False, 0
        super().founded()

    def loaded(self) -> None:
        """See `Engine`."""
        assert self._loaded is not None
        self.calling.tell(self._callbacks.on_loaded, self._loaded)

    def admitted(self, deal: Deal) -> None:
        """See `Engine`."""
        self.deal = deal

    def acts_in(self, view: View) -> None:
        """See `Engine`."""
        if self.view is None or view.key > self.view.key:
            self.view = view

    # --- what the script's node asks ---

    @property
    def epoch(self) -> int:
        """See `ScriptEngine`."""
        return self.batches.epoch

    @property
    def in_callback(self) -> bool:
        """See `ScriptEngine`."""
        return self.calling.under_way

    def blamed(self) -> tuple[Range, ...]:
        """See `ScriptEngine`."""
        return self.batches.blamed(self.runner.in_hand)

    # --- the state ---

    def _load(self, arrival: Arrival) -> None:
        """Load the state of others, or of a checkpoint, even one of `Trainer`, which knows nothing of pipelines."""
        whole = self.keeping is not None and self.keeping.parts.are_in(arrival.manifest)  # A checkpoint.
        left_out = self.keeping.made.parameters if self.keeping is not None and whole else ()
        if self.keeping is not None and whole:
            self.keeping.parts.make_room(left_out)
        runtime = self._load_state(arrival, left_out)
        self.random.key = runtime["rng_key"]
        self.batches.from_plain(runtime["cursor"])
        self.validation.from_plain(runtime.get("validation"), self.batches.epoch)
        self.schedule.from_plain(runtime["lr_schedule"], self.batches.epoch, self.samples)
        self.evaluation.from_plain(runtime.get("evaluation"))
        self._laid, self._goal, self.wishes.agreed = None, 0, ""
        if (own := runtime.get("pipelines")) is not None:
            self.sums.set_tops(own["tops"])
            self.pace.from_plain(own["pace"])
            if "costs" in own:  # Checkpoints of before have none.
                self.costs.from_plain(own["costs"])
            laid = None if own["laid"] is None else Laid.from_plain(own["laid"])
            if laid is not None and all(each.cuts[-1] == len(self.layers) for each in laid.pipelines):
                self._laid = laid  # Else it is of a model that was cut into other layers.
            self._goal, self.wishes.agreed, self._begun = own["goal"], own["wished"], own.get("begun", True)
        if self.keeping is not None and whole:
            assert self.checkpointing is not None
            self.keeping.made.loaded(self.checkpointing.loaded)
        elif self.keeping is not None:
            self.keeping.from_plain(runtime["keeping"])
        self._nan.forget()
        self._loaded = StateLoaded(self.round, self.step, arrival.manifest.total_bytes)

    def _counters(self) -> dict[str, Any]:
        """The plain values of the training state that are neither the model's nor the optimizer's."""
        return {
            "run": self._run,
            "round": self.round,
            "step": self.step,
            "samples": self.samples,
            "rng_key": self.random.key,
            "cursor": self.batches.to_plain(),
            "lr_schedule": self.schedule.to_plain(),
            "evaluation": self.evaluation.to_plain(),
            "validation": self.validation.to_plain(),
            "pipelines": {
                "tops": self.sums.tops,
                "pace": self.pace.to_plain(),
                "costs": self.costs.to_plain(),
                "laid": None if self._laid is None else self._laid.to_plain(),
                "goal": self._goal,
                "wished": self.wishes.agreed,
                "begun": self._begun,
            },
            "keeping": None if self.keeping is None else self.keeping.to_plain(),
        }

    def _capture(self, outcome: StepOutcome, applied: bool) -> None:
        """Copy the state as it is now, if a joiner or a checkpoint is to have it."""
        final, mark = outcome.commit.total.leaving, None
        # What is fresh is on disk as it is, or was never trained.
        fresh = self.keeping is not None and self.keeping.made.fresh
        if self.checkpointing is not None and (applied or final) and not fresh and not self._nan.found:
            mark = self.checkpointing.due(self.step, self._run, outcome.commit)
        if outcome.snapshot is not None or mark is not None:
            self.copies.take(self.round, self._counters(), outcome.snapshot, mark)
        if final:
            self.copies.finish()  # The script may change the model as soon as it is out.

    # --- this member's part of a step ---

    @property
    def is_wanted(self) -> bool:
        """Is the step that is due to train?

        Yes if any member wants that, as told with the last step, and none evaluates.
        """
        others = self.evaluation.under_way if self.keeping is None else self.keeping.gathers
        is_due = self._goal > self.batches.epoch and not self.validation.is_due(self.batches.epoch)
        return is_due and not others and not self.lacks_members

    @property
    def validates(self) -> bool:
        """Is the model validated, by all members together, with the step that is due?"""
        others = self.evaluation.under_way if self.keeping is None else self.keeping.gathers
        return self.validation.is_due(self.batches.epoch) and not others

    @property
    def lacks_members(self) -> int:
        """How many more members must be there before anything is trained."""
        there = len(self.view.member_ids) if self.view is not None else 0
        return 0 if self._begun else max(self._settings.first_members - there, 0)

    def compute(self) -> Contribution:
        """Compute this member's part of the step that is due, in the present view.

        If the script has broken off this attempt, by an error that it has caught or an interrupt, it counts for
        nothing, as tensors that came for it may be gone: all do that step again.
        Raises: Interrupted when the attempt is void.
        """
        assert self.view is not None
        mailbox, key = self.session.loop.mailbox, self.view.key
        again = self._attempt == (key, self.round)
        self._torn = self._tried == self.round
        mailbox.begin(key, self.round)
        self.key = key
        done, traffic = Done(), self.costs.traffic(self.view, self.sums)
        is_member = self.session.name in self.view.member_set  # A node that has left learns it here.
        keeping = self.keeping if is_member else None
        lost = keeping is not None and bool(keeping.lost_in(self.view.member_ids))
        trains, validates = self.is_wanted, self.validates
        computes = (trains or validates) and is_member and not lost
        self.running = None  # Also if there is nothing that could run.
        lines, batches = list[Instruction](), None
        if computes:
            self.running = self._plan(traffic)
            lines, batches = self._work(self.running, trains)
        self.wishes.hear(len(self.view.member_ids))
        self.predicted = self.costs.begin(self.running, traffic.trees) if self.running and trains else None
        self.wishes.answer(self.running if trains else None, self.predicted, self.step + 1)
        self.session.rates.predicted_s = self.predicted.total_us / 1e6 if self.predicted else 0.0
        if keeping is not None and not again:
            keeping.begin(self.view, key, self.round, self.running, mailbox, traffic.rate_mbit)
            self.session.post(KeepersChosen(keeping.keepers(group.chunks for group in self.sums.groups), key))
        for chunks in self.sums.begin(layers_in(lines)) if not again else ():
            self.session.contribute(chunks, 0.0, key)
        self._attempt = key, self.round
        if batches is not None:
            seed = self.random.key, self.step  # Whatever rounds there were in which nothing was trained.
            timed = self.pace.is_due(self.round)
            void = self._is_void() or again
            measure = self.validation.measure if validates else None
            done = self.runner.run(
                lines, batches, mailbox, key, self.round, seed, void, timed, again, measure
            )
            for chunks in self.sums.abandon() if done.void else ():
                self.session.contribute(chunks, 0.0, key)
        if keeping is not None:
            keeping.await_all()
        losses, weight = self.sums.loss_chunks()
        self.session.contribute(losses, weight, key)
        norms = self._norms(mailbox.take_sums(), keeping.first_of()) if keeping is not None else {}
        return self._contribution(done, norms, lost)

    def _work(self, running: Running, trains: bool) -> tuple[list[Instruction], MicroBatches]:
        """This member's instructions in the step that is due, and its micro-batches. Raises: ConfigError."""
        samples = self.batches.step if trains else self.validation.begin
        batches = samples(self._device, self.random.key)
        lines = due(running.program.instructions.get(self.session.name, ()), batches.samples)
        return lines if trains else forward_only(lines), batches

    def _norms(self, results: Sequence[torch.Tensor], groups: Iterable[int]) -> Norms:
        """Of the mean gradients of these groups, with what clipping them needs."""
        return self.sums.norms(results, groups, squares=self._settings.max_grad_norm is not None)

    def _plan(self, traffic: Traffic) -> Running:
        """The pipelines of the step that is due. Raises: PlanInfeasible."""
        assert self.view is not None
        members = self.view.member_ids
        facts = Facts(
            self.pace.costs_us, self.batches.micro_batches, self._settings.stages, self.wishes.holds,
            self.pace.speeds, traffic,
            None if self.keeping is None else self.keeping.facts(members),
        )  # fmt: skip
        made_of = members, facts, self._laid
        if self._planned is None or self._planned[0] != made_of:
            with held_off():  # A collection here can take longer than the choice.
                self._planned = made_of, choose(members, facts, self._laid)
        return self._planned[1]

    def _is_void(self) -> bool:
        """Is the step to count for nothing, so that all hear of something first?

        Of an evaluation that begins here, or that the script wants the whole model: both are of the model as it is;
        or of a strike, before its samples are taken again. A member that knows of a strike was in the step that is
        now done over.
        """
        wants_whole = self.keeping is not None and self.keeping.wants_whole
        if (self.evaluation.size and not self.evaluation.under_way) or wants_whole:
            return True
        self._tried = self.round
        loop = self.session.loop
        try:
            return self._torn and bool(loop.ask(lambda: loop.agent.strikes.open))
        except ChaosnetError:
            return False  # If the loop has ended, an outcome says how, and the first computation hears of it.

    def _layers_done(self, layers: list[int]) -> None:
        for chunks, weight in self.sums.finish(layers):
            self.session.contribute(chunks, weight, self.key)

    def _contribution(self, done: Done, norms: Norms, lost: bool) -> Contribution:
        """What this node contributes beside its gradients.

        `norms`: of the sums of which it tells the others. `lost`: are layers lost?
        """
        session, running = self.session, self.running
        gathers = self.keeping is not None and self.keeping.wants_whole  # First.
        leaving = (session.leaving or session.hooks.wants_exit()) and not gathers
        metrics = self.means.take()
        if self.checkpointing is not None:
            self.checkpointing.contribute(metrics)
        if done.void:
            metrics[VOID] = (1.0, 0.0)
        elif self.validates:
            metrics |= self.validation.take()
        keepers = self.keeping.contribution(metrics) if self.keeping is not None else b""
        if self.sums.loss_samples:
            metrics["loss"] = self.sums.loss_sum(), self.sums.loss_samples
        digests, accounts = (
            ({}, {}) if leaving else self.agreement.tell(self.round, self.step, self.is_wanted)
        )
        is_new = running is not None and running.laid != self._laid
        return Contribution(
            weight=self.sums.loss_samples,
            shares={session.name: 0 if leaving else 1 + self.wants},
            metrics=metrics,
            present=self.sums.present,
            dataset=self.batches.own_length,
            leaving=leaving,
            digests=digests,
            accounts=accounts,
            pipelines=encode(running.laid.to_plain(), "pipelines") if running is not None and is_new else b"",
            keepers=keepers,
            checkpoints={session.name: self.checkpointing.newest_step() if self.checkpointing else 0}
            if lost
            else {},
            norms=tuple((group, *each) for group, each in norms.items()),
            wish=self.wishes.own,
            timings=timings_of(self.costs, self.pace, done, self.round, session, self.view)
            if running and self.view and not done.void and not self.validates
            else {},
            **({} if leaving else self.evaluation.contribution()),
        )

    # --- the cluster's step ---

    def adopt(self, outcome: StepOutcome) -> None:
        """What every member does with a completed step, to the same effect. Raises: ReplicasDiffer."""
        total, came_s = outcome.commit.total, time.monotonic()
        if self.checkpointing is not None:
            self.checkpointing.next_step_done()
        gathered = self.keeping is not None and self.keeping.gathers
        epoch, validates = self.batches.epoch, self.validates
        evaluates, evaluated = average(self.evaluation, self.means, outcome)
        kept = self.keeping.agree(total) if self.keeping is not None else None
        counts = bool(total.weight) and not total.leaving and VOID not in total.metrics
        applied = counts and self._adopt_sums(outcome, kept)
        if self.keeping is not None and kept is not None:
            stepped = self.keeping.parts.numbers(self.sums.with_gradient(total.present) if applied else ())
            self.copies.finish()  # Of what this member may not keep any more.
            self.keeping.committed(total, kept, applied, gathered, stepped)
        self.round = outcome.step + 1
        adopted_s = time.monotonic() - came_s
        self.deal = outcome.deal
        for said in self.batches.completed(total, applied):
            self.session.say(said)
        self.session.rates.left_out = self.batches.share.left_out()
        self._agree(total)
        validated = self.validation.completed(total, epoch) if validates else None
        if validated is not None:
            evaluated, self.means.last = validated, self.validation.metrics
        self.schedule.progressed(self.batches.epoch, self.samples, evaluated)
        if (verdict := judged(self.agreement, outcome, self.step - 1, self.session)) is not None:
            raise ReplicasDiffer(verdict.sentence)
        if self.keeping is not None and total.checkpoints:
            self._go_back(self.keeping, total.checkpoints)
        self._capture(outcome, applied)
        if self.batches.epoch > epoch:
            self.validation.follows(self.means.last)
        self.last = StepDone(
            round=outcome.step, step=self.step, applied=applied, weight=total.weight, samples=self.samples,
            epoch=self.batches.epoch, members=tuple(sorted(total.shares)), metrics=dict(self.means.last),
        )  # fmt: skip
        whole = applied and total.weight == self._settings.batch  # The last step of an epoch may be shorter.
        ran = self.running if whole else None
        has_ended = validated is not None if self.validation.names else self.batches.epoch > epoch
        try:
            self._tell(self.last, applied or not evaluates, has_ended)
        finally:
            self.costs.ended(outcome.step, ran, time.monotonic(), adopted_s, self._torn)

    def _adopt_sums(self, outcome: StepOutcome, kept: Collection[int] | None) -> bool:
        """Step with the cluster's mean gradient, as far as this member keeps the state (`kept`; None: all of it).

        Returns: False if a gradient did not fit its grid: then the step counts for nothing.
        """
        total, results = outcome.commit.total, outcome.results
        assert results is not None, "layer sums leave nothing in place"
        if self.keeping is not None:  # No member has the results of all groups.
            norms = {group: (most, squares) for group, most, squares in total.norms}
        else:
            norms = self._norms(results, range(len(self.sums.groups)))
        adopted = self.sums.adopt(total.present, results, total.weight, norms, kept)
        if adopted.fits:
            self.means.last["loss"] = sum(adopted.losses) / total.weight
            self._apply(self.means.last["loss"], total.weight, norms)
        return adopted.fits

    def _tell(self, done: StepDone, of_step: bool, of_epoch: bool) -> None:
        """Call the script's functions."""
        if of_step:
            self.calling.tell(self._callbacks.on_step, done)
        if of_epoch:
            ended = EpochDone(self.batches.epoch, self.step, self.samples, done.metrics)
            self.calling.tell(self._callbacks.on_epoch, ended)

    def _go_back(self, keeping: Keeping, checkpoints: Mapping[str, int]) -> None:
        """Layers are lost: all members begin again with a checkpoint that each of them has.

        Raises: LayersLost if there is none, or it cannot be loaded.
        """
        members, step = sorted(checkpoints), min(checkpoints.values())
        lost = keeping.lost_in(members)
        if not step:
            raise LayersLost(f"{lost}, and there is no checkpoint that all members can load")
        if self.checkpointing is None:  # A joiner, which did not count for that.
            raise LayersLost(f"{lost}: the members go on from a checkpoint; start this node again")
        before, round, goal = self.step, self.round, self._goal
        wished, begun = self.wishes.agreed, self._begun
        try:
            self._load(self.checkpointing.load_step(step))
        except (CheckpointError, ConfigError) as error:
            raise LayersLost(
                f"{lost}, and the checkpoint of step {step} cannot be loaded: {error}"
            ) from error
        keeping.begin_anew(members)
        self._begun, self._goal = begun, goal
        self.round, self._run = round, xxhash.xxh3_64_hexdigest(f"{self._run} {round}".encode())
        self.wishes.agreed = wished
        self.checkpointing.started(self.step, self._run)
        again = f"{counted(before - step, 'step')} {'is' if before - step == 1 else 'are'} done again"
        self.session.say(f"{lost}; all go on from the checkpoint of step {step}: {again}")
        self.loaded()

    def _apply(self, loss: float, weight: float, norms: Norms) -> None:
        """The optimizer steps with the cluster's mean gradient."""
        if self._settings.max_grad_norm is not None:
            clip(self.model.parameters(), self._settings.max_grad_norm, norms)
        self.copies.finish()
        with self.random.stepping(self.optimizer, self.step):
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self._begun = True
        self._stepped()
        self.samples += weight
        self._nan.look(loss, self.step, self.checkpointing is not None)
        self.schedule.stepped((loss * weight, weight))

    def _agree(self, total: Contribution) -> None:
        """Take over from a commit whether to train, and what the next pipelines are chosen by."""
        self._goal = max(max(total.shares.values(), default=0) - 1, 0)
        if total.pipelines:
            self._laid = Laid.from_plain(decode(total.pipelines))
        self.wishes.agree(total.wish)
        if total.timings:
            self.pace.agree(total.timings, sorted(total.shares))
            self.costs.agree(total.timings, sorted(total.shares))


def _sender(session: Session) -> Callable[[Tensor, Any], None]:
    """What sends tensors to their targets."""
    return lambda message, payload: session.post(TensorMade(message, payload))
