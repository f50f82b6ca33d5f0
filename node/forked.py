"""What a forked child must not keep: the sockets of the node that it was forked from.

A child (a worker of a DataLoader, of multiprocessing) inherits descriptors. While it has those of libzmq, nobody
hears that the node was killed: no connection ends, and the port goes on accepting, so that nothing proves the death
(protocols/deaths.py). A child that runs another program inherits none: libzmq opens all of them close-on-exec.

Closing them here ends nothing for the parent: both have the same connections, which end with the last descriptor. The
child's copies of libzmq's own structures are left alone: its I/O thread is not there, and pyzmq knows the process
that made them.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import weakref
from collections.abc import Iterator
from typing import Protocol

from .transport import local

LISTED = ("/proc/self/fd", "/dev/fd")


class Owner(Protocol):
    """Who has sockets of libzmq: ports, for libzmq tells of a descriptor only after it is in use."""

    listening: set[int]  # Local ports.
    dialled: set[int]  # Ports at the other ends.


_owners: weakref.WeakSet[Owner] = weakref.WeakSet()


def close_in_children_of(owner: Owner) -> None:
    """From now on, forked children close the sockets of `owner`."""
    _owners.add(owner)


def _in_child() -> None:
    listening = {port for owner in _owners for port in owner.listening}
    dialled = {port for owner in _owners for port in owner.dialled}
    _owners.clear()
    if not listening and not dialled:
        return
    timeout_s = socket.getdefaulttimeout()
    socket.setdefaulttimeout(None)  # With one, looking at a socket would change how others read from it.
    for fd in list(_descriptors()):
        with contextlib.suppress(OSError):
            if stat.S_ISSOCK(os.fstat(fd).st_mode) and _is_ours(fd, listening, dialled):
                os.close(fd)
    socket.setdefaulttimeout(timeout_s)


def _descriptors() -> Iterator[int]:
    for folder in LISTED:
        with contextlib.suppress(OSError):
            yield from (int(name) for name in os.listdir(folder))
            return


def _is_ours(fd: int, listening: set[int], dialled: set[int]) -> bool:
    """By its ports, or its name. Any connection to a port that we dial passes for ours, wherever it leads."""
    with socket.socket(fileno=os.dup(fd)) as it:
        if local.is_meeting(it):
            return True
        if it.family not in (socket.AF_INET, socket.AF_INET6) or it.type != socket.SOCK_STREAM:
            return False
        here = it.getsockname()[1]
        if here in listening:
            return True
        try:
            return it.getpeername()[1] in dialled
        except OSError:  # One that is being opened. Nobody can say where to, and the child cannot use it.
            return bool(here and dialled) and not it.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)


if hasattr(os, "register_at_fork"):  # Not on Windows.
    os.register_at_fork(after_in_child=_in_child)
