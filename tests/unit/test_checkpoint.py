"""Checkpoints on disk: who writes what, what is whole, what is loaded and what is removed."""

import errno
import os
import random
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from chaosnet.node.state import checkpoint as disk
from chaosnet.node.state.checkpoint import (
    Index,
    StoredTensor,
    open_checkpoint,
    prune,
    read_index,
    read_tensors,
    scan,
    set_aside,
    write_shard,
)
from chaosnet.node.state.checkpoint_plan import Checkpoint, Mark, assign, choose, part_of, superseded
from chaosnet.protocols.errors import CheckpointError, ConfigError

torch.manual_seed(0)
TENSORS = {
    "flags": torch.tensor([True, False, True]),
    "weight": torch.randn(5, 7),
    "narrow": torch.randn(3).to(torch.bfloat16),
    "nothing": torch.empty(0, 4),
    "count": torch.tensor(7),
    "wide": torch.randn(2, 2, dtype=torch.float64),
}


def data_of(tensor):
    return memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy().data)


def rows(tensors=TENSORS):
    return [
        StoredTensor(
            position=position,
            name=name,
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(tensor.shape),
            nbytes=tensor.nbytes,
        )
        for position, (name, tensor) in enumerate(tensors.items())
    ]


def mark(step=10, shards=2, run="r", key=(1, 1)):
    return Mark(run=run, step=step, key=key, members=("a", "b", "c")[:shards], shards=shards)


def write(directory, of=None, shard=0, read=None):
    of = of or mark()
    every, contents = rows(), list(TENSORS.values())
    mine = assign([tensor.nbytes for tensor in every], of.shards)[shard]
    index = Index(
        mark=of, round=of.step, shard=shard, node=of.members[shard], count=len(every), tensors=(),
        plain=b"plain!" if shard == 0 else b"",
    )  # fmt: skip
    return write_shard(directory, index, [every[n] for n in mine], read or (lambda n: data_of(contents[n])))


def write_all(directory, of=None):
    """Returns: the folder of a complete checkpoint."""
    of = of or mark()
    for shard in range(of.shards):
        write(directory, of, shard)
    return directory / of.folder


# --- who writes what ---


def test_a_handful_of_tensors_is_spread_evenly():
    assert assign([4, 4, 2, 2, 1, 1], 2) == [[0, 2, 4], [1, 3, 5]]
    assert assign([], 3) == [[], [], []]
    assert assign([5], 3) == [[0], [], []]


@given(st.lists(st.integers(0, 10**9), max_size=60), st.integers(1, 12))
def test_each_tensor_is_in_one_shard_and_none_has_much_more_than_it_must(sizes, shards):
    parts = assign(sizes, shards)
    assert sorted(position for part in parts for position in part) == list(range(len(sizes)))
    for part in filter(None, parts):  # Whatever came last came where there was least: no more than the mean.
        loads = [sizes[position] for position in part]
        assert sum(loads) - min(loads) <= sum(sizes) / shards + 1


@given(st.data(), st.lists(st.integers(0, 99), max_size=9), st.integers(1, 5))
def test_the_parts_are_one_whole_whatever_else_each_node_has(data, alike, shards):
    nodes = [alike + data.draw(st.lists(st.integers(0, 10**6), max_size=4)) for _ in range(shards)]
    parts = [part_of(shard, sizes, len(alike), shards) for shard, sizes in enumerate(nodes)]
    assert sorted(position for part in parts for position in part) == list(range(len(nodes[0])))


def test_what_two_histories_or_two_layouts_write_at_one_step_has_two_folders():
    assert mark().folder.startswith("step-00000010-")
    folders = {mark().folder, mark(run="s").folder, mark(key=(2, 1)).folder, mark(shards=3).folder}
    assert len(folders | {msgspec.structs.replace(mark(), layout="x").folder}) == 5


# --- there and back ---


def test_tensors_come_back_to_the_bit_and_in_their_place(tmp_path):
    write_all(tmp_path)
    opened = open_checkpoint(choose(scan(tmp_path)))
    assert [tensor.name for tensor in opened.tensors] == list(TENSORS)
    assert opened.indexes[0].plain == b"plain!"
    found = dict(read_tensors(opened))
    assert {n: bytes(found[n]) for n in found} == {
        n: bytes(data_of(tensor)) for n, tensor in enumerate(TENSORS.values())
    }


@pytest.mark.parametrize("shards", [1, 2, 3])
def test_any_tool_that_knows_safetensors_opens_a_shard(tmp_path, shards):
    folder = write_all(tmp_path, mark(shards=shards))
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)


def test_what_safetensors_has_no_type_for_is_bytes_there(tmp_path):
    tensor = torch.randn(3, dtype=torch.complex128)
    of = mark(shards=1)
    index = Index(mark=of, round=1, shard=0, node="a", count=1, tensors=())
    write_shard(tmp_path, index, rows({"z": tensor}), lambda n: data_of(tensor))
    (file,) = (tmp_path / of.folder).glob("*.safetensors")
    assert load_file(file)["z"].dtype == torch.uint8
    opened = open_checkpoint(choose(scan(tmp_path)))
    assert opened.tensors[0].dtype == "complex128"
    assert dict(read_tensors(opened))[0] == data_of(tensor)


# --- incomplete ---


def test_a_checkpoint_with_a_shard_missing_is_passed_over_for_an_older_one(tmp_path):
    write_all(tmp_path, mark(step=10))
    write(tmp_path, mark(step=20), shard=1)
    newest = scan(tmp_path)[-1]
    assert (newest.step, newest.complete, newest.missing) == (20, False, [0])
    assert choose(scan(tmp_path)).step == 10
    with pytest.raises(CheckpointError, match=r"step-00000020-.* lacks shard 0 of 2; complete: step 10"):
        choose(scan(tmp_path), step=20)


def test_halves_of_two_histories_do_not_make_a_whole(tmp_path):
    write(tmp_path, mark(run="r"), shard=0)
    write(tmp_path, mark(run="s"), shard=1)
    assert [each.complete for each in scan(tmp_path)] == [False, False]
    with pytest.raises(CheckpointError, match=r"lacks shard . of 2; none is complete"):
        choose(scan(tmp_path))


def test_tensors_without_their_index_do_not_count(tmp_path):
    folder = write_all(tmp_path)
    (folder / "00001-of-00002.json").unlink()
    assert scan(tmp_path)[0].missing == [1]


def test_a_file_that_was_being_written_in_a_crash_does_not_count_and_goes_with_its_folder(tmp_path):
    write(tmp_path, mark(step=10), shard=0)
    folder = tmp_path / mark(step=10).folder
    half = folder / ".00001-of-00002.safetensors.0123.tmp"
    half.write_bytes(b"half")
    assert scan(tmp_path)[0].missing == [1]
    write_all(tmp_path, mark(step=20))
    prune(tmp_path, keep=2)
    assert not half.exists() and [each.step for each in scan(tmp_path)] == [20]


def test_an_empty_or_absent_directory_has_no_checkpoints(tmp_path):
    assert scan(tmp_path) == scan(tmp_path / "absent") == []
    with pytest.raises(CheckpointError, match="there is no checkpoint of step 5; none is complete"):
        choose([], 5)


# --- damaged ---


def only(pattern, folder):
    (path,) = folder.glob(pattern)
    return path


@pytest.mark.parametrize("cut", [1, 17, 10**6])
def test_a_torn_file_of_tensors_is_named(tmp_path, cut):
    path = only("00001*.safetensors", write_all(tmp_path))
    data = path.read_bytes()
    path.write_bytes(data[: max(len(data) - cut, 0)])
    with pytest.raises(CheckpointError, match=rf"{path} is torn: it has \d+ bytes \(expected {len(data)}\)"):
        open_checkpoint(scan(tmp_path)[0])


def test_a_missing_file_of_tensors_is_named(tmp_path):
    path = only("00001*.safetensors", write_all(tmp_path))
    path.unlink()
    with pytest.raises(CheckpointError, match=f"{path}: No such file"):
        open_checkpoint(scan(tmp_path)[0])


def test_any_flipped_bit_is_found_and_its_file_named(tmp_path):
    folder, rng = write_all(tmp_path), random.Random(0)
    for path in sorted(folder.iterdir()):
        whole = path.read_bytes()
        for _ in range(40):
            at = rng.randrange(len(whole))
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 1 << rng.randrange(8)]) + whole[at + 1 :])
            if path.suffix == ".json" and _same_meaning(path, whole):
                continue
            with pytest.raises(CheckpointError, match=f"{path} is (torn|damaged|of another checkpoint)"):
                list(read_tensors(open_checkpoint(scan(tmp_path)[0])))
        path.write_bytes(whole)
    assert len(list(read_tensors(open_checkpoint(scan(tmp_path)[0])))) == len(TENSORS)


def _same_meaning(path, whole):
    """A flipped bit in the white space of a JSON text may be white space again."""
    return path.read_bytes().split() == whole.split()


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    folder, other = write_all(tmp_path, mark(step=10)), write_all(tmp_path, mark(step=20))
    foreign = (other / "00001-of-00002.json").read_bytes()
    (folder / "00001-of-00002.json").write_bytes(foreign)
    with pytest.raises(
        CheckpointError, match=r"00001-of-00002.json is of another checkpoint: step-00000020-"
    ):
        read_index(scan(tmp_path)[0], 1)


def test_an_index_of_another_version_is_named_as_that_and_not_as_torn(tmp_path):
    path = only("00001*.json", write_all(tmp_path))
    path.write_text(path.read_text().replace("chaosnet checkpoint 2", "chaosnet checkpoint 1"))
    with pytest.raises(
        CheckpointError,
        match=f"{path} is of another checkpoint format, 'chaosnet checkpoint 1' "
        r"\(this version reads 'chaosnet checkpoint 2'\)",
    ):
        open_checkpoint(scan(tmp_path)[0])


def test_shards_that_do_not_make_up_the_state_are_refused(tmp_path):
    of = mark(shards=1)
    index = Index(mark=of, round=1, shard=0, node="a", count=3, tensors=())
    write_shard(tmp_path, index, rows()[:2], lambda n: data_of(list(TENSORS.values())[n]))
    with pytest.raises(CheckpointError, match=r"have 2 tensors \(expected 3, each once\)"):
        open_checkpoint(scan(tmp_path)[0])


# --- disks that fail ---


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EDQUOT])
def test_a_failed_write_names_its_file_and_leaves_nothing(tmp_path, monkeypatch, error):
    def fails(descriptor):
        raise OSError(error, os.strerror(error))

    write(tmp_path, shard=0)
    monkeypatch.setattr(disk.os, "fsync", fails)
    file = "00001-of-00002.safetensors"
    with pytest.raises(CheckpointError, match=f"{file}: {os.strerror(error)}"):
        monkeypatch.setattr(disk, "_sync_folder", lambda path: None)
        write(tmp_path, shard=1)
    assert not any("00001" in path.name for path in (tmp_path / mark().folder).iterdir())
    assert scan(tmp_path)[0].missing == [1]


def test_a_folder_that_somebody_removes_meanwhile_is_an_error_that_names_it(tmp_path):
    def read(position):
        for path in folder.iterdir():
            path.unlink()
        folder.rmdir()
        return memoryview(b"")

    folder = tmp_path / mark().folder
    with pytest.raises(CheckpointError, match=f"{folder}.*No such file"):
        write(tmp_path, read=read)


def test_a_directory_that_cannot_be_written_is_refused_at_the_start(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"directory: '.*file' cannot be written: ") as raised:
        disk.check_writable(tmp_path / "file")
    assert raised.value.lasting
    disk.check_writable(tmp_path / "new" / "folder")
    assert list((tmp_path / "new" / "folder").iterdir()) == []


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
def test_a_disk_that_is_off_for_a_while_refuses_a_start_and_not_the_next_one(tmp_path, monkeypatch, number):
    """A node that a supervisor started while the server of the shared folder was down stayed ended."""
    monkeypatch.setattr(disk.os, "fsync", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ConfigError, match="cannot be written: ") as raised:
        disk.check_writable(tmp_path)
    assert not raised.value.lasting


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_keeps_no_run_from_going_on_where_older_checkpoints_make_room(
    tmp_path, monkeypatch, number
):
    """Who was started again on a full disk was refused for good, while those that ran trained on."""
    for step in (100, 200):
        write_all(tmp_path, mark(step))
    full = OSError(number, os.strerror(number))
    monkeypatch.setattr(disk.os, "fsync", Mock(side_effect=full))
    disk.check_writable(tmp_path)
    with pytest.raises(ConfigError, match="cannot be written: ") as raised:
        disk.check_writable(tmp_path / "new")
    assert not raised.value.lasting, "somebody may make space"


# --- what goes ---


def looked(step, complete=True, written_s=0.0):
    present = frozenset({0, 1} if complete else {0})
    return Checkpoint(Path(f"{step}-{complete}-{written_s}"), step, 2, present, 1, written_s)


def test_the_newest_complete_ones_stay_and_what_may_be_under_way():
    old, broken, kept, newest = looked(10), looked(20, complete=False), looked(30), looked(40)
    under_way = looked(50, complete=False)
    found = [newest, broken, under_way, old, kept]
    assert superseded(found, keep=2) == [old, broken]
    assert superseded(found, keep=1) == [old, broken, kept]
    assert superseded([broken, under_way], keep=2) == []


def test_where_space_is_wanted_what_nobody_writes_any_more_goes_too():
    old, newest, dead, under_way = (
        looked(10),
        looked(20),
        looked(30, complete=False),
        looked(40, complete=False),
    )
    assert superseded([old, newest, dead, under_way], keep=1, before=40) == [old, dead]
    assert superseded([dead, under_way], keep=1, before=40) == [dead]
    assert superseded([dead, old, newest], keep=2, before=10) == []


def test_of_two_histories_at_one_step_the_later_is_loaded():
    assert choose([looked(10, written_s=2.0), looked(10, written_s=1.0)]).written_s == 2.0


def test_pruning_touches_nothing_else(tmp_path):
    for step in (10, 20, 30):
        write_all(tmp_path, mark(step=step))
    (tmp_path / "step-notes").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    prune(tmp_path, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "notes.txt", mark(step=30).folder, "step-notes",
    ]  # fmt: skip


def test_what_another_run_wrote_beyond_the_step_resumed_is_set_aside(tmp_path):
    for step, run in ((10, "old"), (20, "old"), (20, "new")):
        write_all(tmp_path, mark(step=step, run=run))
    (tmp_path / "step-00000030-00000000").mkdir()  # Somebody has just begun to write.
    (renamed,) = set_aside(tmp_path, step=10, run="new")
    assert renamed.name == f"set-aside-{mark(step=20, run='old').folder}"
    assert [each.step for each in scan(tmp_path)] == [10, 20, 30]
    assert set_aside(tmp_path, step=10, run="new") == []


def test_a_run_whose_nodes_die_over_checkpoints_again_and_again_does_not_fill_the_disk(tmp_path):
    """Each time all died, the part of a checkpoint that was there was set aside when the next run began, for good."""
    write_all(tmp_path, mark(step=10, run="run 0"))
    for number in range(1, 20):
        step = 10 * number
        assert choose(scan(tmp_path)).step == step
        set_aside(tmp_path, step, f"run {number}")
        write_all(tmp_path, mark(step=step + 10, run=f"run {number}"))
        prune(tmp_path, keep=1)
        write(tmp_path, mark(step=step + 20, run=f"run {number}"), shard=1)  # And then all nodes die.
    assert len(list(tmp_path.iterdir())) == 2


def test_what_nobody_can_read_beyond_the_step_resumed_is_set_aside_too(tmp_path):
    """Else it would count as the newest complete one, and what this run writes would be removed for it."""
    write_all(tmp_path, mark(step=10))
    for index in write_all(tmp_path, mark(step=30)).glob("*.json"):
        index.write_text("{}")
    assert len(set_aside(tmp_path, step=10, run="new")) == 1
    write_all(tmp_path, mark(step=20, run="new"))
    prune(tmp_path, keep=1)
    assert choose(scan(tmp_path)).step == 20


def test_what_cannot_be_read_just_now_is_not_set_aside(tmp_path, monkeypatch):
    def fails(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

    write_all(tmp_path, mark(step=30, run="mine"))
    monkeypatch.setattr(Path, "read_bytes", fails)
    assert set_aside(tmp_path, step=10, run="mine") == []
