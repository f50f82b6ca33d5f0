"""A link that dies silently costs the link, not a node; and it is taken up again once it carries."""

import itertools

import pytest
from scripted import Scripted

from chaosnet.protocols.liveness import DEAD_LINK_S

NAMES = ("n1", "n2", "n3", "n4", "n5")
LINKS = tuple(itertools.combinations(NAMES, 2))


@pytest.fixture
def mesh():
    cluster = Scripted().grow(*NAMES)
    assert cluster.agent("n1").sync.view.links == LINKS
    return cluster


def longest_pause_s(cluster, seconds):
    """Between two completed steps, anywhere, during the next `seconds`."""
    until_s, longest_s = cluster.now_s + seconds, 0.0
    while cluster.now_s < until_s:
        cluster.settle(0.01)
        longest_s = max(longest_s, max(cluster.now_s - cluster.nodes[name].last_progress_s for name in NAMES))
    return longest_s


@pytest.mark.parametrize("link", LINKS, ids=lambda link: "-".join(link))
def test_a_link_that_dies_silently_costs_no_node_and_less_than_a_second(mesh, link):
    mesh.settle(1.0)
    mesh.cut(*link)
    pause_s = longest_pause_s(mesh, 4.0)
    assert pause_s < DEAD_LINK_S + 0.25
    for name in NAMES:
        assert mesh.members(name) == NAMES
        assert link not in mesh.agent(name).sync.view.links
    mesh.heal(*link)
    mesh.settle(5.0)
    for name in NAMES:
        assert mesh.agent(name).sync.view.links == LINKS


def test_a_dead_link_is_not_proposed_again_before_it_carries(mesh):
    """Else each proposal would hold the changes behind it for as long as opening may take."""
    mesh.cut("n1", "n2")
    mesh.settle(4.0)
    mesh.exchange.clear()
    mesh.settle(8.0)
    assert [said for said in mesh.control() if said[2] in ("Prepare", "PrepareFailed")] == []


def test_a_link_that_somebody_had_removed_does_not_come_back_by_itself(mesh):
    from chaosnet.protocols.messages import DisconnectLinkRequest

    mesh.ask("n1", DisconnectLinkRequest(a="n1", b="n2", asker="n1"))
    mesh.settle(6.0)
    assert ("n1", "n2") not in mesh.agent("n3").sync.view.links
