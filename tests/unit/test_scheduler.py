"""`chaosnet.scheduler.core`, its parts and `views`: events become views, one after the other."""

import networkx as nx
import pytest
from msgspec.structs import replace

from chaosnet.errors import PlanInfeasible
from chaosnet.protocols.codec import decode, encode
from chaosnet.protocols.effects import Happened, Parked
from chaosnet.protocols.keyring import Keyring
from chaosnet.protocols.messages import (
    EVERYONE,
    AbortRequest,
    Answer,
    Commit,
    ConnectLinkRequest,
    Contribution,
    DisconnectLinkRequest,
    Electorate,
    Entering,
    Envelope,
    Expelled,
    Flush,
    FlushOk,
    Install,
    KeyringNews,
    LinkNews,
    LinkReading,
    Member,
    NegotiationPlan,
    NeighborsReady,
    Prepare,
    PrepareFailed,
    ReplicationPlan,
    Report,
    ScaleInRequest,
    ScaleOutReady,
    ScaleOutRefused,
    ScaleOutRequest,
    View,
    ViewChange,
)
from chaosnet.protocols.overlay import Overlay
from chaosnet.protocols.step_sync import StepSync
from chaosnet.protocols.view_change import applied
from chaosnet.scheduler import views
from chaosnet.scheduler.admission import FRESH_S, GATHER_S
from chaosnet.scheduler.changes import LEAVE_PATIENCE_S
from chaosnet.scheduler.core import Scheduler
from chaosnet.scheduler.joins import MAX_NEIGHBORS, NAMESAKE_S
from chaosnet.scheduler.monitor import ClusterMonitor
from chaosnet.scheduler.sync_plan import POLICIES, custom
from chaosnet.scheduler.tenure import REPEAT_EVERY_S
from chaosnet.scheduler.views import AddJoiners, AddLink, Entrant, Nothing, Promote, Remove, RemoveLink, Votes

TRIANGLE = [("a", "b"), ("a", "c"), ("b", "c")]


def member(name, joined_step=0):
    return Member(id=name, addresses=(f"{name}:1",), joined_step=joined_step)


def make_view(members, links, observers="", policy="single", **kwargs):
    view = View(
        term=1,
        seq=1,
        scheduler=members[0],
        members=tuple(map(member, members)),
        observers=tuple(map(member, observers)),
        links=tuple(links),
        **kwargs,
    )
    graph = nx.Graph([each for each in links if {*each} <= {*members}])
    graph.add_nodes_from(members)
    return views.with_trees(view, graph, POLICIES[policy])


class Bench:
    """The scheduler on node a, in the only view of its term; what it sends is kept, with its views whole."""

    def __init__(self, members="abc", links=TRIANGLE, observers="", policy="single", **kwargs):
        self.sync, self.overlay, self.monitor = StepSync("a", 1), Overlay("a"), ClusterMonitor()
        self.sent, self.version, self.now_s = [], 0, 0.0
        self.views = {}  # That somebody knows, by key.
        self.scheduler = Scheduler(
            "a",
            1,
            self.sync,
            self.overlay,
            self.monitor,
            self._send,
            POLICIES[policy],
            digest="d",
            spec=b"s",
            **kwargs,
        )
        self.enter(make_view(members, links, observers, policy), step=10)

    def _send(self, target, body):
        if isinstance(body, Prepare | Install) and isinstance(body.view, ViewChange):
            body = replace(body, view=applied(self.views[body.view.base], body.view))
        self.sent.append((target, body))
        return []

    def take_sent(self):
        sent, self.sent = self.sent, []
        return sent

    def enter(self, view, step):
        self.views[view.key] = view
        self.sync.enter(view, step, self.sync.priors)
        self.overlay.enter(view)
        self.monitor.entered(view)
        effects = self.scheduler.switched(view, self.now_s)
        self.scheduler.check_invariants()
        return effects

    def receive(self, source, message):
        effects = self.scheduler.receive(source, message, self.now_s)
        self.scheduler.check_invariants()
        return effects, self.take_sent()

    def lose(self, *links, state="silent"):
        for reporter, peer in links:
            self.version += 1
            self.overlay.heard(LinkNews(reporter=reporter, peer=peer, version=self.version, state=state))
        effects = self.scheduler.overlay_changed(self.now_s)
        return effects, self.take_sent()

    def flush_ok(self, node, key=(1, 1), step=10, number=1, **kwargs):
        if "view" in kwargs:
            self.views[key] = kwargs["view"]
        return self.receive(node, FlushOk(term=1, number=number, node=node, key=key, step=step, **kwargs))

    def proposed(self):
        """The one view that was proposed just now."""
        [view] = {
            body.view.key: body.view for _, body in self.take_sent() if isinstance(body, Prepare)
        }.values()
        return view


@pytest.fixture
def bench():
    bench = Bench()
    bench.take_sent()
    return bench


def installs(sent):
    return [body for _, body in sent if isinstance(body, Install)]


# --- one change at a time ---


def test_a_leave_is_proposed_and_repeated_until_it_is_in_force(bench):
    effects, sent = bench.receive("c", ScaleInRequest(node="c"))
    assert effects == [Happened("scale-in", "c", "asks to leave", 10)]
    [(target, prepare)] = sent
    assert target == EVERYONE
    assert prepare.view.member_ids == ("a", "b")
    bench.now_s = REPEAT_EVERY_S
    bench.scheduler.tick(bench.now_s)
    assert bench.take_sent() == sent
    effects = bench.enter(prepare.view, 11)
    assert effects[0] == Happened("left", "c", "now 2 members, 1 link", 11)


def test_who_is_alone_and_asks_again_until_its_step_ends_is_told_of_once():
    bench = Bench(members="a", links=())
    assert bench.receive("a", ScaleInRequest(node="a"))[0] == [Happened("scale-in", "a", "asks to leave", 10)]
    assert bench.receive("a", ScaleInRequest(node="a"))[0] == []


def test_links_of_those_who_only_join_are_not_counted_as_links_of_members():
    bench = Bench(links=[*TRIANGLE, ("a", "j"), ("b", "j")], observers="j")
    _, [(_, prepare)] = bench.receive("c", ScaleInRequest(node="c"))
    assert {("a", "j"), ("b", "j")} <= {*prepare.view.links}
    effects = bench.enter(prepare.view, 11)
    assert effects[0] == Happened("left", "c", "now 2 members, 1 link", 11)


def test_a_joiner_that_reached_none_of_the_chosen_is_given_those_that_it_has_a_link_to():
    bench = Bench("abcd", [("a", "b"), ("a", "c"), ("a", "d"), ("b", "c"), ("c", "d")])
    for linked, chosen in (((), ["b", "d"]), (("c",), ["b", "c"]), (("a", "c", "x"), ["a", "c"])):
        _, sent = bench.receive("j", ScaleOutRequest(node="j", degree=2, linked=linked, stuck=True))
        assert [member.id for member in sent[-1][1].neighbors] == chosen


def test_what_is_proposed_is_told_against_the_view_in_force(bench):
    told = []
    bench.scheduler.send = lambda target, body: told.append(body) or []
    bench.receive("c", ScaleInRequest(node="c"))
    assert (told[0].view.base, told[0].view.gone) == ((1, 1), ("c",))


def test_changes_come_one_by_one_so_that_majorities_overlap(bench):
    bench.receive("c", ScaleInRequest(node="c"))
    _, sent = bench.receive("b", ScaleInRequest(node="b"))
    assert sent == []
    bench.enter(bench.scheduler.proposal.view, 11)
    assert bench.proposed().member_ids == ("a",)


def test_a_request_made_twice_is_served_once(bench):
    bench.receive("c", ScaleInRequest(node="c"))
    assert bench.receive("c", ScaleInRequest(node="c")) == ([], [])
    assert not bench.scheduler.queue


def test_the_schedulers_own_leave_vacates_the_role(bench):
    bench.scheduler.receive("a", ScaleInRequest(node="a"), 0.0)
    assert bench.proposed().scheduler == ""


def test_who_leaves_takes_no_link_along_that_others_need():
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    bench.scheduler.queue.clear()
    bench.scheduler.proposal = None
    bench.take_sent()
    bench.receive("b", ScaleInRequest(node="b"))
    assert bench.scheduler.proposal.view.links == (("a", "c"),)


def test_a_thin_overlay_is_repaired_as_if_somebody_had_asked():
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    assert bench.proposed().links == (("a", "b"), ("a", "c"), ("b", "c"))


def test_a_repair_adds_all_links_that_are_missing_at_once():
    """One a step would leave the overlay thin for as many steps, and plan the trees anew for each."""
    bench = Bench("abcdef", [("a", each) for each in "bcdef"])
    first = bench.proposed()
    assert len(first.links) == 5 + 3
    effects = bench.enter(first, 11)
    assert [each.node for each in effects] == ["b - c", "d - e", "b - f"]
    assert bench.scheduler.proposal is None and not bench.scheduler.queue


def test_the_other_links_of_a_repair_are_tried_again_after_who_has_asked():
    bench = Bench("abcdef", [("a", each) for each in "bcdef"])
    first = bench.proposed()
    bench.receive("f", ScaleInRequest(node="f"))
    bench.receive("b", PrepareFailed(key=first.key, node="b", link=("b", "c"), reason="no route"))
    second = bench.scheduler.proposal.view
    assert second.member_ids == ("a", "b", "c", "d", "e")
    bench.take_sent()
    bench.enter(second, 11)
    third = bench.proposed()
    assert {*third.links} - {*second.links} == {("d", "e")}


def test_links_of_a_repair_do_not_wait_for_a_node_that_can_open_none():
    bench = Bench("abcdefgh", [("a", each) for each in "bcdefgh"])
    view = bench.proposed()
    there = {("a", each) for each in "bcdefgh"}
    assert {*view.links} - there == {("b", "c"), ("d", "e"), ("f", "g"), ("b", "h")}
    for bad in (("b", "c"), ("b", "h")):
        bench.receive("b", PrepareFailed(key=view.key, node="b", link=bad, reason="no route"))
        view = bench.scheduler.proposal.view
    assert {*view.links} - there == {("d", "e"), ("f", "g")}


def test_a_leave_does_not_wait_for_a_repair_while_nobody_trains():
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    assert bench.proposed().link_set > {("a", "b"), ("b", "c")}
    bench.receive("c", ScaleInRequest(node="c"))
    assert bench.scheduler.proposal.view.member_ids == ("a", "b", "c")
    for seconds in range(1, 12):
        bench.scheduler.tick(float(seconds))
    assert bench.scheduler.flush is not None
    assert bench.scheduler.flushes.leaving_at_flush == "c"


def test_a_repair_without_any_possible_link_is_given_up():
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    key = bench.scheduler.proposal.view.key
    bench.receive("a", PrepareFailed(key=key, node="a", link=("b", "c"), reason="it was there"))
    assert bench.scheduler.proposal is None and not bench.scheduler.queue


def test_a_repair_that_cannot_be_is_not_tried_again_until_its_end_joins_anew():
    """Nodes may share no network. Each attempt takes seconds, in which no other change gets its turn."""
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    failed = PrepareFailed(
        key=bench.scheduler.proposal.view.key, node="a", link=("a", "c"), reason="no route"
    )
    bench.receive("a", failed)
    assert bench.scheduler.proposal is None
    bench.enter(make_view("abcd", [("a", "b"), ("b", "c"), ("c", "d")]), 11)
    assert bench.proposed().links == (("a", "b"), ("a", "d"), ("b", "c"), ("c", "d"))
    assert bench.scheduler.repairs.out_of_reach == {("a", "c")}


def test_what_a_joiner_could_not_reach_is_left_out_of_repairs():
    bench = Bench("ab", [("a", "b")])
    bench.receive("c", ScaleOutRequest(node="c", addresses=("c:1",), degree=2, digest="d"))
    reading = LinkReading(rate_bps=1e6)
    bench.receive("c", NeighborsReady(node="c", links={"b": reading}, failed={"a": "no answer"}))
    assert bench.scheduler.repairs.out_of_reach == {("a", "c")}
    bench.receive("c", NeighborsReady(node="c", links={"a": reading}, failed={"b": "no answer"}))
    assert bench.scheduler.repairs.out_of_reach == {("b", "c")}


def test_a_link_that_cannot_be_opened_is_answered_and_told_and_forgotten(bench):
    bench.enter(make_view("abcd", [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]), 11)
    bench.take_sent()
    told, _ = bench.receive("b", ConnectLinkRequest(a="b", b="d", asker="client"))
    assert told == [Happened("connect-link", "b - d", "requested", 11)]
    key = bench.scheduler.proposal.view.key
    failed = PrepareFailed(key=key, node="b", link=("b", "d"), reason="connection refused")
    told, sent = bench.receive("b", failed)
    assert told == [Happened("link-refused", "b - d", "connection refused", 11)]
    text = "the link b - d cannot be opened (connection refused)"
    assert sent == [("client", Answer(ok=False, text=text))]
    assert bench.scheduler.proposal is None


def test_who_asks_for_a_link_that_exists_is_told_so_and_nobody_else_is_told_anything(bench):
    """All nodes printed that the link was to open, and then nothing."""
    told, [(asker, answer)] = bench.receive("b", ConnectLinkRequest(a="b", b="a", asker="client"))
    assert told == []
    assert (asker, answer.ok, answer.text) == ("client", False, "the link a - b exists already")


def test_a_link_that_another_has_asked_for_already_is_told_as_that(bench):
    """All nodes printed the same line twice, as if the first request had come to nothing."""
    bench.enter(make_view("abcd", [("a", "b"), ("b", "c"), ("c", "d"), ("a", "d")]), 11)
    told, _ = bench.receive("b", ConnectLinkRequest(a="b", b="d", asker="client"))
    assert told == [Happened("connect-link", "b - d", "requested", 11)]
    told, _ = bench.receive("b", ConnectLinkRequest(a="d", b="b", asker="another"))
    assert told == [Happened("connect-link", "b - d", "requested again", 11)]
    told, _ = bench.receive("b", ConnectLinkRequest(a="a", b="c", asker="another"))
    assert told == [Happened("connect-link", "a - c", "requested", 11)]


def test_a_leaver_whose_substitute_link_will_not_open_goes_with_a_flush():
    bench = Bench("abc", TRIANGLE)
    bench.receive("c", ScaleInRequest(node="c"))
    failed = PrepareFailed(key=bench.scheduler.proposal.view.key, node="b", link=("a", "b"), reason="no")
    bench.receive("b", failed)
    for node in "ab":
        bench.flush_ok(node)
    effects, sent = bench.flush_ok("c")
    assert installs(sent)[0].view.member_ids == ("a", "b")
    assert Happened("left", "c", "no link can take its place", 10) in effects


@pytest.mark.parametrize("parts", [False, True], ids=["the whole state", "parts of it"])
def test_dead_joiners_whose_links_hold_up_each_others_removal_go_with_a_flush(parts):
    """Seed 207160 of lives with parts: nobody was let in any more, since `c` and `d` were still pulling."""
    links = [("a", "b"), ("a", "c"), ("b", "d")]
    bench = Bench("ab", links, observers="cd")
    bench.sync.sums.parts = parts
    bench.lose(("a", "c"), ("b", "d"), state="closed")
    while (proposal := bench.scheduler.proposal) is not None:
        failed = next(iter(proposal.view.link_set & {("a", "c"), ("b", "d")}))
        bench.receive("b", PrepareFailed(key=proposal.view.key, node="b", link=failed, reason="refused"))
    sent = [bench.flush_ok(node)[1] for node in "ab"]
    assert installs(sent[-1])[0].view.node_set == {"a", "b"}


def test_a_member_that_keeps_a_part_goes_with_no_flush_and_others_get_their_turn():
    bench = Bench("abc", TRIANGLE)
    bench.sync.sums.parts = True
    bench.receive("c", ScaleInRequest(node="c"))
    leaving = bench.scheduler.proposal.view
    bench.receive("client", DisconnectLinkRequest(a="a", b="c", asker="client"))
    bench.receive("b", PrepareFailed(key=leaving.key, node="b", link=("a", "b"), reason="no"))
    assert bench.scheduler.flush is None
    assert bench.scheduler.proposal.change == RemoveLink(asker="client", link=("a", "c"))


def test_a_leavers_substitute_link_is_one_that_can_be_opened():
    bench = Bench("abcdh", [("a", "b"), ("a", "h"), ("b", "h"), ("c", "d"), ("c", "h"), ("d", "h")])
    bench.receive("h", ScaleInRequest(node="h"))
    first = bench.scheduler.proposal.view
    assert ("a", "c") in first.links
    bench.receive("a", PrepareFailed(key=first.key, node="a", link=("a", "c"), reason="no"))
    second = bench.scheduler.proposal.view
    assert ("a", "d") in second.links and ("a", "c") not in second.links


def test_what_a_joiner_has_measured_outlives_other_views(bench):
    for node in "jk":
        bench.receive(node, ScaleOutRequest(node=node, life=1, degree=1))
        reading = LinkReading(rate_bps=5e6, rate_source="probe")
        bench.receive(node, NeighborsReady(node=node, links={"a": reading}))
    bench.enter(bench.scheduler.proposal.view, 11)
    assert bench.monitor.links["a", "k"].to("k") == 5e6


def test_when_nobody_trains_a_leaver_goes_with_a_flush(bench):
    bench.receive("c", ScaleInRequest(node="c"))
    bench.take_sent()
    bench.scheduler.tick(LEAVE_PATIENCE_S + 0.1)
    assert any(isinstance(body, Flush) for _, body in bench.take_sent())
    assert bench.scheduler.flushes.leaving_at_flush == "c"


def test_who_alone_has_a_vote_stays_whatever_is_late():
    """b pulls the state still; o has it, and hangs on a alone."""
    bench = Bench("ab", [("a", "b"), ("a", "o")], "o")
    without_vote = (Entering(node="b", sources=(), blocking=True),)
    bench.enter(replace(bench.sync.view, seq=2, joining=without_vote), 11)
    bench.receive("a", ScaleInRequest(node="a"))
    bench.take_sent()
    bench.scheduler.tick(LEAVE_PATIENCE_S + 0.1)
    assert {type(body) for _, body in bench.take_sent()} == {Prepare}
    # So it does if a vote was there when the flush began.
    bench.scheduler.flushes.leaving_at_flush = "a"
    bench.scheduler.flushes.start("a leaves", 0.0)
    bench.flush_ok("a", key=(1, 2), step=11)
    bench.flush_ok("b", key=(1, 2), step=11, began_here=True)
    _, sent = bench.flush_ok("o", key=(1, 2), step=11)
    assert installs(sent)[0].view.member_ids == ("a", "b")


def test_a_leaver_waits_for_the_vote_as_long_as_steps_take(bench):
    bench.scheduler.admission.costs = lambda: (0, 20.0)
    bench.receive("c", ScaleInRequest(node="c"))
    bench.take_sent()
    bench.scheduler.tick(59.9)
    assert not any(isinstance(body, Flush) for _, body in bench.take_sent())
    bench.scheduler.tick(60.5)
    assert any(isinstance(body, Flush) for _, body in bench.take_sent())


def test_a_step_that_somebody_has_completed_in_a_view_shows_that_nobody_acts_in_older_ones():
    for commit in (None, Commit(key=(1, 1), step=10, switch=None, total=Contribution())):
        bench = Bench("ab", [("a", "b")])
        bench.sync.priors = (Electorate(key=(0, 1), members=("z", "y", "x", "b", "a")),)
        bench.receive("b", AbortRequest(node="b", key=(1, 1), step=10, reason="torn"))
        bench.flush_ok("a")
        _, sent = bench.flush_ok("b", step=11 if commit else 10, commit=commit)
        assert bool(installs(sent)) is (commit is not None)


def test_unknown_ends_of_a_link_are_named_in_the_answer(bench):
    _, [(asker, answer)] = bench.receive("b", ConnectLinkRequest(a="b", b="x", asker="client"))
    assert asker == "client"
    assert answer.text == "'x' is no member (members: a (a:1), b (b:1), c (c:1))"


def test_a_link_without_which_the_overlay_falls_apart_stays(bench):
    bench.enter(make_view("ab", [("a", "b")]), 11)
    bench.take_sent()
    told, sent = bench.receive("b", DisconnectLinkRequest(a="a:1", b="b", asker="b"))
    assert told == []
    assert sent == [("b", Answer(ok=False, text="without the link a - b the overlay falls into two parts"))]


def test_a_lost_link_between_live_nodes_costs_that_link_and_nobody(bench):
    effects, sent = bench.lose(("b", "c"))
    assert effects == []
    [(_, prepare)] = sent
    assert prepare.view.links == (("a", "b"), ("a", "c"))
    assert prepare.view.member_ids == ("a", "b", "c")


# --- scale-out ---


def join(bench, node="j", **kwargs):
    request = ScaleOutRequest(node=node, addresses=(f"{node}:1",), digest="d", **kwargs)
    return bench.receive(node, request)


def ready(bench, *neighbors, node="j"):
    links = {each: LinkReading(rate_bps=1e6) for each in neighbors}
    return bench.receive(node, NeighborsReady(node=node, links=links))


def test_a_plan_tells_how_long_a_step_takes(bench):
    bench.scheduler.admission.costs = lambda: (0, 2.0)
    join(bench, neighbors=("a",))
    ready(bench, "a")
    bench.enter(bench.scheduler.proposal.view, 12)
    [plan] = [body for target, body in bench.take_sent() if target == "j"]
    assert plan.step_s == 2.0


def test_a_joiner_first_listens_then_becomes_a_member(bench):
    bench.receive("a", Report(node="a", state_bytes=1000, layer_bytes=(10, 100)))
    join(bench, neighbors=("a", "b"))
    ready(bench, "a", "b")
    listening = bench.scheduler.proposal.view
    assert (listening.member_ids, listening.observer_ids) == (("a", "b", "c"), ("j",))
    assert listening.joining[0].sources == ("a", "b")
    bench.enter(listening, 12)
    [plan] = [body for target, body in bench.take_sent() if target == "j"]
    assert isinstance(plan, ReplicationPlan)
    assert (plan.step, plan.view) == (12, listening)
    assert sum(plan.shards_by_source.values()) * plan.shard_bytes >= 1000
    bench.receive("j", ScaleOutReady(node="j"))
    assert bench.scheduler.proposal.view.member_ids == ("a", "b", "c", "j")


class Clocked(Bench):
    """Steps take two seconds; j listens."""

    def __init__(self):
        super().__init__(links=[*TRIANGLE, ("a", "j"), ("b", "j")], observers="j")
        self.scheduler.admission.costs = lambda: (1000, 2.0)
        self.take_sent()
        self.scheduler.stepped(0.0)

    def ready_in(self, in_s, now_s):
        self.now_s = now_s
        self.receive("j", ScaleOutReady(node="j", in_s=in_s))
        return self.scheduler.proposal


def test_who_will_have_the_state_when_the_step_ends_is_a_member_of_the_next_without_a_vote():
    bench = Clocked()
    view = bench.ready_in(1.0, now_s=0.9).view
    assert (view.member_ids, view.voter_ids) == (("a", "b", "c", "j"), ("a", "b", "c"))
    bench.enter(view, 11)
    bench.take_sent()
    bench.receive("j", ScaleOutReady(node="j"))
    assert bench.scheduler.proposal is None, "it has not taken part in a step"
    bench.scheduler.stepped(3.0)
    assert bench.proposed().voter_ids == ("a", "b", "c", "j")


def test_who_will_have_it_later_is_one_from_the_step_after_on():
    bench = Clocked()
    assert bench.ready_in(1.5, now_s=0.9) is None
    bench.scheduler.stepped(2.1)
    assert bench.scheduler.proposal.view.voter_ids == ("a", "b", "c")


def test_who_was_about_to_have_it_and_asks_anew_is_not_waited_for():
    bench = Clocked()
    bench.ready_in(1.5, now_s=0.9)
    join(bench, again=True)
    bench.scheduler.stepped(2.1)
    assert bench.scheduler.proposal is None


def test_a_blocking_joiner_is_a_member_at_once(bench):
    join(bench, blocking=True)
    ready(bench, "a")
    assert bench.scheduler.proposal.view.member_ids == ("a", "b", "c", "j")


def test_a_joiner_with_another_model_is_refused_and_told_the_clusters(bench):
    _, sent = bench.receive("j", ScaleOutRequest(node="j", digest="other"))
    assert sent == [("j", ScaleOutRefused(reason="the model differs", spec=b"s"))]


def test_a_joiner_named_like_a_member_is_refused(bench):
    for _ in range(2):  # As if the member had been started again; one request may come by two ways.
        assert join(bench, node="b", life=9) == ([], [])
    bench.now_s += NAMESAKE_S
    bench.receive("b", Report(node="b"))
    _, [(_, refused)] = join(bench, node="b", life=9)
    assert refused.reason == "a node named 'b' is in the cluster already; choose another with --name"


def test_a_member_that_is_started_again_is_not_refused_while_its_death_has_not_shown(bench):
    """Who was held up before it died is given more time than that."""
    bench.receive("b", Report(node="b"))
    for _ in range(5):
        assert join(bench, node="b", life=9) == ([], [])
        bench.now_s += NAMESAKE_S


def test_while_a_flush_is_under_way_nobody_is_refused_as_a_namesake(bench):
    """What it ends with may be that the member of that name has died."""
    bench.lose(("a", "b"), ("b", "c"))
    for _ in range(3):
        assert join(bench, node="b", life=9) == ([], [])
        bench.now_s += NAMESAKE_S
    bench.flush_ok("a")
    _, sent = bench.flush_ok("c")
    [install] = installs(sent)
    bench.enter(install.view, 11)
    bench.take_sent()
    assert isinstance(join(bench, node="b", life=9)[1][0][1], NegotiationPlan)


def test_a_member_without_state_or_sources_is_let_go_to_join_again(bench):
    assert join(bench, node="c") == ([], [])  # The same life: nobody else.
    request = AbortRequest(node="c", key=(1, 1), step=10, reason="c could not get the state", without_me=True)
    bench.receive("c", request)
    for node in "abc":
        _, sent = bench.flush_ok(node)
    [install] = [body for _, body in sent if isinstance(body, Install)]
    assert install.view.member_ids == ("a", "b")


def test_a_member_without_state_is_let_go_also_if_nobody_has_completed_a_step_yet(bench):
    """The founder died before any step, and a person let one go on to which it had given all of the state."""
    request = AbortRequest(node="c", key=(1, 1), step=10, reason="c could not get the state", without_me=True)
    bench.receive("c", request)
    for node in "abc":
        _, sent = bench.flush_ok(node, began_here=True)
    assert installs(sent)[0].view.member_ids == ("a", "b")


def test_a_member_that_asks_to_be_let_in_does_not_know_of_its_membership_and_is_let_go(bench):
    for _ in range(2):  # It may have asked just before it became one, and twice if this node is seconds late.
        assert join(bench, node="c", again=True) == ([], [])
    bench.now_s += NAMESAKE_S
    _, [(_, flush)] = join(bench, node="c", again=True)
    assert isinstance(flush, Flush)
    for node in "abc":
        _, sent = bench.flush_ok(node)
    assert installs(sent)[0].view.member_ids == ("a", "b")


def test_an_observer_that_asks_again_is_not_made_a_member_though_it_was_ready():
    bench = Bench(observers="j", links=[*TRIANGLE, ("a", "j")])
    bench.receive("b", ScaleInRequest(node="b"))
    bench.receive("j", ScaleOutReady(node="j"))
    assert Promote(node="j") in bench.scheduler.queue
    join(bench, again=True)
    assert Promote(node="j") not in bench.scheduler.queue


def test_a_joiner_that_wants_an_unknown_neighbour_is_told_who_there_is(bench):
    _, [(_, refused)] = join(bench, neighbors=("nobody",))
    assert "'nobody' is no member (members: a (a:1), b (b:1), c (c:1))" in refused.reason


def test_without_a_wish_the_scheduler_chooses_as_many_neighbours_as_asked_for(bench):
    _, [(_, plan)] = join(bench, degree=2)
    assert isinstance(plan, NegotiationPlan)
    assert len(plan.neighbors) == 2


def test_whoever_can_only_dial_is_not_chosen_as_a_neighbour():
    view = make_view("abc", TRIANGLE)
    silent = replace(view.members[2], addresses=())
    bench = Bench()
    bench.enter(replace(view, members=(*view.members[:2], silent)), step=10)
    bench.take_sent()
    _, [(_, plan)] = join(bench, degree=3)
    assert [member.id for member in plan.neighbors] == ["a", "b"]


def test_a_parked_scheduler_lets_nobody_in_and_leaves_it_to_the_joiners_patience(bench):
    bench.scheduler.parked = "only 1 of 3 members can be reached"
    assert join(bench) == ([], [])


def test_a_joiner_that_is_in_no_view_any_more_is_told(bench):
    _, sent = bench.receive("j", ScaleOutReady(node="j"))
    assert sent == [("j", Expelled(node="j", reason="it is not in the view any more", key=(1, 1)))]


# --- flush and install ---


def test_a_lost_member_starts_a_flush_and_the_others_go_on(bench):
    _, [(target, flush)] = bench.lose(("a", "c"), ("b", "c"))
    assert target == EVERYONE
    assert flush == Flush(term=1, number=1, scheduler="a", key=(1, 1), step=10)
    assert bench.flush_ok("a") == ([], [])
    effects, sent = bench.flush_ok("b")
    [install] = installs(sent)
    assert install.view.member_ids == ("a", "b")
    assert install.view.links == (("a", "b"),)
    assert install.priors == (Electorate(key=(1, 1), members=("a", "b", "c")),)
    assert (install.step, install.holder) == (10, "")
    assert Happened("node-failure", "c", "lost c", 10) in effects


def test_who_is_lost_because_its_key_was_revoked_is_shut_out(bench):
    key = "k" * 52
    bench.monitor.keyring = Keyring("own")
    bench.monitor.view = replace(
        bench.monitor.view,
        members=tuple(
            replace(each, addresses=(f"{key}@h:1",)) if each.id == "c" else each
            for each in bench.monitor.view.members
        ),
    )
    bench.monitor.keyring.merge(KeyringNews(revoked=(key,)), 0.0)
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a")
    effects, _ = bench.flush_ok("b")
    assert Happened("expelled", "c", "its key was revoked", 10) in effects


def test_a_flush_is_repeated_until_all_in_reach_have_answered(bench):
    bench.lose(("a", "c"), ("b", "c"))
    bench.scheduler.tick(REPEAT_EVERY_S)
    [(_, flush)] = bench.take_sent()
    assert isinstance(flush, Flush)


def test_a_minority_parks_and_goes_on_when_it_can_reach_enough_again(bench):
    bench.lose(("a", "b"), ("a", "c"))
    effects, sent = bench.flush_ok("a")
    assert (effects, sent) == ([Parked("only 1 of 3 members can be reached")], [])
    bench.overlay.heard(LinkNews(reporter="a", peer="b", version=99, state="open"))
    assert bench.flush_ok("b") == ([], [])  # Through b, c can be reached, too: wait for it.
    effects, sent = bench.flush_ok("c")
    assert effects[0] == Parked(None)
    assert installs(sent)[0].view.member_ids == ("a", "b", "c")


def test_members_whose_only_way_leads_through_one_that_fell_behind_wait_for_another_way():
    bench = Bench("abc", [("a", "b"), ("b", "c")])
    bench.receive("c", AbortRequest(node="c", key=(1, 1), step=10, reason="torn"))
    bench.flush_ok("a")
    bench.flush_ok("b", step=7)
    [parked], _ = bench.flush_ok("c")
    assert parked.reason.endswith("(there is no other way to c)")
    assert bench.scheduler.cut_off == {"c"}
    effects, sent = bench.lose(("a", "c"), state="open")
    assert effects[0] == Parked(None)
    assert installs(sent)[0].view.members == (member("a"), member("c"))
    assert not bench.scheduler.cut_off


def test_who_has_the_result_of_the_step_passes_it_on():
    bench = Bench()
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a", step=10)
    _, sent = bench.flush_ok("b", step=11, deal=(("b", 8),))
    [install] = installs(sent)
    assert (install.step, install.holder, install.deal) == (11, "b", (("b", 8),))


def test_the_newest_view_that_anybody_has_switched_to_counts_as_active(bench):
    newer = make_view("abd", [("a", "b"), ("a", "d"), ("b", "d")])
    newer = View(**{name: getattr(newer, name) for name in newer.__struct_fields__ if name != "seq"}, seq=2)
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a")
    old = Electorate(key=(1, 1), members=("a", "b", "c"))
    _, sent = bench.flush_ok("b", key=(1, 2), step=11, view=newer, priors=(old,))
    # Who does not know it: whole.
    assert [to for to, body in sent if isinstance(body, Install)] == [EVERYONE, "a"]
    install = installs(sent)[0]
    assert install.view.key > (1, 2)
    assert [each.key for each in install.priors] == [(1, 2), (1, 1)]


@pytest.mark.parametrize("flushes", [1, 2])
def test_what_came_into_force_with_a_step_that_only_others_have_completed_is_told_all_the_same(
    bench, flushes
):
    _, [(_, prepare)] = bench.receive("c", ScaleInRequest(node="c"))
    view, old = prepare.view, Electorate(key=(1, 1), members=("a", "b", "c"))
    for _ in range(flushes):
        bench.scheduler.start_flush("n is silent", 0.0)
    bench.flush_ok("a", number=flushes)
    effects, sent = bench.flush_ok("b", key=view.key, step=11, view=view, priors=(old,), number=flushes)
    assert installs(sent)
    assert effects == [Happened("left", "c", "now 2 members, 1 link", 10)]
    assert not bench.scheduler.queue


def test_what_was_proposed_and_came_into_force_nowhere_is_proposed_again(bench):
    bench.receive("c", ScaleInRequest(node="c"))
    bench.scheduler.start_flush("n is silent", 0.0)
    for node in "abc":
        effects, sent = bench.flush_ok(node)
    assert effects == []
    bench.enter(installs(sent)[0].view, 10)
    assert bench.proposed().member_ids == ("a", "b")


def test_a_scheduler_that_began_with_a_step_asks_for_the_commit_before(bench):
    """It may have to pass it on, and has none: whoever lacked the result waited for it, for ever."""
    bench.sync.began_here = True
    bench.scheduler.start_flush("elected", 0.0)
    [(_, flush)] = bench.take_sent()
    assert (flush.key, flush.step) == ((1, 1), 0)
    commit = Commit(key=(1, 1), step=9, switch=None, total=Contribution())
    bench.flush_ok("a", began_here=True)
    bench.flush_ok("b", commit=commit, deal=(("a", 1),))
    _, sent = bench.flush_ok("c", step=9)
    install = installs(sent)[0]
    assert (install.step, install.holder, install.commit, install.deal) == (10, "b", commit, (("a", 1),))


def test_if_nobody_has_a_result_those_go_on_who_began_last():
    bench = Bench("a", [("a", "j")], observers="j")
    bench.scheduler.start_flush("elected", 0.0)
    bench.flush_ok("j", step=9, began_here=True)
    _, sent = bench.flush_ok("a", began_here=True)
    install = installs(bench.take_sent() or sent)[0]
    assert (install.step, install.holder, install.view.node_ids) == (10, "", ("a",))


def test_a_joiner_that_began_after_a_step_has_no_result_of_it():
    """Only the dead have completed it, so the others do it over; without the joiner, which has heard too much."""
    bench = Bench("abc", [*TRIANGLE, ("a", "j"), ("b", "j")], observers="j")
    bench.lose(("a", "c"), ("b", "c"))
    newer = replace(make_view("abc", [*TRIANGLE, ("a", "j"), ("b", "j")], observers="j"), seq=2)
    bench.flush_ok("j", key=(1, 2), step=11, view=newer, began_here=True)
    bench.flush_ok("a")
    _, sent = bench.flush_ok("b")
    install = installs(sent)[0]
    assert (install.step, install.holder, install.commit) == (10, "", None)
    assert install.view.node_ids == ("a", "b")


def test_the_role_is_handed_over_by_a_scheduler_that_the_newest_view_has_dropped(bench):
    newer = make_view("bc", [("b", "c")])
    newer = View(**{name: getattr(newer, name) for name in newer.__struct_fields__ if name != "seq"}, seq=2)
    bench.scheduler.start_flush("elected", 0.0)
    bench.take_sent()
    old = Electorate(key=(1, 1), members=("a", "b", "c"))
    bench.flush_ok("a", step=11)
    bench.flush_ok("b", key=(1, 2), step=11, view=newer, priors=(old,))
    _, sent = bench.flush_ok("c", step=11)
    assert [to for to, body in sent if isinstance(body, Install)] == [EVERYONE, "c"]
    install = installs(sent)[0]
    assert (install.view.member_ids, install.view.scheduler) == (("b", "c"), "")
    assert ("a", Expelled(node="a", reason="the cluster went on without it", key=(1, 3))) in sent


def test_an_install_that_was_lost_is_sent_again(bench):
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a")
    _, sent = bench.flush_ok("b")
    [install] = installs(sent)
    bench.enter(install.view, 10)
    bench.take_sent()
    assert bench.flush_ok("b") == ([], [("b", install)])


def test_a_node_that_comes_back_after_the_cluster_went_on_is_told(bench):
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a")
    bench.enter(installs(bench.flush_ok("b")[1])[0].view, 10)
    bench.take_sent()
    told = [("c", Expelled(node="c", reason="the cluster went on without it", key=(1, 2)))]
    assert bench.flush_ok("c") == ([], told)
    assert bench.receive("c", AbortRequest(node="c", key=(1, 1), step=10, reason="no link")) == ([], told)


def observed():
    bench = Bench("abc", [*TRIANGLE, ("a", "o")], observers="o")
    bench.take_sent()
    return bench


def test_an_observer_may_ask_for_another_attempt_and_is_waited_for():
    bench = observed()
    [(_, flush)] = bench.receive(
        "o", AbortRequest(node="o", key=(1, 1), step=10, reason="lost the link o - b")
    )[1]
    assert isinstance(flush, Flush)
    for node in "abc":
        assert not installs(bench.flush_ok(node)[1])
    [install] = installs(bench.flush_ok("o")[1])
    assert install.view.observer_ids == ("o",)


def test_an_observer_that_does_not_answer_is_waited_for_once():
    bench = observed()
    bench.receive("b", AbortRequest(node="b", key=(1, 1), step=10, reason="torn"))
    for node in "abc":
        bench.flush_ok(node)
    bench.scheduler.tick(REPEAT_EVERY_S)
    [install] = installs(bench.take_sent())
    assert install.view.member_ids == ("a", "b", "c") and not install.view.observers


@pytest.mark.parametrize("key", [(1, 1), (0, 9)])
def test_an_observer_that_is_too_far_behind_is_let_go_and_costs_nobody_a_step(key):
    bench = observed()
    _, sent = bench.receive("o", AbortRequest(node="o", key=key, step=8, reason="lost the link o - b"))
    assert sent and all(isinstance(body, Prepare) and not body.view.observers for _, body in sent)


def commit(step):
    return Commit(key=(1, 1), step=step, switch=None, total=Contribution(weight=1.0))


def keep(bench, *steps):
    """The results of these steps, the last before the one under way."""
    bench.sync.kept = tuple(map(commit, steps))


def answered(bench, o_step, kept=3, **told):
    """What is installed if `o` has come to that step, and each member to 10 with so many results, or as `told`."""
    bench.receive("o", AbortRequest(node="o", key=(1, 1), step=o_step, reason="lost the link o - b"))
    for node in "abc":
        bench.flush_ok(node, **{"step": 10, "kept": kept} | told.get(node, {}))
    [install] = installs(bench.flush_ok("o", step=o_step)[1])
    return install


@pytest.mark.parametrize("o_step", [7, 8, 9])
def test_an_observer_that_is_several_steps_behind_gets_what_others_have_kept(o_step):
    bench = observed()
    keep(bench, 7, 8, 9)
    install = answered(bench, o_step)
    assert (install.view.observer_ids, install.holder, install.step) == (("o",), "a", 10)
    assert [*install.earlier, install.commit] == [*bench.sync.kept[o_step - 7 :]]


def test_one_that_was_made_a_member_before_it_had_the_state_gets_it_as_well():
    """It was two steps behind when the link was cut over which it was to hear of them."""
    links = [*TRIANGLE, ("a", "o"), ("b", "o")]
    bench = Bench("abc", links, observers="o")
    joining = (Entering(node="o", sources=(), blocking=True),)
    promoted = replace(make_view("abco", links, joining=joining), seq=2)
    bench.enter(promoted, step=10)
    bench.take_sent()
    keep(bench, 8, 9)
    bench.lose(("o", "b"), ("b", "o"))
    bench.receive("b", AbortRequest(node="b", key=(1, 2), step=10, reason="lost the link b - o"))
    for node in "abc":
        bench.flush_ok(node, key=(1, 2), kept=2)
    install, for_who_is_elsewhere = installs(bench.flush_ok("o", key=(1, 1), step=8)[1])
    assert install == for_who_is_elsewhere
    assert install.view.member_ids == ("a", "b", "c", "o") and "o" not in install.view.voter_ids
    assert (install.holder, install.earlier) == ("a", bench.sync.kept[:1])


def test_if_another_has_come_further_its_results_go_with_the_commits_that_the_scheduler_knows():
    """A flush often comes while a result spreads."""
    bench = observed()
    keep(bench, 7, 8, 9)
    install = answered(bench, 8, b={"step": 11, "commit": commit(10)})
    assert (install.view.observer_ids, install.holder, install.step) == (("o",), "b", 11)
    assert [each.step for each in (*install.earlier, install.commit)] == [8, 9, 10]


@pytest.mark.parametrize(
    ("o_step", "kept", "b"),
    [
        (7, 3, {}),
        (8, 1, {}),
        (8, 3, {"step": 11, "commit": commit(10), "kept": 1}),
        (7, 3, {"step": 11, "kept": 4}),
    ],
    ids=["no commit", "no result", "no result where it is to come from", "no commit of so long ago"],
)
def test_an_observer_that_lacks_what_nobody_has_kept_is_let_go_by_a_flush(o_step, kept, b):
    bench = observed()
    keep(bench, 8, 9)
    bench.scheduler.start_flush("lost the link a - b", 0.0)
    install = answered(bench, o_step, kept, b=b)
    assert not install.view.observers and not install.earlier


def test_who_has_most_of_what_is_lacked_serves_it():
    bench = observed()
    keep(bench, 8, 9)
    install = answered(bench, 8, kept=1, c={"kept": 2})
    assert (install.view.observer_ids, install.holder) == (("o",), "c")


def test_a_scheduler_of_another_history_knows_no_commits_for_joiners():
    """The others act in a view that it never was in, and of which its own is no predecessor."""
    bench = observed()
    keep(bench, 7, 8, 9)
    newer = replace(bench.scheduler.view, seq=9)
    bench.receive("b", AbortRequest(node="b", key=(1, 1), step=10, reason="torn"))
    bench.flush_ok("a", kept=3)
    for node in "bc":
        bench.flush_ok(node, key=newer.key, view=newer, kept=3)
    install = installs(bench.flush_ok("o", step=8)[1])[0]
    assert not install.view.observers


def test_a_member_with_a_vote_tears_no_step_that_is_over_though_somebody_joins():
    bench = observed()
    keep(bench, 7, 8, 9)
    lost = AbortRequest(node="b", key=(1, 1), step=8, reason="lost")
    assert bench.receive("b", lost) == ([], [])


def test_a_torn_step_is_flushed_and_one_that_is_over_is_not(bench):
    assert bench.receive("b", AbortRequest(node="b", key=(1, 1), step=8, reason="lost")) == ([], [])
    _, [(_, flush)] = bench.receive("b", AbortRequest(node="b", key=(1, 1), step=10, reason="lost"))
    assert isinstance(flush, Flush)


def test_a_proposal_that_a_flush_interrupts_is_made_again_after_it(bench):
    bench.receive("c", ScaleInRequest(node="c"))
    bench.receive("b", AbortRequest(node="b", key=(1, 1), step=10, reason="lost"))
    assert bench.scheduler.proposal is None
    bench.flush_ok("a")
    bench.flush_ok("b")
    _, sent = bench.flush_ok("c")
    bench.enter(installs(sent)[0].view, 10)
    assert bench.proposed().member_ids == ("a", "b")


# --- joining together ---


def asks(bench, node, *linked, **kwargs):
    request = ScaleOutRequest(node=node, addresses=(f"{node}:1",), linked=linked, **kwargs)
    _, sent = bench.receive(node, request)
    return [body for _, body in sent]


def is_linked(bench, node, rate_bps, *peers):
    reading = LinkReading(rate_bps=rate_bps, rate_source="probe")
    message = NeighborsReady(node=node, addresses=(f"{node}:1",), links=dict.fromkeys(peers, reading))
    _, sent = bench.receive(node, message)
    return [body for _, body in sent]


def alone(result_bytes=45_000_000, step_s=0.3):
    """A founder whose steps sum so much."""
    bench = Bench("a", [])
    bench.scheduler.admission.costs = lambda: (result_bytes, step_s)
    return bench


def gathered(bench):
    """What is sent when others have had the time to ask, too."""
    bench.now_s = bench.scheduler.wake_at_s
    bench.scheduler.tick(bench.now_s)
    return [body for _, body in bench.take_sent()]


def plans(bench):
    return {target: body for target, body in bench.take_sent() if isinstance(body, ReplicationPlan)}


def test_those_that_ask_at_once_are_let_in_together_and_serve_each_other():
    bench = alone()
    asks(bench, "j", degree=2)
    assert [member.id for member in asks(bench, "k", degree=2)[0].neighbors] == ["a", "j"]
    assert is_linked(bench, "j", 1e9, "a") == []
    is_linked(bench, "k", 1e9, "a", "j")
    [prepare] = gathered(bench)
    assert prepare.view.member_ids == ("a", "j", "k") and prepare.view.voter_ids == ("a",)
    assert set(prepare.view.links) == {("a", "j"), ("a", "k"), ("j", "k")}
    bench.enter(prepare.view, 11)
    found = plans(bench)
    assert [(each.fellows, each.turn, [*each.shards_by_source]) for each in found.values()] == [
        (("k",), (0, 2), ["a"]),
        (("j",), (1, 2), ["a"]),
    ]


def test_who_reaches_no_member_comes_in_through_one_that_joins_with_it():
    bench = alone()
    asks(bench, "j")
    assert "j" in [member.id for member in asks(bench, "k", "j")[0].neighbors]
    is_linked(bench, "k", 1e9, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    assert prepare.view.member_ids == ("a", "j", "k")
    bench.enter(prepare.view, 11)
    assert plans(bench)["k"].shards_by_source == {}


def test_who_hangs_on_one_that_is_not_there_yet_is_told_so_and_let_in_later():
    bench = alone()
    asks(bench, "j")
    assert is_linked(bench, "k", 1e9, "j") == [], "nobody asked for it"
    asks(bench, "k", "j")
    is_linked(bench, "k", 1e9, "j")
    bench.now_s = GATHER_S[1]
    bench.scheduler.tick(bench.now_s)
    assert bench.take_sent() == []
    waits, plan = asks(bench, "k", "j")
    assert waits == Answer(ok=True, text="waits for j to be let in")
    assert "a" in [member.id for member in plan.neighbors], "it may be reached by now"
    is_linked(bench, "k", 1e9, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    assert {*prepare.view.member_ids} == {"a", "j", "k"}


def test_nobody_waits_for_one_that_has_asked_long_ago():
    bench = alone(result_bytes=0)
    asks(bench, "gone")
    bench.now_s = FRESH_S + 0.1
    assert [member.id for member in asks(bench, "j")[0].neighbors] == ["a"]
    assert is_linked(bench, "j", 1e9, "a")


def test_a_founder_alone_waits_for_others_as_long_as_the_join_of_the_first_takes():
    """135 MB of state over 1 Gbit/s, and a step; for a small one, nobody waits. A larger cluster does not wait."""
    bench = alone()
    asks(bench, "j")
    assert is_linked(bench, "j", 1e9, "a") == []
    assert bench.scheduler.wake_at_s == pytest.approx(1.08 + 0.3)
    [prepare] = gathered(bench)
    bench.enter(prepare.view, 11)
    bench.take_sent()
    asks(bench, "k")
    assert is_linked(bench, "k", 1e9, "a")
    little = alone(result_bytes=1000)
    asks(little, "j")
    is_linked(little, "j", 1e9, "a")
    assert gathered(little)
    assert little.now_s < 0.001


@pytest.mark.parametrize(
    ("rate_bps", "least_s", "most_s"), [(10e9, 0.9, 1.1), (216e6, 1.4, 1.6), (1e6, 3.9, 4.1)], ids=str
)
def test_for_those_that_open_links_the_others_wait_as_long_as_it_pays(rate_bps, least_s, most_s):
    """45 MB of results are 135 MB of state: 5 s over 216 Mbit/s."""
    bench = alone()
    asks(bench, "j")
    asks(bench, "k")
    is_linked(bench, "j", rate_bps, "a")
    bench.scheduler.tick(least_s)
    assert bench.take_sent() == []
    assert least_s <= bench.scheduler.wake_at_s <= most_s
    bench.scheduler.tick(most_s)
    assert bench.proposed().node_ids == ("a", "j")


def test_who_asks_at_the_last_moment_has_time_to_open_its_links():
    bench = alone()
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    bench.now_s = 1.0  # j would be let in at 1.38.
    asks(bench, "k")
    assert bench.scheduler.wake_at_s == pytest.approx(2.0)
    bench.now_s = 1.4
    [prepare] = is_linked(bench, "k", 1e9, "a")
    assert prepare.view.node_ids == ("a", "j", "k")


def let_in(bench, rate_bps):
    """Node j joins over one link. Returns: whether the others wait for it, and what people are told."""
    asks(bench, "j")
    is_linked(bench, "j", rate_bps, "a")
    [prepare] = gathered(bench)
    told = bench.enter(prepare.view, 11)
    [started] = [each for each in told if isinstance(each, Happened) and each.kind == "replication"]
    return prepare.view.joining[0].blocking, started.detail


@pytest.mark.parametrize(
    ("result_bytes", "step_s", "blocking"),
    [
        (45_000_000, 0.3, True),  # 360 of 300 Mbit that pass in a step, ...
        (45_000_000, 0.5, True),
        (45_000_000, 1.0, False),  # ... and of 1000.
        (45_000_000, None, True),  # Nobody knows yet how long a step takes, and there is little to lose.
        (0, None, False),
    ],
)
def test_results_that_would_take_most_of_the_links_make_the_cluster_wait(result_bytes, step_s, blocking):
    is_blocking, told = let_in(alone(result_bytes, step_s), 1e9)
    assert is_blocking is blocking
    assert ("blocking" if blocking else "streaming") in told
    assert ("would take 120% of its links" in told) is (step_s == 0.3)


SOON = "the state is there in less than a step"


@pytest.mark.parametrize(
    ("result_bytes", "state_bytes", "step_s", "is_soon"),
    [
        (10_000_000, 30_000_000, 0.3, True),  # 0.24 s at 1 Gbit/s, and 0.05 s.
        (10_000_000, 30_000_000, 0.28, False),
        (10_000_000, 60_000_000, 0.55, True),
        (10_000_000, 61_000_000, 0.55, False),  # Most of it is not trained: results take little.
        (10_000, 30_000, 0.045, False),  # A join takes more than its bytes.
        (10_000_000, 0, 9.0, False),  # Nobody has told how large it is.
    ],
)
def test_a_trained_state_that_is_there_in_a_step_is_waited_for(result_bytes, state_bytes, step_s, is_soon):
    bench = alone(result_bytes, step_s)
    bench.scheduler.admission.state_bytes = lambda: state_bytes
    is_blocking, told = let_in(bench, 1e9)
    assert is_blocking is is_soon
    assert (SOON in told) is is_soon


def test_for_several_the_cluster_waits_sooner():
    bench = alone(45_000_000, 1.0)
    asks(bench, "j")
    asks(bench, "k")
    is_linked(bench, "j", 1e9, "a")
    is_linked(bench, "k", 1e9, "a")
    [prepare] = gathered(bench)
    assert [each.blocking for each in prepare.view.joining] == [True, True]


def test_one_that_cannot_be_let_in_makes_the_cluster_wait_for_no_other():
    """It had a link to one that died, and died itself: every join after that made all wait."""
    bench = alone(45_000_000, 1.0)
    asks(bench, "ghost")
    is_linked(bench, "ghost", 1e9, "gone")
    bench.now_s += GATHER_S[1]
    bench.scheduler.tick(bench.now_s)
    bench.now_s = 1000.0
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    assert [(each.node, each.blocking) for each in prepare.view.joining] == [("j", False)]


def test_who_asks_anew_while_it_is_made_a_member_wants_nothing_any_more():
    bench = Bench("abc", [*TRIANGLE, ("a", "j"), ("b", "j")], observers="j")
    _, sent = bench.receive("j", ScaleOutReady(node="j"))
    [view] = [body.view for _, body in sent if isinstance(body, Prepare)]
    asks(bench, "j", "a", "b")
    bench.enter(view, 11)
    assert "j" in bench.sync.view.voter_ids
    assert is_linked(bench, "j", 1e9, "a", "b") == []
    assert not bench.scheduler.requests and not bench.scheduler.admission.wanting


def test_those_that_came_in_together_get_their_votes_together_after_a_step():
    bench = alone()
    asks(bench, "j")
    asks(bench, "k")
    is_linked(bench, "j", 1e9, "a")
    is_linked(bench, "k", 1e9, "a", "j")
    [prepare] = gathered(bench)
    bench.enter(prepare.view, 11)
    bench.take_sent()
    assert prepare.view.voter_ids == ("a",)
    bench.scheduler.stepped(12.0)
    view = bench.proposed()
    told = [(each.kind, each.node) for each in bench.enter(view, 12) if isinstance(each, Happened)]
    assert view.voter_ids == ("a", "j", "k")
    assert told == [("joined", "j"), ("joined", "k")]
    bench.take_sent()
    assert bench.scheduler.stepped(14.0) == [] and bench.take_sent() == []


def test_votes_have_a_view_of_their_own_only_if_nothing_else_changes():
    bench = alone()
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    bench.enter(prepare.view, 11)
    bench.take_sent()
    bench.sync.frozen = True
    bench.scheduler.stepped(12.0)
    bench.receive("j", ScaleInRequest(node="a"))
    bench.sync.frozen = False
    bench.scheduler.changes.propose_next(12.0)
    view = bench.proposed()
    assert (view.member_ids, view.voter_ids) == (("j",), ("j",))
    bench.enter(view, 12)
    assert not bench.scheduler.queue and bench.take_sent() == []


def test_who_got_a_vote_as_the_scheduler_left_is_told_of_by_its_successor():
    """The view that let it go gave the vote, too, and nobody is left who had proposed it."""
    bench = Bench("ab", [("a", "b")])
    without_vote = (Entering(node="b", sources=(), blocking=True),)
    before = replace(make_view("zab", [("z", "a"), ("a", "b")]), joining=without_vote)
    told = [(each.kind, each.node) for each in bench.scheduler.succeeds(before)]
    assert told == [("joined", "b"), ("left", "z")]


@pytest.mark.parametrize("is_open", [True, False], ids=["open before j is in", "open while j pulls"])
def test_who_comes_next_does_not_wait_for_a_vote_which_its_view_gives_too(is_open):
    """j has no vote yet, and k has asked. The step under way takes as long as j pulls."""
    bench = alone()
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    asks(bench, "k")
    if is_open:
        is_linked(bench, "k", 1e9, "a")
    bench.enter(prepare.view, 11)
    bench.scheduler.stepped(bench.now_s)
    if is_open:
        bench.scheduler.tick(bench.now_s)
        view = bench.proposed()
    else:
        assert not any(isinstance(body, Prepare) for _, body in bench.take_sent())
        [prepare] = is_linked(bench, "k", 1e9, "a")
        view = prepare.view
    told = [(each.kind, each.node) for each in bench.enter(view, 12) if isinstance(each, Happened)]
    assert view.member_ids == ("a", "j", "k") and view.voter_ids == ("a", "j")
    assert told == [("joined", "j"), ("replication", "k")]


def test_who_opens_no_links_holds_up_a_vote_for_one_step_at_most():
    bench = alone()
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    asks(bench, "stuck")
    bench.enter(prepare.view, 11)
    bench.take_sent()
    bench.scheduler.stepped(bench.now_s)
    assert bench.take_sent() == []
    asks(bench, "stuck")
    bench.take_sent()
    bench.scheduler.stepped(bench.now_s)
    assert bench.proposed().voter_ids == ("a", "j")


def test_a_view_names_no_more_joiners_than_a_message_takes():
    base = make_view("a", [])
    crowd = [Entrant(f"j{index}", neighbors=("a",), blocking=True) for index in range(100)]
    first = views.apply_change(base, AddJoiners(joiners=tuple(crowd)), (1, 2), 5)
    assert len(first.joining) == views.MAX_JOINING
    second = views.apply_change(first, AddJoiners(joiners=tuple(crowd)), (1, 4), 7)
    assert len(second.joining) == 100 - views.MAX_JOINING and len(second.members) == 101


def test_a_flush_gives_nobody_a_vote_and_any_other_view_to_all_that_were_members():
    bench = alone()
    asks(bench, "j")
    is_linked(bench, "j", 1e9, "a")
    [prepare] = gathered(bench)
    view = prepare.view
    assert views.survivors(view, {"a", "j"}, {*view.links}, (1, 9), "a").voter_ids == ("a",)
    wanting = AddJoiners(joiners=(Entrant("k", neighbors=("j",), blocking=True),))
    for change in (
        Votes(),
        AddLink(link=("j", "o")),
        Promote(node="o", early=True),
        Remove(node="o"),
        wanting,
    ):
        with_o = replace(view, observers=(Member(id="o"),), links=(*view.links, ("a", "o")))
        assert views.apply_change(with_o, change, (1, 9), 5).voter_ids == ("a", "j")
    assert views.apply_change(view, Remove(node="a"), (1, 9), 5).voter_ids == ("j",)
    with pytest.raises(Nothing, match="all members have a vote"):
        views.apply_change(make_view("ab", [("a", "b")]), Votes(), (1, 9), 5)


# --- pure steps from view to view ---


def test_seniority_is_the_order_in_which_members_joined():
    view = make_view("ab", [("a", "b"), ("b", "j")], observers="j")
    assert views.apply_change(view, Promote(node="j"), (1, 2), step=5).member_ids == ("a", "b", "j")


@pytest.mark.parametrize(
    "change",
    [
        AddJoiners(joiners=(Entrant("b", neighbors=("a",)),)),
        AddJoiners(joiners=(Entrant("j", neighbors=("gone",)),)),
        Promote(node="j"),
        Remove(node="x"),
        AddLink(link=("a", "b")),
        AddLink(link=("a", "x")),
        RemoveLink(link=("b", "c")),
    ],
)
def test_a_change_that_changes_nothing_is_void(change):
    with pytest.raises(Nothing):
        views.apply_change(make_view("abc", [("a", "b"), ("a", "c")]), change, (1, 2), step=5)


def test_the_last_member_cannot_be_removed():
    with pytest.raises(Nothing, match="a is the last member"):
        views.apply_change(make_view("a", []), Remove(node="a"), (1, 2), step=5)


def test_a_link_that_failed_goes_whatever_becomes_of_the_overlay():
    view = make_view("ab", [("a", "b")])
    with pytest.raises(PlanInfeasible):
        views.apply_change(view, RemoveLink(link=("a", "b")), (1, 2), step=5)
    assert views.apply_change(view, RemoveLink(link=("a", "b"), lost=True), (1, 2), step=5).links == ()


def test_survivors_keep_their_links_and_use_others_only_where_they_would_fall_apart():
    base = make_view("abc", [("a", "b"), ("b", "c")])
    live = {("a", "b"), ("a", "c")}
    view = views.survivors(base, {"a", "b", "c"}, live, (2, 2), "a")
    assert view.links == (("a", "b"), ("a", "c"))
    live = {("a", "b"), ("b", "c"), ("a", "c")}
    assert views.survivors(base, {"a", "b", "c"}, live, (2, 2), "a").links == (("a", "b"), ("b", "c"))


def test_an_observer_stays_if_any_member_left_can_serve_it():
    """Seed 400: its only link of the view was lost, another connection was open."""
    base = make_view("abc", [*TRIANGLE, ("a", "o")], observers="o")
    view = views.survivors(base, {"b", "c", "o"}, {("b", "c"), ("b", "o")}, (2, 2), "b")
    assert (view.observer_ids, view.links) == (("o",), (("b", "c"), ("b", "o")))
    view = views.survivors(base, {"b", "c", "o"}, {("b", "c")}, (2, 2), "b")
    assert (view.observer_ids, view.links) == ((), (("b", "c"),))


def test_when_a_link_becomes_slow_the_same_view_is_proposed_with_other_trees(bench):
    bench.scheduler.admission.costs = lambda: (20_000_000, 1.0)
    slow = {*next(iter(bench.sync.view.trees[0].parent.items()))}
    before, told = bench.sync.view, []
    for second in range(20):
        bench.now_s = float(second)
        for node in "abc":
            readings = {
                peer: LinkReading(sent_bps=1e6 if {node, peer} == slow else 1e9) for peer in {*"abc"} - {node}
            }
            told += bench.receive(node, Report(node=node, readings=readings))[1]
        if told:
            break
    assert 4 <= second < 10
    [(_, prepare)] = told
    assert all({*each} != slow for tree in prepare.view.trees for each in tree.parent.items())
    assert replace(prepare.view, seq=1, trees=()) == replace(before, trees=())
    [happened] = bench.enter(prepare.view, step=11)
    assert happened.kind == "new-plan"


def test_if_the_last_that_had_a_vote_is_gone_the_others_have_one():
    """Nobody could answer whether they are a quorum."""
    base = make_view("ab", [("a", "b")], joining=(Entering(node="b", sources=(), blocking=True),))
    assert views.survivors(base, {"a", "b"}, {("a", "b")}, (1, 2), "a").voter_ids == ("a",)
    assert views.survivors(base, {"b"}, set(), (1, 2), "b").voter_ids == ("b",)


def test_a_link_that_somebody_had_closed_is_taken_back_once_a_join_has_brought_it_back(bench):
    _, [(_, prepare)] = bench.receive("cli", DisconnectLinkRequest(a="a", b="c", asker="cli"))
    closed = prepare.view
    bench.enter(closed, 11)
    bench.take_sent()
    heals = ConnectLinkRequest(a="a", b="c", asker="a", healed=True)
    assert bench.receive("a", heals) == ([], [])
    bench.enter(replace(make_view("abc", TRIANGLE), seq=11), 12)  # c was gone meanwhile.
    bench.enter(replace(closed, seq=12), 13)  # The link was lost.
    bench.take_sent()
    told, _ = bench.receive("a", heals)
    assert [each.detail for each in told] == ["it carries again"]


def test_a_plan_names_no_more_neighbours_than_a_message_takes():
    names = [f"n{index:02}" for index in range(64)]
    bench = Bench(["a", *names[1:]], [("a", each) for each in names[1:]])
    asks(bench, "j", degree=64)
    plan = asks(bench, "k", degree=64)[-1]
    assert len(plan.neighbors) == MAX_NEIGHBORS
    envelope = Envelope(source="a", target="k", serial=1, body=plan)
    assert decode(encode(envelope)) == envelope


# --- a policy that finds no trees ---

SQUARE = [("a", "b"), ("a", "d"), ("b", "c"), ("c", "d")]


def trees(view):
    return len(view.trees), {node for tree in view.trees for node in (tree.root, *tree.parent)}


def test_who_is_left_of_a_ring_goes_on_over_one_tree_and_people_are_told_once():
    """PlanInfeasible ended the node that scheduled, and then the next one."""
    bench = Bench("abcd", SQUARE, policy="ring")
    bench.lose(("a", "b"), ("c", "b"))
    bench.flush_ok("c")
    bench.flush_ok("d")
    told, sent = bench.flush_ok("a")
    install = installs(sent)[0]
    assert trees(install.view) == (1, {*"acd"})
    [notice] = [each for each in told if isinstance(each, Happened) and each.kind == "new-plan"]
    assert notice.detail.startswith("one for all sums, as the sync policy finds no others (ring: no Ham")
    told = bench.enter(install.view, step=10)
    assert trees(bench.proposed()) == (3, {*"acd"})  # A repair closes the ring again.
    assert not [each for each in told if isinstance(each, Happened) and each.kind == "new-plan"]


def test_a_joiner_that_no_ring_goes_through_is_let_in_over_one_tree():
    """It was told "next" for ever."""
    bench = Bench("abcd", [*SQUARE, ("a", "j"), ("c", "j")], observers="j", policy="ring")
    told, sent = bench.receive("j", ScaleOutReady(node="j"))
    [prepare] = [body for _, body in sent if isinstance(body, Prepare)]
    assert trees(prepare.view) == (1, {*"abcdj"})
    assert [each.kind for each in told] == ["new-plan"]


def test_who_asks_for_what_the_policy_cannot_do_is_told_why():
    bench = Bench("abcd", [*SQUARE, ("a", "c")], policy="ring")
    _, [(_, answer)] = bench.receive("cli", DisconnectLinkRequest(a="a", b="b", asker="cli"))
    assert not answer.ok and "ring" in answer.text
    assert bench.scheduler.proposal is None and not bench.scheduler.unplanned


def test_an_error_in_a_policy_of_the_users_own_ends_no_scheduler():
    bench = Bench()
    bench.scheduler.policy = custom(lambda graph: [][0])
    bench.lose(("a", "c"), ("b", "c"))
    bench.flush_ok("a")
    told, sent = bench.flush_ok("b")
    assert trees(installs(sent)[0].view) == (1, {*"ab"})
    assert "the callable raises IndexError: list index out of range" in told[0].detail


def test_a_ring_of_more_nodes_than_a_view_holds_trees_is_one_tree():
    """Nobody could decode the view."""
    names = [f"n{index:02}" for index in range(65)]
    ring = [tuple(sorted((names[index - 1], names[index]))) for index in range(65)]
    bench = Bench(["a"], [])
    bench.scheduler.policy = POLICIES["ring"]
    view = replace(make_view(names, ring), trees=())
    assert trees(bench.scheduler.planned(view)) == (1, {*names})
    assert "65" in bench.scheduler.unplanned
    many = [views.SpanningTree("a", {"b": "a"}, 1 / 65)] * 65
    with pytest.raises(PlanInfeasible, match="65 trees"):
        views.with_trees(make_view("ab", [("a", "b")]), nx.Graph([("a", "b")]), lambda graph: many)


@pytest.mark.parametrize(("observers", "chunks", "bundle"), [("", 250, 250), ("b", 250, 1), ("", 0, 1)])
def test_all_chunks_are_one_message_only_where_none_is_sent(observers, chunks, bundle):
    """Who listens to one member gets all results, and a frame has bounds."""
    links = [("a", "b")] if observers else []
    graph = nx.Graph()
    graph.add_node("a")
    graph.graph["result"] = 2_000_000 * chunks, chunks
    view = views.with_trees(make_view("a", links, observers), graph, POLICIES["packed"])
    assert view.bundle == bundle
