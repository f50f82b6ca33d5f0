"""Testbeds with delay, jitter and loss on a kernel with netem: are links what they were set to be?

Runs in the guest that run.sh boots, as root. Times are an emulated machine's, which may run late but never early: so
a delay may not be undercut by more than the clock's grain, and may be exceeded by LATE_MS.
"""

from __future__ import annotations

import json
import os
import sys
import time

from links import Stream, datagrams, namespaces, share, swapped

from chaosnet.netem import LinkSpec, Topology, commands
from chaosnet.netem.commands import queue_ms
from chaosnet.netem.measure import measure
from chaosnet.netem.netns import Netns, has_netem, run, spaces_of
from chaosnet.netem.topology import GOODPUT

NAME = "vm"
EARLY_MS, LATE_MS = 0.1, 4.0
PROGRAMS_LATE_MS = 20.0  # Of a round trip between two programs, on an emulated machine that others share.
SIGMAS = 4.0  # Of what chance decides: a check fails without a reason once in ten thousand runs or so.
WINDOW_S = 4.0  # A machine that stalls for a tenth of a second moves 2.5 % from one such time to the next.
WINDOWS = 6  # Within so many of them Cubic has found a link's rate, from wherever it was.
OVERTAKEN = (
    10  # Of 1000 with order kept: a veth hands on by CPU, and two may be at it. Without, it is some hundreds.
)
LINKS = {
    ("a", "b"): LinkSpec(rate_mbit=100.0, delay_ms=20.0),
    ("b", "c"): LinkSpec(rate_mbit=200.0, delay_ms=50.0),
    ("c", "d"): LinkSpec(rate_mbit=100.0, delay_ms=20.0, jitter_ms=5.0),
    ("d", "e"): LinkSpec(rate_mbit=100.0, delay_ms=10.0, loss_pct=2.0),
    ("a", "e"): LinkSpec(rate_mbit=100.0, rate_back_mbit=50.0),
}
failed: list[str] = []


def check(what: str, found: float, least: float, most: float, unit: str = "") -> None:
    """One row of the table."""
    right = least <= found <= most
    bounds = f"{least:g}" if least == most else f"{least:.4g} to {most:.4g}"
    print(f"{'ok  ' if right else 'FAIL'} {what:<58} {found:>9.4g} {unit:<7} {bounds}", flush=True)
    if not right:
        failed.append(what)


def check_in_force(what: str, testbed: Netns) -> None:
    """Does tc tell what the topology does? Counts ends of links that differ."""
    wrong = 0
    for row in testbed.in_force():
        spec = testbed.topology.spec(row["link"])
        wanted = (spec.rate_from(row["from"] == row["link"][0]), spec.delay_ms, spec.jitter_ms, spec.loss_pct)
        found = tuple(round(row[each], 3) for each in ("rate_mbit", "delay_ms", "jitter_ms", "loss_pct"))
        if found != wanted or row["cut"]:
            wrong += 1
            print(f"     {row['from']} of {row['link']}: {found}, not {wanted}, cut: {row['cut']}")
    check(f"{what}: ends whose `tc -j` differs", wrong, 0, 0)


def send(testbed: Netns, a: str, b: str, count: int, every_s: float) -> list[tuple[int, float]]:
    """Datagrams from a to b over the link between them."""
    spaces = (commands.namespace(testbed.name, each) for each in (a, b))
    return datagrams(*spaces, commands.own_address(testbed.topology, b), count, every_s)


def stream(testbed: Netns, a: str, b: str, connections: int = 1) -> Stream:
    spaces = (commands.namespace(testbed.name, each) for each in (a, b))
    return Stream(*spaces, commands.own_address(testbed.topology, b), connections)


def check_delay(testbed: Netns, a: str, b: str) -> None:
    """The median, and that nothing is early, lost or overtaken."""
    delay_ms = testbed.topology.spec_from(a, b).delay_ms
    found = send(testbed, a, b, 100, 0.01)
    times_ms = [ms for _, ms in found]
    check(f"{a} to {b}: least delay", min(times_ms), delay_ms - EARLY_MS, delay_ms + LATE_MS, "ms")
    check(f"{a} to {b}: median delay", share(times_ms, 0.5), delay_ms - EARLY_MS, delay_ms + LATE_MS, "ms")
    check(f"{a} to {b}: lost of 100", 100 - len(found), 0, 0)


def check_full_links(testbed: Netns) -> None:
    """Both ways of the longest; by two connections, as Linux's default window is hardly enough for one."""
    for a, b in (("b", "c"), ("c", "b")):
        flow = stream(testbed, a, b, connections=2)
        check_rate(f"{a} to {b}", flow, testbed.topology.spec_from(a, b))
        flow.close()


def check_measure(testbed: Netns) -> None:
    """`chaosnet testbed measure`: an average of one connection, which a loss or a late window may hold up."""
    for row in measure(testbed, testbed.topology, WINDOW_S, [("a", "b"), ("b", "c")]):
        way, control = f"measure {row['from']} to {row['to']}", row["congestion_control"]
        least, most = 0.7 * GOODPUT * row["set_mbit"], 1.05 * GOODPUT * row["set_mbit"]
        check(f"{way}: rate ({control})", row["mbit"], least, most, "Mbit/s")
        set_ms = row["set_rtt_ms"]
        check(f"{way}: round trip", row["rtt_ms"], set_ms - EARLY_MS, set_ms + PROGRAMS_LATE_MS, "ms")


def check_jitter(testbed: Netns) -> None:
    """Its spread, measured where packets are far apart; and the order of those that are not."""
    spec, count = LINKS["c", "d"], 300
    for a, b in (("c", "d"), ("d", "c")):
        times_ms = [ms for _, ms in send(testbed, a, b, count, 0.03)]
        spread_ms = (share(times_ms, 0.841) - share(times_ms, 0.159)) / 2
        # Quantiles of a normal distribution: errors of 1.25 (median) and 1.07 (this spread) sigma / sqrt(count).
        chance_ms = SIGMAS * 1.25 * spec.jitter_ms / count**0.5
        least, most = spec.delay_ms - chance_ms, spec.delay_ms + chance_ms + LATE_MS
        check(f"{a} to {b}: median delay with jitter", share(times_ms, 0.5), least, most, "ms")
        least, most = spec.jitter_ms - chance_ms, spec.jitter_ms + chance_ms
        check(f"{a} to {b}: half of what the middle 68 % span", spread_ms, least, most, "ms")
    numbers = [number for number, _ in send(testbed, "c", "d", 1000, 0.001)]
    check("c to d, every 1 ms: overtaken of 1000", swapped(numbers), 0, OVERTAKEN)


def check_loss(testbed: Netns) -> None:
    count, p = 3000, LINKS["d", "e"].loss_pct / 100
    chance = SIGMAS * (count * p * (1 - p)) ** 0.5
    for a, b in (("d", "e"), ("e", "d")):
        lost = count - len(send(testbed, a, b, count, 0.001))
        check(f"{a} to {b}: lost of {count}", lost, count * p - chance, count * p + chance)


def check_rate(what: str, flow: Stream, spec: LinkSpec) -> None:
    """Does what TCP sends come to fill the link, within 5 %?"""
    least, most = 0.95 * GOODPUT * spec.rate_mbit, 1.05 * GOODPUT * spec.rate_mbit
    time.sleep(0.5)  # What was on the way.
    check(f"{what}: rate", flow.mbit_once(least, WINDOWS, WINDOW_S), least, most, "Mbit/s")


def check_change_cut_and_heal(testbed: Netns) -> None:
    """All under one TCP connection from a to b."""
    link = ("a", "b")
    before = testbed.topology.spec(link)
    flow = stream(testbed, *link)
    check_rate("a to b", flow, before)
    late_ms = share([ms for _, ms in send(testbed, *link, 150, 0.02)], 0.5)
    # The queue is longer by that.
    burst_ms = commands.burst_bytes(before.rate_mbit) * 8e-3 / before.rate_mbit
    longest_ms = before.delay_ms + queue_ms(before) + burst_ms
    check("a to b, full: median delay", late_ms, before.delay_ms, longest_ms + LATE_MS, "ms")
    for spec in (LinkSpec(rate_mbit=50.0, delay_ms=5.0), LinkSpec(rate_mbit=80.0, delay_ms=30.0)):
        testbed.change({link: spec})
        check_in_force(f"changed to {spec.rate_mbit:g} Mbit/s, {spec.delay_ms:g} ms", testbed)
        check_rate("a to b: the same connection", flow, spec)
    testbed.cut(link)
    time.sleep(0.2)
    check("a to b, cut: what passes", flow.mbit(0.5), 0, 0, "Mbit/s")
    check("a to b, cut: datagrams that pass, of 20", len(send(testbed, *link, 20, 0.01)), 0, 0)
    check("b to a, cut: datagrams that pass, of 20", len(send(testbed, *link[::-1], 20, 0.01)), 0, 0)
    check("ends of links that in_force calls cut", sum(row["cut"] for row in testbed.in_force()), 2, 2)
    testbed.heal(link)
    check_in_force("healed", testbed)
    check_rate("a to b, healed: the same connection", flow, testbed.topology.spec(link))
    flow.close()
    testbed.change({link: before})


def check_delay_that_comes_and_goes() -> None:
    """A testbed made without netem gets a delay, and loses it by the hand of a later process."""
    plain, slow = Topology({("a", "b"): LinkSpec(100.0)}), LinkSpec(100.0, delay_ms=15.0)
    testbed = Netns(NAME, plain)
    testbed.up(plain)
    flow = stream(testbed, "a", "b")
    testbed.change({("a", "b"): slow})
    check_rate("delay added: the same connection", flow, slow)
    flow.close()
    check_in_force("delay added", testbed)
    check_delay(testbed, "a", "b")
    later = Netns(NAME, Topology({("a", "b"): slow}))
    later.cut(("a", "b"))
    later.change({("a", "b"): LinkSpec(50.0)})
    later = Netns(NAME, Topology({("a", "b"): LinkSpec(50.0)}))
    later.change({("a", "b"): LinkSpec(100.0)})
    check_in_force("delay removed", later)
    check_delay(later, "b", "a")
    later.down()


def main() -> int:
    before = (namespaces(), run(("ip", "-j", "link")))
    print(f"Linux {os.uname().release}, {run(('tc', '-V')).strip()}")
    print(f"     {'check':<58} {'found':>9} {'':<7} expected")
    check("has_netem()", has_netem(), True, True)
    topology = Topology(LINKS)
    testbed = Netns(NAME, topology)
    testbed.up(topology)
    check_in_force("up", testbed)
    for a, b in (("a", "b"), ("b", "a"), ("b", "c"), ("c", "b"), ("e", "a")):
        check_delay(testbed, a, b)
    check_jitter(testbed)
    check_loss(testbed)
    check_change_cut_and_heal(testbed)
    check_full_links(testbed)
    check_measure(testbed)
    testbed.down()
    check_delay_that_comes_and_goes()
    left = len(spaces_of("chaos-")) + ((namespaces(), run(("ip", "-j", "link"))) != before)
    check("what is left after down", left, 0, 0)
    print(json.dumps({"failed": failed}))
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
