"""Datagrams and a TCP stream over a testbed's links, with both ends in this process, so with one clock."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")
CLONE_NEWNET = 0x40000000
HEAD = struct.Struct("!qd")  # Number, time sent.
PATIENCE_S = 1.0  # For the last datagram.
libc = ctypes.CDLL(None, use_errno=True)


def inside(space: str, make: Callable[[], T]) -> T:
    """Make a socket in a namespace; a socket stays where it was made, the thread that made it ends."""
    made: list[T] = []

    def enter() -> None:
        with open(f"/run/netns/{space}") as namespace:
            if libc.setns(namespace.fileno(), CLONE_NEWNET) != 0:
                raise OSError(ctypes.get_errno(), f"setns {space}")
        made.append(make())

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    return made[0]


def datagrams(sender: str, receiver: str, host: str, count: int, every_s: float) -> list[tuple[int, float]]:
    """Send `count` small ones. Returns: number and milliseconds on the way of those that arrive, as they do."""
    receiving = inside(receiver, _datagram_socket)
    sending = inside(sender, _datagram_socket)
    found: list[tuple[int, float]] = []

    def receive() -> None:
        receiving.settimeout(PATIENCE_S + every_s)
        with contextlib.suppress(TimeoutError):
            while len(found) < count:
                number, sent_s = HEAD.unpack(receiving.recv(64))
                found.append((number, (time.perf_counter() - sent_s) * 1e3))

    thread = threading.Thread(target=receive)
    thread.start()
    began_s = time.perf_counter()
    for number in range(count):
        time.sleep(max(0.0, began_s + number * every_s - time.perf_counter()))
        sending.sendto(HEAD.pack(number, time.perf_counter()), (host, receiving.getsockname()[1]))
    thread.join()
    sending.close()
    receiving.close()
    return found


def _datagram_socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.bind(("0.0.0.0", 0))
    return made


class Stream:
    """TCP connections that always have something to send; counted together."""

    def __init__(self, sender: str, receiver: str, host: str, connections: int = 1) -> None:
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.arrived = [0] * connections
        with inside(receiver, lambda: socket.create_server(("0.0.0.0", 0))) as server:
            at = (host, server.getsockname()[1])
            for index in range(connections):
                sending = inside(sender, lambda: socket.create_connection(at, timeout=10))
                sending.settimeout(None)
                receiving, _ = server.accept()
                self.sockets += [sending, receiving]
                self.threads.append(threading.Thread(target=self._send, args=[sending], daemon=True))
                self.threads.append(
                    threading.Thread(target=self._receive, args=[receiving, index], daemon=True)
                )
        for thread in self.threads:
            thread.start()

    def _send(self, sending: socket.socket) -> None:
        block = bytes(256 << 10)
        with contextlib.suppress(OSError):  # Closed.
            while True:
                sending.sendall(block)

    def _receive(self, receiving: socket.socket, index: int) -> None:
        space = memoryview(bytearray(1 << 20))
        with contextlib.suppress(OSError):  # Closed, or reset by the other end's closing.
            while got := receiving.recv_into(space):
                self.arrived[index] += got

    def mbit(self, seconds: float) -> float:
        """What arrives from now on."""
        before, began_s = sum(self.arrived), time.perf_counter()
        time.sleep(seconds)
        return (sum(self.arrived) - before) * 8e-6 / (time.perf_counter() - began_s)

    def mbit_once(self, least: float, windows: int, window_s: float) -> float:
        """What arrives in the first window of time in which it is `least` or more, or else in the last one."""
        for _ in range(windows):
            if (found := self.mbit(window_s)) >= least:
                break
        return found

    def close(self) -> None:
        for each in self.sockets:
            with contextlib.suppress(OSError):  # The other end was quicker.
                each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join()
        for each in self.sockets:
            each.close()


def share(values: list[float], of: float) -> float:
    """The value that `of` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(of * len(values)))]


def swapped(numbers: list[int]) -> int:
    """How many come right after one that was sent later."""
    return sum(later < earlier for earlier, later in itertools.pairwise(numbers))


def namespaces() -> list[str]:
    return sorted(os.listdir("/run/netns")) if os.path.isdir("/run/netns") else []
