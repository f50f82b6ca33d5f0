"""`chaosnet testbed --backend relay`: real sockets and processes, no root."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from chaosnet.commands import testbed
from chaosnet.netem import LinkSpec, TestbedError, Topology, store
from chaosnet.netem.measure import measure
from chaosnet.netem.relay import MARK, RelayTestbed
from chaosnet.netem.topology import line, ring

pytestmark = pytest.mark.realtime
NAME = f"r{os.getpid()}"
CHAOSNET = [sys.executable, "-c", "from chaosnet.cli import main; main()", "testbed"]


@pytest.fixture(autouse=True)
def _nothing_is_left(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "up"))
    yield
    left = ours()
    subprocess.run([*CHAOSNET, "down", "--name", NAME], check=True, capture_output=True)
    assert left == []


def ours():
    """Processes of this testbed that are still there."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) in (NAME, str(Path(os.environ["CHAOSNET_TESTBEDS"]) / NAME)) or (
                process.environ().get("CHAOSNET_TESTBEDS") == os.environ["CHAOSNET_TESTBEDS"]
                and "relay_process" in " ".join(process.cmdline())
            ):
                found.append(process.cmdline())
    return found


@contextlib.contextmanager
def up(topology, routes=True):
    made = RelayTestbed(NAME, topology, routes)
    made.up(topology)
    try:
        yield made
    finally:
        made.down()


def chaosnet(*args):
    done = subprocess.run([*CHAOSNET, *map(str, args)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def file_of(topology, folder):
    path = folder / "topology.yaml"
    path.write_text(topology.to_text())
    return path


def address(text):
    host, _, port = text.rpartition(":")
    return host, int(port)


def test_programs_hear_of_the_testbed_and_not_of_the_users_own_cluster(monkeypatch):
    for name in (
        "CHAOSNET_JOIN",
        "CHAOSNET_CLUSTER",
        "CHAOSNET_KEY",
        "CHAOSNET_ALLOWED_KEYS",
        "CHAOSNET_EVERY",
    ):
        monkeypatch.setenv(name, "mine")
    with up(ring(3)) as made:
        seen = {}
        for node in ("n0", "n1"):
            tell = [sys.executable, "-c", "import json, os; print(json.dumps({**os.environ}))"]
            told = json.loads(made.start(node, tell, stdout=subprocess.PIPE).communicate(timeout=30)[0])
            seen[node] = {name: text for name, text in told.items() if text == "mine"}
            assert ("CHAOSNET_JOIN" in told) == (node == "n1"), "the first founds"
    mine = {"CHAOSNET_EVERY": "mine"}
    assert seen == {"n0": mine, "n1": mine}


@pytest.mark.slow
def test_links_have_the_rates_and_delays_that_were_set():
    links = {
        ("x", "y"): LinkSpec(rate_mbit=100.0, rate_back_mbit=300.0),
        ("y", "z"): LinkSpec(rate_mbit=200.0, delay_ms=10.0),
    }
    with up(Topology(links)) as made:
        rows = list(measure(made, made.topology, seconds=0.5))
    assert [row["set_mbit"] for row in rows] == [100.0, 300.0, 200.0, 200.0]
    assert max(abs(row["error"]) for row in rows) < 0.3  # Of a busy machine; an idle one is right to 1 %.
    for row in rows:
        assert row["set_rtt_ms"] <= row["rtt_ms"] < row["set_rtt_ms"] + 15.0


class Echo:
    """A server at one node's address that sends everything back."""

    def __init__(self, at):
        self.server = socket.create_server(address(at))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.server.close()

    def connect(self, at):
        near = socket.create_connection(address(at), timeout=2.0)
        near.settimeout(0.5)
        far, _ = self.server.accept()
        far.settimeout(0.5)
        return near, far


def at_of(made, node, other):
    return dict(each.split("=") for each in made.environment(node)["CHAOSNET_PEERS_AT"].split(","))[other]


def test_a_cut_is_silent_and_what_was_under_way_arrives_when_it_is_healed():
    with up(ring(3)) as made, Echo(made.environment("n1")["CHAOSNET_LISTEN"]) as server:
        near, far = server.connect(at_of(made, "n0", "n1"))
        near.sendall(b"one")
        assert far.recv(3) == b"one"
        made.cut(("n0", "n1"))
        near.sendall(b"two")
        far.sendall(b"too")
        for end in (near, far):
            with pytest.raises(TimeoutError):
                end.recv(3)
        made.heal(("n0", "n1"))
        assert (far.recv(3), near.recv(3)) == (b"two", b"too")


def test_the_end_of_a_program_is_seen_at_the_other_end_of_the_link():
    with up(ring(3)) as made, Echo(made.environment("n1")["CHAOSNET_LISTEN"]) as server:
        near, far = server.connect(at_of(made, "n0", "n1"))
        far.sendall(b"last words")
        far.close()
        assert near.recv(100) == b"last words"
        assert near.recv(100) == b""


def test_where_nobody_listens_a_connection_ends_at_once():
    # At its making already, where the relay is fast.
    with up(ring(3)) as made, pytest.raises(ConnectionResetError):
        socket.create_connection(address(at_of(made, "n0", "n1")), timeout=2.0).recv(1)


def test_who_is_no_neighbour_is_reached_link_by_link_or_not_at_all():
    slow = {("n0", "n1"): LinkSpec(delay_ms=20.0), ("n1", "n2"): LinkSpec(delay_ms=30.0)}
    with up(Topology(slow)) as made, Echo(made.environment("n2")["CHAOSNET_LISTEN"]) as server:
        near, far = server.connect(at_of(made, "n0", "n2"))
        sent_s = time.perf_counter()
        near.sendall(b"x")
        far.recv(1)
        assert 0.05 <= time.perf_counter() - sent_s < 0.2
    with up(line(3), routes=False) as made:
        assert at_of(made, "n0", "n2") == ""
        assert at_of(made, "n0", "n1")
        # All: a cluster's overlay is the testbed's.
        assert made.environment("n0")["CHAOSNET_NEIGHBORS"] == "2"


def test_links_change_under_connections():
    with up(ring(3)) as made:
        made.change({("n0", "n1"): LinkSpec(rate_mbit=50.0, delay_ms=5.0)})
        rows = {(*row["link"], row["from"]): row for row in made.in_force()}
        assert rows["n0", "n1", "n0"]["rate_mbit"] == rows["n0", "n1", "n1"]["rate_mbit"] == 50.0
        assert rows["n0", "n2", "n0"]["rate_mbit"] == 1000.0
        found = next(iter(measure(made, made.topology, seconds=0.3, links=[("n0", "n1")])))
        assert found["mbit"] < 60.0


def test_a_command_runs_on_every_node_and_nothing_stays(tmp_path):
    path = file_of(ring(3), tmp_path)
    # A line in one write: the nodes share one pipe.
    write = "os.write(1, os.environ['CHAOSNET_NAME'].encode() + b'\\n')"
    script = f"import os, subprocess; {write}; subprocess.Popen(['sleep', '100'])"
    code, out, err = chaosnet(
        "run", path, "--name", NAME, "--backend", "relay", "--", sys.executable, "-c", script
    )
    assert (code, sorted(out.splitlines()), err) == (0, ["n0 | n0", "n1 | n1", "n2 | n2"], "")


def test_what_a_killed_harness_leaves_is_removed_by_name(tmp_path):
    path = file_of(ring(3), tmp_path)
    command = [*CHAOSNET, "run", str(path), "--name", NAME, "--backend", "relay", "--", "sleep", "100"]
    with subprocess.Popen(command) as harness:
        while len([each for each in ours() if each == ["sleep", "100"]]) < 3:
            time.sleep(0.05)
        harness.send_signal(signal.SIGKILL)
    assert chaosnet("ls")[1] == f"{NAME} (relay): 3 nodes, 3 links\n"
    assert chaosnet("down", "--name", NAME) == (0, "3 nodes down\n", "")


def test_a_folder_that_cannot_be_written_is_named_before_anything_is_made(tmp_path):
    (tmp_path / "up").write_text("")  # Where the folder would be.
    for command in (["up", "TOPOLOGY"], ["run", "TOPOLOGY"]):
        words = [str(file_of(ring(3), tmp_path)) if word == "TOPOLOGY" else word for word in command]
        rest = ["--", "true"] if "run" in command else []
        code, out, err = chaosnet(*words, "--name", NAME, "--backend", "relay", *rest)
        assert (code, out, err.count("\n")) == (1, "", 1), err
        assert err.startswith(f"error: testbed: {tmp_path / 'up'}: File exists (expected a folder")
        assert ours() == []
    (tmp_path / "up").unlink()


def test_what_cannot_be_remembered_is_not_made(tmp_path, monkeypatch):
    def full(_made):
        raise TestbedError("No space left on device")

    monkeypatch.setattr("chaosnet.netem.store.save", full)
    with pytest.raises(TestbedError, match="No space left"):
        testbed._up("relay", NAME, ring(3))
    assert ours() == []
    assert list((tmp_path / "up").iterdir()) == []


def test_a_run_under_the_name_of_one_that_is_alive_is_refused(tmp_path):
    path = file_of(ring(3), tmp_path)
    script = "import sys; print('here', flush=True); sys.stdin.read()"
    command = ["run", str(path), "--name", NAME, "--backend", "relay", "--", sys.executable, "-c", script]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([*CHAOSNET, *command], **pipes) as first:
        assert first.stdout.readline().endswith(b"| here\n")
        code, out, err = chaosnet(*command)
        assert (code, out, err.count("\n")) == (1, "", 1)
        assert f"{NAME!r} is up (relay, 3 nodes)" in err and f"chaosnet testbed down --name {NAME})" in err
        first.stdin.close()
        assert first.wait(timeout=30) == 0
    assert ours() == []


def test_the_end_of_a_run_leaves_alone_what_was_made_under_its_name_since(tmp_path):
    path = file_of(ring(3), tmp_path)
    command = [*CHAOSNET, "run", str(path), "--name", NAME, "--backend", "relay", "--"]
    with subprocess.Popen([*command, "sh", "-c", "echo here; sleep 100"], stdout=subprocess.PIPE) as first:
        assert first.stdout.readline().endswith(b"| here\n")
        assert chaosnet("up", path, "--name", NAME, "--backend", "relay")[0] == 0  # Its programs end by this.
        first.wait(timeout=30)
    assert chaosnet("ls")[1] == f"{NAME} (relay): 3 nodes, 3 links\n"
    assert testbed._opened(NAME).alive() == 3
    assert chaosnet("down", "--name", NAME)[0] == 0


def test_a_program_that_a_signal_ends_has_the_exit_code_that_shells_tell(tmp_path):
    path = file_of(ring(3), tmp_path)
    kill_one = "test $CHAOSNET_NAME != n1 || kill -9 $$"
    assert chaosnet("run", path, "--name", NAME, "--backend", "relay", "--", "sh", "-c", kill_one)[0] == 137
    assert chaosnet("up", path, "--name", NAME, "--backend", "relay")[0] == 0
    for ending, code in (("kill -TERM $$", 143), ("exit 3", 3), ("true", 0)):
        assert chaosnet("exec", "n0", "--name", NAME, "--", "sh", "-c", ending)[0] == code
    assert chaosnet("down", "--name", NAME)[0] == 0


def test_what_is_no_program_is_refused_in_one_line(tmp_path):
    path, text = file_of(ring(3), tmp_path), tmp_path / "text"
    text.write_text("no program")
    for what in (text, tmp_path):
        code, _, err = chaosnet("run", path, "--name", NAME, "--backend", "relay", "--", what)
        assert (code, err) == (
            1, f"error: testbed: {str(what)!r} cannot be run: Permission denied (expected a program)\n"
        )  # fmt: skip


def test_a_run_whose_lines_nobody_reads_any_more_ends(tmp_path):
    path = file_of(ring(3), tmp_path)
    command = [*CHAOSNET, "run", str(path), "--name", NAME, "--backend", "relay", "--"]
    loop = ["sh", "-c", "while true; do echo here; sleep 0.1; done"]
    with subprocess.Popen([*command, *loop], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as run:
        assert run.stdout.readline().endswith(b"| here\n")
        run.stdout.close()
        assert (run.wait(timeout=30), run.stderr.read()) == (0, b"")
    assert ours() == []


def test_a_run_whose_lines_cannot_be_written_ends_with_an_error(tmp_path):
    command = ["run", str(file_of(ring(3), tmp_path)), "--name", NAME, "--backend", "relay", "--"]
    loop = ["sh", "-c", "while true; do echo here; sleep 0.1; done"]
    with open("/dev/full", "wb") as full:
        done = subprocess.run([*CHAOSNET, *command, *loop], stdout=full, stderr=subprocess.PIPE, timeout=30)
    told = b"error: testbed: what the programs print cannot be shown: No space left on device\n"
    assert (done.returncode, done.stderr) == (1, told)
    assert ours() == []


def test_a_closed_terminal_ends_a_run_and_what_it_has_made(tmp_path):
    command = [*CHAOSNET, "run", str(file_of(ring(3), tmp_path)), "--name", NAME, "--backend", "relay", "--"]
    wait = ["sh", "-c", "trap exit HUP; echo here; while true; do sleep 0.1; done"]
    with subprocess.Popen([*command, *wait], stdout=subprocess.PIPE, text=True) as run:
        assert [run.stdout.readline().partition(" | ")[2] for _ in range(3)] == ["here\n"] * 3
        run.send_signal(signal.SIGHUP)
        assert run.wait(timeout=30) in (0, 130)  # The latter if it hears of it before the last has begun.
    assert (ours(), store.saved()) == ([], [])


def test_a_third_ctrl_c_leaves_nothing_behind(tmp_path):
    command = [*CHAOSNET, "run", str(file_of(ring(3), tmp_path)), "--name", NAME, "--backend", "relay", "--"]
    stay = ["sh", "-c", "trap '' INT; trap 'echo told' TERM; echo here; while true; do sleep 0.1; done"]
    with subprocess.Popen([*command, *stay], stdout=subprocess.PIPE, text=True) as run:
        assert [run.stdout.readline().partition(" | ")[2] for _ in range(3)] == ["here\n"] * 3
        for _ in range(2):
            run.send_signal(signal.SIGINT)
            time.sleep(0.3)
        assert run.stdout.readline().endswith("told\n")  # So it is about to remove them.
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=30) == 130
    assert (ours(), store.saved()) == ([], [])


def test_a_testbed_of_the_same_name_in_another_folder_is_left_alone(tmp_path, monkeypatch):
    with up(ring(3)) as first:
        program = first.start("n0", ["sleep", "100"])
        monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "other"))
        with up(ring(3)) as second:
            assert (second.alive(), program.poll()) == (3, None)
        monkeypatch.setenv("CHAOSNET_TESTBEDS", str(tmp_path / "up"))
        assert (first.alive(), program.poll()) == (3, None)
    program.wait(timeout=30)


def test_a_cut_link_is_told_and_the_others_are_measured(tmp_path):
    assert chaosnet("up", file_of(line(3), tmp_path), "--name", NAME, "--backend", "relay")[0] == 0
    assert chaosnet("cut", "n0", "n1", "--name", NAME)[0] == 0
    report = tmp_path / "found.json"
    code, out, err = chaosnet("measure", "--name", NAME, "--seconds", "0.1", "--json", report)
    assert (code, err) == (0, "") and "n0           n1                 1000       cut\n" in out
    rows = json.loads(report.read_text())["links"]
    assert [(row["from"], row["cut"], "mbit" in row) for row in rows] == [
        ("n0", True, False), ("n1", True, False), ("n1", False, True), ("n2", False, True),
    ]  # fmt: skip
    assert chaosnet("down", "--name", NAME)[0] == 0


def test_what_was_measured_before_a_failure_is_written(tmp_path, monkeypatch):
    def measured(*_):
        yield {"from": "n0", "to": "n1", "set_mbit": 1.0, "cut": True}
        raise TestbedError("nothing passes from n1 to n2")

    monkeypatch.setattr(testbed, "measure", measured)
    assert chaosnet("up", file_of(line(3), tmp_path), "--name", NAME, "--backend", "relay")[0] == 0
    report = tmp_path / "found.json"
    with pytest.raises(TestbedError, match="nothing passes"):
        testbed.measure_.callback(NAME, 1.0, report)
    assert [row["from"] for row in json.loads(report.read_text())["links"]] == ["n0"]
    assert chaosnet("down", "--name", NAME)[0] == 0


def test_a_relay_that_is_told_to_end_removes_its_folder(tmp_path):
    with up(ring(3)):
        found = json.loads((tmp_path / "up" / f"{NAME}.relay").read_text())
        folder = Path(found["control"].removeprefix("ipc://")).parent
        assert folder.is_dir()
        os.kill(found["pid"], signal.SIGTERM)
        deadline_s = time.monotonic() + 20
        while folder.exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.02)


def test_one_broken_file_keeps_no_other_testbed_from_being_listed_and_goes_with_down(tmp_path):
    assert chaosnet("up", file_of(ring(3), tmp_path), "--name", NAME, "--backend", "relay")[0] == 0
    broken = tmp_path / "up" / "broken.json"
    broken.write_text("{")
    code, out, err = chaosnet("ls")
    assert (code, err, len(out.splitlines())) == (0, "", 2)
    assert out.startswith(f"broken: {broken}: ") and f"{NAME} (relay): 3 nodes, 3 links\n" in out
    assert chaosnet("down", "--name", "broken") == (0, "0 nodes down\n", "")
    assert not broken.exists()
    (tmp_path / "up" / f"{NAME}.json").write_text("{")
    assert chaosnet("down", "--name", NAME) == (0, "3 nodes down\n", "")


@pytest.mark.parametrize("left", ["[]", "3", '{"pid": "x"}', '{"pid": -4, "control": "", "ports": {}}'])
def test_what_a_broken_file_says_of_the_relay_counts_for_nothing(left, tmp_path):
    made = RelayTestbed(NAME, ring(3))
    store.make_folder()
    (tmp_path / "up" / f"{NAME}.relay").write_text(left)
    assert made.alive() == 0
    with pytest.raises(TestbedError, match="make the testbed again"):
        made.in_force()
    assert made.down() == 0
    assert not (tmp_path / "up" / f"{NAME}.relay").exists()


def test_a_back_end_that_nobody_knows_is_told_with_its_file(tmp_path):
    store.make_folder()
    (tmp_path / "up" / "odd.json").write_text('{"backend": "odd", "routes": true, "topology": ""}')
    with pytest.raises(TestbedError, match=r"odd.json: Invalid enum value 'odd' .* \(remove the file\)"):
        store.load("odd")


@pytest.mark.slow
def test_a_trace_keeps_what_other_commands_change_meanwhile(tmp_path):
    (tmp_path / "trace.csv").write_text(
        "time_s,a,b,field,value\n0,n0,n1,rate_mbit,50\n4,n0,n1,rate_mbit,60\n4,n0,n2,rate_mbit,70\n"
    )
    assert chaosnet("up", file_of(ring(3), tmp_path), "--name", NAME, "--backend", "relay")[0] == 0
    command = [*CHAOSNET, "trace", str(tmp_path / "trace.csv"), "--name", NAME]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as tracing:
        assert tracing.stdout.readline().startswith(b"0 s: 1 changes")
        assert chaosnet("cut", "n1", "n2", "--name", NAME)[0] == 0
        assert chaosnet("change", "n0", "n2", "delay_ms=5", "--name", NAME)[0] == 0
        assert tracing.stdout.readline().startswith(b"4 s: 2 changes")
    rows = {row["link"][0] + row["link"][1]: row for row in testbed._opened(NAME).in_force()}
    assert (rows["n0n2"]["delay_ms"], rows["n0n2"]["rate_mbit"], rows["n1n2"]["cut"]) == (5.0, 70.0, True)
    assert testbed._opened(NAME).cuts == {("n1", "n2")}
    assert chaosnet("down", "--name", NAME)[0] == 0


def test_a_testbed_whose_relay_has_died_says_so(tmp_path):
    with up(ring(3)) as made:
        found = json.loads((tmp_path / "up" / f"{NAME}.relay").read_text())
        os.kill(found["pid"], signal.SIGKILL)
        while made.alive():
            time.sleep(0.02)
        with pytest.raises(TestbedError, match=r"the process that relays for .* has ended"):
            made.cut(("n0", "n1"))
    assert not Path(found["control"].removeprefix("ipc://")).parent.exists()


def test_commands_that_change_a_testbed_at_once_keep_what_each_of_them_did():
    links = [("n0", "n1"), ("n1", "n2"), ("n2", "n3")]
    with up(line(4)) as made:
        store.save(made)
        arrived = threading.Barrier(len(links))

        def cut(a, b):
            arrived.wait()
            for _ in range(5):
                testbed.heal.callback(a, b, NAME)
                testbed.cut.callback(a, b, NAME)

        threads = [threading.Thread(target=cut, args=each) for each in links]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert testbed._opened(NAME).cuts == {*links}
