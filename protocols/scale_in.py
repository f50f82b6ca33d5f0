"""Scale-in, the leaver's half (Chaos Sec. IV-B, Fig. 4b).

    STAYING --LeaveWanted--> LEAVING --the view without us, or no member goes on--> LEFT

While it is LEAVING the node goes on contributing steps of weight 0: the all-reduce that the others wait for
is also what carries the vote that lets it go. So nobody pauses, and nothing special is needed when all nodes
have finished and nobody trains any more: their last common step says so, and all leave at once.
"""

from __future__ import annotations

import enum

from .effects import Effect
from .events import Event, LeaveWanted, Tick
from .messages import EVERYONE, ScaleInRequest
from .relay import Relay

ASK_EVERY_S = 1.0  # The scheduler may have changed, or be out of reach for a moment.
PARKED_PATIENCE_S = 1.0  # With too few members left to decide anything, nobody can let us go.


class LeaverState(enum.Enum):
    STAYING = "staying"
    LEAVING = "leaving"
    LEFT = "left"


class Leaver:
    """Takes node `me` out of the cluster."""

    def __init__(self, me: str, relay: Relay) -> None:
        self.me, self.relay = me, relay
        self.state = LeaverState.STAYING
        self.wake_at_s: float | None = None
        self.asked_at_s = 0.0

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Ask to leave, and again until it has happened."""
        due = self.wake_at_s is not None and now_s >= self.wake_at_s
        match self.state, event:
            case (LeaverState.STAYING, LeaveWanted()):
                self.state, self.asked_at_s = LeaverState.LEAVING, now_s
            case (LeaverState.LEAVING, Tick()) if due:
                pass
            case _:
                return []
        self.wake_at_s = now_s + ASK_EVERY_S
        return self.relay.send(EVERYONE, ScaleInRequest(node=self.me))

    def overdue(self, now_s: float) -> bool:
        """Has it waited long enough for a cluster that is parked?"""
        return self.state is LeaverState.LEAVING and now_s >= self.asked_at_s + PARKED_PATIENCE_S

    def left(self) -> None:
        """The view without us is active."""
        self.state, self.wake_at_s = LeaverState.LEFT, None
