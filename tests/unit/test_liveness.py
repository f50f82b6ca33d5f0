"""`chaosnet.protocols.liveness`: heartbeats judge links, and busy machines are not dead."""

import pytest

from chaosnet.protocols.effects import Transmit
from chaosnet.protocols.liveness import (
    PING_EVERY_S,
    PROBE_PATIENCE_S,
    PROOF_WINDOW_S,
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
        lost, _ = liveness.tick(now_s)
        if lost:
            return lost, now_s
        now_s += every_s
    return [], now_s


def test_a_ping_goes_out_every_quarter_of_a_second(liveness):
    assert liveness.tick(0.0) == ([], [Transmit("a", Ping(sent_s=0.0))])
    assert liveness.tick(0.1) == ([], [])
    assert liveness.tick(PING_EVERY_S) == ([], [Transmit("a", Ping(sent_s=PING_EVERY_S))])


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
    lost, _ = liveness.tick(60.0)  # SIGSTOP, SIGCONT.
    assert lost == []


def test_our_own_pause_is_told_to_others_and_forgotten_after_a_while(liveness):
    liveness.tick(0.0)
    _, [ping] = liveness.tick(3.0)
    assert ping.message.stall_s == pytest.approx(3.0 - PING_EVERY_S)
    liveness.received("a", Pong(sent_s=3.0), 3.0)
    liveness.stalled_at_s -= STALL_MEMORY_S
    [pong] = liveness.received("a", Ping(sent_s=3.0), 3.1)
    assert pong.message.stall_s == 0.0


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
    assert min(PROBE_PATIENCE_S, SUSPECT_AFTER_S) > PROOF_WINDOW_S


def test_the_round_trip_time_is_the_best_lately(liveness):
    for sent_s, now_s in [(0.0, 0.020), (1.0, 1.010), (2.0, 2.100)]:
        liveness.received("a", Pong(sent_s=sent_s), now_s)
    assert liveness.peers["a"].rtt_s == pytest.approx(0.0105)


def test_a_closed_connection_is_watched_no_longer(liveness):
    liveness.closed("a")
    assert liveness.wake_at_s is None
    assert liveness.tick(100.0) == ([], [])
