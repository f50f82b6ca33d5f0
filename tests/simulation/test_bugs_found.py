"""Bugs that random runs have found, each as the shortest story that shows it. The seeds were of their time."""

from dataclasses import replace as with_
from itertools import pairwise
from unittest import mock

import msgspec
import pytest
from scripted import Scripted

from chaosnet.node.agent.core import Phase
from chaosnet.protocols.asking import IN_VAIN, MAX_UNANSWERED, JoinState
from chaosnet.protocols.events import Contributed, LeaveWanted, LocalReady, NotReached, Received
from chaosnet.protocols.messages import (
    EVERYONE,
    Contribution,
    Envelope,
    Expelled,
    Flush,
    LinkNews,
    Losses,
    Outlived,
    Prepare,
    ScaleOutRequest,
)
from chaosnet.protocols.overlay import LinkState
from chaosnet.protocols.scale_out import LIFE_STEP, Joiner
from chaosnet.simulator.random_run import run


@pytest.fixture
def trio():
    return Scripted().grow("n1", "n2", "n3")


def assert_settled(cluster, *members):
    cluster.settle(3.0)
    assert not cluster.unsettled(cluster.now_s - 1.0), cluster.story()
    assert sorted(node.name for node in cluster.active()) == sorted(members)


def until(cluster, condition, within_s=5.0):
    """Run event by event until `condition` holds."""
    deadline_s = cluster.now_s + within_s
    while not condition():
        assert cluster.now_s < deadline_s, cluster.story()
        cluster.run(cluster.queue[0][0])


def test_a_leaver_that_is_all_that_is_left_finishes_by_itself():
    """Seed 170: a leaving node did not stand for election, so nobody let it go."""
    cluster = Scripted().grow("n1", "n2")
    cluster.tell("n2", LeaveWanted())
    cluster.crash("n1")
    assert_settled(cluster)
    assert cluster.nodes["n2"].done == "Left"


def test_when_all_that_are_left_want_to_leave_they_elect_one_of_them(trio):
    """Seed 490."""
    trio.crash("n1")
    trio.tell("n2", LeaveWanted())
    trio.tell("n3", LeaveWanted())
    assert_settled(trio)
    assert [trio.nodes[name].done for name in ("n2", "n3")] == ["Left", "Left"]


def test_a_leaver_does_not_wait_for_a_parked_cluster_for_ever(trio):
    trio.crash("n2")
    trio.crash("n3")
    trio.settle()
    assert trio.agent("n1").parked == "only 1 of 3 members can be reached"
    trio.tell("n1", LeaveWanted())
    trio.settle(8.0)
    assert trio.nodes["n1"].done == "Left"


def test_the_farewell_is_said_before_the_connections_close(trio):
    """Seed 273: nobody ever got one, so who had left counted as missing and not as gone."""
    trio.tell("n3", LeaveWanted())
    trio.settle()
    assert ("n3", "all", "Farewell") in trio.exchange


def test_who_learns_of_a_view_late_learns_who_has_left_it(trio):
    """Seed 189: a link was lost to a node that the reporter's newest view had dropped, and nobody was told."""
    trio.cut("n1", "n3")  # n3 learns from n2 alone that n1 has left.
    trio.tell("n1", LeaveWanted())
    trio.settle(4.0)
    trio.heal("n1", "n3")
    assert_settled(trio, "n2", "n3")


def test_a_lone_member_outlives_the_founder_that_has_just_let_it_in():
    """Seed 166: the view before had one voter, and that had died."""
    cluster = Scripted().grow("n1")
    cluster.add("n2", seeds=["n1"])
    until(cluster, lambda: "n2" in cluster.nodes and cluster.agent("n2").sync.view is not None)
    until(cluster, lambda: "n2" in cluster.members("n2"))
    assert [each.members for each in cluster.agent("n2").sync.priors] == [("n1",)]
    cluster.crash("n1")
    assert_settled(cluster, "n2")


def test_a_node_that_the_others_went_on_without_is_told_however_it_comes_back(trio):
    """Seeds 137, 216, 490 and more: it asked, and nobody answered a stranger."""
    for name in ("n3", "n2"):
        others = [each for each in ("n1", "n2", "n3") if each != name]
        for other in others:
            trio.cut(name, other)
        trio.settle(4.0)
        assert trio.agent(name).parked
        for other in others:
            trio.heal(name, other)
        trio.settle(6.0)
        assert name in trio.members("n1")
    assert trio.returns == 2  # Each was told, and came back as a new life.


def test_a_scheduler_that_was_cut_off_is_told_too(trio):
    """Seeds 137 and 285: it was flushing by itself and asked only itself."""
    trio.cut("n1", "n2")
    trio.cut("n1", "n3")
    trio.settle(4.0)
    assert trio.members("n2") == ("n2", "n3")
    trio.heal("n1", "n2")
    trio.heal("n1", "n3")
    assert_settled(trio, "n2", "n3", "n1")
    assert trio.returns == 1


def test_a_candidate_that_was_not_elected_leaves_a_working_scheduler(trio):
    """Seed 21: its higher term stayed, and the scheduler's flushes were ignored without a word."""
    for name in ("n2", "n3"):
        trio.agent(name).election.adopt(7)
    trio.cut("n2", "n3")
    assert_settled(trio, "n1", "n2", "n3")
    assert trio.agent("n1").election.term == trio.agent("n2").election.term > 7


def test_what_an_earlier_life_said_of_a_link_is_outdone_at_once(trio):
    """Seed 521: restarted with its clock set back, it numbered its news up one by one, for ever."""
    n1 = trio.agent("n1")
    past = LinkNews(reporter="n1", peer="n3", version=n1.reporter.version + 10**12, state="silent")
    trio.tell("n2", Received("n3", Losses(news=(past,))))
    trio.settle(0.5)
    assert n1.reporter.version == past.version + 1
    assert all(trio.agent(name).overlay.news["n1", "n3"].state.value == "open" for name in ("n1", "n2", "n3"))


def test_who_knows_what_an_earlier_life_said_of_a_link_tells_the_present_one(trio):
    """Hard seed 1086790: the loss of a link was older news than that of the life before, and was dropped."""
    n1, n2 = trio.agent("n1"), trio.agent("n2")
    past = LinkNews(reporter="n1", peer="n3", version=n1.reporter.version + 10**12, state="open")
    n2.overlay.heard(past)
    trio.cut("n1", "n3")
    trio.settle(2.0)
    assert n2.overlay.news["n1", "n3"].version > past.version
    assert n2.overlay.news["n1", "n3"].state.value == "silent"


def test_what_an_earlier_life_said_of_our_link_is_not_believed(trio):
    """Hard seed 1086790: numbered below what the present life had said since of another link."""
    n1 = trio.agent("n1")
    n1.reporter.version += 10**12
    trio.cut("n1", "n3")
    trio.settle(2.0)
    n1.overlay.news["n1", "n3"] = with_(n1.overlay.news["n1", "n3"], version=5)
    past = LinkNews(reporter="n1", peer="n3", version=1000, state="open")
    trio.tell("n1", Received("n2", Envelope(source="n2", target=EVERYONE, serial=2**62, body=past)))
    assert n1.overlay.news["n1", "n3"].state.value == "silent"


def test_whoever_is_no_member_does_not_testify_that_a_member_is_dead(trio):
    """Seed 2011052: the dead one had gone on alone before, and the other one of two was told by an observer."""
    trio.add("n4", seeds=["n1"], degree=3)
    until(trio, lambda: "n4" in trio.nodes and trio.agent("n4").sync.view is not None)
    n4 = trio.agent("n4")
    assert n4.phase is Phase.JOINING
    trio.cut("n1", "n2")  # Else they see it themselves.
    trio.cut("n1", "n3")
    trio.crash("n1")
    trio.settle(0.3)
    assert n4.overlay.news["n4", "n1"].state is LinkState.SILENT
    assert trio.agent("n2").overlay.crashed == set()


def test_once_anybody_is_heard_in_a_newer_view_no_crash_is_proof(trio):
    """Hard seed 1064818: not the dead one itself had been heard there, but one whom it had let in."""
    n2 = trio.agent("n2")
    term, seq = n2.sync.view.key
    news = LinkNews(reporter="n9", peer="n1", version=1, state="open", key=(term, seq + 1), life=1)
    trio.crash("n1")
    trio.tell("n2", Received("n3", Envelope(source="n9", target=EVERYONE, serial=1, body=news)))
    assert n2.overlay.left_behind
    trio.settle(0.1)
    assert n2.overlay.crashed == set()
    trio.settle(2.0)  # Two of three are a majority all the same.
    assert trio.members("n2") == ("n2", "n3")
    assert not n2.overlay.left_behind


def test_a_flush_from_before_a_joiner_came_does_not_stop_it(trio):
    """Hard seed 1078987: it never heard of its end."""
    trio.cut("n2", "n3")
    trio.settle(3.0)
    old = Flush(term=1, number=1, scheduler="n1", key=(1, 3), step=3)
    assert trio.agent("n1").follower.ended == (old.term, old.number)
    trio.add("n4", seeds=["n1"], degree=3)
    trio.settle(3.0)
    assert "n4" in trio.members("n1")
    trio.agent("n4").note(old, trio.now_s)
    assert not trio.agent("n4").sync.frozen


def test_several_may_join_at_once_though_news_overtakes_a_plan(monkeypatch):
    """PREPARE, told against the view of a joiner's plan, is small, and may come first: it was dropped."""
    orphaned = []
    monkeypatch.setattr(Joiner, "orphaned", lambda self, reason, now_s: orphaned.append(reason) or [])
    for seed in range(8):
        crowd = Scripted(seed).grow("n1", "n2", "n3", "n4")
        crowd.max_delay_s = 0.02
        for number in range(5):
            crowd.add(f"j{number}", seeds=["n2"], degree=2)
        until(crowd, lambda crowd=crowd: len(crowd.members("n1")) == 9, within_s=20.0)
    assert orphaned == []


def test_who_waits_says_where_it_is():
    """Seed 375513: a neighbour was out itself when their link opened, and came back to the others later."""
    halves, said = Scripted().grow("n1", "n2", "n3", "n4"), []
    for name in ("n1", "n2"):
        for other in ("n3", "n4"):
            halves.cut(name, other)
    halves.settle(4.0)
    assert halves.agent("n3").parked
    halves.on_message = lambda sender, receiver, message: said.append(message)
    halves.settle(1.5)
    told = [
        each.body
        for each in said
        if isinstance(each, Envelope) and (each.source, each.target) == ("n3", "n4")
    ]
    key = halves.agent("n3").sync.view.key
    assert any(isinstance(body, LinkNews) and (body.reporter, body.key) == ("n3", key) for body in told)
    effects = halves.agent("n1").handle(
        Received("n2", Envelope(source="n3", target="n1", serial=2**62, body=told[-1])), halves.now_s
    )
    answers = [each.message.body for each in effects if isinstance(getattr(each, "message", None), Envelope)]
    assert [(body.node, body.key) for body in answers] == [("n3", halves.agent("n1").sync.view.key)]


def test_a_joiner_that_reaches_one_member_only_joins_by_that_one():
    """The scheduler chose the members with the fewest links, again and again, whom no way led to from there."""
    five = Scripted().grow("n1", "n2", "n3", "n4", "n5")
    for name in ("n1", "n2", "n3", "n4"):
        five.cut(name, "j")
    five.add("j", seeds=["n5"], degree=2)
    until(five, lambda: "j" in five.members("n1"), within_s=20.0)
    assert five.agent("n1").sync.view.neighbors("j") == ("n5",)


def test_observers_tell_a_newcomer_of_an_earlier_life_of_its_name(trio):
    """Hard seed 1082987: all members had forgotten, and the observer took the newcomer for dead."""
    trio.add("n4", seeds=["n1"], degree=3)
    until(trio, lambda: "n4" in trio.nodes and trio.agent("n4").sync.view is not None)
    n4 = trio.agent("n4")
    assert n4.phase is Phase.JOINING
    n4.overlay.lives.latest["n9"] = (9, 9)
    request = Envelope(source="n9", target=EVERYONE, serial=1, body=ScaleOutRequest(node="n9", life=5))
    sent = [getattr(each, "message", None) for each in n4.handle(Received("n1", request), trio.now_s)]
    assert Outlived(life=5, later=9) in [each.body for each in sent if isinstance(each, Envelope)]


def test_a_joiner_is_not_let_in_as_of_a_life_that_it_lives_no_more(trio):
    """Seed 1066384: what it said of its later life was lost, and the scheduler had planned for the earlier one."""
    trio.add("n4", seeds=["n1"], degree=3)
    until(trio, lambda: "n4" in trio.nodes and trio.agent("n4").joiner is not None)
    n4 = trio.agent("n4")
    until(trio, lambda: n4.joiner.state is JoinState.WAITING)
    n4.joiner.asking.say(life=n4.life + 1)
    n4.reporter.outlived(n4.life + 1)  # And nobody hears of it.
    until(trio, lambda: "n4" in trio.members("n1"), within_s=20.0)
    assert trio.agent("n1").sync.view.find("n4").life == n4.life


def test_two_that_are_told_of_the_same_earlier_life_do_not_take_the_same_next_one():
    """Seed 1066384: it had had that life before, and messages with the serials of then passed for old."""
    lives = set()
    for seed in (1, 2):
        trio = Scripted(seed).grow("n1", "n2", "n3")
        trio.add("n4", seeds=["n1"], degree=3)
        until(trio, lambda trio=trio: "n4" in trio.nodes and trio.agent("n4").joiner is not None)
        n4 = trio.agent("n4")
        told = Outlived(life=n4.life, later=10**15)
        n4.handle(Received("n1", Envelope(source="n1", target="n4", serial=2**62, body=told)), trio.now_s)
        lives.add(n4.life)
    assert len(lives) == 2
    assert min(lives) > 10**15 + LIFE_STEP


def test_an_old_flush_does_not_stop_what_was_installed_after_it(trio):
    """Seed 54: it came late over a link that had been held up, and the node was installed once more."""
    trio.cut("n2", "n3")
    trio.settle(3.0)
    n2 = trio.agent("n2")
    term, number = n2.follower.ended
    flush = Flush(term=term, number=number, scheduler="n1", key=n2.sync.view.key, step=n2.sync.step)
    n2.note(flush, trio.now_s)
    assert not n2.sync.frozen
    assert n2.follower.flush is None


def test_a_restarted_process_does_not_pass_for_the_member_that_died(trio):
    """The flush waited for an answer of the dead member, because somebody of its name could be reached."""
    trio.crash("n3")
    trio.add("n3", seeds=["n1"], degree=2)
    assert_settled(trio, "n1", "n2", "n3")
    assert trio.members("n1")[-1] == "n3"


def test_a_process_may_be_started_again_under_its_name_as_often_as_it_dies(trio):
    """Seed 1447: it asked at two nodes at once, and that passed for asking once more; so did asking a year later."""
    trio.pause("n1", 0.5)  # The scheduler hears of the death and of both requests at once, in any order.
    for _ in range(2):
        trio.crash("n3")
        trio.add("n3", seeds=["n1", "n2"], degree=2)
        assert_settled(trio, "n1", "n2", "n3")


def test_a_joiner_of_a_parked_cluster_gives_up_and_says_why(trio):
    """Seeds 1081 and 1323: ready, it told a dead cluster so for ever."""
    trio.add("n4", seeds=["n3"], degree=3)
    until(
        trio, lambda: trio.agent("n4").joiner is not None and trio.agent("n4").joiner.state.value == "ready"
    )
    for name in ("n1", "n2"):
        trio.crash(name)
    trio.settle(60.0)
    assert trio.nodes["n4"].done == "JoinFailed"
    assert trio.agent("n3").parked


def test_a_connection_that_breaks_between_two_who_live_is_no_crash():
    """Seed 24: both of two went on alone after a reset connection, each sure that the other had died."""
    pair = Scripted().grow("n1", "n2")
    pair.reset("n1", "n2")
    pair.settle(0.3)
    assert pair.agent("n2").overlay.crashed == set()
    pair.settle(5.0)  # They wait for each other, and are linked again: neither goes on alone.
    assert_settled(pair, "n1", "n2")
    assert {key[0] for key in pair.views} == {1}, "nobody had to be elected"


def test_two_survive_the_crash_of_either():
    pair = Scripted().grow("n1", "n2")
    pair.crash("n1")
    pair.settle(1.0)
    assert pair.members("n2") == ("n2",)


def test_a_member_whose_clock_was_set_back_outdoes_what_another_hears_of_its_later_life():
    """Seed 2324271: the other took it for dead, and said that it is parked, though steps went on."""
    duo = Scripted().grow("n1", "n2")
    n1, n2 = duo.agent("n1"), duo.agent("n2")
    later = n1.life + (1 << 40)
    late = LinkNews(reporter="n1", peer="n9", version=later + 1, state=LinkState.OPEN.value, life=later)
    heard = Envelope(source="n9", target="n2", serial=1, body=late)
    duo._perform_all(duo.nodes["n2"], n2.handle(Received("n1", heard), duo.now_s))
    assert_settled(duo, "n1", "n2")
    assert n2.overlay.reachable == {"n1", "n2"}
    assert n2.parked is None
    assert (duo.agent("n1"), duo.agent("n2")) == (n1, n2)
    duo.crash("n1")
    assert_settled(duo, "n2")


def test_a_member_whose_clock_was_set_back_is_asked_until_it_has_shown_that_it_lives():
    """What it had told before was lost on the way to the other."""
    duo = Scripted().grow("n1", "n2")
    n1, n2 = duo.agent("n1"), duo.agent("n2")
    later = n1.life + (1 << 40)
    n1.reporter.outdo(later + 9, n1.member_key, duo.now_s)  # And nobody hears of it.
    late = LinkNews(reporter="n1", peer="n9", version=later + 1, state=LinkState.OPEN.value, life=later)
    heard = Envelope(source="n9", target="n2", serial=1, body=late)
    duo._perform_all(duo.nodes["n2"], n2.handle(Received("n1", heard), duo.now_s))
    assert n2.overlay.lives.reborn == {"n1"}
    assert_settled(duo, "n1", "n2")
    assert n2.overlay.reachable == {"n1", "n2"}
    assert n2.parked is None


def test_a_member_that_asks_to_be_let_in_again_keeps_the_life_that_the_view_names(trio):
    """A blocking joiner is a member before it has the state, and may ask for it again."""
    trio.add("n4", seeds=["n1"], degree=3, blocking=True)
    until(trio, lambda: "n4" in trio.nodes and trio.agent("n4").phase is Phase.MEMBER, within_s=20.0)
    n4 = trio.agent("n4")
    life = n4.life
    n4.joiner.standing.state = JoinState.ASKED
    envelope = Envelope(source="n1", target="n4", serial=1, body=Outlived(life=life, later=life + 5))
    n4.handle(Received("n1", envelope), trio.now_s)
    assert n4.life == life
    assert n4.reporter.version > life + 5


def test_the_death_of_one_that_is_back_and_has_not_said_where_it_was_proves_nothing():
    """Seed 2662424: it had gone on alone, and let another in; both sides had a scheduler of one term."""
    duo = Scripted().grow("n1", "n2")
    duo.cut("n1", "n2")
    duo.settle(5.0)
    assert duo.members("n1") == ("n1",)
    duo.heal("n1", "n2")
    until(duo, lambda: "n1" in duo.agent("n2").relay.peers, within_s=20.0)
    duo.crash("n1", arrives=0.0)
    duo.settle(5.0)
    assert duo.members("n2") == ("n1", "n2")
    assert duo.agent("n2").parked == "only 1 of 2 members can be reached"


def test_the_death_of_one_that_was_started_again_proves_nothing_of_the_life_before():
    """It had gone on alone, and let another in, before it died for the first time. (Found by thinking.)"""
    duo = Scripted().grow("n1", "n2")
    duo.cut("n1", "n2")
    duo.settle(5.0)
    duo.add("j", seeds=["n1"])
    duo.settle(5.0)
    assert duo.members("n1") == ("n1", "j")
    duo.crash("n1")
    for other in ("n1", "n2"):
        duo.cut("j", other)
    duo.heal("n1", "n2")
    duo.add("n1", seeds=["n2"])
    until(duo, lambda: duo.agent("n2").deaths.placed.get("n1") == duo.agent("n1").life, within_s=20.0)
    duo.crash("n1")
    duo.settle(5.0)
    assert duo.members("n2") == ("n1", "n2")
    assert duo.agent("n2").parked == "only 1 of 2 members can be reached"


def test_who_saw_a_node_dying_that_lives_takes_it_back(trio):
    """Something refused connections in its place, as a firewall may."""
    life = trio.agent("n2").life

    def is_dead_to(name):
        return trio.agent(name).overlay.saw_dying("n3", "n2", life)

    def refuse(node, address):
        trio.tell(node.name, NotReached(address, "connection refused", refused=True))

    with mock.patch.object(trio, "_check_reach", refuse):
        trio.reset("n2", "n3")
        until(trio, lambda: is_dead_to("n1") and is_dead_to("n3"))
    until(trio, lambda: "n2" in trio.agent("n3").relay.peers, within_s=20.0)
    assert is_dead_to("n3")  # It has not said who it is.
    until(trio, lambda: not is_dead_to("n1") and not is_dead_to("n3"))
    assert_settled(trio, "n1", "n2", "n3")


def test_who_was_away_hears_that_a_member_was_started_again():
    """Seed 7318569: its flush waited for the answer of a process that was no member, and that for the flush."""
    cluster = Scripted().grow("n1", "n2", "n3", "n4")
    cluster.pause("n1", 30.0)
    cluster.crash("n2")
    cluster.settle(6.0)
    assert cluster.agent("n3").parked == cluster.agent("n4").parked == "only 2 of 4 members can be reached"
    for name in ("n3", "n4"):
        cluster.cut("n1", name)
    cluster.settle(24.05)  # When n1 wakes it looks for all three in vain, ...
    cluster.add("n2", ["n3", "n4"])
    cluster.settle(0.2)
    for name in ("n3", "n4"):
        cluster.heal("n1", name)
        cluster._dial(cluster.nodes[name], "n1:1")  # ... and two find it, before it looks again.
    cluster.settle(30.0)
    assert_settled(cluster, "n1", "n2", "n3", "n4")


def test_a_joiner_that_the_cluster_has_just_dropped_does_not_end_for_want_of_answers(trio):
    """Two lives of links with rates: it had asked for 24 s while it was cut off. The first word was taken for no."""
    trio.add("j", seeds=["n1"])
    joiner = trio.agent("j").joiner
    until(trio, lambda: joiner.state is JoinState.WAITING)
    joiner.asking.unanswered = MAX_UNANSWERED
    told = Expelled(node="j", reason="the cluster went on without it", key=trio.agent("n1").sync.view.key)
    trio.ask("n1", told)
    assert_settled(trio, "n1", "n2", "n3", "j")


def test_a_proposed_view_shows_a_joiner_that_the_cluster_goes_on(trio):
    """Seed 23273 of links with rates: it had asked eight times while the cluster was cut in two, and then ended."""
    trio.add("j", seeds=["n1"], degree=1)
    joiner = trio.agent("j").joiner
    until(trio, lambda: joiner.state is JoinState.ASKED)
    joiner.asking.unanswered = MAX_UNANSWERED
    view = msgspec.structs.replace(trio.agent("n1").sync.view, seq=99)
    proposed = Envelope(source="n1", target=EVERYONE, serial=1 << 40, body=Prepare(view=view))
    trio.tell("j", Received("n1", proposed))
    assert joiner.asking.unanswered == 0


def stopped_scheduler(ready):
    """j has asked for long, or is ready; the scheduler is stopped, and n2 has patience with it, but not for ever."""
    duo = Scripted().grow("n1", "n2")
    duo.add("j", seeds=["n2"], degree=2)
    joiner = duo.agent("j").joiner
    until(duo, lambda: joiner.state is (JoinState.READY if ready else JoinState.ASKED))
    duo.pause("n1", 1.5)
    joiner.asking.unanswered = MAX_UNANSWERED - 1
    joiner.standing.wake_at_s = joiner.asking.ask_again_at_s = duo.now_s
    return duo, joiner.asking


@pytest.mark.parametrize("ready", [False, True], ids=["asks", "is ready"])
def test_a_member_says_to_a_joiner_that_the_cluster_goes_on_while_the_scheduler_is_stopped(ready):
    """Seed 30946 of links with rates: it waited for the scheduler and said nothing, and the joiner gave up."""
    duo, asking = stopped_scheduler(ready)
    until(duo, lambda: asking.unanswered < IN_VAIN, within_s=0.5)
    assert duo.nodes["n1"].paused
    assert_settled(duo, "n1", "n2", "j")


@pytest.mark.parametrize("ready", [False, True], ids=["asks", "is ready"])
def test_a_member_that_waits_itself_does_not_say_that_the_cluster_goes_on(ready):
    duo, asking = stopped_scheduler(ready)
    duo.agent("n2").park("only 1 of 2 members can be reached")
    duo.settle(0.5)
    assert asking.unanswered >= IN_VAIN


@pytest.mark.parametrize("seed", [154508, 155054])
def test_nobody_waits_for_ever_for_or_as_a_joiner_that_listens(seed):
    """Of links with rates. 154508: its link to a member opened after that had sent it a commit.

    155054: it alone could pass on the last result, and went.
    """
    run(seed, rates=True)


@pytest.mark.parametrize("joiner", [False, True], ids=["a loss", "a loss and a join"])
def test_who_is_left_of_a_ring_goes_on(joiner):
    """The policy "ring" found no trees, which ended the node that scheduled, and then each that came after it."""
    names = ["n1", "n2", "n3", "n4", "n5"]
    cluster = Scripted(policy="ring")
    cluster.found(names, [*pairwise(names), ("n1", "n5")])
    cluster.settle()
    cluster.crash("n2")
    if joiner:
        cluster.add("n6", seeds=["n3"], degree=2)
    cluster.settle(15.0)
    assert_settled(cluster, *sorted({*names} - {"n2"} | ({"n6"} if joiner else set())))


def part_of(cluster, name):
    """What a script tells of a step of one sample."""
    contribution = Contribution(weight=1.0, ranges=((5, 6),), shares={name: 1})
    for event in (Contributed((0, 1), 1.0), LocalReady(contribution)):
        cluster.tell(name, event)


def test_a_step_that_a_script_computed_with_a_state_that_is_void_counts_for_nothing(trio):
    """It is told later that it was put out, and by then is in a view again, for which it fetches another state."""
    trio.add("n4", seeds=["n1"], degree=3, blocking=True)
    n4 = trio.agent("n4")
    until(trio, lambda: n4.joiner.state is JoinState.FETCHING)
    assert "n4" in n4.sync.view.member_ids
    part_of(trio, "n4")
    assert n4.sync.local is None and not n4.sync.sums.own_weight
    assert_settled(trio, "n1", "n2", "n3", "n4")
