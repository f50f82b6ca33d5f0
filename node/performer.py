"""Doing what the core wants done: effects in; bytes, copies and words to the training thread out."""

from __future__ import annotations

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols.codec import encode
from ..protocols.errors import LocalProtocolError
from ..protocols.messages import (
    MAX_NAMES,
    MAX_TEXT,
    NoSnapshot,
    Notice,
    StatusReply,
    Tensor,
    shortened,
)
from ..protocols.status import Status, to_json
from . import clock
from .agent.core import Agent, Phase
from .link_tests import LinkTests
from .mailbox import Mailbox
from .memory import free_bytes
from .outcomes import Admitted, Ended, FoundedAt, Outcome, Redo, StateArrived, StateDiscarded, StepOutcome
from .state.replica import Replica
from .step_history import StepHistory
from .sums.all_reduce import AllReduce
from .telling import Telling
from .transport.outgoing import Rank
from .transport.transport import Transport

log = logging.getLogger("chaosnet")

BACKLOG_SHARE = 0.25  # Of available memory, for results that a joiner cannot apply yet.


def backlog_limit() -> int:
    """Bytes of results that may wait at a joiner, by the memory that is free now."""
    return int(BACKLOG_SHARE * free_bytes())


@dataclass(eq=False)
class Performer:
    """Performs the effects of one life. Nothing blocks: what takes time ends in an event.

    Attributes:
        backlog_limit: Bytes of results that may wait at a joiner, see BACKLOG_SHARE.
        soon: Hands the agent an event, after the one under way.
        status: See NodeLoop.
        member: Has the training thread been told that this node is a member? Before that, results wait there.
        backlog_bytes: The bytes of results that wait there.
    """

    agent: Agent
    all_reduce: AllReduce
    replica: Replica
    steps: StepHistory
    transport: Transport
    tests: LinkTests
    telling: Telling
    outcomes: queue.SimpleQueue[Outcome]
    mailbox: Mailbox
    asked: queue.SimpleQueue[fx.LayoutAsked]
    counters: Counter[str]
    backlog_limit: int
    soon: Callable[[ev.Event], None]
    status: Callable[[bool, int], Status]
    member: bool = False
    backlog_bytes: int = 0
    _pending: list[Outcome] = field(default_factory=list)  # Of the event under way.

    def perform(self, effects: list[fx.Effect], took_ms: float) -> bool:
        """Do what an event leads to; then tell the training thread all of it at once.

        Returns: whether all effects (at least one) were about chunks, which move no deadline.
        """
        only_chunks = self._perform_each(effects, took_ms)
        for outcome in self._pending:
            self.outcomes.put(outcome)
        if self._pending:
            self.mailbox.wake()
        self._pending.clear()
        return only_chunks

    def _perform_each(self, effects: list[fx.Effect], took_ms: float) -> bool:
        only_chunks = bool(effects)
        for effect in effects:
            if isinstance(effect, fx.ChunkEffect):
                self.all_reduce.perform(effect)
            else:
                only_chunks = False
                self._perform(effect, took_ms)
        return only_chunks

    def _perform(self, effect: fx.Effect, took_ms: float) -> None:
        match effect:
            case fx.Transmit(peer, message):
                self.transport.send(peer, encode(message))
            case fx.ResetAttempt(before=before):
                self.all_reduce.perform(effect)
                if before is not None:  # A slow link is free for the next attempt.
                    self.transport.forget_bulk(lambda chunk: chunk.key < before)
            case fx.DropResults(peers, before):
                self.transport.forget_bulk(lambda chunk: chunk.key < before, peers)
            case fx.Happened():
                self._happened(effect, took_ms)
            case fx.Parked(reason):
                self.telling.parked(reason)
            case fx.Progress(text):
                self.telling.progress(text)
            case fx.AnswerStatus(asker, history, since):
                reply = StatusReply(status=to_json(self.status(history, since)))
                self._perform_each(self.agent.relay.send(asker, reply), 0.0)
            case fx.PassOn(peer, message, payload):
                self._pass_on(peer, message, payload)
            case fx.HandOver(message, payload):
                self.mailbox.put(message, payload)
            case fx.Summed(key, step):
                self.mailbox.put_sums(key, step, self.all_reduce.results_of(step))
            case fx.LayoutAsked():
                self.asked.put(effect)
            case fx.Misheard(text):
                self.counters["dropped"] += 1
                log.warning("dropped: %s", text)
            case fx.FellBehind():
                self.counters["fell_behind"] += 1
            case fx.MeasureLink() | fx.Measured():
                pass  # From core to core.
            case fx.ViewEntered():
                log.debug("view %s from step %d", effect.view.key, effect.step)
                if self.agent.phase is Phase.MEMBER:
                    self.telling.view(effect.view)
            case _:
                self._perform_on_links(effect)

    def _perform_on_links(self, effect: fx.Effect) -> None:
        match effect:
            case fx.Dial(address):
                self.transport.dial(address)
            case fx.CheckReach(address):
                self.transport.check(address)
            case fx.ClosePeer(peer, reason):
                self.transport.close_peer(peer, reason)
            case fx.KeysChanged():
                self.transport.enforce_keys()
            case fx.SendProbe(peer):
                self.tests.send_probe(peer)
            case fx.ServeIperf3(peer) if self.transport.keys:
                self.soon(ev.Iperf3Serving(peer, 0))  # Its port would be open to everybody.
            case fx.ServeIperf3(peer):
                self.tests.serve_iperf3(peer)
            case fx.RunIperf3(peer, address):
                self.tests.run_iperf3(peer, address)
            case _:
                self._perform_for_training(effect)

    def _perform_for_training(self, effect: fx.Effect) -> None:
        match effect:
            case fx.StepCompleted():
                self._step_completed(effect)
            case fx.Founded():
                self.transport.found()
                self._pending.append(FoundedAt(self.agent.settings.addresses))
            case fx.Joined(step, deal, view):
                self.member = True
                self.telling.parked(None)  # It may have waited in an earlier life.
                self.transport.belongs()
                self._pending.append(Admitted(step, deal, view))
            case fx.Recompute(view):
                self._pending.append(Redo(view))
            case fx.Left(reason):
                self._pending.append(Ended("left", reason, last=self.agent.was_last))
            case fx.Out(reason, final):
                self._pending.append(Ended("refused" if final else "out", reason))
            case fx.JoinFailed(reason, spec, lasting):
                self._pending.append(Ended("refused", reason, spec, lasting=lasting))
            case _:
                self._perform_replication(effect)

    def _perform_replication(self, effect: fx.Effect) -> None:
        match effect:
            case fx.TakeSnapshot():
                self._ask_snapshot(effect)
            case fx.DropSnapshot(step):
                self.replica.snapshots.pop(step, None)
            case fx.ServeManifest(peer, step) if not self.replica.serve_manifest(effect):
                self.transport.send(peer, encode(NoSnapshot(step=step)))
            case fx.ServeShard(peer, step) if not self.replica.serve_shard(effect):
                self.transport.send(peer, encode(NoSnapshot(step=step)))
            case fx.ServeManifest() | fx.ServeShard():
                pass  # It has gone out.
            case fx.ReadManifest(step=step):
                self.soon(self.replica.read_manifest(effect))
                if self.replica.arrival is not None and step in self.agent.serving.snapshots:
                    # For those who join with us.
                    self.replica.snapshots[step] = self.replica.arrival.snapshot()
            case fx.StoreShard():
                stored = self.replica.store_shard(effect)
                self.counters["damaged_pieces"] += isinstance(stored, ev.ShardBad)
                self.soon(stored)
            case fx.StateWhole(step):
                self._pending.append(StateArrived(step, self.replica.arrived(), self.replica.bytes_by_source))
            case fx.DiscardState():
                self.replica.arrival, self.backlog_bytes, self.member = None, 0, False
                self._pending.append(StateDiscarded())
            case _:
                raise LocalProtocolError(f"nobody performs {effect!r}")

    def _pass_on(self, peer: str, message: Tensor, payload: Any) -> None:
        turn = message.step, message.micro_batch
        self.transport.send_bulk(peer, encode(message), payload, rank=Rank.TENSOR, turn=turn, tag=message)

    def _step_completed(self, effect: fx.StepCompleted) -> None:
        """Tell the training thread that a step is complete. At a joiner, that waits there until it has the state."""
        found = self.all_reduce.completed(effect.step, effect.kept)
        results, late = (None, found) if callable(found) else (found, None)
        self.steps.completed(effect.step, effect.commit.total, clock.now_s(), time.time())
        outcome = StepOutcome(effect.step, effect.commit, effect.deal, results, effect.view, late=late)
        if not self.member:
            self.backlog_bytes += outcome.nbytes
            if self.backlog_bytes > self.backlog_limit:
                self.soon(ev.BacklogFull())
        self._pending.append(outcome)

    def _ask_snapshot(self, effect: fx.TakeSnapshot) -> None:
        steps = [outcome for outcome in self._pending if isinstance(outcome, StepOutcome)]
        assert steps and steps[-1].step == effect.step - 1, "a snapshot is asked for when a step completes"
        steps[-1].snapshot = effect

    def _happened(self, effect: fx.Happened, took_ms: float) -> None:
        notice = Notice(
            kind=effect.kind,
            node=shortened(effect.node, MAX_NAMES),
            detail=shortened(effect.detail, MAX_TEXT),
            step=effect.step,
            time_s=time.time(),
            handling_ms=took_ms,
        )
        self.telling.notice(notice)
        self._perform_each(self.agent.note(notice, clock.now_s()), 0.0)
