"""A cluster may begin at any step: that of the checkpoint it goes on from."""

import random

from chaosnet.node.core import Agent, CoreSettings
from chaosnet.protocols.effects import Joined, StepCompleted
from chaosnet.protocols.events import Contributed, LocalReady
from chaosnet.protocols.messages import Contribution


def test_a_founder_begins_at_the_step_it_is_told_and_goes_on_from_there():
    agent = Agent("a", CoreSettings(chunks=2, first_step=1200), random.Random(0))
    effects = agent.found(0.0)
    assert Joined(1200, (("a", 0),), agent.sync.view) in effects
    assert agent.sync.view.members[0].joined_step == 1200
    agent.handle(Contributed((0, 1), 4.0), 0.1)
    done = agent.handle(LocalReady(Contribution(weight=4.0, shares={"a": 4})), 0.2)
    assert [effect.step for effect in done if isinstance(effect, StepCompleted)] == [1200]
    assert agent.sync.step == 1201
    agent.check_invariants()
