"""A cluster's status as tables for people; pure functions of what `client.status` returns."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich import box
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ..protocols.messages import link
from ..protocols.sentences import STYLES, counted, lasting, printable, sentence
from ..protocols.status import LinkRow, MemberRow, Status
from .step_split import who_comes_last
from .told_pipelines import how_safe, pace

ABSENT = "-"  # For what is not known.
UNBOUNDED = 10_000  # Columns of a screen that nothing is left out of.
LOOK: dict[str, Any] = {
    "title_justify": "left", "title_style": "bold", "expand": False, "box": box.SIMPLE_HEAD, "pad_edge": False,
    "padding": (0, 1, 0, 0), "show_edge": False,
}  # fmt: skip
GAP = 2  # Blanks between two columns.
NAME_CHARS = 17  # Of a node's name, where room is short.
NAMED = 3  # Of many names, so many are shown.


def cluster(status: Status, wide: bool = False) -> RenderableType:
    """The whole status: a headline, then tables of members, links, steps (if it has the history) and events.

    `wide`: with full names, neighbours and addresses.
    """
    return Printable(
        Group(
            headline(status),
            members(status, wide),
            links(status, wide),
            *steps(status),
            events(status),
            *(keys(status) if wide else []),
            *strangers(status),
            *cut(status),
        )
    )


class Printable:
    """The same without control characters, which names that nodes give themselves may have."""

    def __init__(self, shown: RenderableType) -> None:
        self.shown = shown

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for text, style, control in console.render(self.shown, options):
            yield Segment(text if control else printable(text), style, control)


def headline(status: Status) -> Text:
    """Who schedules, how far training is, how fast, what was averaged, and what is wrong."""
    parts = [
        counted(len(status.active), "member"),
        f"scheduler {status.scheduler or 'being elected'} (term {status.term})",
        f"step {status.step:,}",
        f"{status.samples_per_s:,.0f} samples/s",
    ]
    text = Text("  ".join(parts), style="bold")
    if status.metrics:
        text.append(f"\n{'  '.join(metrics(status.metrics))}", style="bold")
    for pipeline in status.pipelines.split(" | ") if status.pipelines else ():
        text.append(f"\npipeline: {pipeline}", style="cyan")
    if status.pipelines and (paced := pace(status)):
        text.append(f"\n{paced}", style="cyan")
    if keep := " | ".join(f"{row.node} {row.keeps}" for row in status.active if row.keeps):
        style = "cyan" if status.keepers > 1 else "bold yellow"
        text.append(f"\nstate kept: {keep} ({how_safe(status.keepers)})", style=style)
    if row := status.checkpoint:
        newest = f"step {row.step:,} at {clock(row.time_s)}" if row.step else "none yet"
        now = f"; written by {some(row.writing)} now" if row.writing else ""
        text.append(f"\ncheckpoint: {newest}{now}")
    if status.parked:
        text.append(f"\nwaiting: {status.parked}", style="bold red")
    if waiting := status.waiting:
        told = f"waits for {some(waiting.whom)}, {lasting(waiting.seconds)}: {waiting.why}"
        text.append(f"\n{told}", style="bold yellow")
    elif told := who_comes_last(status):
        text.append(f"\n{told}", style="yellow")
    return text


def some(names: Sequence[str]) -> str:
    """Names, of which there may be many: the first NAMED, and how many more."""
    more = len(names) - NAMED
    return f"{', '.join(names[:NAMED])}{f' and {more} more' if more > 0 else ''}"


def metrics(found: Mapping[str, float | None]) -> list[str]:
    """Name and value of each, by name."""
    return [
        f"{name} {'not finite' if value is None else figure(value)}" for name, value in sorted(found.items())
    ]


def figure(value: float) -> str:
    """A metric's value with enough digits, also where it is small, or large."""
    return f"{value:.4f}" if not value or 0.01 <= abs(value) < 1e6 else f"{value:.4g}"


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a `Fitting`."""

    name: str
    justify: Literal["left", "right"] = "left"


class Fitting:
    """A table that leaves out its last columns if there is no room for them, but always shows the first `least`."""

    def __init__(
        self, title: str, columns: Sequence[Column], rows: Sequence[Sequence[Text | str]], least: int
    ) -> None:
        self.title, self.columns, self.rows, self.least = title, columns, rows, least

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        count = len(self.columns)
        while count > self.least and self.width(count) > options.max_width:
            count -= 1
        yield self.of(count)

    def width(self, count: int) -> int:
        """The width of its first `count` columns. rich would say the same, but takes longer than to draw them."""
        shown = [[column.name for column in self.columns], *self.rows]
        widths = (max(cell_len(str(row[place])) for row in shown) for place in range(count))
        return sum(widths) + GAP * (count - 1)

    def of(self, count: int) -> Table:
        """The table with its first `count` columns."""
        table = Table(title=self.title, **LOOK)
        for column in self.columns[:count]:
            table.add_column(column.name, justify=column.justify, no_wrap=True)
        for row in self.rows:
            # As Text, since a name may contain what rich takes for markup.
            table.add_row(*(each if isinstance(each, Text) else Text(each) for each in row[:count]))
        return table


def short(name: str, wide: bool = False) -> str:
    """A node's name, its middle left out where it is long: the end tells those of one host apart."""
    if wide or len(name) <= NAME_CHARS:
        return name
    return f"{name[: NAME_CHARS - 8]}…{name[-7:]}"


def members(status: Status, wide: bool = False) -> Fitting:
    """One row a node, also those that are gone; what matters most comes first."""
    right = ["step", "samples/s", "sync", "cpu", "memory", "sent", "got"]
    battery = any(row.battery_pct >= 0 for row in status.members)
    columns = [
        Column("node"), Column("role"), *(Column(name, "right") for name in right),
        *([Column("battery", "right")] if battery else []),
        Column("neighbours") if wide else Column("links", "right"), *([Column("address")] if wide else []),
    ]  # fmt: skip
    late = status.waiting.whom if status.waiting else ()
    ordered = sorted(status.members, key=lambda row: (row.state in ("failed", "left"), row.node))
    cells = (
        _member_cells(row, status.scheduler, battery, row.node in late and row.idle_s > 0, wide)
        for row in ordered
    )
    return Fitting("members", columns, [*cells], least=4)


def _member_cells(row: MemberRow, scheduler: str, battery: bool, idle: bool, wide: bool) -> list[Text | str]:
    # A new scheduler has no report of a node for up to a second.
    told = is_here(row) and row.report_age_s is not None
    around = ", ".join(row.neighbors) or ABSENT
    return [
        Text(short(row.node, wide), style="" if is_here(row) else "dim"),
        Text(f"idle {lasting(row.idle_s)}", style="bold yellow") if idle else role(row, scheduler),
        f"{row.step:,}" if told else ABSENT,
        f"{row.samples_per_s:,.0f}" if told else ABSENT,
        *(_readings(row, battery) if told else [ABSENT] * (5 + battery)),
        around if wide else f"{len(row.neighbors)}",
        *([", ".join(_without_key(each) for each in row.addresses) or "(dials only)"] if wide else []),
    ]


def is_here(row: MemberRow) -> bool:
    """Is it in the cluster, or about to be?"""
    return row.state in ("active", "standby")


def _readings(row: MemberRow, battery: bool) -> list[str]:
    """What a node reports of itself: waiting for the all-reduce of its last step, its machine, and its traffic."""
    charge = f"{row.battery_pct:.0f} %" if row.battery_pct >= 0 else ABSENT
    return [
        f"{row.sync_delay_s * 1e3:.0f} ms",
        f"{row.cpu_pct:.0f} %",
        size(row.memory_bytes),
        size(row.sent_bytes),
        size(row.received_bytes),
        *([charge] if battery else []),
    ]


def role(row: MemberRow, scheduler: str) -> Text:
    """What a node is to the cluster, or what has become of it."""
    if not is_here(row):
        return Text(
            "lost" if row.state == "failed" else row.state, style="red" if row.state == "failed" else "dim"
        )
    if row.node == scheduler:
        return Text("scheduler", style="bold cyan")
    return Text("joining", style="yellow") if row.state == "standby" else Text("worker", style="green")


def links(status: Status, wide: bool = False) -> Fitting:
    """One row a link, with its newest readings."""
    names = ("rate", "back", "round trip", "measured")
    readings = {(row.a, row.b): row for row in status.links}
    every = {link(row.node, other) for row in status.members for other in row.neighbors}
    rows = []
    for a, b in sorted(every):
        row = readings.get((a, b))
        rows.append([
            f"{short(a, wide)} - {short(b, wide)}",
            *([rate(row.rate_mbit), rate(row.rate_back_mbit)] if row else [ABSENT] * 2),
            f"{row.rtt_min_ms:.2f} ms" if row and row.rtt_min_ms else ABSENT,
            measured(row) if row else ABSENT,
        ])  # fmt: skip
    return Fitting("links", [Column("link"), *(Column(name, "right") for name in names)], rows, least=3)


def steps(status: Status) -> list[Table]:
    """A table of steps with the metrics of each, the newest last; [] if the status has no history."""
    table = Table(title="steps", title_justify="left", title_style="bold", expand=False, box=None)
    for name in ("time", "step", "seconds", "samples"):
        table.add_column(name, justify="right")
    table.add_column("")
    for row in status.steps:
        seconds = ABSENT if row.seconds is None else f"{row.seconds:.3f}"
        told = Text("  ".join(metrics(row.metrics)))
        table.add_row(clock(row.time_s), f"{row.step:,}", seconds, f"{row.samples:,.0f}", told)
    return [table] if status.steps else []


def events(status: Status) -> Table:
    """Events of the status, in its order: the newest last."""
    table = Table(title="recent events", title_justify="left", title_style="bold", expand=False, box=None)
    table.add_column("time")
    table.add_column("step", justify="right")
    table.add_column("what", overflow="fold")
    for event in status.events:
        table.add_row(
            clock(event.time_s), f"{event.step:,}", Text(sentence(event), style=STYLES.get(event.kind, ""))
        )
    return table


def keys(status: Status) -> list[Text]:
    """Members' addresses with their keys, a line each, to be copied; [] for a cluster without keys."""
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
    """The local time; with the day if that is not today."""
    at, now = time.localtime(time_s), time.localtime()
    year = "" if at.tm_year == now.tm_year else " %Y"
    return time.strftime("%H:%M:%S" if at[:3] == now[:3] else f"%d %b{year} %H:%M:%S", at)


def size(count: float) -> str:
    """Bytes for people."""
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.{0 if count >= 10 or unit == 'B' else 1}f} {unit}"
        count /= 1000
    return f"{count:.1f} GB" if count < 1000 else f"{count / 1000:.1f} TB"


def measured(row: LinkRow) -> str:
    """How long ago the rates were measured, and how: of the older of both directions."""
    ages = [(row.rate_age_s, row.rate_source), (row.rate_back_age_s, row.rate_back_source)]
    known = [(age_s, source) for age_s, source in ages if age_s is not None]
    if not known:
        return ABSENT
    age_s, source = max(known)
    return f"{lasting(age_s)} ago ({source})"


def rate(mbit: float) -> str:
    """Mbit/s for people."""
    if not mbit:
        return ABSENT
    if mbit >= 1000:
        return f"{mbit / 1000:.1f} Gbit/s"
    return f"{mbit:.{0 if mbit >= 10 else 1}f} Mbit/s"
