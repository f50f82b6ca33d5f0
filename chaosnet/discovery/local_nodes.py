"""The nodes of this user that run on this machine: a small file each, for commands that are given no address.

A node keeps its file locked for as long as it lives, so that of one that was killed counts for nothing, whoever has
its process id by now. The files are a help and no more: if they cannot be written, commands want an address.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import secrets
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO

import msgspec
import psutil

from ..node.endpoint import ANY_HOST, Endpoint
from ..protocols.errors import ConfigError
from .remembered import folder

MAX_BYTES = 4096
if sys.platform != "win32":
    import fcntl


@dataclass(frozen=True, slots=True)
class LocalNode:
    """One that runs.

    Attributes:
        address: At which this machine reaches it, with its key.
        cluster: Its id; "" before the node is in one.
        script: As its user has called it.
    """

    pid: int
    name: str
    address: str
    cluster: str
    script: str

    def __str__(self) -> str:
        where = f"cluster {self.cluster}" if self.cluster else "in no cluster yet"
        return f"{self.address} ({self.name}, {self.script}, process {self.pid}, {where})"


def local_nodes() -> list[LocalNode]:
    """Those that live, by process id. What others have left behind is removed."""
    found = []
    with contextlib.suppress(OSError, RuntimeError):  # There may be no home.
        for file in _folder().glob(f"{_machine()}.*.json"):
            with contextlib.suppress(OSError):
                node = _read(file)
                found += [node] if node else []
    return sorted(found, key=lambda node: (node.pid, node.address))


def the_local_node() -> LocalNode:
    """The one there is. Raises: ConfigError if there is none, or several."""
    return _only(local_nodes())


def a_local_member() -> LocalNode:
    """Any of the cluster there is, or the one node there is. Raises: ConfigError if there is none, or several."""
    nodes = local_nodes()
    members = [node for node in nodes if node.cluster]
    return members[0] if len({node.cluster for node in members}) == 1 else _only(nodes)


def _only(nodes: list[LocalNode]) -> LocalNode:
    if len(nodes) == 1:
        return nodes[0]
    if not nodes:
        raise ConfigError(
            "no address, and no node of yours runs on this machine (expected HOST:PORT of a node)"
        )
    listed = "".join(f"\n  {node}" for node in nodes)
    raise ConfigError(f"no address, and {len(nodes)} nodes of yours run here (expected one of them):{listed}")


def reached_here(listen: str, address: str) -> str:
    """Where this machine reaches a node that was told to listen at `listen`, and tells others `address`."""
    host, there = Endpoint.parse(listen).host, Endpoint.parse(address)
    return str(there.at("::1" if host == "::" else "127.0.0.1")) if host in ANY_HOST else address


class LocalFile:
    """That of a node of this process. Nothing here raises."""

    def __init__(self, name: str, listen: str) -> None:
        self._name, self._listen = name, listen
        self._kept: tuple[Path, IO[bytes]] | None = None

    def write(self, addresses: tuple[str, ...], cluster: str = "") -> None:
        """The node listens; or it is in this cluster now."""
        address = reached_here(self._listen, addresses[0])
        node = LocalNode(os.getpid(), self._name, address, cluster, os.path.basename(sys.argv[0]) or "python")
        with contextlib.suppress(OSError, RuntimeError):
            home = _folder()
            home.mkdir(parents=True, exist_ok=True, mode=0o700)
            if self._kept is None:
                local_nodes()  # Nodes that were killed have left files behind, and perhaps nobody ever asks for them.
            file = self._kept[0] if self._kept else home / f"{_machine()}.{secrets.token_hex(6)}.json"
            before, self._kept = self._kept, (file, _written(file, json.dumps(asdict(node)).encode()))
            if before:
                before[1].close()

    def remove(self) -> None:
        """The node has ended."""
        if self._kept is None:
            return
        file, held = self._kept
        self._kept = None
        with contextlib.suppress(OSError):
            file.unlink()
        held.close()


def _folder() -> Path:
    return folder() / "running"


def _machine() -> str:
    """Homes may be shared by several machines."""
    return "".join(each if each.isalnum() or each == "-" else "-" for each in platform.node())


def _written(file: Path, text: bytes) -> IO[bytes]:
    """The file, whole and locked from the moment on at which anybody finds it."""
    temporary = file.with_suffix(".new")
    out = temporary.open("wb")
    try:
        if sys.platform != "win32":
            fcntl.flock(out, fcntl.LOCK_EX)
        out.write(text)
        out.flush()
        os.replace(temporary, file)
    except OSError:
        out.close()
        temporary.unlink(missing_ok=True)
        raise
    return out


def _read(file: Path) -> LocalNode | None:
    """None if its node has gone, with which it is removed, or it says nothing."""
    with file.open("rb") as found:
        if _is_free(found):
            if _is_still(found, file):
                file.unlink()
            return None
        try:
            node = msgspec.json.decode(found.read(MAX_BYTES), type=LocalNode)
        except msgspec.DecodeError:
            return None
    return node if psutil.pid_exists(node.pid) else None


def _is_free(found: IO[bytes]) -> bool:
    """Does nobody hold its lock?"""
    if sys.platform != "win32":
        try:
            fcntl.flock(found, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            return False
    return False


def _is_still(found: IO[bytes], file: Path) -> bool:
    """Or has its node put another in its place meanwhile?"""
    return os.path.samestat(os.fstat(found.fileno()), file.stat())
