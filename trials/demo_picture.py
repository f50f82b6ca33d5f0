"""The picture of a demo: loss, samples/s and the nodes' lives over time, with what happened."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from .demo_report import Deed, NodeLog, cluster_steps, samples_per_s
from .picture import rows_over_time

LOSS, RATE, LIFE = "#2563eb", "#0d9488", "#64748b"
ENDS = ("scale-in", "kill", "kill-scheduler")
COLOR_BY_KIND = {
    "scale-out": "#15803d",
    "disconnect-link": "#b45309",
    "connect-link": "#b45309",
    "scale-in": "#7c3aed",
    "kill": "#dc2626",
    "kill-scheduler": "#dc2626",
}
LABEL_BY_KIND = {
    "scale-out": "{node} joins",
    "disconnect-link": "link {node}\nremoved",
    "connect-link": "link {node}\nadded",
    "scale-in": "{node} leaves\n(Ctrl+C)",
    "kill": "{node}\nkill -9",
    "kill-scheduler": "{node} (scheduler)\nkill -9",
}


def draw(path: Path, logs: Sequence[NodeLog], happenings: Sequence[Deed], title: str) -> None:
    """Loss, samples/s and the nodes' lives over time, with what happened."""
    from matplotlib.ticker import MaxNLocator

    steps = cluster_steps(logs)
    start_s = steps[0].time_s
    times = [step.time_s - start_s for step in steps]
    with rows_over_time(path, title, (11, 7.6), (3.2, 1.3, 1.3), dpi=130) as (top, middle, bottom):
        _draw_loss(top, times, [step.loss for step in steps])
        middle.fill_between(times, samples_per_s(steps), color=RATE, alpha=0.2, linewidth=0)
        middle.plot(times, samples_per_s(steps), color=RATE, linewidth=1.4)
        middle.set_ylabel("samples/s")
        middle.set_ylim(bottom=0)
        _draw_lives(bottom, logs, happenings, start_s)
        for axes in (top, middle, bottom):
            for happening in happenings:
                color = COLOR_BY_KIND[happening.kind]
                axes.axvline(happening.time_s - start_s, color=color, linewidth=1.1, linestyle=(0, (4, 2)))
        _label(top, happenings, start_s)
        bottom.set_xlabel("seconds since the first step")
        bottom.set_xlim(0, max(times) * 1.01)
        bottom.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=14))


def _draw_loss(axes: Any, times: Sequence[float], losses: Sequence[float]) -> None:
    axes.plot(times, losses, color=LOSS, linewidth=0.7, alpha=0.35)
    smooth, value = [], losses[0]
    for loss in losses:
        value += 0.15 * (loss - value)
        smooth.append(value)
    axes.plot(times, smooth, color=LOSS, linewidth=2.0)
    axes.set_yscale("log")
    axes.set_ylabel("training loss, mean over the cluster")


def _draw_lives(axes: Any, logs: Sequence[NodeLog], happenings: Sequence[Deed], start_s: float) -> None:
    """One bar a node, from its first step to its last, and how it ended."""
    end_by_node = {each.node: each.kind for each in happenings if each.kind in ENDS}
    for row, log in enumerate(logs):
        if not log.steps:
            continue
        first, last = log.steps[0].time_s - start_s, log.steps[-1].time_s - start_s
        color = COLOR_BY_KIND.get(end_by_node.get(log.name, ""), LIFE)
        axes.plot([first, last], [row, row], color=LIFE, linewidth=6, solid_capstyle="butt", alpha=0.75)
        if log.name in end_by_node:
            axes.plot(
                last, row, marker="X" if color == "#dc2626" else "o", color=color, markersize=9, zorder=3
            )
    axes.set_yticks(range(len(logs)), [log.name for log in logs])
    axes.set_ylim(len(logs) - 0.4, -0.6)


def _label(axes: Any, happenings: Sequence[Deed], start_s: float) -> None:
    """Above the frame, on three heights, so that neighbours do not meet, also where nodes took long to start."""
    for index, happening in enumerate(happenings):
        axes.annotate(
            LABEL_BY_KIND[happening.kind].format(node=happening.node),
            xy=(happening.time_s - start_s, 1.0),
            xycoords=axes.get_xaxis_transform(),
            xytext=(0, 6 + 32 * (index % 3)),
            textcoords="offset points",
            ha="center",
            va="bottom",
            fontsize=9,
            color=COLOR_BY_KIND[happening.kind],
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
            zorder=9 - index,  # Over the lines of later ones, which pass by.
            arrowprops={"arrowstyle": "-", "color": COLOR_BY_KIND[happening.kind], "linewidth": 0.8},
        )
