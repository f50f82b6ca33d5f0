"""What options and settings take: types whose errors name the value and what was expected."""

from __future__ import annotations

import math
import os
import re
import stat
from numbers import Integral, Real
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import click

from ..node.endpoint import KEY, SECRET, shown


class Expecting(click.ParamType):
    """A type whose errors say what was expected.

    `convert` takes text, of an option or an environment variable. `of_script` takes what a script gives, which has
    a type already: one of `given`.
    """

    expected = ""
    given: ClassVar[type | tuple[type, ...]] = str

    def refuse(self, value: object, problem: str = "", param: Any = None, ctx: Any = None) -> NoReturn:
        text = shown(value) if isinstance(value, str) else SECRET.sub("...", repr(value))
        why = f"{text} {problem}".rstrip()
        raise click.BadParameter(f"{why} (expected {self.expected})", ctx, param)

    def of_script(self, value: Any) -> Any:
        """Raises: click.BadParameter, as `convert`."""
        if not isinstance(value, self.given):
            self.refuse(value)
        return self.convert(value, None, None)

    def mode_of(self, path: Path, param: Any, ctx: Any) -> int:
        """Of what is there; 0: nothing. Refused: what nobody can say, as a folder on the way is closed to us."""
        try:
            return path.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            return 0
        except OSError as error:
            self.refuse(str(path), f"cannot be read: {error.strerror}", param, ctx)


class Address(Expecting):
    name = "[KEY@]HOST:PORT"
    expected = "HOST:PORT, e.g. 10.0.0.2:5555"

    def __init__(self, any_port: bool = False) -> None:
        self.any_port = any_port

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        key, at, place = str(value).rpartition("@")
        if at and not KEY.fullmatch(key):
            self.refuse(value, f"has a key that is none: {shown(key)}", param, ctx)
        host, colon, port = place.rpartition(":")
        if not colon or not port:
            self.refuse(value, "has no port", param, ctx)
        if not host:
            self.refuse(value, "has no host", param, ctx)
        if not (port.isascii() and port.isdigit() and int(port) <= 65535):
            self.refuse(value, f"has no port: {port!r} is no number from 1 to 65535", param, ctx)
        if int(port) == 0 and not self.any_port:
            self.refuse(value, "names port 0, at which nobody can be reached", param, ctx)
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (":" in host) != (bare != host) or "/" in host or " " in host:
            self.refuse(value, "is no address", param, ctx)
        return str(value)


class ListenAt(Expecting):
    """Where to listen: "HOST:PORT". A port alone is one of 127.0.0.1."""

    name = "PORT|HOST:PORT"
    expected = "a port from 0 to 65535, or HOST:PORT"
    given = (int, str)

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        text = str(value)
        if text.isascii() and text.isdigit():
            text = f"127.0.0.1:{text}"
        elif ":" not in text or "@" in text:
            self.refuse(value, "", param, ctx)
        return Address(any_port=True).convert(text, param, ctx)

    def of_script(self, value: Any) -> Any:
        return self.refuse(value) if isinstance(value, bool) else super().of_script(value)


class Addresses(Expecting):
    name = "ADDRESS[,ADDRESS]|INVITE"
    expected = f"{Address.expected}; or what `chaosnet invite` has printed"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if str(value).strip().startswith("chaosnet-invite-"):
            return str(value).strip()  # The node reads it, and its errors do not repeat it.
        parts = [part.strip() for part in str(value).split(",") if part.strip()]
        if not parts:
            self.refuse(value, "names nobody", param, ctx)
        return ",".join(Address().convert(part, param, ctx) for part in parts)


class PeerName(Expecting):
    """An address, or the id that a node has in the cluster."""

    name = "HOST:PORT|ID"
    expected = "HOST:PORT or a node's name, as `chaosnet status` shows them"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not 0 < len(str(value)) <= 255 or "," in str(value) or not _is_text(str(value)):
            self.refuse(value, "is neither", param, ctx)
        return str(value)


class PeerNames(Expecting):
    """Text: with commas in between. A script gives a tuple or a list."""

    name = PeerName.name
    expected = "names or addresses, e.g. ('n1', '10.0.0.2:5555')"
    given = (tuple, list)

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        parts = [part.strip() for part in value.split(",")] if isinstance(value, str) else value
        return tuple(PeerName().convert(part, param, ctx) for part in parts if part)

    def of_script(self, value: Any) -> tuple[str, ...]:
        if not isinstance(value, self.given) or not all(isinstance(each, str) for each in value):
            self.refuse(value)
        return self.convert(value, None, None)


class AddressByName(Expecting):
    """Where to reach others; "" for nowhere."""

    name = "NAME=HOST:PORT,..."
    expected = "NAME=HOST:PORT, or NAME= for nowhere"

    def convert(self, value: Any, param: Any, ctx: Any) -> dict[str, str]:
        found = {}
        for part in filter(None, (part.strip() for part in str(value).split(","))):
            name, equals, address = part.rpartition("=")
            if not equals or not name:
                self.refuse(part, "", param, ctx)
            found[name] = Address(any_port=True).convert(address, param, ctx) if address else ""
        return found


class PublicKey(Expecting):
    name = "KEY"
    expected = "a public key of 52 letters and digits, as `chaosnet keygen` prints"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not KEY.fullmatch(str(value)):
            self.refuse(value, "is no key", param, ctx)
        return str(value)


class Name(Expecting):
    name = "NAME"
    expected = "1 to 64 characters without a comma, not '*', in UTF-8"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        name = str(value)
        if not 0 < len(name) <= 64 or "," in name or name == "*" or not _is_text(name):
            self.refuse(value, "is no name", param, ctx)
        return name


def _is_text(value: str) -> bool:
    """Can it be sent and written? Not what Python keeps of bytes that are no text by the locale."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


class ClusterName(Expecting):
    """Everybody on the network hears it."""

    name = "NAME"
    expected = "1 to 63 letters, digits, '-', '_' or '.'"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if not re.fullmatch(r"[\w.-]{1,63}", str(value), re.ASCII):
            self.refuse(value, "is no name", param, ctx)
        return str(value)


class Amount(Expecting):
    name = "NUMBER"
    given = Real
    kind: ClassVar[type[float]] = float
    called: ClassVar = "a number"

    def __init__(self, least: float = -math.inf, most: float = math.inf) -> None:
        self.least, self.most = least, most
        self.expected = self.called if math.isinf(most) else f"{self.called} from {least} to {most}"

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        try:
            number = self.kind(value)
        except ValueError:
            self.refuse(value, "is no number", param, ctx)
        if not self.least <= number <= self.most:
            self.refuse(value, "is out of range", param, ctx)
        return number


class Whole(Amount):
    name = "N"
    kind = int
    called = "a whole number"

    def of_script(self, value: Any) -> int:
        # Of whole numbers some are too large for a float.
        fits = isinstance(value, Integral) or (isinstance(value, Real) and float(value).is_integer())
        if not fits:
            self.refuse(value)
        return int(self.convert(int(value), None, None))


class Above(Expecting):
    name = "NUMBER"
    given = Real

    def __init__(self, bound: float) -> None:
        self.bound, self.expected = bound, f"a number above {bound}"

    def convert(self, value: Any, param: Any, ctx: Any) -> Any:
        if not value > self.bound:
            self.refuse(value, "", param, ctx)
        return value


class Several(Expecting):
    """One or more of another type, all different, with commas in between."""

    def __init__(self, each: Expecting) -> None:
        self.each, self.name = each, f"{each.name},..."
        self.expected = f"{each.expected}; or several, with commas in between"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[Any, ...]:
        if isinstance(value, tuple):
            return value
        found = tuple(self.each.convert(part.strip(), param, ctx) for part in str(value).split(","))
        if len({*found}) < len(found):
            self.refuse(value, "names one twice", param, ctx)
        return found


class NodeRange(Expecting):
    name = "A..B"
    expected = "a number of nodes from 2 to 10000, or two of them, e.g. 3..12"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, int]:
        least, _, most = str(value).partition("..")
        parts = [least, most or least]
        if not all(part.isascii() and part.isdigit() for part in parts):
            self.refuse(value, "is no number of nodes", param, ctx)
        if not 2 <= int(parts[0]) <= int(parts[1]) <= 10_000:
            self.refuse(value, "is out of range", param, ctx)
        return int(parts[0]), int(parts[1])


class PerSecond(Expecting):
    """A rate, taken in events per second."""

    name = "NUMBER/s"
    expected = "events per second, minute or hour, e.g. 1/s, 30/min or 5/h"
    SECONDS: ClassVar = {"s": 1.0, "min": 60.0, "h": 3600.0}

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        if isinstance(value, float):
            return value
        number, _, unit = str(value).partition("/")
        try:
            per_s = float(number) / self.SECONDS[unit]
        except (ValueError, KeyError):
            self.refuse(value, "is no rate", param, ctx)
        if not 0 < per_s <= 1000:
            self.refuse(value, "is out of range", param, ctx)
        return per_s


class OneOf(Expecting):
    name = "NAME"

    def __init__(self, choices: tuple[str, ...]) -> None:
        self.choices, self.expected = choices, f"one of {', '.join(choices)}"

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        if value not in self.choices:
            self.refuse(value, "is unknown", param, ctx)
        return str(value)


class OneOfOrCallable(OneOf):
    """A script may also give a function."""

    def of_script(self, value: Any) -> Any:
        return value if callable(value) else super().of_script(value)


class Function(Expecting):
    """Of scripts only."""

    name = "FUNCTION"
    expected = "a function without arguments"

    def of_script(self, value: Any) -> Any:
        return value if callable(value) else self.refuse(value)


class Made(Expecting):
    """Of scripts only: an object of one of chaosnet's own classes."""

    name = "OBJECT"

    def __init__(self, kind: type) -> None:
        self.kind, self.expected = kind, f"chaosnet.{kind.__name__}(...)"

    def of_script(self, value: Any) -> Any:
        return value if isinstance(value, self.kind) else self.refuse(value)


class StepEpochOrSamples(Expecting):
    """Of scripts only: how often a schedule is stepped."""

    name = "EVERY"
    expected = "'step', 'epoch', 'evaluation' or a whole number of samples > 0"

    def of_script(self, value: Any) -> str | int:
        if isinstance(value, str) and value in ("step", "epoch", "evaluation"):
            return value
        try:
            samples = 0 if isinstance(value, bool) else Whole(1).of_script(value)
        except click.BadParameter:
            samples = 0
        return samples or self.refuse(value)


class Switch(Expecting):
    """An option without a value; in the environment 0 or 1; in a script True or False."""

    name = "0|1"
    expected = "0 or 1"

    def convert(self, value: Any, param: Any, ctx: Any) -> bool:
        if value not in ("0", "1"):
            self.refuse(value, "", param, ctx)
        return bool(value == "1")

    def of_script(self, value: Any) -> bool:
        if value not in (True, False):
            raise click.BadParameter(f"{value!r} (expected True or False)")
        return bool(value)


class Script(Expecting):
    """A file; or, beside the flag `-m`, the name of a module, which is looked up when it is run."""

    name = "SCRIPT"
    expected = "a Python file, e.g. train.py"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path | str:
        if ctx is not None and ctx.params.get("module"):
            return str(value)
        path = Path(value)
        mode = self.mode_of(path, param, ctx)
        if not stat.S_ISREG(mode):
            self.refuse(str(value), "is a folder" if stat.S_ISDIR(mode) else "does not exist", param, ctx)
        if not os.access(path, os.R_OK):
            self.refuse(str(value), "cannot be read", param, ctx)
        return path


class File(Expecting):
    """Whether it can be read is seen when it is."""

    name = "FILE"
    expected = "the path of a file"
    given = (str, os.PathLike)

    def convert(self, value: Any, param: Any, ctx: Any) -> str:
        return os.fsdecode(value) or self.refuse("", "names nothing", param, ctx)


class Folder(Expecting):
    name = "DIR"
    expected = "a folder, which need not exist yet"
    given = (str, os.PathLike)

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        if not os.fspath(value):  # An unset variable of a shell; Path("") would be the folder where we are.
            self.refuse("", "names nothing", param, ctx)
        path = Path(value)
        mode = self.mode_of(path, param, ctx)
        if mode and not stat.S_ISDIR(mode):
            self.refuse(str(value), "is a file", param, ctx)
        return path
