"""A node's ZeroMQ sockets, each with a monitor, on the loop that runs.

Deaths are seen by the monitors, within a millisecond of a killed process. Everything runs on the thread of one
asyncio (or uvloop) loop, without `zmq.asyncio`: its future per message costs more than the message.
"""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
import time
from collections.abc import Callable, Iterator

import zmq
from zmq.utils import garbage

from .. import forked
from ..endpoint import Endpoint
from ..keys import KeyPair
from . import curve, descriptors, local
from .link import NOBLOCK, POLLIN, Port
from .strangers import HELLO_S, Door, allow_many_descriptors

MAX_FRAME_BYTES = 64 << 20  # libzmq drops a connection that announces more, before it allocates anything.
# More do not move 1 to 4 MiB frames faster over loopback (measured, 2 cores). With one, a monitor's ACCEPTED
# always comes before the first frame of that connection.
IO_THREADS = 1
# Messages that libzmq holds for one connection, besides the one that it is sending: enough to send until we hear that
# there is room, and few, as nothing can overtake them. A Hello and a Bye must fit.
SEND_AHEAD = 2
# A larger payload is sent as it lies, for which a thread of pyzmq's has to wake up to free it.
COPY_BYTES = 256 << 10
MAX_SOCKETS = 8192  # Four for each peer we dial: two DEALERs and their monitors.
HANDSHAKE_MS = round(1000 * HELLO_S)  # libzmq's own limit to its part of the handshake.
# Without it, TCP would try for a quarter of an hour to send what is never acknowledged. No heartbeats go over a bulk
# connection, and its path may die alone: a router may forget one connection, or there are several ways between two
# networks. Longer than the patience with a stopped process (protocols/liveness.py), whose buffers are full meanwhile.
UNACKNOWLEDGED_MS = 25_000
ROUTER_RANK, CONTROL_RANK, BULK_RANK = 1, 0, 2

# Not -1: without reconnection libzmq (4.3.5) ends the pipe of a lost connection at once and throws away what
# was received but not read yet. We close the socket ourselves, long before this.
NO_RECONNECT_MS = 3_600_000

_HANDSHAKE_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
_DIALER_EVENTS = (
    zmq.EVENT_CONNECTED
    | zmq.EVENT_CLOSED
    | zmq.EVENT_CONNECT_RETRIED
    | zmq.EVENT_DISCONNECTED
    | _HANDSHAKE_FAILED
)
_EVENT = struct.Struct("=Hi")


class Sockets:
    """All sockets that carry links, and what their monitors tell.

    Args:
        wake: Called with a port that may have something to read, but once for all that has come: read until empty.
        keys: Ours, with which every connection is encrypted; None: none is.
    """

    def __init__(self, wake: Callable[[Port], None], keys: KeyPair | None) -> None:
        self._wake = wake
        self.keys = keys
        self.door = Door(keyed=keys is not None)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(io_threads=IO_THREADS)
        self.context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        self.open: set[Port] = set()
        self.listening: set[int] = set()  # Ports that we listen at, and those that we dial: for forked.py.
        self.dialled: set[int] = set()
        self._monitors = 0
        forked.close_in_children_of(self)

    def start(self) -> None:
        """Serve on the running loop."""
        self._loop = asyncio.get_running_loop()
        # Else it starts with the first large payload, when there may be no room for a thread.
        if not garbage.gc.is_alive():
            garbage.gc.start()

    def listen(self, here: Endpoint) -> Endpoint:
        """Bind a ROUTER, which asks by ZAP whom to let in if there are keys.

        Returns: where it is bound. Raises: zmq.ZMQError if it cannot be.
        """
        allow_many_descriptors()
        socket = self._socket(zmq.ROUTER, here)
        socket.set(zmq.ROUTER_MANDATORY, 1)  # Sending to a connection that is gone is an error, not silence.
        if self.keys:
            curve.serve(socket, self.keys)
        port = self._watch(socket, ROUTER_RANK, Door.EVENTS)
        try:
            any_port = here.at(here.host or "*").place.removesuffix(str(here.port))
            socket.bind(f"tcp://{any_port}{here.port or '*'}")
        except zmq.ZMQError:
            self.shut(port, 0)
            raise
        bound = Endpoint.parse(socket.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://"))
        self.listening.add(bound.port)
        if place := local.meeting_place(bound):
            with contextlib.suppress(zmq.ZMQError):  # Without it, processes of this machine dial the port.
                socket.bind(place)
        return bound

    def dial(self, there: Endpoint, route: bytes, bulk: bool) -> Port:
        """Connect a DEALER with the routing id `route`. Raises: zmq.ZMQError."""
        socket = self._socket(zmq.DEALER, there)
        if self.keys:
            curve.dial(socket, self.keys, there.key)
        socket.set(zmq.ROUTING_ID, route)
        socket.set(zmq.RECONNECT_IVL, NO_RECONNECT_MS)
        port = self._watch(socket, BULK_RANK if bulk else CONTROL_RANK, _DIALER_EVENTS)
        self.dialled.add(there.port)
        try:
            socket.connect(local.way_to(there) if bulk else f"tcp://{there.place}")
        except zmq.ZMQError:
            self.shut(port, 0)
            raise
        return port

    def _socket(self, kind: int, end: Endpoint) -> zmq.Socket[bytes]:
        """Every data socket is made here, so every one has the same bounds."""
        socket = self.context.socket(kind)
        socket.set(zmq.IPV6, ":" in end.host)
        socket.set(zmq.SNDHWM, SEND_AHEAD)
        socket.set(zmq.RCVHWM, 0)
        socket.copy_threshold = COPY_BYTES
        socket.set(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        socket.set(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
        socket.set(zmq.TCP_KEEPALIVE, 1)  # A path that dies silently while idle is noticed after 25 s.
        socket.set(zmq.TCP_KEEPALIVE_IDLE, 10)
        socket.set(zmq.TCP_KEEPALIVE_INTVL, 5)
        socket.set(zmq.TCP_KEEPALIVE_CNT, 3)
        socket.set(zmq.TCP_MAXRT, UNACKNOWLEDGED_MS)
        return socket

    def _watch(self, socket: zmq.Socket[bytes], rank: int, events: int) -> Port:
        """Put `socket` and a monitor of it on the loop."""
        self._monitors += 1
        place = f"inproc://monitor-{self._monitors}"
        socket.monitor(place, events)
        monitor = self.context.socket(zmq.PAIR)
        monitor.set(zmq.RCVHWM, 0)  # With a bound, a full queue would stop the I/O thread.
        monitor.connect(place)
        port = Port(socket, monitor, rank, None)
        self.open.add(port)
        self._loop.add_reader(socket.fileno(), self._wake, port)
        self._loop.add_reader(monitor.fileno(), self._told, port)
        self._wake(port)
        return port

    def _told(self, port: Port) -> None:
        port.told = True
        self._wake(port)

    def read_monitor(self, port: Port) -> None:
        """Read a port's monitor, and note what it says. Connections that have ended are in `port.lost` then."""
        port.told = False
        for event, value in _monitored(port):
            if port.conn is None:
                if gone := self.door.event(event, value, time.monotonic()):
                    port.lost.append(gone)
            elif event == zmq.EVENT_CONNECTED:
                port.connected, port.fd = True, value
                if port.conn.bulk:
                    descriptors.bound_unsent(value)
            elif event & _HANDSHAKE_FAILED:
                port.failure = curve.why_dial_failed(event, value, self.keys is not None)
            else:  # Closed, to be retried (in an hour) or disconnected: it is over.
                port.fd = -1
                port.lost.append(port.conn)

    def shut(self, port: Port, linger_s: float) -> None:
        """Take a socket off the loop; libzmq goes on sending what is queued for at most `linger_s`."""
        if port not in self.open:
            return
        self.open.discard(port)
        port.open = False
        for each in (port.socket, port.monitor):
            self._loop.remove_reader(each.fileno())
        port.socket.disable_monitor()
        port.monitor.close(0)
        port.socket.close(round(linger_s * 1000))

    def term(self, at_most_s: float) -> None:
        """After all sockets are shut: wait until what is queued has gone."""
        # Now and then libzmq (4.3.5) never ends `term` if a peer hangs up at this very moment (1 in 2,000
        # here, with or without linger and monitors). Such a context is left to the end of the process.
        term = threading.Thread(target=self.context.term, name="chaosnet-zmq-term", daemon=True)
        with contextlib.suppress(RuntimeError):  # There are as many threads as may be: it is left, too.
            term.start()
            term.join(at_most_s)


def _monitored(port: Port) -> Iterator[tuple[int, int]]:
    """(event, value) of each message of a port's monitor."""
    while int(port.monitor.get(zmq.EVENTS)) & POLLIN:
        what, _ = port.monitor.recv_multipart(NOBLOCK)
        yield _EVENT.unpack(what)
