"""Nodes find each other by their cluster's name: in namespaces at a switch, where multicast works as on a LAN."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from lan import CHAOSNET, Machines, needs_namespaces

from chaosnet.node.keys import KeyPair, save

pytestmark = pytest.mark.realtime

SCRIPT = Path(__file__).parents[2] / "examples" / "endless.py"
Main = Callable[..., tuple[int, str, str]]


@pytest.fixture
def lan(tmp_path: Path) -> Iterator[Machines]:
    """Three machines at one switch."""
    machines = Machines(tmp_path)
    try:
        machines.switch("sw")
        for number, name in enumerate("abc"):
            machines.add(name)
            machines.wire(name, "sw", f"10.99.0.{number + 1}/24")
        yield machines
    finally:
        machines.down()


def members(lan: Machines, machine: str) -> list[str]:
    """As `chaosnet status` tells there, without an address."""
    env = {**os.environ, "CHAOSNET_STATE_DIR": str(lan.folder / machine)}
    command = lan.inside(machine, *CHAOSNET, "status", "--json", "--key", str(lan.folder / "key"))
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    return sorted(row["node"] for row in json.loads(done.stdout)["members"] if row["state"] == "active")


@needs_namespaces
@pytest.mark.slow
def test_one_command_on_all_machines_of_a_network_makes_one_cluster(lan: Machines) -> None:
    save(KeyPair.new(), lan.folder / "key")
    save(KeyPair.new(), lan.folder / "other")
    words = ("--cluster", "lab", "--key", str(lan.folder / "key"))
    for machine in "ab":  # In the same second.
        lan.node(machine, *words, script=SCRIPT)
    lan.node("c", "--cluster", "lab", "--key", str(lan.folder / "other"), script=SCRIPT)
    for machine in "ab":
        lan.says(machine, "now 2 members")
    assert sum("founds a cluster; join" in lan.log(machine).read_text() for machine in "ab") == 1
    lan.says("c", "c founds a cluster; join")  # Its key is another: a name is no permission.
    assert (
        "says that it is in 'lab', too, but its key is none that this node knows" in lan.log("c").read_text()
    )
    lan.processes["c"].send_signal(signal.SIGINT)
    assert lan.processes["c"].wait(30) == 0, lan.story()
    lan.node("c", *words, script=SCRIPT)
    lan.says("c", "now 3 members")
    assert members(lan, "b") == ["a", "b", "c"]
    assert "founds a cluster; join" not in lan.log("c").read_text()


# --- what it needs ---


def test_without_the_package_the_command_says_which_to_install(
    chaosnet: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.setitem(sys.modules, "zeroconf", None)
    monkeypatch.setattr("chaosnet.extras.find_spec", lambda name: None)
    code, _, err = chaosnet("run", "--cluster", "lab", str(tmp_path / "train.py"))
    assert code == 2
    assert err == (
        "error: --cluster: to look for 'lab' on the local network needs zeroconf, which is not installed "
        "(pip install 'chaosnet[lan]')\n"
    )
