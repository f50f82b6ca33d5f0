"""`greeting`, `endpoint` and `interfaces`: what strangers say, and what this machine does not tell."""

import asyncio

import psutil
import pytest
import zmq

from chaosnet.node import interfaces
from chaosnet.node.endpoint import refuses
from chaosnet.node.transport.greeting import MAX_WORDS_BYTES, introduces, parse_hello
from chaosnet.node.transport.link import Conn, PeerLink
from chaosnet.protocols.errors import MalformedMessage


def test_a_first_word_that_is_too_long_for_a_hello_is_not_unpacked(monkeypatch):
    monkeypatch.setattr(
        "chaosnet.node.transport.greeting.decode", lambda data: pytest.fail("it was unpacked")
    )
    long = b"\x90" * (MAX_WORDS_BYTES + 1)
    with pytest.raises(MalformedMessage, match="the first item has 4097 bytes"):
        parse_hello([zmq.Frame(b""), zmq.Frame(long)])
    assert not introduces(Conn(None, False, PeerLink(False, "")), long)


@pytest.mark.parametrize("address", ["a..b:5555", "x" * 64 + ":5555", "a\0b:5555"])
def test_a_name_that_no_host_can_have_refuses_nothing(address):
    assert asyncio.run(refuses(address, 1.0)) is False


def test_what_the_kernel_does_not_tell_is_left_out(monkeypatch):
    def missing(*args, **options):
        raise FileNotFoundError("/sys/class/power_supply")

    monkeypatch.setattr(psutil, "sensors_battery", missing)
    monkeypatch.setattr(psutil, "net_io_counters", missing)
    assert interfaces.battery_pct() == -1.0
    assert interfaces.traffic() == interfaces.Traffic(0, 0)
