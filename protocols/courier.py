"""Tensors on their way from one holder of layers to the next, hop by hop where no link joins the two.

    training thread --TensorMade--> PassOn --> ... --> HandOver --> training thread of the target

A tensor belongs to the view that it was computed in. What belongs to a later one waits until this node acts in that,
too; what belongs to an earlier one is void, as its step is done over. Nothing is acknowledged: a link that is lost on
the way tears the step (StepSync.depends_on), and then all of its tensors are computed anew.
"""

from __future__ import annotations

from typing import Any

from .effects import Effect, FellBehind, HandOver, PassOn
from .errors import RemoteProtocolError
from .events import Event, Received, TensorMade
from .messages import Tensor, View, ViewKey

# Of a view that this node does not act in yet: what is beyond is sent again in the next attempt.
MOST_EARLY = 4096


class Courier:
    """Passes tensors on at node `me`."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.view: View | None = None
        self.early: list[tuple[str, Tensor, Any]] = []  # With the neighbour that each came from.
        self._hops: dict[str, str] = {}  # By target: the neighbour that is next on a shortest way there.

    @property
    def key(self) -> ViewKey:
        """The key of the view in which this node acts."""
        return self.view.key if self.view else (0, 0)

    def enter(self, view: View) -> list[Effect]:
        """This node acts in `view` from now on."""
        if self.view is None or self.view.links != view.links or self.view.members != view.members:
            self._hops = first_hops(view, self.me)
        self.view = view
        early, self.early = self.early, []
        return [
            effect for peer, message, payload in early for effect in self._forward(peer, message, payload)
        ]

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """Send a tensor of this node's, or pass on or hand over one that has come."""
        assert isinstance(event, TensorMade | Received) and isinstance(event.message, Tensor)
        peer = event.peer if isinstance(event, Received) else self.me
        return self._forward(peer, event.message, event.payload)

    def _forward(self, peer: str, message: Tensor, payload: Any) -> list[Effect]:
        if message.key < self.key:
            return []  # Of a step that was done over: normal after a flush.
        if message.key > self.key:
            if len(self.early) >= MOST_EARLY:
                return [FellBehind(peer)]  # It is lost, so the step has to begin anew.
            self.early.append((peer, message, payload))
            return []
        if message.target == self.me:
            return [HandOver(message, payload)]
        hop = self._hops.get(message.target)
        if hop is None:
            raise RemoteProtocolError(f"{self.me}: no way to {message.target!r} in view {self.key}")
        return [PassOn(hop, message, payload)]

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert all(message.key > self.key for _, message, _ in self.early)
        assert self.me not in self._hops


def first_hops(view: View, me: str) -> dict[str, str]:
    """By member: the neighbour of `me` that is first on a shortest way there through members.

    Of several as short the one whose name comes first. With each hop the way gets shorter, so there is no circle.
    """
    hops = {peer: peer for peer in view.neighbors(me) if peer in view.member_set}
    edge = list(hops)
    for node in edge:
        for beyond in view.neighbors(node):
            if beyond != me and beyond in view.member_set and beyond not in hops:
                hops[beyond] = hops[node]
                edge.append(beyond)
    return hops
