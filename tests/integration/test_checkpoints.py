"""All nodes die at once, and others go on from what is on disk: real processes, `kill -9`.

`go_on` forgets what the dead had done beyond the checkpoint: that history did not happen. Then `cluster.finish()`
demands of the rest what it always does: no step is missing, each sample of an epoch counted once, and the
losses are those of one process that trains on the same batches.
"""

from __future__ import annotations

import resource
import sys
from pathlib import Path
from typing import Any

import pytest
from cluster import Cluster, Node, cluster_of

from chaosnet.node.state.checkpoint import open_checkpoint, read_tensors, scan

pytestmark = pytest.mark.realtime

EVERY = 20


def complete(directory: Path) -> list[int]:
    return [each.step for each in scan(directory) if each.complete]


def await_checkpoint(cluster: Cluster, directory: Path, after: int = 0) -> int:
    """Returns: the step of the newest."""
    cluster.until(lambda: max(complete(directory), default=0) > after, f"a checkpoint after {after}")
    return max(complete(directory))


def kill_all(cluster: Cluster) -> int:
    """Returns: the last step that any of them has told of."""
    dying = cluster.live()
    for node in dying:
        node.kill()
    for node in dying:
        node.process.join()
    cluster.until(lambda: not any(node.pipe in cluster._by_pipe for node in dying), "their pipes are read")
    return max(node.step for node in dying)


def go_on(cluster: Cluster, **settings: Any) -> Node:
    """Found the cluster anew, from its newest checkpoint."""
    dead = list(cluster.nodes)
    founder = cluster.start(resume=True, **settings)
    step = founder.last("joined")["step"]
    for node in dead:
        node.records[:] = [r for r in node.records if r["what"] not in ("step", "batch") or r["step"] <= step]
    return founder


@pytest.mark.slow
def test_all_die_at_once_and_fewer_nodes_go_on_and_then_more(tmp_path):
    disk = tmp_path / "disk"
    with cluster_of(3, tmp_path, directory=str(disk), every=EVERY) as cluster:
        await_checkpoint(cluster, disk)
        await_checkpoint(cluster, disk, after=max(complete(disk)))
        saved, reached = max(complete(disk)), kill_all(cluster)
        founder = go_on(cluster)
        resumed = founder.last("joined")["step"]
        print(f"died at step {reached}, resumed at {resumed}")
        assert resumed >= saved and resumed % EVERY == 0
        cluster.grow(1)
        founder.advance(2 * EVERY)
        later = await_checkpoint(cluster, disk, after=founder.step)
        whole = [each for each in scan(disk) if each.complete]
        assert {each.shards for each in whole if each.step == later} == {2}
        cluster.grow(1)
        assert await_checkpoint(cluster, disk, after=later + EVERY) > later
        cluster.until(lambda: any(each.shards == 3 for each in scan(disk)), "three nodes write together")
        cluster.finish()


def test_a_node_that_dies_while_it_writes_leaves_nothing_that_is_loaded_or_stays(tmp_path):
    """Its index is missing, so the checkpoint is passed over; the others' next one is whole."""
    disk = tmp_path / "disk"
    with cluster_of(3, tmp_path, directory=str(disk), every=EVERY) as cluster:
        await_checkpoint(cluster, disk)
        victim = cluster.nodes[1]
        victim.order(die_in={"checkpoint": 2})
        victim.dies()
        whole = [each for each in scan(disk) if each.complete]
        cluster.until(lambda: scan(disk)[-1].shards == 2, "the others write without it")
        later = await_checkpoint(cluster, disk, after=whole[-1].step)
        assert {each.shards for each in scan(disk) if each.complete and each.step == later} == {2}
        cluster.until(
            lambda: all(each.complete for each in scan(disk) if each.step <= later), "nothing broken stays"
        )
        cluster.finish()


def test_where_no_disk_is_shared_each_node_can_go_on_alone(tmp_path):
    """ "whole": the founder of the first cluster is lost with its disk."""
    with cluster_of(0, tmp_path, every=EVERY, copies="whole") as cluster:
        first = cluster.start(directory=str(tmp_path / "a"))
        first.last("joined")
        cluster.start(directory=str(tmp_path / "b")).last("joined")
        await_checkpoint(cluster, tmp_path / "b")
        kill_all(cluster)
        founder = go_on(cluster, directory=str(tmp_path / "b"))
        founder.advance()
        cluster.finish()


def test_shards_on_disks_that_are_not_shared_are_a_mistake_that_is_told(tmp_path):
    with cluster_of(0, tmp_path, every=5) as cluster:
        first = cluster.start(directory=str(tmp_path / "a"))
        first.last("joined")
        second = cluster.start(directory=str(tmp_path / "b"))
        second.last("joined")
        for node, other in ((first, "b"), (second, "a")):
            told = f"lacks the part of {other} (each node needs the same `every` and the same folder"
            cluster.until(lambda node=node, told=told: told in node.log.read_text(), f"{node.name} is told")
        assert 'copies="whole"' in first.log.read_text()
        cluster.finish()


@pytest.mark.skipif(sys.platform != "linux", reason="a limit is put on another process")
def test_a_part_that_cannot_be_written_is_told_by_the_others_with_the_reason(tmp_path):
    disk, unlimited = tmp_path / "disk", (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    with cluster_of(2, tmp_path, directory=str(disk), every=EVERY) as cluster:
        a, b = cluster.nodes
        await_checkpoint(cluster, disk)
        resource.prlimit(b.process.pid, resource.RLIMIT_FSIZE, (800, resource.RLIM_INFINITY))
        told = f"lacks the part of b (it could not write it to {disk}: File too large)"
        cluster.until(lambda: told in a.log.read_text(), "a tells why")
        resource.prlimit(b.process.pid, resource.RLIMIT_FSIZE, unlimited)
        await_checkpoint(cluster, disk, after=a.step)
        cluster.finish()


def test_what_is_on_disk_is_the_state_that_all_had_at_that_step(tmp_path):
    """Shards of three nodes make one state: each of them reads the same hash back."""
    disk = tmp_path / "disk"
    with cluster_of(3, tmp_path, directory=str(disk), every=EVERY) as cluster:
        cluster.until(lambda: any(each.complete and each.shards == 3 for each in scan(disk)), "three write")
        kill_all(cluster)
        newest = [each for each in scan(disk) if each.complete][-1]
        opened = open_checkpoint(newest)
        assert len({index.node for index in opened.indexes}) == 3
        assert len(list(read_tensors(opened))) == opened.indexes[0].count
        told = {node.name: {r["step"]: r["hash"] for r in node.told("step")} for node in cluster.nodes}
        expected = {hashes[newest.step] for hashes in told.values()}
        founder = cluster.start(resume=True)
        assert {founder.last("joined")["hash"]} == expected
        founder.advance(1)
        cluster.leave()
