"""Nodes with several interfaces, and one that listens where nobody can reach it: for real, in namespaces."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from lan import Machines

from chaosnet.netem import LinkSpec, Topology
from chaosnet.netem.netns import Netns, run

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
    ),
]
SCRIPT = Path(__file__).parents[2] / "examples" / "endless.py"
CHAOSNET = [sys.executable, "-c", "from chaosnet.cli import main; main()"]


@pytest.fixture
def chain():
    """a - b - c; nothing leads from a to c, so c can be reached over b's other interface only."""
    topology = Topology({("a", "b"): LinkSpec(), ("b", "c"): LinkSpec()})
    testbed = Netns(f"n{os.getpid()}", topology, routes=False)
    testbed.up(topology)
    yield testbed
    testbed.down()


def start(testbed, node, listen):
    command = [*CHAOSNET, "run", str(SCRIPT)]
    return testbed.start(
        node, command, env={"CHAOSNET_LISTEN": listen}, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL
    )


def status(testbed, asked_from):
    at = testbed.environment(asked_from)["CHAOSNET_LISTEN"]
    command = [*CHAOSNET, "status", "--json", at]
    out, _ = testbed.start(
        asked_from, command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ).communicate()
    return json.loads(out) if out else {"members": [], "links": [], "events": []}


def until_members(testbed, count):
    deadline_s = time.monotonic() + 30.0
    while True:
        found = status(testbed, "a")
        active = {row["node"]: row for row in found["members"] if row["state"] == "active"}
        if len(active) == count:
            return active, found
        assert time.monotonic() < deadline_s, found
        time.sleep(0.2)


@pytest.mark.slow
def test_of_several_interfaces_the_one_that_leads_there_is_found(chain):
    for number, node in enumerate("abc"):
        start(chain, node, "0.0.0.0:5555")
        active, found = until_members(chain, number + 1)
    assert len(active["b"]["addresses"]) == 3  # Its own, and one on each link.
    assert active["b"]["neighbors"] == ["a", "c"]
    assert {event["kind"] for event in found["events"]}.isdisjoint({"unreachable"})


@pytest.mark.slow
def test_listening_where_nobody_can_reach_it_is_found_at_join_and_told(chain):
    start(chain, "a", chain.environment("a")["CHAOSNET_LISTEN"])
    until_members(chain, 1)
    start(chain, "b", "127.0.0.1:5555")
    active, found = until_members(chain, 2)
    assert active["b"]["addresses"] == []
    (told,) = [event for event in found["events"] if event["kind"] == "unreachable"]
    assert told["node"] == "b" and "nobody can open a link to it at 127.0.0.1:5555 (a: " in told["detail"]


@pytest.fixture
def machines(tmp_path):
    """p and x at one switch."""
    made = Machines(tmp_path)
    try:
        made.switch("net")
        for number, name in enumerate("px", 1):
            made.add(name)
            made.wire(name, "net", f"10.77.0.{number}/24")
        yield made
    finally:
        made.down()


@pytest.mark.slow
def test_a_node_whose_address_has_changed_comes_back_and_tells_the_new_one(machines):
    """It was said that it can only dial, at the address that it had had."""
    machines.node("p", "--listen", "0.0.0.0:5555", "--insecure", "--new", script=SCRIPT)
    machines.says("p", "p founds a cluster")
    machines.node("x", "--listen", "0.0.0.0:5555", "--insecure", "--join", "10.77.0.1:5555", script=SCRIPT)
    machines.says("p", "x joins: now 2 members")
    device = ("dev", "to-net")
    for change in (("del", "10.77.0.2/24"), ("add", "10.77.0.7/24")):
        run(tuple(machines.inside("x", "ip", "addr", *change, *device)))
    machines.says("x", "x is in again")
    assert "can only dial" not in machines.log("p").read_text(), machines.story()
    asked = machines.inside("p", *CHAOSNET, "status", "--json", "127.0.0.1:5555")
    found = json.loads(subprocess.run(asked, capture_output=True, text=True, check=True).stdout)
    addresses = {row["node"]: row["addresses"] for row in found["members"] if row["state"] == "active"}
    assert addresses == {"p": ["10.77.0.1:5555"], "x": ["10.77.0.7:5555"]}
