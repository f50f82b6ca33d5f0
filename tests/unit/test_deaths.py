"""A broken connection proves a death only if the machine refuses another one at once."""

import pytest

from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.deaths import PROOF_S, Deaths
from chaosnet.protocols.effects import CheckReach
from chaosnet.protocols.events import NotReached, Reached


@pytest.fixture
def deaths():
    book = AddressBook()
    book.reached("b", "b:1")
    return Deaths(book)


def test_a_refusal_is_a_proof(deaths):
    assert deaths.broke("b", 5.0) == [CheckReach("b:1")]
    assert deaths.handle(NotReached("b:1", "connection refused", refused=True)) == {"b": True}
    assert deaths.wake_at_s is None


@pytest.mark.parametrize("event", [NotReached("b:1", "timed out"), Reached("b:1", "b")])
def test_anything_else_is_none(deaths, event):
    deaths.broke("b", 5.0)
    assert deaths.handle(event) == {"b": False}


def test_what_is_not_known_in_time_is_no_proof_later(deaths):
    deaths.broke("b", 5.0)
    assert deaths.wake_at_s == 5.0 + PROOF_S
    assert deaths.overdue(5.0) == []
    assert deaths.overdue(5.0 + PROOF_S) == ["b"]
    assert deaths.handle(NotReached("b:1", "connection refused", refused=True)) == {}


def test_who_has_never_answered_us_anywhere_cannot_be_proven_dead(deaths):
    assert deaths.broke("c", 5.0) == []


def test_a_peer_that_is_back_is_not_looked_for(deaths):
    deaths.broke("b", 5.0)
    deaths.opened("b")
    assert deaths.overdue(9.0) == []


def test_other_answers_decide_nothing(deaths):
    deaths.broke("b", 5.0)
    assert deaths.handle(NotReached("c:1", "connection refused", refused=True)) == {}
    assert deaths.overdue(9.0) == ["b"]
