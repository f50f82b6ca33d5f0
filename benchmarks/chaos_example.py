"""The Chaos paper's example (Sec. II-B, Fig. 1): one overlay, three ways to pull ten units of data.

The paper's drawing is not in its text, only what the schemes take: 80 units of time from a single node, 88 from many
nodes over several links each, 62 from the neighbours. The overlay here is one of ours on which they do. A number on
a link is the time that a unit of data takes over it; what is not next to the new node is passed on unit by unit,
and a link carries one at a time.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click
import networkx as nx

from ..netem.topology import GOODPUT, LinkSpec, Topology, link_name
from ..scheduler.shard_plan import STRATEGIES, ShardPlan, Source
from . import chaos_options as options
from .chaos_models import say_sizes
from .chaos_stage import Case, Work
from .chaos_systems import FIG15, measure
from .figures import bars, legend_below, publish, table
from .overlay import need_root

UNITS = 10
NEW = "n11"
TIMES = {
    ("n3", NEW): 8, ("n2", NEW): 31, ("n9", NEW): 44,
    ("n3", "n10"): 6, ("n10", "n7"): 9, ("n3", "n5"): 5, ("n3", "n6"): 7, ("n5", "n8"): 12,
    ("n2", "n1"): 10, ("n9", "n4"): 20, ("n1", "n4"): 15, ("n7", "n8"): 25, ("n4", "n6"): 18,
}  # fmt: skip
PAPER = {"single source": 80, "multi-source": 88, "multi-neighbour": 62}
MOVED = {"single source": "single source", "multi-source": "multi-source", "multi-neighbour": "chaosnet"}
"""Which scheme of Fig. 15 moves the bytes of each: there its multi-neighbour has equal shares."""


def overlay() -> nx.Graph:
    """With `time` of a unit of data over each link."""
    graph = nx.Graph()
    for (a, b), time in TIMES.items():
        graph.add_edge(a, b, time=time)
    return graph


def paths(graph: nx.Graph) -> dict[str, list[str]]:
    """Of each node to the new one, with the fewest links, as packets go."""
    return {node: nx.shortest_path(graph, node, NEW) for node in sorted(graph) if node != NEW}


def plan(strategy: str, sources: Mapping[str, Source]) -> ShardPlan:
    """What the scheduler would have each source send, in units."""
    return STRATEGIES[strategy](UNITS, 1, 1, sources)


def schemes(graph: nx.Graph) -> dict[str, float]:
    """Units of time that each takes."""
    near = {node: Source(0.0, graph.edges[node, NEW]["time"]) for node in graph[NEW]}
    ways = paths(graph)
    far = {node: Source(0.0, sum(_times(graph, way))) for node, way in ways.items()}
    return {
        "single source": plan("single", near).completion_s,
        "multi-source": passed_on(graph, plan("even", far).shards_by_source),
        "multi-neighbour": plan("adaptive", near).completion_s,
    }


def passed_on(graph: nx.Graph, units_by_source: Mapping[str, int]) -> float:
    """When the last unit is there, if each link carries one at a time, in the order in which they come to it."""
    ways = paths(graph)
    waiting = [(0.0, source, 0) for source, count in sorted(units_by_source.items()) for _ in range(count)]
    free_at: dict[tuple[str, str], float] = defaultdict(float)
    last = 0.0
    while waiting:
        waiting.sort()
        at, source, hop = waiting.pop(0)
        here, there = ways[source][hop : hop + 2]
        free_at[here, there] = done = max(at, free_at[here, there]) + graph.edges[here, there]["time"]
        if there == NEW:
            last = max(last, done)
        else:
            waiting.append((done, source, hop + 1))
    return last


def _times(graph: nx.Graph, way: list[str]) -> list[float]:
    return [graph.edges[link]["time"] for link in nx.utils.pairwise(way)]


def unit_s(size_bytes: int, mbit: float) -> float:
    """What a unit of time is if the fastest of the new node's links has `mbit`."""
    return size_bytes / UNITS * 8 / (GOODPUT * mbit * 1e6) / min(TIMES[link] for link in TIMES if NEW in link)


def case(size_bytes: int, mbit: float) -> Case:
    """The overlay with rates in place of times."""
    unit = unit_s(size_bytes, mbit)
    rates = {
        link_name(*link): LinkSpec(rate_mbit=size_bytes / UNITS * 8 / (GOODPUT * time * unit) / 1e6)
        for link, time in TIMES.items()
    }
    return Case("Fig. 1", Topology(rates, [*sorted({*overlay()} - {NEW}), NEW]), NEW)


@click.command("chaos-fig1")
@options.add(
    click.option("--move", is_flag=True, help="Really move the bytes, over namespaces (root)."),
    options.model(),
    options.MBIT,
    options.repeat(3, "Of what is moved."),
    options.quick("Move a hundredth of all bytes, once"),
)
def fig1_command(
    move: bool,
    model: str,
    mbit: float,
    repeat: int,
    quick: bool,
    json_file: Path | None,
    plot_file: Path | None,
) -> None:
    """Chaos, Fig. 1: ten units from one node, from many nodes, from neighbours."""
    found: dict[str, Any] = {
        "units": schemes(overlay()),
        "paper": PAPER,
        "open": "the overlay: this is one of ours",
    }
    head, columns = ["", "units of time", "the paper"], [found["units"], PAPER]
    if move:
        head.append("units of time as moved")
        found |= _moved(model, mbit, 1 if quick else repeat, quick)
        columns.append(found["moved_units"])
    table(head, [[name, *(column[name] for column in columns)] for name in PAPER])
    publish(found, json_file, plot_file, _draw)


def _moved(model: str, mbit: float, repeat: int, quick: bool) -> dict[str, Any]:
    need_root("chaos-fig1 --move")
    size = say_sizes([model], "sgd", quick)[model]
    unit = unit_s(size, mbit)
    systems = {name: FIG15[scheme] for name, scheme in MOVED.items()}
    took = measure(case(size, mbit), Work(size), systems, repeat)
    seconds = {name: statistics.median(each.delay_s for each in joins) for name, joins in took.items()}
    click.echo(f"A unit of time is {unit:.3f} s; a join takes some tenths of a second beside what is moved.")
    return {
        "moved_s": seconds,
        "unit_s": unit,
        "moved_units": {name: s / unit for name, s in seconds.items()},
    }


def _draw(figure: Any, found: dict[str, Any]) -> None:
    left, right = figure.subplots(1, 2)
    graph = overlay()
    places = nx.kamada_kawai_layout(graph, weight=None)
    colours = ["tab:orange" if node == NEW else "tab:blue" for node in graph]
    nx.draw_networkx(graph, places, ax=left, node_color=colours, font_color="white", font_size=8)
    nx.draw_networkx_edge_labels(graph, places, nx.get_edge_attributes(graph, "time"), ax=left)
    left.set_axis_off()
    series = {"chaosnet": [found["units"][name] for name in PAPER], "paper": [PAPER[name] for name in PAPER]}
    if "moved_units" in found:
        series["as moved"] = [found["moved_units"][name] for name in PAPER]
    bars(right, list(PAPER), series)
    right.set_ylabel("units of time")
    right.set_title("Chaos, Fig. 1")
    legend_below(figure, right)
