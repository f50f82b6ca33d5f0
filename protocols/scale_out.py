"""Scale-out, the joiner's half (Chaos Sec. IV-B, Fig. 4a, overlapped with training as in Fig. 5a).

    KNOCKING --a seed answers--> ASKED --NegotiationPlan--> LINKING --links open and measured--> WAITING
       WAITING --ReplicationPlan--> FETCHING --StateWhole--> LOADING --CaughtUp--> READY --view--> JOINED
    any state --refused, nobody answers, no source left and no patience--> FAILED

A joiner whose state will be whole within a step says so: with that word it is a member from the first step on that it
can take part in, and need not wait for one more.

Instead of failing for want of an answer, a joiner may found a cluster, or keep trying (`Otherwise`). Of several that
reach each other and would found one, it is the one that comes first in the list they all ask, or by its id; the
others hear its requests, and wait for it.

The scheduler's half is in scheduler/joins.py, because it is made of views. A joiner overtaken by a flush or by
the death of the scheduler is an orphan; after a deadline without news it asks again from ASKED.
"""

from __future__ import annotations

import enum
from collections.abc import Callable

import msgspec

from .addresses import AddressBook
from .effects import (
    Dial,
    DiscardState,
    Effect,
    Founded,
    Happened,
    JoinFailed,
    MeasureLink,
    Parked,
    Progress,
    StateWhole,
    Transmit,
)
from .events import (
    ITSELF,
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

HERE = "there is a cluster"  # What a member answers who would found one beside it.
KNOCK_EVERY_S = 0.5
MAX_KNOCK_EVERY_S = 8.0  # Of who keeps trying.
MAX_PATIENCE_S = 300.0  # So often it says at least that it still waits.
MAX_KNOCKS = 32  # Seeds dialled at once, in turn.
HEAR_OUT_S = 1.0  # Time to answer for whom a founder has reached at the last moment.
LINK_PATIENCE_S = 3.0  # To open and measure links; what is not ready by then is reported as it is.
ASK_EVERY_S = 3.0  # Without any progress the request is made again.
MAX_UNANSWERED = 8  # Then the cluster behind the seeds is dead or parked, and the joiner says so.
MAX_EMPTY_PULLS = 12  # Attempts in a row to pull the state that have ended before anything of it had come.
MAX_PULLS_ALIKE = 50  # That have ended for the same reason, though some of it had.
MAX_DROPPED = 2  # Every flush drops who streams and is behind; then the cluster is to wait.
MAX_PLANLESS = 40  # Times that links were reported, and no plan came.
DEAD = f"the cluster does not go on: asked {MAX_UNANSWERED} times"
EARLIER_HEARD_S = (
    7.0  # Whoever is to found before us has said so no longer ago: two of its requests, and a bit.
)
MAX_LINKED = 64  # Neighbours that are named in a request.
MAX_FOUND = 256  # Addresses of members that are known from plans.

# A later life exceeds the one before by more than the messages that a life sends: serials and versions of news
# begin with it, and those of an earlier life are smaller, unless a clock was set back (`LinkReporter.outdo`).
LIFE_STEP = 1 << 32


class Otherwise(enum.Enum):
    """What a joiner does if nobody lets it in, but nobody refuses it for good either."""

    FAIL = "fail"
    FOUND = "found"  # Unless there is a cluster, if only one that waits.
    KEEP_TRYING = "keep trying"


class State(enum.Enum):
    KNOCKING = "knocking"
    ASKED = "asked"
    LINKING = "linking"
    WAITING = "waiting"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    JOINED = "joined"
    FAILED = "failed"


class Joiner:
    """Brings node `me` into the cluster that one of `seeds` belongs to."""

    def __init__(
        self, relay: Relay, book: AddressBook, seeds: tuple[str, ...], request: ScaleOutRequest, patience_s: float,
        now_s: float, seconds_per_link: float = 0.0, otherwise: Otherwise = Otherwise.FAIL,
        steals: bool = True, is_far_behind: Callable[[int], bool] = lambda state_bytes: False,
    ) -> None:  # fmt: skip
        self.relay, self.book, self.named, self.request = relay, book, seeds, request
        self.is_far_behind = is_far_behind  # With a state of so many bytes; see StepSync.
        self.seeds = seeds  # Those that the user has named, and what plans of the cluster told since.
        self.otherwise, self.steals = otherwise, steals
        self.state = State.KNOCKING
        self.patience_s, self.seconds_per_link = patience_s, seconds_per_link
        self.give_up_at_s: float | None = now_s + patience_s
        self.wake_at_s: float | None = now_s
        self.refusals: dict[str, str] = {}  # Seed: why it did not answer.
        self.missed: set[str] = set()  # Seeds to dial again: they did not answer, but others did.
        self.ask_again_at_s = now_s
        self.final: set[str] = set()  # Seeds that will not have us.
        self.mine: set[str] = set()  # Seeds that are this node.
        self.heard_earlier_s: dict[str, float] = {}  # Who is to found before us: when it asked last.
        self.knocks, self.knock_every_s = 0, KNOCK_EVERY_S
        self.waits = ""  # Why the cluster cannot let us in, says one of its members.
        self.found_member = ""  # Who says that there is a cluster; then we found none.
        self.scheduler = ""
        self.links = NewLinks({}, frozenset())  # To neighbours of the last plan.
        self.warned = False
        self.replication: Replication | None = None
        self.step_s = (
            0.0  # What a step takes, said the plan; 0 once we have said that we are about to be ready.
        )
        self.attempts = 0  # To pull the state.
        self.last_end = ""  # Why the last of them ended.
        self.empty, self.alike, self.planless = 0, 0, 0  # As MAX_EMPTY_PULLS, ...
        self.cluster_said = ""  # What whoever answered has to say of it.
        self.unanswered = 0
        self.dropped = 0  # How often the cluster has gone on without us.

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event. Events that are not for the present state are of an attempt that is over."""
        match self.state, event:
            case ((State.JOINED | State.FAILED), _):
                return []
            case _, Received(_, ScaleOutRefused() as refusal):
                return self._fail(refusal.reason, refusal.spec)
            case ((State.KNOCKING | State.ASKED), Received(_, ScaleOutRequest(founds=True) as rival)):
                if self.otherwise is Otherwise.FOUND and _rank(rival) < _rank(self.request):
                    self.heard_earlier_s[rival.node] = now_s
                return []
            case (
                (State.ASKED | State.WAITING | State.FETCHING | State.READY),
                Received(scheduler, ReplicationPlan() as plan),
            ):
                self.scheduler = scheduler
                return [DiscardState(), *self._fetch(plan, now_s)]
            case ((State.KNOCKING | State.ASKED | State.WAITING), Received(source, Answer(ok=ok, text=text))):
                self.found_member, self.waits = source, "" if ok else f"{source}: {text}"
                self.unanswered = 0 if ok else self.unanswered  # The cluster goes on.
                return self._told_by(source, text)
            case ((State.KNOCKING | State.ASKED), _):
                return self._while_asking(event, now_s)
            case State.LINKING, _:
                return self._while_linking(event, now_s)
            case State.WAITING, Tick() if self._due(now_s):
                return self._ask_again(self.waits or "no answer", now_s)
            case ((State.FETCHING | State.LOADING | State.READY), _):
                return self._while_pulling(event, now_s)
        return []

    def _while_asking(self, event: Event, now_s: float) -> list[Effect]:
        """In KNOCKING and ASKED: a way to the cluster opens, fails, or leads to a plan."""
        match self.state, event:
            case State.KNOCKING, Tick() if self._due(now_s):
                return self._knock(now_s)
            case _, DialFailed(address, reason) if reason == ITSELF and address in self.seeds:
                return self._found_itself_at(address)
            case State.KNOCKING, DialFailed(address, reason, final) if address in self.seeds:
                return self._refused_at(address, reason, final) or self._give_up_if_late(now_s)
            case State.KNOCKING, PeerOpened(client=False):
                return self._ask(now_s)
            case State.ASKED, PeerOpened(client=False) if not self.scheduler:
                return self._ask(now_s)  # This way may lead to the cluster.
            case State.ASKED, PeerClosed() if not self.scheduler:
                return self._hung_up_on(now_s)
            case State.ASKED, DialFailed(address, reason) if address in self.seeds and not self.scheduler:
                self.refusals[address] = reason
                return self._knock_soon(address, now_s)
            case State.ASKED, Tick() if self._due(now_s) and now_s < self.ask_again_at_s:
                return self._knock_again(now_s)
            case State.ASKED, Tick() if self._due(now_s):
                return self._ask_again(self.waits or "no answer", now_s)
            case State.ASKED, Received(scheduler, NegotiationPlan() as plan):
                self.scheduler = scheduler
                return self._open_links(plan, now_s)
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
            case Tick() if self._due(now_s):
                return self._report_links(now_s, complete=False)
        return []

    def _while_pulling(self, event: Event, now_s: float) -> list[Effect]:
        """In FETCHING, LOADING and READY: the state comes, is loaded, and is told of until a view has this node."""
        match self.state, event:
            case _, StateRejected(reason):
                return self._ask_again(f"the state was unusable ({reason})", now_s)
            case _, BacklogFull():
                self.is_to_block()
                return self._ask_again("results come faster than the state", now_s)
            case State.LOADING, CaughtUp() if self._lags:
                self.is_to_block()
                return self._ask_again("the results that wait for it are more than the state", now_s)
            case State.LOADING, CaughtUp():
                self.state = State.READY
                return self._say_ready(now_s)
            case State.READY, Tick() if self._due(now_s):
                self.unanswered += 1
                hopeless = self.unanswered > MAX_UNANSWERED
                return self._give_up(DEAD, now_s) if hopeless else self._say_ready(now_s)
            case State.READY, Received(_, Answer()):
                self.unanswered = 0
            case State.FETCHING, _ if self.replication is not None:
                return self._replicate(event, now_s)
        return []

    def overtaken(self, scheduler: str, plan: ReplicationPlan, now_s: float) -> list[Effect]:
        """As an observer of before we are in the plan's view already, and may have results that begin with it."""
        if self.state not in (State.ASKED, State.WAITING):
            return []
        self.scheduler = scheduler
        return self._fetch(plan, now_s)

    def joined(self) -> None:
        """The view with us as a member is active."""
        self.state, self.wake_at_s, self.give_up_at_s = State.JOINED, None, None
        self.replication = None

    def orphaned(self, reason: str, now_s: float, goes_on: bool = False) -> list[Effect]:
        """The cluster dropped us: start over. `goes_on`: it has just shown that it does."""
        if goes_on:
            self.unanswered, self.dropped = 0, self.dropped + 1
        if self.dropped >= MAX_DROPPED:
            self.is_to_block()
        return self._ask_again(reason, now_s) if self.state is not State.KNOCKING else []

    def heard_of_step(self) -> None:
        """Its result has come, so the cluster goes on."""
        self.unanswered = 0

    def is_to_block(self) -> None:
        """The cluster is to wait for us the next time: results come faster than we can take them."""
        self.request = msgspec.structs.replace(self.request, blocking=True)

    @property
    def is_in_view(self) -> bool:
        """The plan that names our life in a view has come."""
        return self.state in (State.FETCHING, State.LOADING, State.READY, State.JOINED)

    def outlived(self, life: int, now_s: float) -> list[Effect]:
        """We live in a later life than we thought: ask again, as that."""
        self.request = msgspec.structs.replace(self.request, life=life)
        asks = self.state in (State.ASKED, State.LINKING, State.WAITING)
        return self._ask(now_s) if asks else []

    # --- knocking and asking ---

    def _due(self, now_s: float) -> bool:
        return self.wake_at_s is not None and now_s >= self.wake_at_s

    def _knock(self, now_s: float) -> list[Effect]:
        self.wake_at_s = now_s + self.knock_every_s
        if self.otherwise is Otherwise.KEEP_TRYING:
            self.knock_every_s = min(1.5 * self.knock_every_s, MAX_KNOCK_EVERY_S)
        return self._give_up_if_late(now_s) or self._dial_seeds()

    def _dial_seeds(self) -> list[Effect]:
        """All of them, or the next few of many."""
        count = min(len(self.seeds), MAX_KNOCKS)
        first, self.knocks = self.knocks, (self.knocks + count) % len(self.seeds)
        dialled = [self.seeds[(first + index) % len(self.seeds)] for index in range(count)]
        self.missed -= set(dialled)
        return [Dial(seed) for seed in dialled]

    def _knock_soon(self, seed: str, now_s: float) -> list[Effect]:
        """It was not there yet. Whoever else has answered may want to join, too."""
        self.missed.add(seed)
        self.wake_at_s = min(self.ask_again_at_s, now_s + KNOCK_EVERY_S)
        return []

    def _knock_again(self, now_s: float) -> list[Effect]:
        """Whom we have reached may have had no way to a member when we asked, and have one now."""
        self.wake_at_s = self._soon(now_s)
        knocks: list[Effect] = [Dial(seed) for seed in self.seeds if seed in self.missed]
        self.missed.clear()
        return knocks[:MAX_KNOCKS] + (self._send_request() if self._is_unheard else [])

    @property
    def _is_unheard(self) -> bool:
        return not self.scheduler and not self.found_member

    def _soon(self, now_s: float) -> float:
        """When to knock or ask again, though the time to ask anew has not come."""
        quick = self._is_unheard or (self.missed and not self.scheduler)
        return min(self.ask_again_at_s, now_s + KNOCK_EVERY_S) if quick else self.ask_again_at_s

    def _refused_at(self, address: str, reason: str, final: bool) -> list[Effect]:
        """One seed that will not have us may be another cluster's; all of them are the end."""
        self.refusals[address] = reason
        self.missed.add(address)
        (self.final.add if final else self.final.discard)(address)
        patient = self.otherwise is Otherwise.KEEP_TRYING
        return self._fail(f"{address}: {reason}") if self._unwanted and not patient else []

    @property
    def _unwanted(self) -> bool:
        others = set(self.seeds) - self.mine
        return self.final >= others and (bool(others) or self.otherwise is not Otherwise.FOUND)

    def _found_itself_at(self, address: str) -> list[Effect]:
        """One list may be for all nodes. Who shall found is told by its order."""
        known, self.mine = self.mine, self.mine | {address}
        place = min(self.seeds.index(each) for each in self.mine) + 1
        self.request = msgspec.structs.replace(self.request, place=place)
        if self._unwanted:
            return self._fail(f"{address}: {ITSELF}, and no other is named")
        news = self.state is State.ASKED and self.otherwise is Otherwise.FOUND and self.mine != known
        return self.relay.send(EVERYONE, self.request) if news else []

    def _hung_up_on(self, now_s: float) -> list[Effect]:
        """It may have founded a cluster: then it wants to be greeted anew."""
        if self.relay.peers - self.relay.leaves:
            return self._dial_seeds()
        self.state, self.wake_at_s = State.KNOCKING, now_s + KNOCK_EVERY_S
        self.give_up_at_s = now_s + self.patience_s
        return []

    def waits_for(self, now_s: float) -> str:
        """Who is to found before us, if anybody is."""
        heard = self.heard_earlier_s.items()
        return min((node for node, at_s in heard if now_s < at_s + EARLIER_HEARD_S), default="")

    def _give_up_if_late(self, now_s: float) -> list[Effect]:
        if self.give_up_at_s is None or now_s < self.give_up_at_s or self.waits_for(now_s):
            return []
        why = "; ".join(f"{seed}: {self.refusals.get(seed, 'no answer')}" for seed in self.seeds)
        return self._give_up(f"nobody answers ({why}; tried for {self.patience_s:g} s)", now_s)

    def _ask(self, now_s: float) -> list[Effect]:
        self.state, self.wake_at_s = State.ASKED, now_s + ASK_EVERY_S
        if self.otherwise is Otherwise.FOUND and self.give_up_at_s is not None:
            self.wake_at_s = min(self.wake_at_s, max(self.give_up_at_s, now_s + HEAR_OUT_S))
        self.ask_again_at_s = self.wake_at_s
        self.wake_at_s = self._soon(now_s)
        return self._send_request()

    def _send_request(self) -> list[Effect]:
        linked = sorted(self.relay.peers - self.relay.leaves)[:MAX_LINKED]
        self.request = msgspec.structs.replace(self.request, linked=tuple(linked))
        return self.relay.send(EVERYONE, self.request)

    def _told_by(self, member: str, text: str) -> list[Effect]:
        """A member that is no scheduler says why none answers."""
        said = f"{member}: {text}"
        if text == HERE or said == self.cluster_said:
            return []
        self.cluster_said = said
        return [Progress(f"the cluster answers: {said}")]

    def _in_vain(self, reason: str) -> str:
        """Too many attempts in a row have come to nothing: how many, and why; "" as long as there is hope."""
        if self.state is State.WAITING:
            self.planless += 1
            return f"{self.planless} times no plan came ({reason})" if self.planless >= MAX_PLANLESS else ""
        if self.replication is None:
            return ""
        self.empty = 0 if self.replication.stored_bytes else self.empty + 1
        self.alike = self.alike + 1 if reason == self.last_end else 1
        self.last_end, self.planless = reason, 0
        if self.empty < MAX_EMPTY_PULLS and self.alike < MAX_PULLS_ALIKE:
            return ""
        return f"{max(self.empty, self.alike)} attempts in a row to pull the state have ended so: {reason}"

    def _ask_again(self, reason: str, now_s: float) -> list[Effect]:
        if vain := self._in_vain(reason):
            return self._give_up(vain, now_s, rest_s=MAX_KNOCK_EVERY_S)
        self.unanswered += 1
        late = self.give_up_at_s is None or now_s >= self.give_up_at_s
        if late and self.may_found:
            if not self.waits_for(now_s):
                return self._found()
            self.unanswered = 0
        if self.unanswered > MAX_UNANSWERED and (late or self.scheduler):
            return self._give_up(f"{DEAD} ({self.cluster_said or reason})", now_s)
        return self._start_over(now_s)

    def _start_over(self, now_s: float) -> list[Effect]:
        self.replication = None
        if not self.relay.peers - self.relay.leaves:
            self.state, self.wake_at_s, self.give_up_at_s = State.KNOCKING, now_s, now_s + self.patience_s
            return [DiscardState()]
        # Whom we have reached may be joiners, too, and reach nobody else: then we go on knocking at the others.
        answered = self.scheduler and self.unanswered < 2
        knocks = [] if answered else self._dial_seeds()
        return [DiscardState(), *knocks, *self._ask(now_s)]

    def _give_up(self, reason: str, now_s: float, rest_s: float = 0.0) -> list[Effect]:
        """Nobody lets us in, so far. `rest_s`: before who keeps trying asks again."""
        if self.may_found:
            return self._found()
        if self.otherwise is not Otherwise.KEEP_TRYING or self._unwanted:
            return self._fail(reason)
        self.patience_s = min(2 * self.patience_s, MAX_PATIENCE_S)
        self.scheduler, self.unanswered = "", 0
        self.empty, self.alike, self.planless = 0, 0, 0
        effects = (
            [Parked(reason), *self._start_over(now_s)] if not rest_s else [Parked(reason), DiscardState()]
        )
        if rest_s:
            self.replication, self.state = None, State.ASKED
            self.wake_at_s = self.ask_again_at_s = now_s + rest_s
        return effects

    @property
    def may_found(self) -> bool:
        return self.otherwise is Otherwise.FOUND and not self.scheduler and not self.found_member

    def _found(self) -> list[Effect]:
        self.state, self.wake_at_s, self.give_up_at_s = State.JOINED, None, None
        return [Founded()]

    def _fail(self, reason: str, spec: bytes = b"") -> list[Effect]:
        self.state, self.wake_at_s = State.FAILED, None
        return [JoinFailed(reason, spec)]

    # --- links ---

    def _open_links(self, plan: NegotiationPlan, now_s: float) -> list[Effect]:
        patience_s = LINK_PATIENCE_S + self.seconds_per_link * len(plan.neighbors)
        self.state, self.wake_at_s = State.LINKING, now_s + patience_s
        links = NewLinks({m.id: tuple(self.book.ways_to(m)) for m in plan.neighbors}, {*self.relay.peers})
        self.links = links
        # If the cluster drops us, they lead back to it, also where the way to the seeds is gone.
        ways = (way for tries in links.ways.values() for way in tries)
        self.seeds = tuple(dict.fromkeys((*self.seeds, *ways)))[: len(self.named) + MAX_FOUND]
        effects = [
            effect for peer, is_open in links.open.items() if is_open for effect in self._examine(peer)
        ]
        return effects + [
            Dial(way) for peer, ways in links.ways.items() if not links.open[peer] for way in ways
        ]

    def _examine(self, peer: str) -> list[Effect]:
        """How fast is the link, and could the other end have opened it?"""
        return [MeasureLink(peer), Transmit(peer, DialBack(addresses=self.request.addresses))]

    def _report_links(self, now_s: float, complete: bool = True) -> list[Effect]:
        links = self.links
        if complete and not links.are_settled:
            return []
        if not any(links.open.values()):
            return self._ask_for_others(now_s)
        self.state, self.wake_at_s, self.unanswered = State.WAITING, now_s + ASK_EVERY_S, 0
        self.request = msgspec.structs.replace(self.request, again=True)
        report = NeighborsReady(
            node=self.request.node,
            addresses=() if links.are_one_sided else self.request.addresses,
            links=links.readings,
            failed=links.failures,
        )
        return self._warn_if_unreachable() + self.relay.send(self.scheduler, report)

    def _warn_if_unreachable(self) -> list[Effect]:
        if not self.links.are_one_sided or self.warned or not self.request.addresses:
            return []
        self.warned = True
        who = "; ".join(f"{peer}: {reply.reason}" for peer, reply in sorted(self.links.dialled_back.items()))
        told = (
            f"nobody can open a link to it at {', '.join(self.request.addresses)} ({who}): it can only dial. "
            "Give --listen an address that the others can reach"
        )
        return [Happened("unreachable", self.request.node, told[:2000], 0)]

    def _ask_for_others(self, now_s: float) -> list[Effect]:
        """They may just have died, and the scheduler is about to learn it; or no way leads there from here."""
        self.planless += 1
        if self.planless >= MAX_PLANLESS:
            links = self.links
            reasons = "; ".join(f"{peer}: {links.failed(peer) or 'no answer'}" for peer in sorted(links.ways))
            reason = f"none of the planned neighbours can be reached ({reasons or 'no answer'})"
            return self._give_up(reason, now_s)
        self.request = msgspec.structs.replace(self.request, stuck=True)
        self.state, self.wake_at_s = State.ASKED, now_s + KNOCK_EVERY_S
        self.ask_again_at_s = self.wake_at_s
        return []

    # --- state ---

    def _fetch(self, plan: ReplicationPlan, now_s: float) -> list[Effect]:
        """Of those to whom the link has not closed since it was reported: nobody would tell us of that again."""
        shares = {peer: count for peer, count in plan.shards_by_source.items() if peer in self.relay.peers}
        fellows = [peer for peer in plan.fellows if peer in self.relay.peers]
        if not shares and not fellows:
            return self._ask_again("no link is open to those who have the state", now_s)
        self.state, self.wake_at_s = State.FETCHING, None
        self.attempts += 1
        self.step_s = plan.step_s
        self.replication = Replication(
            plan.step, plan.shard_bytes, shares, self.attempts, fellows, plan.turn, self.steals
        )
        return self.replication.start(now_s)

    def _replicate(self, event: Event, now_s: float) -> list[Effect]:
        assert self.replication is not None
        effects = self.replication.handle(event, now_s)
        self.wake_at_s = self.replication.wake_at_s
        if self.replication.failed:
            return effects + self._ask_again(self.replication.failed, now_s)
        if any(isinstance(effect, StateWhole) for effect in effects):
            self.state, self.wake_at_s = State.LOADING, None
            return effects
        rest_s = self.replication.rest_s(now_s)
        return effects + (self._say_ready_soon(rest_s) if rest_s <= self.step_s and not self._lags else [])

    @property
    def _lags(self) -> bool:
        """Would a cluster that lets us in wait for results, longer than it would for the state?"""
        total = self.replication.total_bytes if self.replication else None
        return total is not None and self.is_far_behind(total)

    def _say_ready_soon(self, rest_s: float) -> list[Effect]:
        self.step_s = 0.0
        return self.relay.send(self.scheduler, ScaleOutReady(node=self.request.node, in_s=rest_s))

    def _say_ready(self, now_s: float) -> list[Effect]:
        self.wake_at_s = now_s + ASK_EVERY_S
        return self.relay.send(EVERYONE, ScaleOutReady(node=self.request.node))

    def check_invariants(self) -> None:
        """What holds between any two events."""
        if self.replication is not None:
            self.replication.check_invariants()
        if self.state in (State.KNOCKING, State.ASKED, State.LINKING, State.WAITING, State.READY):
            assert self.wake_at_s is not None, f"{self.state} waits without a deadline"


def _rank(request: ScaleOutRequest) -> tuple[bool, int, str]:
    """Of all who would found a cluster, the least does."""
    return (request.place == 0, request.place, request.node)
