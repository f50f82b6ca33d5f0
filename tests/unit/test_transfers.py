"""`chaosnet.scheduler.elastic.transfers`: who sends what, near the bound of any flow."""

import itertools
import math
import random
from collections import Counter

import numpy as np
import pytest
from scipy.optimize import linprog

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.cluster import Cluster, Worker, alike
from chaosnet.scheduler.elastic.transfers import SLACK, busiest_s, plan_transfers
from chaosnet.scheduler.shard_plan import Source, water_filling_bound

GB = 10**9


def optimum_s(held, wanted, state_bytes, cluster):
    """The module's linear program as it stands there, a variable for each source, worker and layer."""
    lacking = [(d, layer) for d, new in wanted.items() for layer in set(new) - set(held.get(d, ()))]
    offers = [(s, i) for i, (_, layer) in enumerate(lacking) for s in held if layer in held[s]]
    limits = {}
    for j, (s, i) in enumerate(offers):
        d = lacking[i][0]
        worker = cluster.workers
        limits.setdefault((cluster.rate(s, d), s, d), []).append(j)
        limits.setdefault((worker[s].nic_out_bps, s, None), []).append(j)
        limits.setdefault((worker[d].nic_in_bps, None, d), []).append(j)
    within = np.zeros((len(limits), len(offers) + 1))
    for row, ((limit_bps, *_), columns) in zip(within, limits.items(), strict=True):
        row[columns], row[-1] = 8 * GB / min(limit_bps, 1e15), -1
    needed = np.zeros((len(lacking), len(offers) + 1))
    for j, (_, i) in enumerate(offers):
        needed[i, j] = 1
    sizes = [(state_bytes[layer + 1] - state_bytes[layer]) / GB for _, layer in lacking]
    last = np.eye(len(offers) + 1)[-1]
    return linprog(last, within, np.zeros(len(limits)), needed, sizes).fun


def random_case(seed, most=9):
    """Everything held by someone; half of the cases with links and NICs that differ by up to 1,000 times."""
    rng = random.Random(seed)
    names = [f"w{i}" for i in range(rng.randint(3, most))]
    layers = rng.choice([6, 12])
    sizes = [rng.choice([0, 1000, GB, rng.randint(1, 10 * GB)]) for _ in range(layers)]

    def some():
        start = rng.randrange(layers)
        return range(start, min(layers, start + rng.randint(1, layers // 2)))

    held = {name: rng.choice([some(), range(0)]) for name in names}
    held |= {"w0": range(layers // 2), "w1": range(layers // 2, layers)}
    wanted = {name: some() for name in names}
    rates = [1e8, 1e9, 1e10, math.inf] if seed % 2 else [1e10]
    workers = {name: Worker(nic_out_bps=rng.choice(rates), nic_in_bps=rng.choice(rates)) for name in names}
    links = {pair: 10 ** rng.uniform(7.5, 10.5) for pair in itertools.permutations(names, 2)}
    cluster = Cluster(workers, 25e9, 0.0, links if seed % 2 else {})
    return held, wanted, [*itertools.accumulate(sizes, initial=0)], cluster


@pytest.mark.parametrize("seed", range(60))
def test_each_byte_that_is_needed_comes_once_from_who_has_it(seed):
    held, wanted, state_bytes, cluster = random_case(seed)
    plan = plan_transfers(held, wanted, state_bytes, cluster)
    arrived = {}
    for move in plan.moves:
        assert move.layer in held[move.source] and move.start < move.stop
        arrived.setdefault((move.destination, move.layer), []).append((move.start, move.stop))
    needed = {
        (d, layer): state_bytes[layer + 1] - state_bytes[layer]
        for d, new in wanted.items()
        for layer in set(new) - set(held[d])
    }
    assert arrived.keys() == {key for key, size in needed.items() if size}
    for key, pieces in arrived.items():
        assert [0, *(stop for _, stop in pieces)] == [*(start for start, _ in pieces), needed[key]]
    assert plan.bytes_total == sum(needed.values())


@pytest.mark.parametrize("seed", range(60))
def test_the_bound_is_the_optimum_of_the_linear_program_and_the_plan_is_near_it(seed):
    held, wanted, state_bytes, cluster = random_case(seed)
    plan = plan_transfers(held, wanted, state_bytes, cluster)
    assert plan.flow_bound_s == pytest.approx(optimum_s(held, wanted, state_bytes, cluster), rel=1e-3)
    assert plan.flow_bound_s <= plan.time_s <= 1.01 * plan.flow_bound_s


@pytest.mark.parametrize("seed", range(20))
def test_the_time_is_that_of_the_busiest_link_or_nic(seed):
    held, wanted, state_bytes, cluster = random_case(seed)
    plan = plan_transfers(held, wanted, state_bytes, cluster)
    sent = Counter()
    for move in plan.moves:
        sent[move.source, move.destination] += move.stop - move.start
    assert plan.time_s == pytest.approx(busiest_s(sent, cluster))


def test_for_one_joiner_the_bound_is_the_water_level_of_the_shard_plan():
    rates = {("a", "j"): 1e9, ("b", "j"): 3e9, ("c", "j"): 5e9}
    cluster = Cluster(dict.fromkeys("abcj", Worker()), 1e9, 0.25, rates)
    plan = plan_transfers(dict.fromkeys("abc", range(2)), {"j": range(2)}, [0, GB, 9 * GB], cluster)
    sources = {s: Source(0.25, 8 / rate) for (s, _), rate in rates.items()}
    assert plan.time_s == pytest.approx(water_filling_bound(9 * GB, sources))
    assert plan.flow_bound_s == pytest.approx(plan.time_s)


def test_two_that_need_the_same_take_it_from_different_sources():
    workers = dict.fromkeys("abcd", Worker(nic_out_bps=1e9, nic_in_bps=1e9))
    held = {"a": range(1), "b": range(1)}
    plan = plan_transfers(held, {"c": range(1), "d": range(1)}, [0, GB], Cluster(workers, 1e9, 0.0))
    assert plan.time_s == pytest.approx(8.0)


def test_with_no_limit_at_all_it_takes_the_latency():
    cluster = Cluster(dict.fromkeys("abc", Worker()), math.inf, 0.5)
    plan = plan_transfers({"a": range(1), "b": range(1)}, {"c": range(1)}, [0, GB], cluster)
    assert plan.time_s == pytest.approx(0.5)
    assert plan.bytes_total == sum(move.stop - move.start for move in plan.moves) == GB


@pytest.mark.parametrize("limits", [{"nic_out_bps": 0.0}, {"nic_in_bps": math.nan}])
def test_a_nic_that_lets_nothing_through_is_refused(limits):
    with pytest.raises(PlanInfeasible, match="worker: nic_out"):
        Worker(**limits)


def test_a_link_without_a_rate_is_not_used():
    rates = {("a", "c"): 0.0}
    cluster = Cluster(dict.fromkeys("abc", Worker()), 1e9, 0.0, rates)
    plan = plan_transfers({"a": range(1), "b": range(1)}, {"c": range(1)}, [0, GB], cluster)
    assert {move.source for move in plan.moves} == {"b"}
    with pytest.raises(PlanInfeasible, match="layer 0: none of a has a link to c"):
        plan_transfers({"a": range(1)}, {"c": range(1)}, [0, GB], cluster)


def test_nothing_moves_where_everybody_has_what_is_wanted():
    plan = plan_transfers({"a": range(3)}, {"a": range(1, 3)}, range(4), alike("a"))
    assert (plan.moves, plan.bytes_total, plan.time_s, plan.flow_bound_s) == ((), 0, 0.0, 0.0)


def test_a_layer_that_no_survivor_holds_is_named():
    with pytest.raises(PlanInfeasible, match="layer 2: no survivor holds it, but b needs it"):
        plan_transfers({"a": range(2)}, {"b": range(1, 3)}, range(4), alike("ab"))


def test_a_lost_layer_comes_from_elsewhere_and_others_from_survivors():
    elsewhere = {"checkpoint": range(3), "a": [2]}
    cluster = Cluster(dict.fromkeys("ab", Worker()), 8e9, 0.0, {("checkpoint", "b"): 8e9})
    plan = plan_transfers({"a": range(2)}, {"b": range(1, 3)}, [0, GB, 2 * GB, 4 * GB], cluster, elsewhere)
    sources = {layer: {move.source for move in plan.moves if move.layer == layer} for layer in (1, 2)}
    assert sources == {1: {"a"}, 2: {"a", "checkpoint"}}
    assert plan.time_s == pytest.approx(1.5, rel=2 * SLACK)


def test_what_a_worker_keeps_elsewhere_itself_does_not_move():
    plan = plan_transfers({"a": range(2)}, {"b": range(2, 3)}, range(4), alike("ab"), {"b": [2]})
    assert plan.moves == ()
