"""`chaosnet.node.interfaces`: what a node tells others of where it is, and whether that leads to it."""

from types import SimpleNamespace

import psutil
import pytest

from chaosnet.node.interfaces import advertised, unheard


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
    assert "no network now: others are told 127.0.0.1:5555" in unheard("0.0.0.0:5555", told)


@pytest.mark.parametrize("listen", ["127.0.0.1:5555", "10.0.0.7:5555", ""])
def test_who_has_named_one_interface_or_none_means_it(interfaces, listen):
    interfaces()
    assert unheard(listen, advertised(listen)) == ""
