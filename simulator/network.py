"""The virtual network that simulated machines talk over, and the clock that all of it runs on.

Between two machines there is one connection at most, in the place of a TCP connection for control and one for
bulk. In each, messages arrive in their order, after delays from the seed; a crash cuts off what is in flight
anywhere, and a cut holds it up until the link heals. What machines do with what arrives is not decided here.

In some lives links have rates (rates.py): then bulk waits in a queue for its direction of the link.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from ..protocols import events as ev
from ..protocols.messages import (
    Down,
    Envelope,
    Link,
    ManifestReply,
    Message,
    Probe,
    Shard,
    Tensor,
    Up,
    ViewKey,
    link,
)
from . import coverage
from .rates import CONTROL_BYTES, BulkQueue, LinkRates

BULK = {Up, Down, Shard, ManifestReply, Probe, Tensor}
ROUNDING_S = 1e-9
REACH_TIMEOUT_S = 1.5  # As node/transport/dialer.py has it.
GRACE_S = 0.1  # As node/transport/links.py has it, between the ends of a link's two connections.
MAX_ACTIONS = 2_000_000  # A life of a minute takes some 30,000.


@dataclass(slots=True)
class Connection:
    """One TCP-like connection between two nodes, seen from both ends."""

    ends: Link
    lives: tuple[int, int]  # Of the ends, when it was opened.
    open_at: set[str] = field(default_factory=set)  # Ends that may use it.
    last_arrival_s: dict[tuple[str, bool], float] = field(default_factory=dict)  # (receiver, bulk).
    stalled: list[tuple[str, ev.Event]] = field(default_factory=list)  # Held up by a cut: (receiver, event).
    lanes: dict[str, BulkQueue] = field(default_factory=dict)  # By sender, of links with rates.


class Machine:
    """What the network knows of a machine: which process answers there, if any does."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.alive, self.paused, self.done = True, False, ""

    @property
    def life(self) -> int:
        """The life of the process that runs there."""
        raise NotImplementedError


M = TypeVar("M", bound=Machine)


class Network(Generic[M]):
    """Connections between the machines in `nodes`, and what happens to them. All times are virtual."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.now_s = 0.0
        self.queue: list[tuple[float, int, Callable[[], None]]] = []
        self.count, self.max_actions = 0, MAX_ACTIONS
        self.nodes: dict[str, M] = {}
        self.connections: dict[Link, Connection] = {}
        self.cuts: set[tuple[str, str]] = set()  # (from, to): one direction each.
        self.healed_s: dict[Link, float] = {}
        self.rates: LinkRates | None = None  # None: bytes take no time, messages do.
        self.chunks = 1
        self.met: set[str] = set()  # Names of coverage.py.
        self.max_delay_s = self.rng.choice([0.002, 0.01, 0.05])
        lag = self.rng.choice([1, 1, 4, 12])  # Bulk fills its connection; control overtakes it.
        self.max_bulk_delay_s = min(lag * self.max_delay_s, 0.3)
        # How long the machine of a dead process takes to refuse a connection; None: it never does.
        self.refuses_after_s: Callable[[], float | None] = lambda: 0.0
        # From one end of a connection that breaks to the other.
        self.reset_lag_s: Callable[[], float] = lambda: 0.0
        self.delivered: set[type[Message]] = set()  # Kinds of messages that have arrived anywhere.
        self.on_message: Callable[[str, str, Message], None] | None = None

    def take(self, longest_s: float) -> None:
        """Set the longest time that a message takes."""
        self.max_delay_s, self.max_bulk_delay_s = longest_s, max(longest_s, self.max_bulk_delay_s)

    def _event(self, node: M, event: ev.Event) -> None:
        """Hand an event to a machine."""
        raise NotImplementedError

    def _say(self, node: str, what: str | ev.Event) -> None:
        """Note it for the story."""
        raise NotImplementedError

    # --- time ---

    def run(self, until_s: float) -> None:
        """Let everything happen that is due up to `until_s`."""
        while self.queue and self.queue[0][0] <= until_s:
            assert self.count < self.max_actions, "it runs hot: far more happens than should in that time"
            self.now_s, _, action = heapq.heappop(self.queue)
            action()
        self.now_s = until_s

    def later(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have `action` happen after a delay."""
        self.count += 1
        heapq.heappush(self.queue, (self.now_s + delay_s, self.count, action))

    def _delay(self) -> float:
        return self.rng.uniform(0.0001, self.max_delay_s)

    # --- faults ---

    def cut(self, a: str, b: str) -> None:
        """The cable is pulled: nothing passes, nobody is told."""
        self.cuts |= {(a, b), (b, a)}
        self._say(a, f"link to {b} CUT")

    def cut_one_way(self, a: str, b: str) -> None:
        """Nothing gets from `a` to `b` any more; what `b` says still arrives."""
        self.cuts.add((a, b))
        self._say(a, f"link CUT on the way to {b}")

    def heal(self, a: str, b: str) -> None:
        """The cable is back.

        What was held up arrives. If an end has given up meanwhile, its Bye arrives behind that; or nothing but the
        reset of a connection that this end does not know any more.
        """
        pair = link(a, b)
        self.cuts -= {(a, b), (b, a)}
        self.healed_s[pair] = self.now_s
        self._say(a, f"link to {b} healed")
        connection = self.connections.get(pair)
        if connection is None:
            return
        stalled, connection.stalled = connection.stalled, []
        given_up = connection.open_at != {*pair}
        lingers = given_up and all(self.nodes[end].alive for end in pair) and self.rng.random() < 0.5
        if not given_up or lingers:
            for receiver, event in stalled:
                self._arrive_later(connection, receiver, event)
        self._go_on(connection)
        for end in sorted(connection.open_at) if given_up else ():
            self.later(self._after_last(connection, end), self._close_end(connection, end, clean=lingers))

    def reset(self, a: str, b: str) -> None:
        """The connection breaks, both processes live: a tunnel was restarted, a router forgot it."""
        connection = self.connections.get(link(a, b))
        self._say(a, f"connection to {b} RESET")
        if connection is None or self._is_cut(a, b):
            return
        self.queue = [
            entry for entry in self.queue if getattr(entry[2], "connection", None) is not connection
        ]
        heapq.heapify(self.queue)
        lag_s = self.reset_lag_s()
        for index, end in enumerate(sorted(connection.open_at)):
            self.later(self._delay() + index * lag_s, self._close_end(connection, end, clean=False))

    def _cut_off(self, name: str, arrives: float | None) -> None:
        """A machine died: what is in flight from it is cut off, per connection; then its peers notice."""
        for pair, connection in list(self.connections.items()):
            if name not in pair:
                continue
            other = pair[0] if pair[1] == name else pair[1]
            connection.open_at.discard(name)
            horizon = max((t for (to, _), t in connection.last_arrival_s.items() if to == other), default=0.0)
            share = self.rng.random() * self.rng.choice([0, 0, 1]) if arrives is None else arrives
            cut_s = self.now_s + share * max(0.0, horizon - self.now_s)
            if self.rates is not None:
                cut_s = min(cut_s, self.now_s + GRACE_S)  # Control breaks first.
            self.queue = [
                entry for entry in self.queue
                if not (getattr(entry[2], "route", None) == (name, other) and entry[0] > cut_s + ROUNDING_S)
            ]  # fmt: skip
            heapq.heapify(self.queue)
            if (name, other) not in self.cuts:
                delay_s = max(cut_s - self.now_s, 0) + self._delay()
                self.later(delay_s, self._close_end(connection, other, clean=False))

    # --- connections ---

    def _dial(self, node: M, address: str) -> None:
        name = address.split(":")[0]
        other = self.nodes.get(name)
        pair = link(node.name, name)

        def connect() -> None:
            if not node.alive or node.done or self.nodes[node.name] is not node:
                return
            if name == node.name:
                self._event(node, ev.DialFailed(address, ev.ITSELF, final=True))
            elif other is None or not other.alive or other.done:
                self._event(node, ev.DialFailed(address, "connection refused"))
            elif self._is_cut(*pair) or other.paused:
                self.later(1.0, lambda: self._event(node, ev.DialFailed(address, "timed out")))
            else:
                self._open(pair, dialler=node.name)

        self.later(self._delay(), connect)

    def _check_reach(self, node: M, address: str) -> None:
        name = address.split(":")[0]

        def answered(at_last: bool = False) -> None:
            other = self.nodes.get(name)
            silent = self._is_cut(node.name, name) or (other is not None and other.paused)
            if not node.alive:
                return
            if silent and not at_last:  # TCP repeats itself until the time is up.
                self.later(REACH_TIMEOUT_S, lambda: answered(at_last=True))
            elif other is None or not other.alive or other.done or silent:
                after_s = None if silent else self.refuses_after_s()
                reason = "timed out" if after_s is None else "connection refused"
                told = ev.NotReached(address, reason, refused=after_s is not None)
                self.later(after_s or 0.0, lambda: self._event(node, told))
            else:
                self._event(node, ev.Reached(address, name, address))

        self.later(2 * self._delay(), answered)

    def _open(self, pair: Link, dialler: str) -> None:
        connection = self.connections.get(pair)
        if connection is not None and connection.open_at == {*pair}:
            return
        lives = self._lives(pair)
        if connection is not None:
            for end in sorted(connection.open_at):  # The other's Bye is under way, or it was started again.
                self._close_end(connection, end, clean=connection.lives == lives)()
        if any(self.nodes[end].done for end in pair):  # That was the end of it.
            dialled = pair[1] if dialler == pair[0] else pair[0]
            self._event(self.nodes[dialler], ev.DialFailed(f"{dialled}:1", "connection refused"))
            return
        connection = self.connections[pair] = Connection(pair, lives)
        connection.open_at = {*pair}
        for end, other in (pair, pair[::-1]):
            opened = ev.PeerOpened(other, f"{other}:1", dialled=end == dialler, at=f"{other}:1")
            self._event(self.nodes[end], opened)

    def _lives(self, pair: Link) -> tuple[int, int]:
        return self.nodes[pair[0]].life, self.nodes[pair[1]].life

    def _is_cut(self, a: str, b: str) -> bool:
        """Is the link cut, in one direction at least?"""
        return (a, b) in self.cuts or (b, a) in self.cuts

    def _send(self, sender: str, receiver: str, message: Message, payload: Any) -> None:
        pair = link(sender, receiver)
        connection = self.connections.get(pair)
        if connection is None or sender not in connection.open_at:
            return
        if self.on_message is not None:
            self.on_message(sender, receiver, message)
            if not self.nodes[sender].alive:
                return
        event = ev.Received(sender, message, payload)
        if self.rates is not None and type(message) in BULK:
            size = self.rates.bytes_of(message, payload, self.chunks)
            lane = connection.lanes.setdefault(sender, BulkQueue())
            lane.push(event, size)
            self._pump(connection, lane, sender, receiver)
        elif (sender, receiver) in self.cuts:
            connection.stalled.append((receiver, event))
        else:
            self._arrive_later(connection, receiver, event)

    def _arrive_later(self, connection: Connection, receiver: str, event: ev.Event) -> None:
        bulk = type(event) is ev.Received and type(event.message) in BULK
        earliest = connection.last_arrival_s.get((receiver, bulk), 0.0)
        sender = connection.ends[0] if connection.ends[1] == receiver else connection.ends[1]
        if self.rates is not None:
            delay_s = self._delay() + (0.0 if bulk else self._held_up_s(connection, sender, receiver))
        else:
            delay_s = self.rng.uniform(0.0001, self.max_bulk_delay_s) if bulk else self._delay()
        arrival = max(self.now_s + delay_s, earliest + 1e-7)
        connection.last_arrival_s[receiver, bulk] = arrival
        self.later(arrival - self.now_s, _Arrival(self, connection, (sender, receiver), event))

    def arrive(self, connection: Connection, receiver: str, event: ev.Event) -> None:
        """A message reaches the other end, if that still has the connection."""
        if receiver not in connection.open_at:
            return
        if isinstance(event, ev.Received):
            body = event.message.body if isinstance(event.message, Envelope) else event.message
            self.delivered.add(type(body))
        sender = connection.ends[0] if connection.ends[1] == receiver else connection.ends[1]
        if (sender, receiver) in self.cuts:
            connection.stalled.append((receiver, event))
            return
        self._event(self.nodes[receiver], event)

    # --- links with rates ---

    def _held_up_s(self, connection: Connection, sender: str, receiver: str) -> float:
        """How long a control message is held up: it passes all bulk but what the kernel has, and delays the rest."""
        assert self.rates is not None
        takes_s = CONTROL_BYTES / self.rates.of(sender, receiver)
        lane = connection.lanes.get(sender)
        if lane is None or lane.free_at_s <= self.now_s:
            return takes_s
        lane.free_at_s += takes_s
        return takes_s + min(lane.free_at_s - self.now_s, self.rates.shows_s)

    def _pump(self, connection: Connection, lane: BulkQueue, sender: str, receiver: str) -> None:
        """Hand the kernel as much of the waiting bulk as it has room for."""
        assert self.rates is not None
        if sender not in connection.open_at or receiver not in connection.open_at:
            lane.waiting.clear()
            return
        if not lane.waiting or (sender, receiver) in self.cuts:
            return
        rate = self.rates.of(sender, receiver)
        ahead_s = self.rates.ahead_bytes / rate
        while lane.waiting and lane.free_at_s - ahead_s <= self.now_s + ROUNDING_S:
            self._put_through(connection, lane, (sender, receiver), rate)
        if not lane.waiting:
            lane.full_s = None
            return
        lane.full_s = self.now_s if lane.full_s is None else lane.full_s
        at_s = lane.free_at_s - ahead_s

        def pump() -> None:
            if lane.pump_at_s == at_s:
                lane.pump_at_s = -1.0
            self._pump(connection, lane, sender, receiver)

        if not 0.0 <= lane.pump_at_s <= at_s:
            lane.pump_at_s = at_s
            self.later(at_s - self.now_s, pump)

    def _put_through(
        self, connection: Connection, lane: BulkQueue, way: tuple[str, str], rate: float
    ) -> None:
        size, event = lane.take(self.now_s)
        self._check_sent(way[0], event)
        if coverage.OVERTAKEN not in self.met and type(event.message) is Shard and lane.count_of_chunks:
            self.met.add(coverage.OVERTAKEN)
        lane.free_at_s = max(lane.free_at_s, self.now_s) + size / rate
        earliest = connection.last_arrival_s.get((way[1], True), 0.0)
        arrival = max(lane.free_at_s + self._delay(), earliest + 1e-7)
        connection.last_arrival_s[way[1], True] = arrival
        self.later(arrival - self.now_s, _Arrival(self, connection, way, event))

    def _check_sent(self, sender: str, event: ev.Received) -> None:
        """Bulk leaves a queue for good."""

    def _go_on(self, connection: Connection) -> None:
        """Send what waited because of a cut."""
        for sender, lane in connection.lanes.items():
            receiver = connection.ends[0] if connection.ends[1] == sender else connection.ends[1]
            self._pump(connection, lane, sender, receiver)

    def forget_bulk(self, sender: str, before: ViewKey, peers: Collection[str] | None = None) -> None:
        """As transport.py does: drop chunks of earlier views, but for what the kernel has."""
        for pair, connection in self.connections.items():
            if peers is not None and pair[pair[0] == sender] not in peers:
                continue
            if sender in pair and sender in connection.lanes:
                lane = connection.lanes[sender]
                if lane.forget(before):
                    self.met.add(coverage.TAKEN_BACK)
                lane.full_s = lane.full_s if lane.waiting else None

    def carried_by(self, sender: str) -> dict[str, tuple[int, float]]:
        """As node/transport/transport.py counts it."""
        return {
            pair[pair[0] == sender]: connection.lanes[sender].carried
            for pair, connection in self.connections.items()
            if sender in connection.lanes and connection.open_at == {*pair}
        }

    def change_rate(self, sender: str, receiver: str, factor: float) -> None:
        """One direction of a link carries more or less from now on, also of what is on its way."""
        assert self.rates is not None
        factor = self.rates.change(sender, receiver, factor)
        self._say(sender, f"link to {receiver} carries {factor:.3g} times as much")
        connection = self.connections.get(link(sender, receiver))
        lane = connection.lanes.get(sender) if connection else None
        if connection is None or lane is None:
            return

        def then_s(at_s: float) -> float:
            return self.now_s + max(at_s - self.now_s, 0.0) / factor

        self.queue = [
            (then_s(entry[0]), *entry[1:])
            if getattr(entry[2], "connection", None) is connection and entry[2].is_bulk_to(receiver)  # type: ignore[attr-defined]
            else entry
            for entry in self.queue
        ]
        heapq.heapify(self.queue)
        if lane.free_at_s > self.now_s:
            self.met.add(coverage.CHANGED)
        lane.free_at_s = then_s(lane.free_at_s)
        last_s = connection.last_arrival_s.get((receiver, True), 0.0)
        connection.last_arrival_s[receiver, True] = then_s(last_s)
        self._pump(connection, lane, sender, receiver)

    def _drain(self, connection: Connection, sender: str, receiver: str) -> None:
        """The sender says Bye behind all bulk that waits."""
        lane = connection.lanes.get(sender)
        if self.rates is None or lane is None:
            return
        rate = self.rates.of(sender, receiver)
        while lane.waiting:
            self._put_through(connection, lane, (sender, receiver), rate)

    # --- ends ---

    def _close(self, name: str, peer: str, reason: str) -> None:
        pair = link(name, peer)
        connection = self.connections.get(pair)
        if connection is None or name not in connection.open_at:
            return
        if (name, peer) not in self.cuts:
            self._drain(connection, name, peer)
        self._close_end(connection, name, clean=True)()
        if (name, peer) not in self.cuts:
            self.later(self._after_last(connection, peer), self._close_end(connection, peer, clean=True))

    def _after_last(self, connection: Connection, receiver: str) -> float:
        """The time until something sent now arrives, behind all that is under way."""
        last_s = max((t for (to, _), t in connection.last_arrival_s.items() if to == receiver), default=0.0)
        return max(last_s - self.now_s, 0.0) + self._delay()

    def _close_end(self, connection: Connection, end: str, clean: bool) -> Callable[[], None]:
        def close() -> None:
            if end in connection.open_at:
                connection.open_at.discard(end)
                other = connection.ends[0] if connection.ends[1] == end else connection.ends[1]
                self._event(self.nodes[end], ev.PeerClosed(other, clean))

        return close


class _Arrival:
    """A message in flight; `route` lets a crash of the sender cut it off."""

    __slots__ = ("connection", "event", "network", "route")

    def __init__(
        self, network: Network[Any], connection: Connection, route: tuple[str, str], event: ev.Event
    ) -> None:
        self.network, self.connection, self.route, self.event = network, connection, route, event

    def is_bulk_to(self, receiver: str) -> bool:
        """Is it on the way there, and as long as its bytes take?"""
        return self.route[1] == receiver and type(getattr(self.event, "message", None)) in BULK

    def __call__(self) -> None:
        self.network.arrive(self.connection, self.route[1], self.event)
