"""`chaosnet.protocols.waiting` and `chaosnet.scheduler.waits`: whom all wait for."""

import msgspec
from statuses import STATUS

from chaosnet.protocols.effects import Happened
from chaosnet.protocols.messages import Lack, Member, Notice, Report, View
from chaosnet.protocols.status import WaitRow
from chaosnet.protocols.waiting import FIRST_S, LEAST_S, StepClock
from chaosnet.scheduler.monitor import ClusterMonitor
from chaosnet.scheduler.waits import Wait, Waits
from chaosnet.terminal import tables

VIEW = View(term=1, seq=1, scheduler="a", members=tuple(Member(id=name) for name in "abc"))


def clock_with(step_s, steps=5):
    clock = StepClock()
    clock.begin(0.0)
    for index in range(1, steps + 1):
        clock.complete(index * step_s)
    return clock


class Bench:
    """A scheduler's monitor that is told of all members once a second; step 5 began at `began_s`."""

    def __init__(self, step_s=0.1):
        self.clock, self.waits, self.monitor = clock_with(step_s), Waits(), ClusterMonitor()
        self.monitor.entered(VIEW)
        self.began_s = 5 * step_s

    def after(self, seconds, **by_node):
        now_s = self.began_s + seconds
        for node in "abc":
            fields = by_node.get(node, {"waits_s": seconds})
            if fields is None:
                continue  # Nothing comes from it.
            self.monitor.report(Report(node=node, step=5, **fields), now_s)
        return self.waits.tick(VIEW, 5, self.clock, self.monitor, now_s)


def test_a_wait_is_told_after_twice_the_usual_step_and_two_seconds_and_then_at_growing_distances():
    bench = Bench()
    told = {s: bench.after(s, b={"idle_s": s}) for s in range(1, 40)}
    assert {s for s in told if told[s]} == {2, 4, 8, 16, 32}
    assert told[4] == [Happened("waits for", "b", "4 s so far: its script has not called update()", 5)]
    assert bench.waits.completed(6, bench.began_s + 39.0) == [
        Happened("waited for", "b", "39 s; going on", 6)
    ]
    assert bench.waits.completed(7, bench.began_s + 39.1) == []


def test_slow_steps_are_no_wait_and_neither_is_one_in_which_all_compute():
    bench = Bench(step_s=20.0)
    assert not any(bench.after(s, b={"idle_s": s}) for s in range(1, 40))
    assert bench.after(41, b={"idle_s": 41})
    bench = Bench()
    assert not any(bench.after(s, **{node: {"idle_s": s} for node in "abc"}) for s in range(1, 40))


def test_before_any_step_is_known_there_is_more_patience():
    clock = StepClock()
    assert clock.patience_s == FIRST_S > LEAST_S
    clock.begin(0.0)
    clock.complete(0.1)
    assert clock.patience_s == LEAST_S


def test_several_are_named_and_who_pulls_the_state_is_not_blamed():
    bench = Bench()
    [told] = bench.after(3, b={"idle_s": 3}, c={"idle_s": 3})
    assert (told.node, told.detail) == ("b, c", "3 s so far: their scripts have not called update()")
    bench = Bench()
    [told] = bench.after(3, c={"idle_s": 3, "pulls_state": True})
    assert told.detail == "3 s so far: it pulls the state"
    [told] = Bench().after(3, b={"idle_s": 3}, c={"idle_s": 3, "pulls_state": True})
    assert (told.node, told.detail) == ("c", "3 s so far: it pulls the state"), "b's script waits for c"


def test_of_who_is_stopped_or_cut_off_it_is_told_that_nothing_comes():
    bench = Bench()
    assert not bench.after(1, b={"idle_s": 1})
    told = {s: bench.after(s, b=None) for s in range(2, 6)}
    assert told[2][0].detail == "2 s so far: its script has not called update()", "it might be late"
    assert told[4] == [Happened("waits for", "b", "4 s so far: nothing has come from it for 3 s", 5)]
    bench = Bench()
    told = {s: bench.after(s, **({"b": None, "c": None} if s > 1 else {})) for s in range(1, 5)}
    assert told[4] == [Happened("waits for", "b, c", "4 s so far: nothing has come from them for 3 s", 5)]


def test_a_scheduler_that_was_stopped_blames_nobody_for_what_it_has_not_read_yet():
    bench = Bench()
    assert not bench.after(1, b={"idle_s": 1})
    [told] = bench.after(11, b=None, c=None)
    assert told.detail == "11 s so far: its script has not called update()"


def test_once_all_have_called_it_the_link_is_named_over_which_chunks_come():
    bench = Bench()
    lacks = {"b": {"waits_s": 4, "lacks": (Lack(peer="c", came=12, of=40, up=True),)},
             "a": {"waits_s": 4, "lacks": (Lack(peer="b", came=30, of=40, up=True),)},
             "c": {"waits_s": 4, "lacks": (Lack(peer="b", came=0, of=40, up=False),)}}  # fmt: skip
    [told] = bench.after(4, **lacks)
    assert told.node == "c - b"
    assert "chunks from c are on the way over this link (parts of the sum: 12 of 40 here)" in told.detail


def test_who_was_lost_in_the_step_is_not_waited_for():
    bench = Bench()
    [told] = bench.after(4, b={"waits_s": 4, "lacks": (Lack(peer="lost", came=0, of=40, up=True),)})
    assert told.node == "the sum"


def test_a_rate_that_was_measured_before_the_wait_decays():
    clock = clock_with(0.5)
    assert clock.slowed(2.5 + 1.9) == 1.0
    assert clock.slowed(2.5 + 25.0) == 0.5 / 25.0


def test_a_step_that_waits_for_a_joiner_to_fetch_the_state_is_not_usual():
    clock = clock_with(0.5)
    clock.is_usual = False
    clock.complete(60.0)
    clock.complete(60.5)
    assert clock.usual_s == 0.5 and max(clock.took_s) == 0.5


def test_status_shows_who_is_waited_for_and_for_how_long():
    bench = Bench()
    bench.after(25, b={"idle_s": 25})
    waiting = bench.waits.row(bench.began_s + 25)
    assert waiting == WaitRow(whom=("b",), seconds=25.0, why="its script has not called update()")
    status = msgspec.structs.replace(STATUS, members=bench.monitor.member_rows(30.0), waiting=waiting)
    assert "waits for b, 25 s: its script has not called update()" in tables.headline(status).plain
    cells = [str(row[1]) for row in tables.members(status).rows]
    assert cells == ["scheduler", "idle 25 s", "worker"]


def test_the_names_of_three_nodes_fit_a_notice_however_long_they_are():
    wait = Wait(tuple(letter * 64 for letter in "abcd"), 0.0, "")
    notice = Notice(kind="waits", node=wait.names, detail="", step=1, time_s=0.0)
    assert msgspec.convert(msgspec.to_builtins(notice), Notice) == notice  # As whoever hears it checks.
