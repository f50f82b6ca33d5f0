"""Connections that have not said who they are: how many, how long, how often, and why they were refused.

A ROUTER has no call to end one of its connections, but its monitor tells the descriptor of each: shutting that down
ends the connection, and libzmq cleans up as if the other end had gone. When there are too many strangers, the oldest
goes: an honest one says Hello within a round trip, so a flood of silent ones pushes out its own.
"""

from __future__ import annotations

import contextlib
import socket
from collections import Counter
from dataclasses import dataclass
from typing import Any

import zmq

from ...protocols.errors import ConfigError
from .curve import MALFORMED, why_refused
from .descriptors import borrowed, opened_by

MAX_STRANGERS = 512
MAX_STRANGERS_PER_HOST = 128
HELLO_S = 10.0  # A connection that has not said Hello by then is ended, whatever else it said.
FAILURES_PER_S = 10.0  # Of one host, in the long run; beyond, its connections are ended as they come.
FAILURE_BURST = 100.0  # Failures that one host may have at once.
MAX_HOSTS = 1024  # Hosts whose failures are remembered.
TOO_OFTEN = "too often"
LEAST_DESCRIPTORS = 64  # A script that has loaded torch, and a node with two or three links, have 30 to 50.


@dataclass(eq=False, slots=True)
class Accepted:
    """One accepted connection, until it ends; its descriptor will be used again."""

    fd: int
    peer: tuple[str, int]  # Its other end, see `peer_of`.
    since_s: float
    # Its end is not to be counted as a refusal: one was counted already, or it only wanted to know who we are.
    settled: bool = False
    why: str = ""  # Why it ended, if that was during the handshake.
    conn: Any = None  # The transport's, once it has said Hello.

    @property
    def host(self) -> str:
        return self.peer[0].removeprefix("::ffff:")


class Strangers:
    """Decides which connections must end; the caller hangs up on those that a method returns. Pure.

    Attributes:
        refused: How many were refused, by reason.
    """

    def __init__(self) -> None:
        self.refused: Counter[str] = Counter()
        self._waiting: dict[Accepted, None] = {}  # Oldest first.
        self._by_host: Counter[str] = Counter()
        # By host: connections that were refused by key, and have not ended yet.
        self._turned_away: Counter[str] = Counter()
        self._credit: dict[str, tuple[float, float]] = {}  # By host: failures it may still have, as of when.

    def __len__(self) -> int:
        return len(self._waiting)

    def accepted(self, new: Accepted, now_s: float) -> list[Accepted]:
        """A connection has come. Returns: those to hang up on."""
        self._waiting[new] = None
        self._by_host[new.host] += 1
        if self._credit_of(new.host, now_s) < 1:
            return [self._over(new, TOO_OFTEN, now_s)]
        if self._by_host[new.host] > MAX_STRANGERS_PER_HOST:
            oldest = next(each for each in self._waiting if each.host == new.host)
            return [self._over(oldest, "too many at once", now_s)]
        if len(self._waiting) > MAX_STRANGERS:
            return [self._over(next(iter(self._waiting)), "too many at once", now_s)]
        return []

    def greeted(self, known: Accepted) -> None:
        """It is a peer's now, and no stranger any more."""
        self._forget(known)

    def refuse(self, who: Accepted, reason: str, now_s: float) -> None:
        """Count a refusal. The connection stays a stranger until its other end closes it, or its time is over."""
        if not who.settled:
            who.settled = True
            self._count(who.host, reason, now_s)

    def turned_away(self, host: str, reason: str, now_s: float) -> None:
        """A key was refused, on a connection from `host` that will end by itself."""
        self._turned_away[host] += self._by_host[host] > 0
        self._count(host, reason, now_s)

    def ended(self, gone: Accepted, reason: str, now_s: float) -> bool:
        """A connection is over. Returns: was that a refusal for `reason`, not counted before?"""
        if gone not in self._waiting:
            return False
        was_turned_away = self._turned_away[gone.host] > 0
        self._turned_away[gone.host] -= was_turned_away
        self._forget(gone)
        if was_turned_away:
            return False
        fresh = not gone.settled
        self.refuse(gone, reason, now_s)
        return fresh

    def overdue(self, now_s: float) -> list[Accepted]:
        """The connections that have been strangers for too long, to hang up on."""
        late = [each for each in self._waiting if now_s >= each.since_s + HELLO_S]
        return [self._over(each, "no Hello in time", now_s) for each in late]

    def _over(self, who: Accepted, reason: str, now_s: float) -> Accepted:
        self.refuse(who, reason, now_s)
        self._forget(who)
        return who

    def _count(self, host: str, reason: str, now_s: float) -> None:
        self.refused[reason] += 1
        if reason == TOO_OFTEN:
            return  # Costs no credit, or a flood would shut out its whole host for as long as it lasts.
        credit = self._credit_of(host, now_s) - 1
        self._credit.pop(host, None)
        self._credit[host] = (max(credit, 0.0), now_s)
        if len(self._credit) > MAX_HOSTS:
            self._credit.pop(next(iter(self._credit)))

    def _credit_of(self, host: str, now_s: float) -> float:
        credit, at_s = self._credit.get(host, (FAILURE_BURST, now_s))
        return min(credit + FAILURES_PER_S * (now_s - at_s), FAILURE_BURST)

    def _forget(self, who: Accepted) -> None:
        if who in self._waiting:
            del self._waiting[who]
            self._by_host[who.host] -= 1
            if not self._by_host[who.host]:
                del self._by_host[who.host]
                if not self._turned_away[who.host]:
                    del self._turned_away[who.host]


class Door:
    """The accepted connections of a ROUTER, from what its monitor says."""

    EVENTS = (
        zmq.EVENT_ACCEPTED
        | zmq.EVENT_DISCONNECTED
        | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
        | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    )

    def __init__(self, keyed: bool) -> None:
        self.keyed = keyed
        self.strangers = Strangers()
        self.by_fd: dict[int, Accepted] = {}
        self._failure = ""  # Of the connection whose end comes next: the one I/O thread tells both in a row.

    def event(self, event: int, value: int, now_s: float) -> Accepted | None:
        """Note an event of the monitor. Returns: the connection that has ended by it, if one has."""
        if event == zmq.EVENT_ACCEPTED:
            new = self.by_fd[value] = Accepted(value, peer_of(value), now_s)
            for each in self.strangers.accepted(new, now_s):
                hang_up(each)
        elif event == zmq.EVENT_DISCONNECTED:
            why, self._failure = self._failure, ""
            if gone := self.by_fd.pop(value, None):
                gone.why = why
            return gone
        else:
            self._failure = why_refused(event, value, self.keyed)
        return None

    def ended(self, gone: Accepted, now_s: float) -> str:
        """All that came over `gone` has been read. Returns: why it was refused; "" if it was not, or that is told."""
        reason = gone.why or MALFORMED
        return reason if self.strangers.ended(gone, reason, now_s) else ""

    def sweep(self, now_s: float) -> None:
        """Hang up on who has been a stranger for too long."""
        for each in self.strangers.overdue(now_s):
            hang_up(each)

    def hang_up(self, who: Accepted) -> None:
        """End a connection if it is still there."""
        if self.by_fd.get(who.fd) is who:
            hang_up(who)


def peer_of(fd: int) -> tuple[str, int]:
    """Host and port at the other end of libzmq's descriptor; ("?", 0) if it has been closed.

    Of a Unix socket it is the process that opened it: ("localhost", PID).
    """
    try:
        with borrowed(fd) as connection:
            return _peer(connection)
    except (OSError, ValueError):
        return "?", 0


def _peer(connection: socket.socket) -> tuple[str, int]:
    if connection.family == getattr(socket, "AF_UNIX", None):
        return "localhost", opened_by(connection)[0]
    host, port, *_ = connection.getpeername()
    return str(host), int(port)


def hang_up(connection: Accepted) -> None:
    """End it, unless its descriptor is another connection's by now."""
    with contextlib.suppress(OSError), borrowed(connection.fd) as ours:
        if _peer(ours) == connection.peer:
            ours.shutdown(socket.SHUT_RDWR)


def allow_many_descriptors() -> None:
    """Raise this process' limit to the most allowed: at the limit, libzmq accepts nobody and retries all the time.

    Raises: ConfigError if the most is too little: libzmq ends the process where it cannot open what it needs.
    """
    try:
        import resource
    except ImportError:  # Not a Unix.
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < LEAST_DESCRIPTORS:
        raise ConfigError(
            f"this process may open only {hard} files (expected {LEAST_DESCRIPTORS} or more, as by `ulimit -n`)"
        )
    if soft != hard:
        with contextlib.suppress(ValueError, OSError):  # macOS has a lower limit that it does not tell.
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
