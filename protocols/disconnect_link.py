"""Disconnect-link, the two ends' half (Chaos Sec. IV-B, Fig. 4d).

The link is no longer in the view that was switched to, but its other end may still finish the last step of
the old view over it. So it is closed one step later: whoever contributes to a step has completed the one
before it.
"""

from __future__ import annotations

from collections.abc import Set

from .effects import ClosePeer, Effect
from .messages import View


class LinkCloser:
    """Closes what node `me` needs no more."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.retiring: set[str] = set()

    def switched(self, before: View | None, view: View, reborn: Set[str] = frozenset()) -> None:
        """A new view is active: note which neighbours are none any more.

        `reborn`: names whose open connection is that of a later process, which is about to join.
        """
        if before is not None:
            self.retiring |= set(before.neighbors(self.me)) - reborn
        self.retiring -= set(view.neighbors(self.me))

    def settled(self, open_peers: set[str], wanted: Set[str]) -> list[Effect]:
        """A step was completed in the view: nothing of the old one is under way any more.

        `wanted`: neighbours in views that we have voted for, or are about to.
        """
        closing = (self.retiring & open_peers) - wanted
        self.retiring &= wanted
        return [ClosePeer(peer, "the link was disconnected") for peer in sorted(closing)]
