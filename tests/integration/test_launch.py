"""`chaosnet launch`: over something that stands for ssh on this machine, and over real sshds in namespaces."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest
from lan import CHAOSNET, Machines, needs_namespaces

from chaosnet.netem.netns import run

pytestmark = pytest.mark.realtime

ENDLESS = Path(__file__).parents[2] / "examples" / "endless.py"
PATIENCE_S = 60.0
SSH = """import os, sys
if sys.argv[1] == "-G":
    sys.exit(print("hostname", "127.0.0.1"))
login, command = sys.argv[-2:]
if login == "far":
    sys.exit("ssh: connect to host far port 22: No route to host")
print("Welcome to", login, flush=True)
os.execvp("sh", ["sh", "-c", command])
"""
SCRIPT = """import os, sys, time
print("named", os.environ["CHAOSNET_NAME"], *sys.argv[1:])
print("at", os.environ["CHAOSNET_LISTEN"], file=sys.stderr)
if os.environ.get("CODE"):
    sys.exit(int(os.environ["CODE"]))
open(f"pid-{os.environ['CHAOSNET_NAME']}", "w").write(str(os.getpid()))
while True:
    try:
        time.sleep(60)
    except KeyboardInterrupt:
        if os.environ.get("STUBBORN") != "1":
            sys.exit(print("leaves"))
"""


class Launched:
    """A launch from `folder`, and what it prints."""

    def __init__(self, folder: Path, hosts: str, *words: str, inside: tuple[str, ...] = ()) -> None:
        self.folder, self.log = folder, folder / "launch.log"
        (folder / "hosts").write_text(hosts)
        command = [*inside, *CHAOSNET, "launch", "--hosts", "hosts", *words]
        env = {**os.environ, "XDG_CONFIG_HOME": str(folder / "own"), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as out:
            self.process = subprocess.Popen(
                command, cwd=folder, env=env, stdout=out, stderr=subprocess.STDOUT
            )

    def says(self, *texts: str) -> str:
        self.until(lambda: all(text in self.log.read_text() for text in texts), f"says {texts}")
        return self.log.read_text()

    def until(self, happened: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:g} s: {what}\n{self.log.read_text()}"
            time.sleep(0.05)

    def ends(self) -> int:
        return self.process.wait(PATIENCE_S)

    def pids(self) -> list[int]:
        """Of members that have come as far as to write them down."""
        return [int(file.read_text() or 0) for file in self.folder.glob("pid-*")]

    def close(self) -> None:
        self.process.kill()
        self.process.wait()


Start = Callable[..., Launched]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Over what stands for ssh."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "lab").mkdir()
    (tmp_path / "lab" / "train.py").write_text(SCRIPT)
    made: list[Launched] = []

    def begin(hosts: str, *words: str, ssh: str = SSH) -> Launched:
        (tmp_path / "ssh.py").write_text(ssh)
        made.append(Launched(tmp_path, hosts, "--ssh", f"{sys.executable} ssh.py", *words))
        return made[-1]

    yield begin
    for each in made:
        each.close()


def test_ctrl_c_has_all_members_leave_and_each_line_names_its_own(start: Start) -> None:
    launched = start("one\nme@two port=6000 slots=2\n", "train.py", "--lr", "0.1")
    said = launched.says("named two-0 --lr 0.1", "two-1  | named", "one    | named", "at 127.0.0.1:6001")
    assert "one    | Welcome to one" in said and "starts 3 members on 2 hosts" in said
    launched.until(lambda: len(launched.pids()) == 3 and all(launched.pids()), "all are there")
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends() == 0, launched.log.read_text()
    assert launched.log.read_text().count("| leaves\n") == 3


def test_sigterm_to_the_launcher_has_the_members_leave_that_run_a_module(start: Start) -> None:
    launched = start("one address=[::1] slots=2\n", "-m", "lab.train", "--lr", "0.1")
    launched.says("one-0  | named one-0 --lr 0.1", "one-1  | named one-1 --lr 0.1", "at [::1]:5556")
    launched.until(lambda: len(launched.pids()) == 2 and all(launched.pids()), "both are there")
    launched.process.terminate()
    assert launched.ends() == 0, launched.log.read_text()
    assert launched.log.read_text().count("| leaves\n") == 2


def test_a_module_that_is_not_there_is_named_by_each_member(start: Start) -> None:
    launched = start("one\n", "-m", "lab.drain")
    assert launched.ends() == 1
    launched.says("error: -m: 'lab.drain' cannot be found", "one ended with exit code 2")


def test_a_second_ctrl_c_kills_all_and_says_so(start: Start) -> None:
    launched = start("one\n", "--env", "STUBBORN=1", "train.py")
    launched.until(lambda: all(launched.pids()) and launched.pids(), "it is there")
    launched.process.send_signal(signal.SIGINT)
    launched.says("all members finish their step and leave")
    assert psutil.pid_exists(launched.pids()[0])
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends() == 130
    assert "one ended with exit code 137" in launched.log.read_text()
    assert not psutil.pid_exists(launched.pids()[0])


def test_a_hosts_file_of_an_editor_that_marks_its_encoding_and_a_pwd_that_is_none(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PWD", "/no/such/folder")
    launched = start("\ufeffone\n", "--env", "CODE=0", "train.py")
    assert launched.ends() == 0, launched.log.read_text()
    assert "one    | named one\n" in launched.log.read_text()


def test_what_is_not_utf_8_is_named(start: Start) -> None:
    launched = start("one\n", "--env", "LATIN=\udce9", "train.py")
    assert launched.ends() == 1
    assert launched.log.read_text().startswith("error: --env LATIN: '\\udce9' is not UTF-8 (expected ")


def test_a_folder_that_is_gone_is_named(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("one\n")
    (tmp_path / "gone").mkdir()
    shell = ["sh", "-c", 'cd gone && rmdir ../gone && exec "$@"', "sh"]
    command = [*shell, *CHAOSNET, "launch", "--hosts", "../hosts", "train.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert (
        done.stderr == f"error: the folder where you are, {tmp_path}/gone, is gone (expected --workdir DIR)\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("stuck", [False, True])
def test_what_ssh_has_started_and_left_keeps_nobody(start: Start, stuck: bool) -> None:
    """As a ProxyCommand that waits for its own connection: it holds ssh's standard error."""
    head, _, rest = SSH.partition("\n")
    leaves = "import subprocess, time\nif sys.argv[1] != '-G': subprocess.Popen(['sleep', '50'], stdout=2)\n"
    hangs = "if sys.argv[1] != '-G': time.sleep(50)\n" if stuck else ""
    launched = start("one\n", "train.py", ssh=f"{head}\n{leaves}{hangs}{rest}")
    began_s = time.monotonic()
    if stuck:
        time.sleep(3.0)
    else:
        launched.until(lambda: all(launched.pids()) and launched.pids(), "it is there")
    launched.process.send_signal(signal.SIGINT)
    assert launched.ends() == (130 if stuck else 0)
    assert time.monotonic() - began_s < 40
    assert "Event loop is closed" not in launched.log.read_text()


def test_hosts_that_cannot_be_used_are_named_and_the_others_go_on(start: Start) -> None:
    launched = start("far port=6100\none\n", "--env", "CODE=3", "train.py")
    assert launched.ends() == 1
    said = launched.log.read_text()
    assert "launch | far is left out: ssh: connect to host far port 22: No route to host\n" in said
    assert "launch | one ended with exit code 3\n" in said
    assert said.endswith("launch | not all has ended well: far, one\n")


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("other.py",), "'other.py' does not exist (expected a Python file, e.g. train.py)"),
        (("--workdir", "/nowhere", "train.py"), "/nowhere: no such folder there (expected --workdir DIR)"),
        (("--python", "/nowhere/python", "train.py"), "(expected --python PATH of one with chaosnet)"),
    ],
)
def test_a_host_says_why_it_cannot_start_a_member(start: Start, words: tuple[str, ...], why: str) -> None:
    launched = start("one\n", *words)
    assert launched.ends() == 1
    assert "launch | one is left out: " in launched.says(why, "no host is left to start a member on")


@pytest.mark.parametrize("stubborn", ["0", "1"])
def test_nothing_is_left_when_the_launcher_is_killed(start: Start, stubborn: str) -> None:
    words = ("--grace", "0.5", "--env", f"STUBBORN={stubborn}", "train.py")
    launched = start("one slots=2\n", *words)
    launched.until(lambda: len(launched.pids()) == 2 and all(launched.pids()), "all are there")
    launched.process.kill()
    launched.until(lambda: not any(map(psutil.pid_exists, launched.pids())), "all are gone")


# --- real sshds ---

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
needs_sshd = pytest.mark.skipif(
    SSHD is None or shutil.which("ssh-keygen") is None, reason="needs sshd (package openssh-server)"
)


def serve(machines: Machines, name: str) -> None:
    """An sshd on that machine, for one key, whose users keep their own chaosnet keys."""
    folder = machines.folder
    settings = {
        "HostKey": folder / "host", "AuthorizedKeysFile": folder / "user.pub", "StrictModes": "no", "PidFile": "none",
        "PermitRootLogin": "prohibit-password", "PasswordAuthentication": "no",
        "SetEnv": f"XDG_CONFIG_HOME={folder / name} CHAOSNET_STATE_DIR={folder / name} OMP_NUM_THREADS=1",
    }  # fmt: skip
    file = folder / f"sshd-{name}"
    file.write_text("".join(f"{key} {value}\n" for key, value in settings.items()))
    assert SSHD is not None
    with machines.log(name).open("wb") as out:
        machines.processes[name] = subprocess.Popen(
            machines.inside(name, SSHD, "-D", "-e", "-f", str(file)), stdout=out, stderr=out
        )


@pytest.fixture
def network(tmp_path: Path) -> Iterator[Machines]:
    """A desk, and three hosts with an sshd, at one switch."""
    machines = Machines(tmp_path)
    for key in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / key], check=True)
    Path("/run/sshd").mkdir(exist_ok=True)  # Where it shuts itself in.
    try:
        machines.switch("sw")
        for number, name in enumerate(("desk", "a", "b", "c")):
            machines.add(name)
            device = machines.wire(name, "sw", f"10.98.0.{number or 100}/24")
            longer = ("-6", "addr", "add", f"fd00:98::{number or 100}/64", "dev", device, "nodad")
            run(("ip", "-n", machines.prefix + name, *longer))
            if number:
                serve(machines, name)
        yield machines
    finally:
        machines.down()


def runs_on(machines: Machines, name: str) -> list[str]:
    """Members there."""
    pids = subprocess.run(
        ["ip", "netns", "pids", machines.prefix + name], capture_output=True, text=True, check=True
    )
    found = []
    for pid in pids.stdout.split():
        try:
            words = psutil.Process(int(pid)).cmdline()
        except psutil.NoSuchProcess:
            continue
        found += (
            [" ".join(words)]
            if any("chaosnet" in word for word in words[:4]) and "ip" not in words[:1]
            else []
        )
    return found


@needs_namespaces
@needs_sshd
@pytest.mark.slow
def test_hosts_with_keys_of_their_own_train_over_ssh_and_outlive_each_other(network: Machines) -> None:
    folder = network.folder
    ssh = f"ssh -F none -i {folder / 'user'} -o StrictHostKeyChecking=no -o UserKnownHostsFile=/dev/null"
    hosts = "root@10.98.0.1\nroot@10.98.0.2\nroot@fd00:98::3\nroot@10.98.0.9  # nobody\n"
    network.until(lambda: all("listening" in network.log(each).read_text() for each in "abc"), "sshds listen")
    words = (
        "--ssh",
        f"{ssh} -o LogLevel=ERROR -o ConnectTimeout=5",
        str(ENDLESS),
        "--log",
        str(folder / "steps"),
    )
    launched = Launched(folder, hosts, *words, inside=tuple(network.inside("desk")))
    try:
        launched.says("10.98.0.9 is left out: ssh: connect to host 10.98.0.9 port 22: ", "now 3 members")
        keys = {(folder / each / "chaosnet" / "key").read_text() for each in "abc"}
        assert len(keys) == 3, "each host makes a key of its own, and none travels"
        (link,) = (
            each
            for each in psutil.Process(launched.process.pid).children()
            if "root@fd00:98::3" in each.cmdline()
        )
        link.kill()
        launched.says("the connection to fd00:98::3 has ended", "fd00:98::3 leaves: now 2 members")
        launched.until(lambda: not runs_on(network, "c"), "nothing is left on c")
        assert runs_on(network, "a") and runs_on(network, "b")
        launched.process.kill()
        launched.until(lambda: not runs_on(network, "a") + runs_on(network, "b"), "nothing is left")
        last = json.loads((folder / "steps").read_text().splitlines()[-1])
        assert "final_step" in last, "they left after a step"
    finally:
        launched.close()
