"""Starts one script on several hosts over the user's own ssh, as one cluster, and ends it there.

All hosts are reached before any member starts: those that cannot be are named, and the others form the cluster. Each
host's members hold a key of that host, which it makes if it has none, so no secret travels: public keys do, and every
member is told those of all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shlex
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, replace
from typing import Any, TextIO

from ..protocols.errors import ConfigError
from ..protocols.sentences import counted
from .hosts import LaunchHost, check_addresses, seeds, taken_for
from .orders import (
    BEAT,
    BEAT_EVERY_S,
    INTERRUPT,
    KILL,
    MARK,
    MAX_LINE,
    VERSION,
    LaunchHello,
    LaunchMember,
    LaunchReady,
    Orders,
    decoded,
    encoded,
    parsed_line,
)

ANSWER_S = 40.0  # From ssh's start to what chaosnet says there.
LAST_WORDS_S = 5.0
LOOK_EVERY_S = 0.05  # Whether ssh has ended.
ME = "launch"  # In the place of a host's name.
HARD_EXIT_CODE = 130
SSH_OPTIONS = (  # Behind the user's own, which win.
    "-o", "BatchMode=yes", "-o", "ConnectTimeout=15", "-o", "ServerAliveInterval=15", "-T",
)  # fmt: skip
Tell = Callable[[str, bytes, TextIO], None]


@dataclass(frozen=True, slots=True)
class Job:
    """What to start.

    Attributes:
        ssh: The command, with options.
        python: There; a ~ in front is the home of the user there.
        workdir: There; the script and relative paths are seen from it.
        run: Behind `chaosnet run`.
        key: The public key of who launches: may ask members, and leave.
    """

    ssh: tuple[str, ...]
    python: str
    workdir: str
    run: tuple[str, ...]
    env: dict[str, str]
    key: str
    grace_s: float

    def command(self, login: str) -> tuple[str, ...]:
        """For one host."""
        tilde, rest = ("~/", self.python[2:]) if self.python.startswith("~/") else ("", self.python)
        there = f"exec {tilde}{shlex.quote(rest)} -m chaosnet.launching.launched"
        return (*self.ssh, *SSH_OPTIONS, login, there)

    def hello(self) -> LaunchHello:
        return LaunchHello(VERSION, self.workdir, [*self.run], self.env)

    def orders(self, host: LaunchHost, ready: Sequence[tuple[LaunchHost, str]]) -> Orders:
        """For one of the hosts that are ready. `ready`: with their keys."""
        ends = [end for each, key in ready for end in each.ends(key)]
        keys = dict.fromkeys(key for key in (*(key for _, key in ready), self.key) if key)
        return Orders(
            members=[LaunchMember(*each) for each in zip(host.members, host.listens(), strict=True)],
            join=seeds(ends) if len(ends) > 1 else "",
            allowed=[*keys] if any(key for _, key in ready) else [],
            grace_s=self.grace_s,
        )


async def addresses(hosts: Sequence[LaunchHost], ssh: Sequence[str]) -> tuple[LaunchHost, ...]:
    """The hosts with their addresses, of which ssh knows those that no line names. Raises: ConfigError."""
    found = []
    for host in hosts:
        printed = b"" if host.address else await _configuration((*ssh, "-G", host.login))
        found.append(host if host.address else replace(host, address=taken_for(host, printed.decode())))
    check_addresses(found)
    return tuple(found)


async def _configuration(command: Sequence[str]) -> bytes:
    """Raises: ConfigError if there is no such command."""
    try:
        ssh = await asyncio.create_subprocess_exec(
            *command, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
    except OSError as error:
        raise ConfigError(
            f"--ssh: {command[0]!r} cannot be run: {error.strerror} (expected an ssh, with options)"
        ) from None
    return (await ssh.communicate())[0]


async def _started(
    command: Sequence[str],
) -> tuple[asyncio.SubprocessTransport, asyncio.subprocess.Process]:
    """Its pipes end with the transport, whoever else holds them. Raises: OSError."""
    loop = asyncio.get_running_loop()
    transport, protocol = await loop.subprocess_exec(
        lambda: asyncio.subprocess.SubprocessStreamProtocol(limit=2 * MAX_LINE, loop=loop),
        *command,
        start_new_session=True,  # Ctrl+C is ours to pass on.
    )
    return transport, asyncio.subprocess.Process(transport, protocol, loop)


async def _line_of(pipe: asyncio.StreamReader) -> bytes:
    """The next line, a piece of one that is longer than the pipe's limit, or what is left; empty at the end."""
    try:
        return await pipe.readuntil(b"\n")
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await pipe.readexactly(error.consumed)


class Remote:
    """One host, over ssh.

    Attributes:
        key: Of its members; "" without keys.
        codes: What its members ended with, by number.
    """

    def __init__(self, host: LaunchHost, job: Job, tell: Tell) -> None:
        self.host, self.key, self.codes = host, "", dict[int, int]()
        self._job, self._tell = job, tell
        self._process: asyncio.subprocess.Process | None = None
        self._transport: asyncio.SubprocessTransport | None = None
        self._errors: list[str] = []  # What ssh, or a shell there, has said before chaosnet did.
        self._reader: asyncio.Task[None] | None = None

    @property
    def is_well(self) -> bool:
        """Have all its members ended well?"""
        return [self.codes.get(number) for number in range(self.host.slots)] == [0] * self.host.slots

    async def connect(self) -> str:
        """Returns: why no member can start there; "" if they can."""
        try:
            self._transport, self._process = await _started(self._job.command(self.host.login))
        except OSError as error:
            return f"{self._job.ssh[0]} cannot be run: {error.strerror}"
        self._reader = asyncio.create_task(self._read_errors())
        self.send(encoded(self._job.hello()))
        try:
            return await asyncio.wait_for(self._answer(), ANSWER_S)
        except TimeoutError:
            return f"no answer in {ANSWER_S:g} s"

    async def _answer(self) -> str:
        while line := await self._line():
            if not line.startswith(MARK):
                self._tell(self.host.name, line, sys.stdout)  # A login says what it likes.
                continue
            answer = decoded(line.removeprefix(MARK), LaunchReady)
            if answer is None or answer.version != VERSION:
                return "its chaosnet is of another version (expected the same on all hosts)"
            for said in self._errors:
                self._tell(self.host.name, said.encode(), sys.stderr)
            self.key = answer.key
            return answer.refused
        code = await self._ended()
        words = self._errors[-1] if self._errors else f"ssh ended with {code}"
        no_python = code in (126, 127) or "No module named" in words
        hint = " (expected --python PATH of one with chaosnet)" if no_python else ""
        return f"{words}{hint}"

    def send(self, line: bytes) -> None:
        """If there is still somebody."""
        if self._process is not None and self._process.stdin is not None:
            with contextlib.suppress(OSError, RuntimeError):
                self._process.stdin.write(line if line.endswith(b"\n") else line + b"\n")

    async def follow(self) -> None:
        """Tell what its members print, until they have ended, or the connection has."""
        while line := await self._line():
            said = parsed_line(line)
            if said is None or said[0] >= self.host.slots:
                continue
            member, (number, kind, text) = self.host.members[said[0]], said
            if kind == "x":
                self.codes[number] = int(text)
                if self.codes[number]:
                    self._tell(ME, f"{member} ended with exit code {self.codes[number]}".encode(), sys.stderr)
            else:
                self._tell(member, text, sys.stdout if kind == "o" else sys.stderr)
        code = await self._ended()
        if len(self.codes) < self.host.slots:
            words = f": {self._errors[-1]}" if self._errors else ""
            news = f"the connection to {self.host.name} has ended ({code}{words}): what runs there leaves by itself"
            self._tell(ME, news.encode(), sys.stderr)

    async def close(self) -> None:
        """Hang up."""
        process = self._process
        if process is not None and process.returncode is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)  # Also what ssh has started to get there.
        await self._ended()
        if self._transport is not None:
            self._transport.close()

    async def _line(self) -> bytes:
        """One of the host's; empty at the end."""
        assert self._process is not None and self._process.stdout is not None
        with contextlib.suppress(OSError):
            return await _line_of(self._process.stdout)
        return b""

    async def _ended(self) -> int:
        if self._process is None:
            return 255
        # Not `wait`: it waits for our pipes as well, which what ssh has started may hold for longer than ssh lives.
        while (code := self._process.returncode) is None:
            await asyncio.sleep(LOOK_EVERY_S)
        if self._reader is not None:
            await asyncio.wait([self._reader], timeout=LAST_WORDS_S)
            self._reader.cancel()
        return code

    async def _read_errors(self) -> None:
        """Of ssh itself, and of what runs there before a member."""
        assert self._process is not None and self._process.stderr is not None
        while line := await _line_of(self._process.stderr):
            text = line.decode(errors="replace").strip()
            if self.codes or self.key:
                self._tell(self.host.name, text.encode(), sys.stderr)
            self._errors = [*self._errors[-20:], text] if text else self._errors


class Launcher:
    """One launch. `tell`: prints a line of somebody's."""

    def __init__(self, hosts: Sequence[LaunchHost], job: Job, tell: Tell) -> None:
        self._remotes = [Remote(host, job, tell) for host in hosts]
        self._job, self._tell = job, tell
        self._started: list[Remote] = []
        self._interrupts = 0
        self._stopped = asyncio.Event()  # By a second Ctrl+C, or by one before anything has started.

    async def run(self) -> int:
        """Returns: 0 if every member of every host has ended well, 130 if they were killed, else 1."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._interrupt)
        beat = asyncio.create_task(self._beat())
        try:
            await self._unless_stopped(self._connect())
            if self._started and not self._interrupts:
                self._start()
                await self._unless_stopped(self._follow())
            if self._stopped.is_set():
                return HARD_EXIT_CODE
            return self._sum_up()
        finally:
            beat.cancel()
            await asyncio.gather(*(each.close() for each in self._remotes))

    def _say(self, text: str) -> None:
        self._tell(ME, text.encode(), sys.stderr)

    async def _unless_stopped(self, work: Coroutine[Any, Any, None]) -> None:
        """Once it is stopped, what has started gets the time to say that it was killed."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(self._stopped.wait())
        await asyncio.wait((task, stopped), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            await asyncio.wait((task,), timeout=LAST_WORDS_S if self._started else 0)
        stopped.cancel()
        if not task.cancel():
            task.result()

    async def _connect(self) -> None:
        refusals = await asyncio.gather(*(each.connect() for each in self._remotes))
        for remote, refusal in zip(self._remotes, refusals, strict=True):
            if refusal:
                self._say(f"{remote.host.name} is left out: {refusal}")
        self._started = [each for each, why in zip(self._remotes, refusals, strict=True) if not why]
        if not self._started:
            self._say("no host is left to start a member on")

    def _start(self) -> None:
        ready = [(each.host, each.key) for each in self._started]
        for remote in self._started:
            remote.send(encoded(self._job.orders(remote.host, ready)))
        first = self._started[0]
        count = sum(each.host.slots for each in self._started)
        at = first.host.ends(first.key)[0]
        members, hosts = counted(count, "member"), counted(len(self._started), "host")
        self._say(f"starts {members} on {hosts}; ask them: chaosnet status {at}")

    async def _follow(self) -> None:
        await asyncio.gather(*(each.follow() for each in self._started))

    def _interrupt(self) -> None:
        self._interrupts += 1
        if self._interrupts == 1 and self._started:
            self._say("all members finish their step and leave (again: they are killed)")
            self._send_all(INTERRUPT)
            return
        self._send_all(KILL)
        self._stopped.set()

    def _send_all(self, line: bytes) -> None:
        for remote in self._started:
            remote.send(line)

    async def _beat(self) -> None:
        """So that hosts notice when this machine is gone without a word."""
        while True:
            await asyncio.sleep(BEAT_EVERY_S)
            for remote in self._remotes:
                remote.send(BEAT)

    def _sum_up(self) -> int:
        bad = [each.host.name for each in self._remotes if not each.is_well]
        if bad:
            self._say(f"not all has ended well: {', '.join(bad)}")
        return 1 if bad else 0


def launch(hosts: Sequence[LaunchHost], job: Job, tell: Tell) -> int:
    """Start, follow, end. Returns: as `Launcher.run`. Raises: ConfigError for hosts that cannot be told apart."""

    _check_texts(job)

    async def run() -> int:
        return await Launcher(await addresses(hosts, job.ssh), job, tell).run()

    return asyncio.run(run())


def _check_texts(job: Job) -> None:
    """Raises: ConfigError for one that JSON cannot take to the hosts."""
    given = {
        "an argument": job.run,
        "--workdir": (job.workdir,),
        **{f"--env {name}": (value,) for name, value in job.env.items()},
    }
    for what, texts in given.items():
        for text in texts:
            try:
                text.encode()
            except UnicodeEncodeError:
                raise ConfigError(
                    f"{what}: {text!r} is not UTF-8 (expected text that is, as it goes to the hosts)"
                ) from None


def workdir_here() -> str:
    """As the user sees it: a folder that is the same on all hosts may be another one behind a link.

    Raises: ConfigError if somebody has removed it.
    """
    seen = os.environ.get("PWD", "")
    with contextlib.suppress(OSError):  # Whoever starts us may have set it to anything.
        if os.path.samefile(seen, "."):
            return seen
    try:
        return os.getcwd()
    except FileNotFoundError:
        raise ConfigError(f"the folder where you are, {seen}, is gone (expected --workdir DIR)") from None
