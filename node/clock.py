"""The clock by which a node judges silence: it goes on while the machine sleeps, and nobody sets it."""

from __future__ import annotations

import sys
import time

# Linux's monotonic clock stands still while the machine sleeps: a laptop that wakes would take a peer's death of an
# hour ago for one of just now, which proves something (protocols/deaths.py). On macOS the one of that name goes on.
_NUMBER = getattr(time, "CLOCK_BOOTTIME", None)
if sys.platform == "darwin":
    _NUMBER = time.CLOCK_MONOTONIC


def now_s() -> float:
    """Seconds since some moment in the past."""
    return time.monotonic() if _NUMBER is None else time.clock_gettime(_NUMBER)
