"""`chaosnet bench peers`: what it makes of what workers say, and what it tells where something cannot be."""

import json
import os
import sys
import threading
from importlib import metadata
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from chaosnet.benchmarks.machines import Switched
from chaosnet.benchmarks.peers import EVENTS, cell, earlier, lives, median
from chaosnet.benchmarks.peers_life import WORKERS, TimeOrWhy, WorkerProgram, WorkerStep, shared
from chaosnet.benchmarks.peers_systems import LOG_LINES, SYSTEMS, environment, reason_of
from chaosnet.cli import cli
from chaosnet.netem.topology import LinkSpec, Topology
from chaosnet.protocols.errors import ConfigError


class Here:
    """Machines that are none."""

    def prefix(self, name):
        return []

    def variables(self, name):
        return {}


def test_who_has_no_number_is_slower_than_all_who_have():
    assert median([TimeOrWhy(3.0), TimeOrWhy(None, "> 60"), TimeOrWhy(1.0)]) == TimeOrWhy(3.0)
    assert median([TimeOrWhy(None, "ended"), TimeOrWhy(None, "ended"), TimeOrWhy(1.0)]) == TimeOrWhy(
        None, "ended"
    )


def test_of_an_even_count_the_slower_one_in_the_middle_counts():
    assert median([TimeOrWhy(4.0), TimeOrWhy(1.0), TimeOrWhy(2.0), TimeOrWhy(3.0)]) == TimeOrWhy(3.0)
    assert median([TimeOrWhy(1.0), TimeOrWhy(None, "> 60")]) == TimeOrWhy(None, "> 60")


def test_a_cell_has_seconds_or_a_reason():
    assert cell(TimeOrWhy(1.234)) == "1.23"
    assert cell(TimeOrWhy(None, "> 60")) == "> 60"
    assert cell(median([])) == "-"


def test_steps_that_a_member_made_alone_do_not_count():
    steps = [WorkerStep(1, 0.1, 1), WorkerStep(2, 0.2, 2), WorkerStep(3, 0.3, 1), WorkerStep(4, 0.4, 3)]
    assert [step.number for step in shared(steps)] == [2, 4]


@pytest.mark.parametrize(
    ("events", "found"),
    [
        (("gap",), [("join",)]),
        (("kill", "join"), [("join", "kill")]),
        (("coordinator", "kill", "stop"), [("kill",), ("stop",), ("coordinator",)]),
    ],
)
def test_what_leaves_a_cluster_as_it_was_shares_a_life(events, found):
    assert lives(events) == found


def test_of_what_pip_says_the_errors_are_told():
    said = (
        "Collecting x\n  WARNING: no\nERROR: Could not find a version that satisfies x\nERROR: No matching\n"
    )
    assert reason_of(said) == "ERROR: Could not find a version that satisfies x\nERROR: No matching"
    assert reason_of("one\n\ntwo\n") == "one\ntwo"


def test_a_package_that_cannot_be_installed_is_named_with_pips_reason(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"(?s)no-such-thing could not be installed.*No matching distribution"
    ):
        environment("no-such-thing", tmp_path / "environments")
    assert not (tmp_path / "environments" / "no-such-thing" / "installed").exists()


def test_an_environment_that_was_made_is_used_again(tmp_path):
    (tmp_path / "thing").mkdir()
    (tmp_path / "thing" / "installed").write_text("1.0\n")
    assert environment("thing", tmp_path) == tmp_path / "thing" / "bin" / "python"


def test_each_system_has_a_worker_that_is_shipped():
    for name in SYSTEMS:
        compile((WORKERS / f"with_{name}.py").read_text(), name, "exec")
    assert (WORKERS / "peer.py").is_file()


def test_each_machine_has_one_address_and_reaches_the_others_by_the_switch():
    names = ["n0", "joiner", "coordinator", "zebra"]  # Before and after the switch in the order of names.
    machines = Switched("test", Topology({(name, "switch"): LinkSpec(rate_mbit=1000) for name in names}))
    addresses = {machines.address(name) for name in names}
    gateways = {machines.route(name)[-1] for name in names}
    assert len(addresses) == len(gateways) == len(names) and not addresses & gateways
    for name in names:
        ours, via = machines.address(name), machines.route(name)[-1]
        assert ours.rpartition(".")[0] == via.rpartition(".")[0]  # The same /30.


def rounds(**outcomes):
    return {"chaosnet": {event: outcomes.get(event, []) for event in ("step", *EVENTS)}}


def test_rounds_of_an_earlier_run_are_taken_up(tmp_path):
    file = tmp_path / "earlier.json"
    kills = [{"seconds": 1.5, "why": ""}, {"seconds": None, "why": "> 60"}]
    file.write_text(
        json.dumps({"mb": 45.0, "versions": {"chaosnet": "1", "x": "2"}, "rounds": rounds(kill=kills)})
    )
    settings = {"mb": 45.0, "versions": {"chaosnet": "1", "y": "3"}}
    assert earlier(file, settings) == rounds(kill=[TimeOrWhy(1.5), TimeOrWhy(None, "> 60")])
    with pytest.raises(ConfigError, match=r"was measured with mb 45.0 \(expected 20.0\)"):
        earlier(file, settings | {"mb": 20.0})
    with pytest.raises(ConfigError, match="versions"):
        earlier(file, settings | {"versions": {"chaosnet": "2"}})
    file.write_text("{}")
    with pytest.raises(ConfigError, match="is none of bench peers' files"):
        earlier(file, settings)


def test_medians_are_made_of_an_earlier_run_alone(tmp_path):
    file = tmp_path / "earlier.json"
    args = [
        "bench",
        "peers",
        "--systems",
        "chaosnet",
        "--loopback",
        "--repeat",
        "0",
        "--onto",
        str(file),
        "--json",
    ]
    file.write_text("[]")
    assert "is none of bench peers' files" in str(CliRunner().invoke(cli, [*args, str(file)]).exception)
    made = {
        "mb": 45.0, "state_mb": 135.0, "pause_s": 0.3, "members": 3, "patience_s": 60.0, "rate_mbit": None,
        "cores": os.cpu_count(), "torch": torch.__version__, "versions": {"chaosnet": metadata.version("chaosnet")},
        "rounds": rounds(kill=[{"seconds": each, "why": ""} for each in (3.0, 1.0, 2.0)]),
    }  # fmt: skip
    file.write_text(json.dumps(made))
    done = CliRunner().invoke(cli, [*args, str(tmp_path / "found.json")], catch_exceptions=False)
    assert "2.00" in done.output and "medians of 3" in done.output
    assert json.loads((tmp_path / "found.json").read_text())["medians"]["chaosnet"]["kill"]["seconds"] == 2.0


@pytest.mark.realtime
def test_a_worker_that_ends_is_seen_and_its_last_words_are_kept(tmp_path):
    say = {"step": 3, "at_s": 1.5, "members": 2}
    program = (
        f"import sys; print('{json.dumps({'ready': True})}'); print('noise'); print('{json.dumps(say)}')"
    )
    program += f"; sys.exit(chr(10).join('line %d' % i for i in range({LOG_LINES + 5})))"
    heard = threading.Condition()
    process = WorkerProgram(Here(), "n0", [sys.executable, "-c", program], Path(tmp_path), heard)
    with heard:
        assert heard.wait_for(lambda: process.ended, 60)
        assert heard.wait_for(lambda: process.steps, 60)
    assert process.said == {"ready": True}
    assert process.steps == [WorkerStep(3, 1.5, 2)]
    assert process.last_words().split("\n") == [f"    line {i}" for i in range(5, LOG_LINES + 5)]
    process.kill()


@pytest.mark.parametrize(
    ("args", "told"),
    [
        (
            ("--systems", "chaosnet,pytorch"),
            "'pytorch' is unknown (expected one of chaosnet, torchft, hivemind",
        ),
        (("--events", "join,nap"), "'nap' is unknown (expected one of join, gap, kill, stop, coordinator"),
        (("--members", "2"), "'2' is out of range (expected a whole number from 3 to 16)"),
        (("--rate", "fast"), "'fast' is no number"),
    ],
)
def test_what_cannot_be_compared_is_told(args, told):
    done = CliRunner().invoke(cli, ["bench", "peers", *args])
    assert done.exit_code == 2 and told in done.output
