"""How fast a link is: in-band probes on the kept connection, or iperf3; one link at a time per node.

    asker --ProbeRequest--> peer, which waits until it measures no other link
    peer  --Probe x 64 (1 MiB)--> asker --ProbeResult--> peer      up to three times: asker knows what comes in
    asker --Probe x 64 (1 MiB)--> peer --ProbeResult--> asker      the same the other way

The receiver's time stamps give the rate, by the slope of a line through all but the first: those may pass on
the burst that a shaper allows an idle link. (A line, because networks hand over pieces of 64 KiB: between two
single time stamps 5 % too much were found.) The median of three is kept; a link so slow that one took long is
not held up by two more. Links are probed when they are new (scale-out, connect-link); afterwards their rates
come from the state that is replicated over them.
"""

from __future__ import annotations

import itertools
import statistics
from collections import deque
from dataclasses import dataclass, field
from typing import Literal

from .addresses import AddressBook
from .effects import Effect, Measured, RunIperf3, SendProbe, ServeIperf3, Transmit
from .events import Event, Iperf3Done, Iperf3Serving, Received, Tick
from .messages import Iperf3Ready, Probe, ProbeRequest, ProbeResult, RateSource

Kind = Literal["in-band", "iperf3"]
PROBE_BYTES = 1 << 20
PROBES = 3
SLOW_BPS = (
    8 * PROBE_BYTES / 0.01
)  # A probe that takes longer is the only one: it is long beside what disturbs it.
HEAD = 3 / 8  # Of a probe, that says nothing.
PATIENCE_S = {"in-band": 2.5, "iperf3": 10.0}
MAX_WAITING = 64
MAX_PARTS = 64  # Of one probe (messages.py).
SHORTEST_S = 1e-6  # Of parts that came at once: faster than we can tell.


@dataclass(slots=True)
class _Session:
    """One link being measured. We asked for it, or were asked."""

    peer: str
    asker: bool
    kind: Kind
    started_s: float
    deadline_s: float
    parts: list[tuple[float, int]] = field(default_factory=list)  # Arrival time and bytes.
    rates_in: list[float] = field(default_factory=list)
    rates_out: list[float] = field(default_factory=list)


def enough(rates_bps: list[float]) -> bool:
    """Both ends see the same rates, so both know when the other direction's turn has come."""
    return len(rates_bps) >= PROBES or any(rate < SLOW_BPS for rate in rates_bps)


def slope_bps(parts: list[tuple[float, int]]) -> float:
    """Rate at which the parts of a probe, (arrival time, bytes), came in; 0 if there are too few."""
    tail = parts[int(len(parts) * HEAD) :]
    sizes = list(itertools.accumulate(size for _, size in tail))
    if len(set(sizes)) < 2:  # Too few, or (not from us) empty ones.
        return 0.0
    seconds_per_byte = statistics.linear_regression(sizes, [time_s for time_s, _ in tail]).slope
    return 8 / max(seconds_per_byte, SHORTEST_S / sizes[-1])


class Prober:
    """The links that this node measures, one after the other."""

    def __init__(self, me: str, kind: Kind, book: AddressBook) -> None:
        self.me, self.kind, self.book = me, kind, book
        self.session: _Session | None = None
        self.wanted: deque[str] = deque()  # To be asked by us.
        self.asked: dict[str, tuple[Kind, float]] = {}  # Have asked us, and wait until then.
        self.took_s = 0.0  # The last measurement, both directions.

    @property
    def wake_at_s(self) -> float | None:
        return self.session.deadline_s if self.session else None

    def want(self, peer: str, now_s: float) -> list[Effect]:
        """Measure the link to `peer` when it is its turn; ends in Measured."""
        if peer not in self.wanted and not (self.session and self.session.peer == peer):
            self.wanted.append(peer)
        return self._next(now_s)

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event; words of a measurement that is over are ignored."""
        match event:
            case Received(peer, ProbeRequest(kind=kind)):
                return self._on_request(peer, kind, now_s)
            case Tick() if self.session and now_s >= self.session.deadline_s:
                return self._end(now_s)
        session = self.session
        if session is None or getattr(event, "peer", "") != session.peer:
            return []
        match event:
            case Received(peer, Probe() as probe, payload):
                return self._on_part(session, probe, payload, now_s)
            case Received(peer, ProbeResult(rate_bps=rate)) if session.kind == "iperf3":
                session.rates_in = [rate]
                return self._end(now_s)
            case Received(peer, ProbeResult()) if enough(session.rates_out):
                return []
            case Received(peer, ProbeResult(rate_bps=rate)):
                session.rates_out.append(rate)
                if not enough(session.rates_out):
                    return [SendProbe(peer)]
                return self._end(now_s) if session.asker else []
            case Iperf3Serving(peer, port):
                return [Transmit(peer, Iperf3Ready(port=port))]
            case Received(peer, Iperf3Ready(port=port)) if session.asker:
                host = self.book.answered.get(peer, "").rpartition("@")[2].rpartition(":")[0]
                return [RunIperf3(peer, f"{host}:{port}")]
            case Iperf3Done(peer, in_bps, out_bps, error) if session.asker:
                return self._on_iperf3(session, in_bps, out_bps, error, now_s)
        return []

    def closed(self, peer: str, now_s: float) -> list[Effect]:
        """No connection is left."""
        self.asked.pop(peer, None)
        if peer in self.wanted:
            self.wanted.remove(peer)
        return self._end(now_s) if self.session and self.session.peer == peer else []

    def _on_request(self, peer: str, kind: Kind, now_s: float) -> list[Effect]:
        session = self.session
        if session is not None and session.peer == peer:
            if session.asker and self.me < peer:
                return []  # Both have asked: ours counts.
            if not session.asker and session.kind == kind == "iperf3":
                return []  # Each would start processes.
            self.session = None  # Theirs; or they ask again, in-band because iperf3 has failed.
        if len(self.asked) < MAX_WAITING:
            self.asked[peer] = (kind, now_s + PATIENCE_S[kind])
        return self._next(now_s)

    def _next(self, now_s: float) -> list[Effect]:
        """Who has asked comes first: it cannot go on without us."""
        if self.session is not None:
            return []
        while self.asked:
            peer = next(iter(self.asked))
            kind, until_s = self.asked.pop(peer)
            if now_s >= until_s:
                continue  # It has given up, and would not listen.
            self.session = _Session(peer, False, kind, now_s, now_s + PATIENCE_S[kind])
            return [SendProbe(peer) if kind == "in-band" else ServeIperf3(peer)]
        if self.wanted:
            peer = self.wanted.popleft()
            kind = self.kind if self.kind == "in-band" or peer in self.book.answered else "in-band"
            self.session = _Session(peer, True, kind, now_s, now_s + PATIENCE_S[kind])
            return [Transmit(peer, ProbeRequest(kind=kind))]
        return []

    def _on_part(self, session: _Session, probe: Probe, payload: object, now_s: float) -> list[Effect]:
        if probe.index == 0:
            session.parts.clear()
        if len(session.parts) >= MAX_PARTS:
            return []  # A probe without a beginning or an end.
        session.parts.append((now_s, 0 if payload is None else len(memoryview(payload))))  # type: ignore[arg-type]
        if probe.index + 1 < probe.count:
            return []
        rate = slope_bps(session.parts)
        session.parts.clear()
        if rate <= 0:
            return []
        session.rates_in.append(rate)
        effects: list[Effect] = [Transmit(session.peer, ProbeResult(rate_bps=rate))]
        if not enough(session.rates_in):
            return effects
        return [*effects, SendProbe(session.peer)] if session.asker else effects + self._end(now_s)

    def _on_iperf3(
        self, session: _Session, in_bps: float, out_bps: float, error: str, now_s: float
    ) -> list[Effect]:
        if error or min(in_bps, out_bps) <= 0:  # No libiperf here or there, or its port is closed.
            session.kind, session.deadline_s = "in-band", now_s + PATIENCE_S["in-band"]
            return [Transmit(session.peer, ProbeRequest(kind="in-band"))]
        session.rates_in = [in_bps]
        return [Transmit(session.peer, ProbeResult(rate_bps=out_bps)), *self._end(now_s)]

    def _end(self, now_s: float) -> list[Effect]:
        """Report what is known of what comes in, also of a probe that was cut short, and go on."""
        assert self.session is not None
        session, self.session = self.session, None
        self.took_s = now_s - session.started_s
        rates = session.rates_in or [slope_bps(session.parts)]
        source: RateSource = "probe" if session.kind == "in-band" else "iperf3"
        return [Measured(session.peer, statistics.median(rates), source), *self._next(now_s)]
