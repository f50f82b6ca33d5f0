"""What a core wants done. The node's loop does it with sockets and tensors, the simulator with a queue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .messages import Commit, Deal, Message, RateSource, Tensor, View, ViewKey


@dataclass(frozen=True, slots=True)
class Effect:
    """Parent of all."""


# --- network ---


@dataclass(frozen=True, slots=True)
class Transmit(Effect):
    """Send over the open connection to `peer`; lost if it has gone."""

    peer: str
    message: Message


@dataclass(frozen=True, slots=True)
class Dial(Effect):
    """Connect to this address; ends in PeerOpened or DialFailed."""

    address: str


@dataclass(frozen=True, slots=True)
class ClosePeer(Effect):
    """Say Bye and close, after what is queued has gone."""

    peer: str
    reason: str


@dataclass(frozen=True, slots=True)
class CheckReach(Effect):
    """See who answers at this address, without a link; ends in Reached or NotReached."""

    address: str


@dataclass(frozen=True, slots=True)
class MeasureLink(Effect):
    """Measure the rate of the link to `peer`; ends in LinkMeasured. From core to core."""

    peer: str


@dataclass(frozen=True, slots=True)
class SendProbe(Effect):
    """Send one bandwidth probe to `peer`."""

    peer: str


@dataclass(frozen=True, slots=True)
class ServeIperf3(Effect):
    """Let `peer` measure our link by iperf3; ends in Iperf3Serving."""

    peer: str


@dataclass(frozen=True, slots=True)
class RunIperf3(Effect):
    """Measure both directions against `peer`'s iperf3 at HOST:PORT; ends in Iperf3Done."""

    peer: str
    address: str


@dataclass(frozen=True, slots=True)
class Measured(Effect):
    """The rate in bit/s of what comes from `peer`, 0 if measuring has failed. From core to core."""

    peer: str
    rate_bps: float
    source: RateSource


# --- the all-reduce of one step ---


@dataclass(frozen=True, slots=True)
class Accumulate(Effect):
    """Add a child's part of these chunks to what has come in for them.

    `place`: that of the child among all that contribute, sorted. Sums are in that order, whoever comes first.
    """

    chunks: range
    payload: Any
    place: int


@dataclass(frozen=True, slots=True)
class SendUp(Effect):
    """Send own part of these chunks plus what has come in to `parent`. Weight 0: there is neither."""

    key: ViewKey
    step: int
    chunks: range
    parent: str
    weight: float
    own: bool  # This node contributes data, not only its children.


@dataclass(frozen=True, slots=True)
class FinishChunks(Effect):
    """At the root: own part plus what has come in, divided by `weight`, is the result of the chunks."""

    step: int
    chunks: range
    weight: float
    own: bool


@dataclass(frozen=True, slots=True)
class AdoptChunks(Effect):
    """The payload is the result of the chunks."""

    step: int
    chunks: range
    payload: Any


@dataclass(frozen=True, slots=True)
class SendDown(Effect):
    """Pass the result of the chunks on. `payload`: as it was received, else the result that is kept."""

    key: ViewKey
    step: int
    chunks: range
    peers: tuple[str, ...]
    weight: float
    payload: Any


@dataclass(frozen=True, slots=True)
class ResetAttempt(Effect):
    """Forget what has come in for the step under way; own contributions stay.

    `before`: what was to be sent in views before this one is void, too. `but_sums`: what has been summed stays, as
    the step may have been committed.
    """

    before: ViewKey | None = None
    but_sums: bool = False


@dataclass(frozen=True, slots=True)
class Summed(Effect):
    """All that this node keeps of a step is here: its training thread may say that it is ready (`parts`)."""

    key: ViewKey
    step: int


@dataclass(frozen=True, slots=True)
class DropResults(Effect):
    """What waits to be sent to `peers` in views before `before` is void."""

    peers: tuple[str, ...]
    before: ViewKey


ChunkEffect = Accumulate | SendUp | FinishChunks | AdoptChunks | SendDown  # Many; they move no deadline.


@dataclass(frozen=True, slots=True)
class StepCompleted(Effect):
    """All results of `step` are here. Of the step after it: `deal`, who gets samples; `view`, in which it is done.

    `kept`: of so many steps, this one the last, results are still needed.
    """

    step: int
    commit: Commit
    deal: Deal
    view: View
    kept: int = 1


@dataclass(frozen=True, slots=True)
class Recompute(Effect):
    """A flush has left the step under way undone: what was computed of it is void, and it begins anew in `view`."""

    view: View
    step: int


@dataclass(frozen=True, slots=True)
class PassOn(Effect):
    """Send a tensor to `peer`, which is on the way to its target, or is that."""

    peer: str
    message: Tensor
    payload: Any


@dataclass(frozen=True, slots=True)
class HandOver(Effect):
    """A tensor has come that this node's training thread waits for, or will."""

    message: Tensor
    payload: Any


# --- membership ---


@dataclass(frozen=True, slots=True)
class ViewEntered(Effect):
    """This node acts in `view` from `step` on."""

    view: View
    step: int


@dataclass(frozen=True, slots=True)
class Joined(Effect):
    """This node is a member, and contributes from `step` on; `deal` and `view` as in StepCompleted."""

    step: int
    deal: Deal
    view: View


@dataclass(frozen=True, slots=True)
class Left(Effect):
    """This node is out, as it wished (or because everybody had finished)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Founded(Effect):
    """Nobody was there to join: this node starts a cluster, and holds its first state. Joined follows."""


@dataclass(frozen=True, slots=True)
class Out(Effect):
    """This node is out against its will. `final`: it need not try to come back."""

    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class JoinFailed(Effect):
    """The cluster will not have this node (`lasting`), or cannot be reached. `spec`: the model that it trains."""

    reason: str
    spec: bytes = b""
    lasting: bool = False


@dataclass(frozen=True, slots=True)
class FellBehind(Effect):
    """`peer` is further ahead than can be kept, so some of the step under way is lost here."""

    peer: str


@dataclass(frozen=True, slots=True)
class Progress(Effect):
    """What this node does, for its user: nobody else need know."""

    text: str


@dataclass(frozen=True, slots=True)
class Parked(Effect):
    """Too few members can be reached to go on (reason), or again enough (None)."""

    reason: str | None


@dataclass(frozen=True, slots=True)
class Happened(Effect):
    """Something that people want to read."""

    kind: str
    node: str
    detail: str
    step: int


@dataclass(frozen=True, slots=True)
class Misheard(Effect):
    """A peer's message could not be taken: count it, and go on."""

    text: str


@dataclass(frozen=True, slots=True)
class AnswerStatus(Effect):
    """Send the cluster's status as JSON to a client. `history`, `since`: see StatusRequest."""

    asker: str
    history: bool = False
    since: int = 0


@dataclass(frozen=True, slots=True)
class LayoutAsked(Effect):
    """Hand the training thread what a client asks for; ends in LayoutAnswered, unless it takes no more steps."""

    asker: str
    layout: str


@dataclass(frozen=True, slots=True)
class KeysChanged(Effect):
    """Connections of keys that are not allowed any more must close."""


# --- state replication ---


@dataclass(frozen=True, slots=True)
class TakeSnapshot(Effect):
    """Copy the state at the boundary before `step`; ends in SnapshotReady. `blocking`: wait until dropped."""

    step: int
    blocking: bool


@dataclass(frozen=True, slots=True)
class DropSnapshot(Effect):
    """Nobody needs the copy any more."""

    step: int


@dataclass(frozen=True, slots=True)
class ServeManifest(Effect):
    """Send the manifest of the snapshot at `step`."""

    peer: str
    step: int


@dataclass(frozen=True, slots=True)
class ServeShard(Effect):
    """Send bytes [start, stop) of the snapshot at `step`."""

    peer: str
    step: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class ReadManifest(Effect):
    """Check and open the manifest; ends in ManifestKnown or ManifestBad of the same attempt to pull the state."""

    source: str
    step: int
    digest: bytes
    payload: Any
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class StoreShard(Effect):
    """Check and keep the bytes; ends in ShardStored or ShardBad of the same attempt."""

    source: str
    start: int
    stop: int
    digest: bytes
    payload: Any
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class StateWhole(Effect):
    """All bytes of the state at `step` are here: load it, apply what completed since, then CaughtUp."""

    step: int


@dataclass(frozen=True, slots=True)
class DiscardState(Effect):
    """What was fetched so far is of no use: a new attempt to join starts."""
