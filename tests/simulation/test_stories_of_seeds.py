"""Bugs that a seed once showed, as scripts: who joins when, what happens at which message.

A seed tells another story after any change that draws once more. These do not; and each is played twice: as it is,
and with its rule broken, when it must go wrong. So a story that no longer tells its bug fails.
"""

from dataclasses import replace
from unittest import mock

import pytest
from scripted import Scripted

from chaosnet.protocols.early import EARLY_STEPS, Early
from chaosnet.protocols.events import ShardStored
from chaosnet.protocols.messages import Down, Envelope, Up
from chaosnet.protocols.replication import Replication
from chaosnet.simulator.mutants import MUTANTS


class Story(Scripted):
    """`at` a message: what happens right before it arrives, once."""

    def __init__(self):
        super().__init__()
        self.at = {}  # Receiver and kind: what happens.
        self.held_s = lambda receiver, message: 0.0
        self.storing_s = 0.0  # A piece of state, to disk.

    def arrive(self, connection, receiver, event):
        body = getattr(event, "message", None)
        body = body.body if isinstance(body, Envelope) else body
        if body is not None and (held_s := self.held_s(receiver, body)):
            self.later(held_s, lambda: self._release(connection, receiver, event, body))
        else:
            self._release(connection, receiver, event, body)

    def _release(self, connection, receiver, event, body):
        if happens := self.at.pop((receiver, type(body)), None):
            happens()
        super().arrive(connection, receiver, event)

    def _soon(self, node, event):
        if isinstance(event, ShardStored) and self.storing_s:
            self.later(self.storing_s, lambda: self._event(node, event))
        else:
            super()._soon(node, event)

    def breaks(self, a, b):
        """The connection is gone, for both, now."""
        connection = self.connections[min(a, b), max(a, b)]
        for end in (a, b):
            self._close_end(connection, end, clean=False)()


def grown():
    return Story().grow("n1", "n2", "n3")


def all_go_on(cluster, *names):
    cluster.settle(8.0)
    assert not cluster.unsettled(cluster.now_s - 1.0), cluster.story()
    assert sorted(node.name for node in cluster.active() if node.loaded) == sorted(names), cluster.story()


# --- the stories ---


def a_piece_that_is_stored_for_the_plan_before():
    """Hard seed 1086143: it counted for the next plan, whose bytes were not here. The state had a hole."""
    cluster = grown()
    cluster.storing_s = 4.0
    cluster.add("j", seeds=["n2"], degree=2)
    while not cluster.nodes["j"].arrived:
        cluster.run(cluster.queue[0][0])
    cluster.settle(0.2)
    assert cluster.nodes["j"].stored  # By and by.
    cluster.storing_s = 0.5
    for source in ("n1", "n2"):
        cluster.breaks("j", source)
    for other in ("n1", "n3"):  # So the next plan has one source, and it is asked for other pieces first.
        cluster.cut("j", other)
    all_go_on(cluster, "n1", "n2", "n3", "j")


def commits_that_are_ahead_of_their_chunks():
    """Seed 519: an observer on a slow link dropped them, and had to begin anew, again and again."""
    cluster = grown()
    cluster.storing_s = 1.0
    cluster.held_s = lambda receiver, message: (
        1.0 if receiver == "j" and isinstance(message, Up | Down) else 0.0
    )
    cluster.add("j", seeds=["n2"], degree=2)
    cluster.settle(4.0)
    assert cluster.agent("j").joiner.attempts == 1, cluster.story()


def a_link_that_breaks_under_a_sum():
    """What was lost on the way never comes, though the link may open again at once: the attempt is torn."""
    cluster = grown()
    cluster.at["n3", Down] = lambda: cluster.breaks("n1", "n3")
    all_go_on(cluster, "n1", "n2", "n3")


# --- the same, with the rule broken ---


def attempts_have_no_number():
    original = Replication.handle

    def handle(self, event, now_s):
        stored = isinstance(event, ShardStored)
        return original(self, replace(event, attempt=self.attempt) if stored else event, now_s)

    return mock.patch.object(Replication, "handle", handle)


def commits_are_kept_as_long_as_chunks():
    return mock.patch.object(Early, "most_commits", 2 * EARLY_STEPS)


STORIES = {
    a_piece_that_is_stored_for_the_plan_before: attempts_have_no_number,
    commits_that_are_ahead_of_their_chunks: commits_are_kept_as_long_as_chunks,
    a_link_that_breaks_under_a_sum: MUTANTS["a-torn-step-is-not-told"].alive,
}


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_a_story_ends_well(story):
    story()


@pytest.mark.parametrize("story", STORIES, ids=lambda story: story.__name__)
def test_without_its_rule_it_does_not(story):
    with STORIES[story](), pytest.raises(AssertionError):
        story()
