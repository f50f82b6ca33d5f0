"""Testbeds of network namespaces: one per node, one veth pair per link. Needs root and `ip`, `tc`."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from typing import Any

from . import commands
from .backend import TestbedError
from .commands import PREFIX, Command
from .topology import Link, LinkSpec, Topology

PORT = 5555  # Each node has its own addresses, so all may listen at the same port.
ALTERNATIVE = "use --backend relay, which needs neither root nor the kernel's help"
END_PATIENCE_S = 2.0  # Between SIGTERM and SIGKILL, for what still runs on a node.


class Netns:
    """One testbed. `topology` is that of `up`, or what a later process has read from the file it left."""

    def __init__(self, name: str, topology: Topology, routes: bool = True) -> None:
        if not re.fullmatch(r"[a-z0-9]{1,20}", name):
            raise TestbedError(f"{name!r} is no name of a testbed (expected a-z and 0-9, at most 20)")
        self.name, self.topology, self.routes = name, topology, routes
        self.netem = commands.needs_netem(topology.links.values())

    def check(self, topology: Topology) -> None:
        """Root, tools, and netem if a link needs it."""
        for tool in ("ip", "tc"):
            if shutil.which(tool) is None:
                raise TestbedError(f"{tool} is not installed (package iproute2); or {ALTERNATIVE}")
        if os.geteuid() != 0:
            raise TestbedError(f"network namespaces need root; or {ALTERNATIVE}")
        if commands.needs_netem(topology.links.values()) and not has_netem():
            raise TestbedError(
                "this kernel has no netem, so links can have a rate but no delay, jitter or loss; "
                f"set them to 0, or {ALTERNATIVE}"
            )

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
            if not has_netem():
                self.check(Topology(links))
            self.netem = True
        shaped = [
            command
            for link, spec in links.items()
            for command in commands.shape(self.name, link, spec, self.netem)
        ]
        run_all(sorted(shaped, key=lambda command: command[2]))
        for link, spec in links.items():
            self.topology.set_spec(link, spec)

    def cut(self, link: Link) -> None:
        """Silently."""
        self.topology.spec(link)
        run_all(commands.cut(self.name, link))

    def heal(self, link: Link) -> None:
        """As it was before the cut."""
        run_all(commands.shape(self.name, link, self.topology.spec(link), self.netem))

    def environment(self, node: str) -> dict[str, str]:
        """Names and addresses (commands.py)."""
        return commands.environment(self.topology, node, PORT)

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program in the node's namespace."""
        if node not in self.topology.graph:
            raise TestbedError(f"there is no node {node!r} (nodes: {', '.join(self.topology.nodes)})")
        env = {**os.environ, **self.environment(node), **options.pop("env", {})}
        inside = ["ip", "netns", "exec", commands.namespace(self.name, node), *command]
        return subprocess.Popen(inside, env=env, **options)

    def in_force(self) -> list[dict[str, Any]]:
        """What `tc` says is set at each end of each link."""
        rows = []
        for link in self.topology.links:
            for end in link:
                space, name = commands.namespace(self.name, end), commands.device(self.name, link, end)
                found = json.loads(run(("tc", "-j", "-n", space, "qdisc", "show", "dev", name)))
                rows.append({"link": link, "from": end, "qdiscs": found} | _tbf(found) | _netem(found))
        return rows

    def down(self) -> None:
        """End what runs on the nodes, then remove them."""
        remove(f"{PREFIX}-{self.name}-")


def _tbf(qdiscs: list[dict[str, Any]]) -> dict[str, Any]:
    """Rate and state of a device from its token bucket."""
    rate = _options(qdiscs, "tbf").get("rate", 0) * 8 / 1e6
    return {"rate_mbit": rate, "cut": 0 < rate < 0.001}


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
    """Our namespaces that begin so, whoever left them."""
    if shutil.which("ip") is None:
        return []
    listed = run(("ip", "-j", "netns", "list")).strip()
    return [row["name"] for row in json.loads(listed or "[]") if row["name"].startswith(prefix)]


def remove(prefix: str = f"{PREFIX}-") -> list[str]:
    """Remove all namespaces of ours that begin so, and end the processes in them. Returns: their names."""
    spaces = spaces_of(prefix)
    _end_processes(spaces)
    run_all(commands.down(spaces))
    return spaces


def _end_processes(spaces: list[str]) -> None:
    def running() -> list[int]:
        found = [run(("ip", "netns", "pids", space)).split() for space in spaces]
        return [int(pid) for pids in found for pid in pids if int(pid) != os.getpid()]

    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in running():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        deadline_s = time.monotonic() + END_PATIENCE_S
        while running() and time.monotonic() < deadline_s:
            time.sleep(0.02)


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


def run_all(wanted: list[Command]) -> None:
    """Run commands in order, in as few processes as possible."""
    for command, text in commands.batches(wanted):
        run(command, text)


def run(command: Command, text: str = "") -> str:
    """Run one; raises TestbedError with the command and what it said."""
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise TestbedError(f"{' '.join(command)}: {said}{f' (input: {text.strip()})' if text else ''}")
    return done.stdout
