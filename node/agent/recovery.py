"""When a node cannot go on as it is: the step under way is torn, or the cluster goes on without it.

    member   --something of the step may be lost--> asks for another attempt until a flush comes
    observer --the same--> asks as well: to pull the state anew takes longer than a step
    joiner   --the same, or it is dropped--> asks to be let in anew

Source: Chaos, Sec. IV-B ("restart all-reduce" after a failure).
"""

from __future__ import annotations

from ...protocols.effects import Effect, FellBehind
from ...protocols.messages import EVERYONE, AbortRequest
from .node import Node, Phase
from .routes import Routes

ABORT_EVERY_S = 1.0


class StepRecovery:
    """Asks for another attempt of the step, or to be let in anew, when this node cannot go on."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.torn: AbortRequest | None = None  # The attempt that cannot end as it is.
        self.ask_at_s = 0.0

    def routes(self) -> Routes:
        return Routes(effects={FellBehind: self.on_fell_behind})

    @property
    def wake_at_s(self) -> float | None:
        return self.ask_at_s if self.torn else None

    def tear(self, reason: str, now_s: float, without_me: bool = False) -> list[Effect]:
        """Ask for a flush: messages of the attempt under way may be lost for good, even if the link opens again."""
        node = self.node
        if node.phase is Phase.JOINING and node.joiner is not None and not node.joiner.is_in_view:
            return self.orphaned(reason, now_s)
        assert node.sync.view is not None
        key, step = node.sync.view.key, node.sync.step
        self.torn = AbortRequest(node=node.me, key=key, step=step, reason=reason, without_me=without_me)
        self.ask_at_s = now_s + ABORT_EVERY_S
        return node.relay.send(EVERYONE, self.torn)

    def go_without_me(self, now_s: float) -> list[Effect]:
        """Ask to be dropped: this node is a member without a state to train on."""
        return self.tear(f"{self.node.me} could not get the state", now_s, without_me=True)

    def tear_if_cut_off(self, now_s: float) -> list[Effect]:
        """A step begins: tear it if there is no connection over which it needs something of us."""
        sync, peers = self.node.sync, self.node.relay.peers
        around = sync.view.neighbors(self.node.me) if sync.view is not None else ()
        torn = [peer for peer in around if peer not in peers and sync.depends_on(peer)]
        return self.tear(f"no link to {torn[0]}", now_s) if torn else []

    def tick(self, now_s: float) -> list[Effect]:
        """Repeat the request, until a flush has come or the step was completed after all."""
        if self.torn is None or now_s < self.ask_at_s:
            return []
        torn, sync = self.torn, self.node.sync
        if sync.view is None or sync.frozen or (torn.key, torn.step) != (sync.view.key, sync.step):
            self.torn = None
            return []
        self.ask_at_s = now_s + ABORT_EVERY_S
        return self.node.relay.send(EVERYONE, torn)

    def on_fell_behind(self, effect: FellBehind, now_s: float) -> list[Effect]:
        """A peer has sent more of later steps than can be kept."""
        node, reason = self.node, f"{self.node.me} fell behind {effect.peer}"
        if node.phase is Phase.JOINING and node.joiner:
            node.joiner.want_blocking()
            return self.orphaned(reason, now_s, goes_on=True)
        return self.tear(reason, now_s) if node.phase is Phase.MEMBER else []

    def orphaned(self, reason: str, now_s: float, goes_on: bool = False) -> list[Effect]:
        """Dropped while joining (in blocking mode as a member without the state): ask to be let in anew."""
        node = self.node
        assert node.joiner is not None
        node.enter(Phase.JOINING)
        node.schedule_by(None)
        self.torn = None
        node.follower.stop()
        node.election.stand_down()
        return node.joiner.orphaned(reason, now_s, goes_on)
