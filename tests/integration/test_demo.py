"""The demo's own judgement: it must notice what it promises cannot happen."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from chaosnet.protocols.status import LinkRow
from chaosnet.trials import demo_report as report
from chaosnet.trials.demo_report import NodeLog, SeenStep
from chaosnet.trials.node_processes import NodeProcess


def log(name: str, *steps: int, loss: float = 1.0, shift_s: float = 0.0, final: str = "") -> NodeLog:
    """A node that committed these steps, one every 0.1 s; `final`: the hash of its state at the end."""
    made = NodeLog(name, [SeenStep(step, 0.1 * step + shift_s, loss / step, 64.0 * step) for step in steps])
    if final:
        made.final = {"final_step": steps[-1], "hash": final, "accuracy": 0.98}
    return made


def test_steps_that_somebody_committed_are_not_lost() -> None:
    found = report.audit([log("a", 1, 2, 3, 4), log("b", 3, 5, 6)])
    assert found == report.StepAudit(last=6, missing=(), repeated=(), disagreeing=())


def test_a_lost_step_is_noticed() -> None:
    assert report.audit([log("a", 1, 2, 4), log("b", 2, 5)]).missing == (3,)
    assert report.audit([log("a", 3, 4)]).missing == (1, 2)


def test_a_step_applied_twice_is_noticed() -> None:
    assert report.audit([log("a", 1, 2, 2, 3), log("b", 2, 3)]).repeated == (2,)


def test_a_step_with_two_losses_is_noticed() -> None:
    assert report.audit([log("a", 1, 2, 3), log("b", 2, 3, loss=1.5)]).disagreeing == (2, 3)


def test_only_the_last_line_of_a_killed_node_may_differ() -> None:
    """It may have died as the only one that had completed that step."""
    survivor, dead = log("a", 1, 2, 3, 4), log("b", 1, 2, 3)
    dead.steps[-1] = dead.steps[-1]._replace(loss=9.0)
    assert report.audit([survivor, dead]).disagreeing == (3,)
    assert report.audit([survivor, dead], killed=["b"]).disagreeing == ()
    dead.steps[-2] = dead.steps[-2]._replace(loss=9.0)
    assert report.audit([survivor, dead], killed=["b"]).disagreeing == (2,)


def test_a_diverged_replica_is_noticed() -> None:
    a = log("a", 1, 2, final="x")
    assert report.replicas_identical([a, log("b", 1, 2, final="x")])
    assert not report.replicas_identical([a, log("b", 1, 2, final="y")])
    assert not report.replicas_identical([a, log("b", 1, 2, 3, final="x")])
    assert not report.replicas_identical([a, log("b", 1, 2)])
    assert not report.replicas_identical([])


def test_half_a_line_of_a_killed_node_tells_nothing() -> None:
    found = NodeLog("a")
    for line in (
        json.dumps({"time_s": 1.0, "joined_step": 0, "seconds": 0.1, "bytes_by_source": {}}),
        json.dumps({"time_s": 2.0, "step": 1, "loss": 0.5, "samples": 32.0}),
        '{"time_s": 3.0, "st',
    ):
        found.add(line)
    assert found.joined is not None
    assert found.steps == [SeenStep(1, 2.0, 0.5, 32.0)]
    assert found.final is None


def test_recovery_lasts_until_the_slowest_survivor_has_a_step_nobody_had_before() -> None:
    a, b = log("a", 1, 2, 3, 4, 9), log("b", 1, 2, 3, 9, shift_s=0.02)
    # At 0.45 s node a has step 4; that b commits it later would be no recovery.
    b.steps.insert(3, SeenStep(4, 0.46, 0.25, 256.0))
    assert report.recovery_s([a, b], ["a", "b"], killed_s=0.45) == pytest.approx(0.92 - 0.45)
    assert report.recovery_s([a, log("b", 1, 2)], ["b"], killed_s=0.45) == float("inf")


def test_the_longest_gap_is_that_in_the_window() -> None:
    logs = [log("a", 1, 2, 5, 6, 12)]
    assert report.longest_gap_s(logs, ["a"], from_s=0.1, until_s=0.55) == pytest.approx(0.3)
    assert report.longest_gap_s(logs, ["a"], from_s=0.1, until_s=2.0) == pytest.approx(0.6)
    assert report.longest_gap_s(logs, ["b"], from_s=0.1, until_s=2.0) == 0.0


def test_the_bound_of_a_join_fills_all_links_of_the_joiner() -> None:
    links = [
        LinkRow(a="a", b="j", rate_mbit=80.0, rate_back_mbit=1.0),
        LinkRow(a="j", b="k", rate_mbit=1.0, rate_back_mbit=80.0),
        LinkRow(a="a", b="k", rate_mbit=8000.0, rate_back_mbit=8000.0),
    ]
    assert report.join_bound_s(20_000_000, links, "j") == pytest.approx(1.0)
    assert report.join_bound_s(20_000_000, links[2:], "j") == 0.0


GOOD: dict[str, Any] = {
    "accuracy": 0.98,
    "steps_lost": 0,
    "steps_applied_twice": 0,
    "steps_disagreeing": 0,
    "replicas_identical": True,
    "events": [{}] * 6,
    "exit_codes": {"node-2": 0},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"accuracy": 0.96},
        {"accuracy": float("nan")},
        {"steps_lost": 1},
        {"steps_applied_twice": 1},
        {"steps_disagreeing": 2},
        {"replicas_identical": False},
        {"events": [{}] * 5},
        {"exit_codes": {"node-2": -9}},
    ],
)
def test_each_broken_promise_is_named(wrong: dict[str, Any]) -> None:
    assert report.broken_promises(GOOD) == []
    (line,) = report.broken_promises({**GOOD, **wrong})
    assert next(iter(wrong)) in line.replace("things happened", "events").replace(
        "node-2 ended with", "exit_codes"
    )


def test_what_a_node_says_as_it_leaves_is_found_before_its_summary(tmp_path: Path) -> None:
    node = NodeProcess.__new__(NodeProcess)
    node._printed = tmp_path / "a.log"
    node._printed.write_text("[chaosnet] a left after step 7 (it asked to): 7 steps\n[chaosnet] loss: 0.1\n")
    assert node.last_words("a left after") == "[chaosnet] a left after step 7 (it asked to): 7 steps"
    assert node.last_words() == "[chaosnet] loss: 0.1"
    assert node.last_words("error") == "it wrote nothing"
