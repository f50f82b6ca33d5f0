"""Which bytes of the state the joiner asks of whom next (Chaos, Sec. III; what adapts is ours).

The state is cut into pieces of one size. The first assignment is the scheduler's (Algorithms 1 and 2 on measured
links). From there it adapts:

- each source has a window of requests; who is faster is asked more often;
- a source that runs dry takes over what another would send last;
- who joins in the same view fetches the same state: such fellows say which pieces they have (Have), and send them;
  each begins at another place, so that they have something to give to each other soon;
- when nothing is left to ask for, an idle source is asked again for the oldest piece still awaited;
- a source that dies gives its rest back; a damaged piece is asked of somebody else, and counted.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from .effects import DiscardState, Effect, Measured, ReadManifest, StateWhole, StoreShard, Transmit
from .errors import RemoteProtocolError
from .events import Event, ManifestBad, ManifestKnown, PeerClosed, Received, ShardBad, ShardStored, Tick
from .messages import (
    Have,
    ManifestReply,
    ManifestRequest,
    NoSnapshot,
    Range,
    ReplicationDone,
    Shard,
    ShardRequest,
)

MIN_PIECE_BYTES, MAX_PIECE_BYTES = 64 << 10, 2 << 20  # Asked for at once.
PIECES = 16  # At least so many, if they are not too small: else one source would send a small state alone.
WINDOW = 3  # Pieces under way per source: one on the wire, one queued, one being asked for.
SAMPLE_BYTES = 1 << 20  # Smaller pieces tell nothing about a link with a shaper's burst.
SAMPLES = 3, 9  # Rates of a link: the median of at least, and at most, so many.
# Put in place, and results applied that have come meanwhile; roughly, on a busy machine.
LOADED_BYTES_PER_S = 500e6
MANIFEST_PATIENCE_S = 2.0  # Then another source is asked for it, too.
# Of who has no source with all of the state: for anything new from those that join, too.
FELLOWS_PATIENCE_S = 10.0


@dataclass(slots=True)
class _Source:
    shards: int
    has: int | None = None  # The pieces of a fellow, a bit each; None: all of them.
    rest: deque[int] = field(default_factory=deque)  # Its share, not asked for yet.
    under_way: dict[int, None] = field(default_factory=dict)  # Asked for, oldest first.
    bytes: int = 0  # Received.
    backlog_since_s: float | None = None  # The last arrival, if more was under way then.
    rates_bps: deque[float] = field(default_factory=lambda: deque(maxlen=SAMPLES[1]))

    def can_send(self, piece: int) -> bool:
        """Does the source have that piece?"""
        return self.has is None or bool(self.has >> piece & 1)


class Replication:
    """The joiner's half: pulls the state at `step` from several sources at once.

    Ends with StateWhole, or with `failed` when no source is left. `attempt` tells what was stored for it from what
    was for one before, whose bytes are gone. `fellows`, `turn`: as in ReplicationPlan. `steals`: a source that has
    sent its share sends of others', too; else the plan is carried out as it is, as the paper does.
    """

    def __init__(
        self,
        step: int,
        shard_bytes: int,
        shards_by_source: dict[str, int],
        attempt: int = 0,
        fellows: Iterable[str] = (),
        turn: tuple[int, int] = (0, 1),
        steals: bool = True,
    ) -> None:
        self.step, self.shard_bytes, self.attempt, self.turn = step, shard_bytes, attempt, turn
        self.steals = steals
        self.sources = {name: _Source(count) for name, count in sorted(shards_by_source.items())}
        self.sources |= {name: _Source(0, has=0) for name in sorted(fellows)}
        self.fellows = frozenset(fellows)
        self.total_bytes: int | None = None
        self._is_read = False  # A manifest: what another source says may be laid out otherwise.
        self.piece_bytes = MAX_PIECE_BYTES
        self.stored_bytes = 0
        self.failed = ""
        self.whole = False
        self.wake_at_s: float | None = None
        self._began_s = 0.0  # When pieces were first asked for.
        self._news_s = 0.0  # When something new of the state came, or was said to be somewhere.
        self._nobodys: deque[int] = deque()  # Not asked for yet, and in nobody's share.
        self._asked: set[str] = set()
        self._stored: set[int] = set()
        self._bits = 0  # The same, as fellows are told.

    def start(self, now_s: float) -> list[Effect]:
        """Ask the first source for the manifest; fellows may be ahead."""
        self._news_s = now_s
        news: list[Effect] = [Transmit(name, Have(step=self.step)) for name in sorted(self.fellows)]
        return news + self._ask_manifest(now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event; those of other steps, attempts, and sources that were dropped are ignored."""
        match event:
            case Tick() if self.wake_at_s is not None and now_s >= self.wake_at_s:
                if self._hangs_on_fellows and now_s >= self._news_s + FELLOWS_PATIENCE_S:
                    return self._give_up_on_fellows()
                return self._ask_manifest(now_s) if self.total_bytes is None else []
            case Received(peer, ManifestReply(step=self.step, digest=digest), payload):
                if self.total_bytes is not None or self._is_read:
                    return []
                self._is_read = True
                return [ReadManifest(peer, self.step, digest, payload, self.attempt)]
            case Received(peer, Shard(step=self.step) as shard, payload):
                return self._on_shard(peer, shard, payload) + self._sample(peer, shard, now_s)
            case Received(peer, Have(step=self.step) as news):
                return self._on_have(peer, news, now_s)
            case ManifestKnown(_, total_bytes, self.attempt) if self.total_bytes is None:
                self.total_bytes, self.wake_at_s = total_bytes, None
                self._began_s = self._news_s = now_s
                self._lay_out(total_bytes)
                return self._fill_all() + self._finish()
            case ManifestBad(source, reason, self.attempt):
                self._is_read = False
                return self._drop(source, f"its manifest is unusable: {reason}", now_s)
            case ShardStored(source, start, stop, self.attempt):
                return self._on_stored(source, (start, stop), now_s)
            case ShardBad(source, start, stop, self.attempt):
                return self._on_bad(source, (start, stop))
            case Received(peer, NoSnapshot(step=self.step)):
                return self._drop(peer, "it has no copy of the state", now_s)
            case PeerClosed(peer, _):
                return self._drop(peer, "it is gone", now_s)
        return []

    def rest_s(self, now_s: float) -> float:
        """Seconds until all is here, at the rate so far, and loaded."""
        if self.total_bytes is None or not self.stored_bytes:
            return math.inf
        comes_s = (self.total_bytes - self.stored_bytes) * (now_s - self._began_s) / self.stored_bytes
        return comes_s + self.total_bytes / LOADED_BYTES_PER_S

    @property
    def bytes_by_source(self) -> dict[str, int]:
        """Bytes that are here, by source, of all present sources."""
        return {name: source.bytes for name, source in self.sources.items()}

    # --- the manifest ---

    def _ask_manifest(self, now_s: float) -> list[Effect]:
        """Ask the next source for the manifest: those with all of the state first; a fellow answers when it can."""
        order = sorted(self.sources, key=lambda name: name in self.fellows)
        waiting = [name for name in order if name not in self._asked]
        if not waiting:
            self._asked.clear()
            waiting = order
        self._asked.add(waiting[0])
        self.wake_at_s = now_s + MANIFEST_PATIENCE_S
        return [Transmit(waiting[0], ManifestRequest(step=self.step))]

    def _lay_out(self, total_bytes: int) -> None:
        """Give each source consecutive pieces in proportion to its planned shards, from this joiner's place on."""
        self.piece_bytes = min(max(total_bytes // PIECES, MIN_PIECE_BYTES), MAX_PIECE_BYTES)
        count = -(-total_bytes // self.piece_bytes)
        first = self.turn[0] * count // self.turn[1]
        pieces = deque((first + index) % count for index in range(count))
        names = [name for name, source in self.sources.items() if source.has is None]
        planned = 0
        for name in names:
            planned += self.sources[name].shards * self.shard_bytes
            until = count if name == names[-1] else min(round(planned / self.piece_bytes), count)
            while count - len(pieces) < until:
                self.sources[name].rest.append(pieces.popleft())
        self._nobodys = pieces

    def _range(self, piece: int) -> Range:
        assert self.total_bytes is not None
        return piece * self.piece_bytes, min((piece + 1) * self.piece_bytes, self.total_bytes)

    # --- shards ---

    def _on_shard(self, peer: str, shard: Shard, payload: object) -> list[Effect]:
        piece = shard.start // self.piece_bytes
        if self.whole or self.total_bytes is None or piece in self._stored:
            return []
        asked = peer in self.sources and piece in self.sources[peer].under_way
        if not asked or (shard.start, shard.stop) != self._range(piece):
            raise RemoteProtocolError(
                f"{peer} sent bytes {shard.start} to {shard.stop}, which nobody asked for"
            )
        return [StoreShard(peer, shard.start, shard.stop, shard.digest, payload, self.attempt)]

    def _sample(self, peer: str, shard: Shard, now_s: float) -> list[Effect]:
        """Measure the link's rate by the time between two pieces, while the source had more to send."""
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

    def _on_stored(self, name: str, where: Range, now_s: float) -> list[Effect]:
        piece = where[0] // self.piece_bytes
        news: list[Effect] = []
        if piece not in self._stored:
            self._stored.add(piece)
            self._bits |= 1 << piece
            self._news_s = now_s
            self.stored_bytes += where[1] - where[0]
            self._no_more_asked(piece)  # Who sent it may have been dropped, and another be to send it again.
            news = self._tell_fellows()
        for source in self.sources.values():
            source.under_way.pop(piece, None)
        if name in self.sources:
            self.sources[name].bytes += where[1] - where[0]
        return news + (self._finish() or self._fill_all())

    def _no_more_asked(self, piece: int) -> None:
        for rest in (self._nobodys, *(source.rest for source in self.sources.values())):
            if piece in rest:
                rest.remove(piece)

    def _on_bad(self, name: str, where: Range) -> list[Effect]:
        piece = where[0] // self.piece_bytes
        if name not in self.sources:
            return []
        self.sources[name].under_way.pop(piece, None)
        if piece not in self._stored and not self._is_due(piece):
            able = [each for each in self.sources if self.sources[each].has is None and each != name]
            heirs = [self.sources[each].rest for each in able]
            min(heirs, key=len, default=self._nobodys).appendleft(piece)
        return self._fill_all()

    def _is_due(self, piece: int) -> bool:
        """Is the piece asked for, or about to be?"""
        return piece in self._nobodys or any(
            piece in source.rest or piece in source.under_way for source in self.sources.values()
        )

    # --- fellows ---

    def _on_have(self, peer: str, news: Have, now_s: float) -> list[Effect]:
        source = self.sources.get(peer)
        if source is None or peer not in self.fellows:
            return []
        begins = not news.pieces and not news.whole
        if not begins:
            self._news_s = now_s
        if news.whole:
            source.has = None
        elif source.has is not None:
            source.has |= int.from_bytes(news.pieces, "little")
        answer = self._tell(peer) if begins and (self._stored or self.whole) else []
        return answer + (self._fill_all() if self.total_bytes is not None else [])

    def _tell_fellows(self) -> list[Effect]:
        return [effect for name in self.sources if name in self.fellows for effect in self._tell(name)]

    def _tell(self, fellow: str) -> list[Effect]:
        if self.stored_bytes == self.total_bytes:
            return [Transmit(fellow, Have(step=self.step, whole=True))]
        pieces = self._bits.to_bytes(-(-self._bits.bit_length() // 8), "little")
        return [Transmit(fellow, Have(step=self.step, pieces=pieces))]

    @property
    def _hangs_on_fellows(self) -> bool:
        """Does no source have all of the state?"""
        return all(source.has is not None for source in self.sources.values())

    def _give_up_on_fellows(self) -> list[Effect]:
        self.failed = f"who joins with it has had no more of the state for {FELLOWS_PATIENCE_S:g} s"
        return [DiscardState()]

    # --- whom to ask for what ---

    def _fill_all(self) -> list[Effect]:
        """Ask everybody for pieces until all windows are full."""
        if self.whole:
            return []
        effects = [effect for name in list(self.sources) for effect in self._fill(name)]
        self.wake_at_s = self._news_s + FELLOWS_PATIENCE_S if self._hangs_on_fellows else None
        return effects

    def _fill(self, name: str) -> list[Effect]:
        source, effects = self.sources[name], list[Effect]()
        while len(source.under_way) < WINDOW:
            piece = self._next_piece(name)
            if piece is None:
                break
            source.under_way[piece] = None
            start, stop = self._range(piece)
            effects.append(Transmit(name, ShardRequest(step=self.step, start=start, stop=stop)))
        return effects

    def _next_piece(self, name: str) -> int | None:
        """The next piece for a source: of its own share, else what another source would send last, if it has that."""
        source = self.sources[name]
        if source.rest:
            return source.rest.popleft()
        others = self.sources.values() if self.steals else ()
        rests = sorted((each.rest for each in others if each.rest), key=len, reverse=True)
        for rest in (self._nobodys, *rests):
            for piece in reversed(rest):
                if source.can_send(piece):
                    rest.remove(piece)
                    return piece
        return self._repeat(source) if self.steals else None

    def _repeat(self, source: _Source) -> int | None:
        """For a source without work: the oldest piece that only one other source has been asked for."""
        if source.under_way:
            return None
        owed = [piece for each in self.sources.values() for piece in each.under_way]
        once = [piece for piece in owed if owed.count(piece) == 1]
        return next((piece for piece in once if source.can_send(piece)), None)

    # --- ends ---

    def _drop(self, name: str, reason: str, now_s: float) -> list[Effect]:
        source = self.sources.pop(name, None)
        if source is None or self.whole:
            return []
        if not self.sources:
            self.failed = f"no neighbour is left to pull the state from (the last was {name}: {reason})"
            return [DiscardState()]
        able = [each for each in self.sources.values() if each.has is None]
        if self.total_bytes is None:
            if able:
                able[0].shards += source.shards
            return self._ask_manifest(now_s) if name in self._asked else []
        lost = [piece for piece in source.under_way if piece not in self._stored and not self._is_due(piece)]
        min((each.rest for each in able), key=len, default=self._nobodys).extend([*lost, *source.rest])
        return self._fill_all()

    def _finish(self) -> list[Effect]:
        if self.whole or self.total_bytes is None or self.stored_bytes < self.total_bytes:
            return []
        self.whole, self.wake_at_s = True, None
        done = [Transmit(name, ReplicationDone(step=self.step)) for name in self.sources]
        return [*done, StateWhole(self.step)]

    def check_invariants(self) -> None:
        """Every piece is stored, under way, or left to ask for; none is stored twice."""
        if self.total_bytes is None or self.failed or self.whole:
            return
        wanted = {piece for source in self.sources.values() for piece in (*source.under_way, *source.rest)}
        wanted |= {*self._nobodys}
        assert not wanted & self._stored, "what is here is asked for, and nobody would take it"
        assert wanted | self._stored == {*range(-(-self.total_bytes // self.piece_bytes))}
