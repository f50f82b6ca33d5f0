"""The cores of one node, and the phase of its life: what all parts of the agent work on.

Whatever changes here changes by a verb; parts read fields, and write only their own.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from ...protocols.addresses import AddressBook, DialBacks
from ...protocols.asking import JoinState
from ...protocols.connect_link import LinkOpener
from ...protocols.courier import Courier
from ...protocols.deaths import Deaths
from ...protocols.disconnect_link import LinkCloser
from ...protocols.election import Election
from ...protocols.flush import FlushFollower
from ...protocols.healing import LostLinks
from ...protocols.keyring import KeyKeeper, Keyring
from ...protocols.link_news import LinkReporter
from ...protocols.liveness import Liveness
from ...protocols.messages import View, ViewKey
from ...protocols.overlay import Overlay
from ...protocols.probing import Kind, Prober
from ...protocols.readings import Readings
from ...protocols.relay import Relay
from ...protocols.scale_in import Leaver
from ...protocols.scale_out import LIFE_STEP, Joiner
from ...protocols.serving import Serving
from ...protocols.step_sync import StepSync
from ...protocols.waiting import StepClock
from ...scheduler.core import Scheduler
from ...scheduler.monitor import ClusterMonitor
from ...scheduler.sync_plan import POLICIES, Bundler, SyncPolicy, bundle
from ...scheduler.waits import Waits


class Phase(enum.Enum):
    OUTSIDE = "outside"
    JOINING = "joining"
    MEMBER = "member"
    OUT = "out"


@dataclass(slots=True)
class CoreSettings:
    """What a core needs to know of its node."""

    addresses: tuple[str, ...] = ()  # Where others may dial it.
    seeds: tuple[str, ...] = ()  # Where the user told it to ask: they lead back from every life.
    peers_at: Mapping[str, str] = field(default_factory=dict)  # What the user says of others' (AddressBook).
    probe: Kind = "in-band"
    chunks: int = 1
    borders: tuple[int, ...] = ()  # Chunks that begin something else: no message goes over them.
    result_bytes: int = 0  # Of what a step sums.
    recomputes: bool = False  # As of StepSync.
    parts: bool = False  # The same.
    digest: str = ""  # Of the model; "" agrees with any.
    spec: bytes = b""
    policy: SyncPolicy = POLICIES["fapt"]
    bundler: Bundler = bundle
    strategy: str = "adaptive"  # How a joiner's shards are assigned (scheduler/shard_plan.py).
    steals: bool = True  # As of Replication.
    life: int = 0  # Which this agent lives: later than any before under its name, if its clock is right.
    first_step: int = 0  # Of a cluster that this node founds: a checkpoint's, if it goes on from one.
    keyring: Keyring | None = None  # None: without keys.


class Node:
    """Node `me`: its cores, and how far it has come."""

    def __init__(self, me: str, settings: CoreSettings, rng: random.Random) -> None:
        self.me, self.settings, self.rng = me, settings, rng
        self.phase = Phase.OUTSIDE
        self.parked: str | None = None  # Why nothing moves here.
        self.relay = Relay(me, settings.life)
        self.liveness = Liveness()
        self.overlay = Overlay(me)
        self.reporter = LinkReporter(me, settings.life, self.relay, self.overlay)
        self.sync = StepSync(
            me, settings.chunks, settings.result_bytes, settings.borders, settings.recomputes, settings.parts
        )
        self.courier = Courier(me)
        self.follower = FlushFollower(me, self.sync, self.relay)
        self.election = Election(me, rng, self.relay.send)
        self.monitor = ClusterMonitor(keyring=settings.keyring)
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
        self.serving = Serving(me)
        self.clock, self.waits = StepClock(), Waits()
        self.joiner: Joiner | None = None  # While this node joins, and after, until it founds a cluster.
        self.scheduler: Scheduler | None = None  # While this node has the role.

    # --- verbs ---

    def enter(self, phase: Phase) -> None:
        """The next phase of this node's life begins."""
        self.phase = phase

    def park(self, reason: str | None) -> None:
        """Nothing moves here, for that reason; None: it does again."""
        self.parked = reason

    def moved_to(self, addresses: tuple[str, ...]) -> None:
        """From now on others may dial this node at these addresses, and no longer at those of before."""
        self.settings.addresses = addresses

    def join_by(self, joiner: Joiner | None) -> None:
        """`joiner` brings this node into a cluster; None: it needs none any more."""
        self.joiner = joiner

    def schedule_by(self, scheduler: Scheduler | None) -> None:
        """This node has the scheduler's role, in one term; None: it has lost it."""
        self.scheduler = scheduler

    # --- what several parts ask ---

    @property
    def life(self) -> int:
        """Which life of its name this node lives, as others know it."""
        return self.reporter.life

    @property
    def next_life(self) -> int:
        """The life in which this node would come back: it exceeds all numbers that this life has told."""
        return max(self.reporter.life, self.reporter.version) + LIFE_STEP

    @property
    def was_last(self) -> bool:
        """This node has left: does nobody go on?"""
        view, commit = self.sync.view, self.sync.last_commit
        return (commit is not None and commit.total.leaving) or (
            view is not None and view.node_ids == (self.me,)
        )

    @property
    def is_joining(self) -> bool:
        """Has this node begun to join, and is not yet in with all of the state?"""
        return self.joiner is not None and self.joiner.state is not JoinState.JOINED

    @property
    def asks_again(self) -> bool:
        """Is its joiner looking for a cluster, or for another plan?"""
        return self.joiner is not None and self.joiner.state in (JoinState.KNOCKING, JoinState.ASKED)

    @property
    def lacks_state(self) -> bool:
        """Does its joiner still need the state? What the training thread brings then belongs to one that is void."""
        has_it = (JoinState.READY, JoinState.JOINED, JoinState.FAILED)  # Who has failed may found a cluster.
        return self.joiner is not None and self.joiner.state not in has_it

    @property
    def member_key(self) -> ViewKey:
        """The key of the view of which this node is a member; (0, 0) if of none."""
        view = self.sync.view if self.phase is Phase.MEMBER else None
        return view.key if view is not None else (0, 0)

    def is_ahead(self, key: ViewKey) -> bool:
        """Is that a newer view than ours that may be in force without us? One that we have voted for waits for us."""
        view, prepared = self.sync.view, self.sync.prepared.get(key)
        return view is not None and key > view.key and (prepared is None or prepared.find(self.me) is None)

    @property
    def coming(self) -> list[View]:
        """Views that we have voted for, or are about to."""
        return [*self.sync.prepared.values(), *([self.opener.view] if self.opener.view else ())]

    def check_invariants(self) -> None:
        """What holds between any two events, here and in every core."""
        self.sync.check_invariants()
        self.relay.check_invariants()
        self.serving.check_invariants()
        assert self.serving.joiners <= {*self.relay.peers}, "it would wait for whom it does not hear"
        self.courier.check_invariants()
        if self.joiner is not None:
            self.joiner.check_invariants()
        if self.scheduler is not None:
            self.scheduler.check_invariants()
            assert self.scheduler.term == self.election.term
        if self.follower.flush is None and self.phase is Phase.MEMBER:
            assert self.sync.view is not None
