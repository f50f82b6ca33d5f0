"""glibc's malloc, told to keep what the all-reduce frees and needs again a moment later.

libzmq allocates every frame that arrives. By default glibc gives such blocks back to the kernel at once and
takes new ones, each page of which faults and is zeroed: 5,000 to 16,000 faults in one all-reduce of 100 MB
among 4 processes, none with these settings (docs/design.md). One arena, because a block is taken on libzmq's
thread and freed on ours. The price is up to TRIM_BYTES of memory that is kept though it is free.
"""

from __future__ import annotations

import ctypes
import os

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MMAP_BYTES = 64 << 20  # Larger than any frame.
TRIM_BYTES = 256 << 20


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
