"""`chaosnet.protocols.addresses`: the address that works, and joiners that nobody can dial."""

import pytest

from chaosnet.protocols.addresses import AddressBook, DialBacks
from chaosnet.protocols.effects import CheckReach, Transmit
from chaosnet.protocols.events import NotReached, Reached
from chaosnet.protocols.messages import DialBack, DialBackReply, Member

TWO = Member(id="b", addresses=("10.0.0.2:5", "192.168.0.2:5"))
ASKED = DialBack(addresses=TWO.addresses)


def test_all_addresses_are_tried_and_the_one_that_answered_comes_first():
    book = AddressBook()
    assert book.ways_to(TWO) == TWO.addresses
    book.reached("b", "192.168.0.2:5", "")
    assert book.ways_to(TWO) == ("192.168.0.2:5", "10.0.0.2:5")
    book.reached("b", "203.0.113.9:7000", "")  # As the user had typed it: a forwarded port.
    assert book.ways_to(TWO) == ("203.0.113.9:7000", *TWO.addresses)


def test_what_the_user_says_of_a_peer_is_all_that_is_tried():
    book = AddressBook({"b": "127.0.0.1:7001", "c": ""})
    assert book.ways_to(TWO) == ("127.0.0.1:7001",)
    assert book.ways_to(Member(id="c", addresses=("10.0.0.3:5",))) == ()
    assert book.ways_to(Member(id="d", addresses=("10.0.0.4:5",))) == ("10.0.0.4:5",)


def test_a_joiner_is_told_at_which_address_it_was_reached():
    dial_backs = DialBacks(AddressBook())
    assert dial_backs.asked("b", ASKED) == [CheckReach(each) for each in TWO.addresses]
    assert dial_backs.handle(NotReached("10.0.0.2:5", "no route")) == []
    assert dial_backs.handle(Reached("192.168.0.2:5", "b")) == [
        Transmit("b", DialBackReply(reached="192.168.0.2:5"))
    ]
    assert dial_backs.handle(Reached("192.168.0.2:5", "b")) == []


def test_a_joiner_is_told_why_none_of_its_addresses_leads_to_it():
    dial_backs = DialBacks(AddressBook())
    dial_backs.asked("b", ASKED)
    dial_backs.handle(Reached("10.0.0.2:5", "x"))
    assert dial_backs.handle(NotReached("192.168.0.2:5", "no answer in 1.5 s")) == [
        Transmit(
            "b",
            DialBackReply(
                reached="", reason="10.0.0.2:5: x answers there; 192.168.0.2:5: no answer in 1.5 s"
            ),
        )
    ]


def test_one_that_names_no_address_is_answered_at_once():
    [answer] = DialBacks(AddressBook()).asked("b", DialBack(addresses=()))
    assert answer.message == DialBackReply(reached="", reason="no way there is known")


def test_who_has_gone_is_not_answered():
    dial_backs = DialBacks(AddressBook())
    dial_backs.asked("b", ASKED)
    dial_backs.closed("b")
    assert dial_backs.handle(Reached("10.0.0.2:5", "b")) == []


def test_who_is_not_heard_over_the_open_link_is_not_told_that_it_cannot_be_dialled():
    dial_backs = DialBacks(AddressBook())
    dial_backs.asked("b", ASKED)
    dial_backs.handle(NotReached("10.0.0.2:5", "no answer in 1.5 s"), silent={"b"})
    assert dial_backs.handle(NotReached("192.168.0.2:5", "no answer in 1.5 s"), silent={"b"}) == []
    assert dial_backs.asked("b", ASKED)  # It may ask once more.


def test_who_asks_again_before_it_is_answered_adds_nothing():
    """Else anybody could make us scan ports."""
    dial_backs = DialBacks(AddressBook())
    dial_backs.asked("b", ASKED)
    assert dial_backs.asked("b", DialBack(addresses=("10.0.0.9:22",))) == []
    dial_backs.handle(Reached("10.0.0.2:5", "b"))
    assert dial_backs.asked("b", DialBack(addresses=("10.0.0.9:22",))) == [CheckReach("10.0.0.9:22")]


def test_who_is_neither_member_nor_connected_is_forgotten():
    book = AddressBook()
    for peer in "bc":
        book.reached(peer, f"{peer}:1", "")
    book.keep({"b"})
    assert book.answered == {"b": "b:1"}


@pytest.mark.parametrize(
    ("at", "named", "is_its_own"),
    [
        ("10.0.0.2:5", ("10.0.0.2:5",), True),
        ("key@10.0.0.2:5", ("other@192.168.0.2:5", "key@10.0.0.2:5"), True),
        ("127.0.0.1:5", ("10.0.0.2:5",), True),  # The transport has seen that it is on this machine.
        ("[::1]:5", (), True),
        ("10.0.0.9:5", ("10.0.0.2:5",), False),  # Another machine hands it on.
        ("10.0.0.2:6", ("10.0.0.2:5",), False),
        ("", ("10.0.0.2:5",), False),
    ],
)
def test_who_listens_where_it_answered(at, named, is_its_own):
    book = AddressBook()
    assert not book.is_its_own("b", named)
    book.reached("b", "as.typed:5", at)
    assert book.is_its_own("b", named) is is_its_own
