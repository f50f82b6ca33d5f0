"""What is wrong with data from a file, in words that one finds in the file."""

from __future__ import annotations

import re
from typing import Any, TypeVar

import msgspec

from .errors import ConfigError

T = TypeVar("T")
STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")


def converted(plain: object, kind: type[T], where: str, error: type[Exception] = ConfigError) -> T:
    """`plain`, as in a file, as a `kind`. Raises: an `error` that says where, the value and what was expected."""
    try:
        return msgspec.convert(plain, kind)
    except msgspec.ValidationError as found:
        raise error(f"{where}: {_explained(found, plain)}") from None


def _explained(error: msgspec.ValidationError, plain: Any) -> str:
    """Where, the value and what was expected: "links, entry 1: rate_mbit: -3 (expected `float` > 0.0)".

    Args:
        plain: what was looked at.
    """
    text, at, path = str(error).rpartition(" - at `$")
    if not at:
        return str(error)
    where, value = "", plain
    for field, number, some in STEP.findall(path):
        if some and not (isinstance(value, dict) and len(value) == 1):
            return f"{where}{', ' if where else ''}one of {', '.join(map(str, value))}: {path.rstrip('`')}: {text}"
        name = next(iter(value)) if some else int(number) if number else field
        value = value[name]
        where += f", entry {name + 1}" if number else f"{': ' if where else ''}{name}"
    if text.startswith("Expected"):
        return f"{where}: {value!r} (e{text[1:]})"
    return f"{where}: {text}"
