"""Several machines that may found a cluster, all given one command: one does, in whatever order they start."""

import itertools

import pytest
from scripted import Scripted

from chaosnet.protocols.asking import Otherwise
from chaosnet.protocols.messages import Envelope, Notice

PATIENCE_S = 20.0  # Of the simulation's joiners.


def start_all(order, gaps_s, seed=1, seeds=None):
    """Each machine starts so long after the one before it."""
    cluster = Scripted(seed)
    cluster.max_delay_s = (0.002, 0.05, 0.4)[seed % 3]
    for name, gap_s in zip(order, gaps_s, strict=True):
        cluster.settle(gap_s)
        cluster.add(name, seeds=seeds or sorted(order), otherwise=Otherwise.FOUND)
    return cluster


def assert_one_cluster(cluster, names):
    cluster.settle(2 * PATIENCE_S + 20.0)
    assert {cluster.members(name) for name in names} == {cluster.members(names[0])}, cluster.story()
    assert sorted(cluster.members(names[0])) == sorted(names), cluster.story()
    assert len({cluster.agent(name).sync.view.key for name in names}) == 1


@pytest.mark.slow
@pytest.mark.parametrize("gap_s", [0.0, 0.3, PATIENCE_S - 0.9, PATIENCE_S - 0.3, PATIENCE_S + 0.5])
@pytest.mark.parametrize("names", [("n1", "n2"), ("n1", "n2", "n3")], ids=["two", "three"])
def test_one_command_on_all_machines_makes_one_cluster_in_any_order(names, gap_s):
    for seed, order in enumerate(itertools.permutations(names)):
        cluster = start_all(order, [0.0, *[gap_s] * (len(names) - 1)], seed)
        assert_one_cluster(cluster, names)


def test_of_those_that_start_at_once_the_first_in_the_list_founds():
    cluster = start_all(("n3", "n2", "n1"), (0.0, 0.0, 0.0), seeds=["n2", "n1", "n3"])
    assert_one_cluster(cluster, ("n1", "n2", "n3"))
    assert cluster.members("n1")[0] == "n2"


def test_two_that_name_only_each_other_make_one_cluster():
    cluster = Scripted()
    cluster.add("n1", seeds=["n2"], otherwise=Otherwise.FOUND)
    cluster.add("n2", seeds=["n1"], otherwise=Otherwise.FOUND)
    assert_one_cluster(cluster, ("n1", "n2"))


def test_one_that_names_nobody_but_itself_founds():
    cluster = Scripted()
    cluster.add("n1", seeds=["n1"], otherwise=Otherwise.FOUND)
    assert_one_cluster(cluster, ("n1",))


def test_if_the_one_that_was_to_found_dies_the_next_one_does():
    cluster = start_all(("n1", "n2", "n3"), (0.0, 0.0, 0.0))
    cluster.settle(PATIENCE_S - 1.0)
    cluster.crash("n1")
    assert_one_cluster(cluster, ("n2", "n3"))
    cluster.add("n1", seeds=["n1", "n2", "n3"], otherwise=Otherwise.FOUND)
    assert_one_cluster(cluster, ("n1", "n2", "n3"))


class Two(Scripted):
    """Two clusters, which is what no other simulation may come to."""

    def _check(self, node):
        node.agent.check_invariants()

    def _check_view(self, node, view):
        pass

    def _check_history(self, node, step, what):
        pass

    def _check_state(self, node):
        pass


def test_no_event_of_one_cluster_shows_in_another_though_their_founders_had_a_link_before():
    cluster = Two()
    heard = {"n1": [], "n2": []}

    def note(sender, receiver, message):
        if isinstance(message, Envelope) and isinstance(message.body, Notice):
            heard[receiver].append(message.body)

    cluster.on_message = note
    for name in ("n1", "n2"):
        cluster.add(name, seeds=["n9"], otherwise=Otherwise.FOUND)
    cluster.settle(1.0)
    cluster._open(("n1", "n2"), dialler="n1")
    cluster.settle(0.1)
    assert cluster.agent("n1").relay.peers == {"n2"}
    for name in ("n1", "n2"):  # As it was when both founded: neither had heard of the other's wish.
        cluster.agent(name).joiner.asking.heard_earlier_s.clear()
        cluster.agent(name).joiner.asking.seeds = ("n9:1",)
        cluster.agent(name).joiner.asking.give_up_at_s = cluster.nodes[name].clock.reads(cluster.now_s)
        cluster.agent(name).joiner.standing.wake_at_s = cluster.agent(name).joiner.asking.give_up_at_s
        cluster.agent(name).joiner.asking.ask_again_at_s = cluster.agent(name).joiner.asking.give_up_at_s
        cluster._post_tick(cluster.nodes[name])
    cluster.settle(0.5)
    assert {cluster.members(name) for name in ("n1", "n2")} == {("n1",), ("n2",)}
    assert not any(cluster.agent(name).relay.peers for name in ("n1", "n2"))
    for name in ("n1", "n2"):
        cluster.ask(name, Notice(kind="left", node=name, detail="", step=1, time_s=0.0))
    cluster.settle(1.0)
    assert heard == {"n1": [], "n2": []}
