"""The picture of a soak: steps over time, the processes' lives with what happened to them, and their memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .picture import rows_over_time
from .soak_report import ProcessLife

COLOR_BY_KIND = {
    "kill": "#dc2626", "kill-scheduler": "#7f1d1d", "kill-joiner": "#f87171", "pause": "#94a3b8",
    "freeze": "#2563eb", "join": "#15803d", "leave": "#7c3aed", "cut": "#d97706",
    "hangup": "#c084fc", "raise": "#db2777", "diverge": "#0891b2", "slow": "#a16207",
}  # fmt: skip
MARK_BY_KIND = {
    "kill": "X", "kill-scheduler": "X", "kill-joiner": "x", "pause": "|", "freeze": "s", "join": ">",
    "leave": "o", "cut": "d", "hangup": "o", "raise": "*", "diverge": "P", "slow": "D",
}  # fmt: skip


def draw(
    path: Path, lives: Sequence[ProcessLife], faults: Sequence[Mapping[str, Any]], start_s: float, title: str
) -> None:
    """Step over time, the processes' lives with what happened to them, and their memory."""
    with rows_over_time(path, title, (12, 9), (1.6, 1.6, 1.2), dpi=120) as (top, middle, bottom):
        for life in lives:
            top.plot([t - start_s for t in life.times_s], life.steps, color="#64748b", linewidth=1.0)
            bottom.plot(
                [t - start_s for t, _ in life.rss], [size / 1e6 for _, size in life.rss], linewidth=0.9
            )
        names = sorted({life.node for life in lives})
        _draw_lives(middle, lives, names, start_s)
        _draw_faults(top, middle, faults, names)
        top.set_ylabel("step")
        bottom.set_ylabel("memory of each process, MB")
        bottom.set_ylim(bottom=0)
        bottom.set_xlabel("seconds")


def _draw_lives(axes: Any, lives: Sequence[ProcessLife], names: Sequence[str], start_s: float) -> None:
    for life in lives:
        if life.steps:
            times = [life.times_s[0] - start_s, life.times_s[-1] - start_s]
            axes.plot(
                times, [names.index(life.node)] * 2, color="#cbd5e1", linewidth=7, solid_capstyle="butt"
            )
    axes.set_yticks(range(len(names)), names)


def _draw_faults(top: Any, axes: Any, faults: Sequence[Mapping[str, Any]], names: Sequence[str]) -> None:
    for kind, color in COLOR_BY_KIND.items():
        of_kind = [fault for fault in faults if fault["kind"] == kind]
        if not of_kind:
            continue
        times = [fault["time_s"] for fault in of_kind]
        top.scatter(times, [fault["step"] for fault in of_kind], color=color, marker=MARK_BY_KIND[kind], s=28,
                    label=f"{kind} ({len(of_kind)})", zorder=3)  # fmt: skip
        for end in ("node", "other"):
            marked = [fault for fault in of_kind if fault[end] in names]
            axes.scatter([fault["time_s"] for fault in marked], [names.index(fault[end]) for fault in marked],
                         color=color, marker=MARK_BY_KIND[kind], s=28, zorder=3)  # fmt: skip
    if faults:
        top.legend(loc="upper left", frameon=False, ncols=4, fontsize=9)
