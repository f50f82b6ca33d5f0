"""A joiner that is several steps behind when it loses a link, or a source, need not pull the state again."""

import pytest
from scripted import Scripted

from chaosnet.node.agent.core import Phase
from chaosnet.protocols import step_sync
from chaosnet.protocols.events import Received
from chaosnet.protocols.messages import Install, ReplicationDone, ScaleOutReady
from chaosnet.protocols.serving import Serving
from chaosnet.simulator.cluster import SimCluster
from chaosnet.simulator.hunt import MUTANTS
from chaosnet.simulator.lagging import JOINER, LOSSES, MEMBERSHIPS, play


@pytest.mark.parametrize("loss", LOSSES)
def test_what_it_lacks_comes_from_the_others_if_they_have_kept_as_much(loss):
    cluster = play(LOSSES[loss])
    assert cluster.nodes[JOINER].agent.phase is Phase.MEMBER


@pytest.mark.parametrize("loss", [name for name, each in LOSSES.items() if each.pulls == 1])
def test_if_no_more_than_one_result_is_kept_it_pulls_the_state_again(loss, monkeypatch):
    """As it did. So it is these results that it lacks."""
    monkeypatch.setattr(step_sync, "RESULTS_KEPT", 1)
    with pytest.raises(AssertionError, match="pulled the state 2 times"):
        play(LOSSES[loss])


def test_the_install_brings_the_commits_of_all_steps_that_it_lacks():
    cluster, found = SimCluster(1, record=True), []

    def look(sender, receiver, message):
        body = getattr(message, "body", None)
        if isinstance(body, Install) and receiver == JOINER:
            found.append(body)

    cluster.on_message = look
    play(LOSSES["n2 dies at 2 steps"], cluster)
    install = found[-1]
    assert [each.step for each in (*install.earlier, install.commit)] == [install.step - 2, install.step - 1]


@pytest.mark.parametrize(
    ("name", "mutant", "complaint"),
    [
        ("a script that is behind", "void-states-count", "computed with no state"),
        ("parts of an earlier membership", "listening-begins-with-old-parts", "counted twice"),
    ],
)
def test_what_belongs_to_an_earlier_membership_does_not_count(name, mutant, complaint):
    MEMBERSHIPS[name]()
    with MUTANTS[mutant].alive(), pytest.raises(AssertionError, match=complaint):
        MEMBERSHIPS[name]()


def test_a_source_that_was_not_told_that_a_joiner_has_all_hears_so_once_all_wait(monkeypatch):
    """The link between them had closed, and was open again before the source came to the view of the join."""
    original = Serving.asked

    def asked(self, event, now_at):
        is_lost = self.me == "n1" and isinstance(event.message, ReplicationDone)
        return [] if is_lost else original(self, event, now_at)

    monkeypatch.setattr(Serving, "asked", asked)
    cluster = Scripted().grow("n1", "n2", "n3")
    agent = cluster.agent("n1")
    assert agent.serving.joiners == {"n2", "n3"}
    for node, unanswered in (("n2", True), ("n3", False)):
        agent.welcome.on_unheard(
            Received(node, ScaleOutReady(node=node, unanswered=unanswered)), cluster.now_s
        )
    assert agent.serving.joiners == {"n3"}
