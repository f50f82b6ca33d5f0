"""`chaosnet testbed` on this kernel: real namespaces, real shaping. Needs root, and says so where there is none."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from chaosnet.commands import testbed as testbed_command
from chaosnet.commands.testbed import testbed as command_line
from chaosnet.netem import LinkSpec, TestbedError, Topology, store
from chaosnet.netem.measure import measure
from chaosnet.netem.netns import Netns, has_netem, spaces_of
from chaosnet.netem.topology import random_overlay, ring
from chaosnet.protocols.errors import ConfigError

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.skipif(
        os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
    ),
]
NAME = f"t{os.getpid()}"
TAKE = """
import socket, sys
with socket.create_server((sys.argv[1], int(sys.argv[2]))) as server:
    print("READY", flush=True)
    connection = server.accept()[0]
    left = 100_000
    while left:
        left -= len(connection.recv(left))
    connection.sendall(b".")
"""
SEND = """
connection = socket.create_connection({at})
began_s = time.monotonic()
connection.sendall(bytes(100_000))
connection.recv(1)
print(time.monotonic() - began_s)
"""
CHAOSNET = [sys.executable, "-c", "from chaosnet.cli import main; main()", "testbed"]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "up"))
    yield
    left = spaces_of(f"chaos-{NAME}-")
    subprocess.run([*CHAOSNET, "down", "--name", NAME], check=True, capture_output=True)
    assert left == []


def chaosnet(*args: object) -> tuple[int, str, str]:
    done = subprocess.run([*CHAOSNET, *map(str, args)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def file_of(topology: Topology, folder: Path) -> Path:
    path = folder / "topology.yaml"
    path.write_text(topology.to_text())
    return path


def ask(testbed: Netns, node: str, code: str) -> str:
    process = testbed.start(node, [sys.executable, "-c", code], stdout=subprocess.PIPE)
    return process.communicate()[0].decode().strip()


@pytest.mark.slow
def test_links_have_the_rates_that_were_set(tmp_path):
    topology = Topology({("x", "y"): LinkSpec(rate_mbit=100.0, rate_back_mbit=300.0)})
    assert chaosnet("up", file_of(topology, tmp_path), "--name", NAME)[0] == 0
    try:
        assert chaosnet("measure", "--name", NAME, "--seconds", 0.5, "--json", tmp_path / "m.json")[0] == 0
        found = json.loads((tmp_path / "m.json").read_text())
        assert [row["set_mbit"] for row in found["links"]] == [100.0, 300.0]
        assert found["worst_error"] < 0.3  # Of a busy machine; an idle one is right to 1 %.
        assert chaosnet("ls")[1] == f"{NAME} (netns): 2 nodes, 1 links\n"
        assert chaosnet("change", "y", "x", "rate_mbit=200", "--name", NAME) == (0, "", "")
        rows = json.loads(chaosnet("show", "--json", "--name", NAME)[1])
        assert [round(row["rate_mbit"]) for row in rows] == [100, 200]
    finally:
        assert chaosnet("down", "--name", NAME) == (0, "2 nodes down\n", "")
    assert chaosnet("down", "--name", NAME) == (0, "0 nodes down\n", "")


def test_a_cut_is_silent_and_nodes_that_are_no_neighbours_are_reached_around_it():
    testbed = Netns(NAME, ring(4))
    testbed.up(testbed.topology)
    try:
        connect = (
            "import os, socket\n"
            "at = dict(each.split('=') for each in os.environ['CHAOSNET_NEIGHBORS_AT'].split(','))['n1']\n"
            "try: socket.create_connection(at.split(':'), timeout=0.5)\n"
            "except OSError as error: print(type(error).__name__)"
        )
        assert ask(testbed, "n0", connect) == "ConnectionRefusedError"  # Nobody listens, but it is there.
        testbed.cut(("n0", "n1"))
        assert ask(testbed, "n0", connect) == "TimeoutError"
        testbed.heal(("n0", "n1"))
        assert ask(testbed, "n0", connect) == "ConnectionRefusedError"
        far = (
            "import socket\n"
            "try: socket.create_connection(('10.211.255.252', 1), timeout=2)\n"
            "except OSError as error: print(type(error).__name__)"
        )
        assert ask(testbed, "n0", far) == "ConnectionRefusedError"
    finally:
        testbed.down()


def test_connections_outlive_changes_of_their_links(tmp_path):
    topology = random_overlay(6, seed=3, links=12)
    testbed = Netns(NAME, topology)
    testbed.up(topology)
    try:
        a, b = next(iter(topology.links))
        serve = testbed.start(
            b, [sys.executable, "-m", "chaosnet.netem.flow", "recv", "0.0.0.0", "9"], stdout=subprocess.PIPE
        )
        assert serve.stdout and serve.stdout.readline() == b"READY\n"
        at = testbed.environment(b)["CHAOSNET_LISTEN"].split(":")[0]
        send = testbed.start(
            a, [sys.executable, "-m", "chaosnet.netem.flow", "send", at, "9", "1.0"], stdout=subprocess.PIPE
        )
        time.sleep(0.6)
        testbed.change({link: LinkSpec(rate_mbit=40.0) for link in topology.links})
        found = json.loads(send.communicate(timeout=30)[0])
        assert found["bytes"] > 0
        assert {round(row["rate_mbit"]) for row in testbed.in_force()} == {40}
    finally:
        testbed.down()


def test_a_command_runs_on_every_node_and_nothing_stays(tmp_path):
    path = file_of(ring(3), tmp_path)
    # A line in one write: the nodes share one pipe.
    write = "os.write(1, os.environ['CHAOSNET_NAME'].encode() + b'\\n')"
    script = f"import os, subprocess; {write}; subprocess.Popen(['sleep', '100'])"
    code, out, err = chaosnet("run", path, "--name", NAME, "--", sys.executable, "-c", script)
    assert (code, sorted(out.splitlines()), err) == (0, ["n0 | n0", "n1 | n1", "n2 | n2"], "")


def test_what_a_killed_harness_leaves_is_removed_by_name(tmp_path):
    path = file_of(ring(3), tmp_path)
    command = [*CHAOSNET, "run", str(path), "--name", NAME, "--", "sleep", "100"]
    with subprocess.Popen(command) as harness:
        while len(spaces_of(f"chaos-{NAME}-")) < 3 or not _sleepers():
            time.sleep(0.05)
        harness.send_signal(signal.SIGKILL)
    assert chaosnet("down", "--name", NAME) == (0, "3 nodes down\n", "")
    assert _sleepers() == []


def test_all_testbeds_are_those_that_are_remembered_and_no_other_namespaces(tmp_path):
    foreign = [f"chaos-{NAME}", f"chaos-{NAME}x-n0"]
    try:
        for space in foreign:
            subprocess.run(["ip", "netns", "add", space], check=True)
        assert chaosnet("up", file_of(ring(3), tmp_path), "--name", NAME)[0] == 0
        assert chaosnet("down", "--all") == (0, "3 nodes down\n", "")
        assert spaces_of(f"chaos-{NAME}") == foreign
    finally:
        for space in foreign:
            subprocess.run(["ip", "netns", "delete", space], check=True)


def test_a_testbed_is_remembered_before_it_is_made_so_that_nothing_of_a_killed_run_stays(monkeypatch):
    def up(made, topology):
        seen.append(store.saved())
        raise TestbedError("no")

    seen = []
    monkeypatch.setattr(Netns, "up", up)
    with pytest.raises(TestbedError, match="no"):
        testbed_command._up("netns", NAME, ring(3))
    assert (seen, store.saved()) == ([[NAME]], [])


def test_another_back_end_under_the_same_name_replaces_what_the_first_has_made(tmp_path):
    path = file_of(ring(3), tmp_path)
    assert chaosnet("up", path, "--name", NAME)[0] == 0
    assert chaosnet("up", path, "--name", NAME, "--backend", "relay")[0] == 0
    assert spaces_of(f"chaos-{NAME}-") == []
    assert chaosnet("ls")[1] == f"{NAME} (relay): 3 nodes, 3 links\n"
    assert chaosnet("up", path, "--name", NAME)[0] == 0
    assert not (tmp_path / "up" / f"{NAME}.relay").exists()
    assert chaosnet("down", "--name", NAME) == (0, "3 nodes down\n", "")


def test_a_namespace_that_somebody_else_removes_meanwhile_is_gone(monkeypatch):
    testbed = Netns(NAME, ring(3))
    testbed.up(testbed.topology)
    there = spaces_of(f"chaos-{NAME}-")
    subprocess.run(["ip", "netns", "delete", there[0]], check=True)
    seen = iter([there])
    monkeypatch.setattr(
        "chaosnet.netem.netns.spaces_of", lambda prefix: next(seen, None) or spaces_of(prefix)
    )
    assert testbed.down() == 3
    assert spaces_of(f"chaos-{NAME}-") == []


def test_without_ip_nothing_is_forgotten(tmp_path, monkeypatch):
    assert chaosnet("up", file_of(ring(3), tmp_path), "--name", NAME)[0] == 0
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path))
        for words in ("down", "show", "cut n0 n1", "exec n0 true"):
            with pytest.raises(ConfigError, match=r"(ip|tc) is not on PATH$"):
                command_line.main([*words.split(), "--name", NAME], standalone_mode=False)
        assert store.saved() == [NAME]
    assert chaosnet("down", "--name", NAME) == (0, "3 nodes down\n", "")


@pytest.mark.parametrize("tool", ["ip", "tc", "sysctl"])
def test_a_tool_that_is_missing_is_named_before_anything_is_made(tool, tmp_path, monkeypatch):
    for each in {"ip", "tc", "sysctl"} - {tool}:
        (tmp_path / each).symlink_to(shutil.which(each))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(TestbedError, match=f"{tool} is not on PATH"):
        Netns(NAME, ring(3)).up(ring(3))


@pytest.mark.slow
def test_a_slow_link_is_measured():
    topology = Topology({("x", "y"): LinkSpec(rate_mbit=0.5)})
    testbed = Netns(NAME, topology)
    testbed.up(topology)
    try:
        row = next(iter(measure(testbed, topology, seconds=0.1)))
        assert 0.2 < row["mbit"] < 1.0
    finally:
        testbed.down()


def test_a_slow_link_takes_its_time_over_a_short_message():
    topology = Topology({("x", "y"): LinkSpec(rate_mbit=1.0)})
    testbed = Netns(NAME, topology)
    testbed.up(topology)
    try:
        at = tuple(testbed.environment("y")["CHAOSNET_LISTEN"].split(":"))
        serve = testbed.start("y", [sys.executable, "-c", TAKE, *at], stdout=subprocess.PIPE)
        assert serve.stdout and serve.stdout.readline() == b"READY\n"
        seconds = float(ask(testbed, "x", f"import socket, time\n{SEND.format(at=at)}"))
        assert serve.wait(timeout=30) == 0
        assert seconds > 0.5  # 100 kB take 0.8 s; all but a burst of 16 KiB wait for it.
    finally:
        testbed.down()


def _sleepers() -> list[str]:
    spaces = spaces_of(f"chaos-{NAME}-")
    pids = [
        subprocess.run(["ip", "netns", "pids", space], capture_output=True, text=True).stdout
        for space in spaces
    ]
    return [pid for each in pids for pid in each.split()]


def test_what_the_kernel_cannot_do_is_told_before_anything_is_made(tmp_path):
    if has_netem():
        pytest.skip("this kernel has netem")
    topology = ring(3, LinkSpec(delay_ms=5.0))
    with pytest.raises(TestbedError, match="no netem, so links can have a rate but no delay"):
        Netns(NAME, topology).up(topology)
    code, out, err = chaosnet("up", file_of(topology, tmp_path), "--name", NAME)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: testbed: this kernel has no netem")


def test_mistakes_are_one_line(tmp_path):
    assert chaosnet("exec", "n0", "--name", "none", "--", "true")[2] == (
        "error: testbed: no testbed 'none' is up (up: none; make one with: chaosnet testbed up)\n"
    )
    assert "is no name of a testbed" in chaosnet("up", file_of(ring(3), tmp_path), "--name", "a-b")[2]
