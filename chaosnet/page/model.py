"""What the page draws, as plain data: made of a picture of the cluster (picture.py); pure.

Rates are in Mbit/s (links) and bytes or samples a second, times in seconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from ..node.step_history import pace_s
from ..protocols.sentences import sentence
from ..protocols.status import EventRow, LinkRow, MemberRow, Status, StepRow
from ..terminal.step_split import split
from ..terminal.told_pipelines import how_safe, kept, lines, micro_batches_per_s
from .picture import STEPS_WHOLE, Picture, PullBegun

GONE = ("failed", "left")

Plain = dict[str, Any]


def page(picture: Picture, now_s: float) -> Plain:
    """All but the curves and events."""
    status = picture.status
    found: Plain = {
        "generation": picture.generation,
        "source": picture.source,
        "told_s": picture.told_s,
        "silent_for_s": None if picture.silent_s is None else round(now_s - picture.silent_s, 1),
        "trouble": picture.trouble,
    }
    if status is None:
        return found
    step_s = pace_s(picture.steps)
    late = status.waiting.whom if status.waiting else ()
    found_split = split(status.active, step_s, bool(status.pipelines), picture.steps[-STEPS_WHOLE:])
    return found | {
        "head": _head(status, step_s),
        "nodes": [
            _node(row, status.scheduler, late, picture.pulls, picture.told_s) for row in _sorted(status)
        ],
        "links": [_link(row, status) for row in status.links],
        "trees": [{"root": tree.root, "share": tree.share} for tree in status.trees],
        "split": found_split and asdict(found_split),
        "pipelines": [asdict(line) for line in lines(status.pipelines)],
        "predicted_s": status.predicted_s if status.pipelines else 0.0,
        "micro_batches_per_s": micro_batches_per_s(status, step_s),
        "kept": _kept(status),
    }


def _head(status: Status, step_s: float | None) -> Plain:
    counts = dict.fromkeys(("active", "standby", *GONE), 0)
    for row in status.members:
        counts[row.state] = counts.get(row.state, 0) + 1
    waiting = status.waiting
    return {
        "cluster": status.cluster,
        "step": status.step,
        "view": ".".join(map(str, status.view)),
        "term": status.term,
        "scheduler": status.scheduler,
        "told_by": status.node,
        "counts": counts,
        "samples_per_s": status.samples_per_s,
        "step_s": step_s,
        "metrics": status.metrics,
        "state_bytes": max((row.state_bytes for row in status.members), default=0),
        "checkpoint": status.checkpoint and msgspec.structs.asdict(status.checkpoint),
        "parked": status.parked,
        "waiting": waiting and {"whom": waiting.whom, "seconds": waiting.seconds, "why": waiting.why},
        "strangers": status.strangers_refused,
        "dropped": status.samples_dropped,
        "set_aside": status.samples_set_aside,
        "cut": status.cut,
    }


def _sorted(status: Status) -> list[MemberRow]:
    """Those that are here first, as they have come; then those that are gone."""
    return sorted(status.members, key=lambda row: row.state in GONE)


def _node(
    row: MemberRow, scheduler: str, late: Sequence[str], pulls: dict[str, PullBegun], told_s: float | None
) -> Plain:
    here = row.state not in GONE
    found: Plain = {
        "id": row.node,
        "state": row.state,
        "scheduler": here and row.node == scheduler,
        "late": here and row.node in late,
        "addresses": [address.rpartition("@")[2] for address in row.addresses],
        "joined_step": row.joined_step,
        "neighbors": row.neighbors,
        "page": row.page,
        "keeps": row.keeps,
    }
    if here and row.report_age_s is not None:
        found |= {
            "report_age_s": row.report_age_s,
            "step": row.step,
            "samples_per_s": row.samples_per_s,
            "sync_s": row.sync_delay_s,
            "idle_s": row.idle_s,
            "cpu_pct": row.cpu_pct,
            "memory_bytes": row.memory_bytes,
            "battery_pct": row.battery_pct if row.battery_pct >= 0 else None,
            "sent_bytes": row.sent_bytes,
            "received_bytes": row.received_bytes,
            "counters": {name: count for name, count in row.counters.items() if count},
        }
    if here and row.pulls_bytes:
        found["pull"] = pull(row, pulls.get(row.node), told_s)
    return found


def pull(row: MemberRow, began: PullBegun | None, now_s: float | None) -> Plain:
    """How far a node is with the state that it pulls: of whom it has what, how fast, and what is left in time."""
    here = min(sum(row.pulled.values()), row.pulls_bytes)
    past_s = now_s - began.at_s if began and now_s is not None else 0.0
    before = began.bytes_by_source if began else {}
    rates = {
        name: round((count - before.get(name, 0)) / past_s) if past_s > 0 else None
        for name, count in row.pulled.items()
    }
    rate = sum(each or 0 for each in rates.values())
    return {
        "bytes": row.pulls_bytes,
        "here": here,
        "sources": {name: {"bytes": count, "rate": rates[name]} for name, count in row.pulled.items()},
        "left_s": round((row.pulls_bytes - here) / rate, 1) if rate else None,
    }


def _link(row: LinkRow, status: Status) -> Plain:
    trees = [place for place in row.trees if place < len(status.trees)]
    return {
        "a": row.a,
        "b": row.b,
        "rate": row.rate_mbit,
        "back": row.rate_back_mbit,
        "age_s": row.rate_age_s,
        "back_age_s": row.rate_back_age_s,
        "source": row.rate_source,
        "back_source": row.rate_back_source,
        "rtt_ms": row.rtt_min_ms,
        "trees": trees,
        "share": round(sum(status.trees[place].share for place in trees), 4),
    }


def _kept(status: Status) -> Plain | None:
    """Who keeps the training state of which layers; None where all keep all of it."""
    found = kept(status)
    if not found:
        return None
    last = max((last for _, ranges in found for _, last in ranges), default=0)
    rows = [{"node": node, "ranges": ranges} for node, ranges in found]
    return {"rows": rows, "layers": last + 1, "keepers": status.keepers, "said": how_safe(status.keepers)}


def curves(steps: Sequence[StepRow]) -> Plain:
    """Steps by columns. Of a metric: None where it is not finite, False where the script did not ask for it."""
    names = sorted({name for row in steps for name in row.metrics})
    return {
        "step": [row.step for row in steps],
        "time_s": [round(row.time_s, 3) for row in steps],
        "seconds": [row.seconds for row in steps],
        "samples": [row.samples for row in steps],
        "metrics": {name: [row.metrics.get(name, False) for row in steps] for name in names},
    }


def story(events: Sequence[EventRow]) -> list[Plain]:
    """Events by their time, the newest last."""
    return [
        {
            "kind": row.kind,
            "text": sentence(row),
            "node": row.node,
            "detail": row.detail,
            "step": row.step,
            "time_s": row.time_s,
        }
        for row in sorted(events, key=lambda row: row.time_s)
    ]
