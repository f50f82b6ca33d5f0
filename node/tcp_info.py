"""What the kernel can be asked and told about libzmq's connections, by their descriptors.

A descriptor is duplicated for a moment, and stays libzmq's own: a copy that we kept would keep the connection open.
It may be another connection's by now, for its monitor tells of an end a moment later: then a number is wrong once.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import sys
from collections.abc import Iterator
from dataclasses import dataclass

# Bytes that the kernel takes beyond those on their way. A socket's own buffer grows to 4 MiB and more: two chunks
# that nothing can overtake. This lasts a link of 1 Gbit/s for 2 ms, and libzmq brings the next long before.
UNSENT_BYTES = 256 << 10
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)

# struct tcp_info (linux/include/uapi/linux/tcp.h): only ever grown at its end; an older kernel gives less of it.
# Offsets: tcpi_bytes_acked 120, tcpi_busy_time 168, tcpi_rwnd_limited 176 (since 4.10); each u64, times in us.
_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None) if sys.platform == "linux" else None
_FIELDS = struct.Struct("=120xQ40xQQ")


@dataclass(frozen=True, slots=True)
class Carried:
    """Of one connection since it began.

    `busy_s`: it had something unsent or unacknowledged. `limited_s`: of that, the other end's window was full. Both
    count in the kernel's ticks (1 to 10 ms).
    """

    bytes_acked: int
    busy_s: float
    limited_s: float


@contextlib.contextmanager
def borrowed(fd: int) -> Iterator[socket.socket]:
    """libzmq's connection as a socket of ours; raises OSError if there is none any more."""
    copy = os.dup(fd)
    try:
        ours = socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
    with ours:
        yield ours


def bound_unsent(fd: int) -> None:
    """Let the kernel hold little that is unsent, where it can."""
    if _NOTSENT_LOWAT is not None:
        with contextlib.suppress(OSError), borrowed(fd) as ours:
            ours.setsockopt(socket.IPPROTO_TCP, _NOTSENT_LOWAT, UNSENT_BYTES)


def carried(fd: int) -> Carried | None:
    """None where the kernel does not tell, or the connection is gone."""
    if _TCP_INFO is None:
        return None
    try:
        with borrowed(fd) as ours:
            info = ours.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, _FIELDS.size)
    except OSError:
        return None
    if len(info) < _FIELDS.size:
        return None
    acked, busy_us, limited_us = _FIELDS.unpack(info)
    return Carried(acked, busy_us / 1e6, limited_us / 1e6)
