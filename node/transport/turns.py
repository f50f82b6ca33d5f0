"""A transport's turns on the loop: when its ports are read, and when its sink is told."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

import zmq

from .link import Port
from .shared_memory import Payload

BULK_TURN_S = 0.002  # Time the sink may spend on bulk in one turn; control waits at most this and one item.


class Sink(Protocol):
    """Who hears what happens; always on the loop's thread, never from inside a call to the transport."""

    def opened(self, peer: str, address: str, dialled: bool, client: bool, at: str) -> None:
        """A first link to `peer` is up. `address`: the one we dialled, else the one it names ("" if none).

        `at`: see `PeerLink`.
        """

    def closed(self, peer: str, clean: bool) -> None:
        """The last link to `peer` is gone. `clean`: one of us said Bye; else its process or the path died."""

    def dial_failed(self, address: str, reason: str, final: bool) -> None:
        """A `dial` has ended without a link, for this reason. `final`: any other would, too."""

    def checked(self, address: str, peer: str, reason: str, at: str) -> None:
        """A `check` has ended: `peer` answers there, or "" does, for this reason. `at`: see `PeerLink`."""

    def control(self, peer: str, body: bytes) -> None:
        """A control message has come."""

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | Payload | None) -> None:
        """Bulk bytes have come. `payload.buffer` is writable, and the sink's own."""

    def foreign(self, where: str, reason: str) -> None:
        """Something malformed or not ours was dropped."""


class Turns:
    """Ports that may have something to read, and calls to the sink that wait; one turn of the loop serves both.

    `serve(port)` reads a port, and calls `emptied(port)` once it has read all; else the port's next turn comes.
    """

    def __init__(self) -> None:
        self.closed = False  # If so, no turn comes any more, and no timer is needed.
        self.serve: Callable[[Port], None]
        self._ready: set[Port] = set()  # To be read in the next turn.
        self._inbox: deque[Callable[[], None]] = deque()  # Calls to the sink; bulk is bounded by credits.
        self._is_due = False

    def start(self, serve: Callable[[Port], None]) -> None:
        """Take turns on the running loop."""
        self.serve = serve
        self._loop = asyncio.get_running_loop()

    def wake(self, port: Port | None = None) -> None:
        """There is something to do, with `port` or for the sink."""
        if port and port.open:
            self._ready.add(port)
        if not self._is_due and not self.closed:
            self._is_due = True
            self._loop.call_soon(self._turn)

    def emptied(self, port: Port) -> None:
        """All that `port` had to read has been read."""
        self._ready.discard(port)

    def tell(self, call: Callable[[], None]) -> None:
        """Have the sink called in a later turn, after all that it was to hear before."""
        self._inbox.append(call)
        self.wake()

    def deliver(self, until_s: float = float("inf")) -> None:
        """Call the sink until nothing waits, or until `until_s` by `time.monotonic`."""
        while self._inbox:
            self._inbox.popleft()()
            if time.monotonic() >= until_s:
                return

    def forget(self) -> None:
        """Drop all calls to the sink that wait."""
        self._inbox.clear()

    def later(self, delay_s: float, call: Callable[..., object], *args: object) -> asyncio.TimerHandle:
        return self._loop.call_later(delay_s, call, *args)

    def _turn(self) -> None:
        """Read what is ready, control first; then let the sink take bulk for a while."""
        self._is_due = False
        try:
            self._ready = {port for port in self._ready if port.open}
            for port in sorted(self._ready, key=lambda port: port.rank):
                if port.open:  # Serving another may have shut it.
                    self.serve(port)
            self.deliver(time.monotonic() + BULK_TURN_S)  # loop.time() may stand still within a turn.
        finally:  # Also when the sink raised: descriptors do not signal a second time what is still unread.
            if self._inbox or any(port.open for port in self._ready):
                self.wake()
