"""Testbeds without root: nodes are plain processes, and a process relays each link's bytes (relay_process.py).

All nodes share this machine's loopback. Each has a port of its own, and reaches the others at ports of the
relay: its neighbours over their links, the rest link by link.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from uuid import uuid4

import msgspec
import networkx as nx
import psutil
import zmq

from . import commands, store
from .backend import Kind, TestbedError, check_name, end_processes
from .relay_process import FOLDER, HOST, Cut, Enter, RelayPlace, Request, Set, Show, Stop
from .topology import Link, LinkSpec, Topology

# In the environment of all that runs on a node, so that `down` finds it: the folder of testbeds, and the name in it.
MARK = "CHAOSNET_TESTBED"
ANSWER_MS = 5000


class RelayTestbed:
    """One testbed."""

    kind: ClassVar[Kind] = "relay"
    python: ClassVar[str] = sys.executable

    def __init__(self, name: str, topology: Topology, routes: bool = True) -> None:
        self.name, self.topology, self.routes = check_name(name), topology, routes
        self.cuts: set[Link] = set()
        self._process: RelayPlace | None = None
        self.id = uuid4().hex

    def check(self, topology: Topology) -> None:
        """Nothing is needed but sockets."""

    def up(self, topology: Topology) -> None:
        """Start the process that relays."""
        store.make_folder()
        self.down()
        self.topology = topology
        # It outlives this process, as namespaces do.
        with subprocess.Popen(
            [sys.executable, "-m", f"{__package__}.relay_process"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL, start_new_session=True,
        ) as started:  # fmt: skip
            assert started.stdin is not None and started.stdout is not None
            started.stdin.write(topology.to_text().encode())
            started.stdin.close()
            said = started.stdout.readline()
            started.returncode = 0  # Nobody waits for it.
        if not said:
            raise TestbedError("the process that relays ended at once")
        self._process = msgspec.json.decode(said, type=RelayPlace)
        try:
            with store.writing():
                self._file.write_bytes(said)
        except TestbedError:
            self._end_relay()
            raise

    def change(self, links: Mapping[Link, LinkSpec]) -> None:
        """From now on, also for connections that are open."""
        for link, spec in links.items():
            self._ask(Set(*link, spec))
            self.topology.set_spec(link, spec)

    def cut(self, link: Link) -> None:
        """Silently: connections stay open, and nothing passes."""
        self.topology.spec(link)
        self._ask(Cut(*link, True))
        self.cuts.add(link)

    def heal(self, link: Link) -> None:
        """What was held back arrives."""
        self.topology.spec(link)
        self._ask(Cut(*link, False))
        self.cuts.discard(link)

    def environment(self, node: str) -> dict[str, str]:
        """As commands.environment, and the addresses of the relay at which this node reaches each other one."""
        ports = self._relay.ports
        at = {
            other: f"{HOST}:{self._ask(Enter(node, other, ports[other]))}" if self._leads(node, other) else ""
            for other in self.topology.nodes
            if other != node
        }
        found = commands.environment(self.topology, node, f"{HOST}:{ports[node]}", at, self.routes)
        return found | {"CHAOSNET_PEERS_AT": ",".join(f"{each}={address}" for each, address in at.items())}

    def _leads(self, node: str, other: str) -> bool:
        graph = self.topology.graph
        return bool(nx.has_path(graph, node, other) if self.routes else graph.has_edge(node, other))

    def endpoints(self, sender: str, receiver: str, port: int) -> tuple[str, str]:
        """Where `receiver` is to listen, and where `sender` finds it: HOST:PORT."""
        return f"{HOST}:{port}", f"{HOST}:{self._ask(Enter(sender, receiver, port))}"

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """Run a program as one of this node's."""
        self.topology.check_node(node)
        env = {
            **commands.inherited(os.environ),
            **self.environment(node),
            **options.pop("env", {}),
            MARK: self._mark,
        }
        try:
            return subprocess.Popen(list(command), env=env, **options)
        except FileNotFoundError:
            raise TestbedError(f"{command[0]!r} is no program on this machine's PATH") from None
        except OSError as error:
            raise TestbedError(
                f"{command[0]!r} cannot be run: {error.strerror} (expected a program)"
            ) from None

    def in_force(self) -> list[dict[str, Any]]:
        """What the relay says is set."""
        rows: list[dict[str, Any]] = self._ask(Show())
        return rows

    def alive(self) -> int:
        """Of how many nodes are the links there?"""
        return len(self.topology.nodes) if _running(self._remembered()) else 0

    def down(self) -> int:
        """End what runs on the nodes, then the relay."""
        found = self._process = self._remembered()
        end_processes(lambda: _marked(self._mark))
        self._end_relay()
        with store.writing():
            self._file.unlink(missing_ok=True)
        return len(found.ports) if found else 0

    @staticmethod
    def names() -> list[str]:
        """Of all that have left their file."""
        return sorted(path.stem for path in store.folder().glob("*.relay"))

    # --- the process ---

    @property
    def _file(self) -> Path:
        return store.folder() / f"{self.name}.relay"

    @property
    def _mark(self) -> str:
        return str(store.folder().absolute() / self.name)

    def _remembered(self) -> RelayPlace | None:
        with contextlib.suppress(OSError, msgspec.DecodeError):
            return msgspec.json.decode(self._file.read_bytes(), type=RelayPlace)
        return None

    def _end_relay(self) -> None:
        found = self._process
        if found is None:
            return
        if _running(found):
            with contextlib.suppress(TestbedError):
                self._ask(Stop())
            end_processes(lambda: [found.pid] if _running(found) else [])
        place = Path(found.control.removeprefix("ipc://")).parent
        if place.name.startswith(FOLDER):  # Of a relay that was killed, it is still there.
            shutil.rmtree(place, ignore_errors=True)
        self._process = None

    @property
    def _relay(self) -> RelayPlace:
        found = self._process = self._process or self._remembered()
        if found is None or not _running(found):
            raise TestbedError(f"the process that relays for {self.name!r} has ended; make the testbed again")
        return found

    def _ask(self, request: Request) -> Any:
        with zmq.Context() as context, context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(self._relay.control)
            socket.send(msgspec.json.encode(request))
            if not socket.poll(ANSWER_MS):
                raise TestbedError(f"the process that relays for {self.name!r} does not answer")
            return socket.recv_json()


def _running(found: RelayPlace | None) -> bool:
    """Is it still that process, or has its number been given to another?"""
    with contextlib.suppress(psutil.Error):
        return found is not None and any(
            "relay_process" in word for word in psutil.Process(found.pid).cmdline()
        )
    return False


def _marked(mark: str) -> list[int]:
    """Processes that were started on a node, and what they have started; not the one that asks."""
    mine = {os.getpid(), *(parent.pid for parent in psutil.Process().parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid not in mine and process.environ().get(MARK) == mark:
                found.append(process.pid)
    return found
