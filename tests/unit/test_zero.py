"""`chaosnet.scheduler.elastic.zero`: layouts of the optimizer's state and what moves between them."""

import random

import pytest

from chaosnet.errors import PlanInfeasible
from chaosnet.scheduler.elastic.plan import Pipeline, cuts_of, of_pipelines
from chaosnet.scheduler.elastic.zero import (
    Piece,
    contiguous,
    interleaved,
    keepers,
    of_holders,
    overlap,
    remap,
    sent_bytes,
    unrecoverable,
)

LAYOUTS = (interleaved, contiguous)


def by_byte(parts):
    """{(layer, byte): owners}"""
    owners = {}
    for name, pieces in parts.items():
        for layer, start, stop in pieces:
            for byte in range(start, stop):
                owners.setdefault((layer, byte), []).append(name)
    return owners


def random_sizes(rng):
    return {layer: rng.randint(0, 40) for layer in range(rng.randint(1, 5))}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("seed", range(10))
def test_a_layout_gives_each_byte_to_one_rank_and_every_rank_about_as_much(layout, seed):
    rng = random.Random(seed)
    sizes, ranks = random_sizes(rng), [f"r{i}" for i in range(rng.randint(1, 6))]
    parts = layout(sizes, ranks)
    assert sorted(by_byte(parts)) == [(layer, byte) for layer in sizes for byte in range(sizes[layer])]
    assert all(len(names) == 1 for names in by_byte(parts).values())
    owned = [sum(stop - start for _, start, stop in parts[rank]) for rank in ranks]
    assert max(owned) - min(owned) <= (len(sizes) if layout is interleaved else 1)


@pytest.mark.parametrize("seed", range(40))
def test_a_remap_gives_each_target_byte_once_from_who_has_it(seed):
    rng = random.Random(seed)
    sizes, ring = random_sizes(rng), [f"r{i}" for i in range(rng.randint(2, 7))]
    parts = rng.choice(LAYOUTS)(sizes, ring)
    lost = set(rng.sample(ring, rng.randint(0, len(ring) - 1)))
    targets = rng.choice(LAYOUTS)(sizes, [*(r for r in ring if r not in lost), "joiner"])
    own_host_first = rng.random() < 0.5
    if any(parts[name] for name in unrecoverable(ring, lost)):
        with pytest.raises(PlanInfeasible, match="both copies are lost of the parts of"):
            remap(parts, ring, lost, targets, own_host_first)
        return
    flows = remap(parts, ring, lost, targets, own_host_first)
    owner, keeper = by_byte(parts), keepers(ring)
    arrived = {}
    for source, destination, (layer, start, stop), where in flows:
        assert source not in lost
        for byte in range(start, stop):
            (had,) = owner[layer, byte]
            assert source == (had if where == "device" else keeper[had])
            assert where == "device" or had in lost or (own_host_first and source == destination)
            assert source == destination or destination != had, "what a rank has on its device, stays"
            arrived.setdefault((layer, byte), []).append(destination)
    assert arrived == by_byte(targets)


def test_a_part_survives_if_its_worker_or_its_keeper_does():
    ring = ["a", "b", "c", "d"]
    assert keepers(ring) == {"b": "a", "c": "b", "d": "c", "a": "d"}
    assert unrecoverable(ring, {"c"}) == ()
    assert unrecoverable(ring, {"a", "c"}) == ()
    assert unrecoverable(ring, {"b", "c"}) == ("c",)
    assert unrecoverable(ring, {"a", "d"}) == ("a",)
    assert unrecoverable(ring, set(ring)) == ("a", "b", "c", "d")
    assert unrecoverable(["a"], {"a"}) == ("a",)


def test_the_lost_part_and_its_keeper_are_named():
    parts = interleaved({0: 8}, "abcd")
    with pytest.raises(PlanInfeasible, match=r"parts of c \(kept by b\)$"):
        remap(parts, "abcd", {"b", "c"}, interleaved({0: 8}, "ad"))


def test_bytes_that_nobody_has_are_named():
    with pytest.raises(PlanInfeasible, match=r"layer 3: bytes \[4, 8\) are nowhere \(needed by b\)"):
        overlap({"a": [Piece(3, 0, 4)]}, {"b": [Piece(3, 0, 8)]})


def test_a_copy_on_the_own_host_saves_the_link():
    parts = interleaved({0: 12}, "abc")
    targets = {"a": [Piece(0, 0, 8)], "c": [Piece(0, 8, 12)]}
    assert sent_bytes(remap(parts, "abc", (), targets)) == {}
    assert sent_bytes(remap(parts, "abc", (), targets, own_host_first=False)) == {("b", "a"): 4}


def test_a_plan_owns_parts_by_its_holders():
    pipelines = [Pipeline(("a", "b"), cuts_of((1, 2))), Pipeline(("c", "d"), cuts_of((2, 1)))]
    plan = of_pipelines(pipelines, [1, 1], 1)
    parts = of_holders(dict.fromkeys(range(3), 10), dict(enumerate(plan.holders)))
    assert parts["b"] == [Piece(1, 0, 5), Piece(2, 0, 5)]
    assert parts["c"] == [Piece(0, 5, 10), Piece(1, 5, 10)]


def test_a_layer_that_nobody_is_to_own_is_refused():
    with pytest.raises(PlanInfeasible, match="nobody to own it"):
        interleaved({0: 8}, [])
