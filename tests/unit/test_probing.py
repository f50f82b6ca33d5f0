"""`chaosnet.protocols.probing`: how fast new links are."""

import itertools
import statistics
import subprocess
import sys
import threading
from functools import partial

import pytest

from chaosnet.node import iperf3_probe
from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.effects import Effect, Measured, RunIperf3, SendProbe, ServeIperf3, Transmit
from chaosnet.protocols.events import Iperf3Done, Iperf3Serving, Received, Tick
from chaosnet.protocols.messages import Iperf3Ready, Probe, ProbeRequest, ProbeResult
from chaosnet.protocols.probing import (
    MAX_SESSIONS,
    PATIENCE_S,
    PROBE_BYTES,
    PROBES,
    SLOW_BPS,
    WIRE_PART_BYTES,
    Prober,
    enough,
    rate_bps,
    slope_bps,
)

PARTS = 16  # Not larger than what goes over wires.
PART = bytes(PROBE_BYTES // PARTS)


class Pair:
    """Two probers over a link; `rates` in bit/s by receiver. Parts arrive at that rate, words at once."""

    port = 5201  # At which iperf3 is served.

    def __init__(self, rates, kind="in-band"):
        self.rates, self.probes = rates, []
        self.now_s = dict.fromkeys(
            rates, 0.0
        )  # By receiver, as the directions of a link are not in each other's way.
        self.probers = {me: Prober(me, kind, AddressBook()) for me in rates}
        for me, other in (tuple(rates), tuple(rates)[::-1]):
            self.probers[me].book.reached(other, f"{other}:1", "")
        self.found = {}

    def perform(self, me, effects):
        (other,) = set(self.probers) - {me}
        for effect in effects:
            match effect:
                case Transmit(peer, message):
                    self.hand(peer, Received(me, message))
                case SendProbe(peer):
                    self.probes.append((me, peer))
                    for index in range(PARTS):
                        self.now_s[peer] += 8 * len(PART) / self.rates[peer]
                        self.hand(peer, Received(me, Probe(index=index, count=PARTS), PART))
                case Measured(peer, rate, source):
                    self.found[me] = (peer, rate, source)
                case ServeIperf3(peer):
                    self.hand(me, Iperf3Serving(peer, self.port))
                case RunIperf3(peer, address):
                    assert address == f"{other}:5201"
                    self.hand(me, self.iperf3(peer))
        for prober in self.probers.values():
            assert not prober.sessions or prober.wake_at_s is not None

    def hand(self, me, event):
        self.perform(me, self.probers[me].handle(event, self.now_s[me]))

    def want(self, me):
        (other,) = set(self.probers) - {me}
        self.perform(me, self.probers[me].want(other, self.now_s[me]))


def test_both_ends_learn_the_rate_of_what_comes_to_them():
    pair = Pair({"a": 1e9, "b": 9e9})
    pair.want("a")
    assert pair.found == {
        "a": ("b", pytest.approx(1e9), "probe"),
        "b": ("a", pytest.approx(9e9), "probe"),
    }
    assert sorted(pair.probes) == [("a", "b")] * PROBES + [("b", "a")] * PROBES
    assert not any(prober.sessions for prober in pair.probers.values())


def test_both_directions_are_measured_at_once():
    """They do not share what a link carries; one that does is shared when training, too."""
    prober = Prober("a", "in-band", AddressBook())
    prober.want("b", 0.0)
    assert prober.handle(Received("b", Probe(index=0, count=8), PART), 0.0) == [SendProbe("b")]
    assert prober.handle(Received("b", Probe(index=0, count=8), PART), 0.1) == []


def test_a_slow_link_is_probed_once():
    pair = Pair({"a": 100e6, "b": 250e6})
    pair.want("a")
    assert pair.probes == [("b", "a"), ("a", "b")]
    assert pair.found["a"][1] == pytest.approx(100e6)


def test_the_median_counts():
    prober = Prober("a", "in-band", AddressBook())
    prober.want("b", 0.0)
    rates, now_s = [80e6, 500e6, 100e6], 0.0
    for rate in rates:
        for index in range(PARTS):
            now_s += 8 * len(PART) / rate
            prober.handle(Received("b", Probe(index=index, count=PARTS), PART), now_s)
    assert statistics.median(prober.sessions["b"].rates_in) == pytest.approx(100e6)


def test_the_rate_is_the_slope_of_all_but_the_first_parts():
    """Those come on the burst that a shaper allows: at once."""
    parts = [(0.0, 100)] * 3 + [(1.0, 100), (2.0, 100), (3.0, 100), (4.0, 100), (5.0, 100)]
    assert slope_bps(parts) == pytest.approx(8 * 100 / 1.0)
    assert slope_bps(parts[:1]) == 0.0
    assert slope_bps([(1.0, 100)] * 8) > 1e8  # All at once: faster than we can tell.


def test_networks_that_hand_over_several_parts_at_once_do_not_fool_it():
    """64 parts of 16 KiB over 100 Mbit/s in pieces of 65160 bytes, and what is left."""
    size, piece, rate = PROBE_BYTES, 65160, 100e6
    pieces = [*range(20_000, size, piece), size]
    arrivals = [
        next(each for each in pieces if each >= part) * 8 / rate for part in range(16384, size + 1, 16384)
    ]
    assert slope_bps([(at_s, 16384) for at_s in arrivals]) == pytest.approx(rate, rel=0.03)


def test_what_a_busy_receiver_reads_at_once_is_not_the_rate():
    """Parts as two busy cores saw them, over 1 Gbit/s: the slope alone told 12 Gbit/s."""
    late = [(0.0, 16384), *((0.0105 + 1e-5 * index, 16384) for index in range(63))]
    assert slope_bps(late) > 10e9 and rate_bps(late) < 1e9
    steady = [(1.3e-4 * index, 16384) for index in range(64)]
    assert rate_bps(steady) == pytest.approx(slope_bps(steady))
    burst = [(1e-5 * min(index, 8) + 1.3e-4 * max(index - 8, 0), 16384) for index in range(64)]
    assert rate_bps(burst) == slope_bps(burst), "the burst of a shaper does not count"


def test_a_busy_receiver_is_not_taken_for_slow_memory():
    """A first probe of 101 Mbit/s was the only one, between two processes of one machine."""
    prober = Prober("m", "in-band", AddressBook())
    prober.want("x", 0.0)

    def probed(seconds: float, at_s: float) -> list[Effect]:
        told: list[Effect] = []
        for index in range(16):
            told += prober.handle(
                Received("x", Probe(index=index, count=16), bytes(WIRE_PART_BYTES + 1)),
                at_s + index * seconds,
            )
        return told

    told = [probed(0.005, 0.0), probed(1e-5, 1.0), probed(1e-5, 2.0)]
    rates = [each.message.rate_bps for each in itertools.chain(*told) if isinstance(each, Transmit)]
    assert rates[0] == SLOW_BPS and min(rates[1:]) > 10e9, "both ends know that there are three"
    assert not enough(rates[:1]) and enough(rates)
    for rate in rates:
        told.append(prober.handle(Received("x", ProbeResult(rate_bps=rate)), 3.0))
    assert told[-1] == [Measured("x", max(rates), "probe")]


def test_all_links_are_measured_at_once():
    prober = Prober("m", "in-band", AddressBook())
    for peer in "xy":
        assert prober.handle(Received(peer, ProbeRequest()), 0.0) == [SendProbe(peer)]
    assert prober.want("z", 0.0) == [Transmit("z", ProbeRequest())]
    assert prober.want("z", 0.5) == []
    for index in range(4):
        for peer in "xyz":
            prober.handle(Received(peer, Probe(index=index, count=16), bytes(1000)), 0.5 * index)
    assert prober.closed("x", 2.0) == [Measured("x", pytest.approx(16_000.0), "probe")]
    assert prober.closed("x", 2.0) == []
    assert sorted(prober.sessions) == ["y", "z"]


def test_of_probes_that_take_long_what_has_come_by_then_counts():
    prober, patience_s = Prober("m", "in-band", AddressBook()), PATIENCE_S["in-band"]
    for peer in "xy":
        prober.handle(Received(peer, ProbeRequest()), 0.0)
    for index in range(4):
        prober.handle(Received("y", Probe(index=index, count=16), bytes(1000)), 0.5 * index)
    assert prober.wake_at_s == patience_s
    measured = prober.handle(Tick(), patience_s)
    assert measured == [Measured("x", 0.0, "probe"), Measured("y", pytest.approx(16_000.0), "probe")]
    assert prober.wake_at_s is None


def test_iperf3_may_take_the_longer_the_more_links_are_measured():
    prober, patience_s = Prober("m", "iperf3", AddressBook()), PATIENCE_S["iperf3"]
    for peer in "xy":
        prober.handle(Received(peer, ProbeRequest(kind="iperf3")), 0.0)
    assert prober.handle(Tick(), patience_s) == [Measured("x", 0.0, "iperf3")]
    assert prober.wake_at_s == 2 * patience_s


def test_only_so_many_are_measured_for_those_who_ask():
    prober = Prober("m", "in-band", AddressBook())
    for number in range(MAX_SESSIONS):
        assert prober.handle(Received(f"x{number}", ProbeRequest()), 0.0)
    assert prober.handle(Received("y", ProbeRequest()), 0.0) == []


def test_both_asking_at_once_is_one_measurement():
    probers = {me: Prober(me, "in-band", AddressBook()) for me in "ab"}
    (to_b,), (to_a,) = probers["a"].want("b", 0.0), probers["b"].want("a", 0.0)
    assert probers["a"].handle(Received("b", to_a.message), 0.0) == []
    assert probers["b"].handle(Received("a", to_b.message), 0.0) == [SendProbe("a")]


def test_a_probe_that_is_cut_short_still_tells_something():
    prober = Prober("a", "in-band", AddressBook())
    prober.want("b", 0.0)
    for index in range(4):
        prober.handle(Received("b", Probe(index=index, count=16), bytes(1000)), 0.5 * index)
    assert prober.handle(Tick(), PATIENCE_S["in-band"]) == [Measured("b", pytest.approx(16_000.0), "probe")]


def test_enough_is_known_to_both_ends():
    assert not enough([1e9, 1e9]) and enough([1e9, 1e9, 1e9]) and enough([1e6])


def test_iperf3_measures_both_directions_from_one_end():
    pair = Pair({"a": 1.0, "b": 1.0}, kind="iperf3")
    pair.iperf3 = lambda peer: Iperf3Done(peer, in_bps=95e6, out_bps=480e6)
    pair.want("a")
    assert pair.found == {"a": ("b", 95e6, "iperf3"), "b": ("a", 480e6, "iperf3")}
    assert pair.probes == []


def test_where_iperf3_fails_the_link_is_probed():
    pair = Pair({"a": 100e6, "b": 200e6}, kind="iperf3")
    pair.iperf3 = lambda peer: Iperf3Done(peer, error="no libiperf")
    pair.want("a")
    assert pair.found["a"] == ("b", pytest.approx(100e6), "probe")
    assert pair.found["b"] == ("a", pytest.approx(200e6), "probe")


@pytest.mark.parametrize("asker", ["a", "b"])
def test_where_iperf3_is_not_served_the_link_is_probed_at_once(asker):
    """The asker waited for all of its patience, and then knew nothing."""
    pair = Pair({"a": 100e6, "b": 200e6}, kind="iperf3")
    pair.port = 0
    pair.want(asker)
    assert pair.found == {
        "a": ("b", pytest.approx(100e6), "probe"),
        "b": ("a", pytest.approx(200e6), "probe"),
    }
    assert sorted(pair.probes) == [("a", "b"), ("b", "a")]
    assert not any(prober.sessions for prober in pair.probers.values())


def test_a_server_that_fails_when_the_asker_has_gone_on_in_band_changes_nothing():
    prober = Prober("m", "in-band", AddressBook())
    prober.handle(Received("x", ProbeRequest(kind="iperf3")), 0.0)
    prober.handle(Received("x", ProbeRequest()), 1.0)
    assert prober.handle(Iperf3Serving("x", 0), 1.1) == []
    assert prober.handle(Iperf3Serving("x", 5201), 1.1) == []
    assert prober.wake_at_s == 1.0 + PATIENCE_S["in-band"]


def test_a_peer_that_says_nothing_of_iperf3_is_asked_in_band():
    """So does one with keys: its port would be open to everybody."""
    prober = Prober("a", "iperf3", AddressBook())
    prober.book.reached("b", "b:1", "")
    assert prober.want("b", 0.0) == [Transmit("b", ProbeRequest(kind="iperf3"))]
    late_s = PATIENCE_S["iperf3"]
    assert prober.handle(Tick(), late_s) == [Transmit("b", ProbeRequest(kind="in-band"))]
    assert prober.wake_at_s == late_s + PATIENCE_S["in-band"]
    assert prober.handle(Tick(), prober.wake_at_s) == [Measured("b", 0.0, "probe")]


@pytest.mark.parametrize("why", ["too many are served", "iperf3 does not work"])
def test_an_iperf3_that_cannot_be_served_is_told_at_once(monkeypatch, why):
    if why == "too many are served":
        monkeypatch.setattr(iperf3_probe, "_serving", threading.Semaphore(0))
    silent = partial(subprocess.Popen, [sys.executable, "-c", ""], stdout=subprocess.PIPE, text=True)
    monkeypatch.setattr(iperf3_probe, "_process", lambda *_: silent(start_new_session=True))
    ports = []
    iperf3_probe.serve(ports.append)
    assert ports == [0]


def test_late_words_of_a_measurement_that_is_over_change_nothing():
    prober = Prober("a", "in-band", AddressBook())
    for message in (ProbeResult(rate_bps=1.0), Probe(index=0, count=2), Iperf3Ready(port=1)):
        assert prober.handle(Received("b", message, PART), 0.0) == []


def test_probes_without_payload_tell_nothing():
    prober = Prober("a", "in-band", AddressBook())
    prober.handle(Received("b", ProbeRequest()), 0.0)
    for index in range(2):
        assert prober.handle(Received("b", Probe(index=index, count=2)), 0.1) == []
    prober.handle(Received("b", Probe(index=0, count=2)), 0.1)
    prober.handle(Received("b", Probe(index=0, count=3)), 0.1)
    assert prober.handle(Tick(), PATIENCE_S["in-band"]) == [Measured("b", 0.0, "probe")]


def test_one_peer_starts_one_iperf3():
    prober = Prober("m", "in-band", AddressBook())
    ask = Received("x", ProbeRequest(kind="iperf3"))
    assert prober.handle(ask, 0.0) == [ServeIperf3("x")]
    assert prober.handle(ask, 0.1) == []
    assert prober.handle(Received("x", ProbeRequest()), 0.2) == [SendProbe("x")]
