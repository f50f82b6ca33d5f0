"""Links that this node opens: from the dial until the other end has answered, or did not."""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from functools import partial

import zmq

from ...protocols.addresses import is_loopback
from ...protocols.errors import ConfigError
from ...protocols.keyring import KeyVerdict
from ...protocols.messages import Hello
from ..endpoint import Endpoint, is_numeric
from .greeting import Identity
from .link import Conn, LinkStage, PeerLink, Port
from .links import Links
from .sockets import Sockets
from .turns import Sink, Turns

NOT_THERE = "it does not accept connections (refused, or no route)"
CHECK_S = 1.5  # For a `check` to connect: less than a joiner waits for its links. Greeting may take longer.
MAX_TRIED = 3  # Addresses of one name that are dialled.


def hangs(patience_s: float) -> str:
    """Why there is no link to who accepts a connection and says nothing."""
    return (
        f"it accepts connections, and no answer comes in {patience_s:g} s (it hangs, or large packets do not get "
        "through: MTU)"
    )


class Dialer:
    """Dials addresses. A `check` ends as soon as the other end has said who it is."""

    def __init__(
        self, identity: Identity, turns: Turns, sockets: Sockets, links: Links, sink: Sink, timeout_s: float
    ) -> None:
        self.timeout_s = timeout_s
        self._identity, self._turns, self._sockets = identity, turns, sockets
        self._links, self._sink = links, sink
        # By address and check, until it opens or fails.
        self._dialling: dict[tuple[str, bool], PeerLink] = {}
        self._lookups: set[asyncio.Task[None]] = set()  # asyncio keeps only weak references to tasks.

    def links(self) -> list[PeerLink]:
        """The links that are being opened."""
        return list(self._dialling.values())

    def dial(self, address: str, check: bool) -> None:
        """Open a link to `address`, or only see who is there. Does nothing if that is under way."""
        if self._turns.closed or (address, check) in self._dialling:
            return
        link = self._dialling[address, check] = PeerLink(dialled=True, address=address, check=check)
        try:
            there = self._dialable(address)
        except ConfigError as error:
            self.failed(link, str(error))
            return
        link.key, link.dialled_s = there.key, time.monotonic()
        link.set_timer(self._turns.later(self._patience_s(link), self._timed_out, link))
        if is_numeric(there.host):
            self._connect(link, there)
        else:
            lookup = asyncio.get_running_loop().create_task(self._look_up(link, there))
            self._lookups.add(lookup)
            lookup.add_done_callback(self._lookups.discard)

    async def _look_up(self, link: PeerLink, there: Endpoint) -> None:
        """Look a name up here: libzmq would do it on its one I/O thread, and all links would wait."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(
                there.host, there.port, type=socket.SOCK_STREAM
            )
        except RuntimeError as error:  # It takes a thread, and there are as many as may be.
            self.failed(link, f"its name does not resolve ({error})")
            return
        except (OSError, ValueError) as error:  # ValueError: of a name that cannot be one.
            why = (error.strerror or error) if isinstance(error, OSError) else "no host can be called so"
            self.failed(link, f"its name does not resolve ({why})")
            return
        usual = sorted(found, key=lambda each: each[0] != socket.AF_INET)  # IPv4 first, if there is one.
        hosts = list(dict.fromkeys(str(each[4][0]) for each in usual))
        if link.state is LinkStage.GREETING and not self._turns.closed:
            link.untried = [there.at(host) for host in hosts[:MAX_TRIED]]
            self._try_next(link)

    def _try_next(self, link: PeerLink) -> None:
        """Dial the next address of a name: not all may lead there from here. Each has its share of the time."""
        for conn in link.conns():  # Those to the address before.
            self._links.sender.forget(conn)
            self._sockets.shut(conn.port, 0)
        left_s = link.dialled_s + self._patience_s(link) - time.monotonic()
        link.set_timer(self._turns.later(max(left_s, 0.0) / len(link.untried), self._timed_out, link))
        self._connect(link, link.untried.pop(0))

    def _connect(self, link: PeerLink, there: Endpoint) -> None:
        """Dial `there`, whose host is an IP address."""
        link.at = str(there)
        suffix = secrets.token_bytes(12) + b"#" + self._identity.node.encode()[:64]
        try:
            link.control = self._connection(link, there, b"c" + suffix)
            link.bulk = None if link.check else self._connection(link, there, b"b" + suffix)
        except zmq.ZMQError as error:
            if link.untried:
                self._try_next(link)
            else:
                self.failed(link, str(error))
            return
        for conn in link.conns():
            self._links.sender.say(conn, self._identity.hello(link.check))

    def answered(self, conn: Conn, hello: Hello) -> None:
        """The other end has said who it is; with the first answer it has heard both our Hellos."""
        link = conn.link
        conn.hello = hello
        if link.state is not LinkStage.GREETING:
            return  # The answer over the link's other connection.
        if hello.machine != self._identity.machine and is_loopback(Endpoint.parse(link.at).host):
            link.at = ""  # There is a tunnel: it means nothing to other machines.
        if refusal := self._identity.refusal(hello):
            self.failed(link, refusal, final=True)
        elif forbidden := self._forbidden(link.key):  # It may have been revoked since we dialled.
            self.failed(link, f"it is not let in: {forbidden}")
        elif link.check:
            self._dialling.pop((link.address, True), None)
            self._links.bury(link)
            self._turns.tell(partial(self._sink.checked, link.address, hello.node, "", link.at))
        elif rival := self._links.rival(hello):
            self.failed(link, rival.reason, rival.final)
        else:
            self._dialling.pop((link.address, False), None)
            if not self._identity.cluster and hello.cluster:  # A joiner is of the cluster that it dials.
                self._identity.cluster, self._identity.is_guest = hello.cluster, True
            self._links.open(link, hello)

    def failed(self, link: PeerLink, reason: str, final: bool = False) -> None:
        """A link does not open. `final`: nor would it if it were dialled again."""
        if link.state is LinkStage.GREETING:
            self._links.bury(link)
            self._report_failure(link, reason, final)

    def lost(self, conn: Conn) -> None:
        """The connection, of a link that we dialled, is gone, and all that came over it has been read."""
        link = conn.link
        if conn not in (link.control, link.bulk):
            return  # Of an address before the one that is being tried.
        greeted = link.state is not LinkStage.GREETING
        if not greeted and link.untried and not conn.port.connected:
            self._try_next(link)
            return
        self._links.lost(conn)
        if not greeted:
            self._report_failure(link, _why_lost(conn.port))

    def give_up(self, reason: str) -> None:
        """Give up all links that are being opened."""
        for link in self.links():
            self._say_bye(link, reason)
            self.failed(link, reason)

    def _dialable(self, address: str) -> Endpoint:
        """Raises: ConfigError for an address that we cannot, or must not, dial."""
        there, keys = Endpoint.parse(address), self._identity.keys
        if not there.dialable:
            raise ConfigError(f"{address!r} cannot be dialled (expected HOST:PORT)")
        if keys and not there.key:
            raise ConfigError(
                f"{address!r} names no key, and this node has one (expected KEY@{there.place}, or --insecure)"
            )
        if there.key and not keys:
            raise ConfigError(f"{address!r} names a key, and this node has none (chaosnet keygen makes one)")
        if forbidden := self._forbidden(there.key):
            raise ConfigError(f"{address!r} is not dialled: {forbidden}")
        return there

    def _forbidden(self, key: str) -> str:
        """Why the holder of `key` may not have a link to us, by the keyring; "" if it may."""
        verdict = self._identity.verdict(key) if self._identity.keyring else KeyVerdict.MEMBER
        return "" if verdict is KeyVerdict.MEMBER else verdict.value

    def _connection(self, link: PeerLink, there: Endpoint, route: bytes) -> Conn:
        bulk = route.startswith(b"b")
        port = self._sockets.dial(there, route, bulk)
        port.conn = Conn(port, bulk, link)
        return port.conn

    def _patience_s(self, link: PeerLink) -> float:
        """How long it may take to connect."""
        return CHECK_S if link.check else self.timeout_s

    def _timed_out(self, link: PeerLink) -> None:
        patience_s = self._patience_s(link)
        if link.control and link.control.port.connected:
            patience_s = max(patience_s, self.timeout_s)  # Somebody is there, if far away.
            left_s = link.dialled_s + patience_s - time.monotonic()
            if left_s > 0:
                link.set_timer(self._turns.later(left_s, self._timed_out, link))
                return
        elif link.untried:
            self._try_next(link)
            return
        self._say_bye(link, "your answer came too late")
        connected = link.control is not None and link.control.port.connected
        self.failed(link, hangs(patience_s) if connected else f"no answer in {patience_s:g} s")

    def _say_bye(self, link: PeerLink, reason: str) -> None:
        for conn in link.conns():  # The other end may have opened the link by now.
            self._links.sender.bye(conn, reason)

    def _report_failure(self, link: PeerLink, reason: str, final: bool = False) -> None:
        self._dialling.pop((link.address, link.check), None)
        if link.check:
            self._turns.tell(partial(self._sink.checked, link.address, "", reason, ""))
        else:
            self._turns.tell(partial(self._sink.dial_failed, link.address, reason, final))


def _why_lost(port: Port) -> str:
    """Why there was no Hello over a connection that we dialled."""
    if not port.connected:
        return NOT_THERE
    hung_up = "it hung up before it said Hello (it wants to see a key, is no chaosnet node, or shuts down)"
    return port.failure or hung_up
