"""What the kernel can be asked and told about libzmq's connections, by their descriptors.

A descriptor is duplicated only for a moment, as a copy that we kept would keep the connection open. It may be another
connection's by now: the monitor tells of a connection's end a moment later.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator

# Bytes that the kernel takes beyond those on their way. Without a bound, its buffer grows to 4 MiB and more, which
# nothing can overtake. UNSENT_BYTES until the link's rate is known; then what it carries in UNSENT_S, the time in
# which libzmq brings more.
UNSENT_BYTES = 256 << 10
UNSENT_S = 0.01
LEAST_UNSENT_BYTES, MOST_UNSENT_BYTES = 64 << 10, 4 << 20
LAST_STANDARD = 2  # The descriptor of standard error.
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
# In Linux's `struct tcp_info`, 4.10 and later.
_ACKED, _BUSY = struct.Struct("120xQ"), struct.Struct("168xQ")


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """libzmq's connection as a socket of ours, for a moment. Raises: OSError if it is gone."""
    copy = os.dup(fd)
    try:
        ours = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with ours:
        yield ours


def bound_unsent(fd: int, rate_bps: float = 0.0) -> None:
    """Let the kernel hold few unsent bytes, where it knows how. `rate_bps`: what the link carries, 0 if unknown."""
    size = min(max(int(rate_bps * UNSENT_S / 8), LEAST_UNSENT_BYTES), MOST_UNSENT_BYTES)
    if _NOTSENT_LOWAT is not None:
        with contextlib.suppress(OSError), borrowed(fd) as ours:
            ours.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, size if rate_bps else UNSENT_BYTES)


def acknowledged(fd: int) -> tuple[int, float] | None:
    """Bytes that have arrived, and for how many seconds any were on their way; None if the kernel does not say."""
    if _TCP_INFO is not None:
        with contextlib.suppress(OSError, struct.error), borrowed(fd) as ours:
            info = ours.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _BUSY.size)
            return _ACKED.unpack_from(info)[0], _BUSY.unpack_from(info)[0] / 1e6
    return None


def take_standard_ones() -> None:
    """Put /dev/null where standard input, output or error is closed, as with `>&-`, or by a script.

    Else the next file that is opened gets that number. What the script prints would go into it, and libuv ends the
    process by an assertion when it closes a descriptor of its own that is one of these three.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= LAST_STANDARD:
        os.set_inheritable(fd, True)
    os.close(fd)


def process_at_the_end_of(fd: int) -> int:
    """The process at the other end of a Unix socket, as the kernel says; 0 if it is another user's, or of TCP."""
    with contextlib.suppress(OSError), borrowed(fd) as ours:
        if ours.family == getattr(socket, "AF_UNIX", None):
            process, user = opened_by(ours)
            return process if user == os.geteuid() else 0
    return 0


def opened_by(unix_socket: socket.socket) -> tuple[int, int]:
    """(process, user) at the other end of a Unix socket, as the kernel says."""
    process, user, _ = struct.unpack("3i", unix_socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    return process, user
