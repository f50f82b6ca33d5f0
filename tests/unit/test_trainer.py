"""`Trainer` on its own: a cluster of one, in this process. More nodes: tests/integration."""

import gc
import itertools
import json
import os
import re
import signal
import socket
import threading
import time
import weakref
from datetime import datetime, timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Subset, TensorDataset

from chaosnet import (
    Callbacks,
    Checkpoints,
    Cluster,
    ConfigError,
    EpochDone,
    ScaleOutFailed,
    StepDone,
    Trainer,
    capture_exit_event,
    close_all,
)
from chaosnet.data.share import fetch
from chaosnet.invite import Token
from chaosnet.node.keys import KeyPair
from chaosnet.protocols.errors import ChaosnetError, ReplicasDiffer
from chaosnet.protocols.messages import Notice
from chaosnet.script import exit_event
from chaosnet.script.teller import Teller
from chaosnet.training.agreement import Divergence

pytestmark = [pytest.mark.realtime, pytest.mark.usefixtures("fresh_exit_events")]

LENGTH = 24


def make_model(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


@pytest.fixture
def start():
    """Makes trainers and closes them."""
    trainers = []

    def make(model=None, optimizer=None, **settings):
        model = model or make_model()
        trainer = Trainer(model, optimizer or torch.optim.SGD(model.parameters(), 0.1), **settings)
        trainers.append(trainer)
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(LENGTH, 4, generator=generator), torch.arange(LENGTH) % 2, torch.arange(LENGTH)
    )


def loss_of(model, batch):
    return nn.functional.cross_entropy(model(batch.x), batch.y)


def train(trainer, batches):
    """Returns: the indices that were used, per update."""
    used = []
    for batch in batches:
        loss_of(trainer.model, batch).backward()
        if batch.last:
            trainer.update()
        used.append(batch[2].tolist())
    return used


# --- numbers ---


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_alone_a_trainer_does_what_a_plain_loop_does(start, data, name):
    model, twin = make_model(), make_model()
    optimizer, plain = (getattr(torch.optim, name)(each.parameters(), 0.01) for each in (model, twin))
    trainer = start(model, optimizer)
    for indices in train(trainer, trainer.batches(data, batch_size=8, epochs=3)):
        nn.functional.cross_entropy(twin(data[indices][0]), data[indices][1]).backward()
        plain.step()
        plain.zero_grad()
    for ours, theirs in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(ours, theirs)  # To the bit: nothing is weighted, and divided again.


def test_gradients_are_gone_after_an_update(start, data):
    trainer = start()
    train(trainer, trainer.batches(data, batch_size=8))
    assert all(parameter.grad is None for parameter in trainer.model.parameters())


def test_steps_samples_and_epochs_are_counted(start, data):
    trainer = start()
    assert (trainer.step, trainer.samples, trainer.epoch) == (0, 0, 0)
    train(trainer, trainer.batches(data, batch_size=5))
    assert (trainer.step, trainer.samples, trainer.epoch) == (5, LENGTH, 1)
    assert trainer.updates_here >= 4


def test_who_asks_for_a_mean_too_early_is_told_once(start, data, capfd):
    trainer = start(quiet=False)
    for batch in itertools.islice(trainer.batches(data, batch_size=8), 3):
        loss = loss_of(trainer.model, batch)
        loss.backward()
        mean = trainer.mean(loss)
        assert "is nan" not in capfd.readouterr().err
        trainer.update()
        assert float(mean) == pytest.approx(loss.item())
    for form in (float, "{:.3f}".format):
        assert str(form(trainer.mean(1.0))) == "nan"
        said = capfd.readouterr().err
        assert ("trainer.mean(..., 'loss') is nan until the next update()" in said) == (form is float)


def test_a_mean_is_not_a_number_until_the_update(start, data):
    trainer = start()
    for batch in trainer.batches(data, batch_size=8):
        loss = loss_of(trainer.model, batch)
        loss.backward()
        mean = trainer.mean(loss)
        assert str(mean) == "ClusterMean(nan)"
        trainer.update()
        assert float(mean) == pytest.approx(loss.item())
        assert f"{mean:.3f}" == f"{loss.item():.3f}"
        assert trainer.metrics == {"loss": float(mean)}


def test_a_value_given_several_times_is_averaged_by_weight(start, data):
    trainer = start()
    batch = next(trainer.batches(data, batch_size=8))
    loss_of(trainer.model, batch).backward()
    trainer.mean(1.0, "accuracy", weight=3)
    trainer.mean(0.0, "accuracy", weight=1)
    trainer.update()
    assert trainer.metrics["accuracy"] == 0.75


def test_what_has_no_weight_does_not_count_even_if_it_is_no_number(start, data):
    """As the mean over a batch of which nothing was left."""
    trainer = start()
    batch = next(trainer.batches(data, batch_size=8))
    loss_of(trainer.model, batch).backward()
    trainer.mean(0.5, "accuracy", weight=2)
    trainer.mean(float("nan"), "accuracy", weight=0)
    trainer.update()
    assert trainer.metrics["accuracy"] == 0.5


def test_the_state_hash_changes_with_every_update(start, data):
    trainer = start()
    hashes = {trainer.state_hash()}
    for batch in trainer.batches(data, batch_size=8):
        loss_of(trainer.model, batch).backward()
        trainer.update()
        hashes.add(trainer.state_hash())
    assert len(hashes) == 4


def test_what_a_joiner_would_fetch_counts_the_state_that_the_optimizer_has_made(start, data):
    """By a third of it the cluster chose to wait for joiners that took longer than a step."""
    model = make_model()
    trainer = start(model, torch.optim.Adam(model.parameters()))
    size, deadline_s = sum(each.nbytes for each in model.parameters()), time.monotonic() + 30
    train(trainer, trainer.batches(data, batch_size=8, epochs=1))
    while trainer.status().members[0].state_bytes < 3 * size:
        assert time.monotonic() < deadline_s


# --- data ---


def test_each_sample_of_an_epoch_is_handed_out_once_in_an_order_of_its_own(start, data):
    trainer = start(seed=3)
    epochs = [train(trainer, trainer.batches(data, batch_size=7)) for _ in range(2)]
    for used in epochs:
        assert [len(batch) for batch in used] == [7, 7, 7, 3]
        assert sorted(index for batch in used for index in batch) == list(range(LENGTH))
    assert epochs[0] != epochs[1]


def test_who_breaks_off_goes_on_with_the_rest_of_the_epoch(start, data):
    trainer = start()
    used = []
    for batch in trainer.batches(data, batch_size=7):
        loss_of(trainer.model, batch).backward()
        trainer.update()
        used += batch[2].tolist()
        if len(used) > 7:
            break
    used += [index for batch in train(trainer, trainer.batches(data, batch_size=7)) for index in batch]
    assert sorted(used) == list(range(LENGTH)) and trainer.epoch == 1


def test_a_data_set_that_grows_between_two_passes_that_were_kept_is_refused(start, data):
    trainer = start()
    growing = Subset(data, range(10))
    passes = trainer.batches(growing, batch_size=5)
    train(trainer, passes)
    growing.indices = range(12)
    with pytest.raises(ConfigError, match="has 12 samples here, 10 in the cluster"):
        train(trainer, passes)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_data_loader_deals_what_its_data_set_would(start, data, workers):
    def passes(dataset, **settings):
        with start() as trainer:
            return [train(trainer, trainer.batches(dataset, **settings)) for _ in range(2)]

    shuffled = DataLoader(data, batch_size=7, shuffle=True, num_workers=workers)
    assert passes(shuffled) == passes(data, batch_size=7)
    assert passes(shuffled, accumulate=2) == passes(data, batch_size=7, accumulate=2)
    ordered = DataLoader(data, batch_size=7, drop_last=True, num_workers=workers)
    assert passes(ordered) == 2 * [[list(range(n, n + 7)) for n in (0, 7, 14)]]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_device_that_a_script_makes_its_tensors_on_is_of_the_script_alone(start, data, tmp_path, workers):
    """As of torch.set_default_device("cuda"); here one on which nothing can be read."""
    model, loader = make_model(), DataLoader(data, 8, num_workers=workers)
    with torch.device("meta"):
        trainer = start(model, guard="skip", checkpoints=Checkpoints(tmp_path, every=2, kept=1))
        used = train(trainer, trainer.batches(loader)) + train(
            trainer, trainer.batches(data, 8, shuffle=False)
        )
        with torch.no_grad():
            for batch in trainer.evaluate(loader):
                trainer.mean(loss_of(model, batch))
        evaluated = trainer.metrics["loss"]
        trainer.close()
    assert [*itertools.chain(*used)] == [*range(LENGTH), *range(LENGTH)]
    whole = nn.functional.cross_entropy(model(data[:][0]), data[:][1])
    assert evaluated == pytest.approx(whole.item())
    assert len(list(tmp_path.glob("step-*"))) == 1


def test_a_data_loader_of_an_earlier_pass_is_not_kept(start, data):
    trainer, made = start(), []
    for _ in range(3):
        loader = DataLoader(data, batch_size=8)
        made.append(weakref.ref(loader))
        train(trainer, trainer.batches(loader))
    del loader
    gc.collect()
    assert [each() is None for each in made] == [True, True, False]


def test_what_the_data_loader_says_is_not_said_again(start, data):
    trainer, loader = start(), DataLoader(data, batch_size=7)
    for given in ({"batch_size": 4}, {"collate_fn": list}, {"shuffle": False}):
        with pytest.raises(ConfigError, match=f"{next(iter(given))}: .* none beside a DataLoader"):
            next(trainer.batches(loader, **given))


def test_samples_may_be_dealt_in_their_order_and_few_in_a_step(start, data):
    trainer = start()
    used = train(trainer, trainer.batches(data, batch_size=8, shuffle=False, global_batch=6))
    assert used == [list(range(n, n + 6)) for n in range(0, LENGTH, 6)]
    with pytest.raises(ConfigError, match="shuffle is True here, False in the cluster"):
        next(trainer.batches(data, batch_size=8, global_batch=6))
    with pytest.raises(ConfigError, match="global_batch is 0 here, 6 in the cluster"):
        next(trainer.batches(data, batch_size=8, shuffle=False))


def test_a_batch_without_an_update_was_not_used(start, data):
    trainer = start()
    abandoned = next(trainer.batches(data, batch_size=4))[2].tolist()
    assert train(trainer, trainer.batches(data, batch_size=4))[0] == abandoned


def test_accumulated_batches_say_when_to_update_and_what_they_weigh(start, data):
    trainer = start()
    batches = []
    for batch in trainer.batches(data, batch_size=3, accumulate=3):
        batches.append((batch.samples, batch.last, round(batch.share, 3)))
        (loss_of(trainer.model, batch) * batch.share).backward()
        if batch.last:
            trainer.update()
    whole = [(3, False, 0.333), (3, False, 0.333), (3, True, 0.333)]
    assert batches == [*whole, *whole, (2, False, 0.333), (2, False, 0.333), (2, True, 0.333)]
    assert (trainer.step, trainer.samples) == (3, LENGTH)


def test_epochs_counts_those_that_the_cluster_still_has_to_do(start, data):
    trainer = start()
    done = [len(train(trainer, trainer.batches(data, batch_size=8))) for _ in trainer.epochs(3)]
    assert done == [3, 3, 3]
    assert list(trainer.epochs(3)) == []


def test_an_epoch_that_the_loop_inside_has_left_is_an_error_and_not_the_end(start, data):
    trainer = start()
    epochs = trainer.epochs(3)
    next(epochs)
    batches = iter(trainer.batches(data, batch_size=8))
    loss_of(trainer.model, next(batches)).backward()
    trainer.update()
    with pytest.raises(ConfigError, match=r"left epoch 0 after 8 of 24 samples .*Subset"):
        next(epochs)


def test_epochs_ends_when_the_node_is_to_leave(start, data):
    trainer = start()
    epochs = trainer.epochs(3)
    assert [next(epochs), next(trainer.batches(data, batch_size=8)).samples] == [0, 8]
    exit_event.want_exit()
    assert list(epochs) == []


def test_a_node_alone_is_the_main_one_from_the_beginning(start, data):
    trainer = Trainer(cluster=Cluster(name="a"))
    with pytest.raises(ConfigError, match="no model yet"):
        assert trainer.is_main
    trainer = start(cluster=Cluster(name="a"))
    assert (trainer.is_main, trainer.world_size, trainer.members) == (True, 1, ("a",))
    train(trainer, trainer.batches(data, batch_size=8))
    assert trainer.is_main and trainer.world_size == 1
    trainer.close()
    assert trainer.is_main, "what it was to do at the end, it does"


# --- mistakes ---


def test_forgetting_update_is_noticed(start, data):
    trainer = start()
    with pytest.raises(ConfigError, match=r"without optimizer\.step\(\) or trainer\.update"):
        for batch in trainer.batches(data, batch_size=8):
            loss_of(trainer.model, batch).backward()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"batch_size": 0}, "batch_size: 0 "),
        ({"batch_size": 4, "accumulate": 0}, "accumulate: 0 "),
        ({"batch_size": 4, "min_samples": "2"}, "min_samples: '2' "),
        ({"batch_size": 4, "min_samples": 5}, r"min_samples: 5 .* which is 4"),
        ({"batch_size": 4, "drop_last": 5}, "drop_last: 5 "),
        ({"batch_size": 4, "shuffle": "no"}, "shuffle: 'no' "),
        ({"batch_size": 4, "min_samples": 3, "global_batch": 2}, r"global_batch: 2 .* which is 3"),
        ({}, r"batch_size: None \(expected a whole number from 1\)"),
    ],
)
def test_how_batches_are_dealt_is_checked(start, data, settings, named):
    with pytest.raises(ConfigError, match=named):
        next(start().batches(data, **settings))


def test_epochs_are_those_of_batches(start, data):
    trainer = start()
    with pytest.raises(ConfigError, match=r"epochs: counts epochs of trainer\.batches"):
        for _ in trainer.epochs(3):
            loss_of(trainer.model, fetch(data, [0, 1])).backward()
            trainer.update(samples=1)


def test_an_empty_data_set_is_refused(start, data):
    with pytest.raises(ConfigError, match="expected >= 1 sample"):
        next(start().batches(torch.utils.data.Subset(data, []), batch_size=4))


def test_another_data_set_is_refused(start, data):
    trainer = start()
    train(trainer, trainer.batches(data, batch_size=8))
    with pytest.raises(ConfigError, match="has 5 samples here, 24 in the cluster"):
        next(trainer.batches(torch.utils.data.Subset(data, range(5)), batch_size=4))


@pytest.mark.parametrize(
    "settings",
    [{"neighbors": 65}, {"neighbors": 0}, {"join_patience_s": float("nan")}, {"join_patience_s": float("inf")},
     {"links": tuple(f"n{index}" for index in range(65))}],
)  # fmt: skip
def test_numbers_are_within_what_the_cluster_takes(settings):
    [name] = settings
    with pytest.raises(ConfigError, match=rf"{name}: .* \(expected "):
        Trainer(cluster=Cluster(**settings))


@pytest.mark.parametrize(
    "settings",
    [{"seed": "x"}, {"max_grad_norm": "1"}, {"max_grad_norm": 0}, {"after_step": 5},
     {"guard": 5}, {"guard": "skip", "guard_factor": "10"}],
    ids=str,
)  # fmt: skip
def test_a_setting_that_cannot_be_is_named_with_its_value_and_what_was_expected(settings):
    *_, (name, value) = settings.items()
    with pytest.raises(ConfigError) as refused:
        Trainer(**settings)
    assert str(refused.value).startswith(f"{name}: {value!r} (expected ")


@pytest.mark.parametrize(
    ("group", "settings"),
    [(Cluster, {"links": "h:1"}), (Cluster, {"links": (1,)}), (Cluster, {"join": ("h:1",)}),
     (Cluster, {"listen": 5555}), (Cluster, {"name": 7}), (Cluster, {"neighbors": "2"}),
     (Cluster, {"sync_policy": 5}), (Cluster, {"probe": 5}), (Cluster, {"blocking": "no"}),
     (Cluster, {"insecure": "no"}), (Cluster, {"key": 7}), (Cluster, {"allowed_keys": 7}),
     (Cluster, {"chunk_bytes": 0.5}), (Checkpoints, {"directory": 7}),
     (Checkpoints, {"directory": "d", "every": [1]}), (Checkpoints, {"directory": "d", "resume": "no"})],
    ids=str,
)  # fmt: skip
def test_so_is_one_of_a_group(group, settings):
    *_, (name, value) = settings.items()
    with pytest.raises(ConfigError) as refused:
        Trainer(**{group.__name__.lower(): group(**settings)})
    assert str(refused.value).startswith(f"{name}: {value!r} (expected ")


def test_an_invite_in_the_wrong_place_is_not_repeated():
    with pytest.raises(ConfigError, match=r"join: \('\.\.\.',\) \(expected") as refused:
        Trainer(cluster=Cluster(join=("chaosnet-invite-" + "A1b-" * 30,)))
    assert "A1b" not in str(refused.value)


def test_a_trainer_that_has_left_says_so_when_it_is_asked(start):
    trainer = start()
    trainer.request_node_exit()
    with pytest.raises(ChaosnetError, match="this node has left"):
        trainer.status()


@pytest.mark.parametrize("samples", [-1, float("nan"), float("inf"), 1e13])
def test_samples_is_a_number_of_at_least_zero(start, samples):
    with pytest.raises(ConfigError, match=r"update: samples is .* \(expected a number from 0 to 1e\+12\)"):
        start().update(samples=samples)


@pytest.mark.parametrize("samples", [1e-39, 9e-13])
def test_samples_are_no_number_that_float32_has_no_reciprocal_of(start, samples):
    with pytest.raises(ConfigError, match=rf"samples is {samples} \(expected 0, or a number from 1e-12\)"):
        start().update(samples=samples)


@pytest.mark.parametrize("name", [32, "", "x" * 65])
def test_a_mean_whose_name_would_not_reach_the_others_is_refused(start, name):
    with pytest.raises(ConfigError, match=r"mean: the name is .* \(expected 1 to 64 characters\)"):
        start().mean(0.5, name)


def test_the_weight_of_a_mean_may_be_a_tensor_and_is_a_number_of_at_least_zero(start):
    trainer = start()
    trainer.mean(1.0, weight=torch.tensor(2.0))
    trainer.update()
    assert trainer.metrics == {"loss": 1.0}
    with pytest.raises(ConfigError, match="mean: the weight of 'loss' is -1"):
        trainer.mean(1.0, weight=-1)


def test_an_update_between_batches_that_belong_together_is_refused(start, data):
    trainer = start()
    with pytest.raises(ConfigError, match=r"update\(\) after batch 1 of 3 that belong together"):
        for batch in trainer.batches(data, batch_size=3, accumulate=3):
            (loss_of(trainer.model, batch) * batch.share).backward()
            trainer.update()


@pytest.mark.parametrize("dealt", [False, True])
def test_a_grad_scaler_unscales_before_the_update(start, dealt):
    """It leaves no trace in the gradients' version, and chunks have left during backward."""
    model = nn.Linear(3, 1, bias=False)
    nn.init.zeros_(model.weight)
    trainer = start(model)
    scaler = torch.amp.GradScaler("cpu")
    ones = TensorDataset(torch.ones(6, 3))
    for batch in trainer.batches(ones, batch_size=2) if dealt else [(torch.ones(2, 3),)] * 3:
        scaler.scale(model(batch[0]).mean()).backward()
        scaler.unscale_(trainer.optimizer)
        trainer.update()
        scaler.update()
    assert torch.allclose(model.weight, torch.full((1, 3), -0.3))


def test_a_sparse_gradient_is_refused_with_the_name_of_its_parameter(start):
    model = nn.ModuleDict({"words": nn.Embedding(5, 3, sparse=True)})
    trainer = start(model)
    with pytest.raises(ConfigError, match=r"'words\.weight' has a sparse gradient"):
        model["words"](torch.tensor([1])).sum().backward()
        trainer.update()


def test_a_trainer_that_is_refused_leaves_nothing_at_the_model(tmp_path):
    (tmp_path / "step-1").touch()
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for settings in ({"extra_state": [1]}, {"checkpoints": Checkpoints(tmp_path / "step-1")}):
        with pytest.raises(ConfigError):
            Trainer(model, optimizer, **settings)
    assert not any(parameter._post_accumulate_grad_hooks for parameter in model.parameters())


def test_a_model_without_an_optimizer_is_refused():
    with pytest.raises(ConfigError, match="expected a model and an optimizer, or neither"):
        Trainer(make_model())


def test_a_trainer_without_a_model_says_so_until_one_is_attached(data):
    trainer = Trainer()
    with pytest.raises(ConfigError, match="no model yet"):
        trainer.status()
    model = make_model()
    trainer.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    assert train(trainer, trainer.batches(data, batch_size=12)) != []
    with pytest.raises(ConfigError, match="has a model already"):
        trainer.attach(model, torch.optim.SGD(model.parameters(), 0.1))
    trainer.close()


@pytest.mark.parametrize("call", ["update", "batches", "check_state_replication", "state_hash"])
def test_whatever_is_called_before_attach_says_what_is_missing(data, call):
    with pytest.raises(ConfigError, match="no model yet"):
        list(getattr(Trainer(), call)(*([data, 4] if call == "batches" else [])))


def test_an_address_that_answers_nothing_is_named(start, free_address):
    with pytest.raises(ScaleOutFailed, match=f"cannot join {free_address}: nobody answers"):
        start(cluster=Cluster(join=free_address, join_patience_s=0.3))


def test_a_founder_that_fails_inside_is_not_said_to_join_anything(start, monkeypatch):
    def fail(*arguments, **others):
        raise RuntimeError("a defect")

    monkeypatch.setattr("chaosnet.node.agent.core.Agent.found", fail)
    with pytest.raises(ScaleOutFailed, match=r"cannot found a cluster: .*RuntimeError: a defect"):
        start()


@pytest.fixture
def free_address():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    return f"127.0.0.1:{port}"


# --- leaving ---


def test_leaving_says_what_was_done_here(start, data, capsys):
    trainer = start(cluster=Cluster(name="solo"))
    train(trainer, trainer.batches(data, batch_size=8))
    trainer.request_node_exit()
    said = capsys.readouterr().err
    assert "solo left after step 3" in said
    assert f"run: 3 steps, 3 with samples from here ({len(data)} of {len(data)})" in said
    assert "work lost: none\n" in said and "members: solo at the end\n" in said
    trainer.close()  # Again: harmless.
    assert capsys.readouterr().err == ""


def test_a_quiet_trainer_prints_nothing(start, data, capsys):
    trainer = start(quiet=True)
    train(trainer, trainer.batches(data, batch_size=8))
    trainer.close()
    assert capsys.readouterr().err == ""


def test_whoever_wants_no_summary_hears_that_the_node_left(start, data, capsys):
    trainer = start(cluster=Cluster(name="solo"), summary=False)
    train(trainer, trainer.batches(data, batch_size=8))
    trainer.close()
    assert capsys.readouterr().err.splitlines()[-1].startswith("[chaosnet] solo left after step 3")


def test_as_json_every_line_is_an_object(start, data, capfd):
    trainer = start(cluster=Cluster(name="solo"), log_format="json")
    train(trainer, trainer.batches(data, batch_size=8))
    exit_event._tell("finishing the step")
    trainer._teller.notice(
        Notice(kind="link-failure", node="n1 - n3", detail="lost n1 - n3", step=3, time_s=0.0)
    )
    trainer.close()
    exit_event.speak("text", "")
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines()]
    assert len(lines) >= 3
    for line in lines:
        assert line["node"] == "solo" and line["text"] and line["time"].endswith("Z")
        assert datetime.fromisoformat(line["time"]).utcoffset() == timedelta(0)
    [lost] = [line for line in lines if line["event"] == "link-failure"]
    assert (lost["step"], lost["subject"], lost["detail"]) == (3, "n1 - n3", "lost n1 - n3")
    assert lost["text"] == "the link n1 - n3 is lost: lost n1 - n3"
    assert lines[-2]["event"] == "said" and lines[-2]["text"].startswith("solo left after step 3")
    assert lines[-1]["event"] == "summary" and lines[-1]["text"].startswith("run: 3 steps, 3 with samples")
    assert (lines[-1]["steps"], lines[-1]["samples_here"], lines[-1]["members"]) == (3, len(data), ["solo"])


def test_the_exit_event_ends_the_batches_and_the_script_leaves(start, data):
    trainer = start()
    for batch in trainer.batches(data, batch_size=2, epochs=100):
        loss_of(trainer.model, batch).backward()
        trainer.update()
        if trainer.step == 3:
            exit_event.want_exit()
        if capture_exit_event():
            break
    assert trainer.step == 3
    trainer.request_node_exit()


def test_a_script_that_does_not_ask_is_ended_by_the_exit_event(start, data, capsys):
    trainer = start()
    with pytest.raises(SystemExit) as ended:
        for batch in trainer.batches(data, batch_size=2, epochs=100):
            loss_of(trainer.model, batch).backward()
            exit_event.want_exit()
            trainer.update()
    assert ended.value.code == 0
    assert "left after step" in capsys.readouterr().err


def test_a_script_that_was_to_ask_after_its_first_step_may_do_so_although_the_exit_event_came_before(
    start, data
):
    from chaosnet import capture_exit_event as asks

    trainer, done = start(), []
    for index in range(5):  # It brings its own data.
        exit_event.want_exit()
        loss_of(trainer.model, fetch(data, [index])).backward()
        trainer.update()
        done.append(index)
        if asks():
            break
    assert done == [0] and trainer.step == 1


def test_one_that_imports_it_and_does_not_ask_is_ended_a_step_later(start, data):
    exit_event.imported()
    trainer, done = start(), []
    exit_event.want_exit()
    with pytest.raises(SystemExit):
        for index in range(5):
            loss_of(trainer.model, fetch(data, [index])).backward()
            trainer.update()
            done.append(index)
    assert done == [0]


@pytest.mark.parametrize("loop", ["batches", "evaluate"])
def test_one_that_does_not_ask_is_ended_where_a_loop_ends_for_the_exit_event(start, data, loop, capsys):
    """Behind the loop it would look for what has not come."""
    trainer = start()
    with pytest.raises(SystemExit) as ended:
        for batch in getattr(trainer, loop)(data, batch_size=2):
            if loop == "batches":
                loss_of(trainer.model, batch).backward()
                trainer.update()
            exit_event.want_exit()
    assert ended.value.code == 0
    assert "left after step" in capsys.readouterr().err


@pytest.mark.parametrize("loop", ["batches", "evaluate"])
def test_one_that_may_ask_goes_on_behind_the_loop(start, data, loop):
    exit_event.imported()
    trainer = start()
    for batch in getattr(trainer, loop)(data, batch_size=2):
        exit_event.want_exit()
        if loop == "batches":
            loss_of(trainer.model, batch).backward()
            trainer.update()
    assert capture_exit_event()


def started_in_a_thread(start):
    """One thread drives one trainer."""
    made = []
    thread = threading.Thread(target=lambda: made.append(start()))
    thread.start()
    thread.join()
    return made[0]


def handlers():
    return [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]


def test_a_trainer_to_which_no_name_leads_can_be_closed(start):
    """As in a notebook, where the function that made it has ended with an error."""
    trainers = [start(), started_in_a_thread(start)]
    with pytest.raises(ConfigError, match=r"is still open .* chaosnet\.close_all\(\) if no name leads to it"):
        start()
    close_all()
    assert [trainer.session.ended.how for trainer in trainers] == ["left", "left"]
    start()


@pytest.mark.parametrize("call", ["update", "batches", "status"])
def test_a_forked_child_that_asks_the_trainer_of_its_parent_is_told_that_it_is_no_node(start, data, call):
    trainer = start()
    ask = {"batches": lambda: next(iter(trainer.batches(data, 2)))}.get(call, getattr(trainer, call))
    came, told = os.pipe()
    if (child := os.fork()) == 0:
        threading.Timer(20, lambda: os._exit(1)).start()
        try:
            ask()
        except ConfigError as error:
            os.write(told, str(error).encode())
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert b"this process was forked from that of a node, and is none" in os.read(came, 1000)
    trainer.update(samples=0)


def test_when_the_last_trainer_has_closed_signals_do_what_they_did_before(start):
    before = handlers()
    trainers = [start(), started_in_a_thread(start)]
    trainers.pop().close()
    assert handlers() != before
    signal.raise_signal(signal.SIGTERM)
    assert capture_exit_event()
    trainers.pop().close()
    assert capture_exit_event() and handlers() == before


def test_a_trainer_that_fails_to_join_catches_no_signals(start, free_address):
    before = handlers()
    with pytest.raises(ScaleOutFailed):
        start(cluster=Cluster(join=free_address, join_patience_s=0.1))
    assert handlers() == before


def test_a_trainer_whose_invite_is_refused_catches_no_signals_and_leaves_no_thread(
    start, free_address, monkeypatch, tmp_path
):
    def refuse(token, keys):
        raise ScaleOutFailed("the invite does not let this node in: it was used already")

    monkeypatch.setattr("chaosnet.settings.resolved.introduce", refuse)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    token = Token(KeyPair.new(), (f"{KeyPair.new().public}@{free_address}",)).encode()
    before = handlers()
    with pytest.raises(ScaleOutFailed, match=rf"cannot join .*{free_address}: the invite does not"):
        start(cluster=Cluster(join=token))
    assert handlers() == before
    assert [t.name for t in threading.enumerate() if t.name.startswith("chaosnet")] == []


def test_a_handler_that_the_script_installs_meanwhile_stays(start, monkeypatch):
    trainer = start()
    signal.signal(signal.SIGTERM, lambda *args: None)
    mine = signal.getsignal(signal.SIGTERM)
    trainer.close()
    assert handlers() == [signal.default_int_handler, mine]


def test_ctrl_c_counts_again_after_a_trainer_was_closed_in_a_thread(start):
    closing = threading.Thread(target=start().close)
    closing.start()
    closing.join()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert not capture_exit_event()


def test_nothing_keeps_a_trainer_that_has_closed():
    model = make_model()
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.1))
    trainer.close()
    kept = weakref.ref(trainer)
    del trainer
    gc.collect()
    assert kept() is None


def test_a_with_statement_leaves_at_its_end_and_says_goodbye_at_once_after_an_error(data, capsys):
    model = make_model()
    with Trainer(model, torch.optim.SGD(model.parameters(), 0.1)) as trainer:
        train(trainer, trainer.batches(data, batch_size=8))
    assert "left after step 3" in capsys.readouterr().err
    with (
        pytest.raises(ZeroDivisionError),
        Trainer(model, torch.optim.SGD(model.parameters(), 0.1)) as trainer,
    ):
        print(1 / 0)
    assert "its script ended with ZeroDivisionError: division by zero" in capsys.readouterr().err
    trainer.close()


def test_after_leaving_the_model_is_the_scripts_own_again(start, data):
    trainer = start()
    train(trainer, trainer.batches(data, batch_size=8))
    trainer.close()
    loss_of(trainer.model, fetch(data, [0, 1])).backward()
    assert all(parameter.grad is not None for parameter in trainer.model.parameters())


def test_a_closed_trainer_leaves_no_thread_behind(start, data):
    before = threading.active_count()
    trainer = start()
    train(trainer, trainer.batches(data, batch_size=8))
    trainer.close()
    gc.collect()
    assert [t.name for t in threading.enumerate() if t.name.startswith("chaosnet")] == []
    assert threading.active_count() <= before + 1  # zmq's garbage collector stays.


def test_status_shows_the_cluster(start, data):
    trainer = start(cluster=Cluster(name="solo"))
    train(trainer, trainer.batches(data, batch_size=8))
    status = trainer.status()
    assert (status.node, status.scheduler, status.phase) == ("solo", "solo", "member")
    assert [member.node for member in status.members] == ["solo"]
    assert status.step >= 3  # It counts rounds, also those in which nobody had samples yet.


def test_the_history_of_a_status_has_the_means_of_each_step_and_is_there_when_it_is_asked_for(start, data):
    trainer = start()
    told = []
    for batch in trainer.batches(data, batch_size=8):
        loss_of(trainer.model, batch).backward()
        trainer.mean(float(len(told)))
        trainer.update()
        told.append(trainer.metrics)
    assert told == [{"loss": 0.0}, {"loss": 1.0}, {"loss": 2.0}]
    steps = trainer.status(history=True).steps
    assert [row.metrics for row in steps if row.metrics] == told
    assert sum(row.samples for row in steps) == LENGTH
    assert (trainer.status().steps, trainer.status().metrics) == ((), told[-1])


def test_a_trainer_that_cannot_listen_leaves_the_script_as_it_was_and_may_try_again():
    model = make_model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        trainer = Trainer(cluster=Cluster(listen=f"127.0.0.1:{taken.getsockname()[1]}"), quiet=True)
        with pytest.raises(ConfigError, match=r"cannot listen on .*: Address already in use$"):
            trainer.attach(model, optimizer)
        optimizer.step()  # It is the script's again.
        trainer.close()
    trainer.attach(model, optimizer)
    trainer.close()


def test_of_a_node_that_is_to_heal_when_nobody_else_is_left_no_state_passes_for_the_clusters(start, data):
    trainer = start(on_divergence="heal", quiet=True)
    with pytest.raises(ReplicasDiffer, match="Nobody is left whose state this node could pull"):
        for batch in trainer.batches(data, batch_size=8, min_samples=4, drop_last=True):
            loss_of(trainer.model, batch).backward()
            trainer.engine.healing = Divergence("state", "x", "x differs", here=True)
            trainer.update()


def test_an_update_without_samples_says_nothing_of_those_to_come(start):
    trainer = start()
    x = torch.ones(3, 4)
    for samples in (3, 0, None):
        if samples != 0:
            trainer.model(x).sum().backward()
        trainer.update(samples=samples)
    assert (trainer.step, trainer.samples) == (2, 6)


# --- callbacks ---


def test_after_step_may_take_the_trainer(start, data):
    seen = []
    trainer = start(after_step=lambda trainer: seen.append(trainer.metrics["loss"]))
    for batch in trainer.batches(data, batch_size=8):
        loss = loss_of(trainer.model, batch)
        loss.backward()
        trainer.mean(loss)
        trainer.update()
    assert len(seen) == 3 and seen[-1] == trainer.metrics["loss"]
    trainer.close()
    with pytest.raises(
        ConfigError, match=r"after_step: takes a, b \(expected a function of nothing, or of the"
    ):
        start(after_step=lambda a, b: None)


def test_epochs_are_told_after_their_last_step(start, data):
    told = []
    trainer = start(callbacks=Callbacks(on_step=told.append, on_epoch=told.append))
    train(trainer, trainer.batches(data, batch_size=8, epochs=2))
    applied = [type(each) for each in told if isinstance(each, EpochDone) or each.applied]
    assert applied == 2 * [*3 * [StepDone], EpochDone]
    assert [(each.epoch, each.step, each.samples) for each in told if isinstance(each, EpochDone)] == [
        (1, 3, LENGTH), (2, 6, 2 * LENGTH),
    ]  # fmt: skip


def test_each_step_is_told_with_its_numbers(start, data):
    told = []
    trainer = start(callbacks=Callbacks(on_step=told.append))
    train(trainer, trainer.batches(data, batch_size=8))
    trained = [each for each in told if each.applied]
    assert [each.step for each in trained] == list(range(1, trainer.step + 1))
    assert all(each.members == (trainer.name,) for each in told)
    assert sum(each.weight for each in told) == told[-1].samples == len(data)
    assert (told[-1].epoch, told[0].epoch) == (1, 0)


def test_a_node_that_is_to_leave_by_a_callback_ends_its_step_first(start, data):
    def enough(done):
        if done.step == 2:
            trainer.request_node_exit()

    trainer = start(callbacks=Callbacks(on_step=enough))
    assert len(train(trainer, trainer.batches(data, batch_size=2))) == 2
    assert (trainer.step, trainer.updates_here) == (2, 2)
    assert trainer.session.ended.how == "left"


def test_another_thread_that_takes_the_node_out_while_a_callback_runs_waits_until_it_is_out(start, data):
    entered, told = threading.Event(), []

    def slow(done):
        if done.applied and not entered.is_set():
            entered.set()
            told.append(left.wait(0.2))

    trainer, left = start(callbacks=Callbacks(on_step=slow)), threading.Event()

    def leave():
        entered.wait(10.0)
        trainer.request_node_exit()
        told.append(trainer.session.ended.how)
        left.set()

    other = threading.Thread(target=leave)
    other.start()
    train(trainer, trainer.batches(data, batch_size=2))
    other.join(10.0)
    assert told == [False, "left"]


def once(act):
    """A callback that does it at the first step with samples, and never again."""
    done = []
    return lambda event: event.applied and not done and (done.append(event), act())


@pytest.mark.parametrize("call", ["trainer.update", "optimizer.step"])
def test_a_step_in_a_callback_is_refused(start, data, call):
    def step():
        trainer.update() if call == "trainer.update" else trainer.optimizer.step()

    trainer = start(callbacks=Callbacks(on_step=once(step)))
    with pytest.raises(ConfigError, match=rf"on_step called {call}"):
        train(trainer, trainer.batches(data, batch_size=8))


def test_what_a_callback_raises_the_step_raises(start, data):
    def fail():
        raise ValueError("mine")

    trainer = start(callbacks=Callbacks(on_step=once(fail)))
    with pytest.raises(ValueError, match="mine"):
        train(trainer, trainer.batches(data, batch_size=8))


def test_the_thread_that_serves_links_may_ask_the_trainer_and_have_it_leave_and_takes_no_step(start, data):
    trainer = start()
    ask = trainer.session.loop.ask
    assert ask(lambda: trainer.status().node) == trainer.name
    with pytest.raises(ConfigError, match=r"on_notice or on_parked called trainer\.update"):
        ask(trainer.update)
    ask(trainer.request_node_exit)
    assert train(trainer, trainer.batches(data, batch_size=2, epochs=100)) == []
    trainer.close()
    assert trainer.session.ended.how == "left"


def test_what_a_callback_of_notices_raises_is_told_and_no_more(capsys):
    def fails(event):
        raise ValueError("mine")

    teller = Teller(False, Callbacks(on_notice=fails, on_parked=fails))
    teller.parked(None)
    assert "on_parked of the script failed: ValueError: mine" in capsys.readouterr().err


def test_callbacks_of_another_type_are_refused(start):
    with pytest.raises(ConfigError, match=r"callbacks: .* \(expected chaosnet.Callbacks\(\.\.\.\)\)"):
        start(callbacks=print)


def test_an_evaluation_by_one_node_averages_over_all_samples_and_trains_nothing(start, data):
    told = []
    trainer = start(callbacks=Callbacks(on_step=told.append))
    before, seen = trainer.state_hash(), []
    for x, _, indices in trainer.evaluate(data, 24):
        seen += indices.tolist()
        trainer.mean(x.mean(), "x")
    assert seen == list(range(LENGTH))
    whole = torch.stack([x for x, _, _ in data])
    assert trainer.metrics == {"x": pytest.approx(whole.mean().item(), rel=1e-5)}
    assert (trainer.step, trainer.samples, trainer.state_hash()) == (0, 0.0, before)
    assert told == []


@pytest.mark.parametrize(
    "given, message",
    [
        ({"batch_size": 0}, "batch_size: 0 (expected a whole number from 1)"),
        ({}, "batch_size: None (expected a whole number from 1)"),
        ({"dataset": [], "batch_size": 4}, "dataset: [] (expected one with samples)"),
        ({"dataset": iter([1]), "batch_size": 4}, "evaluate: list_iterator has no __len__"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_what_cannot_be_evaluated_is_named(start, data, given, message):
    trainer = start()
    with pytest.raises(ConfigError, match=re.escape(message)):
        list(trainer.evaluate(**{"dataset": data, **given}))
