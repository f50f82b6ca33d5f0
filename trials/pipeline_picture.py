"""The picture of `chaosnet demo --pipeline`: who computed which layers of which micro-batch when, around losses."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..callbacks import LayersComputed
from .picture import GRID, INK, STYLE

if TYPE_CHECKING:
    from .demo_pipeline import Loss, Stager

KILLED, COMMIT = "#dc2626", "#64748b"
TITLE = "A box is a micro-batch, by its number: forwards (light) or backwards (dark). Hatched: computed for nothing"


def draw(path: Path, nodes: Sequence[Stager], losses: Sequence[Loss]) -> None:
    """A row of time for each loss: a step before it, that in which it happened, and the one after."""
    from matplotlib import colormaps, rc_context
    from matplotlib.figure import Figure

    ranges = sorted({each.layers for loss in losses for each, _ in _around(nodes, loss)})
    most = max((stop for _, stop in ranges), default=1)
    color_by_layers = {(a, b): colormaps["viridis"]((a + b) / 2 / most * 0.85) for a, b in ranges}
    with rc_context({**STYLE, "hatch.linewidth": 0.6}):
        figure = Figure(figsize=(17, 4.6 * len(losses)), layout="constrained")
        rows = figure.subplots(len(losses), 1, squeeze=False)
        for axes, loss in zip(rows[:, 0], losses, strict=True):
            _draw_loss(axes, nodes, loss, color_by_layers)
        figure.suptitle(TITLE, fontsize=12, x=0.01, ha="left")
        figure.savefig(path, dpi=110)


def _commits(nodes: Sequence[Stager]) -> dict[int, tuple[float, int]]:
    """By step: when the first node had it, and its round."""
    first: dict[int, tuple[float, int]] = {}
    for node in nodes:
        for step in node.steps:
            first[step.step] = min(first.get(step.step, (step.at_s, step.round)), (step.at_s, step.round))
    return first


def _window(nodes: Sequence[Stager], loss: Loss) -> tuple[int, float, float]:
    """The step in which the loss happened; what is shown begins with the one before, and ends with the next."""
    commits = _commits(nodes)
    torn = max(step for step, (at_s, _) in commits.items() if at_s <= loss.at_s) + 1
    return torn, commits[torn - 2][0], commits[torn + 1][0]


def _around(nodes: Sequence[Stager], loss: Loss) -> list[tuple[LayersComputed, str]]:
    """What was computed there, and by whom."""
    _, begin_s, end_s = _window(nodes, loss)
    return [
        (each, node.name)
        for node in nodes
        for each in node.computed
        if begin_s <= each.began_s and each.ended_s <= end_s
    ]


def _draw_loss(
    axes: Any, nodes: Sequence[Stager], loss: Loss, color_by_layers: dict[tuple[int, int], Any]
) -> None:
    torn, begin_s, end_s = _window(nodes, loss)
    around = _around(nodes, loss)
    names = sorted({name for _, name in around} | {*loss.nodes})
    _draw_boxes(axes, around, names, begin_s, end_s, color_by_layers)
    for step in (torn - 1, torn, torn + 1):
        at_s = _commits(nodes)[step][0] - begin_s
        axes.axvline(at_s, color=COMMIT, linewidth=1.2)
        axes.annotate(
            f"step {step} is done", (at_s, 1.0), (-4, 3), xycoords=axes.get_xaxis_transform(),
            textcoords="offset points", ha="right", va="bottom", fontsize=9, color=COMMIT,
        )  # fmt: skip
    killed_s = loss.at_s - begin_s
    axes.axvline(killed_s, color=KILLED, linewidth=1.4, linestyle=(0, (4, 2)))
    for name in loss.nodes:
        axes.plot(killed_s, names.index(name), marker="X", color=KILLED, markersize=11, zorder=4)
    axes.annotate(
        f"kill -9 of {' and '.join(loss.nodes)}", (killed_s, 1.0), (0, 16), xycoords=axes.get_xaxis_transform(),
        textcoords="offset points", ha="center", va="bottom", fontsize=10, color=KILLED, fontweight="bold",
    )  # fmt: skip
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.6)
    axes.set_xlim(0, (end_s - begin_s) * 1.003)
    axes.set_xlabel(f"seconds since step {torn - 2} was done")
    axes.grid(True, axis="x", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def _draw_boxes(
    axes: Any,
    around: Sequence[tuple[LayersComputed, str]],
    names: Sequence[str],
    begin_s: float,
    end_s: float,
    color_by_layers: dict[tuple[int, int], Any],
) -> None:
    last_view: dict[int, tuple[int, int]] = {}
    for each, _ in around:
        last_view[each.round] = max(last_view.get(each.round, each.view), each.view)
    named = set()
    for each, name in around:
        at_s, long_s, row = each.began_s - begin_s, each.ended_s - each.began_s, names.index(name)
        void = each.view < last_view[each.round]
        axes.barh(
            row, long_s, left=at_s, height=0.62, color=color_by_layers[each.layers], edgecolor="white", linewidth=0.6,
            alpha=(0.95 if each.backward else 0.45) * (0.45 if void else 1.0), hatch="////" if void else None,
        )  # fmt: skip
        if long_s > 0.007 * (end_s - begin_s):
            color = "white" if each.backward and not void else INK
            axes.text(
                at_s + long_s / 2,
                row,
                str(each.micro_batch),
                ha="center",
                va="center",
                fontsize=7,
                color=color,
            )
        attempt = name, each.round, each.view
        if attempt not in named:
            named.add(attempt)
            first, last = each.layers[0], each.layers[1] - 1
            layers = f"layers {first} to {last}" if first < last else f"layer {first}"
            axes.text(at_s, row - 0.41, layers, va="center", fontsize=7, color=INK)
