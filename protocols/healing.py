"""Links of the view that went silent while both ends live: try now and then whether they carry again.

Whoever lost one looks whether the other end answers, without opening a link, and asks the scheduler for it once
it does (connect-link). Each loss of the same link doubles the wait, so a flapping link does not hold up
training again and again; so does each request that has not helped, for a link that answers and cannot be
opened would hold up all other changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .addresses import AddressBook
from .effects import CheckReach, Effect
from .messages import EVERYONE, ConnectLinkRequest, View
from .relay import Relay

FIRST_WAIT_S = 1.0
MAX_WAIT_S = 60.0
CALM_S = 300.0  # A link that was in use for so long has forgotten its losses.


@dataclass(slots=True)
class _LostLink:
    wait_s: float
    lost_at_s: float
    try_at_s: float | None  # None: it is in use again.
    requested: bool = False  # Since the last try.


class LostLinks:
    """The lost links of node `me`, which it tries again."""

    def __init__(self, me: str, relay: Relay, book: AddressBook) -> None:
        self.me, self.relay, self.book = me, relay, book
        self.by_peer: dict[str, _LostLink] = {}
        self.wake_at_s: float | None = None

    def _plan(self) -> None:
        times = (each.try_at_s for each in self.by_peer.values())
        self.wake_at_s = min((time for time in times if time is not None), default=None)

    def lost(self, peer: str, now_s: float) -> None:
        """The link to `peer` was lost, though the view has it."""
        before = self.by_peer.get(peer)
        again = before is not None and now_s - before.lost_at_s < CALM_S
        wait_s = min(2 * before.wait_s, MAX_WAIT_S) if before and again else FIRST_WAIT_S
        self.by_peer[peer] = _LostLink(wait_s, now_s, now_s + wait_s)
        self._plan()

    def entered(self, view: View) -> None:
        """Forget links that are back, and links to nodes that have gone."""
        for peer in list(self.by_peer):
            if view.find(peer) is None or view.find(self.me) is None:
                del self.by_peer[peer]
            elif peer in view.neighbors(self.me) and peer in self.relay.peers:
                self.by_peer[peer].try_at_s = None
        self._plan()

    def tick(self, view: View, now_s: float) -> list[Effect]:
        """Try the links whose time has come: does the peer answer?"""
        effects: list[Effect] = []
        for peer, link in sorted(self.by_peer.items()):
            if link.try_at_s is None or now_s < link.try_at_s:
                continue
            if link.requested:
                link.wait_s, link.requested = min(2 * link.wait_s, MAX_WAIT_S), False
            link.try_at_s = now_s + link.wait_s
            member = view.find(peer)
            effects += [CheckReach(address) for address in self.book.ways_to(member)] if member else []
        self._plan()
        return effects

    def reached(self, peer: str, view: View) -> list[Effect]:
        """`peer` answers: ask for the link again."""
        link = self.by_peer.get(peer)
        if link is None or link.try_at_s is None or link.requested or peer in view.neighbors(self.me):
            return []
        link.requested = True
        return self.relay.send(EVERYONE, ConnectLinkRequest(a=self.me, b=peer, asker=self.me, healed=True))
