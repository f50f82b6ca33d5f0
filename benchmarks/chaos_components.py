"""How long each part of a training state takes to pull over one link (Chaos, Sec. III, Fig. 3).

A cluster of one node, and one link to the node that joins. It joins once for each part, with a state that is that
part alone; the bytes really move. What is left when nothing of the model is moved (negotiation, a probe of the link,
counters, generators, 66 kB of weights) is called runtime info; the other parts' delays have it in them, too.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from ..netem.topology import GOODPUT, LinkSpec, Topology
from . import chaos_options as options
from .chaos_models import VISION, say_sizes, state_bytes, weight_bytes
from .chaos_stage import Case, Pull, Work, stage
from .figures import bars, legend_below, publish, table
from .overlay import need_root

PARTS = ("weights", "optimizer state", "runtime info")
OPEN = (
    "the optimizer, and the values of the bars: the text says of pulling from a neighbour `up to one minute`"
)


def parts(model: str, optimizer: str, quick: bool) -> dict[str, int]:
    """Bytes of each."""
    weights, everything = weight_bytes(model, quick), state_bytes(model, optimizer, quick)
    return dict(zip(PARTS, (weights, everything - weights, 0), strict=True))


def measure(size_bytes: int, mbit: float, repeat: int, step_s: float) -> list[float]:
    """Seconds of joins."""
    pair = Case("pair", Topology({("n0", "n1"): LinkSpec(rate_mbit=mbit)}), "n1")
    with stage(pair, Work(size_bytes, step_s=step_s)) as on:
        on.start_members()
        return [on.join(Pull()).delay_s for _ in range(repeat)]


@click.command("chaos-fig3")
@options.add(
    options.models(",".join(VISION)),
    options.optimizer("adam"),
    options.MBIT,
    options.repeat(1, "Joins for each part."),
    options.step_s(0.2),
    options.quick("A hundredth of all bytes"),
)
def fig3_command(
    models: Sequence[str], optimizer: str, mbit: float, repeat: int, step_s: float, quick: bool,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """Chaos, Fig. 3: how long weights, optimizer state and runtime info take over one link."""
    need_root("chaos-fig3")
    say_sizes(models, optimizer, quick)
    rows: list[dict[str, Any]] = []
    for model in models:
        for part, size in parts(model, optimizer, quick).items():
            took = measure(size, mbit, repeat, step_s)
            bound = 8 * size / (GOODPUT * mbit * 1e6)
            rows.append({"model": model, "part": part, "bytes": size, "took_s": took, "bound_s": bound})
            click.echo(f"{model}, {part}: {size / 1e6:.1f} MB in {statistics.median(took):.2f} s", err=True)
    seconds = {(row["model"], row["part"]): statistics.median(row["took_s"]) for row in rows}
    bounds = {(row["model"], row["part"]): row["bound_s"] for row in rows}
    head = ["", *(f"{part}, s" for part in PARTS), *(f"{part}: bound" for part in PARTS[:2])]
    shown = [
        [model, *(seconds[model, part] for part in PARTS), *(bounds[model, part] for part in PARTS[:2])]
        for model in models
    ]
    table(head, shown)
    click.echo("the paper: pulling from a neighbour takes up to one minute")
    found = {"rows": rows, "mbit": mbit, "optimizer": optimizer, "open": OPEN}

    def draw(figure: Any, _: Any) -> None:
        axes = figure.subplots()
        delays = {part: [seconds[model, part] for model in models] for part in PARTS}
        bars(axes, models, delays, {part: [bounds[model, part] for model in models] for part in PARTS[:2]})
        axes.set_ylabel(f"replication delay at {mbit:g} Mbit/s (s)")
        axes.set_title("Chaos, Fig. 3")
        legend_below(figure, axes)

    publish(found, json_file, plot_file, draw)
