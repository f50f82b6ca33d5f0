"""`chaosnet.protocols.healing`: links that went silent are tried again, and asked for once they carry."""

import pytest

from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.effects import CheckReach
from chaosnet.protocols.healing import CALM_S, FIRST_WAIT_S, MAX_WAIT_S, LostLinks
from chaosnet.protocols.messages import ConnectLinkRequest, Member, View
from chaosnet.protocols.relay import Relay

WITHOUT = (("b", "c"),)
WITH = (("a", "b"), ("b", "c"))


def view(links, members="abc"):
    told = tuple(Member(id=each, addresses=(f"{each}:1",)) for each in members)
    return View(term=1, seq=2, scheduler="b", members=told, links=links)


@pytest.fixture
def lost():
    relay = Relay("a", 0)
    relay.opened("x", client=False)
    links = LostLinks("a", relay, AddressBook())
    links.lost("b", 0.0)
    links.entered(view(WITHOUT))
    return links


def test_it_looks_again_after_a_while_and_again(lost):
    assert lost.wake_at_s == FIRST_WAIT_S
    assert lost.tick(view(WITHOUT), FIRST_WAIT_S - 0.1) == []
    assert lost.tick(view(WITHOUT), FIRST_WAIT_S) == [CheckReach("b:1")]
    assert lost.wake_at_s == 2 * FIRST_WAIT_S


def test_an_answer_is_a_request_to_connect_the_link_again(lost):
    [sent] = lost.reached("b", view(WITHOUT))
    assert sent.message.body == ConnectLinkRequest(a="a", b="b", asker="a", healed=True)
    assert lost.reached("c", view(WITHOUT)) == []  # That one was never lost.


def test_a_link_that_is_back_is_tried_no_more(lost):
    lost.relay.opened("b", client=False)
    lost.entered(view(WITH))
    assert lost.wake_at_s is None
    assert lost.reached("b", view(WITH)) == []


def test_each_loss_doubles_the_wait_until_the_link_was_calm_for_long(lost):
    waits = []
    for now_s in range(10, 100, 10):
        lost.lost("b", float(now_s))
        waits.append(lost.wake_at_s - now_s)
    assert waits == [2.0, 4.0, 8.0, 16.0, 32.0] + [MAX_WAIT_S] * 4
    lost.lost("b", 90.0 + CALM_S)
    assert lost.wake_at_s == 90.0 + CALM_S + FIRST_WAIT_S


def test_a_node_that_has_gone_is_not_waited_for(lost):
    lost.entered(view((), members="ac"))
    assert lost.by_peer == {}


def test_each_request_in_vain_doubles_the_wait_and_is_made_once(lost):
    now_s, waits = FIRST_WAIT_S, []
    for _ in range(8):
        lost.tick(view(WITHOUT), now_s)
        waits.append(lost.wake_at_s - now_s)
        assert len(lost.reached("b", view(WITHOUT))) == 1
        assert lost.reached("b", view(WITHOUT)) == []  # It answered at another address, too.
        now_s = lost.wake_at_s
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, MAX_WAIT_S, MAX_WAIT_S]


def test_there_is_always_a_next_time(lost):
    lost.tick(view(WITH, "ac"), FIRST_WAIT_S)
    assert lost.wake_at_s > FIRST_WAIT_S
