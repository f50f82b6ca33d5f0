"""A picture of an overlay."""

from __future__ import annotations

from pathlib import Path

import networkx as nx

from .topology import Topology

MAX_WIDTH = 6.0  # Of the fastest link, in points.


def draw(topology: Topology, picture: Path) -> None:
    """Write a picture: nodes in a circle, edges as wide as their rates, labelled with rate and delay."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 7), layout="constrained")
    axes = figure.subplots()
    places = nx.circular_layout(topology.graph)
    fastest = max(spec.rate_mbit for spec in topology.links.values())
    widths = [max(0.6, MAX_WIDTH * spec.rate_mbit / fastest) for spec in topology.links.values()]
    labels = {
        link: f"{spec.rate_mbit:g}" + (f", {spec.delay_ms:g} ms" if spec.delay_ms else "")
        for link, spec in topology.links.items()
    }
    nx.draw_networkx_edges(
        topology.graph, places, list(topology.links), width=widths, edge_color="#8aa4c8", ax=axes
    )
    nx.draw_networkx_nodes(
        topology.graph, places, node_size=900, node_color="white", edgecolors="#2b4a73", ax=axes
    )
    nx.draw_networkx_labels(topology.graph, places, font_size=9, ax=axes)
    nx.draw_networkx_edge_labels(topology.graph, places, labels, font_size=8, label_pos=0.38, ax=axes)
    axes.set_title(f"{len(topology.nodes)} nodes, {len(topology.links)} links, Mbit/s", fontsize=11)
    axes.set_axis_off()
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120)
