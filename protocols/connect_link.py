"""Connect-link, the two ends' half (Chaos Sec. IV-B, Fig. 4c, overlapped with training as in Fig. 5b).

The scheduler proposes a view with the link (PREPARE). Its ends open it while everybody trains on, and vote
for the view once it is open. The smaller id dials; the other one tries, too, if that takes long, because
either end may be the one that cannot be dialled. A link that will not open is reported, and the view replaced.
"""

from __future__ import annotations

from .addresses import AddressBook
from .effects import Dial, Effect
from .messages import EVERYONE, PrepareFailed, View, link
from .relay import Relay

OTHER_END_S = 0.5
OPEN_PATIENCE_S = 3.0


class LinkOpener:
    """Opens what the newest proposed view needs of node `me`."""

    def __init__(self, me: str, relay: Relay, book: AddressBook) -> None:
        self.me, self.relay, self.book = me, relay, book
        self.view: View | None = None
        self.started_s = 0.0
        self.dialled: set[str] = set()
        self.reasons: dict[str, str] = {}

    @property
    def wake_at_s(self) -> float | None:
        if self.view is None:
            return None
        other = self.started_s + OTHER_END_S
        return self.started_s + OPEN_PATIENCE_S if self._missing() <= self.dialled else other

    def prepare(self, view: View, now_s: float) -> list[Effect]:
        """Start opening; a view proposed before is forgotten. `ready` tells when all is open."""
        self.view, self.started_s, self.dialled, self.reasons = view, now_s, set(), {}
        return self._dial({peer for peer in self._missing() if self.me < peer})

    @property
    def ready(self) -> View | None:
        """The view that can be voted for, if all its links are open."""
        return self.view if self.view is not None and not self._missing() else None

    def done(self) -> None:
        """The view was voted for, or a newer one is active."""
        self.view = None

    def dial_failed(self, address: str, reason: str) -> None:
        """Remember why, for the report."""
        self.reasons[address] = reason

    def tick(self, now_s: float) -> list[Effect]:
        """Dial from this end, too; give up after OPEN_PATIENCE_S."""
        if self.view is None or now_s < self.started_s + OTHER_END_S:
            return []
        missing = self._missing()
        if now_s < self.started_s + OPEN_PATIENCE_S or not missing:
            return self._dial(missing - self.dialled)
        view, self.view = self.view, None
        peer = min(missing)
        member = view.find(peer)
        ways = self.book.ways_to(member) if member else ()
        reason = "; ".join(f"{way}: {self.reasons.get(way, 'no answer')}" for way in ways)
        reason = reason or "no way there is known"
        failed = PrepareFailed(key=view.key, node=self.me, link=link(self.me, peer), reason=reason)
        return self.relay.send(EVERYONE, failed)

    def _missing(self) -> set[str]:
        assert self.view is not None
        return set(self.view.neighbors(self.me)) - self.relay.peers

    def _dial(self, peers: set[str]) -> list[Effect]:
        assert self.view is not None
        self.dialled |= peers
        members = [self.view.find(peer) for peer in sorted(peers)]
        return [Dial(way) for member in members if member for way in self.book.ways_to(member)]
