"""Measure one direction of a link with one TCP connection: python -m ...flow recv HOST PORT | send HOST PORT SECONDS.

The round trip first (small messages, back and forth), then as many bytes as pass in the given time. The receiver
counts, and leaves out the beginning, where the token bucket is full and TCP still speeds up: 0.3 s, and on long ways
twenty round trips.
"""

from __future__ import annotations

import json
import socket
import statistics
import sys
import time
from typing import Any

PINGS = 20
WARM_UP_S = 0.3
WARM_UP_ROUND_TRIPS = 20
BLOCK = bytes(256 << 10)
UNSENT_BYTES = 128 << 10
CONNECT_PATIENCE_S = 5.0
PATIENCE_S = 30.0


def receive(host: str, port: int) -> None:
    """Serve one measurement; prints READY once it listens."""
    with socket.create_server((host, port)) as server:
        # Whoever has started us cannot always end us: in a container, we would stay.
        server.settimeout(PATIENCE_S)
        print("READY", flush=True)
        connection, _ = server.accept()
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        began_s = time.perf_counter()
        for _ in range(PINGS):
            connection.sendall(_exactly(connection, 8))
        warm_up_s = _warm_up_s((time.perf_counter() - began_s) / PINGS)
        connection.sendall(json.dumps(count(connection, warm_up_s)).encode())


def _warm_up_s(rtt_s: float) -> float:
    return max(WARM_UP_S, WARM_UP_ROUND_TRIPS * rtt_s)


def count(connection: socket.socket, warm_up_s: float = WARM_UP_S) -> dict[str, float]:
    """Rate of all that comes until the other end has sent everything, but for the first `warm_up_s`."""
    space = memoryview(bytearray(1 << 20))
    started_s, total, late, late_s, last_s = 0.0, 0, 0, 0.0, 0.0
    while got := connection.recv_into(space):
        last_s = time.perf_counter()
        started_s = started_s or last_s
        total += got
        if not late_s and last_s > started_s + warm_up_s:
            late, late_s = total, last_s
    seconds = last_s - late_s
    return {"bytes": total, "mbit": (total - late) * 8 / seconds / 1e6 if late_s and seconds > 0 else 0.0}


def send(host: str, port: int, seconds: float) -> dict[str, Any]:
    """Returns: mbit, rtt_min_ms, rtt_median_ms, congestion_control."""
    connection = _connect(host, port)
    with connection:
        connection.settimeout(PATIENCE_S)  # Without any progress.
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # What waits here at the end is sent, too: on a slow link for long.
        if hasattr(socket, "TCP_NOTSENT_LOWAT"):
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
        rtts_ms = []
        for _ in range(PINGS):
            started_s = time.perf_counter()
            connection.sendall(bytes(8))
            _exactly(connection, 8)
            rtts_ms.append((time.perf_counter() - started_s) * 1e3)
        until_s = time.perf_counter() + _warm_up_s(statistics.mean(rtts_ms) / 1e3) + seconds
        while time.perf_counter() < until_s:
            connection.send(BLOCK)  # As much as there is room for.
        connection.shutdown(socket.SHUT_WR)
        found: dict[str, Any] = json.loads(connection.makefile().read())
        control = getattr(socket, "TCP_CONGESTION", None)
        name = connection.getsockopt(socket.IPPROTO_TCP, control, 16) if control else b"unknown"
    return found | {
        "rtt_min_ms": min(rtts_ms),
        "rtt_median_ms": statistics.median(rtts_ms),
        "congestion_control": name.rstrip(b"\0").decode(),
    }


def _connect(host: str, port: int) -> socket.socket:
    deadline_s = time.monotonic() + CONNECT_PATIENCE_S
    while True:
        try:
            return socket.create_connection((host, port), timeout=CONNECT_PATIENCE_S)
        except ConnectionRefusedError:
            if time.monotonic() > deadline_s:
                raise
            time.sleep(0.05)


def _exactly(connection: socket.socket, size: int) -> bytes:
    got = b""
    while len(got) < size:
        part = connection.recv(size - len(got))
        if not part:
            raise ConnectionError("the other end hung up")
        got += part
    return got


if __name__ == "__main__":
    what, host, port, *rest = sys.argv[1:]
    if what == "recv":
        receive(host, int(port))
    else:
        print(json.dumps(send(host, int(port), float(rest[0]))))
