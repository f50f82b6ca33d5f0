"""`chaosnet bench`: that it runs, among real processes, and says what it promises. Not how fast."""

import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
from ctypes.util import find_library
from pathlib import Path

import psutil
import pytest
import torch
from click.testing import CliRunner
from overlay import HAS_NAMESPACES

from chaosnet.benchmarks import processes
from chaosnet.cli import cli

pytestmark = pytest.mark.realtime


def bench(out: Path, *args: str) -> dict:
    done = CliRunner().invoke(cli, ["bench", *args, "--json", str(out)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return json.loads(out.read_text())


@pytest.mark.slow
def test_all_reduces_are_compared_with_gloo(tmp_path):
    figures = bench(tmp_path / "found.json", "allreduce", "--bytes", "4000000", "--nodes", "2,3")
    assert figures.keys() == {"2", "3"}
    for found in figures.values():
        assert found["ratio"] == pytest.approx(found["gloo_s"] / found["ours_s"])


@pytest.mark.slow
@pytest.mark.parametrize(("nodes", "parameters"), [("2", "0"), ("1", "100")])
def test_a_step_is_compared_with_ddp(tmp_path, nodes, parameters):
    args = ("step", "--mb", "0", "--nodes", nodes, "--parameters", parameters)
    found = bench(tmp_path / "found.json", *args)[f"0 MB, {nodes}"]
    low, high = found["middle_half"]
    assert 0 < low <= found["ratio"] <= high
    assert found["ours_s"] > 0 < found["ddp_s"]


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and network namespaces")
def test_so_is_one_over_links_of_a_given_rate(tmp_path):
    """Nobody makes a mean between two faster than 1 MB passes over 45 Mbit/s."""
    found = bench(tmp_path / "found.json", "step", "--mb", "1", "--nodes", "2", "--rate", "45")["1 MB, 2"]
    least_s = 0.98e6 * 8 / 45e6
    assert least_s < found["ours_s"] and least_s < found["ddp_s"]


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_a_device_that_is_not_there_is_told():
    done = CliRunner().invoke(cli, ["bench", "step", "--accelerator"])
    assert "torch.accelerator finds no device" in str(done.exception)


@pytest.mark.slow
@pytest.mark.parametrize("how", [(), ("--blocking",), ("--trained", "--bytes", "240000000")])
def test_a_join_is_measured(tmp_path, how):
    """Also of a model whose gradients are more than a frame may hold."""
    found = bench(tmp_path / "found.json", "join", "--bytes", "8000000", "--sources", "2", *how)
    assert found["bytes"] >= 8_000_000
    assert 0 < found["bound_seconds"] < found["seconds"]
    assert found["ratio_to_bound"] == pytest.approx(found["seconds"] / found["bound_seconds"], rel=0.02)
    assert found["survivor_longest_gap_seconds"] > 0


@pytest.mark.slow
def test_a_join_of_many_small_parameters_is_compared_with_one_of_few(tmp_path):
    args = ("--bytes", "300000", "--sources", "1", "--trained", "--parameters", "100")
    found = bench(tmp_path / "found.json", "join", *args)
    many_s, few_s = found["seconds_to_membership"], found["few_seconds_to_membership"]
    assert 0 < many_s < found["seconds"] and few_s > 0
    assert found["ratio_to_few"] == pytest.approx(many_s / few_s)


@pytest.mark.slow
def test_the_cost_of_checkpoints_is_measured(tmp_path):
    args = ("--bytes", "2000000", "--nodes", "2", "--steps", "10", "--pairs", "2", "--dir", str(tmp_path))
    found = bench(tmp_path / "found.json", "checkpoint", *args)
    assert found["written"] + found["left_out"] >= 2
    assert len(found["ratios"]) == 2 and min(found["ratios"]) <= found["ratio"] <= max(found["ratios"])


@pytest.mark.slow
def test_the_cost_of_comparing_replicas_is_measured(tmp_path):
    found = bench(tmp_path / "found.json", "agreement", "--steps", "100", "--pairs", "2")
    assert found["pairs"] == 2
    assert 0 < found["window_share_pct"] < found["share_pct"] < 20
    assert found["compare_us_per_step"] > 1


@pytest.mark.slow
def test_the_cost_of_encryption_is_measured(tmp_path):
    args = ("allreduce", "--keys", "--bytes", "4000000", "--nodes", "2")
    found = bench(tmp_path / "found.json", *args)["2"]
    assert found["keyed_ratio"] == pytest.approx(found["keyed_s"] / found["ours_s"])


def test_looking_a_loss_up_takes_little_of_what_working_it_out_takes(tmp_path):
    found = bench(tmp_path / "found.json", "policy", "--pipelines", "6", "--stages", "2")
    assert (found["workers"], found["kinds"]) == (12, 2 + 1 + 3)
    assert found["lookup_median_s"] < found["prepared_s"] / found["kinds"] / 10


@pytest.mark.slow
def test_what_the_page_costs_is_measured_while_a_viewer_reads_it(tmp_path):
    found = bench(tmp_path / "found.json", "page", "--nodes", "2", "--rounds", "1", "--seconds", "3")
    assert all(cpu > 0 for cpu in (*found["with_cpu"], *found["without_cpu"]))
    assert -1 < found["cost"] < 1 and found["ratio"] > 0


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="it needs more addresses on loopback than one")
def test_steps_are_measured_with_and_without_strangers(tmp_path):
    found = bench(tmp_path / "found.json", "strangers", "--rounds", "1", "--seconds", "1")
    assert found["noise"]["opened"] == 0 and len(found["attacks"]) == 5
    for kind, row in found["attacks"].items():
        assert row["opened"] > 50 and sum(row["refused"].values()) > 5, (kind, row)  # A busy machine is late.
        assert row["ratio"] == pytest.approx(row["with_s"][0] / row["without_s"][0])


@pytest.mark.slow
@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("ip") is None or find_library("iperf") is None,
    reason="it needs root, iproute2 and libiperf",
)
def test_probes_are_compared_with_iperf3(tmp_path):
    (row,) = bench(tmp_path / "found.json", "probe", "--rates", "200", "--repeat", "1")
    assert row["ratio"] == pytest.approx(1.0, abs=0.25)  # On a busy machine; 0.02 on an idle one.
    assert 0 < row["probe_seconds"] < row["iperf3_seconds"]


@pytest.mark.slow
@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="it needs root and iproute2",
)
def test_all_reduces_over_an_overlay_are_compared_with_its_bound(tmp_path):
    args = ("--random", "1", "--nodes", "3", "--links", "3", "--mb", "1", "--rounds", "2", "--chunk-bytes")
    found = bench(tmp_path / "found.json", "overlay", *args, "262144,65536")
    rows = {(row["policy"], row["chunk_bytes"]): row for row in found["rows"]}
    assert rows.keys() == {
        (policy, size) for policy in ("packed", "fapt", "single") for size in (262144, 65536)
    }
    # That nodes have one and the same mean, and the right one, is the command's to check.
    for row in rows.values():
        assert 0 < row["promised"] <= 1 + 1e-9
        assert len(row["rounds_s"]) == 2 and row["bound_s"] * 0.9 < row["median_s"]
        assert row["reached"] == pytest.approx(row["bound_s"] / row["median_s"])
    for row in found["summary"]:
        assert (
            row["reached_worst"]
            == row["reached_median"]
            == rows[row["policy"], row["chunk_bytes"]]["reached"]
        )
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"-overlay{os.getpid()}-" not in left


@pytest.mark.parametrize(
    ("args", "told"),
    [
        ((), "expected one of --topology and --random"),
        (("--random", "0"), "'0' is out of range (expected a whole number from 1 to 1000)"),
        (("--random", "1", "--topology", __file__), "expected one of --topology and --random"),
        (("--topology", "nowhere.yaml"), "'nowhere.yaml' does not exist"),
        (("--random", "1", "--policies", "fapt,fast"), "'fast' is unknown (expected one of"),
        (("--random", "1", "--policies", "fapt,fapt"), "names one twice"),
        (("--random", "1", "--mb", "1,x"), "'x' is no number"),
    ],
)
def test_what_cannot_be_an_overlay_is_told(args, told):
    done = CliRunner().invoke(cli, ["bench", "overlay", *args])
    assert done.exit_code == 2 and told in done.output


@pytest.mark.parametrize(
    ("command", "told"),
    [
        ("allreduce --nodes x", "'x' is no number"),
        ("allreduce --nodes 2,0", "'0' is out of range (expected a whole number from 2 to 64"),
        ("allreduce --nodes 1", "'1' is out of range"),
        ("allreduce --bytes 0", "'0' is out of range (expected a whole number from 4 to"),
        ("allreduce --threads 0", "'0' is out of range"),
        ("step --nodes x", "'x' is no number"),
        ("step --mb nan", "'nan' is out of range"),
        ("step --rate inf", "'inf' is out of range"),
        ("checkpoint --nodes 0", "'0' is out of range"),
        ("checkpoint --dir /nowhere", "'/nowhere' does not exist"),
        ("agreement --megabytes nan", "'nan' is out of range"),
        ("strangers --rounds 0", "'0' is out of range (expected a whole number from 1 to 40)"),
        ("strangers --seconds 0", "'0' is out of range"),
        ("strangers --rate -1", "'-1' is out of range"),
        ("probe --rates 100,x", "'x' is no number"),
        ("probe --rates 0", "'0' is out of range"),
        ("policy --stages 0", "'0' is out of range"),
        ("policy --pipelines 1 --stages 2", "2 of 2 workers (expected fewer than all)"),
        ("join --sources 0", "'0' is out of range"),
        ("chameleon-fig6 --batches x", "'x' is no number"),
        ("chameleon-fig7 --seeds 0", "'0' is out of range"),
        ("chameleon-fig7 --workers 0", "'0' is out of range"),
        ("chameleon-fig7 --hours nan", "'nan' is out of range"),
        ("chameleon-fig9 --seeds 0", "'0' is out of range"),
        ("chameleon-fig11 --rates-gbps nan", "'nan' is no number"),
        ("elaswave-fig11 --nodes nan", "'nan' is no number"),
        ("elaswave-fig11 --nodes 12", "'12' is out of range"),
        ("elaswave-fig11 --models 8b", "'8b' is unknown (expected one of 7b, 13b, 34b)"),
        ("elaswave-fig14 --minutes nan", "'nan' is out of range"),
        ("elaswave-fig14 --seeds 0", "'0' is out of range"),
    ],
)
def test_options_that_cannot_be_are_told_before_anything_is_measured(command, told):
    done = CliRunner().invoke(cli, ["bench", *command.split()])
    assert done.exit_code == 2 and told in done.output


@pytest.mark.slow
def test_steps_of_pipelines_are_compared_with_what_they_could_be(tmp_path):
    found = bench(tmp_path / "found.json", "pipelines", "--quick")
    program, two, choose, kill, flush = (
        found[part] for part in ("program", "two", "choose", "kill", "flush")
    )
    (program,) = program["cases"]
    low, high = program["middle_half"]
    assert 0.99 < low <= program["ratio"] <= high  # Nothing is faster than the layers.
    assert program["ratio"] == pytest.approx(program["measured_s"] / program["compiled_s"])
    assert program["bare_ratio"] > 0.99 and min(two["bare_s"]) > 0
    assert two["bound"] == pytest.approx(16 / 9)
    assert all(two[name] > 0 for name in ("one_s", "two_s", "plain_s", "speedup", "speedup_over_plain"))
    assert all(0 < case["least_ms"] <= case["median_ms"] <= case["most_ms"] for case in choose["cases"])
    assert all(case["first_ms"] > 0 for case in choose["cases"])
    assert kill["kills"] == len(kill["seconds"]) == 1
    assert kill["median_s"] > -kill["step_after_s"]
    (of_four,) = flush["cases"]
    assert of_four["members"] == 4 and all(seconds > 0 for seconds in of_four["to_first_s"])
    assert 0 < of_four["edit_median_s"] <= of_four["edit_most_s"] and of_four["processor_s"] > 0


@pytest.mark.slow
@pytest.mark.skipif(not HAS_NAMESPACES, reason="needs root, and network namespaces")
def test_steps_of_pipelines_over_links_are_compared_with_what_was_predicted(tmp_path):
    found = bench(tmp_path / "found.json", "pipelines-size", "--quick")
    chapters = found["chapters"]
    assert len(chapters) == 4 and all(each["lost"] == 0 for each in chapters)
    assert all(min(each["step_s"], each["predicted_s"], each["chosen_s"]) > 0 for each in chapters)
    assert all(each["parts"].startswith("predicted ") for each in chapters)
    assert all(each["rates_mbit"] for each in chapters)


def test_a_worker_whose_parent_has_gone_ends_without_a_traceback():
    ours, theirs = multiprocessing.Pipe()
    ours.close()

    def leave(pipe):
        raise SystemExit(0)

    processes._run(theirs, leave, ())


PARENT = """
import os, time
from chaosnet.benchmarks.processes import Workers

def work(pipe):
    pipe.send(os.getpid())
    pipe.receive()
    pipe.send("heard")
    time.sleep(600)

if __name__ == "__main__":
    with Workers() as workers:
        workers.start("one", work)
        print(workers.receive("one"), flush=True)
        input()
        workers.tell("one", "still there?")
        print(workers.receive("one"), flush=True)
        input()
"""


def test_ctrl_c_is_not_for_workers_and_they_end_when_their_parent_is_killed(tmp_path):
    (tmp_path / "parent.py").write_text(PARENT)
    command = [sys.executable, str(tmp_path / "parent.py")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        worker.send_signal(signal.SIGINT)
        parent.stdin.write("\n")
        parent.stdin.flush()
        assert parent.stdout.readline() == "heard\n"
        parent.kill()
        worker.wait(60)


def test_what_is_no_part_of_the_pipelines_bench_is_told():
    done = CliRunner().invoke(cli, ["bench", "pipelines", "--parts", "program,three"])
    assert (
        done.exit_code == 2 and "'three' (expected some of program, two, choose, kill, flush)" in done.output
    )


def test_parts_of_the_pipelines_bench_are_refused_beside_the_one_for_an_accelerator():
    """They were ignored."""
    done = CliRunner().invoke(cli, ["bench", "pipelines", "--accelerator", "--parts", "kill"])
    assert done.exit_code == 2 and "--parts: 'kill' beside --accelerator" in done.output


@pytest.mark.slow
def test_joins_and_deaths_of_chaosnet_are_measured_as_those_of_others(tmp_path):
    picture = tmp_path / "found.png"
    args = ("--systems", "chaosnet", "--loopback", "--mb", "1", "--pause", "0.1", "--repeat", "1", "--plot")
    found = bench(tmp_path / "found.json", "peers", *args, str(picture))
    row = found["medians"]["chaosnet"]
    assert row.keys() == {"step", "join", "gap", "kill", "stop", "coordinator"}
    assert all(each["why"] == "" for each in row.values()), row
    assert row["step"]["seconds"] > 0.1  # The pause.
    assert 0.1 < row["join"]["seconds"] < 30
    for fault in ("kill", "stop", "coordinator"):
        assert 0.1 < row[fault]["seconds"] < 30  # The next step has a pause, too.
    assert len(found["rounds"]["chaosnet"]["step"]) == 3  # One a life.
    assert picture.stat().st_size > 10_000
