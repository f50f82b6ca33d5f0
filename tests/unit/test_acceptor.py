"""`chaosnet.node.transport.acceptor`: links that others open, where libzmq says of some that they are gone."""

from types import SimpleNamespace

import pytest
import zmq

from chaosnet.node.transport.acceptor import Acceptor
from chaosnet.node.transport.foreign import Foreign
from chaosnet.node.transport.greeting import Identity
from chaosnet.node.transport.link import LinkStage, Port
from chaosnet.node.transport.links import Links
from chaosnet.node.transport.strangers import Door
from chaosnet.protocols.codec import encode
from chaosnet.protocols.messages import Hello

HELLO = Hello(node="b", address="", incarnation="0" * 16, cluster="")


class Router:
    """A ROUTER to which some routes do not lead any more."""

    def __init__(self, gone):
        self.gone, self.answered = gone, []

    def send(self, frame, flags=0, copy=True):
        if frame[:1] in (b"c", b"b"):
            if frame[:1] in self.gone:
                raise zmq.ZMQError(zmq.EHOSTUNREACH)
            self.answered.append(frame[:1])

    def get(self, option):
        return 0


class Heard:
    """What the sink is told, and what is left for later."""

    closed = False

    def __init__(self):
        self.told, self.timers = [], []

    def opened(self, *said):
        self.told.append(("opened", said[0]))

    def foreign(self, *said):
        self.told.append(("foreign", *said))

    def tell(self, call):
        call()

    def deliver(self):
        pass

    def wake(self, port):
        pass

    def later(self, delay_s, call, *args):
        self.timers.append(call)
        return SimpleNamespace(cancel=lambda: None)


@pytest.mark.parametrize(
    ("gone", "answered", "told"),
    [("", [b"c", b"b"], [("opened", "b")]), ("c", [], []), ("b", [b"c"], []), ("cb", [], [])],
)
def test_a_link_whose_dialer_has_gone_before_our_answer_is_never_opened(gone, answered, told):
    """It was buried and then opened. If both connections had gone, nothing told of its end: a peer for ever."""
    heard, router = Heard(), Router([each.encode() for each in gone])
    sockets = SimpleNamespace(door=Door(keyed=False), read_monitor=lambda port: None, shut=lambda *_: None)
    us = Identity("a", client=False, keys=None, keyring=None)
    links = Links(us, heard, sockets, heard)
    acceptor = Acceptor(us, heard, sockets, links, Foreign(heard, heard))
    port = Port(router, router, 0, None)
    for route in (b"c-1", b"b-1"):
        acceptor.first_words(port, route, [zmq.Frame(b""), zmq.Frame(encode(HELLO))])
    assert heard.told == told
    assert router.answered == answered
    assert list(links.peers) == [name for _, name in told]
    states = {conn.link.state for conn in acceptor.conns.values()}
    assert states == {LinkStage.OPEN if told else LinkStage.GONE}
