"""Links to peers over ZeroMQ that open, carry control messages and bulk bytes, and close.

A node binds one ROUTER. A link is a pair of connections, control and bulk, each a DEALER of whoever dialled
to the ROUTER of the other: a transfer fills its own connection and never delays a decision. An item on
either is

    ["", Hello or Bye]      the transport's own words
    [body]                  control
    [header]                bulk without payload
    [header, payload]       bulk

and the first on each, both ways, is a Hello. The acceptor answers once it has heard both, and reports the
link. The dialer reports it at the first answer, which says that both were heard (ZMTP's own handshake tried
the way back), so that nothing else can reach it before.

What is to be sent waits in a queue of ours, one per connection (outgoing.py), until libzmq has room for it; libzmq is
asked again when it says so, and every few milliseconds. Whoever says Bye does so after all that is queued, and
reads on until it is answered: closing never resets a connection under words still on their way. Then the dialer,
who alone can, closes.

A monitor and its socket (sockets.py) are two queues: a disconnection is acted upon only when the socket has been
read empty after it, so what a dead peer sent is delivered first.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections import Counter, deque
from collections.abc import Callable, Collection
from functools import partial
from typing import Any, Protocol

import zmq

from ..protocols.codec import decode, encode
from ..protocols.errors import ConfigError, LocalProtocolError, MalformedMessage, VersionMismatch
from ..protocols.events import ITSELF
from ..protocols.keyring import Keyring, Verdict
from ..protocols.messages import Bye, Hello
from . import clock, curve, descriptors
from .curve import MALFORMED
from .endpoint import Endpoint
from .keys import KeyPair
from .link import (
    MAX_FRAMES,
    Conn,
    Link,
    Peer,
    Port,
    State,
    advertised,
    guest_name,
    introduces,
    parse_hello,
    receive,
    where,
)
from .local import host_of
from .outgoing import Item, Rank, size_of
from .sockets import HANDSHAKE_FAILED, MAX_FRAME_BYTES, Sockets, monitored
from .strangers import Accepted, Door

READS_PER_TURN = 256  # Of one socket, before the others and the loop get their turn.
RETRY_S = 0.005  # A word of libzmq's that there is room can be lost on another call to it; then this helps.
BULK_TURN_S = 0.002  # Time the sink may spend on bulk in one turn; control waits at most this and one item.
CHECK_S = 1.5  # From `check` until nobody has answered; less than a joiner waits for its links.
LINGER_S = 1.0  # Time for what is queued to leave, and for our Bye to be answered.
GRACE_S = 0.1  # Time for last words: of a connection whose twin is lost, and of a socket that is closed.
RIVAL_S = 2.5  # Of two nodes of one name the later is refused; for good once the earlier has outlived this.
INTRODUCTION_S = 20.0  # An invite's connection ends after this.
SWEEP_S = 1.0
FOREIGN_PLACES = 64  # Places that foreign frames are counted for one by one.
_OURS = b""  # First frame of the transport's own words; bodies and headers are never empty.


class Sink(Protocol):
    """Who hears what happens; always on the loop's thread, never from inside a call to the transport."""

    def opened(self, peer: str, address: str, dialled: bool, client: bool) -> None:
        """A first link to `peer` is up. `address`: the one we dialled, else the one it names ("" if none)."""

    def closed(self, peer: str, clean: bool) -> None:
        """The last link to `peer` is gone. `clean`: one of us said Bye; else its process or the path died."""

    def dial_failed(self, address: str, reason: str, final: bool) -> None: ...

    def checked(self, address: str, peer: str, reason: str) -> None:
        """A `check` has ended: `peer` answers there, or "" does, for this reason."""

    def control(self, peer: str, body: bytes) -> None: ...

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | None) -> None:
        """`payload.buffer` is writable and belongs to the receiver."""

    def foreign(self, where: str, reason: str) -> None:
        """Something malformed or not ours was dropped, and counted in `stats()`."""


class Transport:
    """The links of one node. Methods never block and never call the sink; what they cause it hears later.

    Args:
        node: This node's name, unique in the cluster.
        listen: "HOST:PORT" to bind, port 0 for any free one; "" to only dial (clients, nodes behind NAT).
        sink: Hears everything.
        cluster: Name of the cluster; "" until known. Nodes of two named clusters refuse each other.
        client: True for one that looks and is no member, e.g. `chaosnet status`.
        dial_timeout_s: From `dial` until `dial_failed` when nobody answers.
        keys: Ours. With them every connection, either way, is encrypted and proves both ends' keys; without,
            none is.
        keyring: Whose keys may connect, and may be dialled; needed with `listen`. None: who dials decides.

    After `start`, `address` is the "HOST:PORT" bound, or "KEY@HOST:PORT" ("" without `listen`).
    """

    def __init__(
        self,
        node: str,
        listen: str,
        sink: Sink,
        *,
        cluster: str = "",
        client: bool = False,
        dial_timeout_s: float = 3.0,
        keys: KeyPair | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        assert not (keys and listen) or keyring, "who listens must know whom to let in"
        self.node = node
        self.incarnation = secrets.token_hex(8)  # Tells a restarted process from the one before it.
        self.cluster = cluster
        self.client = client
        self.address = ""
        self.dial_timeout_s = dial_timeout_s
        self._listen = listen
        self._sink = sink
        self._peers: dict[str, Peer] = {}
        self._dialling: dict[tuple[str, bool], Link] = {}  # By address and check, until it opens or fails.
        self._sockets = Sockets(self._wake)
        self._ready: set[Port] = set()  # To be read in the next turn.
        self._conns: dict[bytes, Conn] = {}  # Accepted ones, by route.
        self._halves: dict[bytes, Link] = {}  # Accepted links that still greet, by the routes' common part.
        self.keys, self._keyring = keys, keyring
        self._door = Door(keyed=keys is not None)
        self._zap: curve.Zap | None = None
        self._inbox: deque[Callable[[], None]] = deque()  # Calls to the sink; bulk is bounded by credits.
        self._foreign: Counter[str] = Counter()
        self._turn_is_due = self._retry_is_due = False
        self._closed = False

    async def start(self) -> None:
        """Bind, and serve on the running loop. Raises ConfigError if `listen` cannot be bound."""
        self._loop = asyncio.get_running_loop()
        self._sockets.start()
        if self._listen:
            self._bind()
            self._loop.call_later(SWEEP_S, self._sweep)

    def dial(self, address: str) -> None:
        """Open a link to whoever listens at `address`: `opened` or `dial_failed` follows.

        A dial of an address that is being dialled adds nothing. One that ends at a peer already connected
        reports nothing, for `opened` was: it is kept if that peer dialled us, else hung up again.
        """
        self._dial(address, check=False)

    def check(self, address: str) -> None:
        """See who listens at `address`, without a link to it: `checked` follows."""
        self._dial(address, check=True)

    def _dial(self, address: str, check: bool) -> None:
        if self._closed or (address, check) in self._dialling:
            return
        link = self._dialling[address, check] = Link(dialled=True, address=address, check=check)
        try:
            there = self._dialable(address)
            link.key = there.key
            suffix = secrets.token_bytes(12) + b"#" + self.node.encode()[:64]
            link.control = self._connect(link, there, b"c" + suffix)
            link.bulk = None if check else self._connect(link, there, b"b" + suffix)
        except (ConfigError, zmq.ZMQError) as error:
            self._dial_failed(link, str(error))
            return
        patience_s = CHECK_S if check else self.dial_timeout_s
        link.set_timer(self._loop.call_later(patience_s, self._dial_timed_out, link))
        for conn in link.conns():
            self._put(conn, _OURS, self._hello(check))

    def _dialable(self, address: str) -> Endpoint:
        """Raises: ConfigError for an address that we cannot, or must not, dial."""
        there = Endpoint.parse(address)
        if not there.dialable:
            raise ConfigError(f"{address!r} cannot be dialled (expected HOST:PORT)")
        if self.keys and not there.key:
            raise ConfigError(
                f"{address!r} names no key, and this node has one (expected KEY@{there.place}, or --insecure)"
            )
        if there.key and not self.keys:
            raise ConfigError(f"{address!r} names a key, and this node has none (chaosnet keygen makes one)")
        if self._keyring and (verdict := self._verdict(there.key)) is not Verdict.MEMBER:
            raise ConfigError(f"{address!r} is not dialled: {verdict.value}")
        return there

    def _verdict(self, key: str) -> Verdict:
        assert self._keyring
        return self._keyring.verdict(key, clock.now_s())

    def enforce_keys(self) -> None:
        """Say Bye to all whose keys are not allowed any more, and hang up on who does not go."""
        for peer in list(self._peers.values()) if self._keyring else []:
            for link in list(peer.links):
                if not link.invited and self._verdict(link.key) is not Verdict.MEMBER:
                    self._say_bye(link, "your key is not allowed any more")

    def send(self, peer: str, body: bytes) -> bool:
        """Queue a control message; False if there is no link. In order, without loss while the link lives."""
        assert body, "an empty body is not a message"
        return self._send(peer, False, body)

    def send_bulk(
        self,
        peer: str,
        header: bytes,
        payload: Any = None,
        *,
        copy: bool = False,
        rank: Rank = Rank.STATE,
        turn: tuple[int, int] = (0, 0),
        tag: Any = None,
    ) -> bool:
        """Queue bulk bytes, contiguous or a `zmq.Frame` that came in; False if there is no link.

        What has a lower `rank` is sent first, then what has a lower `turn`; else in order. `tag`: for `forget_bulk`.
        Unless `copy`, `payload` is sent from where it lies: keep it unchanged until the receiver says that
        it has it. Nothing here bounds the queue, the credits of the protocols do: a bound of ours could only
        block the loop or drop.
        """
        assert header, "an empty header is the transport's own mark"
        if copy and payload is not None and not isinstance(payload, bytes):
            payload = payload.bytes if isinstance(payload, zmq.Frame) else memoryview(payload).tobytes()
        return self._send(peer, True, header, payload, rank, tag, turn)

    def forget_bulk(self, is_void: Callable[[Any], bool], peers: Collection[str] | None = None) -> int:
        """Take back what has a tag that is void, unless libzmq has it already. Returns: how many items.

        `peers`: of what was to be sent to these; None: to anybody.
        """
        found = [peer for peer in self._peers.values() if peers is None or peer.name in peers]
        links = [link for peer in found for link in peer.links]
        return sum(link.bulk.queue.forget(is_void) for link in links if link.bulk)

    def carried(self) -> dict[str, tuple[int, float]]:
        """By peer: bytes of bulk that its link has taken while more waited, and for how many seconds more did.

        Since the connection in use was opened. What a link carries while it is never idle is its rate.
        """
        links = {name: peer.link() for name, peer in self._peers.items()}
        return {name: link.bulk.queue.carried for name, link in links.items() if link and link.bulk}

    def bound_unsent(self, peer: str, rate_bps: float) -> None:
        """Let the kernel hold no more for that peer than suits what its link carries."""
        link = self._peers[peer].link() if peer in self._peers else None
        if link and link.bulk:
            descriptors.bound_unsent(link.bulk.fd, rate_bps)

    def close_peer(self, peer: str, reason: str) -> None:
        """Say Bye to `peer` after all that is queued; `closed` follows at once, the sockets' end later."""
        if found := self._peers.get(peer):
            for link in list(found.links):
                self._say_bye(link, reason)

    def hang_up(self, reason: str) -> Callable[[], bool]:
        """Say Bye to all peers. Returns: what tells whether all have answered by now, or had `LINGER_S` to.

        To be asked before `close`: TCP takes back what was sent last if its sender closes with something unread.
        """
        links = [link for peer in self._peers.values() for link in peer.links]
        for name in list(self._peers):
            self.close_peer(name, reason)
        return lambda: all(link.state is State.GONE for link in links)

    def restart(self, reason: str) -> None:
        """Go on at the same address as a later process of this node would: without links, unknown to its peers.

        Nothing more is heard of what was before, not even that it has closed.
        """
        for name in list(self._peers):
            self.close_peer(name, reason)
        for link in list(self._dialling.values()):
            for conn in link.conns():  # It may have opened the link by now.
                self._bye(conn, reason)
            self._dial_failed(link, reason)
        self._inbox.clear()
        self.incarnation = secrets.token_hex(8)

    def found(self) -> None:
        """Name a cluster. Who greeted us when we were in none must do so again: it may be in another by now."""
        self.cluster = secrets.token_hex(4)
        reason = "it has founded a cluster, and wants to be greeted anew"
        for peer in list(self._peers.values()):
            if not any(conn.hello.client for link in peer.links for conn in link.conns() if conn.hello):
                self.close_peer(peer.name, reason)
        for link in list(self._dialling.values()):
            for conn in link.conns():
                self._bye(conn, reason)
            self._dial_failed(link, reason)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Bye to all, then close; blocks until what is queued has gone, at most `linger_s`."""
        if self._closed:
            return
        self._closed = True
        links = [link for peer in self._peers.values() for link in peer.links]
        for link in [*links, *self._dialling.values()]:  # Who is dialled may have opened the link already.
            link.set_timer(None)
            for conn in link.conns():
                self._bye(conn, "this node closes")
        self._inbox.clear()
        until_s = time.monotonic() + linger_s
        self._flush_all(until_s)
        linger_s = max(0.0, until_s - time.monotonic())
        for port in list(self._sockets.open):
            self._sockets.shut(port, linger_s)
        if self._zap:
            self._loop.remove_reader(self._zap.socket.fileno())
            self._zap.close()
        self._sockets.term(linger_s + GRACE_S)

    def stats(self) -> dict[str, Any]:
        """Counters since the start; a peer's are those since `opened`."""
        return {
            "address": self.address,
            "peers": {
                name: {
                    "links": len(peer.links),
                    "messages_in": peer.messages_in,
                    "messages_out": peer.messages_out,
                    "bytes_in": peer.bytes_in,
                    "bytes_out": peer.bytes_out,
                    "queued": peer.queued,
                    "unsent": sum(len(conn.queue) for link in peer.links for conn in link.conns()),
                }
                for name, peer in sorted(self._peers.items())
            },
            "dialling": sorted(address for address, _ in self._dialling),
            "foreign": self._foreign.total(),
            "foreign_by_place": dict(self._foreign),
            "refused": dict(self.refused),
        }

    @property
    def refused(self) -> Counter[str]:
        """Connections that never became a peer's, by reason."""
        return self._door.strangers.refused

    # --- sockets ---------------------------------------------------------------------------------

    def _bind(self) -> None:
        if self.keys:
            assert self._keyring
            self._zap = curve.Zap(self._sockets.context, self._keyring, self._turned_away)
            self._loop.add_reader(self._zap.socket.fileno(), self._zap.read)
        try:
            bound = self._sockets.listen(Endpoint.parse(self._listen), self.keys)
        except zmq.ZMQError as error:
            raise ConfigError(f"cannot listen on {self._listen!r}: {error}") from None
        self.address = str(bound.of(self.keys.public if self.keys else ""))

    def _connect(self, link: Link, there: Endpoint, route: bytes) -> Conn:
        bulk = route.startswith(b"b")
        port = self._sockets.dial(there, self.keys, route, bulk)
        port.conn = Conn(port, bulk, link)
        return port.conn

    # --- sending ---------------------------------------------------------------------------------

    def _send(
        self,
        name: str,
        bulk: bool,
        first: bytes,
        payload: Any = None,
        rank: Rank = Rank.STATE,
        tag: Any = None,
        turn: tuple[int, int] = (0, 0),
    ) -> bool:
        peer = self._peers.get(name)
        if peer is None or self._closed:
            return False
        size = 0 if payload is None else size_of(payload)
        if max(len(first), size) > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {max(len(first), size)} bytes (at most {MAX_FRAME_BYTES})")
        while link := peer.link():
            conn = link.bulk if bulk else link.control
            assert conn is not None
            if self._put(conn, first, payload, rank, tag, turn):
                peer.messages_out += 1
                peer.bytes_out += len(first) + size
                return True
        return False

    def _put(
        self,
        conn: Conn,
        first: bytes,
        second: Any = None,
        rank: Rank = Rank.STATE,
        tag: Any = None,
        turn: tuple[int, int] = (0, 0),
    ) -> bool:
        """Queue one item on a connection; False if that turns out to be gone."""
        if conn.lost or conn.port not in self._sockets.open:
            return False
        conn.queue.push(rank, first, second, tag, turn)
        self._drain(conn)
        # Sending may take the wake-up that a received message, or room for others, had left in the descriptor.
        if conn.port in self._sockets.open and (conn.port.blocked or conn.port.readable()):
            self._wake(conn.port)
        return not conn.lost

    def _bye(self, conn: Conn, reason: str, spare: bool = False) -> None:
        self._put(conn, _OURS, encode(Bye(reason=reason, spare=spare)), Rank.BYE)

    def _drain(self, conn: Conn) -> bool:
        """Give libzmq what is queued, as far as it takes it. Returns: did it take any?"""
        queue, before = conn.queue, len(conn.queue)
        try:
            while queue:
                self._hand_over(conn, queue.next())
                queue.taken(clock.now_s())
        except zmq.Again:  # Of the first frame: libzmq takes all of an item, or nothing.
            queue.refused(clock.now_s())
            conn.port.blocked[conn] = None
            self._retry_soon()
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self._read_monitor(conn.port)  # It knows why, and has perhaps not been read yet.
            self._wake(conn.port)  # To act upon that.
            self._lost(conn)
        else:
            conn.port.blocked.pop(conn, None)
        return len(queue) < before

    def _hand_over(self, conn: Conn, item: Item) -> None:
        socket, more = conn.port.socket, zmq.NOBLOCK | zmq.SNDMORE
        if conn.route is not None:
            socket.send(conn.route, more)
        if item.second is None:
            socket.send(item.first, zmq.NOBLOCK)
        else:
            socket.send(item.first, more)
            socket.send(item.second, zmq.NOBLOCK, copy=False)

    def _flush(self, port: Port) -> None:
        """Go on with the queues of a port that libzmq had no room for."""
        if not port.blocked or port not in self._sockets.open:
            return  # Nothing waits, or what was heard over it has ended it.
        port.readable()  # Or libzmq would look for room only now and then.
        sent = [self._drain(conn) for conn in list(port.blocked)]
        if any(sent) or port.readable():
            self._wake(port)

    def _flush_all(self, until_s: float) -> None:
        """Of `close`: blocks until libzmq has all that is queued."""
        while time.monotonic() < until_s:
            poller = zmq.Poller()
            for port in (blocked := [port for port in self._sockets.open if port.blocked]):
                poller.register(port.socket.fileno(), zmq.POLLIN)
            if not blocked:
                return
            poller.poll(round(1000 * RETRY_S))
            for port in blocked:
                self._flush(port)

    def _retry_soon(self) -> None:
        if not self._retry_is_due and not self._closed:
            self._retry_is_due = True
            self._loop.call_later(RETRY_S, self._retry)

    def _retry(self) -> None:
        self._retry_is_due = False
        for port in self._sockets.open:
            if port.blocked:
                self._wake(port)

    def _forget(self, conn: Conn) -> None:
        """Nothing more is sent over it."""
        conn.queue.clear()
        conn.port.blocked.pop(conn, None)

    def _hello(self, check: bool = False) -> bytes:
        return encode(
            Hello(
                node=self.node,
                address=self.address,
                incarnation=self.incarnation,
                cluster=self.cluster,
                client=self.client,
                check=check,
            )
        )

    # --- turns of the loop -----------------------------------------------------------------------

    def _wake(self, port: Port | None = None) -> None:
        if port in self._sockets.open:
            self._ready.add(port)
        if not self._turn_is_due and not self._closed:
            self._turn_is_due = True
            self._loop.call_soon(self._turn)

    def _tell(self, call: Callable[[], None]) -> None:
        self._inbox.append(call)
        self._wake()

    def _turn(self) -> None:
        """Read what is ready, control first; then let the sink take bulk for a while."""
        self._turn_is_due = False
        try:
            self._ready &= self._sockets.open
            for port in sorted(self._ready, key=lambda port: port.rank):
                if port in self._sockets.open:  # Serving another may have shut it.
                    self._serve(port)
                    self._flush(port)
            self._deliver(time.monotonic() + BULK_TURN_S)  # The loop's own time may stand still.
        finally:  # Also when the sink raised: the descriptors say nothing twice.
            if self._ready & self._sockets.open or self._inbox:
                self._wake()

    def _deliver(self, until_s: float = float("inf")) -> None:
        while self._inbox:
            self._inbox.popleft()()
            if time.monotonic() >= until_s:
                return

    def _serve(self, port: Port) -> None:
        """Read the monitor, then the socket until it is empty, then act upon what the monitor said."""
        self._read_monitor(port)
        for _ in range(READS_PER_TURN):
            frames = receive(port.socket)
            if frames is None:
                break
            self._received(port, frames)
            if port not in self._sockets.open:
                return
        else:
            return  # Still ready.
        self._ready.discard(port)
        lost, port.lost = port.lost, []
        for gone in lost:
            if isinstance(gone, Conn):
                self._lost(gone)
                continue
            if reason := self._door.ended(gone, time.monotonic()):
                self._drop(gone.host, reason)
            if gone.conn:
                del self._conns[gone.conn.route or b""]
                self._lost(gone.conn)

    def _read_monitor(self, port: Port) -> None:
        for event, value in monitored(port):
            if port.conn is None:
                if gone := self._door.event(event, value, time.monotonic()):
                    port.lost.append(gone)
            elif event == zmq.EVENT_CONNECTED:
                port.connected, port.fd = True, value
                if port.conn.bulk:
                    descriptors.bound_unsent(value)
            elif event & HANDSHAKE_FAILED:
                port.failure = curve.why_dial_failed(event, value, self.keys is not None)
            else:  # Closed, to be retried (in an hour) or disconnected: it is over.
                port.fd = -1
                port.lost.append(port.conn)

    def _sweep(self) -> None:
        if not self._closed:
            self._door.sweep(time.monotonic())
            self._loop.call_later(SWEEP_S, self._sweep)

    def _turned_away(self, host: str, verdict: Verdict) -> None:
        self._door.strangers.turned_away(host_of(host), verdict.value, time.monotonic())
        self._drop(host_of(host), verdict.value)

    # --- receiving -------------------------------------------------------------------------------

    def _received(self, port: Port, frames: list[zmq.Frame]) -> None:
        conn = port.conn
        if conn is None:
            route = frames.pop(0).bytes
            conn = self._conns.get(route)
            if conn is None:
                self._first_words(port, route, frames)
                return
        if not 1 <= len(frames) <= MAX_FRAMES:
            self._drop(where(conn), f"an item of {len(frames)} frames or more (at most {MAX_FRAMES})")
            return
        first = frames[0].bytes
        second = frames[1] if len(frames) > 1 else None
        if first == _OURS:
            self._own_words(conn, second)
        elif conn.link.state is State.GREETING:
            self._drop(where(conn), "the first item is no Hello")
        elif second is not None and not conn.bulk:
            self._drop(where(conn), "a control message of two frames")
        elif conn.link.state is State.OPEN and (peer := conn.link.peer):
            peer.messages_in += 1
            peer.bytes_in += len(first) + (0 if second is None else len(second))
            if conn.link.invited and not introduces(conn, first):
                self._drop(where(conn), "an invite's holder said more than an introduction")
            elif conn.bulk:
                peer.queued += 1
                self._tell(partial(self._give_bulk, peer, first, second))
            else:
                self._sink.control(peer.name, first)

    def _give_bulk(self, peer: Peer, header: bytes, payload: zmq.Frame | None) -> None:
        peer.queued -= 1
        self._sink.bulk(peer.name, header, payload)

    def _first_words(self, port: Port, route: bytes, frames: list[zmq.Frame]) -> None:
        """Of an accepted connection: a Hello, or it stays a stranger."""
        accepted, host = self._source(port, frames)
        key = str(frames[-1].get("User-Id")) if self.keys and frames else ""
        hello: Hello | None = None
        try:
            hello = parse_hello(frames)
            reason = self._refusal(hello) or self._uninvited(hello, key)
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
        # Answer, so that the dialer can name what does not fit: both versions, both clusters. If there is room: who
        # asks without end and reads nothing fills no queue.
        answered = Conn(port, False, Link(False, host), route)
        self._put(answered, _OURS, self._hello())
        self._forget(answered)
        if accepted and hello and (hello.incarnation == self.incarnation or not reason):
            accepted.settled = True  # We dialled ourselves, and hear of it there; or it was a check.
            return
        self._refuse(accepted, f"{hello.node} at {host}" if hello else host, "does not fit", reason)

    def _source(self, port: Port, frames: list[zmq.Frame]) -> tuple[Accepted | None, str]:
        """The accepted connection that an item came over, and the host at its other end."""
        try:
            fd = frames[-1].get(zmq.SRCFD)
        except (IndexError, zmq.ZMQError):  # No frame; bytes that pass for those of a libzmq from before 3.0.
            return None, "?"
        self._read_monitor(port)  # If another connection had `fd` before, then its end is in there.
        ended = (gone for gone in port.lost if isinstance(gone, Accepted) and gone.fd == fd and not gone.conn)
        return self._door.by_fd.get(fd) or next(ended, None), host_of(str(frames[-1].get("Peer-Address")))

    def _uninvited(self, hello: Hello, key: str) -> str:
        """Who comes by an invite must say so, in a name that nobody else has."""
        if not key or self._verdict(key) is Verdict.MEMBER:
            return ""
        fits = hello.client and hello.node == guest_name(key)
        return "" if fits else "an invite's holder can only introduce itself"

    def _greeted(
        self, port: Port, route: bytes, hello: Hello, host: str, accepted: Accepted | None, key: str
    ) -> None:
        """A dialer said Hello on one connection; with both, the link is open."""
        address = advertised(hello.address, host, key)
        link = self._halves.setdefault(route[1:], Link(False, "", key=key))
        conn = Conn(port, route.startswith(b"b"), link, route, accepted, hello)
        if conn.bulk:
            link.bulk = conn
            descriptors.bound_unsent(conn.fd)
        else:
            link.control, link.address = conn, address
        self._conns[route] = conn
        if accepted:
            accepted.conn = conn
        if not (link.control and link.bulk):
            return
        del self._halves[route[1:]]
        if link.control.hello != link.bulk.hello or link.key != key:
            self._refuse(accepted, f"{hello.node} at {host}", MALFORMED, "control and bulk are of two nodes")
            self._bury(link)
            return
        if rival := self._rival(hello):
            for each in link.conns():
                self._put(each, _OURS, encode(rival), Rank.BYE)
                if each.accepted:
                    each.accepted.settled = True
            self._bury(link)
            return
        for each in link.conns():
            if each.accepted:
                self._door.strangers.greeted(each.accepted)
            self._put(each, _OURS, self._hello())
        link.invited = bool(key) and self._verdict(key) is not Verdict.MEMBER
        self._open(link, hello)

    def _own_words(self, conn: Conn, frame: zmq.Frame | None) -> None:
        link = conn.link
        try:
            message = decode(frame.buffer if frame else b"")
        except (MalformedMessage, VersionMismatch) as error:
            if link.dialled and link.state is State.GREETING:
                self._dial_failed(link, str(error), final=isinstance(error, VersionMismatch))
            else:
                self._drop(where(conn), str(error))
            return
        match message:
            case Hello() if link.dialled and not conn.hello:
                conn.hello = message
                if link.state is not State.GREETING:
                    return  # The second answer.
                if refusal := self._refusal(message):
                    self._dial_failed(link, refusal, final=True)
                elif link.check:
                    self._dialling.pop((link.address, True), None)
                    self._bury(link)
                    self._tell(partial(self._sink.checked, link.address, message.node, ""))
                elif rival := self._rival(message):
                    self._dial_failed(link, rival.reason, rival.final)
                else:
                    self._open(link, message)
            case Bye() if link.dialled and link.state is State.GREETING:
                self._dial_failed(link, f"it hung up: {message.reason}", message.final)
            case Bye():
                self._heard_bye(conn, message.spare)
            case _:
                self._drop(where(conn), f"{type(message).__name__} is no word of the transport's here")

    def _refusal(self, hello: Hello) -> str:
        """Why the two of us cannot have a link; both ends find the same, "" for nothing."""
        if hello.incarnation == self.incarnation:
            return ITSELF
        if hello.node == self.node:
            return f"another node is called {self.node!r} too"
        if hello.cluster and self.cluster and hello.cluster != self.cluster:
            return f"it belongs to cluster {hello.cluster!r}, this node to {self.cluster!r}"
        return ""

    def _rival(self, hello: Hello) -> Bye | None:
        """What to answer to another process of a connected peer's name: it, or the peer, must go.

        If it is that node, started again, the end of the old one shows within the peer's patience.
        """
        peer = self._peers.get(hello.node)
        if peer is None or peer.incarnation == hello.incarnation:
            return None
        now_s = time.monotonic()
        first_s = peer.rivals.setdefault(hello.incarnation, now_s)
        reason = f"a node named {hello.node!r} is in the cluster already; choose another with --name"
        return Bye(reason=reason, final=now_s > first_s + RIVAL_S)

    # --- life of a link --------------------------------------------------------------------------

    def _open(self, link: Link, hello: Hello) -> None:
        link.state = State.OPEN
        link.set_timer(None)
        if link.dialled:
            self._dialling.pop((link.address, False), None)
            self.cluster = self.cluster or hello.cluster  # Whom a joiner dials, it belongs to.
        peer = self._peers.get(hello.node)
        if peer:
            redundant = link.dialled and any(other.dialled for other in peer.links)
            link.peer = peer
            peer.links.append(link)
            if redundant:
                self._say_bye(link, "connected already", spare=True)
            return
        self._deliver()  # Its former link's `closed` comes before this one's `opened`.
        peer = self._peers[hello.node] = link.peer = Peer(hello.node, hello.incarnation, [link])
        if link.invited:
            late = "an introduction takes no longer"
            link.set_timer(self._loop.call_later(INTRODUCTION_S, self._say_bye, link, late))
        self._report_opened(peer.name, link)

    def _report_opened(self, name: str, link: Link) -> None:
        client = any(conn.hello.client for conn in link.conns() if conn.hello)
        self._sink.opened(name, link.address, link.dialled, client)

    def _dial_timed_out(self, link: Link) -> None:
        for conn in link.conns():  # It may have opened the link by now.
            self._bye(conn, "your answer came too late")
        self._dial_failed(link, f"no answer in {CHECK_S if link.check else self.dial_timeout_s:g} s")

    def _dial_failed(self, link: Link, reason: str, final: bool = False) -> None:
        if link.state is not State.GREETING:
            return
        self._dialling.pop((link.address, link.check), None)
        self._bury(link)
        if link.check:
            self._tell(partial(self._sink.checked, link.address, "", reason))
        else:
            self._tell(partial(self._sink.dial_failed, link.address, reason, final))

    def _say_bye(self, link: Link, reason: str, spare: bool = False) -> None:
        for conn in link.conns():
            self._bye(conn, reason[:1000], spare)
        self._finish(link, clean=True, state=State.CLOSING)
        link.set_timer(self._loop.call_later(LINGER_S, self._bury, link))

    def _heard_bye(self, conn: Conn, spare: bool) -> None:
        link = conn.link
        conn.said_bye, link.spare = True, spare
        if link.state is State.OPEN:
            conn.queue.clear()  # Whoever has said Bye delivers nothing any more.
            self._bye(conn, "you said so")
        everything = all(each.said_bye for each in link.conns())
        if link.state is State.OPEN and everything:
            self._finish(link, clean=True)
        elif link.state is State.OPEN:
            link.set_timer(self._loop.call_later(LINGER_S, self._end, link))
        elif link.state is State.CLOSING and everything:
            self._bury(link)

    def _lost(self, conn: Conn) -> None:
        """Its connection is gone, and all that came over it has been read."""
        if conn.lost:
            return
        conn.lost = True
        self._forget(conn)
        link = conn.link
        if link.state is State.GREETING:
            if link.dialled:
                self._dial_failed(link, _why_lost(conn.port))
            else:
                self._halves.pop((conn.route or b"")[1:], None)
                self._bury(link)
        elif all(each.lost for each in link.conns()):
            self._end(link)
        elif link.state is State.OPEN:
            link.set_timer(self._loop.call_later(GRACE_S, self._end, link))

    def _end(self, link: Link) -> None:
        """A connection of this link was lost; by now the other one is, too, or had time to be."""
        for conn in link.conns():
            if link.state is State.OPEN:  # To be rid of it: only its dialer can close it.
                self._bye(conn, "the other connection of this link is gone")
        self._finish(link, clean=bool(link.control and link.control.said_bye))

    def _finish(self, link: Link, clean: bool, state: State = State.GONE) -> None:
        """Nothing more is sent or delivered over `link`; report if it was its peer's last."""
        was_open = link.state is State.OPEN
        if state is State.GONE:
            self._bury(link)
        else:
            link.state = state
        peer = link.peer
        if not was_open or peer is None:
            return
        peer.links.remove(link)
        if not peer.links:
            del self._peers[peer.name]
            self._tell(partial(self._sink.closed, peer.name, clean))
        elif not link.spare and state is State.GONE:
            self._loop.call_later(GRACE_S, self._open_again, peer, clean)

    def _open_again(self, peer: Peer, clean: bool) -> None:
        """A link has ended, and others to that peer are left: its other end may have opened them since.

        They may have been heard of before the end was. What was lost with that never comes, so it is reported.
        """
        if self._peers.get(peer.name) is peer and not self._closed:
            self._tell(partial(self._sink.closed, peer.name, clean))
            self._tell(partial(self._report_opened, peer.name, peer.links[0]))

    def _bury(self, link: Link) -> None:
        link.state = State.GONE
        link.set_timer(None)
        for conn in link.conns():
            if conn.route is None:
                self._sockets.shut(conn.port, 0 if conn.lost or not conn.port.connected else GRACE_S)
            elif conn.accepted and not conn.lost and not self._closed:  # Its dialer is to close it.
                self._loop.call_later(LINGER_S, self._door.hang_up, conn.accepted)

    def _refuse(self, accepted: Accepted | None, place: str, kind: str, reason: str) -> None:
        if accepted:
            self._door.strangers.refuse(accepted, kind, time.monotonic())
        self._drop(place, reason)

    def _drop(self, place: str, reason: str) -> None:
        if place not in self._foreign and len(self._foreign) >= FOREIGN_PLACES:
            place = "elsewhere"
        self._foreign[place] += 1
        self._tell(partial(self._sink.foreign, place, reason))


def _why_lost(port: Port) -> str:
    """Why there was no Hello over a connection that we dialled."""
    if not port.connected:
        return "it does not accept connections (refused, no route, or no such host)"
    hung_up = "it hung up before it said Hello (it wants to see a key, is no chaosnet node, or shuts down)"
    return port.failure or hung_up
