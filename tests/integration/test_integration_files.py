"""What nodes of one machine write into one folder by their framework, and what its progress bar tells of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from scripts import scripts_in
from test_integration_refusals import needs
from test_integrations import PRELOAD, SCRIPTS
from torch import nn

pytestmark = [pytest.mark.realtime, pytest.mark.slow]


def accelerator_in(folder, **settings):
    accelerate = needs("accelerate")
    from chaosnet.integrations.accelerate import Accelerator

    project = accelerate.utils.ProjectConfiguration(str(folder), **settings)
    accelerator = Accelerator(cpu=True, project_config=project)
    net = nn.Linear(2, 1)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
    return accelerator


def written(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_the_state_of_accelerate_is_written_by_the_node_that_writes_files_and_no_other(tmp_path):
    accelerator = accelerator_in(tmp_path, automatic_checkpoint_naming=True)
    accelerator.cluster = SimpleNamespace(is_main=False)
    assert accelerator.save_state() is None
    accelerator.save_model(nn.Linear(2, 1), str(tmp_path / "model"))
    assert list(tmp_path.iterdir()) == []
    accelerator.cluster.is_main = True
    assert accelerator.save_state() == tmp_path / "checkpoints" / "checkpoint_1"
    accelerator.save_model(nn.Linear(2, 1), str(tmp_path / "model"))
    assert "model/model.safetensors" in written(tmp_path)


def test_a_late_joiner_that_writes_after_the_others_counts_on(tmp_path):
    first = accelerator_in(tmp_path, automatic_checkpoint_naming=True)
    first.cluster = SimpleNamespace(is_main=True)
    assert [first.save_state().name[-1] for _ in range(3)] == ["0", "1", "2"]
    late = accelerator_in(tmp_path, automatic_checkpoint_naming=True)
    late.cluster = SimpleNamespace(is_main=True)
    assert late.save_state().name == "checkpoint_3"


def test_each_writes_where_the_project_says_so(tmp_path):
    accelerator = accelerator_in(tmp_path, save_on_each_node=True)
    accelerator.cluster = SimpleNamespace(is_main=False)
    accelerator.save_state(str(tmp_path / "mine"))
    assert "mine/model.safetensors" in written(tmp_path)


@pytest.mark.parametrize("kind", ["CSVLogger", "TensorBoardLogger"])
def test_two_nodes_that_look_for_a_free_version_at_once_log_to_two(kind, tmp_path, monkeypatch):
    needs("lightning")
    if kind == "TensorBoardLogger":
        pytest.importorskip("tensorboard")
    from lightning.pytorch import loggers

    from chaosnet.integrations.lightning import take_folder

    first, second, chosen = (getattr(loggers, kind)(str(tmp_path)) for _ in range(3))
    looks = iter([0])  # It looked before the first had made its folder.
    again = second._get_next_version
    monkeypatch.setattr(second, "_get_next_version", lambda: next(looks, again()))
    take_folder(first)
    take_folder(second)
    assert [first.version, second.version] == [0, 1]
    chosen._version = 0
    take_folder(chosen)
    assert chosen.version == 0  # The script has said so.


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_progress_bar_of_transformers_counts_the_clusters_steps(nodes, tmp_path):
    """Two nodes do in half as many steps what one does: the bar is full at the end, and near it before."""
    needs("transformers")
    script = SCRIPTS["transformers"].replace("disable_tqdm=True", "disable_tqdm=False")
    assert script != SCRIPTS["transformers"]
    tell = "\nprint('bar', trainer.state.max_steps, trainer.state.global_step, flush=True)\n"
    step = 'print("step", state.global_step, '
    assert step in script
    script = script.replace(step, 'print("\\nstep", state.global_step, state.max_steps, ')
    script = script.replace('print("valid"', 'print("\\nvalid"')
    with scripts_in(tmp_path, preload=PRELOAD["transformers"], PYTHONWARNINGS="ignore") as scripts:
        words = ["ours", "slow", "num_train_epochs=40"]
        founder = scripts.start("n0", script + tell, *words)
        if nodes == 2:
            founder.advance(1)
            scripts.start("n1", script + tell, *words)
        assert [each.exit_code() for each in scripts.started] == [0] * nodes, scripts.story()
        ((total, step),) = founder.lines("bar")
        assert total == step, scripts.story()
        told = [int(line[1]) for line in founder.lines("step")]
        assert len(told) > 60
        assert all(abs(each - int(step)) <= 3 for each in told[-40:]), (step, told)
        assert f" {step}/{step} " in founder.text(), scripts.story()
