"""The one loop of a node: events in, effects out, in a thread of its own beside the training thread.

The training thread hands over chunks and waits for outcomes; it never touches a socket. Everything here is
I/O and clocks; what to do is decided by `Agent` (core.py). The loop calls upon

    incoming.py     for what the transport brings, as events
    performer.py    to do what the agent wants done, with the transport, all_reduce.py and replica.py
    link_tests.py   to measure links, and to see whether an address refuses
    telling.py      to tell people
    vitals.py       for what a node knows of itself: readings, status

and outcomes.py has what the training thread hears.
"""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import torch

from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols.asking import Otherwise
from ..protocols.errors import ChaosnetError, ConfigError, RemoteProtocolError
from ..protocols.messages import Notice, View
from ..protocols.status import Status
from . import clock, interfaces
from .agent.core import Agent, Phase
from .incoming import Incoming
from .link_tests import LinkTests
from .mailbox import Mailbox
from .memory import keep_freed_frames
from .outcomes import Ended, Outcome, Rates
from .performer import Performer, backlog_limit
from .state.flat_state import Snapshot
from .state.replica import Replica
from .step_history import StepHistory
from .sums.all_reduce import AllReduce, ChunkStore
from .telling import Telling
from .transport.descriptors import take_standard_ones
from .transport.transport import Transport
from .transport.turns import Sink
from .vitals import Vitals

log = logging.getLogger("chaosnet")

READ_EVERY_S = 1.0
MIN_TICK_S = 0.001  # A core that wants a Tick at once must not keep the loop from its sockets.
HANG_UP_POLL_S = 0.005
ASK_PATIENCE_S = 10.0  # Of another thread.
# In so many parts: a process that was stopped (Ctrl+Z, SIGSTOP, a paused machine) for longer than all of them has
# used up one when it goes on, and its loop gets the others to answer in.
ASK_PARTS = 10


class NodeLoop:
    """Runs an Agent; if that is out, and rejoins, the next one. Methods for the training thread work on any thread.

    Args:
        make_agent: From this node's addresses, and the least life that it may live.
        guarded: Whether the contributions of others are checked, in every life (docs/guard.md).
    """

    def __init__(
        self,
        make_agent: Callable[[tuple[str, ...], int], Agent],
        transport: Callable[[Sink], Transport],
        store: ChunkStore,
        on_notice: Callable[[Notice], None] = lambda notice: None,
        on_parked: Callable[[str | None], None] = lambda reason: None,
        guarded: bool = False,
        on_view: Callable[[View], None] = lambda view: None,
        on_progress: Callable[[str], None] = lambda text: None,
        counters: Counter[str] | None = None,
    ) -> None:
        self._make_agent, self._make_transport, self._store = make_agent, transport, store
        self._guards = guarded
        self._telling = Telling(
            on_notice, on_parked, on_view, on_progress, lambda: self.agent.why_it_waits(clock.now_s())
        )
        self.outcomes: queue.SimpleQueue[Outcome] = queue.SimpleQueue()
        self.mailbox = Mailbox(lambda: not self.outcomes.empty())
        self.asked: queue.SimpleQueue[fx.LayoutAsked] = queue.SimpleQueue()  # By clients.
        self.rates = Rates()
        self.counters: Counter[str] = Counter() if counters is None else counters
        self._incoming = Incoming(self._event, self._catching, on_notice, self.counters)
        self._vitals = Vitals()
        self._thread = threading.Thread(target=self._run, name="chaosnet", daemon=True)
        self._process = os.getpid()
        self._started: Future[tuple[str, ...]] = Future()
        self._stopping = False
        self._addresses: tuple[str, ...] = ()  # Where others may dial this node, when its life began.
        self._alarm = _Alarm(lambda: self._catching(lambda: self._event(ev.Tick())))
        self._backlog_limit = backlog_limit()

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
            self._perform(self.agent.found(clock.now_s(), view), 0.0)

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
            agent, now_s = self.agent, clock.now_s()
            effects = agent.join(seeds, neighbors, degree, blocking, patience_s, now_s, otherwise)
            self._perform(effects, 0.0)

        self._call(begin)

    def rejoin(self, degree: int, blocking: bool, patience_s: float) -> tuple[str, ...]:
        """Come back, as if the process had been started again. Admitted or Ended follows.

        The state is not received in place: what is there now stays whole until all of the new one has come.
        Returns: the addresses at which it asks; if none, nothing follows.
        """

        def begin() -> tuple[str, ...]:
            ways, life = self.agent.ways_back, self.agent.next_life
            if ways:
                self.transport.restart("it is out, and starts anew")
                # Another network may be why it is out.
                here = interfaces.reached_at(self.transport.address)
                self._addresses = here or self.agent.settings.addresses
                self._begin_life(life)
                now_s, otherwise = clock.now_s(), Otherwise.KEEP_TRYING
                effects = self.agent.join(ways, (), degree, blocking, patience_s, now_s, otherwise)
                self._perform(effects, 0.0)
            return ways

        return tuple(self.ask(begin))

    def post(self, event: ev.Event) -> None:
        """Hand an event to the core."""
        self._call(lambda: self._event(event))

    def serve_snapshot(self, step: int, snapshot: Snapshot | None) -> None:
        """The copy that a StepOutcome asked for is ready; None: there is none, and joiners that ask are told so."""

        def keep() -> None:
            self.replica.snapshots[step] = snapshot
            self._event(ev.SnapshotReady(step))

        self._call(keep)

    def serving(self, step: int) -> bool:
        """Is the snapshot of that step still needed by a joiner?"""
        return self.agent.phase is not Phase.OUT and step in self.agent.serving.snapshots

    def backlog_applied(self, size: int) -> None:
        """The training thread has used a result that was set aside."""

        def applied() -> None:
            self._performer.backlog_bytes -= size

        self._call(applied)

    @property
    def is_here(self) -> bool:
        """Is this the loop's own thread?"""
        return threading.current_thread() is self._thread

    def check_process(self) -> None:
        """Raises: ConfigError in a forked child, which would wait for ever: this thread is its parent's."""
        if os.getpid() != self._process:
            raise ConfigError(
                "Trainer: this process was forked from that of a node, and is none (expected steps, data and "
                "status() in the process that has made the Trainer, or one made here)"
            )

    def ask(self, question: Callable[[], Any]) -> Any:
        """Evaluate `question` on the loop's thread, where the core may be read.

        Raises: ChaosnetError: it has ended; ConfigError in a forked child.
        """
        self.check_process()
        if self.is_here:
            return question()
        answer: Future[Any] = Future()

        def evaluate() -> None:
            try:
                answer.set_result(question())
            except BaseException as error:
                answer.set_exception(error)

        if not self._call(evaluate):
            raise ChaosnetError("this node has left, or failed: there is no cluster to ask")
        for _ in range(ASK_PARTS):
            try:
                return answer.result(timeout=ASK_PATIENCE_S / ASK_PARTS)
            except TimeoutError:
                if answer.done():  # Just now; or the error is the question's own.
                    return answer.result()
        raise ChaosnetError(f"this node's links have not been served for {ASK_PATIENCE_S:g} s")

    def status(self, history: bool = False, since: int = 0) -> Status:
        """The cluster as this node sees it; whole on the scheduler. `history`: with all that is kept of it.

        `since`: but for what came before this step.
        """
        return self._vitals.status(self.agent, self.steps, self.rates, self.transport.cluster, history, since)

    def stop(self, linger_s: float = 1.0) -> None:
        """Close all links, after what is queued has gone, and end the thread."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._call(lambda: self._stop(linger_s))
            waiting = -1
            while self._thread.is_alive() and waiting != (left := self.transport.waiting):
                waiting = left  # A slow link takes as long as it takes; a thread that hangs moves nothing.
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
            take_standard_ones()
            with asyncio.Runner(loop_factory=_loop_factory()) as runner:
                runner.run(self._serve())
        except BaseException as error:
            if not self._started.done():
                self._started.set_exception(error)
            else:
                self.outcomes.put(Ended("broken", f"{type(error).__name__}: {error}", error=error))
                self.mailbox.wake()

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ended = self._loop.create_future()
        self.transport = self._make_transport(self._incoming)
        self._tests = LinkTests(self.transport, self.post, self._at_once)
        try:
            await self.transport.start()
            self._addresses = interfaces.advertised(self.transport.address)
            self._begin_life(0)
            self._loop.call_later(0.1, self._take_readings)
            self._started.set_result(self._addresses)
            await self._ended
        finally:  # However it ends: others would wait for a node whose links are open.
            self.transport.close(0)

    def _begin_life(self, least: int) -> None:
        """Begin a life with new cores: of an earlier one only the transport and its address stay."""
        self._telling.forget()
        self.agent = self._make_agent(self._addresses, least)
        self.all_reduce = AllReduce(self._store, self.transport.send_bulk, self._guards, self.counters)
        self.replica = Replica(self.transport.send_bulk)
        self._incoming.begin_life(self.agent, self.all_reduce, self._tests)
        self.steps = StepHistory()
        self._performer = Performer(
            self.agent, self.all_reduce, self.replica, self.steps, self.transport, self._tests, self._telling,
            self.outcomes, self.mailbox, self.asked, self.counters, self._backlog_limit, self._soon, self.status,
        )  # fmt: skip

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
        """Call `action`.

        A bug of ours ends the loop, and the training thread hears of it; a peer's mistake is counted.
        """
        try:
            action()
        except RemoteProtocolError as error:
            self.counters["dropped"] += 1
            log.warning("dropped: %s", error)
        except Exception as error:
            if not self._ended.done():
                self._ended.set_exception(error)

    def _at_once(self, event: ev.Event) -> None:
        self._catching(lambda: self._event(event))

    def _soon(self, event: ev.Event) -> None:
        """Handle an event after the one under way, before what has come since."""
        self._loop.call_soon(self._at_once, event)

    def _event(self, event: ev.Event) -> None:
        if self._ended.done() or self._stopping:
            return
        started_s = time.perf_counter()
        effects = self.agent.handle(event, clock.now_s())
        took_ms = 1e3 * (time.perf_counter() - started_s)
        if effects and self.agent.scheduler is not None:  # Without any it was a copy of a flooded message.
            self._vitals.handled(event, took_ms)
        self._perform(effects, took_ms)

    def _perform(self, effects: list[fx.Effect], took_ms: float) -> None:
        if not self._performer.perform(effects, took_ms):
            self._alarm.set(self.agent.wake_at_s)

    def _take_readings(self) -> None:
        def take() -> None:
            self._event(self._vitals.readings(self.rates, self.counters, self.transport))
            for peer, rate_bps in self.agent.readings.sent_bps().items():
                self.transport.bound_unsent(peer, rate_bps)
            if self.agent.asks_again:
                self._event(ev.AddressesRead(interfaces.reached_at(self.transport.address)))

        self._catching(take)
        if not self._ended.done():
            self._loop.call_later(READ_EVERY_S, self._take_readings)


class _Alarm:
    """Rings when the core wants a Tick."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self._ring = ring
        self._timer: asyncio.TimerHandle | None = None
        self._at_s: float | None = None

    def set(self, at_s: float | None) -> None:
        """Ring at this time, and at no other; None: at none."""
        if self._timer is not None:
            if at_s == self._at_s:
                return
            self._timer.cancel()
        self._timer, self._at_s = None, at_s
        if at_s is not None:
            # Not by the loop's time: uvloop's stands still during a turn.
            delay_s = max(at_s - clock.now_s(), MIN_TICK_S)
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._rings)

    def _rings(self) -> None:
        self._timer = None
        self._ring()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it exists."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
