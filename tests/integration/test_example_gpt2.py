"""examples/gpt2.py: that its layers are GPT-2, and that it trains as one process does, whoever dies."""

from __future__ import annotations

import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from scripts import Script, scripts_in

pytestmark = pytest.mark.realtime

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "gpt2.py"
needs_transformers = pytest.mark.skipif(
    find_spec("transformers") is None, reason="transformers is not installed"
)
SMALL = {
    '"n_layer": 6': '"n_layer": 2',
    "step.step % 10": "step.step % 2",
    "Path(__file__)": f"Path({str(EXAMPLE)!r})",
}
LAYERS_ONLY = """
import torch
gpt2.eval()
x, y = data[:4]
with torch.no_grad():
    out = x
    for layer in layers:
        out = layer(out)
    print("same", torch.equal(out, gpt2(x, use_cache=False).logits))
"""


def small() -> str:
    """The script with fewer blocks, which tells more often."""
    text = EXAMPLE.read_text()
    for old, new in SMALL.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return "import torch\ntorch.set_num_threads(1)\n" + text  # Before a fork there may have been more.


def losses(script: Script) -> dict[str, str]:
    """By step."""
    return {line[0].rstrip(","): line[-1] for line in script.lines("step")}


@needs_transformers
@pytest.mark.slow
def test_its_layers_one_after_the_other_are_gpt2(tmp_path):
    before, _, _ = small().partition("with PipelineTrainer")
    script = tmp_path / "layers.py"
    script.write_text(before + LAYERS_ONLY)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "same True"


@needs_transformers
@pytest.mark.slow
def test_its_losses_are_those_of_one_process_though_a_member_is_killed(tmp_path):
    with scripts_in(tmp_path, PYTHONWARNINGS="ignore") as scripts:
        founder = scripts.start("n0", small())
        second = scripts.start("n1", small())
        second.advance()
        second.signal(signal.SIGKILL)
        founder.advance()
        alone = scripts.start("alone", small(), join=False)
        scripts.until(lambda: losses(alone).keys() >= losses(second).keys(), "one process is as far", 120.0)
        common = losses(founder).keys() & losses(alone).keys()
        assert len(common) >= 3
        assert {step: losses(founder)[step] for step in common} == {
            step: losses(alone)[step] for step in common
        }
        assert losses(second).items() <= losses(founder).items()


def test_without_transformers_it_says_what_is_missing(tmp_path):
    (tmp_path / "transformers.py").write_text("raise ImportError")
    command = [sys.executable, "-c", f"import runpy, sys; sys.path.insert(0, {str(tmp_path)!r});"
               f"runpy.run_path({str(EXAMPLE)!r})"]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "examples/gpt2.py: transformers is not installed (pip install transformers)"
