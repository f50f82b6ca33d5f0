"""Chameleon, Sec. IV-B: the Restorer's two examples."""

import pytest

from chaosnet.scheduler.elastic.cluster import alike
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, of_pipelines
from chaosnet.scheduler.elastic.profile import uniform
from chaosnet.scheduler.elastic.roles import costs, staff
from chaosnet.scheduler.elastic.sync_rounds import buckets, rounds
from chaosnet.scheduler.elastic.transfers import plan_transfers

LAYER = range(10)
"""State of layers [0, l) in layers, as the figures count."""


def test_fig_3_costs_of_layers_1_2_3_to_1_2_and_to_3_4():
    """ "(1,2,3) to (1,2) ... the cost is 0 ... (3,4) ... layer 4 must be transferred ... a cost of 1"."""
    assert costs([range(3)], [range(2), range(2, 4)], LAYER).tolist() == [[0, 1]]


@pytest.mark.parametrize("lost", range(9))
def test_fig_3_dp_3_pp_3_loses_a_worker_and_becomes_dp_2_pp_4(lost):
    """ "9 layers ... DP = 3 and PP = 3 ... DP = 2 and PP = 4, with ... (2,2,2,3)"."""
    before = [Pipeline(tuple(f"w{3 * i + s}" for s in range(3)), cuts_of((3, 3, 3))) for i in range(3)]
    held = dict(of_pipelines(before, [1, 1, 1], 1).placement)
    del held[f"w{lost}"]
    after = of_pipelines(staff([cuts_of((2, 2, 2, 3))] * 2, held, LAYER, before), [2, 1], 1)
    assert after.placement.keys() == held.keys()
    moved = sum(len(set(now) - set(held[worker])) for worker, now in after.placement.items())
    # Who takes (3,4) needs layer 3 or 4, so twice one layer. Unless one of layers 7 to 9 is lost, three hold
    # them where two are needed, and the third brings nothing for a role of two layers.
    assert moved == {0: 3, 1: 3, 2: 2}[lost % 3]


def test_fig_3_what_moves_comes_from_survivors_only():
    held = {"a": range(3), "b": range(3, 6), "c": range(6, 9), "d": range(3)}
    profile = uniform(9, 1.0, 2.0, static_bytes=600.0)
    pipeline = staff([cuts_of((2, 2, 2, 3))], held, profile.state_bytes)[0]
    wanted = {hop.worker: range(hop.start, hop.stop) for hop in pipeline.stages}
    plan = plan_transfers(held, wanted, profile.state_bytes, alike("abcd"))
    assert {(move.source, move.destination, move.layer) for move in plan.moves} == {("b", "d", 3)}
    assert plan.bytes_total == 500


def test_fig_4_four_sums_become_six():
    """ "the number of communications increases (e.g., from 4 AllReduce operations to 6)"."""
    four, three = cuts_of((3, 3, 3, 3)), cuts_of((4, 4, 4))
    old = of_pipelines([Pipeline(tuple("abcd"), four), Pipeline(tuple("efgh"), four)], [1, 1], 1)
    new = of_pipelines([Pipeline(tuple("abcd"), four), Pipeline(tuple("efg"), three)], [1, 1], 1)
    assert len(buckets(old.placement, 12)) == 4
    assert len(buckets(new.placement, 12)) == 6
    assert [len(each) for each in old.sync] == [4]


def test_fig_4_the_sum_of_layer_4_waits_for_that_of_layers_1_to_3():
    """ "in the new comm2, layer 4 is distributed on the first node, so comm2 must wait for comm1"."""
    four, three = cuts_of((3, 3, 3, 3)), cuts_of((4, 4, 4))
    plan = of_pipelines([Pipeline(tuple("abcd"), four), Pipeline(tuple("efg"), three)], [1, 1], 1)
    comm1, comm2 = buckets(plan.placement, 12)[:2]
    assert (comm1.start, comm1.stop, comm2.start, comm2.stop) == (0, 3, 3, 4)
    assert set(comm1.holders) & set(comm2.holders) == {"e"}
    number = {bucket: i for i, each in enumerate(rounds(plan.placement, 12)) for bucket in each}
    assert number[comm1] < number[comm2]
    assert len(plan.sync) == 2
