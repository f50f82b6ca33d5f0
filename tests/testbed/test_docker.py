"""docker-compose.yml as a person uses it: six containers train, one comes, one leaves, one dies, the host joins in.

One cluster lives through all tests, in their order. Needs root and a docker engine, and says so where there is none.
"""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosnet import client
from chaosnet.netem import Topology
from chaosnet.netem.docker import Docker
from chaosnet.netem.measure import measure
from chaosnet.netem.topology import GOODPUT, link_name
from chaosnet.protocols.errors import PeerUnreachable
from chaosnet.protocols.status import MemberRow, Status
from chaosnet.trials.demo_report import NodeLog, audit, replicas_identical

ROOT = Path(__file__).parents[2]
NAME = f"ct{os.getpid()}"
SIX = [f"node{number}" for number in range(1, 7)]
STEPS = 20  # That say: they go on.


def missing() -> str:
    """Why this cannot be tried here; "" if it can."""
    if shutil.which("docker") is None:
        return "docker is not installed"
    asked = subprocess.run(["docker", "version"], capture_output=True, text=True, check=False)
    if asked.returncode != 0:
        return f"no docker engine answers ({asked.stderr.strip().splitlines()[-1]})"
    return "" if os.geteuid() == 0 else "shaping the networks of containers needs root"


pytestmark = [pytest.mark.realtime, pytest.mark.skipif(bool(missing()), reason=missing() or "-")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


class Project:
    """The Compose project of this test, apart from one that a person may have up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.address = f"127.0.0.1:{free_port()}"
        self.env = {
            **os.environ,
            "COMPOSE_PROJECT_NAME": NAME,
            "CHAOSNET_PORT": self.address.split(":")[1],
            "CHAOSNET_SUBNETS": f"10.{220 + os.getpid() % 30}",
            "CHAOSNET_TESTBEDS": str(folder),
        }

    def compose(self, *args: str) -> str:
        program = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        return run(*program, *args, env=self.env)

    def chaosnet(self, *args: object) -> str:
        return run(sys.executable, "-m", "chaosnet", *map(str, args), env=self.env)

    def container(self, node: str) -> str:
        labels = {"project": NAME, "service": node}
        filters = [
            word
            for key, value in labels.items()
            for word in ("--filter", f"label=com.docker.compose.{key}={value}")
        ]
        return run("docker", "ps", "--all", "--quiet", *filters).strip()

    def of(self, node: str, what: str) -> str:
        return run("docker", "inspect", "--format", "{{" + what + "}}", self.container(node)).strip()

    def status(self) -> Status | None:
        with contextlib.suppress(PeerUnreachable):
            return client.status(self.address, deadline_s=2.0)
        return None

    def members(self) -> tuple[MemberRow, ...]:
        found = self.status()
        return found.members if found else ()

    def states(self) -> dict[str, str]:
        return {row.node: row.state for row in self.members()}

    def links(self) -> set[tuple[str, str]]:
        return {link_name(row.node, other) for row in self.members() for other in row.neighbors}

    def goes_on(self) -> None:
        """All that are members train: each makes more steps."""
        found = self.status()
        goal = (found.step if found else 0) + STEPS

        def further() -> bool:
            rows = [row for row in self.members() if row.state == "active"]
            return bool(rows) and all(row.step >= goal for row in rows)

        wait(further, f"all members reach step {goal}")


def run(*command: str, env: dict[str, str] | None = None) -> str:
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{' '.join(command)}: {done.stderr[-2000:]}"
    return done.stdout


def wait(until, what, patience_s=60.0) -> None:
    deadline_s = time.monotonic() + patience_s
    while not until():
        assert time.monotonic() < deadline_s, f"waited {patience_s:g} s in vain until {what}"
        time.sleep(0.2)


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    """Six containers that train. Afterwards nothing of the project is left."""
    run("make", "docker-image", f"PYTHON={sys.executable}")
    made = Project(tmp_path_factory.mktemp("testbed"))
    try:
        made.compose("up", "--detach")
        wait(lambda: made.states() == dict.fromkeys(SIX, "active"), "six nodes are members", 120)
        yield made
    except BaseException:
        print(made.compose("logs", "--tail", "30"))
        raise
    finally:
        made.compose("--profile", "seventh", "down", "--timeout", "5", "--volumes")
    label = f"label=com.docker.compose.project={NAME}"
    assert run("docker", "ps", "--all", "--quiet", "--filter", label) == ""
    assert run("docker", "network", "ls", "--quiet", "--filter", label) == ""


def test_every_network_is_a_link_of_the_overlay(project):
    project.goes_on()
    topology = Topology.read(ROOT / "examples/compose.yaml")
    wait(lambda: project.of("node6", ".State.Health.Status") == "healthy", "a node is healthy")
    found = project.links()
    assert found <= set(topology.links)
    # Of nodes that joined at the same moment; a repair may come first.
    for a, b in set(topology.links) - found:
        add = ["docker", "exec", project.container(a), "chaosnet", "link", "add", "127.0.0.1:5555", b]
        subprocess.run(add, capture_output=True, check=False)
    wait(lambda: project.links() == set(topology.links), "all networks are links")


def test_links_have_the_rates_that_are_set(project):
    file = ROOT / "examples/compose.yaml"
    told = project.chaosnet("testbed", "up", file, "--backend", "docker", "--name", NAME)
    assert told.startswith(f"{NAME} is up: 6 nodes, 9 links")
    testbed = Docker(NAME, Topology.read(file))
    wanted = {
        (link, end): spec.rate_from(end == link[0])
        for link, spec in testbed.topology.links.items()
        for end in link
    }
    assert {(row["link"], row["from"]): row["rate_mbit"] for row in testbed.in_force()} == pytest.approx(
        wanted
    )
    for row in measure(testbed, testbed.topology, seconds=1.0, links=[("node1", "node6")]):
        # Training shares the link, and the machine may be busy. Without a bucket it would be twenty times as much.
        assert 0.4 * GOODPUT < row["mbit"] / row["set_mbit"] < 1.05
    project.goes_on()


def test_a_cut_link_carries_nothing_until_it_is_healed(project):
    project.chaosnet("testbed", "cut", "node2", "node5", "--name", NAME)
    testbed = Docker(NAME, Topology.read(ROOT / "examples/compose.yaml"))
    cut = {row["link"] for row in testbed.in_force() if row["cut"]}
    assert cut == {("node2", "node5")}
    wait(lambda: ("node2", "node5") not in project.links(), "the cluster gives up the link")
    assert project.states() == dict.fromkeys(SIX, "active")
    project.goes_on()
    project.chaosnet("testbed", "heal", "node2", "node5", "--name", NAME)
    assert not any(row["cut"] for row in testbed.in_force())


def test_a_seventh_node_comes_when_it_is_called(project):
    project.compose("up", "--detach", "node7")
    wait(lambda: project.states().get("node7") == "active", "node7 is a member")
    project.goes_on()
    seven = ROOT / "examples/compose-seven.yaml"
    project.chaosnet("testbed", "up", seven, "--backend", "docker", "--name", NAME)
    rows = json.loads(project.chaosnet("testbed", "show", "--name", NAME, "--json"))
    assert len(rows) == 2 * 11


def test_sigint_is_an_exit_and_kill_a_crash(project):
    project.compose("kill", "-s", "SIGINT", "node5")
    wait(lambda: project.of("node5", ".State.Status") == "exited", "node5 has ended")
    assert project.of("node5", ".State.ExitCode") == "0"
    run("docker", "kill", project.container("node3"))
    wait(lambda: project.states().get("node3") == "failed", "node3 is known to have failed")
    assert project.states()["node5"] == "left"
    project.goes_on()
    assert "node5 left after step" in project.compose("logs", "node5")
    changed = project.chaosnet("testbed", "change", "node3", "node4", "rate_mbit=50", "--name", NAME)
    assert changed == ""  # Only node4's end is there to change.
    rows = Docker(NAME, Topology.read(ROOT / "examples/compose-seven.yaml")).in_force()
    assert [(row["from"], round(row["rate_mbit"])) for row in rows if row["link"] == ("node3", "node4")] == [
        ("node4", 50)
    ]


def test_a_worker_on_the_host_joins(project):
    first = json.loads(run("docker", "inspect", project.container("node1")))[0]["NetworkSettings"]["Networks"]
    address = first[f"{NAME}_link12"]["IPAddress"]
    command = [
        sys.executable,
        "-m",
        "chaosnet",
        "run",
        "--insecure",
        "--listen",
        f"0.0.0.0:{free_port()}",
        "--join",
        f"{address}:5555",
    ]
    command += ["--name", "host", "examples/endless.py", "--log", str(project.folder / "host.jsonl")]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL) as worker:
        try:
            wait(lambda: project.states().get("host") == "active", "the host is a member")
            project.goes_on()
            worker.send_signal(signal.SIGINT)
            assert worker.wait(timeout=30) == 0
        finally:
            worker.kill()
    wait(lambda: project.states().get("host") == "left", "the host has left")


def test_no_step_is_lost_and_replicas_are_equal(project):
    survivors = ["node1", "node2", "node4", "node6", "node7"]
    run("docker", "exec", project.container("node1"), "touch", "/tmp/enough")
    for node in survivors:
        wait(lambda node=node: project.of(node, ".State.Status") == "exited", f"{node} has ended")
    logs = {}
    for node in [*SIX, "node7"]:
        run(
            "docker",
            "cp",
            f"{project.container(node)}:/tmp/steps.jsonl",
            str(project.folder / f"{node}.jsonl"),
        )
    for node in [*SIX, "node7", "host"]:
        logs[node] = NodeLog(node)
        for line in (project.folder / f"{node}.jsonl").read_text().splitlines():
            logs[node].add(line)
    found = audit(logs.values(), killed=["node3"])
    assert found.last > 6 * STEPS
    assert (found.missing, found.repeated, found.disagreeing) == ((), (), ())
    assert replicas_identical(logs[node] for node in survivors)
