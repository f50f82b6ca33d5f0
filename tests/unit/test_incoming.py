"""`chaosnet.node.incoming`: what people hear of notices to all."""

import random
from collections import Counter

from chaosnet.node.agent.core import Agent, CoreSettings
from chaosnet.node.agent.node import Phase
from chaosnet.node.incoming import Incoming
from chaosnet.protocols.codec import encode
from chaosnet.protocols.events import Crashed, PeerOpened
from chaosnet.protocols.messages import EVERYONE, Envelope, Notice


class Hearing:
    """A node `a` with links to `b` and `c`, which both pass on what the other nodes say to all."""

    def __init__(self):
        self.told, self.serial = [], 0
        self.agent = Agent("a", CoreSettings(), random.Random(0))
        self.incoming = Incoming(
            lambda event: self.agent.handle(event, 0.2), lambda call: call(), self.told.append, Counter()
        )
        self.incoming.begin_life(self.agent, None, None)
        self.agent.found(0.0)
        for peer in ("b", "c"):
            self.agent.handle(PeerOpened(peer, ""), 0.1)

    def hears(self, detail):
        self.serial += 1
        notice = Notice(kind="left", node="a", detail=detail, step=1, time_s=0.0)
        body = encode(Envelope(source="d", target=EVERYONE, serial=self.serial, body=notice))
        for peer in ("b", "c"):
            self.incoming.control(peer, body)
        return [each.detail for each in self.told]


def test_a_notice_that_comes_over_two_links_is_told_once():
    assert Hearing().hears("now 2 members") == ["now 2 members"]


def test_a_node_that_has_left_does_not_hear_of_its_own_leave_from_each_neighbour():
    hearing = Hearing()
    hearing.agent.handle(Crashed("its script ended with ValueError"), 0.2)
    assert hearing.agent.phase is Phase.OUT
    assert hearing.hears("now 1 member") == []
