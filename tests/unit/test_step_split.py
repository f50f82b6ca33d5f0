"""`chaosnet.terminal.step_split`: what a step's time goes to, and whom the others wait for."""

from __future__ import annotations

from dataclasses import asdict

import msgspec
from statuses import STATUS

from chaosnet.page import model
from chaosnet.page.picture import Picture
from chaosnet.protocols.status import MemberRow, StepRow
from chaosnet.terminal import tables
from chaosnet.terminal.step_split import split, who_comes_last


def member(name: str, sync_s: float) -> MemberRow:
    row = next(row for row in STATUS.members if row.node == "a")
    return msgspec.structs.replace(row, node=name, sync_delay_s=sync_s)


def slowest(*sync_s: float, step_s: float = 1.0, by_plan: bool = False) -> str | None:
    """Of members a, b, ... that wait so long for the sum."""
    found = split([member(*each) for each in zip("abc", sync_s, strict=False)], step_s, by_plan)
    assert found is not None
    return found.slowest


def test_the_time_of_a_step_is_split_by_who_waits_least():
    found = split((member("a", 0.4), member("b", 0.1), member("c", 0.4)), step_s=1.0)
    assert found is not None and found.sum_s == 0.1
    assert [(row.node, row.own_s, round(row.wait_s, 9)) for row in found.rows] == [
        ("b", 0.9, 0.0), ("a", 0.6, 0.3), ("c", 0.6, 0.3),
    ]  # fmt: skip
    assert (found.slowest, round(found.costs_s, 9)) == ("b", 0.3)
    pair = split((member("a", 0.5), member("b", 0.1)), step_s=1.0)
    assert pair is not None and (pair.slowest, pair.costs_s) == ("b", 0.4), "of two, too"


def test_what_a_node_does_itself_is_the_rest_of_the_step_in_which_it_waited():
    """Not of a usual step: a node that waited once for a slow one would have had nothing to do itself."""
    members = [msgspec.structs.replace(member(name, s), step=9) for name, s in (("a", 2.6), ("b", 0.1))]
    steps = [StepRow(step=8, time_s=0.0, seconds=3.0, samples=8, metrics={})]
    found = split(members, 1.0, steps=steps)
    assert found is not None
    assert [(row.node, round(row.own_s, 9)) for row in found.rows] == [("b", 2.9), ("a", 0.4)]


def test_nobody_is_blamed_for_a_wait_that_does_not_matter_or_without_others():
    assert slowest(0.12, 0.1) is None
    assert slowest(0.006, 0.001, step_s=0.01) is None, "half of a step, of some milliseconds"
    assert slowest(0.12) is None
    assert split((), step_s=1.0) is None and split((member("a", 0.1),), None) is None


def test_nobody_is_blamed_who_ends_last_by_plan():
    assert (slowest(0.5, 0.1), slowest(0.5, 0.1, by_plan=True)) == ("b", None)


def test_who_has_just_joined_has_waited_for_no_step_and_is_not_blamed():
    new = msgspec.structs.replace(member("new", 0.0), step=7, joined_step=7)
    found = split((member("a", 0.8), member("b", 0.8), new), step_s=1.0)
    assert found is not None and found.slowest is None


def test_status_and_page_say_the_same():
    status = msgspec.structs.replace(
        STATUS, members=(member("a", 0.4), member("b", 0.1)), step_s=1.25, pipelines="", waiting=None
    )
    assert who_comes_last(status) == "b comes last: the others wait 300 ms of a step of 1.2 s for it"
    assert who_comes_last(status) in tables.headline(status).plain
    picture = Picture()
    picture.answered(status, 100.0)
    page = model.page(picture, 100.0)
    found = split(status.active, page["head"]["step_s"], steps=status.steps)
    assert found is not None and page["split"] == asdict(found)
