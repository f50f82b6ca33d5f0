"""Clusters of some size: what an event costs, in messages and bytes, and how that grows with the nodes."""

import pytest

from chaosnet.simulator.scale import KINDS, ScaleRun

STEP_S = 0.5
SMALL, LARGE = 30, 60


def measured(nodes, kinds=KINDS, churn_per_s=0.0, seconds=0.0):
    return ScaleRun(nodes, churn_per_s, seconds, STEP_S, seed=1).run(lambda text: None, kinds)


@pytest.fixture(scope="module")
def rows_by_size():
    return {nodes: {row.kind: row for row in measured(nodes).rows} for nodes in (SMALL, LARGE)}


@pytest.mark.parametrize("kind", KINDS)
def test_with_twice_the_nodes_an_event_takes_twice_the_messages_and_no_more_than_twice_the_bytes_a_node(
    kind, rows_by_size
):
    """A flood is a message a link, and a view names every node. Half as much again is left to chance."""
    small, large = rows_by_size[SMALL][kind], rows_by_size[LARGE][kind]
    # Who stands for scheduler is answered by each on a way that grows, slowly, with the nodes.
    assert large.messages_per_event < 1.5 * 2 * small.messages_per_event
    assert large.bytes_per_node_and_event < 1.5 * 2 * small.bytes_per_node_and_event


@pytest.mark.parametrize("kind", KINDS)
def test_every_event_is_soon_in_force_everywhere(kind, rows_by_size):
    for rows in rows_by_size.values():
        assert rows[kind].unfinished == 0
        assert rows[kind].converged_s < 10 * STEP_S


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
