"""`chaosnet soak`: how it asks its nodes."""

from types import SimpleNamespace

from chaosnet import client
from chaosnet.trials.soak import Soak, Wanted


def test_nodes_of_a_testbed_are_asked_without_a_key_whatever_the_user_has(tmp_path, monkeypatch):
    """A link needs a key at both ends, or at none."""
    found, asked = object(), []
    monkeypatch.setattr(client, "status", lambda address, **how: (asked.append((address, how)), found)[1])
    soak = Soak(tmp_path, Wanted(every_s=1.0), say=print)
    soak.processes["n0"] = SimpleNamespace(
        address="127.0.0.1:5555", life=SimpleNamespace(joined=True, node="n0"), stopped=False
    )
    soak._ask()
    ((address, how),) = asked
    assert soak.status is found and address == "127.0.0.1:5555"
    assert how.get("keys", "user") is None
    assert soak.testbed.kind == "relay", "whose nodes use none"
