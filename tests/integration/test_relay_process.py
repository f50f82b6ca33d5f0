"""`chaosnet.netem.relay_process`: what waits in it is bounded."""

import socket
import threading
import time

import pytest

from chaosnet.netem import LinkSpec, Topology
from chaosnet.netem.relay_process import HOST, LOOK_S, Relays

pytestmark = pytest.mark.realtime


@pytest.fixture
def server():
    with socket.create_server((HOST, 0)) as server:
        yield server


def entry(server):
    relays = Relays(Topology({("a", "b"): LinkSpec(rate_mbit=100.0)}))
    return relays, relays.enter("a", "b", server.getsockname()[1])


def test_who_gives_up_connecting_over_a_cut_link_leaves_nothing(server):
    relays, port = entry(server)
    relays.lines["a", "b"].set_cut(True)
    before = threading.active_count()
    for _ in range(10):
        with socket.create_connection((HOST, port)) as connection:
            connection.sendall(b"hello")
    time.sleep(5 * LOOK_S)
    assert threading.active_count() == before


def test_a_receiver_that_does_not_read_holds_up_its_sender(server):
    _, port = entry(server)
    with socket.create_connection((HOST, port)) as connection:
        connection.settimeout(0.5)
        taken, until_s = 0, time.monotonic() + 3.0
        with pytest.raises(TimeoutError):
            while time.monotonic() < until_s:
                taken += connection.send(bytes(1 << 16))
    assert taken < 20e6


def test_a_receiver_that_dies_with_much_under_way_leaves_nothing(server):
    _, port = entry(server)
    before = set(threading.enumerate())
    with socket.create_connection((HOST, port)) as connection:
        taker, _ = server.accept()
        connection.settimeout(0.5)
        with pytest.raises(TimeoutError):
            while True:
                connection.send(bytes(1 << 16))
        taker.close()
        connection.settimeout(10.0)
        with pytest.raises(OSError, match=r"reset|pipe"):
            while True:
                connection.send(bytes(1 << 16))
        until_s = time.monotonic() + 5.0
        while set(threading.enumerate()) - before and time.monotonic() < until_s:
            time.sleep(0.05)
        assert not set(threading.enumerate()) - before
