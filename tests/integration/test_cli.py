"""The command line as a newcomer meets it: real processes, and what they print."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from chaosnet import client
from chaosnet.commands.simulate import MAX_CRASH_NODES
from chaosnet.errors import PeerUnreachable
from chaosnet.protocols.status import Status
from chaosnet.simulator.crash_points import MAX_NODES
from chaosnet.trials.node_processes import run_folder

PATIENCE_S = 30.0

TRAIN = """
import sys, time, torch
from chaosnet import Cluster, Trainer, capture_exit_event
torch.manual_seed(0)
torch.set_num_threads(1)
width, pause_s = int(sys.argv[1]), float(sys.argv[2])
model = torch.nn.Sequential(torch.nn.Linear(4, width), torch.nn.Linear(width, 2))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
print("trains", flush=True)
while True:
    model(torch.ones(3, 4)).sum().backward()
    time.sleep(pause_s)
    trainer.update(samples=3)
"""
CAPTURES = (
    TRAIN
    + """
    if capture_exit_event():
        trainer.request_node_exit()
        print("after the loop", flush=True)
        break
"""
)


class Nodes:
    """Processes of `chaosnet run`, ended when the test has."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self, name: str, *options: str, script: str = CAPTURES, width: int = 8, pause_s: float = 0.01
    ) -> None:
        path = self.folder / f"{name}.py"
        path.write_text(script)
        command = [sys.executable, "-m", "chaosnet", "run", "--name", name, *options, str(path)]
        with self._log(name).open("wb") as log:
            self.processes[name] = subprocess.Popen(
                [*command, str(width), str(pause_s)],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env={**os.environ, "OMP_NUM_THREADS": "1", "CHAOSNET_JOIN_PATIENCE_S": "20"},
                start_new_session=True,
            )

    def start_cluster(self, *names: str, **settings: Any) -> str:
        """All at once; all link to the first. Returns: its address, once all train."""
        self.start(names[0], "--listen", "127.0.0.1:0", **settings)
        address = self.founded(names[0])
        for name in names[1:]:
            self.start(name, "--join", address, **settings)
        for name in names:
            self.await_text(name, "trains")
        return address

    def founded(self, name: str) -> str:
        text = self.await_text(name, "CHAOSNET_JOIN=")
        return text.split("CHAOSNET_JOIN=")[1].split()[0]

    def text(self, name: str) -> str:
        return self._log(name).read_text()

    def await_text(self, name: str, part: str) -> str:
        wait_until(lambda: part in self.text(name), lambda: f"{name} says {part!r}: {self.text(name)}")
        return self.text(name)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def exit_code(self, name: str) -> int:
        return self.processes[name].wait(PATIENCE_S)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
            process.wait()

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"


def wait_until(true: Callable[[], bool], what: Callable[[], str]) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < deadline_s, f"in vain waited until {what()}"
        time.sleep(0.05)


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    nodes = Nodes(tmp_path)
    yield nodes
    nodes.end()


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Nodes, str]]:
    """Nodes a, b, c, in a triangle. Only the last tests below send some of them away."""
    nodes = Nodes(tmp_path_factory.mktemp("three"))
    address = nodes.start_cluster("a", "b", "c")
    yield nodes, address
    nodes.end()


Main = Callable[..., tuple[int, str, str]]


def state_by_node(address: str) -> dict[str, str]:
    return {row.node: row.state for row in client.status(address).members}


def links(address: str) -> set[tuple[str, str]]:
    rows = client.status(address).members
    return {(row.node, other) for row in rows for other in row.neighbors if row.node < other}


# --- usage ---


USAGE = {
    "run --join 10.0.0.2 SCRIPT": "--join: '10.0.0.2' has no port (expected HOST:PORT, e.g. 10.0.0.2:5555)",
    "run --join 10.0.0.2:x SCRIPT": "--join: '10.0.0.2:x' has no port: 'x' is no number from 1 to",
    "run --join :5555 SCRIPT": "--join: ':5555' has no host (expected",
    "run --listen nowhere SCRIPT": "--listen: 'nowhere' has no port (expected",
    "run --listen -1 SCRIPT": "--listen: '-1' has no port (expected",
    "run --every -1 SCRIPT": "--every: '-1' is out of range (expected",
    "run --checkpoint-dir= SCRIPT": "--checkpoint-dir: '' names nothing (expected a folder, which",
    "run --key= SCRIPT": "--key: '' names nothing (expected the path of a file)",
    "keygen --out=": "--out: '' names nothing (expected the path of a file)",
    "demo --out=": "--out: '' names nothing (expected a folder",
    "soak --out SCRIPT": "--out: '",
    "run --neighbors 0 SCRIPT": "--neighbors: '0' is out of range (expected a whole number from 1 to 64)",
    "run --neighbors 2 --link a --join h:1 SCRIPT": "--link: 'a' beside --neighbors 2 (expected one of them)",
    "run --link a SCRIPT": "--link: 'a' without --join",
    "run --policy best SCRIPT": "--policy: 'best' is unknown (expected one of packed, fapt, single, ring)",
    "top 127.0.0.1:9": "chaosnet top: this is no terminal (expected one; chaosnet status prints",
    "run --every 5 SCRIPT": "--every: without --checkpoint-dir (expected the folder to write to)",
    "run --resume SCRIPT": "--resume: without --checkpoint-dir (expected the folder to resume from)",
    "run --checkpoint-dir SCRIPT SCRIPT": "--checkpoint-dir: ",
    "run --checkpoint-dir d --every 0 SCRIPT": "--every: '0' is out of range (expected a whole number from 1",
    "run --checkpoint-dir d --resume-from x SCRIPT": "--resume-from: 'x' is no number",
    "run --checkpoint-copies two SCRIPT": "--checkpoint-copies: 'two' is unknown (expected one of shard, whole)",
    "checkpoints": "DIR: missing (expected a folder",
    "run --name a,b SCRIPT": "--name: 'a,b' is no name (expected 1 to 64 characters",
    "run missing.py": "SCRIPT: 'missing.py' does not exist (expected a Python file",
    "run": "SCRIPT: missing (expected a Python file, e.g. train.py)",
    "run --jion h:1 SCRIPT": "--jion: no such option (did you mean --",
    "run -m": "SCRIPT: missing (expected a Python file, e.g. train.py)",
    "status": "chaosnet status: no address, and no node of yours runs on this machine (expected HOST:PORT",
    "go-on": "chaosnet go-on: no address, and no node of yours runs on this machine",
    "dashboard": "chaosnet dashboard: no address, and no node of yours runs on this machine",
    "dashboard h:1 --file run.json": "chaosnet dashboard: ADDRESS and --file: both (expected one)",
    "dashboard --allow-actions --file run.json": "chaosnet dashboard: --allow-actions beside --file",
    "relayout 2+2": "chaosnet relayout: no address, and no node of yours runs on this machine",
    "relayout --auto": "chaosnet relayout: no address, and no node of yours runs on this machine",
    "relayout h:1": "chaosnet relayout: LAYOUT: expected stages of each pipeline",
    "relayout 2+2 --auto": "chaosnet relayout: LAYOUT: expected stages of each pipeline",
    "relayout h:1 2+2 3": "chaosnet relayout: '3' is one too many (expected [ADDRESS] LAYOUT)",
    "relayout h:x 2": "chaosnet relayout: 'h:x' has no port",
    "allow": "chaosnet allow: KEY: missing (expected a public key",
    "revoke h:1 x": "chaosnet revoke: 'x' is no key (expected a public key",
    "link add a": "chaosnet link add: no address, and no node of yours runs on this machine",
    "link add a b": "chaosnet link add: 'a' has no port (expected HOST:PORT",
    "link add h:1 b c": "chaosnet link add: 'c' is one too many (expected [A] B)",
    "status 127.0.0.1:0": "ADDRESS: '127.0.0.1:0' names port 0",
    "leave here": "ADDRESS: 'here' has no port (expected",
    "link add": "chaosnet link add: B: missing (expected HOST:PORT or a node's name",
    "link cut h:1 b": "chaosnet link: No such command 'cut'",
    "bench nothing": "'nothing' is no benchmark (expected one of join, start, allreduce, overlay, replan",
    "simulate --schedules some": "--schedules: 'some' is no number (expected a whole number",
    "simulate --schedules 5 --seed 3": "chaosnet simulate: 2 things to run (expected exactly one of --schedules,",
    "simulate --schedules 5 --nodes 9..3": "--nodes: '9..3' is out of range (expected a number of nodes from 2",
    "simulate --schedules 5 --json SCRIPT/found.json": "--json: '",
    "simulate --seed 5 --json f": "--json: means nothing with --seed (expected --nodes or --hard or --rates or",
    "simulate --mutants --hard": "--hard: means nothing with --mutants (expected --json)",
    "simulate --crash-points --nodes 3..9": "--nodes: 3..9 with --crash-points (expected at most 5)",
    "run --resume-from 3 SCRIPT": "--resume-from: without --checkpoint-dir",
    "bench policy --json SCRIPT/found.json": "--json: '",
    "frobnicate": "chaosnet: No such command 'frobnicate'",
}


@pytest.mark.parametrize("words", USAGE)
def test_wrong_usage_is_one_line_that_names_option_value_and_what_was_expected(
    words: str, chaosnet: Main, tmp_path: Path
) -> None:
    script = tmp_path / "train.py"
    script.touch()
    code, out, err = chaosnet(*words.replace("SCRIPT", str(script)).split())
    assert (code, out) == (2, "")
    assert err.startswith(f"error: {USAGE[words]}")
    assert err.count("\n") == 1


def test_what_is_repeated_here_to_start_quickly_is_what_there_is() -> None:
    assert MAX_CRASH_NODES == MAX_NODES


@pytest.mark.parametrize("words", ["run --join TOKEN SCRIPT", "run --join xTOKEN SCRIPT", "status TOKEN",
                                   "run --join h:1,TOKEN SCRIPT", "run --listen TOKEN SCRIPT"])  # fmt: skip
def test_no_error_repeats_an_invite(words: str, chaosnet: Main, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("from chaosnet import Trainer\nTrainer()\n")
    secret = "A1b-" * 30
    line = words.replace("SCRIPT", str(tmp_path / "train.py")).replace("TOKEN", f"chaosnet-invite-{secret}")
    code, _, err = chaosnet(*line.split())
    assert code != 0
    assert err.startswith("error: ")
    assert "A1b" not in err


@pytest.mark.parametrize("command", ["demo", "soak"])
def test_a_folder_that_holds_something_else_is_left_alone(
    command: str, chaosnet: Main, tmp_path: Path
) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    code, _, err = chaosnet(command, "--out", str(tmp_path))
    assert code == 1
    assert err.startswith(f"error: --out: '{tmp_path}' holds something else (expected a new folder")
    assert (tmp_path / "thesis.txt").read_text() == "years of work"


@pytest.mark.parametrize(
    ("words", "kept"), [("demo", {"CHAOSNET_KEY"}), ("demo --pipeline", {"CHAOSNET_KEY"}), ("soak", set())]
)
def test_what_the_environment_says_of_the_users_own_nodes_is_not_for_those_of_a_trial(
    words: str, kept: set[str], chaosnet: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = {"CHAOSNET_CLUSTER": "lab", "CHAOSNET_CHECKPOINT_DIR": "/mnt/run1", "CHAOSNET_KEY": "/mnt/key"}
    for name, text in said.items():
        monkeypatch.setenv(name, text)
    seen: list[set[str]] = []
    for place in ("demo.run_demo", "demo_pipeline.run_demo", "soak.run_soak"):
        monkeypatch.setattr(f"chaosnet.trials.{place}", lambda *how: seen.append({*os.environ} & {*said}))
    assert chaosnet(*words.split()) == (0, "", "")
    assert seen == [kept]


def test_what_an_earlier_run_has_left_makes_room_for_the_next(tmp_path: Path) -> None:
    run_folder(tmp_path / "out")
    (tmp_path / "out" / "node-1.log").touch()
    run_folder(tmp_path / "out")
    assert not (tmp_path / "out" / "node-1.log").exists()


@pytest.mark.realtime
@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_comes_without_torch(word: str) -> None:
    command = [sys.executable, "-X", "importtime", "-m", "chaosnet", word]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "chaosnet" in done.stdout
    assert "torch" not in done.stderr
    assert "chaosnet.cli" in done.stderr


# --- scripts ---


def run_script(folder: Path, text: str, *args: str) -> subprocess.CompletedProcess[str]:
    (folder / "script.py").write_text(text)
    command = [sys.executable, "-m", "chaosnet", "run", "--name", "n", "script.py", *args]
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, check=False)


@pytest.mark.realtime
def test_a_script_runs_as_python_would_run_it(tmp_path: Path) -> None:
    (tmp_path / "scheduler.py").write_text("HERE = True\n")  # The user's own, not ours.
    done = run_script(
        tmp_path,
        "import os, sys, scheduler, __main__\n"
        "print(sys.argv, sys.path[0], __name__, __file__, scheduler.HERE, __main__.os is os)\n"
        "print(os.environ['CHAOSNET_NAME'])\n"
        "sys.exit(7)\n",
        "--join",
        "x",
    )
    expected = f"['script.py', '--join', 'x'] {tmp_path} __main__ script.py True True\nn\n"
    assert (done.stdout, done.returncode) == (expected, 7), done.stderr


@pytest.mark.realtime
def test_an_error_in_a_script_shows_the_scripts_own_traceback(tmp_path: Path) -> None:
    done = run_script(tmp_path, "def work():\n    return 1 / 0\nwork()\n")
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
    assert "line 3, in <module>" in done.stderr
    for ours in ("runpy", "click", "chaosnet"):
        assert ours not in done.stderr


@pytest.mark.realtime
def test_an_error_of_chaosnet_in_a_script_is_one_line(tmp_path: Path) -> None:
    done = run_script(tmp_path, "from chaosnet import ConfigError\nraise ConfigError('steps: -1')\n")
    assert (done.returncode, done.stderr) == (2, "error: steps: -1\n")


# --- checkpoints ---


@pytest.mark.slow
@pytest.mark.realtime
def test_the_same_command_starts_a_run_and_goes_on_with_it(
    nodes: Nodes, chaosnet: Main, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    options = ("--checkpoint-dir", str(folder), "--every", "10", "--resume")
    nodes.start("first", *options)
    assert "starts from scratch" in nodes.await_text("first", "trains")
    wait_until(lambda: len(list(folder.glob("step-*/*.json"))) >= 2, lambda: "two checkpoints")
    nodes.signal("first", signal.SIGKILL)
    nodes.exit_code("first")
    code, out, err = chaosnet("checkpoints", str(folder), "--json")
    newest = [row for row in json.loads(out) if row["complete"]][-1]
    assert (code, err, newest["problem"]) == (0, "", "")
    nodes.start("second", *options)
    assert f"goes on from step {newest['step']} in {newest['path']}" in nodes.await_text("second", "trains")
    nodes.signal("second", signal.SIGINT)
    assert nodes.exit_code("second") == 0


@pytest.mark.slow
@pytest.mark.realtime
def test_a_damaged_checkpoint_is_listed_and_refused_in_one_line(
    nodes: Nodes, chaosnet: Main, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoints"
    nodes.start("first", "--checkpoint-dir", str(folder), "--every", "10")
    nodes.await_text("first", "trains")
    wait_until(lambda: len(list(folder.glob("step-*/*.json"))) >= 1, lambda: "a checkpoint")
    nodes.signal("first", signal.SIGINT)
    nodes.exit_code("first")
    file = sorted(folder.glob("step-*/*.safetensors"))[-1]
    data = file.read_bytes()
    file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    assert chaosnet("checkpoints", str(folder))[0] == 0  # All files have their size.
    code, out, _ = chaosnet("checkpoints", str(folder), "--verify")
    assert code == 1 and f"{file.name} is damaged" in out
    step = file.parent.name.split("-")[1]
    nodes.start("second", "--checkpoint-dir", str(folder), "--resume-from", str(int(step)))
    assert nodes.exit_code("second") == 1
    (line,) = [line for line in nodes.text("second").splitlines() if line.startswith("error: ")]
    assert line.startswith(f"error: cannot resume: {file} is damaged: ") and "--resume-from" in line


def test_a_folder_without_checkpoints_says_so(chaosnet: Main, tmp_path: Path) -> None:
    assert chaosnet("checkpoints", str(tmp_path)) == (0, f"no checkpoints in {tmp_path}\n", "")
    code, _, err = chaosnet("checkpoints", str(tmp_path / "absent"))
    assert (code, err) == (1, f"error: {tmp_path / 'absent'} does not exist\n")


def test_a_folder_is_called_by_its_name_whatever_that_has(chaosnet: Main, tmp_path: Path) -> None:
    for name in ("[red]x", "[", ":boom:"):
        (folder := tmp_path / name).mkdir()
        assert chaosnet("checkpoints", str(folder)) == (0, f"no checkpoints in {folder}\n", "")
    (
        damaged := tmp_path / "[" / "b]"
    ).mkdir()  # The end of its path looks like the end of what has never begun.
    assert chaosnet("checkpoints", str(damaged)) == (0, f"no checkpoints in {damaged}\n", "")


@pytest.mark.parametrize(
    "words", ["run PLACE/train.py", "checkpoints PLACE", "run --checkpoint-dir PLACE SCRIPT"]
)
@pytest.mark.parametrize("number", [errno.EACCES, errno.ENAMETOOLONG])
def test_a_path_that_leads_through_a_closed_folder_is_named(
    words: str, number: int, chaosnet: Main, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, looked_at = tmp_path / "closed" / "inside", Path.stat
    (tmp_path / "train.py").touch()

    def closed(path: Path, **how: Any) -> os.stat_result:
        if "closed" in path.parts:
            raise OSError(number, os.strerror(number), str(path))
        return looked_at(path, **how)

    monkeypatch.setattr(Path, "stat", closed)
    line = words.replace("PLACE", str(place)).replace("SCRIPT", str(tmp_path / "train.py"))
    code, _, err = chaosnet(*line.split())
    assert code == 2 and err.count("\n") == 1
    assert str(place) in err and f"cannot be read: {os.strerror(number)} (expected a" in err


@pytest.mark.parametrize("encoding", ["ascii", "ascii:surrogateescape"], ids=["strict", "as-by-locale-c"])
def test_a_terminal_that_lacks_a_letter_shows_a_question_mark(encoding: str, tmp_path: Path) -> None:
    (folder := tmp_path / "gr\u00fcn").mkdir()
    (script := tmp_path / "train.py").write_text("print('gr\u00fcn')\n")
    told = {}
    for words in (("checkpoints", folder), ("run", script)):
        command = [sys.executable, "-m", "chaosnet", *map(str, words)]
        env = {**os.environ, "PYTHONIOENCODING": encoding}
        told[words[0]] = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=60, check=False
        )
    assert (told["checkpoints"].returncode, told["checkpoints"].stderr) == (0, "")
    assert told["checkpoints"].stdout == f"no checkpoints in {tmp_path / 'gr?n'}\n"
    assert "UnicodeEncodeError" in told["run"].stderr, "as python would end it"


FULL = "cannot write the output: No space left on device"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "words", ["--version", "simulate --schedules 1", "simulate --schedules 1 --json /dev/full"]
)
def test_output_to_a_full_disk_is_told_in_one_line(words: str) -> None:
    command = [sys.executable, "-m", "chaosnet", *words.split()]
    with open(os.devnull if "--json" in words else "/dev/full", "w") as out:
        done = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (1, f"error: {FULL}\n")


# --- a running cluster ---


@pytest.mark.realtime
def test_status_shows_members_links_scheduler_and_events(three: tuple[Nodes, str], chaosnet: Main) -> None:
    _, address = three
    wait_until(lambda: client.status(address).samples_per_s > 0, lambda: "reports are in")
    code, out, err = chaosnet("status", address, "--wide")
    assert (code, err) == (0, "")
    for part in ("3 members", "scheduler a", "samples/s", "worker", "a - b", "c joins", address):
        assert part in out
    code, out, err = chaosnet("status", address, "--json")
    found = json.loads(out)
    assert (code, err, found["scheduler"]) == (0, "", "a")
    assert {row["node"]: row["state"] for row in found["members"]} == dict.fromkeys("abc", "active")
    assert all({"rate_mbit", "rate_back_mbit", "rtt_min_ms"} <= row.keys() for row in found["links"])
    assert {"joined"} <= {event["kind"] for event in found["events"]}


@pytest.mark.realtime
def test_links_are_removed_and_added_while_training(three: tuple[Nodes, str], chaosnet: Main) -> None:
    _, address = three
    addresses = {row.node: row.addresses[0] for row in client.status(address).members}
    assert links(address) == {("a", "b"), ("a", "c"), ("b", "c")}
    assert chaosnet("link", "remove", addresses["b"], "c") == (0, "the link b - c is closed\n", "")
    assert links(address) == {("a", "b"), ("a", "c")}
    code, _, err = chaosnet("link", "remove", address, "b")
    assert (code, err.count("\n")) == (1, 1)
    assert "the overlay falls into two parts" in err
    code, _, err = chaosnet("link", "add", address, "z")
    assert code == 1
    assert "'z' is no member (members: a (" in err
    assert chaosnet("link", "add", addresses["c"], addresses["b"]) == (0, "the link b - c is open\n", "")
    assert links(address) == {("a", "b"), ("a", "c"), ("b", "c")}


@pytest.mark.realtime
def test_who_asks_nobody_is_told_so(chaosnet: Main) -> None:
    code, out, err = chaosnet("status", "127.0.0.1:9")
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith("error: 127.0.0.1:9: nobody answers (it does not accept connections")


@pytest.mark.slow
@pytest.mark.realtime
def test_refused_joiners_say_why_and_the_cluster_goes_on(three: tuple[Nodes, str], nodes: Nodes) -> None:
    _, address = three
    before = client.status(address).step
    quick = CAPTURES.replace("0.01))", "0.01), cluster=Cluster(join_patience_s=1.0))")
    nodes.start("wide", "--join", address, width=16)
    nodes.start("clips", "--join", address, script=CAPTURES.replace("0.01))", "0.01), max_grad_norm=0.5)"))
    nodes.start("lost", "--join", "127.0.0.1:9", script=quick)
    nodes.start("a", "--join", address, script=quick)
    expected = {
        "wide": (address, "the model differs", "0.weight", "(16, 4)", "(8, 4)"),
        "clips": (address, "'max_grad_norm' is 0.5 here, None there"),
        "lost": ("127.0.0.1:9", "nobody answers", "does not accept connections", "tried for 1 s"),
        "a": (address, "another node is called 'a' too"),
    }
    for name, (where, *parts) in expected.items():
        assert nodes.exit_code(name) == (1 if name == "lost" else 2), (
            "who may be let in later is started again"
        )
        assert "Traceback" not in nodes.text(name)
        said = nodes.text(name).splitlines()[-1].replace("[", "(").replace("]", ")")
        assert said.startswith(f"error: {name} cannot join {where}: ")
        assert [part for part in parts if part not in said] == [], said
    found = client.status(address)
    assert found.step > before
    assert state_by_node(address) == dict.fromkeys("abc", "active")


@pytest.mark.slow
@pytest.mark.realtime
def test_a_namesake_does_not_push_a_member_out(three: tuple[Nodes, str], nodes: Nodes) -> None:
    cluster, address = three
    cluster.start("e", "--join", address)
    cluster.await_text("e", "trains")
    nodes.start("e", "--join", address)
    try:
        done = nodes.processes["e"]
        wait_until(
            lambda: done.poll() is not None or "trains" in nodes.text("e"), lambda: "the second e is in"
        )
        assert done.poll() == 2
        assert "a node named 'e' is in the cluster already" in nodes.text("e")
        assert cluster.processes["e"].poll() is None
    finally:
        cluster.signal("e", signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.realtime
def test_leave_sends_a_node_away_even_if_its_script_never_asks(
    three: tuple[Nodes, str], nodes: Nodes, chaosnet: Main
) -> None:
    _, address = three
    nodes.start("d", "--join", address, script=TRAIN)
    nodes.await_text("d", "trains")
    (theirs,) = (row.addresses[0] for row in client.status(address).members if row.node == "d")
    assert chaosnet("leave", theirs) == (0, "d leaves\n", "")
    assert nodes.exit_code("d") == 0
    assert "d left after step" in nodes.text("d")
    assert "Traceback" not in nodes.text("d")
    assert state_by_node(address)["d"] == "left"


@pytest.mark.slow
@pytest.mark.realtime
def test_leave_sends_the_only_node_away(nodes: Nodes, chaosnet: Main) -> None:
    nodes.start("a", script=TRAIN)
    nodes.await_text("a", "trains")
    assert chaosnet("leave", nodes.founded("a"))[0] == 0
    assert nodes.exit_code("a") == 0
    assert "a left after step" in nodes.text("a")


@pytest.mark.realtime
def test_ctrl_c_finishes_the_step_and_leaves(three: tuple[Nodes, str]) -> None:
    nodes, address = three
    nodes.signal("c", signal.SIGINT)
    assert nodes.exit_code("c") == 0
    text = nodes.text("c")
    for part in (
        "finishing the step, then leaving",
        "c left after step",
        "steps with samples",
        "after the loop",
    ):
        assert part in text
    assert "Traceback" not in text
    states = state_by_node(address)
    assert (states["a"], states["c"]) == ("active", "left")


@pytest.mark.slow
@pytest.mark.realtime
def test_ctrl_c_while_it_joins_ends_the_script(nodes: Nodes) -> None:
    nodes.start("a", "--join", "127.0.0.1:9")  # Nobody is there.
    nodes.await_text("a", "joins the cluster")
    nodes.signal("a", signal.SIGINT)
    assert nodes.exit_code("a") == 0
    text = nodes.text("a")
    assert "a left before it was a member" in text
    assert not [word for word in ("error", "Traceback", "after the loop") if word in text]


@pytest.mark.realtime
def test_status_answers_right_after_the_scheduler_has_died(three: tuple[Nodes, str]) -> None:
    nodes, address = three
    addresses = {row.node: row.addresses[0] for row in client.status(address).members}
    nodes.signal("a", signal.SIGKILL)
    found = client.status(addresses["b"])
    assert found.scheduler in ("b", "c")  # Whichever joined first.
    assert {row.node: row.state for row in found.members}["a"] == "failed"


@pytest.mark.slow
@pytest.mark.realtime
def test_a_watch_goes_on_when_the_node_that_it_asks_dies_and_when_the_next_one_leaves(nodes: Nodes) -> None:
    nodes.start_cluster("a", "b", "c")
    silent: list[PeerUnreachable] = []
    watch = client.watch(nodes.founded("a"), every_s=0.1, on_silence=silent.append)
    found = next(watch)
    assert (found.scheduler, {row.node for row in found.active}) == ("a", set("abc"))
    nodes.signal("a", signal.SIGKILL)
    found = _watch_until(watch, lambda found: {row.node for row in found.active} == set("bc"))
    assert found.scheduler in "bc" and "joined" in {event.kind for event in found.events}
    assert silent, "the address of a was asked once more"
    nodes.signal(found.scheduler, signal.SIGINT)
    (left,) = set("bc") - {found.scheduler}
    found = _watch_until(watch, lambda found: [row.node for row in found.active] == [left])
    later = _watch_until(watch, lambda later: later.step > found.step)
    assert (later.scheduler, later.cluster) == (left, found.cluster)


def _watch_until(watch: Iterator[Status], holds: Callable[[Status], bool]) -> Status:
    deadline_s = time.monotonic() + PATIENCE_S
    for found in watch:
        if holds(found):
            return found
        assert time.monotonic() < deadline_s, f"in vain watched: {found}"
    raise AssertionError("a watch never ends")


@pytest.mark.realtime
def test_a_watch_of_a_cluster_that_is_gone_ends_with_what_it_has_asked(nodes: Nodes) -> None:
    address = nodes.start_cluster("a")
    watch = client.watch(address, every_s=0.1, patience_s=1.0)
    next(watch)
    nodes.signal("a", signal.SIGKILL)
    with pytest.raises(PeerUnreachable, match=rf"the cluster has not answered for \d s \(asked: {address}"):
        _watch_until(watch, lambda found: False)


@pytest.mark.slow
@pytest.mark.realtime
def test_a_status_with_history_has_the_steps_and_one_without_stays_small(
    nodes: Nodes, chaosnet: Main
) -> None:
    address = nodes.start_cluster("a", "b")
    wait_until(lambda: client.status(address).step >= 30, lambda: "30 steps are made")
    short, whole = client.status(address), client.status(address, history=True)
    assert short.steps == () and short.version == 1
    steps = [row.step for row in whole.steps]
    assert len(steps) >= 30 and steps == list(range(steps[0], steps[0] + len(steps)))
    assert all(row.seconds is not None and row.seconds > 0 for row in whole.steps[1:])
    assert all(row.samples > 0 for row in whole.steps[-10:])
    code, out, _ = chaosnet("status", address, "--json", "--history")
    found = json.loads(out)
    assert (code, found["version"]) == (0, 1) and len(found["steps"]) >= len(steps)
    code, out, _ = chaosnet("status", address, "--history")
    assert code == 0 and f"{steps[-1]:,}" in out


@pytest.mark.realtime
def test_a_cluster_whose_status_has_another_version_is_told_from_one_that_is_silent(
    nodes: Nodes, chaosnet: Main, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = nodes.start_cluster("a")
    monkeypatch.setattr("chaosnet.protocols.status.STATUS_VERSION", 2)  # Here, and not in the node.
    code, out, err = chaosnet("status", address)
    assert (code, out, err.count("\n")) == (1, "", 1)
    assert err.startswith(f"error: {address}: the cluster tells its status in version 1, which this chaosnet")


@pytest.mark.realtime
def test_a_second_ctrl_c_leaves_at_once(nodes: Nodes) -> None:
    nodes.start("a", pause_s=60.0)
    nodes.await_text("a", "trains")
    nodes.signal("a", signal.SIGINT)
    nodes.await_text("a", "finishing the step")
    nodes.signal("a", signal.SIGINT)
    assert nodes.exit_code("a") == 130
    assert "leaving at once" in nodes.text("a")
