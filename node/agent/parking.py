"""A node that waits because too few members can be reached: what it says, and what a person can do about it.

Nobody goes on without a quorum (docs/design.md, "Quorums"). Only a person can know that who is out of reach
is dead, and says so by `chaosnet go-on`; then it counts as dead for everybody.
"""

from __future__ import annotations

from ...protocols.effects import AnswerStatus, Effect, Happened, Parked
from ...protocols.events import Received
from ...protocols.messages import EVERYONE, Answer, DeclaredDead, GoOnCommand, StatusRequest
from .missing import Missing
from .node import Node, Phase
from .routes import Routes


class Parking:
    """What a node does while it waits for members out of reach."""

    def __init__(self, node: Node, missing: Missing) -> None:
        self.node, self.missing = node, missing

    def routes(self) -> Routes:
        return Routes(
            routed={
                GoOnCommand: self.on_go_on,
                DeclaredDead: self.on_declared,
                StatusRequest: self.on_status_request,
            },
            effects={Parked: self.on_parked},
        )

    def on_parked(self, effect: Parked, now_s: float) -> list[Effect]:
        """This node begins to wait, or goes on."""
        self.node.park(effect.reason)
        if self.node.phase is Phase.MEMBER:
            self.missing.look(now_s)
        return []

    def doubted(self) -> tuple[tuple[str, int], ...]:
        """Voters out of reach, with their lives, that no person has declared dead.

        A member that has no vote yet, and has the state, may go on without all of those who have one.
        """
        node, view = self.node, self.node.sync.view
        if view is None:
            return ()
        voters = self._voters()
        if node.me in view.voter_ids:
            return node.overlay.missing_of(voters)
        can_go_on = not node.lacks_state and not voters & node.overlay.reachable
        return node.overlay.missing_of(voters | view.member_set) if can_go_on else ()

    def _voters(self) -> set[str]:
        return {voter for electorate in self.node.sync.electorates() for voter in electorate.members}

    def why(self, now_s: float) -> str | None:
        """Why this node waits, and what a person can do about it, if anything. None: it does not wait."""
        node = self.node
        if node.parked is None or node.phase is not Phase.MEMBER or node.sync.view is None:
            return node.parked
        addresses = node.settings.addresses
        if lives := self.doubted():
            what = f"chaosnet go-on {addresses[0].rpartition('@')[2] if addresses else 'HOST:PORT'}"
        elif self._voters() & node.overlay.reachable:
            return node.parked  # These may be told to go on, and say so themselves.
        else:
            lives, what = node.overlay.missing_of(self._voters()), f"start anew, as {node.me} has just joined"
        lost_at_s = self.missing.lost_at_s
        lost = ", ".join(
            f"{name} was lost {now_s - lost_at_s.get(name, now_s):.0f} s ago" for name, _ in lives
        )
        gone = "it is" if len(lives) == 1 else "they are"
        return f"{node.parked} ({lost}; if {gone} gone for good: {what})" if lives else node.parked

    def on_go_on(self, event: Received, now_s: float) -> list[Effect]:
        """A person tells this node that all members out of reach are dead."""
        assert isinstance(event.message, GoOnCommand)
        node, asker = self.node, event.message.asker
        told: list[Effect] = []
        ok = False
        if node.phase is not Phase.MEMBER or node.parked is None:
            text = f"{node.me} does not wait for anybody who is out of reach"
        elif node.overlay.left_behind:
            text = f"the others went on without {node.me}: it joins them as soon as it reaches one"
        elif lives := self.doubted():
            names, ok = ", ".join(name for name, _ in lives), True
            text = f"{node.me} goes on without {names}; who of them lives has to join anew"
            told += [
                Happened("declared dead", name, f"a person told {node.me} so", node.sync.step) for name, _ in lives
            ]  # fmt: skip
            told += node.relay.send(EVERYONE, DeclaredDead(lives=lives))
        else:
            text = f"{node.me} waits, but not for a member out of reach: {node.parked}"
        return told + node.relay.send(asker, Answer(ok=ok, text=text[:2000]))

    def on_declared(self, event: Received, now_s: float) -> list[Effect]:
        """A person has told some node that these are dead."""
        node, view, told = self.node, self.node.sync.view, event.message
        assert isinstance(told, DeclaredDead)
        if view is None:
            return []
        for name, life in told.lives:
            member = view.find(name)
            if name != node.me and member is not None and member.life == life:
                self.missing.declare(member)
            node.overlay.lives.declare(name, life)
        return self.missing.overlay_changed(now_s)

    def on_status_request(self, event: Received, now_s: float) -> list[Effect]:
        """A client asks for the status. The scheduler answers, and so does a node that waits."""
        request = event.message
        assert isinstance(request, StatusRequest)
        answers = self.node.scheduler is not None or bool(self.node.parked)
        return [AnswerStatus(request.asker, request.history, request.since)] if answers else []
