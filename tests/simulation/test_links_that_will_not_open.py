"""A link that answers, or is planned, and yet cannot be opened, holds up nothing for long."""

from scripted import Scripted

from chaosnet.protocols.events import DialFailed, LeaveWanted
from chaosnet.protocols.messages import DisconnectLinkRequest, link

TWO_TRIANGLES = (("a", "b"), ("a", "h"), ("b", "h"), ("c", "d"), ("c", "h"), ("d", "h"))


class Blocked(Scripted):
    """Nobody can open the links `blocked`; those that are open stay so."""

    blocked = ()

    def _dial(self, node, address):
        if link(node.name, address.split(":")[0]) in self.blocked:
            self.later(0.01, lambda: self._event(node, DialFailed(address, "blocked")))
        else:
            super()._dial(node, address)


def test_a_lost_link_that_answers_and_will_not_open_holds_up_other_changes_ever_less():
    cluster = Blocked().grow("a", "b", "c")
    cluster.blocked = (("b", "c"),)
    cluster.cut("b", "c")
    cluster.settle(4.0)
    cluster.heal("b", "c")
    cluster.settle(30.0)
    busy = 0
    for _ in range(300):
        cluster.settle(0.1)
        busy += cluster.agent("a").scheduler.busy
    assert busy < 100  # OPEN_PATIENCE_S of each 32 s, by each end.


def test_who_holds_two_parts_together_leaves_though_one_link_between_them_cannot_be():
    cluster = Blocked()
    cluster.blocked = (("a", "c"),)
    cluster.add("h")
    for name, neighbors in {"a": "h", "b": "ha", "c": "h", "d": "hc"}.items():
        cluster.add(name, seeds=["h"], neighbors=tuple(neighbors))
        cluster.settle()
    cluster.settle(10.0)
    for a, b in set(cluster.agent("h").sync.view.links) - set(TWO_TRIANGLES):
        cluster.ask("h", DisconnectLinkRequest(a=a, b=b, asker="h"))
        cluster.settle()
    assert cluster.agent("h").sync.view.links == TWO_TRIANGLES
    cluster.tell("h", LeaveWanted())
    cluster.settle(20.0)
    assert cluster.nodes["h"].done == "Left"
    assert set(cluster.members("a")) == {*"abcd"}
