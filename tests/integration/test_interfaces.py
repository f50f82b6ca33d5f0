"""Nodes with several interfaces, and one that listens where nobody can reach it: for real, in namespaces."""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosnet.netem import LinkSpec, Topology
from chaosnet.netem.netns import Netns

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
