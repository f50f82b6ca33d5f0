"""Memory that a node lends to another one of its machine: payloads lie in it, and only words about them travel.

Over a socket, bytes are copied twice, in many turns of the kernel; here once. Each end of a link makes such memory,
an `Arena`, for what it sends, and offers its descriptor over the link's Unix socket. The other end maps it if the
kernel says that it belongs to a process of the same user. Where it does not, and where the arena is full, payloads
go over the socket. It has no file, and is gone when both processes are, killed or not (and what they have forked
meanwhile). Until then it keeps what was ever used of it.

The sender takes blocks, and the receiver gives them back: one byte each says whether a block is taken. What is not
given back yet, because a result is kept for a while, is passed over.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import stat
import sys
import weakref
from pathlib import Path
from typing import Any

import numpy as np

# Not every Python for Linux is built with them.
if sys.platform == "linux" and hasattr(os, "memfd_create"):
    import fcntl

    # Nobody may make it shorter: touching what is not there any more kills a process.
    SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
else:
    SEALS = 0

BLOCK_BYTES = 64 << 10
BLOCKS = 16 << 10
"""1 GiB. Memory is taken as it is first used, and the first free blocks are used first."""
LEAST_BYTES = 128 << 10
"""What is smaller is as fast over a socket (measured)."""
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SIZE = BLOCKS + BLOCKS * BLOCK_BYTES


class Payload(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes in another process' arena; they are given back when the last view of them is gone."""

    @property
    def buffer(self) -> memoryview:
        """As that of a `zmq.Frame`."""
        return self.data


class Arena:
    """Of one direction of a link; at both ends. A byte for each block (1: taken), then the blocks."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        self._memory = memory  # It keeps a descriptor of its own.
        self.descriptor = descriptor
        """To be offered; -1 once it is mapped at the other end, and there."""
        self._close = weakref.finalize(self, os.close, descriptor) if descriptor >= 0 else None

    # --- the sender's end ---

    @classmethod
    def create(cls) -> Arena | None:
        """None where there is no such memory: it takes Linux.

        Nor where the kernel counts what is promised (overcommit_memory 2): it kills who uses too much of such memory.
        """
        if sys.platform != "linux" or not SEALS:
            return None
        with contextlib.suppress(OSError):
            if OVERCOMMIT.read_text().strip() == "2":
                return None
            descriptor = os.memfd_create("chaosnet", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            try:
                os.truncate(descriptor, _SIZE)
                fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
                return cls(mmap.mmap(descriptor, _SIZE), descriptor)
            except OSError:
                os.close(descriptor)
        return None

    @property
    def is_mapped(self) -> bool:
        """At the other end, too?"""
        return self.descriptor < 0

    def mapped(self) -> None:
        """The other end has it: from now on it can be used."""
        if self._close:
            self._close()
        self.descriptor = -1

    def reserve(self, size: int) -> int | None:
        """Blocks for so many bytes: the first one's number; None if they are too few or find no room."""
        if size < LEAST_BYTES or not self.is_mapped:
            return None
        first = self._memory.find(bytes(_blocks(size)), 0, BLOCKS)
        if first < 0:
            return None
        self._memory[first : first + _blocks(size)] = b"\1" * _blocks(size)
        return first

    def write(self, first: int, payload: Any) -> None:
        """Into what was reserved for as many bytes."""
        values = np.frombuffer(payload, np.uint8)
        place = np.frombuffer(self._memory, np.uint8, values.size, BLOCKS + first * BLOCK_BYTES)
        np.copyto(place, values)  # Other threads run meanwhile.

    def release(self, first: int, size: int) -> None:
        """What was reserved is not used (any more)."""
        self._memory[first : first + _blocks(size)] = bytes(_blocks(size))

    # --- the receiver's end ---

    @classmethod
    def of(cls, process: int, descriptor: int) -> Arena:
        """Map the other end's. Raises: OSError or ValueError if there is none of the same user's."""
        if sys.platform != "linux" or not SEALS:
            raise OSError("there is no such memory here")
        path = Path(f"/proc/{process}/fd/{descriptor}")
        if not stat.S_ISREG(path.stat().st_mode):  # Opening something else might wait, or do something.
            raise ValueError(f"{path} is no memory")
        ours = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            if fcntl.fcntl(ours, fcntl.F_GET_SEALS) & SEALS != SEALS or os.fstat(ours).st_size != _SIZE:
                raise ValueError(f"{path} is no arena")
            return cls(mmap.mmap(ours, _SIZE))
        finally:
            os.close(ours)

    def payload(self, first: int, size: int) -> Payload:
        """What lies there. Raises: ValueError if that is beyond the end."""
        if first + _blocks(size) > BLOCKS:
            raise ValueError(f"{size} bytes from block {first} on (expected to end before {BLOCKS})")
        # Its base is no array, or numpy would let a view of it go past it to that, and its end would be missed.
        place = BLOCKS + first * BLOCK_BYTES
        found = np.ndarray.__new__(Payload, (size,), np.uint8, self._memory, place)
        weakref.finalize(found, _give_back, self, os.getpid(), first, size).atexit = False
        return found


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _give_back(arena: Arena, process: int, first: int, size: int) -> None:
    if os.getpid() == process:  # A fork has copies of all that we hold, and may lose them earlier.
        arena.release(first, size)
