"""`chaosnet.node.interfaces`: what a node tells others of where it is, and whether that leads to it."""

import random
from types import SimpleNamespace

import psutil
import pytest

from chaosnet.node.agent.core import Agent, CoreSettings
from chaosnet.node.interfaces import advertised, reached_at, unheard
from chaosnet.protocols.effects import Transmit
from chaosnet.protocols.events import AddressesRead, PeerOpened
from chaosnet.protocols.messages import Envelope, ScaleOutRequest


@pytest.fixture
def interfaces(monkeypatch):
    """Sets the addresses of the one interface beside loopback, and whether it is up."""

    def are(*addresses, up=True):
        named = {"lo": ["127.0.0.1", "::1"], "eth0": [*addresses, "aa:bb:cc:dd:ee:ff"]}
        monkeypatch.setattr(
            psutil,
            "net_if_addrs",
            lambda: {
                name: [SimpleNamespace(address=each) for each in those] for name, those in named.items()
            },
        )
        isup = {"lo": SimpleNamespace(isup=True), "eth0": SimpleNamespace(isup=up)}
        monkeypatch.setattr(psutil, "net_if_stats", lambda: isup)

    return are


def test_all_interfaces_that_others_can_use_are_told(interfaces):
    interfaces("10.0.0.7", "169.254.1.1", "2001:db8::7", "fe80::1")
    assert advertised("0.0.0.0:5555") == ("10.0.0.7:5555",)
    assert advertised("[::]:5555") == ("10.0.0.7:5555", "[2001:db8::7]:5555")
    assert unheard("0.0.0.0:5555", ("10.0.0.7:5555",)) == ""


@pytest.mark.parametrize("addresses, up", [((), True), (("10.0.0.7",), False), (("169.254.1.1",), True)])
def test_without_a_network_it_says_that_only_this_machine_reaches_it(interfaces, addresses, up):
    interfaces(*addresses, up=up)
    told = advertised("0.0.0.0:5555")
    assert told == ("127.0.0.1:5555",)
    assert reached_at("0.0.0.0:5555") == ()
    assert "no network now: others are told 127.0.0.1:5555" in unheard("0.0.0.0:5555", told)


def test_on_a_network_of_ipv6_alone_it_says_how_to_listen_there(interfaces):
    """It was said that there is no network. With a cluster's name each node founded one."""
    interfaces("2001:db8::7")
    assert unheard("0.0.0.0:0", advertised("0.0.0.0:5555")).endswith("Start it again with --listen [::]:0")
    assert unheard("[::]:0", advertised("[::]:5555")) == ""


@pytest.mark.parametrize("listen", ["127.0.0.1:5555", "10.0.0.7:5555", ""])
def test_who_has_named_one_interface_or_none_means_it(interfaces, listen):
    interfaces()
    assert unheard(listen, advertised(listen)) == ""


def asked_with(effects):
    """The addresses in requests to be let in."""
    sent = (effect.message for effect in effects if isinstance(effect, Transmit))
    bodies = (each.body for each in sent if isinstance(each, Envelope))
    return [body.addresses for body in bodies if isinstance(body, ScaleOutRequest)]


def test_who_asks_to_be_let_in_tells_where_it_is_now():
    """A laptop that had come into another network was said to be one that can only dial."""
    joiner = Agent("j", CoreSettings(addresses=("10.0.0.7:5555",)), random.Random(0))
    joiner.join(("10.0.0.1:5555",), (), 2, False, 60.0, 0.0)
    for addresses in (("192.168.1.7:5555",), ()):  # Then there is no network for a moment.
        joiner.handle(AddressesRead(addresses), 0.5)
    opened = PeerOpened("a", "10.0.0.1:5555", dialled=True, at="10.0.0.1:5555")
    assert asked_with(joiner.handle(opened, 1.0)) == [("192.168.1.7:5555",)]
    assert joiner.settings.addresses == ("192.168.1.7:5555",)
    joiner.check_invariants()


def test_what_the_view_says_of_a_member_stays():
    founder = Agent("a", CoreSettings(addresses=("10.0.0.7:5555",)), random.Random(0))
    founder.found(0.0)
    assert founder.handle(AddressesRead(("192.168.1.7:5555",)), 1.0) == []
    assert founder.settings.addresses == founder.sync.view.members[0].addresses == ("10.0.0.7:5555",)
