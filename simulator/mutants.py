"""Cores broken on purpose. A simulation that finds nothing may look at nothing: it must catch each of these.

Each mutant breaks one rule for as long as its context lasts; hunt.py looks for a life that notices.

Not here, because breaking it breaks nothing that can be seen from outside: the scheduler's queue (whoever waits asks
again), a promotion of a joiner that has no state yet (that is what blocking mode is). Nor these, which survived a
thousand crash points and as many lives, because a second rule holds: a candidate whose view is older than the
voter's (its flush learns of the newer one); PREPARE and FLUSH of an older term (a view needs the votes of all its
members, and an INSTALL its own FLUSH); a flush that overlooks a newer view (what it installs is newer still); an
answer to an earlier flush that counts (who has answered is frozen, so it says the same again); a piece of state of
another step (a joiner that asks again begins with new requests, and pieces are matched with those); a view that is
switched to before its links are open (they open a moment later, or count as lost); pieces of state that wait behind
results of steps (the joiner falls behind, asks again, and in the end the cluster waits for it); a link of the old
view that closes before its last step is over (the step is summed again after a flush).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import msgspec

from ..node.agent import role as role_module
from ..node.agent.core import Agent
from ..node.agent.leaving import Leaving
from ..node.agent.node import Phase
from ..node.agent.parking import Parking
from ..node.agent.recovery import StepRecovery
from ..node.agent.role import Role
from ..node.agent.views import Views
from ..node.agent.welcome import Welcome
from ..protocols import asking, contributions, early, election, overlay, relay, scale_out, step_sync, sums
from ..protocols import liveness as liveness_module
from ..protocols.data_cursor import DataCursor
from ..protocols.deaths import Deaths
from ..protocols.effects import ResetAttempt
from ..protocols.events import Received
from ..protocols.lives import Lives
from ..protocols.messages import EVERYONE, DeclaredDead, Flush, View
from ..protocols.view_change import applied
from ..scheduler import admission, flushes
from ..scheduler.flushes import Flushes
from . import cluster, network

TOO_LONG_S = 2.0

Patch = Callable[[Any, str, Any], None]
"""Sets an attribute for as long as the mutant lives."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """One rule that is broken."""

    name: str
    breaks: str
    patch: Callable[[Patch], None]

    @contextlib.contextmanager
    def alive(self) -> Iterator[None]:
        """The rule is broken in here."""
        with contextlib.ExitStack() as stack:
            self.patch(
                lambda target, name, value: stack.enter_context(mock.patch.object(target, name, value))
            )
            yield


MUTANTS: dict[str, Mutant] = {}


def mutant(breaks: str) -> Callable[[Callable[[Patch], None]], None]:
    """Registers a function that breaks a rule; `breaks` says what holds instead."""

    def register(patch: Callable[[Patch], None]) -> None:
        name = patch.__name__.lstrip("_").replace("_", "-")
        MUTANTS[name] = Mutant(name, breaks, patch)

    return register


# --- quorums, votes and terms ---


@mutant("Whoever can be reached goes on, in all parts of a partition.")
def _no_quorum(patch: Patch) -> None:
    patch(overlay, "has_quorum", lambda electorate, alive, crashed, word=False: True)


@mutant("A quorum of the present view is enough, whoever may still act in the one before.")
def _older_views_do_not_count(patch: Patch) -> None:
    original = overlay.lacking

    def lacking(electorates: Any, alive: Any, crashed: Any, word: bool = False) -> Any:
        return original(electorates[:1], alive, crashed, word)

    for module in (overlay, election, role_module, flushes):
        patch(module, "lacking", lacking)


@mutant("An exact half goes on without the most senior member and without proof that the others are dead.")
def _any_half_will_do(patch: Patch) -> None:
    def has_quorum(electorate: Any, alive: set[str], crashed: set[str], word: bool = False) -> bool:
        return 2 * sum(voter in alive for voter in electorate.members) >= len(electorate.members)

    patch(overlay, "has_quorum", has_quorum)


@mutant("Who cannot be reached passes for dead.")
def _silence_proves_a_crash(patch: Patch) -> None:
    patch(overlay.Overlay, "crashed", property(lambda self: self.view.node_set - self.reachable))


@mutant("A connection that broke passes for a crash, whatever is found where the peer had answered.")
def _a_broken_connection_proves_a_crash(patch: Patch) -> None:
    def handle(self: Any, event: Any, now_s: float) -> dict[str, Any]:
        return {peer: look.life for peer, look in self.looking.items() if look.address == event.address}

    patch(Deaths, "handle", handle)


@mutant("A death that was seen is forgotten when another process answers in that place.")
def _proofs_are_wiped_out(patch: Patch) -> None:
    original = overlay.Overlay._witness

    def witness(self: Any, ends: Any, told: Any) -> None:
        self.closed.pop(ends, None)
        original(self, ends, told)

    patch(overlay.Overlay, "_witness", witness)


@mutant("A voter gives its vote to everybody who asks, however often in a term.")
def _several_votes_a_term(patch: Patch) -> None:
    original = election.Election.on_request

    def forgetful(self: Any, request: Any, key: Any, scheduler_missing: bool) -> Any:
        self.voted_term = 0
        self.term = min(self.term, request.term - 1)
        return original(self, request, key, scheduler_missing)

    patch(election.Election, "on_request", forgetful)


@mutant("One of the votes is counted twice.")
def _a_vote_counts_twice(patch: Patch) -> None:
    original = overlay.lacking

    def lacking(electorates: Any, votes: set[str], crashed: Any, word: bool = False) -> Any:
        more = next((voter for voter in electorates[0].members if voter not in votes), "")
        return original(electorates, votes | {more}, crashed, word)

    patch(election, "lacking", lacking)


@mutant("A round of an election is as short over far links as over near ones.")
def _rounds_know_no_distance(patch: Patch) -> None:
    patch(election, "ROUND_TRIPS", 0)


@mutant("Views of a scheduler that goes on by a person's word are numbered on from those before.")
def _no_leap_by_word(patch: Patch) -> None:
    patch(flushes.Flushes, "_leap", lambda self: 0)


@mutant("A change of a view is applied to whatever view one is in.")
def _a_change_of_any_view(patch: Patch) -> None:
    def whole(self: Any, told: Any) -> Any:
        view = self.node.sync.view
        if view is None or isinstance(told, View):
            return told if isinstance(told, View) else None
        return applied(msgspec.structs.replace(view, term=told.base[0], seq=told.base[1]), told)

    patch(Views, "whole", whole)


@mutant("INSTALL is taken without the FLUSH that it ends, so an older view is entered again.")
def _install_without_its_flush(patch: Patch) -> None:
    original = Views.on_install

    def on_install(self: Any, event: Any, now_s: float) -> Any:
        install, follower = event.message, self.node.follower
        if self.node.sync.view is not None and follower.flush is None:
            follower.flush = Flush(term=install.term, number=install.number, scheduler="", key=(0, 0), step=0)
        return original(self, event, now_s)

    patch(Views, "on_install", on_install)


# --- of two members ---


@mutant("Of two members, a refusal proves the other's death however late, though it may have gone on first.")
def _a_late_refusal_proves_a_death(patch: Patch) -> None:
    original = Deaths.closed

    def closed(self: Any, peer: str, *args: Any) -> Any:
        effects = original(self, peer, *args)
        if peer in self.looking and self.looking[peer].holds:
            self.looking[peer].proof_until_s = math.inf
        return effects

    patch(Deaths, "closed", closed)


@mutant("Of two members, who gets no refusal after a break takes it for silence at once.")
def _a_break_passes_for_silence(patch: Patch) -> None:
    patch(liveness_module.Liveness, "hold_until_s", lambda self, peer: 0.0)


@mutant("Of two members each gives the other up long before the other thinks so.")
def _pairs_lose_patience(patch: Patch) -> None:
    patch(liveness_module, "PAIR_PATIENCE_S", liveness_module.PROBE_PATIENCE_S)


@mutant(
    "Of two members a proof is taken for as long as the other is patient, whatever the clocks do meanwhile."
)
def _clocks_do_not_drift(patch: Patch) -> None:
    patch(liveness_module, "PAIR_PROOF_S", liveness_module.PAIR_PATIENCE_S)


@mutant("Of two members, too, the death of one that was silent for a moment proves nothing.")
def _pairs_prove_nothing_later(patch: Patch) -> None:
    patch(liveness_module.Liveness, "proof_until_s", lambda self, peer: -math.inf)


@mutant("A node whose script raises vanishes: its connections close, and it tells nobody why.")
def _errors_are_not_told(patch: Patch) -> None:
    original = Leaving.say_farewell

    def say_farewell(self: Any) -> Any:
        effects = original(self)
        return effects if self.crash is None else []

    patch(Leaving, "say_farewell", say_farewell)


@mutant("A person who says that the others are dead is believed by a node that reaches them.")
def _anybody_can_be_declared_dead(patch: Patch) -> None:
    def on_go_on(self: Any, event: Any, now_s: float) -> Any:
        node = self.node
        lives = sorted(each for each in node.sync.view.lives if each[0] != node.me)
        return node.relay.send(EVERYONE, DeclaredDead(lives=tuple(lives)))

    patch(Parking, "on_go_on", on_go_on)


# --- views ---


@mutant("The view that somebody is prepared for is switched to, by all.")
def _views_are_switched_to_unprepared(patch: Patch) -> None:
    patch(step_sync, "merge_votes", lambda votes: max((vote for vote in votes if vote), default=None))


@mutant("Whom the cluster went on without is not told.")
def _the_expelled_are_not_told(patch: Patch) -> None:
    patch(Role, "expel_stranger", lambda self, name, key: [])
    patch(Flushes, "expel", lambda self, node: [])


@mutant("News of a link counts though newer news of it has come before.")
def _older_news_counts(patch: Patch) -> None:
    original = overlay.Overlay.heard

    def heard(self: Any, told: Any) -> bool:
        self.news.pop((told.reporter, told.peer), None)
        return original(self, told)

    patch(overlay.Overlay, "heard", heard)


@mutant("Links are never given up, however long they are silent.")
def _nothing_is_suspected(patch: Patch) -> None:
    patch(liveness_module.Liveness, "_deadline_s", lambda self, state: math.inf)


@mutant("Whoever lost something of the step under way keeps it to itself.")
def _a_torn_step_is_not_told(patch: Patch) -> None:
    original = StepRecovery.tear

    def tear(self: Any, reason: str, now_s: float, without_me: bool = False) -> Any:
        joining = self.node.phase is Phase.JOINING
        return original(self, reason, now_s, without_me) if joining or without_me else []

    patch(StepRecovery, "tear", tear)


@mutant("An envelope that was here before is passed on again.")
def _floods_never_end(patch: Patch) -> None:
    original = relay.Relay._note

    def note(self: Any, peer: str, envelope: Any) -> bool:
        original(self, peer, envelope)
        return True

    patch(relay.Relay, "_note", note)


# --- step recovery ---


@mutant("What had come in for a step stays when its attempt is over.")
def _sums_survive_a_flush(patch: Patch) -> None:
    original = Agent.handle

    def handle(self: Any, event: Any, now_s: float) -> Any:
        return [each for each in original(self, event, now_s) if not isinstance(each, ResetAttempt)]

    patch(Agent, "handle", handle)


@mutant(
    "Who has taken back what it had contributed goes on with the attempt, which has some of that already."
)
def _parts_taken_back_are_mixed(patch: Patch) -> None:
    patch(sums.Sums, "may_go_out", property(lambda self: not self.catching_up))


@mutant("Messages count by their step alone, whichever attempt they are of.")
def _attempts_have_no_name(patch: Patch) -> None:
    original = step_sync.StepSync._received

    def received(self: Any, event: Received) -> Any:
        message: Any = event.message
        if self.view is not None and message.step == self.step and not self.frozen:
            message = msgspec.structs.replace(message, key=self.view.key)
        return original(self, Received(event.peer, message, event.payload))

    patch(step_sync.StepSync, "_received", received)


@mutant("Messages that are ahead of the receiver are dropped.")
def _nothing_is_kept_for_later(patch: Patch) -> None:
    patch(early.Early, "take", lambda self: [])


@mutant("Who has completed the step that others have not keeps the result for itself.")
def _results_are_not_passed_on(patch: Patch) -> None:
    patch(sums.Sums, "serve_result", lambda self, step, weight: [])


@mutant("Whose link opens tells of lost links, and not of farewells.")
def _farewells_are_not_repeated(patch: Patch) -> None:
    patch(Lives, "farewells", lambda self: ())


@mutant("A result is given up as soon as its step is complete, though others may need it.")
def _results_are_given_up_early(patch: Patch) -> None:
    original = cluster.SimCluster._check_result

    def check_result(self: Any, node: Any, effect: Any) -> Any:
        who = original(self, node, effect)
        node.results = {}
        return who

    patch(cluster.SimCluster, "_check_result", check_result)


@mutant("A flush asks the others, and not those who are ahead: a completed step is done over.")
def _completed_steps_are_done_over(patch: Patch) -> None:
    original = Flushes.on_ok

    def on_ok(self: Any, answer: Any) -> Any:
        behind = msgspec.structs.replace(answer, step=min(answer.step, self.tenure.sync.step))
        return original(self, behind)

    patch(Flushes, "on_ok", on_ok)


@mutant("A flush ends with the first answers, and leaves out who is slower.")
def _flushes_do_not_wait(patch: Patch) -> None:
    original = Flushes.install_if_complete

    def install_if_complete(self: Any) -> Any:
        tenure, seen = self.tenure, self.tenure.overlay
        tenure.overlay = mock.Mock(
            wraps=seen, reachable={*tenure.flush.answers}, crashed=seen.crashed, has_word=seen.has_word
        )
        try:
            return original(self)
        finally:
            tenure.overlay = seen

    patch(Flushes, "install_if_complete", install_if_complete)


# --- the all-reduce ---


@mutant("A child's part is added twice.")
def _parts_are_added_twice(patch: Patch) -> None:
    original = sums.Sums.on_up

    def on_up(self: Any, peer: str, up: Any, payload: Any) -> Any:
        effects = original(self, peer, up, payload)
        return effects[:1] + effects

    patch(sums.Sums, "on_up", on_up)


@mutant("A child's part counts as of one sample, whatever it says.")
def _weights_are_not_added_up(patch: Patch) -> None:
    original = sums.Sums.on_up

    def on_up(self: Any, peer: str, up: Any, payload: Any) -> Any:
        return original(self, peer, msgspec.structs.replace(up, weight=min(up.weight, 1.0)), payload)

    patch(sums.Sums, "on_up", on_up)


@mutant("A sum goes up before all children's parts have come.")
def _children_are_not_waited_for(patch: Patch) -> None:
    original = sums.Sums._forward_up

    def forward_up(self: Any, index: int) -> Any:
        if self.may_go_out:
            self.progress[index].missing = set(sorted(self.progress[index].missing)[1:])
        return original(self, index)

    patch(sums.Sums, "_forward_up", forward_up)


@mutant("A message goes up once its first chunk is there.")
def _bundles_go_before_they_are_whole(patch: Patch) -> None:
    original = sums.Sums._forward_up

    def forward_up(self: Any, index: int) -> Any:
        chunks = self.bundles[index]
        own = self.own_weight
        if chunks.start in own:
            self.own_weight = dict.fromkeys(chunks, own[chunks.start])
        effects = original(self, index)
        self.own_weight = own
        return effects

    patch(sums.Sums, "_forward_up", forward_up)


@mutant("Who caught up is served in the bundles of another view.")
def _recovered_results_keep_their_bundles(patch: Patch) -> None:
    original = sums.Sums.serve_result

    def serve_result(self: Any, step: int, weight: float) -> Any:
        kept = self.bundles
        self.bundles = [range(chunks.start, chunks.start + 1) for chunks in kept]
        effects = original(self, step, weight)
        self.bundles = kept
        return effects

    patch(sums.Sums, "serve_result", serve_result)


@mutant("What a leaving node's subtree has contributed is not put down as used.")
def _samples_of_a_subtree_are_forgotten(patch: Patch) -> None:
    original = contributions.merge

    def merge(parts: Any) -> Any:
        total = original(parts)
        leaving = any(part.leaving for part in parts)
        return msgspec.structs.replace(total, ranges=total.ranges[:-1]) if leaving else total

    patch(step_sync, "merge", merge)


@mutant("Every member is dealt the first samples that are left.")
def _samples_are_dealt_twice(patch: Patch) -> None:
    original = DataCursor.deal

    def deal(self: Any, shares: Any) -> Any:
        return {name: original(self, [(name, size)])[name] for name, size in shares}

    patch(DataCursor, "deal", deal)


@mutant("Samples are used up when they are dealt, so those of a crashed node are never dealt again.")
def _samples_are_used_up_when_dealt(patch: Patch) -> None:
    original = DataCursor.deal

    def deal(self: Any, shares: Any) -> Any:
        ranges = original(self, shares)
        self.commit(each for parts in ranges.values() for each in parts)
        return ranges

    patch(DataCursor, "deal", deal)
    patch(DataCursor, "commit", _commit_what_is_not_used_up(DataCursor.commit))


def _commit_what_is_not_used_up(original: Any) -> Any:
    def commit(self: Any, ranges: Any) -> None:
        used = {position for start, stop in self.consumed for position in range(start, stop)}
        original(self, [each for each in ranges if each[0] not in used])

    return commit


# --- links with rates ---


@mutant("A joiner ends when the state takes long, though it comes.")
def _long_pulls_are_given_up(patch: Patch) -> None:
    original = scale_out.Joiner._replicate
    began_s: dict[int, float] = {}

    def replicate(self: Any, event: Any, now_s: float) -> Any:
        late = now_s > began_s.setdefault(id(self.replication), now_s) + TOO_LONG_S
        return self.asking.fail("the state takes too long") if late else original(self, event, now_s)

    patch(scale_out.Joiner, "_replicate", replicate)


@mutant("A joiner that was not answered for a few seconds ends, though the cluster goes on.")
def _joiners_ask_twice(patch: Patch) -> None:
    patch(asking, "MAX_UNANSWERED", 2)


@mutant("Members leave it to the scheduler to answer a joiner, though it may be stopped.")
def _members_say_nothing(patch: Patch) -> None:
    patch(Welcome, "_say_here", lambda self, joiner: [])


@mutant("What an attempt that is over would have sent stays in the queues.")
def _revoked_chunks_are_sent(patch: Patch) -> None:
    original = step_sync.StepSync.start_installed

    def start_installed(self: Any, install: Any, view: Any) -> Any:
        effects = original(self, install, view)
        return [ResetAttempt() if isinstance(each, ResetAttempt) else each for each in effects]

    patch(step_sync.StepSync, "start_installed", start_installed)


@mutant("Control shares a connection with bulk, and waits behind what was there first.")
def _control_waits_behind_bulk(patch: Patch) -> None:
    def held_up_s(self: Any, connection: Any, sender: str, receiver: str) -> float:
        lane, rate = connection.lanes.get(sender), self.rates.of(sender, receiver)
        if lane is None:
            return 0.0
        waits_s = sum(item[3] for item in lane.waiting) / rate
        return max(lane.free_at_s - self.now_s, 0.0) + float(waits_s)

    patch(network.Network, "_held_up_s", held_up_s)


@mutant("Whoever has too many results for a state it has not got begins anew, and nobody waits for it.")
def _nobody_waits_for_joiners(patch: Patch) -> None:
    patch(admission, "MAX_RESULTS_SHARE", (math.inf, math.inf))
    patch(scale_out.Joiner, "want_blocking", lambda self: None)
