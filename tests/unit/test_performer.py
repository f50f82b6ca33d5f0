"""`chaosnet.node.performer`: what the training thread hears, and when."""

from collections import Counter
from queue import SimpleQueue
from types import SimpleNamespace

import msgspec
import pytest

from chaosnet.node.outcomes import StepOutcome
from chaosnet.node.performer import Performer
from chaosnet.protocols.effects import Happened, StepCompleted, StoreShard, TakeSnapshot
from chaosnet.protocols.events import ShardBad, ShardStored
from chaosnet.protocols.messages import Commit, Contribution, Member, Notice, View


@pytest.fixture
def performer():
    agent = SimpleNamespace(note=lambda notice, now_s: [], sync=None)
    return Performer(
        agent=agent,
        all_reduce=SimpleNamespace(completed=lambda step, kept: []),
        replica=None,
        steps=SimpleNamespace(completed=lambda *step: None),
        transport=None,
        tests=None,
        telling=SimpleNamespace(notice=lambda notice: None),
        outcomes=SimpleQueue(),
        mailbox=SimpleNamespace(wake=lambda: None),
        asked=SimpleQueue(),
        counters=Counter(),
        backlog_limit=0,
        soon=None,
        status=None,
        member=True,
    )


def test_a_step_and_the_copy_that_is_wanted_after_it_come_together_whatever_is_told_in_between(performer):
    """A wait that was over and a view with a joiner, in one step: the scheduler ended with an error."""
    view = View(term=1, seq=2, scheduler="n0", members=(Member(id="n0"),))
    commit = Commit(key=(1, 1), step=3, switch=(1, 2), total=Contribution())
    told = Happened("waited for", "n2", "3 s; going on", 4)
    copy = TakeSnapshot(4, blocking=False)
    performer.perform([StepCompleted(3, commit, (), view), told, copy], 0.0)
    outcome = performer.outcomes.get_nowait()
    assert isinstance(outcome, StepOutcome)
    assert outcome.snapshot == copy


def test_a_notice_is_cut_to_what_its_receivers_take(performer):
    told = []
    performer.telling = SimpleNamespace(notice=told.append)
    performer.perform([Happened("unreachable", "n" * 300, "gone; " * 1000, 4)], 0.0)
    [notice] = told
    assert msgspec.convert(msgspec.to_builtins(notice), Notice) == notice  # As whoever hears it checks.
    assert notice.node == "n" * 198 + " …"
    assert notice.detail.endswith("gone; go …")


def test_damaged_pieces_are_counted(performer):
    """A member's counters are in its reports: bad memory, or a bad link, shows there."""
    came, heard = [ShardStored("a", 0, 4), ShardBad("a", 4, 8)], []
    performer.replica = SimpleNamespace(store_shard=lambda effect: came[len(heard)])
    performer.soon = heard.append
    for start in (0, 4):
        performer.perform([StoreShard("a", start, start + 4, b"", b"")], 0.0)
    assert heard == came
    assert performer.counters["damaged_pieces"] == 1
