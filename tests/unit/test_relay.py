"""`chaosnet.protocols.relay`: envelopes find their way hop by hop."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.protocols.effects import Transmit
from chaosnet.protocols.messages import EVERYONE, Envelope, Expelled, Farewell, Report
from chaosnet.protocols.relay import LIVES_KEPT, ONE_LIFE, SEEN_PER_SOURCE, Relay

BODY = Farewell(node="x")


def envelope(source, target, serial=1, body=BODY):
    return Envelope(source=source, target=target, serial=serial, body=body)


@pytest.fixture
def relay():
    relay = Relay("me", first_serial=100)
    for peer in ("a", "b", "c"):
        relay.opened(peer, client=False)
    return relay


def peers(effects):
    return [effect.peer for effect in effects]


def test_a_direct_peer_is_sent_to_directly(relay):
    assert relay.send("b", BODY) == [Transmit("b", envelope("me", "b", 101))]


def test_an_envelope_whose_way_is_unknown_is_flooded(relay):
    assert peers(relay.send("far", BODY)) == ["a", "b", "c"]


def test_what_passes_teaches_the_way_back(relay):
    relay.receive("b", envelope("far", "me"))
    assert peers(relay.send("far", BODY)) == ["b"]


def test_the_first_copy_came_the_quickest_way(relay):
    relay.receive("b", envelope("far", "me"))
    relay.receive("c", envelope("far", "me"))
    assert peers(relay.send("far", BODY)) == ["b"]


def test_a_closed_connection_unlearns_the_ways_through_it(relay):
    relay.receive("b", envelope("far", "me"))
    relay.closed("b")
    assert peers(relay.send("far", BODY)) == ["a", "c"]


def test_an_envelope_is_delivered_once(relay):
    assert relay.receive("a", envelope("far", "me")) == (True, [])
    assert relay.receive("b", envelope("far", "me")) == (False, [])


def test_a_broadcast_is_taken_and_passed_on_to_all_but_where_it_came_from(relay):
    ours, effects = relay.receive("a", envelope("far", EVERYONE))
    assert ours
    assert peers(effects) == ["b", "c"]
    assert relay.receive("b", envelope("far", EVERYONE)) == (False, [])


def test_ones_own_broadcast_reaches_oneself_locally_and_does_not_echo(relay):
    relay.send(EVERYONE, BODY)
    assert relay.local == [BODY]
    assert relay.receive("a", envelope("me", EVERYONE, 101)) == (False, [])


def test_a_message_to_oneself_stays_here(relay):
    assert relay.send("me", BODY) == []
    assert relay.local == [BODY]


def test_floods_do_not_go_to_clients(relay):
    relay.opened("client", client=True)
    assert peers(relay.send("far", BODY)) == ["a", "b", "c"]
    assert peers(relay.send("client", Expelled(node="client", reason=""))) == ["client"]


def arrives(relay, serial):
    return relay.receive("a", envelope("far", "me", serial))[0]


def test_what_is_remembered_is_bounded(relay):
    for serial in range(3 * SEEN_PER_SOURCE):
        assert arrives(relay, serial)
    assert [bits.bit_length() for _, bits in relay.seen["far"].windows] == [SEEN_PER_SOURCE]
    for life in range(2 * LIVES_KEPT):
        assert arrives(relay, life * ONE_LIFE + 10**9)
    assert len(relay.seen["far"].windows) == LIVES_KEPT


@given(st.permutations(range(SEEN_PER_SOURCE // 8)))
def test_envelopes_that_overtake_each_other_arrive_once_each(serials):
    relay = Relay("me", first_serial=0)
    assert all(arrives(relay, serial) for serial in serials)
    assert not any(arrives(relay, serial) for serial in serials)


@pytest.mark.parametrize("later", [10**12, 10])
def test_a_process_started_again_is_heard_even_if_its_clock_was_put_back(relay, later):
    assert arrives(relay, 10**8)
    assert arrives(relay, later)
    assert arrives(relay, 10**8 + 1)  # Late, of the life before.
    heard = [
        serial
        for serial in (later - 1, later, 10**8, 10**8 + 1, 10**8 + 2)
        if not relay.is_new(envelope("far", "me", serial))
    ]
    assert heard == [later, 10**8, 10**8 + 1]
    assert not arrives(relay, later)
    assert not arrives(relay, 10**8)


def test_what_is_older_than_all_that_is_remembered_of_its_life_does_not_flood_again(relay):
    """Nodes that were seconds late passed it on to each other for ever, and so became later still."""
    for serial in (10**8, 10**8 + 2 * SEEN_PER_SOURCE):
        assert arrives(relay, serial)
    for serial in (10**8 + 1, 10**8):
        assert not arrives(relay, serial) and not relay.is_new(envelope("far", "me", serial))
    assert arrives(relay, 10**8 + 2 * SEEN_PER_SOURCE - 1)


def test_serials_of_three_lives_that_flood_at_once_are_each_heard_once(relay):
    serials = [1, 10**9, 10**12]  # Set back, told of its earlier life, and what that had sent before.
    assert [arrives(relay, serial) for serial in serials * 3] == [True] * 3 + [False] * 6


def test_over_any_overlay_a_message_arrives_exactly_once():
    links = [("a", "b"), ("b", "c"), ("c", "d"), ("d", "a"), ("b", "d"), ("d", "e")]
    relays = {name: Relay(name, 0) for name in "abcde"}
    for one, other in links:
        relays[one].opened(other, client=False)
        relays[other].opened(one, client=False)
    under_way = [("a", effect) for effect in relays["a"].send("e", BODY)]
    delivered = []
    while under_way:
        sender, effect = under_way.pop()
        ours, passed_on = relays[effect.peer].receive(sender, effect.message)
        delivered += [effect.peer] if ours else []
        under_way += [(effect.peer, each) for each in passed_on]
    assert delivered == ["e"]


def test_nothing_takes_a_link_that_may_be_dead_as_its_only_way(relay):
    relay.silent.add("a")
    assert peers(relay.send("a", BODY)) == ["a", "b", "c"]
    relay.silent.discard("a")
    assert peers(relay.send("a", BODY)) == ["a"]


def test_what_goes_around_a_link_takes_all_others(relay):
    relay.opened("client", client=True)
    assert peers(relay.around("a", BODY)) == ["b", "c"]


def test_a_report_is_never_flooded(relay):
    report = Report(node="me", step=1)
    assert peers(relay.send("far", report)) == []
    relay.by_view = ("far", "c")
    assert peers(relay.send("far", report)) == ["c"]
    relay.receive("b", envelope("far", "me"))
    assert peers(relay.send("far", report)) == ["b"]
    assert peers(relay.receive("c", envelope("x", "further", body=report))[1]) == []
