"""Members out of reach: this node dials them until it reaches all, and informs what waits for them."""

from __future__ import annotations

from collections.abc import Set

from ...protocols.effects import Dial, Effect
from ...protocols.messages import Member, View
from .node import Node, Phase
from .recovery import StepRecovery

DECLARED_EVERY_S = 5.0  # Who is said to be dead is dialled so often, in case that it lives after all.
THERE_S = 2.0  # Who has been in reach for so long was there.
REDIAL_EVERY_S = 1.0  # Members out of reach are tried directly, in case another way leads to them.


class Missing:
    """Members that this node cannot reach."""

    def __init__(self, node: Node, recovery: StepRecovery) -> None:
        self.node, self.recovery = node, recovery
        self.wake_at_s: float | None = None
        self.lost_at_s: dict[str, float] = {}  # By member that is out of reach, or was a moment ago.
        self._found_at_s: dict[str, float] = {}  # Those of them that are in reach again.
        # Dead by a person's word, or lost by a node that went on alone, and in no view since.
        self.declared: dict[str, Member] = {}
        self.doubted: Set[str] = frozenset()  # Who was out of reach when we dialled last.

    def overlay_changed(self, now_s: float) -> list[Effect]:
        """Links were lost or found, so other members may be in reach now: tell the joiner, or the scheduler."""
        node, view = self.node, self.node.sync.view
        assert view is not None
        if node.phase is Phase.JOINING and not node.overlay.reachable & view.member_set:
            # A joiner that asks already, or has a plan, ignores further news of the view that it has left.
            was_in = node.joiner is not None and node.joiner.is_in_view
            return self.recovery.orphaned("no member can be reached", now_s) if was_in else []
        self._note(view, now_s)
        self.look(now_s)
        if node.scheduler and node.phase is Phase.MEMBER:
            return node.scheduler.overlay_changed(now_s)
        return []

    def _note(self, view: View, now_s: float) -> None:
        """Note who is out of reach since when.

        A process that is started under the name of a lost member is taken for it until it has said who it is, and so
        are those behind it: who is lost again at once was not there.
        """
        reachable, since, found = self.node.overlay.reachable, self.lost_at_s, self._found_at_s
        for each in sorted(view.member_set - reachable):
            if each not in since or now_s - found.pop(each, now_s) >= THERE_S:
                since[each] = now_s
        for each in [*since]:
            if each in reachable and now_s - found.setdefault(each, now_s) < THERE_S:
                continue
            if each in reachable or each not in view.member_set:
                del since[each]
                found.pop(each, None)

    def look(self, now_s: float) -> None:
        """Decide whether to dial: as long as members are out of reach or cut off from us."""
        node, view = self.node, self.node.sync.view
        assert view is not None
        missing = view.member_set - node.overlay.reachable
        if not node.parked:
            missing -= node.overlay.crashed
        if not missing and not self._cut_off:
            self.wake_at_s = self.wake_at_s or now_s if self.declared else None
        elif self.wake_at_s is None:
            self.wake_at_s = now_s

    @property
    def _cut_off(self) -> Set[str]:
        """Members that a flush waits for, as they can be reached only through nodes that it drops."""
        node = self.node
        return node.scheduler.cut_off - node.relay.peers if node.scheduler else frozenset()

    def declare(self, member: Member) -> None:
        """A person says that `member` is dead. It is dialled all the same: if it lives, one of us two must rejoin."""
        self.declared[member.id] = member

    def entered(self, before: View | None, view: View) -> None:
        """Forget those declared dead whose name another process has in this view.

        Who goes on alone dials those that it has lost, unless it knows that they have died or left: they may wait,
        and dial it in vain where it had been, as its address is another by now.
        """
        if before is not None and view.node_set == {self.node.me}:
            for member in before.members:
                if member.id not in self.node.overlay.crashed | {self.node.me}:
                    self.declare(member)
        declared = self.declared.items()
        self.declared = {name: each for name, each in declared if view.find(name) in (None, each)}

    def tick(self, now_s: float) -> list[Effect]:
        if self.wake_at_s is None or now_s < self.wake_at_s:
            return []
        node, view = self.node, self.node.sync.view
        assert view is not None
        missing = (view.node_set - node.overlay.reachable) | self._cut_off
        self.wake_at_s = now_s + (REDIAL_EVERY_S if missing else DECLARED_EVERY_S)
        members = [view.find(name) for name in sorted(missing)]
        members += [each for name, each in self.declared.items() if name not in node.relay.peers]
        found = [member for member in members if member]
        ways = [way for member in found for way in node.book.ways_to(member)]
        ways += self._elsewhere(view) if missing else []
        effects: list[Effect] = [Dial(way) for way in dict.fromkeys(ways)]
        # Of whom a later life was heard for so long, it may be an earlier one whose clock had been wrong.
        doubted, self.doubted = self.doubted & missing & node.overlay.lives.reborn, missing
        for member in found:
            if member.id in doubted:
                effects += node.reporter.tell_outlived(member.id, member.life)
        waits = node.parked is not None and node.phase is Phase.MEMBER
        return effects + (node.reporter.repeat(node.member_key) if waits else [])

    def _elsewhere(self, view: View) -> list[str]:
        """Where nodes of the cluster's name say that they are: a missing member may have got another address."""
        node = self.node
        there = [view.find(name) for name in (*node.overlay.reachable, node.me)]
        known = {way for member in there if member for way in node.book.ways_to(member)}
        return [way for way in node.book.heard_of if way not in known | {*node.settings.addresses}]
