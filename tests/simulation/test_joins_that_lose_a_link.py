"""A link to a joiner is cut, or its other end killed, while it pulls: it need not pull the state again."""

import random

import pytest
from scripted import Scripted

from chaosnet.node.core import Phase
from chaosnet.protocols.asking import JoinState
from chaosnet.protocols.messages import Install
from chaosnet.simulator.rates import LinkRates

MEMBERS = ("n1", "n2", "n3")
STATE_BYTES, RESULT_BYTES = 132_000_000, 13_200_000
PULL_S = 2.0  # What the links of the three take for the state.


@pytest.fixture
def mesh():
    """Steps of 0.7 s: a tenth of the state is trained, so a joiner listens, and falls behind while it pulls."""
    cluster = Scripted()
    cluster.chunks = 12
    cluster.compute_s, cluster.state_bytes, cluster.result_bytes = 0.8, STATE_BYTES, RESULT_BYTES
    cluster.rates = LinkRates(random.Random(1))
    cluster.rates.result_bytes, cluster.rates.ahead_bytes, cluster.rates.shows_s = RESULT_BYTES, 2 << 20, 0.0
    for one in (*MEMBERS, "n4"):
        for other in (*MEMBERS, "n4"):
            cluster.rates.by_way[one, other] = STATE_BYTES / len(MEMBERS) / PULL_S
    cluster.add(MEMBERS[0])
    for name in MEMBERS[1:]:
        cluster.add(name, seeds=[MEMBERS[0]], degree=3)
        until(cluster, lambda: cluster.nodes[name].loaded)  # noqa: B023  At once.
    cluster.settle(6.0)
    return cluster


def until(cluster, is_so):
    for _ in range(3000):
        if is_so():
            return
        cluster.settle(0.01)
    raise AssertionError(cluster.story())


def begin_to_pull(cluster):
    joiner = cluster.add("n4", seeds=[MEMBERS[0]], degree=3).agent.joiner
    until(cluster, lambda: joiner.state is JoinState.FETCHING)
    assert cluster.agent("n1").sync.view.observer_ids == ("n4",)
    return joiner


def lacked(cluster, node):
    """How many steps it is behind."""
    return cluster.agent("n1").sync.step - cluster.agent(node).sync.step


def comes_in(cluster):
    node = cluster.nodes["n4"]
    until(cluster, lambda: node.training and node.loaded)
    assert node.agent.phase is Phase.MEMBER


@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("source", MEMBERS)
def test_a_joiner_whose_link_is_cut_while_it_lags_pulls_once(mesh, source, steps):
    joiner = begin_to_pull(mesh)
    until(mesh, lambda: lacked(mesh, "n4") == steps)
    mesh.cut(source, "n4")
    comes_in(mesh)
    assert joiner.attempts == 1, mesh.story()


@pytest.mark.parametrize("source", MEMBERS[1:])
def test_a_joiner_whose_source_dies_while_it_lags_by_two_steps_pulls_once(mesh, source):
    joiner = begin_to_pull(mesh)
    until(mesh, lambda: lacked(mesh, "n4") == 2)
    mesh.crash(source)
    comes_in(mesh)
    assert joiner.attempts == 1, mesh.story()


def test_the_install_brings_the_commits_of_both_steps_that_it_lacks(mesh):
    found, note = [], mesh.on_message

    def look(sender, receiver, message):
        note(sender, receiver, message)
        body = getattr(message, "body", None)
        if isinstance(body, Install) and receiver == "n4":
            found.append(body)

    mesh.on_message = look
    begin_to_pull(mesh)
    until(mesh, lambda: lacked(mesh, "n4") == 2)
    mesh.crash("n2")
    comes_in(mesh)
    install = found[-1]
    assert [each.step for each in (*install.earlier, install.commit)] == [install.step - 2, install.step - 1]
