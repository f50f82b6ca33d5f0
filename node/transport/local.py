"""Where processes of one machine meet: a Unix socket beside each TCP port, for bulk bytes.

TCP over loopback would take longer.

The sockets are abstract: they belong to a network namespace, as ports do, need no file, and end with their process.
So a container or a namespace with an address of its own is never taken for this machine. Linux alone has them.
"""

from __future__ import annotations

import contextlib
import platform
import socket
import sys
import uuid
from functools import cache
from pathlib import Path

import psutil
import xxhash

from ...protocols.addresses import is_loopback
from ..endpoint import ANY_HOST, Endpoint, is_numeric

PREFIX = "chaosnet-"
LISTED = Path("/proc/net/unix")
"""One line for each socket of this network namespace; its name is the last word."""
BOOT, NETWORK = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns/net")
_ACCEPTS = "00010000"  # The flags of a socket that listens.


@cache
def this_machine() -> str:
    """A hash that only processes of one machine and network namespace share: those with the same 127.0.0.1."""
    try:
        known = f"{BOOT.read_text()} {NETWORK.stat().st_ino}"
    except OSError:  # Not Linux, or hidden.
        known = f"{platform.node()} {uuid.getnode()}"
    return xxhash.xxh3_64_hexdigest(known.encode())


def meeting_place(here: Endpoint) -> str:
    """libzmq's address of the socket beside the port that `here` is bound to; "" where there is none."""
    host = "*" if here.host in ANY_HOST else here.host
    return f"ipc://@{PREFIX}{host}:{here.port}" if sys.platform == "linux" else ""


def way_to(there: Endpoint) -> str:
    """libzmq's address for a connection to `there`: that of its Unix socket if `there` is on this machine."""
    listening = _listening()
    for name in (f"{there.host}:{there.port}", *([f"*:{there.port}"] if _is_here(there.host) else ())):
        if f"@{PREFIX}{name}" in listening:
            return f"ipc://@{PREFIX}{name}"
    return f"tcp://{there.place}"


def _listening() -> set[str]:
    """Names of the Unix sockets that accept connections."""
    try:
        lines = LISTED.read_text(errors="replace").splitlines()
    except OSError:  # Not Linux, or hidden.
        return set()
    words = [line.split() for line in lines if "@" + PREFIX in line]
    return {each[-1] for each in words if each[3] == _ACCEPTS}


def _is_here(host: str) -> bool:
    """Is this an IP address of this machine? False for a name, which is not looked up."""
    mine = (each.address for found in psutil.net_if_addrs().values() for each in found)
    return is_numeric(host) and (is_loopback(host) or host in mine)


def host_of(place: str) -> str:
    """The host of a connection's other end as libzmq names that: an address, or "localhost:USER:GROUP:PROCESS"."""
    return "localhost" if place.startswith("localhost:") else place


def is_meeting(connection: socket.socket) -> bool:
    """Is this one of our Unix sockets, or a connection to one?"""
    if connection.family != getattr(socket, "AF_UNIX", None):
        return False
    names = [connection.getsockname()]
    with contextlib.suppress(OSError):  # A socket that listens has no peer.
        names.append(connection.getpeername())
    return any(isinstance(name, bytes) and name.startswith(b"\0" + PREFIX.encode()) for name in names)
