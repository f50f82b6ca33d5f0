"""Links that others open to this node: who may connect, and the first words of who does.

An accepted connection is a stranger's (strangers.py) until it has said a Hello that fits. The link is open once both
of its connections have.
"""

from __future__ import annotations

import asyncio
import time

import zmq

from ...protocols.errors import CannotListen, ConfigError, MalformedMessage, VersionMismatch
from ...protocols.keyring import KeyVerdict
from ...protocols.messages import Hello
from ..endpoint import Endpoint
from . import curve, descriptors
from .curve import MALFORMED
from .foreign import Foreign
from .greeting import Identity, advertised, parse_hello
from .link import Conn, LinkStage, PeerLink, Port
from .links import Links
from .local import host_of
from .outgoing import Rank
from .sockets import Sockets
from .strangers import Accepted
from .turns import Turns

SWEEP_S = 1.0  # Between two looks at who has been a stranger for too long.


class Acceptor:
    """Lets others connect to this node.

    Attributes:
        conns: The accepted connections that have said who they are, by routing id.
    """

    def __init__(
        self, identity: Identity, turns: Turns, sockets: Sockets, links: Links, foreign: Foreign
    ) -> None:
        self.conns: dict[bytes, Conn] = {}
        self._identity, self._turns, self._sockets = identity, turns, sockets
        self._door = sockets.door
        self._links, self._foreign = links, foreign
        self._halves: dict[bytes, PeerLink] = {}  # Links that still greet, by the end of both routing ids.
        self._zap: curve.Zap | None = None

    def listen(self, listen: str) -> str:
        """Listen, on the running loop. Returns: where, with our key. Raises: CannotListen if that cannot be bound."""
        self._loop = asyncio.get_running_loop()
        keys, keyring = self._identity.keys, self._identity.keyring
        if keys:
            assert keyring
            self._zap = curve.Zap(self._sockets.context, keyring, self._turned_away)
            self._loop.add_reader(self._zap.socket.fileno(), self._zap.read)
        try:
            bound = self._sockets.listen(Endpoint.parse(listen))
        except zmq.ZMQError as error:
            raise CannotListen(f"cannot listen on {listen!r}: {zmq.strerror(error.errno or 0)}") from None
        self._turns.later(SWEEP_S, self._sweep)
        return str(bound.of(keys.public if keys else ""))

    def close(self) -> None:
        """Close what answers libzmq about keys. To be called after all sockets are shut."""
        if self._zap:
            self._loop.remove_reader(self._zap.socket.fileno())
            self._zap.close()

    def first_words(self, port: Port, route: bytes, frames: list[zmq.Frame]) -> None:
        """Read the first item of an accepted connection. Without a Hello that fits, it stays a stranger."""
        accepted, host = self._source(port, frames)
        key = str(frames[-1].get("User-Id")) if self._identity.keys and frames else ""
        hello: Hello | None = None
        try:
            hello = parse_hello(frames)
            reason = self._identity.refusal(hello) or self._identity.uninvited(hello, key)
            if not route.startswith((b"c", b"b")):
                reason = "its routing id is not ours"
            if not reason and not hello.check:
                self._greeted(port, route, hello, host, accepted, key)
                return
        except VersionMismatch as error:
            reason = str(error)
        except (MalformedMessage, ConfigError) as error:
            self._refuse(accepted, host, MALFORMED, str(error))
            return
        # Answer, so that the dialer can name what does not fit: both versions, both clusters. Only if libzmq has room
        # (`forget`): a dialer that asks again and again, and reads nothing, shall fill no queue.
        answered = Conn(port, False, PeerLink(False, host), route)
        self._links.sender.say(answered, self._identity.hello())
        self._links.sender.forget(answered)
        if accepted and hello and (hello.incarnation == self._identity.incarnation or not reason):
            accepted.settled = True  # It was a check; or we dialled ourselves, and the dialer is told.
            return
        self._refuse(accepted, f"{hello.node} at {host}" if hello else host, "does not fit", reason)

    def ended(self, gone: Accepted) -> None:
        """An accepted connection is over, and all that came over it has been read."""
        if reason := self._door.ended(gone, time.monotonic()):
            self._foreign.drop(gone.host, reason)
        conn: Conn | None = gone.conn
        if conn is None:
            return
        route = conn.route or b""
        del self.conns[route]
        if conn.link.state is LinkStage.GREETING:
            self._halves.pop(route[1:], None)
        self._links.lost(conn)

    def _source(self, port: Port, frames: list[zmq.Frame]) -> tuple[Accepted | None, str]:
        """The accepted connection that an item came over, and the host at its other end."""
        try:
            fd = frames[-1].get(zmq.SRCFD)
        except (IndexError, zmq.ZMQError):  # No frame, or bytes as of a libzmq before 3.0.
            return None, "?"
        self._sockets.read_monitor(port)  # If another connection had `fd` before, its end is known then.
        ended = (gone for gone in port.lost if isinstance(gone, Accepted) and gone.fd == fd and not gone.conn)
        return self._door.by_fd.get(fd) or next(ended, None), host_of(str(frames[-1].get("Peer-Address")))

    def _greeted(
        self, port: Port, route: bytes, hello: Hello, host: str, accepted: Accepted | None, key: str
    ) -> None:
        """A dialer has said Hello on a connection. Once it has on both, the link opens."""
        address = advertised(hello.address, host, key)
        link = self._halves.setdefault(route[1:], PeerLink(False, "", key=key))
        conn = Conn(port, route.startswith(b"b"), link, route, accepted, hello)
        if conn.bulk:
            link.bulk = conn
            descriptors.bound_unsent(conn.fd)
        else:
            link.control, link.address = conn, address
        self.conns[route] = conn
        if accepted:
            accepted.conn = conn
        if not (link.control and link.bulk):
            return
        del self._halves[route[1:]]
        if link.control.hello != link.bulk.hello or link.key != key:
            self._refuse(accepted, f"{hello.node} at {host}", MALFORMED, "control and bulk are of two nodes")
            self._links.bury(link)
            return
        self._answer(link, hello)

    def _answer(self, link: PeerLink, hello: Hello) -> None:
        """Open the link of a dialer that has said the same Hello on both connections, unless it has a rival."""
        if rival := self._links.rival(hello):
            for each in link.conns():
                self._links.sender.say(each, rival, Rank.BYE)
                if each.accepted:
                    each.accepted.settled = True
            self._links.bury(link)
            return
        for each in link.conns():
            if each.accepted:
                self._door.strangers.greeted(each.accepted)
        if not all(self._links.sender.say(each, self._identity.hello()) for each in link.conns()):
            return  # The dialer has gone meanwhile: `Links.lost` has buried the link.
        link.invited = self._identity.invited(link.key)
        self._links.open(link, hello)

    def _refuse(self, accepted: Accepted | None, place: str, kind: str, reason: str) -> None:
        if accepted:
            self._door.strangers.refuse(accepted, kind, time.monotonic())
        self._foreign.drop(place, reason)

    def _turned_away(self, host: str, verdict: KeyVerdict) -> None:
        self._door.strangers.turned_away(host_of(host), verdict.value, time.monotonic())
        self._foreign.drop(host_of(host), verdict.value)

    def _sweep(self) -> None:
        if not self._turns.closed:
            self._door.sweep(time.monotonic())
            self._turns.later(SWEEP_S, self._sweep)
