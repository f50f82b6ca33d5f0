"""`chaosnet.node.agent.core`: the step that a cluster begins with, and messages that cannot be taken."""

import random

from chaosnet.node.agent.core import Agent, CoreSettings
from chaosnet.protocols.effects import Joined, Misheard, StepCompleted, Transmit
from chaosnet.protocols.events import Contributed, LocalReady, PeerOpened, Received
from chaosnet.protocols.messages import (
    EVERYONE,
    Contribution,
    Envelope,
    Member,
    Notice,
    Prepare,
    Tree,
    View,
    ViewChange,
)


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


def test_what_cannot_be_taken_here_is_told_to_the_others_nevertheless():
    agent = Agent("a", CoreSettings(), random.Random(0))
    agent.found(0.0)
    for peer in ("b", "c"):
        agent.handle(PeerOpened(peer, ""), 0.1)
    base = agent.sync.view.key
    nobody = ViewChange(base=base, term=base[0], seq=base[1] + 1, scheduler="a", gone=("a",), trees=())
    envelope = Envelope(source="b", target=EVERYONE, serial=1, body=Prepare(view=nobody))
    sent, misheard = agent.handle(Received("b", envelope), 0.2)
    assert sent == Transmit("c", envelope)
    assert isinstance(misheard, Misheard) and "a change to a bad view" in misheard.text
    agent.check_invariants()


def test_who_asks_to_join_learns_from_news_for_people_that_steps_complete():
    agent = Agent("a", CoreSettings(seeds=("b:1",)), random.Random(0))
    agent.join(("b:1",), (), 2, False, 20.0, 0.0)
    agent.handle(PeerOpened("b", "b:1"), 0.1)
    asking = agent.joining.node.joiner.asking
    for serial, (step, unanswered) in enumerate([(7, 0), (7, 5), (8, 0)], 1):
        asking.unanswered = 5
        notice = Notice(kind="scale-in", node="c", detail="", step=step, time_s=0.0)
        agent.handle(Received("b", Envelope(source="b", target=EVERYONE, serial=serial, body=notice)), 0.2)
        assert asking.unanswered == unanswered


def test_who_comes_back_for_weeks_knows_the_last_members_and_not_all_that_there_ever_were():
    ways: tuple[str, ...] = ("seed:1",)
    for life in range(1, 301):
        agent = Agent("a", CoreSettings(life=life, seeds=("seed:1",)), random.Random(life))
        agent.join(ways, (), 2, False, 20.0, 0.0)
        other, me = Member(id=f"n{life}", addresses=(f"n{life}:1",)), Member(id="a", addresses=("a:1",))
        tree = Tree(root=other.id, parent={"a": other.id})
        links = (("a", other.id),)
        view = View(term=1, seq=life, scheduler=other.id, members=(other, me), links=links, trees=(tree,))
        agent.sync.observe(view, life)
        ways = agent.ways_back
    assert ways[:3] == ("n300:1", "n299:1", "n298:1")
    assert len(ways) < 40 and "seed:1" in ways
