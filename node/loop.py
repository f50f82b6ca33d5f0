"""The one loop of a node: events in, effects out, in a thread of its own beside the training thread.

The training thread hands over chunks and waits for outcomes; it never touches a socket. Everything here is
I/O and clocks; what to do is decided by `Agent` (core.py).
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psutil
import torch
import zmq

from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols.codec import decode, encode
from ..protocols.deaths import PROOF_S
from ..protocols.errors import ChaosnetError, LocalProtocolError, MalformedMessage, RemoteProtocolError
from ..protocols.messages import (
    EVERYONE,
    REFUSED,
    Commit,
    ConnectLinkRequest,
    Deal,
    DisconnectLinkRequest,
    Down,
    Envelope,
    NoSnapshot,
    Notice,
    Probe,
    ScaleInRequest,
    StatusReply,
    Up,
    View,
)
from ..protocols.probing import PROBE_BYTES
from ..protocols.scale_out import Otherwise
from ..protocols.status import EVENTS_TOLD, Status, to_json
from . import clock, interfaces, iperf3_probe
from .all_reduce import AllReduce, ChunkStore
from .core import Agent, Phase
from .endpoint import refuses
from .flat_state import Arrival, Snapshot
from .memory import keep_freed_frames
from .replica import Replica
from .shared_memory import Payload
from .step_history import StepHistory
from .transport import Transport

log = logging.getLogger("chaosnet")

PROBE_PARTS = 64
# Where memory is shared: what is smaller takes another way.
SHARED_PROBE_PARTS, SHARED_PART_BYTES = 16, 256 << 10
READ_EVERY_S = 1.0
MIN_TICK_S = 0.001  # A core that wants a Tick at once must not keep the loop from its sockets.
BACKLOG_SHARE = 0.25  # Of available memory, for results that a joiner cannot apply yet.
HANG_UP_POLL_S = 0.005
WAIT_TOLD_S = 0.3  # A wait that lasts longer is told.
ASK_PATIENCE_S = 10.0  # Of another thread.
TIMED = (ScaleInRequest, ConnectLinkRequest, DisconnectLinkRequest)


# --- what the training thread hears ---


@dataclass(slots=True)
class StepOutcome:
    """A step is complete. `results`: its values by chunk, to be read only; [] if nobody had samples.

    `bundle`: so many chunks travel as one message in the next.
    """

    step: int
    commit: Commit
    deal: Deal
    results: list[torch.Tensor]
    bundle: int = 1
    snapshot: fx.TakeSnapshot | None = None  # To be taken once this step has been applied.


@dataclass(slots=True)
class StateArrived:
    """All bytes of the state at the beginning of `step` are here."""

    step: int
    arrival: Arrival
    bytes_by_source: dict[str, int]


@dataclass(slots=True)
class StateDiscarded:
    """What arrived, and what was set aside for it, is void, and so is an admission without it."""


@dataclass(slots=True)
class Founded:
    """Nobody was there to join: the state is what this node began with. `addresses`: where others join it."""

    addresses: tuple[str, ...]


@dataclass(slots=True)
class Admitted:
    """This node is a member from `step` on."""

    step: int
    deal: Deal


@dataclass(slots=True)
class Ended:
    """This node is out: "left", "out" (against its will; it may rejoin), "refused" or "broken".

    `last`: it has left, and nobody goes on.
    """

    how: str
    reason: str
    spec: bytes = b""
    error: BaseException | None = None
    last: bool = False


Outcome = StepOutcome | StateArrived | StateDiscarded | Founded | Admitted | Ended


@dataclass(slots=True)
class Rates:
    """What the training thread tells of itself, for reports; plain numbers, so no lock is needed."""

    samples_per_s: float = 0.0
    sync_delay_s: float = 0.0
    state_bytes: int = 0
    layer_bytes: tuple[int, int] = (0, 0)
    left_out: dict[str, int] = field(default_factory=dict)  # Samples that nobody trained on, by why.


class NodeLoop:
    """Runs an Agent, and after it, if that is out, another. Methods for the training thread: from any thread.

    Args:
        make_agent: From this node's addresses, and the least life that it may live.
        guarded: Whether parts of others are looked at, in every life (docs/guard.md).
    """

    def __init__(
        self,
        make_agent: Callable[[tuple[str, ...], int], Agent],
        transport: Callable[[NodeLoop], Transport],
        store: ChunkStore,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        on_parked: Callable[[str | None], None] = lambda reason: None,
        guarded: bool = False,
        on_view: Callable[[View], None] = lambda view: None,
        on_progress: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._guards, self._on_view, self._on_progress = guarded, on_view, on_progress
        self._make_agent, self._make_transport, self._store = make_agent, transport, store
        self._on_notice, self._on_parked = on_notice, on_parked
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.rates = Rates()
        self.counters: Counter[str] = Counter()
        self.handling_ms: dict[str, list[float]] = {}
        self._thread = threading.Thread(target=self._run, name="chaosnet", daemon=True)
        self._started: Future[tuple[str, ...]] = Future()
        self._stopping = False
        self._pending: list[Outcome] = []  # Of the event under way, told when all its effects are done.
        self._member = False
        self._backlog_bytes = 0
        self._backlog_limit = int(BACKLOG_SHARE * psutil.virtual_memory().available)
        self._looks: set[asyncio.Task[None]] = set()  # The loop itself keeps no task alive.
        self._timer: asyncio.TimerHandle | None = None
        self._timer_at_s: float | None = None
        self._to_tell: asyncio.TimerHandle | None = None  # That we wait.
        self._told_parked = False
        self._process = psutil.Process()

    # --- for the training thread ---

    def start(self) -> tuple[str, ...]:
        """Start the thread. Returns: the addresses that peers may dial. Raises: ConfigError."""
        keep_freed_frames()
        self._thread.start()
        return self._started.result()

    def found(self, view: View | None = None) -> None:
        """Start a cluster of one, or one whose first view is given to all of its members."""

        def begin() -> None:
            if view is None:
                self.transport.found()
            self._perform_all(self.agent.found(self._now_s(), view), 0.0)

        self._call(begin)

    def join(
        self,
        seeds: tuple[str, ...],
        neighbors: tuple[str, ...],
        degree: int,
        blocking: bool,
        patience_s: float,
        places: dict[str, torch.Tensor] | None = None,
        otherwise: Otherwise = Otherwise.FAIL,
    ) -> None:
        """Ask for membership; Admitted or Ended follows. `places`: see Arrival."""

        def begin() -> None:
            self.replica.places = places or {}
            self._join(seeds, neighbors, degree, blocking, patience_s, otherwise)

        self._call(begin)

    def rejoin(self, degree: int, blocking: bool, patience_s: float) -> tuple[str, ...]:
        """Come back as a process would that was started again. Admitted or Ended follows.

        The state is not received in place: what is there now stays whole until all of the new one has come.
        Returns: the addresses at which it asks; if none, nothing follows.
        """
        return tuple(self.ask(lambda: self._rejoin(degree, blocking, patience_s)))

    def _rejoin(self, degree: int, blocking: bool, patience_s: float) -> tuple[str, ...]:
        ways, life = self.agent.ways_back, self.agent.next_life
        if ways:
            self.transport.restart("it is out, and starts anew")
            self._begin_life(life)
            self._join(ways, (), degree, blocking, patience_s, Otherwise.KEEP_TRYING)
        return ways

    def _join(
        self, seeds: tuple[str, ...], neighbors: tuple[str, ...], degree: int, blocking: bool,
        patience_s: float, otherwise: Otherwise,
    ) -> None:  # fmt: skip
        effects = self.agent.join(seeds, neighbors, degree, blocking, patience_s, self._now_s(), otherwise)
        self._perform_all(effects, 0.0)

    def post(self, event: ev.Event) -> None:
        """Hand an event to the core."""
        self._call(lambda: self._event(event))

    def serve_snapshot(self, step: int, snapshot: Snapshot | None) -> None:
        """The copy asked for by a StepOutcome is ready; None: it cannot be had, and who asks for it is told so."""

        def keep() -> None:
            self.replica.snapshots[step] = snapshot
            self._event(ev.SnapshotReady(step))

        self._call(keep)

    def serving(self, step: int) -> bool:
        """Is the snapshot of that step still needed by a joiner?"""
        return self.agent.phase is not Phase.OUT and step in self.agent.serving.snapshots

    def backlog_applied(self, size: int) -> None:
        """The training thread has used a result that was set aside."""
        self._call(lambda: setattr(self, "_backlog_bytes", self._backlog_bytes - size))

    def ask(self, question: Callable[[], Any]) -> Any:
        """Evaluate `question` on the loop's thread, where the core may be read. ChaosnetError: it has ended."""
        answer: Future[Any] = Future()

        def evaluate() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        if not self._call(evaluate):
            raise ChaosnetError("this node has left, or failed: there is no cluster to ask")
        return answer.result(timeout=ASK_PATIENCE_S)

    def stop(self, linger_s: float = 1.0) -> None:
        """Close all links, after what is queued has gone, and end the thread."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._call(lambda: self._stop(linger_s))
            self._thread.join(linger_s + 2.0)

    def _call(self, action: Callable[[], None]) -> bool:
        """Have the loop's thread do something; False if it has ended."""
        try:
            self._loop.call_soon_threadsafe(self._catching, action)
        except RuntimeError:
            log.debug("the loop has ended; dropped a call")
            return False
        return True

    # --- the thread ---

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                self.outcomes.put(Ended("broken", f"{type(error).__name__}: {error}", error=error))

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self.transport = self._make_transport(self)
        await self.transport.start()
        self._addresses = interfaces.advertised(self.transport.address)
        self._begin_life(0)
        self._loop.call_later(0.1, self._take_readings)
        self._started.set_result(self._addresses)
        await self._ended

    def _begin_life(self, least: int) -> None:
        """Nothing of an earlier life is left but the transport and its address."""
        self.agent = self._make_agent(self._addresses, least)
        self.all_reduce = AllReduce(self._store, self.transport.send_bulk, self._guards, self.counters)
        self.replica = Replica(self.transport.send_bulk)
        self.steps = StepHistory()
        self._member, self._backlog_bytes = False, 0

    def _stop(self, linger_s: float) -> None:
        if self._ended.done() or self._stopping:
            return
        self._stopping = True  # Nothing that comes from now on is for the core.
        answered = self.transport.hang_up("this node closes")

        def finish() -> None:
            if self._ended.done():
                return
            if not answered():
                self._loop.call_later(HANG_UP_POLL_S, finish)
                return
            self.transport.close(linger_s)
            self._ended.set_result(None)

        finish()

    def _catching(self, action: Callable[[], None]) -> None:
        """A bug of ours ends the loop, and the training thread hears of it; a peer's mistake does not."""
        try:
            action()
        except RemoteProtocolError as error:
            self.counters["dropped"] += 1
            log.warning("dropped: %s", error)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _event(self, event: ev.Event) -> None:
        if self._ended.done() or self._stopping:
            return
        started_s = time.perf_counter()
        effects = self.agent.handle(event, self._now_s())
        took_ms = 1e3 * (time.perf_counter() - started_s)
        if effects:  # Else it was one more copy of a flooded message.
            self._time(event, took_ms)
        self._perform_all(effects, took_ms)

    def _perform_all(self, effects: list[fx.Effect], took_ms: float) -> None:
        """Do what an event leads to, and then tell the training thread: of a step it hears all at once."""
        only_chunks = self._perform_each(effects, took_ms)
        for outcome in self._pending:
            self.outcomes.put(outcome)
        self._pending.clear()
        if not only_chunks:
            self._set_timer()

    def _perform_each(self, effects: list[fx.Effect], took_ms: float) -> bool:
        """Returns: whether there were any, and they were of chunks only, which move no deadline."""
        only_chunks = bool(effects)
        for effect in effects:
            if isinstance(effect, fx.ChunkEffect):
                self.all_reduce.perform(effect)
            else:
                only_chunks = False
                self._perform(effect, took_ms)
        return only_chunks

    def _set_timer(self) -> None:
        wake_at_s = self.agent.wake_at_s
        if self._timer is not None:
            if wake_at_s == self._timer_at_s:
                return
            self._timer.cancel()
        self._timer, self._timer_at_s = None, wake_at_s
        if wake_at_s is not None:
            delay_s = max(wake_at_s - self._now_s(), MIN_TICK_S)
            self._timer = self._loop.call_later(delay_s, self._catching, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._event(ev.Tick())

    def _now_s(self) -> float:
        return clock.now_s()  # Not the loop's time: uvloop's stands still during a turn.

    # --- effects ---

    def _perform(self, effect: fx.Effect, took_ms: float) -> None:
        match effect:
            case fx.Transmit(peer, message):
                self.transport.send(peer, encode(message))
            case fx.ResetAttempt(before):
                self.all_reduce.perform(effect)
                if before is not None:  # A slow link is free for the next attempt.
                    self.transport.forget_bulk(lambda chunk: chunk.key < before)
            case fx.DropResults(peers, before):
                self.transport.forget_bulk(lambda chunk: chunk.key < before, peers)
            case fx.StepCompleted():
                self._step_completed(effect)
            case fx.Dial(address):
                self.transport.dial(address)
            case fx.CheckReach(address):
                self.transport.check(address)
            case fx.ClosePeer(peer, reason):
                self.transport.close_peer(peer, reason)
            case fx.KeysChanged():
                self.transport.enforce_keys()
            case fx.SendProbe(peer):
                self._send_probe(peer)
            case fx.Happened():
                self._happened(effect, took_ms)
            case fx.Parked(reason):
                self._parked(reason)
            case fx.Progress(text):
                self._on_progress(text)
            case fx.AnswerStatus(asker, history):
                reply = StatusReply(status=to_json(self.status(history)))
                self._perform_each(self.agent.relay.send(asker, reply), 0.0)
            case fx.ServeIperf3() if self.transport.keys:
                pass  # Its port would be open to everybody. The asker gives up, and measures in-band.
            case fx.ServeIperf3(peer):
                self._iperf3(lambda: iperf3_probe.serve(partial(self._iperf3_serves, peer)))
            case fx.RunIperf3(peer, address):
                self._iperf3(partial(self._run_iperf3, peer, address))
            case fx.FellBehind():
                self.counters["fell_behind"] += 1
            case fx.MeasureLink() | fx.Measured():
                pass  # From core to core.
            case fx.ViewEntered():
                log.debug("view %s from step %d", effect.view.key, effect.step)
                if self.agent.phase is Phase.MEMBER:
                    self._on_view(effect.view)
            case fx.Founded():
                self.transport.found()
                self._pending.append(Founded(self._addresses))
            case fx.Joined(step, deal):
                self._member = True
                self._pending.append(Admitted(step, deal))
            case fx.Left(reason):
                self._pending.append(Ended("left", reason, last=self.agent.was_last))
            case fx.Out(reason, final):
                self._pending.append(Ended("refused" if final else "out", reason))
            case fx.JoinFailed(reason, spec):
                self._pending.append(Ended("refused", reason, spec))
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
                self._soon(self.replica.read_manifest(effect))
                if self.replica.arrival is not None and step in self.agent.serving.snapshots:
                    # For those who join with us.
                    self.replica.snapshots[step] = self.replica.arrival.snapshot()
            case fx.StoreShard():
                self._soon(self.replica.store_shard(effect))
            case fx.StateWhole(step):
                self._pending.append(StateArrived(step, self.replica.arrived(), self.replica.bytes_by_source))
            case fx.DiscardState():
                self.replica.arrival, self._backlog_bytes, self._member = None, 0, False
                self._pending.append(StateDiscarded())
            case _:
                raise LocalProtocolError(f"nobody performs {effect!r}")

    def _parked(self, reason: str | None) -> None:
        """A wait that is over in a moment, as while others leave, is not told."""
        if self._to_tell is not None:
            self._to_tell.cancel()
            self._to_tell = None
        if reason is not None:
            self._to_tell = self._loop.call_later(WAIT_TOLD_S, self._tell_parked, reason)
        elif self._told_parked:
            self._told_parked = False
            self._on_parked(None)

    def _tell_parked(self, reason: str) -> None:
        self._to_tell, self._told_parked = None, True
        self._on_parked(self.agent.why_it_waits(self._now_s()) or reason)

    def _soon(self, event: ev.Event) -> None:
        self._loop.call_soon(self._catching, lambda: self._event(event))

    def _step_completed(self, effect: fx.StepCompleted) -> None:
        """To the training thread; what a joiner is told waits there until it has the state."""
        view, results = self.agent.sync.view, self.all_reduce.completed(effect.step)
        self.steps.completed(effect.step, effect.commit.total, self._now_s(), time.time())
        bundle = view.bundle if view else 1
        outcome = StepOutcome(effect.step, effect.commit, effect.deal, results, bundle=bundle)
        if not self._member:
            self._backlog_bytes += sum(result.nbytes for result in outcome.results)
            if self._backlog_bytes > self._backlog_limit:
                self._soon(ev.BacklogFull())
        self._pending.append(outcome)

    def _ask_snapshot(self, effect: fx.TakeSnapshot) -> None:
        steps = [outcome for outcome in self._pending if isinstance(outcome, StepOutcome)]
        assert steps and steps[-1].step == effect.step - 1, "a snapshot is asked for when a step completes"
        steps[-1].snapshot = effect

    def _send_probe(self, peer: str) -> None:
        parts, part_bytes = PROBE_PARTS, PROBE_BYTES // PROBE_PARTS
        if self.transport.shares_memory(peer):
            parts, part_bytes = SHARED_PROBE_PARTS, SHARED_PART_BYTES
        for index in range(parts):
            self.transport.send_bulk(peer, encode(Probe(index=index, count=parts)), bytes(part_bytes))

    def _iperf3(self, work: Callable[[], None]) -> None:
        """In a thread, for it waits for a process."""
        threading.Thread(target=work, name="chaosnet-iperf3", daemon=True).start()

    def _iperf3_serves(self, peer: str, port: int) -> None:
        self.post(ev.Iperf3Serving(peer, port))

    def _run_iperf3(self, peer: str, address: str) -> None:
        found = iperf3_probe.run(address)
        self.post(ev.Iperf3Done(peer, found.in_bps, found.out_bps, found.error))

    def _happened(self, effect: fx.Happened, took_ms: float) -> None:
        notice = Notice(
            kind=effect.kind,
            node=effect.node,
            detail=effect.detail,
            step=effect.step,
            time_s=time.time(),
            handling_ms=took_ms,
        )
        self._on_notice(notice)
        self._perform_each(self.agent.note(notice, self._now_s()), 0.0)

    # --- the transport's sink ---

    def opened(self, peer: str, address: str, dialled: bool, client: bool) -> None:
        self._catching(lambda: self._event(ev.PeerOpened(peer, address, client, dialled)))

    def closed(self, peer: str, clean: bool) -> None:
        self._catching(lambda: self._event(ev.PeerClosed(peer, clean)))

    def dial_failed(self, address: str, reason: str, final: bool) -> None:
        self._catching(lambda: self._event(ev.DialFailed(address, reason, final)))

    def checked(self, address: str, peer: str, reason: str) -> None:
        if peer:
            self._catching(lambda: self._event(ev.Reached(address, peer)))
        else:
            self._looks = {task for task in self._looks if not task.done()}
            self._looks.add(self._loop.create_task(self._not_reached(address, reason)))

    async def _not_reached(self, address: str, reason: str) -> None:
        refused = await refuses(address, PROOF_S)
        self._catching(lambda: self._event(ev.NotReached(address, reason, refused)))

    def control(self, peer: str, body: bytes) -> None:
        self._catching(lambda: self._receive(peer, body, None))

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | Payload | None) -> None:
        self._catching(lambda: self._receive(peer, header, payload))

    def foreign(self, where: str, reason: str) -> None:
        self.counters["foreign"] += 1

    def _receive(self, peer: str, body: bytes, payload: zmq.Frame | Payload | None) -> None:
        try:
            message = decode(body)
        except MalformedMessage as error:
            self.counters["malformed"] += 1
            if self.counters["malformed"] == 1:
                log.warning("dropped a malformed frame from %s: %s", peer, error)
            return
        if isinstance(message, Envelope) and isinstance(message.body, Notice) and message.target == EVERYONE:
            self._heard_notice(message)
        if payload is not None and not payload.buffer.nbytes:
            payload = None
        if isinstance(message, Up | Down):
            self.all_reduce.check(message, payload)
        self._event(ev.Received(peer, message, payload))

    def _heard_notice(self, envelope: Envelope) -> None:
        assert isinstance(envelope.body, Notice)
        if self.agent.relay.is_new(envelope):
            self._on_notice(envelope.body)

    # --- readings ---

    def _time(self, event: ev.Event, took_ms: float) -> None:
        """How long the scheduler takes to handle the events that the paper times (Table I)."""
        if self.agent.scheduler is None or not isinstance(event, ev.Received):
            return
        body = event.message.body if isinstance(event.message, Envelope) else None
        if isinstance(body, TIMED):
            self.handling_ms.setdefault(type(body).__name__, []).append(took_ms)

    def _take_readings(self) -> None:
        battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
        rates, traffic = self.rates, interfaces.traffic()
        self._catching(
            lambda: self._event(
                ev.ReadingsTaken(
                    samples_per_s=rates.samples_per_s,
                    sync_delay_s=rates.sync_delay_s,
                    state_bytes=rates.state_bytes,
                    layer_bytes=rates.layer_bytes,
                    cpu_pct=self._process.cpu_percent(),
                    memory_bytes=self._process.memory_info().rss,
                    battery_pct=battery.percent if battery else -1.0,
                    nic_sent_bytes=traffic.sent,
                    nic_received_bytes=traffic.received,
                    counters=self._counted(),
                    carried=self.transport.carried(),
                )
            )
        )
        for peer, rate_bps in self.agent.readings.sent_bps().items():
            self.transport.bound_unsent(peer, rate_bps)
        if not self._ended.done():
            self._loop.call_later(READ_EVERY_S, self._take_readings)

    def _counted(self) -> dict[str, int]:
        """All that went wrong here so far, by its name."""
        refused = {f"{REFUSED}{reason}": count for reason, count in self.transport.refused.items()}
        return {**self.counters, **refused}

    def status(self, history: bool = False) -> Status:
        """The cluster as this node sees it; whole on the scheduler. `history`: with all that is kept of it."""
        agent, now_s = self.agent, self._now_s()
        view, events = agent.sync.view, agent.monitor.event_rows()
        return Status(
            node=agent.me,
            phase=agent.phase.value,
            cluster=self.transport.cluster,
            scheduler=view.scheduler if view else "",
            term=agent.election.term,
            view=view.key if view else (),
            step=agent.sync.step,
            samples_per_s=round(self._cluster_rate(), 1),
            metrics=dict(self.steps.metrics),
            **self.rates.left_out,
            parked=agent.why_it_waits(now_s),
            waiting=agent.waits.row(now_s),
            handling_ms={name: tuple(values[-50:]) for name, values in self.handling_ms.items()},
            members=agent.monitor.member_rows(now_s),
            links=agent.monitor.link_rows(now_s),
            events=events if history else events[-EVENTS_TOLD:],
            steps=tuple(self.steps.rows) if history else (),
            strangers_refused=agent.monitor.refused(),
        )

    def _cluster_rate(self) -> float:
        records = self.agent.monitor.nodes.values()
        return sum(r.report.samples_per_s for r in records if r.report and r.state == "active")


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
