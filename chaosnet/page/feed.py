"""One watch of the cluster for all viewers: a thread that asks only while somebody looks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..client import Keys, watch
from ..protocols.errors import PeerUnreachable
from ..protocols.status import Status
from .picture import Picture

PACE_S = 1.0  # From one question to the next: nodes report once a second.
PACE_BESIDE_TRAINING_S = 2.0  # In a process that trains, whose time each question takes a little of.
ASK_AGAIN_S = 0.25  # Of the next node, if one has not answered.

Ask = Callable[[Callable[[PeerUnreachable], None]], Iterator[Status]]  # From what to do on silence.


class _Closed(Exception):
    """Nobody is to look any more."""


class Feed:
    """What is known of a cluster, and who wants to hear of it. All methods are for any thread.

    Args:
        ask: Statuses of the cluster, without an end; None: the picture is what it is, and stays so.
        pace_s: From one question to the next.
        address: Where the cluster is asked first; "": nowhere, as all is known.
    """

    def __init__(
        self,
        picture: Picture,
        ask: Ask | None,
        pace_s: float = PACE_S,
        address: Callable[[], str] = lambda: "",
    ) -> None:
        self.address = address
        self.picture, self.lock, self._pace_s = picture, threading.Lock(), pace_s
        self._ask = ask
        self._turn = threading.Condition()
        self._listeners: dict[int, Callable[[], None]] = {}
        self._serial = 0
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="chaosnet-page-feed", daemon=True)

    def start(self) -> None:
        """Ask from now on, whenever somebody looks."""
        if self._ask is not None:
            self._thread.start()

    def close(self) -> None:
        """Ask no more; who listens is told once more."""
        with self._turn:
            self._closed = True
            self._turn.notify_all()
        self._tell()

    @property
    def closed(self) -> bool:
        """Is it over?"""
        return self._closed

    @contextmanager
    def listening(self, listener: Callable[[], None]) -> Iterator[None]:
        """As long as this lasts the cluster is asked, and `listener` called, on the feed's thread, with all news."""
        with self._turn:
            self._serial += 1
            serial = self._serial
            self._listeners[serial] = listener
            self._turn.notify_all()
        try:
            yield
        finally:
            with self._turn:
                del self._listeners[serial]

    # --- the thread ---

    def _run(self) -> None:
        statuses: Iterator[Status] | None = None
        while self._is_wanted():
            assert self._ask is not None
            asked_s = time.time()
            try:
                statuses = statuses or self._ask(self._silent)
                found = next(statuses)
                with self.lock:
                    self.picture.answered(found, time.time())
            except _Closed:
                return
            except Exception as error:  # Nobody has answered yet, or this machine is short of descriptors.
                statuses = None
                with self.lock:
                    self.picture.silent(str(error), asked_s)
            self._tell()
            self._rest(self._pace_s - ASK_AGAIN_S)

    def _is_wanted(self) -> bool:
        """Wait until somebody looks. False: it is over."""
        with self._turn:
            self._turn.wait_for(lambda: self._closed or self._listeners)
            return not self._closed

    def _rest(self, seconds: float) -> None:
        with self._turn:
            self._turn.wait_for(lambda: self._closed, seconds)

    def _silent(self, error: PeerUnreachable) -> None:
        with self.lock:
            self.picture.silent(str(error), time.time())
        self._tell()
        if not self._is_wanted():  # A cluster that is gone is not asked for nobody.
            raise _Closed

    def _tell(self) -> None:
        with self._turn:
            listeners = [*self._listeners.values()]
        for listener in listeners:
            listener()


def of_cluster(
    address: Callable[[], str], keys: Callable[[], Keys] = lambda: "user", pace_s: float = PACE_S
) -> Feed:
    """Of the cluster that the node at `address` belongs to; if that dies, its other members are asked.

    `address` and `keys` are evaluated when the cluster is asked for the first time. `keys`: as `client.status`.
    """

    def ask(on_silence: Callable[[PeerUnreachable], None]) -> Iterator[Status]:
        return watch(
            address(), ASK_AGAIN_S, float("inf"), keys(), history=True, on_silence=on_silence, increments=True
        )

    return Feed(Picture(), ask, pace_s, address)


def of_status(status: Status, source: str) -> Feed:
    """Of a status that was kept in a file."""
    picture = Picture(source=source)
    times = [row.time_s for row in status.steps] + [row.time_s for row in status.events]
    last = max(times, default=time.time())
    picture.answered(status, last)
    return Feed(picture, None)
