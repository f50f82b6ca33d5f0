"""Nodes that the cluster went on without, for real: they are told, and come back by themselves."""

import signal
import time

import pytest
from cluster import cluster_of

pytestmark = pytest.mark.realtime

SLEEP_S = 8.0


def rejoined(node):
    """How often its state was loaded after the first time."""
    return len(node.told("loaded")) - (0 if node.name == "a" else 1)


@pytest.mark.slow
def test_a_node_that_wakes_after_a_long_sleep_rejoins_by_itself(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        a, _, sleeper = cluster.nodes
        at_s = sleeper.signal(signal.SIGSTOP)
        cluster.without(sleeper.name, at_s)
        time.sleep(max(0.0, at_s + SLEEP_S - time.monotonic()))
        before = sleeper.step
        sleeper.signal(signal.SIGCONT)
        cluster.until(lambda: rejoined(sleeper) == 1, "the sleeper has rejoined")
        cluster.until(lambda: sleeper.name in a.told("step")[-1]["by"], "it takes part again")
        a.advance(20)
        log = sleeper.log.read_text()
        assert "is out of the cluster: the cluster went on without it; it rejoins through" in log
        assert f"{sleeper.name} is in again at step" in log
        assert sleeper.step > before + 20
        cluster.steps()  # Equal states, to the bit, at every step that both have done.
        cluster.check_samples()


def test_the_scheduler_that_wakes_after_a_long_sleep_rejoins_by_itself(tmp_path):
    with cluster_of(3, tmp_path) as cluster:
        sleeper, b, _ = cluster.nodes
        at_s = sleeper.signal(signal.SIGSTOP)
        cluster.without(sleeper.name, at_s)
        time.sleep(1.0)
        sleeper.signal(signal.SIGCONT)
        cluster.until(lambda: rejoined(sleeper) == 1, "the sleeper has rejoined")
        cluster.until(lambda: sleeper.name in b.told("step")[-1]["by"], "it takes part again")
        b.advance(20)
        cluster.steps()
        cluster.check_samples()
