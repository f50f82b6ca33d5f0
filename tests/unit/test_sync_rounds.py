"""`chaosnet.scheduler.elastic.sync_rounds`: as few rounds of gradient sums as can be."""

import itertools
import random

import networkx as nx
import pytest

from chaosnet.scheduler.elastic.plan import Pipeline, of_pipelines
from chaosnet.scheduler.elastic.sync_rounds import buckets, rounds


def random_placement(rng, layers, pipelines, idle=0.0):
    """Pipelines with cuts anywhere; some workers may be missing."""
    placement = {}
    for i in range(pipelines):
        cuts = [0, *sorted(rng.sample(range(1, layers), rng.randint(1, min(layers - 1, 5)))), layers]
        for s, (start, stop) in enumerate(itertools.pairwise(cuts)):
            if rng.random() >= idle:
                placement[f"w{i}.{s}"] = range(start, stop)
    return placement


def conflicts(placement, layers):
    """Buckets to be summed, with an edge where two have a worker in common."""
    graph = nx.Graph()
    graph.add_nodes_from(each for each in buckets(placement, layers) if len(each.holders) > 1)
    graph.add_edges_from(
        (a, b) for a, b in itertools.combinations(list(graph), 2) if not set(a.holders).isdisjoint(b.holders)
    )
    return graph


def can_be_coloured(graph, colours):
    nodes = sorted(graph)

    def fits(done):
        if len(done) == len(nodes):
            return True
        node = nodes[len(done)]
        taken = {done[other] for other in graph[node] if other in done}
        new = max(done.values(), default=-1) + 1  # Which of the unused ones makes no difference.
        return any(
            fits({**done, node: colour}) for colour in range(min(new + 1, colours)) if colour not in taken
        )

    return fits({})


@pytest.mark.parametrize("seed", range(40))
def test_rounds_are_as_many_as_the_largest_clique(seed):
    rng = random.Random(seed)
    placement = random_placement(rng, 24, rng.randint(2, 6), idle=rng.choice([0, 0.2]))
    cliques = nx.find_cliques(conflicts(placement, 24))
    assert len(rounds(placement, 24)) == max((len(each) for each in cliques), default=0)


@pytest.mark.parametrize("seed", range(40))
def test_no_colouring_has_fewer_rounds(seed):
    rng = random.Random(seed)
    placement = random_placement(rng, 7, 3, idle=rng.choice([0, 0.2]))
    least = len(rounds(placement, 7))
    graph = conflicts(placement, 7)
    assert can_be_coloured(graph, least)
    assert not graph or not can_be_coloured(graph, least - 1)


@pytest.mark.parametrize("seed", range(20))
def test_every_layer_of_several_holders_is_summed_once_and_nobody_is_asked_twice_at_a_time(seed):
    rng = random.Random(seed)
    placement = random_placement(rng, 24, 4, idle=0.3)
    found = rounds(placement, 24)
    holders = [{w for w, held in placement.items() if layer in held} for layer in range(24)]
    summed = sorted(layer for each in found for bucket in each for layer in range(bucket.start, bucket.stop))
    assert summed == [layer for layer in range(24) if len(holders[layer]) > 1]
    for each in found:
        asked = [worker for bucket in each for worker in bucket.holders]
        assert len(asked) == len(set(asked))
        for bucket in each:
            assert all(holders[layer] == set(bucket.holders) for layer in range(bucket.start, bucket.stop))


def test_equal_pipelines_need_one_round():
    pipelines = [Pipeline((f"{i}a", f"{i}b"), (0, 2, 4)) for i in range(3)]
    assert len(of_pipelines(pipelines, [1, 1, 1], 1).sync) == 1


def test_a_layer_of_one_holder_is_not_summed():
    assert rounds({"a": range(2), "b": range(1, 3)}, 3) == (((1, 2, ("a", "b")),),)
