"""What `chaosnet demo` prints, with the names that a user chose; with processes: tests/integration/test_demo.py."""

import pytest

from chaosnet.trials.demo_pipeline import Play
from chaosnet.trials.demo_stage import DemoStage


@pytest.mark.parametrize("of", [DemoStage, Play])
def test_brackets_in_the_name_of_a_folder_are_shown(tmp_path, capsys, of):
    of(tmp_path, 0).say("written: runs[red]/summary.json")
    assert capsys.readouterr().out.endswith("written: runs[red]/summary.json\n")
