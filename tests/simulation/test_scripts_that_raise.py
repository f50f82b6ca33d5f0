"""A script that ends with an error says goodbye: whoever is left goes on, whatever was under way."""

import random

import pytest
from scripted import Scripted

from chaosnet.node.agent.core import Phase
from chaosnet.protocols.events import Crashed

SEEDS = 25
PAUSE_S = 2.0  # A link that is just being measured holds up a step, too.


def raise_in_one(seed, count):
    """In a cluster of `count`, one raises at any moment, perhaps while another joins. Returns: also who is left."""
    rng = random.Random(seed)
    names = [f"n{n}" for n in range(1, count + 1)]
    cluster = Scripted(seed).grow(*names)
    victim = rng.choice(names)
    if rng.random() < 0.5:
        cluster.add("late", seeds=[rng.choice(names)], degree=count)
    cluster.settle(rng.uniform(0.0, 0.8))
    at_s, left = cluster.now_s, [name for name in names if name != victim]
    was_member = all(victim in cluster.members(name) for name in left)
    cluster.tell(victim, Crashed("ValueError: bad record"))
    cluster.settle(PAUSE_S)
    for name in left:
        node = cluster.nodes[name]
        if cluster.agent(name).phase is Phase.MEMBER:
            assert node.last_progress_s > at_s, f"seed {seed}: {name} stands still\n{cluster.story()}"
    cluster.settle(8.0)
    return cluster, victim, left, was_member


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_others_go_on_at_once(seed, count):
    cluster, victim, left, was_member = raise_in_one(seed, count)
    for name in left:
        assert cluster.agent(name).phase is Phase.MEMBER
        assert victim not in cluster.members(name)
        assert set(left) <= set(cluster.members(name)) <= {*left, "late"}
    told = [notice for notice in cluster.agent(left[0]).monitor.events if notice.node == victim]
    assert not was_member or ("left", "its script ended with ValueError: bad record") in [
        (n.kind, n.detail) for n in told
    ]
