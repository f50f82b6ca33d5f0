"""A network falls into parts and heals, for real: namespaces whose links are cut. Needs root, and says so."""

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
from chaosnet.netem.topology import LinkSpec, mesh

WORKER = Path(__file__).with_name("overlay_worker.py")
SLEEP_S = 8.0
HASH_EVERY = 25  # Steps; as the worker does.
START_S = 120.0  # All of them import torch at the same time.

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
    ),
]


class Run:
    """A worker on each node of a mesh n0, n1, ...; n0 founds, and is the scheduler at first."""

    def __init__(self, folder, nodes):
        topology = mesh(nodes, LinkSpec(rate_mbit=200.0))
        self.folder, self.nodes, self.processes = folder, topology.nodes, {}
        self.testbed = Netns(f"p{os.getpid()}", topology)
        self.testbed.up(topology)

    def __enter__(self):
        env = {"CHAOSNET_NEIGHBORS": str(len(self.nodes) - 1), "OMP_NUM_THREADS": "1"}
        env["CHAOSNET_JOIN_PATIENCE_S"] = str(START_S)
        for node in self.nodes:
            with (
                (self.folder / f"{node}.out").open("wb") as out,
                (self.folder / f"{node}.err").open("wb") as err,
            ):
                started = self.testbed.start(node, [sys.executable, WORKER], env=env, stdout=out, stderr=err)
            self.processes[node] = started
        for node in self.nodes:
            self.until(lambda node=node: self.step(node) > 0, f"{node} trains", START_S)
        self.goes_on(self.nodes, 5)  # Who has taken part in a step has a vote from the next view on.
        return self

    def __exit__(self, *error):
        self.testbed.down()

    def told(self, node):
        lines = (self.folder / f"{node}.out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def said(self, node):
        return (self.folder / f"{node}.err").read_text()

    def step(self, node):
        told = self.told(node)
        return told[-1]["step"] if told else 0

    def until(self, condition, what, patience_s=30.0):
        deadline_s = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not in {patience_s:g} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def story(self):
        return "\n".join(f"{node}: {self.said(node)[-3000:]}" for node in self.processes)

    # What happens to it.

    def split(self, side):
        """Cut all links between `side` and the rest."""
        for link in self.testbed.topology.links:
            if len({*link} & {*side}) == 1:
                self.testbed.cut(link)

    def heal(self):
        for link in sorted(self.testbed.cuts):
            self.testbed.heal(link)

    def goes_on(self, nodes, steps=30):
        goals = {node: self.step(node) + steps for node in nodes}
        self.until(
            lambda: all(self.step(node) >= goal for node, goal in goals.items()), f"{nodes} go on by {steps}"
        )

    def waits(self, nodes, reason):
        self.until(lambda: all(f"waiting: {reason}" in self.said(node) for node in nodes), f"{nodes} wait")

    def is_back(self, nodes, times=1):
        self.until(
            lambda: all(self.said(node).count("is in again at step") >= times for node in nodes),
            f"{nodes} are back",
        )

    # At the end.

    def stop(self):
        """All leave with Ctrl+C. Returns: members as each saw them then."""
        members = json.loads(self.ask_status())
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        codes = {node: process.wait(20) for node, process in self.processes.items()}
        assert set(codes.values()) == {0}, self.story()
        return members

    def ask_status(self):
        code = "import json, os\nfrom chaosnet.client import status\n"
        code += "found = status(os.environ['CHAOSNET_LISTEN'])\n"
        code += "print(json.dumps(sorted(r.node for r in found.active)))"
        asked = self.testbed.start(self.nodes[0], [sys.executable, "-c", code], stdout=-1)
        return asked.communicate(timeout=20)[0]

    def check(self):
        """All are members; nobody has missed a step but who was away; equal states wherever two tell of one."""
        # However few steps there were before the split, each node is to tell three hashes.
        self.until(lambda: all(self.step(node) > 3 * HASH_EVERY for node in self.nodes), "enough steps")
        assert self.stop() == list(self.nodes)
        hashes = {}
        for node in self.nodes:
            told = self.told(node)
            steps = [each["step"] for each in told]
            gaps = sum(b != a + 1 for a, b in itertools.pairwise(steps))
            assert steps == sorted(set(steps)) and gaps == self.said(node).count("is in again at step"), node
            for each in told:
                if "hash" in each:
                    hashes.setdefault(each["step"], set()).add(each["hash"])
        assert len(hashes) >= 3 and all(len(each) == 1 for each in hashes.values())
        done = set().union(*({each["step"] for each in self.told(node)} for node in self.nodes))
        assert done == set(range(1, max(done) + 1)), "steps are lost"


@pytest.mark.slow
@pytest.mark.parametrize(
    "minority", [("n3", "n4"), ("n0", "n1")], ids=["scheduler-stays", "scheduler-cut-off"]
)
def test_the_majority_goes_on_and_the_minority_waits_and_rejoins(minority, tmp_path):
    with Run(tmp_path, 5) as run:
        majority = [node for node in run.nodes if node not in minority]
        run.split(minority)
        run.waits(minority, "only 2 of 5 members can be reached")
        run.goes_on(majority)
        run.heal()
        run.is_back(minority)
        run.goes_on(run.nodes)
        run.check()


@pytest.mark.slow
def test_of_two_nodes_the_senior_goes_on_and_the_junior_waits_and_rejoins(tmp_path):
    with Run(tmp_path, 2) as run:
        run.split(["n1"])
        run.waits(["n1"], "only 1 of 2 members can be reached")
        run.goes_on(["n0"])
        run.heal()
        run.is_back(["n1"])
        run.goes_on(run.nodes)
        run.check()


@pytest.mark.slow
def test_with_no_majority_anywhere_all_wait_and_end_as_one(tmp_path):
    with Run(tmp_path, 5) as run:
        run.split(["n0", "n1"])
        for pair in [("n2", "n4"), ("n3", "n4")]:
            run.testbed.cut(pair)
        run.waits(["n0", "n1", "n2", "n3"], "only 2 of 5 members can be reached")
        run.waits(["n4"], "only 1 of 5 members can be reached")
        waiting_at = {node: run.step(node) for node in run.nodes}
        time.sleep(1.0)
        assert waiting_at == {node: run.step(node) for node in run.nodes}, "a step without a majority"
        run.heal()  # Link by link: three may go on before the others are heard, which then rejoin.
        run.goes_on(run.nodes)
        run.check()


@pytest.mark.slow
def test_a_node_on_a_flapping_link_ends_as_a_member(tmp_path):
    with Run(tmp_path, 3) as run:
        for _ in range(4):
            run.split(["n2"])
            time.sleep(1.5)
            run.heal()
            time.sleep(1.0)
        run.goes_on(run.nodes)
        run.check()


@pytest.mark.slow
def test_a_node_that_was_stopped_for_long_is_told_and_rejoins(tmp_path):
    with Run(tmp_path, 3) as run:
        run.processes["n1"].send_signal(signal.SIGSTOP)
        time.sleep(SLEEP_S)
        run.goes_on(["n0", "n2"])
        run.processes["n1"].send_signal(signal.SIGCONT)
        run.is_back(["n1"])
        assert "it rejoins through" in run.said("n1")
        run.goes_on(run.nodes)
        run.check()
