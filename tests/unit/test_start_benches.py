"""What the benches of joins and starts reckon: bounds, limits, medians, when steps are as they could be."""

from pathlib import Path

import networkx as nx
import pytest

from chaosnet.benchmarks.join import middle
from chaosnet.benchmarks.overlay import measured as rates
from chaosnet.benchmarks.replan import Draw, draws, one_slow_link
from chaosnet.benchmarks.start import (
    CASES,
    LIMIT_S,
    OF_FILE,
    Found,
    StartCase,
    _knowing,
    _rates_bps,
    bound_s,
    cases,
)
from chaosnet.netem.topology import GOODPUT, LinkSpec, Topology, mesh
from chaosnet.scheduler.sync_plan import POLICIES

OVERLAY = Path(__file__).parents[2] / "examples" / "overlay.yaml"


def mbit(links):
    return Topology({pair: LinkSpec(rate_mbit=rate) for pair, rate in links.items()})


@pytest.mark.parametrize(
    ("topology", "least_mbit"),
    [
        (mbit({("a", "b"): 800.0, ("b", "c"): 100.0}), 100.0),
        (mbit({("a", "b"): 800.0, ("a", "c"): 100.0, ("b", "c"): 300.0}), 400.0),  # c has it from both.
        (mesh(4, LinkSpec(rate_mbit=100.0)), 300.0),
        (Topology({("a", "b"): LinkSpec(rate_mbit=50.0, rate_back_mbit=900.0)}), 50.0),
    ],
)
def test_no_state_gets_to_all_faster_than_the_least_flow_to_any(topology, least_mbit):
    assert bound_s(StartCase("", 10.0, 0.1, topology)) == pytest.approx(8 * 3 * 10 / (GOODPUT * least_mbit))


def test_only_those_that_are_started_count():
    four = mesh(4, LinkSpec(rate_mbit=100.0))
    assert bound_s(StartCase("", 10.0, 0.1, four, nodes=2)) == pytest.approx(
        3 * bound_s(StartCase("", 10.0, 0.1, four))
    )


def test_all_are_to_be_in_within_three_bounds_and_steps_and_half_a_minute():
    assert Found(1.0, bound_s=2.0, step_s=0.5, joins_s={}).limit_s == 7.5
    assert Found(1.0, bound_s=20.0, step_s=0.5, joins_s={}).limit_s == LIMIT_S
    assert Found(1.0, bound_s=0.0, step_s=0.5, joins_s={}).limit_s == LIMIT_S


def test_every_case_has_an_overlay_or_is_on_loopback():
    known = cases(OVERLAY)
    assert tuple(known) == CASES
    assert [name for name, case in known.items() if case.topology is None] == ["loopback"]
    assert [*cases(None)] == [name for name in CASES if name not in OF_FILE]  # The others need no file.
    assert all(bound_s(case) > 0 for name, case in known.items() if name != "loopback")


def test_trees_can_be_planned_for_the_rates_that_are_set_whatever_is_measured():
    links = {("a", "b"): 10.0, ("b", "c"): 900.0, ("a", "c"): 900.0}
    case = StartCase("", 10.0, 0.1, mbit(links), knows=True)
    seen = nx.Graph()
    seen.add_weighted_edges_from([("a", "b", 1e9), ("b", "c", 1e9), ("a", "c", 1e6)], weight="rate_bps")
    seen.graph["result"] = 10_000_000, 40
    true = rates(case.topology)
    true.graph["result"] = seen.graph["result"]
    trees = _knowing(_rates_bps(case))(seen)
    assert [tree.parent for tree in trees] == [tree.parent for tree in POLICIES["packed"](true)]
    assert [tree.parent for tree in trees] != [tree.parent for tree in POLICIES["packed"](seen)]
    assert _knowing(_rates_bps(case._replace(knows=False))) is None


def test_a_draw_is_late_until_three_steps_in_a_row_are_as_they_could_be():
    assert Draw([5.0, 1.1, 3.0, 1.1, 1.2, 1.0, 9.0], known_s=1.0).late_steps == 3
    assert Draw([5.0, 5.0], known_s=1.0).late_steps == 2


def test_draws_have_the_same_links_and_other_rates():
    first, second = draws(6, 2, seed=3, scale=0.5)
    assert first.links.keys() == second.links.keys()
    assert first.links != second.links
    assert all(50 <= spec.rate_mbit <= 500 for each in (first, second) for spec in each.links.values())


def test_one_link_of_a_mesh_becomes_ten_times_as_slow():
    before, after = one_slow_link(4, 200.0)
    changed = {pair: spec for pair, spec in after.links.items() if spec != before.links[pair]}
    assert len(before.links) == 6 and before.links.keys() == after.links.keys()
    assert [spec.rate_mbit for spec in changed.values()] == [20.0]


def test_of_several_joins_the_one_in_the_middle_is_told_and_not_the_best():
    assert middle([{"seconds": took_s} for took_s in (3.0, 1.0, 2.0)]) == {"seconds": 2.0}
    assert middle([{"seconds": took_s} for took_s in (1.0, 4.0)]) == {"seconds": 4.0}
