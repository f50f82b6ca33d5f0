"""`chaosnet.scheduler.elastic.traffic`: what of a step crosses links."""

import itertools

import pytest

from chaosnet.scheduler.elastic.keeping import Move
from chaosnet.scheduler.elastic.running import Facts, choose
from chaosnet.scheduler.elastic.traffic import NO_TRAFFIC, Traffic, order_by_links

MB = 1_000_000
LAYERS = 8


def mesh(names, mbit=1000, slow=(), slow_mbit=10, **more):
    """Links between all; those of `slow` in both directions."""
    pairs = list(itertools.permutations(names, 2))
    rates = {pair: slow_mbit if pair in slow or pair[::-1] in slow else mbit for pair in pairs}
    links = tuple(itertools.combinations(names, 2))
    return Traffic(**{"out_bytes": (MB,) * LAYERS, "rates_mbit": rates, "links": links} | more)


def facts(traffic, micro_batches=8, stages=2, **more):
    return Facts(((10_000, 20_000),) * LAYERS, micro_batches, stages, traffic=traffic, **more)


def hops(running):
    return [set(pair) for each in running.laid.pipelines for pair in itertools.pairwise(each.workers)]


def test_a_tensor_takes_its_bytes_at_the_rate_of_the_link_and_the_delay():
    traffic = mesh("ab", mbit=100, delays_us={("a", "b"): 500})
    assert traffic.transfer_us("a", "b", 1) == 500 + 8 * MB / 100
    assert traffic.transfer_us("a", "a", 1) == 0


def test_where_no_link_joins_two_a_tensor_goes_over_others():
    rates = {("a", "b"): 100, ("b", "c"): 200}
    traffic = Traffic(out_bytes=(MB,), rates_mbit=rates, links=(("a", "b"), ("b", "c")))
    assert traffic.transfer_us("a", "c", 1) == 8 * MB / 100 + 8 * MB / 200


def test_a_link_without_a_rate_is_as_links_usually_are():
    traffic = Traffic(out_bytes=(MB,), rates_mbit={("a", "b"): 400}, links=(("a", "b"), ("b", "c")))
    assert traffic.transfer_us("c", "b", 1) == 8 * MB / 400


def test_tensors_make_a_step_longer_and_computing_hides_what_it_can():
    alone = choose("ab", facts(NO_TRAFFIC)).predicted_us
    transfer_us = 8 * MB / 100
    found = choose("ab", facts(mesh("ab", mbit=100))).predicted_us
    assert alone + transfer_us <= found < alone + 16 * transfer_us


def two_trees(names, share=0.5):
    return tuple((tuple((each, root) for each in names if each != root), share) for root in sorted(names)[:2])


def test_sums_take_what_the_link_with_most_to_carry_takes():
    sums = (((0,), 10 * MB), ((1,), 30 * MB))
    one = Traffic(sums=sums, rates_mbit={("a", "b"): 100, ("b", "a"): 100}, trees=(((("a", "b"),), 1.0),))
    assert one.summed_us([0.0, 0.0]) == 8 * 40 * MB / 100
    half = Traffic(sums=sums, rates_mbit={("a", "b"): 100, ("b", "a"): 50}, trees=two_trees("ab"))
    assert half.summed_us([0.0, 0.0]) == 8 * 40 * MB / 50


def test_what_is_ready_first_has_gone_before_the_rest_is_ready():
    sums = (((0,), 10 * MB), ((1,), 30 * MB))
    traffic = Traffic(sums=sums, rates_mbit={("a", "b"): 100}, trees=two_trees("ab"))
    late_us = 5_000_000.0
    assert traffic.summed_us([late_us, 0.0]) == late_us + 8 * 10 * MB / 100
    assert traffic.summed_us([0.0, late_us]) == late_us + 8 * 30 * MB / 100


def test_a_sum_of_two_layers_waits_for_both():
    traffic = Traffic(sums=(((0, 1), MB),), rates_mbit={("a", "b"): 8}, trees=two_trees("ab"))
    assert traffic.summed_us([7.0, 9.0]) == 9 + MB


def test_results_go_only_where_they_are_kept():
    """From the root, which has one link to each of two others, only one of which keeps anything."""
    rates = {("a", "b"): 100, ("b", "a"): 100, ("c", "a"): 100, ("a", "c"): 10}
    traffic = Traffic(
        sums=(((0,), MB), ((1,), 0)), rates_mbit=rates, trees=(((("b", "a"), ("c", "a")), 1.0),)
    )
    assert (
        traffic.summed_us([0.0, 9e9]) == 8 * MB / 10
    )  # To c, over the slow link; of the second there is nothing.
    assert traffic.summed_us([0.0, 9e9], [{"a", "b"}, {"c"}]) == 8 * MB / 100


def test_parameters_that_one_sends_to_one_come_one_by_one():
    alone = (("a", 1),)
    moves = [Move(0, "b", False, alone), Move(1, "b", False, alone), Move(0, "c", False, alone)]
    traffic = mesh("abc", mbit=80, delays_us={("a", "b"): 7})
    came_us = traffic.came_us(moves, [MB, 2 * MB])
    # A link without a delay is as links usually are.
    assert came_us == {("b", 0): MB / 10 + 7, ("b", 1): 3 * MB / 10 + 7, ("c", 0): MB / 10 + 7}


def test_parameters_that_two_send_come_by_shares():
    traffic = mesh("abc", mbit=80, slow=[("b", "c")], slow_mbit=20)
    rates = [(name, traffic.rate_mbit(name, "c")) for name in "ab"]
    assert traffic.came_us([Move(0, "c", False, tuple(rates))], [MB]) == {("c", 0): 0.8 * MB / 10}
    assert NO_TRAFFIC.rate_mbit("a", "b") == 1


def test_the_last_message_goes_up_and_down_the_deepest_tree():
    rates = dict.fromkeys(itertools.permutations("abc", 2), 80)
    chain = ((("c", "b"), ("b", "a")), 1.0)
    traffic = Traffic(sums=(((0,), 10 * MB),), rates_mbit=rates, trees=(chain,), message_bytes=MB)
    message_us = 8 * MB / 80
    assert traffic.summed_us([0.0]) == 9 * message_us + 4 * message_us


def test_of_two_layouts_that_compute_alike_the_one_without_the_slow_link_runs():
    for slow in itertools.combinations("abcd", 2):
        running = choose("abcd", facts(mesh("abcd", slow=[slow])))
        assert set(slow) not in hops(running)
        assert len(running.laid.pipelines) == 2


def test_pipelines_that_run_are_left_when_their_link_becomes_slow():
    before = choose("abcd", facts(mesh("abcd")))
    slow = next(tuple(sorted(each)) for each in hops(before))
    after = choose("abcd", facts(mesh("abcd", slow=[slow])), before.laid)
    assert after.why == "layout" and set(slow) not in hops(after)
    assert after.predicted_us < 0.95 * dict(after.others)["stay"]


def test_a_little_slower_is_no_reason_to_change():
    before = choose("abcd", facts(mesh("abcd")))
    slow = next(tuple(sorted(each)) for each in hops(before))
    after = choose("abcd", facts(mesh("abcd", slow=[slow], slow_mbit=900)), before.laid)
    assert after.laid == before.laid


def test_members_keep_their_order_where_links_are_alike():
    assert order_by_links("dbca", [2, 2], mesh("abcd")) == tuple("dbca")
    assert order_by_links("dbca", [2, 2], NO_TRAFFIC) == tuple("dbca")


def test_who_is_far_from_all_is_left_over_if_somebody_is():
    far = [tuple(sorted(("b", each))) for each in "acd"]
    assert "b" not in order_by_links("abcd", [3], mesh("abcd", slow=far))[:3]


@pytest.mark.parametrize("lengths", [(2, 2, 2), (3, 3), (6,), (4, 2)])
def test_two_sites_with_a_slow_way_between_them_share_as_few_pipelines_as_can_be(lengths):
    slow = [(a, b) for a in "abc" for b in "xyz"]
    traffic = mesh("axbycz", slow=slow)
    order = order_by_links("axbycz", lengths, traffic)
    at, crossed = 0, 0
    for length in lengths:
        part = order[at : at + length]
        crossed += sum((a in "abc") != (b in "abc") for a, b in itertools.pairwise(part))
        at += length
    assert crossed <= 1
