"""Every command that a page shows on a line of its own, typed as it stands, on machines with the pages' addresses.

`make pages-test` runs it (root, Debian or Ubuntu). Machines are namespaces at a switch: a is 10.0.0.2, b 10.0.0.3,
and so on; w, 10.0.0.9, is where a person sits; r is the real one. `ELSEWHERE` names the lines that are not typed
here, and what runs them. The quick start and "From DDP" say what their reader sees, too: test_pages.py.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "integration"))
from lan import Machines, needs_namespaces
from pages import ROOT, Reader

from chaosnet.netem.netns import run

pytestmark = [pytest.mark.realtime, pytest.mark.slow, needs_namespaces]

PAGES = ["README.md", *sorted(str(page.relative_to(ROOT)) for page in ROOT.glob("docs/*.md"))]
PROGRAMS = (
    "accelerate|apt-get|bash|chaosnet|cp|curl|docker|docker-compose|export|git|helm|journalctl|kubectl|make|mpirun|"
    "pip|python|sbatch|srun|sudo|sysctl|systemctl|tests/testbed|torchrun"
)
COMMAND = re.compile(
    rf"^    (?:\$ )?((?:[A-Z_]+=\S+ )*(?:{PROGRAMS})(?![\w:=]|[^\n]*:$)\S*(?: [^\n]*)?)$", re.MULTILINE
)
NO_COMMANDS = "chaosnet/  ", "chaosnet go-on 10.0.0.2:5555)"  # A listing; the end of a notice.
MACHINES = {letter: f"10.0.0.{number}" for number, letter in enumerate("abcdefgw", 2)}

BENCH = "its figures stand beside it: typed when they were measured, and with --quick by tests/integration"
SYSTEMD = "needs systemd; tests/integration/test_systemd.py does what the unit says"
KUBERNETES = "needs a cluster; tests/integration/test_kubernetes.py does what the manifests say"
DOCKER = "needs an engine and the image; make testbed-docker"
ELSEWHERE = {
    "README.md": {
        "make ": ".ci/run",
        "chaosnet launch": "needs sshd on all hosts: tests/integration/test_launch.py",
    },
    "docs/accelerators.md": {"git clone": "a placeholder; .ci/run clones", "make ": ".ci/run"},
    "docs/benchmarks.md": {"chaosnet bench": BENCH, "python -m pytest": "tests of make test-all"},
    "docs/deploy.md": {
        "sudo": SYSTEMD,
        "journalctl": SYSTEMD,
        "docker build": DOCKER,
        "chaosnet keygen": KUBERNETES,
        "cp ": KUBERNETES,
        "kubectl": KUBERNETES,
    },
    "docs/launch.md": {
        "chaosnet launch": "needs sshd on all hosts: tests/integration/test_launch.py",
        "chaosnet run": "needs a router: tests/integration/test_nat.py",
        "sbatch": "make testbed-slurm",
    },
    "docs/operate.md": {"chaosnet launch": "needs sshd on all hosts: tests/integration/test_launch.py"},
    "docs/testbed.md": {
        "make docker": DOCKER,
        "docker": DOCKER,
        "chaosnet top --insecure 127.0.0.1:5555": DOCKER,
        "chaosnet testbed up examples/compose.yaml": DOCKER,
        "chaosnet testbed measure --name": DOCKER,
        "chaosnet run --insecure --name host": DOCKER,
        "chaosnet testbed down --name": DOCKER,
        "tests/testbed/netem_vm/run.sh": "starts a virtual machine of a minute; typed by hand",
    },
}


def commands(page: str) -> list[str]:
    """On lines of their own, in order, with the comments behind them."""
    return [line for line in COMMAND.findall((ROOT / page).read_text()) if not line.startswith(NO_COMMANDS)]


class Typist:
    """Types a page's commands, each once, in any order. What begins a command names it."""

    def __init__(self, reader: Reader, machines: Machines) -> None:
        self.reader, self.machines = reader, machines
        self.page, self.left = "", list[str]()

    def open(self, page: str) -> None:
        """Its commands are what will be typed."""
        elsewhere = tuple(ELSEWHERE.get(page, ()))
        self.page, self.left = page, [each for each in commands(page) if not each.startswith(elsewhere)]

    def _next(self, begins: str) -> str:
        """The first of the page's commands that begins so, and has not been typed yet."""
        found = next((each for each in self.left if each.startswith(begins)), "")
        assert found, f"{self.page} has no {begins!r} (left: {self.left})"
        self.left.remove(found)
        return found

    def types(self, begins: str, at: str = "w1", goes_on: bool = False) -> str:
        """The next command that begins so. Returns: what it shows, if it ends."""
        return self.reader.type(at, self._next(begins) + "\n", goes_on)

    def sees(self, at: str, text: str) -> None:
        """Wait until it comes, since something was typed last."""
        self.reader.until(at, text, again=True)

    def node(self, begins: str, at: str) -> None:
        """The same, of one that goes on as a node of a cluster."""
        self.types(begins, at, goes_on=True)
        self.sees(at, "joined at step")

    def more(self, at: str, command: str) -> None:
        """A node that the page takes for granted."""
        self.reader.type(at, command + "\n", goes_on=True)
        self.sees(at, "joined at step")

    def stop(self, *terminals: str, says: str = "leaves after step") -> None:
        """Ctrl+C."""
        for at in terminals:
            self.reader.terminals[at].interrupt()
            if says:
                self.sees(at, says)
            self.reader.type(at, "true\n")

    def looks(self, begins: str, at: str = "w1") -> None:
        """At `top`, which needs a terminal, for a while; the key q ends it."""
        command = self._next(begins).partition("#")[0].strip()
        program = f"TERM=xterm-256color script -qfec '{command}' /dev/null"
        self.reader.type(at, f"(sleep 6; printf q) | {program} > screen; grep -q members screen\n")

    def browses(self, begins: str, at: str = "w2") -> None:
        """The page that the command serves."""
        self.types(begins, at, goes_on=True)
        self.sees(at, "http://127.0.0.1:8088")
        script = (
            "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:8088').read(200).decode())"
        )
        assert "<!doctype html>" in self.reader.type("w3", f'python -c "{script}"\n').lower()
        self.stop(at, says="")

    def one_key(self, letters: str) -> None:
        """Copy the key of `w` to those machines."""
        for letter in letters:
            target = self.reader.folder / f"machine-{letter}" / "chaosnet" / "key"
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(self.reader.folder / "machine-w" / "chaosnet" / "key", target)

    def make_one_key(self, letters: str) -> None:
        """The same, on a page that takes the key for granted."""
        self.reader.type("w1", "chaosnet keygen\n")
        self.one_key(letters)

    def founds(self, letters: str = "abc") -> None:
        """A cluster of those machines, with one key; its scripts print when they join."""
        self.make_one_key(letters)
        first, *others = letters
        self.more(f"{first}1", f"chaosnet run --listen {MACHINES[first]}:5555 train.py")
        for each in others:
            join = f"--join {MACHINES[first]}:5555"
            self.more(f"{each}1", f"chaosnet run --listen {MACHINES[each]}:5555 {join} train.py")


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    """The pages' addresses, at one switch."""
    found = Machines(tmp_path)
    try:
        found.switch("sw")
        for letter, address in MACHINES.items():
            found.add(letter)
            found.wire(letter, "sw", f"{address}/24")
        yield found
    finally:
        found.down()


@pytest.fixture
def typist(tmp_path: Path, machines: Machines) -> Iterator[Typist]:
    """In a folder with a script and the examples."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    shutil.copy(ROOT / "examples" / "endless.py", tmp_path / "train.py")
    reader = Reader(
        tmp_path,
        {"/mnt/shared": str(tmp_path / "shared"), "pip install": "pip install --quiet --dry-run"},
        lambda letter: machines.inside(letter) if letter in MACHINES else (),
    )
    typist = Typist(reader, machines)
    try:
        yield typist
        assert not typist.left, f"{typist.page}: not typed: {typist.left}"
    finally:
        reader.close()


def test_readme(typist: Typist) -> None:
    typist.open("README.md")
    typist.types("chaosnet keygen")
    typist.one_key("abcdef")
    typist.node("chaosnet run --listen 10.0.0.2:5555", "a1")
    typist.node("chaosnet run --listen 10.0.0.3:5555", "b1")
    assert "2 members" in typist.types("chaosnet status 10.0.0.2:5555")
    typist.more("c1", "chaosnet run --listen 10.0.0.4:5555 --join 10.0.0.3:5555 --neighbors 1 train.py")
    typist.reader.type("w1", "chaosnet link remove 10.0.0.2:5555 10.0.0.4:5555\n")  # Who joins opens it.
    typist.types("chaosnet link add")
    typist.browses("chaosnet dashboard 10.0.0.2:5555")
    typist.looks("chaosnet top")
    typist.types("chaosnet leave 10.0.0.3:5555")
    typist.sees("b1", "leaves after step")
    typist.stop("c1", "a1")
    typist.node("chaosnet run --cluster lab", "d1")
    typist.more("e1", "chaosnet run --cluster lab train.py")
    assert "2 members" in typist.types("chaosnet status", at="d2")
    typist.stop("e1", "d1")
    typist.types("chaosnet testbed run", at="w2", goes_on=True)
    typist.sees("w2", "joined at step")
    typist.stop("w2", says="")
    typist.types("chaosnet keygen", at="g1")
    typist.node("chaosnet run --listen 0.0.0.0:5555 train.py", "g1")
    typist.types("chaosnet invite", at="g2")
    typist.stop("g1")
    typist.types("chaosnet run --listen 127.0.0.1:5555 examples/pipeline.py", "f1", goes_on=True)
    typist.sees("f1", "step")
    typist.types("chaosnet run --join 127.0.0.1:5555 examples/pipeline.py", "f2", goes_on=True)
    typist.sees("f2", "step")
    typist.stop("f2", "f1", says="")


def test_checkpoints(typist: Typist) -> None:
    typist.open("docs/checkpoints.md")
    typist.make_one_key("ab")
    typist.node("chaosnet run --listen 10.0.0.2:5555", "a1")
    typist.node("chaosnet run --listen 10.0.0.3:5555", "b1")
    typist.stop("b1", "a1")
    assert "complete" in typist.types("chaosnet checkpoints")


def test_dashboard(typist: Typist) -> None:
    typist.open("docs/dashboard.md")
    typist.types("pip install", at="r1")
    typist.founds("ab")
    typist.browses("chaosnet dashboard 10.0.0.2:5555  ")
    typist.browses("chaosnet dashboard 10.0.0.2:5555 --allow-actions")
    typist.types("chaosnet status")
    typist.stop("b1", "a1")
    typist.browses("chaosnet dashboard --file")


def test_integrations(typist: Typist) -> None:
    typist.open("docs/integrations.md")
    typist.make_one_key("ab")
    typist.reader.type("r1", f"cd {ROOT}\n")
    typist.types("pip install", at="r1")
    shutil.copy(ROOT / "examples" / "lightning_digits.py", typist.reader.folder / "train.py")
    typist.types("chaosnet run --listen 10.0.0.2:5555", "a1", goes_on=True)
    typist.sees("a1", "founds a cluster")
    typist.types("chaosnet run --listen 10.0.0.3:5555", "b1", goes_on=True)
    typist.sees("a1", "now 2 members")
    typist.stop("b1", "a1", says="")


def test_launch(typist: Typist) -> None:
    typist.open("docs/launch.md")
    typist.reader.type("w1", "chaosnet keygen\n")
    typist.types("export")
    typist.types("torchrun", goes_on=True)
    typist.sees("w1", "now 2 members")
    typist.stop("w1", says="")


def test_operate(typist: Typist) -> None:
    typist.open("docs/operate.md")
    typist.founds("cab")
    for _ in range(2):
        typist.types("sysctl", at="a2")
    assert "3 members" in typist.types("chaosnet status")
    typist.looks("chaosnet top")
    typist.types("chaosnet link remove")  # Each node has one to each.
    typist.types("chaosnet link add")
    typist.types("chaosnet invite")
    typist.reader.type("w1", "chaosnet keygen --out other.key > other.txt\n")
    (key,) = re.findall(r"\b[a-z2-7]{52}\b", (typist.reader.folder / "other.txt").read_text())
    typist.reader.instead |= {" KEY": f" {key}"}
    typist.types("chaosnet allow")
    typist.types("chaosnet revoke")
    typist.types("chaosnet leave")
    typist.sees("b1", "leaves after step")
    run(("ip", "-n", f"{typist.machines.prefix}sw", "link", "set", "p-c", "down"))  # Its cable.
    typist.sees("a1", "chaosnet go-on 10.0.0.2:5555")
    typist.types("chaosnet go-on")
    typist.sees("a1", "going on")
    typist.stop("a1")
    typist.node("chaosnet run --listen 10.0.0.2:5555 --checkpoint-dir", "a1")
    typist.sees("a1", "loss")
    typist.stop("a1")
    assert "complete" in typist.types("chaosnet checkpoints")


def test_pipelines(typist: Typist) -> None:
    typist.open("docs/pipelines.md")
    typist.make_one_key("abcd")
    typist.types("chaosnet run --listen 10.0.0.2:5555", "a1", goes_on=True)
    typist.sees("a1", "step")
    typist.types("chaosnet run --listen 10.0.0.3:5555", "b1", goes_on=True)
    typist.sees("b1", "step")
    for at, address in (("c1", MACHINES["c"]), ("d1", MACHINES["d"])):  # The page's layout takes four.
        join = f"--listen {address}:5555 --join 10.0.0.2:5555"
        typist.reader.type(at, f"chaosnet run {join} examples/pipeline.py\n", goes_on=True)
        typist.sees(at, "step")
    assert " | " in typist.types("chaosnet relayout 10.0.0.2:5555 3+1")
    typist.left.remove("chaosnet relayout 10.0.0.2:5555 8")  # That it is refused is what the page shows.
    assert "error: relayout" in typist.reader.type("w1", "chaosnet relayout 10.0.0.2:5555 8 || true\n")
    typist.stop(*(f"{letter}1" for letter in "dcba"), says="")
    typist.types("chaosnet demo --pipeline")


def test_planner(typist: Typist) -> None:
    typist.open("docs/planner.md")
    typist.types("chaosnet plan")
    typist.types("chaosnet simulate-training")


def test_scale(typist: Typist) -> None:
    typist.open("docs/scale.md")
    typist.types("chaosnet simulate")


def test_security(typist: Typist) -> None:
    typist.open("docs/security.md")
    typist.types("chaosnet keygen", "a1")
    typist.node("chaosnet run --listen 0.0.0.0:5555 train.py", "a1")
    # A token names all addresses at which its member listens.
    typist.types("chaosnet invite", "a2")
    typist.node("chaosnet run --listen 0.0.0.0:5555 --join TOKEN", "b1")
    shown = typist.types("chaosnet keygen --out new.key", "b2")
    rows = typist.reader.type("a2", "chaosnet status --wide\n")
    keys = dict(zip("ab", re.findall(r"([a-z2-7]{52})@10\.0\.0\.[23]:5555", rows), strict=True))
    (new,) = re.findall(r"\b[a-z2-7]{52}\b", shown)
    typist.reader.instead |= {
        "ADDRESS-OF-THE-NODE": f"{keys['b']}@10.0.0.3:5555",
        "ADDRESS": "10.0.0.2:5555",
        "NEW": new,
        "OLD": keys["b"],
        "OTHER": keys["a"],
    }
    typist.types("chaosnet allow", "a2")
    typist.types("chaosnet leave", "a2")
    typist.sees("b1", "leaves after step")
    typist.node("chaosnet run --key new.key", "b1")
    typist.types("chaosnet revoke", "a2")


def test_testbed_of_namespaces(typist: Typist) -> None:
    """And the commands that need no nodes."""
    typist.open("docs/testbed.md")
    r1 = "r1"
    for each in (
        "up examples/overlay.yaml  ",
        "show",
        "measure",
        "exec n0 -- ip route",
        "change n0 n2",
        "cut",
        "down",
    ):
        typist.types(f"chaosnet testbed {each}", r1)
    typist.types("chaosnet testbed run examples/overlay.yaml -- ", r1, goes_on=True)
    typist.sees(r1, "now 8 members")
    typist.types("chaosnet testbed exec n0 -- sh -c", "r2")
    typist.stop(r1, says="")
    typist.types("chaosnet testbed run examples/overlay.yaml --backend relay", r1, goes_on=True)
    typist.sees(r1, "now 8 members")
    (address,) = re.findall(r"n0.*join.*?(127\.0\.0\.1:\d+)", typist.reader.terminals[r1].show())[:1]
    typist.reader.instead |= {"ADDRESS": address}
    for each in ("testbed cut", "testbed heal", "testbed change n0 n4", "status --insecure"):
        typist.types(f"chaosnet {each}", "r2")
    typist.stop(r1, says="")
    typist.reader.instead |= {
        "--for 1800": "--for 3",
        "--every 180": "--every 1",
    }  # Nobody waits for half an hour.
    for each in ("new", "plot", "rates", "up overlay.yaml"):
        typist.types(f"chaosnet testbed {each}", r1)
    typist.reader.type(r1, "chaosnet testbed down\n")


def test_trainer(typist: Typist) -> None:
    typist.open("docs/trainer.md")
    typist.types("chaosnet keygen")
    typist.one_key("ab")
    typist.node("chaosnet run --cluster lab", "a1")
    typist.more("b1", "chaosnet run --cluster lab train.py")


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_typed_here_or_elsewhere(page: str) -> None:
    """The stories above are of all pages that have commands."""
    elsewhere = ELSEWHERE.get(page, {})
    here = [each for each in commands(page) if not each.startswith(tuple(elsewhere))]
    story = Path(__file__).read_text()
    assert not here or f'typist.open("{page}")' in story
    unused = [each for each in elsewhere if not any(line.startswith(each) for line in commands(page))]
    assert not unused, f"{page} has no such command"
