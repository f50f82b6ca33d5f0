"""Who is the scheduler: terms and votes as in Raft, with its pre-vote.

    FOLLOWER --the scheduler is out of reach--> TRIAL --a quorum would vote--> CANDIDATE --it did--> ELECTED
       ^                                          |                               |
       +------------- a higher term, or the scheduler answers --------------------+

What differs from Raft: there is no log, so a voter compares views instead, and refuses a candidate whose
view is older than its own. The quorum is that of every view in which somebody may still be active: the
candidate's own, and its predecessors until a step has been completed in it (`electorates`).

Quorums that rest on the others' proven crash need not meet those that do not: of two nodes the senior may be
elected alone and die, and the junior after it. So that no term has two schedulers, the former have even
terms and the latter odd ones. And of the even ones, those whose quorum of the present view rests on a crash are
no multiples of four; the others, where only that of a predecessor does, are: a half of the present view with the
most senior may be elected so, and die, and the other half after it. A quorum that rests on a person's word need not
meet any: the majority that a person says is dead may have had schedulers of any of the next terms. So terms leap
where one is elected by that word. A scheduler that goes on by it keeps its term, and its views leap
(scheduler/flushes.py); terms of those that are elected after it leap by as much.

The most senior node stands first, so that candidates rarely duel; back-off is random when they do. These times grow
with the round trips of links, and with how many of them lead to the farthest voter: votes that take longer than a
round would never elect anybody.
"""

from __future__ import annotations

import enum
import random
from collections.abc import Callable, Set

from .effects import Effect
from .messages import EVERYONE, Electorate, Routed, ViewKey, VoteReply, VoteRequest
from .overlay import lacking

STAGGER_S = 0.02  # Times the rank in seniority: the head start of the more senior.
ROUND_S = 0.25  # Answers that take longer do not count; then the next attempt.
# Round trips up to this have room in that: pre-vote and vote take one for each link on their way.
NEAR_S = 0.1
ROUND_TRIPS = 4  # A round is longer by so many times what the slowest link's takes beyond that.
MOST_LONGER_S = 8.0
# Between so many times four terms are left out where a person's word is what counts.
LEAPS = 1 << 10, 1 << 20
LEAP_BIT = 20  # Of a view's number: this and higher ones count how far views have leapt.


class ElectionRole(enum.Enum):
    FOLLOWER = "follower"
    TRIAL = "trial"
    CANDIDATE = "candidate"
    ELECTED = "elected"


class Election:
    """The part of node `me` in electing the scheduler. `send` routes a message."""

    def __init__(self, me: str, rng: random.Random, send: Callable[[str, Routed], list[Effect]]) -> None:
        self.me, self.rng, self.send = me, rng, send
        self.role = ElectionRole.FOLLOWER
        self.term = 0
        self.voted_term = 0  # The last term in which a vote was given away.
        self.votes: set[str] = set()
        self.standing_for = 0  # The term that we stand for,
        self.by_word = False  # and whether it was chosen knowing of a person's word.
        self.wake_at_s: float | None = None
        self.rounds = 0  # How often we have stood in vain.

    def begin(self, term: int, elected: bool) -> None:
        """A cluster begins in that term. `elected`: with us as its scheduler."""
        self.term = self.voted_term = term
        if elected:
            self.role = ElectionRole.ELECTED

    def adopt(self, term: int) -> None:
        """A message of a higher term: whatever we were, we follow."""
        if term > self.term:
            self.term, self.role, self.wake_at_s = term, ElectionRole.FOLLOWER, None

    def stand_down(self) -> None:
        """There is a scheduler, or we may not stand."""
        if self.role in (ElectionRole.TRIAL, ElectionRole.CANDIDATE):
            self.role = ElectionRole.FOLLOWER
        self.wake_at_s, self.rounds = None, 0

    def scheduler_missing(self, rank: int, now_s: float, rtt_s: float = 0.0) -> None:
        """The scheduler is out of reach: stand after a time that grows with `rank` (0: most senior alive).

        `rtt_s`: the round trip of the slowest link.
        """
        if self.role is ElectionRole.FOLLOWER and self.wake_at_s is None:
            self.wake_at_s = now_s + rank * (STAGGER_S + _longer_s(rtt_s))

    def is_due(self, now_s: float) -> bool:
        """Is it time to stand, or to find out when?"""
        return self.wake_at_s is None or now_s >= self.wake_at_s

    def tick(
        self,
        key: ViewKey,
        electorates: list[Electorate],
        voters: Set[str],
        now_s: float,
        rtt_s: float = 0.0,
        word: bool = False,
    ) -> list[Effect]:
        """Stand, or stand again, when it is time.

        `voters`: all members that can be reached, and we. `rtt_s`: the round trip of the slowest link. `word`: a
        person has said that some of the others are dead.
        """
        if self.wake_at_s is None or now_s < self.wake_at_s:
            return []
        self.role, self.votes = ElectionRole.TRIAL, {self.me}
        self.rounds += 1
        self.wake_at_s = now_s + (ROUND_S + _longer_s(rtt_s)) * self.rng.uniform(1.0, 2.0)
        leap = (key[1] >> LEAP_BIT) + (self.rng.randrange(*LEAPS) if word else 0)
        self.standing_for, self.by_word = self._next_term(electorates, voters) + 4 * leap, word
        return self._ask(key, voters, self.standing_for, trial=True)

    def _next_term(self, electorates: list[Electorate], voters: Set[str]) -> int:
        term = self.term + 1
        if lacking(electorates, voters, set()) is None:
            return term + (term % 2 == 0)
        needed_now = lacking(electorates[:1], voters, set()) is not None
        return term + ((2 if needed_now else 0) - term) % 4

    def on_request(self, request: VoteRequest, key: ViewKey, scheduler_missing: bool) -> list[Effect]:
        """A candidate asks. Pre-votes change nothing here; a vote is given once per term."""
        fresh = request.key >= key and request.term > self.voted_term and request.term > self.term
        if request.trial:
            granted = fresh and scheduler_missing
        else:
            granted = fresh
            if request.term > self.term:
                self.adopt(request.term)
            if granted:
                self.voted_term = request.term
        return self.send(
            request.candidate,
            VoteReply(term=max(self.term, request.term) if granted else self.term, voter=self.me,
                      granted=granted, trial=request.trial),
        )  # fmt: skip

    def on_reply(
        self,
        reply: VoteReply,
        key: ViewKey,
        electorates: list[Electorate],
        voters: Set[str],
        crashed: Set[str],
        word: bool = False,
    ) -> list[Effect]:
        """A voter answers. When a quorum said yes: TRIAL becomes CANDIDATE, CANDIDATE becomes ELECTED."""
        if not reply.granted:
            if reply.term > self.term:
                self.adopt(reply.term)
            return []
        if (self.role, reply.trial) not in ((ElectionRole.TRIAL, True), (ElectionRole.CANDIDATE, False)):
            return []
        if reply.term != self.standing_for:
            return []
        self.votes.add(reply.voter)
        return self.count(key, electorates, voters, crashed, word)

    def count(
        self,
        key: ViewKey,
        electorates: list[Electorate],
        voters: Set[str],
        crashed: Set[str],
        word: bool = False,
    ) -> list[Effect]:
        """Look whether the votes suffice; also called after standing, for a cluster of one."""
        if self.role not in (ElectionRole.TRIAL, ElectionRole.CANDIDATE):
            return []
        if word and not self.by_word:
            return []  # The next attempt's term leaps.
        proven = crashed if self.standing_for % 2 == 0 else set[str]()
        proven_now = crashed if self.standing_for % 4 == 2 else set[str]()
        if lacking(electorates[:1], self.votes, proven_now, word):
            return []
        if lacking(electorates, self.votes, proven, word):
            return []
        if self.role is ElectionRole.CANDIDATE:
            self.role, self.wake_at_s, self.rounds = ElectionRole.ELECTED, None, 0
            return []
        self.term = self.standing_for
        self.role, self.voted_term, self.votes = ElectionRole.CANDIDATE, self.term, {self.me}
        effects = self._ask(key, voters, self.term, trial=False)
        return effects + self.count(key, electorates, voters, crashed, word)

    def _ask(self, key: ViewKey, voters: Set[str], term: int, trial: bool) -> list[Effect]:
        request = VoteRequest(term=term, candidate=self.me, key=key, trial=trial)
        return self.send(EVERYONE, request) if voters - {self.me} else []


def _longer_s(rtt_s: float) -> float:
    return min(ROUND_TRIPS * max(rtt_s - NEAR_S, 0.0), MOST_LONGER_S)
