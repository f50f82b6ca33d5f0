"""tests/scripts/: scripts of several kinds as people write them, and what each changes to train in a cluster.

Each is run by three nodes. One comes late and one is killed; the two that are left end equal, to the bit.
"""

from __future__ import annotations

import difflib
import signal
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from scripts import Scripts, scripts_in

pytestmark = pytest.mark.realtime

FOLDER = Path(__file__).parent.parent / "scripts"
MOST_LINES = 5
EPOCHS, SAMPLES = 6, 512
LOSE_THEIR_FOUNDER = ("classifier", "ema", "gan", "unused")
NEEDS = {  # Imported once for all of a test, as it takes seconds.
    "accelerate_loop": "accelerate",
    "fabric": "lightning", "gpt2": "transformers", "hf_trainer": "transformers.trainer",
    "lightning_trainer": "lightning", "lora": "peft",
}  # fmt: skip
NAMES = sorted(path.name.removesuffix("_cluster.py") for path in FOLDER.glob("*_cluster.py"))

# Goes before a script: tells of its steps, and holds the founder back until all that is to happen has begun.
BEFORE = """
import functools, os, time, torch, chaosnet
from pathlib import Path
torch.set_num_threads(1)
torch.compile = functools.partial(torch.compile, backend="aot_eager")  # Others take a minute each.
def tell(step):
    print("step", step.step, step.samples, step.epoch, len(step.members), step.applied)
    if os.environ["CHAOSNET_NAME"] == "n0" and not Path("go").exists():
        time.sleep(0.1)
made, make = [], chaosnet.Trainer.__init__
def make_telling(self, *args, **settings):
    made.append(self)
    make(self, *args, **settings, callbacks=chaosnet.Callbacks(on_step=tell))
chaosnet.Trainer.__init__ = make_telling
"""
AFTER = (
    '\ntrainer = made[0]\nprint("end", trainer.step, trainer.epoch, trainer.samples, trainer.state_hash())\n'
)


def changes(name: str) -> tuple[int, int]:
    """Returns: lines that are changed or new in the cluster's version, and lines of the plain one that are gone."""
    plain, cluster = ((FOLDER / f"{name}{end}.py").read_text().splitlines() for end in ("", "_cluster"))
    new = gone = 0
    for _, i, i_end, j, j_end in difflib.SequenceMatcher(None, plain, cluster, autojunk=False).get_opcodes():
        if plain[i:i_end] != cluster[j:j_end]:
            before = sum(bool(line.strip()) for line in plain[i:i_end])
            after = sum(bool(line.strip()) for line in cluster[j:j_end])
            new += after
            gone += max(0, before - after)
    return new, gone


@pytest.mark.parametrize("name", NAMES)
def test_a_script_changes_five_lines_at_most(name):
    new, gone = changes(name)
    assert new <= MOST_LINES
    page = (FOLDER.parent.parent / "docs" / "trainer.md").read_text()
    row = next(line for line in page.splitlines() if line.startswith(f"| [{name}]"))
    assert row.endswith(f"| {new} | {gone} |")


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_script_runs_alone_and_in_a_cluster_that_a_node_joins_late_and_another_leaves_dead(name, tmp_path):
    package = NEEDS.get(name, "torch").partition(".")[0]
    if find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    if name == "muon" and not hasattr(torch.optim, "Muon"):
        pytest.skip(f"torch {torch.__version__} has no Muon")
    text = BEFORE + (FOLDER / f"{name}_cluster.py").read_text() + AFTER
    with scripts_in(tmp_path, preload=NEEDS.get(name, ""), PYTHONWARNINGS="ignore") as scripts:
        alone = scripts.start("alone", BEFORE + (FOLDER / f"{name}.py").read_text())
        assert alone.exit_code() == 0, scripts.story()
        assert losses_fall(alone.lines("loss")), scripts.story()
        scripts.started.clear()
        founder = scripts.start("n0", text)
        founder.address()
        early = scripts.start("n1", text)
        early.advance()
        late = scripts.start("n2", text)
        late.advance()
        dead, left = (founder, early) if name in LOSE_THEIR_FOUNDER else (early, founder)
        dead.signal(signal.SIGKILL)
        (tmp_path / "go").touch()
        assert [left.exit_code(), late.exit_code()] == [0, 0], scripts.story()
        check_ends(scripts, name, left.lines("end")[0], late.lines("end")[0])
        assert not dead.lines("end"), "it was to die in the middle"
        told = {int(line[0]) for line in (*left.lines("step"), *dead.lines("step"))}
        assert told - {0} == set(range(1, max(told) + 1)), scripts.story()
        assert max(int(line[3]) for line in late.lines("step")) == 3, scripts.story()
        assert left.lines("loss")[-1:] == late.lines("loss")[-1:], scripts.story()
        assert losses_fall([*founder.lines("loss")[:1], *late.lines("loss")[-1:]]), scripts.story()
        if name == "classifier":  # All have left; who goes on has what was there at the end.
            again = scripts.start("again", text, join=False)
            assert again.exit_code() == 0, scripts.story()
            assert again.lines("end") == left.lines("end"), scripts.story()


def check_ends(scripts: Scripts, name: str, one: list[str], other: list[str]) -> None:
    """Both have the same state, after as many epochs, and have seen each sample once in each."""
    assert one == other, scripts.story()
    assert int(one[1]) == EPOCHS
    if name != "classifier":  # There, those of gradients that overflow are left out.
        assert float(one[2]) == EPOCHS * SAMPLES, scripts.story()


def losses_fall(lines: list[list[str]]) -> bool:
    """By the first and the last `loss EPOCH LOSS`, if the script tells any."""
    return len(lines) < 2 or float(lines[-1][1]) < float(lines[0][1])
