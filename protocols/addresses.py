"""Where peers can be dialled.

A node names one address for each network that it is in, and which of them leads to it depends on who dials. So
all are tried at once, and the one that answered is kept. Nothing is ever looked up by a host's name but what a
person has typed.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection, Mapping

from .effects import CheckReach, Effect, Transmit
from .events import NotReached, Reached
from .messages import Addresses, DialBack, DialBackReply, Member

MAX_HEARD_OF = 256  # The newest.


class AddressBook:
    """`given`: what the user says of certain peers (id: address, "" for no way); nothing else is tried then."""

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        self.given = dict(given or {})
        self.answered: dict[str, str] = {}  # Peer: where it answered last.
        self._at: dict[str, str] = {}  # Peer: that in numbers.
        self.heard_of: tuple[str, ...] = ()  # Where nodes of the cluster's name say that they are.

    def reached(self, peer: str, address: str, at: str) -> None:
        """`peer` answers there. `at`: see `PeerOpened`."""
        self.answered[peer], self._at[peer] = address, at

    def is_its_own(self, peer: str, named: Addresses) -> bool:
        """Does `peer` itself listen where it answered, and not a tunnel or a relay that may end without it?

        `named`: where it says that it listens.
        """
        place = _place(self._at.get(peer, ""))
        return bool(place) and (is_loopback(place.rpartition(":")[0]) or place in map(_place, named))

    def ways_to(self, member: Member) -> tuple[str, ...]:
        """Addresses to try, the likeliest first."""
        return self.ways(member.id, member.addresses)

    def ways(self, peer: str, addresses: Addresses) -> tuple[str, ...]:
        """As `ways_to`, of a peer that is no member yet."""
        if peer in self.given:
            return tuple(filter(None, (self.given[peer],)))
        return tuple(dict.fromkeys(filter(None, (self.answered.get(peer, ""), *addresses))))

    def hear_of(self, addresses: Addresses) -> None:
        """Nodes that may be in the cluster, or on the way into it, say that they are there."""
        self.heard_of = tuple(dict.fromkeys((*addresses, *self.heard_of)))[:MAX_HEARD_OF]

    def keep(self, *peers: Collection[str]) -> None:
        """Forget the others: their processes have gone, and another of the same name may live elsewhere."""
        for peer in [peer for peer in self.answered if not any(peer in some for some in peers)]:
            del self.answered[peer], self._at[peer]


class DialBacks:
    """A joiner asks whether others can reach it at the addresses that it names: try, and answer."""

    def __init__(self, book: AddressBook) -> None:
        self.book = book
        self.waiting: dict[str, dict[str, str]] = {}  # Asker: address, and why it failed ("": not known yet).

    def asked(self, peer: str, message: DialBack) -> list[Effect]:
        """Try all at once; who asks again before it is answered adds nothing, so it cannot make us scan ports."""
        if peer in self.waiting:
            return []
        addresses = self.book.ways(peer, message.addresses)
        if not addresses:
            return [Transmit(peer, DialBackReply(reached="", reason="no way there is known"))]
        self.waiting[peer] = dict.fromkeys(addresses, "")
        return [CheckReach(address) for address in addresses]

    def handle(self, event: Reached | NotReached, silent: Collection[str] = ()) -> list[Effect]:
        """One of the tries has ended. `silent`: peers of whom nothing is heard over the open link, either.

        That such a one cannot be dialled says nothing, so nothing is answered: it would pass for one that can
        only dial for as long as it lives.
        """
        effects: list[Effect] = []
        for asker, tries in list(self.waiting.items()):
            if event.address not in tries:
                continue
            if isinstance(event, Reached) and event.peer == asker:
                effects += self._answer(asker, event.address, "")
                continue
            other = f"{event.peer} answers there" if isinstance(event, Reached) else ""
            tries[event.address] = other or getattr(event, "reason", "")
            if all(tries.values()) and asker in silent:
                del self.waiting[asker]
            elif all(tries.values()):
                reasons = "; ".join(f"{address}: {reason}" for address, reason in tries.items())
                effects += self._answer(asker, "", reasons[:2000])
        return effects

    def closed(self, peer: str) -> None:
        """Nobody waits for the answer any more."""
        self.waiting.pop(peer, None)

    def _answer(self, asker: str, reached: str, reason: str) -> list[Effect]:
        del self.waiting[asker]
        return [Transmit(asker, DialBackReply(reached=reached, reason=reason))]


def _place(address: str) -> str:
    """Without the key."""
    return address.rpartition("@")[2]


def is_loopback(host: str) -> bool:
    """Is it a machine's address of itself, in numbers?"""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False
