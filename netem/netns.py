"""Testbeds of network namespaces: one per node, one veth pair per link. Needs root and `ip`, `tc`."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

from . import commands
from .backend import Kind, TestbedError, check_name, end_processes
from .commands import PREFIX, Command
from .topology import MIN_RATE_MBIT, Link, LinkSpec, Topology

PACKAGES = {"ip": "iproute2", "tc": "iproute2", "sysctl": "procps"}
SPACES = Path("/var/run/netns")  # Where `ip` keeps them, and any may look.
CLONE_NEWNET = 0x40000000  # Of <sched.h>.
PORT = 5555  # Each node has its own addresses, so all may listen at the same port.
ALTERNATIVE = "use --backend relay, which needs neither root nor the kernel's help"


class Netns:
    """One testbed."""

    kind: ClassVar[Kind] = "netns"
    python: ClassVar[str] = sys.executable

    def __init__(self, name: str, topology: Topology, routes: bool = True) -> None:
        self.name, self.topology, self.routes = check_name(name), topology, routes
        self.cuts: set[Link] = set()
        self.netem = commands.needs_netem(topology.links.values())
        self.id = uuid4().hex

    def check(self, topology: Topology) -> None:
        """Root, tools, netem if a link needs it, and an address for every end."""
        commands.check_size(topology)
        for tool, package in PACKAGES.items():
            if shutil.which(tool) is None:
                raise TestbedError(f"{tool} is not on PATH (package {package}); or {ALTERNATIVE}")
        if os.geteuid() != 0:
            raise TestbedError(f"network namespaces need root; or {ALTERNATIVE}")
        check_netem(topology.links.values(), f", or {ALTERNATIVE}")

    def up(self, topology: Topology) -> None:
        """Make all namespaces and links."""
        self.check(topology)
        self.down()
        self.topology, self.netem = topology, commands.needs_netem(topology.links.values())
        try:
            run_all(commands.up(self.name, topology, self.routes, self.netem))
        except BaseException:
            self.down()
            raise

    def change(self, links: Mapping[Link, LinkSpec]) -> None:
        """One `tc` process for all links, so that a hundred change within milliseconds."""
        if not self.netem and commands.needs_netem(links.values()):
            check_netem(links.values(), f", or {ALTERNATIVE}")
            self.netem = True
        there = {link: spec for link, spec in links.items() if link not in self.cuts}
        run_all(commands.shape(self.name, there, self.netem))
        for link, spec in links.items():
            self.topology.set_spec(link, spec)

    def cut(self, link: Link) -> None:
        """Silently."""
        self.topology.spec(link)
        run_all(commands.cut(self.name, link))
        self.cuts.add(link)

    def heal(self, link: Link) -> None:
        """As it was before the cut."""
        run_all(commands.shape(self.name, {link: self.topology.spec(link)}, self.netem))
        self.cuts.discard(link)

    def environment(self, node: str) -> dict[str, str]:
        """Names and addresses (commands.py)."""
        at = {each: f"{own}:{PORT}" for each, own in commands.own_addresses(self.topology).items()}
        return commands.environment(self.topology, node, at[node], at, self.routes)

    def endpoints(self, sender: str, receiver: str, port: int) -> tuple[str, str]:
        """Where `receiver` is to listen, and where `sender` finds it: HOST:PORT."""
        at = f"{commands.own_address(self.topology, receiver)}:{port}"
        return at, at

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program in the node's namespace."""
        self.topology.check_node(node)
        env = {**commands.inherited(os.environ), **self.environment(node), **options.pop("env", {})}
        inside = ["ip", "netns", "exec", commands.namespace(self.name, node), *command]
        try:
            return subprocess.Popen(inside, env=env, **options)
        except FileNotFoundError:
            raise TestbedError("ip is not on PATH") from None

    def in_force(self) -> list[dict[str, Any]]:
        """What `tc` says is set at each end of each link."""
        rows = []
        for link in self.topology.links:
            for end in link:
                space, name = commands.namespace(self.name, end), commands.device(self.name, link, end)
                found = json.loads(run(("tc", "-j", "-n", space, "qdisc", "show", "dev", name)))
                rows.append({"link": link, "from": end, "qdiscs": found} | in_force(found))
        return rows

    def alive(self) -> int:
        """How many nodes are there?"""
        return len(spaces_of(f"{PREFIX}-{self.name}-"))

    def down(self) -> int:
        """End what runs on the nodes, then remove them."""
        return len(remove(f"{PREFIX}-{self.name}-"))


@contextmanager
def entered(space: str) -> Iterator[None]:
    """This thread, and those that it starts, are in that namespace as long as the block lasts. Raises: OSError."""
    with Path("/proc/thread-self/ns/net").open("rb") as here, (SPACES / space).open("rb") as there:
        _enter(there.fileno())
        try:
            yield
        finally:
            _enter(here.fileno())


def _enter(namespace: int) -> None:
    """`namespace`: a descriptor of it. os.setns is there from Python 3.12 on."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(namespace, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns failed")


def in_force(qdiscs: list[dict[str, Any]]) -> dict[str, Any]:
    """What is set on a device, from what `tc -j` says of it."""
    return _tbf(qdiscs) | _netem(qdiscs)


def _tbf(qdiscs: list[dict[str, Any]]) -> dict[str, Any]:
    """Rate and state of a device from its token bucket."""
    rate = _options(qdiscs, "tbf").get("rate", 0) * 8 / 1e6
    cut = 0 < rate < MIN_RATE_MBIT  # That of commands.cut_end is none that anybody has asked for.
    return {"rate_mbit": 0.0 if cut else rate, "cut": cut}


def _netem(qdiscs: list[dict[str, Any]]) -> dict[str, float]:
    """Delay, jitter and loss of a device; tc tells seconds and shares."""
    options = _options(qdiscs, "netem")
    delay, loss = options.get("delay", {}), options.get("loss-random", {})
    return {
        "delay_ms": round(delay.get("delay", 0.0) * 1e3, 6),
        "jitter_ms": round(delay.get("jitter", 0.0) * 1e3, 6),
        "loss_pct": round(loss.get("loss", 0.0) * 1e2, 6),
    }


def _options(qdiscs: list[dict[str, Any]], kind: str) -> dict[str, Any]:
    found: dict[str, Any] = next((each["options"] for each in qdiscs if each["kind"] == kind), {})
    return found


def spaces_of(prefix: str) -> list[str]:
    """Namespaces that begin so, whoever left them. Looked up without `ip`, which there need not be."""
    return sorted(path.name for path in SPACES.glob(f"{prefix}*"))


def remove(prefix: str) -> list[str]:
    """Remove all namespaces that begin so, and end the processes in them. Returns: their names."""
    spaces = spaces_of(prefix)
    _end_processes(spaces)
    for space in spaces:
        _run_in(space, ("ip", "netns", "delete", space))
    return spaces


def _end_processes(spaces: list[str]) -> None:
    def running() -> list[int]:
        found = [_run_in(space, ("ip", "netns", "pids", space)).split() for space in spaces]
        return [int(pid) for pids in found for pid in pids if int(pid) != os.getpid()]

    end_processes(running)


def _run_in(space: str, command: Command) -> str:
    """Nothing, if the namespace has gone: somebody else may take down the same testbed."""
    try:
        return run(command)
    except TestbedError:
        if space in spaces_of(space):
            raise
        return ""


@functools.cache
def has_netem() -> bool:
    """Does the kernel know netem? Tried in a namespace of its own that goes again."""
    space = f"{PREFIX}-probe-{os.getpid()}"
    run(("ip", "netns", "add", space))
    try:
        run(("tc", "-n", space, "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"))
    except TestbedError:
        return False
    finally:
        run(("ip", "netns", "delete", space))
    return True


def check_netem(specs: Iterable[LinkSpec], alternative: str = "") -> None:
    """Raises: TestbedError if a link needs netem, and this kernel has none. `alternative`: how it goes on."""
    if commands.needs_netem(specs) and not has_netem():
        raise TestbedError(
            "this kernel has no netem, so links can have a rate but no delay, jitter or loss; set them to 0"
            + alternative
        )


def run_all(wanted: list[Command]) -> None:
    """Run commands in order, in as few processes as possible."""
    for command, text in commands.batches(wanted):
        run(command, text)


def run(command: Command, text: str = "") -> str:
    """Run one; raises TestbedError with the command and what it said."""
    try:
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise TestbedError(f"{command[0]} is not on PATH") from None
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise TestbedError(f"{' '.join(command)}: {said}{f' (input: {text.strip()})' if text else ''}")
    return done.stdout
