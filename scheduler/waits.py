"""Whom all wait for, since when and why, from the nodes' reports: told to everybody at growing intervals."""

from __future__ import annotations

import math
from collections.abc import Set
from dataclasses import dataclass

from ..protocols import sentences
from ..protocols.effects import Effect, Happened
from ..protocols.messages import Lack, Report, View
from ..protocols.status import WaitRow
from ..protocols.waiting import LEAST_S, StepClock
from .monitor import ClusterMonitor

NAMED = 3  # Of many; the others are counted.
MOST_LETTERS = 200  # Of names, in a notice.
MOST_APART_S = 600.0  # From one line to the next.
SILENT_S = 2.0  # Reports come once a second: who misses so many may be stopped or cut off.


@dataclass(frozen=True, slots=True)
class Wait:
    """What holds the step up. `about`: nodes, or the two ends of a link."""

    about: tuple[str, ...]
    since_s: float
    why: str
    link: bool = False

    @property
    def names(self) -> str:
        if self.link:
            return " - ".join(self.about)
        more = len(self.about) - NAMED
        shown = ", ".join(self.about[:NAMED])
        shown = f"{shown} and {more} more" if more > 0 else shown
        return shown[:MOST_LETTERS]


class Waits:
    """The scheduler's view of what holds a step up; it tells nothing while steps take their usual time."""

    def __init__(self) -> None:
        self.now: Wait | None = None
        self._told: Wait | None = None
        self._again_s = LEAST_S
        self._ticked_s = self._awake_s = -math.inf  # What came while we slept is not read yet.

    def tick(
        self, view: View, step: int, clock: StepClock, monitor: ClusterMonitor, now_s: float
    ) -> list[Effect]:
        """Look whether somebody holds the step up; to be called about once a second."""
        if now_s - self._ticked_s >= SILENT_S:
            self._awake_s = now_s
        self._ticked_s = now_s
        heard = [
            (record.report, now_s - record.reported_s)
            for node in view.member_ids
            if (record := monitor.nodes.get(node))
            and record.report
            and record.report.step in (step - 1, step)
        ]
        waits = [
            report.waits_s + age_s
            for report, age_s in heard
            if report.waits_s and (report.step == step or age_s < LEAST_S)  # Else of a step that is over.
        ]
        waited_s = max(waits, default=0.0)
        if waited_s < LEAST_S or clock.elapsed_s(now_s) < clock.patience_s:
            return []
        silent = {
            report.node: silent_s
            for report, age_s in heard
            if (silent_s := min(age_s, now_s - self._awake_s)) >= SILENT_S
        }
        self.now = _wait(view, [report for report, _ in heard], silent, step, now_s - waited_s)
        if waited_s < self._again_s:
            return []
        self._again_s = waited_s + min(waited_s, MOST_APART_S)
        self._told = self.now
        return [Happened("waits for", self.now.names, sentences.waiting(waited_s, self.now.why), step)]

    def completed(self, step: int, now_s: float) -> list[Effect]:
        """The step is complete: if a wait was told, tell that it is over."""
        told, self._told, self.now, self._again_s = self._told, None, None, LEAST_S
        return (
            [Happened("waited for", told.names, f"{now_s - told.since_s:.0f} s; going on", step)]
            if told
            else []
        )

    def row(self, now_s: float) -> WaitRow | None:
        """For the status; None if nobody waits for long."""
        if self.now is None:
            return None
        wait = self.now
        return WaitRow(whom=wait.about, seconds=round(now_s - wait.since_s, 1), why=wait.why)


def _wait(view: View, reports: list[Report], silent: dict[str, float], step: int, since_s: float) -> Wait:
    if silent:
        return Wait(tuple(silent), since_s, sentences.silent(len(silent), min(silent.values())))
    late = [report for report in reports if report.step == step and report.idle_s]
    pulling = [report for report in late if report.pulls_state]  # The scripts of the others wait for these.
    if late:
        one = "it pulls the state" if pulling else "its script has not called update()"
        many = "they pull the state" if pulling else "their scripts have not called update()"
        named = tuple(report.node for report in pulling or late)
        return Wait(named, since_s, one if len(named) == 1 else many)
    found = _lacking(reports, view.member_set)
    if found is None:
        others = tuple(report.node for report in reports if report.step < step) or ("the sum",)
        return Wait(others, since_s, "all have called update(); their votes, or the result, are on the way")
    node, lack = found
    part = "parts of the sum" if lack.up else "results"
    why = f"chunks from {lack.peer} are on the way over this link ({part}: {lack.came} of {lack.of} here)"
    return Wait((lack.peer, node), since_s, why, link=True)


def _lacking(reports: list[Report], members: Set[str]) -> tuple[str, Lack] | None:
    """Where it is stuck: what a node lacks of a peer that itself lacks nothing. Parts come before results.

    Who is no member any more, and was lost in this step, is not waited for.
    """
    for up in (True, False):
        lacks = {
            report.node: [lack for lack in report.lacks if lack.up is up and lack.peer in members]
            for report in reports
        }
        stuck = [(node, lack) for node in sorted(lacks) for lack in lacks[node] if not lacks.get(lack.peer)]
        if stuck:
            return min(stuck, key=lambda each: each[1].came / max(each[1].of, 1))
    return None
