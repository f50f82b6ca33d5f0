"""`chaosnet.protocols.early`: what is ahead of a node waits until it has come there."""

import pytest

from chaosnet.protocols.early import EARLY_STEPS, Early
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import Contribution, Down, Ready, Up

MOST = 2 * EARLY_STEPS  # Of steps with one chunk.


def down(key, step, peer="a"):
    return Received(peer, Down(key=key, step=step, chunk=0, weight=1.0), None)


@pytest.fixture
def early():
    return Early(chunks=1, result_bytes=0)


def test_messages_come_back_in_their_order_once(early):
    events = [down((1, 2), step, peer) for step, peer in ((3, "a"), (2, "b"), (4, "a"))]
    assert all(early.keep(event) for event in events)
    assert early.take() == events
    assert early.take() == []


def test_a_peer_that_is_too_far_ahead_in_one_view_costs_nothing_of_a_later_one(early):
    later = [
        Received("b", Up(key=(1, 6), step=9, chunk=0, weight=1.0), None),
        Received("b", Ready(key=(1, 6), step=9, vote=None, contribution=Contribution()), None),
        down((1, 6), 9),
    ]
    assert all(early.keep(event) for event in later)
    assert all(early.keep(down((1, 2), step)) for step in range(MOST - 1))
    assert not early.keep(down((1, 2), MOST))
    early.check_invariants()
    assert early.take() == later


@pytest.mark.parametrize("last", [(1, 2), (1, 6)])
def test_the_oldest_view_goes_whichever_message_is_too_much(early, last):
    for step in range(MOST):
        early.keep(down((1, 6) if step == 0 else (1, 2), step))
    assert not early.keep(down(last, MOST))
    assert {event.message.key for event in early.take()} == {(1, 6)}
