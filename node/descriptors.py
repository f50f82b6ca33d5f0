"""What the kernel can be asked and told about libzmq's connections, by their descriptors.

A descriptor is duplicated for a moment, and stays libzmq's own: a copy that we kept would keep the connection open.
It may be another connection's by now, for its monitor tells of an end a moment later.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterator

# Bytes that the kernel takes beyond those on their way. A socket's own buffer grows to 4 MiB and more: two chunks
# that nothing can overtake. This lasts a link of 1 Gbit/s for 2 ms, and libzmq brings the next long before.
UNSENT_BYTES = 256 << 10
_NOTSENT_LOWAT: int | None = getattr(socket, "TCP_NOTSENT_LOWAT", None)


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
