"""Receiving: reads a port item by item, and passes each on to whom it is for.

A monitor and its socket (sockets.py) are two queues: a disconnection is acted upon only when the socket has been
read empty after it, so what a dead peer sent is delivered first.
"""

from __future__ import annotations

import time
from functools import partial

import zmq

from ...protocols.codec import decode
from ...protocols.errors import MalformedMessage, VersionMismatch
from ...protocols.messages import Bye, Hello, Laid, Lend, Mapped
from . import lending
from .acceptor import Acceptor
from .dialer import Dialer
from .foreign import Foreign
from .greeting import introduces
from .link import NOBLOCK, OURS, Conn, LinkStage, Port, where
from .links import Links
from .shared_memory import Arena, Payload
from .sockets import Sockets
from .turns import Sink, Turns

READS_PER_TURN = 256  # Items of one socket, before the others and the loop get their turn.
MAX_FRAMES = 2  # Of an item.


class Receiver:
    """Reads ports, and tells links, the dialer, the acceptor and the sink what came."""

    def __init__(
        self,
        turns: Turns,
        sockets: Sockets,
        links: Links,
        dialer: Dialer,
        acceptor: Acceptor,
        foreign: Foreign,
        sink: Sink,
    ) -> None:
        self._turns, self._sockets, self._links = turns, sockets, links
        self._dialer, self._acceptor = dialer, acceptor
        self._foreign, self._sink = foreign, sink

    def serve(self, port: Port) -> None:
        """A port's turn: read it, then go on with what waits to be sent over it."""
        self._read(port)
        self._links.sender.flush(port)

    def _read(self, port: Port) -> None:
        """Read the monitor, then the socket until it is empty, then act upon what the monitor said."""
        # That a port we have dialled is connected is known before anything that has come is acted upon.
        if port.told or (port.conn and not port.connected):
            self._sockets.read_monitor(port)
        for _ in range(READS_PER_TURN):
            if not port.readable():  # Cheaper than an error that there is nothing.
                break
            self.received(port, _receive(port.socket))
            if not port.open:
                return
        else:
            return  # There may be more: the port is read again in the next turn.
        self._turns.emptied(port)
        lost, port.lost = port.lost, []
        for gone in lost:
            if isinstance(gone, Conn):
                self._dialer.lost(gone)
            else:
                self._acceptor.ended(gone)

    def received(self, port: Port, frames: list[zmq.Frame]) -> None:
        """Handle one item that has come over `port`."""
        conn = port.conn
        if conn is None:
            route = frames.pop(0).bytes
            conn = self._acceptor.conns.get(route)
            if conn is None:
                self._acceptor.first_words(port, route, frames)
                return
        if not 1 <= len(frames) <= MAX_FRAMES:
            self._drop(conn, f"an item of {len(frames)} frames or more (at most {MAX_FRAMES})")
            return
        first = frames[0].bytes
        second = frames[1] if len(frames) > 1 else None
        if first == OURS:
            self._own_words(conn, second)
        elif conn.link.state is LinkStage.GREETING:
            self._drop(conn, "the first item is no Hello")
        elif second is not None and not conn.bulk:
            self._drop(conn, "a control message of two frames")
        else:
            self._take(conn, first, second)

    def _take(self, conn: Conn, first: bytes, second: zmq.Frame | Payload | None) -> None:
        """Pass an item on to the sink, if its link may deliver."""
        self._links.outlives(conn.link)
        if not self._links.delivers(conn.link):
            return
        peer = conn.link.peer
        assert peer
        peer.heard_s = time.monotonic()
        self._links.bytes_in += len(first) + (0 if second is None else len(second))
        if conn.link.invited and not introduces(conn, first):
            self._drop(conn, "an invite's holder said more than an introduction")
        elif conn.bulk:
            self._turns.tell(partial(self._sink.bulk, peer.name, first, second))
        else:
            self._sink.control(peer.name, first)

    def _own_words(self, conn: Conn, frame: zmq.Frame | None) -> None:
        """Act upon one of the transport's own words."""
        link = conn.link
        greets = link.dialled and link.state is LinkStage.GREETING
        try:
            message = decode(frame.buffer if frame else b"")
        except (MalformedMessage, VersionMismatch) as error:
            if greets:
                self._dialer.failed(link, str(error), final=isinstance(error, VersionMismatch))
            else:
                self._drop(conn, str(error))
            return
        match message:
            case Hello() if link.dialled and not conn.hello:
                self._dialer.answered(conn, message)
            case Bye() if greets:
                self._dialer.failed(link, f"it hung up: {message.reason}", message.final)
            case Bye():
                self._links.heard_bye(conn, message.spare)
            case Lend() | Mapped() | Laid() if link.state in (LinkStage.CLOSING, LinkStage.GONE):
                pass  # It was sent before our Bye came.
            case Lend() if conn.bulk and link.state is LinkStage.OPEN and not link.invited:
                if answer := lending.borrow(conn, message):
                    self._links.sender.say(conn, answer)
            case Mapped() if conn.lent:
                conn.lent.mapped()
            case Laid() if conn.borrowed and link.state is LinkStage.OPEN:
                self._take_laid(conn, conn.borrowed, message)
            case _:
                self._drop(conn, f"{type(message).__name__} is no word of the transport's here")

    def _take_laid(self, conn: Conn, arena: Arena, laid: Laid) -> None:
        try:
            payload = arena.payload(laid.first, laid.size)
        except ValueError as error:
            self._drop(conn, str(error))
            return
        self._take(conn, laid.header, payload)

    def _drop(self, conn: Conn, reason: str) -> None:
        self._foreign.drop(where(conn), reason)


def _receive(socket: zmq.Socket[bytes]) -> list[zmq.Frame]:
    """One item, which is there. Of one with too many frames, only so many that the receiver sees it."""
    frame = socket.recv(NOBLOCK, copy=False)
    frames = [frame]
    while frame.more:
        frame = socket.recv(copy=False)
        if len(frames) < MAX_FRAMES + 2:
            frames.append(frame)
    return frames
