"""Scale-out, the scheduler's half (Chaos, Fig. 4a): from the first request to the vote of a new member.

    asks --NegotiationPlan--> opens links --NeighborsReady--> admitted --ReplicationPlan--> observer or member
         --ScaleOutReady, or soon ready--> promoted

When those that wait are let in together is admission.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..protocols.effects import Effect, Happened
from ..protocols.messages import (
    Answer,
    Expelled,
    Member,
    NegotiationPlan,
    NeighborsReady,
    ReplicationPlan,
    ScaleOutRefused,
    ScaleOutRequest,
    View,
    link,
)
from . import link_plan, shard_plan
from .admission import Wanting
from .changes import Changes
from .flushes import Flushes
from .repairs import Repairs
from .tenure import MAX_QUEUE, Tenure
from .views import Entrant, Promote, Votes

MAX_NEIGHBORS = 64  # Named in one NegotiationPlan.
# A member that reports so long after a later process of its name has asked is another node; as RIVAL_S of the
# transport. And one that asks so long after it has asked does not know that it is a member. Less than until a joiner
# asks again.
NAMESAKE_S = 2.5


class Joins:
    """The joins under way at one scheduler. `digest` and `spec` are those of the model that the cluster trains."""

    def __init__(
        self, tenure: Tenure, repairs: Repairs, changes: Changes, flushes: Flushes,
        digest: str, spec: bytes, strategy: str,
    ) -> None:  # fmt: skip
        self.tenure, self.repairs, self.changes, self.flushes = tenure, repairs, changes, flushes
        self.digest, self.spec, self.strategy = digest, spec, strategy
        self.ready_at_s: dict[str, float] = {}  # Observers that are about to have the state: when they will.
        self.stepped_s = 0.0
        self.stepped_in = (0, 0)  # The view after the last step.
        # Members whose name a later process has asked for: its life, and when it asked first.
        self.namesakes: dict[str, tuple[int, float]] = {}
        self.astray_s: dict[str, float] = {}  # Members that have asked to be let in: since when.

    @property
    def admit_at_s(self) -> float | None:
        """When to let in the joiners that wait for others; None if none waits."""
        tenure = self.tenure
        return tenure.admission.at_s(tenure.view) if tenure.sync.view is not None else None

    def tick(self, now_s: float) -> list[Effect]:
        at_s = self.admit_at_s
        return self.changes.admit(now_s) if at_s is not None and now_s >= at_s else []

    # --- who asks ---

    def on_scale_out(self, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        """A joiner asks to be let in."""
        tenure, node = self.tenure, request.node
        if tenure.parked:
            return []  # We do not know when we go on, so the joiner's patience decides.
        if self.digest and request.digest and request.digest != self.digest:
            return tenure.send(node, ScaleOutRefused(reason="the model differs", spec=self.spec))
        namesake = tenure.view.find(node) if node in tenure.view.member_ids else None
        if namesake is not None and request.life == namesake.life:
            return self._on_astray(request, now_s)
        if namesake is not None and self._may_be_reborn(request, now_s):
            return []
        if namesake is not None:
            reason = f"a node named {node!r} is in the cluster already; choose another with --name"
            return tenure.send(node, ScaleOutRefused(reason=reason))
        neighbors, unknown = self._neighbors_for(request)
        if unknown:
            reason = f"the wanted neighbour {unknown!r} is no member (members: {tenure.members_named})"
            return tenure.send(node, ScaleOutRefused(reason=reason))
        told: list[Effect] = []
        if tenure.admission.knows(node, request.life, {*request.linked}):
            told += tenure.send(node, Answer(ok=True, text=tenure.admission.why_not_yet(node, tenure.view)))
            if any(each.node == node for each in tenure.admission.admissible(tenure.view)):
                return told + self.changes.admit(now_s)
        told += self._begin(request, now_s)
        fellows = () if request.neighbors else self._fellows_for(request, now_s)
        return told + tenure.send(node, NegotiationPlan(neighbors=(*neighbors, *fellows)[:MAX_NEIGHBORS]))

    def _begin(self, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        """The joiner opens its links from now on; forget what it had done before."""
        tenure, node = self.tenure, request.node
        tenure.admission.forget({node})  # It may have links to other joiners by now.
        tenure.admission.asks(node, now_s)
        self.ready_at_s.pop(node, None)  # It was ready, or about to be, and has lost its links since.
        for each in (Promote(node=node), Promote(node=node, early=True)):
            tenure.withdraw(each)
        told: list[Effect] = []
        if tenure.requests.pop(node, None) is None:
            told.append(Happened("scale-out", node, "asks to join", tenure.sync.step))
        tenure.requests[node] = request
        if len(tenure.requests) > MAX_QUEUE:
            forgotten = next(iter(tenure.requests))  # It asks again, if it is still there.
            del tenure.requests[forgotten]
            tenure.admission.forget({forgotten})
        return told

    def _fellows_for(self, request: ScaleOutRequest, now_s: float) -> list[Member]:
        """Other joiners, which will fetch the same state: first those that it has a link to, then the last to ask."""
        tenure = self.tenure
        fresh = [tenure.requests[node] for node in tenure.admission.fresh(now_s) if node != request.node]
        others = [each for each in fresh if each.addresses]
        others.sort(key=lambda each: each.node not in request.linked)
        return [
            Member(id=each.node, addresses=each.addresses, joined_step=0, life=each.life)
            for each in others[: request.degree]
        ]

    def _may_be_reborn(self, request: ScaleOutRequest, now_s: float) -> bool:
        """May a member's process have been started again? Not if the member has reported a while after this request.

        While a flush is under way, this cannot be known yet.
        """
        life, asked_s = self.namesakes.get(request.node, (0, 0.0))
        if life != request.life or self.tenure.flush is not None:
            asked_s = now_s
            self.namesakes[request.node] = request.life, asked_s
        record = self.tenure.monitor.nodes.get(request.node)
        return record is None or record.reported_s < asked_s + NAMESAKE_S

    def _on_astray(self, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        """A member asks to be let in. Has it lost touch just before the view that made it a member?

        Then it does not know of that view, and all would wait for it. But the request may be an old one: the member
        may know by now, or have said itself that it does not (AbortRequest). If it asks again, it does not know; but
        two old requests may wait at a scheduler that is seconds late.
        """
        node = request.node
        if not request.again or self.tenure.flush is not None:
            return []
        if now_s < self.astray_s.setdefault(node, now_s) + NAMESAKE_S:
            return []
        del self.astray_s[node]
        self.flushes.goes_without_state(node)
        return self.flushes.start(f"{node} asks to be let in again", now_s)

    def _neighbors_for(self, request: ScaleOutRequest) -> tuple[list[Member], str]:
        """The members that the joiner is to link to; or the name of a wanted neighbour that is no member."""
        view = self.tenure.view
        found = {wanted: self.tenure.find(wanted) for wanted in request.neighbors}
        unknown = [wanted for wanted, member in found.items() if member is None]
        if unknown and not request.again:
            return [], unknown[0]
        if wanted := [member for member in found.values() if member is not None]:
            return wanted, ""
        # The joiner dials, so whoever can only dial is no neighbour for it, unless nobody else is there.
        members = [m for m in view.members if m.addresses] or view.members
        linked = [m for m in view.members if request.stuck and m.id in request.linked]
        chosen = self._least_linked(linked, request.degree)
        chosen |= self._least_linked([m for m in members if m.id not in chosen], request.degree - len(chosen))
        return [m for m in view.members if m.id in chosen], ""

    def _least_linked(self, members: Sequence[Member], count: int) -> set[str]:
        degrees = [(m.id, len(self.tenure.view.neighbors(m.id))) for m in members]
        return set(link_plan.choose_neighbors(degrees, count)) if count and degrees else set()

    # --- who has opened its links ---

    def on_neighbors_ready(self, message: NeighborsReady, now_s: float) -> list[Effect]:
        """A joiner's links are open, or cannot be opened."""
        request = self.tenure.requests.get(message.node)
        if request is None:
            return []
        self.repairs.tried(message.node, (link(message.node, peer) for peer in message.failed))
        joiner = Entrant(message.node, message.addresses, tuple(sorted(message.links)), life=request.life)
        self.tenure.admission.opened(Wanting(joiner, request.blocking, now_s, message.links))
        return self.tick(now_s)

    def switched(self, view: View) -> list[Effect]:
        """A view is active: tell the joiners that are new in it who sends them what (Algorithms 1 and 2)."""
        tenure = self.tenure
        effects: list[Effect] = []
        new = [each.node for each in view.joining if each.sources and each.blocking]
        for joining in view.joining:
            if not joining.sources:
                continue
            tenure.requests.pop(joining.node, None)
            tenure.admission.forget({joining.node})
            full = [source for source in joining.sources if source not in new]
            message = ReplicationPlan(
                view=view,
                step=tenure.sync.step,
                step_s=tenure.admission.costs()[1] or 0.0,
                flushed=(tenure.term, self.flushes.ended),
                fellows=tuple(source for source in joining.sources if source in new),
                turn=(new.index(joining.node), len(new)) if joining.blocking else (0, 1),
                **self._shards(joining.node, full),
            )
            effects += tenure.send(joining.node, message)
        self._forget_members(view)
        self.astray_s = {node: since_s for node, since_s in self.astray_s.items() if node in view.member_set}
        self.namesakes = {node: each for node, each in self.namesakes.items() if node in view.member_set}
        return effects

    def _forget_members(self, view: View) -> None:
        """Forget the requests of nodes that are members by now: they asked while that view was on its way."""
        requests = self.tenure.requests
        for node, request in [*requests.items()]:
            member = view.find(node) if node in view.member_set else None
            if member is not None and member.life == request.life:  # A later life still wants in.
                del requests[node]
                self.tenure.admission.forget({node})

    def _shards(self, joiner: str, full: list[str]) -> dict[str, Any]:
        """How much each source sends, of those that have all of the state (Algorithms 1 and 2)."""
        if not full:
            return {"shard_bytes": 1, "shards_by_source": {}}
        monitor = self.tenure.monitor
        total, smallest, largest = monitor.state_sizes()
        total = max(total, 1)
        plan = shard_plan.STRATEGIES[self.strategy](
            total,
            max(1, min(smallest, total)),
            max(1, min(largest, total)),
            monitor.sources(joiner, full),
        )
        shards = {source: plan.shards_by_source.get(source, 0) for source in full}
        return {"shard_bytes": plan.shard_bytes, "shards_by_source": shards}

    # --- who has the state ---

    def on_ready(self, node: str, in_s: float, now_s: float) -> list[Effect]:
        """A joiner has the state, or will have it in so many seconds."""
        tenure, view = self.tenure, self.tenure.view
        if node in view.member_set:
            return []  # It is about to notice, and votes once it has taken part in a step.
        if node in view.observer_ids and in_s:
            self.ready_at_s[node] = now_s + in_s
            return self._promote_early(now_s)
        if node in view.observer_ids:
            coming: list[Effect] = [] if tenure.parked else tenure.send(node, Answer(ok=True, text="next"))
            return coming + self.changes.enqueue(Promote(node=node), now_s)
        return tenure.send(node, Expelled(node=node, reason="it is not in the view any more", key=view.key))

    def stepped(self, now_s: float) -> list[Effect]:
        """A step is complete: members without a vote have taken part in it, and get one by the next view.

        Joiners that ask just now are to enter with the same view, as a step may take as long as a state does. But
        they may be stuck, so votes wait for them for one step at most.
        """
        self.stepped_s = now_s
        view, admission = self.tenure.view, self.tenure.admission
        others = bool(admission.wanting) or not admission.is_complete(now_s)
        is_due = view.voteless_ids and (self.stepped_in == view.key or not others)
        self.stepped_in = view.key
        effects = self.changes.enqueue(Votes(), now_s) if is_due else []
        return effects + self._promote_early(now_s)

    def _promote_early(self, now_s: float) -> list[Effect]:
        """Promote the joiners that will have the state by the end of the step under way."""
        observers, usual_s = self.tenure.view.observer_set, self.tenure.admission.costs()[1]
        self.ready_at_s = {node: at_s for node, at_s in self.ready_at_s.items() if node in observers}
        near = [node for node, at_s in self.ready_at_s.items() if at_s <= self.stepped_s + (usual_s or 0.0)]
        return [
            effect for node in near for effect in self.changes.enqueue(Promote(node=node, early=True), now_s)
        ]
