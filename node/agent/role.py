"""Who has the scheduler's role: when this node stands for it, takes it, gives its vote, and loses it.

The rules of an election are protocols/election.py, those of the role scheduler/core.py. Here is what connects
them: the scheduler that is missed is that of the view, or of the flush under way; a higher term makes all
older ones void; and whoever acts in a view or term that is history is told so.
"""

from __future__ import annotations

from collections.abc import Set

from ...protocols.effects import Effect, Happened, Parked
from ...protocols.election import ElectionRole
from ...protocols.events import Received
from ...protocols.messages import (
    AbortRequest,
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Electorate,
    Expelled,
    FlushOk,
    NeighborsReady,
    PrepareFailed,
    Report,
    ScaleInRequest,
    ScaleOutReady,
    View,
    ViewKey,
    VoteReply,
    VoteRequest,
)
from ...protocols.overlay import lacking
from ...protocols.scale_in import LeaverState
from ...scheduler.core import Scheduler
from .node import Node, Phase
from .routes import Routes, all_to

ROUNDS_IN_VAIN = 8  # Of an election, 2 to 4 s where links are short. Duels end sooner.
FOR_THE_SCHEDULER = (
    NeighborsReady, ScaleOutReady, ScaleInRequest, ConnectLinkRequest, DisconnectLinkRequest,
    PrepareFailed, AbortRequest, FlushOk, Report,
)  # fmt: skip


class Role:
    """What one node does about the scheduler's role."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.vacant_term = 0  # The term whose scheduler has stood again, and so no longer counts.
        self.scheduled: View | None = None  # The last view with a scheduler, if that has left by a vote.

    def routes(self) -> Routes:
        role = all_to(self.to_scheduler, *FOR_THE_SCHEDULER)
        return Routes(routed={VoteRequest: self.on_request, VoteReply: self.on_reply, **role})

    def to_scheduler(self, event: Received, now_s: float) -> list[Effect]:
        """A message for the scheduler: hand it on, if this node has the role."""
        scheduler = self.node.scheduler
        return scheduler.receive(event.peer, event.message, now_s) if scheduler else []  # type: ignore[arg-type]

    def tick(self, now_s: float) -> list[Effect]:
        return self.node.scheduler.tick(now_s) if self.node.scheduler else []

    # --- taking and losing it ---

    def found(self, view: View) -> None:
        """A cluster begins with `view`, which names its scheduler."""
        is_ours = view.scheduler == self.node.me
        self.node.election.begin(view.term, is_ours)
        if is_ours:
            self.node.schedule_by(self._new_scheduler(view.term))

    def entered(self, before: View | None, view: View) -> None:
        """`view` is in force; `before` it, the other one was."""
        if view.scheduler:
            self.scheduled = None
        elif before is not None and before.scheduler:
            self.scheduled = before

    def elect(self, now_s: float) -> list[Effect]:
        """Stand if the scheduler is out of reach; take the role if elected."""
        node, view = self.node, self.node.sync.view
        if node.phase is not Phase.MEMBER or view is None or node.scheduler is not None:
            return []
        if not self._is_vacant:
            node.election.stand_down()
            return []
        if node.me not in view.member_set or (node.overlay.has_word and node.lacks_state):
            return []
        seniors = view.member_set & node.overlay.reachable
        # A round has room for two links on the way (election.py); to the farthest voter there may be more.
        farther = max(1.0, node.overlay.depth() / 2) if node.election.is_due(now_s) else 1.0
        rtt_s = node.liveness.slowest_rtt_s * farther
        if node.election.wake_at_s is None:
            leaves = node.leaver.state is not LeaverState.STAYING  # Stands only if nobody else does.
            rank = sum(each in seniors for each in view.member_ids[: view.member_ids.index(node.me)])
            node.election.scheduler_missing(rank + leaves * len(seniors), now_s, rtt_s)
        electorates, word = self._electorates, node.overlay.has_word
        effects = node.election.tick(view.key, electorates, seniors, now_s, rtt_s, word)
        effects += self._count(view.key, seniors)
        if node.election.role is ElectionRole.ELECTED:
            return effects + self._take(now_s)
        return effects + self.park_without_quorum()

    @property
    def _electorates(self) -> list[Electorate]:
        node = self.node
        assert node.sync.view is not None
        return node.sync.electorates(node.overlay.electorate(node.sync.view))

    def _count(self, key: ViewKey, voters: Set[str]) -> list[Effect]:
        node = self.node
        electorates, crashed, word = self._electorates, node.overlay.crashed, node.overlay.has_word
        return node.election.count(key, electorates, voters, crashed, word)

    def _take(self, now_s: float) -> list[Effect]:
        node, term = self.node, self.node.election.term
        node.opener.done()
        scheduler = self._new_scheduler(term)
        scheduler.go_on_from(node.sync.view.seq if node.sync.view else 0)
        node.schedule_by(scheduler)
        told: list[Effect] = [Happened("scheduler", node.me, f"elected for term {term}", node.sync.step)]
        if self.scheduled is not None:
            told = scheduler.succeeds(self.scheduled) + told
        return told + scheduler.start_flush("the scheduler was lost", now_s)

    def _new_scheduler(self, term: int) -> Scheduler:
        node, settings, clock = self.node, self.node.settings, self.node.clock
        return Scheduler(
            node.me,
            term,
            node.sync,
            node.overlay,
            node.monitor,
            node.relay.send,
            settings.policy,
            settings.bundler,
            settings.digest,
            settings.spec,
            settings.strategy,
            lambda: (settings.result_bytes, clock.usual_s),
        )

    def adopt_term(self, term: int) -> None:
        """A higher term makes older proposals, and an older scheduler, void."""
        node = self.node
        node.election.adopt(term)
        term = node.election.term
        if node.scheduler is not None and node.scheduler.term < term:
            node.schedule_by(None)
        if node.opener.view is not None and node.sync.view is not None and node.opener.view.term < term:
            node.opener.done()

    def park_without_quorum(self) -> list[Effect]:
        """If there is no quorum, or no election succeeds, park: say once why nothing moves."""
        node = self.node
        crashed, word = node.overlay.crashed, node.overlay.has_word
        voters = lacking(self._electorates, node.overlay.reachable, crashed, word)
        if voters is not None:
            present = sum(each in node.overlay.reachable for each in voters.members)
            reason = f"only {present} of {len(voters.members)} members can be reached"
        elif node.election.rounds > ROUNDS_IN_VAIN:
            reason = "no scheduler can be elected: who is a step ahead can reach too few members"
        else:
            return []
        if node.parked == reason:
            return []
        node.park(reason)
        return [Parked(reason)]

    # --- votes ---

    def on_request(self, event: Received, now_s: float) -> list[Effect]:
        """A candidate asks for our vote."""
        node, view, request = self.node, self.node.sync.view, event.message
        assert isinstance(request, VoteRequest)
        if view is None or node.me not in view.member_set:
            return []
        if request.candidate not in view.member_set:
            return self.expel_stranger(request.candidate, request.key)
        named, term = self._named
        if request.candidate == named and request.term > term:
            # We stand, too: its view may be too old for it to be elected again.
            self.vacant_term = term
        effects = node.election.on_request(request, view.key, self._is_vacant)
        self.adopt_term(node.election.term)
        return effects

    def on_reply(self, event: Received, now_s: float) -> list[Effect]:
        """A voter has answered us."""
        node, view, reply = self.node, self.node.sync.view, event.message
        assert isinstance(reply, VoteReply)
        if view is None or node.me not in view.member_set:
            return []
        voters = view.member_set & node.overlay.reachable
        electorates, crashed, word = self._electorates, node.overlay.crashed, node.overlay.has_word
        effects = node.election.on_reply(reply, view.key, electorates, voters, crashed, word)
        self.adopt_term(node.election.term)
        return effects

    @property
    def _named(self) -> tuple[str, int]:
        """The scheduler and its term, as the flush under way names them, or else the view."""
        said = self.node.follower.flush or self.node.sync.view
        return (said.scheduler, said.term) if said else ("", 0)

    @property
    def _is_vacant(self) -> bool:
        node, (named, term) = self.node, self._named
        gave_up = node.scheduler is None if named == node.me else self.vacant_term == term
        return named == "" or gave_up or named not in node.overlay.reachable

    # --- those whose time is over ---

    def expel_stranger(self, name: str, key: ViewKey) -> list[Effect]:
        """Tell a node that it is out, if it acts in an older view than ours, and ours does not have it."""
        view = self.node.sync.view
        if view is None or view.find(name) is not None or key >= view.key:
            return []
        expelled = Expelled(node=name, reason="the cluster went on without it", key=view.key)
        return self.node.relay.send(name, expelled)

    def tell_term(self, scheduler: str) -> list[Effect]:
        """Tell a scheduler that its term is over: somebody stood for a later one, even if nobody was elected."""
        node = self.node
        refusal = VoteReply(term=node.election.term, voter=node.me, granted=False, trial=False)
        return node.relay.send(scheduler, refusal)
