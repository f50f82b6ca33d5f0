"""The page and the metrics as pure functions of statuses: what is drawn, and what Prometheus reads."""

import json
import re
from collections import Counter
from pathlib import Path

import click
import msgspec
import pytest
from many_nodes import BEGAN_S, cluster
from prometheus_client.parser import text_string_to_metric_families
from statuses import STATUS

from chaosnet.page import metrics, model
from chaosnet.page.picture import EVENTS_KEPT, STEPS_KEPT, STEPS_WHOLE, Picture
from chaosnet.protocols.status import EventRow, StepRow
from chaosnet.settings.options import ListenAt
from chaosnet.terminal.told_pipelines import StageTold, lines

DOCS = Path(__file__).parents[2] / "docs"


def pictured(*statuses):
    """Answered a second apart, from 100 s on."""
    picture = Picture()
    for place, status in enumerate(statuses):
        picture.answered(status, 100.0 + place)
    return picture


def after(status, **changes):
    return msgspec.structs.replace(status, **changes)


# --- what is remembered ---


def step(number, **more):
    return StepRow(step=number, time_s=0.0, seconds=0.5, samples=8, metrics={}, **more)


def test_increments_continue_the_history_and_nothing_comes_twice():
    first = after(STATUS, steps=tuple(step(n) for n in range(10)))
    second = after(STATUS, steps=tuple(step(n) for n in range(9, 12)))
    picture = pictured(first, second, second)
    assert [row.step for row in picture.steps] == [*range(12)]
    assert [row.kind for row in picture.events] == [row.kind for row in STATUS.events]
    assert picture.events_by_kind == {"joined": 1, "node-failure": 1}


def test_a_long_run_keeps_its_beginning_in_outline_and_its_end_whole():
    picture = pictured(*(after(STATUS, steps=(step(n),)) for n in range(STEPS_KEPT + 500)))
    kept = [row.step for row in picture.steps]
    assert kept[0] == 0 and len(kept) <= STEPS_KEPT
    assert kept[-STEPS_WHOLE:] == [*range(STEPS_KEPT + 500 - STEPS_WHOLE, STEPS_KEPT + 500)]


def test_of_a_run_of_weeks_no_tenth_is_without_a_curve():
    """After a million steps, nothing was known of what came between the first of them and number 981,248."""
    picture, steps, at_once = Picture(), 60_000, 200
    for first in range(0, steps, at_once):
        picture.answered(after(STATUS, steps=tuple(step(n) for n in range(first, first + at_once))), 0.0)
    tenths = Counter(10 * row.step // steps for row in picture.steps)
    assert min(tenths[tenth] for tenth in range(10)) > 50


def test_an_event_by_a_clock_that_is_behind_is_counted_once_and_shown_in_its_place():
    def event(n):
        return EventRow(kind="link-up", node="a", detail=f"{n}", step=1, time_s=1000.0 + n, handling_ms=0.1)

    late = msgspec.structs.replace(event(0), kind="joined", node="b", time_s=5.0)
    picture = pictured(after(STATUS, events=tuple(event(n) for n in range(EVENTS_KEPT))))
    for _ in range(3):
        picture.answered(after(STATUS, events=(late, event(EVENTS_KEPT - 1))), 200.0)
    assert picture.events_by_kind["joined"] == 1
    assert model.story(picture.events)[0]["kind"] == "joined"


def test_another_cluster_at_the_same_addresses_begins_anew():
    other = after(STATUS, cluster="other", steps=(step(3),), events=())
    picture = pictured(STATUS, other)
    assert (picture.generation, [row.step for row in picture.steps], picture.events) == (1, [3], [])


def test_a_cluster_that_falls_silent_is_shown_as_it_was_and_since_when():
    picture = pictured(STATUS)
    picture.silent("nobody answers", 110.0)
    picture.silent("nobody answers still", 112.0)
    page = model.page(picture, 115.0)
    assert (page["silent_for_s"], page["trouble"], page["told_s"]) == (5.0, "nobody answers still", 100.0)
    assert page["head"]["step"] == STATUS.step
    picture.answered(STATUS, 120.0)
    assert model.page(picture, 121.0)["silent_for_s"] is None


def test_before_the_first_answer_there_is_nothing_to_draw():
    picture = Picture()
    picture.silent("nobody answers", 100.0)
    assert "head" not in model.page(picture, 103.0)


# --- what is drawn ---


def test_nodes_are_told_with_their_parts_and_those_that_are_gone_come_last():
    page = model.page(pictured(STATUS), 100.0)
    assert [(node["id"], node["state"]) for node in page["nodes"]] == [
        ("a", "active"), ("b", "active"), ("d", "standby"), ("c", "failed"),
    ]  # fmt: skip
    a, b, *_ = page["nodes"]
    assert (a["scheduler"], a["late"], a["page"]) == (True, False, "http://10.0.0.1:8080")
    assert (b["scheduler"], b["late"], "step" in b) == (False, True, False), "b has not reported"
    assert page["head"]["counts"] == {"active": 2, "standby": 1, "failed": 1, "left": 0}


def test_a_link_tells_the_rate_each_way_and_what_part_of_the_gradients_it_carries():
    (link,) = model.page(pictured(STATUS), 100.0)["links"]
    assert (link["rate"], link["back"], link["trees"], link["share"]) == (100.0, 20.0, [0, 1], 1.0)


def test_a_pull_tells_of_whom_it_has_what_how_fast_and_when_it_will_be_over():
    pulling = next(row for row in STATUS.members if row.pulls_bytes)
    later = msgspec.structs.replace(pulling, pulled={"a": 8_000_000, "b": 5_000_000})
    members = tuple(later if row is pulling else row for row in STATUS.members)
    page = model.page(pictured(STATUS, after(STATUS, members=members)), 101.0)
    told = next(node["pull"] for node in page["nodes"] if node["id"] == "d")
    assert told["sources"] == {
        "a": {"bytes": 8_000_000, "rate": 2_000_000},
        "b": {"bytes": 5_000_000, "rate": 1_000_000},
    }
    assert (told["here"], told["bytes"], told["left_s"]) == (13_000_000, 20_000_000, round(7 / 3, 1))


def test_a_pull_that_begins_anew_is_measured_anew():
    pulling = next(row for row in STATUS.members if row.pulls_bytes)
    again = msgspec.structs.replace(pulling, pulled={"a": 1_000_000})
    members = tuple(again if row is pulling else row for row in STATUS.members)
    picture = pictured(STATUS, after(STATUS, members=members))
    assert picture.pulls["d"].bytes_by_source == {"a": 1_000_000}


def test_pipelines_are_read_from_what_the_status_says():
    first, second = lines("a 0-3 > b 4-7 (gone) x8 | my node 0-7 x4")
    assert first.stages == (StageTold("a", 0, 3, False), StageTold("b", 4, 7, True))
    assert (first.micro_batches, second.stages[0].node) == (8, "my node")
    (alone,) = lines("my node 0 > b 1-2 > c 3 (gone) x8")
    assert alone.stages == (
        StageTold("my node", 0, 0, False), StageTold("b", 1, 2, False), StageTold("c", 3, 3, True),
    )  # fmt: skip
    assert lines("") == [] and lines("of another kind") == []
    (drawn,) = model.page(pictured(STATUS), 100.0)["pipelines"]
    assert [(stage["node"], stage["last"]) for stage in drawn["stages"]] == [("a", 3), ("b", 5)]


def test_what_a_step_of_pipelines_should_take_is_drawn_beside_what_it_takes():
    page = model.page(pictured(STATUS), 100.0)
    assert (page["predicted_s"], page["head"]["step_s"], page["micro_batches_per_s"]) == (0.4, 0.5, 16.0)
    other = model.page(pictured(after(STATUS, pipelines="")), 100.0)
    assert (other["predicted_s"], other["micro_batches_per_s"]) == (0.0, None)


def test_the_newest_checkpoint_is_drawn_with_who_writes_one_now():
    told = model.page(pictured(STATUS), 100.0)["head"]["checkpoint"]
    assert (told["step"], told["time_s"], told["writing"]) == (1000, 1.75e9 - 60, ("a", "b"))


def test_who_keeps_the_state_of_which_layers_is_drawn_where_members_keep_parts():
    kept = model.page(pictured(STATUS), 100.0)["kept"]
    assert kept["rows"] == [{"node": "a", "ranges": [(0, 2), (5, 5)]}, {"node": "b", "ranges": [(0, 5)]}]
    assert (kept["layers"], kept["said"]) == (6, "each layer at 2 members or more")
    assert "one member only" in model.page(pictured(after(STATUS, keepers=1)), 100.0)["kept"]["said"]
    all_keep_all = tuple(msgspec.structs.replace(row, keeps="") for row in STATUS.members)
    assert model.page(pictured(after(STATUS, members=all_keep_all)), 100.0)["kept"] is None


def test_traffic_is_that_of_the_process_here_and_for_prometheus():
    """As `chaosnet status` tells it: nodes of one machine have its interfaces in common."""
    rows = (msgspec.structs.replace(STATUS.members[0], sent_bytes=7, received_bytes=9), *STATUS.members[1:])
    picture = pictured(after(STATUS, members=rows))
    [shown] = [node for node in model.page(picture, 100.0)["nodes"] if node["id"] == "a"]
    assert (shown["sent_bytes"], shown["received_bytes"]) == (7, 9)
    assert ({"node": "a"}, 7.0) in parsed(picture)["chaosnet_member_network_sent_bytes_total"]


def test_curves_have_a_place_for_every_step_in_every_column():
    rows = (
        StepRow(step=1, time_s=1.0, seconds=None, samples=8, metrics={"loss": 1.0, "val": None}),
        step(2),
    )
    told = model.curves(rows)
    assert (told["step"], told["seconds"]) == ([1, 2], [None, 0.5])
    assert told["metrics"] == {"loss": [1.0, False], "val": [None, False]}, "None is one that is not finite"


def test_a_page_of_two_hundred_nodes_is_less_than_what_a_phone_takes_in_a_moment():
    picture = pictured(cluster(200))
    assert len(msgspec.json.encode(model.page(picture, 101.0))) < 200_000


# --- what Prometheus reads ---


def parsed(picture):
    """Samples by name, each a dictionary of labels and a value."""
    found = {}
    for family in text_string_to_metric_families(metrics.exposition(picture).decode()):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def test_prometheus_reads_the_cluster():
    found = parsed(pictured(STATUS))
    assert found["chaosnet_steps_total"] == [({}, 1042.0)]
    assert ({"state": "standby"}, 1.0) in found["chaosnet_members"]
    assert found["chaosnet_link_rate_bits_per_second"] == [
        ({"from": "a", "to": "b"}, 100e6), ({"from": "b", "to": "a"}, 20e6),
    ]  # fmt: skip
    assert found["chaosnet_metric"] == [({"name": "loss"}, 0.25)], "one that is not finite is left out"
    assert found["chaosnet_step_seconds"] == [({}, 0.5)]
    assert found["chaosnet_step_predicted_seconds"] == [({}, 0.4)]
    assert (found["chaosnet_micro_batches_per_second"], found["chaosnet_state_copies"]) == (
        [({}, 16.0)],
        [({}, 2.0)],
    )
    assert (found["chaosnet_checkpoint_step"], found["chaosnet_checkpoint_writers"]) == (
        [({}, 1000.0)],
        [({}, 2.0)],
    )
    assert found["chaosnet_member_faults_total"] == [({"node": "a", "what": "dropped"}, 1.0)], "no checkpoint"
    assert ({"node": "d", "from": "a"}, 6e6) in found["chaosnet_join_pulled_bytes"]
    assert ({"reason": "too often"}, 705.0) in found["chaosnet_strangers_refused_total"]
    assert ({"kind": "node-failure"}, 1.0) in found["chaosnet_events_total"]


def test_of_a_cluster_that_does_not_answer_prometheus_reads_only_that():
    picture = pictured(STATUS)
    picture.silent("nobody answers", 110.0)
    assert parsed(picture) == {"chaosnet_up": [({}, 0.0)]}


def test_of_a_joiner_that_died_no_pull_is_told():
    members = tuple(
        msgspec.structs.replace(row, state="failed") if row.pulls_bytes else row for row in STATUS.members
    )
    assert parsed(pictured(STATUS))["chaosnet_join_state_bytes"]
    assert "chaosnet_join_state_bytes" not in parsed(pictured(after(STATUS, members=members)))


def test_names_and_labels_that_are_awkward_are_escaped():
    odd = after(STATUS, metrics={'a "b"\n\\': 1.0}, events=(EventRow(
        kind="joined", node="x", detail="", step=1, time_s=BEGAN_S, handling_ms=0.0),))  # fmt: skip
    assert parsed(pictured(odd))["chaosnet_metric"] == [({"name": 'a "b"\n\\'}, 1.0)]


def names():
    """Of all families, as Prometheus has them."""
    picture = pictured(STATUS)
    return {family.name + "_total" * (family.type == "counter") for family in metrics.families(picture)}


def test_the_docs_name_every_metric_and_no_other():
    text = (DOCS / "dashboard.md").read_text()
    assert {*re.findall(r"^\| `(chaosnet_\w+)", text, re.MULTILINE)} == names()


def test_every_query_of_the_grafana_dashboard_asks_for_a_metric_that_there_is():
    board = json.loads((DOCS / "grafana.json").read_text())
    queries = [target["expr"] for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) >= len([panel for panel in board["panels"] if panel["type"] != "row"]) > 5
    for query in queries:
        asked = {*re.findall(r"chaosnet_\w+", query)}
        assert asked and asked <= names(), query


def test_every_label_of_the_grafana_dashboard_is_one_that_its_metric_has():
    labels = {}
    for family in metrics.families(pictured(STATUS)):
        for sample in family.samples:
            labels.setdefault(sample.name, set()).update(sample.labels)
    board = json.loads((DOCS / "grafana.json").read_text())
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    named = 0
    for target in targets:
        (metric,) = re.findall(r"chaosnet_\w+", target["expr"])
        asked = {*re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", ""))}
        asked |= {*re.findall(r"(\w+)=", target["expr"])} - {"job"}
        assert asked <= labels[metric], (target, labels[metric])
        named += len(asked)
    assert named > 10


def test_grafana_draws_what_its_titles_name_at_any_interval_of_scrapes():
    """Prometheus scrapes once a minute by default: one minute has one value then, of which there is no rate."""
    board = json.loads((DOCS / "grafana.json").read_text())
    asked = {panel["title"]: [each["expr"] for each in panel["targets"]] for panel in board["panels"]}
    assert "chaosnet_member_memory_bytes" in asked["Memory"][0] and "cpu" in asked["Processors"][0]
    rates = [query for queries in asked.values() for query in queries if query.startswith("rate(")]
    assert rates and all(query.endswith("[$__rate_interval])") for query in rates)
    places = [panel["gridPos"] for panel in board["panels"]]
    cells = [
        (x, y)
        for at in places
        for x in range(at["x"], at["x"] + at["w"])
        for y in range(at["y"], at["y"] + at["h"])
    ]
    assert len({*cells}) == len(cells) and max(x for x, _ in cells) < 24, "no panel covers another"


# --- where it listens ---


@pytest.mark.parametrize(
    ("given", "where"),
    [(8080, "127.0.0.1:8080"), ("0", "127.0.0.1:0"), ("0.0.0.0:80", "0.0.0.0:80"), ("[::1]:80", "[::1]:80")],
)
def test_a_port_alone_is_one_of_this_machine_only(given, where):
    assert ListenAt().of_script(given) == where


@pytest.mark.parametrize("given", [True, "web", "70000", -1, ":80", "a b:80", 8.5])
def test_a_place_that_cannot_be_is_refused(given):
    with pytest.raises(click.BadParameter, match=r"\(expected "):
        ListenAt().of_script(given)
