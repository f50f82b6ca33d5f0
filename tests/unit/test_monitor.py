"""`chaosnet.scheduler.monitor`: the table of Sec. IV-A, as each node keeps it."""

import pytest

from chaosnet.protocols.messages import LinkReading, Member, Notice, View
from chaosnet.scheduler.monitor import GONE_KEPT, ClusterMonitor

MEMBERS = {name: Member(id=name, addresses=(f"{name}:1",)) for name in "abc"}


def view(members, observers="", seq=1, joined_step=0):
    told = [Member(id=name, addresses=(f"{name}:1",), joined_step=joined_step) for name in members]
    return View(
        term=1,
        seq=seq,
        scheduler="a",
        members=tuple(told),
        observers=tuple(MEMBERS[name] for name in observers),
        links=(("a", "b"),),
    )


def states(monitor):
    return {name: record.state for name, record in monitor.nodes.items()}


def notice(kind, node, step=10):
    return Notice(kind=kind, node=node, detail="", step=step, time_s=0.0)


def test_joiners_are_on_standby_and_members_active():
    monitor = ClusterMonitor()
    monitor.entered(view("ab", "c"))
    assert states(monitor) == {"a": "active", "b": "active", "c": "standby"}
    monitor.entered(view("abc", seq=2))
    assert states(monitor) == dict.fromkeys("abc", "active")


def test_who_leaves_has_left():
    monitor = ClusterMonitor()
    monitor.entered(view("abc"))
    monitor.entered(view("ab", seq=2))
    monitor.notice(notice("left", "c"))
    assert states(monitor)["c"] == "left"


def test_of_those_that_are_out_the_first_to_leave_are_forgotten():
    """It was the first to come: a member of long standing was forgotten as soon as it had left."""
    monitor = ClusterMonitor()
    monitor.entered(view("ab"))
    for index in range(GONE_KEPT):
        monitor.entered(view(["a", "b", f"j{index}"], seq=2 + 2 * index))
        monitor.entered(view("ab", seq=3 + 2 * index))
    monitor.entered(view("a", seq=1000))
    assert "b" in monitor.nodes and "j0" not in monitor.nodes
    assert len(monitor.nodes) == 1 + GONE_KEPT


def test_who_failed_is_known_whether_the_notice_comes_before_the_view_or_after_it():
    for before in (True, False):
        monitor = ClusterMonitor()
        monitor.entered(view("abc"))
        if before:
            monitor.notice(notice("node-failure", "c"))
        monitor.entered(view("ab", seq=2))
        if not before:
            monitor.notice(notice("node-failure", "c"))
        assert states(monitor)["c"] == "failed"
        monitor.entered(view("ab", seq=3))
        assert states(monitor)["c"] == "failed"


def test_a_late_notice_of_a_failure_does_not_count_against_the_next_life():
    monitor = ClusterMonitor()
    monitor.entered(view("abc", joined_step=20))
    monitor.notice(notice("node-failure", "c", step=10))
    assert states(monitor)["c"] == "active"


def reading(rate_bps=0.0, age_s=0.0, source="probe", rtt_s=0.0):
    found = {"rate_bps": rate_bps, "rate_age_s": age_s, "rate_source": source} if rate_bps else {}
    return LinkReading(rtt_min_s=rtt_s, rtt_median_s=rtt_s, **found)


@pytest.fixture
def measured():
    """b gets 100 Mbit/s from a, and a 20 from b."""
    monitor = ClusterMonitor()
    monitor.entered(view("ab"))
    monitor.reading("b", "a", reading(100e6, age_s=2.0, rtt_s=0.004), 10.0)
    monitor.reading("a", "b", reading(20e6, source="replication"), 10.0)
    return monitor


def test_rates_are_kept_by_direction_with_age_and_source(measured):
    (row,) = measured.link_rows(now_s=15.0)
    assert (row.a, row.b) == ("a", "b")
    assert (row.rate_mbit, row.rate_age_s, row.rate_source) == (100.0, 7.0, "probe")
    assert (row.rate_back_mbit, row.rate_back_age_s, row.rate_back_source) == (
        20.0,
        5.0,
        "replication",
    )
    assert (row.rtt_min_ms, row.rtt_median_ms) == (4.0, 4.0)


def test_an_all_reduce_is_as_fast_as_the_slower_direction_and_a_join_as_that_to_the_joiner(measured):
    graph = measured.graph("ab", [("a", "b")])
    assert graph.edges["a", "b"] == {"rate_bps": 20e6, "rtt_s": 0.004}
    assert measured.sources("b", ["a"])["a"].seconds_per_byte == pytest.approx(8 / 100e6)
    assert measured.sources("a", ["b"])["b"].seconds_per_byte == pytest.approx(8 / 20e6)


def test_planners_of_pipelines_get_the_rate_of_each_direction(measured):
    assert measured.rates_bps() == {("a", "b"): 100e6, ("b", "a"): 20e6}


def test_what_was_not_measured_this_time_stays(measured):
    measured.reading("b", "a", reading(rtt_s=0.001), 20.0)
    (row,) = measured.link_rows(now_s=20.0)
    assert (row.rate_mbit, row.rate_age_s, row.rtt_min_ms) == (100.0, 12.0, 1.0)


def test_of_two_ends_that_have_measured_a_direction_the_later_counts(measured):
    measured.reading("a", "b", LinkReading(sent_bps=50e6, sent_age_s=1.0), 20.0)
    row = measured.link_rows(20.0)[0]
    assert (row.rate_mbit, row.rate_source, row.rate_age_s) == (50.0, "traffic", 1.0)
    assert row.rate_back_mbit == 20.0
    measured.reading("b", "a", reading(100e6, age_s=5.0), 20.0)
    assert measured.link_rows(20.0)[0].rate_mbit == 50.0
