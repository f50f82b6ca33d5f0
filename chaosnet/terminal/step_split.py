"""How each member spends a step, from what a status says, and whom the others wait for; pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from ..protocols.sentences import lasting
from ..protocols.status import MemberRow, Status, StepRow

# A node for which the others wait for less, of a step, is not named. Less than some milliseconds are a matter of who
# got a processor first.
WORTH_SAYING, WORTH_SAYING_S = 0.1, 0.02


@dataclass(frozen=True, slots=True)
class NodeTime:
    """Seconds of a step that a node spends on its own work, on the sum, and waiting for others."""

    node: str
    own_s: float
    sum_s: float
    wait_s: float


@dataclass(frozen=True, slots=True)
class StepSplit:
    """A step. `rows`: the slowest first. `slowest`: for whom the others wait `costs_s`; None if that is not long."""

    step_s: float
    sum_s: float
    rows: tuple[NodeTime, ...]
    slowest: str | None
    costs_s: float


def split(
    active: Sequence[MemberRow],
    step_s: float | None,
    by_plan: bool = False,
    steps: Sequence[StepRow] = (),
) -> StepSplit | None:
    """How members spend a step of `step_s`.

    A node tells how long its last step has waited for the all-reduce: what else that step took, which `steps` may
    tell, was its own work. For the one that comes last, the wait is the time of the sum alone; what others wait for
    longer, they wait for it. Who has done no step yet has waited for none. `by_plan`: members end one after the other
    by plan, as in pipelines, so nobody is named.
    Returns: None before that is known.
    """
    told = [row for row in active if row.report_age_s is not None and row.step > row.joined_step]
    if not told or step_s is None:
        return None
    took_s = {row.step: row.seconds or step_s for row in steps}
    sum_s = min(step_s, min(row.sync_delay_s for row in told))
    rows = tuple(
        NodeTime(
            row.node,
            max(took_s.get(row.step - 1, step_s) - row.sync_delay_s, 0.0),
            sum_s,
            max(min(row.sync_delay_s, step_s) - sum_s, 0.0),
        )
        for row in sorted(told, key=lambda row: row.sync_delay_s)
    )
    waits = statistics.median(each.wait_s for each in rows[1:]) if rows[1:] else 0.0
    named = waits >= max(WORTH_SAYING * step_s, WORTH_SAYING_S) and not by_plan
    return StepSplit(step_s, sum_s, rows, rows[0].node if named else None, waits if named else 0.0)


def who_comes_last(status: Status) -> str:
    """For whom the others wait in each step; "" if for nobody, or not for long."""
    found = split(status.active, status.step_s, bool(status.pipelines))
    if found is None or found.slowest is None:
        return ""
    wait, step = lasting(found.costs_s), lasting(found.step_s)
    return f"{found.slowest} comes last: the others wait {wait} of a step of {step} for it"
