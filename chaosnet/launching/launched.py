"""What `chaosnet launch` starts on a host over ssh (`python -m chaosnet.launching.launched`): it runs members.

Members outlive neither the launcher nor the connection to it: when the pipe from there ends, or nothing has come
for a while, they are asked to leave as by Ctrl+C, and killed if they do not. What they print is read on meanwhile, so
that no print fails.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import click

from ..identity import identity, insecure_wanted
from ..protocols.errors import ChaosnetError
from ..settings.options import Script
from .orders import (
    INTERRUPT,
    KILL,
    MARK,
    MAX_LINE,
    SILENCE_S,
    VERSION,
    LaunchHello,
    LaunchReady,
    Orders,
    decoded,
    encoded,
    member_line,
)

STDIN, STDOUT = 0, 1
PATIENCE_S = "5"  # All hosts are reached when members start: who is there, is there soon.
LAST_WORDS_S = 2.0  # What a member has started may hold its pipe for longer than it lives.


class Input:
    """Lines from the launcher, by stdin."""

    def __init__(self) -> None:
        self._rest = b""

    def line(self, silence_s: float) -> bytes | None:
        """The next one. None: nobody is there any more, or has said anything for so long."""
        while b"\n" not in self._rest:
            readable, _, _ = select.select([STDIN], [], [], silence_s)
            found = os.read(STDIN, 65536) if readable else b""
            if not found:
                return None
            self._rest += found
        line, _, self._rest = self._rest.partition(b"\n")
        return line


class Output:
    """Lines to the launcher, by stdout, from several threads. If nobody reads them, they are dropped."""

    def __init__(self) -> None:
        self._turn = threading.Lock()

    def say(self, line: bytes) -> None:
        with self._turn, contextlib.suppress(OSError):
            rest = memoryview(line)
            while rest:
                rest = rest[os.write(STDOUT, rest) :]


class Members:
    """Processes of this host."""

    def __init__(self, output: Output) -> None:
        self._output = output
        self._processes: list[subprocess.Popen[bytes]] = []
        self._waiting: list[threading.Thread] = []

    def start(self, hello: LaunchHello, orders: Orders, allowed: str) -> None:
        """All of them. Each is the leader of a group of its own, as in a terminal of its own."""
        for number, member in enumerate(orders.members):
            settings = {"CHAOSNET_NAME": member.name, "CHAOSNET_LISTEN": member.listen}
            if orders.join:
                settings |= {"CHAOSNET_JOIN": orders.join, "CHAOSNET_FOUND": "1"}
                settings["CHAOSNET_JOIN_PATIENCE_S"] = hello.env.get("CHAOSNET_JOIN_PATIENCE_S", PATIENCE_S)
            if allowed:
                settings["CHAOSNET_ALLOWED_KEYS"] = allowed
            process = subprocess.Popen(
                [sys.executable, "-m", "chaosnet", "run", *hello.run],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **hello.env, **settings}, start_new_session=True,
            )  # fmt: skip
            self._processes.append(process)
            thread = threading.Thread(target=self._follow, args=(number, process), daemon=True)
            self._waiting.append(thread)
            thread.start()

    def signal(self, number: int) -> None:
        """To all that run in the groups of members that have not ended."""
        for process in self._processes:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, number)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Have all ended, and has that been told?"""
        until_s = None if timeout_s is None else time.monotonic() + timeout_s
        for thread in self._waiting:
            thread.join(None if until_s is None else max(0.0, until_s - time.monotonic()))
        return not any(thread.is_alive() for thread in self._waiting)

    def _follow(self, number: int, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None and process.stderr is not None
        pipes = ((process.stdout, b"o"), (process.stderr, b"e"))
        readers = [
            threading.Thread(target=self._pass_on, args=(number, *each), daemon=True) for each in pipes
        ]
        for reader in readers:
            reader.start()
        code = process.wait()
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)  # What it has left behind.
        for reader in readers:
            reader.join(LAST_WORDS_S)
        self._output.say(member_line(number, b"x", b"%d" % (code if code >= 0 else 128 - code)))

    def _pass_on(self, number: int, pipe: IO[bytes], kind: bytes) -> None:
        with pipe:
            for line in iter(lambda: pipe.readline(MAX_LINE // 2), b""):
                self._output.say(member_line(number, kind, line.rstrip(b"\n")))


def ready(hello: LaunchHello) -> LaunchReady:
    """Go where the script is, and look whether it can be run."""
    if hello.version != VERSION:
        return LaunchReady(VERSION)
    os.environ.update(hello.env)
    try:
        folder = Path(hello.workdir).expanduser()
        if not folder.is_dir():
            return LaunchReady(
                VERSION, refused=f"{hello.workdir}: no such folder there (expected --workdir DIR)"
            )
        os.chdir(folder)
        if hello.run[0] != "-m":
            Script().convert(hello.run[0], None, None)
        keys = identity(make=not insecure_wanted())
    except click.BadParameter as error:
        return LaunchReady(VERSION, refused=f"in {os.getcwd()}: {error.message}")
    except (ChaosnetError, OSError, RuntimeError) as error:
        return LaunchReady(VERSION, refused=str(error))
    return LaunchReady(VERSION, key=keys.public if keys else "")


@contextlib.contextmanager
def file_of(keys: list[str]) -> Iterator[str]:
    """A file with these, while members run; "" for none."""
    if not keys:
        yield ""
        return
    with tempfile.NamedTemporaryFile("w", prefix="chaosnet-allowed-", suffix=".txt") as file:
        file.write("".join(f"{key}\n" for key in keys))
        file.flush()
        yield file.name


def told_to_end() -> threading.Event:
    """Set once this process is to end."""
    ends = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: ends.set())
    return ends


def obey(lines: Input, members: Members, gone: threading.Event, grace_s: float) -> None:
    """Until all have ended; once `gone` is set, they are asked to."""

    def listen() -> None:
        while (line := lines.line(SILENCE_S)) is not None:
            if line in (INTERRUPT, KILL):
                members.signal(signal.SIGINT if line == INTERRUPT else signal.SIGKILL)
        gone.set()

    threading.Thread(target=listen, daemon=True).start()
    while not members.wait(0.2):
        if gone.is_set():
            members.signal(signal.SIGINT)
            if not members.wait(grace_s):
                members.signal(signal.SIGKILL)
                members.wait(LAST_WORDS_S)
            return


def main() -> None:
    """Ends with 0, whatever members have ended with: that is told."""
    lines, output = Input(), Output()
    hello = decoded(lines.line(SILENCE_S) or b"", LaunchHello)
    if hello is None:
        sys.exit("error: chaosnet.launching.launched is what `chaosnet launch` starts on its hosts")
    answer = ready(hello)
    output.say(MARK + encoded(answer))
    if answer.refused or hello.version != VERSION:
        return
    while (line := lines.line(SILENCE_S)) is not None:
        orders = decoded(line, Orders)
        if orders is not None:
            members = Members(output)
            gone = told_to_end()
            with file_of(orders.allowed) as allowed:
                try:
                    members.start(hello, orders, allowed)
                except OSError as error:
                    print(f"error: not all members can be started: {error}", file=sys.stderr)
                    gone.set()
                obey(lines, members, gone, orders.grace_s)
            return


if __name__ == "__main__":
    main()
    sys.stderr.flush()
    os._exit(0)  # A thread may still wait for the launcher to read.
