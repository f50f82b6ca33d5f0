"""How a node gets out of its cluster, and what it does when others have.

    LeaveWanted, LeaveCommand --the view without us, or no member goes on--> Left --> Farewell to everybody
    Crashed (its script ended with an error) --> Left --> Farewell, with the reason and the samples in hand
    Expelled (the others went on without it) --> Out --> Farewell; a joiner asks to be let in anew instead

The rules of leaving in good order are protocols/scale_in.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...protocols.effects import Effect, Left, Out
from ...protocols.events import Crashed, LeaveWanted, Received, Tick
from ...protocols.messages import EVERYONE, Answer, Expelled, Farewell, LeaveCommand
from ...protocols.scale_in import LeaverState
from ...protocols.step_sync import ASKED_TO
from .missing import Missing
from .node import Node, Phase
from .recovery import StepRecovery
from .routes import Routes
from .strikes import Strikes
from .views import Views


class Leaving:
    """What a node does to leave, and when others have left."""

    def __init__(
        self, node: Node, recovery: StepRecovery, missing: Missing, views: Views, strikes: Strikes
    ) -> None:
        self.node, self.recovery, self.missing = node, recovery, missing
        self.views, self.strikes = views, strikes
        self.crash: Crashed | None = None  # How our own script has ended.

    def routes(self) -> Routes:
        return Routes(
            events={LeaveWanted: self.on_wanted, Crashed: self.on_crashed},
            routed={LeaveCommand: self.on_command, Farewell: self.on_farewell, Expelled: self.on_expelled},
            effects={Left: self.on_left, Out: self.on_out},
        )

    def on_wanted(self, event: LeaveWanted, now_s: float) -> list[Effect]:
        """The user, or the script, wants this node to leave."""
        node = self.node
        if node.phase is not Phase.MEMBER:
            return [Left("it was not a member yet")]
        node.election.stand_down()
        return node.leaver.handle(event, now_s)

    def on_command(self, event: Received, now_s: float) -> list[Effect]:
        """A client wants this node to leave (`chaosnet leave`)."""
        assert isinstance(event.message, LeaveCommand)
        answer = Answer(ok=True, text=f"{self.node.me} leaves")
        return self.node.relay.send(event.message.asker, answer) + self.on_wanted(LeaveWanted(), now_s)

    def on_crashed(self, event: Crashed, now_s: float) -> list[Effect]:
        """The script has ended with an error."""
        self.crash = event
        return [Left(event.reason)]

    def tick(self, now_s: float) -> list[Effect]:
        return self.node.leaver.handle(Tick(), now_s)

    def give_up(self, now_s: float) -> list[Effect]:
        """Leave without being let go, if too few members can be reached for that, and we have waited for long."""
        if not self.node.parked or not self.node.leaver.overdue(now_s):
            return []
        return [Left(f"without asking the others ({self.node.parked})")]

    def on_expelled(self, event: Received, now_s: float) -> list[Effect]:
        """The others went on without us."""
        node, told = self.node, event.message
        assert isinstance(told, Expelled)
        if told.node != node.me:
            return []
        if node.phase is Phase.JOINING and node.joiner:
            return self.recovery.orphaned(told.reason, now_s, goes_on=True)
        if node.leaver.state is LeaverState.LEAVING:
            return [Left(ASKED_TO)]
        if node.sync.view is not None and (0, 0) < told.key <= node.sync.view.key:
            return []  # It was meant for our earlier life.
        return [Out(told.reason)] if node.phase is Phase.MEMBER else []

    def on_left(self, effect: Left, now_s: float) -> list[Effect]:
        """This node has left, as it wanted."""
        self.node.leaver.left()
        return self.say_farewell()

    def on_out(self, effect: Out, now_s: float) -> list[Effect]:
        """This node is out, against its will. A joiner asks again instead."""
        if self.node.is_joining and not effect.final:
            return self.recovery.orphaned(effect.reason, now_s)
        return self.say_farewell()

    def say_farewell(self) -> list[Effect]:
        """Tell everybody that this node takes part in no view any more."""
        node, entered, crash = self.node, self.views.entered, self.crash
        node.enter(Phase.OUT)
        node.schedule_by(None)
        told = Farewell(node=node.me, life=node.life, key=entered.key if entered else (0, 0))
        if crash is not None:
            told = replace(told, reason=crash.reason, ranges=crash.ranges, epoch=crash.epoch, error=True)
        return node.relay.send(EVERYONE, told)

    def on_farewell(self, event: Received, now_s: float) -> list[Effect]:
        """A node is out. A view that we have voted for waits for us, so it counts like the view that we act in."""
        node, told = self.node, event.message
        assert isinstance(told, Farewell)
        view, key = node.sync.view, told.key
        if node.is_ahead(key):
            node.overlay.note_newer_view()
        elif view is not None and told.error:
            key = min(key, view.key)
        node.overlay.farewell(told.node, told.life, key, told.error)
        if told.error:
            node.monitor.ended(told.node, told.life, told.reason)
            if node.phase is Phase.MEMBER and (strike := self.strikes.heard(told)):
                node.sync.told_of(strike)
        return self.missing.overlay_changed(now_s) if view else []
