"""The training simulator: what it counts, and that its scenarios say what is wrong with them."""

import math
from pathlib import Path

import pytest

from chaosnet.protocols.errors import ConfigError
from chaosnet.scheduler.elastic.cluster import Worker
from chaosnet.scheduler.elastic.policy import renamed
from chaosnet.simulator.scenario import (
    events_of,
    first_state,
    interval,
    load,
    profile_named,
    run,
    run_seed,
    summary,
)
from chaosnet.simulator.systems import SYSTEMS, canonical
from chaosnet.simulator.training import (
    HOUR_S,
    Decision,
    Incident,
    Span,
    TrainingRun,
    failures,
    made_trace,
    read_trace,
    trace_events,
    train,
)  # fmt: skip

EXAMPLES = Path(__file__).parents[2] / "examples"
SCENARIO = """
name: small
model: llama2-7b
pipelines: 3
stages: 2
micro_batches: 12
hours: 2
failures: {per_hour: 0.3, repair_hours: 0.5}
"""


def scenario(tmp_path, more="", text=SCENARIO):
    path = tmp_path / "scenario.yaml"
    path.write_text(text + more)
    return load(path)


class Scripted:
    """Trains at the speeds of a list, each after its transition."""

    name = "scripted"

    def __init__(self, *decisions):
        self.decisions = iter(decisions)

    def began(self):
        return next(self.decisions)

    def met(self, event):
        return next(self.decisions)


def test_samples_are_speed_times_time_without_transitions():
    system = Scripted(Decision(10, 0, "stay"), Decision(5, 4, "layout"), Decision(8, 0, "reroute"))
    run = train(system, ["a", "b"], [Incident(10, gone=("a",)), Incident(20, come=("a",))], 30)
    assert run.samples == 10 * 10 + (10 - 4) * 5 + 10 * 8
    assert run.stood_s == 4 and run.samples_per_s == run.samples / 30
    assert [each.workers for each in run.spans] == [2, 1, 1, 2]


def test_an_event_during_a_transition_begins_another():
    system = Scripted(Decision(10, 0, "stay"), Decision(5, 8, "layout"), Decision(8, 6, "layout"))
    run = train(system, ["a"], [Incident(10), Incident(15)], 30)
    assert run.samples == 100 + 0 + (30 - 21) * 8 and run.stood_s == 11


def test_a_transition_is_not_shorter_because_another_event_comes_in_between():
    system = Scripted(
        Decision(1.0, 0.0, "stay"), Decision(1.0, 60.0, "checkpoint"), Decision(0.5, 2.0, "fill")
    )
    run = train(system, ["a", "b"], [Incident(10.0, gone=("b",)), Incident(20.0, come=("b",))], 100.0)
    assert run.stood_s == pytest.approx(60) and run.samples == pytest.approx(10 + 0.5 * 30)
    assert [span.from_s for span in run.spans] == sorted(span.from_s for span in run.spans)
    assert run.spans[-1] == Span(70.0, 0.5, 2)


def test_a_system_that_cannot_go_on_stands_still_and_has_not_recovered():
    events = [Incident(10.0, gone=("a",)), Incident(20.0, gone=("b",))]
    run = train(
        Scripted(Decision(10, 0, "stay"), Decision(5, 0, "drop"), Decision(0, 0, "none")), "ab", events, 30
    )
    assert run.samples == 150 and run.stood_s == 10 and run.families == {"drop": 1}


def test_a_cluster_of_which_nobody_is_left_trains_no_more(tmp_path):
    text = SCENARIO.replace("0.3, repair_hours: 0.5", "0.99").replace("hours: 2", "hours: 5")
    for name, found in run_seed(0, scenario(tmp_path, text=text)).items():
        assert found.spans[-1].workers == 0
        assert (found.spans[-1].samples_per_s == 0 and found.stood_s > 0) or name == "fault-free"


def test_failures_are_as_frequent_as_asked_for():
    workers = [f"w{i}" for i in range(2000)]
    within_an_hour = {e.gone[0] for e in failures(workers, 0.1, 9, seed=1) if e.at_s < HOUR_S}
    assert 150 < len(within_an_hour) < 250
    assert failures(workers, 0.1, 9, seed=1) == failures(workers, 0.1, 9, seed=1)
    assert not failures(workers, 0.0, 9, seed=1)


def test_repaired_workers_come_back():
    events = failures(["a"], 0.5, 1000, seed=2, repair_hours=1)
    assert len(events) > 100
    assert all(bool(each.gone) == (number % 2 == 0) for number, each in enumerate(events))


def test_a_trace_of_node_counts_is_followed(tmp_path):
    path = tmp_path / "trace.csv"
    path.write_text("# made up\ntime_s,nodes\n0,3\n10,1\n20,3\n")
    nodes = [("a", "b"), ("c", "d"), ("e", "f")]
    lost, back = trace_events(read_trace(path), nodes, seed=0)
    assert len(lost.gone) == 4 and {*back.come} == {*lost.gone} and not lost.come
    bad = {"time,nodes\n0,1\n": "columns", "time_s,nodes\n0,x\n": "line 2", "time_s,nodes\n5,1\n": "from 0"}
    for text, told in bad.items():
        path.write_text(text)
        with pytest.raises(ConfigError, match=told):
            read_trace(path)
    with pytest.raises(ConfigError, match=r"from 2 nodes on \(expected 3"):
        trace_events([(0.0, 2)], nodes, seed=0)


@pytest.mark.parametrize(("content", "told"), [(None, "No such file"), (b"\xff\xfe", "no UTF-8 text")])
def test_a_trace_that_cannot_be_read_is_named(tmp_path, content, told):
    if content is not None:
        (tmp_path / "trace.csv").write_bytes(content)
    text = SCENARIO.replace("{per_hour: 0.3, repair_hours: 0.5}", "{trace: trace.csv}")
    with pytest.raises(ConfigError, match=rf"{tmp_path}/trace.csv: {told}"):
        scenario(tmp_path, text=text)


@pytest.mark.parametrize("kind", ["plateau", "shrink"])
def test_made_traces_stay_within_their_nodes(kind):
    trace = [*made_trace(kind, 12, 3600, seed=1)]
    assert trace[0] == (0.0, 12) and all(6 <= count <= 12 for _, count in trace) and len(trace) > 4
    full = sum(count == 12 for _, count in trace) / len(trace)
    assert (full >= 0.5) if kind == "plateau" else (full < 0.5)


def test_states_that_differ_in_names_are_one_and_names_come_back(tmp_path):
    small = scenario(tmp_path)
    state = first_state(small, profile_named("llama2-7b"))
    workers = dict.fromkeys(small.workers)

    workers = dict.fromkeys(small.workers, Worker())
    one, other = state.after(["w0"], []), state.after(["w4"], [])
    (names, key), (_, other_key) = canonical(one, workers), canonical(other, workers)
    assert key == other_key != canonical(state.after(["w1"], []), workers)[1]
    back = {new: old for old, new in names.items()}
    assert renamed(renamed(one, names), back) == one


def test_all_systems_go_through_the_same_events_and_ours_is_ahead(tmp_path):
    small = scenario(tmp_path, "seeds: 3\nmemory_gib: 80\n")
    runs = run(small, processes=1)
    found = summary(small, runs)
    assert found["systems"].keys() == {*SYSTEMS}
    best = found["systems"]["fault-free"]["samples_per_s"]
    for name, row in found["systems"].items():
        assert 0 < row["samples_per_s"] <= best * 1.0001, name
    assert events_of(small, 1) == events_of(small, 1) != events_of(small, 2)
    for name in ("chameleon", "elaswave"):
        assert found["ratios"][f"chaosnet/{name}"]["mean"] >= 0.99
    assert run_seed(1, small)["chaosnet"].samples == runs[1]["chaosnet"].samples


def test_equations_in_place_of_programs_are_slower_after_losses_the_larger_the_bubble(tmp_path):
    more = "systems: [fault-free, recycle]\nbubble: "
    text = SCENARIO.replace("0.3, repair_hours: 0.5", "0.15")
    shares = []
    for bubble in (0.0, 0.5, 1.0):
        found = run_seed(3, scenario(tmp_path, f"{more}{bubble}\n", text))
        shares.append(found["recycle"].samples / found["fault-free"].samples)
    assert shares == sorted(shares, reverse=True) and shares[0] > shares[2]


def test_intervals_are_students():
    assert interval([1.0]) == {"mean": 1.0, "low": 1.0, "high": 1.0}
    found = interval([1.0, 2.0, 3.0])
    assert found["mean"] == 2.0 and found["high"] - 2.0 == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ("colour: red\n", "unknown field `colour`"),
        ("systems: [chaosnet, magic]\n", "['magic'] (expected of fault-free, chaosnet"),
        ("slow: [{worker: 6, speed: 0.5}]\n", "slow: worker (expected below 6)"),
        ("seeds: 0\n", "seeds: 0 (expected `int` >= 1)"),
    ],
)
def test_a_scenario_says_what_is_wrong_with_it(tmp_path, more, told):
    with pytest.raises(ConfigError) as found:
        scenario(tmp_path, more)
    assert told in str(found.value) and str(tmp_path / "scenario.yaml") in str(found.value)


def test_a_trace_of_another_cluster_is_named_and_the_advised_one_fits_as_advised(tmp_path):
    text = (EXAMPLES / "scenario.yaml").read_text()
    assert "with `pipelines: 6` and `workers_per_node: 2`" in text
    traced = text.replace("per_hour: 0.10 ", f"trace: {EXAMPLES / 'trace-shrink.csv'} ")
    fitting = traced.replace("pipelines: 8", "pipelines: 6\nworkers_per_node: 2")
    with pytest.raises(ConfigError, match=r"trace-shrink.csv: from 12 nodes on \(expected 32"):
        scenario(tmp_path, text=traced)
    assert events_of(scenario(tmp_path, text=fitting), 0)


def test_a_profile_that_is_not_there_is_named():
    with pytest.raises(ConfigError, match="profile 'llama2-8b': no such file"):
        profile_named("llama2-8b")


def test_averages_over_parts_count_what_a_transition_takes():
    spans = [Span(0.0, 4.0, 2), Span(10.0, 0.0, 1), Span(15.0, 2.0, 1)]
    run = TrainingRun("x", 40.0, spans=spans)
    assert run.averages(4) == [4.0, 1.0, 2.0, 2.0]
    assert run.averages(1) == [pytest.approx((40 + 50) / 40)]
    assert sum(run.averages(7)) / 7 == pytest.approx(90 / 40)
