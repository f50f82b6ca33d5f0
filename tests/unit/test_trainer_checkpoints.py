"""Checkpoints of a cluster of one, in this process. More nodes: tests/integration/test_checkpoints.py."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
import time
from contextlib import contextmanager

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from chaosnet import Callbacks, CheckpointError, Checkpoints, Cluster, ConfigError, Trainer
from chaosnet.node.state.checkpoint import scan
from chaosnet.settings.resolved import CheckpointSettings
from chaosnet.training import checkpointing

pytestmark = [pytest.mark.realtime, pytest.mark.usefixtures("fresh_exit_events")]

LENGTH = 50


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch):
    for name in list(os.environ):
        if name.startswith("CHAOSNET_"):
            monkeypatch.delenv(name)


def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(LENGTH, 4, generator=generator), torch.arange(LENGTH) % 2, torch.arange(LENGTH)
    )


class Script:
    """A user's script: everything that a state can have, and what it saw on the way."""

    def __init__(self, seed=0, width=16, patient=True, lr=0.01, **settings):
        self.patient = patient
        torch.manual_seed(0)
        self.model = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.Linear(width, 2)
        )
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, 0.9)
        self.extra = {"best": 0.0, "ema": torch.zeros(2)}
        self.trainer = Trainer(self.model, self.optimizer, self.scheduler, self.extra, seed=seed, **settings)
        self.used, self.losses = [], []

    def train(self, until):
        """Returns: a hash of the state after step `until`."""
        for x, y, indices in self.trainer.batches(data(), 8, epochs=100):
            loss = nn.functional.cross_entropy(self.model(x), y)
            loss.backward()
            self.extra["best"] = max(self.extra["best"], loss.item())
            self.extra["ema"].mul_(0.9).add_(loss.item())
            if self.patient:
                self.await_disk()
            self.trainer.update()
            self.used.append(indices.tolist())
            self.losses.append(loss.item())
            if self.trainer.step == until:
                break
        return self.trainer.state_hash()

    def await_disk(self):
        """A step here takes less than a slow disk does."""
        checkpointing, trainer = self.trainer.engine.checkpointing, self.trainer
        if checkpointing and (trainer.step + 1) % checkpointing.settings.every == 0:
            while checkpointing.busy:
                time.sleep(0.002)

    def counters(self):
        return self.trainer.session.counters

    def close(self):
        self.trainer.close()


@pytest.fixture
def start():
    scripts = []

    def make(**settings):
        scripts.append(Script(**settings))
        return scripts[-1]

    yield make
    for script in scripts:
        script.close()


def trained(start, directory, steps, every=5, **settings):
    """A script that has trained, and whose checkpoints are all written."""
    script = start(checkpoints=Checkpoints(directory, every=every), **settings)
    script.train(steps)
    script.close()
    return script


def told(script, true):
    """What the status says of checkpoints, once that is so."""
    deadline_s = time.monotonic() + 20
    while not ((row := script.trainer.status().checkpoint) and true(row)):
        assert time.monotonic() < deadline_s, row
        time.sleep(0.05)
    return row


# --- going on ---


@pytest.mark.parametrize("same_rng", [False, True])
def test_twenty_steps_are_ten_and_ten_more_after_resuming_to_the_bit(start, tmp_path, same_rng):
    straight = start(same_rng=same_rng)
    expected = straight.train(20)
    straight.close()
    trained(start, tmp_path, 10, same_rng=same_rng)
    second = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True), same_rng=same_rng)
    assert (second.trainer.step, second.trainer.epoch) == (10, 1)
    assert second.train(20) == expected
    assert second.losses == straight.losses[10:]
    assert second.used == straight.used[10:]
    assert second.extra == {**straight.extra, "ema": second.extra["ema"]}
    assert second.trainer.samples == straight.trainer.samples
    assert second.scheduler.state_dict() == straight.scheduler.state_dict()


def test_a_learning_rate_that_the_checkpoint_replaces_is_told_and_one_that_only_its_schedule_changed_is_not(
    start, tmp_path, capsys
):
    trained(start, tmp_path, 5)
    start(checkpoints=Checkpoints(tmp_path, every=5, resume=True)).close()
    told = "settings of the state that was loaded are used: "
    assert told not in capsys.readouterr().err
    start(checkpoints=Checkpoints(tmp_path, every=5, resume=True), lr=0.5)
    assert (
        f"{told}optimizer.param_groups[0]['initial_lr'] is 0.01 (this script: 0.5)" in capsys.readouterr().err
    )


def test_a_resumed_run_goes_on_at_the_rate_that_its_scripts_set_when_the_state_is_loaded(tmp_path):
    def run(steps, resume=False):
        torch.manual_seed(0)
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        callbacks = (
            Callbacks(on_loaded=lambda event: optimizer.param_groups[0].update(lr=0.0)) if resume else None
        )
        checkpoints = Checkpoints(tmp_path, every=5, resume=resume)
        with Trainer(model, optimizer, checkpoints=checkpoints, callbacks=callbacks) as trainer:
            for batch in trainer.batches(data(), 8, epochs=100):
                nn.functional.cross_entropy(model(batch.x), batch.y).backward()
                trainer.update()
                if trainer.step == steps:
                    break
            return model.weight.clone()

    before = run(5)
    assert torch.equal(run(10, resume=True), before)


def test_the_step_at_which_a_node_came_in_is_one_of_the_model_whatever_was_evaluated(start, tmp_path, capsys):
    first = start(checkpoints=Checkpoints(tmp_path, every=5))
    first.train(5)
    assert sum(batch.samples for batch in first.trainer.evaluate(data(), 10)) == LENGTH
    first.train(10)
    first.close()
    second = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    assert second.trainer.joined_step == second.trainer.step == 10
    second.train(12)
    capsys.readouterr()
    second.close()
    told = capsys.readouterr().err
    assert "left after step 12 (no member goes on): 2 steps with samples from here, joined at step 10" in told


def test_who_fails_to_be_made_by_a_callback_is_no_node_and_may_be_made_again(start, tmp_path, capsys):
    """The script has no trainer that it could close, and others would wait for it."""
    trained(start, tmp_path, 2, every=2)
    checkpoints, handler = Checkpoints(tmp_path, every=2, resume=True), signal.getsignal(signal.SIGINT)

    def fail(event):
        raise ValueError("of the script")

    with pytest.raises(ValueError, match="of the script"):
        start(checkpoints=checkpoints, callbacks=Callbacks(on_loaded=fail), quiet=False)
    assert "its script ended with ValueError: of the script" in capsys.readouterr().err
    assert "chaosnet" not in {thread.name for thread in threading.enumerate()}
    assert signal.getsignal(signal.SIGINT) is handler
    assert start(checkpoints=checkpoints).trainer.step == 2


@pytest.mark.parametrize(
    ("before", "now", "until", "stepped"),
    [("epoch", 8, 15, 3), ("step", 8, 15, 15), ("step", "epoch", 21, 15), (8, "epoch", 21, 13)],
)
def test_a_schedule_that_counts_in_another_unit_than_the_checkpoint_goes_on_from_there(
    start, tmp_path, before, now, until, stepped
):
    """It is not stepped at once for all that was trained before."""
    trained(start, tmp_path, 14, every=7, lr_scheduler_every=before)  # Two epochs.
    second = start(checkpoints=Checkpoints(tmp_path, every=7, resume=True), lr_scheduler_every=now)
    was = second.scheduler.last_epoch
    second.train(until)
    assert (was, second.scheduler.last_epoch) == (stepped - 1, stepped)


def test_the_order_of_samples_is_that_of_the_run_whatever_the_seed_is_now(start, tmp_path):
    straight = start(seed=3)
    straight.train(12)
    straight.close()
    trained(start, tmp_path, 10, seed=3)
    second = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True), seed=4)
    second.train(12)
    assert second.used == straight.used[10:]


def test_who_goes_on_with_a_run_that_has_all_its_epochs_hears_why_nothing_happens(start, tmp_path, capsys):
    trained(start, tmp_path, 14)
    script = start(checkpoints=Checkpoints(tmp_path, resume=True))
    capsys.readouterr()
    assert list(script.trainer.epochs(2)) == list(script.trainer.batches(data(), 8, epochs=1)) == []
    told = "nothing is left to train: the cluster has done 2 epochs, and this script asks for"
    assert [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()] == [
        f"{told} 2",
        f"{told} 1",
    ]
    for _ in script.trainer.epochs(3):
        assert script.train(21)
    assert list(script.trainer.epochs(3)) == [] and told not in capsys.readouterr().err


def test_to_resume_where_nothing_is_starts_from_scratch_and_says_so(start, tmp_path, capsys):
    assert start(checkpoints=Checkpoints(tmp_path / "new", resume=True)).trainer.step == 0
    assert f"nothing to resume in {tmp_path / 'new'}: starts from scratch" in capsys.readouterr().err


def test_what_a_node_has_loaded_is_gone_on_from_only_once_it_founds(start, tmp_path):
    """If its cluster lives, it joins that."""
    for loads, line in ((False, f"nothing to resume in {tmp_path}"), (True, "goes on from step 5 in")):
        said = []
        settings = CheckpointSettings(str(tmp_path), resume=True)
        node = checkpointing.Checkpointing(settings, "a", said.append)
        assert node.resume(lambda _: None) == loads
        assert (said, node.newest) == ([], None)
        node.founded()
        assert said[0].startswith(line) and bool(node.newest) == loads
        if not loads:
            trained(start, tmp_path, 5)


def test_a_checkpoint_itself_is_not_the_folder_to_resume_from(start, tmp_path):
    trained(start, tmp_path, 5)
    [checkpoint] = tmp_path.glob("step-*")
    with pytest.raises(ConfigError, match=r"is a checkpoint itself \(expected the folder that holds it"):
        start(checkpoints=Checkpoints(checkpoint, resume=True))


def test_without_resume_a_directory_with_checkpoints_is_refused(start, tmp_path):
    trained(start, tmp_path, 5)
    with pytest.raises(ConfigError, match=r"holds checkpoints up to step 5 already \(expected --resume"):
        start(checkpoints=Checkpoints(tmp_path))


def damage(checkpoint):
    (file,) = checkpoint.path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    return file


def test_a_damaged_newest_checkpoint_is_passed_over_and_named_unless_it_is_the_wanted_one(
    start, tmp_path, capsys
):
    trained(start, tmp_path, 10)
    file = damage(scan(tmp_path)[-1])
    with pytest.raises(CheckpointError, match=rf"cannot resume: {file} is damaged: .*--resume-from STEP"):
        start(checkpoints=Checkpoints(tmp_path, every=5, resume_from=10))
    assert "passed over" not in capsys.readouterr().err
    script = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    told = capsys.readouterr().err
    assert f"passed over: {file} is damaged: " in told
    assert "goes on from step 5 in" in told
    assert script.trainer.step == 5
    assert "set aside as" in told
    script.train(10)
    script.close()
    assert [each.step for each in scan(tmp_path)] == [5, 10]
    assert start(checkpoints=Checkpoints(tmp_path, every=5, resume=True)).trainer.step == 10


def test_a_newest_checkpoint_of_which_a_part_never_came_is_ignored_and_said(start, tmp_path, capsys):
    """Its writer died first: here one of two parts is there."""
    trained(start, tmp_path, 10)
    newest = scan(tmp_path)[-1].path
    for file in newest.iterdir():
        file.rename(file.with_name(file.name.replace("of-00001", "of-00002")))
    script = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    said = capsys.readouterr().err
    assert f"ignored: {newest} lacks shard 1 of 2" in said
    assert "goes on from step 5 in" in said
    assert script.trainer.step == 5


def test_if_all_are_damaged_the_newest_is_named(start, tmp_path):
    trained(start, tmp_path, 10)
    _, file = map(damage, scan(tmp_path))
    with pytest.raises(CheckpointError, match=rf"cannot resume: {file} is damaged"):
        start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))


def test_where_no_checkpoint_is_complete_nobody_is_sent_to_look_for_one_that_is(start, tmp_path):
    """All nodes were killed over the first checkpoint."""
    trained(start, tmp_path, 5)
    (file,) = scan(tmp_path)[-1].path.glob("*.json")
    file.unlink()
    with pytest.raises(
        CheckpointError, match=r"cannot resume: .*; none is complete \(another folder starts from"
    ):
        start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))


def test_a_damaged_checkpoint_changes_nothing_in_the_model(start, tmp_path, monkeypatch):
    trained(start, tmp_path, 5)
    (file,) = scan(tmp_path)[-1].path.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-1] + b"\0")
    model = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 2))
    before = [value.clone() for value in model.state_dict().values()]
    with pytest.raises(CheckpointError, match="is damaged"):
        Trainer(model, torch.optim.Adam(model.parameters()), checkpoints=Checkpoints(tmp_path, resume=True))
    assert all(map(torch.equal, before, model.state_dict().values()))


def test_the_checkpoint_of_another_model_is_refused_by_the_name_of_the_difference(start, tmp_path, capsys):
    trained(start, tmp_path, 5)
    with pytest.raises(ConfigError, match=r"'0.weight' is float32 \[8, 4\] here, float32 \[16, 4\] there"):
        start(checkpoints=Checkpoints(tmp_path, resume=True), width=8)
    assert "goes on from" not in capsys.readouterr().err


def test_a_step_that_is_not_there_is_refused_with_those_that_are(start, tmp_path):
    trained(start, tmp_path, 10)
    with pytest.raises(CheckpointError, match="no checkpoint of step 7; complete: step 5, step 10"):
        start(checkpoints=Checkpoints(tmp_path, resume_from=7))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"resume": True}, "resume: no directory"),
        ({"directory": "x", "every": 0}, "every: 0"),
        ({"directory": "x", "every": 1.5}, r"every: 1.5 \(expected a whole number from 1"),
        ({"directory": "x", "resume_from": -1}, "resume_from: -1"),
        ({"directory": "x", "copies": "some"}, "copies: 'some'"),
        ({"directory": "x", "kept": 0}, "kept: 0"),
        ({"directory": __file__}, r"directory: .* is a file \(expected a folder"),
    ],
)
def test_settings_that_cannot_work_are_named(start, settings, message):
    with pytest.raises(ConfigError, match=message):
        start(checkpoints=Checkpoints(**settings))


# --- the last one ---


def test_the_last_state_is_on_disk_whatever_its_step_and_resuming_goes_on_to_the_bit(start, tmp_path, capsys):
    straight = start()
    expected = straight.train(20)
    straight.close()
    trained(start, tmp_path, 13)
    assert f"the state after step 13 is in {tmp_path}" in capsys.readouterr().err
    second = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    assert second.trainer.step == 13
    assert second.train(20) == expected
    assert second.losses == straight.losses[13:]


def test_what_a_forward_pass_that_is_not_counted_has_changed_is_not_in_it(start, tmp_path):
    """Ctrl+C in the middle of a step: its dropout and its BatchNorm are of no step."""
    straight = start()
    expected = straight.train(20)
    straight.close()
    first = start(checkpoints=Checkpoints(tmp_path, every=5))
    first.train(13)
    first.model(torch.randn(8, 4)).sum().backward()
    first.close()
    second = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    assert second.train(20) == expected


def test_what_is_on_disk_already_is_not_written_again(start, tmp_path, capsys):
    script = trained(start, tmp_path, 10)
    assert script.counters()["checkpoints"] == 2
    assert "the state after" not in capsys.readouterr().err


def test_who_has_not_trained_writes_none(start, tmp_path):
    start(checkpoints=Checkpoints(tmp_path, every=5)).close()
    assert not scan(tmp_path)


# --- writing ---


def test_the_status_tells_the_newest_checkpoint_also_one_that_was_gone_on_from(start, tmp_path):
    plain = start()
    plain.train(1)
    assert plain.trainer.status().checkpoint is None
    plain.close()
    script = start(checkpoints=Checkpoints(tmp_path, every=5))
    assert told(script, lambda row: True).step == 0
    script.train(6)
    found = told(script, lambda row: row.step and not row.writing)
    assert found.step == 5 and abs(found.time_s - time.time()) < 60
    script.close()
    resumed = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    assert told(resumed, lambda row: row.step).step == 6


def test_the_newest_three_are_kept_and_the_last_write_is_waited_for(start, tmp_path):
    script = trained(start, tmp_path, 40, every=10)
    assert [(each.step, each.complete) for each in scan(tmp_path)] == [(20, True), (30, True), (40, True)]
    assert script.counters()["checkpoint_step"] == 40


@pytest.mark.parametrize("spoilt", [11, 14])
def test_a_model_that_has_become_nan_is_told_once_and_does_not_replace_older_checkpoints(
    start, tmp_path, capsys, spoilt
):
    script = start(checkpoints=Checkpoints(tmp_path, every=5))
    script.train(spoilt)
    with torch.no_grad():
        script.model[3].bias.fill_(torch.nan)  # As an optimizer does with a gradient that is NaN.
    script.train(40)
    script.close()
    assert [(each.step, each.complete) for each in scan(tmp_path)] == [(5, True), (10, True)]
    said = capsys.readouterr().err
    assert said.count("the model has become NaN, on all nodes: ") == 1
    assert "seen after step 15; no more checkpoints are written" in said
    resumed = start(checkpoints=Checkpoints(tmp_path, every=5, resume=True))
    assert resumed.trainer.step == 10
    resumed.train(12)
    with torch.no_grad():
        resumed.model[3].bias.fill_(torch.nan)
    resumed.close()
    assert [each.step for each in scan(tmp_path)] == [5, 10]


def test_who_leaves_while_the_disk_is_slow_says_what_it_waits_for(start, tmp_path, monkeypatch, capsys):
    original, said = checkpointing.write_shard, threading.Event()

    def slow(*args):
        assert said.wait(20)
        return original(*args)

    monkeypatch.setattr(checkpointing, "write_shard", slow)
    monkeypatch.setattr(checkpointing, "FIRST_S", 0.05)
    script = start(checkpoints=Checkpoints(tmp_path, every=100))
    script.train(3)
    on = script.trainer.engine.checkpointing
    told, say = [], on.say

    def hear(text):
        told.append(text)
        say(text)
        if text.startswith("waits for the disk"):
            said.set()

    on.say = hear
    script.close()
    assert f"waits for the disk: a checkpoint is still being written to {tmp_path}" in told
    assert [each.step for each in scan(tmp_path)] == [3]


def test_what_the_optimizer_changes_while_a_checkpoint_is_written_does_not_get_into_it(
    start, tmp_path, monkeypatch
):
    """The write is held up for three steps, and shows the state as it was."""
    go_on, original = threading.Event(), checkpointing.write_shard

    def slow(*args):
        go_on.wait(20)
        return original(*args)

    monkeypatch.setattr(checkpointing, "write_shard", slow)
    script = start(checkpoints=Checkpoints(tmp_path, every=5))
    expected = script.train(5)
    script.train(8)
    go_on.set()
    script.close()
    resumed = start(checkpoints=Checkpoints(tmp_path, every=5, resume_from=5))
    assert (resumed.trainer.step, resumed.trainer.state_hash()) == (5, expected)


def test_a_checkpoint_that_is_due_while_one_is_written_is_left_out_and_said(
    start, tmp_path, monkeypatch, capsys
):
    go_on, original = threading.Event(), checkpointing.write_shard

    def slow(*args):
        go_on.wait(20)
        return original(*args)

    monkeypatch.setattr(checkpointing, "write_shard", slow)
    script = start(checkpoints=Checkpoints(tmp_path, every=2), cluster=Cluster(name="solo"), patient=False)
    script.train(7)
    assert told(script, lambda row: row.writing).writing == ("solo",)
    go_on.set()
    assert script.counters()["checkpoints_left_out"] == 2
    assert "checkpoint_step" not in script.counters(), "it was not there yet"
    said = capsys.readouterr().err
    assert said.count("still writing the last one") == 1 and "no checkpoint at step 4: solo is" in said
    assert "checkpoint under way" not in script.trainer.metrics
    script.close()
    assert [each.step for each in scan(tmp_path)] == [2, 7]


def test_a_directory_that_cannot_be_read_for_a_while_does_not_keep_a_node_from_training(
    start, tmp_path, monkeypatch, capsys
):
    """As when it rejoins: the check of the directory at the start is past by then."""

    def fails(path):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    script = start(checkpoints=Checkpoints(tmp_path, every=5))
    script.train(2)
    with monkeypatch.context() as patched:
        patched.setattr(os, "listdir", fails)
        script.trainer.engine.checkpointing.started(2, "run")
    assert f"nothing set aside beyond step 2: {tmp_path}: Input/output error" in capsys.readouterr().err
    assert script.counters()["checkpoints_failed"] == 1
    script.train(5)
    script.close()
    assert [each.step for each in scan(tmp_path)] == [5]


@contextmanager
def mounted(folder, size):
    """A disk of so many bytes."""
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", folder], check=False)
    if done.returncode:
        pytest.skip("no tmpfs can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", folder], check=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_a_full_disk_is_told_and_training_goes_on_and_later_checkpoints_succeed(start, tmp_path, capsys):
    with mounted(tmp_path / "disk", "64k") as disk:
        script = start(checkpoints=Checkpoints(disk, every=5), width=4000)
        script.train(9)
        said = capsys.readouterr().err
        assert "no checkpoint at step 5: " in said
        assert "00000-of-00001.safetensors: No space left on device; training goes on" in said
        assert script.counters()["checkpoints_failed"] == 1
        subprocess.run(["mount", "-o", "remount,size=64m", disk], check=True)
        script.train(12)
        script.close()
        assert [each.step for each in scan(disk) if each.complete] == [10, 12]
        assert not list(disk.glob("*/.*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root")
def test_on_a_disk_for_two_checkpoints_each_is_written_and_the_newest_stays(start, tmp_path, capsys):
    size = trained(start, tmp_path / "all", 5, width=4000).counters()["checkpoint_bytes"]
    with mounted(tmp_path / "disk", int(2.5 * size)) as disk:
        script = start(checkpoints=Checkpoints(disk, every=5), width=4000)
        script.train(32)
        script.close()
        assert script.counters()["checkpoints_failed"] == 0
        assert [each.step for each in scan(disk) if each.complete] == [30, 32]
    assert capsys.readouterr().err.count(f"no space for another checkpoint in {disk}: older ones") == 1
