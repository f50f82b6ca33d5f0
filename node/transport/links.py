"""The life of a link once both its ends have greeted: it opens, says or hears Bye, or is lost.

Whoever says Bye does so after all that is queued, and reads on until it is answered: closing never resets a
connection under words still on their way. That takes as long as the link needs for them: both ends wait while
something moves. Then the dialer, who alone can, closes. When one connection of a link is
lost, so is the other, after a moment for its last words.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from ...protocols.messages import Bye, Hello
from . import lending
from .greeting import Identity
from .link import Conn, LinkStage, Peer, PeerLink
from .sender import Sender
from .sockets import Sockets
from .turns import Sink, Turns

LINGER_S = 1.0  # Of a link that ends: for so long nothing that is queued moves, and no Bye is answered.
GRACE_S = 0.1  # Time for last words: of a connection whose twin is lost, and of a socket that is closed.
# Two links to one peer that open at once may lie in another order at its end. Beyond this, the order is the same.
CROSSING_S = 3.0
RIVAL_S = 2.5  # Of two nodes of one name the later is refused; for good once the earlier is heard after this.
RIVALS_KEPT = 16
INTRODUCTION_S = 20.0  # An invite's connection ends after this.


class Links:
    """The open links, by peer.

    Attributes:
        peers: Those with a link at least, by name.
        bytes_out, bytes_in: Handed to links, and come over them, since this node began: also of peers that are gone.
    """

    def __init__(self, identity: Identity, turns: Turns, sockets: Sockets, sink: Sink) -> None:
        self.peers: dict[str, Peer] = {}
        self.bytes_out = self.bytes_in = 0
        self.sender = Sender(turns, sockets, self.lost)
        self._identity, self._turns, self._sockets, self._sink = identity, turns, sockets, sink

    def all(self) -> list[PeerLink]:
        return [link for peer in self.peers.values() for link in peer.links]

    def to(self, name: str) -> PeerLink | None:
        """One that can be used now."""
        peer = self.peers.get(name)
        return peer.link() if peer else None

    def rival(self, hello: Hello) -> Bye | None:
        """What to answer to another process of a connected peer's name: it, or the peer, must go.

        If it is that node, started again, nothing is heard of the old one any more, whose end shows once our patience
        is over: that is longer than RIVAL_S if one of us was held up lately (protocols/liveness.py).
        """
        peer = self.peers.get(hello.node)
        if peer is None or peer.incarnation == hello.incarnation:
            return None
        first_s = peer.rivals.setdefault(hello.incarnation, time.monotonic())
        while len(peer.rivals) > RIVALS_KEPT:  # A supervisor may start it anew for ever.
            del peer.rivals[next(iter(peer.rivals))]
        reason = f"a node named {hello.node!r} is in the cluster already; choose another with --name"
        return Bye(reason=reason, final=peer.heard_s > first_s + RIVAL_S)

    def open(self, link: PeerLink, hello: Hello) -> None:
        """Both ends have greeted, and nothing speaks against it."""
        assert link.state is LinkStage.GREETING, f"a link that is {link.state.value} opens once more"
        link.state, link.opened_s = LinkStage.OPEN, time.monotonic()
        link.set_timer(None)
        peer = self.peers.get(hello.node)
        if peer:
            redundant = link.dialled and any(other.dialled for other in peer.links)
            link.peer = peer
            peer.links.append(link)
            if redundant:
                self.say_bye(link, "connected already", spare=True)
            else:
                self._lend(link)
            return
        self._turns.deliver()  # Its former link's `closed` comes before this one's `opened`.
        peer = self.peers[hello.node] = link.peer = Peer(hello.node, hello.incarnation, [link])
        if link.invited:
            late = "an introduction takes no longer"
            link.set_timer(self._turns.later(INTRODUCTION_S, self.say_bye, link, late))
        self._lend(link)
        self._report_opened(peer.name, link)

    def say_bye(self, link: PeerLink, reason: str, spare: bool = False) -> None:
        link.drains = spare
        for conn in link.conns():
            self.sender.bye(conn, reason[:1000], spare)
        self._finish(link, clean=True, state=LinkStage.CLOSING)
        self._linger(link, self.bury)

    def _linger(self, link: PeerLink, end: Callable[[PeerLink], None]) -> None:
        """`end(link)` once nothing has moved for LINGER_S."""
        moved = _moved(link)

        def look() -> None:
            if _moved(link) != moved:
                self._linger(link, end)
            else:
                end(link)

        link.set_timer(self._turns.later(LINGER_S, look))

    def heard_bye(self, conn: Conn, spare: bool) -> None:
        link = conn.link
        conn.said_bye, link.spare = True, spare
        if link.state is LinkStage.OPEN:
            other = link.peer.link() if spare and link.peer else None
            if other is not None:
                self.sender.move(conn, other)
            conn.queue.clear()  # Whoever has said Bye delivers nothing any more but what was sent before.
            self.sender.bye(conn, "you said so")
        everything = all(each.said_bye for each in link.conns())
        if link.state is LinkStage.OPEN and everything:
            self._finish(link, clean=True)
        elif link.state is LinkStage.OPEN:
            self._linger(link, self._end)
        elif link.state is LinkStage.CLOSING and everything:
            self.bury(link)

    def outlives(self, link: PeerLink) -> None:
        """Its other end sends over it, as over the first that it can use: what was opened long before is gone there.

        Here it may seem alive for as long as TCP tries again, which is a quarter of an hour: where a router has
        forgotten the connection, or the other end has another address by now. What was sent over it was lost.
        """
        peer = link.peer
        if link.state is not LinkStage.OPEN or peer is None or peer.links[0] is link:
            return
        before = peer.links[: peer.links.index(link)]
        gone = [each for each in before if each.opened_s <= link.opened_s - CROSSING_S]
        for each in gone:
            each.spare = True  # What its end means is told here, before what has come.
            for conn in each.conns():
                conn.queue.clear()
                self.sender.bye(conn, "your other link to this node is in use")
            self._finish(each, clean=True)
        if gone:
            self._open_again(peer, clean=True)
            self._turns.deliver()

    def delivers(self, link: PeerLink) -> bool:
        """Is what comes over it for the sink?"""
        if link.state is LinkStage.OPEN:
            return True
        drains = link.drains and link.state is LinkStage.CLOSING and link.peer is not None
        return drains and link.peer is self.peers.get(link.peer.name if link.peer else "")

    def lost(self, conn: Conn) -> None:
        """Its connection is gone, and all that came over it has been read."""
        if conn.lost:
            return
        conn.lost = True
        self.sender.forget(conn)
        link = conn.link
        if link.state is LinkStage.GREETING:  # Also in the middle of our answer: it must not be opened then.
            self.bury(link)
        elif all(each.lost for each in link.conns()):
            self._end(link)
        elif link.state is LinkStage.OPEN:
            link.set_timer(self._turns.later(GRACE_S, self._end, link))

    def bury(self, link: PeerLink) -> None:
        """Nothing more comes of it: let go of what it holds."""
        link.state = LinkStage.GONE
        link.set_timer(None)
        for conn in link.conns():
            lending.give_back(conn)
            if conn.route is None:
                self._sockets.shut(conn.port, 0 if conn.lost or not conn.port.connected else GRACE_S)
            elif conn.accepted and not conn.lost and not self._turns.closed:  # Its dialer is to close it.
                self._turns.later(LINGER_S, self._sockets.door.hang_up, conn.accepted)

    def _lend(self, link: PeerLink) -> None:
        """Offer memory to who is on this machine: what is sent then goes by way of that."""
        conn = link.bulk
        if conn is None or link.invited or link.of_client or self._identity.client:
            return  # Little is sent.
        if link.dialled:
            self._sockets.read_monitor(conn.port)  # It tells the descriptor, and may not have been read yet.
        if offer := lending.lend(conn):
            self.sender.say(conn, offer)

    def _report_opened(self, name: str, link: PeerLink) -> None:
        self._sink.opened(name, link.address, link.dialled, link.of_client, link.at)

    def _end(self, link: PeerLink) -> None:
        """A connection of this link was lost; by now the other one is, too, or had time to be."""
        for conn in link.conns():
            if link.state is LinkStage.OPEN:  # To be rid of it: only its dialer can close it.
                self.sender.bye(conn, "the other connection of this link is gone")
        self._finish(link, clean=bool(link.control and link.control.said_bye))

    def _finish(self, link: PeerLink, clean: bool, state: LinkStage = LinkStage.GONE) -> None:
        """Nothing more is sent or delivered over `link`; report if it was its peer's last."""
        was_open = link.state is LinkStage.OPEN
        if state is LinkStage.GONE:
            self.bury(link)
        else:
            link.state = state
        peer = link.peer
        if not was_open or peer is None:
            return
        peer.links.remove(link)
        if not peer.links:
            del self.peers[peer.name]
            # Its members may be gone, and others be there instead.
            if self._identity.is_guest and not self.peers:
                self._identity.cluster, self._identity.is_guest = "", False
            self._turns.tell(partial(self._sink.closed, peer.name, clean))
        elif not link.spare and state is LinkStage.GONE:
            self._turns.later(GRACE_S, self._open_again, peer, clean)

    def _open_again(self, peer: Peer, clean: bool) -> None:
        """A link has ended, and others to that peer are left: its other end may have opened them since.

        They may have been heard of before the end was. What was lost with that never comes, so it is reported.
        """
        if self.peers.get(peer.name) is peer and not self._turns.closed:
            self._turns.tell(partial(self._sink.closed, peer.name, clean))
            self._turns.tell(partial(self._report_opened, peer.name, peer.links[0]))


def _moved(link: PeerLink) -> tuple[int, float]:
    """What differs if something has been sent, or has come, since."""
    waiting = sum(len(conn.queue) for conn in link.conns())
    return waiting, link.peer.heard_s if link.peer else 0.0
