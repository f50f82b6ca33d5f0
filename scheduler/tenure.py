"""One term of the scheduler's role: what its parts share.

The verbs are what parts do to it; none puts another object in the place of a field.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import networkx as nx

from ..protocols.effects import Effect
from ..protocols.errors import PlanInfeasible
from ..protocols.messages import FlushOk, Member, Routed, ScaleOutRequest, View, ViewChange
from ..protocols.overlay import Overlay
from ..protocols.step_sync import StepSync
from . import views
from .admission import Admission, Costs
from .monitor import ClusterMonitor
from .sync_plan import Bundler, SyncPolicy, best_single_tree
from .views import Change, Replan

REPEAT_EVERY_S = 0.5  # PREPARE and FLUSH are sent again to make up for what was lost with a connection.
MAX_QUEUE = 1024
MEMBERS_NAMED, MEMBERS_TEXT = 20, 3000  # In a refusal, whose text is bounded.

Send = Callable[[str, Routed], list[Effect]]


@dataclass(slots=True)
class Proposal:
    """A view that PREPARE asks for."""

    view: View
    told: View | ViewChange  # The same, as it is sent.
    change: Change
    new: tuple[str, ...]  # Those that get a vote.
    since_s: float
    repeat_at_s: float


@dataclass(slots=True)
class FlushState:
    """A flush under way."""

    number: int
    answers: dict[str, FlushOk] = field(default_factory=dict)
    repeat_at_s: float = 0.0
    repeated: bool = False
    reason: str = ""
    awaited: str = ""  # One of those who must answer: until it has, there is nothing to look through.
    proposed: Proposal | None = None  # When it began: somebody may have gone on in that view.


class Tenure:
    """The role of node `me` in one term. `sync` and `overlay` are the host's, read only here."""

    def __init__(
        self, me: str, term: int, sync: StepSync, overlay: Overlay, monitor: ClusterMonitor, send: Send,
        policy: SyncPolicy, bundler: Bundler, costs: Costs,
    ) -> None:  # fmt: skip
        self.me, self.term = me, term
        self.sync, self.overlay, self.monitor, self.send = sync, overlay, monitor, send
        self.policy, self.bundler = policy, bundler
        # Of joiners whose links are open.
        self.admission = Admission(costs, lambda: monitor.state_sizes()[0])
        self.requests: dict[str, ScaleOutRequest] = {}  # Joiners that are not in a view yet.
        self.queue: deque[Change] = deque()
        self.proposal: Proposal | None = None
        self.flush: FlushState | None = None
        self.parked = ""
        self.unplanned = ""  # Why the last view has one tree and not those of the policy.
        self.seq = 0

    # --- verbs ---

    def go_on_from(self, seq: int) -> None:
        """The next view of this term gets the number after `seq`."""
        self.seq = seq

    def next_key(self) -> tuple[int, int]:
        """The key of the next view."""
        self.seq = max(self.seq, self.view.seq) + 1
        return (self.term, self.seq)

    def propose(self, proposal: Proposal | None) -> None:
        """This proposal is under way; None: none is any more."""
        self.proposal = proposal

    def flush_by(self, flush: FlushState | None) -> None:
        """A flush is under way; None: it is over."""
        self.flush = flush

    def park(self, reason: str) -> None:
        """Nothing can be decided, for this reason; "": it can again."""
        self.parked = reason

    def put_off(self, change: Change) -> None:
        """Another view comes before this change. New trees need not be asked for again: that view has new ones."""
        if not isinstance(change, Replan):
            self.queue.appendleft(change)

    def withdraw(self, change: Change) -> None:
        """Take a change out of the queue."""
        if change in self.queue:
            self.queue.remove(change)

    # --- what several parts ask ---

    @property
    def view(self) -> View:
        assert self.sync.view is not None
        return self.sync.view

    @property
    def busy(self) -> bool:
        """Is a change under way, or waiting?"""
        return self.flush is not None or self.proposal is not None or bool(self.queue)

    def find(self, name: str) -> Member | None:
        """The member of that name, or at that address."""
        return next((m for m in self.view.members if name == m.id or name in m.addresses), None)

    @property
    def members_named(self) -> str:
        """The members with their addresses, for people: the first ones, if they are many."""
        named = self.view.members[:MEMBERS_NAMED]
        told = ", ".join(f"{member.id} ({', '.join(member.addresses) or 'dials only'})" for member in named)
        more = len(self.view.members) - len(named)
        return (f"{told} and {more} more" if more else told)[:MEMBERS_TEXT]

    def planned(self, view: View, must_be: bool = True) -> View:
        """The same view, with trees: if the policy finds none and it `must_be`, the best single one.

        Raises: PlanInfeasible.
        """
        why = ""
        try:
            view = views.with_trees(view, self.graph(view), self.policy, self.bundler)
        except PlanInfeasible as error:
            if not must_be:
                raise
            why = str(error)
            view = views.with_trees(view, self.graph(view), best_single_tree, self.bundler)
        self.unplanned = why
        return view

    def graph(self, view: View) -> nx.Graph:
        """The overlay of a view's members, with what policies may want to know (sync_plan.py)."""
        graph = self.monitor.graph(view.member_ids, view.links)
        graph.graph["roots"] = tuple(tree.root for tree in self.view.trees)
        graph.graph["result"] = self.admission.costs()[0], self.sync.sums.chunk_count
        return graph
