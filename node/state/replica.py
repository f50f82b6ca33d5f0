"""Sending and receiving the training state: snapshots at a source, the arriving state at a joiner.

Hashing and copying of pieces runs on the loop's thread: a piece is 2 MiB, which xxh3 reads in a fifth of a
millisecond. Pieces leave from the snapshot without a copy.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
import xxhash
import zmq

from ...protocols.codec import encode
from ...protocols.effects import ReadManifest, ServeManifest, ServeShard, StoreShard
from ...protocols.errors import ChaosnetError
from ...protocols.events import (
    Event,
    ManifestBad,
    ManifestKnown,
    Received,
    ShardBad,
    ShardStored,
    StateRejected,
)
from ...protocols.messages import ManifestReply, NoSnapshot, Shard
from ...protocols.replication import MAX_PIECE_BYTES
from ..transport.shared_memory import Payload
from .flat_state import NO_MEMORY, Arrival, Manifest, Snapshot, StateChanged

log = logging.getLogger("chaosnet")

LAYOUT_BYTES = 8  # Of `Manifest.layout`, in front of a piece's own hash.


def digest(data: Any) -> bytes:
    """A hash against damage, not against malice: that is the business of encryption."""
    return xxhash.xxh3_128_digest(data)


class Replica:
    """Snapshots by step, and the state that is arriving."""

    def __init__(self, send_bulk: Callable[..., bool]) -> None:
        self.send_bulk = send_bulk
        self.snapshots: dict[int, Snapshot | None] = {}  # None: it could not be made, or was changed.
        self.arrival: Arrival | None = None
        self.bytes_by_source: dict[str, int] = {}
        self.places: dict[str, torch.Tensor] = {}  # Where the first state may arrive without a copy.

    def arrived(self) -> Arrival:
        """Hand over the whole state to the training thread. A later one gets memory of its own."""
        assert self.arrival is not None
        arrival, self.arrival, self.places = self.arrival, None, {}
        return arrival

    def serve_manifest(self, effect: ServeManifest) -> bool:
        """Send the manifest of a snapshot. Returns: False if there is none."""
        snapshot = self.snapshots[effect.step]
        if snapshot is None:
            return False
        body = snapshot.manifest.to_bytes()
        self.send_bulk(effect.peer, encode(ManifestReply(step=effect.step, digest=digest(body))), body)
        return True

    def serve_shard(self, effect: ServeShard) -> bool:
        """Send a range of a snapshot. One beyond its end, or longer than a piece, is a peer's mistake, and not sent.

        Returns: False if there is no such snapshot, or not any more.
        """
        snapshot = self.snapshots[effect.step]
        if snapshot is None:
            return False
        arrival = self.arrival
        if arrival and arrival.manifest.step == effect.step and not arrival.has(effect.start, effect.stop):
            return True
        size = effect.stop - effect.start
        if not 0 < size <= MAX_PIECE_BYTES or effect.stop > snapshot.manifest.total_bytes:
            return True
        try:
            body = snapshot.slice(effect.start, effect.stop)
        except StateChanged as error:
            log.warning("the state of step %d is not sent any more: %s", effect.step, error)
            self.snapshots[effect.step] = None
            return False
        proof = snapshot.manifest.layout + digest(body)
        shard = Shard(step=effect.step, start=effect.start, stop=effect.stop, digest=proof)
        self.send_bulk(effect.peer, encode(shard), body)
        return True

    def read_manifest(self, effect: ReadManifest) -> Event:
        """Check the manifest that came, and make room for the state that it describes."""
        try:
            body = _buffer(effect.payload)
            if digest(body) != effect.digest:
                return ManifestBad(effect.source, "it does not match its hash", effect.attempt)
            manifest = Manifest.from_bytes(bytes(body))
        except (ChaosnetError, *NO_MEMORY) as error:
            return ManifestBad(effect.source, str(error)[:1000], effect.attempt)
        try:
            self.arrival, self.bytes_by_source = Arrival(manifest, self.places), {}
        except NO_MEMORY as error:  # That of another source would need as much.
            return StateRejected(
                f"no memory here for its {manifest.total_bytes / 1e6:,.0f} MB: {error}"[:1000]
            )
        return ManifestKnown(effect.step, manifest.total_bytes, effect.attempt)

    def store_shard(self, effect: StoreShard) -> Event:
        """Check a piece and put it in place. A source with another layout counts as one without a snapshot."""
        body, arrival = _buffer(effect.payload), self.arrival
        layout, shown = effect.digest[:LAYOUT_BYTES], effect.digest[LAYOUT_BYTES:]
        whole = len(body) == effect.stop - effect.start and digest(body) == shown
        if not whole or arrival is None:
            return ShardBad(effect.source, effect.start, effect.stop, effect.attempt)
        if layout != arrival.manifest.layout:
            log.warning(
                "the state of %s is laid out otherwise than the manifest that came: left out", effect.source
            )
            return Received(effect.source, NoSnapshot(step=arrival.manifest.step))
        arrival.write(effect.start, body)
        self.bytes_by_source[effect.source] = self.bytes_by_source.get(effect.source, 0) + len(body)
        return ShardStored(effect.source, effect.start, effect.stop, effect.attempt)


def _buffer(payload: zmq.Frame | Payload | None) -> memoryview:
    return memoryview(b"") if payload is None else payload.buffer
