"""`chaosnet.scheduler.monitor`: the table of Sec. IV-A, as each node keeps it."""

from chaosnet.protocols.messages import Member, Notice, View
from chaosnet.scheduler.monitor import ClusterMonitor

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
