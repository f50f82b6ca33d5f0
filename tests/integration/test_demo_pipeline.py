"""`chaosnet demo --pipeline`: that it keeps its promises, and would notice if it did not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from chaosnet.cli import cli
from chaosnet.trials.demo_gpt import make_layers, own_source
from chaosnet.trials.demo_pipeline import broken_promises

GOOD: dict[str, Any] = {
    "steps_lost": 0,
    "steps_that_differ": 0,
    "loss": 1.5,
    "loss_alone": 1.5,
    "models_identical": True,
    "exit_codes": {"node-1": 0, "alone": 0},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps_lost": 1},
        {"steps_that_differ": 2},
        {"loss": 1.5000000000000002},
        {"models_identical": False},
        {"exit_codes": {"node-1": 1}},
    ],
)
def test_each_broken_promise_is_named(wrong: dict[str, Any]) -> None:
    assert broken_promises(GOOD) == []
    (line,) = broken_promises({**GOOD, **wrong})
    assert next(iter(wrong)) in line.replace("node-1 ended with", "exit_codes")


def test_who_takes_longer_over_a_layer_has_the_same_numbers() -> None:
    x, _ = own_source()[:2]
    slow, fast = x, x
    for one, other in zip(make_layers(0.0001, 3), make_layers(0.0, 3), strict=True):
        slow, fast = one.eval()(slow), other.eval()(fast)
    assert slow.equal(fast)


@pytest.mark.slow
@pytest.mark.realtime
def test_a_worker_and_then_a_whole_stage_are_lost_and_every_step_is_that_of_one_process(tmp_path) -> None:
    done = CliRunner().invoke(
        cli, ["demo", "--pipeline", "--out", str(tmp_path / "run")], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert broken_promises(summary) == []
    worker, stage = summary["losses"]
    assert (worker["kind"], len(worker["nodes"])) == ("worker", 1)
    assert (stage["kind"], len(stage["nodes"])) == ("stage", 2)
    assert summary["recovery_seconds"].keys() == {"worker", "stage"}
    assert (
        sum(each.count("|") for each in summary["pipelines"]) >= 2
    )  # Two at a time, at first and once more.
    assert "kill -9 of" in done.output and "pipelines (" in done.output
    assert (tmp_path / "run" / "demo-pipeline.png").stat().st_size > 30_000
