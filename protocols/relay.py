"""How a routed message finds its way over the overlay, without any routing protocol.

Like a learning switch: an envelope whose way is unknown is flooded, and every envelope that passes
teaches the way back to its source. So nodes negotiate with whom they have no link to, a dead link costs
one flood, and a broadcast costs one message per link. Delivery is at most once and may fail when a
connection closes on the way; who waits for an answer has a deadline.
"""

from __future__ import annotations

from .effects import Effect, Transmit
from .messages import EVERYONE, Envelope, Routed

SEEN_PER_SOURCE = 512  # Serials remembered; far more than are ever under way from one source.
MAX_SOURCES = 4096


class Relay:
    """Routes envelopes for node `me`. `first_serial` must exceed all of an earlier life of the same id."""

    def __init__(self, me: str, first_serial: int) -> None:
        self.me = me
        self.serial = first_serial
        self.peers: set[str] = set()
        self.leaves: set[str] = set()  # Peers that never pass anything on: clients.
        self.silent: set[str] = set()  # Peers whose links may be dead: nothing is sent by them alone.
        self.way: dict[str, str] = {}  # Source: the peer its envelopes come from.
        self.seen: dict[str, dict[int, None]] = {}  # Source: serials in order of arrival.
        self.local: list[Routed] = []  # Sent by us to us (EVERYONE includes us), to be taken by the owner.

    def opened(self, peer: str, client: bool) -> None:
        """A connection can be used."""
        self.peers.add(peer)
        if client:
            self.leaves.add(peer)

    def closed(self, peer: str) -> None:
        """A connection is gone; ways through it are unlearned, so the next message floods."""
        self.peers.discard(peer)
        self.leaves.discard(peer)
        self.silent.discard(peer)
        self.way = {source: via for source, via in self.way.items() if via != peer}

    def send(self, target: str, body: Routed) -> list[Effect]:
        """Put `body` on its way to `target`; EVERYONE, we included, floods."""
        if target in (self.me, EVERYONE):
            self.local.append(body)
        if target == self.me:
            return []
        self.serial += 1
        envelope = Envelope(source=self.me, target=target, serial=self.serial, body=body)
        return self._forward(envelope, came_from=None)

    def around(self, target: str, body: Routed) -> list[Effect]:
        """Put `body` on its way to `target` over every link but the one that leads straight to it."""
        self.serial += 1
        envelope = Envelope(source=self.me, target=target, serial=self.serial, body=body)
        return [Transmit(peer, envelope) for peer in sorted(self.peers - self.leaves - {target})]

    def receive(self, peer: str, envelope: Envelope) -> tuple[bool, list[Effect]]:
        """Whether `envelope` is for us and new, and what to pass on."""
        if envelope.source == self.me or not self._note(peer, envelope):
            return False, []
        if envelope.target == self.me:
            return True, []
        return envelope.target == EVERYONE, self._forward(envelope, came_from=peer)

    def _note(self, peer: str, envelope: Envelope) -> bool:
        """Learn the way back; False if the envelope was here before."""
        serials = self.seen.pop(envelope.source, {})
        self.seen[envelope.source] = serials  # Last: who was silent longest is forgotten first.
        if envelope.serial in serials:
            return False
        if len(self.seen) > MAX_SOURCES:
            forgotten = next(iter(self.seen))
            del self.seen[forgotten]
            self.way.pop(forgotten, None)
        serials[envelope.serial] = None
        if len(serials) > SEEN_PER_SOURCE:
            serials.pop(next(iter(serials)))
        self.way[envelope.source] = peer  # The first copy came the quickest way.
        return True

    def _forward(self, envelope: Envelope, came_from: str | None) -> list[Effect]:
        if envelope.target in self.peers - self.silent:
            return [Transmit(envelope.target, envelope)]
        via = self.way.get(envelope.target)
        if via in self.peers - self.silent and via != came_from:
            return [Transmit(via, envelope)]
        return [
            Transmit(peer, envelope)
            for peer in sorted(self.peers - self.leaves)
            if peer not in (came_from, envelope.source)
        ]
