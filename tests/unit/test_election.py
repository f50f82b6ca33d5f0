"""`chaosnet.protocols.election`: terms, votes and pre-votes."""

import random

import pytest

from chaosnet.protocols.effects import Transmit
from chaosnet.protocols.election import LEAP_BIT, NEAR_S, ROUND_S, STAGGER_S, Election, ElectionRole
from chaosnet.protocols.messages import EVERYONE, Electorate, VoteReply, VoteRequest

VIEW = (1, 3)
TRIO = [Electorate(key=VIEW, members=("a", "b", "c"))]


def make(me, term=2):
    election = Election(me, random.Random(0), lambda to, body: [Transmit(to, body)])
    election.term = term
    return election


def stand(election, voters=("a", "b", "c"), electorates=TRIO, now_s=0.0):
    election.scheduler_missing(0, now_s)
    return election.tick(VIEW, electorates, set(voters), now_s)


def yes(voter, term, trial):
    return VoteReply(term=term, voter=voter, granted=True, trial=trial)


def request(candidate, term, key=VIEW, trial=False):
    return VoteRequest(term=term, candidate=candidate, key=key, trial=trial)


def granted(effects):
    [effect] = effects
    return effect.message.granted


def elect(election, voter="b"):
    stand(election)
    election.on_reply(yes(voter, election.standing_for, True), VIEW, TRIO, {"a", "b", "c"}, set())
    return election.on_reply(yes(voter, election.term, False), VIEW, TRIO, {"a", "b", "c"}, set())


def test_the_most_senior_stands_first():
    senior, junior = make("a"), make("c")
    senior.scheduler_missing(0, 10.0)
    junior.scheduler_missing(2, 10.0)
    assert senior.wake_at_s == 10.0
    assert junior.wake_at_s == 10.0 + 2 * STAGGER_S
    assert junior.tick(VIEW, TRIO, {"a", "b", "c"}, 10.0) == []


def test_a_trial_comes_first_and_raises_no_term():
    election = make("a", term=4)
    assert stand(election) == [Transmit(EVERYONE, request("a", 5, trial=True))]
    assert (election.role, election.term) == (ElectionRole.TRIAL, 4)


def test_a_quorum_of_trial_votes_makes_a_candidate_and_a_quorum_of_votes_elects_it():
    election = make("a")
    stand(election)
    asked = election.on_reply(yes("c", 3, True), VIEW, TRIO, {"a", "b", "c"}, set())
    assert [effect.message.trial for effect in asked] == [False]
    assert (election.role, election.term) == (ElectionRole.CANDIDATE, 3)
    election.on_reply(yes("b", 3, False), VIEW, TRIO, {"a", "b", "c"}, set())
    assert election.role is ElectionRole.ELECTED


def test_votes_of_an_older_attempt_do_not_count():
    election = make("a")
    stand(election)
    election.on_reply(yes("b", 3, True), VIEW, TRIO, {"a", "b", "c"}, set())
    election.on_reply(yes("b", 3, True), VIEW, TRIO, {"a", "b", "c"}, set())  # A trial vote, come late.
    election.on_reply(yes("b", 2, False), VIEW, TRIO, {"a", "b", "c"}, set())  # Of another term.
    assert election.role is ElectionRole.CANDIDATE


def test_a_candidate_needs_the_quorum_of_every_view_that_may_be_active():
    before = Electorate(key=(1, 2), members=("a", "d", "e"))
    election = make("a")
    stand(election)
    election.on_reply(yes("b", 3, True), VIEW, [*TRIO, before], {"a", "b", "c", "d"}, set())
    assert election.role is ElectionRole.TRIAL
    election.on_reply(yes("d", 3, True), VIEW, [*TRIO, before], {"a", "b", "c", "d"}, set())
    assert election.role is ElectionRole.CANDIDATE


def test_alone_one_is_elected_at_once():
    election = make("a")
    alone = [Electorate(key=VIEW, members=("a",))]
    stand(election, "a", alone)
    election.count(VIEW, alone, {"a"}, set())
    assert election.role is ElectionRole.ELECTED


def test_of_two_the_senior_and_after_its_crash_the_junior_are_elected_in_different_terms():
    pair = [Electorate(key=VIEW, members=("a", "b"))]
    senior, junior = make("a", term=1), make("b", term=1)
    stand(senior, "a", pair)
    senior.count(VIEW, pair, {"a"}, set())
    stand(junior, "b", pair)
    junior.count(VIEW, pair, {"b"}, set())
    assert junior.role is ElectionRole.TRIAL  # That a is silent is not enough.
    junior.count(VIEW, pair, {"b"}, {"a"})
    assert (senior.role, junior.role) == (ElectionRole.ELECTED, ElectionRole.ELECTED)
    assert senior.term != junior.term


def test_so_are_a_senior_by_a_farewell_in_the_view_before_and_the_junior_by_the_crash_of_the_senior():
    two_views = [Electorate(key=VIEW, members=("a", "b")), Electorate(key=(1, 2), members=("x", "a"))]
    senior, junior = make("a", term=1), make("b", term=1)
    stand(senior, "a", two_views)
    senior.count(VIEW, two_views, {"a"}, {"x"})
    stand(junior, "b", two_views)
    junior.count(VIEW, two_views, {"b"}, {"a", "x"})
    assert (senior.role, junior.role) == (ElectionRole.ELECTED, ElectionRole.ELECTED)
    assert (senior.term, junior.term) == (4, 2)


def test_proof_of_a_crash_that_comes_late_does_not_count_for_a_term_without_proofs():
    four = [Electorate(key=VIEW, members=("a", "b", "c", "d"))]
    election = make("c", term=1)
    stand(election, "bcd", four)
    election.on_reply(yes("d", 3, True), VIEW, four, {"b", "c", "d"}, set())
    assert election.count(VIEW, four, {"c", "d"}, {"a", "b"}) == []
    assert election.role is ElectionRole.TRIAL


def test_one_vote_is_given_per_term():
    voter = make("c")
    assert granted(voter.on_request(request("a", 3), VIEW, scheduler_missing=True))
    assert not granted(voter.on_request(request("b", 3), VIEW, scheduler_missing=True))
    assert granted(voter.on_request(request("b", 4), VIEW, scheduler_missing=True))


def test_a_candidate_does_not_vote_for_another_in_its_own_term():
    election = make("a")
    stand(election)
    election.on_reply(yes("b", 3, True), VIEW, TRIO, {"a", "b", "c"}, set())
    assert not granted(election.on_request(request("c", 3), VIEW, scheduler_missing=True))


@pytest.mark.parametrize("trial", [True, False])
def test_a_candidate_with_an_older_view_is_refused(trial):
    voter = make("c")
    effects = voter.on_request(request("a", 3, key=(1, 2), trial=trial), VIEW, scheduler_missing=True)
    assert not granted(effects)


def test_a_trial_is_refused_while_the_scheduler_can_be_reached_and_changes_nothing():
    voter = make("c")
    assert not granted(voter.on_request(request("a", 3, trial=True), VIEW, scheduler_missing=False))
    assert granted(voter.on_request(request("a", 3, trial=True), VIEW, scheduler_missing=True))
    assert (voter.term, voter.voted_term) == (2, 0)


def test_a_refusal_carries_the_higher_term_and_ends_the_candidacy():
    voter = make("c", term=7)
    [refusal] = voter.on_request(request("a", 3), VIEW, scheduler_missing=True)
    assert refusal.message == VoteReply(term=7, voter="c", granted=False, trial=False)
    election = make("a")
    stand(election)
    election.on_reply(refusal.message, VIEW, TRIO, {"a", "b", "c"}, set())
    assert (election.role, election.term) == (ElectionRole.FOLLOWER, 7)


def test_an_elected_scheduler_follows_whoever_has_a_higher_term():
    election = make("a")
    elect(election)
    assert election.role is ElectionRole.ELECTED
    election.adopt(9)
    assert (election.role, election.term) == (ElectionRole.FOLLOWER, 9)


def test_who_is_not_elected_tries_again_after_a_random_time():
    waits = set()
    for seed in range(5):
        election = Election("a", random.Random(seed), lambda to, body: [])
        stand(election)
        waits.add(election.wake_at_s)
        assert ROUND_S <= election.wake_at_s <= 2 * ROUND_S
    assert len(waits) == 5


def test_over_far_links_a_round_is_longer_than_both_votes_take():
    election, rtt_s = make("a"), 0.5
    election.scheduler_missing(0, 0.0, rtt_s)
    election.tick(VIEW, TRIO, {"a", "b", "c"}, 0.0, rtt_s)
    assert election.wake_at_s > 2 * rtt_s


def test_over_far_links_the_next_in_rank_hears_the_most_senior_before_it_stands():
    junior, rtt_s = make("b"), 0.5
    junior.scheduler_missing(1, 0.0, rtt_s)
    assert junior.wake_at_s > rtt_s
    near = make("b")
    near.scheduler_missing(1, 0.0, NEAR_S)
    assert near.wake_at_s == STAGGER_S


def test_a_term_by_a_persons_word_is_far_from_the_next_and_of_the_same_kind():
    election = make("a", term=6)
    election.scheduler_missing(0, 0.0)
    election.tick(VIEW, TRIO, {"a"}, 0.0)
    usual = election.standing_for
    election.tick(VIEW, TRIO, {"a"}, election.wake_at_s, word=True)
    assert election.standing_for > usual + 4000
    assert election.standing_for % 4 == usual % 4
    leapt = make("a", term=6)
    leapt.scheduler_missing(0, 0.0)
    leapt.tick((6, 3 + (2000 << LEAP_BIT)), TRIO, {"a"}, 0.0)
    assert leapt.standing_for == usual + 8000


def test_a_word_that_comes_in_the_middle_of_an_attempt_counts_in_the_next():
    """Else it would be elected for a term that the dead may have had."""
    election, dead = make("a"), {"b", "c"}
    election.scheduler_missing(0, 0.0)
    election.tick(VIEW, TRIO, {"a"}, 0.0)
    election.count(VIEW, TRIO, {"a"}, dead, word=True)
    assert election.role is ElectionRole.TRIAL
    election.tick(VIEW, TRIO, {"a"}, election.wake_at_s, word=True)
    election.count(VIEW, TRIO, {"a"}, dead, word=True)
    assert election.role is ElectionRole.ELECTED
    assert election.term > 4000


def test_rounds_in_vain_are_counted_until_there_is_a_scheduler():
    election = make("a")
    for _ in range(3):
        stand(election, now_s=election.wake_at_s or 0.0)
    assert election.rounds == 3
    election.stand_down()
    assert election.rounds == 0


def test_nobody_stands_once_the_scheduler_is_back():
    election = make("a")
    stand(election)
    election.stand_down()
    assert (election.role, election.wake_at_s) == (ElectionRole.FOLLOWER, None)
