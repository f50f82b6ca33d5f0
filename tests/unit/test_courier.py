"""`chaosnet.protocols.courier`: tensors from one member to another."""

import pytest

from chaosnet.protocols.courier import MOST_EARLY, Courier, first_hops
from chaosnet.protocols.effects import FellBehind, HandOver, PassOn
from chaosnet.protocols.errors import RemoteProtocolError
from chaosnet.protocols.events import Received, TensorMade
from chaosnet.protocols.messages import Member, Tensor, View


def view(seq, members="abcd", links=("ab", "bc", "cd"), observers=""):
    return View(
        term=1,
        seq=seq,
        scheduler="a",
        members=tuple(Member(id=each) for each in members),
        observers=tuple(Member(id=each) for each in observers),
        links=tuple(tuple(each) for each in links),
    )


def tensor(target, seq=1, step=0):
    return Tensor(key=(1, seq), step=step, target=target, way="a", micro_batch=0, layer=1)


@pytest.fixture
def courier():
    courier = Courier("b")
    assert courier.enter(view(1)) == []
    yield courier
    courier.check_invariants()


def test_ours_go_to_the_neighbour_that_is_next_on_the_way(courier):
    message = tensor("d")
    assert courier.handle(TensorMade(message, "bytes"), 0.0) == [PassOn("c", message, "bytes")]


def test_one_for_us_is_handed_over_and_one_for_others_passed_on(courier):
    for_us, for_a = tensor("b"), tensor("a")
    assert courier.handle(Received("c", for_us, "x"), 0.0) == [HandOver(for_us, "x")]
    assert courier.handle(Received("c", for_a, "y"), 0.0) == [PassOn("a", for_a, "y")]


def test_one_to_ourselves_needs_no_link(courier):
    message = tensor("b")
    assert courier.handle(TensorMade(message, "x"), 0.0) == [HandOver(message, "x")]


def test_one_of_a_later_view_waits_until_we_act_in_it(courier):
    ahead = tensor("d", seq=2)
    assert courier.handle(Received("a", ahead, "x"), 0.0) == []
    assert courier.enter(view(2)) == [PassOn("c", ahead, "x")]


def test_one_of_an_earlier_view_is_void(courier):
    courier.enter(view(2))
    assert courier.handle(Received("a", tensor("b", seq=1), "x"), 0.0) == []


def test_who_is_no_member_is_no_target(courier):
    with pytest.raises(RemoteProtocolError, match="no way to 'z'"):
        courier.handle(Received("a", tensor("z"), "x"), 0.0)


def test_what_waits_for_later_views_is_bounded(courier):
    for _ in range(MOST_EARLY):
        courier.handle(Received("a", tensor("b", seq=9), "x"), 0.0)
    assert courier.handle(Received("a", tensor("b", seq=9), "x"), 0.0) == [FellBehind("a")]


def test_ways_lead_through_members_only():
    links = ("ao", "bo", "bc", "ac")
    assert first_hops(view(1, "abc", links, observers="o"), "a") == {"c": "c", "b": "c"}


def test_every_hop_is_nearer_to_the_target():
    links = ("ab", "ac", "bd", "cd", "de")
    ring = view(1, "abcde", links)
    for start in "abcd":
        at, passed = start, [start]
        while at != "e":
            at = first_hops(ring, at)["e"]
            passed.append(at)
        assert len(passed) == len(set(passed)) <= 4
