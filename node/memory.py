"""Memory that does not fault page by page.

`keep_freed_frames`: glibc's malloc, told to keep what the all-reduce frees and needs again a moment later.

libzmq allocates every frame that arrives. By default glibc gives such blocks back to the kernel at once and
takes new ones, each page of which faults and is zeroed: 5,000 to 16,000 faults in one all-reduce of 100 MB
among 4 processes, none with these settings (docs/design.md). One arena, because a block is taken on libzmq's
thread and freed on ours. The price is up to TRIM_BYTES of memory that is kept though it is free.

`fresh`: what is large and written once, as a copy of the state is. In pages of 4 KiB faults take most of the time of
writing it, in huge ones hardly any (docs/design.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os

import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MMAP_BYTES = 64 << 20  # Larger than any frame.
TRIM_BYTES = 256 << 20
HUGE_BYTES = 4 << 20  # Two pages or more of them.


def keep_freed_frames() -> None:
    """Set it, for the whole process; CHAOSNET_MALLOC=default leaves malloc alone."""
    if os.environ.get("CHAOSNET_MALLOC") == "default":
        return
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return  # Not glibc.
    for name, value in ((M_ARENA_MAX, 1), (M_MMAP_THRESHOLD, MMAP_BYTES), (M_TRIM_THRESHOLD, TRIM_BYTES)):
        mallopt(name, value)


def fresh(size: int) -> torch.Tensor:
    """So many bytes of this machine's memory, uint8 [size]; in huge pages if that is much, and there are some.

    Raises: MemoryError, or torch's RuntimeError.
    """
    if size < HUGE_BYTES or not hasattr(mmap, "MADV_HUGEPAGE"):
        return torch.empty(size, dtype=torch.uint8, device="cpu")  # Whatever the script's default is.
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{size} bytes: {error}") from None
    with contextlib.suppress(OSError):  # A kernel without them.
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.uint8)
