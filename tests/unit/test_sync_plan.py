"""`chaosnet.scheduler.sync_plan`: trees for the gradient; `link_plan`: links for the overlay."""

import itertools
import math
import random

import networkx as nx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from chaosnet.errors import ConfigError, PlanInfeasible
from chaosnet.scheduler.link_plan import choose_neighbors, repair_links
from chaosnet.scheduler.sync_plan import (
    POLICIES,
    attach_leaf,
    best_single_tree,
    custom,
    fapt,
    ring,
)
from chaosnet.scheduler.trees import (
    DEFAULT_RATE_BPS,
    SpanningTree,
    packing_bound,
    throughput_bps,
    validate,
)

EDGES_OF_FIVE = list(itertools.combinations("abcde", 2))
MBIT = 1e6


def overlay(*links: tuple[str, str, float]) -> nx.Graph:
    """Links with their rates in Mbit/s."""
    graph = nx.Graph()
    for u, v, rate_mbit in links:
        graph.add_edge(u, v, rate_bps=rate_mbit * MBIT)
    return graph


@st.composite
def overlays(draw: st.DrawFn, min_nodes: int = 1, max_nodes: int = 6) -> nx.Graph:
    """Connected, any density, some links measured and some not."""
    nodes = [f"n{index}" for index in range(draw(st.integers(min_nodes, max_nodes)))]
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    for index, node in enumerate(nodes[1:], start=1):
        for neighbour in draw(st.sets(st.sampled_from(nodes[:index]), min_size=1)):
            graph.add_edge(neighbour, node)
            if draw(st.booleans()):
                rate_mbit = draw(st.sampled_from([10, 50, 100, 200, 900]))
                graph.edges[neighbour, node].update(rate_bps=rate_mbit * MBIT)
            if draw(st.booleans()):
                graph.edges[neighbour, node].update(rtt_s=draw(st.sampled_from([0.0, 0.001, 0.05])))
    return graph


def rate_bps(graph: nx.Graph, u: str, v: str) -> float:
    return graph.edges[u, v].get("rate_bps", DEFAULT_RATE_BPS)


def bottleneck_bps(tree: SpanningTree, graph: nx.Graph) -> float:
    return min((rate_bps(graph, child, parent) for child, parent in tree.parent.items()), default=math.inf)


def depth(tree: SpanningTree) -> int:
    """Links from the root to the deepest leaf."""

    def height(node: str) -> int:
        return 0 if node == tree.root else 1 + height(tree.parent[node])

    return max(height(node) for node in [tree.root, *tree.parent])


def rooted_spanning_trees(graph: nx.Graph) -> list[SpanningTree]:
    """All of them, by brute force."""
    trees = []
    for links in itertools.combinations(graph.edges, len(graph) - 1):
        candidate = nx.Graph(links)
        if len(candidate) == len(graph) and nx.is_connected(candidate):
            for root in graph:
                parents = {child: parent for parent, child in nx.bfs_edges(candidate, root)}
                trees.append(SpanningTree(root, parents, 1.0))
    return trees


# --- Every policy ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["single", "fapt", "packed"])
@given(graph=overlays())
def test_every_connected_overlay_has_a_valid_plan_below_the_packing_bound(name, graph):
    trees = POLICIES[name](graph)
    validate(trees, graph)
    assert throughput_bps(trees, graph) <= packing_bound(graph) * (1 + 1e-9)


@pytest.mark.parametrize("name", sorted(POLICIES))
@given(graph=overlays(), seed=st.integers(0, 1000))
def test_a_plan_does_not_depend_on_the_order_in_which_links_were_added(name, graph, seed):
    nodes, links = list(graph), list(graph.edges(data=True))
    rng = random.Random(seed)
    rng.shuffle(nodes)
    rng.shuffle(links)
    shuffled = nx.Graph()
    shuffled.add_nodes_from(nodes)
    shuffled.add_edges_from((v, u, link) for u, v, link in links)
    try:
        expected = POLICIES[name](graph)
    except PlanInfeasible as error:
        assert name == "ring"
        with pytest.raises(PlanInfeasible) as also:
            POLICIES[name](shuffled)
        assert str(also.value) == str(error)
    else:
        assert POLICIES[name](shuffled) == expected


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_node_alone_needs_no_links(name):
    graph = nx.Graph()
    graph.add_node("a")
    assert POLICIES[name](graph) == [SpanningTree("a", {}, 1.0)]


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_two_nodes_use_their_one_link(name):
    graph = overlay(("a", "b", 100))
    validate(POLICIES[name](graph), graph)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_an_overlay_in_two_parts_has_no_plan_and_the_error_names_the_far_part(name):
    with pytest.raises(PlanInfeasible, match=r"no path from 'a' to \['c', 'd'\]"):
        POLICIES[name](overlay(("a", "b", 1), ("c", "d", 1)))
    with pytest.raises(PlanInfeasible, match="no nodes"):
        POLICIES[name](nx.Graph())


@pytest.mark.parametrize(
    "measured", [{"rate_bps": -1.0}, {"rate_bps": 0.0}, {"rate_bps": math.nan}, {"rtt_s": -1.0}]
)
@pytest.mark.parametrize("name", sorted(POLICIES))
def test_a_measurement_out_of_range_is_named_with_its_link(name, measured):
    graph = overlay(("a", "b", 1))
    graph.edges["a", "b"].update(measured)
    with pytest.raises(PlanInfeasible, match=f"link 'a' - 'b': {next(iter(measured))}"):
        POLICIES[name](graph)


def test_a_link_not_measured_yet_counts_with_the_default_rate():
    graph = overlay(("a", "b", 2 * DEFAULT_RATE_BPS / MBIT), ("b", "c", 0.5 * DEFAULT_RATE_BPS / MBIT))
    graph.add_edge("a", "c")
    graph.add_edge("a", "d", rate_bps=None)
    assert best_single_tree(graph) == [SpanningTree("a", {"b": "a", "c": "a", "d": "a"}, 1.0)]
    assert throughput_bps(best_single_tree(graph), graph) == DEFAULT_RATE_BPS


# --- One tree ----------------------------------------------------------------------------------------


@given(graph=overlays(max_nodes=5))
def test_the_single_tree_has_the_best_bottleneck_and_of_those_the_least_depth(graph):
    for *_, link in graph.edges(data=True):
        link.pop("rtt_s", None)  # So that the depth of a tree is its number of hops.
    (tree,) = best_single_tree(graph)
    everything = rooted_spanning_trees(graph) or [tree]
    best_bps = max(bottleneck_bps(other, graph) for other in everything)
    assert bottleneck_bps(tree, graph) == best_bps
    assert depth(tree) == min(
        depth(other) for other in everything if bottleneck_bps(other, graph) == best_bps
    )


def test_a_path_is_rooted_at_its_centre():
    graph = overlay(("a", "b", 1), ("b", "c", 1), ("c", "d", 1), ("d", "e", 1))
    assert best_single_tree(graph)[0].root == "c"


def test_of_trees_as_fast_the_single_tree_takes_the_near_links():
    graph = overlay(("a", "b", 5), ("b", "c", 5), ("a", "c", 5))
    graph.edges["a", "b"].update(rtt_s=0.001)
    graph.edges["b", "c"].update(rtt_s=0.001)
    graph.edges["a", "c"].update(rtt_s=0.100)
    assert best_single_tree(graph) == [SpanningTree("b", {"a": "b", "c": "b"}, 1.0)]


# --- Ring --------------------------------------------------------------------------------------------


def test_a_ring_has_one_path_ending_at_each_node():
    graph = overlay(("a", "b", 1), ("b", "c", 1), ("c", "d", 1), ("d", "a", 1))
    trees = ring(graph)
    validate(trees, graph)
    assert sorted(tree.root for tree in trees) == ["a", "b", "c", "d"]
    assert all(tree.share == 0.25 and depth(tree) == 3 for tree in trees)
    assert throughput_bps(trees, graph) == pytest.approx(4 / 3 * MBIT)  # Each link carries 3/4.


@given(graph=overlays(min_nodes=3))
def test_a_ring_is_found_if_there_is_one_and_its_slowest_link_is_the_fastest_possible(graph):
    first, *rest = sorted(graph)
    cycles = [
        list(zip([first, *order], [*order, first], strict=True))
        for order in itertools.permutations(rest)
        if all(graph.has_edge(u, v) for u, v in zip([first, *order], [*order, first], strict=True))
    ]
    if not cycles:
        with pytest.raises(PlanInfeasible, match="no Hamiltonian cycle"):
            ring(graph)
        return
    best_bps = max(min(rate_bps(graph, u, v) for u, v in cycle) for cycle in cycles)
    trees = ring(graph)
    validate(trees, graph)
    assert min(bottleneck_bps(tree, graph) for tree in trees) == best_bps


# --- NetStorm's FAPT ---------------------------------------------------------------------------------


def test_fapt_takes_the_fastest_path_even_if_it_has_more_hops():
    graph = overlay(("a", "b", 10), ("b", "c", 10), ("a", "c", 4))
    assert fapt(graph, roots=1) == [SpanningTree("b", {"a": "b", "c": "b"}, 1.0)]
    by_root = {tree.root: tree.parent for tree in fapt(graph, roots=3)}
    assert by_root["a"] == {"b": "a", "c": "b"}  # 1/10 + 1/10 < 1/4.


@given(graph=overlays(), roots=st.integers(1, 7))
def test_fapt_roots_are_those_whose_slowest_leaf_path_is_fastest(graph, roots):
    for u, v in graph.edges:
        graph.edges[u, v]["length"] = 1 / rate_bps(graph, u, v)
    slowest = {
        root: max(nx.single_source_dijkstra_path_length(graph, root, weight="length").values())
        for root in graph
    }
    trees = fapt(graph, roots)
    assert [tree.root for tree in trees] == sorted(graph, key=lambda node: (slowest[node], node))[:roots]
    for tree in trees:
        paths = nx.Graph(
            [
                (child, parent, {"length": graph.edges[child, parent]["length"]})
                for child, parent in tree.parent.items()
            ]
        )
        paths.add_node(tree.root)
        along_tree = nx.single_source_dijkstra_path_length(paths, tree.root, weight="length")
        shortest = nx.single_source_dijkstra_path_length(graph, tree.root, weight="length")
        assert along_tree == pytest.approx(shortest)
        assert tree.share == 1 / min(roots, len(graph))


def test_fapt_without_roots_is_a_wrong_setting():
    with pytest.raises(ConfigError, match="roots: 0"):
        fapt(overlay(("a", "b", 1)), roots=0)


# --- The packing bound -------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [2, 3, 5, 8])
def test_the_packing_bound_of_known_graphs(nodes):
    """Nash-Williams and Tutte, links of rate 1: complete n/2, cycle n/(n - 1), tree 1."""
    for graph, expected in (
        (nx.complete_graph(nodes), nodes / 2),
        (nx.cycle_graph(nodes), nodes / (nodes - 1) if nodes > 2 else 1),
        (nx.path_graph(nodes), 1),
    ):
        nx.set_edge_attributes(graph, 1.0, "rate_bps")
        assert packing_bound(nx.relabel_nodes(graph, str)) == pytest.approx(expected)


def test_a_slow_bridge_bounds_all_packings():
    graph = overlay(("a", "b", 100), ("b", "c", 100), ("a", "c", 100), ("c", "d", 7))
    assert packing_bound(graph) == 7 * MBIT


def test_the_packing_bound_is_for_small_graphs():
    with pytest.raises(ConfigError, match="9 nodes"):
        packing_bound(nx.relabel_nodes(nx.complete_graph(9), str))


# --- Validation and policies of one's own ------------------------------------------------------------

SQUARE = overlay(("a", "b", 1), ("b", "c", 1), ("c", "d", 1), ("d", "a", 1))
GOOD = SpanningTree("a", {"b": "a", "c": "b", "d": "a"}, 1.0)


def test_a_policy_of_the_users_own_is_a_callable_from_overlay_to_trees():
    policy = custom(lambda graph: (GOOD._replace(share=0.5) for _ in range(2)))
    assert policy(SQUARE) == [GOOD._replace(share=0.5)] * 2


@pytest.mark.parametrize(
    ("trees", "text"),
    [
        ([], "shares of 0 trees sum to 0"),
        ([GOOD, GOOD], "shares of 2 trees sum to 2"),
        ([GOOD._replace(share=0.9)], "shares of 1 trees sum to 0.9"),
        ([GOOD._replace(share=2.0), GOOD._replace(share=-1.0)], "tree 1, root 'a': share -1.0"),
        ([GOOD._replace(share=math.nan)], "share nan"),
        ([GOOD._replace(parent={"b": "a", "d": "a"})], "tree 0, root 'a': misses ['c'], has []"),
        ([GOOD._replace(parent={**GOOD.parent, "e": "a"})], "misses [], has ['e']"),
        ([GOOD._replace(parent={**GOOD.parent, "a": "d"})], "the root has a parent, 'd'"),
        ([GOOD._replace(parent={**GOOD.parent, "c": "a"})], "no link 'c' - 'a' in the overlay"),
        ([GOOD._replace(parent={**GOOD.parent, "b": "c"})], "tree 0, root 'a': cycle through 'b'"),
        ([GOOD._replace(parent={**GOOD.parent, "b": "z"})], "no link 'b' - 'z'"),
    ],
)
def test_a_plan_that_cannot_work_is_refused_by_name(trees, text):
    with pytest.raises(PlanInfeasible) as error:
        custom(lambda graph: trees)(SQUARE)
    assert text in str(error.value)


# --- Observers ---------------------------------------------------------------------------------------


def test_an_observer_hangs_under_its_neighbours_in_turn():
    trees = fapt(SQUARE, roots=4)
    grown = attach_leaf(trees, "x", ["c", "a"])
    assert [tree.parent["x"] for tree in grown] == ["a", "c", "a", "c"]
    with_observer = SQUARE.copy()
    with_observer.add_edges_from([("x", "a"), ("x", "c")])
    validate(grown, with_observer)
    assert all("x" not in tree.parent for tree in trees)


def test_the_neighbours_of_an_observer_share_the_gradient_not_the_number_of_trees():
    trees = [GOOD._replace(share=share) for share in (0.6, 0.2, 0.2)]
    assert [tree.parent["x"] for tree in attach_leaf(trees, "x", ["a", "b"])] == ["a", "b", "b"]


def test_an_observer_needs_a_neighbour_in_the_tree_and_joins_it_once():
    assert attach_leaf([GOOD], "x", ["observer", "d"])[0].parent["x"] == "d"
    with pytest.raises(PlanInfeasible, match="no neighbour of 'x' in it"):
        attach_leaf([GOOD], "x", ["observer"])
    with pytest.raises(PlanInfeasible, match="'c' is in it already"):
        attach_leaf([GOOD], "c", ["a"])


# --- The overlay's links -----------------------------------------------------------------------------


def is_repaired(nodes: str, links: list[tuple[str, str]], min_degree: int = 2) -> bool:
    graph = nx.Graph()
    graph.add_nodes_from(nodes)
    graph.add_edges_from(links)
    wanted = min(min_degree, len(nodes) - 1)
    return nx.is_connected(graph) and all(degree >= wanted for _, degree in graph.degree)


def fewest_additions(nodes: str, links: list[tuple[str, str]]) -> int:
    possible = [pair for pair in itertools.combinations(nodes, 2) if pair not in links]
    for count in range(len(possible) + 1):
        if any(is_repaired(nodes, links + list(extra)) for extra in itertools.combinations(possible, count)):
            return count
    raise AssertionError("the complete graph is always repaired")


@given(st.sets(st.sampled_from(EDGES_OF_FIVE)))
def test_repair_adds_as_few_links_as_brute_force(links):
    """Found equal on all 1,024 overlays of five nodes; here on a sample of them."""
    existing = sorted(links)
    added = repair_links("abcde", existing)
    assert is_repaired("abcde", existing + added)
    assert len(added) == fewest_additions("abcde", existing)


@given(st.integers(1, 12), st.sets(st.tuples(st.integers(0, 11), st.integers(0, 11))), st.integers(0, 4))
def test_repair_connects_any_overlay_and_gives_each_node_its_degree(count, pairs, min_degree):
    nodes = "abcdefghijkl"[:count]
    links = [(nodes[u], nodes[v]) for u, v in sorted(pairs) if u != v and max(u, v) < count]
    added = repair_links(nodes, links, min_degree)
    assert is_repaired(nodes, links + added, min_degree)
    assert not {frozenset(link) for link in added} & {frozenset(link) for link in links}
    assert repair_links(nodes, links + added, min_degree) == []


def test_repair_joins_parts_first_then_the_lowest_degrees_then_goes_by_name():
    links = [("a", "b"), ("b", "c"), ("a", "c"), ("d", "e")]
    assert repair_links("edcba", links) == [("a", "d"), ("b", "e")]
    assert repair_links("ab", []) == [("a", "b")]
    assert repair_links("a", []) == repair_links("", []) == []


def test_repair_takes_the_next_best_link_where_one_is_impossible():
    chain = [("a", "b"), ("b", "c"), ("c", "d")]
    assert repair_links("abcd", chain) == [("a", "d")]
    assert repair_links("abcd", chain, impossible={("a", "d")}) == [("a", "c"), ("b", "d")]
    assert repair_links("abcd", chain, impossible={("a", "d"), ("a", "c")}) == [("b", "d")]
    assert repair_links("abc", [("a", "b")], 1, impossible={("a", "c")}) == [("b", "c")]
    assert repair_links("ab", [], impossible={("a", "b")}) == []


@pytest.mark.parametrize("link", [("a", "gone"), ("a", "a")])
def test_repair_refuses_a_link_that_cannot_be(link):
    with pytest.raises(PlanInfeasible, match=f"link 'a' - '{link[1]}'"):
        repair_links("ab", [link])


def test_a_joiner_links_to_the_members_with_fewest_links_the_most_senior_first():
    members = [("old", 3), ("mid", 2), ("new", 2), ("last", 1)]
    assert choose_neighbors(members, 2) == ["last", "mid"]
    assert choose_neighbors(members, 9) == ["last", "mid", "new", "old"]
    with pytest.raises(ConfigError, match="k: 0"):
        choose_neighbors(members, 0)
