"""One training step after the other: the vote that ends each and switches views, and new attempts.

    ready:  up the first tree, when its subtree is and the training thread has called update(): carries the vote
    commit: the root's answer to all Readys: totals, and the view that the next step runs in

What the step adds up goes along the trees beside it (sums.py). A step is *complete* at a node that has the commit
and all results. Nobody contributes to step s+1 before it has completed s. So the first result of s+1 is proof that
every member has completed s, and a node needs to keep just two results: those of the step it has completed and of
the one under way. No message says "all have s"; the next step does. A joiner may be further behind, and be cut off
from whoever was to send it the results: so while somebody joins, a node keeps two more.

Where members keep only parts of the state (`parts`), nobody has all results, and nobody could pass on what another
lacks. So there a member is ready only when all that it keeps is summed: then whoever learns of the commit completes
the step alone. A flush leaves what is summed where it is until its install says whether the step was committed.

An attempt is named by (view key, step), because every retry happens in a new view. Messages of another
attempt are dropped by that name, or kept for a moment if they are ahead of us (early.py).

Source: Chaos, Sec. IV-B ("plans after the current all-reduce"; "restart all-reduce" after a failure).
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import repeat

import msgspec

from .contributions import merge, merge_strikes
from .early import EARLY_COMMITS, Early
from .effects import (
    DropResults,
    Effect,
    FellBehind,
    Left,
    Out,
    Recompute,
    ResetAttempt,
    StepCompleted,
    Summed,
    Transmit,
    ViewEntered,
)
from .errors import LocalProtocolError, RemoteProtocolError
from .events import Contributed, Event, KeepersChosen, LocalReady, Received, Retracted
from .messages import (
    Commit,
    Contribution,
    Deal,
    Down,
    Electorate,
    Install,
    Message,
    Ready,
    Strike,
    Up,
    View,
    ViewKey,
)
from .sums import Sums

STEP_MESSAGES = (Up, Down, Ready, Commit)
RESULTS_KEPT = 3  # While somebody joins: with Adam they are as many bytes as the state.
ASKED_TO = "it asked to"  # Why a node has left that a vote has let go.


def means(totals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """Of the sums of (value * weight, weight), by name; what nobody gave any weight has none."""
    return {name: total / weight for name, (total, weight) in totals.items() if weight}


def merge_votes(votes: list[tuple[int, int] | None]) -> tuple[int, int] | None:
    """The view that all are prepared for. None unless all name the same one.

    Same and not least: who has prepared a later proposal need not have the earlier one.
    """
    return votes[0] if all(vote == votes[0] for vote in votes) else None


@dataclass(slots=True)
class _Attempt:
    readies: dict[str, Ready] = field(default_factory=dict)
    ready_sent: bool = False
    summed_told: bool = False
    commit: Commit | None = None


class StepSync:
    """The all-reduce of one node, step after step.

    `chunks` is the same on all nodes of one model, and so are `borders`, over which no bundle goes.
    `result_bytes`: of what a step sums, 0 if that is not known.
    `recomputes`: what a node contributes hangs on the view that it was computed in, as where members compute
    different layers: it is void with its attempt. Else it is kept for the next.
    `parts`: members keep parts of the state, and each is told before its own part of a step who keeps what.
    """

    def __init__(
        self,
        me: str,
        chunks: int,
        result_bytes: int = 0,
        borders: tuple[int, ...] = (),
        recomputes: bool = False,
        parts: bool = False,
    ) -> None:
        self.me, self.result_bytes, self.recomputes = me, result_bytes, recomputes
        self.sums, self.early = Sums(me, chunks, borders, parts), Early(chunks, result_bytes)
        self.view: View | None = None
        self.priors: tuple[Electorate, ...] = ()  # Views that others may still be in, older than ours.
        self.step = 0  # Steps completed; the number of the one under way.
        self.deal: Deal = ()
        self.kept: tuple[Commit, ...] = ()  # Of the last steps, up to step - 1: those whose results are here.
        self.owed: list[Commit | None] = []  # After a flush: of steps to adopt after the one under way.
        self.began_here = False  # As a joiner: without a result of step - 1.
        self.prepared: dict[ViewKey, View] = {}
        self.vote: tuple[int, int] | None = None
        self.frozen = True  # Between a flush and its install, and before the first view.
        self.local: Contribution | None = None
        self.attempt = _Attempt()

    @property
    def last_commit(self) -> Commit | None:
        """The commit of step - 1."""
        return self.kept[-1] if self.kept else None

    # --- entering views -----------------------------------------------------------------------------

    def enter(
        self, view: View, step: int, priors: tuple[Electorate, ...] = (), deal: Deal = ()
    ) -> list[Effect]:
        """Act in `view`, whose first step here is `step`."""
        self.view, self.step, self.priors, self.frozen = view, step, priors, False
        self.deal = deal or self.deal
        self.prepared = {key: each for key, each in self.prepared.items() if key > view.key}
        self.sums.enter(view, step)
        self.attempt, self.owed = _Attempt(), []
        return [ViewEntered(view, step)]

    def begin(self, view: View, step: int) -> list[Effect]:
        """Act in the first view, in which others may act already."""
        return [*self.enter(view, step), *self._replay_early()]

    def observe(self, view: View, step: int) -> list[Effect]:
        """A joiner listens in `view` from `step` on. Messages that came before the plan are handled now.

        What this node contributed as a member before is void.
        """
        self.sums.observe()
        self.local, self.kept, self.began_here = None, (), True
        return [ResetAttempt(), *self.enter(view, step), *self._replay_early()]

    def freeze(self) -> list[Effect]:
        """A flush: the attempt under way is void. Own contributions are kept for the next, unless they are, too."""
        self.frozen, self.attempt = True, _Attempt()
        self.sums.freeze()
        if self.recomputes:
            self.local = None
            self.sums.forget_own()
        return [ResetAttempt(but_sums=self.sums.has_all)]

    def start_installed(self, install: Install, view: View) -> list[Effect]:
        """INSTALL: go on in `view`, the one that it tells; adopt, serve or pass on the last step's results.

        Also those of the steps before that whose commits it brings.
        """
        behind, lacked = install.step - self.step, 1 + len(install.earlier)
        if behind not in range(lacked + 1):
            raise RemoteProtocolError(f"{self.me}: installed at step {install.step} while at {self.step}")
        self.prepared, self.vote = {}, None
        effects = self.enter(view, self.step, install.priors)
        effects.append(ResetAttempt(before=view.key, but_sums=bool(behind) and self.sums.has_all))
        self.deal = install.deal
        self.sums.go_on(behind, recovering=lacked if install.holder else 0)
        if behind:
            self.attempt.commit, *self.owed = [*install.earlier, install.commit][-behind:]
            effects += self._complete_if_done()
        else:
            if install.holder == self.me:
                assert len(self.kept) >= lacked
                for commit in self.kept[-lacked:]:
                    effects += self.sums.serve_result(commit.step, commit.total.weight)
            if self.recomputes:
                effects.append(Recompute(view, self.step))
            effects += self.sums.resume() + self._forward_ready()
        return effects + self._replay_early()

    # --- events ---------------------------------------------------------------------------------------

    def handle(self, event: Event) -> list[Effect]:
        """One event of this step: from the training thread or from a neighbour."""
        match event:
            case Received(_, message) if isinstance(message, STEP_MESSAGES):
                return self._received(event)
            case Contributed(key=key) | LocalReady(key=key) | KeepersChosen(key=key) if self._is_void(key):
                return []
            case KeepersChosen(keepers):
                self.sums.keep(keepers)
                return []
            case Contributed(chunks, weight):
                touched = self.sums.contributed(chunks, weight)
                return [] if self.frozen else self.sums.send_up(touched) + self._complete_if_done()
            case LocalReady(contribution):
                if self.local is not None:
                    raise LocalProtocolError(f"{self.me}: ready twice for step {self.step}")
                if self.sums.is_lacking:
                    raise LocalProtocolError(
                        f"{self.me}: ready for step {self.step} before all it keeps was summed"
                    )
                self.local = contribution
                return self._forward_ready()
            case Retracted(weight, _):
                return self.sums.retracted(weight, self.frozen)
        raise LocalProtocolError(f"{self.me}: {type(event).__name__} is not for the all-reduce")

    def _is_void(self, key: ViewKey | None) -> bool:
        """Was this contribution computed in a view that this node has left, or is about to leave?"""
        return self.recomputes and (self.frozen or self.view is None or key != self.view.key)

    def _received(self, event: Received) -> list[Effect]:
        message = event.message
        assert isinstance(message, STEP_MESSAGES)
        here = (self.view.key if self.view else (0, 0), self.step)
        there = (message.key, message.step)
        lacked = range(self.step - self.sums.recovering, self.step)
        if isinstance(message, Down) and message.key == here[0] and message.step in lacked:
            return self.sums.pass_on_recovered(event.peer, message, event.payload)
        if there > here or (self.frozen and message.key > here[0]):
            return [] if self.early.keep(event) else [FellBehind(event.peer)]
        if there != here or (self.frozen and not _is_the_end(message)):
            return []  # Of an attempt that is over: normal after a flush.
        match message:
            case Up():
                return self.sums.on_up(event.peer, message, event.payload) + self._complete_if_done()
            case Down():
                return self.sums.on_down(event.peer, message, event.payload) + self._complete_if_done()
            case Ready():
                self.attempt.readies[event.peer] = message
                return self._forward_ready()
            case Commit():
                return self._on_commit(event.peer, message)

    # --- ready and commit -----------------------------------------------------------------------------------

    def _forward_ready(self) -> list[Effect]:
        """If our subtree is ready, tell the parent; at the root, commit."""
        if self.frozen or not self.sums.may_go_out or self.local is None or self.attempt.ready_sent:
            return []
        place, readies = self.sums.places[0], self.attempt.readies
        if not place.children.keys() <= readies.keys():
            return []
        assert self.view is not None
        self.attempt.ready_sent = True
        below = [readies[child] for child in place.children]  # In one order, whoever came first.
        total = merge([self.local, *(ready.contribution for ready in below)])
        vote = merge_votes([self._own_vote(), *(ready.vote for ready in below)])
        key, step = self.view.key, self.step
        if place.parent is not None:
            return [Transmit(place.parent, Ready(key=key, step=step, vote=vote, contribution=total))]
        switch = vote if vote and vote > key else None
        return self._on_commit(None, Commit(key=key, step=step, switch=switch, total=total))

    def _own_vote(self) -> tuple[int, int] | None:
        """The vote. A member votes for a view without itself only once others keep all that it kept."""
        if self.vote is not None and self.sums.kept.any_here and self.vote in self.prepared:
            return self.vote if self.me in self.prepared[self.vote].member_set else None
        return self.vote

    def _on_commit(self, peer: str | None, commit: Commit) -> list[Effect]:
        if self.attempt.commit is not None:
            return []
        self.attempt.commit = commit
        passed_on: list[Effect] = [
            Transmit(below, commit) for below in self.sums.places[0].below if below != peer
        ]
        return passed_on + self._complete_if_done()

    def _complete_if_done(self) -> list[Effect]:
        commit = self.attempt.commit
        if commit is None or not (self.sums.complete or _is_the_end(commit)):
            return self._tell_summed()
        assert self.view is not None
        if commit.switch and not self.sums.catching_up and commit.switch not in self.prepared:
            if self.me in self.view.member_set:
                raise LocalProtocolError(f"{self.me}: never prepared view {commit.switch}, but voted for it")
            self.frozen = True
            return [Out("the cluster switched to a view that this joiner had not prepared")]
        following = self.view
        if commit.switch and not self.sums.catching_up:
            following = self.prepared[commit.switch]
        return self._complete(commit, following)

    def _tell_summed(self) -> list[Effect]:
        """Tell the training thread, once, that all is here that this node keeps."""
        if not self.sums.kept.is_told or self.sums.is_lacking or self.attempt.summed_told:
            return []
        assert self.view is not None
        self.attempt.summed_told = True
        return [Summed(self.view.key, self.step)]

    def _complete(self, commit: Commit, following: View) -> list[Effect]:
        assert self.view is not None
        before, settled = self.view, not self.sums.catching_up
        self.step += 1
        self.kept, self.began_here = (*self.kept, commit)[-self._keeps(before, following) :], False
        self.local = None
        self.sums.completed()
        if settled:
            ids, shares = following.member_ids, commit.total.shares
            self.deal = tuple(zip(ids, map(shares.get, ids, repeat(0)), strict=True))
        effects: list[Effect] = [StepCompleted(self.step - 1, commit, self.deal, following, len(self.kept))]
        if commit.total.leaving:
            self.frozen = True
            return [*effects, Left("no member goes on")]
        if following is not before:
            effects += self._switch(before, following)
        else:
            self.priors = () if settled else self.priors
            self.attempt = _Attempt(commit=self.owed.pop(0) if self.owed else None)
            self.sums.restart(self.step)
        return effects + self._replay_early()

    def _keeps(self, before: View, following: View) -> int:
        """How many steps' results to keep.

        A node that has just become a member may lack some until its first step.
        """
        somebody_joins = any(view.observers or view.joining for view in (before, following))
        return RESULTS_KEPT if somebody_joins and not self.sums.parts else 1

    def _switch(self, before: View, following: View) -> list[Effect]:
        if self.me not in following.node_set:
            self.frozen, self.view, self.prepared = True, following, {}
            if self.me in before.member_set:
                return [Left(ASKED_TO)]
            return [Out("the cluster dropped this node before it had joined")]
        return [*_void(before, following), *self.enter(following, self.step, (before.electorate,), self.deal)]

    def is_far_behind(self, state_bytes: int) -> bool:
        """By the commits that have come, do more bytes of results wait for us than a new copy of the state has?"""
        steps = 1 + self.early.steps
        return steps > EARLY_COMMITS[0] and steps * self.result_bytes > state_bytes

    def _replay_early(self) -> list[Effect]:
        effects: list[Effect] = []
        for event in self.early.take():
            # A bad one is dropped, as one that comes in time is; the effects of the others are not lost with it.
            with suppress(RemoteProtocolError):
                effects += self._received(event)
        return effects

    # --- for the vote, the flush and invariants

    def prepare(self, view: View) -> None:
        """All that `view` needs is open: vote for it from now on."""
        self.prepared[view.key] = view
        self.vote = max(view.key, self.vote or view.key)

    def depends_on(self, peer: str) -> bool:
        """Does the attempt under way need what only this peer can send, or does this peer need us?"""
        assert self.view is not None
        if self.frozen or (self._listens(peer) and not self.sums.catching_up):
            return False  # Who only listens gives nothing, unless it is from there that the last result is to come.
        if self.recomputes and peer in self.view.member_set.intersection(self.view.neighbors(self.me)):
            return True  # A tensor may have been lost on the link to it.
        return self.sums.depends_on(peer)

    def feeds(self, peer: str) -> bool:
        """Does this peer only listen, and get commits or results from us?"""
        return not self.frozen and self._listens(peer) and self.sums.depends_on(peer)

    def _listens(self, peer: str) -> bool:
        return self.view is not None and peer in self.view.observer_set - self.view.member_set

    def told_of(self, strike: Strike) -> None:
        """A member has ended over its samples: add the strike to our part of the step, which is done over."""
        if self.local is not None:
            strikes = merge_strikes([self.local.strikes, (strike,)])
            self.local = msgspec.structs.replace(self.local, strikes=strikes)

    def electorates(self, present: Electorate | None = None) -> list[Electorate]:
        """The electorates of which a decision needs a quorum: of our view, and of views that others may be in.

        `present`: of our view, if it is not its voters who decide.
        """
        assert self.view is not None
        return [present or self.view.electorate, *self.priors, *self.without_us()]

    def without_us(self) -> tuple[Electorate, ...]:
        """Views that the other of two voters may be in as soon as we have voted for them.

        A view that we are in waits for us; one without us does not. Who leaves and is a quorum of the present one
        by itself, as the senior of two is, must not go on while the other does.
        """
        if self.view is None or len(self.view.voter_ids) > 2:
            return ()
        return tuple(view.electorate for view in self.prepared.values() if self.me not in view.member_set)

    def check_invariants(self) -> None:
        """What holds between any two events."""
        self.sums.check_invariants()
        self.early.check_invariants()
        assert [each.step for each in self.kept] == [*range(self.step - len(self.kept), self.step)]
        if self.prepared:
            assert min(self.prepared) > (self.view.key if self.view else (0, 0))


def _is_the_end(message: Message) -> bool:
    """Does it say that all leave, with a step that changes nothing?

    Who hears that leaves as well, even if links of those that have gone already made it stop for a flush: nobody is
    left who would answer.
    """
    return isinstance(message, Commit) and message.total.leaving and not message.total.weight


def _void(before: View, following: View) -> list[Effect]:
    """Results that observers of before do not want any more: they have gone, or get a later state."""
    anew = {each.node for each in following.joining if each.sources}
    peers = [each for each in before.observer_ids if each in anew or each not in following.node_set]
    return [DropResults(tuple(peers), following.key)] if peers else []
