"""`chaosnet.node.session`: when a script may begin its first step."""

from queue import SimpleQueue
from types import SimpleNamespace

from chaosnet.node.outcomes import Admitted, StepOutcome
from chaosnet.node.session import Session, _Entry
from chaosnet.protocols.messages import Commit, Contribution, Member, View


class Apart(Session):
    """Without a cluster."""

    engine = loop = None


def test_a_member_adopts_what_the_others_have_completed_before_its_script_begins():
    """Let in by a flush, while a result was on its way, it trained with an older state, and was ready twice."""
    view = View(term=1, seq=2, scheduler="a", members=(Member(id="a"),))
    outcome = StepOutcome(7, Commit(key=(1, 1), step=7, switch=None, total=Contribution()), (), [], view)
    outcomes = SimpleQueue()
    outcomes.put(Admitted(8, (), view))
    outcomes.put(outcome)
    adopted = []
    engine = SimpleNamespace(
        round=7, admitted=lambda deal: None, acts_in=lambda view: None, entered=lambda fetched: None
    )

    def adopt(outcome):
        adopted.append(outcome.step)
        engine.round = outcome.step + 1

    session = Apart.__new__(Apart)
    session.engine = engine
    session.loop = SimpleNamespace(
        outcomes=outcomes, ask=lambda question: {}, backlog_applied=lambda size: None
    )
    session.adopt = adopt
    assert session._become_member(_Entry(loaded=True)) is None
    assert (adopted, outcomes.empty(), engine.round) == ([7], True, 8)


def test_the_thread_that_trains_computes_what_the_loop_has_left_to_it():
    """The loop did it: with 250 MB of gradients on a busy machine a founder was silent for 3 s at each first join."""
    view = View(term=1, seq=2, scheduler="a", members=(Member(id="a"),))
    commit = Commit(key=(1, 1), step=7, switch=None, total=Contribution(weight=1.0))
    outcome = StepOutcome(7, commit, (), None, view, late=lambda: ["mean"])
    adopted = []
    session = Apart.__new__(Apart)
    session.engine = SimpleNamespace(
        adopt=lambda outcome: adopted.append(outcome.results), acts_in=lambda view: None
    )
    session.adopt(outcome)
    assert adopted == [["mean"]] and outcome.late is None
