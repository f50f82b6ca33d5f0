"""The elected scheduler: puts events into views, one after the other, and restarts what was torn.

    request --> change --PREPARE--> proposed view --the vote in the all-reduce--> active --> next change
    loss of a member or of a link in use, or a new scheduler:
        FLUSH --FlushOk of everybody in reach--> quorum? --INSTALL--> active
                                                   no --> parked until more can be reached

It holds nothing that the last view and the members' reports cannot rebuild, and it is not on the data path:
without it training goes on, and only changes wait.

Like an agent (node/agent/core.py) it is made of parts, which share a term (tenure.py): joins.py lets nodes in,
changes.py makes proposals of what is asked for, flushes.py restarts what was torn, repairs.py knows which links can
be, and notices.py tells people. This class sends each message to whoever handles it. Source: Chaos, Sec. IV-B and
V-A2.
"""

from __future__ import annotations

from collections.abc import Set

from ..protocols.effects import Effect, Happened
from ..protocols.messages import (
    AbortRequest,
    Answer,
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Expelled,
    FlushOk,
    NeighborsReady,
    PrepareFailed,
    Report,
    Routed,
    ScaleInRequest,
    ScaleOutReady,
    ScaleOutRequest,
    View,
    link,
)
from ..protocols.overlay import Overlay
from ..protocols.step_sync import StepSync
from . import sync_plan
from .admission import Costs
from .changes import Changes
from .flushes import Flushes
from .joins import Joins
from .monitor import ClusterMonitor
from .notices import Notices
from .repairs import Repairs
from .tenure import MAX_QUEUE, Send, Tenure
from .views import AddLink, Remove, RemoveLink, new_voters


class Scheduler(Tenure):
    """The role, in one term, on node `me`. `sync` and `overlay` are the host's, read only here."""

    def __init__(
        self,
        me: str,
        term: int,
        sync: StepSync,
        overlay: Overlay,
        monitor: ClusterMonitor,
        send: Send,
        policy: sync_plan.SyncPolicy,
        bundler: sync_plan.Bundler = sync_plan.bundle,
        digest: str = "",
        spec: bytes = b"",
        strategy: str = "adaptive",
        costs: Costs = lambda: (0, None),
    ) -> None:
        super().__init__(me, term, sync, overlay, monitor, send, policy, bundler, costs)
        self.repairs = Repairs(self)
        self.notices = Notices(self, self.repairs)
        self.flushes = Flushes(self, self.notices)
        self.changes = Changes(self, self.repairs, self.notices, self.flushes)
        self.joins = Joins(self, self.repairs, self.changes, self.flushes, digest, spec, strategy)

    @property
    def wake_at_s(self) -> float | None:
        times = [self.flush.repeat_at_s] if self.flush else []
        times += [self.proposal.repeat_at_s] if self.proposal else []
        times += [at_s] if (at_s := self.joins.admit_at_s) is not None else []
        return min(times, default=None)

    @property
    def cut_off(self) -> Set[str]:
        """Members in reach, but only through some who cannot go on."""
        return self.flushes.cut_off

    # --- events ---

    def receive(self, source: str, message: Routed, now_s: float) -> list[Effect]:
        """One routed message for the role."""
        match message:
            case ScaleOutRequest():
                return self.joins.on_scale_out(message, now_s)
            case NeighborsReady():
                return self.joins.on_neighbors_ready(message, now_s)
            case ScaleOutReady(node=node, in_s=in_s):
                return self.joins.on_ready(node, in_s, now_s)
            case ScaleInRequest(node=node):
                return self._on_scale_in(node, now_s)
            case ConnectLinkRequest(a=a, b=b, asker=asker) | DisconnectLinkRequest(a=a, b=b, asker=asker):
                return self._on_link_request(message, a, b, asker, now_s)
            case PrepareFailed():
                return self.changes.on_prepare_failed(message, now_s)
            case AbortRequest():
                return self._on_abort(message, now_s)
            case FlushOk():
                return self.flushes.on_ok(message)
            case Report():
                self.monitor.report(message, now_s)
                return self.changes.replan_if_worth_it(now_s)
        return []

    def tick(self, now_s: float) -> list[Effect]:
        """Repeat what may have been lost."""
        return [*self.joins.tick(now_s), *self.flushes.tick(now_s), *self.changes.tick(now_s)]

    def start_flush(self, reason: str, now_s: float) -> list[Effect]:
        """Stop the attempt everywhere and find out where everybody is."""
        return self.flushes.start(reason, now_s)

    def overlay_changed(self, now_s: float) -> list[Effect]:
        """A link was lost or found. A node whose step is torn by that says so itself (AbortRequest)."""
        if self.flush:
            return self.flushes.install_if_complete()
        if gone := sorted(self.view.member_set - self.overlay.reachable):
            return self.flushes.start(f"lost {', '.join(gone)}", now_s)
        effects: list[Effect] = []
        for observer in sorted(self.view.observer_set - self.overlay.reachable):
            effects += self.changes.enqueue(Remove(node=observer), now_s)
        for each in sorted(self.overlay.lost):
            effects += self.changes.enqueue(RemoveLink(link=each, lost=True), now_s)
        return effects

    def switched(self, view: View, now_s: float) -> list[Effect]:
        """The host entered a new view: finish what it was for, go on with the next change."""
        effects = self.joins.switched(view)
        self.repairs.entered(view, {*view.node_ids, *self.requests})
        effects += self.changes.switched(view, now_s)
        if self.admission.wanting and self.admission.since_s is None:
            effects += self.changes.admit(now_s)  # Somebody may be there now through whom they can be let in.
        self.changes.repair(view)
        return effects + self.changes.propose_next(now_s)

    def succeeds(self, before: View) -> list[Effect]:
        """Tell people that the scheduler of `before` has left by a vote: its own notice of that may be lost."""
        new = new_voters(before, self.view)
        return self.notices.done(Remove(node=before.scheduler), self.view, new)

    def stepped(self, now_s: float) -> list[Effect]:
        """A step is complete."""
        return self.joins.stepped(now_s)

    # --- who asks for something else (Fig. 4b to d) ---

    def _on_abort(self, request: AbortRequest, now_s: float) -> list[Effect]:
        """A node cannot go on with the step under way."""
        node, key, step = request.node, request.key, request.step
        if self.view.find(node) is None:
            return self.flushes.expel(node) if key < self.view.key else []
        if request.without_me and key == self.view.key:
            self.flushes.goes_without_state(node)
        most = 1 if node in self.view.voter_ids else max(len(self.sync.kept), 1)  # That it may lack.
        is_over = step < self.sync.step - most
        if is_over and node in self.view.observer_set:  # No flush can bring it what it lacks.
            return self.changes.enqueue(Remove(node=node), now_s)
        if self.flush or (is_over and key == self.view.key):
            return []
        return self.flushes.start(request.reason, now_s)

    def _on_scale_in(self, node: str, now_s: float) -> list[Effect]:
        if self.view.find(node) is None:
            return self.send(
                node, Expelled(node=node, reason="it is not in the view any more", key=self.view.key)
            )
        if self.changes.is_queued(Remove(node=node)):
            return []
        return self.notices.asks_to_leave(node) + self.changes.enqueue(Remove(node=node), now_s)

    def _on_link_request(
        self, message: ConnectLinkRequest | DisconnectLinkRequest, a: str, b: str, asker: str, now_s: float
    ) -> list[Effect]:
        ends = [self.find(a), self.find(b)]
        if ends[0] is None or ends[1] is None:
            unknown = a if ends[0] is None else b
            text = f"{unknown!r} is no member (members: {self.members_named})"
            return self.send(asker, Answer(ok=False, text=text))
        each = link(ends[0].id, ends[1].id)
        connect = isinstance(message, ConnectLinkRequest)
        healed = isinstance(message, ConnectLinkRequest) and message.healed
        if healed and (each in self.view.links or each in self.repairs.unwanted):
            return []
        asker = "" if healed else asker
        change = AddLink(asker=asker, link=each) if connect else RemoveLink(asker=asker, link=each)
        if self.changes.is_queued(change):
            return []
        requested = "requested again" if self.changes.is_asked_for(change) else "requested"
        effects = self.changes.enqueue(change, now_s)
        if not self.changes.is_queued(change):
            return effects  # Refused at once: that is for who has asked.
        kind = "connect-link" if connect else "disconnect-link"
        why = "it carries again" if healed else requested
        return [Happened(kind, f"{each[0]} - {each[1]}", why, self.sync.step), *effects]

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert self.flush is None or self.proposal is None
        assert len(self.queue) <= MAX_QUEUE
        assert self.admission.wanting.keys() | self.admission.asked_s.keys() <= self.requests.keys()
        assert len(self.requests) <= MAX_QUEUE
