"""How fast a link is: in-band probes on the kept connection, or iperf3; all new links of a node at once.

    asker --ProbeRequest--> peer
    peer  --Probe x 64 (1 MiB)--> asker --ProbeResult--> peer      up to three times: asker knows what comes in
    asker --Probe x 64 (1 MiB)--> peer --ProbeResult--> asker      meanwhile, the other way

Between processes that share memory a probe is 16 parts of 256 KiB. A peer that was asked for iperf3 and cannot serve
it sends its first probe at once; whoever gets that, or hears nothing, goes on in-band.

The receiver's time stamps give the rate, by the slope of a line through all but the first: those may pass on
the burst that a shaper allows an idle link. (A line, because networks hand over pieces of 64 KiB: between two
single time stamps 5 % too much were found.) A receiver that was busy reads what has come meanwhile at once: so
no rate is above that of the whole probe. The median of three is kept, in memory the highest; a link so slow that
one took long is not held up by two more. Links that share an interface share it while they are measured, as they
do when all of them carry state or gradients. Links are probed when they are new (scale-out, connect-link), and
again if nothing else has told their rates for a while: what state and gradients take over them (readings.py).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Literal

from .addresses import AddressBook
from .effects import Effect, Measured, RunIperf3, SendProbe, ServeIperf3, Transmit
from .events import Event, Iperf3Done, Iperf3Serving, Received, Tick
from .messages import Iperf3Ready, Probe, ProbeRequest, ProbeResult, RateSource

Kind = Literal["in-band", "iperf3"]
PROBE_BYTES = 1 << 20
PROBES = 3
# A probe that takes longer is the only one: it is long beside what disturbs it.
SLOW_BPS = 8 * PROBE_BYTES / 0.03
HEAD = 3 / 8  # Of a probe, that says nothing.
PATIENCE_S = {"in-band": 2.5, "iperf3": 10.0}
MAX_SESSIONS = 64
MAX_PARTS = 64  # Of one probe (messages/probes.py).
WIRE_PART_BYTES = 64 << 10  # Larger parts lie in memory that both processes share.
SHORTEST_S = 1e-6  # Of parts that came at once: faster than we can tell.


@dataclass(slots=True)
class _Session:
    """One link being measured. We asked for it, or were asked."""

    peer: str
    asker: bool
    kind: Kind
    started_s: float
    deadline_s: float
    sends: bool = False  # We have begun to.
    in_memory: bool = False  # What comes in lies where both processes have it.
    parts: list[tuple[float, int]] = field(default_factory=list)  # Arrival time and bytes.
    rates_in: list[float] = field(default_factory=list)
    rates_out: list[float] = field(default_factory=list)


def enough(rates_bps: list[float]) -> bool:
    """Are these rates of one direction enough? Both ends see the same rates, so both know when it is measured."""
    return len(rates_bps) >= PROBES or any(rate < SLOW_BPS for rate in rates_bps)


def slope_bps(parts: list[tuple[float, int]]) -> float:
    """Rate at which the last parts of a probe, (arrival time, bytes), came in; 0 if there are too few."""
    tail = parts[int(len(parts) * HEAD) :]
    sizes = list(itertools.accumulate(size for _, size in tail))
    if len(set(sizes)) < 2:  # Too few, or (not from us) empty ones.
        return 0.0
    seconds_per_byte = statistics.linear_regression(sizes, [time_s for time_s, _ in tail]).slope
    return 8 / max(seconds_per_byte, SHORTEST_S / sizes[-1])


def rate_bps(parts: list[tuple[float, int]]) -> float:
    """Of a probe, (arrival time, bytes) for each part: the slope; over a wire what all parts had if that is less."""
    slope, seconds = slope_bps(parts), parts[-1][0] - parts[0][0] if parts else 0.0
    if seconds <= SHORTEST_S or parts[-1][1] > WIRE_PART_BYTES:  # All at once: faster than we can tell.
        return slope
    return min(slope, 8 * sum(size for _, size in parts[1:]) / seconds)


class Prober:
    """The links that this node measures."""

    def __init__(self, me: str, kind: Kind, book: AddressBook) -> None:
        self.me, self.kind, self.book = me, kind, book
        self.sessions: dict[str, _Session] = {}  # By peer.
        self.took_s = 0.0  # The last measurement, both directions.

    @property
    def wake_at_s(self) -> float | None:
        return min((session.deadline_s for session in self.sessions.values()), default=None)

    def want(self, peer: str, now_s: float) -> list[Effect]:
        """Measure the link to `peer`; ends in Measured."""
        if peer in self.sessions:
            return []
        kind = self.kind if self.kind == "in-band" or peer in self.book.answered else "in-band"
        self._begin(peer, True, kind, now_s)
        return [Transmit(peer, ProbeRequest(kind=kind))]

    def handle(self, event: Event, now_s: float) -> list[Effect]:
        """One event; words of a measurement that is over are ignored."""
        match event:
            case Received(peer, ProbeRequest(kind=kind)):
                return self._on_request(peer, kind, now_s)
            case Tick():
                late = [session for session in self.sessions.values() if now_s >= session.deadline_s]
                return [effect for session in late for effect in self._on_late(session, now_s)]
        session = self.sessions.get(getattr(event, "peer", ""))
        if session is None:
            return []
        match event:
            case Received(peer, Probe() as probe, payload):
                if session.kind == "iperf3" and session.asker:
                    self._go_in_band(session, now_s)  # It cannot serve us, and sends this instead.
                return self._send_too(session) + self._on_part(session, probe, payload, now_s)
            case Received(peer, ProbeResult(rate_bps=rate)) if session.kind == "iperf3":
                session.rates_in = [rate]
                return self._end(session, now_s)
            case Received(peer, ProbeResult(rate_bps=rate)) if not enough(session.rates_out):
                session.rates_out.append(rate)
                return self._end_if_done(session, now_s) if enough(session.rates_out) else [SendProbe(peer)]
            case Iperf3Serving(peer, port) if session.kind == "iperf3" and not session.asker:
                if port:
                    return [Transmit(peer, Iperf3Ready(port=port))]
                self._go_in_band(session, now_s)
                return [SendProbe(peer)]  # That tells it, too.
            case Received(peer, Iperf3Ready(port=port)) if session.kind == "iperf3" and session.asker:
                host = self.book.answered.get(peer, "").rpartition("@")[2].rpartition(":")[0]
                return [RunIperf3(peer, f"{host}:{port}")]
            case Iperf3Done(peer, in_bps, out_bps, error) if session.kind == "iperf3" and session.asker:
                return self._on_iperf3(session, in_bps, out_bps, error, now_s)
        return []

    def closed(self, peer: str, now_s: float) -> list[Effect]:
        """No connection to `peer` is left: the measurement is over."""
        session = self.sessions.get(peer)
        return self._end(session, now_s) if session else []

    def _begin(self, peer: str, asker: bool, kind: Kind, now_s: float) -> None:
        """Begin to measure. iperf3 gets more time for more links; of probes, what has come in time counts."""
        others = len(self.sessions) - (peer in self.sessions) if kind == "iperf3" else 0
        deadline_s = now_s + PATIENCE_S[kind] * (1 + others)
        self.sessions[peer] = _Session(peer, asker, kind, now_s, deadline_s, sends=not asker)

    def _on_request(self, peer: str, kind: Kind, now_s: float) -> list[Effect]:
        match self.sessions.get(peer):
            case None if len(self.sessions) >= MAX_SESSIONS:
                return []
            case _Session(asker=True) if self.me < peer:
                return []  # Both have asked: ours counts.
            case _Session(asker=False, kind="iperf3") if kind == "iperf3":
                return []  # Each would start processes.
        self._begin(peer, False, kind, now_s)  # In place of ours; or iperf3 has failed, and they ask again.
        return [SendProbe(peer) if kind == "in-band" else ServeIperf3(peer)]

    def _send_too(self, session: _Session) -> list[Effect]:
        """Send our probes once one has come: sent with the request, on another connection, they might overtake it."""
        if session.sends:
            return []
        session.sends = True
        return [SendProbe(session.peer)]

    def _on_part(self, session: _Session, probe: Probe, payload: object, now_s: float) -> list[Effect]:
        if probe.index == 0:
            session.parts.clear()
        if len(session.parts) >= MAX_PARTS:
            return []  # A probe without a beginning or an end.
        session.parts.append((now_s, 0 if payload is None else len(memoryview(payload))))  # type: ignore[arg-type]
        if probe.index + 1 < probe.count:
            return []
        rate = rate_bps(session.parts)
        session.in_memory = session.parts[-1][1] > WIRE_PART_BYTES
        session.parts.clear()
        if rate <= 0:
            return []
        if session.in_memory:
            rate = max(rate, SLOW_BPS)  # Slower is not the memory: both ends go on with two more probes.
        session.rates_in.append(rate)
        return [Transmit(session.peer, ProbeResult(rate_bps=rate)), *self._end_if_done(session, now_s)]

    def _on_iperf3(
        self, session: _Session, in_bps: float, out_bps: float, error: str, now_s: float
    ) -> list[Effect]:
        if error or min(in_bps, out_bps) <= 0:  # No libiperf here or there, or its port is closed.
            return self._ask_in_band(session, now_s)
        session.rates_in = [in_bps]
        return [Transmit(session.peer, ProbeResult(rate_bps=out_bps)), *self._end(session, now_s)]

    def _go_in_band(self, session: _Session, now_s: float) -> None:
        session.kind, session.deadline_s = "in-band", now_s + PATIENCE_S["in-band"]

    def _ask_in_band(self, session: _Session, now_s: float) -> list[Effect]:
        self._go_in_band(session, now_s)
        return [Transmit(session.peer, ProbeRequest(kind="in-band"))]

    def _on_late(self, session: _Session, now_s: float) -> list[Effect]:
        """Time is up.

        With iperf3, ask for probes instead, as it may have been refused; with probes, take what has come.
        """
        asks = session.asker and session.kind == "iperf3"
        return self._ask_in_band(session, now_s) if asks else self._end(session, now_s)

    def _end_if_done(self, session: _Session, now_s: float) -> list[Effect]:
        """End the measurement, if both directions are measured."""
        return self._end(session, now_s) if enough(session.rates_in) and enough(session.rates_out) else []

    def _end(self, session: _Session, now_s: float) -> list[Effect]:
        """Report what is known of what comes in, also of a probe that was cut short."""
        del self.sessions[session.peer]
        self.took_s = now_s - session.started_s
        rates = session.rates_in or [rate_bps(session.parts)]
        source: RateSource = "probe" if session.kind == "in-band" else "iperf3"
        # What disturbs a copy in memory only makes it slower.
        rate = max(rates) if session.in_memory else statistics.median(rates)
        return [Measured(session.peer, rate, source)]
