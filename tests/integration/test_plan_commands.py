"""`chaosnet plan` and `chaosnet simulate-training`, as one types them."""

import json
import re
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).parents[2] / "examples" / "pipelines.yaml"

CLUSTER = """
pipelines: [[a, b], [c, d]]
micro_batches: 8
"""


def cluster(tmp_path, text):
    path = tmp_path / "cluster.yaml"
    path.write_text(text)
    return str(path)


def test_the_choice_after_a_loss_is_explained(chaosnet):
    code, out, _ = chaosnet("plan", str(EXAMPLE), "llama2-7b", "--fail", "b2")
    assert code == 0
    assert "before:" in out and "without b2" in out and "not stay: b2 lost" in out
    assert "with which most samples are trained until the next fault, expected in 3 h" in out
    families = re.findall(r"^ (\w+) +[\d.]+ ", out, re.MULTILINE)
    assert families and not {*families} & {*re.findall(r"^  not (\w+):", out, re.MULTILINE)}


def test_workers_are_called_by_their_names_whatever_these_have(chaosnet, tmp_path):
    path = cluster(tmp_path, CLUSTER.replace("[a, b]", '["[red]a", "[/b]"]'))
    code, out, err = chaosnet("plan", path, "llama2-7b", "--fail", "d")
    assert (code, err) == (0, "") and "[red]a" in out and "[/b]" in out


def test_the_choice_is_there_as_json_with_every_candidate(chaosnet):
    code, out, _ = chaosnet("plan", str(EXAMPLE), "llama2-7b", "--fail", "b2,c1", "--json")
    found = json.loads(out)
    assert code == 0 and found["chosen"] == found["candidates"][0]["family"]
    assert {row["family"] for row in found["candidates"]} >= {"reroute", "layout", "layers", "drop"}
    workers = [name for each in found["pipelines"] for name in each["workers"]]
    assert len(workers) == len({*workers}) and {"b2", "c1"}.isdisjoint(workers)


@pytest.mark.parametrize(
    ("text", "profile", "told"),
    [
        (CLUSTER + "colour: red\n", "llama2-7b", "unknown field `colour`"),
        (CLUSTER + "idle: [a]\n", "llama2-7b", "'a' is there twice"),
        (CLUSTER + "workers: {z: {speed: 2}}\n", "llama2-7b", "'z' (expected a worker of pipelines or idle"),
        (
            CLUSTER + "layers: [[16, 16], [16, 15]]\n",
            "llama2-7b",
            "layers of pipeline 1: 31 (the profile has 32)",
        ),
        (
            CLUSTER + "workers: {a: {speed: 0}}\n",
            "llama2-7b",
            "workers: a: speed: 0 (expected `float` >= 1e-06",
        ),
        (CLUSTER + "workers: {a: {speed: 1.0e-320}}\n", "llama2-7b", "(expected `float` >= 1e-06"),
        (CLUSTER + "workers: {a: {speed: .inf}}\n", "llama2-7b", "(expected `float` <= 1000000000.0"),
        (CLUSTER + "between_faults_hours: .inf\n", "llama2-7b", "(expected `float` <= 1000000000.0"),
        (CLUSTER + "between_faults_hours: .nan\n", "llama2-7b", "(expected `float` >= 1e-06"),
        (CLUSTER + "rate_gbps: .inf\n", "llama2-7b", "(expected `float` <= 1000000000.0"),
        (CLUSTER, "llama2-8b", "no such file"),
    ],
)
def test_bad_input_is_named(tmp_path, chaosnet, text, profile, told):
    code, _, err = chaosnet("plan", cluster(tmp_path, text), profile, "--fail", "a")
    assert code == 1 and told in err


def test_at_the_bounds_of_what_a_cluster_file_takes_the_choice_is_valid_json(tmp_path, chaosnet):
    text = CLUSTER + (
        "between_faults_hours: 1.0e+9\nrate_gbps: 1.0e-6\nmemory_gib: .inf\n"
        "workers: {b: {speed: 1.0e-6}, c: {speed: 1.0e+9, nic_gbps: .inf}}\n"
    )
    code, out, err = chaosnet("plan", cluster(tmp_path, text), "llama2-7b", "--fail", "a", "--json")
    assert (code, err) == (0, "")
    json.loads(out, parse_constant=pytest.fail)  # NaN, Infinity: of no JSON.


@pytest.mark.parametrize("content", [b"pipelines: [[\xff]]", b"pipelines: [[a, b]"])
def test_a_file_that_is_no_yaml_is_refused_in_one_line(tmp_path, chaosnet, content):
    (tmp_path / "cluster.yaml").write_bytes(content)
    code, _, err = chaosnet("plan", str(tmp_path / "cluster.yaml"), "llama2-7b", "--fail", "a")
    assert code == 1 and "cluster.yaml: not YAML (" in err and err.count("\n") == 1


def test_the_loss_of_an_unknown_worker_names_those_there_are(tmp_path, chaosnet):
    code, _, err = chaosnet("plan", cluster(tmp_path, CLUSTER), "llama2-7b", "--fail", "x")
    assert code == 1 and "--fail x: unknown (expected one of a, b, c, d)" in err


def test_too_little_memory_for_any_plan_says_by_how_much(tmp_path, chaosnet):
    code, _, err = chaosnet(
        "plan", cluster(tmp_path, CLUSTER + "memory_gib: 20\n"), "llama2-7b", "--fail", "a"
    )
    assert code == 1 and "no way to go on" in err and "over its memory" in err


def test_a_loss_of_all_workers_leaves_nobody(tmp_path, chaosnet):
    code, _, err = chaosnet("plan", cluster(tmp_path, CLUSTER), "llama2-7b", "--fail", "a,b,c,d")
    assert (code, err) == (1, "error: no way to go on: all: nobody is left\n")


def test_who_is_lost_may_be_said_twice_and_with_blanks(chaosnet):
    once = chaosnet("plan", str(EXAMPLE), "llama2-7b", "--fail", "b2,c1")
    assert chaosnet("plan", str(EXAMPLE), "llama2-7b", "--fail", "b2, c1", "--fail", "b2") == once


def test_a_profile_of_ones_own_is_read_and_checked(tmp_path, chaosnet):
    layer = {"seconds": {"1": [0.1, 0.2]}, "parameter_bytes": 1, "gradient_bytes": 1, "optimizer_bytes": 4,
             "activation_bytes": 1, "boundary_bytes": 1}  # fmt: skip
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps({"model": "mine", "layers": [layer] * 4}))
    bad.write_text(json.dumps({"model": "mine", "layers": [layer | {"seconds": {"1": [-0.1, 0.2]}}]}))
    assert chaosnet("plan", cluster(tmp_path, CLUSTER), str(good), "--fail", "a")[0] == 0
    code, _, err = chaosnet("plan", cluster(tmp_path, CLUSTER), str(bad), "--fail", "a")
    assert code == 1 and "bad.json" in err and "Expected `float` >= 0" in err


@pytest.mark.parametrize("name", ["found.jpeg2", "found", "png"])
def test_a_picture_of_an_unknown_kind_is_refused_before_anything_begins(tmp_path, chaosnet, name):
    (tmp_path / "any.yaml").write_text("no: scenario, no topology")
    picture, told = str(tmp_path / "new" / name), "(expected a file that ends with .png, .pdf, .svg)"
    for command in (["simulate-training", str(tmp_path / "any.yaml"), "--plot", picture],
                    ["testbed", "plot", str(tmp_path / "any.yaml"), picture],
                    ["bench", "chameleon-fig6", "--plot", picture]):  # fmt: skip
        code, _, err = chaosnet(*command)
        assert (code, err.count("\n")) == (2, 1) and f"{picture!r} {told}" in err
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(("file", "why"), [("", ".: Is a directory"), ("n" * 300, "File name too long")])
def test_a_file_that_cannot_be_written_is_refused_before_anything_begins(chaosnet, file, why):
    for command in (["simulate", "--seed", "3", "--trace", file], ["bench", "policy", "--json", file]):
        code, _, err = chaosnet(*command)
        assert (code, err.count("\n")) == (2, 1)
        assert f"{file!r} cannot be written: " in err and f"{why} (expected a file in a folder" in err


def test_an_overlay_of_more_nodes_than_memory_has_room_for_is_refused(chaosnet):
    code, out, err = chaosnet("testbed", "new", "mesh", "1000000")
    assert (code, out) == (2, "")
    assert err == "error: NODES: '1000000' is out of range (expected a whole number from 2 to 1000)\n"


def test_a_scenario_is_simulated_drawn_and_written_down(tmp_path, chaosnet):
    scenario = tmp_path / "scenario.yaml"
    scenario.write_text(
        "name: small\nmodel: llama2-7b\npipelines: 2\nstages: 2\nmicro_batches: 8\nhours: 1\n"
        "failures: {per_hour: 0.5}\n"
    )
    report, picture = tmp_path / "found.json", tmp_path / "found.png"
    code, out, _ = chaosnet(
        "simulate-training", str(scenario), "--seeds", "2", "--json", str(report), "--plot", str(picture)
    )
    found = json.loads(report.read_text())
    assert code == 0 and "small, 2 runs" in out and found["seeds"] == 2
    assert found["systems"]["chaosnet"]["samples_per_s"] > 0 and picture.read_bytes()[:4] == b"\x89PNG"
