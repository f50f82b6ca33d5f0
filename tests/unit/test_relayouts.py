"""`chaosnet.node.agent.relayouts`: what a client that asks for other pipelines hears."""

import random

from chaosnet.node.agent.core import Agent, CoreSettings
from chaosnet.node.agent.relayouts import MOST_ASKERS
from chaosnet.protocols.effects import LayoutAsked, Transmit
from chaosnet.protocols.events import LayoutAnswered, PeerOpened, Received
from chaosnet.protocols.messages import Answer, Envelope, RelayoutCommand


def founder(recomputes=True):
    agent = Agent("a", CoreSettings(recomputes=recomputes), random.Random(0))
    agent.found(0.0)
    return agent


def ask(agent, asker="cli", serial=1):
    agent.handle(PeerOpened(asker, "", client=True), 0.1)
    body = RelayoutCommand(asker=asker, layout="2+2")
    return agent.handle(Received(asker, Envelope(source=asker, target="a", serial=serial, body=body)), 0.2)


def answers(effects):
    sent = [e.message.body for e in effects if isinstance(e, Transmit) and isinstance(e.message, Envelope)]
    return [(body.ok, body.text) for body in sent if isinstance(body, Answer)]


def test_the_training_thread_is_asked_once_and_its_answer_goes_to_whoever_repeats_the_question():
    agent = founder()
    assert LayoutAsked("cli", "2+2") in ask(agent)
    again = ask(agent, serial=2)
    assert not answers(again) and not any(isinstance(each, LayoutAsked) for each in again)
    assert answers(agent.handle(LayoutAnswered("cli", True, "from step 7 on"), 0.3)) == [
        (True, "from step 7 on")
    ]
    assert answers(ask(agent, serial=3)) == [(True, "from step 7 on")]


def test_a_node_that_does_not_train_in_pipelines_says_so():
    agent = founder(recomputes=False)
    assert answers(ask(agent)) == [(False, "a does not train in pipelines")]


def test_what_is_kept_of_clients_is_bounded():
    agent = founder()
    for number in range(MOST_ASKERS + 5):
        ask(agent, f"cli-{number}")
    assert len(agent.relayouts.answers) == MOST_ASKERS
