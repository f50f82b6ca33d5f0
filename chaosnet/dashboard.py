"""A cluster's status as tables for people; pure functions of what `client.status` returns."""

from __future__ import annotations

import time
from collections.abc import Mapping

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from .protocols.messages import link
from .protocols.status import EVENTS_TOLD, LinkRow, MemberRow, Status

STYLE_BY_STATE = {"active": "green", "standby": "yellow", "failed": "red", "left": "dim"}
ABSENT = "-"


def cluster(status: Status) -> RenderableType:
    """All of it: one line on the cluster, members, links, steps if it has them, what happened lately."""
    return Group(
        headline(status),
        members(status),
        links(status),
        *steps(status),
        events(status),
        *keys(status),
        *strangers(status),
        *cut(status),
    )


def lately(status: Status) -> Status:
    """With the newest steps and events only: what is on a screen has to fit, for its end would not be seen."""
    newest = status.steps[-EVENTS_TOLD:], status.events[-EVENTS_TOLD:]
    return msgspec.structs.replace(status, steps=newest[0], events=newest[1])


def headline(status: Status) -> Text:
    """Who schedules, how far training is, how fast, and what is wrong."""
    count = len(status.active)
    parts = [
        f"{count} active member{'s' if count != 1 else ''}",
        f"scheduler {status.scheduler or 'being elected'} (term {status.term})",
        f"step {status.step:,}",
        f"{status.samples_per_s:,.0f} samples/s",
        *metrics(status.metrics),
    ]
    text = Text("  ".join(parts), style="bold")
    for pipeline in status.pipelines.split(" | ") if status.pipelines else ():
        text.append(f"\npipeline: {pipeline}", style="cyan")
    if status.parked:
        text.append(f"\nwaiting: {status.parked}", style="bold red")
    if waiting := status.waiting:
        names = ", ".join(waiting.whom)
        text.append(f"\nwaits for {names}, {waiting.seconds:.0f} s: {waiting.why}", style="bold yellow")
    return text


def metrics(found: Mapping[str, float | None]) -> list[str]:
    """Name and value of each, by name."""
    return [
        f"{name} {'not finite' if value is None else format(value, '.4f')}"
        for name, value in sorted(found.items())
    ]


def members(status: Status) -> Table:
    """One row a node, also those that are gone."""
    table = Table(title="members", title_justify="left", title_style="bold", expand=False)
    for name in ("node", "role", "state"):
        table.add_column(name)
    for name in ("step", "samples/s"):
        table.add_column(name, justify="right")
    table.add_column("neighbours", overflow="fold")
    battery = any(row.battery_pct >= 0 for row in status.members)
    for name in ("sync", "cpu", "memory", "sent", "received", *(["battery"] if battery else [])):
        table.add_column(name, justify="right")
    table.add_column("address", overflow="fold")
    late = status.waiting.whom if status.waiting else ()
    for row in sorted(status.members, key=lambda row: (row.state in ("failed", "left"), row.node)):
        table.add_row(*_member_cells(row, status.scheduler, battery, row.node in late and row.idle_s > 0))
    return table


def _member_cells(row: MemberRow, scheduler: str, battery: bool, idle: bool) -> list[Text | str]:
    here = row.state in ("active", "standby")
    told = here and row.report_age_s is not None  # A new scheduler hears its first reports within a second.
    return [
        Text(row.node, style="" if here else "dim"),
        role(row, scheduler),
        Text(f"idle {row.idle_s:.0f} s", style="bold yellow")
        if idle
        else Text(row.state, style=STYLE_BY_STATE.get(row.state, "")),
        f"{row.step:,}" if told else ABSENT,
        f"{row.samples_per_s:,.0f}" if told else ABSENT,
        ", ".join(row.neighbors) or ABSENT,
        *(_readings(row, battery) if told else [ABSENT] * (5 + battery)),
        ", ".join(_without_key(each) for each in row.addresses) or "(dials only)",
    ]


def _readings(row: MemberRow, battery: bool) -> list[str]:
    """What a node reports of itself: waiting for the all-reduce of its last step, and its machine."""
    charge = f"{row.battery_pct:.0f} %" if row.battery_pct >= 0 else ABSENT
    return [
        f"{row.sync_delay_s * 1e3:.0f} ms",
        f"{row.cpu_pct:.0f} %",
        size(row.memory_bytes),
        size(row.nic_sent_bytes),
        size(row.nic_received_bytes),
        *([charge] if battery else []),
    ]


def role(row: MemberRow, scheduler: str) -> Text:
    """What a node is to the cluster."""
    if row.state not in ("active", "standby"):
        return Text(ABSENT, style="dim")
    if row.node == scheduler:
        return Text("scheduler", style="bold cyan")
    return Text("joining" if row.state == "standby" else "worker")


def links(status: Status) -> Table:
    """One row a link, with its newest readings."""
    table = Table(title="links", title_justify="left", title_style="bold", expand=False)
    table.add_column("link")
    for name in ("rate", "back", "measured", "round trip"):
        table.add_column(name, justify="right")
    readings = {(row.a, row.b): row for row in status.links}
    every = {link(row.node, other) for row in status.members for other in row.neighbors}
    for a, b in sorted(every):
        row = readings.get((a, b))
        table.add_row(
            f"{a} - {b}",
            *([rate(row.rate_mbit), rate(row.rate_back_mbit), measured(row)] if row else [ABSENT] * 3),
            f"{row.rtt_min_ms:.2f} ms" if row and row.rtt_min_ms else ABSENT,
        )
    return table


def steps(status: Status) -> list[Table]:
    """What the script has averaged over the cluster in each, the newest last; nothing without the history."""
    table = Table(title="steps", title_justify="left", title_style="bold", expand=False, box=None)
    for name in ("time", "step", "seconds", "samples"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in status.steps:
        seconds = ABSENT if row.seconds is None else f"{row.seconds:.3f}"
        told = "  ".join(metrics(row.metrics))
        table.add_row(clock(row.time_s), f"{row.step:,}", seconds, f"{row.samples:,.0f}", told)
    return [table] if status.steps else []


def events(status: Status) -> Table:
    """The newest last."""
    table = Table(title="recent events", title_justify="left", title_style="bold", expand=False, box=None)
    table.add_column("time")
    table.add_column("step", justify="right")
    for name in ("what", "node", ""):
        table.add_column(name)
    for event in status.events:
        table.add_row(clock(event.time_s), f"{event.step:,}", event.kind, event.node, event.detail)
    return table


def keys(status: Status) -> list[Text]:
    """Members' addresses with their keys, a line each, to be copied; nothing of a cluster without keys."""
    named = {each: row.node for row in status.members for each in row.addresses if "@" in each}
    lines = [Text(f" {address}  {node}", no_wrap=True, overflow="ignore") for address, node in named.items()]
    return [Text("addresses with keys", style="bold"), *lines] if named else []


def _without_key(address: str) -> str:
    return address.rpartition("@")[2]


def strangers(status: Status) -> list[Text]:
    """One line on who was not let in, if anybody."""
    said = ", ".join(f"{count:,} {reason}" for reason, count in status.strangers_refused.items())
    return [Text(f"strangers refused: {said}", style="yellow")] if said else []


def cut(status: Status) -> list[Text]:
    """One line on what the reply had no room for, if anything."""
    return [Text(f"did not fit: {status.cut:,} rows, or their details", style="yellow")] if status.cut else []


def clock(time_s: float) -> str:
    """Time of the day, where it is shown."""
    return time.strftime("%H:%M:%S", time.localtime(time_s))


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.{0 if count >= 10 or unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} GB"


def measured(row: LinkRow) -> str:
    """How long ago, and how: of the direction that is known for longer."""
    ages = [(row.rate_age_s, row.rate_source), (row.rate_back_age_s, row.rate_back_source)]
    known = [(age_s, source) for age_s, source in ages if age_s is not None]
    return "{:.0f} s ago ({})".format(*max(known)) if known else ABSENT


def rate(mbit: float) -> str:
    """Mbit/s for people."""
    if not mbit:
        return ABSENT
    return f"{mbit / 1000:.1f} Gbit/s" if mbit >= 1000 else f"{mbit:.0f} Mbit/s"
