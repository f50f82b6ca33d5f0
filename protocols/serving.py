"""The source's half of a state replication: copies of the state, and who may still ask for them.

    view with a joiner --TakeSnapshot--> copying --SnapshotReady--> served --ReplicationDone, joiner gone--> dropped

One copy a step, for all joiners of the view that begins with it. What is asked for before there is a copy waits.
Who joins serves those that join with it, from what has arrived: no copy, so it must not train before they have all.
The joiner's half is replication.py.

Source: Chaos, Sec. V-B (`checkStateReplication`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from .effects import DropSnapshot, Effect, ServeManifest, ServeShard, TakeSnapshot, Transmit
from .events import Received
from .messages import Have, ManifestRequest, NoSnapshot, ReplicationDone, ShardRequest, View

MAX_EARLY = 1000  # Requests kept because they are ahead of us.


@dataclass(slots=True)
class _Snapshot:
    joiners: set[str]
    ready: bool = False
    arriving: bool = False  # It is no copy, but what has arrived here so far, ...
    whole: bool = False  # ... or all of it.
    waiting: list[Received] = field(default_factory=list)


class Serving:
    """The copies that node `me` has made for joiners."""

    def __init__(self, me: str) -> None:
        self.me = me
        self.snapshots: dict[int, _Snapshot] = {}  # Step: the copy of the state at its beginning.
        self.early: list[Received] = []  # Asked of a step that we have not reached.

    @property
    def joiners(self) -> set[str]:
        """Who is being served: their links must stay."""
        return {joiner for snapshot in self.snapshots.values() for joiner in snapshot.joiners}

    def entered(self, view: View, step: int, peers: Collection[str]) -> list[Effect]:
        """A view is active: copy for those who join with it, and drop what was for nodes that it has lost.

        `peers`: to whom there is a link. Others pull from elsewhere, and could not tell that they have all.
        """
        effects: list[Effect] = []
        for joining in view.joining:
            effects += self.drop(joining.node, before=step) if joining.sources else []  # It pulls anew.
        mine = [each for each in view.joining if self.me in each.sources and each.node in peers]
        fetches = any(joining.node == self.me and joining.sources for joining in view.joining)
        if mine and not fetches:
            self.snapshots[step] = _Snapshot({joining.node for joining in mine})
            effects.append(TakeSnapshot(step, blocking=any(joining.blocking for joining in mine)))
        for joiner in sorted(self.joiners - view.node_set):
            effects += self.drop(joiner)
        return effects

    def arrives(self, step: int, fellows: Iterable[str]) -> list[Effect]:
        """This node begins to fetch the state at `step`, as do its fellows; what arrived before is void."""
        effects: list[Effect] = []
        for at in [at for at, each in self.snapshots.items() if each.arriving]:
            del self.snapshots[at]
            effects += [DropSnapshot(at)] if at != step else []
        if joiners := set(fellows):
            self.snapshots[step] = _Snapshot(joiners, arriving=True)
        return effects

    def arrived(self, step: int) -> None:
        """All of the state that this node fetches is here."""
        if step in self.snapshots:
            self.snapshots[step].whole = True

    def ready(self, step: int) -> list[Effect]:
        """The copy is made, or the manifest of what arrives has come."""
        snapshot = self.snapshots.get(step)
        if snapshot is None:
            return [DropSnapshot(step)]
        snapshot.ready = True
        waiting, snapshot.waiting = snapshot.waiting, []
        return [effect for event in waiting for effect in self.asked(event, step)]

    def asked(self, event: Received, now_at: int) -> list[Effect]:
        """A joiner asks for something, or has all it needs. `now_at`: the step of this node."""
        message = event.message
        assert isinstance(message, ManifestRequest | ShardRequest | ReplicationDone | Have)
        snapshot = self.snapshots.get(message.step)
        # Who has not all of it yet answers as one who fetches (replication.py).
        if isinstance(message, Have):
            asks = not message.pieces and not message.whole and snapshot is not None and snapshot.whole
            return [Transmit(event.peer, Have(step=message.step, whole=True))] if asks else []
        if snapshot is None and message.step > now_at and len(self.early) < MAX_EARLY:
            # The joiner has the plan before we have completed the step that it begins after.
            self.early.append(event)
            return []
        if isinstance(message, ReplicationDone):
            return self.drop(event.peer)
        if snapshot is None or event.peer not in snapshot.joiners:
            return [Transmit(event.peer, NoSnapshot(step=message.step))]
        if not snapshot.ready:
            if len(snapshot.waiting) < MAX_EARLY:
                snapshot.waiting.append(event)
            return []
        if isinstance(message, ManifestRequest):
            return [ServeManifest(event.peer, message.step)]
        return [ServeShard(event.peer, message.step, message.start, message.stop)]

    def asked_early(self, now_at: int) -> list[Effect]:
        """Answer requests that came before this node had reached their step.

        By now there is a copy, or never will be.
        """
        if not self.early:
            return []
        early, self.early = self.early, []
        return [effect for event in early for effect in self.asked(event, now_at)]

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert len(self.early) <= MAX_EARLY
        assert all(len(each.waiting) <= MAX_EARLY for each in self.snapshots.values())

    def drop(self, joiner: str, before: float = math.inf) -> list[Effect]:
        """`joiner` has all it needs, or is gone: drop copies (of steps below `before`) that nobody else needs."""
        effects: list[Effect] = []
        for step, snapshot in [each for each in self.snapshots.items() if each[0] < before]:
            snapshot.joiners.discard(joiner)
            if not snapshot.joiners:
                del self.snapshots[step]
                effects.append(DropSnapshot(step))
        return effects
