"""`chaosnet.protocols.status`: what people and programs are told of a cluster, and who is asked for it.

A whole status is kept in tests/traces/status.json, so a change of the schema shows in review. To rewrite it:
CHAOSNET_REWRITE_TRACES=1 python -m pytest tests/unit/test_status.py
"""

import ast
import io
import json
import os
import time
from pathlib import Path

import msgspec
import pytest
from rich.console import Console
from statuses import STATUS

from chaosnet.errors import MalformedMessage, PeerUnreachable, VersionMismatch
from chaosnet.node.step_history import STEPS_KEPT, VALUES_KEPT, StepHistory
from chaosnet.protocols.messages import Bytes, Contribution, Member, Notice, Report, Tree, View
from chaosnet.protocols.sentences import SENTENCES, in_again, sentence
from chaosnet.protocols.status import (
    DETAIL_CHARS,
    MAX_BYTES,
    STATUS_VERSION,
    CheckpointRow,
    EventRow,
    LinkRow,
    MemberRow,
    StepRow,
    WaitRow,
    from_json,
    to_json,
)
from chaosnet.scheduler.monitor import (
    CHECKPOINT_AT_S,
    CHECKPOINT_STEP,
    CHECKPOINT_WRITING,
    EVENTS_KEPT,
    ClusterMonitor,
)
from chaosnet.script.teller import log_line
from chaosnet.terminal import tables
from chaosnet.terminal.watching import Known

KEPT = Path(__file__).parent.parent / "traces" / "status.json"


# --- the schema ---


def test_the_json_is_what_it_was():
    told = msgspec.json.format(to_json(STATUS), indent=2).decode() + "\n"
    if os.environ.get("CHAOSNET_REWRITE_TRACES") == "1":
        KEPT.write_text(told)
    assert told == KEPT.read_text(), "the status changed (see the top of this file, and STATUS_VERSION)"


LONG = "\x01" * 4000  # Six characters each in JSON.


def test_a_reply_fits_into_a_message_however_long_the_details_of_its_events_are():
    events = tuple(
        EventRow(kind="left", node="a", detail=LONG, step=n, time_s=0.0, handling_ms=0.0)
        for n in range(EVENTS_KEPT)
    )
    status = msgspec.structs.replace(STATUS, events=events, cut=0)
    text = to_json(status)
    assert len(msgspec.json.encode(status)) > MAX_BYTES
    assert msgspec.convert(text, Bytes) == text
    told = from_json(text)
    assert [row.step for row in told.events] == [*range(EVENTS_KEPT)]
    assert {row.detail for row in told.events} == {"\x01" * (DETAIL_CHARS - 3) + "..."}
    assert (told.cut, told.steps, told.members) == (EVENTS_KEPT, STATUS.steps, STATUS.members)


@pytest.mark.parametrize("field", ["steps", "events", "links", "members"])
def test_a_reply_fits_into_a_message_however_many_rows_it_has(field):
    rows = getattr(STATUS, field) * (2 * MAX_BYTES // len(msgspec.json.encode(getattr(STATUS, field))))
    status = msgspec.structs.replace(STATUS, cut=0, **{field: rows})
    text = to_json(status)
    told = from_json(text)
    left = getattr(told, field)
    assert MAX_BYTES / 5 < len(text) <= MAX_BYTES
    assert left == (rows[-len(left) :] if field in ("steps", "events") else rows[: len(left)])
    fields = ("steps", "events", "links", "members")
    assert told.cut == sum(len(getattr(status, each)) - len(getattr(told, each)) for each in fields) > 0


def test_links_do_not_go_in_vain_for_members_that_would_not_fit_alone():
    members = STATUS.members * (3 * MAX_BYTES // len(msgspec.json.encode(STATUS.members)))
    told = from_json(to_json(msgspec.structs.replace(STATUS, cut=0, members=members)))
    assert told.links == STATUS.links and told.events == STATUS.events and told.steps == STATUS.steps
    assert 0 < len(told.members) < len(members) == told.cut + len(told.members)


def test_what_was_written_is_read_back():
    assert from_json(to_json(STATUS)) == STATUS


@pytest.mark.parametrize(
    ("version", "told"),
    [(STATUS_VERSION + 1, f"in version {STATUS_VERSION + 1}"), (None, "without a version")],
)
def test_another_version_of_the_schema_is_named(version, told):
    plain = {**json.loads(to_json(STATUS)), "version": version}
    plain["members"] = "are told in another way there"
    if version is None:
        del plain["version"]
    with pytest.raises(VersionMismatch, match=f"tells its status {told}.*expected version {STATUS_VERSION}"):
        from_json(json.dumps(plain).encode())


def test_fields_that_a_newer_chaosnet_has_added_are_ignored():
    plain = {**json.loads(to_json(STATUS)), "weather": "fine"}
    assert from_json(json.dumps(plain).encode()) == STATUS


@pytest.mark.parametrize(
    "text", [b"", b"\xff", b"[]", b'{"version": "1"}', b'{"version": 1}', to_json(STATUS)[:-1]]
)
def test_what_is_no_status_is_malformed(text):
    with pytest.raises(MalformedMessage, match="not a cluster's status"):
        from_json(text)


def test_all_of_it_is_shown_to_people():
    shown = io.StringIO()
    Console(width=200, file=shown).print(tables.cluster(STATUS))
    for part in (
        "2 members", "scheduler a (term 3)", "step 1,042", "loss 0.2500  norm not finite",
        "pipeline: a 0-3 > b 4-5 x8",
        "predicted: 400.0 ms a step, took 500.0 ms (median of the last 21), 16.0 micro-batches/s",
        "state kept: a 0-2, 5 | b 0-5 (each layer at 2 members or more)",
        "checkpoint: step 1,000 at ", "; written by a, b now",
        "waits for b, 25 s", "a - b", "100 Mbit/s", "7 s ago (probe)", "c is lost", "0.500", "705 too often",
        "did not fit: 1,500 rows",
    ):  # fmt: skip
        assert part in shown.getvalue(), part


def shown(status, width, wide=False):
    """What a terminal so wide has on it."""
    screen = io.StringIO()
    Console(width=width, file=screen).print(tables.cluster(status, wide))
    return screen.getvalue()


def test_names_that_look_like_markup_are_shown_as_they_are():
    """Of nodes, also as neighbours, and of what a script averages."""
    names = {"a": "a[/b]", "b": "gpu[a100]"}
    members = tuple(
        msgspec.structs.replace(
            row,
            node=names.get(row.node, row.node),
            neighbors=tuple(names.get(each, each) for each in row.neighbors),
        )
        for row in STATUS.members
    )
    step = StepRow(step=1, time_s=0.0, seconds=0.5, samples=8, metrics={"acc[top5]": 0.5})
    told = shown(msgspec.structs.replace(STATUS, members=members, steps=(step,)), 200, wide=True)
    for name in ("a[/b] - gpu[a100]", "acc[top5] 0.5000", *names.values()):
        assert name in told, name


LONG_NAMES = [f"a-host-with-a-long-name-{number:06x}" for number in range(3)]


def of_long_names():
    a = STATUS.members[0]
    here = f"{'K' * 52}@10.0.0.1:5555"
    rows = [
        msgspec.structs.replace(
            a, node=name, id=name, addresses=(here,), neighbors=tuple({*LONG_NAMES} - {name}), keeps=""
        )
        for name in LONG_NAMES
    ]
    return msgspec.structs.replace(STATUS, members=(*rows, *STATUS.members), scheduler=LONG_NAMES[0])


@pytest.mark.parametrize("width", [60, 80, 100, 200])
def test_no_row_is_wider_than_the_terminal_and_no_cell_is_cut(width):
    text = shown(of_long_names(), width)
    assert max(map(len, text.splitlines())) <= width
    rows = [line for line in text.splitlines() if line.startswith(("a-host", "node "))]
    assert text.count("…") == sum(line.count("a-host") for line in rows), "only names are shortened"
    for name in LONG_NAMES:
        assert f"{name[-7:]} " in text
    assert "got" in text if width >= 80 else "sync" in text
    assert "5555" not in text


def test_what_is_shown_in_full_has_names_neighbours_and_addresses():
    text = shown(of_long_names(), tables.UNBOUNDED, wide=True)
    assert "…" not in text and "(dials only)" in text and f"{'K' * 52}@10.0.0.1:5555" in text
    assert f"{LONG_NAMES[0]} - {LONG_NAMES[1]}" in text


def test_traffic_is_that_of_the_process():
    rows = tuple(msgspec.structs.replace(row, sent_bytes=7_000_000_000) for row in STATUS.members)
    text = shown(msgspec.structs.replace(STATUS, members=rows), 120)
    assert "7.0 GB" in text and "5.0 MB" not in text  # That is the machine's.


def test_the_day_of_an_event_is_told_unless_it_is_today():
    now_s = time.time()
    assert tables.clock(now_s) == time.strftime("%H:%M:%S", time.localtime(now_s))
    assert tables.clock(1.75e9) == time.strftime("%d %b %Y %H:%M:%S", time.localtime(1.75e9))
    assert " 2025 " in shown(msgspec.structs.replace(STATUS, events=(at(1.75e9),)), 80)


def at(time_s):
    return msgspec.structs.replace(STATUS.events[0], time_s=time_s)


def test_of_the_many_whom_all_wait_for_three_are_named():
    wait = WaitRow(whom=tuple(f"node-{number}" for number in range(200)), seconds=7200.0, why="they compute")
    text = shown(msgspec.structs.replace(STATUS, waiting=wait), 120)
    assert "waits for node-0, node-1, node-2 and 197 more, 2 h: they compute" in text


def test_units_fit_after_a_week_and_on_a_slow_link():
    rows = tuple(msgspec.structs.replace(row, sent_bytes=61_234_000_000_000) for row in STATUS.members)
    slow = LinkRow(a="a", b="b", rate_mbit=0.4, rate_age_s=604_800.0, rate_source="probe")
    text = shown(msgspec.structs.replace(STATUS, members=rows, links=(slow,)), 120)
    for part in ("61.2 TB", "0.4 Mbit/s", "7 days ago (probe)"):
        assert part in text, part


def test_what_a_node_calls_itself_does_not_reach_the_terminal_as_a_command():
    name = "a\x1b]0;mine\x07\x1b[2J"
    rows = tuple(msgspec.structs.replace(row, node=name, keeps="0") for row in STATUS.members)
    event = msgspec.structs.replace(STATUS.events[0], node=name, detail="\x9b31m")
    status = msgspec.structs.replace(
        STATUS, members=rows, scheduler=name, events=(event,), metrics={name: 1.0}
    )
    for text in (shown(status, 200, wide=True), log_line(sentence(event), "text")):
        assert "mine" in text
        assert all(each.isprintable() or each == "\n" for each in text)


def test_nothing_of_an_event_is_cut_off_in_a_narrow_terminal():
    event = msgspec.structs.replace(at(1.75e9), node="n" * 60)
    text = shown(msgspec.structs.replace(STATUS, events=(event,)), 80)
    assert text.count("n" * 10) >= 5 and "…" not in text


# --- words ---


@pytest.mark.parametrize(
    ("kind", "node", "detail", "told"),
    [
        ("joined", "n3", "now 4 members, 5 links", "n3 joins: now 4 members, 5 links"),
        ("scale-out", "n3", "asks to join", "n3 asks to join"),
        ("left", "n3", "now 1 member, 0 links", "n3 leaves: now 1 member, 0 links"),
        ("node-failure", "n3", "", "n3 is lost"),
        ("expelled", "n3", "its key was revoked", "n3 is shut out: its key was revoked"),
        ("link-failure", "n1 - n3", "lost n1 - n3", "the link n1 - n3 is lost: lost n1 - n3"),
        ("waits for", "n1 - n3", "9 s so far: why", "all wait for the link n1 - n3, 9 s so far: why"),
        ("of-a-newer-chaosnet", "n1", "{node}", "of-a-newer-chaosnet n1: {node}"),
    ],
)
def test_events_are_told_in_words(kind, node, detail, told):
    assert sentence(Notice(kind=kind, node=node, detail=detail, step=1, time_s=0.0)) == told


def test_every_kind_of_event_has_a_sentence():
    """Names of the wire are for programs."""
    root = Path(__file__).parent.parent.parent
    sources = [
        file for folder in ("node", "scheduler", "protocols") for file in (root / folder).rglob("*.py")
    ]
    calls = (
        node
        for file in sources
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call)
    )
    happened = [call.args[0] for call in calls if getattr(call.func, "id", "") == "Happened"]
    named = {each.value for call in happened for each in ast.walk(call) if isinstance(each, ast.Constant)}
    assert len(happened) >= 15
    assert {each for each in named if isinstance(each, str)} | {"connect-link", "disconnect-link"} == {
        *SENTENCES
    }


# --- what makes it ---


def test_a_row_has_all_that_a_node_reports_but_what_links_and_waits_show():
    assert set(Report.__struct_fields__) - set(MemberRow.__struct_fields__) == {"readings", "lacks"}
    assert set(Notice.__struct_fields__) == set(EventRow.__struct_fields__)


def test_a_member_that_has_not_reported_yet_is_told_apart_from_one_that_does_nothing():
    monitor = ClusterMonitor()
    view = View(term=1, seq=1, scheduler="a", members=(Member(id="a"), Member(id="b")), links=(("a", "b"),))
    monitor.entered(view)
    monitor.report(Report(node="b", step=5, cpu_pct=3.0), now_s=10.0)
    a, b = monitor.member_rows(now_s=12.0)
    assert (a.report_age_s, a.neighbors, a.step) == (None, ("b",), 0)
    assert (b.report_age_s, b.step, b.cpu_pct) == (2.0, 5, 3.0)


def test_events_are_kept_up_to_a_limit():
    monitor = ClusterMonitor()
    for step in range(EVENTS_KEPT + 5):
        monitor.notice(Notice(kind="joined", node="b", detail="", step=step, time_s=0.0))
    assert [row.step for row in monitor.event_rows()] == list(range(5, EVENTS_KEPT + 5))


def test_the_newest_checkpoint_is_that_of_which_all_who_write_have_their_parts():
    monitor, members = ClusterMonitor(), tuple(Member(id=name) for name in "abcd")
    monitor.entered(View(term=1, seq=1, scheduler="a", members=members, links=(), trees=()))
    assert monitor.checkpoint_row() is None
    monitor.report(Report(node="d", counters={"dropped": 1}), 0.0)
    assert monitor.checkpoint_row() is None, "d writes none"

    def wrote(node, step, at_s, now):
        told = {CHECKPOINT_STEP: step, CHECKPOINT_AT_S: at_s, CHECKPOINT_WRITING: now}
        monitor.report(Report(node=node, counters=told if step else {CHECKPOINT_WRITING: now}), 0.0)

    wrote("a", 0, 0, 1)
    assert monitor.checkpoint_row() == CheckpointRow(step=0, time_s=0.0, writing=("a",))
    wrote("a", 200, 90, 0)
    wrote("b", 100, 70, 1)
    wrote("c", 0, 0, 0)
    assert monitor.checkpoint_row() == CheckpointRow(step=100, time_s=70.0, writing=("b",)), (
        "b lacks its part"
    )
    wrote("b", 200, 95, 0)
    assert monitor.checkpoint_row() == CheckpointRow(step=200, time_s=95.0), "c has joined since"


def contribution(**means):
    return Contribution(weight=8.0, metrics={name: (value * 8.0, 8.0) for name, value in means.items()})


def test_steps_are_kept_with_what_they_took_and_brought():
    history = StepHistory()
    history.completed(7, contribution(loss=0.5), now_s=100.0, time_s=1000.0)
    history.completed(8, contribution(loss=float("inf")), now_s=100.25, time_s=1000.25)
    first, second = history.rows
    assert (first.step, first.seconds, first.samples, first.metrics) == (7, None, 8.0, {"loss": 0.5})
    assert (second.seconds, second.time_s, second.metrics) == (0.25, 1000.25, {"loss": None})
    assert history.metrics == {"loss": None}


def test_what_a_step_takes_is_the_median_of_late_ones():
    history = StepHistory()
    assert history.pace_s is None
    for step in range(40):
        history.completed(step, contribution(), 100.0 * step if step < 20 else 2000.0 + step, 0.0)
    assert history.pace_s == 1.0
    history.completed(40, contribution(), 9000.0, 0.0)
    assert history.pace_s == 1.0, "one that waited does not change it"


def test_steps_are_kept_up_to_a_limit():
    history = StepHistory()
    for step in range(STEPS_KEPT + 5):
        history.completed(step, contribution(loss=1.0), float(step), 0.0)
    assert [row.step for row in history.rows] == list(range(5, STEPS_KEPT + 5))


def test_what_is_new_of_the_history_is_what_came_at_a_step_or_later():
    history = StepHistory()
    for step in range(10):
        history.completed(step, contribution(loss=1.0), float(step), 0.0)
    assert [row.step for row in history.since(7)] == [7, 8, 9]
    assert (len(history.since(0)), history.since(10)) == (10, ())


def test_the_trees_of_a_view_are_told_with_the_links_that_they_lead_over():
    monitor, members = ClusterMonitor(), tuple(Member(id=name) for name in "abc")
    trees = (
        Tree(root="a", parent={"b": "a", "c": "a"}, share=0.75),
        Tree(root="c", parent={"a": "b", "b": "c"}, share=0.25),
    )
    links = (("a", "b"), ("a", "c"), ("b", "c"))
    monitor.entered(View(term=1, seq=1, scheduler="a", members=members, links=links, trees=trees))
    assert [(row.a, row.b, row.trees) for row in monitor.link_rows(0.0)] == [
        ("a", "b", (0, 1)), ("a", "c", (0,)), ("b", "c", (1,)),
    ]  # fmt: skip
    assert [(row.root, row.share) for row in monitor.tree_rows()] == [("a", 0.75), ("c", 0.25)]


def test_the_history_fits_into_a_message_however_many_metrics_there_are():
    history = StepHistory()
    means = {chr(0x1F600) * 60 + f"{index:04}": 1 / 3 for index in range(100)}
    for step in range(VALUES_KEPT // 100 + 5):
        history.completed(step, contribution(**means), float(step), 0.0)
    assert [row.step for row in history.rows] == list(range(5, VALUES_KEPT // 100 + 5))
    text = to_json(msgspec.structs.replace(STATUS, steps=tuple(history.rows)))
    assert msgspec.convert(text, Bytes) == text


# --- whom to ask ---


def known(*active, patience_s=30.0):
    """Asked at a:1 for the first time at 0 s, and answered so."""
    ring = Known("a:1", patience_s)
    ring.answered(told(*active))
    return ring


def told(*active):
    rows = [
        MemberRow(node=each, id=each, state="active", addresses=(f"{each}:1",), joined_step=0, neighbors=())
        for each in active
    ]
    gone = MemberRow(node="x", id="x", state="left", addresses=("x:1",), joined_step=0, neighbors=())
    return msgspec.structs.replace(STATUS, members=(gone, *rows))


DIED = PeerUnreachable("nobody answers")


def test_whoever_answers_is_asked_again_and_if_it_falls_silent_the_next_member():
    ring = known("a", "b", "c")
    assert ring.addresses[0] == "a:1"
    ring.silent(DIED, 1.0, now_s=1.0)
    assert ring.addresses[0] == "b:1"
    ring.answered(told("b", "c"))
    assert ring.addresses[0] == "b:1"
    ring.answered(told("c", "d"))  # b has left, and has told so with its last words.
    ring.silent(DIED, 4.0, now_s=4.0)
    assert ring.addresses[0] == "c:1"


def test_who_has_left_is_not_asked_and_the_first_address_is_the_last_resort():
    ring = known("b", "c")
    asked = []
    for _ in range(4):
        asked.append(ring.addresses[0])
        ring.silent(DIED, 1.0, now_s=1.0)
    assert asked == ["a:1", "b:1", "c:1", "a:1"]
    ring = known("a", "b")
    ring.silent(DIED, 1.0, now_s=1.0)
    ring.answered(told("b", "c"))
    assert ring.addresses == ["b:1", "c:1", "a:1"]


def test_an_election_is_waited_for_but_a_cluster_that_is_gone_ends_the_watch():
    ring = known("a", "b")
    for now_s in (5.0, 10.0, 32.9):
        ring.silent(DIED, now_s - 2, now_s)
    ring.answered(told("a", "b"))
    ring.silent(DIED, 50.0, now_s=52.0)
    with pytest.raises(
        PeerUnreachable, match=r"not answered for 31 s \(asked: .*b:1.*\); at last: nobody answers"
    ):
        ring.silent(DIED, 79.0, now_s=81.0)


def test_a_pause_of_who_watches_is_no_silence_and_everybody_is_asked_before_it_ends():
    ring = known("a", "b", "c")
    for asked_s in (600.0, 660.0):
        ring.silent(DIED, asked_s, asked_s + 2)
    with pytest.raises(PeerUnreachable, match="not answered for 122 s"):
        ring.silent(DIED, 720.0, 722.0)


@pytest.mark.parametrize(
    ("value", "shown"),
    [(0.25, "0.2500"), (0.0, "0.0000"), (0.00001234, "1.234e-05"), (-0.0052, "-0.0052"), (2e9, "2e+09")],
)
def test_a_small_or_a_large_metric_is_shown_with_digits_that_say_something(value, shown):
    assert tables.figure(value) == shown


def test_who_is_back_has_missed_steps_or_lost_its_own():
    assert in_again("n1", 5, 6) == "n1 is in again at step 6: 1 step went by without it"
    undone = "65 steps that it has made are undone, as the others went on from an earlier one"
    assert in_again("n1", 70, 5) == f"n1 is in again at step 5: {undone}"
