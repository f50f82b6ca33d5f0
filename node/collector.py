"""Python's garbage collector, while many objects are made that are to stay.

It runs whenever some hundred more objects have been made than have gone, and looks at those, now and then at all. A
state of 5,000 small parameters is 100,000 objects and more, and none of them is garbage: it would look at them in
vain, several times in one join, which would take a quarter of the join's time.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

AT_MOST_S = 30.0
"""Who waits for long makes garbage, too."""


class _Switch:
    """Switches the collector off as long as anybody holds it; then it is as it was before."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._holders: set[object] = set()
        self._was_on = False

    def hold(self, holder: object) -> None:
        with self._lock:
            if not self._holders:
                self._was_on = gc.isenabled()
                gc.disable()
            self._holders.add(holder)

    def let_go(self, holder: object) -> None:
        """`holder` does not hold it any more. Does nothing if it did not."""
        with self._lock:
            held, self._holders = self._holders, self._holders - {holder}
            if held and not self._holders and self._was_on:
                gc.enable()


_switch = _Switch()


@contextmanager
def held_off(at_most_s: float = AT_MOST_S) -> Iterator[None]:
    """No collection, until the block ends or this time is over. Threads may be in such blocks at once."""
    holder = object()
    _switch.hold(holder)
    timer = threading.Timer(at_most_s, _switch.let_go, (holder,))
    timer.daemon = True
    try:
        timer.start()
    except RuntimeError:  # There are as many threads as may be, and nothing would end it in time.
        _switch.let_go(holder)
    try:
        yield
    finally:
        timer.cancel()
        _switch.let_go(holder)
