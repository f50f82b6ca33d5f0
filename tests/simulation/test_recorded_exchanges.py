"""A dozen exchanges as text: tests/traces/exchanges/. They are documentation that cannot fall behind.

Write them anew with CHAOSNET_REWRITE_TRACES=1, and commit the difference only if you can explain it.
"""

import os
import textwrap
from pathlib import Path

import pytest
from recorded import Recorded

from chaosnet.protocols.events import LeaveWanted
from chaosnet.protocols.messages import ConnectLinkRequest, DisconnectLinkRequest

FOLDER = Path(__file__).parent.parent / "traces" / "exchanges"
REWRITE = os.environ.get("CHAOSNET_REWRITE_TRACES") == "1"
HEAD = """\
Seconds since the beginning, from, to (all: flooded), message and fields. In brackets: what a node does, or what
happens to it. Left out: pings, reports, news that a Losses repeats, sums, and steps in which nobody votes. A view
is written as term.number[members,+observers].
"""


def join(c):
    """n4 joins a cluster of three, asks at n2 and wants two links. Nobody waits for it (streaming)."""
    c.add("n4", seeds=["n2"], degree=2)
    c.settle(3.0)
    assert "n4" in c.members("n1")


def leave(c):
    """n3 leaves. Nothing is torn: the cluster switches to a view without it between two steps."""
    c.tell("n3", LeaveWanted())
    c.settle(2.0)
    assert c.members("n1") == ("n1", "n2")


def crash(c):
    """n3 is killed. The step under way is given up, and done again by a flush without n3."""
    c.crash("n3", arrives=0.0)
    c.settle(2.0)
    assert c.members("n1") == ("n1", "n2")


def link_removed(c):
    """A person asks n3 to have the link n2-n3 removed."""
    c.ask("n3", DisconnectLinkRequest(a="n2", b="n3", asker="n3"))
    c.settle(2.0)
    assert ("n2", "n3") not in c.agent("n1").sync.view.links


def link_added(c):
    """The link n2-n3, removed a moment ago, is added again: it is opened and measured before the view changes."""
    c.ask("n2", ConnectLinkRequest(a="n2", b="n3", asker="n2"))
    c.settle(2.0)
    assert ("n2", "n3") in c.agent("n1").sync.view.links


def election(c):
    """n1, the scheduler, is killed. The others elect one of them, which then flushes."""
    c.crash("n1", arrives=0.0)
    c.settle(3.0)
    assert c.agent("n2").sync.view.term > 1


def flush(c):
    """A connection is reset while a step is under way; all live. The step is done again in a new view."""
    c.reset("n2", "n3")
    c.settle(2.0)
    assert c.members("n1") == ("n1", "n2", "n3")


def partition(c):
    """n3 is cut off. The two that are left go on; n3, one of three, waits and says so."""
    c.cut("n1", "n3")
    c.cut("n2", "n3")
    c.settle(5.0)
    assert c.members("n1") == ("n1", "n2")
    assert c.agent("n3").parked


def rejoin(c):
    """The links of n3, which the others went on without, carry again. It is told so, and joins as a new life."""
    c.heal("n1", "n3")
    c.heal("n2", "n3")
    c.settle(6.0)
    assert c.members("n1") == ("n1", "n2", "n3")


def refused(c):
    """n4 asks for a neighbour that does not exist."""
    c.add("n4", seeds=["n2"], neighbors=("n9",))
    c.settle(2.0)
    assert c.nodes["n4"].done == "JoinFailed"


def source_killed(c):
    """n3, a source of the state that n4 pulls, is killed half way. Another source sends the rest."""
    c.add("n4", seeds=["n2"], degree=3)
    while not c.nodes["n4"].stored:
        c.run(c.queue[0][0])
    c.crash("n3", arrives=0.0)
    c.settle(4.0)
    assert c.members("n1") == ("n1", "n2", "n4")


def many_joins(c):
    """Three nodes ask at the same moment. One view lets all of them in; each is a member once it has the state."""
    for name in ("n4", "n5", "n6"):
        c.add(name, seeds=["n1"], degree=2)
    c.settle(5.0)
    assert len(c.members("n1")) == 6


SCENARIOS = {  # What is recorded: what happens before.
    join: None, leave: None, crash: None, link_removed: None, link_added: link_removed, election: None, flush: None,
    partition: None, rejoin: partition, refused: None, source_killed: None, many_joins: None,
}  # fmt: skip


def recorded(scenario):
    cluster = Recorded().grow("n1", "n2", "n3")
    if before := SCENARIOS[scenario]:
        before(cluster)
    cluster.record_from_here()
    scenario(cluster)
    told = textwrap.fill(scenario.__doc__, 110)
    return f"{told}\n\n{HEAD}\n{cluster.text()}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_an_exchange_is_as_it_was_recorded(scenario):
    file, text = FOLDER / f"{scenario.__name__}.txt", recorded(scenario)
    if REWRITE:
        file.write_text(text)
    assert text == file.read_text(), "the exchange has changed; CHAOSNET_REWRITE_TRACES=1 writes it anew"


def test_there_is_no_text_without_its_scenario():
    assert {file.stem for file in FOLDER.glob("*.txt")} == {each.__name__ for each in SCENARIOS}
