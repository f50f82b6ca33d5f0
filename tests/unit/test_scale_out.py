"""`chaosnet.protocols.scale_out`: the joiner's half of Fig. 4a."""

import pytest
from msgspec.structs import replace

from chaosnet.protocols.addresses import AddressBook
from chaosnet.protocols.asking import ASK_EVERY_S, HERE, KNOCK_EVERY_S, MAX_UNANSWERED, JoinState, Otherwise
from chaosnet.protocols.effects import (
    Dial,
    DiscardState,
    Happened,
    JoinFailed,
    MeasureLink,
    StateWhole,
    Transmit,
)
from chaosnet.protocols.events import (
    ITSELF,
    BacklogFull,
    CaughtUp,
    DialFailed,
    LinkMeasured,
    ManifestKnown,
    PeerClosed,
    PeerOpened,
    Received,
    ShardStored,
    StateRejected,
    Tick,
)
from chaosnet.protocols.messages import (
    Answer,
    DialBack,
    DialBackReply,
    Envelope,
    LinkReading,
    Member,
    NegotiationPlan,
    NeighborsReady,
    ReplicationPlan,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
    View,
)
from chaosnet.protocols.relay import Relay
from chaosnet.protocols.replication import MIN_PIECE_BYTES
from chaosnet.protocols.scale_out import LINK_PATIENCE_S, Joiner

REQUEST = ScaleOutRequest(node="j", addresses=("j:1",))
A, B = Member(id="a", addresses=("a:1",)), Member(id="b", addresses=("b:1",))
VIEW = View(term=1, seq=2, scheduler="a", members=(A, B), observers=(Member(id="j", addresses=("j:1",)),))


class Bench:
    """A joiner with its relay; `now_s` moves by hand."""

    def __init__(self, seeds=("a:1", "x:1"), patience_s=20.0, request=REQUEST):
        self.relay, self.now_s, self.waiting_bytes = Relay("j", 0), 0.0, 0
        self.joiner = Joiner(
            self.relay, AddressBook(), seeds, request, patience_s, 0.0,
            is_far_behind=lambda state_bytes: self.waiting_bytes > state_bytes,
        )  # fmt: skip

    def handle(self, event):
        effects = self.joiner.handle(event, self.now_s)
        self.joiner.check_invariants()
        return effects

    def open(self, peer):
        self.relay.opened(peer, client=False)
        return self.handle(PeerOpened(peer, f"{peer}:1"))

    def close(self, peer):
        self.relay.closed(peer)
        return self.handle(PeerClosed(peer, clean=False))

    def after(self, seconds):
        self.now_s += seconds
        return self.handle(Tick())

    def plan(self, *members):
        return self.handle(Received("a", NegotiationPlan(neighbors=members)))

    def examined(self, peer, rate_bps, reached="j:1", reason=""):
        """Its link is measured, and it has tried to dial us."""
        effects = self.handle(LinkMeasured(peer, rate_bps, "probe"))
        return effects + self.handle(Received(peer, DialBackReply(reached=reached, reason=reason)))

    def to_waiting(self):
        self.handle(Tick())
        self.open("a")
        self.plan(A)
        return self.examined("a", 1e6)

    def to_fetching(self, shards=None, step_s=0.0):
        self.to_waiting()
        shards = shards or {"a": 1}
        plan = ReplicationPlan(view=VIEW, step=7, step_s=step_s, shard_bytes=100, shards_by_source=shards)
        return self.handle(Received("a", plan))


@pytest.fixture
def bench():
    return Bench()


def bodies(effects):
    return [
        effect.message.body
        for effect in effects
        if isinstance(effect, Transmit) and isinstance(effect.message, Envelope)
    ]


def test_it_dials_all_seeds_and_again_until_one_answers(bench):
    assert bench.handle(Tick()) == [Dial("a:1"), Dial("x:1")]
    assert bench.after(KNOCK_EVERY_S - 0.1) == []
    assert bench.after(0.1) == [Dial("a:1"), Dial("x:1")]


def test_it_gives_up_when_nobody_answers_and_says_what_each_seed_said():
    bench = Bench(patience_s=5.0)
    bench.handle(Tick())
    bench.handle(DialFailed("a:1", "connection refused"))
    assert bench.after(5.0) == [
        JoinFailed("nobody answers (a:1: connection refused; x:1: no answer; tried for 5 s)")
    ]
    assert bench.joiner.state is JoinState.FAILED


def test_it_gives_up_at_once_if_the_seeds_speak_another_version(bench):
    bench.handle(Tick())
    assert bench.handle(DialFailed("a:1", "the peer speaks protocol version 9", final=True)) == []
    [failed] = bench.handle(DialFailed("x:1", "the peer speaks protocol version 9", final=True))
    assert isinstance(failed, JoinFailed) and failed.lasting


@pytest.mark.parametrize("itself_first", [True, False])
def test_who_asks_itself_and_is_unwanted_elsewhere_hears_why(bench, itself_first):
    bench.handle(Tick())
    events = [DialFailed("a:1", ITSELF), DialFailed("x:1", "it hung up: your name is taken", final=True)]
    first, last = events if itself_first else reversed(events)
    assert bench.handle(first) == []
    assert bench.handle(last) == [JoinFailed("x:1: it hung up: your name is taken", lasting=True)]


def test_who_asks_nobody_but_itself_is_told_so():
    bench = Bench(seeds=("a:1",))
    bench.handle(Tick())
    failed = bench.handle(DialFailed("a:1", ITSELF))
    assert failed == [JoinFailed("a:1: that is this node itself, and no other is named", lasting=True)]


def test_it_asks_whoever_answers_first(bench):
    bench.handle(Tick())
    assert bodies(bench.open("a")) == [replace(REQUEST, linked=("a",))]
    assert bench.joiner.state is JoinState.ASKED


@pytest.mark.parametrize("fails_first", [True, False])
def test_it_goes_on_dialling_seeds_that_were_not_there_when_others_have_answered(bench, fails_first):
    """Or whoever is linked by another joiner asks nobody else for seconds, and misses those that are let in."""
    bench.handle(Tick())
    if fails_first:
        bench.handle(DialFailed("a:1", "connection refused"))
    bench.open("b")
    if not fails_first:
        bench.handle(DialFailed("a:1", "connection refused"))
    for _ in range(2):
        assert bench.after(KNOCK_EVERY_S)[:1] == [Dial("a:1")]
        assert not any(isinstance(each, Dial) for each in bench.after(KNOCK_EVERY_S)), "it is under way"
        bench.handle(DialFailed("a:1", "connection refused"))
    bench.plan(A)
    assert bench.joiner.state is JoinState.LINKING


def test_it_asks_soon_again_until_it_is_heard(bench):
    """Whom it has reached may have had no way to a member yet."""
    bench.handle(Tick())
    bench.open("b")
    assert bodies(bench.after(KNOCK_EVERY_S)) == [replace(REQUEST, linked=("b",))]
    bench.open("c")
    assert bodies(bench.after(KNOCK_EVERY_S)) == 2 * [replace(REQUEST, linked=("b", "c"))]
    bench.handle(Received("m", Answer(ok=False, text="it waits")))
    bench.after(KNOCK_EVERY_S)
    assert bench.after(KNOCK_EVERY_S) == []


def test_who_streams_and_is_dropped_twice_asks_the_cluster_to_wait(bench):
    """A flush drops observers that are behind, which is what a slow link makes of them."""
    asked = []
    for _ in range(2):
        bench.to_fetching()
        [ask] = bodies([each for each in bench.joiner.orphaned("dropped", bench.now_s, goes_on=True)
                        if isinstance(each, Transmit)])  # fmt: skip
        asked.append(ask.blocking)
    assert asked == [False, True]


def test_a_result_that_comes_shows_that_the_cluster_goes_on(bench):
    bench.to_fetching()
    bench.joiner.asking.unanswered = MAX_UNANSWERED
    bench.joiner.goes_on()
    assert not any(isinstance(each, JoinFailed) for each in bench.joiner.orphaned("cut off", bench.now_s))


def test_news_of_later_steps_show_that_the_cluster_goes_on(bench):
    """Who answers may wait itself, as one of many does that join at once. Seen with 24 on two processors."""
    bench.handle(Tick())
    bench.open("a")
    bench.handle(Received("a", Answer(ok=False, text="it waits")))
    for step in range(1, 3 * MAX_UNANSWERED):
        bench.joiner.told(step)
        assert not any(isinstance(each, JoinFailed) for each in bench.after(ASK_EVERY_S))


def test_news_of_the_same_step_do_not(bench):
    bench.handle(Tick())
    bench.open("a")
    for _ in range(2 * MAX_UNANSWERED):
        bench.joiner.told(5)
        failed = bench.after(ASK_EVERY_S)
        if any(isinstance(each, JoinFailed) for each in failed):
            return
    pytest.fail("it asks for ever")


def test_a_plan_shows_that_the_cluster_goes_on(bench):
    """Seeds 30750 and 53473 of links with rates: it came as an answer to the last of eight requests."""
    bench.handle(Tick())
    bench.open("a")
    bench.joiner.asking.unanswered = MAX_UNANSWERED
    bench.plan(A)
    assert bench.joiner.asking.unanswered == 0


def test_a_refusal_is_final_and_carries_the_model_of_the_cluster(bench):
    bench.handle(Tick())
    bench.open("a")
    refused = ScaleOutRefused(reason="the model differs", spec=b"spec")
    assert bench.handle(Received("a", refused)) == [JoinFailed("the model differs", b"spec", lasting=True)]


@pytest.mark.parametrize(("wanted", "lasting"), [((), True), (("n9",), False)])
def test_who_wants_a_neighbor_that_is_not_there_may_try_again(wanted, lasting):
    bench = Bench(request=replace(REQUEST, neighbors=wanted))
    bench.handle(Tick())
    bench.open("a")
    refused = ScaleOutRefused(reason="no")
    assert bench.handle(Received("a", refused)) == [JoinFailed("no", lasting=lasting)]


def test_it_opens_the_planned_links_and_measures_those_that_are_open_already(bench):
    bench.handle(Tick())
    bench.open("a")
    ask = DialBack(addresses=REQUEST.addresses)
    assert bench.plan(A, B) == [MeasureLink("a"), Transmit("a", ask), Dial("b:1")]
    assert bench.open("b") == [MeasureLink("b"), Transmit("b", ask)]


def test_it_reports_the_links_when_all_are_measured_or_have_failed(bench):
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    assert bench.examined("a", 5e6) == []
    [report] = bodies(bench.handle(DialFailed("b:1", "connection refused")))
    assert report == NeighborsReady(
        node="j",
        addresses=("j:1",),
        links={"a": LinkReading(rate_bps=5e6, rate_source="probe")},
        failed={"b": "b:1: connection refused"},
    )


def test_a_link_that_closes_before_it_is_measured_is_opened_again(bench):
    """Who rejoins finds links of before open, which the other ends are about to close."""
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    assert bench.close("a") == [Dial("a:1")]
    assert bench.examined("b", 1e6) == []
    bench.open("b")
    assert bench.examined("b", 1e6) == [], "the other link is on its way"
    bench.open("a")
    assert bodies(bench.examined("a", 1e6)) != []


def test_dropped_it_knows_other_ways_than_its_seeds(bench):
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    bench.close("a")
    bench.joiner.orphaned("it has been cut off", bench.now_s)
    assert bench.after(0.0) == [Dial("a:1"), Dial("x:1"), Dial("b:1")]


def test_it_waits_longer_for_links_that_take_long_to_measure():
    bench = Bench()
    bench.joiner.seconds_per_link = 4.0
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    assert bench.after(LINK_PATIENCE_S + 7.9) == []
    [report] = bodies(bench.after(0.1))
    assert report.failed == {"b": "no answer"}


def test_one_neighbour_that_can_dial_it_is_enough(bench):
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    bench.open("b")
    assert (
        bench.handle(LinkMeasured("a", 5e6, "probe")) == bench.handle(LinkMeasured("b", 5e6, "probe")) == []
    )
    [report] = bodies(bench.handle(Received("b", DialBackReply(reached="j:1"))))
    assert report.addresses == ("j:1",)


def test_if_nobody_can_dial_it_that_is_told_plainly_and_its_addresses_are_not_passed_on(bench):
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A)
    warning, report = bench.examined("a", 5e6, reached="", reason="j:1: no answer in 1.5 s")
    assert isinstance(warning, Happened) and warning.kind == "unreachable"
    assert "nobody can open a link to it at j:1 (a: j:1: no answer in 1.5 s)" in warning.detail
    assert report.message.body.addresses == ()


def test_all_addresses_of_a_neighbour_are_tried_and_it_has_failed_when_all_have(bench):
    bench.handle(Tick())
    bench.open("a")
    two = Member(id="b", addresses=("b:1", "b:2"))
    assert bench.plan(A, two)[-2:] == [Dial("b:1"), Dial("b:2")]
    bench.examined("a", 5e6)
    assert bench.handle(DialFailed("b:1", "no route")) == []
    [report] = bodies(bench.handle(DialFailed("b:2", "refused")))
    assert report.failed == {"b": "b:1: no route; b:2: refused"}


def test_it_does_not_wait_for_a_slow_link_for_ever(bench):
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A, B)
    [report] = bodies(bench.after(LINK_PATIENCE_S))
    assert report.links == {"a": LinkReading()}
    assert report.failed == {"b": "no answer"}


def test_with_the_plan_it_pulls_the_state_and_becomes_ready_when_it_has_caught_up(bench):
    effects = bench.to_fetching()
    assert effects[0] == DiscardState()
    assert bench.joiner.state is JoinState.FETCHING
    done = bench.handle(ManifestKnown(7, 0, 1))
    assert StateWhole(7) in done
    assert bench.joiner.state is JoinState.LOADING
    assert bodies(bench.handle(CaughtUp())) == [ScaleOutReady(node="j")]
    assert bench.joiner.state is JoinState.READY


def test_it_says_once_when_the_state_will_be_whole_within_a_step(bench):
    bench.to_fetching(step_s=3.1)
    bench.handle(ManifestKnown(7, 8 * MIN_PIECE_BYTES, 1))
    said = []
    for piece in range(7):
        bench.now_s += 1.0
        start = piece * MIN_PIECE_BYTES
        effects = bench.handle(ShardStored("a", start, start + MIN_PIECE_BYTES, 1))
        said += [(piece, body.in_s) for body in bodies(effects) if isinstance(body, ScaleOutReady)]
    assert said == [(4, pytest.approx(3.0, rel=0.01))]


def test_it_says_again_that_it_is_ready_until_it_is_a_member(bench):
    bench.to_fetching()
    bench.handle(ManifestKnown(7, 0, 1))
    bench.handle(CaughtUp())
    assert bodies(bench.after(ASK_EVERY_S)) == [ScaleOutReady(node="j")]
    bench.joiner.joined()
    assert bench.after(ASK_EVERY_S) == []


def test_without_an_answer_it_asks_again(bench):
    bench.handle(Tick())
    bench.open("a")
    [*_, again] = bench.after(ASK_EVERY_S)
    assert again.message.body == replace(REQUEST, linked=("a",))


def test_joiners_that_reach_only_each_other_go_on_knocking_at_the_others():
    bench = Bench(seeds=("a:1", "k:1"), patience_s=100.0)
    bench.handle(Tick())
    bench.open("k")  # Started at the same moment, and knows as little as we do.
    for _ in range(MAX_UNANSWERED + 2):
        assert bench.after(ASK_EVERY_S)[:3] == [DiscardState(), Dial("a:1"), Dial("k:1")]
    assert replace(REQUEST, linked=("a", "k"), unanswered=True) in bodies(bench.open("a"))
    bench.plan(A)
    bench.examined("a", 1e6)
    bench.close("a")
    # The scheduler has answered before, and may again by another way.
    assert Dial("a:1") not in bench.after(ASK_EVERY_S)
    assert Dial("a:1") in bench.after(ASK_EVERY_S)


def test_it_gives_up_on_a_cluster_that_does_not_go_on(bench):
    bench.handle(Tick())
    bench.open("a")
    for _ in range(MAX_UNANSWERED):
        assert bench.joiner.state is JoinState.ASKED
        bench.after(ASK_EVERY_S)
    [failed] = bench.after(ASK_EVERY_S)
    assert failed == JoinFailed("the cluster does not go on: asked 9 times (no answer)")


def test_of_all_that_are_to_found_before_it_it_learns_where_the_first_is(bench):
    """Of 24 that were started at once, each dialled all before it, and 276 links carried news of each other."""
    asking = bench.joiner.asking
    asking.otherwise = Otherwise.FOUND
    for node in "dfbecg":
        rival = replace(REQUEST, node=node, addresses=(f"{node}:1",), founds=True)
        bench.handle(Received(node, rival))
    assert asking.seeds == ("a:1", "x:1", "d:1", "b:1")
    assert asking.waits_for(bench.now_s) == "b"


def test_who_might_have_founded_is_as_patient_with_a_cluster_that_has_answered(bench):
    """It asked once a second from then on, and gave up on a busy scheduler after 9 s."""
    bench.joiner.asking.otherwise = Otherwise.FOUND
    bench.handle(Tick())
    bench.open("a")
    bench.plan(A)
    bench.examined("a", 1e6)
    bench.after(30.0)  # No plan came, and by now it would have founded.
    for _ in range(MAX_UNANSWERED - 1):
        assert bench.after(ASK_EVERY_S - 0.1) == [] and bench.joiner.state is JoinState.ASKED
        assert bench.after(0.1) != []


def test_who_was_not_answered_asks_the_members_too_and_waits_as_long_as_one_says_that_there_is_a_cluster(
    bench,
):
    bench.handle(Tick())
    bench.open("a")
    asked = []
    for _ in range(3 * MAX_UNANSWERED):
        [*_, request] = bodies(bench.after(ASK_EVERY_S))
        asked.append(request.unanswered)
        if request.unanswered:
            bench.handle(Received("a", Answer(ok=True, text=HERE)))
    assert asked == [False, True] * (3 * MAX_UNANSWERED // 2)
    assert bench.joiner.state is JoinState.ASKED


def test_ready_for_a_dead_cluster_it_gives_up_too(bench):
    bench.to_fetching()
    bench.handle(ManifestKnown(7, 0, 1))
    bench.handle(CaughtUp())
    for times in range(MAX_UNANSWERED):
        assert bodies(bench.after(ASK_EVERY_S)) == [ScaleOutReady(node="j", unanswered=times > 0)]
    assert bench.after(ASK_EVERY_S) == [JoinFailed("the cluster does not go on: asked 9 times")]


def test_ready_it_waits_as_long_as_the_scheduler_answers(bench):
    """Steps may take minutes, and the view that lets it in comes with one."""
    bench.to_fetching()
    bench.handle(ManifestKnown(7, 0, 1))
    bench.handle(CaughtUp())
    for _ in range(3 * MAX_UNANSWERED):
        assert bodies(bench.after(ASK_EVERY_S)) == [ScaleOutReady(node="j")]
        bench.handle(Received("a", Answer(ok=True, text="next")))


def test_dropped_by_the_cluster_it_starts_over_and_forgets_the_state(bench):
    bench.to_fetching()
    effects = bench.joiner.orphaned("it is not in the view any more", 1.0)
    assert effects[0] == DiscardState()
    assert bench.joiner.state is JoinState.ASKED
    assert bench.joiner.replication is None


def test_with_all_connections_gone_it_knocks_again(bench):
    bench.to_fetching()
    effects = bench.close("a")
    assert effects == [DiscardState(), DiscardState()]
    assert bench.joiner.state is JoinState.KNOCKING
    assert bench.handle(Tick()) == [Dial("a:1"), Dial("x:1")]


def test_a_state_that_it_cannot_use_is_asked_for_again(bench):
    bench.to_fetching()
    bench.handle(ManifestKnown(7, 0, 1))
    assert bench.handle(StateRejected("another dtype"))[0] == DiscardState()
    assert bench.joiner.state is JoinState.ASKED


def test_short_of_memory_it_asks_to_join_in_blocking_mode(bench):
    bench.to_fetching()
    [_, again] = bench.handle(BacklogFull())
    assert again.message.body.blocking


def test_with_more_results_to_come_than_the_state_is_it_asks_for_that_anew_and_the_cluster_is_to_wait(bench):
    """Its state may overtake results on a slow link; as a member it would be waited for until all have come."""
    bench.to_fetching(step_s=3.1)
    bench.handle(ManifestKnown(7, MIN_PIECE_BYTES, 1))
    bench.waiting_bytes = MIN_PIECE_BYTES + 1
    bench.handle(ShardStored("a", 0, MIN_PIECE_BYTES, 1))
    assert bench.joiner.state is JoinState.LOADING
    [discards, again] = bench.handle(CaughtUp())
    assert discards == DiscardState()
    assert again.message.body.blocking


def test_with_as_many_results_to_come_as_the_state_is_it_is_ready(bench):
    bench.to_fetching()
    bench.handle(ManifestKnown(7, MIN_PIECE_BYTES, 1))
    bench.waiting_bytes = MIN_PIECE_BYTES
    bench.handle(ShardStored("a", 0, MIN_PIECE_BYTES, 1))
    assert bodies(bench.handle(CaughtUp())) == [ScaleOutReady(node="j")]


def test_far_behind_it_does_not_say_that_the_state_will_be_whole_soon(bench):
    bench.to_fetching(step_s=3.1)
    bench.handle(ManifestKnown(7, 8 * MIN_PIECE_BYTES, 1))
    bench.waiting_bytes = 8 * MIN_PIECE_BYTES + 1
    for piece in range(7):
        bench.now_s += 1.0
        start = piece * MIN_PIECE_BYTES
        assert not bodies(bench.handle(ShardStored("a", start, start + MIN_PIECE_BYTES, 1)))


def test_a_newer_plan_replaces_the_pull_under_way(bench):
    bench.to_fetching()
    plan = ReplicationPlan(view=VIEW, step=9, shard_bytes=100, shards_by_source={"a": 1})
    effects = bench.handle(Received("a", plan))
    assert effects[0] == DiscardState()
    assert isinstance(effects[1], Transmit)
    assert bench.joiner.replication.step == 9


def test_a_source_whose_link_has_closed_is_not_waited_for(bench):
    bench.to_waiting()
    bench.open("b")
    bench.close("a")
    plan = ReplicationPlan(view=VIEW, step=7, shard_bytes=100, shards_by_source={"a": 1, "b": 1})
    bench.handle(Received("b", plan))
    assert list(bench.joiner.replication.sources) == ["b"]
    bench.close("b")
    assert bench.joiner.state is JoinState.KNOCKING


def test_without_a_link_to_any_source_it_asks_again(bench):
    bench.to_waiting()
    bench.open("b")
    bench.close("a")
    plan = ReplicationPlan(view=VIEW, step=7, shard_bytes=100, shards_by_source={"a": 1})
    bench.handle(Received("b", plan))
    assert bench.joiner.state is JoinState.ASKED


def test_results_that_came_before_the_plan_of_their_view_are_kept(bench):
    bench.to_waiting()
    plan = ReplicationPlan(view=VIEW, step=7, shard_bytes=100, shards_by_source={"a": 1})
    assert DiscardState() not in bench.joiner.overtaken("a", plan, bench.now_s)
    assert bench.joiner.state is JoinState.FETCHING
    assert bench.joiner.overtaken("a", plan, bench.now_s) == []  # It has been heard.


def test_time_in_which_a_joiner_was_stopped_is_none_of_its_patience():
    bench = Bench(seeds=("a:1",), patience_s=20.0)
    bench.handle(Tick())
    bench.now_s = 40.0
    assert bench.handle(DialFailed("a:1", "timed out")) == []
    for _ in range(2):  # It has 20 s left, less what it was awake.
        assert bench.handle(Tick()) == [Dial("a:1")]
        bench.now_s += KNOCK_EVERY_S
    while not (effects := bench.handle(Tick())) or not isinstance(effects[0], JoinFailed):
        bench.now_s += KNOCK_EVERY_S
    assert bench.now_s == pytest.approx(40.0 + 20.0, abs=1.0)


@pytest.mark.parametrize("overtaken", [False, True], ids=["new view", "view it is in"])
def test_a_plan_of_an_earlier_request_counts_while_links_of_the_next_are_opened(bench, overtaken):
    """All waited for it until its patience with these links was over, and a flush let it go."""
    bench.to_waiting()
    bench.after(ASK_EVERY_S)
    bench.plan(A, B)
    assert bench.joiner.state is JoinState.LINKING
    plan = ReplicationPlan(view=VIEW, step=7, shard_bytes=100, shards_by_source={"a": 1})
    if overtaken:
        bench.joiner.overtaken("a", plan, bench.now_s)
    else:
        bench.handle(Received("a", plan))
    assert bench.joiner.state is JoinState.FETCHING
    assert bench.joiner.replication is not None
