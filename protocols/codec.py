"""Messages to bytes and back.

A frame is the magic `CN`, one byte of protocol version, and a msgpack map. The size is bounded before
anything is parsed; msgpack builds only plain values, and msgspec checks each field's type and bounds.
"""

from __future__ import annotations

from typing import get_args

import msgpack
import msgspec

from .errors import MalformedMessage, VersionMismatch
from .messages import (
    PROTOCOL_VERSION,
    Envelope,
    FlushOk,
    Install,
    Message,
    Prepare,
    ReplicationPlan,
    Routed,
    View,
    WireMessage,
)

MAGIC = b"CN"
MAX_MESSAGE_BYTES = 16 << 20  # A view of MAX_NODES nodes with all its trees stays below.
_PREFIX = MAGIC + bytes([PROTOCOL_VERSION])
_TYPE_BY_NAME = {kind.__name__: kind for kind in get_args(WireMessage)}  # Three times as fast as the union.

# msgspec looks at a type when it is first used, and two threads that do so at once end in a segmentation fault
# (0.22.0): of two nodes in one process, one in ten runs. So it is done here (18 ms), where only one thread can be.
for _kind in _TYPE_BY_NAME.values():
    msgspec.msgpack.Decoder(_kind)


def encode(message: Message) -> bytes:
    """The bytes of one message."""
    return _PREFIX + msgpack.packb(msgspec.to_builtins(message, builtin_types=(bytes,)))


def decode(frame: bytes | memoryview) -> WireMessage:
    """The message in `frame`.

    Raises: VersionMismatch if a chaosnet of another protocol version wrote it, MalformedMessage if
    nothing of ours did.
    """
    if len(frame) > MAX_MESSAGE_BYTES:
        raise MalformedMessage(f"a frame of {len(frame)} bytes (at most {MAX_MESSAGE_BYTES} are taken)")
    if len(frame) < 3 or bytes(frame[:2]) != MAGIC:
        raise MalformedMessage(f"a frame that starts with {bytes(frame[:3])!r} (expected {MAGIC!r})")
    if frame[2] != PROTOCOL_VERSION:
        raise VersionMismatch(
            f"the peer speaks chaosnet protocol version {frame[2]}, this node {PROTOCOL_VERSION}"
        )
    try:
        plain = msgpack.unpackb(frame[3:])  # Counts and lengths are bounded by the frame itself.
        message = msgspec.convert(plain, _TYPE_BY_NAME[plain["type"]], builtin_types=(bytes,))
    except Exception as error:  # Whatever a library says of foreign bytes means one thing to us.
        raise MalformedMessage(f"{type(error).__name__}: {error}"[:300]) from None
    if isinstance(message, Envelope) and (flaw := _flaw(message.body)):
        raise MalformedMessage(f"a {type(message.body).__name__} with a bad view: {flaw}")
    return message


def _flaw(body: Routed) -> str:
    """Of the view that a message brings: who has passed it on, or made it up, is not who acts in it."""
    match body:
        case Prepare(view=View() as view) | Install(view=View() as view) | ReplicationPlan(view=view):
            return view.flaw() or ("" if view.trees else "nobody has planned the trees")
        case FlushOk(view=View() as view):
            return view.flaw()
    return ""
