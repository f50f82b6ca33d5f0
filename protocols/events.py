"""What can happen to a core. Plain values; made by the node's loop, by the simulator, or by another core."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .messages import Contribution, Message, Range, RateSource, Tensor, ViewKey


@dataclass(frozen=True, slots=True)
class Event:
    """Parent of all."""


@dataclass(frozen=True, slots=True)
class Tick(Event):
    """Time has passed; sent when `wake_at_s` is due, harmless at any other time."""


# --- from the network ---


@dataclass(frozen=True, slots=True)
class PeerOpened(Event):
    """A connection to `peer` can be used in both directions. `dialled`: by us, at `address`.

    `at`: that in numbers; "" if it leads to another machine than it seems to.
    """

    peer: str
    address: str
    client: bool = False
    dialled: bool = False
    at: str = ""


@dataclass(frozen=True, slots=True)
class PeerClosed(Event):
    """No connection to `peer` is left. `clean`: it said Bye, or we did."""

    peer: str
    clean: bool


ITSELF = "that is this node itself"  # Reason of a DialFailed.


@dataclass(frozen=True, slots=True)
class DialFailed(Event):
    """Nobody (or the wrong one) answered at `address`. `final`: trying again is of no use."""

    address: str
    reason: str
    final: bool = False


@dataclass(frozen=True, slots=True)
class Reached(Event):
    """CheckReach has found `peer` at `address`. `at`: see `PeerOpened`."""

    address: str
    peer: str
    at: str = ""


@dataclass(frozen=True, slots=True)
class NotReached(Event):
    """CheckReach has found nobody, or none of ours. `refused`: the machine is there, and nothing listens."""

    address: str
    reason: str
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Iperf3Serving(Event):
    """ServeIperf3 listens; port 0: it cannot, for too many are served, or iperf3 does not work here."""

    peer: str
    port: int


@dataclass(frozen=True, slots=True)
class Iperf3Done(Event):
    """RunIperf3 has ended: rates of both directions in bit/s, or why not."""

    peer: str
    in_bps: float = 0.0
    out_bps: float = 0.0
    error: str = ""


@dataclass(frozen=True, slots=True)
class LinkMeasured(Event):
    """The link to `peer` was probed; rate 0 if that failed."""

    peer: str
    rate_bps: float
    source: RateSource


@dataclass(frozen=True, slots=True)
class Received(Event):
    """A message from the other end of an open connection. `payload`: bulk bytes, opaque to cores."""

    peer: str
    message: Message
    payload: Any = None


@dataclass(frozen=True, slots=True)
class SeedsFound(Event):
    """Nodes that may be in the cluster, or on the way into it, say that they are at these addresses."""

    addresses: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class AddressesRead(Event):
    """Where others may dial this node, as its interfaces are now; none if there is no network."""

    addresses: tuple[str, ...]


# --- from the training thread ---


@dataclass(frozen=True, slots=True)
class Contributed(Event):
    """These chunks of the step under way hold this node's weighted sum. Weight 0: nothing, no data.

    `key`: the view that they were computed in, if that matters (StepSync, `recomputes`).
    """

    chunks: tuple[int, ...]
    weight: float
    key: ViewKey | None = None


@dataclass(frozen=True, slots=True)
class KeepersChosen(Event):
    """Before anything is contributed to an attempt: who keeps the sum of each chunk (StepSync, `parts`).

    Chunks that are not named are for everybody. `key`: as of Contributed.
    """

    keepers: Mapping[int, frozenset[str]]
    key: ViewKey


@dataclass(frozen=True, slots=True)
class LocalReady(Event):
    """The training thread called update(): all that this node brings to the step. `key`: as of Contributed."""

    contribution: Contribution
    key: ViewKey | None = None


@dataclass(frozen=True, slots=True)
class TensorMade(Event):
    """The training thread has computed what another node waits for. `payload`: its bytes, which stay as they are."""

    message: Tensor
    payload: Any


@dataclass(frozen=True, slots=True)
class Retracted(Event):
    """Chunks contributed to this step have changed (gradient accumulation): start the attempt again."""

    weight: float
    reason: str


@dataclass(frozen=True, slots=True)
class LayoutAnswered(Event):
    """What has become of the pipelines that a client asked for."""

    asker: str
    ok: bool
    text: str


@dataclass(frozen=True, slots=True)
class LeaveWanted(Event):
    """Ctrl+C, SIGTERM, `chaosnet leave`, or the end of the script."""


@dataclass(frozen=True, slots=True)
class Crashed(Event):
    """The script has ended with an error: this node contributes nothing more. `reason`: at most MAX_REASON long."""

    reason: str
    ranges: tuple[Range, ...] = ()  # The samples in hand,
    epoch: int = 0  # of this epoch.


@dataclass(frozen=True, slots=True)
class SnapshotReady(Event):
    """The copy of the state at `step`, asked for by TakeSnapshot, can be served."""

    step: int


@dataclass(frozen=True, slots=True)
class ManifestKnown(Event):
    """The joiner has a valid manifest of the state at `step`."""

    step: int
    total_bytes: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ManifestBad(Event):
    """The manifest from this source was damaged or is unusable here."""

    source: str
    reason: str
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ShardStored(Event):
    """Bytes [start, stop) arrived intact from `source`."""

    source: str
    start: int
    stop: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class ShardBad(Event):
    """Bytes [start, stop) from `source` do not match their hash."""

    source: str
    start: int
    stop: int
    attempt: int = 0


@dataclass(frozen=True, slots=True)
class CaughtUp(Event):
    """The joiner's training thread holds the state of the newest completed step."""


@dataclass(frozen=True, slots=True)
class StateRejected(Event):
    """The joiner cannot use the state it was sent."""

    reason: str


@dataclass(frozen=True, slots=True)
class BacklogFull(Event):
    """Results come in faster than the state does, and memory is short: join in blocking mode instead."""


@dataclass(frozen=True, slots=True)
class ReadingsTaken(Event):
    """psutil readings and rates of this node, for its next Report."""

    samples_per_s: float
    sync_delay_s: float
    state_bytes: int
    layer_bytes: tuple[int, int]
    cpu_pct: float
    memory_bytes: int
    battery_pct: float
    nic_sent_bytes: int
    nic_received_bytes: int
    counters: dict[str, int]
    carried: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Of each peer, since its link opened: bytes sent to it while more waited for it, and for how many seconds."""
    acknowledged: Mapping[str, tuple[int, float]] = field(default_factory=dict)
    """Of the same, where the kernel counts it: bytes acknowledged, and for how many seconds any were on their way."""
    page: str = ""
    sent_bytes: int = 0
    received_bytes: int = 0
