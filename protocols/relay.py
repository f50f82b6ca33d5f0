"""How a routed message finds its way over the overlay, without any routing protocol.

Like a learning switch: an envelope whose way is unknown is flooded, and every envelope that passes
teaches the way back to its source. So nodes negotiate with whom they have no link to, a dead link costs
one flood, and a broadcast costs one message per link. Reports are never flooded, for every node sends one
a second: while nothing has taught the way, they take the shortest by the view, or none. Delivery is at most
once and may fail when a connection closes on the way; who waits for an answer has a deadline.
"""

from __future__ import annotations

from .effects import Effect, Transmit
from .messages import EVERYONE, MAX_NODES, Envelope, Report, Routed

SEEN_PER_SOURCE = 512  # Serials remembered: more than are under way, unless nodes are seconds late.
ONE_LIFE = 1 << 20  # Serials of one life differ by less, and lives by more: they are numbered by nanoseconds.
LIVES_KEPT = 16  # Of one name: more than can be started while an envelope is under way.
MAX_SOURCES = 2 * MAX_NODES  # One that is forgotten while its envelopes are under way could flood in circles.
_WINDOW = (1 << SEEN_PER_SOURCE) - 1


class _Seen:
    """Which serials of one source were here. Per window: the newest, and a bit for each of those below it.

    A process may be started again with its clock put back, and be told of its earlier life a moment later:
    each time its serials go on far away, while what it had sent before still floods. What is in none of the
    windows passes for new, so with one window too few, envelopes would flood in circles for ever. So would they on
    nodes that are seconds late, if what is older than all that is remembered of its life passed for new.
    """

    __slots__ = ("windows",)

    def __init__(self, serial: int) -> None:
        self.windows: list[tuple[int, int]] = [(serial, 1)]  # The last used comes first.

    def note(self, serial: int) -> bool:
        """Note a serial. Returns: False if it was here before."""
        place = self._place(serial)
        if place is None:
            self.windows = [(serial, 1), *self.windows[: LIVES_KEPT - 1]]
            return True
        newest, bits = self.windows.pop(place)
        ahead = serial - newest
        if ahead > 0:
            earlier = bits << ahead if ahead < SEEN_PER_SOURCE else 0
            self.windows.insert(0, (serial, (earlier | 1) & _WINDOW))
            return True
        is_new = self._is_new(newest, bits, serial)
        self.windows.insert(0, (newest, bits | 1 << -ahead if is_new else bits))
        return is_new

    def has(self, serial: int) -> bool:
        """Was this serial here?"""
        place = self._place(serial)
        if place is None:
            return False
        newest, bits = self.windows[place]
        return not self._is_new(newest, bits, serial)

    def _place(self, serial: int) -> int | None:
        """The window that a serial belongs to: that of its life."""
        for place, (newest, _) in enumerate(self.windows):
            if -ONE_LIFE < serial - newest < ONE_LIFE:
                return place
        return None

    @staticmethod
    def _is_new(newest: int, bits: int, serial: int) -> bool:
        behind = newest - serial
        return behind < 0 or (behind < SEEN_PER_SOURCE and not bits >> behind & 1)


class Relay:
    """Routes envelopes for node `me`. `first_serial` must exceed all of an earlier life of the same id."""

    def __init__(self, me: str, first_serial: int) -> None:
        self.me = me
        self.serial = first_serial
        self.peers: set[str] = set()
        self.leaves: set[str] = set()  # Peers that never pass anything on: clients.
        self.silent: set[str] = set()  # Peers whose links may be dead: nothing is sent by them alone.
        self.way: dict[str, str] = {}  # Source: the peer its envelopes come from.
        self.by_view = ("", "")  # The scheduler of the view, and the peer that is nearest to it.
        self.seen: dict[str, _Seen] = {}  # By source.
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

    def heard(self, peer: str) -> None:
        """Something was heard over the link to `peer`: it works."""
        self.silent.discard(peer)

    def doubt(self, peer: str) -> None:
        """Nothing was heard over the link to `peer` of late: until something is, nothing is sent over it alone."""
        self.silent.add(peer)

    def start_from(self, serial: int) -> None:
        """Number messages from `serial` on, as an earlier life of this name has got further."""
        self.serial = serial

    def takes(self, scheduler: str, via: str) -> None:
        """A view is active: `via` is the peer that is nearest to its scheduler."""
        self.by_view = (scheduler, via)

    def take_local(self) -> Routed | None:
        """The next of our messages that is for us, in the order they were sent; None: there is none."""
        return self.local.pop(0) if self.local else None

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

    def is_new(self, envelope: Envelope) -> bool:
        """Would `receive` take it for one that was not here before?"""
        seen = self.seen.get(envelope.source)
        return seen is None or not seen.has(envelope.serial)

    def _note(self, peer: str, envelope: Envelope) -> bool:
        """Learn the way back; False if the envelope was here before."""
        seen = self.seen.pop(envelope.source, None)
        if seen is not None:
            self.seen[envelope.source] = seen  # Last: who was silent longest is forgotten first.
            if not seen.note(envelope.serial):
                return False
        else:
            self.seen[envelope.source] = _Seen(envelope.serial)
            if len(self.seen) > MAX_SOURCES:
                forgotten = next(iter(self.seen))
                del self.seen[forgotten]
                self.way.pop(forgotten, None)
        self.way[envelope.source] = peer  # The first copy came the quickest way.
        return True

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert len(self.way) <= len(self.seen) <= MAX_SOURCES

    def _forward(self, envelope: Envelope, came_from: str | None) -> list[Effect]:
        if envelope.target in self.peers - self.silent:
            return [Transmit(envelope.target, envelope)]
        via = self.way.get(envelope.target)
        if via in self.peers - self.silent and via != came_from:
            return [Transmit(via, envelope)]
        if isinstance(envelope.body, Report):
            target, via = self.by_view
            usable = target == envelope.target and via in self.peers - self.silent and via != came_from
            return [Transmit(via, envelope)] if usable else []
        return [
            Transmit(peer, envelope)
            for peer in sorted(self.peers - self.leaves)
            if peer not in (came_from, envelope.source)
        ]
