"""What one node knows of its links: round trips of the heartbeats, and the newest rate of what comes in."""

from __future__ import annotations

from dataclasses import dataclass

from .liveness import Liveness
from .messages import LinkReading, RateSource


@dataclass(frozen=True, slots=True)
class _Rate:
    bps: float
    at_s: float
    source: RateSource


class Readings:
    """Of the open links of one node."""

    def __init__(self, liveness: Liveness) -> None:
        self.liveness = liveness
        self.rates: dict[str, _Rate] = {}

    def measured(self, peer: str, rate_bps: float, source: RateSource, now_s: float) -> None:
        """The rate of what comes from `peer`, bit/s; 0, nothing was found out, changes nothing."""
        if rate_bps > 0 and peer in self.liveness.peers:
            self.rates[peer] = _Rate(rate_bps, now_s, source)

    def closed(self, peer: str) -> None:
        """Another link to it may be another way."""
        self.rates.pop(peer, None)

    def of(self, peer: str, now_s: float) -> LinkReading:
        """All that is known of the link to `peer`."""
        rtt_min_s, rtt_median_s = self.liveness.rtt_s(peer)
        rate = self.rates.get(peer)
        if rate is None:
            return LinkReading(rtt_min_s=rtt_min_s, rtt_median_s=rtt_median_s)
        return LinkReading(
            rtt_min_s=rtt_min_s,
            rtt_median_s=rtt_median_s,
            rate_bps=rate.bps,
            rate_age_s=max(now_s - rate.at_s, 0.0),
            rate_source=rate.source,
        )
