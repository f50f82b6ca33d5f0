"""`chaosnet bench peers`: chaosnet beside torchft and hivemind, with one state, on one machine, in turns.

Members train (parameters with Adam's moments, so the state is three times as large; a sleep per step is the forward
pass). Then, in lives of their own,

    join          one more is started and, once its model is there, told to join: from the call of its system to its
                  first completed step
    gap           the longest time between two steps of a member that touches the join, less their median before
    kill          a member is killed (SIGKILL, the whole process group) right after a step: until all others have
                  completed the next step with gradients of at least two members
    stop          the same after a SIGSTOP, as of a machine that hangs
    coordinator   the same after SIGKILL of what coordinates: the scheduler's node; the lighthouse; the first DHT peer

Workers are scripts of `peers_workers`, as each system's documentation has them, in an environment of their own that
is made here by pip, from wherever pip is configured to take packages. torch is that of this installation.

Machines are network namespaces with one link each, to a switch; or (`--loopback`) none at all.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import venv
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import torch

from ..netem import commands
from ..netem.backend import TestbedError
from ..netem.topology import LinkSpec, Topology
from ..options import Amount, Folder, OneOf, Several, Whole
from ..outputs import write_json
from ..protocols.errors import ConfigError
from .figures import bars, legend_below, outputs, picture, table
from .join import extra_gap
from .overlay import namespaces

WORKERS = Path(__file__).parent / "peers_workers"
START_PATIENCE_S = 180.0  # Until all members train with each other.
STEPS_BEFORE = 5  # That each has made with others before anything is measured.
LOG_LINES, LINE_LETTERS = 20, 240  # Of the log of a worker that has ended, shown.
LIGHTHOUSE_PORT = 29510
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
"""A machine's name is its address: torchft publishes the name of its host, which has to lead there."""
COORDINATOR, SWITCH = "coordinator", "switch"  # Machines beside the members'.


EVENTS = {  # What is measured, and what its column is called.
    "join": "a node joins, s",
    "gap": "gap of the others, s",
    "kill": "kill -9, s",
    "stop": "SIGSTOP, s",
    "coordinator": "coordinator dies, s",
}
LIVES = (("join", "kill"), ("stop",), ("coordinator",))
"""What happens in one life of a cluster, in order: after a member that hangs, others are not as they were."""


@dataclass(frozen=True)
class System:
    """One of those that are compared."""

    name: str
    package: str | None  # On the package registry; None: this installation.
    configured: str
    coordinator: str  # What it is.
    lighthouse: tuple[str, ...] = ()  # A program of its own that members are told of, and its arguments.


SYSTEMS = {
    each.name: each
    for each in (
        System("chaosnet", None, "as it comes, without keys", "the node with the elected scheduler"),
        System(
            "torchft",
            "torchft-nightly",  # As its README has it. 0.2.0 ends when an all-reduce over Gloo fails (ddp.py).
            "as in its train_ddp.py: fault-tolerant DDP over Gloo (timeout 5 s), state over the process group "
            "(10 s), all else 30 s; nothing starts what has ended again",
            "the lighthouse, on a machine of its own, which nothing starts again",
            ("torchft_lighthouse", "--min_replicas", "1", "--quorum_tick_ms", "100", "--join_timeout_ms", "10000"),
        ),
        System(
            "hivemind",
            "hivemind",
            "hivemind.Optimizer, synchronous; matchmaking 3 s, averaging timeout 10 s as in its quick start; a step "
            "is an epoch, of ten samples a member",
            "the first DHT peer, a member, too",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Of all lives."""

    mb: float  # Of parameters.
    pause_s: float  # Of a forward pass.
    members: int  # Before a join.
    patience_s: float


class Outcome(NamedTuple):
    """Seconds; or None, and why there is no number, in a word or two."""

    seconds: float | None
    why: str = ""


class Unsettled(Exception):
    """A cluster that does not begin to train, or a worker that ends; the text has the last lines of its log."""


# --- environments ---


def default_folder() -> Path:
    """Where environments are kept."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "chaosnet" / "peers"


def environment(package: str, folder: Path) -> Path:
    """The interpreter of an environment that has `package`: made, or as it was. Raises ConfigError with pip's reason.

    It sees our packages behind its own (a .pth file), so torch is there already; a constraint keeps pip from
    replacing it: where a package needs another torch, that is said instead of fetching gigabytes.
    """
    place = folder / package
    python, done = place / "bin" / "python", place / "installed"
    if done.exists():
        return python
    click.echo(f"installing {package} into {place}", err=True)
    shutil.rmtree(place, ignore_errors=True)
    venv.create(place, with_pip=True)
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    borrowed = Path(torch.__file__).parent.parent
    (place / "lib" / version / "site-packages" / "borrowed_torch.pth").write_text(f"{borrowed}\n")
    constraint = place / "constraints.txt"
    constraint.write_text(f"torch=={torch.__version__}\n")
    install = [
        str(python),
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "-c",
        str(constraint),
        package,
    ]
    ran = subprocess.run(install, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if ran.returncode != 0:
        raise ConfigError(f"bench peers: {package} could not be installed:\n{reason_of(ran.stdout)}")
    done.write_text(version_of(package, python) + "\n")
    return python


def reason_of(said: str) -> str:
    """What pip says is wrong, or the end of what it says."""
    lines = [line for line in said.strip().splitlines() if line.strip()]
    errors = [line for line in lines if line.lstrip().lower().startswith(("error", "×"))]
    return "\n".join((errors or lines)[-LOG_LINES:])


def version_of(package: str, python: Path) -> str:
    """As it is installed. Raises ConfigError if it is not."""
    asked = f"from importlib.metadata import version; print(version({package!r}))"
    ran = subprocess.run([str(python), "-c", asked], capture_output=True, text=True, check=False)
    if ran.returncode != 0:
        raise ConfigError(f"bench peers: {python} has no {package}:\n{reason_of(ran.stderr)}")
    return ran.stdout.strip()


# --- machines ---


class Machines(Protocol):
    """Where processes run."""

    def address(self, name: str) -> str:
        """By which all reach what runs there."""

    def prefix(self, name: str) -> list[str]:
        """Of a command that is to run there."""

    def variables(self, name: str) -> dict[str, str]:
        """Of a process there."""


class Loopback:
    """All on this machine, at one address."""

    def address(self, name: str) -> str:
        return "127.0.0.1"

    def prefix(self, name: str) -> list[str]:
        return []

    def variables(self, name: str) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": "lo"}


class Switched:
    """Namespaces with one link each, to a switch that forwards."""

    def __init__(self, testbed: str, topology: Topology) -> None:
        self.testbed, self.topology = testbed, topology

    def address(self, name: str) -> str:
        link = self._link(name)
        return commands.addresses(self.topology)[link][link.index(name)]

    def prefix(self, name: str) -> list[str]:
        inside = ["ip", "netns", "exec", commands.namespace(self.testbed, name)]
        return [*inside, "unshare", "--uts", "sh", "-c", NAMED, self.address(name)]

    def variables(self, name: str) -> dict[str, str]:
        return {"GLOO_SOCKET_IFNAME": commands.device(self.testbed, self._link(name), name)}

    def route(self, name: str) -> commands.Command:
        """All that is not near goes to the switch."""
        link = self._link(name)
        via = commands.addresses(self.topology)[link][link.index(SWITCH)]
        return ("ip", "-n", commands.namespace(self.testbed, name), "route", "add", "default", "via", via)

    def _link(self, name: str) -> tuple[str, str]:
        return (name, SWITCH) if name < SWITCH else (SWITCH, name)


@contextmanager
def switched(names: Sequence[str], rate_mbit: float) -> Iterator[Switched]:
    """As long as they are needed. Raises: TestbedError."""
    if shutil.which("unshare") is None:
        raise TestbedError("unshare is not installed (package util-linux)")
    topology = Topology({(name, SWITCH): LinkSpec(rate_mbit=rate_mbit) for name in names})
    with namespaces(topology) as testbed:
        machines = Switched(testbed.name, topology)
        for name in names:
            subprocess.run(machines.route(name), check=True)
        yield machines


# --- processes ---


class Step(NamedTuple):
    """One that a worker has completed."""

    number: int
    at_s: float
    members: int  # Whose gradients were in it.


class Process:
    """A program on a machine; what it says is kept."""

    def __init__(
        self, machines: Machines, name: str, command: Sequence[str], folder: Path, heard: threading.Condition
    ) -> None:
        self.name, self._heard = name, heard
        self.log = folder / f"{name}.log"
        self.said: dict[str, Any] = {}
        self.steps: list[Step] = []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": "", **machines.variables(name)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*machines.prefix(name), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=env, start_new_session=True, cwd=folder,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError), self._heard:
                self._take(json.loads(line))
        self._process.wait()
        with self._heard:
            self._heard.notify_all()

    def _take(self, what: dict[str, Any]) -> None:
        if "step" in what:
            self.steps.append(Step(what["step"], what["at_s"], what["members"]))
        else:
            self.said |= what
        self._heard.notify_all()

    def begin(self, join: Any) -> None:
        """Tell it to join, or with None to be the first."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # Who waits for it sees that it has ended.
            self._process.stdin.write(json.dumps({"join": join}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Now, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "\n".join(f"    {line[:LINE_LETTERS]}" for line in lines) or "    (its log is empty)"


class Life:
    """One cluster of one system, from its start until it is killed."""

    def __init__(
        self, system: System, python: Path, machines: Machines, settings: Settings, folder: Path
    ) -> None:
        self.system, self.python, self.machines, self.settings, self.folder = (
            system,
            python,
            machines,
            settings,
            folder,
        )
        self.heard = threading.Condition()
        self.workers: dict[str, Process] = {}
        self.lighthouse: Process | None = None

    # --- the beginning ---

    def begin(self) -> None:
        """Until all members have made some steps together. Raises: Unsettled."""
        join: Any = None
        if self.system.lighthouse:
            join = self._start_lighthouse()
        for name in members(self.settings.members):
            self.start(name)
        first, *others = self.workers.values()
        self.until(lambda: "ready" in first.said, START_PATIENCE_S, "to load")
        first.begin(join)
        self.until(lambda: "address" in first.said, START_PATIENCE_S, "the first to begin")
        for each in others:
            self.until(lambda each=each: "ready" in each.said, START_PATIENCE_S, "to load")  # type: ignore[misc]
            each.begin(first.said["address"])
        self.until(self._together, START_PATIENCE_S, "all to train together")

    def start(self, name: str) -> Process:
        """A worker, which waits once it has loaded."""
        told = {
            "name": name, "address": self.machines.address(name), "mb": self.settings.mb,
            "pause_s": self.settings.pause_s, "members": self.settings.members,
        }  # fmt: skip
        command = [str(self.python), str(WORKERS / f"with_{self.system.name}.py"), json.dumps(told)]
        self.workers[name] = Process(self.machines, name, command, self.folder, self.heard)
        return self.workers[name]

    def _start_lighthouse(self) -> str:
        program, *arguments = self.system.lighthouse
        address = self.machines.address(COORDINATOR)
        at = f"{address}:{LIGHTHOUSE_PORT if self.machines.prefix(COORDINATOR) else free_port()}"
        command = [str(self.python.parent / program), *arguments, "--bind", at]
        self.lighthouse = Process(self.machines, COORDINATOR, command, self.folder, self.heard)
        return f"http://{at}"

    def _together(self) -> bool:
        """All have made some steps with others, and the last ones were of all."""
        return all(
            len(shared(each.steps)) >= STEPS_BEFORE and each.steps[-1].members == len(self.workers)
            for each in self.workers.values()
        )

    # --- what happens to it ---

    def join(self) -> tuple[Outcome, Outcome]:
        """One more. Returns: the join, and the gap of the others."""
        joiner = self.start("joiner")
        old = [each for each in self.workers.values() if each is not joiner]
        self.until(lambda: "ready" in joiner.said, START_PATIENCE_S, "to load")
        self._after_a_step(old[0])
        self.workers.pop("joiner")
        joiner.begin(old[0].said["address"])
        try:
            in_time = self._wait(lambda: joiner.ended or bool(shared(joiner.steps)), self.settings.patience_s)
            if joiner.ended or not in_time:
                self._show(joiner)
                why = Outcome(None, "ended" if joiner.ended else self._beyond)
                return why, why
            called_s, first_s = joiner.said["called_s"], shared(joiner.steps)[0].at_s
            if not self._wait(
                lambda: all(each.steps[-1].at_s >= first_s for each in old), self.settings.patience_s
            ):
                return Outcome(first_s - called_s), Outcome(None, self._beyond)
            gaps = [extra_gap([step.at_s for step in each.steps], called_s, first_s)[0] for each in old]
            return Outcome(first_s - called_s), Outcome(max(gaps))
        finally:
            self.workers["joiner"] = joiner

    def fault(self, event: str) -> Outcome:
        """Something happens to one of them right after a step. Returns: when the others had made the next one."""
        victim = self._victim(event)
        survivors = [each for each in self.workers.values() if each is not victim and not each.ended]
        last = self._after_a_step(survivors[0])
        at_s = time.monotonic()
        victim.signal(signal.SIGSTOP if event == "stop" else signal.SIGKILL)

        def next_steps() -> list[float]:
            found = [
                [step.at_s for step in shared(each.steps) if step.number > last.number] for each in survivors
            ]
            return [steps[0] for steps in found if steps]

        def over() -> bool:
            return len(next_steps()) == len(survivors) or any(each.ended for each in survivors)

        in_time = self._wait(over, self.settings.patience_s)
        for each in survivors:
            if each.ended:
                self._show(each)
                return Outcome(None, "ended")
        return Outcome(max(next_steps()) - at_s) if in_time else Outcome(None, self._beyond)

    def _victim(self, event: str) -> Process:
        if event == "coordinator":
            leads = [each for each in self.workers.values() if each.said.get("leads")]
            return self.lighthouse or leads[0]
        return next(
            each for name, each in self.workers.items() if name != "joiner" and not each.said.get("leads")
        )

    @property
    def _beyond(self) -> str:
        return f"> {self.settings.patience_s:g}"

    # --- waiting ---

    def until(self, true: Callable[[], bool], patience_s: float, what: str) -> None:
        """Raises: Unsettled if that takes too long, or a worker has ended."""
        ended = lambda: [each for each in self.workers.values() if each.ended]  # noqa: E731
        in_time = self._wait(lambda: true() or bool(ended()), patience_s)
        if each := next(iter(ended()), None):
            raise Unsettled(f"{self.system.name}: {each.name} has ended:\n{each.last_words()}")
        if not in_time:
            words = "\n".join(f"{each.name}:\n{each.last_words()}" for each in self.workers.values())
            raise Unsettled(f"{self.system.name}: {patience_s:g} s were not enough for {what}\n{words}")

    def _wait(self, true: Callable[[], bool], patience_s: float) -> bool:
        """Who ends says nothing, so it is looked at twice a second."""
        until_s = time.monotonic() + patience_s
        with self.heard:
            while not true():
                if time.monotonic() >= until_s:
                    return False
                self.heard.wait(0.5)
        return True

    def _after_a_step(self, of: Process) -> Step:
        """Wait for the next that it completes, with others."""
        done = len(shared(of.steps))
        self.until(lambda: len(shared(of.steps)) > done, START_PATIENCE_S, "the next step")
        return shared(of.steps)[-1]

    def usual_s(self) -> float:
        """The median time from one step of the first member to the next."""
        first = next(iter(self.workers.values()))
        return statistics.median(b.at_s - a.at_s for a, b in pairwise(first.steps[-STEPS_BEFORE:]))

    def _show(self, each: Process) -> None:
        click.echo(f"{self.system.name}: {each.name} says last:\n{each.last_words()}", err=True)

    def kill(self) -> None:
        """All of it."""
        for each in [*self.workers.values(), *([self.lighthouse] if self.lighthouse else [])]:
            each.kill()


def members(count: int) -> list[str]:
    """Their names."""
    return [f"n{index}" for index in range(count)]


def shared(steps: Sequence[Step]) -> list[Step]:
    """Those that were not made alone."""
    return [step for step in steps if step.members > 1]


def free_port() -> int:
    """One that nobody listens at, on loopback."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


# --- rounds ---


Found = dict[str, dict[str, list[Outcome]]]
"""By system and event, one outcome a round; `step` is the usual step before each event."""


def measure(
    pythons: Mapping[str, Path], events: Sequence[str], machines: Machines, settings: Settings, repeat: int
) -> Found:
    """Systems take turns, life by life."""
    found: Found = {name: {event: [] for event in ("step", *EVENTS)} for name in pythons}
    for number in range(repeat):
        for wanted in lives(events):
            for name, python in pythons.items():
                done = live(SYSTEMS[name], python, wanted, machines, settings)
                for event, outcome in done:
                    found[name][event].append(outcome)
                shown = ", ".join(f"{event} {cell(outcome)}" for event, outcome in done)
                click.echo(f"round {number + 1} of {repeat}, {name}: {shown}", err=True)
    return found


def lives(events: Sequence[str]) -> list[tuple[str, ...]]:
    """Those of LIVES that are wanted; the gap is that of the join."""
    wanted = {"join" if each == "gap" else each for each in events}
    return [some for life in LIVES if (some := tuple(each for each in life if each in wanted))]


def live(
    system: System, python: Path, events: Sequence[str], machines: Machines, settings: Settings
) -> list[tuple[str, Outcome]]:
    """One cluster, and what happens to it. What does not begin to train is shown, and gives no number."""
    done: list[tuple[str, Outcome]] = []
    with tempfile.TemporaryDirectory(prefix="chaosnet-peers-") as folder, ExitStack() as stack:
        life = Life(system, python, machines, settings, Path(folder))
        stack.callback(life.kill)
        try:
            life.begin()
            done.append(("step", Outcome(life.usual_s())))
            for event in events:
                if event == "join":
                    done += zip(("join", "gap"), life.join(), strict=True)
                else:
                    done.append((event, life.fault(event)))
        except Unsettled as error:
            click.echo(str(error), err=True)
            seen = {event for event, _ in done}
            done += [(each, Outcome(None, "no start")) for each in events if each not in seen]
    return done


def median(outcomes: Sequence[Outcome]) -> Outcome:
    """Who has no number is slower than all who have. Of an even count the slower of the two in the middle."""
    if not outcomes:
        return Outcome(None, "")
    ranked = sorted(outcomes, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    return ranked[len(ranked) // 2]


def cell(outcome: Outcome) -> str:
    """For the table."""
    return outcome.why or "-" if outcome.seconds is None else f"{outcome.seconds:.2f}"


# --- the command ---


@click.command("peers")
@click.option("--systems", type=Several(OneOf(tuple(SYSTEMS))), default=",".join(SYSTEMS), show_default=True)
@click.option("--events", type=Several(OneOf(tuple(EVENTS))), default=",".join(EVENTS), show_default=True)
@click.option(
    "--mb", type=Amount(0.001, 10_000), default=45.0, show_default=True,
    help="Of parameters; with Adam's moments the state is three times that.",
)  # fmt: skip
@click.option(
    "--pause", "pause_s", type=Amount(0, 60), default=0.3, show_default=True, help="Sleep a step, s."
)
@click.option("--members", "count", type=Whole(3, 16), default=3, show_default=True, help="Before a join.")
@click.option(
    "--rate",
    type=Amount(1, 100_000),
    default=1000.0,
    show_default=True,
    help="Of each machine's link, Mbit/s.",
)
@click.option("--loopback", is_flag=True, help="No namespaces: no root, and no limit to a link.")
@click.option(
    "--patience", "patience_s", type=Amount(1, 3600), default=60.0, show_default=True, help="Of an event, s."
)
@click.option("--repeat", type=Whole(0, 100), default=5, show_default=True, help="Rounds.")
@click.option(
    "--onto", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json",
    help="Of an earlier run: its rounds count, too.",
)  # fmt: skip
@click.option(
    "--environments",
    type=Folder(),
    help="Where torchft and hivemind are installed. Default: the user's cache.",
)
@outputs
def peers_command(
    systems: tuple[str, ...], events: tuple[str, ...], mb: float, pause_s: float, count: int, rate: float,
    loopback: bool, patience_s: float, repeat: int, environments: Path | None, onto: Path | None,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """chaosnet beside torchft and hivemind: joins and deaths, with one trained state, in turns."""
    if not repeat and onto is None:
        raise click.UsageError("--repeat 0 measures nothing (expected 1 or more, or --onto FILE)")
    if repeat and not loopback and os.geteuid() != 0:
        raise ConfigError("bench peers: network namespaces need root (or --loopback)")
    pythons, versions = _installed(systems, environments or default_folder())
    result: dict[str, Any] = {
        "mb": mb, "state_mb": 3 * mb, "pause_s": pause_s, "members": count, "patience_s": patience_s,
        "rate_mbit": None if loopback else rate, "cores": os.cpu_count(), "torch": str(torch.__version__),
        "versions": versions,
    }  # fmt: skip
    found = earlier(onto, result) if onto else {}
    names = [*members(count), "joiner", COORDINATOR]
    try:
        with ExitStack() as stack:
            machines = Loopback() if loopback or not repeat else stack.enter_context(switched(names, rate))
            settings = Settings(mb, pause_s, count, patience_s)
            for name, rows in measure(pythons, events, machines, settings, repeat).items():
                for event, outcomes in rows.items():
                    found.setdefault(name, {}).setdefault(event, []).extend(outcomes)
    except TestbedError as error:
        raise ConfigError(f"bench peers: {error}") from None
    medians = {name: {event: median(outcomes) for event, outcomes in found[name].items()} for name in systems}
    table(
        ["", "usual step, s", *EVENTS.values()],
        [[f"{name} {versions[name]}", *map(cell, medians[name].values())] for name in systems],
    )
    for name in systems:
        counts = {len(found[name][event]) for event in EVENTS if found[name][event]}
        click.echo(f"{name}: {SYSTEMS[name].configured}. Coordinator: {SYSTEMS[name].coordinator}.")
        click.echo(f"    medians of {' or '.join(map(str, sorted(counts))) or 0}")
    result["medians"] = _plain(medians, Outcome._asdict)
    result["rounds"] = _plain(found, lambda outcomes: [each._asdict() for each in outcomes])
    write_json(json_file, result)
    if plot_file is not None:
        picture(result, plot_file, _draw)


def earlier(file: Path, settings: Mapping[str, Any]) -> Found:
    """The rounds that --json has written. Raises ConfigError if they are of other settings or versions."""
    try:
        told = json.loads(file.read_text())
        rounds = {
            name: {event: [Outcome(**each) for each in rows[event]] for event in ("step", *EVENTS)}
            for name, rows in told["rounds"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--onto: {str(file)!r} is none of bench peers' files ({error!r})") from None
    for key, value in settings.items():
        before = told.get(key)
        if key == "versions":  # Of the systems that both have.
            value, before = ({name: of[name] for name in value if name in before} for of in (value, before))
        if before != value:
            raise ConfigError(
                f"--onto: {str(file)!r} was measured with {key} {before!r} (expected {value!r})"
            )
    return rounds


def _plain(rows: Mapping[str, Mapping[str, Any]], of: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """For JSON: by system and event."""
    return {name: {event: of(each) for event, each in row.items()} for name, row in rows.items()}


def _installed(systems: Sequence[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Interpreters and versions, by system."""
    pythons, versions = {}, {}
    for name in systems:
        package = SYSTEMS[name].package
        pythons[name] = Path(sys.executable) if package is None else environment(package, folder)
        versions[name] = metadata.version(name) if package is None else version_of(package, pythons[name])
    return pythons, versions


def _draw(figure: Any, found: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = found["medians"]
    events = list(next(iter(rows.values())))
    bars(axes, events, {name: [row[event]["seconds"] for event in events] for name, row in rows.items()})
    axes.set_yscale("log")
    axes.set_ylabel("seconds (no bar: not in time, or not at all)")
    axes.set_title(f"{found['members']} members, a state of {found['state_mb']:g} MB")
    legend_below(figure, axes)
