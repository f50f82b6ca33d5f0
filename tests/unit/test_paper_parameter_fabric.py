"""ElasWave, Sec. 5 (snapshots and live remap), 6.2 (layers that move) and 6.3 (layouts of ZeRO)."""

import pytest

from chaosnet.scheduler.elastic.cluster import Cluster, Worker
from chaosnet.scheduler.elastic.migration import of, transition
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, of_pipelines
from chaosnet.scheduler.elastic.transfers import busiest_s
from chaosnet.scheduler.elastic.zero import (
    Piece,
    contiguous,
    interleaved,
    keepers,
    moved_layer,
    remap,
    sent_bytes,
)


def stages(ranks, layers=6):
    """Two stages of equal layers, whose bytes can be divided by all that divides them here."""
    size = 2 * ranks * (ranks + 1) * (layers + 1) * (layers - 1)
    sizes = dict.fromkeys(range(layers), size), dict.fromkeys(range(layers, 2 * layers), size)
    names = [f"a{j}" for j in range(ranks)], [f"b{j}" for j in range(ranks)]
    return size, sizes, names


def split(sent):
    """Bytes across stages, and within either."""
    across = sum(size for (source, to), size in sent.items() if source[0] != to[0])
    within = [
        sum(size for (source, to), size in sent.items() if source[0] == to[0] == stage) for stage in "ab"
    ]
    return across, within


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sec_6_3_interleaved_is_d_disjoint_sends_of_o(ranks):
    """ "Interleaved performs exactly D 1:1 sends summing to |O_i| bytes"."""
    size, sizes, names = stages(ranks)
    sent = sent_bytes(moved_layer(interleaved, sizes, names, layer=5))
    assert sent == {(f"a{j}", f"b{j}"): size // ranks for j in range(ranks)}


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_sec_6_3_contiguous_is_d_plus_1_over_2_times_o_per_stage(ranks):
    """ "cross-stage transfer of |O_i| plus intra-stage resharding ... (D-1)/2 |O_i|".

    Each stage does; both together send D |O_i|.
    """
    size, sizes, names = stages(ranks)
    across, within = split(sent_bytes(moved_layer(contiguous, sizes, names, layer=5)))
    assert across == size
    assert within == [size * (ranks - 1) / 2] * 2
    assert across + within[0] == (ranks + 1) / 2 * size


def test_sec_6_3_cut_points_shift_by_o_over_d():
    """ "the new cut points shift by about |O_i|/D across the group"."""
    size, sizes, names = stages(3)
    sent = sent_bytes(moved_layer(contiguous, sizes, names, layer=5))
    assert (sent["a0", "a1"], sent["a1", "a2"]) == (size // 3, 2 * size // 3)


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_sec_6_3_interleaved_takes_less_time_over_equal_nics(ranks):
    """ "parallel, rank-to-rank sends ... fewer network hotspots"."""
    _, sizes, names = stages(ranks)
    nic = Worker(nic_out_bps=1e9, nic_in_bps=1e9)
    cluster = Cluster(dict.fromkeys([*names[0], *names[1]], nic), 1e9, 0.0)
    times = [
        busiest_s(sent_bytes(moved_layer(layout, sizes, names, layer=5)), cluster)
        for layout in (interleaved, contiguous)
    ]
    assert times[1] > 1.8 * times[0]


def test_sec_5_1_worker_i_keeps_the_part_of_worker_i_plus_1_mod_n():
    assert keepers(["0", "1", "2", "3"]) == {"1": "0", "2": "1", "3": "2", "0": "3"}


def test_fig_7_worker_2_of_4_fails_and_its_part_comes_from_the_host_of_worker_1():
    """ "DP 0 pulls necessary shards from DP 1's device ..., while DP 3 retrieves ... from DP 1's host".

    "diagonal entries like (Src0, Dst0) represent data that remains local".
    """
    before = contiguous({0: 12}, "0123")
    flows = remap(before, "0123", {"2"}, contiguous({0: 12}, "013"), own_host_first=False)
    assert set(flows) == {
        ("0", "0", Piece(0, 0, 3), "device"),
        ("1", "0", Piece(0, 3, 4), "device"),
        ("1", "1", Piece(0, 4, 6), "device"),
        ("1", "1", Piece(0, 6, 8), "host"),
        ("1", "3", Piece(0, 8, 9), "host"),
        ("3", "3", Piece(0, 9, 12), "device"),
    }


def test_fig_9_the_shadow_serves_the_early_micro_batches_and_pays_their_gradient_back():
    """ "the source runs a shadow instance of the migrating layer for the early micro-batches"."""
    found = of(arrival_s=0.25, mini_step_s=0.1, micro_batches=8, gradient_bytes=4e8, payback_s=0.2)
    assert (found.served, found.payback_bytes, found.added_s) == (3, 4e8, 0.0)
    pipelines = [Pipeline(("s", "t"), cuts_of((2, 2)))]
    plan = transition(of_pipelines(pipelines, [8], 1), range(1, 2), "s", "t", found.served)
    runs_layer_1 = [
        next(hop.worker for hop in each.route if hop.start <= 1 < hop.stop) for each in plan.micro_batches
    ]
    assert runs_layer_1 == ["s"] * 3 + ["t"] * 5
    assert [(each.start, each.stop, each.holders) for each in plan.sync[0]] == [(1, 2, ("s", "t"))]
