"""`chaosnet.protocols.connect_link` and `disconnect_link`: the two ends of Fig. 4c and 4d."""

import pytest

from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.connect_link import OPEN_PATIENCE_S, OTHER_END_S, LinkOpener
from chaosnet.protocols.disconnect_link import LinkCloser
from chaosnet.protocols.effects import ClosePeer, Dial
from chaosnet.protocols.messages import Member, PrepareFailed, View
from chaosnet.protocols.relay import Relay


def view(*links, seq=2, nat=""):
    members = tuple(Member(id=each, addresses=() if each in nat else (f"{each}:1",)) for each in "abc")
    return View(term=1, seq=seq, scheduler="a", members=members, links=links)


def opener(me, *open_peers):
    relay = Relay(me, 0)
    for peer in open_peers:
        relay.opened(peer, client=False)
    return LinkOpener(me, relay, AddressBook())


def test_the_smaller_id_dials():
    assert opener("a", "c").prepare(view(("a", "b"), ("a", "c")), 0.0) == [Dial("b:1")]
    assert opener("b", "c").prepare(view(("a", "b"), ("b", "c")), 0.0) == []


def test_the_other_end_dials_too_if_that_takes_long():
    late = opener("b")
    late.prepare(view(("a", "b")), 0.0)
    assert late.wake_at_s == OTHER_END_S
    assert late.tick(OTHER_END_S - 0.01) == []
    assert late.tick(OTHER_END_S) == [Dial("a:1")]
    assert late.tick(OTHER_END_S + 0.1) == []  # It was dialled.
    assert late.wake_at_s == OPEN_PATIENCE_S


def test_who_cannot_be_dialled_dials_itself():
    assert opener("a").prepare(view(("a", "b"), nat="b"), 0.0) == []
    behind_nat = opener("b")
    behind_nat.prepare(view(("a", "b"), nat="b"), 0.0)
    assert behind_nat.tick(OTHER_END_S) == [Dial("a:1")]


def test_the_view_is_ready_when_all_its_links_are_open():
    one = opener("a", "c")
    wanted = view(("a", "b"), ("a", "c"))
    one.prepare(wanted, 0.0)
    assert one.ready is None
    one.relay.opened("b", client=False)
    assert one.ready == wanted
    one.done()
    assert (one.ready, one.wake_at_s) == (None, None)


def test_a_link_that_will_not_open_is_reported_with_the_reason():
    one = opener("a", "c")
    one.prepare(view(("a", "b"), ("a", "c")), 0.0)
    one.dial_failed("b:1", "connection refused")
    [effect] = one.tick(OPEN_PATIENCE_S)
    assert effect.message.body == PrepareFailed(
        key=(1, 2), node="a", link=("a", "b"), reason="b:1: connection refused"
    )
    assert one.ready is None


def test_a_newer_proposal_replaces_the_one_under_way():
    one = opener("a")
    one.prepare(view(("a", "b")), 0.0)
    assert one.prepare(view(("a", "c"), seq=3), 1.0) == [Dial("c:1")]
    assert one.wake_at_s == 1.0 + OPEN_PATIENCE_S


@pytest.fixture
def closer():
    closer = LinkCloser("a")
    closer.switched(None, view(("a", "b"), ("a", "c")))
    return closer


def test_a_link_that_is_no_longer_in_the_view_is_closed_one_step_later(closer):
    closer.switched(view(("a", "b"), ("a", "c")), view(("a", "c"), seq=3))
    assert closer.settled({"b", "c"}, set()) == [ClosePeer("b", "the link was disconnected")]
    assert closer.settled({"b", "c"}, set()) == []


def test_a_link_that_comes_back_before_that_stays_open(closer):
    closer.switched(view(("a", "b"), ("a", "c")), view(("a", "c"), seq=3))
    closer.switched(view(("a", "c"), seq=3), view(("a", "b"), ("a", "c"), seq=4))
    assert closer.settled({"b", "c"}, set()) == []


def test_a_link_that_we_have_voted_for_stays_open(closer):
    """Seed 392245: it was closed as that of an earlier view, and was missing in the next, again and again."""
    closer.switched(view(("a", "b"), ("a", "c")), view(("a", "c"), seq=3))
    assert closer.settled({"b", "c"}, {"b", "c"}) == []
    assert closer.settled({"b", "c"}, {"c"}) == [ClosePeer("b", "the link was disconnected")]


def test_a_connection_that_never_was_a_link_is_left_alone(closer):
    closer.switched(view(("a", "b"), ("a", "c")), view(("a", "b"), ("a", "c"), seq=3))
    assert closer.settled({"b", "c", "joiner"}, set()) == []


def test_a_link_to_a_later_process_of_a_neighbour_that_has_gone_stays_open(closer):
    """It is about to join; the view that drops its earlier life comes after its connection."""
    closer.switched(view(("a", "b"), ("a", "c")), view(("a", "c"), seq=3), reborn={"b"})
    assert closer.settled({"b", "c"}, set()) == []
