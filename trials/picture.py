"""How the pictures of a demo and of a soak look."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

INK, GRID, FRAME = "#1f2933", "#e4e7eb", "#9aa5b1"
STYLE: Any = {"font.size": 10, "axes.edgecolor": FRAME, "text.color": INK, "axes.labelcolor": INK}


@contextmanager
def rows_over_time(
    path: Path, title: str, inches: tuple[float, float], heights: Sequence[float], dpi: int
) -> Iterator[Sequence[Any]]:
    """Axes one above the other, with one axis of time; the picture is written when the block ends.

    Args:
        heights: Of the rows, relative to each other.
    """
    from matplotlib import rc_context
    from matplotlib.figure import Figure

    with rc_context(STYLE):
        figure = Figure(figsize=inches, layout="constrained")
        rows = figure.subplots(len(heights), 1, sharex=True, height_ratios=heights)
        yield rows
        for axes in rows:
            axes.grid(True, color=GRID, linewidth=0.8)
            axes.set_axisbelow(True)
            axes.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, ha="left")
        figure.savefig(path, dpi=dpi)
