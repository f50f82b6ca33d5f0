"""A broken connection proves a death only if the machine refuses another one at once."""

import pytest

from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.deaths import PROOF_S, Deaths
from chaosnet.protocols.effects import CheckReach
from chaosnet.protocols.events import NotReached, Reached


@pytest.fixture
def deaths():
    book = AddressBook()
    book.reached("b", "b:1", "b:1")
    deaths = Deaths(book)
    deaths.said_where("b", life=7)
    return deaths


def test_a_refusal_is_a_proof(deaths):
    assert deaths.closed("b", True, 5.0) == [CheckReach("b:1")]
    assert deaths.handle(NotReached("b:1", "connection refused", refused=True), 5.0) == {"b": 7}
    assert deaths.wake_at_s is None


@pytest.mark.parametrize("event", [NotReached("b:1", "timed out"), Reached("b:1", "b")])
def test_anything_else_is_none(deaths, event):
    deaths.closed("b", True, 5.0)
    assert deaths.handle(event, 5.0) == {"b": None}


def test_a_refusal_where_it_does_not_listen_itself_is_none(deaths):
    """A tunnel has ended, perhaps."""
    assert deaths.closed("b", True, 5.0, proof_until_s=7.0, is_its_own=False) == []
    deaths.said_where("b", life=7)
    looks = deaths.closed("b", True, 5.0, proof_until_s=7.0, hold_until_s=8.0, is_its_own=False)
    assert looks == [CheckReach("b:1")]
    assert deaths.handle(NotReached("b:1", "connection refused", refused=True), 5.0) == {}
    assert deaths.overdue(8.0) == ["b"]


def test_what_is_not_known_in_time_is_no_proof_later(deaths):
    deaths.closed("b", True, 5.0)
    assert deaths.wake_at_s == 5.0 + PROOF_S
    assert deaths.overdue(5.0) == []
    assert deaths.overdue(5.0 + PROOF_S) == ["b"]
    assert deaths.handle(NotReached("b:1", "connection refused", refused=True), 5.0) == {}


def test_a_close_that_is_no_break_proves_nothing(deaths):
    assert deaths.closed("b", False, 5.0) == []


def test_over_a_connection_that_is_new_it_has_to_say_where_it_is_before_its_death_proves_anything(deaths):
    deaths.closed("b", False, 5.0)
    deaths.opened("b")
    assert deaths.closed("b", True, 6.0) == []


def test_who_has_never_answered_us_anywhere_cannot_be_proven_dead(deaths):
    assert deaths.closed("c", True, 5.0) == []


def test_a_peer_that_is_back_is_not_looked_for(deaths):
    deaths.closed("b", True, 5.0)
    deaths.opened("b")
    assert deaths.overdue(9.0) == []


def test_other_answers_decide_nothing(deaths):
    deaths.closed("b", True, 5.0)
    assert deaths.handle(NotReached("c:1", "connection refused", refused=True), 5.0) == {}
    assert deaths.overdue(9.0) == ["b"]
