"""Inputs of the fuzz targets, all drawn from one seeded `random.Random`: bytes that were tampered with, and messages
that have the declared types but say anything."""

import random
import types
import typing
from typing import Annotated, Any, Literal

import msgspec

from chaosnet.protocols import messages as m
from chaosnet.protocols.codec import decode, encode
from chaosnet.protocols.errors import MalformedMessage, VersionMismatch

# --- bytes ---

# What a parser of msgpack minds: containers and strings that claim 2**32 of something, extensions, odd numbers.
PIECES = [
    b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff",
    b"\xc9\xff\xff\xff\xff\x01", b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xcb\x7f\xf8" + bytes(6),
    b"\xcb\x7f\xf0" + bytes(6), b"\x91" * 40, b"\x81\xa1a" * 40, b"\xc7\x05\x01", b"\xd4\x01\x90", b"\xc0", b"\x80",
    b"\x90", b"\xc4\x00", b"\xa0", b"\xff", b"\x00", b"\xc1",
]  # fmt: skip


def tampered(rng: random.Random, data: bytes, others: list[bytes]) -> bytes:
    """A copy with one to four changes: bits, bytes, pieces put in, taken out, doubled, or from another input."""
    made = bytearray(data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(7):
            case 0 if made:
                made[at % len(made)] ^= 1 << rng.randrange(8)
            case 1 if made:
                made[at % len(made)] = rng.randrange(256)
            case 2:
                made[at:at] = rng.choice(PIECES)
            case 3:
                del made[at : at + rng.choice((1, 1, 4, 30))]
            case 4:
                made[at:at] = made[at : at + rng.randrange(1, 40)]
            case 5:
                other = rng.choice(others)
                made[at:] = other[rng.randrange(len(other) + 1) :]
            case _:
                del made[at:]
    return bytes(made)


# --- messages ---

NAMES = ["a", "b", "c", "d", "e", "j", "stranger", "client", m.EVERYONE, "n" * 64, "ü", "\0", "{}", "a:1"]
TEXTS = [
    "",
    "x",
    "a:1",
    "127.0.0.1:1",
    "[::1]:5",
    "*:5",
    ":5",
    "a;b:5",
    "\0:5",
    "ü:5",
    "a:99999",
    "no port",
    "%s",
]
WHOLE = [
    0,
    1,
    2,
    3,
    7,
    64,
    1000,
    1 << 20,
    1 << 31,
    1 << 32,
    (1 << 53) + 1,
    1 << 62,
    (1 << 63) - 1,
    (1 << 64) - 1,
]
REAL = [0.0, -0.0, 1.0, 0.25, -1.0, 1e-300, 1e18, 1e308, float("inf"), float("-inf"), float("nan")]
MANY = 3000


class Hostile:
    """Makes values of declared types. `near`: numbers that mean something to who is attacked."""

    def __init__(self, rng: random.Random, near: list[int] | None = None) -> None:
        self.rng, self.near, self.fresh = rng, near or [], 0

    def name(self) -> str:
        """Of a node: mostly one that there is."""
        self.fresh += 1
        return self.rng.choice(NAMES) if self.rng.random() < 0.9 else f"made-up-{self.fresh}"

    def message(self, *kinds: type) -> Any:
        """Any message of these types, or of all."""
        return self.of(self.rng.choice(kinds or LINK_LOCAL))

    def of(self, declared: Any, depth: int = 0) -> Any:
        """A value of a type as protocols/messages declares it; bounds are for the codec to check."""
        origin, arguments = typing.get_origin(declared), typing.get_args(declared)
        if origin is Annotated:
            return self.name() if declared == m.Id else self.of(arguments[0], depth)
        if origin is Literal:
            return self.rng.choice(arguments)
        if origin in (typing.Union, types.UnionType):
            return self.of(self.rng.choice(arguments), depth)
        if origin is tuple and arguments[-1:] == (...,):
            return tuple(self.of(arguments[0], depth + 1) for _ in range(self.length(depth)))
        if origin is tuple:
            return tuple(self.of(each, depth + 1) for each in arguments)
        if origin is dict:
            keys = [self.of(arguments[0], depth) for _ in range(self.length(depth))]
            return {key: self.of(arguments[1], depth + 1) for key in keys}
        if isinstance(declared, type) and issubclass(declared, msgspec.Struct):
            return declared(**{name: self.of(kind, depth + 1) for name, kind in _fields(declared).items()})
        return self.plain(declared)

    def length(self, depth: int) -> int:
        if depth <= 2 and self.rng.random() < 0.002:
            return MANY
        return self.rng.choice((0, 1, 1, 2, 3, 5))

    def plain(self, declared: Any) -> Any:
        rng = self.rng
        if declared is str:
            return rng.choice((self.name(), rng.choice(TEXTS)))
        if declared is bool:
            return rng.random() < 0.5
        if declared is int:
            return rng.choice(self.near) if self.near and rng.random() < 0.7 else rng.choice(WHOLE)
        if declared is float:
            return rng.choice(REAL) if rng.random() < 0.5 else rng.uniform(0.0, 100.0)
        if declared is bytes:
            return rng.randbytes(rng.choice((0, 1, 4, 16, 300)))
        return None

    def changed(self, message: Any) -> Any:
        """A message that was really sent, with one or more fields that were not, at any depth."""
        fields = _fields(type(message))
        if not fields:
            return message
        found = {}
        for name in self.rng.sample(list(fields), self.rng.choice((1, 1, 2)) if len(fields) > 1 else 1):
            old = getattr(message, name)
            inside = isinstance(old, msgspec.Struct) and self.rng.random() < 0.9
            found[name] = self.changed(old) if inside else self.of(fields[name], 1)
        return msgspec.structs.replace(message, **found)


def as_received(message: Any) -> Any:
    """What the receiver makes of it; None if the codec, at either end, does not let it through."""
    try:
        return decode(encode(message))
    except (MalformedMessage, VersionMismatch, OverflowError, UnicodeEncodeError, TypeError, ValueError):
        return None  # The sender's error, or the codec's: bytes that decode refuses.


def _fields(kind: type) -> dict[str, Any]:
    if kind not in _KNOWN:
        _KNOWN[kind] = typing.get_type_hints(kind, include_extras=True)
        _KNOWN[kind].pop("__struct_config__", None)
        _KNOWN[kind] = {name: _KNOWN[kind][name] for name in kind.__struct_fields__}  # type: ignore[attr-defined]
    return _KNOWN[kind]


_KNOWN: dict[type, dict[str, Any]] = {}
LINK_LOCAL = typing.get_args(m.WireMessage)
ROUTED = typing.get_args(m.Routed)
