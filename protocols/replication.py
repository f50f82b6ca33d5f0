"""Which bytes of the state the joiner asks of whom next (Chaos, Sec. III; what adapts is ours).

The first assignment is the scheduler's (Algorithms 1 and 2 on measured links). From there it adapts:

- each source has a window of requests; who is faster is asked more often;
- a source that runs dry takes over half of what the slowest has left;
- when nothing is left to ask for, an idle source is asked again for the oldest piece still awaited;
- a source that dies gives its rest back; a damaged piece is asked of somebody else, and counted.
"""

from __future__ import annotations

import statistics
from collections import deque
from dataclasses import dataclass, field

from .effects import DiscardState, Effect, Measured, ReadManifest, StateWhole, StoreShard, Transmit
from .errors import RemoteProtocolError
from .events import Event, ManifestBad, ManifestKnown, PeerClosed, Received, ShardBad, ShardStored, Tick
from .messages import ManifestReply, ManifestRequest, NoSnapshot, Range, ReplicationDone, Shard, ShardRequest

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 << 10, 2 << 20  # Asked for at once.
PIECES = 16  # At least so many, if they are not too small: else one source would send a small state alone.
WINDOW = 3  # Pieces under way per source: one on the wire, one queued, one being asked for.
SAMPLE_BYTES = 1 << 20  # Smaller pieces tell nothing about a link with a shaper's burst.
SAMPLES = 3, 9  # Rates of a link: the median of at least, and at most, so many.
MANIFEST_PATIENCE_S = 2.0  # Then another source is asked for it, too.


@dataclass(slots=True)
class _Source:
    shards: int
    rest: list[Range] = field(default_factory=list)  # Not asked for yet.
    under_way: dict[Range, None] = field(default_factory=dict)  # Asked for, oldest first.
    bytes: int = 0  # Received.
    backlog_since_s: float | None = None  # The last arrival, if more was under way then.
    rates_bps: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES[1]))

    def rest_bytes(self) -> int:
        return sum(stop - start for start, stop in self.rest)


class Replication:
    """The joiner's half: pulls the state at `step` from several sources at once.

    Ends with StateWhole, or with `failed` when no source is left. `attempt` tells what was stored for it from what
    was for one before, whose bytes are gone.
    """

    def __init__(
        self, step: int, shard_bytes: int, shards_by_source: dict[str, int], attempt: int = 0
    ) -> None:
        self.step, self.shard_bytes, self.attempt = step, shard_bytes, attempt
        self.sources = {name: _Source(count) for name, count in sorted(shards_by_source.items())}
        self.total_bytes: int | None = None
        self.piece_bytes = MAX_PIECE_BYTES
        self.stored_bytes = 0
        self.bad_shards = 0
        self.stolen_ranges = 0
        self.failed = ""
        self.whole = False
        self.wake_at_s: float | None = None
        self._asked: set[str] = set()
        self._stored: set[Range] = set()

    def start(self, now_s: float) -> list[Effect]:
        """Ask the first source for the manifest."""
        return self._ask_manifest(now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event; those of other steps, attempts, and sources that were dropped are ignored."""
        match event:
            case Tick() if self.wake_at_s is not None and now_s >= self.wake_at_s:
                return self._ask_manifest(now_s) if self.total_bytes is None else []
            case Received(peer, ManifestReply(step=self.step, digest=digest), payload):
                wanted = self.total_bytes is None
                return [ReadManifest(peer, self.step, digest, payload, self.attempt)] if wanted else []
            case Received(peer, Shard(step=self.step) as shard, payload):
                return self._on_shard(peer, shard, payload) + self._sample(peer, shard, now_s)
            case ManifestKnown(_, total_bytes, self.attempt) if self.total_bytes is None:
                self.total_bytes, self.wake_at_s = total_bytes, None
                self._lay_out(total_bytes)
                return [effect for name in list(self.sources) for effect in self._fill(name)] + self._finish()
            case ManifestBad(source, reason, self.attempt):
                return self._drop(source, f"its manifest is unusable: {reason}", now_s)
            case ShardStored(source, start, stop, self.attempt):
                return self._on_stored(source, (start, stop))
            case ShardBad(source, start, stop, self.attempt):
                return self._on_bad(source, (start, stop))
            case Received(peer, NoSnapshot(step=self.step)):
                return self._drop(peer, "it has no copy of the state", now_s)
            case PeerClosed(peer, _):
                return self._drop(peer, "it is gone", now_s)
        return []

    # --- the manifest ---

    def _ask_manifest(self, now_s: float) -> list[Effect]:
        waiting = [name for name in self.sources if name not in self._asked]
        if not waiting:
            self._asked.clear()
            waiting = list(self.sources)
        self._asked.add(waiting[0])
        self.wake_at_s = now_s + MANIFEST_PATIENCE_S
        return [Transmit(waiting[0], ManifestRequest(step=self.step))]

    def _lay_out(self, total_bytes: int) -> None:
        """Contiguous ranges in proportion to the planned shards; the last source takes the remainder."""
        self.piece_bytes = min(max(total_bytes // PIECES, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        position, names = 0, list(self.sources)
        for name in names:
            source = self.sources[name]
            stop = min(position + source.shards * self.shard_bytes, total_bytes)
            stop = total_bytes if name == names[-1] else stop
            source.rest = [(position, stop)] if stop > position else []
            position = stop

    # --- shards ---

    def _on_shard(self, peer: str, shard: Shard, payload: object) -> list[Effect]:
        if self.whole or (shard.start, shard.stop) in self._stored:
            return []
        if peer not in self.sources or (shard.start, shard.stop) not in self.sources[peer].under_way:
            raise RemoteProtocolError(
                f"{peer} sent bytes {shard.start} to {shard.stop}, which nobody asked for"
            )
        return [StoreShard(peer, shard.start, shard.stop, shard.digest, payload, self.attempt)]

    def _sample(self, peer: str, shard: Shard, now_s: float) -> list[Effect]:
        """While a source has more to send than its link takes, the time between two pieces is the link's."""
        source = self.sources.get(peer)
        if source is None:
            return []
        since_s, size = source.backlog_since_s, shard.stop - shard.start
        source.backlog_since_s = now_s if len(source.under_way) > 1 else None
        if since_s is None or now_s <= since_s or size < SAMPLE_BYTES:
            return []
        source.rates_bps.append(8 * size / (now_s - since_s))
        if len(source.rates_bps) < SAMPLES[0]:
            return []
        return [Measured(peer, statistics.median(source.rates_bps), "replication")]

    def _on_stored(self, name: str, piece: Range) -> list[Effect]:
        if piece not in self._stored:
            self._stored.add(piece)
            self.stored_bytes += piece[1] - piece[0]
        for source in self.sources.values():
            source.under_way.pop(piece, None)
            if (
                piece in source.rest
            ):  # Whoever sent it was dropped meanwhile, and another is to send it again.
                source.rest.remove(piece)
        if name in self.sources:
            self.sources[name].bytes += piece[1] - piece[0]
        return self._finish() or [effect for each in list(self.sources) for effect in self._fill(each)]

    def _on_bad(self, name: str, piece: Range) -> list[Effect]:
        self.bad_shards += 1
        if name not in self.sources:
            return []
        self.sources[name].under_way.pop(piece, None)
        if piece in self._stored:
            return self._fill(name)
        others = [each for each in self.sources if each != name] or [name]
        taker = min(others, key=lambda each: (self.sources[each].rest_bytes(), each))
        self.sources[taker].rest.insert(0, piece)
        return self._fill(taker)

    def _fill(self, name: str) -> list[Effect]:
        """Ask `name` for pieces until its window is full."""
        source, effects = self.sources[name], list[Effect]()
        while len(source.under_way) < WINDOW:
            piece = self._next_piece(name)
            if piece is None:
                break
            source.under_way[piece] = None
            effects.append(Transmit(name, ShardRequest(step=self.step, start=piece[0], stop=piece[1])))
        return effects

    def _next_piece(self, name: str) -> Range | None:
        source = self.sources[name]
        if not source.rest and not self._steal(name):
            return self._repeat(name)
        start, stop = source.rest.pop(0)
        if stop - start > self.piece_bytes:
            source.rest.insert(0, (start + self.piece_bytes, stop))
            stop = start + self.piece_bytes
        return (start, stop)

    def _steal(self, name: str) -> bool:
        """Take over the second half of the largest range that another source has left."""
        owners = [each for each in self.sources if self.sources[each].rest]
        if not owners:
            return False
        slowest = self.sources[max(owners, key=lambda each: (self.sources[each].rest_bytes(), each))]
        start, stop = slowest.rest.pop()
        middle = start if stop - start <= self.piece_bytes else (start + stop) // 2
        if middle > start:
            slowest.rest.append((start, middle))
        self.sources[name].rest = [(middle, stop)]
        self.stolen_ranges += 1
        return True

    def _repeat(self, name: str) -> Range | None:
        """The oldest piece that somebody else owes, if this source has nothing to do at all."""
        if self.sources[name].under_way:
            return None
        owed = [piece for each in self.sources.values() for piece in each.under_way]
        asked_twice = {piece for piece in owed if owed.count(piece) > 1}
        return next((piece for piece in owed if piece not in asked_twice), None)

    # --- ends ---

    def _drop(self, name: str, reason: str, now_s: float) -> list[Effect]:
        source = self.sources.pop(name, None)
        if source is None or self.whole:
            return []
        if not self.sources:
            self.failed = f"no neighbour is left to pull the state from (the last was {name}: {reason})"
            return [DiscardState()]
        if self.total_bytes is None:
            heir = next(iter(self.sources))
            self.sources[heir].shards += source.shards
            return self._ask_manifest(now_s) if name in self._asked else []
        heir = min(self.sources, key=lambda each: (self.sources[each].rest_bytes(), each))
        still = {piece for each in self.sources.values() for piece in each.under_way}
        lost = [piece for piece in source.under_way if piece not in still and piece not in self._stored]
        self.sources[heir].rest += lost + source.rest
        return [effect for each in list(self.sources) for effect in self._fill(each)]

    def _finish(self) -> list[Effect]:
        if self.whole or self.total_bytes is None or self.stored_bytes < self.total_bytes:
            return []
        self.whole = True
        done = [Transmit(name, ReplicationDone(step=self.step)) for name in self.sources]
        return [*done, StateWhole(self.step)]

    def check_invariants(self) -> None:
        """Every byte is stored, under way, or left to ask for; none is stored twice."""
        if self.total_bytes is None or self.failed:
            return
        wanted = {piece for source in self.sources.values() for piece in (*source.under_way, *source.rest)}
        pieces = wanted | self._stored
        assert not wanted & self._stored, "what is here is asked for, and nobody would take it"
        position = 0
        for start, stop in sorted(pieces):
            assert start == position, f"bytes {position} to {start} belong to nobody"
            position = stop
        assert position == self.total_bytes
