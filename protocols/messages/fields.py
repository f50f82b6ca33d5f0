"""What fields of messages may hold, and the parent of all messages."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 10  # Bump when a field is removed or changes meaning.

EVERYONE = "*"  # Destination of an envelope that all nodes take and pass on.

MAX_NODES = 20_000
MAX_REASON = 300  # Characters of what a script ended with.

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Address = Annotated[str, Meta(max_length=255)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=16)]
MAX_TEXT = 4000
Text = Annotated[str, Meta(max_length=MAX_TEXT)]
MAX_NAMES = 200
Names = Annotated[str, Meta(max_length=MAX_NAMES)]  # Of nodes, in a sentence.
ItemText = Annotated[str, Meta(max_length=255)]
Layout = Annotated[str, Meta(max_length=200)]  # Of pipelines (scheduler/elastic/running.py, `lengths_of`).
FASTEST = "auto"  # A wish for whatever pipelines are predicted to be the fastest.
MOST_BUNDLED = 1 << 20
Bundle = Annotated[int, Meta(ge=1, le=MOST_BUNDLED)]  # So many neighbouring chunks travel as one message.
Count = Annotated[int, Meta(ge=0, le=1 << 62)]  # So that the sum of two still fits into 64 bits.
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]  # No NaN, and nothing that sums up to infinity.
Positive = Annotated[float, Meta(ge=0, le=1e18)]
Bytes = Annotated[bytes, Meta(max_length=4 << 20)]
Link = tuple[Id, Id]  # Two node ids, sorted.
ViewKey = tuple[Count, Count]  # (term, seq): views are ordered by it.
Range = tuple[Count, Count]  # [start, stop).


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Parent of all; the class name is the type on the wire."""


def shortened(text: str, most: int) -> str:
    """At most so many characters of it: what is longer, a receiver drops."""
    return text if len(text) <= most else f"{text[: most - 2]} …"


def link(a: str, b: str) -> Link:
    """The link between two nodes, however they are named."""
    return (a, b) if a < b else (b, a)
