"""Commands and runs that name no address and no file, for real."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from scripts import scripts_in

pytestmark = pytest.mark.realtime

Main = Callable[..., tuple[int, str, str]]
TRAIN = """
import time, torch
from chaosnet import Trainer
model = torch.nn.Linear(2, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01))
print("trains", flush=True)
while True:
    model(torch.ones(3, 2)).sum().backward()
    time.sleep(0.01)
    trainer.update(samples=3)
"""


def test_commands_without_an_address_are_for_the_node_of_this_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chaosnet: Main
) -> None:
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(tmp_path / "state"))
    with scripts_in(tmp_path, CHAOSNET_STATE_DIR=str(tmp_path / "state")) as scripts:
        first = scripts.start("a", TRAIN)
        first.says("trains")
        code, out, err = chaosnet("status", "--json")
        assert (code, err) == (0, "")
        assert [row["node"] for row in json.loads(out)["members"]] == ["a"]
        code, _, err = chaosnet("relayout", "1")
        assert (code, "a does not train in pipelines" in err) == (1, True)
        command = [sys.executable, "-m", "chaosnet", "dashboard", "--listen", "0"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("the cluster of 127.0.0.1:")
            process.send_signal(signal.SIGINT)
            assert process.wait(20) == 0
        second = scripts.start("b", TRAIN)
        second.says("trains")
        code, out, err = chaosnet("status", "--json")
        assert code == 0 and {row["node"] for row in json.loads(out)["members"]} == {"a", "b"}, err
        code, out, err = chaosnet("leave")
        assert code == 2
        assert "2 nodes of yours run here" in err
        address = next(line for line in err.splitlines() if "(b, b.py, process " in line).split()[0]
        assert chaosnet("leave", address)[0] == 0
        assert second.exit_code() == 0
        assert chaosnet("leave")[0] == 0
        assert first.exit_code() == 0
        assert "no node of yours runs on this machine" in chaosnet("leave")[2]


# --- chaosnet run -m ---

MODULE = """
import multiprocessing, sys
from .parts import double
def work(number):
    return double(number)
if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(sys.argv[1:], __name__, __package__, pool.map(work, [21]))
"""


def run_module(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "chaosnet", "run", "-m", *words]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    inside = tmp_path / "lab" / "models"
    inside.mkdir(parents=True)
    (inside / "parts.py").write_text("def double(number):\n    return 2 * number\n")
    (inside / "train.py").write_text(MODULE)
    (inside / "__main__.py").write_text("import sys\nprint(sys.argv[1:], __name__, __package__)\n")
    (inside / "fails.py").write_text("def fail():\n    return 1 / 0\nfail()\n")
    return tmp_path


def test_a_module_runs_as_by_python_m_with_processes_of_its_own(package: Path) -> None:
    done = run_module(package, "lab.models.train", "--epochs", "3")
    assert done.stdout == "['--epochs', '3'] __main__ lab.models [42]\n"
    assert "lab.models.train made no Trainer in this process" in done.stderr
    assert done.returncode == 0


def test_a_package_runs_its_main_module(package: Path) -> None:
    done = run_module(package, "lab.models", "7")
    assert (done.stdout, done.returncode) == ("['7'] __main__ lab.models\n", 0)


def test_a_module_is_not_looked_for_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    words = 'rmdir "$PWD" && exec "$@"', "sh", sys.executable, "-m", "chaosnet", "run", "-m", "train"
    done = subprocess.run(
        ["sh", "-c", *words], cwd=gone, capture_output=True, text=True, check=False, timeout=60
    )
    expected = f"error: -m: the folder where you are, {gone}, is gone (expected one to find 'train' from)\n"
    assert (done.stderr, done.returncode) == (expected, 2)


def test_an_error_of_a_module_is_shown_without_frames_of_ours(package: Path) -> None:
    done = run_module(package, "lab.models.fails")
    assert done.returncode == 1
    assert done.stderr.count("  File ") == 2 and "ZeroDivisionError" in done.stderr


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("lab.model", "'lab.model' cannot be found"),
        ("labs.models", "'labs.models' cannot be found"),
        ("lab", "'lab' is a package without a module '__main__'"),
        ("lab..models", "'lab..models' cannot be found"),
        ("sys", "'sys' is not written in Python"),
    ],
)
def test_a_module_that_is_none_is_named(
    package: Path, monkeypatch: pytest.MonkeyPatch, chaosnet: Main, name: str, why: str
) -> None:
    monkeypatch.chdir(package)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    code, _, err = chaosnet("run", "-m", name)
    assert (code, err) == (2, f"error: -m: {why} (expected a module, as `python -m` takes it)\n")
