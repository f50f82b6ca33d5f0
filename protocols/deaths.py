"""A connection broke: has the process at its other end died, or only the way to it?

An exact half of the members may go on without the others only if these have died (overlay.py), so a broken tunnel,
or a router that forgot the connection, must not pass for a death. The machine of a dead process refuses
connections where the process had listened. So it is looked there at once, and only a refusal, at an address
where that peer has answered us before, is a proof; that takes a round trip. Later it would be none: until then
the peer may have gone on without us. So it may have before the connection opened: the death of one that has not
said in which view it acts, as all do first, proves nothing, either.
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
        self.looking: dict[str, tuple[str, float, int]] = {}  # Peer: the address, until when, and its life.
        # Peers that have said, over the open connection, in which view they act, and in which life they live.
        self.placed: dict[str, int] = {}

    @property
    def wake_at_s(self) -> float | None:
        return min((until_s for _, until_s, _ in self.looking.values()), default=None)

    def closed(self, peer: str, broke: bool, now_s: float) -> list[Effect]:
        """If its connection broke, look where it has answered. No effect: there can be no proof."""
        address, life = self.book.answered.get(peer, ""), self.placed.pop(peer, None)
        if not broke or not address or life is None:
            return []
        self.looking[peer] = (address, now_s + PROOF_S, life)
        return [CheckReach(address)]

    def opened(self, peer: str) -> None:
        """It is back."""
        self.looking.pop(peer, None)

    def said_where(self, peer: str, life: int) -> None:
        """It has told us by itself of a link, and so of the view that it acts in."""
        self.placed[peer] = life

    def handle(self, event: Reached | NotReached) -> dict[str, int | None]:
        """Peers about whom that decides: the life that has died; None if it may not have."""
        found: dict[str, int | None] = {
            peer: life for peer, (address, _, life) in self.looking.items() if address == event.address
        }
        for peer in found:
            del self.looking[peer]
        died = isinstance(event, NotReached) and event.refused
        return found if died else dict.fromkeys(found)

    def overdue(self, now_s: float) -> list[str]:
        """Peers of whom nothing was heard in time: they may live."""
        found = [peer for peer, (_, until_s, _) in self.looking.items() if now_s >= until_s]
        for peer in found:
            del self.looking[peer]
        return found
