"""Networks of namespaces: machines at a switch, and routers between switches. Needs root and iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from chaosnet.netem.netns import remove, run

needs_namespaces = pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None, reason="namespaces need root and iproute2"
)
CHAOSNET = [sys.executable, "-m", "chaosnet"]
FAR_WIRE = Path(__file__).with_name("far_wire.py")
PATIENCE_S = 60.0


class Machines:
    """Namespaces of this test, and what runs in them. `folder`: for logs, a file for each node."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.prefix = folder, f"chaos-t{os.getpid()}-"
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.wires: list[subprocess.Popen[str]] = []

    def add(self, name: str) -> None:
        """A machine, or a switch."""
        run(("ip", "netns", "add", self.prefix + name))
        run(("ip", "-n", self.prefix + name, "link", "set", "lo", "up"))

    def switch(self, name: str) -> None:
        """One that frames of all that are wired to it reach all of."""
        self.add(name)
        run(("ip", "-n", self.prefix + name, "link", "add", "sw", "type", "bridge"))
        run(("ip", "-n", self.prefix + name, "link", "set", "sw", "up"))

    def wire(self, machine: str, switch: str, address: str) -> str:
        """Returns: the machine's device. `address`: with the length of its network."""
        here, there = self.prefix + machine, self.prefix + switch
        device, port = f"to-{switch}"[:15], f"p-{machine}"[:15]
        run(("ip", "-n", here, "link", "add", device, "type", "veth", "peer", "name", port, "netns", there))
        run(("ip", "-n", there, "link", "set", port, "master", "sw", "up"))
        run(("ip", "-n", here, "addr", "add", address, "dev", device))
        run(("ip", "-n", here, "link", "set", device, "up"))
        return device

    def remove(self, machine: str, switch: str) -> None:
        """The machine and its wire. The wire first: the kernel takes its time over a namespace and what is in it."""
        run(("ip", "-n", self.prefix + switch, "link", "delete", f"p-{machine}"[:15]))
        run(("ip", "netns", "delete", self.prefix + machine))

    def far_wire(self, machine: str, router: str, network: str, way_s: float) -> None:
        """The machine is NETWORK.2, and reaches all by way of the router, which is NETWORK.1 there."""
        ends = f"to-{router}"[:15], f"p-{machine}"[:15]
        words = (self.prefix + machine, ends[0], self.prefix + router, ends[1], str(way_s))
        self.wires.append(
            subprocess.Popen([sys.executable, str(FAR_WIRE), *words], stdout=subprocess.PIPE, text=True)
        )
        assert self.wires[-1].stdout and self.wires[-1].stdout.readline() == "up\n"
        for name, device, number in ((machine, ends[0], 2), (router, ends[1], 1)):
            run(("ip", "-n", self.prefix + name, "addr", "add", f"{network}.{number}/24", "dev", device))
            run(("ip", "-n", self.prefix + name, "link", "set", device, "up"))
        run(tuple(self.inside(machine, "ip", "route", "add", "default", "via", f"{network}.1")))

    def inside(self, machine: str, *command: str) -> list[str]:
        """The command, to be run there."""
        return ["ip", "netns", "exec", self.prefix + machine, *command]

    def node(
        self,
        machine: str,
        *options: str,
        script: Path,
        arguments: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> None:
        """Start `chaosnet run`; the node has the name of the machine. `arguments`: the script's."""
        command = self.inside(machine, *CHAOSNET, "run", "--name", machine, *options, str(script), *arguments)
        state = {"CHAOSNET_STATE_DIR": str(self.folder / machine), "OMP_NUM_THREADS": "1"}
        with self.log(machine).open("wb") as out:
            self.processes[machine] = subprocess.Popen(
                command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **state, **(env or {})}
            )

    def log(self, machine: str) -> Path:
        return self.folder / f"{machine}.log"

    def says(self, machine: str, text: str) -> None:
        """Wait until its node has printed that."""
        self.until(lambda: text in self.log(machine).read_text(), f"{machine} says {text!r}")

    def until(self, happened: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:g} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def story(self) -> str:
        return "\n".join(f"--- {name}\n{self.log(name).read_text()[-3000:]}" for name in self.processes)

    def down(self) -> None:
        remove(self.prefix)  # And what runs there.
        for wire in self.wires:
            wire.kill()
            wire.communicate()
        for process in self.processes.values():
            process.wait()
