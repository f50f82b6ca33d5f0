"""`chaosnet.protocols.readings`: rates of links, from what passes anyway."""

import pytest

from chaosnet.protocols.liveness import Liveness
from chaosnet.protocols.readings import STALE_S, Readings

MIB = 1 << 20


@pytest.fixture
def readings():
    liveness = Liveness()
    liveness.opened("b", 0.0)
    return Readings(liveness)


def test_what_was_sent_while_more_waited_makes_a_rate(readings):
    readings.carried({"b": (10 * MIB, 1.0)}, 5.0)
    found = readings.of("b", 7.0)
    assert found.sent_bps == 80 * MIB
    assert found.sent_age_s == 2.0
    assert found.rate_bps == 0


def test_a_rate_is_made_of_what_came_since_the_last(readings):
    readings.carried({"b": (10 * MIB, 1.0)}, 5.0)
    readings.carried({"b": (12 * MIB, 3.0)}, 6.0)
    assert readings.of("b", 6.0).sent_bps == 8 * MIB


def test_noise_is_smoothed_and_a_jump_shows_at_once(readings):
    total, told = 0, []
    for rate_mib in (10, 11, 15, 9, 10, 2, 2):
        total += rate_mib * MIB
        readings.carried({"b": (total, 1.0 + len(told))}, float(len(told)))
        told.append(readings.of("b", 0.0).sent_bps / (8 * MIB))
    assert told == [10, 10.5, 11, 10.5, 10, 2, 2]


def test_too_little_waits_for_more(readings):
    readings.carried({"b": (MIB, 0.04)}, 5.0)
    assert readings.of("b", 5.0).sent_bps == 0
    readings.carried({"b": (2 * MIB, 0.08)}, 6.0)
    assert readings.of("b", 6.0).sent_bps == 8 * 2 * MIB / 0.08


def test_little_in_a_long_time_is_a_slow_link(readings):
    readings.carried({"b": (100_000, 2.0)}, 5.0)
    assert readings.of("b", 5.0).sent_bps == 400_000


def test_a_node_that_is_late_with_the_next_does_not_make_its_link_slow(readings):
    readings.carried({"b": (2 * MIB, 1.0)}, 5.0, {"b": (100 * MIB, 1.0)})
    assert readings.of("b", 5.0).sent_bps == 8 * 100 * MIB
    readings.carried({"b": (4 * MIB, 2.0)}, 6.0, {"b": (180 * MIB, 2.0)})
    assert readings.samples["b"][-1] == 8 * 80 * MIB


def test_what_waits_for_round_trips_does_not_make_its_link_slow(readings):
    readings.carried({"b": (10 * MIB, 1.0)}, 5.0, {"b": (12 * MIB, 30.0)})
    assert readings.of("b", 5.0).sent_bps == 80 * MIB


def test_what_buffers_take_at_once_does_not_make_a_link_fast(readings):
    readings.carried({"b": (2 * MIB, 0.1)}, 5.0, {"b": (4 * MIB, 0.4)})
    assert readings.of("b", 5.0).sent_bps == 80 * MIB


def test_a_burst_that_the_kernel_has_counted_is_no_rate(readings):
    readings.carried({"b": (4 * MIB, 0.2)}, 5.0, {"b": (4 * MIB, 0.005)})
    assert readings.of("b", 5.0).sent_bps == 8 * 4 * MIB / 0.2


def test_what_the_kernel_says_of_another_connection_is_counted_from_its_beginning(readings):
    readings.carried({"b": (10 * MIB, 1.0)}, 5.0, {"b": (10 * MIB, 1.0)})
    readings.carried({"b": (14 * MIB, 2.0)}, 6.0, {"b": (4 * MIB, 1.0)})
    assert readings.samples["b"][-1] == 8 * 14 * MIB / 2.0


def test_another_connection_is_counted_from_its_beginning(readings):
    readings.carried({"b": (10 * MIB, 1.0)}, 5.0)
    readings.carried({"b": (4 * MIB, 2.0)}, 6.0)
    assert readings.of("b", 6.0).sent_bps == 16 * MIB  # Five times slower than before.


def test_a_link_that_has_closed_says_nothing(readings):
    readings.carried({"b": (10 * MIB, 1.0), "stranger": (10 * MIB, 1.0)}, 5.0)
    readings.closed("b")
    assert readings.of("b", 5.0).sent_bps == 0
    assert readings.sent == readings.samples == readings.counted == {}


def test_what_a_start_has_measured_is_measured_anew_soon_and_then_ever_more_seldom(readings):
    readings.measured("b", 1e6, "probe", 0.0)
    asked_s = [second for second in range(1500) if readings.take_stale(["b"], float(second))]
    assert asked_s == [21, 82, 263, 564, 865, 1166, 1467]
    readings.closed("b")
    readings.measured("b", 1e6, "probe", 1500.0)
    assert readings.take_stale(["b"], 1521.0) == ["b"]


def test_a_link_is_stale_when_neither_direction_was_measured_for_long(readings):
    readings.measured("b", 1e6, "probe", 0.0)
    readings.asked["b"] = 9
    assert readings.take_stale(["b"], STALE_S) == []
    assert readings.take_stale(["b"], STALE_S + 1) == ["b"]
    assert readings.take_stale(["b"], 2 * STALE_S) == [], "it was to be measured, and that may have failed"
    readings.carried({"b": (10 * MIB, 1.0)}, 2 * STALE_S)
    assert readings.take_stale(["b"], 2 * STALE_S + 2) == []
    assert readings.take_stale(["b"], 3 * STALE_S + 1) == ["b"]


def test_a_link_that_was_never_measured_is_not_measured_again(readings):
    assert readings.take_stale(["b"], 10 * STALE_S) == []
