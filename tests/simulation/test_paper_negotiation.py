"""The exchanges of Fig. 4, as the paper's Sec. IV-B tells them, between the real cores."""

import pytest
from scripted import TRAINING, Scripted

from chaosnet.protocols.events import LeaveWanted
from chaosnet.protocols.messages import ConnectLinkRequest, DisconnectLinkRequest


@pytest.fixture
def cluster():
    cluster = Scripted().grow("n1", "n2", "n3")
    yield cluster
    assert not cluster.unsettled(cluster.now_s - 1.0), cluster.story()


def kinds(exchange):
    return [kind for _, _, kind in exchange]


def steps(cluster):
    return max(cluster.history)


# --- scale-out, Fig. 4a ---


def test_scale_out_follows_figure_4a(cluster):
    """ "it sends a join request to the scheduler, including its IP and port, and the IDs of intended neighbors
    [...] The scheduler then starts the peer negotiation phase. [...] instructs the neighbors to establish socket
    connections with the new node. It then triggers the cluster monitor to gather bandwidth and latency data, and
    runs Algorithms 1 and 2 to generate a state replication plan. [...] After all-reduce is completed for the
    current iteration, the scheduler sends the state replication policy to the new node" """
    cluster.add("n4", seeds=["n2"], degree=2)
    cluster.settle()
    control = [said for said in cluster.control() if said[2] != "ShardRequest"]
    first = [
        ("n4", "all", "ScaleOutRequest"),
        ("n1", "n4", "NegotiationPlan"),
        ("n4", "n1", "NeighborsReady"),
        ("n1", "all", "Prepare"),
        ("n1", "n4", "ReplicationPlan"),
    ]
    assert control[:5] == first
    assert kinds(control).count("ManifestReply") == 1
    assert ("n4", "all", "ScaleOutReady") in control
    assert cluster.members("n1") == cluster.members("n4") == ("n1", "n2", "n3", "n4")


def test_the_state_comes_from_several_neighbours_at_once(cluster):
    """ "neighbor 1 sends its training state shard K1 to the new node, while neighbor 2 sends shard K2." """
    cluster.add("n4", seeds=["n2"], degree=2)
    cluster.settle()
    sources = {source for source, target, kind in cluster.exchange if (target, kind) == ("n4", "Shard")}
    assert len(sources) == 2


def test_a_joiner_names_its_neighbours(cluster):
    """ "and the IDs of intended neighbors (e.g., nodes 1, 2 in case 1)" """
    cluster.add("n4", seeds=["n3"], neighbors=("n1", "n2"))
    cluster.settle()
    assert cluster.agent("n1").sync.view.neighbors("n4") == ("n1", "n2")


def test_nobody_waits_for_a_joiner(cluster):
    """ "These steps run asynchronously with gradient computation, so their delays can overlap." """
    cluster.settle(4.0)
    before = steps(cluster)
    cluster.settle(4.0)
    undisturbed = steps(cluster) - before
    cluster.add("n4", seeds=["n1"], degree=2)
    cluster.settle(4.0)
    assert "Flush" not in kinds(cluster.exchange)
    assert steps(cluster) - before - undisturbed > 0.8 * undisturbed


# --- scale-in, Fig. 4b ---


def test_scale_in_follows_figure_4b(cluster):
    """ "To exit, node 4 sends a leave request to the scheduler. With the scheduler's coordination, it disconnects
    from neighbor nodes 1 and 2. Since the network topology has changed, the scheduler must also update the model
    synchronization policy accordingly. All nodes then proceed with all-reduce using the new policy." """
    cluster.tell("n3", LeaveWanted())
    cluster.settle()
    assert cluster.control() == [
        ("n3", "all", "ScaleInRequest"),
        ("n1", "all", "Prepare"),
        ("n3", "all", "Farewell"),
    ]
    assert cluster.nodes["n3"].done == "Left"
    assert cluster.members("n1") == ("n1", "n2")


def test_an_exit_happens_after_the_all_reduce(cluster):
    """ "In a node exit, operations such as disconnecting links and updating model synchronization policy happen
    after all-reduce." """
    cluster.tell("n3", LeaveWanted())
    cluster.settle()
    said = [each for each in cluster.exchange if "n3" in each[:2]]
    assert said.index(("n3", "all", "Farewell")) == len(said) - 1
    assert {"Ready", "Commit"} <= set(kinds(said[said.index(("n3", "all", "ScaleInRequest")) :]))
    assert "Flush" not in kinds(cluster.exchange)


def test_even_the_scheduler_may_leave(cluster):
    """ "The scheduler [...] can be deployed on any node." """
    cluster.tell("n1", LeaveWanted())
    cluster.settle()
    assert cluster.nodes["n1"].done == "Left"
    assert cluster.members("n2") == cluster.members("n3") == ("n2", "n3")
    assert cluster.agent("n2").sync.view.scheduler == "n2"
    for other in ("n2", "n3"):
        told = [(each.kind, each.node, each.detail) for each in cluster.agent(other).monitor.events]
        assert told.count(("left", "n1", "now 2 members, 1 link")) == 1


# --- node failure ---


def test_after_a_failure_the_all_reduce_is_restarted(cluster):
    """ "for a node failure, they should be performed before all-reduce to avoid networking errors. If the failure
    happens during all-reduce, the scheduler notifies all nodes to restart all-reduce." """
    cluster.crash("n3")
    cluster.settle()
    control = kinds(cluster.control())
    assert control.index("Flush") < control.index("FlushOk") < control.index("Install")
    assert cluster.members("n1") == cluster.members("n2") == ("n1", "n2")
    resumed = [view for view in cluster.views.values() if view.member_ids == ("n1", "n2")]
    assert resumed[0].key > (1, 1)


def test_missed_heartbeats_are_a_failure_too(cluster):
    """ "a node failure is triggered when the scheduler misses heartbeats from node 4 for too long, then the scale-in
    negotiation will start automatically." """
    cluster.pause("n3", 4.0)
    cluster.settle(3.0)
    assert cluster.members("n1") == ("n1", "n2")
    cluster.settle(6.0)
    assert cluster.returns == 1  # It is told when it can be reached again, and comes back.
    assert cluster.members("n1") == ("n1", "n2", "n3")


# --- connect-link and disconnect-link, Fig. 4c and d ---


def chain():
    cluster = Scripted().grow("n1", "n2", "n3", "n4")
    cluster.ask("n1", DisconnectLinkRequest(a="n1", b="n4", asker="n1"))
    cluster.settle()
    cluster.exchange.clear()
    return cluster


def test_connect_link_follows_figure_4c():
    """ "node 4 sends a link join request to the scheduler, asking to connect to node 1. The scheduler starts peer
    negotiation and instructs both nodes to establish the socket. [...] After the current all-reduce completes, the
    scheduler notifies all nodes to update their model synchronization policy" """
    cluster = chain()
    assert ("n1", "n4") not in cluster.agent("n1").sync.view.links
    cluster.ask("n4", ConnectLinkRequest(a="n4", b="n1", asker="n4"))
    cluster.settle()
    assert cluster.control() == [
        ("n4", "all", "ConnectLinkRequest"),
        ("n1", "all", "Prepare"),
        ("n1", "n4", "Answer"),
    ]
    assert ("n1", "n4") in cluster.agent("n3").sync.view.links
    assert "n4" in cluster.agent("n1").relay.peers


def test_disconnect_link_follows_figure_4d(cluster):
    """The scheduler updates the policy; the link closes after the all-reduce that may still need it."""
    cluster.ask("n3", DisconnectLinkRequest(a="n2", b="n3", asker="n3"))
    cluster.settle()
    assert cluster.control()[:3] == [
        ("n3", "all", "DisconnectLinkRequest"),
        ("n1", "all", "Prepare"),
        ("n1", "n3", "Answer"),
    ]
    assert "Flush" not in kinds(cluster.exchange)


@pytest.mark.parametrize("event", ["connect", "disconnect"])
def test_links_change_without_a_pause_in_training(event):
    """ "connect-link has no state replication, so its delay is fully hidden by gradient computation." """
    cluster = chain() if event == "connect" else Scripted().grow("n1", "n2", "n3", "n4")
    before = steps(cluster)
    cluster.settle(4.0)
    undisturbed = steps(cluster) - before
    request = ConnectLinkRequest if event == "connect" else DisconnectLinkRequest
    cluster.ask("n4", request(a="n4", b="n1", asker="n4"))
    cluster.settle(4.0)
    assert steps(cluster) - before - undisturbed > 0.8 * undisturbed
    assert set(TRAINING) <= set(kinds(cluster.exchange))
    assert "Flush" not in kinds(cluster.exchange)
