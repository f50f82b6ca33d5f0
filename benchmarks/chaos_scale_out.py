"""What a scale-out takes, by system and scheme (Chaos, Fig. 7, 8, 10, 15 and 16), with real bytes over shaped links.

An overlay of network namespaces, links of 100 to 1000 Mbit/s. All nodes but one train; that one joins, and leaves
again, once with each system in turn. Two things are measured of one and the same join:

    delay    from the new node's call of Trainer() to its membership; with Pollux, from the word to stop until all
             nodes, the new one too, can train
    idle     the delay, which the new node waits, and for all members together how much longer than usual the steps
             took that were under way between that call and the end of the new node's first step; with Pollux,
             the time between a member's last step before the stop and its membership afterwards

Computing is a sleep. Of the state nothing is trained, unless --trained-mb says so: steps are short, and links carry
the state alone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from ..settings.options import Amount, OneOf, Several, Whole
from . import chaos_options as options
from .chaos_models import TEXT, say_sizes
from .chaos_stage import Work, bound_s, cases
from .chaos_systems import FIG15, FIG16, SYSTEMS, ScaleOutSystem, measure, plain
from .figures import bars, legend_below, publish, table
from .overlay import need_root

MB = 1e6
PAPER_7 = {"Pollux": "> 100", "EDL+": "> 10 if large", "Autoscaling": "near EDL+", "Chaos": "about 1"}
PAPER_10 = {"Pollux": "> 1000", "EDL+": "50 to 100", "Autoscaling": "high", "Chaos": "< 10"}
PHASES = {  # Those of protocols/scale_out.py.
    "until asked": ("knocking", "asked"),
    "links, probes": ("linking",),
    "step's end": ("waiting",),
    "state": ("fetching",),
    "loading": ("loading",),
    "next step's end": ("ready",),
}
OPEN = (
    "where links are, and how many a new node has: three or four here, random; the optimizer; what a step takes; "
    "what disks and processes cost beside the links: loopback's processors, and this machine's disk for all"
)


class Figure(NamedTuple):
    """Which of the two is drawn, and what the paper's text says of it."""

    number: int
    systems: Mapping[str, ScaleOutSystem]
    idle: bool = False
    paper: Mapping[str, str] | None = None

    @property
    def name(self) -> str:
        return f"chaos-fig{self.number}"


def run(
    figure: Figure, members: Sequence[int], models: Sequence[str], overlays: int, repeat: int, seed: int,
    scale: float, step_s: float, trained_mb: float, optimizer: str, systems: Sequence[str] | None, quick: bool,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Measure, print, write, draw."""
    need_root(figure.name)
    sizes = say_sizes(models, optimizer, quick)
    chosen = {name: each for name, each in figure.systems.items() if systems is None or name in systems}
    if quick:
        members, overlays, repeat = members[:1], 1, 1
    rows: list[dict[str, Any]] = []
    for model in models:
        work = Work(sizes[model], int(min(trained_mb * MB, sizes[model])), step_s)
        for count in members:
            for case in cases(count, overlays, seed, scale):
                row = {
                    "model": model,
                    "members": count,
                    "overlay": case.name,
                    "state_bytes": work.state_bytes,
                }
                row |= plain(measure(case, work, chosen, repeat))
                rows.append(row | {"bound_s": bound_s(case, work.state_bytes)})
                click.echo(_line(rows[-1]), err=True)
    shown = [Shown(rows, model, count) for model in models for count in members]
    _print_phases(shown, list(chosen))
    for idle in {figure.idle: None, not figure.idle: None} if figure.paper else (figure.idle,):
        _print(shown, list(chosen), idle)
    found = {"rows": rows, "scale": scale, "step_s": step_s, "paper": figure.paper, "open": OPEN}
    publish(found, json_file, plot_file, lambda drawn, _: _draw(drawn, figure, list(chosen), shown))


class Shown:
    """Medians of what belongs together: one model, one size of the cluster."""

    def __init__(self, rows: Sequence[Mapping[str, Any]], model: str, members: int) -> None:
        self.rows = [row for row in rows if (row["model"], row["members"]) == (model, members)]
        self.label = f"{model}, {members} to {members + 1}"
        self.bound_s = statistics.median(row["bound_s"] for row in self.rows)

    def seconds(self, name: str, idle: bool) -> float:
        """Over all joins on all overlays."""
        return statistics.median(s for row in self.rows for s in row["idle_s" if idle else "delay_s"][name])

    def phase_s(self, name: str, phases: Sequence[str]) -> float:
        """Of the delay, what went into these."""
        return statistics.median(
            sum(join.get(phase, 0.0) for phase in phases)
            for row in self.rows
            for join in row["phases_s"][name]
        )

    def to_bound(self, name: str, steps: int = 0) -> float:
        """Each overlay's median delay by what its links allow, and so many steps; in the middle."""
        return statistics.median(
            statistics.median(row["delay_s"][name])
            / (row["bound_s"] + steps * statistics.median(row["member_step_s"][name]))
            for row in self.rows
        )

    def step_s(self) -> float:
        """What a step takes while nobody joins."""
        return statistics.median(
            took_s for row in self.rows for each in row["member_step_s"].values() for took_s in each
        )


def _print_phases(shown: Sequence[Shown], names: Sequence[str]) -> None:
    """Medians of each by itself, so they do not add up to the median delay."""
    told = [name for name in names if any(any(row["phases_s"][name]) for each in shown for row in each.rows)]
    if told:
        click.echo("of the delay, s")
        table(
            ["", *PHASES],
            [
                [f"{each.label}: {name}", *(each.phase_s(name, phases) for phases in PHASES.values())]
                for each in shown
                for name in told
            ],
        )


def _print(shown: Sequence[Shown], names: Sequence[str], idle: bool) -> None:
    if idle:
        click.echo("idle time of all nodes together, s")
        table(["", *names], [[each.label, *(each.seconds(name, True) for name in names)] for each in shown])
        _paper(PAPER_10, names)
        return
    click.echo("scale-out delay, s; and divided by what the new node's links allow")
    rows = [
        [
            each.label,
            *(each.seconds(n, False) for n in names),
            each.bound_s,
            *(each.to_bound(n) for n in names),
        ]
        for each in shown
    ]
    table(["", *names, "bound", *(f"{name} / bound" for name in names)], rows)
    click.echo(
        "divided by that and one step: a state exists when a step ends, and membership begins when one does, so that "
        "a join waits for half a step twice, in the mean"
    )
    table(
        ["", "a step", *(f"{name} / (bound + step)" for name in names)],
        [[each.label, each.step_s(), *(each.to_bound(n, steps=1) for n in names)] for each in shown],
    )
    _paper(PAPER_7, names)


def _paper(said: Mapping[str, str], names: Sequence[str]) -> None:
    if told := [f"{name} {said[name]}" for name in names if name in said]:
        click.echo(f"the paper, on its machines, with its disks: {', '.join(told)}")


def _line(row: Mapping[str, Any]) -> str:
    took = ", ".join(
        f"{name} {statistics.median(delays):.2f} s (idle {statistics.median(row['idle_s'][name]):.2f} s)"
        for name, delays in row["delay_s"].items()
    )
    return f"{row['model']}, {row['members']} members, {row['overlay']}: {took}, bound {row['bound_s']:.2f} s"


def _draw(figure: Any, what: Figure, names: Sequence[str], shown: Sequence[Shown]) -> None:
    axes = figure.subplots()
    series: dict[str, list[float | None]] = {
        name: [each.seconds(name, what.idle) for each in shown] for name in names
    }
    if not what.idle:
        series["bound"] = [each.bound_s for each in shown]
    bars(axes, [each.label for each in shown], series)
    if what.paper:  # A restart takes many times as long as anything else.
        axes.set_yscale("log")
    axes.set_ylabel("cluster idle time (s)" if what.idle else "scale-out delay (s)")
    axes.set_title(f"Chaos, Fig. {what.number}")
    legend_below(figure, axes)


def _options(figure: Figure, members: str, models: str, overlays: int, step_s: float) -> options.Option:
    return options.add(
        options.members(2, members),
        options.models(models),
        options.optimizer("sgd"),
        options.shown("--overlays", type=Whole(1, 100), default=overlays, help="Random ones."),
        options.repeat(3, "Joins by each system on each overlay."),
        options.SEED,
        options.SCALE,
        options.step_s(step_s),
        options.shown(
            "--trained-mb", type=Amount(0, 10_000), default=0.0, help="Of the state, so summed in each step."
        ),
        click.option(
            "--systems", type=Several(OneOf(tuple(figure.systems))),
            help=f"Of {', '.join(figure.systems)}. Default: all.",
        ),
        options.quick("A hundredth of all bytes, one join"),
    )  # fmt: skip


def _command(
    figure: Figure,
    text: str,
    members: str = "6",
    models: str = "ResNet101",
    overlays: int = 1,
    step_s: float = 0.2,
) -> click.Command:
    @click.command(figure.name, help=text)
    @_options(figure, members, models, overlays, step_s)
    def command(**chosen: Any) -> None:
        run(figure, **chosen)

    return command


SIZES = "6,8,11"
NEW = {name: SYSTEMS[name] for name in ("Chaos", "chaosnet")}
fig7_command = _command(
    Figure(7, SYSTEMS, paper=PAPER_7), "Chaos, Fig. 7: scale-out delay, by system (and idle time).", SIZES
)
fig8_command = _command(Figure(8, NEW), "Chaos, Fig. 8: scale-out delay with GPT-2.", SIZES, ",".join(TEXT))
fig10_command = _command(
    Figure(10, SYSTEMS, idle=True, paper=PAPER_10),
    "Chaos, Fig. 10: idle time of all nodes (and delay).",
    SIZES,
)
fig15_command = _command(
    Figure(15, FIG15), "Chaos, Fig. 15: a state from one neighbour, from several nodes, from all neighbours.",
    overlays=3, step_s=0.02,
)  # fmt: skip
fig16_command = _command(
    Figure(16, FIG16),
    "Chaos, Fig. 16: equal, greedy and optimal shares of neighbours.",
    overlays=3,
    step_s=0.02,
)
