"""What is known of a cluster: its last status, and what earlier ones told of steps, events and pulls; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec

from ..protocols.status import EventRow, MemberRow, Status, StepRow

STEPS_KEPT = 4000  # Then older ones are thinned out, evenly: a run of weeks keeps its curve.
STEPS_WHOLE = 1000  # The newest, of which none is left out.
EVENTS_KEPT = 500


@dataclass(frozen=True, slots=True)
class PullBegun:
    """When a pull of the state was first seen, and what was here by then, by source."""

    at_s: float
    bytes_by_source: dict[str, int]


@dataclass(slots=True)
class Picture:
    """Of one cluster at a time. Times are of the wall clock, in seconds since 1970.

    Attributes:
        generation: Grows when everything before is void: another cluster answers at the same addresses.
        told_s: When the last status came; None before the first.
        silent_s: Since when nobody answers; None: somebody does. `trouble` says what is wrong.
        source: The file that it was read from; "": it is live.
    """

    source: str = ""
    generation: int = 0
    events_version: int = 0
    told_s: float | None = None
    silent_s: float | None = None
    trouble: str = ""
    status: Status | None = None
    steps: list[StepRow] = field(default_factory=list)
    events: list[EventRow] = field(default_factory=list)  # As they were told; a clock may be behind.
    pulls: dict[str, PullBegun] = field(default_factory=dict)
    events_by_kind: dict[str, int] = field(default_factory=dict)

    def answered(self, status: Status, now_s: float) -> None:
        """The cluster has told of itself."""
        if self.status is not None and status.cluster != self.status.cluster:
            self._begin_anew()
        self.status, self.told_s, self.silent_s, self.trouble = status, now_s, None, ""
        self._add_steps(status.steps)
        self._add_events(status.events)
        self._note_pulls(status.members, now_s)

    def whole(self) -> Status | None:
        """The last status with all that is known of steps and events; None before the first."""
        if self.status is None:
            return None
        events = sorted(self.events, key=lambda row: row.time_s)
        return msgspec.structs.replace(self.status, steps=tuple(self.steps), events=tuple(events))

    def silent(self, why: str, now_s: float) -> None:
        """Nobody has answered a question that was put at `now_s`, or who did is of no use."""
        self.silent_s = now_s if self.silent_s is None else self.silent_s
        self.trouble = why

    def _begin_anew(self) -> None:
        self.generation += 1
        self.steps, self.events, self.pulls, self.events_by_kind = [], [], {}, {}

    def _add_steps(self, rows: Sequence[StepRow]) -> None:
        last = self.steps[-1].step if self.steps else -1
        self.steps += [row for row in rows if row.step > last]
        if len(self.steps) > STEPS_KEPT:
            self.steps = _spread(self.steps[:-STEPS_WHOLE]) + self.steps[-STEPS_WHOLE:]

    def _add_events(self, rows: Sequence[EventRow]) -> None:
        """Each once: nodes tell an event alike, but for the time that its handling took."""
        known = {_name(row) for row in self.events[-EVENTS_KEPT:]}
        new = [row for row in rows if _name(row) not in known]
        if not new:
            return
        for row in new:
            self.events_by_kind[row.kind] = self.events_by_kind.get(row.kind, 0) + 1
        self.events = (self.events + new)[-EVENTS_KEPT:]
        self.events_version += 1

    def _note_pulls(self, members: Sequence[MemberRow], now_s: float) -> None:
        pulling = {row.node: row for row in members if row.pulls_bytes and row.state in ("standby", "active")}
        for node in [*self.pulls]:
            began = self.pulls[node].bytes_by_source
            row = pulling.get(node)
            if row is None or any(row.pulled.get(name, 0) < count for name, count in began.items()):
                del self.pulls[node]  # It is over, or has begun anew.
        for node, row in pulling.items():
            self.pulls.setdefault(node, PullBegun(now_s, dict(row.pulled)))


def _spread(rows: Sequence[StepRow]) -> list[StepRow]:
    """Half of them at most, no two of which are close to each other."""
    apart = 2 * (rows[-1].step - rows[0].step) / len(rows)
    kept = [rows[0]]
    for row in rows:
        if row.step - kept[-1].step >= apart:
            kept.append(row)
    return kept


def _name(row: EventRow) -> tuple[str, str, str, int, float]:
    return row.kind, row.node, row.detail, row.step, row.time_s
