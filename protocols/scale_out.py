"""Scale-out, the joiner's half (Chaos Sec. IV-B, Fig. 4a, overlapped with training as in Fig. 5a).

    KNOCKING --a seed answers--> ASKED --NegotiationPlan--> LINKING --links open and measured--> WAITING
       WAITING --ReplicationPlan--> FETCHING --StateWhole--> LOADING --CaughtUp--> READY --view--> JOINED
    ASKED, LINKING --ReplicationPlan of an earlier request--> FETCHING
    any state --refused, nobody answers, no source left and no patience--> FAILED

KNOCKING and ASKED are asking.py, to which every other state comes back when it has failed.

A joiner whose state will be whole within a step says so: with that word it is a member from the first step on that it
can take part in, and need not wait for one more.

The scheduler's half is in scheduler/joins.py, because it is made of views. A joiner overtaken by a flush or by
the death of the scheduler is an orphan; after a deadline without news it asks again from ASKED.
"""

from __future__ import annotations

from collections.abc import Callable

from .addresses import AddressBook
from .asking import (
    ASK_EVERY_S,
    DEAD,
    IN_VAIN,
    KNOCK_EVERY_S,
    MAX_KNOCK_EVERY_S,
    MAX_PLANLESS,
    Asking,
    JoinState,
    Otherwise,
    Standing,
)
from .effects import Dial, DiscardState, Effect, Happened, MeasureLink, StateWhole, Transmit
from .events import (
    BacklogFull,
    CaughtUp,
    DialFailed,
    Event,
    LinkMeasured,
    PeerClosed,
    PeerOpened,
    Received,
    StateRejected,
    Tick,
)
from .messages import (
    EVERYONE,
    Answer,
    DialBack,
    DialBackReply,
    LinkReading,
    NegotiationPlan,
    NeighborsReady,
    ReplicationPlan,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
)
from .new_links import NewLinks
from .relay import Relay
from .replication import Replication

LINK_PATIENCE_S = 3.0  # To open and measure links; what is not ready by then is reported as it is.
MAX_DROPPED = 2  # Every flush drops who streams and is behind; then the cluster is to wait.

# A later life exceeds the one before by more than the messages that a life sends: serials and versions of news
# begin with it, and those of an earlier life are smaller, unless a clock was set back (`LinkReporter.outdo`).
LIFE_STEP = 1 << 32


class Joiner:
    """Brings node `me` into the cluster that one of `seeds` belongs to."""

    def __init__(
        self, relay: Relay, book: AddressBook, seeds: tuple[str, ...], request: ScaleOutRequest, patience_s: float,
        now_s: float, seconds_per_link: float = 0.0, otherwise: Otherwise = Otherwise.FAIL,
        steals: bool = True, is_far_behind: Callable[[int], bool] = lambda state_bytes: False,
    ) -> None:  # fmt: skip
        self.relay, self.book, self.steals = relay, book, steals
        self.is_far_behind = is_far_behind  # With a state of so many bytes; see StepSync.
        self.seconds_per_link = seconds_per_link
        self.standing = Standing(now_s)
        self.asking = Asking(relay, self.standing, seeds, request, patience_s, now_s, otherwise)
        self.links = NewLinks({}, frozenset())  # To neighbours of the last plan.
        self.warned = False
        self.replication: Replication | None = None
        # What a step takes, said the plan; 0 once we have said that we are about to be ready.
        self.step_s = 0.0
        self.attempts = 0  # To pull the state.
        self.dropped = 0  # How often the cluster has gone on without us.
        self.told_step = 0  # The last one at which something is known to have happened there.

    @property
    def state(self) -> JoinState:
        return self.standing.state

    @property
    def wake_at_s(self) -> float | None:
        return self.standing.wake_at_s

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event. Events that are not for the present state are of an attempt that is over."""
        match self.state, event:
            case ((JoinState.JOINED | JoinState.FAILED), _):
                return []
            case _, Received(_, ScaleOutRefused() as refusal):
                # Who is wanted may come yet.
                lasting = bool(refusal.spec) or not self.asking.request.neighbors
                return self.asking.fail(refusal.reason, refusal.spec, lasting)
            case (
                (
                    JoinState.ASKED
                    | JoinState.LINKING
                    | JoinState.WAITING
                    | JoinState.FETCHING
                    | JoinState.READY
                ),
                Received(scheduler, ReplicationPlan() as plan),
            ):
                self.asking.planned_by(scheduler)
                return [DiscardState(), *self._fetch(plan, now_s)]
            case (
                (JoinState.KNOCKING | JoinState.ASKED | JoinState.WAITING),
                Received(member, Answer() as answer),
            ):
                return self.asking.answered(member, answer)
            case JoinState.ASKED, Received(scheduler, NegotiationPlan() as plan):
                self.asking.planned_by(scheduler)
                return self._open_links(plan, now_s)
            case ((JoinState.KNOCKING | JoinState.ASKED), _):
                return self.asking.handle(event, now_s)
            case JoinState.LINKING, _:
                return self._while_linking(event, now_s)
            case JoinState.WAITING, Tick() if self.standing.is_due(now_s):
                return self._ask_again(self.asking.waits or "no answer", now_s)
            case ((JoinState.FETCHING | JoinState.LOADING | JoinState.READY), _):
                return self._while_pulling(event, now_s)
        return []

    def _while_linking(self, event: Event, now_s: float) -> list[Effect]:
        """In LINKING: links of the plan open, fail, and are measured."""
        links = self.links
        match event:
            case PeerOpened(peer, _, False) if peer in links.open:
                links.opened(peer)
                return self._examine(peer)
            case PeerClosed(peer) if links.open.get(peer) and links.ways[peer]:
                # Of who rejoins, the link of before may have been open still, and is closed by the other end.
                return [Dial(way) for way in links.closed(peer)]
            case DialFailed(address, reason):
                links.dial_failed(address, reason)
                return self._report_links(now_s)
            case LinkMeasured(peer, rate, source) if peer in links.open:
                links.measure(peer, LinkReading(rate_bps=rate, rate_source=source if rate else ""))
                return self._report_links(now_s)
            case Received(peer, DialBackReply() as reply) if peer in links.open:
                links.reply(peer, reply)
                return self._report_links(now_s)
            case Tick() if self.standing.is_due(now_s):
                return self._report_links(now_s, complete=False)
        return []

    def _while_pulling(self, event: Event, now_s: float) -> list[Effect]:
        """In FETCHING, LOADING and READY: the state comes, is loaded, and is told of until a view has this node."""
        match self.state, event:
            case _, StateRejected(reason):
                return self._ask_again(f"the state was unusable ({reason})", now_s, is_unusable=True)
            case _, BacklogFull():
                self.want_blocking()
                return self._ask_again("results come faster than the state", now_s)
            case JoinState.LOADING, CaughtUp() if self._lags:
                self.want_blocking()
                return self._ask_again("the results that wait for it are more than the state", now_s)
            case JoinState.LOADING, CaughtUp():
                return self._say_ready(now_s)
            case JoinState.READY, Tick() if self.standing.is_due(now_s):
                return self._say_ready_again(now_s)
            case JoinState.READY, Received(_, Answer()):
                self.asking.goes_on()
            case JoinState.FETCHING, _ if self.replication is not None:
                return self._replicate(event, now_s)
        return []

    def overtaken(self, scheduler: str, plan: ReplicationPlan, now_s: float) -> list[Effect]:
        """A plan has come for a view in which we listen already, as an earlier attempt of ours is in it."""
        if self.state not in (JoinState.ASKED, JoinState.LINKING, JoinState.WAITING):
            return []
        self.asking.planned_by(scheduler)
        return self._fetch(plan, now_s)

    def joined(self) -> None:
        """The view with us as a member is active."""
        self.asking.joined()
        self.replication = None

    def orphaned(self, reason: str, now_s: float, goes_on: bool = False) -> list[Effect]:
        """The cluster dropped us: start over. `goes_on`: it has just shown that it does."""
        if goes_on:
            self.asking.goes_on()
            self.dropped += 1
        if self.dropped >= MAX_DROPPED:
            self.want_blocking()
        return self._ask_again(reason, now_s) if self.state is not JoinState.KNOCKING else []

    def goes_on(self) -> None:
        """The cluster has completed a step, or proposes a view."""
        self.asking.goes_on()

    def told(self, step: int) -> None:
        """Something has happened in the cluster, at this step. A later one than before shows that steps complete."""
        if step > self.told_step:
            self.told_step = step
            self.asking.goes_on()

    def want_blocking(self) -> None:
        """Ask for blocking mode the next time: results come faster than this joiner can take them."""
        self.asking.say(blocking=True)

    def moved_to(self, addresses: tuple[str, ...]) -> None:
        """From now on others may dial this node at these addresses."""
        self.asking.say(addresses=addresses)

    @property
    def is_in_view(self) -> bool:
        """Has a plan come whose view has this life of ours?"""
        return self.state in (JoinState.FETCHING, JoinState.LOADING, JoinState.READY, JoinState.JOINED)

    def outlived(self, life: int, now_s: float) -> list[Effect]:
        """This node lives in a later life than it thought: ask again under that."""
        self.asking.say(life=life)
        asks = self.state in (JoinState.ASKED, JoinState.LINKING, JoinState.WAITING)
        return self.asking.ask(now_s) if asks else []

    # --- asking again ---

    def _ask_again(self, reason: str, now_s: float, is_unusable: bool = False) -> list[Effect]:
        vain, pull = "", self.replication
        if self.state is JoinState.WAITING and self.asking.vain.no_plan():
            vain = f"{MAX_PLANLESS} times no plan came ({reason})"
        elif self.state is not JoinState.WAITING and pull is not None:
            vain = self.asking.vain.pull_ended(reason, pull.stored_bytes, is_unusable)
        if vain:
            return self._give_up(vain, now_s, rest_s=MAX_KNOCK_EVERY_S)
        self.replication = None
        return self.asking.again(reason, now_s)

    def _give_up(self, reason: str, now_s: float, rest_s: float = 0.0) -> list[Effect]:
        self.replication = None
        return self.asking.give_up(reason, now_s, rest_s)

    # --- links ---

    def _open_links(self, plan: NegotiationPlan, now_s: float) -> list[Effect]:
        patience_s = LINK_PATIENCE_S + self.seconds_per_link * len(plan.neighbors)
        self.standing.go(JoinState.LINKING, now_s + patience_s)
        links = NewLinks({m.id: tuple(self.book.ways_to(m)) for m in plan.neighbors}, {*self.relay.peers})
        self.links = links
        self.asking.learn(way for tries in links.ways.values() for way in tries)
        effects = [
            effect for peer, is_open in links.open.items() if is_open for effect in self._examine(peer)
        ]
        return effects + [
            Dial(way) for peer, ways in links.ways.items() if not links.open[peer] for way in ways
        ]

    def _examine(self, peer: str) -> list[Effect]:
        """Find out how fast the link is, and whether the other end could have opened it."""
        return [MeasureLink(peer), Transmit(peer, DialBack(addresses=self.asking.request.addresses))]

    def _report_links(self, now_s: float, complete: bool = True) -> list[Effect]:
        links = self.links
        if complete and not links.are_settled:
            return []
        if not any(links.open.values()):
            return self._ask_for_others(now_s)
        self.standing.go(JoinState.WAITING, now_s + ASK_EVERY_S)
        self.asking.goes_on()
        self.asking.say(again=True)
        report = NeighborsReady(
            node=self.asking.request.node,
            addresses=() if links.are_one_sided else self.asking.request.addresses,
            links=links.readings,
            failed=links.failures,
        )
        return self._warn_if_unreachable() + self.relay.send(self.asking.scheduler, report)

    def _warn_if_unreachable(self) -> list[Effect]:
        if not self.links.are_one_sided or self.warned or not self.asking.request.addresses:
            return []
        self.warned = True
        who = "; ".join(f"{peer}: {reply.reason}" for peer, reply in sorted(self.links.dialled_back.items()))
        told = (
            f"nobody can open a link to it at {', '.join(self.asking.request.addresses)} ({who}): it can only dial. "
            "Give --listen an address that the others can reach"
        )
        return [Happened("unreachable", self.asking.request.node, told[:2000], 0)]

    def _ask_for_others(self, now_s: float) -> list[Effect]:
        """No planned neighbour can be reached: ask for others. These may just have died, unknown to the scheduler."""
        if self.asking.vain.no_plan():
            links = self.links
            reasons = "; ".join(f"{peer}: {links.failed(peer) or 'no answer'}" for peer in sorted(links.ways))
            reason = f"none of the planned neighbours can be reached ({reasons or 'no answer'})"
            return self._give_up(reason, now_s)
        self.asking.say(stuck=True)
        self.asking.rest(now_s + KNOCK_EVERY_S)
        return []

    # --- state ---

    def _fetch(self, plan: ReplicationPlan, now_s: float) -> list[Effect]:
        """Pull the state, from those to whom a link is still open: nobody would tell us again that one has closed."""
        shares = {peer: count for peer, count in plan.shards_by_source.items() if peer in self.relay.peers}
        fellows = [peer for peer in plan.fellows if peer in self.relay.peers]
        if not shares and not fellows:
            return self._ask_again("no link is open to those who have the state", now_s)
        self.standing.go(JoinState.FETCHING)
        self.attempts += 1
        self.step_s = plan.step_s
        self.replication = Replication(
            plan.step, plan.shard_bytes, shares, self.attempts, fellows, plan.turn, self.steals
        )
        return self.replication.start(now_s)

    def _replicate(self, event: Event, now_s: float) -> list[Effect]:
        assert self.replication is not None
        effects = self.replication.handle(event, now_s)
        self.standing.go(JoinState.FETCHING, self.replication.wake_at_s)
        if self.replication.failed:
            return effects + self._ask_again(self.replication.failed, now_s)
        if any(isinstance(effect, StateWhole) for effect in effects):
            self.standing.go(JoinState.LOADING)
            return effects
        rest_s = self.replication.rest_s(now_s)
        return effects + (self._say_ready_soon(rest_s) if rest_s <= self.step_s and not self._lags else [])

    @property
    def _lags(self) -> bool:
        """Do more bytes of results wait for us than the state has? Then the cluster would wait longer for these."""
        total = self.replication.total_bytes if self.replication else None
        return total is not None and self.is_far_behind(total)

    def _say_ready_soon(self, rest_s: float) -> list[Effect]:
        self.step_s = 0.0
        return self.relay.send(
            self.asking.scheduler, ScaleOutReady(node=self.asking.request.node, in_s=rest_s)
        )

    def _say_ready(self, now_s: float) -> list[Effect]:
        self.standing.go(JoinState.READY, now_s + ASK_EVERY_S)
        node, in_vain = self.asking.request.node, self.asking.unanswered >= IN_VAIN
        return self.relay.send(EVERYONE, ScaleOutReady(node=node, unanswered=in_vain))

    def _say_ready_again(self, now_s: float) -> list[Effect]:
        hopeless = self.asking.is_unanswered_again()
        return self._give_up(DEAD, now_s) if hopeless else self._say_ready(now_s)

    def check_invariants(self) -> None:
        """What holds between any two events."""
        if self.replication is not None:
            self.replication.check_invariants()
        if self.state in (
            JoinState.KNOCKING,
            JoinState.ASKED,
            JoinState.LINKING,
            JoinState.WAITING,
            JoinState.READY,
        ):
            assert self.wake_at_s is not None, f"{self.state} waits without a deadline"
