"""`chaosnet.protocols.join_news`, and the ends of a joiner's patience: nothing goes on in silence, or for ever."""

from types import SimpleNamespace

from test_scale_out import VIEW, A, B, Bench

from chaosnet.node.agent.node import Phase
from chaosnet.node.agent.reports import Reports
from chaosnet.protocols.asking import (
    ASK_EVERY_S,
    MAX_EMPTY_PULLS,
    MAX_PLANLESS,
    MAX_PULLS_ALIKE,
    MAX_UNUSABLE,
    JoinState,
    Otherwise,
)
from chaosnet.protocols.effects import JoinFailed, Parked, Progress
from chaosnet.protocols.events import DialFailed, ManifestKnown, ReadingsTaken, Received, StateRejected, Tick
from chaosnet.protocols.join_news import JoinNews, left_s
from chaosnet.protocols.messages import Answer, NoSnapshot, ReplicationPlan


def lines(news, until_s):
    """What is told by when, with a tick a second."""
    told = {s: news.tick(float(s)) for s in range(until_s)}
    return {s: each[0].text for s, each in told.items() if each}


def test_knocking_is_told_at_growing_distances_with_what_each_seed_said():
    bench = Bench(patience_s=60.0)
    bench.handle(Tick())
    bench.handle(DialFailed("a:1", "refused"))
    told = lines(JoinNews(bench.joiner, 0.0), 100)
    assert list(told) == [2, 5, 10, 20, 40, 80]
    assert told[20] == "still knocking at a:1 (refused); x:1 (no answer); gives up in 40 s"
    bench.joiner.asking.otherwise = Otherwise.FOUND
    assert lines(JoinNews(bench.joiner, 0.0), 3)[2].endswith("founds a cluster in 58 s")


def test_measuring_and_pulling_are_told_with_whom_and_how_much():
    bench = Bench()
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    assert lines(JoinNews(bench.joiner, 0.0), 3) == {2: "opens and measures the links to a, b"}
    bench = Bench()
    bench.to_fetching()
    bench.handle(ManifestKnown(7, 540_000_000, 1))
    bench.joiner.replication.stored_bytes = 120_000_000
    told = lines(JoinNews(bench.joiner, 0.0), 3)
    assert told == {2: "pulls the state: 120 of 540 MB, 60.0 MB/s from a, about 7 s left"}


def test_the_rate_of_a_pull_is_reckoned_from_its_begin():
    bench = Bench()
    news = JoinNews(bench.joiner, -3.0)  # For so long it has asked, linked and waited.
    bench.to_fetching()
    news.note(0.0)
    bench.handle(ManifestKnown(7, 540_000_000, 1))
    bench.joiner.replication.stored_bytes = 120_000_000
    assert news.tick(2.0)[0].text == "pulls the state: 120 of 540 MB, 60.0 MB/s from a, about 7 s left"


def test_a_joiner_that_pulls_reports_how_much_it_has_of_whom():
    bench = Bench()
    bench.to_fetching()
    joiner = bench.joiner
    node = SimpleNamespace(
        me="j",
        phase=Phase.JOINING,
        joiner=joiner,
        is_joining=True,
        relay=bench.relay,
        readings=SimpleNamespace(carried=lambda *told: None),
    )
    reports = Reports(node)
    reports.on_readings(ReadingsTaken(0.0, 0.0, 100, (1, 100), 5.0, 7, -1.0, 0, 0, {}), 0.0)
    assert reports.of_pull() == [], "it does not know yet how much there is"
    bench.handle(ManifestKnown(7, 540_000_000, 1))
    joiner.replication.sources["a"].bytes = 120_000_000
    [told] = reports.of_pull()
    report = told.message.body
    assert (report.pulls_bytes, report.pulled, report.pulls_state) == (540_000_000, {"a": 120_000_000}, True)
    node.phase = Phase.MEMBER
    assert reports.of_pull() == [], "members report anyway"


def test_a_cluster_that_waits_tells_who_asks():
    bench = Bench()
    bench.handle(Tick())
    bench.open("a")
    waits = Received("a", Answer(ok=False, text="the cluster waits: only 1 of 2 members can be reached"))
    [told] = bench.handle(waits)
    assert told == Progress("the cluster answers: a: the cluster waits: only 1 of 2 members can be reached")
    assert bench.handle(waits) == []
    assert bench.joiner.asking.cluster_said


def test_who_is_told_that_the_cluster_waits_says_how_long_it_asks_on():
    """It said "gives up in 0 s" for a quarter of a minute."""
    bench = Bench(patience_s=10.0)
    bench.handle(Tick())
    bench.open("a")
    asking, told, gave_up_s = bench.joiner.asking, {}, None
    while gave_up_s is None and bench.now_s < 60.0:
        bench.handle(Received("a", Answer(ok=False, text="it waits")))
        told[bench.now_s] = bench.now_s + left_s(asking, bench.now_s)
        if any(isinstance(each, JoinFailed) for each in bench.after(0.5)):
            gave_up_s = bench.now_s
    assert gave_up_s == 27.0
    assert set(told.values()) == {gave_up_s}


NO_COPY = Received("a", NoSnapshot(step=7))


def pull(bench, empty=True, ends=NO_COPY):
    """One attempt, which ends so: as is, as its only source has no copy."""
    if bench.joiner.state is JoinState.ASKED:
        bench.plan(A)
        bench.examined("a", 1e6)
    plan = ReplicationPlan(view=VIEW, step=7, shard_bytes=100, shards_by_source={"a": 1})
    bench.handle(Received("a", plan))
    if not empty:
        bench.joiner.replication.stored_bytes = 10
    return bench.handle(ends)


def test_a_state_that_cannot_be_pulled_is_given_up_with_the_reason():
    bench = Bench()
    bench.to_waiting()
    for _ in range(MAX_EMPTY_PULLS - 1):
        assert not any(isinstance(effect, JoinFailed) for effect in pull(bench))
    [failed] = [effect for effect in pull(bench) if isinstance(effect, JoinFailed)]
    assert failed.reason == (
        "12 attempts in a row to pull the state have ended so: "
        "no neighbour is left to pull the state from (the last was a: it has no copy of the state)"
    )


def test_as_long_as_bytes_come_there_is_more_patience():
    bench = Bench()
    bench.to_waiting()
    for _ in range(MAX_PULLS_ALIKE - 1):
        assert not any(isinstance(effect, JoinFailed) for effect in pull(bench, empty=False))
    assert any(isinstance(effect, JoinFailed) for effect in pull(bench, empty=False))


def test_a_state_that_cannot_be_loaded_is_not_pulled_for_ever():
    bench = Bench()
    bench.to_waiting()
    for _ in range(MAX_UNUSABLE - 1):
        effects = pull(bench, empty=False, ends=StateRejected("no such folder"))
        assert not any(isinstance(effect, JoinFailed) for effect in effects)
    *_, failed = pull(bench, empty=False, ends=StateRejected("no such folder"))
    assert failed == JoinFailed(
        "3 attempts in a row to pull the state have ended so: the state was unusable (no such folder)"
    )


def test_who_keeps_trying_says_so_and_rests_before_it_does():
    bench = Bench()
    bench.joiner.asking.otherwise = Otherwise.KEEP_TRYING
    bench.to_waiting()
    for _ in range(MAX_EMPTY_PULLS):
        effects = pull(bench)
    assert any(isinstance(effect, Parked) for effect in effects)
    assert bench.joiner.state is JoinState.ASKED
    assert bench.after(ASK_EVERY_S) == []
    assert bench.after(8.0)


def test_links_that_are_reported_again_and_again_without_a_plan_are_given_up():
    bench = Bench()
    bench.to_waiting()
    for count in range(MAX_PLANLESS):
        effects = bench.after(ASK_EVERY_S)
        if count < MAX_PLANLESS - 1:
            bench.plan(A)
            bench.examined("a", 1e6)
    assert effects == [JoinFailed("40 times no plan came (no answer)")]


def test_the_time_of_each_phase_is_kept_also_if_the_joiner_comes_into_it_twice():
    bench = Bench()
    news = JoinNews(bench.joiner, 0.0)
    for at_s, state in (
        (1.0, JoinState.ASKED),
        (1.5, JoinState.LINKING),
        (2.0, JoinState.LINKING),
        (4.0, JoinState.ASKED),
    ):
        bench.joiner.standing.go(state)
        news.note(at_s)
    bench.joiner.standing.go(JoinState.LINKING)
    news.note(4.25)
    assert news.took_s == {"knocking": 1.0, "asked": 0.75, "linking": 2.5}
