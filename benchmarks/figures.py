"""What benchmarks have in common: where their figures go, a table, a picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from ..terminal.outputs import json_option, plot_option, write_json

Found = dict[str, Any]
Draw = Callable[[Any, Found], None]
"""Draws what was found into a matplotlib figure."""

COLOURS = {
    "chaosnet": "tab:blue", "chameleon": "tab:orange", "elaswave": "tab:green", "recycle": "tab:red",
    "oobleck": "tab:purple", "torchft": "tab:brown", "fault-free": "tab:gray", "paper": "black",
    "no clocks": "tab:cyan", "degraded": "tab:gray", "hivemind": "tab:pink",
    "single source": "tab:gray", "multi-source": "tab:red", "multi-neighbour": "tab:orange",
    "Pollux": "tab:brown", "EDL+": "tab:gray", "Autoscaling": "tab:red", "Chaos": "tab:orange",
    "weights": "tab:blue", "optimizer state": "tab:orange", "runtime info": "tab:green",
    "as moved": "tab:green", "core": "tab:blue", "effect": "tab:gray", "held up": "tab:red",
    "even": "tab:orange", "greedy": "tab:green", "optimal": "tab:purple",
}  # fmt: skip

LINES = (("paper", "-"), ("capacity", "--"), ("bound", ":"))
"""What bars drawn as lines across their group are called, and the style."""


def outputs(command: Callable[..., None]) -> Callable[..., None]:
    """Adds --json and --plot."""
    return json_option(plot_option("plot_file", "Draw it: a .png, .pdf or .svg.")(command))


def publish(found: Found, json_file: Path | None, plot_file: Path | None, draw: Draw) -> None:
    """Write the files that are asked for; then the line on what the paper's text leaves open."""
    write_json(json_file, found)
    if plot_file is not None:
        picture(found, plot_file, draw)
    click.echo(f"Left open by the paper's text: {found['open']}")


def picture(found: Found, plot_file: Path, draw: Draw) -> None:
    """A PNG, without a screen."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5), layout="constrained")
    draw(figure, found)
    figure.savefig(plot_file, dpi=110)


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns as wide as they need to be; numbers to the right."""
    cells = [[_cell(each) for each in row] for row in [head, *rows]]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for number, row in enumerate(cells):
        lines = [
            each.ljust(width) if column == 0 else each.rjust(width)
            for column, (each, width) in enumerate(zip(row, widths, strict=True))
        ]
        click.echo("  ".join(lines).rstrip())
        if number == 0:
            click.echo("  ".join("-" * width for width in widths))


def _cell(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def middle_half(values: Sequence[float]) -> list[float]:
    """From where to where: without the lowest and the highest quarter."""
    ordered = sorted(values)
    return [ordered[len(ordered) // 4], ordered[-1 - len(ordered) // 4]]


def bars(
    axes: Any, groups: Sequence[str], series: Mapping[str, Sequence[float | None]],
    bounds: Mapping[str, Sequence[float]] = MappingProxyType({}),
) -> None:  # fmt: skip
    """Beside each other, by group; None leaves a gap. `LINES` are drawn across their group.

    `bounds`: of single bars, by the name of their series.
    """
    shown = {name: values for name, values in series.items() if name not in dict(LINES)}
    width = 0.8 / max(len(shown), 1)
    for number, (name, values) in enumerate(shown.items()):
        at = [group - 0.4 + (number + 0.5) * width for group in range(len(groups))]
        axes.bar(at, [value or 0.0 for value in values], 0.92 * width, label=name, color=COLOURS.get(name))
        if name in bounds:
            left, right = [x - width / 2 for x in at], [x + width / 2 for x in at]
            label = "bound" if name == next(iter(bounds)) else None
            axes.hlines(bounds[name], left, right, "black", dict(LINES)["bound"], label=label, linewidth=2)
    for name, style in LINES:
        drawn = [(i, value) for i, value in enumerate(series.get(name, ())) if value is not None]
        if drawn:
            left, right = [i - 0.42 for i, _ in drawn], [i + 0.42 for i, _ in drawn]
            axes.hlines([value for _, value in drawn], left, right, "black", style, label=name, linewidth=2)
    axes.set_xticks(range(len(groups)), groups)
    axes.grid(axis="y", alpha=0.3)


def legend_below(figure: Any, axes: Any) -> None:
    """Outside of the axes, so that it hides nothing."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), 6))
