"""The steps of a node: what its training thread and its neighbours bring, and what follows from each.

The all-reduce and its vote are protocols/step_sync.py.
"""

from __future__ import annotations

from msgspec.structs import replace

from ...protocols.effects import Effect, Parked, StepCompleted
from ...protocols.events import Contributed, Event, KeepersChosen, LocalReady, Received, Retracted, TensorMade
from ...protocols.messages import Tensor
from ...protocols.scale_in import LeaverState
from ...protocols.step_sync import STEP_MESSAGES
from .node import Node
from .recovery import StepRecovery
from .routes import Routes, all_to
from .strikes import Strikes


class Steps:
    """Hands what belongs to a step to the cores, and follows up on it."""

    def __init__(self, node: Node, recovery: StepRecovery, strikes: Strikes) -> None:
        self.node, self.recovery, self.strikes = node, recovery, strikes

    def routes(self) -> Routes:
        return Routes(
            events={
                Contributed: self.on_own,
                LocalReady: self.on_ready,
                KeepersChosen: self.on_own,
                Retracted: self.on_retracted,
                TensorMade: self.on_tensor,
            },
            messages=all_to(self.on_part, *STEP_MESSAGES) | {Tensor: self.on_tensor},
            effects={StepCompleted: self.on_completed},
        )

    def on_part(self, event: Event, now_s: float) -> list[Effect]:
        """A neighbour's part of a sum, or of the vote."""
        return self.node.sync.handle(event)

    def on_own(self, event: Event, now_s: float) -> list[Effect]:
        """The training thread's part. Ignored while it has not heard yet that its state is void."""
        return [] if self.node.lacks_state else self.node.sync.handle(event)

    def on_tensor(self, event: TensorMade | Received, now_s: float) -> list[Effect]:
        """A tensor from one holder of layers for the next."""
        return self.node.courier.handle(event, now_s)

    def on_ready(self, event: LocalReady, now_s: float) -> list[Effect]:
        """The training thread has called update()."""
        node = self.node
        if node.lacks_state:
            return []
        node.clock.give(now_s)
        # Its script may not know yet. Who is alone, or whose peers all leave, gets out by this.
        leaving = event.contribution.leaving or node.leaver.state is LeaverState.LEAVING
        strikes = tuple(self.strikes.open.values())
        contribution = replace(event.contribution, leaving=leaving, strikes=strikes)
        if node.settings.parts and node.leaver.state is LeaverState.LEAVING:
            contribution = replace(contribution, shares={node.me: 0})  # Others are to keep what it does.
        return node.sync.handle(LocalReady(contribution, event.key))

    def on_retracted(self, event: Retracted, now_s: float) -> list[Effect]:
        """What the training thread had contributed has changed."""
        effects = self.on_own(event, now_s)
        return effects + (self.recovery.tear(event.reason, now_s) if self.node.sync.sums.tainted else [])

    def on_completed(self, effect: StepCompleted, now_s: float) -> list[Effect]:
        """A step is complete: nobody waits any more.

        Once every member acts in our view, forget what older ones needed.
        """
        node = self.node
        effects: list[Effect] = [] if node.parked is None else [Parked(None)]
        node.clock.complete(now_s)
        went_on = node.waits.completed(node.sync.step, now_s)
        if node.joiner:
            node.joiner.goes_on()
        if node.scheduler:
            effects += went_on + node.scheduler.stepped(now_s)
        if node.sync.last_commit is not None:
            self.strikes.committed(node.sync.last_commit.total.strikes)
        if not node.sync.priors:
            node.overlay.settled()
            wanted = {peer for view in node.coming for peer in view.neighbors(node.me)}
            effects += node.closer.settled(node.relay.peers - node.serving.joiners, wanted)
        return effects + self.recovery.tear_if_cut_off(now_s)
