"""Links to peers over ZeroMQ that open, carry control messages and bulk bytes, and close.

A node binds one ROUTER. A link is a pair of connections, control and bulk, each a DEALER of whoever dialled
to the ROUTER of the other: a transfer fills its own connection and never delays a decision. An item on
either is

    ["", Hello or Bye]      the transport's own words; and Lend, Mapped
    [body]                  control
    [header]                bulk without payload
    [header, payload]       bulk
    ["", Laid]              bulk, and where its payload lies in memory that two processes of one machine share

and the first on each, both ways, is a Hello. The acceptor answers once it has heard both, and reports the
link. The dialer reports it at the first answer, which says that both were heard (ZMTP's own handshake tried
the way back), so that nothing else can reach it before.

The parts, each of which knows only those above it:

    sockets.py      libzmq's sockets and what their monitors tell; link.py: what is kept of each connection
    turns.py        when ports are read and when the sink is told
    greeting.py     who we are, and whose Hello fits
    sender.py       queues of what is to be sent; lending.py: large payloads by way of memory
    links.py        the life of a link from its opening on
    dialer.py       links that we open, until they are open; acceptor.py: those that others open
    receiver.py     what comes, and who of these hears it
"""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from typing import Any

from ...protocols.errors import LocalProtocolError
from ...protocols.keyring import Keyring, KeyVerdict
from ..keys import KeyPair
from . import descriptors
from .acceptor import Acceptor
from .dialer import Dialer
from .foreign import Foreign
from .greeting import Identity, new_incarnation
from .link import Conn, LinkStage
from .links import GRACE_S, LINGER_S, Links
from .outgoing import Rank, size_of
from .receiver import Receiver
from .sockets import MAX_FRAME_BYTES, Sockets
from .turns import Sink, Turns


class Transport:
    """The links of one node. Methods never block and never call the sink; what they cause it hears later.

    Args:
        node: This node's name, unique in the cluster.
        listen: "HOST:PORT" to bind, port 0 for any free one; "" to only dial (clients, nodes behind NAT).
        sink: Is told all that happens.
        client: True for one that looks and is no member, e.g. `chaosnet status`.
        dial_timeout_s: From `dial` until `dial_failed` when nobody answers.
        keys: Ours. With them every connection, either way, is encrypted and proves both ends' keys; without,
            none is.
        keyring: Whose keys may connect, and may be dialled; needed with `listen`. None: who dials decides.
    """

    def __init__(
        self,
        node: str,
        listen: str,
        sink: Sink,
        *,
        client: bool = False,
        dial_timeout_s: float = 3.0,
        keys: KeyPair | None = None,
        keyring: Keyring | None = None,
    ) -> None:
        assert not (keys and listen) or keyring, "who listens must know whom to let in"
        self._listen = listen
        self.identity = us = Identity(node, client, keys, keyring)
        self.turns = turns = Turns()
        self.sockets = sockets = Sockets(turns.wake, keys)
        self.foreign = foreign = Foreign(turns, sink)
        self.links = links = Links(us, turns, sockets, sink)
        self.dialer = dialer = Dialer(us, turns, sockets, links, sink, dial_timeout_s)
        self.acceptor = acceptor = Acceptor(us, turns, sockets, links, foreign)
        self.receiver = Receiver(turns, sockets, links, dialer, acceptor, foreign, sink)

    @property
    def cluster(self) -> str:
        return self.identity.cluster

    @property
    def keys(self) -> KeyPair | None:
        return self.identity.keys

    @property
    def address(self) -> str:
        """After `start`: the "HOST:PORT" bound, or "KEY@HOST:PORT"; "" without `listen`."""
        return self.identity.address

    async def start(self) -> None:
        """Bind, and serve on the running loop. Raises ConfigError if `listen` cannot be bound."""
        self.turns.start(self.receiver.serve)
        self.sockets.start()
        if self._listen:
            self.identity.address = self.acceptor.listen(self._listen)

    def dial(self, address: str) -> None:
        """Open a link to whoever listens at `address`: `opened` or `dial_failed` follows.

        A dial of an address that is being dialled adds nothing. One that ends at a peer already connected
        reports nothing, for `opened` was: it is kept if that peer dialled us, else hung up again.
        """
        self.dialer.dial(address, check=False)

    def check(self, address: str) -> None:
        """See who listens at `address`, without a link to it: `checked` follows."""
        self.dialer.dial(address, check=True)

    def enforce_keys(self) -> None:
        """Say Bye to all whose keys are not allowed any more, and hang up on who does not go."""
        for link in self.links.all() if self.identity.keyring else []:
            if not link.invited and self.identity.verdict(link.key) is not KeyVerdict.MEMBER:
                self.links.say_bye(link, "your key is not allowed any more")

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
        rank: Rank = Rank.STATE,
        turn: tuple[int, int] = (0, 0),
        tag: Any = None,
    ) -> bool:
        """Queue bulk bytes, contiguous or a payload that came in; False if there is no link.

        What has a lower `rank` is sent first, then what has a lower `turn`; else in order. `tag`: for `forget_bulk`.
        `payload` is sent from where it lies: keep it unchanged until the receiver says that it has it. Nothing here
        bounds the queue, the credits of the protocols do: a bound of ours could only block the loop or drop.
        """
        assert header, "an empty header is the transport's own mark"
        return self._send(peer, True, header, payload, rank, tag, turn)

    def forget_bulk(self, is_void: Callable[[Any], bool], peers: Collection[str] | None = None) -> int:
        """Take back what has a tag that is void, unless libzmq has it already. Returns: how many items.

        `peers`: of what was to be sent to these; None: to anybody.
        """
        found = [peer for peer in self.links.peers.values() if peers is None or peer.name in peers]
        links = [link for peer in found for link in peer.links]
        return sum(link.bulk.queue.forget(is_void) for link in links if link.bulk)

    def carried(self) -> dict[str, tuple[int, float]]:
        """By peer: bytes of bulk that its link has taken while more waited, and for how many seconds more did.

        Since the connection in use was opened. What a link carries while it is never idle is its rate.
        """
        return {name: bulk.queue.carried for name, bulk in self._bulks()}

    def acknowledged(self) -> dict[str, tuple[int, float]]:
        """By peer: bytes of bulk that have arrived, and for how many seconds any were on their way.

        As `carried` since the connection was opened, and of those connections of which the kernel counts it.
        """
        told = {name: descriptors.acknowledged(bulk.fd) for name, bulk in self._bulks()}
        return {name: each for name, each in told.items() if each}

    def _bulks(self) -> Iterator[tuple[str, Conn]]:
        links = ((name, peer.link()) for name, peer in self.links.peers.items())
        return ((name, link.bulk) for name, link in links if link and link.bulk)

    @property
    def moved_bytes(self) -> tuple[int, int]:
        """Bytes that this node has sent over all its links, and received, since it began."""
        return self.links.bytes_out, self.links.bytes_in

    def bound_unsent(self, peer: str, rate_bps: float) -> None:
        """Let the kernel hold few unsent bytes for that peer. `rate_bps`: what its link carries, bits/s."""
        link = self.links.to(peer)
        if link and link.bulk:
            descriptors.bound_unsent(link.bulk.fd, rate_bps)

    def shares_memory(self, peer: str) -> bool:
        """Do large payloads go to that peer by way of memory?"""
        link = self.links.to(peer)
        return bool(link and link.bulk and link.bulk.lent and link.bulk.lent.is_mapped)

    def close_peer(self, peer: str, reason: str) -> None:
        """Say Bye to `peer` after all that is queued; `closed` follows at once, the sockets' end later."""
        if found := self.links.peers.get(peer):
            for link in list(found.links):
                self.links.say_bye(link, reason)

    def hang_up(self, reason: str) -> Callable[[], bool]:
        """Say Bye to all peers. Returns: a call that tells whether all have answered, or fallen silent (links.py).

        To be asked before `close`: TCP takes back what was sent last if its sender closes with something unread.
        """
        links = self.links.all()
        for name in list(self.links.peers):
            self.close_peer(name, reason)
        return lambda: all(link.state is LinkStage.GONE for link in links)

    def restart(self, reason: str) -> None:
        """Go on at the same address as a later process of this node would: without links, unknown to its peers.

        Nothing more is heard of what was before, not even that it has closed.
        """
        self.hang_up(reason)
        self.dialer.give_up(reason)
        self.turns.forget()
        self.identity.incarnation = new_incarnation()

    def belongs(self) -> None:
        """This node is a member of the cluster that it has dialled: no other will do from now on."""
        self.identity.is_guest = False

    def found(self) -> None:
        """Name a cluster. Who greeted us when we were in none must do so again: it may be in another by now."""
        self.identity.cluster, self.identity.is_guest = secrets.token_hex(4), False
        reason = "it has founded a cluster, and wants to be greeted anew"
        for peer in list(self.links.peers.values()):
            if not any(link.of_client for link in peer.links):
                self.close_peer(peer.name, reason)
        self.dialer.give_up(reason)

    def close(self, linger_s: float = LINGER_S) -> None:
        """Bye to all, then close; blocks until what is queued has gone, at most `linger_s`."""
        if self.turns.closed:
            return
        self.turns.closed = True
        # The other end of a link that we are dialling may have opened it already.
        for link in [*self.links.all(), *self.dialer.links()]:
            link.set_timer(None)
            for conn in link.conns():
                self.links.sender.bye(conn, "this node closes")
        self.turns.forget()
        until_s = time.monotonic() + linger_s
        self.links.sender.flush_all(until_s)
        linger_s = max(0.0, until_s - time.monotonic())
        for port in list(self.sockets.open):
            self.sockets.shut(port, linger_s)
        self.acceptor.close()
        self.sockets.term(linger_s + GRACE_S)

    @property
    def waiting(self) -> int:
        """Items that are queued, for all peers. May be asked on any thread."""
        return sum(len(conn.queue) for port in [*self.sockets.open] for conn in [*port.blocked])

    @property
    def refused(self) -> Counter[str]:
        """How many connections were refused, by reason."""
        return self.sockets.door.strangers.refused

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
        peer = self.links.peers.get(name)
        if peer is None or self.turns.closed:
            return False
        size = 0 if payload is None else size_of(payload)
        if max(len(first), size) > MAX_FRAME_BYTES:
            raise LocalProtocolError(f"a frame of {max(len(first), size)} bytes (at most {MAX_FRAME_BYTES})")
        while link := peer.link():
            conn = link.bulk if bulk else link.control
            assert conn is not None
            if self.links.sender.put(conn, first, payload, rank, tag, turn):
                self.links.bytes_out += len(first) + size
                return True
        return False
