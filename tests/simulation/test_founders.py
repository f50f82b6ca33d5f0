"""Several machines that may found a cluster, all given one command: one does, in whatever order they start."""

import itertools
import random

import pytest
from scripted import Scripted

from chaosnet.node.agent.node import Phase
from chaosnet.protocols.asking import Otherwise
from chaosnet.protocols.events import SeedsFound
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


# --- machines that are given no address, but hear of each other ---

HEARD_S = 2.0  # At most, after both are there.


def hear_of_each_other(names, gap_s, seed, deaf=()):
    """Each starts so long after the one before, and hears of all others. `deaf`: pairs (who, of whom) that do not."""
    cluster, chance = Scripted(seed), random.Random(seed)
    cluster.max_delay_s = (0.002, 0.05, 0.4)[seed % 3]
    for count, name in enumerate(names):
        cluster.settle(gap_s if count else 0.0)
        node = cluster._machine(name, int(cluster.now_s * 1e9) + 1)
        cluster._join(node, (), 2, False, Otherwise.FOUND)
        for who, of in [(name, other) for other in names[:count]] + [
            (other, name) for other in names[:count]
        ]:
            if (who, of) not in deaf:
                found = SeedsFound((f"{of}:1",))
                cluster.later(
                    chance.uniform(0.0, HEARD_S), lambda who=who, found=found: cluster.tell(who, found)
                )
    return cluster


@pytest.mark.parametrize("gap_s", [0.0, PATIENCE_S - HEARD_S / 2, PATIENCE_S + 0.5])
@pytest.mark.parametrize("names", [("n1", "n2"), ("n2", "n3", "n1")], ids=" ".join)
def test_machines_that_hear_of_each_other_make_one_cluster(names, gap_s):
    for seed in range(3):
        assert_one_cluster(hear_of_each_other(names, gap_s, seed), names)


@pytest.mark.parametrize("unheard", ["n1", "n2", "n3"])
def test_it_is_enough_to_be_heard_by_nobody_if_one_hears_the_others(unheard):
    names = ("n2", "n1", "n3")
    deaf = [(name, unheard) for name in names if name != unheard]
    for seed in range(2):
        assert_one_cluster(hear_of_each_other(names, 0.2, seed, deaf), names)


def test_one_that_hears_of_nobody_founds_after_its_patience():
    cluster = hear_of_each_other(("n1",), 0.0, 1)
    cluster.settle(PATIENCE_S - 1.0)
    assert cluster.agent("n1").phase is Phase.JOINING
    cluster.settle(2.0)
    assert cluster.members("n1") == ("n1",)


def test_an_address_where_nobody_is_delays_a_founder_and_no_more():
    cluster = hear_of_each_other(("n1",), 0.0, 1)
    cluster.tell("n1", SeedsFound(("n9:1", "n1:1")))
    cluster.settle(PATIENCE_S + 5.0)
    assert cluster.members("n1") == ("n1",)


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
        cluster.agent(name).joiner.asking.earlier.clear()
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
