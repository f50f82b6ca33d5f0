"""Joins that do not get on, for real: they say what they wait for, and end with the reason."""

from __future__ import annotations

import time

import pytest
import worker
from cluster import cluster_of

pytestmark = pytest.mark.realtime

NOBODY = "127.0.0.1:9"  # The discard port: nothing listens there.


def keeps_what_cannot_be_sent(me):
    """A founder whose extra state cannot be handed over: whoever joins asks in vain."""
    model = worker.make_model()
    extra = {"x": 0}
    trainer = me.trainer(model, worker.make_optimizer(model), extra_state=extra)
    if "join" not in me.settings:
        extra["x"] = object()
    for batch in trainer.batches(worker.Numbered(), 4, epochs=10**6):
        worker.loss_of(model, batch[0], batch[1]).backward()
        trainer.update()
        if me.obey():
            break
        time.sleep(0.01)
    trainer.request_node_exit()


@pytest.mark.slow
def test_knocking_where_nobody_is_says_so_until_it_gives_up(tmp_path):
    with cluster_of(0, tmp_path, join=NOBODY, join_patience_s=7.0) as cluster:
        joiner = cluster.start()
        assert joiner.ended()["how"] == "ScaleOutFailed"
        told = [line for line in joiner.log.read_text().splitlines() if "still knocking at" in line]
        assert len(told) == 2, told
        assert NOBODY in told[0] and "gives up in" in told[0]


def test_a_state_that_nobody_can_send_ends_the_join_with_the_reason(tmp_path):
    with cluster_of(0, tmp_path, script=keeps_what_cannot_be_sent, hash_every=0) as cluster:
        first = cluster.start()
        first.last("joined")
        joiner = cluster.start()
        ended = joiner.ended()
        assert ended["how"] == "ScaleOutFailed"
        assert "attempts in a row to pull the state have ended so" in ended["reason"]
        assert "it has no copy of the state" in ended["reason"]
        before = first.step
        first.reach(before + 5)
