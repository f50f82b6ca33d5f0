"""`chaosnet bench`: that it runs, among real processes, and says what it promises. Not how fast."""

import json
import os
import shutil
from ctypes.util import find_library
from pathlib import Path

import pytest
from click.testing import CliRunner

from chaosnet.cli import cli

pytestmark = pytest.mark.realtime


def bench(out: Path, *args: str) -> dict:
    done = CliRunner().invoke(cli, ["bench", *args, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


def test_all_reduces_are_compared_with_gloo(tmp_path):
    figures = bench(tmp_path / "found.json", "allreduce", "--bytes", "4000000", "--nodes", "2,3")
    assert figures.keys() == {"2", "3"}
    for found in figures.values():
        assert found["ratio"] == pytest.approx(found["gloo_s"] / found["ours_s"])


@pytest.mark.parametrize("how", [(), ("--blocking",), ("--trained",)])
def test_a_join_is_measured(tmp_path, how):
    found = bench(tmp_path / "found.json", "join", "--bytes", "8000000", "--sources", "2", *how)
    assert found["bytes"] >= 8_000_000
    assert 0 < found["bound_seconds"] < found["seconds"]
    assert found["ratio_to_bound"] == pytest.approx(found["seconds"] / found["bound_seconds"], rel=0.02)
    assert found["survivor_longest_gap_seconds"] > 0


def test_the_cost_of_checkpoints_is_measured(tmp_path):
    args = ("--bytes", "2000000", "--nodes", "2", "--steps", "10", "--pairs", "2", "--dir", str(tmp_path))
    found = bench(tmp_path / "found.json", "checkpoint", *args)
    assert found["written"] + found["left_out"] >= 2
    assert len(found["ratios"]) == 2 and min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or find_library("iperf") is None,
    reason="it needs root, iproute2 and libiperf",
)
def test_probes_are_compared_with_iperf3(tmp_path):
    (row,) = bench(tmp_path / "found.json", "probe", "--rates", "200")
    assert row["ratio"] == pytest.approx(1.0, abs=0.25)  # On a busy machine; 0.02 on an idle one.
    assert 0 < row["probe_seconds"] < row["iperf3_seconds"]
