"""`chaosnet.node.loop`: what the training thread hears, and when."""

from types import SimpleNamespace

import pytest

from chaosnet.node.loop import NodeLoop, StepOutcome
from chaosnet.protocols.effects import Happened, StepCompleted, TakeSnapshot
from chaosnet.protocols.messages import Commit, Contribution


@pytest.fixture
def loop():
    loop = NodeLoop(None, None, None)
    sync = SimpleNamespace(view=None)
    loop.agent = SimpleNamespace(note=lambda notice, now_s: [], wake_at_s=None, sync=sync)
    loop.all_reduce = SimpleNamespace(completed=lambda step: [])
    loop.steps = SimpleNamespace(completed=lambda *step: None)
    loop._member = True
    return loop


def test_a_step_and_the_copy_that_is_wanted_after_it_come_together_whatever_is_told_in_between(loop):
    """A wait that was over and a view with a joiner, in one step: the scheduler ended with an error."""
    commit = Commit(key=(1, 1), step=3, switch=(1, 2), total=Contribution())
    told = Happened("waited for", "n2", "3 s; going on", 4)
    copy = TakeSnapshot(4, blocking=False)
    loop._perform_all([StepCompleted(3, commit, ()), told, copy], 0.0)
    outcome = loop.outcomes.get_nowait()
    assert isinstance(outcome, StepOutcome)
    assert outcome.snapshot == copy
