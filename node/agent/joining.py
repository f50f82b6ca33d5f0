"""How a node comes into a cluster: it founds one, or is let in; and becomes a member.

The rules of a join are protocols/scale_out.py. Here is what connects them: what a joiner hears of its links
and its state, a clock that was set back, and the moment at which the view makes it a member. A blocking
joiner is a member before it has the state, a streaming one after.
"""

from __future__ import annotations

from ...protocols.asking import JoinState, Otherwise
from ...protocols.effects import ClosePeer, DiscardState, Effect, Founded, Joined
from ...protocols.events import (
    AddressesRead,
    BacklogFull,
    CaughtUp,
    Event,
    ManifestBad,
    ManifestKnown,
    ReadingsTaken,
    Received,
    SeedsFound,
    ShardBad,
    ShardStored,
    StateRejected,
    Tick,
)
from ...protocols.join_news import JoinNews
from ...protocols.messages import (
    Answer,
    DialBackReply,
    ManifestReply,
    Member,
    NegotiationPlan,
    NoSnapshot,
    Outlived,
    ScaleOutRefused,
    ScaleOutRequest,
    Shard,
    View,
)
from ...protocols.scale_out import LIFE_STEP, Joiner
from ...scheduler.views import with_trees
from .node import Node, Phase
from .recovery import StepRecovery
from .reports import Reports
from .role import Role
from .routes import Routes, all_to

SECONDS_PER_LINK = {"in-band": 0.0, "iperf3": 4.0}  # That measuring adds to a joiner's patience.
OF_THE_STATE = (BacklogFull, CaughtUp, StateRejected, ManifestKnown, ManifestBad, ShardStored, ShardBad)


class Joining:
    """What brings a node into a cluster: it founds one, or its joiner is let in."""

    def __init__(self, node: Node, role: Role, recovery: StepRecovery, reports: Reports) -> None:
        self.node, self.role, self.recovery, self.reports = node, role, recovery, reports
        self.news: JoinNews | None = None
        self.seeds: tuple[str, ...] = ()  # Where it was told to ask, by the user or by its life before.

    def routes(self) -> Routes:
        answers = all_to(self.hear, NegotiationPlan, ScaleOutRefused, Answer)
        return Routes(
            events={
                ReadingsTaken: self.on_readings,
                SeedsFound: self.on_seeds,
                AddressesRead: self.on_addresses,
                **all_to(self.on_state, *OF_THE_STATE),
            },
            messages=all_to(self.hear, DialBackReply, ManifestReply, Shard, NoSnapshot),
            routed={Outlived: self.on_outlived, **answers},
            effects={Founded: self.on_founded, DiscardState: self.on_discard_state},
        )

    # --- founding ---

    def found(self, view: View | None, now_s: float) -> list[Effect]:
        """Start a cluster: of one, or of all members of a first `view` that each of them is given."""
        node, step = self.node, self.node.settings.first_step
        hang_up: list[Effect] = []
        if view is None:
            # They are in no cluster, as we were, and may soon be in another, which must not hear of this one.
            strangers = sorted(node.relay.peers - node.relay.leaves)
            hang_up = [ClosePeer(peer, "it founds a cluster") for peer in strangers]
            me = Member(id=node.me, addresses=node.settings.addresses, joined_step=step, life=node.life)
            alone = View(term=1, seq=1, scheduler=node.me, members=(me,))
            graph = node.monitor.graph((node.me,), ())
            graph.graph["result"] = node.settings.result_bytes, node.settings.chunks
            view = with_trees(alone, graph, node.settings.policy)
        self.role.found(view)
        self._begin(now_s)
        nothing_yet = tuple((member, 0) for member in view.member_ids)
        return [*hang_up, *node.sync.begin(view, step), Joined(step, nothing_yet, view)]

    def on_founded(self, effect: Founded, now_s: float) -> list[Effect]:
        """The joiner has found no cluster, and is to found one."""
        self.node.join_by(None)
        return self.found(None, now_s)

    def _begin(self, now_s: float) -> None:
        self.node.enter(Phase.MEMBER)
        self.reports.begin(now_s)
        self.node.clock.begin(now_s)

    # --- joining ---

    def ask(
        self, seeds: tuple[str, ...], neighbors: tuple[str, ...], degree: int, blocking: bool,
        patience_s: float, now_s: float, otherwise: Otherwise,
    ) -> list[Effect]:  # fmt: skip
        """Ask to be let into the cluster that one of `seeds` belongs to."""
        node, settings = self.node, self.node.settings
        self.seeds = seeds
        request = ScaleOutRequest(
            node=node.me,
            life=node.life,
            addresses=settings.addresses,
            neighbors=neighbors,
            degree=degree,
            digest=settings.digest,
            blocking=blocking,
            founds=otherwise is Otherwise.FOUND,
        )
        node.enter(Phase.JOINING)
        joiner = Joiner(
            node.relay, node.book, seeds, request, patience_s, now_s, SECONDS_PER_LINK[settings.probe],
            otherwise, settings.steals, node.sync.is_far_behind,
        )  # fmt: skip
        node.join_by(joiner)
        self.news = JoinNews(joiner, now_s)
        return self.hear(SeedsFound(node.book.heard_of), now_s) + self.hear(Tick(), now_s)

    def on_seeds(self, event: SeedsFound, now_s: float) -> list[Effect]:
        """Addresses of other nodes have become known: a joiner asks there. A member keeps them (missing.py)."""
        self.node.book.hear_of(event.addresses)
        return self.hear(event, now_s)

    def on_addresses(self, event: AddressesRead, now_s: float) -> list[Effect]:
        """Our addresses may have changed since we began to ask. Once a view has them, they stay."""
        node, now = self.node, event.addresses
        if now and node.asks_again and node.joiner is not None and now != node.settings.addresses:
            node.moved_to(now)
            node.joiner.moved_to(now)
        return []

    def hear(self, event: Event, now_s: float) -> list[Effect]:
        """Hand an event to the joiner's core, if this node is joining."""
        joiner = self.node.joiner
        if joiner is None or joiner.state in (JoinState.JOINED, JoinState.FAILED):
            return []
        effects = joiner.handle(event, now_s)
        if self.news:
            self.news.note(now_s)
        return effects

    def tick(self, now_s: float) -> list[Effect]:
        return self.hear(Tick(), now_s)

    def on_readings(self, event: ReadingsTaken, now_s: float) -> list[Effect]:
        """About once a second: say what the joiner is doing, and how much of the state it has."""
        return (self.news.tick(now_s) if self.news else []) + self.reports.of_pull()

    def on_state(self, event: Event, now_s: float) -> list[Effect]:
        """There is news of the state that this node pulls."""
        effects = self.hear(event, now_s)
        self._end_if_ready(now_s)
        return effects

    def on_discard_state(self, effect: DiscardState, now_s: float) -> list[Effect]:
        """The joiner asks anew: what it has of the state is void. If it is a member already, it has no state to go on
        with."""
        node = self.node
        void = node.joiner is not None and node.joiner.replication is None
        effects = node.serving.arrives(0, ()) if void else []
        lost = node.phase is Phase.MEMBER and node.asks_again
        return effects + (self.recovery.go_without_me(now_s) if lost else [])

    def on_outlived(self, event: Received, now_s: float) -> list[Effect]:
        """Others know later numbers of this name, as our clock was set back: go on with a life that exceeds them."""
        node, told = self.node, event.message
        assert isinstance(told, Outlived)
        if told.life != node.life:
            return []
        if node.phase is not Phase.JOINING or node.joiner is None or node.joiner.is_in_view:
            return node.reporter.outdo(told.later, node.member_key, now_s)
        # Nobody may remember that this name has had the very next life, too: its serials would pass for ours.
        life = told.later + LIFE_STEP + node.rng.randrange(LIFE_STEP)
        return node.reporter.outlived(life) + node.joiner.outlived(life, now_s)

    def become_member(self, view: View, now_s: float) -> list[Effect]:
        """`view`, which has this node as a member, is active.

        If results are on the way, it contributes after these.
        """
        self._begin(now_s)
        self._end_if_ready(now_s)
        first = self.node.sync.step + self.node.sync.sums.catching_up
        effects: list[Effect] = [Joined(first, self.node.sync.deal, view)]
        return effects + (self.recovery.go_without_me(now_s) if self.node.asks_again else [])

    def _end_if_ready(self, now_s: float) -> None:
        joiner = self.node.joiner
        if joiner and joiner.state is JoinState.READY and self.node.phase is Phase.MEMBER:
            joiner.joined()
            if self.news:
                self.news.note(now_s)
