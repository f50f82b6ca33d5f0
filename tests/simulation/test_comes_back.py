"""Partitions, sleeps, founders and clocks: whoever is left behind is told, and comes back by itself."""

import pytest
from scripted import Scripted

from chaosnet.protocols.asking import Otherwise
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import Envelope, Expelled

NAMES = ("n1", "n2", "n3", "n4", "n5")


def cluster_of(*names):
    cluster = Scripted()
    cluster.run(2.0)
    return cluster.grow(*names)


def split(cluster, side, change="cut"):
    """Cut (or heal) all links between `side` and the rest."""
    for a in sorted(side):
        for b in sorted(set(cluster.nodes) - set(side)):
            getattr(cluster, change)(a, b)


def assert_one_cluster(cluster, *names, seconds=12.0):
    cluster.settle(seconds)
    assert not cluster.unsettled(cluster.now_s - 1.0), cluster.story()
    assert {cluster.agent(name).sync.view.key for name in names} == {cluster.agent(names[0]).sync.view.key}
    assert sorted(cluster.members(names[0])) == sorted(names), cluster.story()


@pytest.mark.parametrize(
    "minority", [("n4", "n5"), ("n1", "n2")], ids=["scheduler-stays", "scheduler-cut-off"]
)
def test_the_minority_waits_says_why_and_rejoins(minority):
    cluster = cluster_of(*NAMES)
    majority = [name for name in NAMES if name not in minority]
    split(cluster, minority)
    cluster.settle(4.0)
    for name in minority:
        assert cluster.agent(name).parked == "only 2 of 5 members can be reached"
    for name in majority:
        assert cluster.nodes[name].last_progress_s > cluster.now_s - 1.0
        assert sorted(cluster.members(name)) == majority
    split(cluster, minority, "heal")
    assert_one_cluster(cluster, *NAMES)
    assert cluster.returns == 2


def test_of_two_nodes_the_senior_goes_on_and_the_junior_rejoins():
    cluster = cluster_of("n1", "n2")
    cluster.cut("n1", "n2")
    cluster.settle(4.0)
    assert cluster.members("n1") == ("n1",)
    assert cluster.agent("n2").parked == "only 1 of 2 members can be reached"
    cluster.heal("n1", "n2")
    assert_one_cluster(cluster, "n1", "n2")


@pytest.mark.parametrize("senior_side", [("n1", "n4"), ("n1", "n2")])
def test_an_exact_half_goes_on_if_it_has_the_most_senior(senior_side):
    cluster = cluster_of(*NAMES[:4])
    split(cluster, senior_side)
    cluster.settle(4.0)
    assert sorted(cluster.members("n1")) == sorted(senior_side)
    split(cluster, senior_side, "heal")
    assert_one_cluster(cluster, *NAMES[:4])
    assert cluster.returns == 2


def test_parts_without_a_quorum_anywhere_go_on_as_one_and_nobody_rejoins():
    cluster = cluster_of(*NAMES)
    for side in (("n1", "n2"), ("n5",)):
        split(cluster, side)
    cluster.settle(4.0)
    assert all(cluster.agent(name).parked for name in NAMES)
    for side in (("n1", "n2"), ("n5",)):
        split(cluster, side, "heal")
    assert_one_cluster(cluster, *NAMES)
    assert cluster.returns == 0


def test_a_node_behind_a_flapping_link_ends_as_a_member():
    cluster = cluster_of("n1", "n2", "n3")
    for _ in range(6):
        split(cluster, ["n3"])
        cluster.settle(1.6)
        split(cluster, ["n3"], "heal")
        cluster.settle(0.7)
    assert_one_cluster(cluster, "n1", "n2", "n3")


@pytest.mark.parametrize("sleeper", ["n1", "n3"], ids=["scheduler", "worker"])
@pytest.mark.parametrize("seconds", [5.0, 60.0])
def test_a_node_that_slept_is_told_and_rejoins(sleeper, seconds):
    cluster = cluster_of("n1", "n2", "n3")
    cluster.pause(sleeper, seconds)
    cluster.settle(seconds)
    assert_one_cluster(cluster, "n1", "n2", "n3")
    assert cluster.returns == 1
    assert cluster.members("n2")[-1] == sleeper


def test_a_link_that_is_dead_in_one_direction_costs_no_node():
    cluster = cluster_of("n1", "n2", "n3")
    cluster.cut_one_way("n1", "n3")
    cluster.settle(6.0)
    cluster.heal("n1", "n3")
    assert_one_cluster(cluster, "n1", "n2", "n3")
    assert cluster.returns == 0


def test_a_node_that_cannot_come_back_yet_says_why_and_keeps_trying():
    cluster = cluster_of("n1", "n2", "n3")
    split(cluster, ["n3"])
    cluster.settle(4.0)
    cluster.heal("n2", "n3")
    while not cluster.returns:
        cluster.settle(0.01)
    cluster.cut("n2", "n3")
    cluster.settle(60.0)
    assert cluster.agent("n3").parked.startswith("nobody answers (n")
    split(cluster, ["n3"], "heal")
    assert_one_cluster(cluster, "n1", "n2", "n3", seconds=20.0)


# --- clocks that were set back ---


@pytest.mark.parametrize("restarted", ["n1", "n3"], ids=["scheduler", "worker"])
@pytest.mark.parametrize("noticed", [False, True], ids=["at once", "later"])
def test_a_process_that_was_started_again_with_its_clock_set_back_is_let_in(restarted, noticed):
    cluster = cluster_of("n1", "n2", "n3")
    cluster.settle(20.0)
    before = cluster.agent(restarted).life
    cluster.crash(restarted)
    if noticed:
        cluster.settle(3.0)
    cluster.add(restarted, seeds=["n2"], clock_s=1.0)
    assert cluster.agent(restarted).life < before
    assert_one_cluster(cluster, "n1", "n2", "n3")


def test_nobody_takes_a_process_of_an_earlier_clock_for_the_member_that_died():
    """Its news is older than what the member said last, so all believed in the member's links."""
    cluster = cluster_of("n1", "n2", "n3")
    cluster.settle(20.0)
    for other in ("n1", "n2"):
        cluster.cut("n3", other)  # Nobody sees it die.
    cluster.crash("n3")
    for other in ("n1", "n2"):
        cluster.heal("n3", other)
    cluster.add("n3", seeds=["n1"], clock_s=1.0)
    assert_one_cluster(cluster, "n1", "n2", "n3")
    lives = {cluster.agent(name).overlay.lives.newest("n3")[1] for name in ("n1", "n2")}
    assert lives == {cluster.agent("n3").life}


# --- founders ---


def test_a_restarted_founder_finds_the_living_cluster():
    cluster = cluster_of("n1", "n2", "n3")
    cluster.crash("n1")
    cluster.settle(1.0)
    cluster.add("n1", seeds=["n2", "n3"], otherwise=Otherwise.FOUND)
    assert_one_cluster(cluster, "n1", "n2", "n3")


def test_a_founder_founds_when_all_that_answer_wait_themselves():
    cluster = Scripted()
    cluster.add("n2", seeds=["n1"])
    cluster.add("n1", seeds=["n2", "n3"], otherwise=Otherwise.FOUND)
    cluster.add("n3", seeds=["n2"])
    cluster.settle(15.0)
    assert not cluster.active()
    assert_one_cluster(cluster, "n1", "n2", "n3", seconds=20.0)


def test_a_founder_founds_when_nobody_answers():
    cluster = Scripted()
    cluster.add("n1", seeds=["n2"], otherwise=Otherwise.FOUND)
    assert_one_cluster(cluster, "n1", seconds=25.0)


def test_a_founder_founds_no_second_cluster_beside_one_that_waits():
    cluster = cluster_of("n1", "n2", "n3")
    for other in ("n1", "n3"):
        cluster.cut("n2", other)
    cluster.settle(3.0)
    cluster.crash("n1")
    cluster.crash("n3")
    assert cluster.agent("n2").parked
    cluster.heal("n1", "n2")
    cluster.add("n1", seeds=["n2"], otherwise=Otherwise.FOUND)
    cluster.settle(80.0)
    assert cluster.nodes["n1"].done == "JoinFailed"


# --- what random lives have found ---


def test_news_that_one_is_out_does_not_end_a_later_life():
    """It travels by name, and may come when the name is a member again."""
    cluster = cluster_of("n1", "n2", "n3")
    old = cluster.agent("n1").sync.view.key
    late = Expelled(node="n3", reason="the cluster went on without it", key=old)
    cluster.settle(1.0)
    cluster.tell("n3", Received("n1", Envelope(source="n1", target="n3", serial=1, body=late)))
    assert cluster.nodes["n3"].done == ""
