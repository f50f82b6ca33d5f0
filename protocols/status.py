"""A cluster's status as the scheduler tells it to people and programs: its schema, to JSON and back.

`chaosnet status --json` prints it, `chaosnet.client.status` and `Trainer.status` return it. Rates are of bytes
or samples a second, ages and waits are in seconds, wall clocks in seconds since 1970.
"""

from __future__ import annotations

import msgspec

from .errors import MalformedMessage, VersionMismatch
from .messages import RateSource

STATUS_VERSION = 1  # Bump when a field is removed or changes meaning; a new field gets a default instead.


class MemberRow(msgspec.Struct, frozen=True, kw_only=True):
    """A node of the cluster, or one of the last that were in it.

    From `step` on, it is what the node itself has reported; while `report_age_s` is None, it has not yet, and these
    fields say nothing.
    """

    node: str
    id: str  # The same as `node`, for programs that read it from before this schema.
    state: str  # "standby" (it is joining), "active", "failed" or "left".
    addresses: tuple[str, ...]  # Where others dial it; none if nobody can.
    joined_step: (
        int  # The step of the cluster from which on it is a member; `Trainer.joined_step` counts updates.
    )
    neighbors: tuple[str, ...]  # To which it has links.
    keeps: str = ""  # Layers whose training state it keeps, "0-2, 5", where members keep parts of it.
    report_age_s: float | None = None
    step: int = 0
    samples_per_s: float = 0.0
    sync_delay_s: float = 0.0  # So long its last step has waited for the all-reduce.
    state_bytes: int = 0  # Of parameters, buffers and the optimizer's state.
    layer_bytes: tuple[int, int] = (0, 0)  # Smallest and largest tensor of these.
    cpu_pct: float = 0.0  # Of one core, so that it may be above 100.
    memory_bytes: int = 0  # Resident, of the process.
    battery_pct: float = -1.0  # -1: it has none.
    nic_sent_bytes: int = 0  # By all interfaces of the machine but loopback, since it was started.
    nic_received_bytes: int = 0
    counters: dict[str, int] = {}  # What went wrong there, by its name.
    idle_s: float = 0.0  # So long its script lets the others wait for update().
    waits_s: float = 0.0  # So long it has waited for others in this step.
    pulls_state: bool = False
    pulls_bytes: int = 0  # Of the state that it pulls; 0: it pulls none, or does not know yet.
    pulled: dict[str, int] = {}  # Bytes of that which are here, by who has sent them.
    page: str = ""  # URL of the cluster's page that it serves; "": none.
    sent_bytes: int = 0  # By the process over its links, since it began.
    received_bytes: int = 0


class LinkRow(msgspec.Struct, frozen=True, kw_only=True):
    """A link with its newest readings. `rate` is what passes from `a` to `b`, `rate_back` from `b` to `a`."""

    a: str
    b: str
    rate_mbit: float = 0.0  # 0: not measured.
    rate_age_s: float | None = None  # Since it was measured; None: it was not.
    rate_source: RateSource = ""
    rate_back_mbit: float = 0.0
    rate_back_age_s: float | None = None
    rate_back_source: RateSource = ""
    rtt_min_ms: float = 0.0  # 0: not measured.
    rtt_median_ms: float = 0.0
    trees: tuple[int, ...] = ()  # That lead over it, by their places in `Status.trees`.


class TreeRow(msgspec.Struct, frozen=True, kw_only=True):
    """A tree that gradients travel over: up to `root` they are summed, and the results come down."""

    root: str
    share: float  # Of the gradients.


class EventRow(msgspec.Struct, frozen=True, kw_only=True):
    """Something that happened, as all nodes print it."""

    kind: str  # "joined", "node-failure", ...
    node: str
    detail: str
    step: int
    time_s: float  # Wall clock of the node that told it.
    handling_ms: float  # Time that its core took.


class StepRow(msgspec.Struct, frozen=True, kw_only=True):
    """A step that the cluster has completed."""

    step: int
    time_s: float  # When, by the wall clock of the node that tells it.
    seconds: float | None  # Since the one before; None: this node has not seen that.
    samples: float  # On which all nodes together have trained in it.
    metrics: dict[str, float | None]  # Means over the cluster that the script asked for; None: not finite.


class CheckpointRow(msgspec.Struct, frozen=True, kw_only=True):
    """The newest checkpoint of which all members that are here, and have written any, have written their parts."""

    step: int  # 0: there is none yet.
    time_s: float  # When it was there, by the wall clock of the last that wrote.
    writing: tuple[str, ...] = ()  # Who writes one now.


class WaitRow(msgspec.Struct, frozen=True, kw_only=True):
    """Whom all wait for: nodes, or the two ends of a link."""

    whom: tuple[str, ...] = msgspec.field(name="for")
    seconds: float
    why: str


class Status(msgspec.Struct, frozen=True, kw_only=True):
    """The cluster as the node `node` sees it; that is all of it where `node` is the scheduler.

    `events` and `steps` have the newest last. Without the history, these are the newest EVENTS_TOLD events (of new
    trees the last only) and no steps. With it, they are all that `node` has kept: at most EVENTS_KEPT events
    (scheduler/monitor.py) and STEPS_KEPT steps (node/step_history.py), since it joined last; or of these what came at
    or after a step that was asked for. What is too much for one message is left out, and `cut` tells of it
    (`to_json`).
    """

    version: int = STATUS_VERSION
    node: str
    phase: str  # Of `node`: "joining", "member", ...
    cluster: str  # Its id; "" before the node belongs to one.
    scheduler: str  # "": it is being elected.
    term: int  # Grows with every election.
    view: tuple[int, ...]  # (term, number) of the membership view; () before the first.
    step: int  # The one under way.
    samples_per_s: float  # Of all members together.
    metrics: dict[str, float | None]  # Of the last completed step.
    pipelines: str = ""  # That run: "a 0-3 > b 4 x8 | ...", layers of each member and micro-batches.
    predicted_s: float = 0.0  # What a step of them should take, from the end of one to the end of the next.
    step_s: float | None = None  # What a step takes: the median of the last 21; None: not seen yet.
    keepers: int = 0  # Members that keep the layers' state which the fewest do; 0: all keep all of it.
    checkpoint: CheckpointRow | None = None  # None: no member writes any.
    samples_dropped: int = 0  # Over all epochs, by `drop_last` rules and the like.
    samples_set_aside: int = 0  # As scripts ended with an error over them.
    parked: str | None  # Why training waits, and what a person can do; None: it does not.
    waiting: WaitRow | None  # For whom the step under way waits; None: for nobody longer than usual.
    handling_ms: dict[str, tuple[float, ...]]  # Times the scheduler's core took, by message, newest last.
    members: tuple[MemberRow, ...]
    links: tuple[LinkRow, ...]
    events: tuple[EventRow, ...]
    steps: tuple[StepRow, ...] = ()
    trees: tuple[TreeRow, ...] = ()  # None while they are being planned.
    strangers_refused: dict[str, int]  # Connections that all nodes refused, by reason, most frequent first.
    # So many rows are missing, or the ends of their details, as they did not fit into one message.
    cut: int = 0

    @property
    def active(self) -> tuple[MemberRow, ...]:
        """Those that train."""
        return tuple(row for row in self.members if row.state == "active")


EVENTS_TOLD = 10  # Without the history.
MAX_BYTES = 4 << 20  # In one message (messages/reports.py, `StatusReply`).
DETAIL_CHARS = 300  # Of an event, where those of all do not fit.


class _Versioned(msgspec.Struct):
    version: int | None = None


# As in codec.py: here, so that no two threads look at a type for the first time at once.
_VERSION = msgspec.json.Decoder(_Versioned)
_STATUS = msgspec.json.Decoder(Status)


def to_json(status: Status) -> bytes:
    """On one line. What does not fit into MAX_BYTES is left out, and counted in `cut`: the ends of long details of
    events first, then the oldest steps, the oldest events, links, and the last of the members. Where the members
    would not fit alone, some of them go first: the rest need not go for them in vain.
    """
    text = msgspec.json.encode(status)
    if len(text) > MAX_BYTES:
        status = _with_short_details(status)
        while len(msgspec.json.encode(status.members)) > MAX_BYTES:
            status = _with_half(status, "members", newest_last=False)
        text = msgspec.json.encode(status)
    for field, newest_last in (("steps", True), ("events", True), ("links", False), ("members", False)):
        while len(text) > MAX_BYTES and getattr(status, field):
            status = _with_half(status, field, newest_last)
            text = msgspec.json.encode(status)
    return text


def _with_half(status: Status, field: str, newest_last: bool) -> Status:
    """Of the rows of this field."""
    rows = getattr(status, field)
    half = len(rows) // 2
    kept = rows[-half:] if newest_last and half else rows[:half]
    return msgspec.structs.replace(status, **{field: kept, "cut": status.cut + len(rows) - half})


def _with_short_details(status: Status) -> Status:
    shortened = 0
    events = []
    for row in status.events:
        if len(row.detail) > DETAIL_CHARS:
            shortened += 1
            row = msgspec.structs.replace(row, detail=row.detail[: DETAIL_CHARS - 3] + "...")
        events.append(row)
    return msgspec.structs.replace(status, events=tuple(events), cut=status.cut + shortened)


def from_json(text: bytes) -> Status:
    """What `to_json` has written.

    Raises: VersionMismatch if it was written by a chaosnet whose schema is another, MalformedMessage if by none.
    """
    try:
        version = _VERSION.decode(text).version
        if version == STATUS_VERSION:
            return _STATUS.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MalformedMessage(f"not a cluster's status: {error}"[:300]) from None
    told = "without a version" if version is None else f"in version {version}"
    raise VersionMismatch(
        f"the cluster tells its status {told}, which this chaosnet cannot read (expected version "
        f"{STATUS_VERSION}: ask with the chaosnet that the nodes run)"
    )
