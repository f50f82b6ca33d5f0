"""chaosnet in other trainers: alone they end where they do without it, to the bit; and what a cluster makes of them.

tests/scripts has a script of each, with a joiner and a death (test_scripts_of_kinds.py).
"""

from __future__ import annotations

import signal
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import scripts_in

pytestmark = [pytest.mark.realtime, pytest.mark.slow]

ROOT = Path(__file__).parent.parent.parent
PRELOAD = {
    "lightning": "lightning",
    "transformers": "transformers.trainer",
    "accelerate": "accelerate",
}
COMMON = """
import json, os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
torch.set_num_threads(1)
torch.manual_seed(0)
mode, *words = sys.argv[1:]
OURS, GAMMA = mode != "plain", 1.0 if "flat" in words else 0.9
SAMPLES, BATCH = int(os.environ.get("SAMPLES", "96")), int(os.environ.get("BATCH", "16"))
x = torch.randn(SAMPLES, 8)
y = (x[:, 0] * x[:, 1] > 0).long()
net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2))
def loss_of(outputs, labels, calls=[0]):
    calls[0] += 1
    if "fails" in words and calls[0] > 3:
        raise ValueError("no good")
    return nn.functional.cross_entropy(outputs, labels)
def slowly():
    if "slow" in words:
        time.sleep(0.05)
def tell_weights():
    print("weights", sum(p.double().sum().item() for p in net.parameters()).hex(), flush=True)
def tell_end(cluster):
    print("end", cluster.step, cluster.epoch, cluster.state_hash(), flush=True)
"""
LIGHTNING = (
    COMMON
    + """
import lightning
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from lightning.pytorch.plugins.precision import MixedPrecision

class Classifier(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = net
        self.automatic_optimization = "by-hand" not in words
    def training_step(self, batch, number):
        loss = loss_of(self.net(batch[0]), batch[1])
        if not self.automatic_optimization:
            optimizer = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.lr_schedulers().step()
        return loss
    def on_train_batch_end(self, *args):
        print("step", self.global_step, flush=True)
        slowly()
    def validation_step(self, batch, number):
        self.log("loss", nn.functional.cross_entropy(self.net(batch[0]), batch[1]))
    def on_validation_epoch_end(self):
        if not self.trainer.sanity_checking:
            loss = self.trainer.callback_metrics["loss"].item()
            print("valid", self.current_epoch, self.global_step, loss, flush=True)
    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), 0.1, momentum=0.9)
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
        return [optimizer], [{"scheduler": schedule, "interval": "step" if "by-step" in words else "epoch"}]

settings = dict(accelerator="cpu", max_epochs=3, enable_progress_bar=False, logger=False, enable_checkpointing=False)
for word in words:
    name, _, value = word.partition("=")
    if value:
        settings[name] = json.loads(value) if value[0] in "0123456789tf" else value
if "scaled" in words:
    settings["plugins"] = [MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))]
if "early" in words:
    settings["callbacks"] = [EarlyStopping("loss", patience=1, min_delta=1e9)]
if "saves" in words:
    name = os.environ["CHAOSNET_NAME"]
    settings |= dict(enable_checkpointing=True, callbacks=[ModelCheckpoint(name, save_last=True)])
if OURS:
    from chaosnet.integrations.lightning import ChaosnetStrategy
    settings["strategy"] = strategy = ChaosnetStrategy()
trainer = lightning.Trainer(**settings)
data = TensorDataset(x, y)
trainer.fit(Classifier(), DataLoader(data, BATCH), DataLoader(data, 96))
tell_weights()
if OURS:
    tell_end(strategy.cluster)
"""
)
TRANSFORMERS = (
    COMMON
    + """
import transformers

class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = net
    def forward(self, x, labels):
        out = self.net(x)
        return {"loss": loss_of(out, labels), "logits": out}

class Tell(transformers.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        print("step", state.global_step, flush=True)
        slowly()
    def on_evaluate(self, args, state, control, metrics, **kwargs):
        print("valid", round(state.epoch), state.global_step, metrics["eval_loss"], flush=True)
    def on_log(self, args, state, control, logs, **kwargs):
        if "train_loss" in logs:
            print("trained", logs["train_loss"], flush=True)

settings = dict(num_train_epochs=3, per_device_train_batch_size=BATCH, per_device_eval_batch_size=96, use_cpu=True,
                report_to="none", disable_tqdm=True, eval_strategy="epoch", save_strategy="no", optim="sgd",
                learning_rate=0.1, metric_for_best_model="loss", train_sampling_strategy="sequential",
                logging_strategy="no")
for word in words:
    name, _, value = word.partition("=")
    if value:
        settings[name] = json.loads(value) if value[0] in "0123456789tf" else value
callbacks = [Tell()]
if "early" in words:
    callbacks.append(transformers.EarlyStoppingCallback(1, 1e9))
if "saves" in words:
    settings["save_strategy"] = "epoch"
folder = os.environ.get("CHAOSNET_NAME", "out")
Trainer = transformers.Trainer
if OURS:
    from chaosnet.integrations.transformers import Trainer
if "own-loader" in words:
    class Trainer(Trainer):
        def get_train_dataloader(self):
            collate_fn = transformers.default_data_collator
            return self.accelerator.prepare(DataLoader(data, BATCH, collate_fn=collate_fn))
args = transformers.TrainingArguments(folder, **settings)
data = [{"x": a, "labels": b} for a, b in zip(x, y, strict=True)]
trainer = Trainer(model=Classifier(), args=args, train_dataset=data, eval_dataset=data, callbacks=callbacks)
trainer.train()
tell_weights()
if OURS:
    tell_end(trainer.cluster)
"""
)
ACCELERATE = (
    COMMON
    + """
import accelerate
Accelerator, N = accelerate.Accelerator, 2 if "accumulate" in words else 1
if OURS:
    from chaosnet.integrations.accelerate import Accelerator
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=N)
optimizer = torch.optim.SGD(net.parameters(), 0.1, momentum=0.9)
schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, GAMMA)
loader = DataLoader(TensorDataset(x, y), BATCH)
if "scaled" in words:
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
model, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)
COUNT = 100000 if "long" in words else 3
for epoch in accelerator.epochs(COUNT) if OURS else range(COUNT):
    for inputs, labels in loader:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(inputs), labels))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        slowly()
        print("step", accelerator.cluster.step if OURS else 0, flush=True)
tell_weights()
if OURS:
    tell_end(accelerator.cluster)
"""
)
SCRIPTS = {"lightning": LIGHTNING, "transformers": TRANSFORMERS, "accelerate": ACCELERATE}


EXAMPLES = {
    "lightning": "lightning_digits", "transformers": "transformers_gpt2", "accelerate": "accelerate_digits",
}  # fmt: skip


def needs(framework: str) -> None:
    if find_spec(framework) is None:
        pytest.skip(f"{framework} is not installed")


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("lightning", ["by-step"]),
        ("lightning", ["gradient_clip_val=0.1"]),
        ("lightning", ["accumulate_grad_batches=2", "by-step"]),
        ("lightning", ["by-hand"]),
        ("lightning", ["precision=bf16-mixed"]),
        ("lightning", ["scaled", "gradient_clip_val=0.1"]),
        ("lightning", ["max_steps=10", "max_epochs=9"]),
        ("transformers", []),
        ("transformers", ["max_grad_norm=0.1", "lr_scheduler_type=cosine"]),
        ("transformers", ["own-loader"]),
        ("transformers", ["gradient_accumulation_steps=2"]),
        ("transformers", ["max_steps=10"]),
        ("transformers", ["bf16=true"]),
        ("transformers", ["num_train_epochs=1.5"]),
        ("accelerate", []),
        ("accelerate", ["accumulate"]),
        ("accelerate", ["scaled"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_alone_it_ends_where_the_framework_does_to_the_bit(framework, words, tmp_path):
    needs(framework)
    with scripts_in(tmp_path, preload=PRELOAD[framework], PYTHONWARNINGS="ignore") as scripts:
        both = [
            scripts.start(mode, SCRIPTS[framework], mode, *words, join=False) for mode in ("plain", "ours")
        ]
        assert [script.exit_code() for script in both] == [0, 0], scripts.story()
        plain, ours = ([script.lines(word) for word in ("weights", "valid")] for script in both)
        assert plain == ours, scripts.story()
        assert plain[0]


@pytest.mark.parametrize(
    ("framework", "words"),
    [
        ("lightning", ["accumulate_grad_batches=4", "flat"]),
        ("transformers", ["gradient_accumulation_steps=4", "lr_scheduler_type=constant"]),
        ("accelerate", ["accumulate", "flat"]),
    ],
)
def test_a_step_with_few_batches_is_the_mean_of_its_samples(framework, words, tmp_path):
    """64 samples are a step, and then 3, which are dealt out in as many batches. Beside it: both in one batch."""
    needs(framework)
    with scripts_in(tmp_path, preload=PRELOAD[framework], SAMPLES="67", PYTHONWARNINGS="ignore") as scripts:
        plain = scripts.start("plain", SCRIPTS[framework], "plain", words[-1], join=False, BATCH="64")
        batch = "32" if framework == "accelerate" else "16"
        ours = scripts.start("ours", SCRIPTS[framework], "ours", *words, join=False, BATCH=batch)
        assert [plain.exit_code(), ours.exit_code()] == [0, 0], scripts.story()
        ((expected,),), ((found,),) = plain.lines("weights"), ours.lines("weights")
        assert float.fromhex(found) == pytest.approx(float.fromhex(expected), abs=1e-5), scripts.story()
        assert ours.lines("end")[0][:2] == ["6", "3"], scripts.story()


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_two_nodes_validate_after_each_epoch_and_one_of_them_writes(framework, tmp_path):
    """Of 33 samples in batches of 16, one of the two is dealt none in the last step of an epoch."""
    needs(framework)
    with scripts_in(tmp_path, preload=PRELOAD[framework], SAMPLES="33", PYTHONWARNINGS="ignore") as scripts:
        word = {"lightning": "max_epochs=60", "transformers": "num_train_epochs=60"}[framework]
        words = ["ours", "slow", "saves", word]
        founder = scripts.start("n0", SCRIPTS[framework], *words)
        founder.address()
        founder.advance(1)
        second = scripts.start("n1", SCRIPTS[framework], *words)
        assert [founder.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert founder.lines("end") == second.lines("end") != [], scripts.story()
        found = second.lines("valid")
        assert len(found) > 5, scripts.story()
        assert found == founder.lines("valid")[-len(found) :], scripts.story()
        steps_here = [line[0] for line in second.lines("step")]
        assert {line[1] for line in found} - set(steps_here), "it was to have no samples in a last step"
        files = [path for kind in ("ckpt", "safetensors") for path in tmp_path.rglob(f"*.{kind}")]
        writers = {path.relative_to(tmp_path).parts[0] for path in files}
        assert writers == {"n0"}, scripts.story()


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_early_stopping_on_one_node_stops_all_after_the_same_step(framework, tmp_path):
    needs(framework)
    with scripts_in(tmp_path, preload=PRELOAD[framework], PYTHONWARNINGS="ignore") as scripts:
        word = {"lightning": "max_epochs=1000", "transformers": "num_train_epochs=1000"}[framework]
        founder = scripts.start("n0", SCRIPTS[framework], "ours", "slow", word)
        founder.address()
        founder.advance(1)
        second = scripts.start("n1", SCRIPTS[framework], "ours", "slow", "early", word)
        assert [founder.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert founder.lines("end") == second.lines("end") != [], scripts.story()


def _version(package):
    return tuple(map(int, metadata.version(package).split(".")[:2]))


@pytest.mark.parametrize("framework", ["lightning", "transformers"])
def test_a_run_goes_on_from_the_clusters_checkpoints(framework, tmp_path):
    needs(framework)
    to_disk = {"CHAOSNET_CHECKPOINT_DIR": str(tmp_path / "checkpoints")}
    word = {"lightning": "max_epochs", "transformers": "num_train_epochs"}[framework]
    with scripts_in(tmp_path, preload=PRELOAD[framework], PYTHONWARNINGS="ignore", **to_disk) as scripts:
        flat = ["flat", "lr_scheduler_type=constant"][framework == "transformers"]
        whole = scripts.start(
            "whole", SCRIPTS[framework], "ours", f"{word}=4", flat, CHAOSNET_CHECKPOINT_DIR=""
        )
        first = scripts.start("first", SCRIPTS[framework], "ours", f"{word}=2", flat, join=False)
        assert first.exit_code() == 0, scripts.story()
        second = scripts.start(
            "second", SCRIPTS[framework], "ours", f"{word}=4", flat, join=False, CHAOSNET_RESUME="1"
        )
        assert [whole.exit_code(), second.exit_code()] == [0, 0], scripts.story()
        assert first.lines("valid") + second.lines("valid") == whole.lines("valid"), scripts.story()
        assert second.lines("weights") == whole.lines("weights"), scripts.story()
        # The loss is of the steps here, and not a sum of theirs by all steps.
        if framework == "transformers" and _version("transformers") >= (5, 19):  # Theirs did so before.
            of_all, *of_halves = (float(run.lines("trained")[0][0]) for run in (whole, first, second))
            assert sum(of_halves) / 2 == pytest.approx(of_all), scripts.story()


@pytest.mark.parametrize("framework", SCRIPTS)
def test_an_error_ends_one_node_only_and_sigterm_lets_the_other_leave_after_its_step(framework, tmp_path):
    needs(framework)
    with scripts_in(tmp_path, preload=PRELOAD[framework], PYTHONWARNINGS="ignore") as scripts:
        word = {"lightning": "max_epochs=100000", "transformers": "num_train_epochs=100000"}.get(
            framework, "long"
        )
        founder = scripts.start("n0", SCRIPTS[framework], "ours", "slow", word)
        founder.advance(1)
        second = scripts.start("n1", SCRIPTS[framework], "ours", "slow", "fails", word)
        assert second.exit_code() == 1, scripts.story()
        founder.says("its script ended with ValueError: no good")
        founder.advance(3)
        founder.signal(signal.SIGTERM)
        assert founder.exit_code() == 0, scripts.story()
        assert "n0 left after step" in founder.text()


@pytest.mark.parametrize("framework", EXAMPLES)
def test_its_example_trains_on_two_nodes(framework, tmp_path):
    needs(framework)
    path = ROOT / "examples" / f"{EXAMPLES[framework]}.py"
    text = "import torch\ntorch.set_num_threads(1)\n" + path.read_text().replace("__file__", repr(str(path)))
    with scripts_in(tmp_path, preload=PRELOAD[framework], PYTHONWARNINGS="ignore") as scripts:
        founder = scripts.start("n0", text)
        founder.address()
        second = scripts.start("n1", text)
        second.says("n1 joins")
        for node in (founder, second):
            scripts.until(
                lambda node=node: len(node.lines("epoch")) >= 2, f"{node.name} ends two epochs", 60.0
            )
        for node in (second, founder):
            node.signal(signal.SIGTERM)
            assert node.exit_code() == 0, scripts.story()
        losses = [{line[0]: line[1:] for line in node.lines("epoch")} for node in (founder, second)]
        common = losses[0].keys() & losses[1].keys()
        assert common, scripts.story()
        assert {epoch: losses[0][epoch] for epoch in common} == {epoch: losses[1][epoch] for epoch in common}
