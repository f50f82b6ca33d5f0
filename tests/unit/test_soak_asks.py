"""`chaosnet soak`: how it asks its nodes."""

from types import SimpleNamespace

import pytest

from chaosnet import ConfigError, client
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


def test_links_with_a_rate_need_root(tmp_path, monkeypatch):
    monkeypatch.setattr("os.geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="--rate: network namespaces need root"):
        Soak(tmp_path, Wanted(rate_mbit=200.0), say=print)
