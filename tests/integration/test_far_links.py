"""Machines with round trips of 0.4 s: they join, are lost and leave as near ones do."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from lan import Machines, needs_namespaces

from chaosnet.netem.netns import run

pytestmark = [pytest.mark.realtime, pytest.mark.slow]

SCRIPT = Path(__file__).parents[2] / "examples" / "endless.py"
NODES = ("n0", "n1", "n2")
WAY_S = 0.1  # From a machine to the router in the middle: a quarter of a round trip.


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    try:
        made.add("hub")
        run(tuple(made.inside("hub", "sysctl", "-qw", "net.ipv4.ip_forward=1")))
        for number, name in enumerate(NODES):
            made.add(name)
            made.far_wire(name, "hub", f"10.77.{number}", WAY_S)
        yield made
    finally:
        made.down()


@needs_namespaces
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
def test_far_members_join_and_replace_a_killed_scheduler_and_leave(machines: Machines) -> None:
    for number, name in enumerate(NODES):
        join = ("--join", "10.77.0.2:5555") if number else ()
        listen = ("--listen", f"10.77.{number}.2:5555", "--insecure")
        machines.node(name, *listen, *join, script=SCRIPT, arguments=("--every", "1"))
        machines.says("n0", f"now {number + 1} members" if number else "n0 founds a cluster")
    assert "can only dial" not in machines.story(), "they answer, if late"
    step = last_step(machines, "n0")
    machines.until(lambda: last_step(machines, "n2") > step + 2, "all three make steps")
    machines.processes["n0"].send_signal(signal.SIGKILL)
    machines.says("n2", "n0 is lost")
    assert "no scheduler can be elected" not in machines.story(), "a round is long enough for its votes"
    step = last_step(machines, "n2")
    machines.until(lambda: last_step(machines, "n2") > step + 1, "the others go on with another scheduler")
    leaver, other = ("n1", "n2") if "n1 is the scheduler" in machines.story() else ("n2", "n1")
    machines.processes[leaver].send_signal(signal.SIGINT)
    machines.says(other, f"{leaver} leaves: now 1 member")
    assert machines.processes[leaver].wait(30) == 0
    assert f"{leaver} is lost" not in machines.log(other).read_text()


@needs_namespaces
@pytest.mark.skipif(not os.path.exists("/dev/net/tun"), reason="needs /dev/net/tun")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_of_two_far_members_the_junior_goes_on_without_the_senior(machines: Machines, number: int) -> None:
    """A dead process refuses connections, and that is heard a round trip later."""
    for index, name in enumerate(NODES[:2]):
        join = ("--join", "10.77.0.2:5555") if index else ()
        listen = ("--listen", f"10.77.{index}.2:5555", "--insecure")
        machines.node(name, *listen, *join, script=SCRIPT, arguments=("--every", "1"))
        machines.says("n0", "now 2 members" if index else "n0 founds a cluster")
    step = last_step(machines, "n0")
    machines.until(lambda: last_step(machines, "n1") > step + 2, "both make steps")
    machines.processes["n0"].send_signal(number)
    machines.says("n1", "n0 is lost" if number == signal.SIGKILL else "n0 leaves: now 1 member")
    step = last_step(machines, "n1")
    machines.until(lambda: last_step(machines, "n1") > step + 1, "it goes on")
    assert "waiting:" not in machines.log("n1").read_text()


def last_step(machines: Machines, machine: str) -> int:
    """That its script has printed."""
    lines = [line.split() for line in machines.log(machine).read_text().splitlines()]
    return max((int(words[1]) for words in lines if len(words) == 6 and words[0] == "step"), default=0)
