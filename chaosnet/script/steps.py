"""A script's steps: each is one of the cluster, whether the script has samples for it or not."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..engines.data_parallel import DataParallel
from ..node.outcomes import Ended, StepOutcome
from ..node.session import Session
from ..protocols.errors import ConfigError, NodeExpelled, ReplicasDiffer
from ..protocols.messages import Contribution
from ..training.agreement import HEALS_COUNT_STEPS, MAX_HEALS, Divergence
from ..training.guard import Guard
from . import endings
from .means import MAX_WEIGHT, MIN_WEIGHT
from .modes import no_modes
from .rules import SCHEDULE, STEP

if TYPE_CHECKING:
    from .process import ScriptNode

RATE_MEMORY = 0.8  # Of the moving average of samples per second.


class ScriptSteps:
    """What this node does at each step of the cluster. For the thread that trains.

    Attributes:
        turn: Held while a thread takes part in a step: the main thread may end while another one trains.
        in_hand: Samples of the last batch handed out; None: the script brings its own data.
        calls: Steps in which this node has taken part and for which it has got an answer, if only "you are out".
        updates_here: Steps with samples from here.
    """

    def __init__(self, session: Session, engine: DataParallel, node: ScriptNode) -> None:
        self._session, self._engine, self._node = session, engine, node
        self.turn = threading.RLock()
        self.in_hand: float | None = None
        self.calls = self.updates_here = self.heals = 0
        self._void = False  # Is what the script has in hand not to count?
        self._eager = False  # Is the weight known before update(), so that chunks may leave during backward?
        self._updating = ""  # Name of the update() under way.
        self._healed: dict[str, list[int]] = {}  # What had differed: at which steps.
        self._started_s = self._contributed = 0.0  # When, and with how many samples.

    @property
    def usual_weight(self) -> float:
        """Samples of the last batch; with the script's own data, the number that it last gave."""
        return self._engine.evaluation.in_hand or self.in_hand or self._engine.own_weight

    @property
    def has_model(self) -> bool:
        """See `EvaluationSteps`."""
        return True

    def has_missed(self) -> bool:
        """See `EvaluationSteps`."""
        engine = self._engine
        if not engine.evaluation.missed():
            return False
        engine.means.came(engine.evaluation.results)
        return True

    def cut_short(self) -> None:
        """See `ScriptNode`."""
        self._node.cut_short()

    def entered(self) -> None:
        """See `NodeSteps`."""
        self.begin()
        self.await_round()

    def begin(self) -> None:
        """Forward may begin. With `batches`, the weight is known only when a batch is handed out."""
        engine, share = self._engine, self._engine.share
        self._started_s = time.monotonic()
        engine.random.step_begins(engine.step)
        if engine.named.is_settled:  # Else the round's other updates are of the same samples.
            share.ranges, self._void = [], False
        later = share.size or self._session.leaving or not self._eager
        engine.gradients.arm(None if later else self._engine.own_weight)

    def await_round(self) -> None:
        """Take part without samples until the first update of a round is due, and nobody evaluates anything."""
        self.conclude()
        engine = self._engine
        while (not engine.named.is_settled or engine.evaluation.under_way) and not self._session.done:
            self.skip()

    # --- what the script calls ---

    def requested(self, call: str, samples: float | None, name: str | None, overflow: bool = False) -> None:
        """The script asks for a step by that call. `overflow`: a GradScaler found one: the gradient is left out."""
        if self._session.loop.is_here:
            raise ConfigError(
                f"on_notice or on_parked called {call} (expected no step in it: links wait for it)"
            )
        self._node.driver = threading.current_thread()
        with self.turn, no_modes(self._engine.kinds):
            self._engine.rules.check_place(call)
            self.check_trains(call)
            if not self._node.leave_if_wanted():
                if self.conclude():  # What the script has now, it has computed with the state before.
                    self._engine.drop_gradient()
                else:
                    self._asked(call, samples, name, overflow)
            if self._node.must_leave:
                self._node.request_node_exit()
        endings.rest_if_all_ends()

    def on_optimizer_step(self, name: str | None, overflow: bool) -> None:
        """The script has called optimizer.step()."""
        self.requested(STEP, None, name, overflow)

    def on_scheduler_step(self, name: str, arguments: tuple[Any, ...]) -> None:
        """The script has called scheduler.step()."""
        self._engine.rules.check_place(SCHEDULE)
        if not self._session.done:
            self._engine.schedule.called(name, arguments)

    # --- a step ---

    def _asked(self, call: str, samples: float | None, name: str | None, overflow: bool) -> None:
        """Take the step that the script asks for, without its gradient if that does not count."""
        if samples != 0:
            self._engine.rules.check_call(call)
        left_out = overflow or self._void or samples == 0
        if left_out:
            self._engine.drop_gradient()
        self._update(0 if left_out else samples, name)

    def _update(self, samples: float | None, name: str | None) -> None:
        """Contribute, and adopt the result. Arguments and errors as of `Trainer.update`."""
        engine, named = self._engine, self._engine.named
        self._updating = named.check(name)
        if named.void:
            engine.schedule.own_step(self._updating, counts=False)
            named.end_void()
            self.await_round()
            return
        if self._updating and samples != 0:
            engine.rules.check_backward(self._updating)
        weight = self._weigh(samples)
        engine.rules.check(engine.round)
        engine.schedule.check(counts_epochs=engine.share.length > 0)
        if engine.guard is not None and weight > 0:
            weight = self._guarded(engine.guard.of(self._updating), weight)
        engine.schedule.own_step(self._updating, counts=weight > 0)
        self._take_part(weight, engine.contribute(weight))
        if named.mine == 0:
            self.await_round()

    def _weigh(self, samples: float | None) -> float:
        """The weight of the step: the given samples, else those of the batch, else the last number given."""
        weight = float(samples if samples is not None else self._engine.weight or self._engine.own_weight)
        if not 0 <= weight <= MAX_WEIGHT:
            raise ConfigError(f"update: samples is {samples} (expected a number from 0 to {MAX_WEIGHT:g})")
        if 0 < weight < MIN_WEIGHT:
            raise ConfigError(f"update: samples is {samples} (expected 0, or a number from {MIN_WEIGHT:g})")
        if samples and self._engine.weight is None:
            self._engine.own_weight = weight  # None at all is said of this update, not of those to come.
        self._eager = samples is None
        return weight

    def _guarded(self, guard: Guard, weight: float) -> float:
        """Have the guard judge this node's gradient and buffers before others get them. Returns: their weight."""
        engine, session = self._engine, self._session
        gradients = [p.grad for p in engine.model.parameters() if p.grad is not None]
        norm = float(nn.utils.get_total_norm(gradients))
        spoilt = engine.gradients.spoilt() if math.isfinite(norm) else None  # Else there is a reason already.
        if spoilt is None:
            verdict = guard.judge(norm)
        else:
            verdict = guard.refuse(f"forward made its buffer {spoilt!r} not finite")
        if verdict.action == "pass":
            return weight
        session.counters[f"guard_{verdict.action}"] += 1
        session.say(f"guard at step {engine.step + 1}: {session.name}: {verdict.reason}: {verdict.action}")
        if verdict.action == "clip":
            torch._foreach_mul_(gradients, verdict.scale)
            return weight
        engine.drop_gradient()
        if verdict.action == "evict":
            engine.share.ranges = []  # Others are to have these samples: it may not be the data.
            self._node.request_node_exit()
            raise NodeExpelled(f"{session.name} has put itself out of the cluster: {verdict.reason}")
        return 0.0

    def check_trains(self, call: str) -> None:
        """Raises: ConfigError in the middle of a loop over an evaluation."""
        if self._engine.evaluation.size:
            raise ConfigError(
                f"{call} within a loop over trainer.evaluate (expected after it: nothing is trained meanwhile)"
            )

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Inside, this node takes part in an evaluation; the batch that the script has in hand stays valid.

        That batch does not count if the cluster has trained meanwhile, or has dealt its samples to others.
        """
        engine, share, named = self._engine, self._engine.share, self._engine.named
        if named.mine:
            raise ConfigError(
                f"evaluate: update(name={named.names[named.mine]!r}) is due (expected evaluate after all of "
                f"{', '.join(named.names)})"
            )
        ranges, blamed, calls, told = share.ranges, share.in_hand, self.calls, engine.means.hold()
        before = self._basis()
        share.in_hand = []
        try:
            yield
        finally:
            engine.means.give_back(told)
            self.calls = calls
            moved = self._basis() != before or (ranges and share.dealt() != ranges)
            has_some = ranges or not before[-1]
            self._void = bool(has_some and moved)
            if self._void:
                self._node.record.void(engine.step, computed=True)
            else:
                share.ranges, share.in_hand = ranges, blamed

    def _basis(self) -> tuple[int, int, int, bool]:
        """What the script's work for a step rests on, to see whether it has changed.

        Last: is there no gradient yet?
        """
        engine = self._engine
        return engine.step, self._session.rejoins, engine.share.epoch, engine.gradients.is_zero()

    def skip(self) -> bool:
        """Take part in a step without samples. Returns: False if this node is out."""
        with self.turn, no_modes(self._engine.kinds):
            if self._session.ended:
                return False
            if self.conclude():
                return self._session.ended is None
            present = self._engine.contribute_nothing()
            self._engine.share.ranges, self._updating = [], ""
            return self._take_part(0.0, present)

    def _take_part(self, weight: float, present: bytes) -> bool:
        session, engine = self._session, self._engine
        leaving = session.hooks.wants_exit() or session.leaving
        contribution = engine.contribution(weight, present, self._updating, leaving)
        self._contributed = weight
        self._node.record.computing += time.monotonic() - self._started_s
        return self._hear(lambda: session.step(contribution))

    def conclude(self) -> bool:
        """End the step that an interrupt has left under way, as at a prompt. Returns: whether there was one."""
        if not self._session.is_waiting or self._session.ended is not None:
            return False
        with self.turn, no_modes(self._engine.kinds):
            self._hear(self._session.hear)
        return True

    def _hear(self, hear: Callable[[], StepOutcome | None]) -> bool:
        """Wait for the outcome of the step under way, and adopt it. Returns: as `skip`."""
        session, engine, record = self._session, self._engine, self._node.record
        weight, waited_s = self._contributed, time.monotonic()
        outcome = hear()
        self.calls += 1
        came_s = time.monotonic()
        record.summing += came_s - waited_s
        if session.ended is not None:
            return False
        if outcome is None:
            record.void(engine.step, weight > 0)
            self.begin()
            return True
        session.rates.sync_delay_s = came_s - waited_s
        try:
            self._adopt(outcome, weight, came_s)
            if engine.healing is not None and session.ended is None:
                self._heal(engine.healing)
        except BaseException:
            if session.ended is None:  # It is of a function of the script's, and the script may go on.
                self.begin()
            raise
        self.begin()
        return True

    def _adopt(self, outcome: StepOutcome, weight: float, came_s: float) -> None:
        session, engine, record = self._session, self._engine, self._node.record
        step, samples = engine.step, engine.samples
        try:
            session.adopt(outcome)
        finally:
            self._measure(weight)
            record.updating += time.monotonic() - came_s
            record.samples_here += weight if engine.samples > samples else 0.0  # Of a round once.
            record.stepped(engine.step, outcome.commit.total.shares, dict(outcome.deal))
            if engine.step > step:
                record.measured(engine.means.last)

    def _measure(self, weight: float) -> None:
        took_s = max(time.monotonic() - self._started_s, 1e-6)
        rates = self._session.rates
        rates.samples_per_s = RATE_MEMORY * rates.samples_per_s + (1 - RATE_MEMORY) * weight / took_s
        if weight > 0:
            self.updates_here += 1
            self._engine.evaluation.attend()

    def _heal(self, verdict: Divergence) -> None:
        """Leave the cluster, which goes on, and come back with its state. Raises: ReplicasDiffer if in vain."""
        session, engine = self._session, self._engine
        engine.copies.finish()

        def withdrawal() -> Contribution:
            self.begin()
            return engine.withdrawal()

        ended = session.withdraw(withdrawal)
        if ended.how not in ("left", "out"):
            session.end(ended)
            return
        engine.healing = None
        if session.hooks.wants_exit():
            session.end(Ended("left", ended.reason))
            return
        lately = [
            step for step in self._healed.get(verdict.key, []) if step > engine.step - HEALS_COUNT_STEPS
        ]
        self._healed[verdict.key] = [*lately, engine.step]
        if ended.last or len(lately) >= MAX_HEALS:
            many = f"This node has pulled the state anew {MAX_HEALS} times for it, in vain."
            vain = "Nobody is left whose state this node could pull." if ended.last else many
            text = f"{verdict.sentence} ({vain})"
            session.end(Ended("broken", text, error=ReplicasDiffer(text)))
            return
        self.heals += 1
        session.counters["healed"] += 1
        session.rejoin("its state differs, and it pulls that of the others")
