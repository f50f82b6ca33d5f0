"""Samples over which a script raises, and rests of an epoch that are too small: real scripts, real ends."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from scripts import Script, Scripts, scripts_in

pytestmark = pytest.mark.realtime

TEXT = """
import os, sys, time
import torch
from torch import nn
from chaosnet import Trainer

BAD, WHERE = int(sys.argv[1]), sys.argv[2]
SETTINGS = eval(sys.argv[3]) if len(sys.argv) > 3 else {}

class Records:
    def __len__(self):
        return SETTINGS.get("length", 48)
    def __getitem__(self, index):
        if index == BAD and WHERE == "fetch" and os.path.exists("go"):
            raise ValueError(f"record {index} is damaged")
        generator = torch.Generator().manual_seed(index)
        return torch.randn(4, generator=generator), index % 2, index

torch.manual_seed(0)
torch.set_num_threads(1)
norm = [nn.BatchNorm1d(8)] if WHERE == "norm" else []
model = nn.Sequential(nn.Linear(4, 8), *norm, nn.Linear(8, 2))
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
rules = {key: SETTINGS[key] for key in ("min_samples", "drop_last", "accumulate") if key in SETTINGS}
epochs = SETTINGS.get("epochs", 12)
for x, y, indices in (batches := trainer.batches(Records(), SETTINGS.get("batch", 4), epochs=epochs, **rules)):
    if BAD in indices.tolist() and WHERE == "forward" and os.path.exists("go"):
        raise ValueError("loss is not finite")
    here = trainer.step
    nn.functional.cross_entropy(model(x), y).backward()
    epoch = trainer.epoch
    if "accumulate" not in rules:
        trainer.update()
    print("used", here, epoch, *indices.tolist(), flush=True)
    print("step", trainer.step, time.monotonic(), flush=True)
    time.sleep(0.01)
print("done", trainer.epoch, trainer.samples_set_aside, trainer.samples_dropped, trainer.state_hash(),
      trainer.status().samples_set_aside, flush=True)
"""


def start_all(scripts: Scripts, count: int, *args: str) -> list[Script]:
    """From the time on that all are members there is a bad sample."""
    nodes = [scripts.start(f"n{number}", TEXT, *args) for number in range(count)]
    for node in nodes:
        node.advance(3)
    (scripts.folder / "go").touch()
    return nodes


def ends(nodes: list[Script]) -> tuple[list[Script], list[Script]]:
    """Wait for all. Returns: those that have done all epochs, and those that ended with the error."""
    codes = {each.name: each.exit_code() for each in nodes}
    done = [each for each in nodes if codes[each.name] == 0]
    return done, [each for each in nodes if codes[each.name] == 1]


def verdicts(node: Script) -> list[str]:
    return re.findall(r"set aside sample .*", node.text())


@pytest.mark.slow
@pytest.mark.parametrize("where", ["fetch", "forward"])
def test_a_sample_that_has_ended_two_nodes_is_set_aside_and_training_goes_on(tmp_path, where):
    with scripts_in(tmp_path) as scripts:
        nodes = start_all(scripts, 4, "17", where, "{'epochs': 60, 'batch': 8}")
        done, dead = ends(nodes)
        assert (len(done), len(dead)) == (2, 2), scripts.story()
        error = "ValueError: record 17 is damaged" if where == "fetch" else "ValueError: loss is not finite"
        named = {tuple(verdicts(node)) for node in done}
        assert len(named) == 1, "all name the same"
        (said,) = named
        condemned = {int(index) for index in re.findall(r"\(index (\d+) of the data set\)", " ".join(said))}
        assert 17 in condemned and len(condemned) == len(said) <= (1 if where == "fetch" else 3), said
        assert all(line.endswith(f"ended with {error}") for line in said), said
        assert all(each.name in said[0] for each in dead), said
        told = {tuple(line) for node in done for line in node.lines("done")}
        assert len(told) == 1, told
        epochs, aside, dropped, _, counted = told.pop()
        assert (epochs, dropped, counted) == ("60", "0", aside)
        used = Counter(int(index) for node in nodes for line in node.lines("used") for index in line[2:])
        # Each is used once an epoch or set aside in it; so they are already in the epoch after the last.
        assert sum(60 + 1 - used.pop(index) for index in condemned) == int(aside) > 10
        odd = {index: count for index, count in used.items() if count != 60}
        lines = [
            (node.name, *line)
            for node in nodes
            for line in node.lines("used")
            if {*line[2:]} & {*map(str, odd)}
        ]
        assert not odd, (odd, lines, scripts.story())
        assert len(used) == 48 - len(condemned)


@pytest.mark.slow
def test_who_joins_later_knows_what_is_set_aside(tmp_path):
    with scripts_in(tmp_path) as scripts:
        nodes = start_all(scripts, 3, "17", "fetch", "{'epochs': 100000}")
        scripts.until(lambda: sum(each.code == 1 for each in nodes) == 2, "two have ended")
        left = next(each for each in nodes if each.code is None)
        left.advance(20)
        path = left.address() if "founds" in left.text() else re.findall(r" at ([\d.:]+)", left.text())[0]
        late = scripts.start(
            "late", TEXT, "17", "fetch", "{'epochs': 100000}", join=False, CHAOSNET_JOIN=path
        )
        late.advance(40)
        left.advance(40)
        assert late.code is None and left.code is None, scripts.story()


@pytest.mark.slow
def test_with_min_samples_batch_norm_never_sees_a_single_sample(tmp_path):
    """41 samples in batches of 8: without it, one is left at the end of an epoch, whoever trains on it dies."""
    with scripts_in(tmp_path) as scripts:
        settings = "{'epochs': 8, 'length': 41, 'batch': 8, 'min_samples': 2}"
        nodes = start_all(scripts, 3, "-1", "norm", settings)
        done, _ = ends(nodes)
        assert len(done) == 3, scripts.story()
        sizes = [len(line) - 2 for node in nodes for line in node.lines("used")]
        assert min(sizes) >= 2 and max(sizes) <= 8
        used = Counter(int(index) for node in nodes for line in node.lines("used") for index in line[2:])
        assert set(used.values()) == {8}, used


def test_with_drop_last_no_batch_is_smaller_than_the_others(tmp_path):
    with scripts_in(tmp_path) as scripts:
        node = scripts.start(
            "a", TEXT, "-1", "none", "{'epochs': 5, 'length': 41, 'batch': 8, 'drop_last': True}"
        )
        assert node.exit_code() == 0, scripts.story()
        assert {len(line) - 2 for line in node.lines("used")} == {8}
        assert node.lines("done")[0][:3] == ["5", "0", "5"]


@pytest.mark.parametrize(
    ("ours", "name"), [("{'min_samples': 3}", "min_samples"), ("{'drop_last': True}", "drop_last")]
)
def test_another_rule_than_the_clusters_is_refused_by_name(tmp_path, ours, name):
    with scripts_in(tmp_path) as scripts:
        founder = scripts.start("a", TEXT, "-1", "none", "{'epochs': 100000}")
        founder.advance(3)
        other = scripts.start("b", TEXT, "-1", "none", ours)
        assert other.exit_code() == 1
        assert f"batches: {name} is {eval(ours)[name]} here, " in other.text(), scripts.story()
        founder.advance(5)


PIPELINES = """
import os, sys, time
import torch
from torch import nn
from chaosnet import PipelineTrainer

BAD, WHERE = 17, sys.argv[1]

class Records:
    def __len__(self):
        return 48
    def __getitem__(self, index):
        if index == BAD and WHERE == "fetch" and os.path.exists("go"):
            raise ValueError(f"record {index} is damaged")
        return torch.randn(4, generator=torch.Generator().manual_seed(index)), index

def loss(out, indices):
    if BAD in indices.tolist() and WHERE == "loss" and os.path.exists("go"):
        raise ValueError("the loss is not finite")
    return nn.functional.cross_entropy(out, indices % 2)

torch.manual_seed(0)
torch.set_num_threads(1)
model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
trainer = PipelineTrainer(model, torch.optim.SGD(model.parameters(), 0.1), loss, batch=16, micro_batch=4, stages=2)
first = None
for done in trainer.steps(Records(), epochs=10**6):
    print("step", trainer.step, time.monotonic(), flush=True)
    time.sleep(0.01)
    if trainer.samples_set_aside and first is None:
        first = trainer.epoch
    if first is not None and trainer.epoch > first + 1:
        break
print("done", trainer.samples_set_aside, flush=True)
trainer.request_node_exit()
"""


@pytest.mark.parametrize("where", ["loss", pytest.param("fetch", marks=pytest.mark.slow)])
def test_a_sample_that_has_ended_two_members_of_pipelines_is_set_aside_and_the_others_train_on(
    tmp_path, where
):
    with scripts_in(tmp_path) as scripts:
        nodes = [scripts.start(f"n{number}", PIPELINES, where) for number in range(4)]
        for node in nodes:
            node.advance(3)
        (tmp_path / "go").touch()
        done, dead = ends(nodes)
        assert (len(done), len(dead)) == (2, 2), scripts.story()
        assert all("ValueError" in each.text() for each in dead)
        for each in done:
            said = verdicts(each)
            # Of an epoch's last samples several may be taken at once.
            assert len(said) < 4 and any("(index 17 of the data set)" in text for text in said), (
                scripts.story()
            )
            assert int(each.lines("done")[0][0]) >= 2  # Once an epoch.
