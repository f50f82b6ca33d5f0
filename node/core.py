"""The agent's core: one node, all of its decisions (Chaos Sec. V-A1: "bridges the node and scheduler").

    OUTSIDE --found or join--> (observer -->) member --leave, expelled--> OUT

A node that is out comes back as a new Agent, as a process does that was started again: of a later life, through
`ways_back`.

It is made of smaller cores, each with one concern: Relay (how messages travel), Liveness and Overlay (who can
be reached), StepSync (the all-reduce and its vote), Election, the four negotiations' node halves, and, on one
node at a time, the Scheduler. This class routes events to them and connects what one finds out to what
another needs to know. No clock, no socket, no tensor, no thread.
"""

from __future__ import annotations

import enum
import random
from collections import deque
from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from msgspec.structs import replace

from ..protocols.addresses import AddressBook, DialBacks
from ..protocols.connect_link import LinkOpener
from ..protocols.deaths import PROOF_S, Deaths
from ..protocols.disconnect_link import LinkCloser
from ..protocols.effects import (
    AnswerStatus,
    ClosePeer,
    Dial,
    DiscardState,
    Effect,
    FellBehind,
    Founded,
    Happened,
    Joined,
    Left,
    Measured,
    MeasureLink,
    Out,
    Parked,
    StateWhole,
    StepCompleted,
    ViewEntered,
)
from ..protocols.election import Election, Role
from ..protocols.events import (
    BacklogFull,
    CaughtUp,
    Contributed,
    Crashed,
    DialFailed,
    Event,
    Iperf3Done,
    Iperf3Serving,
    LeaveWanted,
    LinkMeasured,
    LocalReady,
    ManifestBad,
    ManifestKnown,
    NotReached,
    PeerClosed,
    PeerOpened,
    Reached,
    ReadingsTaken,
    Received,
    Retracted,
    ShardBad,
    ShardStored,
    SnapshotReady,
    StateRejected,
    Tick,
)
from ..protocols.flush import FlushFollower
from ..protocols.healing import LostLinks
from ..protocols.join_news import JoinNews
from ..protocols.keyring import KeyKeeper, Keyring
from ..protocols.link_news import LinkReporter
from ..protocols.liveness import Liveness
from ..protocols.messages import (
    EVERYONE,
    AbortRequest,
    Answer,
    Commit,
    DeclaredDead,
    DialBack,
    DialBackReply,
    Down,
    Echo,
    EchoReply,
    Envelope,
    Expelled,
    Farewell,
    Flush,
    GoOnCommand,
    Have,
    Install,
    Introduction,
    Iperf3Ready,
    KeyCommand,
    KeyringNews,
    LeaveCommand,
    LinkNews,
    Losses,
    ManifestReply,
    ManifestRequest,
    Member,
    NegotiationPlan,
    NoSnapshot,
    Notice,
    Outlived,
    Ping,
    Pong,
    Prepare,
    Probe,
    ProbeRequest,
    ProbeResult,
    Ready,
    ReplicationDone,
    ReplicationPlan,
    Report,
    Routed,
    ScaleOutRefused,
    ScaleOutRequest,
    Shard,
    ShardRequest,
    StatusRequest,
    Strike,
    Up,
    View,
    ViewChange,
    ViewKey,
    VoteReply,
    VoteRequest,
)
from ..protocols.overlay import LinkState, Overlay, lacking
from ..protocols.probing import Kind, Prober
from ..protocols.readings import Readings
from ..protocols.relay import Relay
from ..protocols.scale_in import Leaver
from ..protocols.scale_in import State as LeaverState
from ..protocols.scale_out import HERE, LIFE_STEP, Joiner, Otherwise
from ..protocols.scale_out import State as JoinerState
from ..protocols.serving import Serving
from ..protocols.step_sync import StepSync
from ..protocols.view_change import applied
from ..protocols.waiting import LEAST_S, StepClock
from ..scheduler.core import Scheduler
from ..scheduler.monitor import ClusterMonitor
from ..scheduler.sync_plan import POLICIES, Bundler, Policy, bundle
from ..scheduler.views import with_trees
from ..scheduler.waits import Waits

DECLARED_EVERY_S = 5.0  # Who is said to be dead is dialled so often, in case that it lives after all.
REDIAL_EVERY_S = 1.0  # Members out of reach are tried directly, in case another way leads to them.
ABORT_EVERY_S = 1.0
ROUNDS_IN_VAIN = 8  # Of an election, 2 to 4 s. Duels end sooner.
REPORT_EVERY_S = 1.0
STEP_MESSAGES = (Up, Down, Ready, Commit)
MAX_STRIKES = 64  # Kept at once. More nodes that end with an error in one step are not told of.
FOLLOWED_UP = (
    FellBehind, ViewEntered, StepCompleted, Founded, Left, Out, DiscardState, StateWhole, Parked, MeasureLink,
    Measured,
)  # fmt: skip
SECONDS_PER_LINK = {"in-band": 0.0, "iperf3": 4.0}  # That measuring adds to a joiner's patience.


class Phase(enum.Enum):
    OUTSIDE = "outside"
    JOINING = "joining"
    MEMBER = "member"
    OUT = "out"


@dataclass(slots=True)
class Settings:
    """What a core needs to know of its node."""

    addresses: tuple[str, ...] = ()  # Where others may dial it.
    peers_at: Mapping[str, str] = field(default_factory=dict)  # What the user says of others' (AddressBook).
    probe: Kind = "in-band"
    chunks: int = 1
    borders: tuple[int, ...] = ()  # Chunks that begin something else: no message goes over them.
    result_bytes: int = 0  # Of what a step sums.
    digest: str = ""  # Of the model; "" agrees with any.
    spec: bytes = b""
    policy: Policy = POLICIES["fapt"]
    bundler: Bundler = bundle
    strategy: str = "adaptive"  # How a joiner's shards are assigned (scheduler/shard_plan.py).
    steals: bool = True  # As of Replication.
    life: int = 0  # Which this agent lives: later than any before under its name, if its clock is right.
    first_step: int = 0  # Of a cluster that this node founds: a checkpoint's, if it goes on from one.
    keyring: Keyring | None = None  # None: without keys.


class Agent:
    """One node's decisions. `handle(event, now_s)` says what to do; `wake_at_s` when to send a Tick."""

    def __init__(self, me: str, settings: Settings, rng: random.Random) -> None:
        self.me, self.settings, self.rng = me, settings, rng
        self.phase = Phase.OUTSIDE
        self.relay = Relay(me, settings.life)
        self.liveness = Liveness()
        self.overlay = Overlay(me)
        self.reporter = LinkReporter(me, settings.life, self.relay, self.overlay)
        self.sync = StepSync(me, settings.chunks, settings.result_bytes, settings.borders)
        self.follower = FlushFollower(me, self.sync, self.relay)
        self.election = Election(me, rng, self.relay.send)
        self.monitor = ClusterMonitor()
        self.book = AddressBook(settings.peers_at)
        self.dial_backs = DialBacks(self.book)
        self.deaths = Deaths(self.book)
        self.prober = Prober(me, settings.probe, self.book)
        self.readings = Readings(self.liveness)
        self.keys = KeyKeeper(me, settings.keyring, self.relay)
        self.lost_links = LostLinks(me, self.relay, self.book)
        self.opener = LinkOpener(me, self.relay, self.book)
        self.closer = LinkCloser(me)
        self.leaver = Leaver(me, self.relay)
        self.strikes: dict[tuple[str, int], Strike] = {}  # By node and life, until a step has told of them.
        self.struck: deque[tuple[str, int]] = deque(maxlen=MAX_STRIKES)  # Of these one has: they count once.
        self.crash: Crashed | None = None  # How our own script has ended.
        self.joiner: Joiner | None = None
        self.join_news: JoinNews | None = None
        self.seeds: tuple[str, ...] = ()
        self.scheduler: Scheduler | None = None
        self.serving = Serving(me)
        self.entered: View | None = None  # The newest view that was acted in.
        self.parked: str | None = None
        self.vacant_term = 0  # Whose scheduler has stood again: it is none any more.
        self.torn: AbortRequest | None = None  # The attempt that cannot end as it is.
        self.early_prepare: ViewChange | None = None  # Of a joiner: told against the view of a plan to come.
        self.abort_at_s = 0.0
        self.redial_at_s: float | None = None
        self.lost_at_s: dict[str, float] = {}  # Members out of reach, and since when.
        self.declared: dict[str, Member] = {}  # Who is dead, says a person, and in no view since.
        self.named_at: dict[str, str] = {}  # Peer: the address that it names, or that we dialled.
        self.missed: Set[str] = frozenset()  # Who was out of reach when we dialled last.
        self.last_readings: ReadingsTaken | None = None
        self.report_at_s: float | None = None
        self.clock, self.waits = StepClock(), Waits()

    # --- start ---

    def found(self, now_s: float, view: View | None = None) -> list[Effect]:
        """Start a cluster: of one, or of all members of a first `view` that each of them is given."""
        return self._finish(self._found(view, now_s), now_s)

    def _found(self, view: View | None, now_s: float) -> list[Effect]:
        step = self.settings.first_step
        hang_up: list[Effect] = []
        if view is None:
            # They are in no cluster, as we were, and may be in another by now: news of one must not reach the other.
            strangers = sorted(self.relay.peers - self.relay.leaves)
            hang_up = [ClosePeer(peer, "it founds a cluster") for peer in strangers]
            me = Member(id=self.me, addresses=self.settings.addresses, joined_step=step, life=self.life)
            alone = View(term=1, seq=1, scheduler=self.me, members=(me,))
            view = with_trees(alone, self.monitor.graph((self.me,), ()), self.settings.policy)
        self.election.term = self.election.voted_term = view.term
        if view.scheduler == self.me:
            self.election.role = Role.ELECTED
            self.scheduler = self._new_scheduler(view.term)
        self.phase = Phase.MEMBER
        self.report_at_s = now_s
        self.clock.begin(now_s)
        return [*hang_up, *self.sync.begin(view, step), Joined(step, ())]

    def join(
        self, seeds: tuple[str, ...], neighbors: tuple[str, ...], degree: int, blocking: bool,
        patience_s: float, now_s: float, otherwise: Otherwise = Otherwise.FAIL,
    ) -> list[Effect]:  # fmt: skip
        """Ask to be let into the cluster that one of `seeds` belongs to."""
        self.seeds = seeds
        request = ScaleOutRequest(
            node=self.me,
            life=self.life,
            addresses=self.settings.addresses,
            neighbors=neighbors,
            degree=degree,
            digest=self.settings.digest,
            blocking=blocking,
            founds=otherwise is Otherwise.FOUND,
        )
        self.phase = Phase.JOINING
        self.joiner = Joiner(
            self.relay, self.book, seeds, request, patience_s, now_s, SECONDS_PER_LINK[self.settings.probe],
            otherwise, self.settings.steals,
        )  # fmt: skip
        self.join_news = JoinNews(self.joiner, now_s)
        return self._finish(self.joiner.handle(Tick(), now_s), now_s)

    @property
    def life(self) -> int:
        """Which life of its name this node lives, as others know it."""
        return self.reporter.life

    @property
    def next_life(self) -> int:
        """That of who comes back after this one: it exceeds whatever this one has told."""
        return max(self.reporter.life, self.reporter.version) + LIFE_STEP

    @property
    def was_last(self) -> bool:
        """Of who has left: does nobody go on?"""
        view, commit = self.sync.view, self.sync.last_commit
        return (commit is not None and commit.total.leaving) or (
            view is not None and view.node_ids == (self.me,)
        )

    @property
    def ways_back(self) -> tuple[str, ...]:
        """Where to ask for the cluster that goes on without us: its neighbours of ours, its others, our seeds."""
        view = self.sync.view
        near = view.neighbors(self.me) if view else ()
        members = sorted(view.members, key=lambda m: m.id not in near) if view else ()
        ways = [way for member in members if member.id != self.me for way in self.book.ways_to(member)]
        peers = [self.named_at[peer] for peer in sorted(self.relay.peers) if peer in self.named_at]
        return tuple(dict.fromkeys((*ways, *self.seeds, *peers)))  # One of them has told us that we are out.

    # --- events ---

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event in, its effects out. A peer's mistake is raised as RemoteProtocolError: drop and count it."""
        if self.phase is Phase.OUT:
            return []
        return self._finish(self._dispatch(event, now_s), now_s)

    @property
    def wake_at_s(self) -> float | None:
        """When the next Tick is due."""
        soonest: float | None = self.redial_at_s
        for core in (
            self.liveness, self.deaths, self.election, self.follower, self.opener, self.prober, self.lost_links,
            self.leaver, self.joiner, self.scheduler,
        ):  # fmt: skip
            if (
                core is not None
                and (at_s := core.wake_at_s) is not None
                and (soonest is None or at_s < soonest)
            ):
                soonest = at_s
        for at_s in (self.report_at_s, self.abort_at_s if self.torn else None):
            if at_s is not None and (soonest is None or at_s < soonest):
                soonest = at_s
        return soonest

    def _dispatch(self, event: Event, now_s: float) -> list[Effect]:
        match event:
            case Received(_, message):
                heard = self._heard(event, now_s)
                is_step = isinstance(message, STEP_MESSAGES)
                return heard + (self.sync.handle(event) if is_step else self._received(event, now_s))
            case Tick():
                return self._tick(now_s)
            case PeerOpened():
                return self._on_opened(event, now_s)
            case PeerClosed():
                return self._on_closed(event, now_s)
            case DialFailed(address, reason, _):
                self.opener.dial_failed(address, reason)
                return self._joining(event, now_s)
            case Reached() | NotReached():
                return self._on_reached(event, now_s)
            case Iperf3Serving() | Iperf3Done():
                return self.prober.handle(event, now_s)
            case Contributed():
                return self.sync.handle(event)
            case LocalReady(contribution):
                self.clock.give(now_s)
                # Its script may not know yet. Who is alone, or whose peers all leave, gets out by this.
                leaving = contribution.leaving or self.leaver.state is LeaverState.LEAVING
                told = replace(contribution, leaving=leaving, strikes=tuple(self.strikes.values()))
                return self.sync.handle(LocalReady(told))
            case Retracted(_, reason):
                effects = self.sync.handle(event)
                return effects + (self._on_torn(reason, now_s) if self.sync.tainted else [])
            case LeaveWanted():
                return self._on_leave_wanted(now_s)
            case Crashed(reason):
                self.crash = event
                return [Left(reason)]
            case SnapshotReady(step):
                return self.serving.ready(step)
            case (
                BacklogFull()
                | CaughtUp()
                | StateRejected()
                | ManifestKnown()
                | ManifestBad()
                | ShardStored()
                | ShardBad()
            ):
                effects = self._joining(event, now_s)
                if isinstance(event, ManifestKnown):
                    effects += self.serving.ready(event.step)  # Fellows may have it from us.
                return self._joined_if_ready() + effects
            case ReadingsTaken():
                self.last_readings = event
                self.readings.carried(event.carried, now_s)
                return self.join_news.tick(now_s) if self.join_news else []
        raise TypeError(f"nobody handles {event!r}")

    def _heard(self, event: Received, now_s: float) -> list[Effect]:
        """Whatever it is, its link carries."""
        self.relay.silent.discard(event.peer)
        return self.liveness.received(event.peer, event.message, now_s)

    def _tick(self, now_s: float) -> list[Effect]:
        lost, silent, effects = self.liveness.tick(now_s)
        for peer in silent:
            self.relay.silent.add(peer)
            effects += self.relay.around(peer, Echo(node=self.me, asked_s=now_s))
        for peer in lost:
            effects += [ClosePeer(peer, "nothing was heard from you")]
            effects += self._on_closed(PeerClosed(peer, clean=False), now_s, silent=True)
        effects += self.deaths.look_again(now_s)
        for peer in self.deaths.overdue(now_s):
            effects += self._tell_link(peer, LinkState.SILENT)
        effects += self.prober.handle(Tick(), now_s)
        if self.sync.view is not None:
            effects += self.lost_links.tick(self.sync.view, now_s)
        effects += self.opener.tick(now_s) + self.leaver.handle(Tick(), now_s) + self._joining(Tick(), now_s)
        if self.scheduler:
            effects += self.scheduler.tick(now_s)
        if self.follower.is_due(now_s):
            effects += self.follower.repeat(now_s) + self._park_without_quorum()
        if self.parked and self.leaver.overdue(now_s):
            effects.append(Left(f"without asking the others ({self.parked})"))
        if self.torn is not None and now_s >= self.abort_at_s:
            effects += self._ask_abort_again(now_s)
        if self.redial_at_s is not None and now_s >= self.redial_at_s:
            effects += self._redial(now_s)
        if self.report_at_s is not None and now_s >= self.report_at_s:
            self.report_at_s = now_s + REPORT_EVERY_S
            effects += self._report(now_s) + self._tell_waits(now_s) + self._measure_again(now_s)
        return effects

    def _finish(self, effects: list[Effect], now_s: float) -> list[Effect]:
        """Follow up on what this event has changed, until nothing more follows."""
        done: list[Effect] = []
        while True:
            done += self._followed_up(effects, now_s)
            if self.relay.local:
                effects = self._routed(self.me, self.relay.local.pop(0), now_s)
            else:
                effects = self._elect(now_s) + self.serving.asked_early(self.sync.step)
                if not effects and not self.relay.local:
                    return done

    def _followed_up(self, effects: list[Effect], now_s: float) -> list[Effect]:
        done: list[Effect] = []
        for effect in effects:
            if type(effect) not in FOLLOWED_UP:
                done.append(effect)
                continue
            following = self._followed_up(self._follow_up(effect, now_s), now_s)
            ends = isinstance(effect, (Left, Out))  # The farewell goes first: after it nothing is sent.
            if isinstance(effect, Out) and self._is_joining:
                done += following  # It asks again; nobody need know.
            else:
                done += [*following, effect] if ends else [effect, *following]
        return done

    @property
    def _is_joining(self) -> bool:
        return self.joiner is not None and self.joiner.state is not JoinerState.JOINED

    @property
    def _asks_again(self) -> bool:
        return self.joiner is not None and self.joiner.state in (JoinerState.KNOCKING, JoinerState.ASKED)

    def _follow_up(self, effect: Effect, now_s: float) -> list[Effect]:
        """What an effect of one core means to the others."""
        match effect:
            case ViewEntered(view, step):
                return self._on_view(view, step, now_s)
            case StepCompleted():
                return self._on_step_completed(now_s)
            case Left():
                self.leaver.left()
                return self._leave_all()
            case Out(reason, final=False) if self._is_joining:
                return self._orphaned(reason, now_s)
            case Out():
                return self._leave_all()
            case Founded():
                self.joiner = None
                return self._found(None, now_s)
            case StateWhole(step):
                self.serving.arrived(step)
            case DiscardState():
                void = self.joiner is not None and self.joiner.replication is None
                effects = self.serving.arrives(0, ()) if void else []
                lost = self.phase is Phase.MEMBER and self._asks_again
                return effects + (self._go_without_me(now_s) if lost else [])
            case FellBehind(peer) if self.phase is Phase.JOINING and self.joiner:
                self.joiner.is_to_block()
                return self._orphaned(f"{self.me} fell behind {peer}", now_s, goes_on=True)
            case FellBehind(peer) if self.phase is Phase.MEMBER:
                return self._on_torn(f"{self.me} fell behind {peer}", now_s)
            case Parked(reason):
                self.parked = reason
                if self.phase is Phase.MEMBER:
                    self._look_for_missing(now_s)
            case MeasureLink(peer):
                return self.prober.want(peer, now_s)
            case Measured(peer, rate_bps, source):
                self.readings.measured(peer, rate_bps, source, now_s)
                return self._joining(LinkMeasured(peer, rate_bps, source), now_s)
        return []

    # --- connections ---

    def _on_opened(self, event: PeerOpened, now_s: float) -> list[Effect]:
        peer = event.peer
        self.relay.opened(peer, event.client)
        self.liveness.opened(peer, now_s)
        self.deaths.opened(peer)
        if event.address and not event.client:
            self.named_at[peer] = event.address
        effects = self._joining(event, now_s)
        if event.dialled:
            self.book.reached(peer, event.address)
            wanted = self.opener.view
            effects += [MeasureLink(peer)] if wanted and peer in wanted.neighbors(self.me) else []
        if not event.client:
            effects += self.keys.opened(peer, now_s)
            effects += self._tell_link(peer, LinkState.OPEN) + self.reporter.tell_losses(peer)
        return effects + self._vote_if_prepared()

    def _on_closed(self, event: PeerClosed, now_s: float, silent: bool = False) -> list[Effect]:
        peer = event.peer
        if peer not in self.relay.peers:
            return []
        client, broke = peer in self.relay.leaves, not silent and not event.clean
        proof_until_s, hold_until_s = self._proof_until_s(peer, now_s), self.liveness.hold_until_s(peer)
        self.relay.closed(peer)
        self.liveness.closed(peer)
        self.readings.closed(peer)
        self.dial_backs.closed(peer)
        self.named_at.pop(peer, None)
        effects = self.prober.closed(peer, now_s) + self._joining(event, now_s) + self.serving.drop(peer)
        if self.sync.view is not None and peer in self.sync.view.neighbors(self.me):
            self.lost_links.lost(peer, now_s)
        if self.sync.view is not None and self.sync.depends_on(peer):
            effects += self._on_torn(f"lost the link {self.me} - {peer}", now_s)
        if client:
            return effects
        # Who says Bye is alive, whatever it thinks of us.
        effects += self.deaths.closed(peer, broke, now_s, proof_until_s, hold_until_s)
        return effects + ([] if peer in self.deaths.looking else self._tell_link(peer, LinkState.SILENT))

    def _proof_until_s(self, peer: str, now_s: float) -> float:
        """If its connection breaks now, and its machine refuses another: until when does that prove its death?"""
        lately_s = now_s + PROOF_S if self.liveness.spoke_lately(peer, now_s) else float("-inf")
        return max(lately_s, self.liveness.proof_until_s(peer)) if self._are_two(peer) else lately_s

    def _are_two(self, peer: str) -> bool:
        """Are we and `peer` the voters of every view it may act in? Then nothing shortens its patience with us."""
        view = self.sync.view
        if self.phase is not Phase.MEMBER or view is None or self.follower.flush is not None:
            return False
        coming = [*self.sync.prepared.values(), *([self.opener.view] if self.opener.view else ())]
        voters = [each.members for each in self.sync.electorates()] + [each.voter_ids for each in coming]
        return all({*each} == {self.me, peer} for each in voters)

    def _on_torn(self, reason: str, now_s: float, without_me: bool = False) -> list[Effect]:
        """Messages of the attempt under way may be lost for good, even if the link opens again.

        An observer asks for another attempt, too: to pull the state anew takes longer than to do a step over.
        """
        if self.phase is Phase.JOINING and self.joiner is not None and not self.joiner.is_in_view:
            return self._orphaned(reason, now_s)
        assert self.sync.view is not None
        key, step = self.sync.view.key, self.sync.step
        self.torn = AbortRequest(node=self.me, key=key, step=step, reason=reason, without_me=without_me)
        self.abort_at_s = now_s + ABORT_EVERY_S
        return self.relay.send(EVERYONE, self.torn)

    def _go_without_me(self, now_s: float) -> list[Effect]:
        """We are a member, and have no state to train on."""
        return self._on_torn(f"{self.me} could not get the state", now_s, without_me=True)

    def _ask_abort_again(self, now_s: float) -> list[Effect]:
        """Until a flush has come, or the step was completed after all."""
        torn, view = self.torn, self.sync.view
        if (
            torn is None
            or view is None
            or self.sync.frozen
            or (torn.key, torn.step) != (view.key, self.sync.step)
        ):
            self.torn = None
            return []
        self.abort_at_s = now_s + ABORT_EVERY_S
        return self.relay.send(EVERYONE, torn)

    def _tell_link(self, peer: str, state: LinkState, peer_life: int | None = None) -> list[Effect]:
        return self.reporter.tell(peer, state, self._member_key, peer_life)

    @property
    def _member_key(self) -> ViewKey:
        """Of the view that we are a member of; (0, 0) if of none."""
        view = self.sync.view if self.phase is Phase.MEMBER else None
        return view.key if view is not None else (0, 0)

    def _overlay_changed(self, now_s: float) -> list[Effect]:
        """Somebody may have gone or come back."""
        assert self.sync.view is not None
        if self.phase is Phase.JOINING and not self.overlay.reachable & self.sync.view.member_set:
            return self._orphaned("no member can be reached", now_s) if self.joiner else []
        missing = self.sync.view.member_set - self.overlay.reachable
        self.lost_at_s = {node: self.lost_at_s.get(node, now_s) for node in sorted(missing)}
        self._look_for_missing(now_s)
        if self.scheduler and self.phase is Phase.MEMBER:
            return self.scheduler.overlay_changed(now_s)
        return []

    def _look_for_missing(self, now_s: float) -> None:
        """Dial members that are out of reach, or cut off from us, until there are none."""
        assert self.sync.view is not None
        missing = self.sync.view.member_set - self.overlay.reachable
        if not self.parked:
            missing -= self.overlay.crashed
        if not missing and not self._cut_off:
            self.redial_at_s = self.redial_at_s or now_s if self.declared else None
        elif self.redial_at_s is None:
            self.redial_at_s = now_s

    @property
    def _cut_off(self) -> Set[str]:
        """Members that a flush waits for: until a way leads to them that is not through nodes it drops."""
        return self.scheduler.cut_off - self.relay.peers if self.scheduler else frozenset()

    def _redial(self, now_s: float) -> list[Effect]:
        assert self.sync.view is not None
        missing = (self.sync.view.node_set - self.overlay.reachable) | self._cut_off
        self.redial_at_s = now_s + (REDIAL_EVERY_S if missing else DECLARED_EVERY_S)
        members = [self.sync.view.find(node) for node in sorted(missing)]
        members += [member for node, member in self.declared.items() if node not in self.relay.peers]
        dials: list[Effect] = [Dial(way) for member in members if member for way in self.book.ways_to(member)]
        # Of whom a later life was heard for so long, it may be an earlier one whose clock had been wrong.
        doubted, self.missed = self.missed & missing & self.overlay.reborn, missing
        asks = [
            effect for member in members if member and member.id in doubted
            for effect in self._tell_outlived(member.id, member.life)
        ]  # fmt: skip
        waits = self.parked is not None and self.phase is Phase.MEMBER
        return dials + asks + (self.reporter.repeat(self._member_key) if waits else [])

    def _on_reached(self, event: Reached | NotReached, now_s: float) -> list[Effect]:
        effects = self.dial_backs.handle(event, self.relay.silent)
        # Who is no member does not know whether the dead one had gone on without those whom we tell.
        testifies = self.phase is Phase.MEMBER
        for peer, life in self.deaths.handle(event, now_s).items():
            died = testifies and life is not None
            effects += self._tell_link(peer, LinkState.CLOSED if died else LinkState.SILENT, life)
        if isinstance(event, NotReached):
            return effects
        self.book.reached(event.peer, event.address)
        view = self.sync.view
        if view is not None and self.phase is Phase.MEMBER:
            effects += self.lost_links.reached(event.peer, view)
        return effects

    # --- messages ---

    def _received(self, event: Received, now_s: float) -> list[Effect]:
        peer = event.peer
        match event.message:
            case Envelope() as envelope:
                if envelope.source == peer and isinstance(envelope.body, LinkNews):
                    self._said_where(peer, envelope.body)
                ours, effects = self.relay.receive(peer, envelope)
                return effects + (self._routed(envelope.source, envelope.body, now_s) if ours else [])
            case Ping() | Pong():
                return []
            case Losses() as losses:
                return self.reporter.on_losses(peer, losses)
            case ProbeRequest() | Probe() | ProbeResult() | Iperf3Ready():
                return self.prober.handle(event, now_s)
            case DialBack() as wanted:
                return self.dial_backs.asked(peer, wanted)
            case DialBackReply():
                return self._joining(event, now_s)
            case ManifestRequest() | ShardRequest() | ReplicationDone():
                return self.serving.asked(event, self.sync.step)
            case Have():
                fetches = self.joiner is not None and self.joiner.state is JoinerState.FETCHING
                return self._joining(event, now_s) if fetches else self.serving.asked(event, self.sync.step)
            case ManifestReply() | Shard() | NoSnapshot():
                return self._joining(event, now_s)
        return []

    def _routed(self, source: str, message: Routed, now_s: float) -> list[Effect]:
        match message:
            case Prepare(view=proposed):
                return self._on_prepare(source, proposed, now_s)
            case Flush():
                return self._on_flush(message, now_s)
            case Install():
                return self._on_install(message)
            case LinkNews():
                return self._on_link_news(message, now_s)
            case Farewell():
                return self._on_farewell(message, now_s)
            case VoteRequest() | VoteReply():
                return self._on_vote(message, now_s)
            case Echo(node=node, asked_s=asked_s):
                return self.relay.around(node, EchoReply(node=self.me, asked_s=asked_s))
            case EchoReply(node=node, asked_s=asked_s):
                self.liveness.vouched(node, asked_s, now_s)
                return []
            case ScaleOutRequest() if self.sync.view is not None:
                return self._on_newcomer(source, message, now_s)
            case Outlived():
                return self._on_outlived(message, now_s)
            case NegotiationPlan() | ScaleOutRefused() | Answer() | ScaleOutRequest():
                return self._joining(Received(source, message), now_s)
            case ReplicationPlan(view=view, step=step):
                return self._on_replication_plan(source, message, view, step, now_s)
            case Expelled():
                return self._on_expelled(message, now_s)
            case Notice():
                self.monitor.notice(message)
                return []
            case KeyringNews() | KeyCommand() | Introduction():
                return self.keys.handle(message, now_s, scheduling=self.scheduler is not None)
            case LeaveCommand(asker=asker):
                answer = Answer(ok=True, text=f"{self.me} leaves")
                return self.relay.send(asker, answer) + self._on_leave_wanted(now_s)
            case GoOnCommand(asker=asker):
                return self._on_go_on(asker)
            case DeclaredDead(lives=lives):
                return self._on_declared(lives, now_s)
            case StatusRequest(asker=asker):
                return [AnswerStatus(asker)] if self.scheduler or self.parked else []
        return self.scheduler.receive(source, message, now_s) if self.scheduler else []

    # --- newcomers and lives ---

    def _on_newcomer(self, source: str, request: ScaleOutRequest, now_s: float) -> list[Effect]:
        """The scheduler plans, any member knows that there is a cluster, and any node may know of earlier lives."""
        if self.overlay.is_outlived(request.node, request.life):
            return self._tell_outlived(request.node, request.life)
        here: list[Effect] = []
        if self.parked and self.phase is Phase.MEMBER:
            here = self.relay.send(
                request.node, Answer(ok=False, text=f"it waits: {self.why_it_waits(now_s)}"[:2000])
            )
        elif request.founds and self.phase is Phase.MEMBER:
            here = self.relay.send(request.node, Answer(ok=True, text=HERE))
        return here + (self.scheduler.receive(source, request, now_s) if self.scheduler else [])

    def _tell_outlived(self, node: str, life: int) -> list[Effect]:
        return self.relay.send(node, Outlived(life=life, later=self.overlay.life_of(node)))

    def _on_outlived(self, message: Outlived, now_s: float) -> list[Effect]:
        """Our clock was set back. Whatever was said in our earlier life has later numbers than we: exceed them."""
        if message.life != self.life:
            return []
        if self.phase is not Phase.JOINING or self.joiner is None or self.joiner.is_in_view:
            return self.reporter.outdo(message.later, self._member_key, now_s)
        # Nobody may remember that this name has had the very next life, too: its serials would pass for ours.
        life = message.later + LIFE_STEP + self.rng.randrange(LIFE_STEP)
        return self.reporter.outlived(life) + self.joiner.outlived(life, now_s)

    # --- views ---

    def _on_prepare(self, source: str, proposed: View | ViewChange, now_s: float) -> list[Effect]:
        if proposed.term < self.election.term:
            return self._tell_term(source)
        if self.sync.view and proposed.key <= self.sync.view.key:
            return []
        self._adopt_term(proposed.term)
        newest = self.opener.view
        if proposed.key in self.sync.prepared or (newest is not None and newest.key >= proposed.key):
            return []
        view = self._whole(proposed)
        if view is None and isinstance(proposed, ViewChange) and self.phase is Phase.JOINING:
            self.early_prepare = proposed
        if view is None or (view.find(self.me) is None and self.phase is not Phase.MEMBER):
            return []
        return self._prepare(view, now_s)

    def _prepare(self, view: View, now_s: float) -> list[Effect]:
        return self.opener.prepare(view, now_s) + self._vote_if_prepared()

    def _whole(self, told: View | ViewChange) -> View | None:
        """The view that is told of; None if it is told against one that we do not know.

        Then we have no vote in it: who has one acts in the view in force, or has voted for it. A joiner gets its
        first view whole, and what was told against that may come first; whoever is elsewhere at a flush gets what
        it installs whole.
        """
        if isinstance(told, View):
            return told
        bases = (self.sync.view, self.opener.view, self.sync.prepared.get(told.base))
        base = next((view for view in bases if view is not None and view.key == told.base), None)
        return applied(base, told) if base is not None else None

    def _vote_if_prepared(self) -> list[Effect]:
        view = self.opener.ready
        if view is not None:
            self.opener.done()
            if not self.sync.frozen or self.phase is Phase.JOINING:
                self.sync.prepare(view)
        return []

    def _on_view(self, view: View, step: int, now_s: float) -> list[Effect]:
        """The host acts in a new view: everything derived from it follows."""
        before, self.entered = self.entered, view
        self.follower.flush = None
        if self.opener.view is not None and self.opener.view.key <= view.key:
            self.opener.done()
        self.overlay.enter(view)
        self.declared = {
            node: each for node, each in self.declared.items() if view.find(node) in (None, each)
        }
        others = [voter for voter in view.voter_ids if voter != self.me]
        self.liveness.pairs_with(others[0] if len(view.voter_ids) == 2 and len(others) == 1 else "")
        self.relay.by_view = (view.scheduler, view.to_scheduler(self.me))
        self.lost_links.entered(view)
        self.book.keep(view.node_set, self.relay.peers)
        self.closer.switched(before, view, self.overlay.reborn)
        self.monitor.entered(view)
        effects: list[Effect] = [] if self.parked is None else [Parked(None)]
        self._adopt_term(view.term)
        if self.me in view.member_set and self.phase is Phase.JOINING and self.joiner:
            effects += self._become_member(step, now_s)
        self.clock.is_usual = not any(joining.blocking and joining.sources for joining in view.joining)
        effects += self.serving.entered(view, step)
        if self.scheduler:
            if view.scheduler not in (self.me, "") or self.me not in view.member_set:
                self.scheduler = None
            else:
                effects += self.scheduler.switched(view, now_s)
        effects += self._overlay_changed(now_s)
        return effects + self._miss_links(view, now_s)

    def _miss_links(self, view: View, now_s: float) -> list[Effect]:
        """What should be open but is not, the scheduler may believe in: tell it."""
        effects: list[Effect] = []
        missing = [peer for peer in view.neighbors(self.me) if peer not in self.relay.peers]
        for peer in missing:
            news = self.overlay.news.get((self.me, peer))
            if news is None or news.state is LinkState.OPEN:
                effects += self._tell_link(peer, LinkState.SILENT)
        return effects + self._tear_if_cut_off(now_s)

    def _tear_if_cut_off(self, now_s: float) -> list[Effect]:
        """A step begins: what it needs of us must not be lost for want of a link."""
        view = self.sync.view
        around = view.neighbors(self.me) if view is not None else ()
        torn = [peer for peer in around if peer not in self.relay.peers and self.sync.depends_on(peer)]
        return self._on_torn(f"no link to {torn[0]}", now_s) if torn else []

    def _become_member(self, step: int, now_s: float) -> list[Effect]:
        assert self.joiner is not None
        self.phase, self.report_at_s = Phase.MEMBER, now_s
        self.clock.begin(now_s)
        effects = [*self._joined_if_ready(), Joined(step, self.sync.deal)]
        return effects + (self._go_without_me(now_s) if self._asks_again else [])

    def _joined_if_ready(self) -> list[Effect]:
        """A blocking joiner is a member before it has the state, a streaming one after."""
        if self.joiner and self.joiner.state is JoinerState.READY and self.phase is Phase.MEMBER:
            self.joiner.joined()
        return []

    def _on_step_completed(self, now_s: float) -> list[Effect]:
        """We do not wait any more. If every member acts in our view, what belongs to older ones can go."""
        effects: list[Effect] = [] if self.parked is None else [Parked(None)]
        self.clock.complete(now_s)
        went_on = self.waits.completed(self.sync.step, now_s)
        if self.joiner:
            self.joiner.heard_of_step()
        if self.scheduler:
            effects += went_on + self.scheduler.stepped(now_s)
        if self.sync.last_commit is not None:
            for each in self.sync.last_commit.total.strikes:
                self.strikes.pop((each.node, each.life), None)
                self.struck.append((each.node, each.life))
        if not self.sync.priors:
            self.overlay.settled()
            coming = [*self.sync.prepared.values(), *([self.opener.view] if self.opener.view else ())]
            wanted = {peer for view in coming for peer in view.neighbors(self.me)}
            effects += self.closer.settled(self.relay.peers - self.serving.joiners, wanted)
        return effects + self._tear_if_cut_off(now_s)

    def _on_leave_wanted(self, now_s: float) -> list[Effect]:
        if self.phase is not Phase.MEMBER:
            return [Left("it was not a member yet")]
        self.election.stand_down()
        return self.leaver.handle(LeaveWanted(), now_s)

    def _leave_all(self) -> list[Effect]:
        self.phase, self.scheduler = Phase.OUT, None
        key, crash = self.entered.key if self.entered else (0, 0), self.crash
        told = Farewell(node=self.me, life=self.life, key=key)
        if crash is not None:
            told = replace(told, reason=crash.reason, ranges=crash.ranges, epoch=crash.epoch, error=True)
        return self.relay.send(EVERYONE, told)

    def _on_farewell(self, told: Farewell, now_s: float) -> list[Effect]:
        """It acts no more. A view that we have voted for and are in waits for us, so it is as good as ours."""
        view, key = self.sync.view, told.key
        if self._is_ahead(key):
            self.overlay.left_behind = True
        elif view is not None and told.error:
            key = min(key, view.key)
        self.overlay.farewell(told.node, told.life, key)
        if told.error:
            self.monitor.ended(told.node, told.life, told.reason)
            self._on_strike(told)
        return self._overlay_changed(now_s) if view else []

    def _on_strike(self, told: Farewell) -> None:
        """What it had in hand may be why it ended: all are to know before that is dealt to somebody else."""
        known, full = (told.node, told.life) in self.struck, len(self.strikes) >= MAX_STRIKES
        if told.ranges and self.phase is Phase.MEMBER and not known and not full:
            strike = Strike(
                node=told.node, life=told.life, ranges=told.ranges, reason=told.reason, epoch=told.epoch
            )
            self.strikes[told.node, told.life] = strike
            self.sync.told_of(strike)

    def _orphaned(self, reason: str, now_s: float, goes_on: bool = False) -> list[Effect]:
        """Dropped while joining; who joins in blocking mode was a member before it had the state."""
        assert self.joiner is not None
        self.phase, self.scheduler, self.torn, self.follower.flush = Phase.JOINING, None, None, None
        self.election.stand_down()
        return self.joiner.orphaned(reason, now_s, goes_on)

    def _on_expelled(self, told: Expelled, now_s: float) -> list[Effect]:
        if told.node != self.me:
            return []
        if self.phase is Phase.JOINING and self.joiner:
            return self._orphaned(told.reason, now_s, goes_on=True)
        if self.leaver.state is LeaverState.LEAVING:
            return [Left("it asked to")]
        if self.sync.view is not None and (0, 0) < told.key <= self.sync.view.key:
            return []  # It was meant for our earlier life.
        return [Out(told.reason)] if self.phase is Phase.MEMBER else []

    # --- flush and install ---

    def _on_flush(self, flush: Flush, now_s: float) -> list[Effect]:
        if self.sync.view is None:
            return []
        if flush.term < self.election.term:
            return self._expel_stranger(flush.scheduler, flush.key) or self._tell_term(flush.scheduler)
        self._adopt_term(flush.term)
        if self.follower.is_over(flush):
            return []
        if flush.scheduler != self.me:
            self.election.stand_down()
        return self.follower.follow(flush, now_s)

    def _on_install(self, install: Install) -> list[Effect]:
        if not self.follower.is_ended_by(install):
            return []
        view = self._whole(install.view)
        if view is None or view.find(self.me) is None:
            return []  # It comes whole when we answer again; or Expelled follows, or a leaver is let go.
        return self.follower.end(install, view)

    # --- a person decides ---

    def _doubted(self) -> tuple[tuple[str, int], ...]:
        """Voters out of reach, with their lives, of whom no person has spoken."""
        if self.sync.view is None or self.me not in self.sync.view.voter_ids:
            return ()  # It has no state to go on with.
        voters = {voter for electorate in self.sync.electorates() for voter in electorate.members}
        return self.overlay.missing_of(voters)

    def why_it_waits(self, now_s: float) -> str | None:
        """And what a person can do about it, if anything. None: it does not wait."""
        if self.parked is None or self.phase is not Phase.MEMBER or not (lives := self._doubted()):
            return self.parked
        lost = ", ".join(
            f"{node} was lost {now_s - self.lost_at_s.get(node, now_s):.0f} s ago" for node, _ in lives
        )
        here = self.settings.addresses[0].rpartition("@")[2] if self.settings.addresses else "HOST:PORT"
        gone = "it is" if len(lives) == 1 else "they are"
        return f"{self.parked} ({lost}; if {gone} gone for good: chaosnet go-on {here})"

    def _on_go_on(self, asker: str) -> list[Effect]:
        """Who cannot be reached is dead, says a person."""
        if self.phase is not Phase.MEMBER or self.parked is None:
            text = f"{self.me} does not wait for anybody who is out of reach"
        elif self.overlay.left_behind:
            text = f"the others went on without {self.me}: it joins them as soon as it reaches one"
        elif lives := self._doubted():
            names = ", ".join(node for node, _ in lives)
            text = (
                f"{self.me} goes on without {names}, which counts as dead; if it lives, it has to join anew"
            )
            told: list[Effect] = [
                Happened("declared dead", node, f"a person told {self.me} so", self.sync.step)
                for node, _ in lives
            ]
            told += self.relay.send(EVERYONE, DeclaredDead(lives=lives))
            return told + self.relay.send(asker, Answer(ok=True, text=text[:2000]))
        else:
            text = f"{self.me} waits, but not for a member out of reach: {self.parked}"
        return self.relay.send(asker, Answer(ok=False, text=text[:2000]))

    def _on_declared(self, lives: tuple[tuple[str, int], ...], now_s: float) -> list[Effect]:
        """Should one of them live, and have gone on, too, it or we must learn that: dial it now and then."""
        view = self.sync.view
        if view is None:
            return []
        for node, life in lives:
            member = view.find(node)
            if node != self.me and member is not None and member.life == life:
                self.declared[node] = member
            self.overlay.declare(node, life)
        return self._overlay_changed(now_s)

    # --- loss and election ---

    def _on_link_news(self, news: LinkNews, now_s: float) -> list[Effect]:
        if self._is_ahead(news.key):
            self.overlay.left_behind = True
        answer = self.reporter.correct(news, self._member_key, now_s)
        if answer is not None:
            return answer
        expel = self._expel_stranger(news.reporter, news.key) if news.key > (0, 0) else []
        if not self.overlay.heard(news) or self.sync.view is None:
            return expel
        lost = news.state != LinkState.OPEN.value and news.peer != self.me
        doubt = self.liveness.doubt(news.peer, now_s) if lost else []
        return expel + doubt + self._overlay_changed(now_s)

    def _said_where(self, peer: str, news: LinkNews) -> None:
        """A neighbour tells of its own link; whoever repeats such news names no life."""
        if news.life and news.reporter == peer and peer not in self.relay.leaves:
            self.deaths.said_where(peer, news.life)

    def _is_ahead(self, key: tuple[int, int]) -> bool:
        """Is that a newer view than ours that need not wait for us, as one does that we have voted for?"""
        view, prepared = self.sync.view, self.sync.prepared.get(key)
        return view is not None and key > view.key and (prepared is None or prepared.find(self.me) is None)

    @property
    def _named_scheduler(self) -> str:
        view = self.sync.view
        return self.follower.flush.scheduler if self.follower.flush else (view.scheduler if view else "")

    @property
    def _named_term(self) -> int:
        view = self.sync.view
        return self.follower.flush.term if self.follower.flush else (view.term if view else 0)

    @property
    def _scheduler_missing(self) -> bool:
        named = self._named_scheduler
        gave_up = self.scheduler is None if named == self.me else self.vacant_term == self._named_term
        return named == "" or gave_up or named not in self.overlay.reachable

    def _elect(self, now_s: float) -> list[Effect]:
        """Stand if the scheduler is out of reach; take the role if elected."""
        view = self.sync.view
        if self.phase is not Phase.MEMBER or view is None or self.scheduler is not None:
            return []
        if not self._scheduler_missing:
            self.election.stand_down()
            return []
        if self.me not in view.member_set:
            return []
        seniors = view.member_set & self.overlay.reachable
        if self.election.wake_at_s is None:
            leaves = self.leaver.state is not LeaverState.STAYING  # Stands only if nobody else does.
            rank = sum(node in seniors for node in view.member_ids[: view.member_ids.index(self.me)])
            self.election.scheduler_missing(rank + leaves * len(seniors), now_s)
        effects = self.election.tick(view.key, self.sync.electorates(), seniors, now_s)
        effects += self._count(seniors)
        if self.election.role is Role.ELECTED:
            return effects + self._take_role(now_s)
        return effects + self._park_without_quorum()

    def _count(self, voters: Set[str]) -> list[Effect]:
        assert self.sync.view is not None
        electorates = self.sync.electorates()
        crashed, word = self.overlay.crashed, self.overlay.has_word
        return self.election.count(self.sync.view.key, electorates, voters, crashed, word)

    def _park_without_quorum(self) -> list[Effect]:
        """Say why nothing moves, once."""
        crashed, word = self.overlay.crashed, self.overlay.has_word
        voters = lacking(self.sync.electorates(), self.overlay.reachable, crashed, word)
        if voters is not None:
            present = sum(node in self.overlay.reachable for node in voters.members)
            reason = f"only {present} of {len(voters.members)} members can be reached"
        elif self.election.rounds > ROUNDS_IN_VAIN:
            reason = "no scheduler can be elected: who is a step ahead can reach too few members"
        else:
            return []
        if self.parked == reason:
            return []
        self.parked = reason
        return [Parked(reason)]

    def _on_vote(self, message: VoteRequest | VoteReply, now_s: float) -> list[Effect]:
        view = self.sync.view
        if view is None or self.me not in view.member_set:
            return []
        if isinstance(message, VoteRequest):
            if message.candidate not in view.member_set:
                return self._expel_stranger(message.candidate, message.key)
            if message.candidate == self._named_scheduler and message.term > self._named_term:
                # We stand, too: its view may be too old for it to be elected again.
                self.vacant_term = self._named_term
            effects = self.election.on_request(message, view.key, self._scheduler_missing)
            self._adopt_term(self.election.term)
            return effects
        voters = view.member_set & self.overlay.reachable
        electorates, crashed = self.sync.electorates(), self.overlay.crashed
        word = self.overlay.has_word
        effects = self.election.on_reply(message, view.key, electorates, voters, crashed, word)
        self._adopt_term(self.election.term)
        return effects

    def _expel_stranger(self, node: str, key: tuple[int, int]) -> list[Effect]:
        """Somebody acts in a view that is history, and is not in ours: it must be told."""
        view = self.sync.view
        if view is None or view.find(node) is not None or key >= view.key:
            return []
        expelled = Expelled(node=node, reason="the cluster went on without it", key=view.key)
        return self.relay.send(node, expelled)

    def _tell_term(self, scheduler: str) -> list[Effect]:
        """Its term is over: somebody stood for the next one, even if nobody was elected."""
        refusal = VoteReply(term=self.election.term, voter=self.me, granted=False, trial=False)
        return self.relay.send(scheduler, refusal)

    def _adopt_term(self, term: int) -> None:
        """A higher term makes older proposals, and an older scheduler, void."""
        self.election.adopt(term)
        if self.scheduler is not None and self.scheduler.term < self.election.term:
            self.scheduler = None
        view = self.sync.view
        if self.sync.vote is not None and self.sync.vote[0] < self.election.term:
            self.sync.forget_prepared()
        if self.opener.view is not None and view is not None and self.opener.view.term < self.election.term:
            self.opener.done()

    def _take_role(self, now_s: float) -> list[Effect]:
        term = self.election.term
        self.sync.forget_prepared()
        self.opener.done()
        self.scheduler = self._new_scheduler(term)
        self.scheduler.seq = self.sync.view.seq if self.sync.view else 0
        told: list[Effect] = [Happened("scheduler", self.me, f"elected for term {term}", self.sync.step)]
        return told + self.scheduler.start_flush("the scheduler was lost", now_s)

    def _new_scheduler(self, term: int) -> Scheduler:
        settings = self.settings
        return Scheduler(
            self.me,
            term,
            self.sync,
            self.overlay,
            self.monitor,
            self.relay.send,
            settings.policy,
            settings.bundler,
            settings.digest,
            settings.spec,
            settings.strategy,
            lambda: (settings.result_bytes, self.clock.usual_s),
        )

    # --- state replication ---

    def _joining(self, event: Event, now_s: float) -> list[Effect]:
        """To the joiner's core, if this node is one."""
        if self.joiner is None or self.joiner.state in (JoinerState.JOINED, JoinerState.FAILED):
            return []
        return self.joiner.handle(event, now_s)

    def _on_replication_plan(
        self, source: str, plan: ReplicationPlan, view: View, step: int, now_s: float
    ) -> list[Effect]:
        here = view.find(self.me)
        if self.joiner is None or here is None or here.life != self.life:
            return []  # If we live in a later life than the scheduler knows, we ask again.
        self.follower.ended = max(self.follower.ended, plan.flushed)
        if self.sync.view is not None and view.key == self.sync.view.key:
            return self.joiner.overtaken(source, plan, now_s)
        if self.sync.view is not None and view.key < self.sync.view.key:
            return []
        effects = self._joining(Received(source, plan), now_s)
        if self.joiner.replication is not None:
            effects += self.serving.arrives(plan.step, self.joiner.replication.fellows)
        self.overlay.listens(view)
        early, self.early_prepare = self.early_prepare, None
        if early is not None and early.base == view.key and (then := applied(view, early)).find(self.me):
            effects += self._prepare(then, now_s)  # Before we hear of the step that switches to it.
        return effects + self.sync.observe(view, step)

    # --- monitoring ---

    def note(self, message: Routed, now_s: float, target: str = EVERYONE) -> list[Effect]:
        """Tell everybody; above all what happened here, once the loop has put time and cost to it."""
        return self._finish(self.relay.send(target, message), now_s)

    def _report(self, now_s: float) -> list[Effect]:
        taken, view = self.last_readings, self.sync.view
        if taken is None or view is None:
            return []
        report = Report(
            node=self.me,
            step=self.sync.step,
            readings={
                peer: self.readings.of(peer, now_s)
                for peer in view.neighbors(self.me)
                if peer in self.relay.peers
            },
            samples_per_s=taken.samples_per_s * self.clock.slowed(now_s),
            sync_delay_s=taken.sync_delay_s,
            state_bytes=taken.state_bytes,
            layer_bytes=taken.layer_bytes,
            cpu_pct=taken.cpu_pct,
            memory_bytes=taken.memory_bytes,
            battery_pct=taken.battery_pct,
            nic_sent_bytes=taken.nic_sent_bytes,
            nic_received_bytes=taken.nic_received_bytes,
            counters=taken.counters,
            idle_s=self.clock.idle_s(now_s) if self.phase is Phase.MEMBER else 0.0,
            waits_s=self.clock.waits_s(now_s),
            pulls_state=self._is_joining,
            lacks=self.sync.lacks() if self.clock.waits_s(now_s) >= LEAST_S else (),
        )
        return self.relay.send(view.scheduler, report) if view.scheduler else []

    def _measure_again(self, now_s: float) -> list[Effect]:
        """Links that the trees leave out may carry more by now. Of its two ends one asks."""
        view = self.sync.view
        if (
            view is None
            or self.phase is not Phase.MEMBER
            or self.sync.frozen
            or self.settings.probe != "in-band"
        ):
            return []
        ours = [peer for peer in view.neighbors(self.me) if peer > self.me and peer in self.relay.peers]
        return [MeasureLink(peer) for peer in self.readings.take_stale(ours, now_s)]

    def _tell_waits(self, now_s: float) -> list[Effect]:
        """Whom all wait for, if anybody; who is parked has said so."""
        view = self.sync.view
        if self.scheduler is None or view is None or self.sync.frozen or self.parked:
            return []
        return self.waits.tick(view, self.sync.step, self.clock, self.monitor, now_s)

    def check_invariants(self) -> None:
        """What holds between any two events, here and in every core."""
        self.sync.check_invariants()
        self.relay.check_invariants()
        self.serving.check_invariants()
        if self.joiner is not None:
            self.joiner.check_invariants()
        if self.scheduler is not None:
            self.scheduler.check_invariants()
            assert self.scheduler.term == self.election.term
        if self.follower.flush is None and self.phase is Phase.MEMBER:
            assert self.sync.view is not None
