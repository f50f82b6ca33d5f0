"""The process behind the relay back end: every link's bytes pass through it, at the link's rate and delay.

    python -m ...relay_process NAME          a topology as YAML on stdin; prints one JSON line once it serves

A *line* is one direction of a link. What is read from a sender is booked on the line, which tells when it has
arrived at the other end, and is written there at that time. Threads, because they hold a rate more exactly
than an event loop does (docs/testbed.md); one reader and one writer per connection and direction. TCP on both
sides means that nothing can be lost or reordered: a lost packet is a wait of one round trip.
"""

from __future__ import annotations

import contextlib
import math
import os
import random
import select
import selectors
import shutil
import signal
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import deque
from typing import Annotated

import msgspec
import networkx as nx
import zmq

from .topology import GOODPUT, Link, LinkSpec, Topology, link_name

HOST = "127.0.0.1"
FOLDER = "chaosnet-relay-"  # So the names of folders for its sockets begin.
QUEUE_S = 0.02  # As the kernel back end's: so much may wait for the wire.
SLICE_S = 0.001  # Bytes are booked in slices of this length of wire.
SLICE_BYTES = (4 << 10, 64 << 10)
BUFFER_BYTES = 256 << 10  # Of sockets: what waits in here has passed no link yet.
PACKET_BYTES = 1448
MIN_STALL_S = 0.01  # Nobody retransmits a packet sooner.
SWITCH_S = 0.0005  # Threads must not wait 5 ms for each other.
CONNECT_S = 3.0
TAKEN_S = 0.1  # After it has arrived, something should have been taken.
LOOK_S = 0.2  # Who tries to connect over a cut link may give up: so often that is looked for.


class Line:
    """One direction of a link: when does what is sent now arrive? Times: seconds of the monotonic clock."""

    def __init__(self, spec: LinkSpec, first: bool, rng: random.Random) -> None:
        self.rng, self.first = rng, first
        self.changed = threading.Condition()
        self.busy_until_s = 0.0
        self.cut = False
        self.set(spec)

    def set(self, spec: LinkSpec) -> None:
        """Other properties, from now on."""
        with self.changed:
            self.spec = spec
            self.bytes_per_s = GOODPUT * spec.rate_from(self.first) * 1e6 / 8
            self.changed.notify_all()

    def set_cut(self, cut: bool) -> None:
        """Nothing passes, or again everything."""
        with self.changed:
            self.cut = cut
            self.changed.notify_all()

    @property
    def slice_bytes(self) -> int:
        """How much to book at once."""
        return min(max(int(self.bytes_per_s * SLICE_S), SLICE_BYTES[0]), SLICE_BYTES[1])

    def book(self, size: int, now_s: float) -> float:
        """When `size` bytes have arrived at the other end."""
        with self.changed:
            self.busy_until_s = max(self.busy_until_s, now_s) + size / self.bytes_per_s
            return self.busy_until_s + self._delay_s(size)

    def _delay_s(self, size: int) -> float:
        spec = self.spec
        delay_s = spec.delay_ms / 1e3
        if spec.jitter_ms:
            delay_s = max(0.0, self.rng.gauss(delay_s, spec.jitter_ms / 1e3))
        packets = math.ceil(size / PACKET_BYTES)
        if spec.loss_pct and self.rng.random() > (1 - spec.loss_pct / 100) ** packets:
            delay_s += max(MIN_STALL_S, 2 * spec.delay_ms / 1e3)
        return delay_s

    def wait_for_room(self) -> None:
        """Until the queue in front of the wire is short."""
        while True:
            self.wait_while_cut()
            late_s = self.busy_until_s - time.monotonic() - QUEUE_S
            if late_s <= 0:
                return
            time.sleep(late_s)

    def wait_while_cut(self, patience_s: float | None = None) -> bool:
        """Until bytes pass; False if they do not by then."""
        if not self.cut:
            return True
        with self.changed:
            return self.changed.wait_for(lambda: not self.cut, patience_s)


class _Flow:
    """One direction of one connection."""

    def __init__(self, source: socket.socket, target: socket.socket, line: Line) -> None:
        self.source, self.target, self.line = source, target, line
        self.queue: deque[tuple[float, bytes]] = deque()
        self.ready = threading.Condition()
        self.broken = False  # The receiver has gone.
        self.threads = [threading.Thread(target=each, daemon=True) for each in (self._read, self._write)]

    def _read(self) -> None:
        arrives_s = 0.0
        while True:
            self.line.wait_for_room()
            self._wait_for_taker()
            if self.broken:
                return
            try:
                data = self.source.recv(self.line.slice_bytes)
            except OSError:
                data = b""
            arrives_s = max(arrives_s, self.line.book(len(data), time.monotonic()))
            with self.ready:
                self.queue.append((arrives_s, data))
                self.ready.notify()
            if not data:
                return

    def _wait_for_taker(self) -> None:
        """What has arrived and is not taken holds up its sender, as a full TCP window does."""
        with self.ready:
            self.ready.wait_for(
                lambda: self.broken or not self.queue or time.monotonic() < self.queue[0][0] + TAKEN_S
            )

    def _write(self) -> None:
        while True:
            with self.ready:
                self.ready.wait_for(lambda: self.queue)
                arrives_s, data = self.queue.popleft()
                self.ready.notify()
            wait_s = arrives_s - time.monotonic()
            if wait_s > 0:
                time.sleep(wait_s)
            self.line.wait_while_cut()
            try:
                if not data:
                    self.target.shutdown(socket.SHUT_WR)
                    return
                self.target.sendall(data)
            except OSError:
                with contextlib.suppress(OSError):  # Whoever sends must hear of it.
                    self.source.shutdown(socket.SHUT_RDWR)
                with self.ready:
                    self.broken = True
                    self.ready.notify()
                return


class Relays:
    """All links of a testbed, and the ports at which they are entered."""

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        rng = random.Random(0)
        self.lines: dict[Link, Line] = {}  # By (sender, receiver).
        for (a, b), spec in topology.links.items():
            self.lines[a, b] = Line(spec, True, rng)
            self.lines[b, a] = Line(spec, False, rng)
        self.entries: dict[tuple[str, str, int], int] = {}  # (from, to, port there): port to dial.
        self.selector = selectors.DefaultSelector()
        threading.Thread(target=self._accept, daemon=True).start()

    def enter(self, source: str, target: str, port: int) -> int:
        """The port at which `source` reaches `port` of `target`: over their link, else link by link."""
        key = (source, target, port)
        if key not in self.entries:
            path = nx.shortest_path(self.topology.graph, source, target)
            onward = port if len(path) == 2 else self.enter(path[1], target, port)
            server = socket.create_server((HOST, 0), backlog=64)
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            lines = (self.lines[source, path[1]], self.lines[path[1], source])
            self.selector.register(server, selectors.EVENT_READ, (lines, onward))
            self.entries[key] = server.getsockname()[1]
        return self.entries[key]

    def _accept(self) -> None:
        while True:
            for key, _ in self.selector.select(timeout=0.05):  # Servers are added meanwhile.
                server = key.fileobj
                assert isinstance(server, socket.socket)
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    threading.Thread(target=_serve, args=(connection, *key.data), daemon=True).start()


def _serve(connection: socket.socket, lines: tuple[Line, Line], port: int) -> None:
    """Both directions of one connection, until both have ended."""
    there, back = lines
    while not there.wait_while_cut(LOOK_S):
        if _has_hung_up(connection):
            connection.close()
            return
    try:
        onward = socket.create_connection((HOST, port), timeout=CONNECT_S)
    except OSError:
        # Nobody listens there: reset, which is the nearest to a refusal that is left.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        return
    onward.settimeout(None)
    for each in (connection, onward):
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    onward.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    with connection, onward:
        flows = _Flow(connection, onward, there), _Flow(onward, connection, back)
        threads = [thread for flow in flows for thread in flow.threads]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


def _has_hung_up(connection: socket.socket) -> bool:
    """Also if it has sent something before."""
    poll = select.poll()
    poll.register(connection, getattr(select, "POLLRDHUP", 0))  # Without: POLLHUP, which is always told.
    return bool(poll.poll(0))


# --- what the back end asks of this process ---


class RelayPlace(msgspec.Struct):
    """What it tells of itself: where it is asked, and the port of each node."""

    pid: Annotated[int, msgspec.Meta(ge=1)]
    control: str
    ports: dict[str, int]


class Enter(msgspec.Struct, tag=True):
    source: str
    target: str
    port: int


class Set(msgspec.Struct, tag=True):
    a: str
    b: str
    spec: LinkSpec


class Cut(msgspec.Struct, tag=True):
    a: str
    b: str
    cut: bool


class Show(msgspec.Struct, tag=True):
    pass


class Stop(msgspec.Struct, tag=True):
    pass


Request = Enter | Set | Cut | Show | Stop


def answer(relays: Relays, request: Request) -> object:
    """One request; what it returns is sent back as JSON."""
    match request:
        case Enter(source, target, port):
            return relays.enter(source, target, port)
        case Set(a, b, spec):
            relays.topology.set_spec(link_name(a, b), spec)
            for ends in ((a, b), (b, a)):
                relays.lines[ends].set(spec)
        case Cut(a, b, cut):
            for ends in ((a, b), (b, a)):
                relays.lines[ends].set_cut(cut)
        case Show():
            return [
                {
                    "link": link_name(*ends),
                    "from": ends[0],
                    "rate_mbit": line.spec.rate_from(line.first),
                    "delay_ms": line.spec.delay_ms,
                    "jitter_ms": line.spec.jitter_ms,
                    "loss_pct": line.spec.loss_pct,
                    "cut": line.cut,
                }
                for ends, line in relays.lines.items()
            ]
    return None


def reserved_ports(count: int) -> list[socket.socket]:
    """Sockets bound to ports for others to listen at; while they are open, nobody gets these ports by chance."""
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        each.bind((HOST, 0))
    return sockets


def main() -> None:
    """Serve until told to stop."""
    sys.setswitchinterval(SWITCH_S)
    topology = Topology.from_text(sys.stdin.read())
    # Threads inherit that it is blocked, so that it wakes this one, which then ends by way of `finally`.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    relays, context = Relays(topology), zmq.Context()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    control = context.socket(zmq.REP)
    folder = tempfile.mkdtemp(prefix=FOLDER)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
        control.bind(f"ipc://{folder}/control")
        kept = reserved_ports(len(topology.nodes))
        ports = {node: each.getsockname()[1] for node, each in zip(topology.nodes, kept, strict=True)}
        told = RelayPlace(os.getpid(), f"ipc://{folder}/control", ports)
        print(msgspec.json.encode(told).decode(), flush=True)
        while True:
            request = msgspec.json.decode(control.recv(), type=Request)
            control.send_json(answer(relays, request))
            if isinstance(request, Stop):
                return
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        control.close(linger=200)
        context.term()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
