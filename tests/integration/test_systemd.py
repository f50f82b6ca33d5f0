"""examples/systemd: what systemd says of the unit, and its nodes started, killed and stopped as it says."""

from __future__ import annotations

import itertools
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples" / "systemd"
ENDLESS = FOLDER.parent / "endless.py"
CHAOSNET = Path(sys.executable).parent / "chaosnet"
PATIENCE_S = 60.0


def lines(text: str) -> list[tuple[str, str]]:
    """Names and values, of a unit as of a file of variables."""
    pairs = [line.partition("=") for line in text.splitlines() if line[:1] not in ("#", "[", "")]
    return [(name, value) for name, _, value in pairs]


class Unit:
    """What the unit says of the instance NAME on the machine `host`; its folders are below `folder`."""

    def __init__(self, folder: Path, host: str, name: str = "digits") -> None:
        text = (FOLDER / "chaosnet@.service").read_text().replace("/opt/chaosnet/bin/chaosnet", str(CHAOSNET))
        for root in ("/etc/chaosnet", "/srv/chaosnet"):
            assert root in text
            text = text.replace(root, f"{folder}{root}")
        self.text = text.replace("%i", name).replace("%l", host)
        self.said = lines(self.text)

    def one(self, key: str) -> str:
        (value,) = [value for name, value in self.said if name == key]
        return value

    def environment(self) -> dict[str, str]:
        """A file's variables come before those of the unit itself."""
        found = dict(value.split("=", 1) for name, value in self.said if name == "Environment")
        return found | dict(lines(Path(self.one("EnvironmentFile")).read_text()))

    def command(self) -> list[str]:
        env = self.environment()
        words = [
            env[word[1:]].split() if word.startswith("$") else [word]
            for word in self.one("ExecStart").split()
        ]
        return [*itertools.chain.from_iterable(words)]

    def restarts(self, code: int) -> bool:
        """After a process that has ended so, by itself; -9: it was killed."""
        assert self.one("Restart") == "on-failure"
        well = {0, *map(int, self.one("SuccessExitStatus").split())}
        return code not in well and str(code) not in self.one("RestartPreventExitStatus").split()

    def stop(self, node: subprocess.Popen[bytes]) -> int:
        """As `systemctl stop`."""
        assert self.one("KillMode") == "mixed", "the first signal is for the node alone"
        assert self.one("TimeoutStopSec").endswith("min")
        node.send_signal(getattr(signal, self.one("KillSignal")))
        return node.wait(PATIENCE_S)


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="needs systemd-analyze")
def test_systemd_understands_the_unit(tmp_path: Path) -> None:
    file = tmp_path / "chaosnet@digits.service"
    file.write_text(Unit(tmp_path, "m1").text)
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")
    file.write_text(file.read_text().replace("Restart=", "Restarts="))
    done = subprocess.run(["systemd-analyze", "verify", file], capture_output=True, text=True, check=False)
    assert "Unknown key" in done.stderr, "it looks at what it is given"


class Machines:
    """Units of several machines, which are folders, at ports of loopback."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {"HOME": str(folder), "PATH": "/usr/local/bin:/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
        self.nodes: list[subprocess.Popen[bytes]] = []
        with socket.create_server(("127.0.0.1", 0)) as a, socket.create_server(("127.0.0.1", 0)) as b:
            self.at = {f"m{n}": f"127.0.0.1:{each.getsockname()[1]}" for n, each in enumerate((a, b), 2)}
        subprocess.run([CHAOSNET, "keygen"], env=self.env, check=True, capture_output=True)

    def unit(self, host: str, **settings: str) -> Unit:
        """With the file of variables that the examples have, as somebody has filled it in."""
        text = (FOLDER / "digits.env").read_text()
        assert "CHAOSNET_LISTEN=10.0.0.2:5555\n" in text and "SCRIPT=train.py" in text
        text = text.replace("LISTEN=10.0.0.2:5555", f"LISTEN={self.at[host]}")
        text = text.replace("10.0.0.2:5555", self.at["m2"]).replace("10.0.0.3:5555", self.at["m3"])
        text = text.replace(",10.0.0.4:5555", "").replace(
            "SCRIPT=train.py --lr 0.1", f"SCRIPT={ENDLESS} --pause 0.02"
        )
        for folder in ("etc", "srv"):
            (self.folder / host / folder / "chaosnet" / "digits").mkdir(parents=True, exist_ok=True)
        more = "".join(f"{name}={value}\n" for name, value in settings.items())
        (self.folder / host / "etc" / "chaosnet" / "digits.env").write_text(f"{text}{more}")
        return Unit(self.folder / host, host)

    def start(self, unit: Unit, log: str) -> subprocess.Popen[bytes]:
        with (self.folder / log).open("ab") as out:
            folder, env = unit.one("WorkingDirectory"), self.env | unit.environment()
            node = subprocess.Popen(unit.command(), cwd=folder, env=env, stdout=out, stderr=out)
        self.nodes.append(node)
        return node

    def says(self, log: str, text: str, times: int = 1) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while (said := (self.folder / log).read_text()).count(text) < times:
            assert time.monotonic() < deadline_s, f"{log} does not say {text!r}:\n{said}"
            time.sleep(0.05)


@pytest.fixture
def machines(tmp_path: Path) -> Iterator[Machines]:
    made = Machines(tmp_path)
    yield made
    for node in made.nodes:
        node.kill()
        node.wait()


@pytest.mark.realtime
@pytest.mark.slow
def test_a_node_leaves_at_a_stop_and_joins_again_after_a_crash(machines: Machines) -> None:
    a, b = (machines.unit(host, CHAOSNET_JOIN_PATIENCE_S="1") for host in machines.at)
    machines.start(a, "a")
    machines.says("a", "m2-digits founds a cluster")
    dies = machines.start(b, "b")
    machines.says("b", "joined at step")
    dies.kill()
    assert b.restarts(dies.wait())
    stops = machines.start(b, "b")
    machines.says("b", "joined at step", times=2)
    assert b.stop(stops) == 0 and not b.restarts(0)
    machines.says("b", "m3-digits left after step")
    machines.says("a", "m3-digits leaves: now 1 member")


@pytest.mark.realtime
@pytest.mark.parametrize(
    ("settings", "says", "again"),
    [
        ({"CHAOSNET_KEY": "/nowhere"}, "error: /nowhere: the key cannot be read", False),
        ({"CHAOSNET_LISTEN": "{taken}"}, "Address already in use", True),
    ],
)
def test_an_error_that_a_person_must_mend_starts_nothing_again(
    machines: Machines, settings: dict[str, str], says: str, again: bool
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        unit = machines.unit("m2", **{name: value.format(taken=place) for name, value in settings.items()})
        code = machines.start(unit, "a").wait(PATIENCE_S)
    machines.says("a", says)
    assert unit.restarts(code) == again, code


@pytest.mark.realtime
def test_who_is_stopped_before_it_is_a_node_has_ended_well(machines: Machines) -> None:
    unit = machines.unit("m2")
    script = Path(unit.one("WorkingDirectory")) / "slow.py"
    script.write_text("import time\nprint('loads', flush=True)\ntime.sleep(600)\n")
    unit = machines.unit("m2", SCRIPT="slow.py")
    node = machines.start(unit, "a")
    machines.says("a", "loads")
    assert str(unit.stop(node)) == unit.one("SuccessExitStatus")
