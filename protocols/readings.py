"""What one node knows of its links: round trips of the heartbeats, and the newest rates each way.

What comes is timed when a link is new (probing.py) and while state comes over it. What goes is timed all the while,
and costs nothing: a link with more waiting for it carries what it can.

On a busy machine that may be too low, as the node itself is late with the next bytes; and over a short time too high,
as buffers take some at once. So the kernel is asked as well, where it counts for how long a connection had bytes on
their way. That may be too low, too, as the last of a message is on its way for a round trip, whatever the rate. So
the queue's figure counts where there is no other, or if it is of a second or more, and higher.
"""

from __future__ import annotations

import statistics
from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from .liveness import Liveness
from .messages import LinkReading, RateSource

ENOUGH_BYTES, ENOUGH_S = 1 << 20, 0.05  # Sent while more waited: from here on they make a rate,
SOME_BYTES, LONG_S = 1 << 16, 1.0  # or so few in so long.
# Rates measured one after the other differ by a tenth, and now and then by a third. Their median is reported; but one
# that differs by more than this factor is no noise.
SAMPLES, JUMP = 5, 2.0
# A link of which nothing newer is known is measured anew: 1 MiB or 3 each way. Soon at first, as both ends were busy
# with a start then, then after three times as long each time.
SOON_STALE_S, STALE_S = 20.0, 300.0


@dataclass(frozen=True, slots=True)
class _Rate:
    bps: float
    at_s: float
    source: RateSource


class _Sent(NamedTuple):
    """Bytes, and the seconds that they took."""

    total: int = 0
    total_s: float = 0.0

    def since(self, before: _Sent) -> _Sent:
        return _Sent(self.total - before.total, self.total_s - before.total_s)

    @property
    def bps(self) -> float:
        """0: too little to tell."""
        is_enough = self.total >= ENOUGH_BYTES and self.total_s >= ENOUGH_S
        is_slow = self.total >= SOME_BYTES and self.total_s >= LONG_S
        return 8 * self.total / self.total_s if is_enough or is_slow else 0.0


def _bps(carried: _Sent, acknowledged: _Sent) -> float:
    """What the link carries, by its queue and by the kernel; `carried` is enough."""
    if acknowledged.bps and carried.total_s < LONG_S:
        return acknowledged.bps
    return max(carried.bps, acknowledged.bps)


_UNKNOWN = _Rate(0.0, 0.0, "")


class Readings:
    """What one node knows of its open links."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.rates: dict[str, _Rate] = {}
        self.sent: dict[str, _Rate] = {}
        self.asked_s: dict[str, float] = {}  # When it was last to be measured anew,
        self.asked: Counter[str] = Counter()  # and how often.
        self.samples: dict[str, deque[float]] = {}
        # What the last rate of `sent` was made of, too: `carried` and `acknowledged`.
        self.counted: dict[str, tuple[_Sent, _Sent]] = {}

    def measured(self, peer: str, rate_bps: float, source: RateSource, now_s: float) -> None:
        """The rate of what comes from `peer`, bit/s; 0, nothing was found out, changes nothing."""
        if rate_bps > 0 and peer in self.liveness.peers:
            self.rates[peer] = _Rate(rate_bps, now_s, source)

    def closed(self, peer: str) -> None:
        """Forget what is known of the link to `peer`: another one may take another way."""
        for known in (self.rates, self.sent, self.samples, self.counted, self.asked_s, self.asked):
            known.pop(peer, None)

    def carried(
        self,
        totals: Mapping[str, tuple[int, float]],
        now_s: float,
        acknowledged: Mapping[str, tuple[int, float]] | None = None,
    ) -> None:
        """Take in what links have carried. Arguments: as in `events.ReadingsTaken`."""
        for peer, total in totals.items():
            if peer not in self.liveness.peers:
                continue
            now = _Sent(*total), _Sent(*(acknowledged or {}).get(peer, ()))
            before = self.counted.get(peer, (_Sent(), _Sent()))
            new = now[0].since(before[0]), now[1].since(before[1])
            if min(*new[0], *new[1]) < 0:  # Another connection, counted from its beginning.
                self.counted[peer] = _Sent(), _Sent()
                new = now
            if new[0].bps:
                self.sent[peer] = _Rate(self._usual_bps(peer, _bps(*new)), now_s, "traffic")
                self.counted[peer] = now

    def _usual_bps(self, peer: str, newest_bps: float) -> float:
        samples = self.samples.setdefault(peer, deque(maxlen=SAMPLES))
        if samples and not 1 / JUMP < newest_bps / statistics.median(samples) < JUMP:
            samples.clear()
        samples.append(newest_bps)
        return statistics.median(samples)

    def sent_bps(self) -> dict[str, float]:
        """What links carry, by peer, as far as their queues have told."""
        return {peer: rate.bps for peer, rate in self.sent.items()}

    def rates_bps(self, peer: str) -> tuple[float, float]:
        """The rates from `peer` and to it; 0: unknown. Any thread may ask."""
        return self.rates.get(peer, _UNKNOWN).bps, self.sent.get(peer, _UNKNOWN).bps

    def take_stale(self, peers: Iterable[str], now_s: float) -> list[str]:
        """The peers whose links were not measured for long. They are to be measured now."""
        stale = [peer for peer in peers if now_s > self._known_s(peer, now_s) + self._stale_s(peer)]
        self.asked_s |= dict.fromkeys(stale, now_s)
        self.asked.update(stale)
        return stale

    def _stale_s(self, peer: str) -> float:
        return min(SOON_STALE_S * 3 ** min(self.asked[peer], 3), STALE_S)

    def _known_s(self, peer: str, now_s: float) -> float:
        """When the link was last measured, or was to be."""
        rates_s = [known[peer].at_s for known in (self.rates, self.sent) if peer in known]
        return max([*rates_s, self.asked_s.get(peer, rates_s[0])]) if rates_s else now_s

    def of(self, peer: str, now_s: float) -> LinkReading:
        """All that is known of the link to `peer`."""
        rtt_min_s, rtt_median_s = self.liveness.rtt_s(peer)
        came, went = self.rates.get(peer, _UNKNOWN), self.sent.get(peer, _UNKNOWN)
        return LinkReading(
            rtt_min_s=rtt_min_s,
            rtt_median_s=rtt_median_s,
            rate_bps=came.bps,
            rate_age_s=max(now_s - came.at_s, 0.0) if came.bps else 0.0,
            rate_source=came.source,
            sent_bps=went.bps,
            sent_age_s=max(now_s - went.at_s, 0.0) if went.bps else 0.0,
        )
