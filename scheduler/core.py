"""The elected scheduler: puts events into views, one after the other, and restarts what was torn.

    request --> change --PREPARE--> proposed view --the vote in the all-reduce--> active --> next change
    loss of a member or of a link in use, or a new scheduler:
        FLUSH --FlushOk of everybody in reach--> quorum? --INSTALL--> active
                                                   no --> parked until more can be reached

It holds nothing that the last view and the members' reports cannot rebuild, and it is not on the data path:
without it training goes on, and only changes wait. A proposal changes one voter at most, so that the quorums
of two successive views overlap. Source: Chaos, Sec. IV-B and V-A2.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import networkx as nx
from msgspec.structs import replace

from ..protocols.effects import Effect, Happened, Out, Parked
from ..protocols.errors import PlanInfeasible
from ..protocols.messages import (
    EVERYONE,
    AbortRequest,
    Answer,
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Electorate,
    Expelled,
    Flush,
    FlushOk,
    Install,
    Link,
    Member,
    NegotiationPlan,
    NeighborsReady,
    Prepare,
    PrepareFailed,
    ReplicationPlan,
    Report,
    Routed,
    ScaleInRequest,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
    View,
    ViewChange,
    link,
)
from ..protocols.overlay import Overlay, lacking
from ..protocols.step_sync import StepSync
from ..protocols.view_change import told_against
from . import shard_plan, sync_plan, views
from .admission import Admission, Costs, Wanting, mode
from .monitor import ClusterMonitor
from .replanning import Replanning
from .views import AddJoiners, AddLink, Change, Joiner, Nothing, Promote, Remove, RemoveLink, Repair, Replan

REPEAT_EVERY_S = 0.5  # PREPARE and FLUSH are sent again to make up for what was lost with a connection.
NAMESAKE_S = (
    2.5  # Less than until a joiner asks again, more than until a death shows; as RIVAL_S of the transport.
)
MAX_QUEUE = 1024
MEMBERS_NAMED, MEMBERS_TEXT = 20, 3000  # In a refusal, whose text is bounded.
MIN_DEGREE = 2  # Below it the overlay is repaired: any one node or link may fail.
# If no step carries the vote by then (everybody is paused), a flush does it. The step under way or the next one does,
# if they train: so it is this long at least, and so many usual steps.
LEAVE_PATIENCE_S, LEAVE_PATIENCE_STEPS = 5.0, 3.0

Send = Callable[[str, Routed], list[Effect]]


@dataclass(slots=True)
class _FlushState:
    number: int
    answers: dict[str, FlushOk] = field(default_factory=dict)
    repeat_at_s: float = 0.0
    repeated: bool = False
    reason: str = ""
    awaited: str = ""  # One of those who must answer: until it has, there is nothing to look through.
    proposed: _Proposal | None = None  # When it began: somebody may have gone on in that view.


@dataclass(slots=True)
class _Proposal:
    view: View
    told: View | ViewChange  # The same, as it is sent.
    change: Change
    since_s: float
    repeat_at_s: float


@dataclass(frozen=True, slots=True)
class _Impossible:
    """Links that no plan of ours may count on: the named ones, and those between two who can only dial."""

    links: Set[Link]
    silent: frozenset[str]

    def __contains__(self, each: object) -> bool:
        return each in self.links or (isinstance(each, tuple) and self.silent.issuperset(each))


class Scheduler:
    """The role, in one term, on node `me`. `sync` and `overlay` are the host's, read only here."""

    def __init__(
        self,
        me: str,
        term: int,
        sync: StepSync,
        overlay: Overlay,
        monitor: ClusterMonitor,
        send: Send,
        policy: sync_plan.Policy,
        bundler: sync_plan.Bundler = sync_plan.bundle,
        digest: str = "",
        spec: bytes = b"",
        strategy: str = "adaptive",
        costs: Costs = lambda: (0, None),
    ) -> None:
        self.me, self.term = me, term
        self.sync, self.overlay, self.monitor = sync, overlay, monitor
        self.send, self.policy, self.bundler, self.strategy = send, policy, bundler, strategy
        self.digest, self.spec = digest, spec
        self.queue: deque[Change] = deque()
        self.proposal: _Proposal | None = None
        self.flush: _FlushState | None = None
        self.last_flush = 0
        self.last_install: Install | None = None
        self.requests: dict[str, ScaleOutRequest] = {}  # Joiners that are not in a view yet.
        self.admission = Admission(costs)  # Of those whose links are open.
        self.replanning = Replanning()
        self.ready_at_s: dict[str, float] = {}  # Observers that are about to have the state: when they will.
        self.stepped_s = 0.0
        self.parked = ""
        self.seq = 0
        # Members whose name a later process has asked for: its life, and when it asked first.
        self.namesakes: dict[str, tuple[int, float]] = {}
        self.astray: set[str] = set()  # Members that have asked once to be let in.
        self.unwanted: set[Link] = set()  # Links that somebody had removed: no repair brings them back.
        self.out_of_reach: set[Link] = set()  # Nodes that could not open one: no repair tries it again.
        self.leaving_at_flush = ""  # A node that wants out, and that no vote will let go soon.
        self.stateless = ""  # The same, but it has nothing to go on with.
        self.cut_off: Set[str] = frozenset()  # Members in reach, but only through some who cannot go on.

    def go_on_from(self, seq: int) -> None:
        """Number the views of this term from here on."""
        self.seq = seq

    @property
    def view(self) -> View:
        assert self.sync.view is not None
        return self.sync.view

    @property
    def wake_at_s(self) -> float | None:
        times = [self.flush.repeat_at_s] if self.flush else []
        times += [self.proposal.repeat_at_s] if self.proposal else []
        times += [at_s] if (at_s := self._admit_at_s) is not None else []
        return min(times, default=None)

    @property
    def _admit_at_s(self) -> float | None:
        return self.admission.at_s(self.view) if self.sync.view is not None else None

    @property
    def busy(self) -> bool:
        """Is a change under way, or waiting?"""
        return self.flush is not None or self.proposal is not None or bool(self.queue)

    # --- events ---

    def receive(self, source: str, message: Routed, now_s: float) -> list[Effect]:
        """One routed message for the role."""
        match message:
            case ScaleOutRequest():
                return self._on_scale_out(message, now_s)
            case NeighborsReady():
                return self._on_neighbors_ready(message, now_s)
            case ScaleOutReady(node=node, in_s=in_s):
                return self._on_ready(node, in_s, now_s)
            case ScaleInRequest(node=node):
                return self._on_scale_in(node, now_s)
            case ConnectLinkRequest(a=a, b=b, asker=asker) | DisconnectLinkRequest(a=a, b=b, asker=asker):
                return self._on_link_request(message, a, b, asker, now_s)
            case PrepareFailed():
                return self._on_prepare_failed(message, now_s)
            case AbortRequest(node=node, key=key, step=step, reason=reason):
                if self.view.find(node) is None:
                    return self._expel(node) if key < self.view.key else []
                if message.without_me and key == self.view.key:
                    self.stateless = node
                is_over = step < self.sync.step - 1
                if is_over and node in self.view.observer_set:  # No flush can bring it what it lacks.
                    return self._enqueue(Remove(node=node), now_s)
                if self.flush or (is_over and key == self.view.key):
                    return []
                return self.start_flush(reason, now_s)
            case FlushOk():
                return self._on_flush_ok(message)
            case Report():
                self.monitor.report(message, now_s)
                return self._replan_if_worth_it(now_s)
        return []

    def tick(self, now_s: float) -> list[Effect]:
        """Repeat what may have been lost."""
        effects: list[Effect] = []
        if (at_s := self._admit_at_s) is not None and now_s >= at_s:
            effects += self._admit(now_s)
        if self.flush and now_s >= self.flush.repeat_at_s:
            self.flush.repeat_at_s, self.flush.repeated = now_s + REPEAT_EVERY_S, True
            self.flush.awaited = ""  # It may be a joiner, which need not answer any more.
            effects += self.send(EVERYONE, self._flush_message())
            effects += self._install_if_complete()
        if self.proposal and now_s >= self.proposal.repeat_at_s:
            self.proposal.repeat_at_s = now_s + REPEAT_EVERY_S
            effects += self.send(EVERYONE, Prepare(view=self.proposal.told))
            change, waited_s = self.proposal.change, now_s - self.proposal.since_s
            is_late = waited_s > self._vote_patience_s
            leaver = next((each for each in (change, *self.queue) if isinstance(each, Remove)), None)
            if leaver is not None and is_late:
                effects += self._leave_by_flush(leaver.node, "nobody trains", now_s)
            elif isinstance(change, Replan) and is_late:
                self.proposal = None  # Nobody trains, so it helps nobody; others may want to leave.
                effects += self._propose_next(now_s)
        return effects

    @property
    def _vote_patience_s(self) -> float:
        """Until then a step has carried the vote, if anybody trains."""
        return max(LEAVE_PATIENCE_S, LEAVE_PATIENCE_STEPS * (self.admission.costs()[1] or 0.0))

    def overlay_changed(self, now_s: float) -> list[Effect]:
        """A link was lost or found. Whose step is torn by that says so itself (AbortRequest)."""
        if self.flush:
            return self._install_if_complete()
        if gone := sorted(self.view.member_set - self.overlay.reachable):
            return self.start_flush(f"lost {', '.join(gone)}", now_s)
        effects: list[Effect] = []
        for observer in sorted(self.view.observer_set - self.overlay.reachable):
            effects += self._enqueue(Remove(node=observer), now_s)
        for each in sorted(self.overlay.lost):
            effects += self._enqueue(RemoveLink(link=each, lost=True), now_s)
        return effects

    def switched(self, view: View, now_s: float) -> list[Effect]:
        """The host entered a new view: finish what it was for, go on with the next change."""
        effects = self._tell_joiner(view)
        self.replanning.entered(now_s)
        known = {*view.node_ids, *self.requests}
        self.out_of_reach = {each for each in self.out_of_reach if known.issuperset(each)}
        self.astray &= view.member_set
        self.namesakes = {node: each for node, each in self.namesakes.items() if node in view.member_set}
        proposal, self.proposal = self.proposal, None
        if proposal is not None and proposal.view.key == view.key:
            effects += self._done(proposal.change, view)
        elif proposal is not None:
            self._put_off(proposal.change)
        if self.admission.wanting and self.admission.since_s is None:
            effects += self._admit(now_s)  # Somebody may be there now through whom they can be let in.
        return effects + self._repair(view) + self._propose_next(now_s)

    def stepped(self, now_s: float) -> list[Effect]:
        """Who has taken part in a step, and has no vote yet, is to get one."""
        self.stepped_s = now_s
        lacking = [each.node for each in self.view.joining if each.node in self.view.member_set]
        effects = self._enqueue(Promote(node=lacking[0]), now_s) if lacking else []
        return effects + self._promote_early(now_s)

    def _promote_early(self, now_s: float) -> list[Effect]:
        """Who will have the state when the step under way ends takes part in the next one."""
        self.ready_at_s = {
            node: at_s for node, at_s in self.ready_at_s.items() if node in self.view.observer_set
        }
        ends_s = self.stepped_s + (self.admission.costs()[1] or 0.0)
        near = [node for node, at_s in self.ready_at_s.items() if at_s <= ends_s]
        return [effect for node in near for effect in self._enqueue(Promote(node=node, early=True), now_s)]

    # --- scale-out (Fig. 4a) ---

    def _on_scale_out(self, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        node = request.node
        if self.parked:
            return []  # We do not know when we go on, so the joiner's patience decides.
        if self.digest and request.digest and request.digest != self.digest:
            return self.send(node, ScaleOutRefused(reason="the model differs", spec=self.spec))
        namesake = self.view.find(node) if node in self.view.member_ids else None
        if namesake is not None and request.life == namesake.life:
            return self._on_astray(request, now_s)
        if namesake is not None and self._may_be_reborn(request, now_s):
            return []
        if namesake is not None:
            reason = f"a node named {node!r} is in the cluster already; choose another with --name"
            return self.send(node, ScaleOutRefused(reason=reason))
        neighbors, unknown = self._neighbors_for(request)
        if unknown:
            reason = f"the wanted neighbour {unknown!r} is no member (members: {self._members})"
            return self.send(node, ScaleOutRefused(reason=reason))
        told: list[Effect] = []
        if self.admission.knows(node, request.life, {*request.linked}):
            told += self.send(node, Answer(ok=True, text=self.admission.why_not_yet(node, self.view)))
            if any(each.node == node for each in self.admission.admissible(self.view)):
                return told + self._admit(now_s)
        self.admission.forget({node})  # Others than those that it hangs on may be there by now.
        self.admission.asks(node, now_s)
        self.ready_at_s.pop(node, None)  # It was ready, or about to be, and has lost its way since.
        for each in (Promote(node=node), Promote(node=node, early=True)):
            if each in self.queue:
                self.queue.remove(each)
        if self.requests.pop(node, None) is None:
            told.append(Happened("scale-out", node, "asks to join", self.sync.step))
        self.requests[node] = request
        if len(self.requests) > MAX_QUEUE:
            forgotten = next(iter(self.requests))  # It asks again, if it is still there.
            del self.requests[forgotten]
            self.admission.forget({forgotten})
        fellows = () if request.neighbors else self._fellows_for(request, now_s)
        return told + self.send(node, NegotiationPlan(neighbors=(*neighbors, *fellows)))

    def _fellows_for(self, request: ScaleOutRequest, now_s: float) -> list[Member]:
        """Others that want in, and will fetch the same: whom it has a link to, then those that asked just before."""
        fresh = [self.requests[node] for node in self.admission.fresh(now_s) if node != request.node]
        others = [each for each in fresh if each.addresses]
        others.sort(key=lambda each: each.node not in request.linked)
        return [
            Member(id=each.node, addresses=each.addresses, joined_step=0, life=each.life)
            for each in others[: request.degree]
        ]

    def _may_be_reborn(self, request: ScaleOutRequest, now_s: float) -> bool:
        """Was the member started again? It asks once more, and by then its death has shown; or it had not died.

        If a flush is under way, only its end shows that.
        """
        life, asked_s = self.namesakes.get(request.node, (0, 0.0))
        if life != request.life or self.flush is not None:
            asked_s = now_s
            self.namesakes[request.node] = request.life, asked_s
        return now_s < asked_s + NAMESAKE_S

    def _on_astray(self, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        """A member asks to be let in: it lost its way to us just before the view that made it one.

        It cannot know of that view, so all would wait for it. But it may as well have asked before, and know
        by now, or have said so itself (AbortRequest). If it asks once more, it does not know.
        """
        node = request.node
        if not request.again or self.flush is not None:
            return []
        if node not in self.astray:
            self.astray.add(node)
            return []
        self.astray.discard(node)
        self.stateless = node
        return self.start_flush(f"{node} asks to be let in again", now_s)

    def _neighbors_for(self, request: ScaleOutRequest) -> tuple[list[Member], str]:
        """The members that the joiner is to link to; or the wanted one that is none."""
        found = {wanted: self._find(wanted) for wanted in request.neighbors}
        unknown = [wanted for wanted, member in found.items() if member is None]
        if unknown and not request.again:
            return [], unknown[0]
        if wanted := [member for member in found.values() if member is not None]:
            return wanted, ""
        # The joiner dials, so whoever can only dial is no neighbour for it, unless nobody else is there.
        members = [m for m in self.view.members if m.addresses] or self.view.members
        linked = [m for m in self.view.members if request.stuck and m.id in request.linked]
        chosen = self._least_linked(linked, request.degree)
        chosen |= self._least_linked([m for m in members if m.id not in chosen], request.degree - len(chosen))
        return [m for m in self.view.members if m.id in chosen], ""

    def _least_linked(self, members: Sequence[Member], count: int) -> set[str]:
        degrees = [(m.id, len(self.view.neighbors(m.id))) for m in members]
        return set(sync_plan.choose_neighbors(degrees, count)) if count and degrees else set()

    @property
    def _members(self) -> str:
        """Who is there, for people: the first of them, if they are many."""
        named = self.view.members[:MEMBERS_NAMED]
        told = ", ".join(f"{member.id} ({', '.join(member.addresses) or 'dials only'})" for member in named)
        more = len(self.view.members) - len(named)
        return (f"{told} and {more} more" if more else told)[:MEMBERS_TEXT]

    def _find(self, name: str) -> Member | None:
        return next((m for m in self.view.members if name == m.id or name in m.addresses), None)

    def _on_neighbors_ready(self, message: NeighborsReady, now_s: float) -> list[Effect]:
        request = self.requests.get(message.node)
        if request is None:
            return []
        self.out_of_reach = {each for each in self.out_of_reach if message.node not in each}
        self.out_of_reach |= {link(message.node, peer) for peer in message.failed}
        joiner = Joiner(message.node, message.addresses, tuple(sorted(message.links)), life=request.life)
        self.admission.opened(Wanting(joiner, request.blocking, now_s, message.links))
        due_s = self._admit_at_s
        return self._admit(now_s) if due_s is not None and now_s >= due_s else []

    def _admit(self, now_s: float) -> list[Effect]:
        """All have opened their links, or had the time to: those that can be are let in together."""
        self.admission.since_s = None
        return self._enqueue(AddJoiners(), now_s) if self.admission.admissible(self.view) else []

    def _tell_joiner(self, view: View) -> list[Effect]:
        """The view with the joiner is active: here is who sends it what (Algorithms 1 and 2)."""
        effects: list[Effect] = []
        new = [each.node for each in view.joining if each.sources and each.blocking]
        for joining in view.joining:
            if not joining.sources:
                continue
            self.requests.pop(joining.node, None)
            self.admission.forget({joining.node})
            full = [source for source in joining.sources if source not in new]
            message = ReplicationPlan(
                view=view,
                step=self.sync.step,
                step_s=self.admission.costs()[1] or 0.0,
                flushed=(self.term, self.last_flush - (self.flush is not None)),
                fellows=tuple(source for source in joining.sources if source in new),
                turn=(new.index(joining.node), len(new)) if joining.blocking else (0, 1),
                **self._shards(joining.node, full),
            )
            effects += self.send(joining.node, message)
        return effects

    def _shards(self, joiner: str, full: list[str]) -> dict[str, Any]:
        """Who sends how much, of those who have all of the state (Algorithms 1 and 2)."""
        if not full:
            return {"shard_bytes": 1, "shards_by_source": {}}
        total, smallest, largest = self.monitor.state_sizes()
        total = max(total, 1)
        plan = shard_plan.STRATEGIES[self.strategy](
            total,
            max(1, min(smallest, total)),
            max(1, min(largest, total)),
            self.monitor.sources(joiner, full),
        )
        shards = {source: plan.shards_by_source.get(source, 0) for source in full}
        return {"shard_bytes": plan.shard_bytes, "shards_by_source": shards}

    def _on_ready(self, node: str, in_s: float, now_s: float) -> list[Effect]:
        if node in self.view.voter_ids:
            return []  # It is in already, and about to notice.
        if node in self.view.member_ids:
            return []  # It votes once it has taken part in a step.
        if node in self.view.observer_ids and in_s:
            self.ready_at_s[node] = now_s + in_s
            return self._promote_early(now_s)
        if node in self.view.observer_ids:
            coming: list[Effect] = [] if self.parked else self.send(node, Answer(ok=True, text="next"))
            return coming + self._enqueue(Promote(node=node), now_s)
        return self.send(
            node, Expelled(node=node, reason="it is not in the view any more", key=self.view.key)
        )

    # --- scale-in, connect-link, disconnect-link (Fig. 4b to d) ---

    def _on_scale_in(self, node: str, now_s: float) -> list[Effect]:
        if self.view.find(node) is None:
            return self.send(
                node, Expelled(node=node, reason="it is not in the view any more", key=self.view.key)
            )
        if self._is_queued(Remove(node=node)):
            return []
        told: list[Effect] = [Happened("scale-in", node, "asks to leave", self.sync.step)]
        return told + self._enqueue(Remove(node=node), now_s)

    def _on_link_request(
        self, message: ConnectLinkRequest | DisconnectLinkRequest, a: str, b: str, asker: str, now_s: float
    ) -> list[Effect]:
        ends = [self._find(a), self._find(b)]
        if ends[0] is None or ends[1] is None:
            unknown = a if ends[0] is None else b
            text = f"{unknown!r} is no member (members: {self._members})"
            return self.send(asker, Answer(ok=False, text=text))
        each = link(ends[0].id, ends[1].id)
        connect = isinstance(message, ConnectLinkRequest)
        healed = isinstance(message, ConnectLinkRequest) and message.healed
        if healed and (each in self.view.links or each in self.unwanted):
            return []
        asker = "" if healed else asker
        change = AddLink(asker=asker, link=each) if connect else RemoveLink(asker=asker, link=each)
        if self._is_queued(change):
            return []
        kind = "connect-link" if connect else "disconnect-link"
        why = "it carries again" if healed else "requested"
        told: list[Effect] = [Happened(kind, f"{each[0]} - {each[1]}", why, self.sync.step)]
        return told + self._enqueue(change, now_s)

    # --- proposals ---

    def _is_queued(self, change: Change) -> bool:
        if isinstance(change, AddJoiners):
            return any(isinstance(each, AddJoiners) for each in self.queue)
        return change in self.queue or (self.proposal is not None and self.proposal.change == change)

    def _enqueue(self, change: Change, now_s: float) -> list[Effect]:
        if self._is_queued(change) or len(self.queue) >= MAX_QUEUE:
            return []
        self.queue.append(change)
        return self._propose_next(now_s)

    def _propose_next(self, now_s: float) -> list[Effect]:
        """Take the next change that still makes sense and send PREPARE for its view."""
        effects: list[Effect] = []
        while self.queue and self.proposal is None and self.flush is None and not self.sync.frozen:
            change = self.queue.popleft()
            if isinstance(change, AddJoiners):
                change = AddJoiners(joiners=self.admission.admissible(self.view))
                for each in change.joiners:
                    wanting = self.admission.wanting[each.node]
                    for peer, reading in wanting.links.items():
                        self.monitor.reading(each.node, peer, reading, wanting.measured_s)
            if isinstance(change, Repair):
                change = Repair(links=self._untried(change) or self._missing_links(self.view))
            try:
                view = self._planned(
                    views.apply_change(
                        self.view, change, self._next_key(), self.sync.step + 1, self._impossible(self.view)
                    )
                )
            except (Nothing, PlanInfeasible) as reason:
                effects += self._answer(change, False, str(reason))
                continue
            told = told_against(self.view, view)
            self.proposal = _Proposal(view, told, change, now_s, now_s + REPEAT_EVERY_S)
            effects += self.send(EVERYONE, Prepare(view=told))
        return effects

    def _put_off(self, change: Change) -> None:
        """Another view comes first, and its trees are planned for what links carry now."""
        if not isinstance(change, Replan):
            self.queue.appendleft(change)

    def _next_key(self) -> tuple[int, int]:
        self.seq = max(self.seq, self.view.seq) + 1
        return (self.term, self.seq)

    def _planned(self, view: View) -> View:
        return views.with_trees(view, self._graph(view), self.policy, self.bundler)

    def _graph(self, view: View) -> nx.Graph:
        """The overlay of a view's members, with what policies may want to know (sync_plan.py)."""
        graph = self.monitor.graph(view.member_ids, view.links)
        graph.graph["roots"] = tuple(tree.root for tree in self.view.trees)
        graph.graph["result"] = self.admission.costs()[0], self.sync.chunk_count
        return graph

    def _replan_if_worth_it(self, now_s: float) -> list[Effect]:
        """Links may carry more or less than when the trees were planned."""
        result_bytes, step_s = self.admission.costs()
        if self.busy or self.parked or self.sync.frozen or not result_bytes or step_s is None:
            return []
        graph = self._graph(self.view)
        why = self.replanning.look(self.view, graph, self.policy, result_bytes, step_s, now_s)
        return self._enqueue(Replan(why=why), now_s) if why else []

    def _on_prepare_failed(self, message: PrepareFailed, now_s: float) -> list[Effect]:
        if self.proposal is None or message.key != self.proposal.view.key:
            return []
        change, self.proposal = self.proposal.change, None
        a, b = message.link
        if isinstance(change, AddJoiners):
            self.admission.forget({a, b})  # They ask again.
            return self._admit(now_s) + self._propose_next(now_s)
        another = message.link not in self.out_of_reach and message.link not in self.view.links
        if isinstance(change, Remove | Repair):
            self.out_of_reach.add(message.link)
        effects = self._answer(change, False, f"the link {a} - {b} cannot be opened ({message.reason})")
        if isinstance(change, Remove) and another:
            self.queue.appendleft(change)  # Another link may take the place of this one.
        elif isinstance(change, Repair) and another and len(self.queue) < MAX_QUEUE:
            self.queue.append(change)  # The other links are wanted still, but whoever asked comes first.
        elif isinstance(change, Remove):
            return effects + self._leave_by_flush(change.node, "no link can take its place", now_s)
        return effects + self._propose_next(now_s)

    def _leave_by_flush(self, node: str, reason: str, now_s: float) -> list[Effect]:
        self.leaving_at_flush = node
        return self.start_flush(f"{node} leaves and {reason}", now_s)

    def _answer(self, change: Change, ok: bool, text: str) -> list[Effect]:
        return self.send(change.asker, Answer(ok=ok, text=text)) if change.asker else []

    def _done(self, change: Change, view: View) -> list[Effect]:
        """Tell people, and who asked, that the change is in force."""
        step = self.sync.step
        count = f"{len(view.members)} members, {len(view.links)} links"
        match change:
            case AddJoiners(joiners=joiners):
                return [
                    Happened("replication", each.node, f"starts to pull the state ({mode(each)})", step)
                    for each in joiners
                ]
            case Promote(early=True):
                return []  # It is told once it has a vote.
            case Promote(node=node):
                return [Happened("joined", node, f"now {count}", step)]
            case Remove(node=node):
                return [Happened("left", node, f"now {count}", step)]
            case AddLink(link=(a, b)):
                self.unwanted.discard((a, b))
                self.out_of_reach.discard((a, b))
                answer = self._answer(change, True, f"the link {a} - {b} is open")
                return [*answer, Happened("link-up", f"{a} - {b}", f"now {count}", step)]
            case Repair(links=links):
                return [Happened("link-up", f"{a} - {b}", f"now {count}", step) for a, b in links]
            case RemoveLink(link=(a, b), lost=lost):
                if not lost:
                    self.unwanted.add((a, b))
                answer = self._answer(change, True, f"the link {a} - {b} is closed")
                return [*answer, Happened("link-down", f"{a} - {b}", f"now {count}", step)]
            case Replan(why=why):
                return [Happened("new-plan", self.me, why, step)]
        return []

    def _done_meanwhile(self, proposed: _Proposal) -> list[Effect]:
        """Others have completed a step in the view proposed, and this node has not: nobody else would tell of it."""
        if proposed.change in self.queue:
            self.queue.remove(proposed.change)
        return self._done(proposed.change, proposed.view)

    def _repair(self, view: View) -> list[Effect]:
        """Where a loss has left the overlay thin, add links as if somebody had asked."""
        is_queued = any(isinstance(change, Repair) for change in self.queue)
        if not is_queued and len(self.queue) < MAX_QUEUE and self._missing_links(view):
            self.queue.append(Repair())
        return []

    def _missing_links(self, view: View) -> tuple[Link, ...]:
        impossible = self._impossible(view)
        return tuple(views.missing_links(view.members, view.observers, view.links, MIN_DEGREE, impossible))

    def _untried(self, repair: Repair) -> tuple[Link, ...]:
        """Those of its links that may still be opened: not all wait for a node that can open none."""
        view, impossible = self.view, self._impossible(self.view)
        return tuple(
            each
            for each in repair.links
            if each not in view.link_set and each not in impossible and view.node_set.issuperset(each)
        )

    def _impossible(self, view: View) -> _Impossible:
        """Links that somebody wanted away, that are dead or could not be opened, or whose ends can only dial."""
        silent = frozenset(member.id for member in view.members if not member.addresses)
        return _Impossible(self.unwanted | self.out_of_reach | self.overlay.denials, silent)

    # --- flush and install ---

    def start_flush(self, reason: str, now_s: float) -> list[Effect]:
        """Stop the attempt everywhere and find out where everybody is."""
        proposed = self.flush.proposed if self.flush else self.proposal
        if self.proposal is not None:
            self._put_off(self.proposal.change)
            self.proposal = None
        self.last_flush += 1
        self.last_install = None
        self.flush = _FlushState(
            self.last_flush, repeat_at_s=now_s + REPEAT_EVERY_S, reason=reason, proposed=proposed
        )
        return self.send(EVERYONE, self._flush_message())

    def _flush_message(self) -> Flush:
        assert self.flush is not None
        return Flush(
            term=self.term,
            number=self.flush.number,
            scheduler=self.me,
            key=self.view.key,
            step=0 if self.sync.began_here else self.sync.step,  # We may have to pass on the commit before.
        )

    def _on_flush_ok(self, answer: FlushOk) -> list[Effect]:
        if answer.key < self.view.key and self.view.find(answer.node) is None:
            return self._expel(answer.node)
        if answer.term != self.term:
            return []
        if self.flush is None or answer.number != self.flush.number:
            late = self.last_install is not None and answer.number == self.last_install.number
            return self._again(answer.node) if late else []
        answers = self.flush.answers
        if answer.node not in answers and len(answers) >= MAX_QUEUE + 2 * len(self.view.node_ids):
            return []  # So many nodes there are not.
        answers[answer.node] = answer
        if answer.view is not None:
            self.flush.awaited = ""  # Others may have to answer in that view.
        return self._install_if_complete()

    @property
    def last_view(self) -> View | None:
        """That the last INSTALL, which is kept whole, told of."""
        view = self.last_install.view if self.last_install else None
        return view if isinstance(view, View) else None

    def _again(self, node: str) -> list[Effect]:
        """The INSTALL may have been lost on its way to this node."""
        assert self.last_install is not None and self.last_view is not None
        if self.last_view.find(node) is None:
            return self._expel(node)
        return self.send(node, self.last_install)

    def _expel(self, node: str) -> list[Effect]:
        key = max(self.view.key, self.last_view.key if self.last_view else (0, 0))
        return self.send(node, Expelled(node=node, reason="the cluster went on without it", key=key))

    def _install_if_complete(self) -> list[Effect]:
        assert self.flush is not None
        answers, reachable = self.flush.answers, self.overlay.reachable
        if self.flush.awaited in reachable and self.flush.awaited not in answers:
            return []
        answers = {node: answer for node, answer in answers.items() if node in reachable}
        if self.me not in answers:
            return []
        known = [self.view, *(answer.view for answer in answers.values() if answer.view)]
        base = max(known, key=lambda view: view.key)
        # A blocking joiner that has not heard of the view it entered with cannot answer. An observer that answers too
        # late would have to pull the state anew.
        due = {*base.voter_ids} if self.flush.repeated else base.node_set
        self.flush.awaited = next(iter((due & reachable) - answers.keys()), "")
        if self.flush.awaited:
            return []
        priors = self._priors(base, answers)
        # What linked them may have been a node that `base` has dropped, this one even, or that cannot go on.
        able = self._able(answers)
        parts = views.parts(base.member_set & able, self.overlay.live_links()) or [set()]
        # Who cannot go on consents by its answer, but to one part only: whoever is cut off may ask it, too.
        consent = base.member_set & (answers.keys() - able) if len(parts) == 1 else set()
        others = priors if base.key > self.view.key else (*priors, *self.sync.without_us())
        missing = [self._without_quorum(base, others, part | consent) for part in parts]
        if "" not in missing:
            ours = next((part for part in parts if self.me in part), set())
            self.cut_off = base.member_set & able - ours - {self.me}
            return self._park(missing[0])
        cut_off = base.member_set - parts[missing.index("")]
        rest = answers.keys() - cut_off
        if self.stateless == self.me and rest & base.member_set == {self.me}:
            return [Out("nobody who has the state is left")]
        return self._install(base, priors, {node: answers[node] for node in sorted(rest)})

    def _able(self, answers: dict[str, FlushOk]) -> set[str]:
        """Who has answered, and can be told the result of one step at most and then go on from there."""
        top = self._top(answers)
        able = {node for node, answer in answers.items() if top - 1 <= answer.step <= top}
        holders = {node for node in able if answers[node].step == top and not answers[node].began_here}
        if not holders:
            return {node for node in able if answers[node].step == top}
        return able - {self.stateless} if holders - {self.stateless} else able

    def _top(self, answers: dict[str, FlushOk]) -> int:
        """The step to go on with: the one after the last whose result somebody has.

        Who was told to begin later heard of a step that only the dead have completed. If nobody has a result, all
        were told, and the last step that one was told of is where its state begins.
        """
        steps = [answer.step for answer in answers.values() if not answer.began_here]
        return max(steps or (answer.step for answer in answers.values()))

    def _priors(self, base: View, answers: dict[str, FlushOk]) -> tuple[Electorate, ...]:
        """Older views that somebody may still be in: none, if anybody has completed a step in `base`."""
        if any(answer.commit is not None and answer.commit.key == base.key for answer in answers.values()):
            return ()
        if base.key == self.view.key:
            return self.sync.priors
        return next(answer.priors for answer in answers.values() if answer.view == base)

    def _without_quorum(self, base: View, others: tuple[Electorate, ...], alive: set[str]) -> str:
        electorates = [views.electorate(base), *others]
        voters = lacking(electorates, alive, self.overlay.crashed, self.overlay.has_word)
        if voters is None:
            return ""
        present = sum(node in alive for node in voters.members)
        return f"only {present} of {len(voters.members)} members can be reached"

    def _park(self, reason: str) -> list[Effect]:
        if self.cut_off:
            cut_off = ", ".join(sorted(self.cut_off))
            reason += f" without nodes that cannot go on (there is no other way to {cut_off})"
        if self.parked == reason:
            return []
        self.parked = reason
        return [Parked(reason)]

    def _install(
        self, base: View, priors: tuple[Electorate, ...], answers: dict[str, FlushOk]
    ) -> list[Effect]:
        assert self.flush is not None
        leaver = self.leaving_at_flush
        alive = self._able(answers)
        top = max(
            (answers[node] for node in alive),
            key=lambda answer: (
                answer.step,
                not answer.began_here,
                answer.node != leaver,
                answer.node == self.me,
                answer.node,
            ),
        )
        alive = self._without_leaver(alive, base, top.node)
        behind = any(answers[node].step == top.step - 1 for node in alive if base.find(node))
        scheduler = self.me if self.me in alive and self.me in base.member_ids else ""
        self.seq = max(self.seq, base.seq)
        view = views.survivors(base, alive, self.overlay.live_links(), self._next_key(), scheduler)
        view = self._planned(view)
        install = Install(
            term=self.term,
            number=self.flush.number,
            view=view,
            priors=(views.electorate(base), *priors),
            step=top.step,
            deal=top.deal or self.sync.deal,
            holder=top.node if behind else "",
            commit=(top.commit or self.sync.last_commit) if behind else None,
        )
        reason, proposed = self.flush.reason, self.flush.proposed
        self.flush, self.last_install = None, install
        effects = self._unpark()
        if proposed is not None and proposed.view.key == base.key != self.view.key:
            effects += self._done_meanwhile(proposed)
        for node in sorted({*base.node_ids, *answers} - {*view.node_ids}):
            stays_away = "left" if node == leaver else "expelled"
            kind = "node-failure" if node not in self.overlay.reachable else stays_away
            error = self.monitor.ending(node)
            if error is not None:
                effects.append(Happened("left", node, f"its script ended with {error}", top.step))
            else:
                effects.append(Happened(kind, node, reason, top.step))
            effects += self._expel(node)
        for a, b in sorted(set(base.links) - set(view.links)):
            if view.find(a) and view.find(b):
                effects.append(Happened("link-failure", f"{a} - {b}", reason, top.step))
        effects += self.send(EVERYONE, replace(install, view=told_against(base, view)))
        elsewhere = sorted(node for node in alive & view.node_set if answers[node].key != base.key)
        return effects + [effect for node in elsewhere for effect in self.send(node, install)]

    def _without_leaver(self, alive: set[str], base: View, holder: str) -> set[str]:
        """Let the leaver go with this flush, unless the rest needs it: for its links, or its result."""
        leaver, self.leaving_at_flush, self.stateless = self.leaving_at_flush, "", ""
        rest = alive - {leaver}
        members = rest & set(base.member_ids)
        links = [each for each in self.overlay.live_links() if members.issuperset(each)]
        return rest if members and leaver != holder and views.is_connected(members, links) else alive

    def _unpark(self) -> list[Effect]:
        was, self.parked, self.cut_off = self.parked, "", frozenset()
        return [Parked(None)] if was else []

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert self.flush is None or self.proposal is None
        assert len(self.queue) <= MAX_QUEUE
        assert self.admission.wanting.keys() | self.admission.asked_s.keys() <= self.requests.keys()
        assert len(self.requests) <= MAX_QUEUE
