"""Links of a mesh die silently, one after the other, under a training run: for real, over both back ends."""

import itertools
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path

import pytest

from chaosnet.netem.netns import Netns
from chaosnet.netem.relay import Relay
from chaosnet.netem.topology import LinkSpec, mesh
from chaosnet.protocols.liveness import DEAD_LINK_S

NODES = 5
PAUSE_S = 1.0  # That a dead link may cost.
CUT_S, HEALED_S = 2.0, 2.5  # Long enough to notice, and to take the link up again.
WORKER = Path(__file__).with_name("overlay_worker.py")
HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None

pytestmark = pytest.mark.realtime


class Run:
    """A worker on each node of a mesh."""

    def __init__(self, testbed, folder):
        self.testbed, self.folder, self.processes = testbed, folder, {}
        env = {"CHAOSNET_NEIGHBORS": str(NODES - 1), "OMP_NUM_THREADS": "1"}
        for node in testbed.topology.nodes:
            with (folder / f"{node}.out").open("wb") as out, (folder / f"{node}.err").open("wb") as err:
                started = testbed.start(node, [sys.executable, WORKER], env=env, stdout=out, stderr=err)
            self.processes[node] = started
            self.until(lambda node=node: len(self.told(node)) > 20, f"{node} trains")

    def told(self, node):
        lines = (self.folder / f"{node}.out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, condition, what, patience_s=30.0):
        deadline_s = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not in {patience_s:g} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def stop(self):
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        return {node: process.wait(20) for node, process in self.processes.items()}

    def story(self):
        return "\n".join(f"{node}: {(self.folder / f'{node}.err').read_text()}" for node in self.processes)


def longest_pause_s(told, from_s, until_s):
    """Between two steps of which the second is in the window."""
    times = [each["at_s"] for each in told]
    return max(b - a for a, b in itertools.pairwise(times) if from_s <= b <= until_s)


@pytest.mark.parametrize(
    "backend",
    [
        Relay,
        pytest.param(
            Netns, marks=pytest.mark.skipif(not HAS_NAMESPACES, reason="namespaces need root and iproute2")
        ),
    ],
    ids=lambda backend: backend.kind,
)
def test_each_link_of_a_mesh_dies_in_turn(backend, tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "up"))
    topology = mesh(NODES, LinkSpec(rate_mbit=200.0))
    testbed = backend(f"t{os.getpid()}", topology)
    testbed.up(topology)
    try:
        run = Run(testbed, tmp_path)
        started_s = time.monotonic()
        time.sleep(2.0)
        windows = {None: (started_s, time.monotonic())}  # Nothing is cut: how busy is this machine?
        for link in topology.links:
            cut_s = time.monotonic()
            testbed.cut(link)
            time.sleep(CUT_S)
            windows[link] = (cut_s, time.monotonic())
            testbed.heal(link)
            time.sleep(HEALED_S)
        codes = run.stop()
        told = {node: run.told(node) for node in topology.nodes}
        assert set(codes.values()) == {0}, run.story()
    finally:
        testbed.down()
    pauses = {
        link: max(longest_pause_s(told[node], *window) for node in topology.nodes)
        for link, window in windows.items()
    }
    for link, pause_s in pauses.items():
        print(f"{link}: {pause_s:.2f} s")
    usual_s = pauses.pop(None)
    assert max(pauses.values()) <= PAUSE_S + usual_s
    assert max(pauses.values()) > DEAD_LINK_S / 2, "no cut was felt: none of them was real"

    for node, records in told.items():  # Nobody was lost, for a short while either; no step was.
        steps = [record["step"] for record in records]
        assert steps == list(range(steps[0], steps[-1] + 1)), node
    hashes = {}
    for records in told.values():
        for record in records:
            if "hash" in record:
                hashes.setdefault(record["step"], set()).add(record["hash"])
    assert len(hashes) > 10 and all(len(each) == 1 for each in hashes.values())
    said = (tmp_path / f"{topology.nodes[0]}.err").read_text().splitlines()
    links = next(json.loads(line)["links"] for line in said if line.startswith('{"links"'))
    assert len(links) >= len(topology.links) - 1  # The last may still be about to come back.
