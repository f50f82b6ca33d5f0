"""Two nodes, of which one falls silent before it dies; and what a person can do when that proves nothing."""

import itertools
from dataclasses import replace

import pytest
from scripted import Scripted

from chaosnet.node.agent.node import Phase
from chaosnet.protocols.events import DialFailed, PeerOpened, SeedsFound
from chaosnet.protocols.liveness import PAIR_PATIENCE_S, PAIR_PROOF_S, PING_EVERY_S
from chaosnet.simulator.pairs import DEATHS, play


@pytest.fixture
def pair():
    return Scripted().grow("n1", "n2")


def steps(cluster, name):
    return len(cluster.nodes[name].log)


def goes_on(cluster, name):
    before = steps(cluster, name)
    cluster.settle(3.0)
    return steps(cluster, name) > before + 3


@pytest.mark.parametrize("silent_s", [0.2, 0.6, 1.0, 1.5, PAIR_PROOF_S - PING_EVERY_S - 0.1])
def test_the_junior_survives_a_senior_that_was_silent_before_it_died(pair, silent_s):
    """Before, half a second of silence was enough for it to wait for ever."""
    pair.fall_silent("n1", silent_s)
    pair.settle(silent_s + 0.5)
    assert pair.agent("n2").parked is None
    assert pair.members("n2") == ("n2",)
    assert goes_on(pair, "n2")


@pytest.mark.parametrize("late_s", [0.05, 0.3, 1.0])
def test_a_refusal_that_comes_late_is_a_proof_as_long_as_the_dead_cannot_have_gone_on(pair, late_s):
    pair.refuses_after_s = lambda: late_s
    pair.crash("n1")
    assert goes_on(pair, "n2")


def test_after_a_longer_silence_its_death_proves_nothing_and_a_person_decides(pair):
    pair.fall_silent("n1", PAIR_PATIENCE_S + 0.5)
    pair.settle(6.0)
    waiting = pair.agent("n2")
    assert waiting.parked == "only 1 of 2 members can be reached"
    now_s = pair.nodes["n2"].clock.reads(pair.now_s)
    assert waiting.why_it_waits(now_s).endswith("if it is gone for good: chaosnet go-on n2:1)")
    pair.go_on("n2")
    assert goes_on(pair, "n2")
    assert waiting.parked is None


@pytest.mark.parametrize("silent_s", [0.0, 3.0], ids=["proved", "in doubt"])
def test_of_five_the_two_that_are_left_go_on_when_a_person_says_so(silent_s):
    """Seed 7341664: `waiting:` named the command, and it changed nothing."""
    cluster = Scripted().grow("n1", "n2", "n3", "n4", "n5")
    for name in ("n1", "n2", "n3"):
        cluster.fall_silent(name, silent_s) if silent_s else cluster.crash(name)
    cluster.settle(9.0)
    assert cluster.agent("n5").parked == "only 2 of 5 members can be reached"
    now_s = cluster.nodes["n5"].clock.reads(cluster.now_s)
    assert "if they are gone for good: chaosnet go-on n5:1" in cluster.agent("n5").why_it_waits(now_s)
    cluster.go_on("n5")
    assert goes_on(cluster, "n4") and goes_on(cluster, "n5")
    assert cluster.members("n4") == cluster.members("n5") == ("n4", "n5")


def test_joiners_whose_only_source_dies_say_that_the_cluster_has_to_be_started_anew():
    """A soak at 45 MB: the founder was killed before the first step of five others."""
    cluster = Scripted().grow("n1")
    for name in ("n2", "n3"):
        cluster.add(name, seeds=["n1"], blocking=True)
    while cluster.agent("n2").phase is not Phase.MEMBER:
        cluster.settle(0.01)
    cluster.crash("n1")
    cluster.settle(9.0)
    waiting = cluster.agent("n2")
    assert waiting.parked == "only 0 of 1 members can be reached"
    now_s = cluster.nodes["n2"].clock.reads(cluster.now_s)
    assert waiting.why_it_waits(now_s).endswith("if it is gone for good: start anew, as n2 has just joined)")


def test_who_has_the_state_and_no_vote_yet_goes_on_when_a_person_says_so():
    """Three processes at 34 MB: both others were killed 5 s after the third had joined, within its third step."""
    cluster = Scripted().grow("n1", "n2")
    cluster.add("n3", seeds=["n1"], blocking=True)
    while cluster.agent("n3").phase is not Phase.MEMBER or cluster.agent("n3").lacks_state:
        cluster.settle(0.01)
    waiting = cluster.agent("n3")
    assert "n3" not in waiting.sync.view.voter_ids
    for name in ("n1", "n2"):
        cluster.crash(name)
    cluster.settle(6.0)
    assert waiting.parked == "only 0 of 2 members can be reached"
    now_s = cluster.nodes["n3"].clock.reads(cluster.now_s)
    assert waiting.why_it_waits(now_s).endswith("if they are gone for good: chaosnet go-on n3:1)")
    cluster.go_on("n3")
    assert goes_on(cluster, "n3")
    assert waiting.sync.view.voter_ids == ("n3",)


def test_terms_of_a_majority_that_is_said_to_be_dead_are_not_used_again():
    """Seed 179836 of lives with rates: it had elected a scheduler of term 3, and so did who was left, later."""
    cluster = Scripted().grow("n1", "n2", "n3")
    for other in ("n2", "n3"):
        cluster.cut("n1", other)
    while not (elected := [name for name in ("n2", "n3") if cluster.agent(name).scheduler]):
        cluster.settle(0.001)
    term = cluster.agent(elected[0]).scheduler.term
    for other in ("n2", "n3"):
        cluster.crash(other)
        cluster.heal("n1", other)
    cluster.settle(6.0)
    assert cluster.agent("n1").parked == "only 1 of 3 members can be reached"
    cluster.go_on("n1")
    assert goes_on(cluster, "n1")
    assert cluster.agent("n1").scheduler.term < term, "if the person is wrong, the majority's work stays"
    cluster.add("n4", seeds=["n1"])
    cluster.settle(6.0)
    assert cluster.members("n1") == ("n1", "n4")
    cluster.crash("n1")
    assert goes_on(cluster, "n4")
    assert cluster.agent("n4").scheduler.term > term + 1000


def test_a_connection_that_broke_at_one_end_first_makes_nobody_go_on_alone(pair):
    """A router forgot it: the senior sees that a second earlier, and dies before the junior knows."""
    pair.reset_lag_s = lambda: 1.0
    pair.reset("n1", "n2")
    pair.settle(0.8)
    assert pair.members("n1") == ("n1", "n2")


def test_a_node_that_does_not_wait_is_not_told_to_go_on(pair):
    pair.go_on("n2")
    assert pair.members("n2") == ("n1", "n2")
    assert not pair.agent("n2").overlay.lives.declared


def test_if_the_person_was_wrong_one_of_the_two_parts_joins_the_other_anew():
    """The senior went on behind the cut. When they can talk again, the older term gives way, and says so."""
    pair = Scripted().grow("n1", "n2")
    pair.cut("n1", "n2")
    pair.settle(6.0)
    assert pair.agent("n2").parked
    nothing = lambda *args: None  # noqa: E731  From here on there are two histories.
    pair._check_history = pair._check_state = pair._check_samples = nothing
    pair.go_on("n2")
    pair.settle(3.0)
    assert pair.members("n2") == ("n2",) and pair.members("n1") == ("n1",)
    pair.heal("n1", "n2")
    pair.settle(30.0)
    assert set(pair.members("n1")) == set(pair.members("n2")) == {"n1", "n2"}
    assert pair.returns == 1


@pytest.mark.parametrize("name", DEATHS)
def test_the_junior_goes_on_if_the_senior_cannot_have_and_waits_if_it_may(name):
    """With another rule broken for each, these fail (simulator/mutants.py)."""
    for seed in range(5):
        play(DEATHS[name], seed)


def test_of_a_silent_scheduler_each_node_tells_its_user():
    """It tells all for whom they wait. A stall of 4 s makes the others patient for 9: nobody said a word."""
    cluster = Scripted().grow("n1", "n2", "n3")
    for name in ("n2", "n3"):
        liveness = cluster.agent(name).liveness
        liveness.stall_s, liveness.stalled_at_s = 4.0, cluster.nodes[name].clock.reads(cluster.now_s)
    cluster.fall_silent("n1", 30.0)
    cluster.settle(8.0)
    lines = [(name, text) for _, name, text in cluster.told if isinstance(text, str)]
    told = [(name, text) for name, text in lines if "nothing has come from it" in text]
    assert {name for name, _ in told} == {"n2", "n3"}
    assert len(told) == 4, "after 2 s, and again once the wait has doubled"
    assert all(text.startswith("waits for n1, ") for _, text in told)
    cluster.settle(4.0)
    assert goes_on(cluster, "n2")


def test_since_when_a_member_is_lost_is_not_told_anew_when_its_name_is_started_again():
    """The new process was taken for the lost one for a moment, and all had been lost 0 s ago."""
    cluster = Scripted().grow("n1", "n2", "n3")
    for name in ("n2", "n3"):
        cluster.crash(name)
    cluster.settle(10.0)
    cluster.add("n2", seeds=["n1"], degree=1)
    cluster.settle(5.0)
    n1 = cluster.agent("n1")
    assert n1.overlay.lives.reborn == {"n2"}
    assert "(n2 was lost 15 s ago, n3 was lost 15 s ago; " in n1.parking.why(cluster.now_s)


def test_who_was_back_for_a_while_is_lost_anew(pair):
    n2 = pair.agent("n2")
    view, overlay, missing = n2.sync.view, n2.overlay, n2.missing
    lost, found = {"n2"}, {"n1", "n2"}
    since = []
    for reachable, now_s in [
        (lost, 10.0),
        (found, 11.0),
        (lost, 12.9),
        (found, 14.0),
        (lost, 16.0),
        (lost, 19.0),
    ]:
        overlay.reachable = reachable
        missing._note(view, now_s)
        since.append(missing.lost_at_s["n1"])
    assert since == [10.0, 10.0, 10.0, 10.0, 16.0, 16.0]
    overlay.reachable = found
    for now_s in (20.0, 22.0):
        missing._note(view, now_s)
    assert not missing.lost_at_s and not missing._found_at_s


class Moving(Scripted):
    """Nobody finds those that have `moved` where they had been, at port 1: they are at port 2 now."""

    moved = ()

    def _dial(self, node, address):
        name, _, port = address.partition(":")
        if name in self.moved and port == "1":
            self.later(0.1, lambda: self._event(node, DialFailed(address, "timed out")))
        else:
            super()._dial(node, f"{name}:1")

    def _event(self, node, event):
        if isinstance(event, PeerOpened) and event.dialled and event.peer in self.moved:
            event = replace(event, address=f"{event.peer}:2", at=f"{event.peer}:2")
        super()._event(node, event)


def test_a_senior_that_has_gone_on_alone_finds_the_junior_that_dials_its_old_address():
    """Its machine got another address by DHCP: the junior waited for a person, beside a cluster that went on."""
    cluster = Moving().grow("n1", "n2")
    cluster.cut("n1", "n2")
    cluster.moved = ("n1",)
    cluster.settle(4.0)
    assert cluster.members("n1") == ("n1",) and cluster.agent("n2").parked
    cluster.heal("n1", "n2")
    cluster.settle(20.0)
    assert cluster.members("n1") == ("n1", "n2")
    assert goes_on(cluster, "n2")


@pytest.mark.parametrize("names", [("n1", "n2"), ("n1", "n2", "n3")], ids=" ".join)
def test_members_that_all_get_other_addresses_hear_where_the_others_are(names):
    """As when a router comes back with another network: their links have ended, and each dials where nobody is."""
    cluster, pairs = Moving().grow(*names), list(itertools.combinations(names, 2))
    for pair in pairs:
        cluster.cut(*pair)
    cluster.moved = names
    cluster.settle(4.0)
    for pair in pairs:
        cluster.heal(*pair)
    cluster.settle(20.0)
    assert all(cluster.agent(name).parked for name in names[-1:])
    for name in names:
        cluster.tell(name, SeedsFound(tuple(f"{other}:2" for other in names)))
    cluster.settle(20.0)
    assert cluster.members("n1") == names
    assert all(goes_on(cluster, name) for name in names)
