"""`chaosnet.node.agent.routes`: everything that can come has somebody who handles it, and all know in which order."""

import copy
import random
import typing

import pytest

from chaosnet.node.agent.core import Agent, CoreSettings
from chaosnet.node.agent.routes import merged
from chaosnet.protocols import events, messages
from chaosnet.protocols.effects import Effect, Left
from chaosnet.protocols.events import Event, LeaveWanted, LinkMeasured

OF_THE_TRANSPORT = {"Hello", "Bye", "Lend", "Mapped", "Laid"}
FOR_CLIENTS = {"StatusReply"}


def names(kinds):
    return {kind.__name__ for kind in kinds}


def made():
    return Agent("a", CoreSettings(), random.Random(0))


def test_every_event_has_a_handler():
    kinds = {each for each in vars(events).values() if isinstance(each, type) and issubclass(each, Event)}
    assert names(kinds - {Event, LinkMeasured}) == names(made()._events)  # The last is from core to core.


def test_every_message_has_a_handler():
    agent = made()
    assert names(typing.get_args(messages.WireMessage)) - names(agent._messages) == OF_THE_TRANSPORT
    assert names(typing.get_args(messages.Routed)) - names(agent._routed) == FOR_CLIENTS


def test_no_message_is_both_of_a_neighbour_and_of_the_overlay():
    agent = made()
    assert not agent._messages.keys() & agent._routed.keys()


def test_what_nobody_handles_is_an_error():
    with pytest.raises(TypeError, match="nobody handles LinkMeasured"):
        made().handle(LinkMeasured("b", 1.0, "probe"), 0.0)


def test_several_handlers_of_one_type_come_in_turn():
    said = []

    def part(name):
        def handle(what, now_s):
            said.append((name, what, now_s))
            return [Left(name)]

        return {LeaveWanted: handle}

    handle = merged([part("first"), {Effect: None}, part("second")])[LeaveWanted]
    assert handle("this", 2.0) == [Left("first"), Left("second")]
    assert said == [("first", "this", 2.0), ("second", "this", 2.0)]


def test_the_farewell_goes_before_the_end():
    """After Left nothing is sent: the loop hangs up."""
    agent = made()
    agent.found(0.0)
    agent.handle(events.PeerOpened("b", "b:1"), 0.1)
    effects = agent.end("its script has failed", 0.2)
    assert isinstance(effects[-1], Left)
    assert isinstance(effects[0].message.body, messages.Farewell)


def test_a_copy_of_an_agent_leaves_the_first_alone():
    """Tests that try many events from one moment on copy it."""
    agent = made()
    agent.found(0.0)
    other = copy.deepcopy(agent)
    other.handle(events.PeerOpened("b", "b:1"), 0.1)
    other.handle(events.LeaveWanted(), 0.2)
    assert other.relay.peers == {"b"} and other.leaver.state.value == "leaving"
    assert not agent.relay.peers and agent.leaver.state.value == "staying"
