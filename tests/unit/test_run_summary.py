"""What is told of a run at its end: figures, and the lines that they are put into."""

import json
import math

import pytest

from chaosnet.protocols.messages import Notice
from chaosnet.script.run_summary import (
    PLAIN_BLOCKS,
    SPARKS,
    VALUES_KEPT,
    Curve,
    RunRecord,
    RunSummary,
    lines,
    sparkline,
)


def summary(**given):
    figures = {
        "node": "n0", "step": 40, "seconds": 10.0, "steps": 40, "steps_here": 30, "samples": 1280.0,
        "samples_here": 480.0, "computing": 6.0, "summing": 2.0, "updating": 1.0, "waiting": 0.5,
        "members": ("n0", "n1"),
    }  # fmt: skip
    return RunSummary(**figures | given)


def notice(kind, node):
    return Notice(kind=kind, node=node, detail="", step=3, time_s=0.0)


def test_a_run_is_told_in_lines():
    told = summary(
        joined=("n2", "n3"), left=("n3",), lost=("n2",), dealt_again=16.0, void_steps=1,
        metrics={"loss": (4.0, 1.0, 4.0, 2.0, 1.0)}, checkpoint="ckpt/step-40", checkpoint_step=40,
    )  # fmt: skip
    assert lines(told, PLAIN_BLOCKS) == [
        "run: 40 steps, 30 with samples from here (480 of 1,280)",
        "time 10 s: 60% compute, 20% sum, 10% optimizer, 5% wait, 5% other",
        "members: n0, n1 at the end; joined n2, n3; left n3; lost n2",
        "work lost: none; done over: 1 step here, at most 16 samples of others",
        "loss: 1, from 4  @-_",
        "newest checkpoint: step 40 in ckpt/step-40",
    ]


def test_no_line_is_wider_than_a_terminal_and_there_are_seven_at_most():
    many = tuple(f"a-node-with-a-long-name-{n}" for n in range(40))
    told = lines(
        summary(
            seconds=1e6,
            steps=10**9,
            steps_here=10**9,
            samples=1e15,
            samples_here=1e15,
            members=many,
            joined=many,
            left=many,
            lost=many,
            lost_updates=10**9,
            void_steps=10**9,
            dealt_again=1e12,
            samples_set_aside=10**9,
            samples_dropped=10**9,
            checkpoint="c",
            checkpoint_step=1,
            metrics={"m" * 60 + str(n): (-1.23456e-300,) * 60 for n in range(9)},
        )
    )
    assert len(told) == 7
    assert max(map(len, told)) <= 69


def test_what_was_really_lost_is_named():
    assert "work lost: 2 updates of the model, 3 samples set aside" in lines(
        summary(lost_updates=2, samples_set_aside=3)
    )


@pytest.mark.parametrize(
    ("values", "expected"),
    [([], ""), ([1.0], ""), ([1.0, 1.0], "__"), ([0.0, 7.0], "_@"), ([7.0, 2.0, 0.0], "@-_")],
)
def test_a_sparkline_goes_from_the_least_to_the_greatest(values, expected):
    assert sparkline(values, PLAIN_BLOCKS) == expected


def test_a_sparkline_of_many_values_shows_their_parts_means():
    line = sparkline([float(n) for n in range(1000)], PLAIN_BLOCKS)
    assert len(line) == SPARKS and list(line) == sorted(line, key=PLAIN_BLOCKS.index)


def test_a_curve_keeps_its_ends_and_its_shape_in_bounded_memory():
    curve = Curve()
    for n in range(100_000):
        curve.add(float(n))
    curve.add(math.nan)
    assert (curve.first, math.isnan(curve.last)) == (0.0, True)
    assert VALUES_KEPT / 4 <= len(curve.values) < VALUES_KEPT
    assert curve.values == sorted(curve.values)
    assert sum(curve.values) / len(curve.values) == pytest.approx(50_000, rel=0.02)


def test_a_record_counts_who_came_and_went_while_this_node_was_a_member():
    record = RunRecord("n0")
    record.heard(notice("joined", "n9"))
    record.entered(step=10, samples=100.0)
    record.stepped(11, ("n0", "n1"), {"n0": 8, "n1": 4})
    for kind, node in [("joined", "n0"), ("joined", "n2"), ("left", "n1"), ("waits for", "n2")]:
        record.heard(notice(kind, node))
    record.stepped(12, ("n0", "n2"), {"n0": 8, "n2": 16})
    record.stepped(13, ("n0", "n2"), {"n0": 8})  # The next step is dealt without it before its loss is told.
    record.heard(notice("node-failure", "n2"))
    told = record.summary(150.0, steps_here=3, now_s=9.0)
    assert (told.joined, told.left, told.lost) == (("n2",), ("n1",), ("n2",))
    assert (told.steps, told.step, told.samples, told.dealt_again) == (3, 13, 50.0, 16.0)
    assert told.lost_updates == told.void_steps == 0


def test_of_nodes_that_are_gone_no_more_than_their_names_is_kept():
    record = RunRecord("n0")
    record.entered(step=0, samples=0.0)
    for number in range(100):
        record.stepped(number + 1, ("n0", f"n{number}"), {"n0": 8, f"n{number}": 4})
        record.heard(notice("node-failure" if number % 2 else "left", f"n{number}"))
    assert record.summary(0.0, steps_here=100, now_s=9.0).dealt_again == 200.0
    assert record._shares == {"n0": 8}


def test_updates_that_the_cluster_does_not_have_any_more_are_counted_as_lost():
    record = RunRecord("n0")
    record.entered(step=0, samples=0.0)
    record.stepped(1, ("n0",), {})
    record.stepped(2, ("n0",), {})
    record.void(1, computed=True)  # It has come back to a cluster that is one behind.
    told = record.summary(8.0, steps_here=2, now_s=1.0)
    assert (told.lost_updates, told.void_steps) == (1, 1)


def test_waits_that_were_told_are_no_part_of_the_sums():
    record = RunRecord("n0")
    record.entered(step=0, samples=0.0)
    record.stepped(1, ("n0",), {})
    record.summing = 5.0
    record.parked(True, now_s=1.0)
    record.parked(True, now_s=2.0)  # For another reason.
    record.parked(False, now_s=4.0)
    told = record.summary(8.0, steps_here=1, now_s=6.0)
    assert (told.waiting, told.summing) == (3.0, 2.0)


def test_who_was_in_no_step_has_nothing_to_tell():
    record = RunRecord("n0")
    record.entered(step=3, samples=9.0)
    assert record.summary(9.0, steps_here=0, now_s=1.0) is None


def test_after_a_long_run_not_all_names_are_told_but_how_many():
    many = tuple(f"n{number}" for number in range(5000))
    told = summary(joined=many, lost=many[:2])
    fields = told.fields()
    assert (fields["joined"], fields["joined_count"]) == (many[:20], 5000)
    assert (fields["lost"], fields["lost_count"], fields["left_count"]) == (many[:2], 2, 0)
    assert "joined n0, n1 and 4998 more; lost n0, n1" in lines(told)[2]


def test_programs_get_numbers_that_json_has():
    fields = summary(metrics={"loss": (math.inf, math.nan, 2.0, 1.0)}).fields()
    assert json.loads(json.dumps(fields, allow_nan=False))["metrics"] == {
        "loss": {"first": None, "last": None, "history": [2.0, 1.0]}
    }
