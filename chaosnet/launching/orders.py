"""What a launcher and its hand on a host (launched.py) say to each other, a line each, over ssh's pipes.

launcher -> host    LaunchHello as JSON; once all hosts have answered, Orders as JSON; then words: INTERRUPT, KILL,
                    and BEAT again and again. The end of the pipe, or silence for SILENCE_S, means that the
                    launcher is gone: the members leave.
host -> launcher    MARK and LaunchReady as JSON, after whatever a login prints; then, for each line of a member,
                    its number, "o" (stdout) or "e" (stderr), and the line; at its end its number, "x", the code.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

VERSION = 1
MARK = b"chaosnet-launched "
INTERRUPT, KILL, BEAT = b"interrupt", b"kill", b"beat"
BEAT_EVERY_S = 10.0
SILENCE_S = 60.0
MAX_LINE = 1 << 20  # Longer ones are passed on in pieces.

Line = TypeVar("Line", bound=msgspec.Struct)


class LaunchHello(msgspec.Struct, frozen=True):
    """Launcher to host: is the script there, and which key do you use?

    Attributes:
        run: Behind `chaosnet run`: -m perhaps, the script, its arguments.
        env: Settings of chaosnet's, and what the user has named.
    """

    version: int
    workdir: str
    run: list[str]
    env: dict[str, str]


class LaunchReady(msgspec.Struct, frozen=True):
    """Host to launcher.

    Attributes:
        key: The public key of its members; "" without keys.
        refused: Why it cannot start a member; "" if it can.
    """

    version: int
    key: str = ""
    refused: str = ""


class LaunchMember(msgspec.Struct, frozen=True):
    """One to start."""

    name: str
    listen: str


class Orders(msgspec.Struct, frozen=True):
    """Launcher to host: start these.

    Attributes:
        join: Addresses of all members of all hosts, the first to found first; "" if there is no other.
        allowed: Public keys of all hosts, and of who launches.
        grace_s: From an INTERRUPT for want of a launcher to a SIGKILL.
    """

    members: list[LaunchMember]
    join: str
    allowed: list[str]
    grace_s: float


def encoded(line: Any) -> bytes:
    return msgspec.json.encode(line) + b"\n"


def decoded(text: bytes, kind: type[Line]) -> Line | None:
    """None for what is no such line."""
    try:
        return msgspec.json.decode(text, type=kind)
    except msgspec.MsgspecError:
        return None


def member_line(number: int, kind: bytes, text: bytes) -> bytes:
    """A line of a member's, to the launcher."""
    return b"%d%s %s\n" % (number, kind, text)


def parsed_line(line: bytes) -> tuple[int, str, bytes] | None:
    """Number, kind and text of what `member_line` made; None for anything else."""
    head, space, text = line.rstrip(b"\n").partition(b" ")
    number, kind = head[:-1], head[-1:]
    if not (space and number.isdigit() and kind in (b"o", b"e", b"x")):
        return None
    return int(number), kind.decode(), text
