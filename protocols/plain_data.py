"""What is wrong with data from a file, in words that one finds in the file."""

from __future__ import annotations

import re
from typing import Any

import msgspec

STEP = re.compile(r"\.(\w+)|\[(\d+)\]|\[(\.\.\.)\]")


def explained(error: msgspec.ValidationError, plain: Any) -> str:
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
