"""What a transport keeps of its links."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

import zmq

from ...protocols.messages import Hello
from ..endpoint import Endpoint
from .outgoing import Outgoing
from .shared_memory import Arena
from .strangers import Accepted

# As plain integers: each operation on pyzmq's flags makes an object, in the loop's hottest places.
NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)

OURS = b""  # First frame of the transport's own words; bodies and headers are never empty.


class LinkStage(Enum):
    GREETING = "greeting"  # Not both Hellos yet.
    OPEN = "open"
    CLOSING = "closing"  # We said Bye: nothing is delivered any more, and the other end's Bye is awaited.
    GONE = "gone"


@dataclass(eq=False, slots=True)
class Port:
    """A socket on the loop, and its monitor."""

    socket: zmq.Socket[bytes]
    monitor: zmq.Socket[bytes]
    rank: int  # Lower is read first.
    conn: Conn | None  # None: the ROUTER, shared by all accepted connections.
    told: bool = True  # Its monitor may have something to read.
    open: bool = True  # False once its sockets are closed.
    connected: bool = False
    fd: int = -1  # Of a connection that we dialled, while that lives.
    blocked: dict[Conn, None] = field(default_factory=dict)  # Its connections with something queued.
    lost: list[Conn | Accepted] = field(default_factory=list)  # Acted upon once the socket is read empty.
    failure: str = ""  # Why the handshake of a connection that we dialled failed.

    def readable(self) -> bool:
        """Is there something to read? The question also makes libzmq look for what has changed."""
        return bool(int(self.socket.get(zmq.EVENTS)) & POLLIN)


@dataclass(eq=False, slots=True)
class Conn:
    """One connection: half of a link."""

    port: Port
    bulk: bool
    link: PeerLink
    route: bytes | None = None  # Its routing id at our ROUTER; None for a DEALER of our own.
    accepted: Accepted | None = None
    hello: Hello | None = None  # The other end's, once it has come.
    queue: Outgoing = field(default_factory=Outgoing)
    lent: Arena | None = None  # For payloads that we send, if the other end is on this machine.
    borrowed: Arena | None = None  # For payloads that come.
    laid_bytes: int = 0  # Written to `lent` in this turn of its port.
    said_bye: bool = False
    lost: bool = False

    @property
    def fd(self) -> int:
        """libzmq's descriptor; -1 if there is none."""
        return self.accepted.fd if self.accepted else self.port.fd


@dataclass(eq=False, slots=True)
class PeerLink:
    """Two connections to one node, control and bulk.

    Attributes:
        address: What we dialled, or where the dialer says that it can be dialled.
        at: What we dialled, with an IP address; "" for a loopback address behind which another machine answers.
    """

    dialled: bool
    address: str
    at: str = ""
    check: bool = False  # Ends as soon as the other end has said who it is.
    dialled_s: float = 0.0  # When, by `time.monotonic`.
    untried: list[Endpoint] = field(default_factory=list)  # Other addresses of the name that we dialled.
    key: str = ""  # The key that the other end has proved to hold.
    spare: bool = False  # The other end has said Bye to it because another link is there.
    drains: bool = False  # We have said Bye for that reason: what was sent until then is still for us.
    invited: bool = False  # By an invite's key: it may introduce somebody, and nothing else.
    state: LinkStage = LinkStage.GREETING
    control: Conn | None = None
    bulk: Conn | None = None
    peer: Peer | None = None
    opened_s: float = 0.0  # By `time.monotonic`.
    timer: asyncio.TimerHandle | None = None

    def conns(self) -> Iterator[Conn]:
        return (conn for conn in (self.control, self.bulk) if conn)

    @property
    def of_client(self) -> bool:
        """Is its other end a client, which is no node?"""
        return any(conn.hello.client for conn in self.conns() if conn.hello)

    def usable(self) -> bool:
        return self.state is LinkStage.OPEN and not any(conn.lost or conn.said_bye for conn in self.conns())

    def set_timer(self, timer: asyncio.TimerHandle | None) -> None:
        if self.timer:
            self.timer.cancel()
        self.timer = timer


@dataclass(eq=False, slots=True)
class Peer:
    """A node to which there is a link."""

    name: str
    incarnation: str
    links: list[PeerLink] = field(default_factory=list)
    heard_s: float = -math.inf  # When the last message came.
    rivals: dict[str, float] = field(default_factory=dict)  # When first refused, by incarnation of this name.

    def link(self) -> PeerLink | None:
        return next((link for link in self.links if link.usable()), None)


def where(conn: Conn) -> str:
    """The other end, as people know it: its name, or its address before it has one."""
    return conn.link.peer.name if conn.link.peer else conn.link.address
