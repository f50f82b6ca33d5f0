"""Lives over far links: a message takes up to 0.1 to 0.4 s, and a round trip twice as long."""

import pytest

from chaosnet.simulator import run_many
from chaosnet.simulator.cluster import SimCluster
from chaosnet.simulator.hunt import KNOWN_FAR
from chaosnet.simulator.random_run import run


@pytest.mark.parametrize("seed", KNOWN_FAR)
def test_seeds_that_catch_a_broken_rule_keep_all_of_them(seed):
    run(seed, far=True)


@pytest.mark.slow
def test_random_lives_keep_all_rules():
    summary = run_many(range(9000, 9100), far=True)
    assert not summary.violations, summary.describe()
    assert summary.total("crashes") > 50 and summary.total("joins") > 50


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_scheduler_is_elected_where_most_voters_are_many_links_away(seed, monkeypatch):
    """As after a rolling restart: each is linked to those that started beside it. No round was long enough."""
    cluster, names = SimCluster(seed), [f"n{number:02d}" for number in range(12)]
    monkeypatch.setattr(cluster, "_delay", lambda: 0.05)
    cluster.found(names, {tuple(sorted((names[i - 1], names[i]))) for i in range(12)})
    cluster.run(10.0)
    cluster.crash("n00")
    cluster.run(20.0)
    for name in names[1:]:
        assert cluster.nodes[name].agent.sync.view.scheduler in names[1:]
