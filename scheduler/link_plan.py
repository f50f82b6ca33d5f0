"""Which links the overlay is to have: a joiner's, and those in place of lost ones. Pure functions."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence

import networkx as nx

from ..protocols.errors import ConfigError, PlanInfeasible
from ..protocols.messages import link


def repair_links(
    nodes: Iterable[str],
    links: Iterable[tuple[str, str]],
    min_degree: int = 2,
    impossible: Container[tuple[str, str]] = (),
) -> list[tuple[str, str]]:
    """Links to add so that the overlay is connected and every node has min(min_degree, n - 1) of them.

    Without the `impossible` ones, (name, later name), and so perhaps with less than that.

    Greedy: first the components are joined, each through its node of lowest degree, then the node of lowest
    degree gets a link to the node of lowest degree that it has none to; ties by name.
    Returns: (name, later name) pairs, in the order in which they were chosen.
    Raises: PlanInfeasible if a link names a node that is not in `nodes`.
    """
    overlay = nx.Graph()
    overlay.add_nodes_from(sorted(nodes))
    for u, v in sorted(links):
        if u == v or u not in overlay or v not in overlay:
            raise PlanInfeasible(f"link {u!r} - {v!r}: expected two of {list(overlay)!r}")
        overlay.add_edge(u, v)
    added = []
    while new := _joining_link(overlay, impossible) or _degree_link(overlay, min_degree, impossible):
        overlay.add_edge(*new)
        added.append(new)
    return added


def choose_neighbors(degree_by_member: Sequence[tuple[str, int]], k: int) -> list[str]:
    """The `k` members of lowest degree, for a joiner to link to; all of them if there are fewer.

    Args:
        degree_by_member: (member, number of links), most senior first, which also decides ties.
    Raises: ConfigError unless k >= 1.
    """
    if k < 1:
        raise ConfigError(f"k: {k} (expected >= 1 neighbour)")
    return [member for member, _ in sorted(degree_by_member, key=lambda pair: pair[1])[:k]]


def _joining_link(overlay: nx.Graph, impossible: Container[tuple[str, str]]) -> tuple[str, str] | None:
    """The link that joins two components, between nodes of lowest degree; None if there is one component."""
    part = {node: number for number, nodes in enumerate(nx.connected_components(overlay)) for node in nodes}
    lowest = sorted(overlay, key=lambda node: (overlay.degree(node), node))
    for node in lowest if len(set(part.values())) > 1 else ():
        for other in lowest:
            if part[other] != part[node] and link(node, other) not in impossible:
                return link(node, other)
    return None


def _degree_link(
    overlay: nx.Graph, min_degree: int, impossible: Container[tuple[str, str]]
) -> tuple[str, str] | None:
    """A link for the node of lowest degree, if that is too low, to the one of lowest degree that it can reach."""
    for degree, node in sorted((overlay.degree(node), node) for node in overlay):
        if degree >= min(min_degree, len(overlay) - 1):
            return None
        others = sorted((overlay.degree(other), other) for other in nx.non_neighbors(overlay, node))
        for _, other in others:
            if link(node, other) not in impossible:
                return link(node, other)
    return None
