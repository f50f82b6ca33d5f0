"""Sending: an item waits in the queue of its connection (outgoing.py) until libzmq has room for it."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import zmq

from ...protocols.codec import encode
from ...protocols.messages import Bye, Message
from .. import clock
from . import lending
from .link import NOBLOCK, OURS, SNDMORE, Conn, PeerLink, Port
from .outgoing import Item, Rank, size_of
from .sockets import Sockets
from .turns import Turns

# We look for room when libzmq signals it. The signal is lost if a call about something else takes it: so we also ask.
RETRY_S = 0.02
LAID_PER_TURN = 16 << 20  # Bytes that one connection lays in shared memory before others have their turn.


class Sender:
    """Hands queued items to libzmq. `lost(conn)` is called when a connection turns out to be gone."""

    def __init__(self, turns: Turns, sockets: Sockets, lost: Callable[[Conn], None]) -> None:
        self._turns, self._sockets, self._lost = turns, sockets, lost
        self._retry_is_due = False

    def put(
        self,
        conn: Conn,
        first: bytes,
        second: Any = None,
        rank: Rank = Rank.STATE,
        tag: Any = None,
        turn: tuple[int, int] = (0, 0),
    ) -> bool:
        """Queue one item on a connection (see `Transport.send_bulk`); False if that turns out to be gone."""
        port = conn.port
        if conn.lost or not port.open:
            return False
        waits = bool(conn.queue)
        conn.queue.push(rank, first, second, tag, turn)
        if waits:  # libzmq had no room, and will signal it.
            return True
        self._drain(conn)
        # Sending may take from the descriptor the signal that a message has come, or that there is room for others.
        if port.open and (port.blocked or port.readable()):
            self._turns.wake(port)
        return not conn.lost

    def say(self, conn: Conn, word: Message, rank: Rank = Rank.STATE) -> bool:
        """Queue one of the transport's own words."""
        return self.put(conn, OURS, encode(word), rank)

    def move(self, conn: Conn, link: PeerLink) -> None:
        """Queue what waits on `conn`, whose link ends, on another link to that peer."""
        there = link.bulk if conn.bulk else link.control
        while conn.queue:
            item = conn.queue.pop()
            if there is not None and item.first != OURS:
                self.put(there, item.first, item.second, item.rank, item.tag, item.turn)

    def bye(self, conn: Conn, reason: str, spare: bool = False) -> None:
        """Queue a Bye, after all that waits."""
        self.say(conn, Bye(reason=reason, spare=spare), Rank.BYE)

    def forget(self, conn: Conn) -> None:
        """Drop what waits on a connection."""
        conn.queue.clear()
        conn.port.blocked.pop(conn, None)

    def flush(self, port: Port) -> None:
        """Go on with the queues of a port that libzmq had no room for."""
        if not port.blocked or not port.open:
            return  # Nothing waits; or what was read from the port has made us shut it.
        for conn in port.blocked:
            conn.laid_bytes = 0
        # A second time where it took some: meanwhile it may have found more room, without a further signal.
        sent = self._drain_all(port) and self._drain_all(port)
        # Sending may have taken from the descriptor the signal that a message has come.
        if sent or port.readable():
            self._turns.wake(port)

    def _drain_all(self, port: Port) -> bool:
        """Give libzmq what is queued for a port. Returns: did it take any?"""
        port.readable()  # Makes libzmq look for room, which it else does only now and then.
        sent = [self._drain(conn) for conn in list(port.blocked)]
        return any(sent)

    def flush_all(self, until_s: float) -> None:
        """Block until libzmq has all that is queued, or until `until_s` by `time.monotonic`."""
        while time.monotonic() < until_s:
            poller = zmq.Poller()
            for port in (blocked := [port for port in self._sockets.open if port.blocked]):
                poller.register(port.socket.fileno(), zmq.POLLIN)
            if not blocked:
                return
            poller.poll(round(1000 * RETRY_S))
            for port in blocked:
                self.flush(port)

    def _drain(self, conn: Conn) -> bool:
        """Give libzmq what is queued, as much as it takes. Returns: did it take any?"""
        queue, before = conn.queue, len(conn.queue)
        try:
            while queue:
                if conn.laid_bytes >= LAID_PER_TURN:
                    conn.port.blocked[conn] = None
                    self._turns.wake(conn.port)
                    return True
                _hand_over(conn, queue.next())
                queue.taken(clock.now_s())
        except zmq.Again:  # It refuses the first frame only: libzmq takes all of an item, or nothing.
            queue.refused(clock.now_s())
            conn.port.blocked[conn] = None
            self._retry_soon()
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._sockets.read_monitor(conn.port)  # The monitor tells why.
            self._turns.wake(conn.port)  # To act upon what it told.
            self._lost(conn)
        else:
            conn.port.blocked.pop(conn, None)
        return len(queue) < before

    def _retry_soon(self) -> None:
        if not self._retry_is_due and not self._turns.closed:
            self._retry_is_due = True
            self._turns.later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_is_due = False
        for port in self._sockets.open:
            if port.blocked:
                self._turns.wake(port)


def _hand_over(conn: Conn, item: Item) -> None:
    """Give libzmq one item, its payload by way of lent memory if that has room.

    Raises: zmq.Again if libzmq has no room; other zmq.ZMQError if the connection is gone.
    """
    socket, more = conn.port.socket, NOBLOCK | SNDMORE
    if conn.lent and item.second is not None:
        size = size_of(item.second)
        if (at := conn.lent.reserve(size)) is not None:
            lending.lay(conn, conn.lent, item, at, size)
            return
    if conn.route is not None:
        socket.send(conn.route, more)
    if item.second is None:
        socket.send(item.first, NOBLOCK)
    else:
        socket.send(item.first, more)
        socket.send(item.second, NOBLOCK, copy=False)
