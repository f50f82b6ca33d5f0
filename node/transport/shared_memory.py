"""Memory that a node lends to another one of its machine: payloads lie there, and only where they lie is sent.

Over a socket, bytes are copied twice, in many turns of the kernel; here once. Each end of a link makes such memory,
an `Arena`, for what it sends, and offers its descriptor over the link's Unix socket. The other end maps it if the
kernel says that it belongs to a process of the same user. If it does not, and while the arena is full, payloads go
over the socket. An arena has no file, and is gone when both processes are, killed or not (and what they have forked
meanwhile). Until then, pages that were once used stay in memory.

The sender takes blocks, and the receiver gives them back: one byte for each says whether it is taken. Blocks that are
not given back yet, because a result is kept for a while, are passed over.
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

# Not every Python for Linux is built with memfd_create.
if sys.platform == "linux" and hasattr(os, "memfd_create"):
    import fcntl
    import resource

    # Nobody may shorten the memory: a process that touches what is not there any more is killed.
    SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)
else:
    SEALS = 0

BLOCK_BYTES = 64 << 10
BLOCKS = 16 << 10
"""1 GiB. Memory is taken as it is first used, and the first free blocks are used first."""
LEAST_BYTES = 128 << 10
"""Smaller payloads are as fast over a socket (measured)."""
OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_SIZE = BLOCKS + BLOCKS * BLOCK_BYTES


class Payload(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes in another process' arena; they are given back when the last view of them is gone."""

    @property
    def buffer(self) -> memoryview:
        """The bytes, under the name that a `zmq.Frame` has for them."""
        return self.data


class Arena:
    """The memory for one direction of a link, as either end has it: a byte per block (1: taken), then the blocks."""

    def __init__(self, memory: mmap.mmap, descriptor: int = -1) -> None:
        self._memory = memory  # It keeps a descriptor of its own.
        self.descriptor = descriptor
        """To be offered to the other end; -1 once that has mapped it, and at that end."""
        self._close = weakref.finalize(self, os.close, descriptor) if descriptor >= 0 else None

    # --- the sender's end ---

    @classmethod
    def create(cls) -> Arena | None:
        """Make one. None where there is no such memory, which takes Linux, or where its room is the script's.

        None, too, where the kernel promises no more memory than there is (overcommit_memory 2): it kills a process
        that uses too much of such memory.
        """
        if sys.platform != "linux" or not SEALS or _is_counted():
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
        """Has the other end mapped it, too?"""
        return self.descriptor < 0

    def mapped(self) -> None:
        """The other end has it: from now on it can be used."""
        if self._close:
            self._close()
        self.descriptor = -1

    def reserve(self, size: int) -> int | None:
        """Take blocks for so many bytes. Returns: the first one's number; None for few bytes, or without room."""
        if size < LEAST_BYTES or not self.is_mapped:
            return None
        first = self._memory.find(bytes(_blocks(size)), 0, BLOCKS)
        if first < 0:
            return None
        self._memory[first : first + _blocks(size)] = b"\1" * _blocks(size)
        return first

    def write(self, first: int, payload: Any) -> None:
        """Copy `payload` to the blocks from `first` on, which were reserved for as many bytes."""
        values = np.frombuffer(payload, np.uint8)
        place = np.frombuffer(self._memory, np.uint8, values.size, BLOCKS + first * BLOCK_BYTES)
        np.copyto(place, values)  # Other threads run meanwhile.

    def release(self, first: int, size: int) -> None:
        """Free the blocks that were reserved for `size` bytes from `first` on."""
        self._memory[first : first + _blocks(size)] = bytes(_blocks(size))

    # --- the receiver's end ---

    @classmethod
    def of(cls, process: int, descriptor: int) -> Arena:
        """Map what another process offers. Raises: OSError or ValueError if that is no arena, or cannot be opened."""
        if sys.platform != "linux" or not SEALS or _is_counted():
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
        """The `size` bytes from block `first` on. Raises: ValueError if they reach beyond the end."""
        if first + _blocks(size) > BLOCKS:
            raise ValueError(f"{size} bytes from block {first} on (expected to end before {BLOCKS})")
        # Made from the memory, not from another array: views of `found` would keep that alive, not `found`.
        place = BLOCKS + first * BLOCK_BYTES
        found = np.ndarray.__new__(Payload, (size,), np.uint8, self._memory, place)
        weakref.finalize(found, _give_back, self, os.getpid(), first, size).atexit = False
        return found


def _is_counted() -> bool:
    """Is what this process maps limited (`ulimit -v`), used or not? The two arenas of a link are 2 GiB."""
    return bool(resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY)


def _blocks(size: int) -> int:
    return -(-size // BLOCK_BYTES)


def _give_back(arena: Arena, process: int, first: int, size: int) -> None:
    if os.getpid() == process:  # A forked process has copies of all that we hold, and may drop them earlier.
        arena.release(first, size)
