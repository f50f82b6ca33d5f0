"""The exact search against full tables and enumeration; splits of layers; how the search grows."""

import itertools
import math
import time

import numpy as np
import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic import pipeline_time, splits
from chaosnet.scheduler.elastic.layouts import Layout, _choose, _first, _most, best_layout
from chaosnet.scheduler.elastic.pipeline_time import one_f_one_b, peak_bytes
from chaosnet.scheduler.elastic.plan import of_pipelines
from chaosnet.scheduler.elastic.profile import Layer, Profile, uniform
from chaosnet.scheduler.elastic.splits import PipelineTimes


class TableOfTimes(PipelineTimes):
    """Any columns of times in place of a profile's."""

    def __init__(self, columns: dict[int, list[float]]) -> None:
        super().__init__(uniform(max(columns), 1.0, 1.0))
        self.columns = columns

    def column(self, stages: int, upto: int) -> np.ndarray:
        return np.array(self.columns.get(stages, [math.inf] * upto))

    def split(self, stages: int, micro_batches: int) -> tuple[int, ...]:
        return (1,) * stages


def random_capacities(rng: np.random.Generator) -> dict[int, int]:
    """Micro-batches in time by length: up and down, and some lengths cannot do any."""
    shortest = int(rng.integers(1, 4))
    lengths = range(shortest, shortest + int(rng.integers(1, 8)))
    kind = rng.integers(3)
    found = {}
    for p in lengths:
        if kind == 0:
            found[p] = int(rng.integers(0, 12))
        elif kind == 1:  # About what pipelines do: the more the longer, and a bit of noise.
            found[p] = max(0, 3 * p + int(rng.integers(-2, 3)))
        else:
            found[p] = max(0, int(rng.integers(0, 40)) if rng.random() < 0.6 else 0)
    return {p: k for p, k in found.items() if k} or {shortest: 1}


def full_table(capacities: dict[int, int], count: int, workers: int) -> np.ndarray:
    """f[c, n]: most micro-batches of c pipelines on at most n workers; negative where there are too few."""
    f = np.full((count + 1, workers + 1), -(10**9))
    f[0] = 0
    for c in range(1, count + 1):
        for p, k in capacities.items():
            if p <= workers:
                f[c, p:] = np.maximum(f[c, p:], f[c - 1, : workers + 1 - p] + k)
    return f


def test_the_most_micro_batches_are_those_of_the_full_table():
    rng = np.random.default_rng(1)
    fixed_some = 0
    for _ in range(1500):
        capacities = random_capacities(rng)
        count = int(rng.integers(1, 80))
        workers = int(rng.integers(count * min(capacities), count * (max(capacities) + 1) + 1))
        f = full_table(capacities, count, workers)
        for c in {count, max(1, count - 1), int(rng.integers(1, count + 1))}:
            n = int(rng.integers(0, workers + 1))
            expected = int(f[c, n])
            found = _most(capacities, c, n)
            assert found == (expected if expected >= 0 else None), (capacities, c, n)
            fixed_some += c > 4 * (max(capacities) - min(capacities)) + 1
            if found is not None:
                chosen = _choose(capacities, c, n)
                assert sum(chosen.values()) == c
                assert sum(p * x for p, x in chosen.items()) <= n
                assert sum(capacities[p] * x for p, x in chosen.items()) == found
    assert fixed_some > 500  # Cases where not all of it was the window.


def test_the_short_cuts_never_change_the_answer():
    rng = np.random.default_rng(2)
    for _ in range(3000):
        capacities = random_capacities(rng)
        count = int(rng.integers(1, 40))
        workers = int(rng.integers(count * min(capacities), count * (max(capacities) + 1) + 1))
        most = _most(capacities, count, workers)
        for micro_batches in (most - 1, most, most + 1):
            expected = count if most >= micro_batches else None
            assert _first(capacities, [count], workers, micro_batches) == expected, (
                capacities,
                count,
                workers,
            )


def fastest_by_enumeration(
    columns: dict[int, list[float]], workers: int, pipelines: list[int], micro_batches: int
) -> float:
    """Every set of lengths, every batch, idle workers: min of the slowest pipeline."""
    best = math.inf
    for count in pipelines:
        batches = [
            np.diff((0, *cuts, micro_batches))
            for cuts in itertools.combinations(range(1, micro_batches), count - 1)
        ]
        for lengths in itertools.combinations_with_replacement(sorted(columns), count):
            if sum(lengths) > workers:
                continue
            for batch in batches:
                slowest = max(columns[p][m - 1] for p, m in zip(lengths, batch, strict=True))
                best = min(best, slowest)
    return best


def test_the_layout_is_the_best_of_all_there_are():
    rng = np.random.default_rng(3)
    none = idle = 0
    for _ in range(600):
        micro_batches = int(rng.integers(1, 8))
        shortest = int(rng.integers(1, 4))
        columns = {}
        for p in range(shortest, shortest + int(rng.integers(1, 5))):
            column = np.cumsum(rng.integers(1, 9, micro_batches)).astype(float) + rng.integers(0, 9)
            column[int(rng.choice([0, 1, 3, 99, 99, 99])) :] = np.inf  # From here on memory does not suffice.
            columns[p] = column.tolist()
        pipelines = [int(count) for count in rng.permutation(4)[: rng.integers(1, 4)] + 1]
        workers = int(rng.integers(1, 18))
        expected = fastest_by_enumeration(columns, workers, pipelines, micro_batches)
        times = TableOfTimes(columns)
        if math.isinf(expected):
            none += 1
            with pytest.raises(PlanInfeasible):
                best_layout(times, workers, pipelines, list(columns), micro_batches)
            continue
        found = best_layout(times, workers, pipelines, list(columns), micro_batches)
        assert found.time_s == expected
        check_layout(found, times, workers, pipelines, micro_batches)
        idle += found.workers < workers
    assert none > 50
    assert idle > 50


def check_layout(
    found: Layout, times: PipelineTimes, workers: int, pipelines: list[int], micro_batches: int
) -> None:
    assert found.count in pipelines
    assert sum(group.count * group.micro_batches for group in found.groups) == micro_batches
    assert sum(group.count * len(group.sizes) for group in found.groups) == found.workers <= workers
    slowest = max(times.time_s(len(group.sizes), group.micro_batches) for group in found.groups)
    assert slowest == found.time_s


def test_a_layout_takes_as_long_as_it_says_and_makes_a_plan():
    profile = uniform(32, 1.0, 2.0, static_bytes=10.0, activation_bytes=1.0)
    found = best_layout(PipelineTimes(profile, memory_bytes=400.0), 61, range(5, 10), range(2, 17), 64)
    slowest = 0.0
    for group in found.groups:
        sizes = np.array(group.sizes, dtype=float)
        slowest = max(slowest, float(one_f_one_b(sizes, 2 * sizes, group.micro_batches)))
        assert peak_bytes(profile, group.sizes, 1, group.micro_batches).max() <= 400.0
    assert slowest == found.time_s
    names = [f"w{number}" for number in range(61)]
    pipelines, counts = found.pipelines(names)
    plan = of_pipelines(pipelines, counts, samples=2)
    assert len(plan.placement) == found.workers
    assert plan.samples == 128
    with pytest.raises(PlanInfeasible, match=f"3 names for {found.workers} places"):
        found.pipelines(names[:3])


def test_of_equally_fast_numbers_of_pipelines_the_first_asked_for_wins():
    times = TableOfTimes({1: [5.0] * 12, 2: [5.0] * 12})
    assert best_layout(times, 8, [3, 2, 4], [1, 2], 12).count == 3
    assert best_layout(times, 8, [4, 2, 3], [1, 2], 12).count == 4


def test_a_length_has_one_split_whatever_its_batches():
    found = best_layout(PipelineTimes(uniform(11, 1.0, 2.0)), 19, [4], range(2, 7), 29)
    splits = {group.sizes for group in found.groups}
    assert len({len(sizes) for sizes in splits}) == len(splits)


# --- why not ---


def test_a_missing_layout_is_explained():
    times = PipelineTimes(uniform(8, 1.0, 2.0, static_bytes=10.0, activation_bytes=1.0), memory_bytes=30.0)
    with pytest.raises(
        PlanInfeasible, match=r"workers: 9 for 3 pipelines of 4 stages, the shortest .* 3 too few"
    ):
        best_layout(times, 9, [3, 4], range(2, 6), 12)
    with pytest.raises(PlanInfeasible, match="micro-batches: 2 for 3 pipelines, 1 too few"):
        best_layout(times, 20, [3, 4], range(2, 6), 2)
    # Two stages of four layers, one micro-batch: 44 bytes each; three stages hold 3 layers at most: 33.
    with pytest.raises(PlanInfeasible, match=r"memory: 33 bytes at least .* 3 stages .* 3 over 30"):
        best_layout(times, 20, [3, 4], [2, 3], 12)
    with pytest.raises(PlanInfeasible, match="stages: 9 at least for 8 layers"):
        best_layout(times, 20, [1], [9, 10], 12)
    with pytest.raises(PlanInfeasible, match="pipelines: none"):
        best_layout(times, 20, [], [2], 12)


def test_memory_that_fits_some_micro_batches_and_not_all_is_explained():
    # A micro-batch in flight is 4 bytes a stage; the first of two stages may hold one and not two.
    times = PipelineTimes(uniform(2, 1.0, 2.0, static_bytes=1.0, activation_bytes=4.0), memory_bytes=6.0)
    assert best_layout(times, 6, [3], [2], 3).time_s == 6.0
    with pytest.raises(PlanInfeasible, match=r"memory: 3 micro-batches at most fit 6 workers .*expected 4"):
        best_layout(times, 6, [3], [2], 4)


# --- splits ---


def unequal(rng: np.random.Generator, layers: int) -> Profile:
    return Profile(
        "unequal",
        tuple(
            Layer({1: (float(t), 2.0 * float(t))}, 2.0, 2.0, 8.0, float(a), 1.0)
            for t, a in zip(rng.integers(1, 9, layers), rng.integers(1, 5, layers), strict=True)
        ),
    )


def test_the_table_goes_on_in_a_straight_line_where_the_times_do():
    times = PipelineTimes(uniform(11, 1.0, 2.0))
    column = times.column(4, 400)
    ways = np.array([way for way in itertools.product([2, 3], repeat=4) if sum(way) == 11], dtype=float)
    for micro_batches in (1, 3, 5, 9, 40, 41, 399, 400):
        assert column[micro_batches - 1] == one_f_one_b(ways, 2 * ways, micro_batches).min()
    again = PipelineTimes(uniform(11, 1.0, 2.0))
    for upto in (1, 2, 7, 30, 400):  # In pieces.
        again.column(4, upto)
    assert again.column(4, 400)[:400].tolist() == column[:400].tolist()


def test_times_never_fall_with_micro_batches():
    rng = np.random.default_rng(4)
    for _ in range(20):
        times = PipelineTimes(unequal(rng, 9), memory_bytes=float(rng.integers(60, 120)))
        for stages in range(1, 7):
            column = times.column(stages, 30)
            assert (column[1:] >= column[:-1]).all()


@pytest.mark.parametrize("max_splits", [20_000, 10])
def test_unequal_layers_get_the_best_of_few_splits_and_a_good_one_of_many(max_splits, monkeypatch):
    monkeypatch.setattr(splits, "MAX_SPLITS", max_splits)
    rng = np.random.default_rng(5)
    best = total = 0
    for _ in range(60):
        layers, stages = int(rng.integers(6, 13)), int(rng.integers(2, 6))
        profile = unequal(rng, layers)
        count = stages - 1
        sizes = np.array(
            [np.diff((0, *cuts, layers)) for cuts in itertools.combinations(range(1, layers), count)]
        )
        times = PipelineTimes(profile)
        every = times._timed(sizes)
        for micro_batches in (1, stages, 2 * stages, 20):
            expected = one_f_one_b(every.forward, every.backward, micro_batches).min()
            found = times.time_s(stages, micro_batches)
            assert expected <= found <= (1.0 if max_splits > 10 else 1.1) * expected
            best += found == expected
            total += 1
    print(f"\nunequal layers, at most {max_splits} splits: the best of all in {best} of {total} cases")
    assert best > 0.8 * total


@pytest.mark.parametrize("max_splits", [20_000, 10])
@pytest.mark.parametrize("memory", [math.inf, 90.0])
def test_leaving_out_splits_that_cannot_win_changes_neither_times_nor_splits(max_splits, memory, monkeypatch):
    """Of all that are tried, the first of those that take least; in a straight line, the least slope's."""
    monkeypatch.setattr(splits, "MAX_SPLITS", max_splits)
    rng = np.random.default_rng(6)
    for _ in range(25):
        layers, stages = int(rng.integers(4, 12)), int(rng.integers(1, 5))
        times = PipelineTimes(unequal(rng, layers), memory_bytes=memory)
        column = times.column(stages, 30)
        every = times._timed(times._sizes[stages])
        for m in range(1, 31):
            each = one_f_one_b(every.forward, every.backward, m)
            peaks = peak_bytes(times.profile, every.sizes, 1, m).max(axis=-1)
            each[peaks > memory] = math.inf
            assert column[m - 1] == each.min()
            if m <= stages and math.isfinite(each.min()):
                assert times.split(stages, m) == tuple(every.sizes[each.argmin()])


def test_most_splits_are_not_timed(monkeypatch):
    """24 unequal layers, up to 16 stages, up to 64 micro-batches: the first choice of a cluster of 16."""
    timed, whole = 0, 0
    plain = pipeline_time.Lines.at

    def at(self, micro_batches, splits=...):
        nonlocal timed
        found = plain(self, micro_batches, splits)
        timed += found.size
        return found

    monkeypatch.setattr(pipeline_time.Lines, "at", at)
    layers = tuple(
        Layer({1: (1000.0 + 37 * (n % 5), 2000.0 + 71 * (n % 7))}, 0.0, 0.0, 0.0, 0.0, 0.0) for n in range(24)
    )
    times = PipelineTimes(Profile("unequal", layers))
    for stages in range(1, 17):
        times.column(stages, 64)
        whole += 64 * len(times._sizes[stages])
    assert timed < 0.5 * whole  # Without the beams of the search, which are timed besides.


def test_combinations_are_those_of_itertools_in_their_order():
    for items, chosen in itertools.product(range(9), range(6)):
        if chosen <= items:
            every = list(itertools.combinations(range(items), chosen))
            for most in (1, 2, 7, 1000):
                assert [tuple(row) for row in splits._combinations(items, chosen, most).tolist()] == every[
                    :most
                ]


def test_each_split_is_kept_once_in_the_order_of_sizes():
    rng = np.random.default_rng(7)
    for top in (3, 300):
        rows = rng.integers(1, top, (200, 3))
        assert rows[splits._firsts(rows)].tolist() == np.unique(rows, axis=0).tolist()


def test_where_no_even_split_fits_an_uneven_one_is_found():
    profile = uniform(8, 1.0, 2.0, static_bytes=1.0, activation_bytes=10.0)
    # Even: 2 layers on the first of four stages keep 80 bytes of activations.
    sizes = PipelineTimes(profile, memory_bytes=65.0).split(4, 8)
    assert peak_bytes(profile, sizes, 1, 8).max() <= 65.0
    assert sum(sizes) == 8
    with pytest.raises(PlanInfeasible, match=r"memory: 44 bytes at least .* 4 stages and 8 micro-batches"):
        PipelineTimes(profile, memory_bytes=40.0).split(4, 8)  # (1, 1, 2, 4) needs 44.


# --- growth ---


def search_seconds(workers: int, layers: int = 32, repeats: int = 5) -> tuple[float, float]:
    """(cold, warm): pipelines of 2 to 16 stages around 8, 8 micro-batches each, one to five workers lost."""
    times = PipelineTimes(uniform(layers, 1.0, 2.0))
    dp = workers // 8
    taken = []
    for lost in range(1, repeats + 2):
        start = time.perf_counter()
        best_layout(times, workers - lost, range(dp - 2, dp + 3), range(2, 17), 8 * dp)
        taken.append(time.perf_counter() - start)
    return taken[0], min(taken[1:])


def test_the_search_grows_no_faster_than_n_log_n():
    search_seconds(256)
    warm = {workers: min(search_seconds(workers)[1] for _ in range(3)) for workers in (1024, 4096)}
    bound = 4096 * math.log(4096) / (1024 * math.log(1024))
    assert warm[4096] < bound * warm[1024]
