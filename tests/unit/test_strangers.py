"""`chaosnet.node.transport.strangers`: how many connections may stay unnamed, for how long, how often."""

import pytest
import zmq

from chaosnet.node.transport import strangers
from chaosnet.node.transport.strangers import (
    FAILURE_BURST,
    FAILURES_PER_S,
    HELLO_S,
    MAX_HOSTS,
    MAX_STRANGERS,
    MAX_STRANGERS_PER_HOST,
    Accepted,
    Door,
    Strangers,
    allow_many_descriptors,
)
from chaosnet.protocols.errors import ConfigError


def from_host(host: str, fd: int = 0, since_s: float = 0.0) -> Accepted:
    return Accepted(fd, (host, 1000 + fd), since_s)


def test_who_says_hello_is_no_stranger_any_more_and_nothing_is_counted():
    gate, one = Strangers(), from_host("10.0.0.1")
    assert gate.accepted(one, 0.0) == []
    gate.greeted(one)
    assert gate.overdue(HELLO_S + 1) == [] and not gate.ended(one, "gone", 20.0)
    assert not gate.refused and len(gate) == 0


def test_who_never_says_hello_must_go_in_time_and_is_counted_once():
    gate, one = Strangers(), from_host("10.0.0.1", since_s=5.0)
    gate.accepted(one, 5.0)
    assert gate.overdue(5.0 + HELLO_S - 0.1) == []
    assert gate.overdue(5.0 + HELLO_S) == [one]
    assert gate.overdue(6.0 + HELLO_S) == [] and not gate.ended(one, "gone", 20.0)
    assert gate.refused == {"no Hello in time": 1}


def test_the_oldest_of_a_host_makes_room_for_its_newest():
    gate = Strangers()
    first = [from_host("10.0.0.1", fd) for fd in range(MAX_STRANGERS_PER_HOST)]
    for each in [from_host("10.0.0.2"), *first]:
        assert gate.accepted(each, 0.0) == []
    assert gate.accepted(from_host("10.0.0.1", 999), 0.0) == [first[0]]
    assert len(gate) == MAX_STRANGERS_PER_HOST + 1, "the other host has kept its own"


def test_there_is_a_limit_to_all_hosts_together():
    gate = Strangers()
    for number in range(MAX_STRANGERS):
        assert gate.accepted(from_host(f"10.0.{number // 100}.{number % 100}"), 0.0) == []
    [gone] = gate.accepted(from_host("10.1.0.0"), 0.0)
    assert gone.host == "10.0.0.0" and len(gate) == MAX_STRANGERS


def test_a_host_that_fails_too_often_is_hung_up_on_and_gets_another_chance_later():
    gate, now_s = Strangers(), 0.0
    for number in range(int(FAILURE_BURST)):
        one = from_host("10.0.0.1", number)
        assert gate.accepted(one, now_s) == []
        gate.ended(one, "malformed", now_s)
    too_often = from_host("10.0.0.1", 999)
    assert gate.accepted(too_often, now_s) == [too_often]
    assert gate.accepted(from_host("10.0.0.2"), now_s) == [], "others are not to blame"
    assert gate.accepted(from_host("10.0.0.1", 1000), now_s + 1.5 / FAILURES_PER_S) == []
    assert gate.refused == {"malformed": FAILURE_BURST, "too often": 1}


def test_a_refused_key_is_counted_once_though_its_connection_ends_as_well():
    gate, one = Strangers(), from_host("10.0.0.1")
    gate.accepted(one, 0.0)
    gate.turned_away("10.0.0.1", "unknown key", 0.1)
    assert not gate.ended(one, "hung up", 0.2)
    assert gate.refused == {"unknown key": 1}


def test_what_is_remembered_of_hosts_is_bounded():
    gate = Strangers()
    for number in range(3 * MAX_HOSTS):
        one = from_host(f"host-{number}")
        gate.accepted(one, 0.0)
        gate.turned_away(one.host, "unknown key", 0.0)
        gate.ended(one, "gone", 0.0)
    assert len(gate._credit) <= MAX_HOSTS and not gate._by_host and not gate._turned_away


@pytest.fixture
def door(monkeypatch):
    monkeypatch.setattr(strangers, "peer_of", lambda fd: ("10.0.0.1", fd))
    return Door(keyed=True)


def test_the_reason_of_a_failed_handshake_is_that_of_the_connection_that_ends_next(door):
    for fd in (5, 6):
        door.event(zmq.EVENT_ACCEPTED, fd, 0.0)
    door.event(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, 0x11000002, 0.1)
    first = door.event(zmq.EVENT_DISCONNECTED, 6, 0.1)
    second = door.event(zmq.EVENT_DISCONNECTED, 5, 0.1)
    assert first.fd == 6 and door.ended(first, 0.2) == "no key"
    assert door.ended(second, 0.2) == "malformed, oversized or without a Hello"
    assert door.event(zmq.EVENT_DISCONNECTED, 5, 0.3) is None, "it was no connection any more"


def test_nobody_hangs_up_on_a_descriptor_that_is_another_connection_by_now(door, monkeypatch):
    ended = []
    monkeypatch.setattr(strangers, "hang_up", ended.append)
    door.event(zmq.EVENT_ACCEPTED, 5, 0.0)
    before = door.by_fd[5]
    door.event(zmq.EVENT_DISCONNECTED, 5, 0.1)
    door.event(zmq.EVENT_ACCEPTED, 5, 0.2)
    door.hang_up(before)
    assert not ended
    door.hang_up(door.by_fd[5])
    assert len(ended) == 1


def test_a_process_that_may_open_few_files_is_told_so_before_libzmq_ends_it(monkeypatch):
    """`Too many open files (src/ip_resolver.cpp:542)`, and SIGABRT; with a few more, when a neighbour dialled."""
    resource = pytest.importorskip("resource")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (40, 40))
    with pytest.raises(ConfigError, match=r"this process may open only 40 files \(expected 64 or more"):
        allow_many_descriptors()
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    allow_many_descriptors()
