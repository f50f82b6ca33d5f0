"""Link-local: the state on its way from a source to a joiner."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .fields import Bytes, Count, Message


class ManifestRequest(Message, frozen=True, kw_only=True):
    """Joiner to source: send me the manifest of the state at `step`."""

    step: Count


class ManifestReply(Message, frozen=True, kw_only=True):
    """Source to joiner, bulk: the payload is the manifest."""

    step: Count
    digest: Bytes


class NoSnapshot(Message, frozen=True, kw_only=True):
    """Source to joiner: I have no copy of the state at `step` for you."""

    step: Count


class ShardRequest(Message, frozen=True, kw_only=True):
    """Joiner to source: send me these bytes of the state at `step`."""

    step: Count
    start: Count
    stop: Count


class Shard(Message, frozen=True, kw_only=True):
    """Source to joiner, bulk: the payload is bytes [start, stop) of the state at `step`."""

    step: Count
    start: Count
    stop: Count
    digest: Bytes  # Of the layout of the sender's state, and of these bytes.


class Have(Message, frozen=True, kw_only=True):
    """Joiner to one that joins with it: of the state at `step` I can send these pieces, a bit each, or all of it."""

    step: Count
    pieces: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    whole: bool = False


class ReplicationDone(Message, frozen=True, kw_only=True):
    """Joiner to source: I have all of the state; drop your copy."""

    step: Count
