"""Scale-out, the joiner's half (Chaos Sec. IV-B, Fig. 4a, overlapped with training as in Fig. 5a).

    KNOCKING --a seed answers--> ASKED --NegotiationPlan--> LINKING --links open and measured--> WAITING
       WAITING --ReplicationPlan--> FETCHING --StateWhole--> LOADING --CaughtUp--> READY --view--> JOINED
    any state --refused, nobody answers, no source left and no patience--> FAILED

The scheduler's half is in scheduler/core.py, because it is made of views. A joiner overtaken by a flush or by
the death of the scheduler is an orphan; after a deadline without news it asks again from ASKED.
"""

from __future__ import annotations

import enum

import msgspec

from .effects import Dial, DiscardState, Effect, JoinFailed, SendProbe, StateWhole
from .events import BacklogFull, CaughtUp, DialFailed, Event, PeerOpened, Received, StateRejected, Tick
from .messages import (
    EVERYONE,
    Answer,
    LinkReading,
    NegotiationPlan,
    NeighborsReady,
    ProbeResult,
    ReplicationPlan,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
)
from .relay import Relay
from .replication import Replication

KNOCK_EVERY_S = 0.5
LINK_PATIENCE_S = 3.0  # To open and measure links; what is not ready by then is reported as it is.
ASK_EVERY_S = 3.0  # Without any progress the request is made again.
MAX_UNANSWERED = 8  # Then the cluster behind the seeds is dead or parked, and the joiner says so.
DEAD = f"the cluster does not go on: asked {MAX_UNANSWERED} times"


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
        self, relay: Relay, seeds: tuple[str, ...], request: ScaleOutRequest, patience_s: float, now_s: float
    ) -> None:
        self.relay, self.seeds, self.request = relay, seeds, request
        self.state = State.KNOCKING
        self.patience_s = patience_s
        self.give_up_at_s: float | None = now_s + patience_s
        self.wake_at_s: float | None = now_s
        self.refusals: dict[str, str] = {}  # Seed: why it did not answer.
        self.scheduler = ""
        self.address_of: dict[str, str] = {}
        self.open: dict[str, bool] = {}  # Neighbour: is its link open?
        self.failed: dict[str, str] = {}
        self.rates_bps: dict[str, float] = {}
        self.replication: Replication | None = None
        self.unanswered = 0

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event. Events that are not for the present state are of an attempt that is over."""
        if self.state in (State.JOINED, State.FAILED):
            return []
        match self.state, event:
            case State.KNOCKING, Tick() if self._due(now_s):
                return self._knock(now_s)
            case State.KNOCKING, DialFailed(address, reason, final) if address in self.seeds:
                self.refusals[address] = reason
                return self._fail(f"{address}: {reason}") if final else self._give_up_if_late(now_s)
            case State.KNOCKING, PeerOpened(client=False):
                return self._ask(now_s)
            case _, Received(_, ScaleOutRefused() as refusal):
                return self._fail(refusal.reason, refusal.spec)
            case State.ASKED, Received(scheduler, NegotiationPlan() as plan):
                self.scheduler = scheduler
                return self._open_links(plan, now_s)
            case State.LINKING, PeerOpened(peer, _, False) if peer in self.open:
                self.open[peer] = True
                return [SendProbe(peer)]
            case State.LINKING, DialFailed(address, reason) if address in self.address_of:
                self.failed[self.address_of[address]] = reason
                return self._report_links(now_s)
            case State.LINKING, Received(peer, ProbeResult(rate_bps=rate)) if peer in self.open:
                self.rates_bps[peer] = rate
                return self._report_links(now_s)
            case State.LINKING, Tick() if self._due(now_s):
                return self._report_links(now_s, complete=False)
            case (
                (State.ASKED | State.WAITING | State.FETCHING | State.READY),
                Received(scheduler, ReplicationPlan() as plan),
            ):
                self.scheduler = scheduler
                return self._fetch(plan, now_s)
            case State.LOADING, CaughtUp():
                self.state = State.READY
                return self._say_ready(now_s)
            case State.READY, Tick() if self._due(now_s):
                self.unanswered += 1
                return self._fail(DEAD) if self.unanswered > MAX_UNANSWERED else self._say_ready(now_s)
            case State.READY, Received(_, Answer()):
                self.unanswered = 0
            case ((State.FETCHING | State.LOADING | State.READY), StateRejected(reason)):
                return self._ask_again(f"the state was unusable ({reason})", now_s)
            case ((State.ASKED | State.WAITING), Tick()) if self._due(now_s):
                return self._ask_again("no answer", now_s)
            case ((State.FETCHING | State.LOADING | State.READY), BacklogFull()):
                self.request = msgspec.structs.replace(self.request, blocking=True)
                return self._ask_again("results come faster than the state", now_s)
            case State.FETCHING, _ if self.replication is not None:
                return self._replicate(event, now_s)
        return []

    def joined(self) -> None:
        """The view with us as a member is active."""
        self.state, self.wake_at_s, self.give_up_at_s = State.JOINED, None, None
        self.replication = None

    def orphaned(self, reason: str, now_s: float) -> list[Effect]:
        """The cluster dropped us: start over."""
        return self._ask_again(reason, now_s) if self.state is not State.KNOCKING else []

    # --- knocking and asking ---

    def _due(self, now_s: float) -> bool:
        return self.wake_at_s is not None and now_s >= self.wake_at_s

    def _knock(self, now_s: float) -> list[Effect]:
        self.wake_at_s = now_s + KNOCK_EVERY_S
        return self._give_up_if_late(now_s) or [Dial(seed) for seed in self.seeds]

    def _give_up_if_late(self, now_s: float) -> list[Effect]:
        if self.give_up_at_s is None or now_s < self.give_up_at_s:
            return []
        why = "; ".join(f"{seed}: {self.refusals.get(seed, 'no answer')}" for seed in self.seeds)
        return self._fail(f"nobody answers ({why}; tried for {self.patience_s:g} s)")

    def _ask(self, now_s: float) -> list[Effect]:
        self.state, self.wake_at_s = State.ASKED, now_s + ASK_EVERY_S
        return self.relay.send(EVERYONE, self.request)

    def _ask_again(self, reason: str, now_s: float) -> list[Effect]:
        self.unanswered += 1
        if self.unanswered > MAX_UNANSWERED:
            return self._fail(f"{DEAD} ({reason})")
        if not self.relay.peers - self.relay.leaves:
            self.state, self.wake_at_s, self.give_up_at_s = State.KNOCKING, now_s, now_s + self.patience_s
            return [DiscardState()]
        self.replication = None
        return [DiscardState(), *self._ask(now_s)]

    def _fail(self, reason: str, spec: bytes = b"") -> list[Effect]:
        self.state, self.wake_at_s = State.FAILED, None
        return [JoinFailed(reason, spec)]

    # --- links ---

    def _open_links(self, plan: NegotiationPlan, now_s: float) -> list[Effect]:
        self.state, self.wake_at_s = State.LINKING, now_s + LINK_PATIENCE_S
        self.address_of = {member.address: member.id for member in plan.neighbors}
        self.open = {member.id: member.id in self.relay.peers for member in plan.neighbors}
        self.failed, self.rates_bps = {}, {}
        probes: list[Effect] = [SendProbe(peer) for peer, is_open in self.open.items() if is_open]
        return probes + [Dial(m.address) for m in plan.neighbors if not self.open[m.id]]

    def _report_links(self, now_s: float, complete: bool = True) -> list[Effect]:
        settled = all(peer in self.rates_bps or peer in self.failed for peer in self.open)
        if complete and not settled:
            return []
        if not any(self.open.values()):
            return self._ask_for_others(now_s)
        self.state, self.wake_at_s, self.unanswered = State.WAITING, now_s + ASK_EVERY_S, 0
        self.request = msgspec.structs.replace(self.request, again=True)
        links = {
            peer: LinkReading(rate_bps=self.rates_bps.get(peer, 0.0))
            for peer, is_open in self.open.items()
            if is_open
        }
        failed = {
            peer: self.failed.get(peer, "no answer") for peer, is_open in self.open.items() if not is_open
        }
        return self.relay.send(
            self.scheduler, NeighborsReady(node=self.request.node, links=links, failed=failed)
        )

    def _ask_for_others(self, now_s: float) -> list[Effect]:
        """They may just have died, and the scheduler is about to learn it; or nobody can reach them."""
        self.unanswered += 1
        if self.unanswered > MAX_UNANSWERED:
            reasons = "; ".join(f"{peer}: {reason}" for peer, reason in sorted(self.failed.items()))
            return self._fail(f"none of the planned neighbours can be reached ({reasons or 'no answer'})")
        self.state, self.wake_at_s = State.ASKED, now_s + KNOCK_EVERY_S
        return []

    # --- state ---

    def _fetch(self, plan: ReplicationPlan, now_s: float) -> list[Effect]:
        self.state, self.wake_at_s = State.FETCHING, None
        self.replication = Replication(plan.step, plan.shard_bytes, plan.shards_by_source)
        return [DiscardState(), *self.replication.start(now_s)]

    def _replicate(self, event: Event, now_s: float) -> list[Effect]:
        assert self.replication is not None
        effects = self.replication.handle(event, now_s)
        self.wake_at_s = self.replication.wake_at_s
        if self.replication.failed:
            return effects + self._ask_again(self.replication.failed, now_s)
        if any(isinstance(effect, StateWhole) for effect in effects):
            self.state, self.wake_at_s = State.LOADING, None
        return effects

    def _say_ready(self, now_s: float) -> list[Effect]:
        self.wake_at_s = now_s + ASK_EVERY_S
        return self.relay.send(EVERYONE, ScaleOutReady(node=self.request.node))

    def check_invariants(self) -> None:
        """What holds between any two events."""
        if self.replication is not None:
            self.replication.check_invariants()
        if self.state in (State.KNOCKING, State.ASKED, State.LINKING, State.WAITING, State.READY):
            assert self.wake_at_s is not None, f"{self.state} waits without a deadline"
