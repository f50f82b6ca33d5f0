"""The life of a link once both its ends have greeted: it opens, says or hears Bye, or is lost.

An end that closes a link says Bye after all that is queued, and reads on until the other end has answered with Bye:
so no connection is reset while words are still on their way. Both ends wait as long as anything moves. Then the
dialer closes the sockets, as only it can. When one connection of a link is lost, so is the other, after a moment for
its last words.
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

LINGER_S = 1.0  # A closing link is given up once nothing has moved over it for so long, Byes included.
GRACE_S = 0.1  # Time for last words: of a connection whose twin is lost, and of a socket that is closed.
# Links to one peer that open within this time may be in another order at its end; those further apart are not.
CROSSING_S = 3.0
RIVAL_S = 2.5  # The later of two nodes of one name is refused: for good, if the earlier is heard after this.
RIVALS_KEPT = 16  # Incarnations of one name.
INTRODUCTION_S = 20.0  # An invite's connection ends after this.


class Links:
    """The open links, by peer.

    Attributes:
        peers: The nodes to which there is a link, by name.
        bytes_out, bytes_in: Bytes handed to links, and received over them, since this node began; those of peers that
            are gone count, too.
    """

    def __init__(self, identity: Identity, turns: Turns, sockets: Sockets, sink: Sink) -> None:
        self.peers: dict[str, Peer] = {}
        self.bytes_out = self.bytes_in = 0
        self.sender = Sender(turns, sockets, self.lost)
        self._identity, self._turns, self._sockets, self._sink = identity, turns, sockets, sink

    def all(self) -> list[PeerLink]:
        return [link for peer in self.peers.values() for link in peer.links]

    def to(self, name: str) -> PeerLink | None:
        """A link to this peer that can be used now; None if there is none."""
        peer = self.peers.get(name)
        return peer.link() if peer else None

    def rival(self, hello: Hello) -> Bye | None:
        """The Bye to another process with the name of a connected peer; None if there is no such peer.

        It is final if the peer was heard more than RIVAL_S after that process first came. Until then the process may
        be that node, started again: the old one is silent then, and its link ends when our patience is over. (That
        takes longer than RIVAL_S if one of us was held up lately, see protocols/liveness.py.)
        """
        peer = self.peers.get(hello.node)
        if peer is None or peer.incarnation == hello.incarnation:
            return None
        first_s = peer.rivals.setdefault(hello.incarnation, time.monotonic())
        while len(peer.rivals) > RIVALS_KEPT:  # A supervisor may start it again and again.
            del peer.rivals[next(iter(peer.rivals))]
        reason = f"a node named {hello.node!r} is in the cluster already; choose another with --name"
        return Bye(reason=reason, final=peer.heard_s > first_s + RIVAL_S)

    def open(self, link: PeerLink, hello: Hello) -> None:
        """Open a link whose ends have greeted; a peer's first is reported, a redundant one closed."""
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
        """Close a link, after all that is queued. `spare`: because there is another to that peer, which goes on."""
        link.drains = spare
        for conn in link.conns():
            self.sender.bye(conn, reason[:1000], spare)
        self._finish(link, clean=True, state=LinkStage.CLOSING)
        self._linger(link, self.bury)

    def _linger(self, link: PeerLink, end: Callable[[PeerLink], None]) -> None:
        """Call `end(link)` once nothing has moved over it for LINGER_S."""
        moved = _moved(link)

        def look() -> None:
            if _moved(link) != moved:
                self._linger(link, end)
            else:
                end(link)

        link.set_timer(self._turns.later(LINGER_S, look))

    def heard_bye(self, conn: Conn, spare: bool) -> None:
        """The other end has said Bye on `conn`: answer it, and end the link once it has on both."""
        link = conn.link
        conn.said_bye, link.spare = True, spare
        if link.state is LinkStage.OPEN:
            other = link.peer.link() if spare and link.peer else None
            if other is not None:
                self.sender.move(conn, other)
            conn.queue.clear()  # After its Bye, the other end delivers only what was sent before.
            self.sender.bye(conn, "you said so")
        everything = all(each.said_bye for each in link.conns())
        if link.state is LinkStage.OPEN and everything:
            self._finish(link, clean=True)
        elif link.state is LinkStage.OPEN:
            self._linger(link, self._end)
        elif link.state is LinkStage.CLOSING and everything:
            self.bury(link)

    def outlives(self, link: PeerLink) -> None:
        """Something has come over `link`: end those to that peer that were opened long before.

        The other end sends over the first link that it can use, so those before this one are gone there. Here they
        may seem alive for as long as TCP retries, a quarter of an hour, if a router has forgotten the connection or
        the other end has a new address. What was sent over them was lost.
        """
        peer = link.peer
        if link.state is not LinkStage.OPEN or peer is None or peer.links[0] is link:
            return
        before = peer.links[: peer.links.index(link)]
        gone = [each for each in before if each.opened_s <= link.opened_s - CROSSING_S]
        for each in gone:
            each.spare = True  # So that `_finish` tells nothing: `_open_again` does, before what has come is.
            for conn in each.conns():
                conn.queue.clear()
                self.sender.bye(conn, "your other link to this node is in use")
            self._finish(each, clean=True)
        if gone:
            self._open_again(peer, clean=True)
            self._turns.deliver()

    def delivers(self, link: PeerLink) -> bool:
        """Does the sink hear what comes over this link?"""
        if link.state is LinkStage.OPEN:
            return True
        drains = link.drains and link.state is LinkStage.CLOSING and link.peer is not None
        return drains and link.peer is self.peers.get(link.peer.name if link.peer else "")

    def lost(self, conn: Conn) -> None:
        """A connection is gone, and all that came over it has been read."""
        if conn.lost:
            return
        conn.lost = True
        self.sender.forget(conn)
        link = conn.link
        if link.state is LinkStage.GREETING:  # Perhaps in the middle of our answer: it must not open then.
            self.bury(link)
        elif all(each.lost for each in link.conns()):
            self._end(link)
        elif link.state is LinkStage.OPEN:
            link.set_timer(self._turns.later(GRACE_S, self._end, link))

    def bury(self, link: PeerLink) -> None:
        """Let go of all that a link holds: nothing more is sent or read over it."""
        link.state = LinkStage.GONE
        link.set_timer(None)
        for conn in link.conns():
            lending.give_back(conn)
            if conn.route is None:
                self._sockets.shut(conn.port, 0 if conn.lost or not conn.port.connected else GRACE_S)
            elif conn.accepted and not conn.lost and not self._turns.closed:  # Its dialer is to close it.
                self._turns.later(LINGER_S, self._sockets.door.hang_up, conn.accepted)

    def _lend(self, link: PeerLink) -> None:
        """Offer memory to a peer on this machine: large payloads then go by way of that."""
        conn = link.bulk
        if conn is None or link.invited or link.of_client or self._identity.client:
            return  # Too little is sent.
        if link.dialled:
            self._sockets.read_monitor(conn.port)  # To know the descriptor, which it tells.
        if offer := lending.lend(conn):
            self.sender.say(conn, offer)

    def _report_opened(self, name: str, link: PeerLink) -> None:
        self._sink.opened(name, link.address, link.dialled, link.of_client, link.at)

    def _end(self, link: PeerLink) -> None:
        """A connection of this link was lost; by now the other one is, too, or had time to be."""
        for conn in link.conns():
            if link.state is LinkStage.OPEN:  # So that its dialer closes it, as only that can.
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
            # When this node asks again, another cluster may be where that one was.
            if self._identity.is_guest and not self.peers:
                self._identity.cluster, self._identity.is_guest = "", False
            self._turns.tell(partial(self._sink.closed, peer.name, clean))
        elif not link.spare and state is LinkStage.GONE:
            self._turns.later(GRACE_S, self._open_again, peer, clean)

    def _open_again(self, peer: Peer, clean: bool) -> None:
        """Report the end of a link to a peer to which others are left: as if it had closed and opened again.

        What was sent over the link may be lost, and the sink must know.
        """
        if self.peers.get(peer.name) is peer and not self._turns.closed:
            self._turns.tell(partial(self._sink.closed, peer.name, clean))
            self._turns.tell(partial(self._report_opened, peer.name, peer.links[0]))


def _moved(link: PeerLink) -> tuple[int, float]:
    """A value that is another once something has been sent over the link, or has come."""
    waiting = sum(len(conn.queue) for conn in link.conns())
    return waiting, link.peer.heard_s if link.peer else 0.0
