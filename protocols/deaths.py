"""A connection broke: has the process at its other end died, or only the way to it?

An exact half of the members may go on without the others only if these have died (overlay.py), so a broken tunnel,
or a router that forgot the connection, must not pass for a death. The machine of a dead process refuses
connections where the process had listened. So it is looked there at once, and only a refusal, at an address
where that peer has answered us before, is a proof; that takes a round trip. Later it would be none: until then
the peer may have gone on without us.
"""

from __future__ import annotations

from .addresses import AddressBook
from .effects import CheckReach, Effect
from .events import NotReached, Reached

PROOF_S = 0.1  # Who has not refused by then may live.


class Deaths:
    """Peers whose connections broke a moment ago."""

    def __init__(self, book: AddressBook) -> None:
        self.book = book
        self.looking: dict[str, tuple[str, float]] = {}  # Peer: the address, and until when.

    @property
    def wake_at_s(self) -> float | None:
        return min((until_s for _, until_s in self.looking.values()), default=None)

    def broke(self, peer: str, now_s: float) -> list[Effect]:
        """Look where it has answered. No effect: that is nowhere, so there can be no proof."""
        address = self.book.answered.get(peer, "")
        if not address:
            return []
        self.looking[peer] = (address, now_s + PROOF_S)
        return [CheckReach(address)]

    def opened(self, peer: str) -> None:
        """It is back."""
        self.looking.pop(peer, None)

    def handle(self, event: Reached | NotReached) -> dict[str, bool]:
        """Peers about whom that decides: has it died?"""
        found = [peer for peer, (address, _) in self.looking.items() if address == event.address]
        for peer in found:
            del self.looking[peer]
        died = isinstance(event, NotReached) and event.refused
        return dict.fromkeys(found, died)

    def overdue(self, now_s: float) -> list[str]:
        """Peers of whom nothing was heard in time: they may live."""
        found = [peer for peer, (_, until_s) in self.looking.items() if now_s >= until_s]
        for peer in found:
            del self.looking[peer]
        return found
