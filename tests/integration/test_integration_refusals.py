"""What other trainers have and a cluster cannot mean is refused by its name, with what to write instead."""

from __future__ import annotations

import importlib
import re
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset, WeightedRandomSampler

from chaosnet import ConfigError, extras
from chaosnet.integrations.dealt import samples_a_step, settings_and_rules

pytestmark = [pytest.mark.realtime, pytest.mark.slow]  # They import the frameworks.

PAGE = Path(__file__).parent.parent.parent / "docs" / "integrations.md"
OTHER_WORDS = {
    "the number of optimizers": "optimizer",
    "the output of training_step": "`training_step` that returns None",
    "the number of optimizer steps before it": "after several steps of the optimizer",
    "train_dataloaders": "several `train_dataloaders`",
    "train_dataset": "`train_dataset` without `[index]`",
    "the first DataLoader": "`IterableDataset`",
}
DATA = TensorDataset(torch.randn(8, 4), torch.zeros(8, dtype=torch.int64))


def needs(framework):
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")
    return importlib.import_module(framework)


def refused(match):
    """The page has it, too: by its name, or by its value where the name is a description."""
    name, _, value = match.split(": ", 1)[1].partition(" is ")
    words = OTHER_WORDS.get(name, value.strip("'") if " " in name else name)
    told = PAGE.read_text().partition("## What is refused")[2]
    assert words in re.findall(r"`([^`]+)`", told) or (name in OTHER_WORDS and words in told), words
    return pytest.raises(ConfigError, match=f"{re.escape(match)}.*\\(expected ")


# --- Lightning ---


def module(**parts):
    lightning = needs("lightning")

    class Model(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net, self.lr = nn.Linear(4, 2), 0.1

        def training_step(self, batch, number):
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), 0.1)

    return type("Model", (Model,), parts)()


def fit(model, data=None, ckpt_path=None, **settings):
    lightning = needs("lightning")
    strategy = importlib.import_module("chaosnet.integrations.lightning").ChaosnetStrategy(quiet=True)
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False, "max_epochs": 1}
    trainer = lightning.Trainer(**{"accelerator": "cpu", "strategy": strategy, **quiet, **settings})
    trainer.fit(model, DataLoader(DATA, 2) if data is None else data, ckpt_path=ckpt_path)
    return strategy


def callback(name):
    return lambda: getattr(importlib.import_module("lightning.pytorch.callbacks"), name)(
        **({"swa_lrs": 0.1} if name.startswith("Stoch") else {})
    )


@pytest.mark.parametrize(
    ("match", "settings"),
    [
        ("lightning.Trainer: devices is 2", {"devices": 2}),
        ("lightning.Trainer: num_nodes is 2", {"num_nodes": 2}),
        ("lightning.Trainer: limit_train_batches is 3", {"limit_train_batches": 3}),
        ("lightning.Trainer: overfit_batches is 2", {"overfit_batches": 2}),
        ("lightning.Trainer: val_check_interval is 0.5", {"val_check_interval": 0.5}),
        (
            "lightning.Trainer: reload_dataloaders_every_n_epochs is 1",
            {"reload_dataloaders_every_n_epochs": 1},
        ),
        (
            "lightning.Trainer: gradient_clip_algorithm is 'value'",
            {"gradient_clip_val": 0.1, "gradient_clip_algorithm": "value"},
        ),
        (
            "lightning.Trainer: a callback is 'StochasticWeightAveraging'",
            {"callbacks": callback("StochasticWeightAveraging")},
        ),
        (
            "lightning.Trainer: a callback is 'LearningRateFinder'",
            {"callbacks": callback("LearningRateFinder")},
        ),
    ],
)
def test_lightning_what_its_trainer_has(match, settings):
    needs("lightning")
    settings = {name: value() if callable(value) else value for name, value in settings.items()}
    with refused(match):
        fit(module(), **settings)


def two_optimizers(self):
    return [torch.optim.SGD([parameter], 0.1) for parameter in self.net.parameters()], []


def scheduled(make, **config):
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": make(optimizer), "monitor": "x", **config},
        }

    return configure_optimizers


@pytest.mark.parametrize(
    ("match", "parts"),
    [
        (
            "configure_optimizers: the number of optimizers is 2",
            {"configure_optimizers": two_optimizers, "automatic_optimization": False},
        ),
        (
            "configure_optimizers: the LR scheduler is 'ReduceLROnPlateau'",
            {"configure_optimizers": scheduled(torch.optim.lr_scheduler.ReduceLROnPlateau)},
        ),
        (
            "configure_optimizers: frequency is 2",
            {"configure_optimizers": scheduled(lambda o: torch.optim.lr_scheduler.StepLR(o, 1), frequency=2)},
        ),
        (
            "lightning.Trainer: the output of training_step is None",
            {"training_step": lambda self, batch, number: None},
        ),
        (
            "lightning.Trainer: an argument of training_step is 'dataloader_iter'",
            {"training_step": lambda self, dataloader_iter: None},
        ),
    ],
)
def test_lightning_what_a_module_has(match, parts):
    with refused(match):
        fit(module(**parts))


def test_lightning_data_and_files():
    with refused("fit: train_dataloaders is 'DataLoader, DataLoader'"):
        fit(module(), {"a": DataLoader(DATA, 2), "b": DataLoader(DATA, 2)})
    with refused("fit: train_dataloaders is 'Stream'"):
        fit(module(), DataLoader(Stream(), 2))
    with refused("fit: ckpt_path is 'last.ckpt'"):
        fit(module(), ckpt_path="last.ckpt")


def test_lightning_a_second_fit_is_another_cluster_and_everything_is_as_it_was():
    lightning = needs("lightning")
    strategy = importlib.import_module("chaosnet.integrations.lightning").ChaosnetStrategy(quiet=True)
    trainer = lightning.Trainer(
        accelerator="cpu", strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False,
        gradient_clip_val=0.5, enable_progress_bar=False,
    )  # fmt: skip
    clusters = []
    for _ in range(2):
        trainer.fit(module(), DataLoader(DATA, 2))
        clusters.append(strategy.cluster)
        assert trainer.gradient_clip_val == 0.5
        trainer.fit_loop.epoch_progress.reset()
    assert clusters[0] is not clusters[1]
    assert [cluster.step for cluster in clusters] == [4, 4]


def test_lightning_a_checkpoint_that_only_another_node_has(tmp_path):
    lightning = needs("lightning")
    strategy = importlib.import_module("chaosnet.integrations.lightning").ChaosnetStrategy(quiet=True)
    quiet = {"enable_progress_bar": False, "logger": False, "enable_checkpointing": False}
    trainer = lightning.Trainer(accelerator="cpu", strategy=strategy, **quiet)
    tested, gone = module(test_step=lambda self, batch, number: None), str(tmp_path / "best.ckpt")
    with pytest.raises(FileNotFoundError):
        trainer.test(tested, DataLoader(DATA, 2), ckpt_path=gone)
    strategy.cluster = SimpleNamespace()  # It has been a node.
    with refused("test: ckpt_path is "):
        trainer.test(tested, DataLoader(DATA, 2), ckpt_path=gone)


# --- transformers ---


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(4, 2)

    def forward(self, x, labels):
        return {"loss": nn.functional.cross_entropy(self.net(x), labels)}


class Stream(IterableDataset):
    def __iter__(self):
        yield {"x": torch.zeros(4), "labels": torch.tensor(0)}


def train(tmp_path, data=None, resume=None, **arguments):
    transformers = needs("transformers")
    ours = importlib.import_module("chaosnet.integrations.transformers")
    usual = {"use_cpu": True, "report_to": "none", "disable_tqdm": True, "save_strategy": "no"}
    args = transformers.TrainingArguments(str(tmp_path), **{**usual, **arguments})
    items = [{"x": x, "labels": label} for x, label in DATA]
    trainer = ours.Trainer(
        model=Classifier(),
        args=args,
        train_dataset=data or items,
        eval_dataset=items,
        chaosnet={"quiet": True},
    )
    trainer.train(resume_from_checkpoint=resume)


@pytest.mark.parametrize(
    ("match", "arguments"),
    [
        ("TrainingArguments: auto_find_batch_size is True", {"auto_find_batch_size": True}),
        (
            "TrainingArguments: load_best_model_at_end is True",
            {"load_best_model_at_end": True, "eval_strategy": "epoch", "save_strategy": "epoch"},
        ),
        (
            "TrainingArguments: train_sampling_strategy is 'group_by_length'",
            {"train_sampling_strategy": "group_by_length"},
        ),
        (
            "TrainingArguments: lr_scheduler_type is 'reduce_lr_on_plateau'",
            {"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "epoch"},
        ),
        ("train: resume_from_checkpoint is 'checkpoint-3'", {"resume": "checkpoint-3"}),
        ("Trainer: train_dataset is 'Stream'", {"data": Stream(), "max_steps": 3}),
    ],
)
def test_transformers_what_its_trainer_has(match, arguments, tmp_path):
    with refused(match):
        train(tmp_path, **arguments)


def test_transformers_a_loader_of_ones_own_that_cannot_be_dealt_out(tmp_path):
    needs("transformers")
    ours = importlib.import_module("chaosnet.integrations.transformers").Trainer
    items = [{"x": x, "labels": label} for x, label in DATA]
    loaders = {
        "Trainer: get_train_dataloader is 'list'": [items],
        "Trainer: the DataLoader has a WeightedRandomSampler": DataLoader(
            items, 2, sampler=WeightedRandomSampler([1.0] * 8, 8)
        ),
    }
    for match, loader in loaders.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(ConfigError, match=match):
            patch.setattr(ours, "get_train_dataloader", lambda self, loader=loader: loader)
            train(tmp_path, max_steps=3)


# --- accelerate ---


def prepared(*objects, **settings):
    ours = importlib.import_module("chaosnet.integrations.accelerate")
    accelerator = ours.Accelerator(cpu=True, **settings)
    accelerator.prepare(*objects)
    return accelerator


def test_accelerate_what_is_prepared():
    needs("accelerate")
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    with refused("prepare: the number of optimizers is 0"):
        next(prepared(net).epochs(1))
    with refused("prepare: the LR scheduler is 'ReduceLROnPlateau'"):
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        prepared(net, optimizer, DataLoader(DATA, 2), plateau).join()
    with refused("prepare: the first DataLoader is 'Stream'"):
        prepared(net, optimizer, DataLoader(Stream(), 2)).join()
    with refused("Accelerator: load_state is 'here'"):
        prepared(net).load_state("here")


def test_accelerate_saves_and_calls_on_the_node_that_writes_files_only(tmp_path):
    needs("accelerate")
    accelerator, calls = prepared(nn.Linear(4, 2)), []
    tell = accelerator.on_main_process(lambda node: calls.append(node))
    for node, is_main in {"n0": True, "n1": False}.items():
        accelerator.cluster = SimpleNamespace(is_main=is_main)
        tell(node)
        accelerator.save({}, tmp_path / node)
    assert calls == [path.name for path in tmp_path.iterdir()] == ["n0"]


def test_accelerate_a_schedule_that_is_stepped_by_epochs():
    needs("accelerate")
    net = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    ours = importlib.import_module("chaosnet.integrations.accelerate")
    accelerator = ours.Accelerator(cpu=True, chaosnet={"quiet": True})
    model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, DataLoader(DATA, 2), schedule)
    with accelerator.join(), refused("scheduler.step(): the number of optimizer steps before it is 4"):
        for inputs, labels in loader:
            accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
            optimizer.step()
        schedule.step()


# --- all ---


def test_settings_that_the_framework_has_or_nobody_has():
    with pytest.raises(ConfigError, match=r"^chaosnet: updates is 3 \(expected none\)$"):
        settings_and_rules("chaosnet", {"updates": 3}, {"updates": "none"})
    with pytest.raises(ConfigError, match=r"chaosnet: model is 1 \(expected one of after_step, .*summary\)$"):
        settings_and_rules("chaosnet", {"model": 1}, {"updates": "none"})
    assert settings_and_rules("chaosnet", {"global_batch": 64, "seed": 1}, {}) == (
        {"seed": 1},
        {"global_batch": 64},
    )


@pytest.mark.parametrize(
    ("samples", "batch", "accumulate", "drop_last", "expected"),
    [(512, 16, 1, False, 16), (512, 16, 3, False, 47), (10, 16, 1, False, 10), (70, 16, 1, True, 16)],
)
def test_a_schedule_by_steps_counts_samples_so_that_it_ends_with_the_epochs(
    samples, batch, accumulate, drop_last, expected
):
    loader = DataLoader(TensorDataset(torch.zeros(samples)), batch, drop_last=drop_last)
    assert samples_a_step(loader, accumulate) == expected


@pytest.mark.parametrize(("samples", "batch"), [(1500, 32), (900, 16), (17, 16), (33, 2)])
def test_a_schedule_by_steps_is_not_over_before_the_last_epoch(samples, batch):
    steps, epochs = -(-samples // batch), 40
    counted = epochs * samples // samples_a_step(DataLoader(TensorDataset(torch.zeros(samples)), batch), 1)
    assert epochs * (steps - 1) < counted <= epochs * steps


@pytest.mark.parametrize("framework", ["accelerate", "lightning", "transformers"])
def test_without_its_framework_an_integration_names_the_extra(framework, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    name = f"chaosnet.integrations.{framework}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(
        ConfigError, match=rf"{name} needs .*{framework}.*pip install 'chaosnet\[{framework}\]'"
    ):
        importlib.import_module(name)
