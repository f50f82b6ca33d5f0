"""How the two ends of a link come to share memory, and send payloads through it.

Each end lends the other memory for what it sends:

    Lend     here is my memory                   (over bulk, once the link is open)
    Mapped   I have it
    Laid     a header, and where in it the header's payload lies

What was not mapped is not used: payloads go on over the socket.
"""

from __future__ import annotations

import contextlib

import zmq

from ...protocols.codec import encode
from ...protocols.messages import Laid, Lend, Mapped
from . import descriptors
from .link import NOBLOCK, OURS, SNDMORE, Conn
from .outgoing import Item
from .shared_memory import Arena


def lend(conn: Conn) -> Lend | None:
    """Memory for what we send over `conn`, if its other end is on this machine. Returns: the offer to send."""
    if descriptors.process_at_the_end_of(conn.fd) and (arena := Arena.create()):
        conn.lent = arena
        return Lend(descriptor=arena.descriptor)
    return None


def borrow(conn: Conn, offer: Lend) -> Mapped | None:
    """Map what the other end lends us. Returns: the answer; None if it cannot be mapped."""
    if process := descriptors.process_at_the_end_of(conn.fd):
        with contextlib.suppress(OSError, ValueError):  # It goes on over the socket.
            conn.borrowed = Arena.of(process, offer.descriptor)
            return Mapped()
    return None


def give_back(conn: Conn) -> None:
    """Unmap memory of a connection that is over now, not when the garbage collector comes to it."""
    conn.lent = conn.borrowed = None


def lay(conn: Conn, arena: Arena, item: Item, at: int, size: int) -> None:
    """Write the payload of `item` to the blocks from `at` on, which are reserved for it, and send a Laid.

    Raises: zmq.ZMQError if that cannot be sent; then nothing is written, and the blocks are free again.
    """
    socket, more = conn.port.socket, NOBLOCK | SNDMORE
    try:
        socket.send(OURS if conn.route is None else conn.route, more)
    except zmq.ZMQError:
        arena.release(at, size)
        raise
    if conn.route is not None:
        socket.send(OURS, more)
    arena.write(at, item.second)
    conn.laid_bytes += size
    socket.send(encode(Laid(header=item.first, first=at, size=size)), NOBLOCK)
