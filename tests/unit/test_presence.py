"""`chaosnet.discovery.presence`: what a node announces once it is in another network."""

from types import SimpleNamespace
from typing import ClassVar

import pytest

from chaosnet.discovery import presence
from chaosnet.discovery.lan import Announced
from chaosnet.discovery.presence import Presence

HOME, CAFE = ("10.0.0.7:5555",), ("192.168.1.7:5555",)


class Lan:
    """Notes what it announces, and whether it still does."""

    made: ClassVar[list] = []

    def __init__(self, known, found, say):
        self.known, self.places, self.announces = known, known.mine.places, False
        self.made.append(self)

    def start(self):
        self.announces = True

    def stop(self):
        self.announces = False


@pytest.fixture
def watched(monkeypatch, tmp_path):
    """Returns: what is announced after each look, given the addresses that each of them finds."""
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(presence, "Lan", Lan)
    monkeypatch.setattr(presence.threading, "Thread", lambda **_: SimpleNamespace(start=lambda: None))
    monkeypatch.setattr(Lan, "made", [])

    def looks(*found, ids=()):
        settings = SimpleNamespace(listen="0.0.0.0:0", cluster_name="lab", allowed_keys=())
        in_cluster = iter(ids)
        transport = type("Transport", (), {"cluster": property(lambda _: next(in_cluster, ""))})()
        loop = SimpleNamespace(transport=transport)
        node = Presence(SimpleNamespace(name="n", addresses=HOME, settings=settings, say=print, loop=loop))
        node.begin()
        seen, left = [], [*found]
        announced = lambda: [each.places for each in Lan.made if each.announces]  # noqa: E731
        monkeypatch.setattr(presence.interfaces, "reached_at", lambda listen: left.pop(0))
        monkeypatch.setattr(node._over, "wait", lambda timeout_s: seen.append(announced()) or not left)
        node._watch()
        node.end()
        assert announced() == []
        return seen[1:]

    return looks


def test_a_node_that_has_come_into_another_network_is_announced_there(watched):
    """Who was started there heard of addresses at which nobody was, and founded a second cluster."""
    assert watched(HOME, (), CAFE, CAFE, HOME) == [[HOME], [HOME], [CAFE], [CAFE], [HOME]]
    assert len(Lan.made) == 3


def test_a_node_announces_in_which_cluster_it_is_once_it_is_in_one(watched):
    watched(HOME, HOME, HOME, ids=("", "", "5eed", "5eed"))
    assert [each.known.mine.id for each in Lan.made] == ["", "5eed"]
    first, second = (each.known for each in Lan.made)
    news = [
        known.meet(Announced("lab", "x", "", ("10.0.0.9:81",), "0dd"))[1] for known in (first, second, second)
    ]
    assert [bool(each) for each in news] == [False, True, False]
