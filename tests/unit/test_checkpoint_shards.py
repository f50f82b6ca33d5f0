"""Shards that two nodes write, each by its own state: what of it need not be the same on both."""

import errno
import os
import threading
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from chaosnet import CheckpointError
from chaosnet.node.state import checkpoint, flat_state
from chaosnet.node.state.checkpoint import scan
from chaosnet.node.state.checkpoint_plan import Mark, choose
from chaosnet.node.state.training_state import TrainingState
from chaosnet.protocols.messages import Commit, Contribution
from chaosnet.settings.resolved import CheckpointSettings
from chaosnet.training import checkpointing
from chaosnet.training.checkpointing import Checkpointing, load

MEMBERS = ("a", "b")


class Rotary(nn.Module):
    """A cache grows to the longest sequence that was seen, and lies before the buffer that all have alike."""

    def __init__(self, rows, means=4):
        super().__init__()
        self.register_buffer("cache", torch.zeros(rows, 8), persistent=False)
        self.register_buffer("means", torch.arange(float(means)))
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.bias = nn.Parameter(torch.ones(3))


class Node:
    def __init__(self, name, directory, rows, seen=(), means=4, frozen=False, kept=1):
        self.name, self.model = name, Rotary(rows, means)
        self.extra = {"seen": [torch.full((n,), float(n)) for n in seen]}
        optimizer = torch.optim.Adam(self.model.parameters())
        self.model.bias.requires_grad_(not frozen)
        sum(p.sum() for p in self.model.parameters()).backward()
        optimizer.step()
        self.state = TrainingState(self.model, optimizer, None, self.extra)
        self.said = []
        self.checkpointing = Checkpointing(
            CheckpointSettings(directory=str(directory), kept=kept), name, self.said.append
        )

    @torch.no_grad()
    def write(self, step, shards=2, change=None):
        mark = Mark(run="r", step=step, key=(1, 1), members=MEMBERS, shards=shards)
        part = self.checkpointing.tensors_of(mark)
        capture = self.state.begin_capture(step, {}, part)
        if change is not None:
            change.add_(1.0)
        capture.run()
        self.checkpointing.begin(capture, mark, part)
        self.checkpointing.close(abandon=False)


@pytest.mark.parametrize("rows", [(16, 64), (64, 16)])
@pytest.mark.parametrize("seen", [((), (500, 2)), ((500, 2), ()), ((7,), (400,))])
def test_nodes_with_caches_and_own_tensors_of_other_sizes_write_one_state(tmp_path, rows, seen):
    nodes = [Node(name, tmp_path, *each) for name, *each in zip(MEMBERS, rows, seen, strict=True)]
    for node in nodes:
        node.write(10)
    reader = Node("c", tmp_path, rows=1, seen=(1,))
    reader.state.load(load(choose(scan(tmp_path))))
    assert reader.state.state_hash() == nodes[0].state.state_hash()
    assert torch.equal(reader.model.cache, nodes[0].model.cache)


def test_shards_that_do_not_fit_together_are_no_checkpoint_and_no_reason_to_remove_one(tmp_path):
    a, b = Node("a", tmp_path, rows=16), Node("b", tmp_path, rows=16)
    for node in (a, b):
        node.write(10)
    b.model.means = torch.zeros(5)  # It persists, so all should have it alike.
    for step in (20, 30):
        for node in (a, b):
            node.write(step)
    assert [each.complete for each in scan(tmp_path)] == [True, False, False, False, False]
    assert choose(scan(tmp_path)).step == 10
    load(choose(scan(tmp_path)))


def test_nodes_whose_shards_do_not_fit_together_are_told_once(tmp_path):
    a, b = Node("a", tmp_path, rows=16), Node("b", tmp_path, rows=16, means=5)
    for step in (10, 20, 30):
        for node in (a, b):
            node.write(step)
    assert len(a.said) == len(b.said) == 1
    theirs = next(each.path for each in scan(tmp_path) if each.step == 10 and each.present == {1})
    assert f"step 10 lacks the part of b (it is in {theirs}: all nodes need parameters," in a.said[0]
    assert a.checkpointing.counters["checkpoints_incomplete"] == 1


def test_a_run_that_ends_names_no_checkpoint_that_lacks_the_part_of_another(tmp_path):
    """On a full disk one of two wrote its part; both named that checkpoint, and resumed from the one before."""
    a, b = Node("a", tmp_path, rows=16), Node("b", tmp_path, rows=16)
    a.write(10)
    assert a.checkpointing.newest_whole() is None, "no run can go on from a part of one"
    b.write(10)
    b.write(20)
    assert b.checkpointing.newest[0] == 20
    assert b.checkpointing.newest_whole() == (10, choose(scan(tmp_path)).path)
    a.write(20)
    assert b.checkpointing.newest_whole()[0] == 20


def test_the_last_checkpoint_that_lacks_the_part_of_another_is_not_told_as_whole(tmp_path, monkeypatch):
    """Of two that left together one was killed while it wrote; the other said that the last state is on disk."""
    monkeypatch.setattr(checkpointing, "FIRST_S", 0.0)
    a, b = Node("a", tmp_path, rows=16), Node("b", tmp_path, rows=16)
    for node in (a, b):
        node.write(10)
    all_leave = Contribution(weight=1.0, shares={"a": 0, "b": 0}, leaving=True)
    for node in (a, b):
        node.checkpointing.due(20, "r", Commit(key=(1, 1), step=20, switch=None, total=all_leave))
    a.write(20)
    assert a.said[-1].startswith("the state after step 20 is in ")
    assert a.said[-1].endswith(", but for the part of b, not there yet")
    assert a.checkpointing.newest_whole()[0] == 10
    b.write(20)
    assert b.said[-1].startswith("the state after step 20 is in ") and "but for" not in b.said[-1]
    assert b.checkpointing.newest_whole()[0] == 20


def test_who_leaves_waits_for_its_write_as_long_as_that_takes(tmp_path):
    """On a slow disk the last state of a large model was lost after a minute, silently."""
    a, asked = Node("a", tmp_path, rows=16), []
    a.checkpointing._thread = SimpleNamespace(
        join=lambda timeout=None: asked.append(timeout), is_alive=lambda: True
    )
    a.checkpointing.close(abandon=False)
    assert asked[-1] is None
    assert f"waits for the disk: a checkpoint is still being written to {tmp_path}" in a.said


@pytest.mark.parametrize("frozen", [False, True])
def test_a_state_that_changes_while_it_is_copied_is_no_checkpoint_and_that_is_said(tmp_path, frozen):
    """A trained parameter is noticed when it is copied, a frozen one when it is written."""
    a = Node("a", tmp_path, rows=16, frozen=frozen)
    a.state.watch()
    a.write(10, shards=1, change=a.model.bias)
    assert "no checkpoint at step 10: " in a.said[0]
    assert a.checkpointing.counters["checkpoints_failed"] == 1
    assert [each.present for each in scan(tmp_path)] in ([], [frozenset()])


def test_old_checkpoints_that_cannot_be_removed_do_not_make_the_new_one_a_failure(tmp_path, monkeypatch):
    def prune(directory, keep, before):
        raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(checkpointing, "prune", prune)
    a = Node("a", tmp_path, rows=16)
    a.write(10, shards=1)
    assert [each.complete for each in scan(tmp_path)] == [True]
    assert a.said == ["old checkpoints are not removed this time: [Errno 116] Stale file handle"]
    assert (a.checkpointing.counters["checkpoints"], a.checkpointing.counters["checkpoints_failed"]) == (1, 0)


@pytest.fixture
def small_disk(monkeypatch):
    """Room for the files of so many checkpoints: `room`."""
    disk, write_file = SimpleNamespace(room=9), checkpoint._write_file

    def write(path, node, write):
        others = {file.parent for file in path.parent.parent.glob("*/*.safetensors")} - {path.parent}
        if len(others) >= disk.room:
            full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise CheckpointError(f"{path}: {full.strerror}") from full
        return write_file(path, node, write)

    monkeypatch.setattr(checkpoint, "_write_file", write)
    return disk


def test_on_a_disk_that_is_too_small_older_checkpoints_make_room_and_that_is_said_once(tmp_path, small_disk):
    """Once it had been full, no checkpoint was ever written again, as old ones went after a new one only."""
    a = Node("a", tmp_path, rows=16, kept=3)
    for step in (10, 20):
        a.write(step, shards=1)
    left = (3, [10, 20, 30]), (3, [20, 30, 40]), (2, [40, 50]), (2, [50, 60]), (9, [50, 60, 70])
    for small_disk.room, steps in left:
        a.write(steps[-1], shards=1)
        assert [each.step for each in scan(tmp_path) if each.complete] == steps
    assert a.checkpointing.counters["checkpoints_failed"] == 0
    assert a.said == [f"no space for another checkpoint in {tmp_path}: older ones are removed for it"]


def test_for_want_of_space_the_newest_complete_checkpoint_is_never_removed(tmp_path, small_disk):
    nodes = [Node(name, tmp_path, rows=16, kept=3) for name in MEMBERS]
    for node in nodes:
        node.write(10)
    small_disk.room = 1
    for step in (20, 30):
        for node in nodes:
            node.write(step)
        assert [each.step for each in scan(tmp_path) if each.complete] == [10]
    assert nodes[0].said[0].startswith("no checkpoint at step 20: ") and len(nodes[0].said) == 2
    small_disk.room = 2
    for node in nodes:
        node.write(40)
    assert [each.step for each in scan(tmp_path) if each.complete] == [10, 40], (
        "what was begun in vain is gone"
    )


def test_two_nodes_that_find_a_shared_disk_full_remove_one_checkpoint_not_one_each(
    tmp_path, small_disk, monkeypatch
):
    nodes = [Node(name, tmp_path, rows=16, kept=3) for name in MEMBERS]
    for step in (10, 20, 30):
        for node in nodes:
            node.write(step)
    small_disk.room = 3
    both, prune = threading.Barrier(2), checkpointing.prune

    def together(*arguments):
        both.wait(timeout=20)
        prune(*arguments)

    monkeypatch.setattr(checkpointing, "prune", together)
    threads = [threading.Thread(target=node.write, args=(40,)) for node in nodes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [each.step for each in scan(tmp_path) if each.complete] == [20, 30, 40]


def test_a_copy_for_which_there_is_no_memory_is_no_checkpoint_and_that_is_said(tmp_path, monkeypatch):
    def gather(tensors, out):
        raise RuntimeError("not enough memory: you tried to allocate 1 byte")

    a = Node("a", tmp_path, rows=16)
    monkeypatch.setattr(flat_state, "gather", gather)
    a.write(10, shards=1)
    assert "no checkpoint at step 10: not enough memory" in a.said[0]
    assert a.checkpointing.counters["checkpoints_failed"] == 1


def test_two_nodes_that_write_whole_copies_into_one_folder_do_not_write_into_each_others(tmp_path):
    total = SimpleNamespace(shares={"a": 1, "b": 1}, leaving=False, weight=1.0, metrics={})
    commit = SimpleNamespace(total=total, key=(1, 1))
    settings = CheckpointSettings(directory=str(tmp_path), every=10, copies="whole")
    marks = [Checkpointing(settings, name, print).due(10, "r", commit) for name in MEMBERS]
    assert [mark.shards for mark in marks] == [1, 1]
    assert marks[0].folder != marks[1].folder


@pytest.mark.parametrize(("writes", "who"), [("a", "a"), ("b", "another node")])
def test_who_left_no_time_for_a_checkpoint_is_told_though_its_write_has_ended_since(tmp_path, writes, who):
    nodes = [Node(name, tmp_path, rows=16) for name in MEMBERS]
    metrics = {}
    for node in nodes:
        node.checkpointing.busy = node.name == writes
        node.checkpointing.contribute(metrics)
        node.checkpointing.busy = False
    total = SimpleNamespace(shares=dict.fromkeys(MEMBERS, 1), weight=2.0, leaving=False, metrics=metrics)
    every = nodes[0].checkpointing.settings.every
    assert nodes[0].checkpointing.due(every, "r", SimpleNamespace(total=total, key=(1, 1))) is None
    [said] = nodes[0].said
    assert said.startswith(f"no checkpoint at step {every}: {who} is still writing")


def test_a_part_for_which_the_disk_had_no_space_is_told_by_the_others_with_its_node_folder_and_reason(
    tmp_path, monkeypatch
):
    """The others said that the node has another `every` or another folder."""
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    write_file = checkpoint._write_file

    def write(path, node, write):
        if node == "b":
            raise CheckpointError(f"{path}: {full.strerror}") from full
        return write_file(path, node, write)

    monkeypatch.setattr(checkpoint, "_write_file", write)
    a, b = nodes = [Node(name, tmp_path, rows=16) for name in MEMBERS]
    every = a.checkpointing.settings.every
    for step in (every, 2 * every, 3 * every):
        metrics = {}
        for node in nodes:
            node.checkpointing.contribute(metrics)
        total = SimpleNamespace(shares=dict.fromkeys(MEMBERS, 1), weight=2.0, leaving=False, metrics=metrics)
        for node in nodes:
            node.checkpointing.due(step, "r", SimpleNamespace(total=total, key=(1, 1)))
        for node in nodes:
            node.write(step)
    told = f"the checkpoint of step {every} lacks the part of b (it could not write it to {tmp_path}: No space left"
    assert [said[: len(told)] for said in a.said] == [told], "once"
    assert f"no checkpoint at step {every}: {tmp_path}" in b.said[0]
    assert "No space left on device" in b.said[0]
