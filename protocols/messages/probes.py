"""The rate of a link: how it is measured, and what is known of it."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from .fields import Count, Message, Positive

# How a link's rate was found; "": not at all.
RateSource = Literal["", "probe", "iperf3", "replication", "traffic"]


class LinkReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one end knows of a link: the rate of what comes to it, and of what it sends. 0 = not measured."""

    rtt_min_s: Positive = 0.0
    rtt_median_s: Positive = 0.0
    rate_bps: Positive = 0.0
    rate_age_s: Positive = 0.0
    rate_source: RateSource = ""
    sent_bps: Positive = 0.0
    sent_age_s: Positive = 0.0


class ProbeRequest(Message, frozen=True, kw_only=True):
    """To a peer: measure our link with me."""

    kind: Literal["in-band", "iperf3"] = "in-band"


class Iperf3Ready(Message, frozen=True, kw_only=True):
    """Answer to a ProbeRequest for iperf3: I serve at this port."""

    port: Annotated[int, Meta(gt=0, lt=65536)]


class Probe(Message, frozen=True, kw_only=True):
    """To a peer, bulk: part `index` of `count` of a bandwidth probe; the payload is padding."""

    index: Count
    count: Annotated[int, Meta(ge=2, le=64)]


class ProbeResult(Message, frozen=True, kw_only=True):
    """Receiver of a probe to its sender: the rate I saw."""

    rate_bps: Annotated[float, Meta(gt=0, le=1e15)]
