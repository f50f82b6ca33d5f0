"""Clusters of some size: what an event costs, in messages and bytes, and how that grows with the nodes."""

import statistics

import pytest

from chaosnet.simulator.scale import KINDS, ScaleRun

STEP_S = 0.5
SMALL, LARGE = 30, 60


SEEDS = (1, 2, 3, 4, 5)


def measured(nodes, kinds=KINDS, churn_per_s=0.0, seconds=0.0, seed=1):
    return ScaleRun(nodes, churn_per_s, seconds, STEP_S, seed).run(lambda text: None, kinds)


@pytest.fixture(scope="module")
def rows_by_size():
    """Of each size and kind, one row a seed: an event in whose way a flush comes costs half as much again."""
    runs = {nodes: [measured(nodes, seed=seed).rows for seed in SEEDS] for nodes in (SMALL, LARGE)}
    return {nodes: {rows[0].kind: rows for rows in zip(*runs, strict=True)} for nodes, runs in runs.items()}


def median(rows, what):
    return statistics.median(getattr(row, what) for row in rows)


@pytest.mark.parametrize("kind", KINDS)
def test_with_twice_the_nodes_an_event_takes_twice_the_messages_and_no_more_than_twice_the_bytes_a_node(
    kind, rows_by_size
):
    """A flood is a message a link, and a view names every node. Half as much again is left to chance."""
    small, large = rows_by_size[SMALL][kind], rows_by_size[LARGE][kind]
    # Who stands for scheduler is answered by each on a way that grows, slowly, with the nodes.
    for cost in ("messages_per_event", "bytes_per_node_and_event"):
        assert median(large, cost) < 1.5 * 2 * median(small, cost)


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_soon_in_force_everywhere(kind, rows_by_size):
    for rows in rows_by_size.values():
        assert all(row.unfinished == 0 for row in rows[kind])
        assert all(row.converged_s < 10 * STEP_S for row in rows[kind])


def test_a_report_costs_a_node_no_flood():
    """The way to the scheduler grows with the logarithm of the nodes; a flood would take 3 n messages."""
    small, large = (measured(nodes, kinds=()).report_bytes_per_node_and_s for nodes in (SMALL, 4 * SMALL))
    assert large < 2 * small


def test_many_events_at_once_leave_nobody_behind():
    found = measured(SMALL, kinds=(), churn_per_s=2.0, seconds=10.0)
    (mixed,) = found.rows
    assert mixed.events > 10
    assert mixed.unfinished <= 3  # Those of the last seconds.


def test_one_seed_gives_one_run():
    one, other = (measured(SMALL, ("crash",)) for _ in range(2))
    assert one.bytes_by_type == other.bytes_by_type
    assert one.rows[0].converged_s == other.rows[0].converged_s
