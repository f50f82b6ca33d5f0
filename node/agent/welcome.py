"""What a node does for those who join: it tells them that there is a cluster, and serves them the state.

The scheduler plans; any member knows that there is a cluster; any node may know of earlier lives. A source's
half of the replication is protocols/serving.py.
"""

from __future__ import annotations

from ...protocols.asking import HERE, JoinState
from ...protocols.effects import Effect, StateWhole
from ...protocols.events import ManifestKnown, Received, SnapshotReady
from ...protocols.messages import (
    Answer,
    Have,
    ManifestRequest,
    ReplicationDone,
    ScaleOutReady,
    ScaleOutRequest,
    ShardRequest,
)
from .joining import Joining
from .node import Node, Phase
from .parking import Parking
from .routes import Routes, all_to


class Welcome:
    """Answers joiners, and serves them the state."""

    def __init__(self, node: Node, joining: Joining, parking: Parking) -> None:
        self.node, self.joining, self.parking = node, joining, parking

    def routes(self) -> Routes:
        return Routes(
            events={SnapshotReady: self.on_ready, ManifestKnown: self.on_ready},
            messages={
                Have: self.on_have,
                **all_to(self.on_asked, ManifestRequest, ShardRequest, ReplicationDone),
            },
            routed={ScaleOutRequest: self.on_newcomer, ScaleOutReady: self.on_unheard},
            effects={StateWhole: self.on_state_whole},
        )

    def on_newcomer(self, event: Received, now_s: float) -> list[Effect]:
        """A joiner asks to be let in."""
        node, request = self.node, event.message
        assert isinstance(request, ScaleOutRequest)
        if node.sync.view is None:
            return self.joining.hear(event, now_s)  # It may found the cluster that we look for.
        if node.overlay.lives.is_outlived(request.node, request.life):
            return node.reporter.tell_outlived(request.node, request.life)
        here: list[Effect] = []
        if node.parked and node.phase is Phase.MEMBER:
            text = f"it waits: {self.parking.why(now_s)}"[:2000]
            here = node.relay.send(request.node, Answer(ok=False, text=text))
        elif request.founds or (request.unanswered and self._is_near(request)):
            here = self._say_here(request.node)
        return here + (node.scheduler.receive(event.peer, request, now_s) if node.scheduler else [])

    def on_unheard(self, event: Received, now_s: float) -> list[Effect]:
        """A joiner says once more that it has the state, as nobody has answered: tell it that the cluster goes on.

        If this node copied for it, and all wait for that, its word that it has all has been lost with their link.
        """
        told = event.message
        assert isinstance(told, ScaleOutReady)
        if not told.unanswered:
            return []
        here = self._say_here(told.node) if told.node in self.node.relay.peers else []
        return self.node.serving.drop(told.node) + here

    def _is_near(self, request: ScaleOutRequest) -> bool:
        """Is it for us to answer? Only if the joiner has a link to us, or to no member at all."""
        node, view = self.node, self.node.sync.view
        return request.node in node.relay.peers or view is None or view.member_set.isdisjoint(request.linked)

    def _say_here(self, joiner: str) -> list[Effect]:
        """Tell a joiner that there is a cluster, as the scheduler may not hear of it for long.

        Not while we wait ourselves.
        """
        node = self.node
        goes_on = node.phase is Phase.MEMBER and not node.parked
        return node.relay.send(joiner, Answer(ok=True, text=HERE)) if goes_on else []

    def on_asked(self, event: Received, now_s: float) -> list[Effect]:
        """A joiner asks for a part of the state, or says that it has all of it."""
        return self.node.serving.asked(event, self.node.sync.step)

    def on_have(self, event: Received, now_s: float) -> list[Effect]:
        """A fellow tells which pieces it has. While we fetch, they are pieces to pull; else it is one to serve."""
        joiner = self.node.joiner
        fetches = joiner is not None and joiner.state is JoinState.FETCHING
        return self.joining.hear(event, now_s) if fetches else self.on_asked(event, now_s)

    def on_ready(self, event: SnapshotReady | ManifestKnown, now_s: float) -> list[Effect]:
        """The state can be served: its copy is made, or the layout of what arrives here is known."""
        return self.node.serving.ready(event.step)

    def on_state_whole(self, effect: StateWhole, now_s: float) -> list[Effect]:
        """All of the state that this joiner pulls is here."""
        self.node.serving.arrived(effect.step)
        return []

    def answer_early(self) -> list[Effect]:
        """Answer what joiners have asked about a step before this node had come to it."""
        return self.node.serving.asked_early(self.node.sync.step)
