"""Bugs told as scripts: who joins when, what is cut, held up or dies at which message.

Random lives seldom have the three or four faults, each at its moment, without which these bugs do not show; and a
seed tells another story after any change that draws once more. These do not. Each ends well, and does not with its
rule broken (`RULES`), so a story that no longer tells its bug fails.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..protocols import events as ev
from ..protocols.messages import (
    Commit,
    Down,
    Envelope,
    Expelled,
    LinkNews,
    Message,
    ReplicationPlan,
    Up,
)
from .cluster import SimCluster
from .nodes import SimNode

LONGEST_S = 15.0


class ScriptedCluster(SimCluster):
    """A small cluster that a script steers. `at` a message: what happens right before it arrives, once."""

    def __init__(self, seed: int = 1, **kwargs: Any) -> None:
        super().__init__(seed, chunks=2, record=True, **kwargs)
        self.max_delay_s, self.compute_s, self.retract_odds = 0.002, 0.1, 0.0
        self.state_bytes = 3 << 20
        self.at: dict[tuple[str, type[Any]], Callable[[], None]] = {}  # Receiver and kind: what happens.
        # So much longer a message takes on its last hop to a receiver.
        self.held_s: Callable[[str, Any], float] = lambda receiver, message: 0.0
        self.storing_s = 0.0  # A piece of state, to disk.

    def arrive(self, connection: Any, receiver: str, event: ev.Event) -> None:
        """See `Network`."""
        message = event.message if isinstance(event, ev.Received) else None
        body = message.body if isinstance(message, Envelope) else message
        if body is not None and (held_s := self.held_s(receiver, body)):
            self.later(held_s, lambda: self._release(connection, receiver, event, body))
        else:
            self._release(connection, receiver, event, body)

    def _release(self, connection: Any, receiver: str, event: ev.Event, body: Message | None) -> None:
        if happens := self.at.pop((receiver, type(body)), None):
            happens()
        super().arrive(connection, receiver, event)

    def _soon(self, node: SimNode, event: ev.Event) -> None:
        if isinstance(event, ev.ShardStored) and self.storing_s:
            self.later(self.storing_s, lambda: self._event(node, event))
        else:
            super()._soon(node, event)

    # --- what a script does ---

    def grow(self, *names: str) -> ScriptedCluster:
        """Found a cluster and let the others join one by one."""
        self.add(names[0])
        for name in names[1:]:
            self.add(name, seeds=[names[0]], degree=len(names))
            self.settle()
        return self

    def settle(self, seconds: float = 2.0) -> None:
        """Let that much time pass."""
        self.run(self.now_s + seconds)

    def until(self, is_so: Callable[[], object], within_s: float = LONGEST_S) -> None:
        """Event by event."""
        until_s = self.now_s + within_s
        while not is_so():
            assert self.now_s < until_s, f"what was waited for did not come\n{self.story()}"
            self.run(self.queue[0][0])

    def breaks(self, a: str, b: str) -> None:
        """The connection is gone, for both, now."""
        connection = self.connections[min(a, b), max(a, b)]
        for end in (a, b):
            self._close_end(connection, end, clean=False)()

    # --- what it asks ---

    def agent(self, name: str) -> Any:
        """The core of that node."""
        return self.nodes[name].agent

    def members(self, name: str) -> tuple[str, ...]:
        """Of the view that it acts in."""
        return self.nodes[name].view.member_ids

    def all_go_on(self, *names: str, seconds: float = 8.0) -> None:
        """Soon these, and no others, train in one view."""
        self.settle(seconds)
        complaints = self.unsettled(self.now_s - 1.0)
        assert not complaints, f"{complaints}\n{self.story()}"
        train = sorted(node.name for node in self.active() if node.loaded)
        assert train == sorted(names), f"{train} train\n{self.story()}"


# --- the state, and results, on their way to a joiner ---


def a_piece_that_is_stored_for_the_plan_before() -> None:
    """Hard seed 1086143: it counted for the next plan, whose bytes were not here. The state had a hole."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    cluster.storing_s = 4.0
    joiner = cluster.add("j", seeds=["n2"], degree=2)
    cluster.until(lambda: joiner.arrived)
    cluster.settle(0.2)
    assert joiner.stored  # By and by.
    cluster.storing_s = 0.5
    for source in ("n1", "n2"):
        cluster.breaks("j", source)
    for other in ("n1", "n3"):  # So the next plan has one source, and it is asked for other pieces first.
        cluster.cut("j", other)
    cluster.all_go_on("n1", "n2", "n3", "j")


def commits_that_are_ahead_of_their_chunks() -> None:
    """Seed 519: an observer on a slow link dropped them, and had to begin anew, again and again."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    cluster.storing_s = 1.0
    cluster.held_s = lambda receiver, message: float(receiver == "j" and isinstance(message, Up | Down))
    cluster.add("j", seeds=["n2"], degree=2)
    cluster.settle(4.0)
    assert cluster.agent("j").joiner.attempts == 1, cluster.story()


def a_plan_that_comes_after_results_of_many_steps() -> None:
    """An observer cannot keep them all, so some will be lacking for ever: it has to begin anew."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    late: list[Message] = []

    def held_s(receiver: str, message: Message) -> float:
        first = receiver == "j" and isinstance(message, ReplicationPlan) and not late
        late.extend([message] * first)
        return 2.5 * first

    cluster.held_s = held_s
    cluster.add("j", seeds=["n2"], degree=2)
    cluster.settle(4.0)
    assert late
    cluster.all_go_on("n1", "n2", "n3", "j")


def a_link_that_breaks_under_a_sum() -> None:
    """What was lost on the way never comes, though the link may open again at once: the attempt is torn."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    cluster.at["n3", Down] = lambda: cluster.breaks("n1", "n3")
    cluster.all_go_on("n1", "n2", "n3")


# --- who goes on, and who must not ---


def a_leaver_that_does_not_hear_that_it_may_go() -> None:
    """The senior of two has voted for the view without it, in which the other goes on."""
    cluster = ScriptedCluster()
    cluster.found(["n2", "n1"], [("n1", "n2")])  # n1 sums, and commits.
    cluster.settle(1.0)
    cluster.tell("n2", ev.LeaveWanted())
    cluster.until(lambda: cluster.agent("n1").sync.prepared)

    def held_s(receiver: str, message: Message) -> float:
        if isinstance(message, Commit) and message.switch is not None:
            cluster.cut("n1", "n2")
        return 0.0

    cluster.held_s = held_s
    cluster.until(lambda: cluster.cuts)
    cluster.all_go_on("n1")


def a_member_that_goes_on_alone_and_dies_as_it_is_heard_again() -> None:
    """Its crash is no proof for the one left behind: there is another now, with which it had gone on."""
    cluster = ScriptedCluster().grow("n1", "n2")
    cluster.cut("n1", "n2")
    cluster.cut("n2", "n3")
    cluster.settle(4.0)
    cluster.add("n3", seeds=["n1"])
    cluster.until(lambda: cluster.members("n1") == ("n1", "n3") and cluster.nodes["n3"].loaded)
    cluster.settle(2.0)
    cluster.at["n2", LinkNews] = lambda: cluster.later(0.0, lambda: cluster.crash("n1", arrives=0.0))
    cluster.heal("n1", "n2")
    cluster.settle(8.0)
    cluster.heal("n2", "n3")
    cluster.all_go_on("n2", "n3")


def a_scheduler_that_goes_on_by_a_persons_word() -> None:
    """Seed 179836, with rates: the majority had elected another before it died; later its part did, in that term."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    cluster.cut("n1", "n2")
    cluster.cut("n1", "n3")
    cluster.until(lambda: cluster.agent("n2").scheduler)
    cluster.crash("n2")
    cluster.crash("n3")
    cluster.settle(4.0)
    cluster.go_on("n1")
    for name in ("n4", "n5"):
        cluster.settle()
        cluster.add(name, seeds=["n1"], degree=2)
    cluster.all_go_on("n1", "n4", "n5", seconds=4.0)
    cluster.crash("n1")
    cluster.all_go_on("n4", "n5")


# --- lives ---


def a_member_that_is_started_again_while_the_scheduler_is_cut_off() -> None:
    """n1 - n2 - n3: only n2 can tell n1, when their link opens. Else n1 waits for an answer of the dead process."""
    cluster = ScriptedCluster()
    cluster.found(["n1", "n2", "n3"], [("n1", "n2"), ("n2", "n3")])
    cluster.cut("n1", "n3")
    cluster.settle()
    cluster.cut("n1", "n2")
    cluster.settle(0.2)
    cluster.crash("n3")
    cluster.settle(0.2)
    cluster.add("n3", seeds=["n2"])
    cluster.settle(3.0)
    cluster.heal("n1", "n2")
    cluster.all_go_on("n1", "n2", "n3", seconds=20.0)


def an_observer_that_remembers_a_later_life_than_all_others() -> None:
    """It took a member whose clock had been set back for dead, and has no link to it."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    cluster.settle(20.0)
    cluster.cut("j", "n2")
    cluster.storing_s = 1000.0
    joiner = cluster.add("j", seeds=["n1", "n3"])
    cluster.until(lambda: joiner.agent.sync.view is not None)
    cluster.settle(0.5)
    cluster.cut("j", "n1")
    cluster.cut("j", "n3")
    cluster.settle(3.0)
    cluster.tell("n3", ev.LeaveWanted())
    cluster.until(lambda: cluster.nodes["n3"].done)
    cluster.settle(1.0)
    cluster.storing_s = 0.0
    cluster.add("n3", seeds=["n1"], clock_s=1.0)
    cluster.until(lambda: "n3" in cluster.members("n1"))
    assert joiner.agent.overlay.lives.newest("n3")[1] > cluster.agent("n3").life
    cluster.heal("j", "n1")
    cluster.until(lambda: "j" in cluster.members("n1"))
    assert "n3" in joiner.agent.overlay.reachable
    cluster.all_go_on("n1", "n2", "n3", "j")


def news_that_one_is_out_on_a_long_way_round() -> None:
    """It travels by name, and comes when the name is a member again."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    for other in ("n1", "n2"):
        cluster.cut(other, "n3")
    cluster.settle(4.0)
    late: list[Message] = []

    def held_s(receiver: str, message: Message) -> float:
        if receiver != "n2" or not isinstance(message, Expelled):
            return 0.0
        late.append(message)  # From n1; n2 has told n3 so before.
        return 8.0

    cluster.held_s = held_s
    cluster.heal("n2", "n3")
    cluster.all_go_on("n1", "n2", "n3", seconds=20.0)
    assert late
    assert cluster.returns == 1, f"{cluster.returns} times a node was told that it is out\n{cluster.story()}"


def a_farewell_that_one_of_two_has_heard() -> None:
    """Hard seed 900293: who had not heard it waited for a person, with one who had, and who did not say why."""
    cluster = ScriptedCluster().grow("n1", "n2", "n3")
    n1, n2 = cluster.agent("n1"), cluster.agent("n2")
    cluster.cut("n1", "n2")
    cluster.cut("n1", "n3")
    cluster.tell("n3", ev.Crashed("ValueError: 7"))
    cluster.until(lambda: "n3" in n2.overlay.lives.left, within_s=1.0)
    cluster.settle(6.0)  # What was under way between them is lost.
    assert "n3" not in n1.overlay.lives.left and "n3" in n2.overlay.lives.left
    cluster.heal("n1", "n2")
    cluster.until(lambda: "n3" in n1.overlay.lives.left, within_s=1.0)
    cluster.all_go_on("n1", "n2")


RULES = {
    a_piece_that_is_stored_for_the_plan_before: "pieces-are-of-any-pull",
    commits_that_are_ahead_of_their_chunks: "commits-are-kept-as-long-as-chunks",
    a_plan_that_comes_after_results_of_many_steps: "who-fell-behind-goes-on",
    a_link_that_breaks_under_a_sum: "a-torn-step-is-not-told",
    a_leaver_that_does_not_hear_that_it_may_go: "leavers-go-on-alone",
    a_member_that_goes_on_alone_and_dies_as_it_is_heard_again: "nobody-goes-on-without-us",
    a_scheduler_that_goes_on_by_a_persons_word: "no-leap-by-word",
    a_member_that_is_started_again_while_the_scheduler_is_cut_off: "rebirths-are-not-repeated",
    an_observer_that_remembers_a_later_life_than_all_others: "observers-know-better-who-lives",
    news_that_one_is_out_on_a_long_way_round: "expelled-in-any-life",
    a_farewell_that_one_of_two_has_heard: "farewells-are-not-repeated",
}
"""The mutant in which each story ends badly."""

STORIES = {story.__name__.replace("_", " "): story for story in RULES}
