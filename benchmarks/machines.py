"""Where the processes of a benchmark run: all on this machine, or network namespaces at one switch."""

from __future__ import annotations

import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from ..netem import commands
from ..netem.backend import TestbedError
from ..netem.topology import LinkSpec, Topology
from .overlay import namespaces

SWITCH = "switch"  # A machine beside those that are asked for.
NAMED = 'echo "$0" > /proc/sys/kernel/hostname && exec "$@"'
"""A machine's name is its address: torchft publishes the name of its host, which has to lead there."""


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


def free_port() -> int:
    """One that nobody listens at, on loopback."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
