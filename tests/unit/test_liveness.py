"""`chaosnet.protocols.liveness`: heartbeats judge links, and busy machines are not dead."""

import pytest

from chaosnet.protocols.effects import Transmit
from chaosnet.protocols.liveness import (
    DEAD_LINK_S,
    ECHO_GRACE_S,
    PAIR_PATIENCE_S,
    PAIR_PROOF_S,
    PING_EVERY_S,
    PROBE_PATIENCE_S,
    PROOF_WINDOW_S,
    RTTS_KEPT,
    STALL_MEMORY_S,
    SUSPECT_AFTER_S,
    Liveness,
)
from chaosnet.protocols.messages import Ping, Pong


@pytest.fixture
def liveness():
    liveness = Liveness()
    liveness.opened("a", 0.0)
    return liveness


def run(liveness, until_s, start_s=0.0, every_s=PING_EVERY_S):
    """Tick regularly; the first peer that is given up, and when."""
    now_s = start_s
    while now_s < until_s:
        lost, _, _ = liveness.tick(now_s)
        if lost:
            return lost, now_s
        now_s += every_s
    return [], now_s


def test_a_ping_goes_out_every_quarter_of_a_second(liveness):
    assert liveness.tick(0.0) == ([], [], [Transmit("a", Ping(sent_s=0.0))])
    assert liveness.tick(0.1) == ([], [], [])
    assert liveness.tick(PING_EVERY_S) == ([], [], [Transmit("a", Ping(sent_s=PING_EVERY_S))])


def test_a_ping_is_answered_with_its_own_time_stamp(liveness):
    assert liveness.received("a", Ping(sent_s=41.0), 1.0) == [Transmit("a", Pong(sent_s=41.0))]


def test_a_silent_link_is_lost_after_the_patience(liveness):
    lost, when_s = run(liveness, 5.0)
    assert lost == ["a"]
    assert when_s == pytest.approx(SUSPECT_AFTER_S, abs=PING_EVERY_S)


def test_any_message_is_a_sign_of_life(liveness):
    liveness.tick(0.0)
    liveness.received("a", Pong(sent_s=0.0), 1.0)
    assert run(liveness, 1.0 + SUSPECT_AFTER_S - 0.01) == ([], pytest.approx(2.25))


def test_doubt_asks_at_once_and_waits_less(liveness):
    liveness.tick(0.0)
    liveness.received("a", Pong(sent_s=0.0), 0.2)
    assert liveness.doubt("a", 0.25) == [Transmit("a", Ping(sent_s=0.25))]
    assert liveness.doubt("a", 0.3) == []  # It is being asked already.
    lost, when_s = run(liveness, 5.0, start_s=0.25, every_s=0.05)
    assert (lost, when_s) == (["a"], pytest.approx(0.25 + PROBE_PATIENCE_S))


def test_an_answer_ends_the_doubt(liveness):
    liveness.tick(0.0)
    liveness.doubt("a", 0.0)
    liveness.received("a", Pong(sent_s=0.0), 0.1)
    assert run(liveness, PROBE_PATIENCE_S + 0.2)[0] == []


def test_a_peer_that_says_it_was_held_up_is_given_that_much_more_time(liveness):
    liveness.tick(0.0)
    liveness.received("a", Ping(sent_s=0.0, stall_s=2.0), 0.0)
    _, when_s = run(liveness, 9.0)
    assert when_s == pytest.approx(SUSPECT_AFTER_S + 2 * 2.0, abs=PING_EVERY_S)


def test_our_own_pause_is_not_the_peers_silence(liveness):
    liveness.tick(0.0)
    lost, _, _ = liveness.tick(60.0)  # SIGSTOP, SIGCONT.
    assert lost == []


def test_ticks_are_not_late_while_there_is_nobody_to_be_on_time_for():
    alone = Liveness()
    for second in range(5):
        alone.tick(float(second))
    alone.opened("a", 4.9)
    _, _, [ping] = alone.tick(5.0)
    assert ping.message.stall_s == 0.0


def test_our_own_pause_is_told_to_others_and_forgotten_after_a_while(liveness):
    liveness.tick(0.0)
    _, _, [ping] = liveness.tick(3.0)
    assert ping.message.stall_s == pytest.approx(3.0 - PING_EVERY_S)
    liveness.received("a", Pong(sent_s=3.0), 3.0)
    liveness.stalled_at_s -= STALL_MEMORY_S
    [pong] = liveness.received("a", Ping(sent_s=3.0), 3.1)
    assert pong.message.stall_s == 0.0


def test_who_has_slept_longer_than_others_wait_makes_nobody_more_patient(liveness):
    liveness.tick(0.0)
    _, _, [ping] = liveness.tick(60.0)
    assert ping.message.stall_s == 0.0
    liveness.received("a", Pong(sent_s=60.0), 60.0)
    ticks = [60.0 + PING_EVERY_S * count for count in range(1, 7)]
    assert [liveness.tick(now_s)[0] for now_s in ticks][-2:] == [["a"], ["a"]], "after 1.25 s, as ever"


def test_a_close_proves_a_crash_only_if_the_peer_was_heard_lately(liveness):
    """Else the network may just deliver what was sent when the other end gave us up."""
    liveness.received("a", Pong(sent_s=0.0), 1.0)
    liveness.tick(1.0)
    assert liveness.spoke_lately("a", 1.0 + PROOF_WINDOW_S - 0.01)
    assert not liveness.spoke_lately("a", 1.0 + PROOF_WINDOW_S)
    assert not liveness.spoke_lately("stranger", 1.0)


def test_a_close_proves_nothing_when_we_were_away_for_long(liveness):
    """What was queued meanwhile was said before the other end gave us up."""
    liveness.tick(0.0)
    liveness.received("a", Pong(sent_s=0.0), 4.0)  # Read after a SIGCONT.
    assert not liveness.spoke_lately("a", 4.0)
    liveness.tick(4.1)
    assert not liveness.spoke_lately("a", 4.1)
    liveness.received("a", Pong(sent_s=0.0), 4.1 + PROOF_WINDOW_S)
    assert liveness.spoke_lately("a", 4.1 + PROOF_WINDOW_S)


def test_nobody_gives_up_before_a_close_stops_being_a_proof():
    assert min(PROBE_PATIENCE_S, DEAD_LINK_S, SUSPECT_AFTER_S) > PROOF_WINDOW_S


def test_round_trips_are_the_best_and_the_median_of_the_last_ones(liveness):
    assert liveness.rtt_s("a") == (0.0, 0.0)
    for sent_s, now_s in [(0.0, 0.020), (1.0, 1.010), (2.0, 2.100)]:
        liveness.received("a", Pong(sent_s=sent_s), now_s)
    assert liveness.rtt_s("a") == (pytest.approx(0.010), pytest.approx(0.020))
    for number in range(RTTS_KEPT):
        liveness.received("a", Pong(sent_s=number), number + 0.5)
    assert liveness.rtt_s("a") == (0.5, 0.5)


def fall_silent(liveness, until_s, answers):
    """Tick every 10 ms; `answers`: when the other end, asked around the link at once, answers."""
    asked, now_s = [], 0.0
    while now_s < until_s:
        lost, silent, _ = liveness.tick(now_s)
        if lost:
            return asked, now_s
        asked += [now_s] if silent else []
        for answer_s in [each for each in answers if now_s <= each < now_s + 0.01]:
            liveness.vouched("a", asked[-1], answer_s)
        now_s += 0.01
    return asked, None


def test_a_silent_link_whose_other_end_answers_around_it_is_dead_sooner(liveness):
    asked, lost_s = fall_silent(liveness, 2.0, answers=[0.45])
    assert asked == [pytest.approx(0.4, abs=0.02)]  # Once is enough.
    assert lost_s == pytest.approx(DEAD_LINK_S, abs=0.02)


def test_a_silent_link_whose_other_end_does_not_answer_either_gets_the_whole_patience(liveness):
    asked, lost_s = fall_silent(liveness, 2.0, answers=[])
    assert len(asked) == 4
    assert lost_s == pytest.approx(SUSPECT_AFTER_S, abs=0.02)


def test_an_answer_from_before_the_silence_says_nothing_of_the_link(liveness):
    liveness.vouched("a", 0.3, 0.35)
    assert fall_silent(liveness, 2.0, answers=[])[1] == pytest.approx(SUSPECT_AFTER_S, abs=0.02)


def test_who_was_held_up_gets_the_time_for_what_it_had_sent_over_the_link(liveness):
    """Its answer may overtake its heartbeat."""
    assert fall_silent(liveness, 2.0, answers=[0.9])[1] == pytest.approx(0.9 + ECHO_GRACE_S, abs=0.02)
    liveness.vouched("a", 0.9, 0.95)
    liveness.received("a", Pong(sent_s=0.9), 1.0)
    assert liveness.tick(1.01)[0] == []


def test_a_link_with_long_round_trips_is_not_dead_so_soon(liveness):
    liveness.received("a", Pong(sent_s=-0.1), 0.0)
    assert fall_silent(liveness, 2.0, answers=[0.45])[1] == pytest.approx(DEAD_LINK_S + 0.4, abs=0.02)


def test_it_wakes_when_a_link_is_dead(liveness):
    liveness.tick(0.0)
    liveness.tick(0.2)
    liveness.tick(0.4)
    for peer in liveness.peers.values():
        peer.ping_at_s = 0.9
    liveness.vouched("a", 0.4, 0.42)
    assert liveness.wake_at_s == pytest.approx(DEAD_LINK_S)


def test_a_closed_connection_is_watched_no_longer(liveness):
    liveness.closed("a")
    assert liveness.wake_at_s is None
    assert liveness.tick(100.0) == ([], [], [])


def test_news_that_took_the_long_link_may_come_later_than_an_answer_around_it(liveness):
    """The other end was held up, and has said so; the way around is shorter than the link."""
    liveness.received("a", Pong(sent_s=-0.4, stall_s=3.0), 0.0)
    assert run(liveness, 3.0) == ([], 3.0)
    liveness.vouched("a", 2.75, 3.0)
    lost, now_s = run(liveness, 5.0, start_s=3.0, every_s=0.05)
    assert lost == ["a"] and now_s == pytest.approx(3.0 + ECHO_GRACE_S + 0.4, abs=0.06)


# --- two members ---


@pytest.fixture
def pair(liveness):
    liveness.pairs_with("a")
    return liveness


def test_two_members_are_patient_with_each_other_and_nothing_shortens_that(pair):
    pair.tick(0.0)
    pair.doubt("a", 0.3)
    asked, lost_s = fall_silent(pair, 4.0, answers=[0.45])
    assert asked
    assert lost_s == pytest.approx(PAIR_PATIENCE_S, abs=0.02)


def test_a_peer_that_joins_two_ends_their_patience(pair):
    pair.pairs_with("")
    assert fall_silent(pair, 2.0, answers=[])[1] == pytest.approx(SUSPECT_AFTER_S, abs=0.02)
    assert pair.hold_until_s("a") == 0.0


def test_what_a_refusal_proves_counts_from_the_last_ping_that_was_answered(pair):
    assert pair.proof_until_s("a") == float("-inf")
    pair.received("a", Pong(sent_s=1.0), 1.9)
    pair.received("a", Ping(sent_s=1.0), 2.0)  # It speaks; that it hears us is not known.
    assert pair.proof_until_s("a") == 1.0 + PAIR_PROOF_S
    assert pair.hold_until_s("a") == 2.0 + PAIR_PATIENCE_S


def test_clocks_may_drift_by_some_percent_before_a_proof_is_too_late():
    assert PAIR_PROOF_S < 0.95 * PAIR_PATIENCE_S


def test_what_was_heard_after_a_stall_gets_no_more_time_for_it(liveness):
    """Seed 7006434 of two nodes: one that was stopped for 24 s held a dead one for as long again."""
    liveness.pairs_with("a")
    liveness.tick(0.0)
    liveness.received("a", Ping(sent_s=0.0, stall_s=0.0), 24.0)
    liveness.tick(24.0)
    assert liveness.hold_until_s("a") == 24.0 + PAIR_PATIENCE_S
