"""`chaosnet.trials.soak_faults`: whatever is chosen, the cluster must be able to survive it."""

import random
from dataclasses import replace

import networkx as nx
import pytest

from chaosnet.trials import soak_picture
from chaosnet.trials.soak_faults import MIN_RUNNING, Fault, Kind, Situation, choose

NAMES = tuple(f"n{index}" for index in range(8))


def situation(rng: random.Random) -> Situation:
    """Any cluster that the soak may meet: links die, processes are about to join."""
    members = rng.sample(NAMES, rng.randint(3, 8))
    graph = nx.Graph()
    graph.add_nodes_from(members)
    for index, node in enumerate(members[1:], 1):
        graph.add_edges_from((node, other) for other in rng.sample(members[:index], min(index, 2)))
    overlay = frozenset((min(edge), max(edge)) for edge in graph.edges)
    joiners = [node for node in NAMES if node not in members and rng.random() < 0.5]
    cuts = frozenset(edge for edge in sorted(overlay) if rng.random() < 0.1)
    return Situation(
        names=NAMES,
        running=frozenset([*members, *joiners]),
        members={node: rng.random() for node in members},
        overlay=overlay,
        cuts=cuts,
        scheduler=rng.choice([*members, ""]),
        have_rates=True,
    )


def lost(fault: Fault) -> set[str]:
    return {fault.node} if fault.kind not in (Kind.CUT, Kind.SLOW, Kind.PAUSE, Kind.JOIN) else set()


def test_no_fault_takes_the_quorum_or_cuts_the_cluster_in_two():
    rng, chosen = random.Random(0), set()
    for _ in range(3000):
        now = situation(rng)
        fault = choose(rng, now)
        if fault is None:
            continue
        chosen.add(fault.kind)
        left = set(now.members) - lost(fault)
        assert 2 * len(left) > len(now.members)
        graph = nx.Graph(now.overlay - now.cuts).subgraph(left).copy()
        graph.add_nodes_from(left)
        whole = nx.is_connected(nx.Graph(now.live))
        if fault.kind is Kind.CUT:
            graph.remove_edge(fault.node, fault.other)
        assert fault.kind in (Kind.PAUSE, Kind.JOIN, Kind.SLOW) or nx.is_connected(graph)
        assert whole or fault.kind is not Kind.CUT
    assert chosen == set(Kind)


def test_one_seed_gives_one_choice_whatever_order_sets_have():
    now = situation(random.Random(5))
    turned = replace(
        now,
        running=frozenset(sorted(now.running, reverse=True)),
        members=dict(reversed(now.members.items())),
        overlay=frozenset(sorted(now.overlay, reverse=True)),
    )
    for seed in range(50):
        assert choose(random.Random(seed), now) == choose(random.Random(seed), turned)


RING = frozenset({("n0", "n1"), ("n1", "n2"), ("n2", "n3"), ("n0", "n3")})


def ring(**changed) -> Situation:
    four = {"names": NAMES, "running": frozenset(NAMES[:4]), "members": dict.fromkeys(NAMES[:4], 0.0)}
    return Situation(**{**four, "overlay": RING, "scheduler": "n0", **changed})


def all_of(now: Situation, kind: Kind) -> set[str]:
    chosen = (choose(random.Random(seed), now, kind) for seed in range(100))
    return {fault.node for fault in chosen if fault}


def test_no_joiner_is_killed_before_it_is_started():
    now = ring(running=frozenset(NAMES[:6]), starting=frozenset(NAMES[4:5]))
    assert all_of(now, Kind.KILL_JOINER) == {NAMES[5]}


def test_nobody_leaves_who_is_needed_for_the_least_number_of_processes():
    assert len(ring().running) == MIN_RUNNING
    assert not all_of(ring(), Kind.LEAVE)
    assert all_of(ring(running=frozenset(NAMES[:5])), Kind.LEAVE) == set(NAMES[:4])


def test_beside_a_cut_link_only_its_ends_may_die():
    assert all_of(ring(), Kind.FREEZE) == set(NAMES[:4])
    assert all_of(ring(cuts=frozenset({("n0", "n1")})), Kind.FREEZE) == {"n0", "n1"}
    assert not all_of(ring(cuts=frozenset({("n0", "n1")})), Kind.CUT)


def test_kill_9_of_the_scheduler_is_a_kind_of_its_own():
    assert all_of(ring(), Kind.KILL_SCHEDULER) == {"n0"}
    assert all_of(ring(), Kind.KILL) == {"n1", "n2", "n3"}
    assert not all_of(ring(scheduler=""), Kind.KILL_SCHEDULER)


@pytest.mark.parametrize(("running", "more"), [(4, Kind.JOIN), (8, Kind.LEAVE)])
def test_the_number_of_processes_is_drawn_back_to_the_usual_one(running, more):
    names = NAMES[:running]
    links = frozenset((a, b) for a in names for b in names if a < b)
    now = ring(running=frozenset(names), members=dict.fromkeys(names, 0.0), overlay=links)
    kinds = [choose(random.Random(seed), now).kind for seed in range(300)]
    other = {Kind.JOIN: Kind.LEAVE, Kind.LEAVE: Kind.JOIN}[more]
    assert kinds.count(more) > 3 * kinds.count(other)


def test_only_links_that_have_a_rate_become_slow_and_none_twice_at_a_time():
    assert not all_of(ring(), Kind.SLOW)
    assert all_of(ring(have_rates=True), Kind.SLOW) == {"n0", "n1", "n2"}
    assert all_of(ring(have_rates=True, slow=RING - {("n1", "n2")}), Kind.SLOW) == {"n1"}


def test_each_kind_has_a_mark_in_the_picture():
    """Of three nothing was drawn."""
    assert {*soak_picture.MARK_BY_KIND} == {*soak_picture.COLOR_BY_KIND} == {*Kind}
