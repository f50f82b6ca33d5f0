"""The negotiations that a crash may hit: each is played, message by message, on a small cluster of its own.

`PlayedNegotiation` numbers the messages of the one that it plays, hop by hop, and lets somebody crash at one of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..node.agent.core import Phase
from ..protocols import events as ev
from ..protocols.messages import (
    ConnectLinkRequest,
    DisconnectLinkRequest,
    Envelope,
    Link,
    Member,
    Message,
    Notice,
    Ping,
    Pong,
    Report,
    link,
)
from ..protocols.scale_in import LeaverState
from .cluster import SimCluster
from .nodes import SimNode

BESIDE = (Ping, Pong, Report, Notice)  # No part of any negotiation: heartbeats, and news for people.
STEP_S = 0.005
LONGEST_WINDOW_S = 20.0
QUIET_S = 1.0
RESULT_BYTES = 20_000_000
HEAL_AFTER_S = 3.0
RESTART_AFTER_S = 0.5


class When(enum.Enum):
    """Which end of a message crashes, and when."""

    SENDER_BEFORE = "sender-before"
    SENDER_AFTER = "sender-after"
    RECEIVER_BEFORE = "receiver-before"
    RECEIVER_AFTER = "receiver-after"
    SCHEDULER = "scheduler"
    SUBJECT = "subject"  # The joiner or leaver, or an end of the link.


@dataclass(frozen=True, slots=True)
class Sent:
    """One message of the negotiation, over one link."""

    kind: str
    sender: str
    receiver: str
    scheduler: str  # At that moment; "" if nobody was.


@dataclass(frozen=True, slots=True)
class Point:
    """One crash: `index` counts the messages of the negotiation from 0."""

    negotiation: str
    nodes: int
    seed: int
    index: int
    when: When
    sent: Sent
    restart: bool = False

    @property
    def name(self) -> str:
        """What `chaosnet simulate --crash-point` takes to replay it."""
        name = f"{self.negotiation}/{self.nodes}/{self.seed}/{self.index}/{self.when.value}"
        return f"{name}/restart" if self.restart else name


class PlayedNegotiation(SimCluster):
    """A small cluster that plays one negotiation; `point` is where somebody crashes."""

    def __init__(self, seed: int, point: Point | None = None, record: bool = False) -> None:
        super().__init__(seed, chunks=2, record=record)
        self.compute_s, self.retract_odds, self.state_bytes = 0.1, 0.0, 200 << 10
        self.point = point
        self.subject = ""
        self.expected: set[str] = set()  # Whoever must be a member in the end, if it lives.
        self.founders: tuple[str, ...] = ()
        self.sent: list[Sent] = []
        self.victims: list[str] = []
        self.watching = False
        self.aimed = False
        self.awaited: ev.Event | None = None
        self.on_message = self._note

    # --- building ---

    def grow(self, nodes: int, tensors: bool = False, parts: int = 0) -> None:
        """`nodes` members, n1 the first; two links each as far as there are others. The rest: as of Negotiation."""
        if tensors or parts:
            self.compute_together(parts)
        self.add("n1")
        for index in range(2, nodes + 1):
            name = f"n{index}"
            self.add(name, seeds=["n1"], degree=2)
            self.until(lambda name=name: self.rests() and name in self.view.member_ids)  # type: ignore[misc]
        self.until(lambda: len(self.view.links) >= (nodes if nodes > 2 else nodes - 1))
        self.until(self.rests)
        self.founders = tuple(sorted(self.nodes))

    def begin(self, subject: str = "") -> None:
        """The negotiation begins: from here on messages count."""
        self.watching, self.subject = True, subject

    @property
    def view(self) -> Any:
        """The view in which the first founder acts."""
        return self.nodes["n1"].view

    def until(self, condition: Callable[[], bool], within_s: float = LONGEST_WINDOW_S) -> None:
        """Run until `condition` holds."""
        deadline_s = self.now_s + within_s
        while not condition():
            assert self.now_s < deadline_s, f"not within {within_s:g} s"
            self.run(self.now_s + STEP_S)

    def living(self) -> list[SimNode]:
        return [node for node in self.nodes.values() if node.alive and not node.done]

    def lives(self, member: Member) -> bool:
        """Does this very process still act, and not a later one of its name?"""
        node = self.nodes[member.id]
        return node.alive and node.done != "Left" and node.agent.life == member.life

    def rests(self) -> bool:
        """Is everybody in, in one view that a step was completed in, and nothing under way?"""
        agents = [node.agent for node in self.living()]
        return (
            all(agent.phase is Phase.MEMBER and not agent.sync.frozen for agent in agents)
            and len({agent.sync.view.key for agent in agents if agent.sync.view}) == 1
            and not any(agent.sync.priors or (agent.scheduler and agent.scheduler.busy) for agent in agents)
            and all(agent.leaver.state is LeaverState.STAYING for agent in agents)
            and any(agent.scheduler for agent in agents)
            # Out: about to come back.
            and not any(node.alive and node.done == "Out" for node in self.nodes.values())
        )

    # --- messages and crashes ---

    def _note(self, sender: str, receiver: str, message: Message) -> None:
        body = message.body if isinstance(message, Envelope) else message
        if not self.watching or isinstance(body, BESIDE):
            return
        scheduler = next((node.name for node in self.living() if node.agent.scheduler), "")
        self.sent.append(Sent(type(body).__name__, sender, receiver, scheduler))
        if self.point is not None and len(self.sent) == self.point.index + 1:
            assert self.sent[-1] == self.point.sent, (
                "the negotiation went another way than when it was recorded"
            )
            self.aimed = True
            if self.point.when is When.SENDER_BEFORE:
                self.strike(sender)

    def _send(self, sender: str, receiver: str, message: Message, payload: Any) -> None:
        super()._send(sender, receiver, message, payload)
        if not self.aimed or self.point is None:
            return
        self.aimed = False
        match self.point.when:
            case When.SENDER_AFTER:
                self.strike(sender)
            case When.SCHEDULER:
                self.strike(self.point.sent.scheduler)
            case When.SUBJECT:
                self.strike(self.subject)

    def _arrive_later(self, connection: Any, receiver: str, event: ev.Event) -> None:
        if self.aimed:
            self.awaited = event
        super()._arrive_later(connection, receiver, event)

    def arrive(self, connection: Any, receiver: str, event: ev.Event) -> None:
        awaited = event is self.awaited and self.point is not None
        if awaited and self.point.when is When.RECEIVER_BEFORE:  # type: ignore[union-attr]
            self.strike(receiver)
        super().arrive(connection, receiver, event)
        if awaited and self.point.when is When.RECEIVER_AFTER:  # type: ignore[union-attr]
            self.strike(receiver)

    def strike(self, name: str) -> None:
        """Crash a node. On even seeds all that it had sent arrives, on odd ones what chance lets through."""
        node = self.nodes[name]
        if not node.alive or node.done:
            return
        self.crash(name, arrives=1.0 if self.seed % 2 == 0 else None)
        self.victims.append(name)
        if self.point is not None and self.point.restart:
            self.later(RESTART_AFTER_S, lambda: self._restart(name))

    def _restart(self, name: str) -> None:
        others = [node.name for node in self.active()]
        if others:
            self.add(name, seeds=others, degree=2)


# --- the negotiations ---


@dataclass(frozen=True, slots=True)
class Negotiation:
    """`play` starts it on a stage and says when it is over; `least` nodes take part, joiners included."""

    name: str
    least: int
    play: Callable[[PlayedNegotiation], Callable[[], bool]]
    # What it is made of: each of these must be among the messages of some small cluster.
    kinds: frozenset[str]
    joiners: int = 0  # Of the nodes.
    tensors: bool = False  # They need each other's within a step.
    parts: int = 0  # That, and they keep only parts of the state, of which there are so many copies.


TRAINING = frozenset({"Up", "Down", "Ready", "Commit"})
OPENING = frozenset({"LinkNews", "ProbeRequest", "Probe", "ProbeResult"})
REPLICATION = frozenset({"ManifestRequest", "ManifestReply", "ShardRequest", "Shard", "ReplicationDone"})
FLUSH = frozenset({"Flush", "FlushOk", "Install"})
JOIN = OPENING | REPLICATION | {
    "ScaleOutRequest", "NegotiationPlan", "DialBack", "DialBackReply", "NeighborsReady", "Prepare", "ReplicationPlan",
}  # fmt: skip
STREAMING = JOIN | {"ScaleOutReady", "Answer"}
LEAVE = frozenset({"ScaleInRequest", "Farewell"})
LINK = frozenset({"Prepare", "Answer"})


def _step(stage: PlayedNegotiation) -> Callable[[], bool]:
    """One step of training, no event at all: step recovery begins at each of its messages."""
    stage.until(lambda: len({node.agent.sync.step for node in stage.living()}) == 1)
    until_step = stage.nodes["n1"].agent.sync.step + 1
    stage.begin()
    return lambda: all(node.agent.sync.step >= until_step for node in stage.living())


def _join(blocking: bool) -> Callable[[PlayedNegotiation], Callable[[], bool]]:
    def play(stage: PlayedNegotiation) -> Callable[[], bool]:
        stage.expected.add("j")
        stage.begin("j")
        stage.add("j", seeds=stage.founders, degree=2, blocking=blocking)
        return lambda: "j" in stage.view.member_ids and stage.nodes["j"].loaded

    return play


def _join_together(stage: PlayedNegotiation) -> Callable[[], bool]:
    """Two nodes at once: they pass the state on to each other."""
    stage.expected |= {"j", "k"}
    stage.begin("j")
    stage.add("j", seeds=stage.founders, degree=2, blocking=True)
    stage.add("k", seeds=stage.founders, degree=2, blocking=True)
    return lambda: all(name in stage.view.member_ids and stage.nodes[name].loaded for name in ("j", "k"))


def _leave(name: str) -> Callable[[PlayedNegotiation], Callable[[], bool]]:
    def play(stage: PlayedNegotiation) -> Callable[[], bool]:
        leaver = stage.founders[-1] if name == "last" else stage.view.scheduler
        stage.begin(leaver)
        stage.tell(leaver, ev.LeaveWanted())
        return lambda: stage.nodes[leaver].done == "Left"

    return play


def _connect_link(stage: PlayedNegotiation) -> Callable[[], bool]:
    ends = _a_link(stage)
    stage.ask(ends[0], DisconnectLinkRequest(a=ends[0], b=ends[1], asker=ends[0]))
    stage.until(lambda: ends not in stage.view.links and stage.rests())
    stage.run(stage.now_s + QUIET_S)
    stage.begin(ends[1])
    stage.ask(ends[1], ConnectLinkRequest(a=ends[0], b=ends[1], asker=ends[1]))
    return lambda: ends in stage.view.links


def _disconnect_link(stage: PlayedNegotiation) -> Callable[[], bool]:
    ends = _a_link(stage)
    stage.begin(ends[1])
    stage.ask(ends[1], DisconnectLinkRequest(a=ends[0], b=ends[1], asker=ends[1]))
    return lambda: ends not in stage.view.links


def _lose_link(stage: PlayedNegotiation) -> Callable[[], bool]:
    """A link dies silently, is asked around and dropped, heals, and is used again."""
    ends, gone = _a_link(stage), [False]
    stage.begin(ends[1])
    stage.cut(*ends)
    stage.later(HEAL_AFTER_S, lambda: stage.heal(*ends))

    def over() -> bool:
        present = ends in stage.view.links
        gone[0] = gone[0] or not present
        return gone[0] and present

    return over


def _replan(stage: PlayedNegotiation) -> Callable[[], bool]:
    """A link that the trees use has become slow; the scheduler has seen so once, and waits until it is sure."""
    before = stage.view
    slow = {*next(iter(before.trees[0].parent.items()))}
    for node in stage.living():
        node.agent.settings.result_bytes = RESULT_BYTES
        peers = sorted(node.agent.relay.peers)
        stage.carries(node.name, {peer: 1e6 if {peer, node.name} == slow else 1e9 for peer in peers})
    schedulers = [node.agent.scheduler for node in stage.living() if node.agent.scheduler]
    stage.until(lambda: any(each.changes.replanning.worth for each in schedulers))
    stage.begin()
    return lambda: stage.view.key > before.key


def _switch_twice(stage: PlayedNegotiation) -> Callable[[], bool]:
    """A node leaves while another joins: the views follow each other without a pause."""
    leaver = stage.founders[-1]
    stage.expected.add("j")
    stage.begin(leaver)
    stage.add("j", seeds=stage.founders[:1], degree=2)
    stage.tell(leaver, ev.LeaveWanted())
    return lambda: "j" in stage.view.member_ids and stage.nodes[leaver].done == "Left"


def _election(stage: PlayedNegotiation) -> Callable[[], bool]:
    scheduler = stage.view.scheduler
    stage.begin()
    stage.crash(scheduler)
    return lambda: all(node.view.scheduler not in ("", scheduler) for node in stage.living())


def _rejoin(stage: PlayedNegotiation) -> Callable[[], bool]:
    """The last in seniority is cut off; the others go on, it is told so when the links heal, and comes back."""
    away = stage.founders[-1]
    ways = [link(away, other) for other in stage.founders[:-1]]
    for each in ways:
        stage.cut(*each)
    stage.until(lambda: away not in stage.view.member_ids)
    stage.expected.add(away)
    stage.begin(away)
    for each in ways:
        stage.heal(*each)
    return lambda: away in stage.view.member_ids and stage.nodes[away].loaded


def _lose_member(stage: PlayedNegotiation) -> Callable[[], bool]:
    """The last in seniority dies in the middle of a step."""
    victim = stage.founders[-1]
    stage.until(lambda: bool(stage.nodes[victim].agent.sync.sums.own_weight))
    stage.begin()
    stage.crash(victim)
    return lambda: all(victim not in node.view.member_ids for node in stage.living())


def _take_back(stage: PlayedNegotiation) -> Callable[[], bool]:
    """A training thread takes gradients back that have left: step recovery though nobody has died."""
    node = stage.nodes[stage.founders[-1]]
    stage.until(lambda: bool(node.agent.sync.sums.own_weight) and node.agent.sync.local is None)
    before, weight = node.view.key, next(iter(node.agent.sync.sums.own_weight.values()))
    stage.begin(node.name)
    stage.tell(node.name, ev.Retracted(weight, "one more micro-batch"))
    return lambda: all(each.view.key > before for each in stage.living())


def _a_link(stage: PlayedNegotiation) -> Link:
    """A link whose loss leaves the overlay connected; if possible none of the scheduler's."""
    scheduler, links = stage.view.scheduler, stage.view.links
    ends = [each for each in links if scheduler not in each] or links
    return link(*ends[-1])


NEGOTIATIONS = {
    each.name: each
    for each in (
        Negotiation("step", 2, _step, TRAINING),
        Negotiation("join-streaming", 2, _join(blocking=False), TRAINING | STREAMING, joiners=1),
        Negotiation("join-blocking", 2, _join(blocking=True), TRAINING | JOIN, joiners=1),
        Negotiation("join-together", 3, _join_together, TRAINING | JOIN | {"Have"}, joiners=2),
        Negotiation("leave", 2, _leave("last"), TRAINING | LEAVE | {"Prepare"}),
        Negotiation("leave-of-the-scheduler", 2, _leave("scheduler"), TRAINING | {"ScaleInRequest", "Prepare"}),
        Negotiation("connect-link", 3, _connect_link, TRAINING | OPENING | LINK | {"ConnectLinkRequest"}),
        Negotiation("disconnect-link", 3, _disconnect_link, TRAINING | LINK | {"DisconnectLinkRequest"}),
        Negotiation("lost-link", 3, _lose_link, TRAINING | OPENING | FLUSH | {"Echo", "EchoReply", "AbortRequest"}),
        Negotiation("new-plan", 3, _replan, TRAINING | {"Prepare"}),
        Negotiation("view-switches", 3, _switch_twice, TRAINING | STREAMING | LEAVE, joiners=1),
        Negotiation("election", 3, _election, FLUSH | {"VoteRequest", "VoteReply", "LinkNews"}),
        Negotiation("lost-member", 3, _lose_member, FLUSH | {"AbortRequest", "LinkNews"}),
        Negotiation("rejoin", 3, _rejoin, TRAINING | JOIN | {"Expelled"}),
        Negotiation("taken-back", 2, _take_back, FLUSH | {"AbortRequest"}),
        Negotiation("pipeline-step", 2, _step, TRAINING | {"Tensor"}, tensors=True),
        Negotiation("pipeline-join", 3, _join(blocking=False), TRAINING | STREAMING, joiners=1, tensors=True),
        Negotiation("pipeline-lost-member", 3, _lose_member, FLUSH | {"AbortRequest"}, tensors=True),
        Negotiation("parts-step", 3, _step, TRAINING | {"Tensor"}, parts=2),
        Negotiation("parts-join", 3, _join(blocking=False), TRAINING | STREAMING, joiners=1, parts=2),
        Negotiation("parts-leave", 3, _leave("last"), TRAINING | LEAVE | {"Prepare"}, parts=2),
        Negotiation("parts-lost-member", 4, _lose_member, FLUSH | {"AbortRequest"}, parts=3),
    )
}  # fmt: skip
