"""What scaling in and out and changing links takes (Chaos, Table I and Fig. 9).

Members of a random overlay train, with a sleep for computing. In turn a node joins, leaves, a link between two random
members is opened and closed again. Of each, three times:

    core      that the scheduler's decisions took, from the message that asked for it (`handling_ms` of its notices)
    effect    from the call of who asks until it is so. A change takes effect between two steps, so this has the rest
              of a step in it; for a link also its opening and the probes of its rates
    held up   how much longer than usual the steps took that were under way, the mean of all members. `nothing` is
              what this counts where nothing happens: the noise of the machine
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click
import msgspec
import networkx as nx

from ..protocols.errors import ConfigError
from ..protocols.status import Status
from ..settings.options import Whole
from . import chaos_options as options
from .chaos_models import say_sizes
from .chaos_stage import Pull, ScaleOutTimes, Stage, Work, cases, idle_s, stage
from .figures import bars, legend_below, publish, table
from .overlay import PATIENCE_S, need_root

PAPER = {
    "scale-out": "0.5 to 5 s",
    "scale-in": "< 1 ms",
    "connect-link": "< 1 ms",
    "disconnect-link": "< 1 ms",
}
NOTHING = "nothing"
NOTHING_S = 0.3
"""Seconds looked at for what is counted where nothing happens."""
OPEN = "what its delays are counted from and to: its text says that they are hidden behind sums and computing"


class PrimitiveTimes(NamedTuple):
    """One that was measured."""

    kind: str
    effect_s: float
    held_s: float  # Mean of the members.


def events(on: Stage, repeat: int, seed: int) -> Iterator[PrimitiveTimes]:
    """All kinds in turn."""
    rng = random.Random(seed)
    for _ in range(repeat):
        joined, left = _come_and_go(on)
        yield PrimitiveTimes("scale-out", joined.delay_s, statistics.fmean(joined.idle_by_member.values()))
        yield PrimitiveTimes("scale-in", *left)
        a, b = _unlinked(on, rng)
        for kind, connect in (("connect-link", True), ("disconnect-link", False)):
            on.warm_up()
            yield PrimitiveTimes(kind, *_asked(on, a, {"do": "link", "peer": b, "connect": connect}))
        on.warm_up()
        began_s = time.monotonic()
        time.sleep(NOTHING_S)
        yield PrimitiveTimes(NOTHING, NOTHING_S, _held_s(on, began_s, time.monotonic()))


def _unlinked(on: Stage, rng: random.Random) -> tuple[str, str]:
    """As the scheduler sees it: a cluster opens links of its own where it is about to fall apart."""
    linked = nx.Graph((each.a, each.b) for each in _status(on).links)
    linked.add_nodes_from(on.members)
    pairs = [pair for pair in sorted(nx.non_edges(linked)) if {*pair} <= on.members.keys()]
    if not pairs:
        count = len(on.members)
        raise ConfigError(
            f"bench chaos: {on.case.name}: all {count} members are linked (expected more members)"
        )
    return rng.choice(pairs)


def _status(on: Stage) -> Status:
    """The scheduler's."""
    found = [msgspec.convert(each, Status) for each in on.ask_members(do="status").values()]
    return next(status for status in found if status.scheduler == status.node)


def _come_and_go(on: Stage) -> tuple[ScaleOutTimes, tuple[float, float]]:
    joined = on.join(Pull())
    asked_s, left_s = on.left_s
    return joined, (left_s - asked_s, _held_s(on, asked_s, left_s))


def _asked(on: Stage, node: str, command: Mapping[str, Any]) -> tuple[float, float]:
    on.members[node].tell(dict(command))
    answer = on.members[node].hear(PATIENCE_S)
    if not answer["ok"]:
        raise ConfigError(f"bench chaos: {node}: {answer['text']}")
    return answer["done_s"] - answer["asked_s"], _held_s(on, answer["asked_s"], answer["done_s"])


def _held_s(on: Stage, begin_s: float, end_s: float) -> float:
    """Once all have completed the step in which it ended."""
    on.warm_up()
    reports = on.ask_members(do="report")
    return statistics.fmean(idle_s(each["times_s"], begin_s, end_s) for each in reports.values())


def core_ms(on: Stage) -> dict[str, list[float]]:
    """By kind, as the scheduler tells it."""
    found: dict[str, list[float]] = {kind: [] for kind in PAPER}
    for each in _status(on).events:
        if each.kind in found:
            found[each.kind].append(each.handling_ms)
    return found


def measure(members: int, work: Work, repeat: int, seed: int, scale: float) -> list[dict[str, Any]]:
    """One row a kind."""
    (case,) = cases(members, 1, seed, scale)
    with stage(case, work) as on:
        on.start_members()
        happened = list(events(on, repeat, seed))
        core = core_ms(on)
    return [
        {
            "members": members,
            "kind": kind,
            "core_ms": core.get(kind, []),
            "effect_s": [each.effect_s for each in happened if each.kind == kind],
            "held_s": [each.held_s for each in happened if each.kind == kind],
        }
        for kind in (*PAPER, NOTHING)
    ]


def _run(
    name: str,
    members: Sequence[int],
    model: str,
    repeat: int,
    seed: int,
    scale: float,
    step_s: float,
    quick: bool,
) -> list[dict[str, Any]]:
    need_root(name)
    work = Work(say_sizes([model], "sgd", quick)[model], step_s=step_s)
    return [row for count in members for row in measure(count, work, 1 if quick else repeat, seed, scale)]


def _cells(row: Mapping[str, Any]) -> list[object]:
    core = statistics.median(row["core_ms"]) if row["core_ms"] else None
    return [core, 1e3 * statistics.median(row["effect_s"]), 1e3 * statistics.median(row["held_s"])]


def _options(members: options.Option, repeat: int) -> options.Option:
    return options.add(
        members,
        options.model(),
        options.repeat(repeat, "Of each kind."),
        options.SEED,
        options.SCALE,
        options.step_s(0.2),
        options.quick("A hundredth of all bytes, each once"),
    )


@click.command("chaos-table1")
@_options(options.shown("--members", type=Whole(4, 15), default=6), 5)
def table1_command(members: int, json_file: Path | None, plot_file: Path | None, **chosen: Any) -> None:
    """Chaos, Table I: what each of its primitives takes."""
    rows = _run("chaos-table1", (members,), **chosen)
    shown = [[row["kind"], PAPER.get(row["kind"]), *_cells(row)] for row in rows]
    table(["", "the paper", "core, ms", "effect, ms", "held up, ms"], shown)
    kinds = [row["kind"] for row in rows]

    def draw(figure: Any, _: Any) -> None:
        axes = figure.subplots()
        parts = {"core": 2, "effect": 3, "held up": 4}
        bars(axes, kinds, {name: [row[place] for row in shown] for name, place in parts.items()})
        axes.set_yscale("log")
        axes.set_ylabel("ms")
        axes.set_title("Chaos, Table I")
        legend_below(figure, axes)

    publish({"rows": rows, "paper": PAPER, "open": OPEN}, json_file, plot_file, draw)


@click.command("chaos-fig9")
@_options(options.members(4, "4,6,8,11"), 3)
def fig9_command(
    members: Sequence[int], json_file: Path | None, plot_file: Path | None, **chosen: Any
) -> None:
    """Chaos, Fig. 9: what opening a link takes, by the size of the cluster; and the other primitives."""
    rows = _run("chaos-fig9", members, **chosen)
    for row in rows:
        row["cells"] = _cells(row)
    by_size = {(row["kind"], row["members"]): row["cells"] for row in rows}
    for place, name in enumerate(("core", "effect", "held up")):
        click.echo(f"{name}, ms, by the number of members")
        table(
            ["", *(str(count) for count in members), "the paper"],
            [
                [kind, *(by_size[kind, count][place] for count in members), PAPER.get(kind)]
                for kind in (*PAPER, NOTHING)
            ],
        )

    def draw(figure: Any, _: Any) -> None:
        axes = figure.subplots()
        for place, name in enumerate(("core", "effect", "held up")):
            axes.plot(members, [by_size["connect-link", count][place] for count in members], "o-", label=name)
        axes.axhline(1.0, color="black", label="paper: less than")
        axes.set_yscale("log")
        axes.set_xticks(members)
        axes.set_xlabel("members")
        axes.set_ylabel("connect-link (ms)")
        axes.set_title("Chaos, Fig. 9")
        axes.grid(alpha=0.3)
        legend_below(figure, axes)

    publish({"rows": rows, "paper": PAPER, "open": OPEN}, json_file, plot_file, draw)
