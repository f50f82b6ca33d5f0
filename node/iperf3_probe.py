"""Measuring a link with iperf3, as the paper does (Chaos, Sec. VI): an alternative to in-band probes.

It needs libiperf (package iperf3 or libiperf0). The Python package measures rightly only once in a process
(later runs fail with OSError), so each run has a process of its own:

    python -m ...iperf3_probe serve               prints the port, serves both directions, ends
    python -m ...iperf3_probe run HOST PORT       prints {"in_bps": ..., "out_bps": ...}
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

SECONDS = 1  # The package takes whole ones only.
PATIENCE_S = 8.0
LISTEN_PATIENCE_S = 2.0
MAX_SERVING = 16  # Peers, at once: each is a process.

_serving = threading.Semaphore(MAX_SERVING)


@dataclass(frozen=True, slots=True)
class IperfResult:
    """Rates in bit/s of what came and what went; or why there are none."""

    in_bps: float = 0.0
    out_bps: float = 0.0
    error: str = ""


def serve(on_port: Callable[[int], None]) -> None:
    """Let one peer measure both directions. The port is 0 if it cannot: too many do, or iperf3 does not work."""
    if not _serving.acquire(blocking=False):
        on_port(0)
        return
    try:
        with _process("serve") as serving, _ended_after(PATIENCE_S, serving):
            assert serving.stdout is not None
            port = serving.stdout.readline().strip()
            on_port(int(port) if port.isdigit() else 0)
            if port.isdigit():
                serving.wait()
    except OSError:  # No process could be started.
        on_port(0)
    finally:
        _serving.release()


def run(address: str) -> IperfResult:
    """Measure both directions against the server at HOST:PORT."""
    host, _, port = address.rpartition(":")
    with _process("run", host, port) as running:
        try:
            out, err = running.communicate(timeout=PATIENCE_S)
        except subprocess.TimeoutExpired:
            _end(running)
            return IperfResult(error=f"no result in {PATIENCE_S:g} s")
    if running.returncode != 0:
        return IperfResult(error=(err.strip().splitlines() or ["iperf3 failed"])[-1])
    return IperfResult(**json.loads(out.splitlines()[-1]))


def _process(*arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", __name__, *arguments]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


@contextmanager
def _ended_after(patience_s: float, process: subprocess.Popen[str]) -> Iterator[None]:
    """However it goes on, also if it says nothing at all."""
    timer = threading.Timer(patience_s, _end, (process,))
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        _end(process)


def _end(process: subprocess.Popen[str]) -> None:
    """With the processes that it has started: a server waits for ever for who does not come."""
    with suppress(ProcessLookupError):
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def _once(*arguments: str) -> str:
    """One use of the library, in a process of its own. A server that does not listen yet, or still says it is busy
    with the run before, is given some time.
    """
    deadline_s = time.monotonic() + LISTEN_PATIENCE_S
    while True:
        command = [sys.executable, "-m", __spec__.name if __spec__ else __name__, *arguments]
        # The limit is for when whoever wanted this is gone.
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=PATIENCE_S)
        if done.returncode == 0:
            return done.stdout
        if time.monotonic() > deadline_s:
            sys.exit((done.stderr.strip().splitlines() or ["iperf3 failed"])[-1])


def _main(what: str, *rest: str) -> None:
    import iperf3  # Loads libiperf, which may be missing.

    if what == "serve":
        port = _free_port()
        print(port, flush=True)
        for _ in range(2):
            _once("serve-once", str(port))
    elif what == "serve-once":
        server = iperf3.Server()
        server.port, server.verbose = int(rest[0]), False
        server.run()
    elif what == "run":
        rates = {name: float(_once("run-once", *rest, name)) for name in ("in_bps", "out_bps")}
        print(json.dumps(rates))
    elif what == "run-once":
        client = iperf3.Client()
        client.server_hostname, client.port, client.duration = rest[0], int(rest[1]), SECONDS
        client.reverse = rest[2] == "in_bps"
        found = client.run()
        if found.error:
            sys.exit(found.error)
        print(found.received_bps)


if __name__ == "__main__":
    _main(*sys.argv[1:])
