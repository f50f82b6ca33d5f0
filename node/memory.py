"""Memory that does not fault page by page.

`keep_freed_frames`: glibc's malloc, told to keep what the all-reduce frees and needs again a moment later.

libzmq allocates every frame that arrives. By default glibc gives such blocks back to the kernel at once and
takes new ones, each page of which faults and is zeroed: 5,000 to 16,000 faults in one all-reduce of 100 MB
among 4 processes, none with these settings (docs/design.md). One arena, because a block is taken on libzmq's
thread and freed on ours. The price is up to TRIM_BYTES of memory that is kept though it is free.

`fresh`: what is large and written once, as a copy of the state is. In pages of 4 KiB faults take most of the time of
writing it, in huge ones hardly any (docs/design.md).

`free_bytes`: what may still be taken before the kernel ends somebody. A container, a pod or a job of Slurm has less
than its machine, by its control group (cgroup); programs in it see the machine's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import psutil
import torch

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD, M_ARENA_MAX = -1, -3, -8  # malloc.h
MMAP_BYTES = 64 << 20  # Larger than any frame.
TRIM_BYTES = 256 << 20
HUGE_BYTES = 4 << 20  # Two pages or more of them.
CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# Of cgroups of versions 2 and 1: the limit, what is used, and what of that the kernel gives back if it must.
MEMORY_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


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


def free_bytes(cgroups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """What this process may still take: of the machine's memory, and of what its control groups are limited to."""
    return min((psutil.virtual_memory().available, *_rooms(cgroups, own)))


def _rooms(cgroups: Path, own: Path) -> Iterator[int]:
    """Of each control group that this process is in and that says so; on other systems than Linux of none."""
    with contextlib.suppress(OSError, ValueError):  # No such file, or it reads otherwise.
        for line in own.read_text().splitlines():
            _, controller, path = line.split(":", 2)
            if controller in MEMORY_FILES:
                # In a container, the group's own folder may lie where that of the machine's root does.
                for group in (inside := PurePosixPath(path).relative_to("/"), *inside.parents):
                    yield from _room(cgroups / controller / group, *MEMORY_FILES[controller])


def _room(group: Path, limit: str, used: str, cache: str) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError):  # No such group, or no limit ("max").
        most, taken = (int((group / name).read_text()) for name in (limit, used))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        yield max(0, most - taken + int(stat.get(cache, 0)))
