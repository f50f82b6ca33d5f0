"""Who lets a joiner in: it knocks at the addresses that it was given, and asks whoever answers, until a plan comes.

The addresses may also be heard of while it knocks (SeedsFound); it may begin with none.

Instead of failing for want of an answer, a joiner may found a cluster, or keep trying (`Otherwise`). Of several that
reach each other and would found one, it is the one that comes first in the list they all ask, or by its id; the
others hear its requests, and wait for it.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any

import msgspec

from .effects import Dial, DiscardState, Effect, Founded, JoinFailed, Parked, Progress
from .events import ITSELF, DialFailed, Event, PeerClosed, PeerOpened, Received, SeedsFound, Tick
from .messages import EVERYONE, Answer, ScaleOutRequest
from .relay import Relay

HERE = "there is a cluster"  # What a member answers who would found one beside it, or give it up.
IN_VAIN = 2  # Requests that nobody has answered: from then on any member is to say that there is a cluster.
KNOCK_EVERY_S = 0.5
MAX_KNOCK_EVERY_S = 8.0  # Of who keeps trying.
MAX_PATIENCE_S = 300.0  # So often it says at least that it still waits.
MAX_KNOCKS = 32  # Seeds dialled at once, in turn.
STALL_S = 5.0  # It wanted to be woken so much earlier: it was stopped.
HEAR_OUT_S = 1.0  # Time to answer for whom a founder has reached at the last moment.
ASK_EVERY_S = 3.0  # Without any progress the request is made again.
MAX_UNANSWERED = 8  # Then the cluster behind the seeds is dead or parked, and the joiner says so.
DEAD = f"the cluster does not go on: asked {MAX_UNANSWERED + 1} times"
EARLIER_HEARD_S = 7.0  # Who is to found before us has said so no longer ago: two of its requests, and a bit.
MAX_EMPTY_PULLS = 12  # Attempts in a row to pull the state that have ended before anything of it had come.
MAX_PULLS_ALIKE = 50  # That have ended for the same reason, though some of it had.
MAX_UNUSABLE = 3  # That have brought all of it, and it cannot be loaded: a later state hardly can.
MAX_PLANLESS = 40  # Times that links were reported, and no plan came.
MAX_LINKED = 64  # Neighbours that are named in a request.
MAX_FOUND = 256  # Addresses of members that are known from plans.


class Otherwise(enum.Enum):
    """What a joiner does if nobody lets it in, but nobody refuses it for good either."""

    FAIL = "fail"
    FOUND = "found"  # Unless there is a cluster, if only one that waits.
    KEEP_TRYING = "keep trying"


class JoinState(enum.Enum):
    """How far a join has come (scale_out.py)."""

    KNOCKING = "knocking"
    ASKED = "asked"
    LINKING = "linking"
    WAITING = "waiting"
    FETCHING = "fetching"
    LOADING = "loading"
    READY = "ready"
    JOINED = "joined"
    FAILED = "failed"


class Standing:
    """How far a join has come, and when it next wants a Tick."""

    def __init__(self, now_s: float) -> None:
        self.state = JoinState.KNOCKING
        self.wake_at_s: float | None = now_s

    def go(self, state: JoinState, wake_at_s: float | None = None) -> None:
        """Go to `state`, and wait there until something happens or that time has come."""
        self.state, self.wake_at_s = state, wake_at_s

    def is_due(self, now_s: float) -> bool:
        return self.wake_at_s is not None and now_s >= self.wake_at_s


class Vain:
    """Attempts in a row that have come to nothing.

    Attributes:
        last_end: Why the last one to pull the state ended.
    """

    def __init__(self) -> None:
        self.last_end = ""
        self.forget()

    def forget(self) -> None:
        """Begin to count anew."""
        self.empty, self.alike, self.planless = 0, 0, 0

    def no_plan(self) -> bool:
        """Links were reported, or could not be opened, and no plan came. Returns: whether that was too often."""
        self.planless += 1
        return self.planless >= MAX_PLANLESS

    def pull_ended(self, reason: str, stored_bytes: int, is_unusable: bool = False) -> str:
        """An attempt to pull the state has ended. Returns: what to fail with if that was too often, else ""."""
        self.empty = 0 if stored_bytes else self.empty + 1
        self.alike = self.alike + 1 if reason == self.last_end else 1
        self.last_end, self.planless = reason, 0
        if self.empty < MAX_EMPTY_PULLS and self.alike < (MAX_UNUSABLE if is_unusable else MAX_PULLS_ALIKE):
            return ""
        return f"{max(self.empty, self.alike)} attempts in a row to pull the state have ended so: {reason}"


class Asking:
    """A joiner in KNOCKING and ASKED, and what it comes back to when anything later has failed.

    Attributes:
        request: What is asked.
        seeds: Addresses of members: those that the user has named, and what plans of the cluster told since, or the
            network.
        mine: Those of them that are this node's own.
        refusals: Why each did not answer.
        scheduler: Who has planned for us; "" as long as nobody has.
        waits: Why the cluster cannot let us in, as a member has told.
        cluster_said: The last answer of a member, with its name.
        unanswered: How often we have asked since the cluster last showed that it goes on.
        vain: Attempts that were planned and came to nothing.
    """

    def __init__(
        self, relay: Relay, standing: Standing, seeds: tuple[str, ...], request: ScaleOutRequest,
        patience_s: float, now_s: float, otherwise: Otherwise,
    ) -> None:  # fmt: skip
        self.relay, self.standing, self.request, self.otherwise = relay, standing, request, otherwise
        self.seeds, self.most_seeds = seeds, len(seeds) + MAX_FOUND
        self.patience_s = patience_s
        self.give_up_at_s: float | None = now_s + patience_s
        self.ask_again_at_s = now_s
        self.refusals: dict[str, str] = {}
        self.missed: set[str] = set()  # Seeds to dial again: they did not answer, but others did.
        self.final: set[str] = set()  # Seeds that will not have us.
        self.mine: set[str] = set()
        self.earlier: dict[str, tuple[_Rank, float]] = {}  # Who is to found before us; when it last asked.
        self.knocks, self.knock_every_s = 0, KNOCK_EVERY_S
        self.waits = ""
        self.found_member = ""  # Who says that there is a cluster; then we found none.
        self.scheduler = ""
        self.cluster_said = ""
        self.unanswered = 0
        self.vain = Vain()

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """A way to the cluster opens, fails, or is quiet."""
        self._forgive_stall(now_s)
        is_due = self.standing.is_due(now_s)
        match self.standing.state, event:
            case _, Received(_, ScaleOutRequest(founds=True) as rival):
                if self.otherwise is Otherwise.FOUND and _rank(rival) < _rank(self.request):
                    self.earlier[rival.node] = _rank(rival), now_s
                    # No list may lead back to it, when it founds and hangs up on us. But where many start at once,
                    # links of all to all would carry little but news of each other.
                    if not rival.place and self.waits_for(now_s) == rival.node:
                        self.learn(way for way in rival.addresses if way not in self.request.addresses)
            case _, SeedsFound(addresses):
                new = self.learn(addresses)  # Who is there may want to found, too, and then hears of us.
                return [] if self.scheduler else [Dial(seed) for seed in new[:MAX_KNOCKS]]
            case JoinState.KNOCKING, Tick() if is_due:
                return self._knock(now_s)
            case _, DialFailed(address, reason) if reason == ITSELF and address in self.seeds:
                return self._found_itself_at(address)
            case JoinState.KNOCKING, DialFailed(address, reason, final) if address in self.seeds:
                return self._refused_at(address, reason, final) or self._give_up_if_late(now_s)
            case JoinState.KNOCKING, PeerOpened(client=False):
                return self.ask(now_s)
            case JoinState.ASKED, PeerOpened(client=False) if not self.scheduler:
                return self.ask(now_s)  # This way may lead to the cluster.
            case JoinState.ASKED, PeerClosed() if not self.scheduler:
                return self._hung_up_on(now_s)
            case JoinState.ASKED, DialFailed(address, reason) if address in self.seeds and not self.scheduler:
                # It was not there yet. Whoever else has answered may want to join, too.
                self.refusals[address] = reason
                self.missed.add(address)
                self.standing.wake_at_s = min(self.ask_again_at_s, now_s + KNOCK_EVERY_S)
            case JoinState.ASKED, Tick() if is_due and now_s < self.ask_again_at_s:
                return self._knock_again(now_s)
            case JoinState.ASKED, Tick() if is_due:
                return self.again(self.waits or "no answer", now_s)
        return []

    def _forgive_stall(self, now_s: float) -> None:
        """Time in which this process was stopped, or its machine slept, does not count: it has not knocked then."""
        late_s = now_s - (now_s if self.standing.wake_at_s is None else self.standing.wake_at_s)
        if late_s > STALL_S and self.give_up_at_s is not None:
            self.give_up_at_s += late_s
            self.standing.wake_at_s = now_s

    # --- what others have to say ---

    def answered(self, member: str, answer: Answer) -> list[Effect]:
        """A member answers that the cluster goes on, or why no scheduler does."""
        self.found_member, self.waits = member, "" if answer.ok else f"{member}: {answer.text}"
        if answer.ok:
            self.unanswered = 0
        said = f"{member}: {answer.text}"
        if answer.text == HERE or said == self.cluster_said:
            return []
        self.cluster_said = said
        return [Progress(f"the cluster answers: {said}")]

    def waits_for(self, now_s: float) -> str:
        """The node that is to found before us and all others; "" if none is."""
        earlier = self.earlier.items()
        heard = [(rank, node) for node, (rank, at_s) in earlier if now_s < at_s + EARLIER_HEARD_S]
        return min(heard)[1] if heard else ""

    def planned_by(self, scheduler: str) -> None:
        """The scheduler has answered."""
        self.scheduler = scheduler
        self.unanswered = 0

    def goes_on(self) -> None:
        """The cluster has just shown that it does."""
        self.unanswered = 0

    def is_unanswered_again(self) -> bool:
        """Nobody has answered once more. Returns: whether that was too often."""
        self.unanswered += 1
        return self.unanswered > MAX_UNANSWERED

    def learn(self, ways: Iterable[str]) -> tuple[str, ...]:
        """Keep addresses of members. If the cluster drops us, they lead back, even if the first seeds are gone.

        Returns: those that were not known.
        """
        known = len(self.seeds)
        self.seeds = tuple(dict.fromkeys((*self.seeds, *ways)))[: self.most_seeds]
        return self.seeds[known:]

    # --- knocking ---

    def _knock(self, now_s: float) -> list[Effect]:
        self.standing.wake_at_s = now_s + self.knock_every_s
        if self.otherwise is Otherwise.KEEP_TRYING:
            self.knock_every_s = min(1.5 * self.knock_every_s, MAX_KNOCK_EVERY_S)
        return self._give_up_if_late(now_s) or self._dial_seeds()

    def _dial_seeds(self) -> list[Effect]:
        """Dial all seeds, or the next few of many."""
        if not self.seeds:
            return []  # They are yet to be heard of.
        count = min(len(self.seeds), MAX_KNOCKS)
        first, self.knocks = self.knocks, (self.knocks + count) % len(self.seeds)
        dialled = [self.seeds[(first + index) % len(self.seeds)] for index in range(count)]
        self.missed -= set(dialled)
        return [Dial(seed) for seed in dialled]

    def _knock_again(self, now_s: float) -> list[Effect]:
        """Dial missed seeds, and ask once more: nodes that had no way to a member may have one now."""
        self.standing.wake_at_s = self._soon(now_s)
        knocks: list[Effect] = [Dial(seed) for seed in self.seeds if seed in self.missed]
        self.missed.clear()
        return knocks[:MAX_KNOCKS] + (self._send() if self._is_unheard else [])

    @property
    def _is_unheard(self) -> bool:
        return not self.scheduler and not self.found_member

    def _soon(self, now_s: float) -> float:
        """When to knock or ask again, though the time to ask anew has not come."""
        quick = self._is_unheard or (self.missed and not self.scheduler)
        return min(self.ask_again_at_s, now_s + KNOCK_EVERY_S) if quick else self.ask_again_at_s

    def _refused_at(self, address: str, reason: str, final: bool) -> list[Effect]:
        """A seed has refused us. It may be another cluster's; if all refuse us for good, the join has failed."""
        self.refusals[address] = reason
        self.missed.add(address)
        (self.final.add if final else self.final.discard)(address)
        patient = self.otherwise is Otherwise.KEEP_TRYING
        unwanted = self._unwanted and not patient
        return self.fail(f"{address}: {reason}", lasting=True) if unwanted else []

    @property
    def _unwanted(self) -> bool:
        others = set(self.seeds) - self.mine
        return self.final >= others and (bool(others) or self.otherwise is not Otherwise.FOUND)

    def _found_itself_at(self, address: str) -> list[Effect]:
        """One of the seeds is this node itself, as all may have one list. Its place there tells who is to found."""
        known, self.mine = self.mine, self.mine | {address}
        self.say(place=min(self.seeds.index(each) for each in self.mine) + 1)
        if self._unwanted:
            others = "; ".join(f"{seed}: {self.refusals[seed]}" for seed in self.seeds if seed in self.final)
            return self.fail(others or f"{address}: {ITSELF}, and no other is named", lasting=True)
        asked = self.standing.state is JoinState.ASKED
        news = asked and self.otherwise is Otherwise.FOUND and self.mine != known
        return self.relay.send(EVERYONE, self.request) if news else []

    def _hung_up_on(self, now_s: float) -> list[Effect]:
        """A node has hung up on us: it may have founded a cluster, and then it wants to be greeted anew."""
        if self.relay.peers - self.relay.leaves:
            return self._dial_seeds()
        self.standing.go(JoinState.KNOCKING, now_s + KNOCK_EVERY_S)
        self.give_up_at_s = now_s + self.patience_s
        return []

    def _give_up_if_late(self, now_s: float) -> list[Effect]:
        if self.give_up_at_s is None or now_s < self.give_up_at_s or self.waits_for(now_s):
            return []
        why = "; ".join(f"{seed}: {self.refusals.get(seed, 'no answer')}" for seed in self.seeds)
        return self.give_up(f"nobody answers ({why}; tried for {self.patience_s:g} s)", now_s)

    # --- asking ---

    def say(self, **fields: Any) -> None:
        """Change fields of the `ScaleOutRequest` that is sent from now on."""
        self.request = msgspec.structs.replace(self.request, **fields)

    def ask(self, now_s: float) -> list[Effect]:
        """Send the request to all in reach."""
        at_s = now_s + ASK_EVERY_S
        if self.may_found and self.give_up_at_s is not None:
            at_s = min(at_s, max(self.give_up_at_s, now_s + HEAR_OUT_S))
        self.ask_again_at_s = at_s
        self.standing.go(JoinState.ASKED, self._soon(now_s))
        return self._send()

    def _send(self) -> list[Effect]:
        linked = tuple(sorted(self.relay.peers - self.relay.leaves)[:MAX_LINKED])
        self.say(linked=linked, unanswered=self.unanswered >= IN_VAIN)
        return self.relay.send(EVERYONE, self.request)

    def again(self, reason: str, now_s: float) -> list[Effect]:
        """An attempt has led to nothing: ask anew, unless that was in vain too often."""
        unanswered = self.is_unanswered_again()
        late = self.give_up_at_s is None or now_s >= self.give_up_at_s
        if late and self.may_found:
            if not self.waits_for(now_s):
                return self._found()
            self.unanswered, unanswered = 0, False
        if unanswered and (late or self.scheduler):
            return self.give_up(f"{DEAD} ({self.cluster_said or reason})", now_s)
        return self._start_over(now_s)

    def _start_over(self, now_s: float) -> list[Effect]:
        if not self.relay.peers - self.relay.leaves:
            self.standing.go(JoinState.KNOCKING, now_s)
            self.give_up_at_s = now_s + self.patience_s
            return [DiscardState()]
        # Whom we have reached may be joiners, too, and reach nobody else: then we go on knocking at the others.
        answered = self.scheduler and self.unanswered < IN_VAIN
        knocks = [] if answered else self._dial_seeds()
        return [DiscardState(), *knocks, *self.ask(now_s)]

    def rest(self, until_s: float) -> None:
        """Ask again at that time."""
        self.ask_again_at_s = until_s
        self.standing.go(JoinState.ASKED, until_s)

    # --- the end ---

    def give_up(self, reason: str, now_s: float, rest_s: float = 0.0) -> list[Effect]:
        """Nobody lets us in: found a cluster, fail, or keep trying (after `rest_s`), as the user wants."""
        if self.may_found:
            return self._found()
        if self.otherwise is not Otherwise.KEEP_TRYING or self._unwanted:
            return self.fail(reason, lasting=self._unwanted)
        self.patience_s = min(2 * self.patience_s, MAX_PATIENCE_S)
        self.scheduler, self.unanswered = "", 0
        self.vain.forget()
        if not rest_s:
            return [Parked(reason), *self._start_over(now_s)]
        self.rest(now_s + rest_s)
        return [Parked(reason), DiscardState()]

    @property
    def may_found(self) -> bool:
        return self.otherwise is Otherwise.FOUND and not self.scheduler and not self.found_member

    def _found(self) -> list[Effect]:
        self.joined()
        return [Founded()]

    def joined(self) -> None:
        """This node is in a cluster."""
        self.standing.go(JoinState.JOINED)
        self.give_up_at_s = None

    def fail(self, reason: str, spec: bytes = b"", lasting: bool = False) -> list[Effect]:
        """Fail for good. `spec`: as of ScaleOutRefused; `lasting`: a node that is started again is refused again."""
        self.standing.go(JoinState.FAILED)
        return [JoinFailed(reason, spec, lasting)]


_Rank = tuple[bool, int, str]


def _rank(request: ScaleOutRequest) -> _Rank:
    """Of all nodes that would found a cluster, the one with the least rank does."""
    return (request.place == 0, request.place, request.node)
