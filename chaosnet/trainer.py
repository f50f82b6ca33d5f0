"""`Trainer`: three lines put a plain PyTorch script into a cluster that comes and goes (Chaos, Sec. V-B)."""

from __future__ import annotations

import contextlib
import os
import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from numbers import Integral
from typing import Any, NoReturn, cast

import torch
from torch import nn

from . import endings, exit_event
from .agreement import HEALS_COUNT_STEPS, MAX_HEALS, Agreement, Verdict
from .checkpointing import Checkpointing
from .data import Batch, DataShare, EpochOrder, NamedBatch, check_dataset, fetch, split
from .guard import Guard
from .invite import introduce
from .lr_schedule import LRSchedule
from .means import MAX_WEIGHT, ClusterMean, Means
from .named_updates import named, parameter_count
from .node.core import Agent, Settings
from .node.flat_state import Arrival
from .node.gradients import Gradients
from .node.loop import NodeLoop
from .node.outcomes import Admitted, Ended, Founded, StateArrived, StateDiscarded, StepOutcome
from .node.plain import decode, encode
from .node.training_state import TrainingState, first_difference, get_generators, set_generators
from .node.transport import Transport
from .protocols.data_cursor import DataCursor
from .protocols.errors import ChaosnetError, ConfigError, Expelled, ReplicasDiffer, ScaleOutFailed
from .protocols.events import (
    CaughtUp,
    Contributed,
    Crashed,
    LeaveWanted,
    LocalReady,
    Retracted,
    StateRejected,
)
from .protocols.messages import Contribution, Notice
from .protocols.scale_out import Otherwise
from .protocols.status import Status
from .randomness import Randomness
from .remembered import ASK_PATIENCE_S, Remembered
from .scheduler.sync_plan import POLICIES, Policy, custom
from .script_rules import SCHEDULE, UPDATE, ScriptRules
from .script_rules import STEP as STEP_CALL
from .settings import (
    CheckpointSettings,
    NodeSettings,
    StepSettings,
    checkpoint_settings,
    expect,
    node_settings,
    step_settings,
)
from .settings_table import SETTINGS
from .state_copies import StateCopies

RATE_MEMORY = 0.8  # Of the moving average of samples per second.


class Trainer:
    """A member of a cluster that trains one model, synchronously, over whatever links there are.

    Joins the cluster that `join` (or CHAOSNET_JOIN) names, or starts one. Returns when this node is a member
    and holds the cluster's training state: parameters, buffers, optimizer, LR scheduler, RNG, epoch and step,
    `extra_state`. Model, optimizer and the rest may also be given later, to `attach`.

    When the cluster has gone on without this node (it was cut off, or slept), the next update() rejoins: it
    pulls the state anew and returns. What this node had for that step is not counted.

    Args:
        model: Any module; all members have the same one. Several: a dictionary by name.
        optimizer: Any `torch.optim` over its parameters that steps without a closure (so not LBFGS). Several:
            a dictionary by name; then each `update()` says the name of the one that it steps, in that order.
        lr_scheduler: Stepped by Trainer on all nodes alike; the script's own calls of `step()` may stay.
            `ReduceLROnPlateau` looks at `trainer.mean(loss)`.
        extra_state: A dictionary of plain data and tensors of yours that a joiner is to receive, in place.
        updates: With several optimizers: the order of updates in a round, e.g. ("D", "D", "G"). The same on
            all nodes.
        lr_scheduler_every: When the scheduler is stepped: "step", "epoch" (one of `batches`, by the cluster),
            or whenever the cluster has trained so many samples more. The same on all nodes.
        max_grad_norm: Clip the cluster's mean gradient to this norm before the optimizer steps. The same on
            all nodes.
        after_step: Called on every node after each step of the optimizer, also for the steps that a joiner
            catches up with. What else changes the training state at every step belongs here, e.g. an average
            of weights.
        on_divergence: What happens when nodes do not hold the same training state, which is compared all the
            time: "stop": all raise `ReplicasDiffer`. "heal": those in the minority pull the state anew.
            "warn": it is said, and training goes on. The same on all nodes.
        seed: Of the order of samples that `batches` deals out.
        same_rng: All nodes draw the same random numbers in a step. The same on all nodes. Else each node
            draws its own, and the founder's generators stay as the script has seeded them.
        guard: What to do with a gradient that is not finite, or far larger than usual: "skip", "clip" or
            "evict". The same on all nodes.
        guard_factor: So many times the median norm of late is "far larger".
        chunk_bytes: Size of the smallest piece of the gradients that travels by itself. The same on all
            nodes.
        quiet: Print nothing.
        listen: Where others reach this node. Port 0: any free one; host 0.0.0.0: all interfaces.
        join: Addresses of members of the cluster to join, or an invite.
        join_patience_s: How long to knock where nobody answers yet.
        found: Start a cluster if none of the addresses of `join` leads into one within `join_patience_s`. All
            nodes may be given it, and the same `join`, their own addresses among them: of those that reach
            each other one founds, the one that is named first.
        new: Start a cluster, even if this node was in one when it last ran at its port, which may live still.
        rejoin: Come back when the cluster has gone on without this node; else `update()` raises `Expelled`.
        name: Unique in the cluster.
        neighbors: Number of links to ask for, up to 64.
        links: Whom to link to instead: names or addresses of members.
        blocking: Join as the Chaos paper does: neighbours wait until they have sent the state. Else they
            train on meanwhile, unless the results of their steps would take more than half of this node's
            links.
        sync_policy: Trees of the all-reduce, while this node is the scheduler: "packed", "fapt", "single",
            "ring"; in a script also a callable from the overlay (a networkx graph, edges with `rate_bps` and
            `rtt_s` where known) to trees (scheduler/sync_plan.py).
        compression: What float32 gradients are on the wire: "none" (as they are), "bf16" (half the bytes) or
            "int8" (a quarter). The same on all nodes.
        probe: How new links are measured: "in-band", "iperf3".
        key: File with the key of this node or user.
        allowed_keys: File with public keys of others that may join, one a line.
        insecure: Use no key: everybody who reaches the port can join.
        checkpoint_dir: Write the state there, so that training survives the death of all nodes.
        every: Steps from one checkpoint to the next.
        checkpoint_copies: "shard": each node writes a part, into one folder that all share. "whole": each
            node writes all of the state, to a disk of its own.
        checkpoints_kept: Complete ones to keep.
        resume: Start the cluster with the newest complete checkpoint, if there is any. Who joins a cluster
            gets the state from there.
        resume_from: Or with the checkpoint of this step.
    Raises: ScaleOutFailed if the cluster cannot be reached or refuses, ConfigError for a setting or model
        that cannot work, CheckpointError if it cannot be resumed. SystemExit after Ctrl+C while it joins.
    """

    optimizer: Any  # One of torch's, or several as one (named_updates.py).

    def __init__(
        self,
        model: nn.Module | dict[str, nn.Module] | None = None,
        optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer] | None = None,
        lr_scheduler: Any = None,
        extra_state: dict[str, Any] | None = None,
        *,
        updates: tuple[str, ...] | None = None,
        lr_scheduler_every: str | int = "step",
        max_grad_norm: float | None = None,
        after_step: Callable[[], None] | None = None,
        on_divergence: str = "stop",
        seed: int = 0,
        same_rng: bool = False,
        guard: str | None = None,
        guard_factor: float = 10.0,
        chunk_bytes: int | None = None,
        quiet: bool = False,
        listen: str | None = None,
        join: str | None = None,
        join_patience_s: float | None = None,
        found: bool | None = None,
        new: bool | None = None,
        rejoin: bool | None = None,
        name: str | None = None,
        neighbors: int | None = None,
        links: tuple[str, ...] | None = None,
        blocking: bool | None = None,
        sync_policy: str | Policy | None = None,
        compression: str | None = None,
        probe: str | None = None,
        key: str | None = None,
        allowed_keys: str | None = None,
        insecure: bool | None = None,
        checkpoint_dir: str | os.PathLike[str] | None = None,
        every: int | None = None,
        checkpoint_copies: str | None = None,
        checkpoints_kept: int | None = None,
        resume: bool | None = None,
        resume_from: int | None = None,
    ) -> None:
        given = {name: value for name, value in locals().items() if name in SETTINGS}
        told = step_settings(**given)
        self._take(told)
        self.settings: NodeSettings = node_settings(**given)
        self._checkpoints: CheckpointSettings | None = checkpoint_settings(**given)
        policy = self.settings.sync_policy
        self._policy = custom(policy) if callable(policy) else POLICIES[policy]
        self.name = self.settings.name
        self._keyring = self.settings.keyring()
        self._members = Remembered(self.name, self.settings.listen, self._say)
        self._begin(told.seed)
        if model is not None and optimizer is not None:
            self.attach(model, optimizer, lr_scheduler, extra_state)
        elif model is not None or optimizer is not None:
            raise ConfigError("Trainer: expected a model and an optimizer, or neither (then call attach)")

    def _take(self, told: StepSettings) -> None:
        self.max_grad_norm, self.chunk_bytes, self.quiet = told.max_grad_norm, told.chunk_bytes, told.quiet
        self._update_names = told.updates
        self._after_step, self._same_rng = told.after_step, told.same_rng
        self._on_divergence, self._lr_every = told.on_divergence, told.lr_scheduler_every
        self._guard = None if told.guard is None else Guard(told.guard, told.guard_factor)

    def _begin(self, seed: int) -> None:
        """Nothing has been trained, and there is no model yet."""
        self._healing: Verdict | None = None  # This node is to pull the state anew.
        self._healed: dict[str, list[int]] = {}  # What had differed: at which steps.
        self.step = 0  # Updates of the model, by anybody, since the cluster began.
        self.samples = 0.0  # Behind them.
        self.joined_step = 0
        self.updates_here = 0
        self.rejoins = 0
        self.heals = 0
        self.join_seconds = 0.0
        self.join_bytes = 0  # Of the state that this node received, and by whom they were sent.
        self.join_bytes_by_source: dict[str, int] = {}
        self._updates = 0  # Calls of update() that the cluster has answered, if only by "you are out".
        self._round = 0  # Steps of the all-reduce, also those in which nobody had samples.
        self._share = DataShare(self.name, seed)
        self._weight: float | None = None  # Samples of the step; None: the script has not said.
        self._in_hand: float | None = None  # Those of the last batch handed out.
        self._own_weight = 1.0  # What the script said last, if it brings its own data.
        self._eager = False  # Is the weight known before update(), so that chunks may leave during backward?
        self._means = Means()
        self._updating = ""  # Name of the update() under way.
        self._checkpointing: Checkpointing | None = None
        self._run = secrets.token_hex(8)  # Of the cluster since it was founded or resumed.
        self._ended: Ended | None = None
        self._leaving = False  # This node has said that it wants out.
        self._turn = (
            threading.RLock()
        )  # Of who takes part in a step: the main thread may end beside the driver.
        self._closed = False
        self._loop: NodeLoop | None = None
        self._step_started_s = 0.0

    @property
    def metrics(self) -> dict[str, float]:
        """The cluster's means of the last step, by name."""
        return self._means.last

    # --- joining ---

    def attach(
        self,
        model: nn.Module | dict[str, nn.Module],
        optimizer: torch.optim.Optimizer | dict[str, torch.optim.Optimizer],
        lr_scheduler: Any = None,
        extra_state: dict[str, Any] | None = None,
    ) -> None:
        """Take over a model and become a member. Arguments and errors as of the class."""
        if self._loop is not None:
            raise ConfigError("attach: this trainer has a model already")
        endings.check_alone()
        self.model, self.optimizer, self.lr_scheduler, self._named = named(
            model, optimizer, lr_scheduler, self._update_names
        )
        model, lr_scheduler = self.model, self.lr_scheduler
        compression = self.settings.compression
        self._gradients = Gradients(model, self.chunk_bytes, self._on_chunks_ready, compression)
        max_norm = None if self.max_grad_norm is None else float(self.max_grad_norm)
        terms = {"max_grad_norm": str(max_norm), "chunk_bytes": str(self._gradients.chunk_bytes)}
        terms |= {"on_divergence": self._on_divergence, "lr_scheduler_every": str(self._lr_every)}
        terms |= {"same_rng": str(self._same_rng), "compression": repr(compression)}
        if self._named.names:
            terms["updates"] = ", ".join(self._named.names)
        if self._guard is not None:
            terms["guard"] = self._guard.policy
        self._state = TrainingState(model, self.optimizer, lr_scheduler, extra_state, terms)
        self._random = Randomness(self._same_rng, self._state.accelerator())
        if self._guard is not None:
            self._gradients.judge_first()
        self._schedule = LRSchedule(lr_scheduler, self.optimizer, self._lr_every, self._say)
        self._agreement = Agreement(self._state, self._gradients, self.name, self._on_divergence)
        started_s = time.monotonic()
        loop = NodeLoop(
            self._make_agent, self._make_transport, self._gradients, self._on_notice, self._on_parked,
            guarded=self._guard is not None, on_view=self._members.entered,
            on_progress=lambda text: self._say(f"{self.name} {text}"),
        )  # fmt: skip
        if self._checkpoints is not None:
            self._checkpointing = Checkpointing(self._checkpoints, self.name, self._say)
            self._checkpointing.counters = loop.counters
            self._resume()
        self._copies = StateCopies(self._state, loop, self._checkpointing, self._say)
        self._rules = ScriptRules(
            model, self.optimizer, lr_scheduler, self._gradients, self._say,
            self._on_optimizer_step, self._on_scheduler_step,
        )  # fmt: skip
        try:
            addresses = loop.start()
        except BaseException:  # If it cannot listen, the script may go on alone, or try again.
            self._rules.remove()
            raise
        self._loop, self._pid, self.driver = loop, os.getpid(), threading.current_thread()
        loop.rates.state_bytes, loop.rates.layer_bytes = self._state.state_bytes(), self._state.layer_bytes()
        exit_event.install(self._on_exit_wanted)
        endings.opened(self)
        if self.settings.seeds:
            self._ask_to_join(addresses)
        else:
            self._say_founded(addresses)
            self._state.watch()
            loop.found()
        if ended := self._become_member(loaded=not self.settings.seeds):
            self._fail_to_join(ended)
        self.join_seconds = time.monotonic() - started_s
        self._start_step()
        self._await_round()

    def _ask_to_join(self, addresses: tuple[str, ...]) -> None:
        s, loop = self.settings, self._running()
        if s.join:
            self._say(f"{self.name} at {', '.join(addresses)} joins the cluster at {', '.join(s.join)}")
        else:
            self._say(
                f"{self.name} at {', '.join(addresses)} was in a cluster when it last ran here: it asks for that at "
                f"{', '.join(s.remembered)}, and founds one if nobody answers in {ASK_PATIENCE_S:g} s "
                "(at once: --new)"
            )
        if s.invite and s.keys:
            try:
                introduce(s.invite, s.keys)
            except ScaleOutFailed as error:
                self._fail_to_join(Ended("refused", str(error), error=error))
        otherwise = Otherwise.FOUND if s.found or not s.join else Otherwise.FAIL
        patience_s = s.join_patience_s if s.join else ASK_PATIENCE_S
        loop.join(s.seeds, s.links, s.neighbors, s.blocking, patience_s, self._state.places(), otherwise)

    def _make_agent(self, addresses: tuple[str, ...], least_life: int) -> Agent:
        settings = Settings(
            addresses=addresses,
            peers_at=self.settings.peers_at,
            probe=self.settings.probe,
            chunks=len(self._gradients.chunks),
            borders=self._gradients.borders,
            result_bytes=self._gradients.total_bytes,
            digest=self._state.spec_digest(),
            spec=encode(self._state.spec(), "spec"),
            policy=self._policy,
            life=max(time.time_ns(), least_life),  # If the clock was set back: Agent, `Outlived`.
            first_step=self._round,
            keyring=self._keyring,
        )
        return Agent(self.name, settings, random.Random())

    def _make_transport(self, loop: NodeLoop) -> Transport:
        s = self.settings
        return Transport(self.name, s.listen, loop, keys=s.keys, keyring=self._keyring)

    def _become_member(self, loaded: bool) -> Ended | None:
        """Wait for the state and for membership; apply what the others trained meanwhile.

        Returns: why there is none; None if all is well.
        """
        loop = self._running()
        admitted = False
        fetched: int | None = None  # The step whose state has come.
        waiting: list[StepOutcome] = []
        while not (loaded and admitted):
            match loop.outcomes.get():
                case StateArrived() as arrived:
                    loaded, fetched = self._load(arrived), arrived.step
                    for outcome in waiting if loaded else []:
                        self._apply_if_new(outcome)
                    waiting.clear()
                    if loaded:
                        loop.post(CaughtUp())
                case StateDiscarded():
                    loaded, admitted, waiting = False, False, []
                case Founded(addresses):
                    self._say_founded(addresses)
                    self._state.watch()
                    loaded = True
                case StepOutcome() as outcome:
                    if loaded:
                        self._apply_if_new(outcome)
                    else:
                        waiting.append(outcome)
                case Admitted(step, deal):
                    admitted, self.joined_step, self._share.deal = True, step, deal
                case Ended() as ended:
                    return ended
        self._copies.serve_fellows(fetched)
        if self._checkpointing is not None:
            self._checkpointing.started(self.step, self._run)
            self._generators = get_generators(self._state.accelerator())
        return None

    def _load(self, arrived: StateArrived) -> bool:
        loop = self._running()
        try:
            self._load_arrival(arrived.arrival)
        except ChaosnetError as error:
            loop.post(StateRejected(str(error)))
            return False
        self._random.joined(self._run, self.name, self._round)
        self._state.watch()  # It reads all of it, so before the others wait for this node.
        self.join_bytes = arrived.arrival.manifest.total_bytes
        self.join_bytes_by_source = dict(arrived.bytes_by_source)
        return True

    def _resume(self) -> None:
        """Who founds the cluster (or may) goes on from a checkpoint; the others get the state from the cluster."""
        assert self._checkpointing is not None
        may_found = self.settings.found or not self.settings.join
        arrival = self._checkpointing.to_resume() if may_found else None
        if arrival is not None:
            try:
                self._load_arrival(arrival)
            except ConfigError as error:
                raise ConfigError(f"cannot resume from {self._checkpointing.directory}: {error}") from None
            self._run = secrets.token_hex(8)

    def _load_arrival(self, arrival: Arrival) -> None:
        runtime = self._state.load(arrival)
        self._gradients.rebase()
        self._round, self.step, self.samples = runtime["round"], runtime["step"], runtime["samples"]
        self._run = runtime["run"]
        self._schedule.from_plain(runtime.get("lr_schedule"))
        self._agreement.forget()
        self._random.key = runtime.get("rng_key", self._random.key)
        self._named.phase = runtime.get("phase", 0)
        cursor = runtime["cursor"]
        self._share.cursor = None if cursor is None else DataCursor.from_plain(cursor)

    def _runtime(self) -> dict[str, Any]:
        """Our part of the training state."""
        cursor = self._share.cursor
        return {
            "run": self._run,
            "round": self._round,
            "step": self.step,
            "samples": self.samples,
            "rng_key": self._random.key,
            "phase": self._named.phase,
            "cursor": None if cursor is None else cursor.to_plain(),
            "lr_schedule": self._schedule.to_plain(),
        }

    def _apply_if_new(self, outcome: StepOutcome) -> None:
        if outcome.step >= self._round:
            self._apply(outcome)
        size = sum(result.nbytes for result in outcome.results)
        self._running().backlog_applied(size)

    def _fail_to_join(self, ended: Ended) -> NoReturn:
        self._ended = ended
        self._stop()
        if ended.how == "left":  # Ctrl+C while it asked: the script has nothing to go on with.
            self._closed = True
            self._say(f"{self.name} left before it was a member")
            raise SystemExit(0)
        seeds = ", ".join(self.settings.seeds)
        remembered = "" if self.settings.join else ": the cluster that it was in (another one: --new)"
        raise ScaleOutFailed(
            f"{self.name} cannot join {seeds}{remembered}: {self._reason(ended)}"
        ) from ended.error

    def _reason(self, ended: Ended) -> str:
        if not ended.spec:
            return ended.reason
        difference = first_difference(self._state.spec(), decode(ended.spec))
        return f"{ended.reason}: {difference or 'in its details'}"

    # --- rejoining ---

    def _rejoin(self, reason: str) -> None:
        """The cluster went on without us: pull its state, and go on as if we had been there."""
        loop, before = self._running(), self.step
        self._copies.finish()
        self.optimizer.zero_grad(set_to_none=True)
        settings = self.settings
        ways = loop.rejoin(settings.neighbors, settings.blocking, settings.join_patience_s)
        if not ways:
            self._end(Ended("out", f"{reason}; it knows no address of any other member"))
        self._say(f"{self.name} is out of the cluster: {reason}; it rejoins through {', '.join(ways)}")
        self._on_exit_if_wanted()
        if ended := self._become_member(loaded=False):
            self._end(ended)
            return
        self.rejoins += 1
        self._named.rejoined()
        self._means.settle()
        self._say(
            f"{self.name} is in again at step {self.step}: {self.step - before} steps went by without it"
        )

    # --- replicas that differ ---

    def _judge(self, outcome: StepOutcome) -> None:
        """Do all nodes hold the same? All see the same sums, so all do the same about it."""
        order = [name for name, _ in outcome.deal]
        verdict = self._agreement.judge(outcome.commit.total, self.step - 1, order)
        if verdict is None:
            return
        self._running().counters["replicas_differ"] += 1
        if self._on_divergence == "stop":
            leaving = self._leaving or exit_event.exit_wanted()
            error = None if leaving else ReplicasDiffer(verdict.sentence)
            if error is not None:  # To those who are about to join, and have not compared anything.
                self._running().post(Crashed(endings.describe(error), ()))
            self._end(Ended("left" if leaving else "broken", verdict.sentence, error=error))
            return
        self._say(verdict.sentence)
        if self._on_divergence == "heal" and verdict.here and not self._leaving:
            self._healing = verdict

    def _heal(self, verdict: Verdict) -> None:
        """Leave the cluster, which goes on, and come back with its state. ReplicasDiffer: it is in vain."""
        loop = self._running()
        self._copies.finish()
        loop.post(LeaveWanted())
        while True:
            self._start_step()
            present = self._gradients.empty().present
            loop.post(Contributed(tuple(range(len(self._gradients.chunks))), 0.0))
            # No share: checkpoints of the others are to be whole without our part.
            loop.post(LocalReady(self._contribution(present=present, leaving=True)))
            match loop.outcomes.get():
                case StepOutcome() as outcome:
                    self._apply(outcome)
                case Ended("left" | "out") as ended:
                    break
                case Ended() as ended:
                    self._end(ended)
                    return
        self._healing = None
        if exit_event.exit_wanted():
            self._end(Ended("left", ended.reason))
            return
        lately = [step for step in self._healed.get(verdict.key, []) if step > self.step - HEALS_COUNT_STEPS]
        self._healed[verdict.key] = [*lately, self.step]
        if ended.last or len(lately) >= MAX_HEALS:
            many = f"This node has pulled the state anew {MAX_HEALS} times for it, in vain."
            vain = "Nobody is left whose state this node could pull." if ended.last else many
            text = f"{verdict.sentence} ({vain})"
            self._end(Ended("broken", text, error=ReplicasDiffer(text)))
            return
        self.heals += 1
        loop.counters["healed"] += 1
        self._rejoin("its state differs, and it pulls that of the others")

    # --- one step ---

    def _start_step(self) -> None:
        """Forward may begin. With our own data the weight is known when a batch is handed out."""
        self._step_started_s = time.monotonic()
        self._random.step_begins(self.step)
        if self._named.is_settled:  # Else the round's other updates are of the same samples.
            self._share.ranges, self._weight, self._in_hand = [], None, None
        later = self._share.size or self._leaving or not self._eager
        self._gradients.arm(None if later else self._own_weight)

    def _on_chunks_ready(self, chunks: range) -> None:
        weight = self._weight if self._weight is not None else self._own_weight
        self._running().post(Contributed(tuple(chunks), weight))

    def _await_round(self) -> None:
        """Enter where the first update of a round is due; until then take part without samples."""
        while not self._named.is_settled and not self._done:
            self._skip()

    def update(self, samples: float | None = None, name: str | None = None) -> None:
        """All-reduce, optimizer step, LR scheduler step, zero_grad. optimizer.step() in the script does the same.

        The gradient is the mean over all samples of the cluster: each node's counts by its samples.
        Args:
            samples: Behind this node's gradients since the last update. Default: those of the batches that
                `batches` gave out; with your own loader 1, so that all nodes count the same.
            name: Of the optimizer that it steps, if there are several.
        Raises: Expelled if the cluster went on without this node and does not take it back (or with
            rejoin=False); ConfigError for a gradient that cannot be averaged.
        """
        self._step_by(UPDATE, samples, name)

    def _step_by(self, way: str, samples: float | None, name: str | None, overflow: bool = False) -> None:
        """The script asks for a step by that call."""
        self._running()
        self.driver = threading.current_thread()
        with self._turn:
            self._rules.check_place(way)
            if not self._leave_if_wanted():
                if samples != 0:
                    self._rules.check_way(way)
                if overflow:
                    self._drop_gradient()
                self._update(0 if overflow else samples, name)
        endings.rest_if_all_ends()

    def _on_optimizer_step(self, name: str | None, overflow: bool) -> None:
        """optimizer.step() in the script. `overflow`: a GradScaler says so; the gradient is left out."""
        self._step_by(STEP_CALL, None, name, overflow)

    def _on_scheduler_step(self, name: str, arguments: tuple[Any, ...]) -> None:
        """scheduler.step() in the script."""
        self._rules.check_place(SCHEDULE)
        if not self._done:
            self._schedule.called(name, arguments)

    def _update(self, samples: float | None, name: str | None) -> None:
        self._updating = self._named.check(name)
        if self._named.void:
            self._schedule.own_step(self._updating, counts=False)
            self._named.end_void()
            self._await_round()
            return
        if self._updating and samples != 0:
            self._rules.check_backward(self._updating)
        weight = float(samples if samples is not None else self._weight or self._own_weight)
        if not 0 <= weight <= MAX_WEIGHT:
            raise ConfigError(f"update: samples is {samples} (expected a number from 0 to {MAX_WEIGHT:g})")
        if samples and self._weight is None:
            self._own_weight = weight  # None at all is said of this update, not of those to come.
        self._eager = samples is None
        self._rules.check(self._round)
        self._schedule.check(counts_epochs=self._share.length > 0)
        if self._guard is not None and weight > 0:
            weight = self._guarded(self._guard, weight)
        self._schedule.own_step(self._updating, counts=weight > 0)
        finished = self._gradients.finish(weight)
        if weight > 0:
            self._rules.contributed()
        self._named.watch(finished.present, parameter_count(self._gradients))
        if finished.retracted:
            self._running().post(Retracted(weight, f"{self.name} changed gradients that were on their way"))
        else:
            self._running().post(Contributed(tuple(finished.chunks), weight))
        self._finish_step(weight, finished.present)
        if self._named.mine == 0:
            self._await_round()

    def _guarded(self, guard: Guard, weight: float) -> float:
        """Judge our own gradient before anybody gets it. Returns: the weight that it is to have."""
        gradients = [p.grad for p in self.model.parameters() if p.grad is not None]
        verdict = guard.judge(float(nn.utils.get_total_norm(gradients)))
        if verdict.action == "pass":
            return weight
        self._running().counters[f"guard_{verdict.action}"] += 1
        self._say(f"guard at step {self.step + 1}: {self.name}: {verdict.reason}: {verdict.action}")
        if verdict.action == "clip":
            torch._foreach_mul_(gradients, verdict.scale)
            return weight
        self._drop_gradient()
        if verdict.action == "evict":
            self._share.ranges = []  # Others are to have these samples: it may not be the data.
            self.request_node_exit()
            raise Expelled(f"{self.name} has put itself out of the cluster: {verdict.reason}")
        return 0.0

    def _drop_gradient(self) -> None:
        """What this node has for the step is not counted."""
        self.optimizer.zero_grad(set_to_none=True)
        self._gradients.revert_buffers()
        self._means.take()

    def _is_acceptable(self, outcome: StepOutcome) -> bool:
        """Is the cluster's gradient finite? All members see the same bits, so all refuse it, or nobody does."""
        if self._guard is None or all(bool(result.isfinite().all()) for result in outcome.results):
            return True
        self._running().counters["guard_refused"] += 1
        self._say(f"guard after step {self.step}: the cluster's gradient is not finite: nobody applies it")
        self.optimizer.zero_grad(set_to_none=True)
        self._gradients.revert_buffers()
        return False

    def _skip(self) -> bool:
        """Take part in a step without samples. Returns: False if this node is out."""
        with self._turn:
            if self._ended:
                return False
            finished = self._gradients.empty()
            if finished.retracted:
                self._running().post(Retracted(0.0, f"{self.name} took back its gradients"))
            self._running().post(Contributed(tuple(range(len(self._gradients.chunks))), 0.0))
            self._share.ranges, self._updating = [], ""
            return self._finish_step(0.0, finished.present)

    def _finish_step(self, weight: float, present: bytes) -> bool:
        leaving, metrics = exit_event.exit_wanted() or self._leaving, self._means.take()
        if self._checkpointing is not None:
            self._checkpointing.contribute(metrics)
        digests, accounts = ({}, {}) if leaving else self._agreement.tell(self._round, self.step, weight > 0)
        contribution = self._contribution(
            weight=weight,
            ranges=tuple(self._share.ranges) if self._named.is_last else (),
            update=self._updating,
            shares={self.name: 0 if leaving else self._share.size},
            metrics=metrics,
            present=present,
            leaving=leaving,
            digests=digests,
            accounts=accounts,
        )
        loop, waited_s = self._running(), time.monotonic()
        loop.post(LocalReady(contribution))
        outcome = self._await_outcome()
        self._updates += 1
        if self._ended is not None:
            return False
        if outcome is not None:
            loop.rates.sync_delay_s = time.monotonic() - waited_s
            self._apply(outcome)
            self._measure(weight)
            if self._healing is not None and self._ended is None:
                self._heal(self._healing)
        self._start_step()
        return True

    def _contribution(self, **parts: Any) -> Contribution:
        """`parts`, and how the data set is dealt out."""
        share = self._share
        return Contribution(
            dataset=share.length, min_samples=share.min_samples, drop_last=share.drop_last, **parts
        )

    def _await_outcome(self) -> StepOutcome | None:
        """The next completed step; None if this node has left, or was out and has rejoined."""
        while True:
            match self._running().outcomes.get():
                case StepOutcome() as outcome:
                    return outcome
                case Ended("out", reason) if exit_event.exit_wanted() or self._leaving:
                    self._end(Ended("left", reason))
                    return None
                case Ended("out", reason) if self.settings.rejoin:
                    self._rejoin(reason)
                    return None
                case Ended() as ended:
                    self._end(ended)
                    return None

    def _end(self, ended: Ended) -> None:
        self._ended = ended
        self._gradients.detach()
        if ended.how == "left":
            if not self._leaving:
                exit_event.want_exit()  # It was `chaosnet leave`: the script hears of it as of Ctrl+C.
            return
        self._stop()
        if self._checkpointing is not None:
            self._checkpointing.close(abandon=True)
        if ended.error is not None:
            raise ended.error
        again = " and cannot rejoin" if ended.how == "refused" else ""
        raise Expelled(f"{self.name} is out of the cluster{again}: {self._reason(ended)}")

    def _apply(self, outcome: StepOutcome) -> None:
        """What every member does with a completed step, to the same effect."""
        total = outcome.commit.total
        was_last = self._named.is_last
        self._named.completed(total.update)
        if self._named.is_settled:
            self._share.in_hand = []  # What goes wrong from here on is not for the samples to answer for.
        if self._checkpointing is not None:
            self._checkpointing.next_step_done()
        applied = bool(total.weight) and self._is_acceptable(outcome)
        self._means.came(total.metrics)  # First, as after_step may look at them.
        if applied:
            self._gradients.adopt(total.present, outcome.results)
            self._named.stepping(total.update)
            if self.max_grad_norm is not None:
                nn.utils.clip_grad_norm_(self._named.parameters(), self.max_grad_norm)
            self._copies.finish()
            with self._rules.our_step():
                with self._random.stepping(self.optimizer, self.step):
                    self.optimizer.step()
                self._schedule.stepped(total.metrics.get("loss", (0.0, 0.0)))
            self.optimizer.zero_grad(set_to_none=True)
            if self._after_step is not None:
                with self._rules.after_step(), self._random.alike("after_step", self.step):
                    self._after_step()
            self.step += 1
            self.samples += total.weight if was_last else 0.0
        self._round = outcome.step + 1
        self._share.deal = outcome.deal
        self._gradients.bundle(outcome.bundle)
        for said in self._share.completed(total, self._named.is_settled):
            self._say(said)
        self._running().rates.left_out = self._share.left_out()
        with self._rules.our_step():
            self._schedule.progressed(self.epoch, self.samples)
        self._judge(outcome)
        if self._ended is None:
            self._copy_state(outcome, applied)

    def _measure(self, weight: float) -> None:
        took_s = max(time.monotonic() - self._step_started_s, 1e-6)
        rates = self._running().rates
        rates.samples_per_s = RATE_MEMORY * rates.samples_per_s + (1 - RATE_MEMORY) * weight / took_s
        self.updates_here += weight > 0

    # --- serving a joining node ---

    def check_state_replication(self) -> bool:
        """Serve a joining node, if this one was chosen to (Chaos, Sec. V-B).

        A streaming join is served beside training, so this returns at once; for a blocking one it waits until
        the joiner has all of the state. update() does the same if you do not call it.
        Returns: whether a joiner is being served.
        """
        self._running()
        return self._ended is None and self._copies.serve()

    def _copy_state(self, outcome: StepOutcome, applied: bool) -> None:
        """For a joiner, a checkpoint or both: as it is now."""
        joiner, mark, final = outcome.snapshot, None, outcome.commit.total.leaving
        if self._healing is not None:  # What we hold is not what the others do.
            if joiner is not None:
                self._running().serve_snapshot(joiner.step, None)
            return
        if self._checkpointing is not None and (applied or final):
            mark = self._checkpointing.due(self.step, self._run, outcome.commit)
            if applied:
                self._generators = get_generators(self._state.accelerator())
            elif mark is not None:  # Perhaps in the middle of a forward pass, which is not counted.
                self._gradients.revert_buffers()
                set_generators(self._generators, self._state.accelerator())
        if joiner is not None or mark is not None:
            self._copies.take(self._round, self._runtime(), joiner, mark)
        if final:
            self._copies.finish()  # The script may change the model as soon as it is out.

    # --- data ---

    @property
    def epoch(self) -> int:
        """Epochs of `batches` that the cluster has completed."""
        return self._share.epoch

    @property
    def samples_dropped(self) -> int:
        """Left out at the ends of epochs (`drop_last`, `min_samples`), by the whole cluster."""
        return self._share.left_out().get("samples_dropped", 0)

    @property
    def samples_set_aside(self) -> int:
        """Passed over because scripts ended with an error over them, each once an epoch, by the whole cluster."""
        return self._share.left_out().get("samples_set_aside", 0)

    def epochs(self, count: int) -> Iterator[int]:
        """What the cluster still has to do of `count` epochs; a late joiner begins with the present one."""
        while self.epoch < count and not self._done:
            before, updates = self.epoch, self.updates_here
            yield before
            if (
                self.epoch == before
                and self.updates_here > updates
                and not self._share.length
                and not self._done
            ):
                raise ConfigError(
                    "epochs: counts epochs of trainer.batches, and this script brings its own data "
                    "(expected `for epoch in range(N)`, or trainer.batches inside)"
                )
            if self.epoch == before:
                return  # The loop inside was left early.

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        epochs: int | None = None,
        accumulate: int = 1,
        *,
        drop_last: bool = False,
        min_samples: int = 1,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Iterator[Any]:
        """This node's share of a data set that all members have: each sample of an epoch exactly once.

        However members come, go and crash, what a crashed one had not contributed is dealt out again.
        Args:
            dataset: Anything with len() and [index].
            batch_size: Samples per batch on this node; other nodes may choose others.
            epochs: Go on until the cluster has done that many in all. Default: to the end of this one.
            accumulate: At most so many batches between two calls of update(), which is due after each that
                has `batch.last`; scale each loss by `batch.share`.
            drop_last: An epoch ends where fewer samples are left than all nodes take in a step; these are not used.
            min_samples: No batch has fewer. What cannot be dealt so, less than this an epoch, is not used. Both are
                the same on all nodes, and what was left out is counted in `samples_dropped`.
            collate_fn: Makes a batch of a list of samples. Default: as torch's DataLoader does.
        Items that are dictionaries give a dictionary (`model(**batch)`), others a `Batch`.
        A sample over which the scripts of two nodes have ended with an error is set aside (`samples_set_aside`).
        """
        for what, number in (("batch_size", batch_size), ("accumulate", accumulate)):
            expect(isinstance(number, Integral) and number >= 1, what, number, "a whole number from 1")
        fits = isinstance(min_samples, Integral) and 1 <= min_samples <= batch_size
        expect(
            fits, "min_samples", min_samples, f"a whole number from 1 to batch_size, which is {batch_size}"
        )
        expect(drop_last in (True, False), "drop_last", drop_last, "True or False")
        check_dataset(dataset, collate_fn)
        self._running()
        order = self._share.begin(len(dataset), batch_size * accumulate, int(min_samples), bool(drop_last))
        self._gradients.arm(None)
        target = epochs if epochs is not None else self.epoch + 1
        while self.epoch < target and not self._done:
            yield from self._batches_of_step(dataset, order, accumulate, collate_fn)

    def _batches_of_step(
        self, dataset: Any, order: EpochOrder, accumulate: int, collate: Callable[[list[Any]], Any] | None
    ) -> Iterator[Batch | NamedBatch]:
        self._await_round()
        mine, before = self._share.take(), self._updates
        if not mine:
            self._skip()
            return
        weight = float(sum(stop - start for start, stop in mine))
        parts = list(split(mine, accumulate, self._share.min_samples)) if accumulate > 1 else [list(mine)]
        for index, part in enumerate(parts):
            if self._updates != before:
                raise ConfigError(
                    f"batches: update() after batch {index} of {len(parts)} that belong together "
                    "(expected after the one that has `batch.last`)"
                )
            if index == len(parts) - 1:
                self._weight = weight
                self._gradients.arm(weight)
            self._share.in_hand = list(part)
            batch = fetch(dataset, order.indices(self.epoch, part), partial(self._share.blame, part), collate)
            batch.last, batch.share = index == len(parts) - 1, batch.samples / weight
            self._in_hand = float(batch.samples)
            yield batch
        if self._named.mine and not self._done:
            raise ConfigError(
                f"batches: the next batch was asked for before update(name={self._named.names[self._named.mine]!r}) "
                f"(expected all of {', '.join(self._named.names)} after each batch)"
            )
        if self._updates == before and not self._done:
            raise ConfigError(
                "batches: the next batch was asked for without optimizer.step() or trainer.update() (expected one of "
                "them after each batch; to accumulate gradients over several batches, pass accumulate=N; for a batch "
                "that is to be left out, trainer.update(samples=0))"
            )

    @property
    def _done(self) -> bool:
        return self._ended is not None or self._leaving or exit_event.exit_wanted()

    def mean(self, value: Any, name: str = "loss", weight: float | None = None) -> ClusterMean:
        """Average a number over the cluster, with the next update(); costs no message of its own.

        Args:
            value: A number or 0-dim tensor.
            name: One value a name and step; the last means are in `metrics`.
            weight: Default: the samples of the batch in hand.
        Returns: A handle; `float()` of it after the update is the mean.
        """
        counts = weight if weight is not None else (self._in_hand or self._own_weight)
        number = float(value.detach()) if isinstance(value, torch.Tensor) else float(value)
        return self._means.add(name, number, float(counts))

    # --- leaving ---

    def request_node_exit(self) -> None:
        """Leave the cluster: the others go on (Chaos, Sec. V-B). Prints what was done here."""
        if self._loop is None or self._closed or self._pid != os.getpid():  # A forked child is not the node.
            return
        self._leaving = True
        if self._ended is None:
            self._loop.post(LeaveWanted())
            while self._skip():
                pass
        self._closed = True
        if self._checkpointing is not None:
            self._checkpointing.close(abandon=False)
        self._stop()
        assert self._ended is not None
        if self._ended.last:
            self._members.forget()
        self._say(
            f"{self.name} left after step {self.step} ({self._ended.reason}): "
            f"{self.updates_here} steps with samples from here, joined at step {self.joined_step}"
        )

    close = request_node_exit

    def _stop(self) -> None:
        """Nobody is left to leave: signals and the script's end mean what they meant without a trainer."""
        self._rules.remove()
        self._running().stop()
        exit_event.remove(self._on_exit_wanted)
        endings.closed(self)

    def _leave_if_wanted(self) -> bool:
        """Ctrl+C with a script that never asks for it: leave, and end the script. True if out already."""
        if self._leaving:
            return True  # Another thread sees to that: what this one has is not counted.
        if not self._done or exit_event.script_captures_exit():
            return self._ended is not None
        if exit_event.exit_wanted():
            self.request_node_exit()
            raise SystemExit(0)
        return True

    def _on_exit_if_wanted(self) -> None:
        """A signal that came while nobody could act upon it."""
        if exit_event.exit_wanted():
            self._on_exit_wanted()

    def _on_exit_wanted(self) -> None:
        """A signal: the request to leave goes out while the step is still under way."""
        if self._loop is not None and self._ended is None:
            self._loop.post(LeaveWanted())

    def crash(self, reason: str, blames: bool = False) -> None:
        """The script ends with an error: say so to the others, and contribute nothing more."""
        if self._loop is None or self._closed or self._pid != os.getpid():
            return
        self._closed = self._leaving = True
        if self._ended is None:
            self._loop.post(Crashed(reason, self._share.blamed() if blames else (), self.epoch))
            self._ended = Ended("left", reason)
        self._stop()
        self._gradients.detach()
        if self._checkpointing is not None:
            self._checkpointing.close(abandon=True)
        self._say(f"{self.name} left after step {self.step}: its script ended with {reason}")

    def __enter__(self) -> Trainer:
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.request_node_exit()
        else:
            self.crash(endings.describe(error), endings.blames(error))

    # --- telling ---

    def state_hash(self) -> str:
        """A hash of the training state; equal on two members iff it is, to the bit."""
        self._running()
        return self._state.state_hash()

    def status(self, history: bool = False) -> Status:
        """The cluster as this node sees it. `history`: with all events and steps that this node has kept."""
        loop = self._running()
        return cast(Status, loop.ask(lambda: loop.status(history)))

    def _running(self) -> NodeLoop:
        if self._loop is None:
            raise ConfigError("Trainer: no model yet (pass model and optimizer, or call attach)")
        return self._loop

    def _on_notice(self, notice: Notice) -> None:
        when = f"step {notice.step}: " if notice.step else ""  # Who joins does not know it yet.
        self._say(f"{when}{notice.kind} {notice.node}: {notice.detail}")

    def _say_founded(self, addresses: tuple[str, ...]) -> None:
        self._say(f"{self.name} founds a cluster; join it with CHAOSNET_JOIN={' or '.join(addresses)}")

    def _on_parked(self, reason: str | None) -> None:
        self._say(f"waiting: {reason}" if reason else "going on")

    def _say(self, text: str) -> None:
        if not self.quiet:
            line = f"[chaosnet] {text}\n"  # In one piece, as other threads print, too.
            with contextlib.suppress(OSError, ValueError):  # Its reader may have gone: no reason to go, too.
                print(line, end="", file=sys.stderr, flush=True)
