"""`chaosnet bench` of the papers' figures, as small as they go: what must hold, whatever the numbers are."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from chaosnet.benchmarks.discrete import Leg, Step, Sum
from chaosnet.benchmarks.elaswave import MADE, write_made_trace
from chaosnet.cli import cli
from chaosnet.commands.bench import BENCHMARKS
from chaosnet.simulator.scenario import first_state, load, profile_named

EXAMPLES = Path(__file__).parents[2] / "examples"


def bench(folder: Path, name: str, *args: str) -> dict:
    out, picture = folder / "found.json", folder / "found.png"
    done = CliRunner().invoke(
        cli, ["bench", name, *args, "--json", str(out), "--plot", str(picture)], catch_exceptions=False
    )
    assert done.exit_code == 0, done.output
    assert picture.read_bytes().startswith(b"\x89PNG")
    found = json.loads(out.read_text())
    assert "paper" in found
    assert done.output.rstrip().splitlines()[-1] == f"Left open by the paper's text: {found['open']}"
    return found


def test_every_figure_is_listed_with_its_command():
    figures = [name for name in BENCHMARKS if name.startswith(("chameleon-", "elaswave-"))]
    assert len(figures) == 12
    group = cli.commands["bench"]
    for name in figures:
        assert group.get_command(None, name).name == name


def test_no_recovery_with_clocks_as_they_were_is_faster_than_what_is_left_without_bubbles(tmp_path):
    for row in bench(tmp_path, "chameleon-fig6", "--batches", "8")["rows"]:
        assert row["chameleon"] <= row["no clocks"] <= min(row["chaosnet"], row["bound"])
        assert row["capacity"] < 1


def test_workers_that_are_left_never_become_more(tmp_path):
    found = bench(tmp_path, "chameleon-fig7", "--seeds", "5", "--hours", "3")
    for curve in (found["mean"], found["least"], found["most"], found["expected"]):
        assert curve[0] == 32 and curve == sorted(curve, reverse=True)


@pytest.mark.slow
def test_nobody_trains_faster_under_failures_than_without(tmp_path):
    args = ("--seeds", "2", "--hours", "1", "--micro-batches", "16", "--sweep-seeds", "1", "--processes", "1")
    found = bench(tmp_path, "chameleon-fig8", *args)
    for name in ("equal", "calibrated"):
        systems = found[name]["systems"]
        best = systems["fault-free"]["samples_per_s"]
        assert all(each["samples_per_s"] <= 1.001 * best for each in systems.values())
        for ratio in found[name]["ratios"].values():
            assert ratio["low"] <= ratio["mean"] <= ratio["high"]
    assert found["parameters"].keys() == {"bubble", "oobleck_s"}
    by_seconds = [each["chameleon/oobleck"] for each in found["sweep"] if each["bubble"] == 0.3]
    assert by_seconds == sorted(by_seconds)  # Who stands still longer gets less done.


def test_without_jitter_the_other_simulation_agrees_on_one_machine_and_on_a_ring():
    alone = [[Leg("a", 1.0, 2.0, 0.0)]] * 4
    assert Step(alone, [], 1e9, 0.0).run() == pytest.approx(12.0)
    both = [[Leg("a", 1.0, 2.0, 0.0)], [Leg("b", 1.0, 2.0, 0.0)]]
    ring = [[Sum(("a", "b"), 1e9)]]
    assert Step(both, ring, 8e9, 0.5).run() == pytest.approx(3 + 2 * 0.5 + 1.0)


def test_without_jitter_it_times_1f1b_as_equation_9_does():
    stages, micro_batches = 3, 5
    routes = [[Leg(f"s{s}", 1.0, 2.0, 0.0) for s in range(stages)]] * micro_batches
    assert Step(routes, [], 1e9, 0.0).run() == pytest.approx((stages + micro_batches - 1) * 3.0)


def test_fewer_micro_batches_than_pipelines_leave_some_with_nothing_to_do(tmp_path):
    found = bench(tmp_path, "chameleon-fig9", "--batches", "1", "--seeds", "1")
    assert all(row["simulated_s"] > 0 for row in found["rows"])


def test_a_pipeline_of_more_stages_than_workers_is_told():
    done = CliRunner().invoke(cli, ["bench", "chameleon-fig8", "--workers", "8", "--stages", "32"])
    assert "8 for a pipeline of 32 stages" in str(done.exception)


def test_estimates_are_near_the_other_simulation(tmp_path):
    found = bench(tmp_path, "chameleon-fig9", "--batches", "16", "--seeds", "1", "--jitter", "0")
    assert found["worst"] == max(row["error"] for row in found["rows"]) < 0.0802  # The paper's.
    assert {row["state"] for row in found["rows"]} == {"whole", "after: reroute", "after: layout"}


def test_matching_moves_no_more_bytes_and_choosing_sources_is_limited_by_the_same_nics(tmp_path):
    for row in bench(tmp_path, "chameleon-fig10", "--layers", "4,7")["rows"]:
        assert row["matched_bytes"] <= row["naive_bytes"]
        assert row["optimised_bytes"] == pytest.approx(row["matched_bytes"])
        # One worker receives most: more sources do not make its NIC faster.
        assert row["optimised_s"] == pytest.approx(row["matched_s"], rel=0.01)


def test_rounds_take_no_longer_than_one_sum_after_another(tmp_path):
    for row in bench(tmp_path, "chameleon-fig11", "--batches", "16", "--rates-gbps", "200,50")["rows"]:
        assert row["step_in_rounds_s"] < row["step_serial_s"]
        assert 0 < row["sums_less"] < 1 and row["rounds"] == 2


def test_the_peak_does_not_increase_after_a_loss(tmp_path):
    found = bench(tmp_path, "chameleon-fig12")
    assert max(found["whole"]["after"]) <= max(found["whole"]["before"]) < found["limit_gib"]
    assert max(found["zero"]["before"]) < max(found["whole"]["before"])


def test_the_search_is_at_least_as_good_as_algorithm_1_and_does_not_grow_with_it(tmp_path):
    found = bench(tmp_path, "chameleon-search-time", "--workers", "256,1024", "--reference", "16,24")
    printed = [row for row in found["rows"] if "reference_step_s" in row]
    assert len(printed) == 2
    assert all(row["step_s"] <= row["reference_step_s"] * (1 + 1e-9) for row in printed)
    assert all(row["warm_s"] < row["cold_s"] for row in found["rows"])


@pytest.mark.slow
def test_elaswave_is_never_slower_than_any_one_of_its_techniques(tmp_path):
    args = ("--models", "7b,34b", "--nodes", "1,2", "--per-pipeline", "8", "--processes", "1")
    for row in bench(tmp_path, "elaswave-fig11", *args)["rows"]:
        systems = row["systems"]
        assert systems["chaosnet"] >= max(share or 0.0 for share in systems.values())
        assert row["lse"]["elaswave"] == pytest.approx(systems["elaswave"] / row["capacity"])
    for row in bench(tmp_path, "elaswave-fig12a", *args)["rows"]:
        resized, layers, clocks = row["techniques"].values()
        assert resized <= layers <= clocks


def test_a_trace_is_played_at_several_speeds(tmp_path):
    trace = tmp_path / "short.csv"
    trace.write_text("time_s,nodes\n0,12\n600,11\n1200,12\n")
    args = ("--trace", str(trace), "--models", "7b", "--minutes", "5,0", "--per-pipeline", "2", "--seeds", "1",
            "--processes", "1")  # fmt: skip
    quick, slow = bench(tmp_path, "elaswave-fig14", *args)["rows"]
    assert quick["minutes"] == 5 and slow["minutes"] == pytest.approx(1600 / 60)
    stood = [row["systems"]["torchft"]["stood_share"] for row in (quick, slow)]
    assert stood[0] > stood[1]


@pytest.mark.parametrize("kind", MADE)
def test_the_traces_of_the_examples_are_the_made_up_ones(tmp_path, kind):
    name = f"trace-{kind}.csv"
    assert write_made_trace(tmp_path / name, kind).read_text() == (EXAMPLES / name).read_text()


def test_a_slow_worker_is_made_up_for_in_part(tmp_path):
    for row in bench(tmp_path, "elaswave-fig15a", "--models", "7b", "--per-pipeline", "8")["rows"]:
        assert row["degraded"] <= row["elaswave"] * (1 + 1e-9)
        assert row["elaswave"] <= row["chaosnet"] * (1 + 1e-9)


def test_an_unknown_model_is_named():
    done = CliRunner().invoke(cli, ["bench", "elaswave-fig11", "--models", "8b"])
    assert done.exit_code != 0 and "8b" in str(done.output) + str(done.exception)


def test_the_example_scenario_is_one():
    scenario = load(EXAMPLES / "scenario.yaml")
    state = first_state(scenario, profile_named(scenario.model, scenario.tensor_parallel))
    assert len(state.held) == 32 and state.batch == 64
