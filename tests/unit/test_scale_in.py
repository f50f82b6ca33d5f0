"""`chaosnet.protocols.scale_in`: the leaver's half of Fig. 4b."""

import pytest

from chaosnet.protocols.events import LeaveWanted, Tick
from chaosnet.protocols.messages import ScaleInRequest
from chaosnet.protocols.relay import Relay
from chaosnet.protocols.scale_in import ASK_EVERY_S, PARKED_PATIENCE_S, Leaver, LeaverState


@pytest.fixture
def leaver():
    relay = Relay("me", 0)
    relay.opened("a", client=False)
    return Leaver("me", relay)


def bodies(effects):
    return [effect.message.body for effect in effects]


def test_it_asks_the_scheduler_wherever_that_is(leaver):
    assert bodies(leaver.handle(LeaveWanted(), 0.0)) == [ScaleInRequest(node="me")]
    assert leaver.relay.local == [ScaleInRequest(node="me")]  # It may be the scheduler itself.
    assert leaver.state is LeaverState.LEAVING


def test_it_asks_again_until_it_is_out(leaver):
    leaver.handle(LeaveWanted(), 0.0)
    assert leaver.handle(Tick(), ASK_EVERY_S - 0.1) == []
    assert bodies(leaver.handle(Tick(), ASK_EVERY_S)) == [ScaleInRequest(node="me")]
    leaver.left()
    assert leaver.wake_at_s is None
    assert leaver.handle(Tick(), 100.0) == []


def test_wanting_to_leave_twice_asks_once(leaver):
    leaver.handle(LeaveWanted(), 0.0)
    assert leaver.handle(LeaveWanted(), 0.1) == []


def test_it_does_not_wait_for_ever_for_a_cluster_that_is_parked(leaver):
    assert not leaver.overdue(100.0)
    leaver.handle(LeaveWanted(), 100.0)
    assert not leaver.overdue(100.0 + PARKED_PATIENCE_S - 0.1)
    assert leaver.overdue(100.0 + PARKED_PATIENCE_S)
