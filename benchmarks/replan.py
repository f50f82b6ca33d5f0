"""`chaosnet bench replan`: training while the rates of all links change (Chaos, Sec. VI-A; Linux, root).

A random overlay, whose links all get another rate of 100 to 1000 Mbit/s every so often, as in the paper's testbed.
The nodes are told nothing: they measure what links carry, and plan anew. After that, for each draw, a cluster is
started whose scheduler is told the rates: what its steps take is what a plan allows that knew them.

With --one-link it is a mesh, of which one link becomes ten times as slow.
"""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

from ..netem.topology import LinkSpec, Topology, mesh, random_overlay, random_rate
from ..protocols.errors import ConfigError
from ..settings.options import Amount, Whole
from ..terminal.outputs import json_option, write_json
from .figures import table
from .overlay import need_root, scaled
from .start import StartCase, measure, started, steps_of

KNOWN_STEPS = 16  # Of each cluster that knows: until all have a vote there is another view at every step.


@dataclass(slots=True)
class Draw:
    """Steps of the first node under one draw of rates."""

    steps_s: list[float]
    known_s: float = 0.0  # Of a cluster that is told the rates, the median.

    @property
    def mean_s(self) -> float:
        """Also of the steps before the plan was another."""
        return statistics.mean(self.steps_s)

    @property
    def late_steps(self) -> int:
        """Until three in a row took at most 1.2 times what they do with the rates known."""
        near = [took <= 1.2 * self.known_s for took in self.steps_s]
        return next((at for at in range(len(near) - 2) if all(near[at : at + 3])), len(near))


def draws(nodes: int, count: int, seed: int, scale: float) -> list[Topology]:
    """The same links, with other rates each."""
    rng = random.Random(seed)
    first = random_overlay(nodes, seed)
    found = [first]
    while len(found) < count:
        links = {each: LinkSpec(rate_mbit=random_rate(rng)) for each in first.links}
        found.append(Topology(links, first.nodes))
    return [scaled(each, scale) for each in found]


def one_slow_link(nodes: int, mbit: float) -> list[Topology]:
    """A mesh, and the same with a tenth of the rate between two of its nodes."""
    before = mesh(nodes, LinkSpec(rate_mbit=mbit))
    slow = {min(before.links): LinkSpec(rate_mbit=mbit / 10)}
    return [before, Topology({**before.links, **slow}, before.nodes)]


def run(overlays: list[Topology], mb: float, pause_s: float, every_s: float) -> list[Draw]:
    """One cluster through all of them."""
    first = Topology(overlays[0].links, overlays[0].nodes)  # Of its own: a testbed notes changes in it.
    with started(StartCase("", mb, pause_s, first, routes=False)) as (testbed, nodes, _):
        steps_of(nodes[0], len(nodes))
        began_s = [time.monotonic()]
        for following in [*overlays[1:], None]:
            time.sleep(every_s)
            began_s.append(time.monotonic())
            if following is not None:
                testbed.change(dict(following.links))
                click.echo(f"draw {len(began_s)} of {len(overlays)}", err=True)
        times_s = steps_of(nodes[0], len(nodes))
    steps = list(pairwise(times_s))
    found = [[b - a for a, b in steps if begin_s <= a < end_s] for begin_s, end_s in pairwise(began_s)]
    if not all(found):
        raise ConfigError("bench replan: a draw has seen no step (expected a longer --every)")
    return [Draw(each) for each in found]


@click.command("replan")
@click.option("--nodes", type=Whole(3, 20), default=8, show_default=True)
@click.option("--draws", "count", type=Whole(2, 100), default=5, show_default=True, help="Of rates.")
@click.option("--every", "every_s", type=Amount(1, 3600), default=180.0, show_default=True, help="Seconds.")
@click.option("--mb", type=Amount(0.001, 1000), default=20.0, show_default=True, help="Of parameters.")
@click.option(
    "--pause", "pause_s", type=Amount(0, 60), default=0.3, show_default=True, help="Sleep a step, s."
)
@click.option("--seed", type=Whole(0, 2**31), default=0, show_default=True)
@click.option(
    "--scale", type=Amount(0.001, 100), default=0.25, show_default=True,
    help="Times all rates, so that links and not processors are the limit.",
)  # fmt: skip
@click.option(
    "--one-link", "mesh_mbit", type=Amount(1, 10_000), metavar="MBIT",
    help="Instead: a mesh with so many Mbit/s, not scaled, of which one link gets a tenth.",
)  # fmt: skip
@json_option
def replan_command(
    nodes: int,
    count: int,
    every_s: float,
    mb: float,
    pause_s: float,
    seed: int,
    scale: float,
    mesh_mbit: float | None,
    json_file: Path | None,
) -> None:
    """Training while the rates of all links change, beside plans that knew them."""
    need_root("replan")
    overlays = one_slow_link(nodes, mesh_mbit) if mesh_mbit else draws(nodes, count, seed, scale)
    found = run(overlays, mb, pause_s, every_s)
    for draw, overlay in zip(found, overlays, strict=True):
        knowing = StartCase("", mb, pause_s, overlay, routes=False, knows=True)
        draw.known_s = measure(knowing, KNOWN_STEPS).step_s
    head = ["draw", "steps", "mean, s", "median, s", "known, s", "mean / known", "late steps"]
    table(head, [_row(number, draw) for number, draw in enumerate(found, 1)])
    total, known = sum(sum(each.steps_s) for each in found), sum(len(e.steps_s) * e.known_s for e in found)
    click.echo(f"all steps: {total / known:.3f} times as long as with the rates known")
    rows = [asdict(each) | {"late_steps": each.late_steps} for each in found]
    write_json(
        json_file, {"scale": scale, "mb": mb, "pause_s": pause_s, "ratio": total / known, "draws": rows}
    )


def _row(number: int, draw: Draw) -> list[Any]:
    median_s = statistics.median(draw.steps_s)
    ratio = draw.mean_s / draw.known_s
    return [str(number), len(draw.steps_s), draw.mean_s, median_s, draw.known_s, ratio, draw.late_steps]
