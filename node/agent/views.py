"""From one view to the next: a node prepares, votes and switches; or stops, and goes on in what is installed.

    PREPARE --links open--> vote --all have voted--> the view is entered with a step (protocols/step_sync.py)
    FLUSH --everybody has stopped--> INSTALL --> the view is entered at once (protocols/flush.py)
    ReplicationPlan --> a joiner listens in its first view

Whatever follows from a view is brought up to date when it is entered.
"""

from __future__ import annotations

from ...protocols.effects import Effect, Parked, ViewEntered
from ...protocols.events import PeerOpened, Received
from ...protocols.messages import Flush, Install, Prepare, ReplicationPlan, View, ViewChange
from ...protocols.view_change import applied
from .joining import Joining
from .missing import Missing
from .neighbors import Neighbors
from .node import Node, Phase
from .recovery import StepRecovery
from .role import Role
from .routes import Routes


class Views:
    """Takes a node from one view to the next."""

    def __init__(
        self, node: Node, role: Role, recovery: StepRecovery, joining: Joining, neighbors: Neighbors, missing: Missing
    ) -> None:  # fmt: skip
        self.node, self.role, self.recovery = node, role, recovery
        self.joining, self.neighbors, self.missing = joining, neighbors, missing
        self.entered: View | None = None  # The newest that was acted in.
        self.early: ViewChange | None = None  # Told to a joiner against the view of a plan to come.

    def routes(self) -> Routes:
        return Routes(
            events={PeerOpened: self.on_opened},
            routed={
                Prepare: self.on_prepare,
                Flush: self.on_flush,
                Install: self.on_install,
                ReplicationPlan: self.on_replication_plan,
            },
            effects={ViewEntered: self.on_entered},
        )

    # --- prepare and vote ---

    def on_prepare(self, event: Received, now_s: float) -> list[Effect]:
        """The scheduler proposes a view."""
        assert isinstance(event.message, Prepare)
        node, proposed = self.node, event.message.view
        if proposed.term < node.election.term:
            return self.role.tell_term(event.peer)
        if node.sync.view and proposed.key <= node.sync.view.key:
            return []
        self.role.adopt_term(proposed.term)
        if node.joiner:
            node.joiner.goes_on()
        newest = node.opener.view
        if proposed.key in node.sync.prepared or (newest is not None and newest.key >= proposed.key):
            return []
        view = self.whole(proposed)
        if view is None and isinstance(proposed, ViewChange) and node.phase is Phase.JOINING:
            self.early = proposed
        if view is None or (view.find(node.me) is None and node.phase is not Phase.MEMBER):
            return []
        return self._prepare(view, now_s)

    def _prepare(self, view: View, now_s: float) -> list[Effect]:
        effects = self.node.opener.prepare(view, now_s)
        self._vote_if_prepared()
        return effects

    def on_opened(self, event: PeerOpened, now_s: float) -> list[Effect]:
        """A link has opened: it may be the last one that a proposed view needs of us."""
        self._vote_if_prepared()
        return []

    def _vote_if_prepared(self) -> None:
        node, view = self.node, self.node.opener.ready
        if view is not None:
            node.opener.done()
            if not node.sync.frozen or node.phase is Phase.JOINING:
                node.sync.prepare(view)

    def whole(self, told: View | ViewChange) -> View | None:
        """The view that is told; None if it is told as a change of one that we do not know.

        In that case we have no vote in it: a node with a vote acts in the view in force, or has voted for it. A
        joiner gets its first view whole, but a change of it may come before it. A node that is in another view at
        a flush gets the installed view whole.
        """
        if isinstance(told, View):
            return told
        sync, opener = self.node.sync, self.node.opener
        bases = (sync.view, opener.view, sync.prepared.get(told.base))
        base = next((view for view in bases if view is not None and view.key == told.base), None)
        return applied(base, told) if base is not None else None

    # --- flush and install ---

    def on_flush(self, event: Received, now_s: float) -> list[Effect]:
        """The scheduler wants everybody to stop."""
        node, flush = self.node, event.message
        assert isinstance(flush, Flush)
        if node.sync.view is None:
            return []
        if flush.term < node.election.term:
            told = self.role.expel_stranger(flush.scheduler, flush.key)
            return told or self.role.tell_term(flush.scheduler)
        self.role.adopt_term(flush.term)
        if node.follower.is_over(flush):
            return []
        if flush.scheduler != node.me:
            node.election.stand_down()
        return node.follower.follow(flush, now_s)

    def on_install(self, event: Received, now_s: float) -> list[Effect]:
        """The flush is over: go on in the view that the scheduler installs."""
        node, install = self.node, event.message
        assert isinstance(install, Install)
        if not node.follower.is_ended_by(install):
            return []
        view = self.whole(install.view)
        if view is None or view.find(node.me) is None:
            return []  # It comes whole when we answer again; or Expelled follows, or a leaver is let go.
        return node.follower.end(install, view)

    def tick(self, now_s: float) -> list[Effect]:
        follower = self.node.follower
        if not follower.is_due(now_s):
            return []
        return follower.repeat(now_s) + self.role.park_without_quorum()

    # --- entering ---

    def on_replication_plan(self, event: Received, now_s: float) -> list[Effect]:
        """The scheduler tells a joiner to listen in a view from now on, and from whom to pull the state."""
        node, joiner, plan = self.node, self.node.joiner, event.message
        assert isinstance(plan, ReplicationPlan)
        view, here, mine = plan.view, plan.view.find(node.me), node.sync.view
        if joiner is None or here is None or here.life != node.life:
            return []  # If we live in a later life than the scheduler knows, we ask again.
        node.follower.note_ended(plan.flushed)
        if mine is not None and view.key == mine.key:
            return joiner.overtaken(event.peer, plan, now_s)
        if mine is not None and view.key < mine.key:
            return []
        effects = self.joining.hear(event, now_s)
        if joiner.replication is not None:
            effects += node.serving.arrives(plan.step, joiner.replication.fellows)
        node.overlay.listens(view)
        early, self.early = self.early, None
        if early is not None and early.base == view.key and (then := applied(view, early)).find(node.me):
            effects += self._prepare(then, now_s)  # Before we hear of the step that switches to it.
        return effects + node.sync.observe(view, plan.step)

    def on_entered(self, effect: ViewEntered, now_s: float) -> list[Effect]:
        """This node acts in a new view: everything derived from it follows."""
        node, view, step = self.node, effect.view, effect.step
        self._follow(view)
        effects: list[Effect] = [] if node.parked is None else [Parked(None)]
        self.role.adopt_term(view.term)
        if node.me in view.member_set and node.phase is Phase.JOINING and node.joiner:
            effects += self.joining.become_member(view, now_s)
        node.clock.counts(not any(joining.blocking and joining.sources for joining in view.joining))
        effects += node.courier.enter(view) + node.serving.entered(view, step, node.relay.peers)
        if node.scheduler:
            if view.scheduler not in (node.me, "") or node.me not in view.member_set:
                node.schedule_by(None)
            else:
                effects += node.scheduler.switched(view, now_s)
        effects += self.missing.overlay_changed(now_s)
        return effects + self.neighbors.tell_missing(view) + self.recovery.tear_if_cut_off(now_s)

    def _follow(self, view: View) -> None:
        """Bring all up to date that has no effects of its own when the view changes."""
        node = self.node
        before, self.entered = self.entered, view
        self.role.entered(before, view)
        node.follower.stop()
        if node.opener.view is not None and node.opener.view.key <= view.key:
            node.opener.done()
        node.overlay.enter(view)
        self.missing.entered(before, view)
        others = [voter for voter in view.voter_ids if voter != node.me]
        node.liveness.pairs_with(others[0] if len(view.voter_ids) == 2 and len(others) == 1 else "")
        node.relay.takes(view.scheduler, view.to_scheduler(node.me))
        node.lost_links.entered(view)
        node.book.keep(view.node_set, node.relay.peers)
        node.closer.switched(before, view, node.overlay.lives.reborn)
        node.monitor.entered(view)
