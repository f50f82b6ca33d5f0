"""The table of settings, and what repeats it: signatures, docstrings, tables in docs/.

Write the docstrings and the docs anew with CHAOSNET_REWRITE_TRACES=1, and read the difference.
"""

import dataclasses
import inspect
import os
import re
import textwrap
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from chaosnet import Checkpoints, Cluster, Trainer
from chaosnet.commands.node_options import into_environment
from chaosnet.commands.run import run
from chaosnet.commands.status import status
from chaosnet.errors import ConfigError
from chaosnet.node.sums.compression import COMPRESSIONS as ENCODINGS
from chaosnet.protocols.probing import Kind
from chaosnet.scheduler.sync_plan import POLICIES as PLANS
from chaosnet.settings.resolved import checkpoint_settings, node_settings, step_settings
from chaosnet.settings.table import (
    CHECKPOINTS,
    COMPRESSIONS,
    GROUPS,
    MODEL,
    NODE,
    POLICIES,
    PROBES,
    SETTINGS,
    STEP,
)

ROOT = Path(__file__).parents[2]
REWRITE = os.environ.get("CHAOSNET_REWRITE_TRACES") == "1"
ARGUMENTS = (*MODEL, *STEP, *GROUPS)
BY_GROUP = {Cluster: [each for each in NODE if each.annotation], Checkpoints: CHECKPOINTS}
VARIABLES = [setting for setting in SETTINGS.values() if setting.variable]
OPTIONS = [setting for setting in SETTINGS.values() if setting.option]


@pytest.fixture(autouse=True)
def environment(tmp_path, monkeypatch):
    """No key of anybody's, and none of the variables; what a test sets is undone."""
    for name in [name for name in os.environ if name.startswith("CHAOSNET_")]:
        monkeypatch.delenv(name)
    for setting in VARIABLES:
        monkeypatch.setenv(setting.variable, "")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)


# --- what repeats the table ---


def test_the_signature_of_trainer_is_that_of_the_table():
    _, *parameters = inspect.signature(Trainer.__init__).parameters.values()
    found = [(each.name, each.annotation, each.default) for each in parameters]
    assert found == [(each.name, each.annotation, each.signature_default) for each in ARGUMENTS]
    by_position = [each.name for each in parameters if each.kind is each.POSITIONAL_OR_KEYWORD]
    assert by_position == [each.name for each in MODEL]


@pytest.mark.parametrize("group", BY_GROUP)
def test_the_fields_of_a_group_are_those_of_the_table(group):
    found = [(each.name, each.type, each.default) for each in dataclasses.fields(group)]
    assert found == [(each.name, each.annotation, each.signature_default) for each in BY_GROUP[group]]


def test_a_setting_can_be_said_in_one_place_only():
    everywhere = [each.name for each in (*MODEL, *STEP, *GROUPS, *NODE, *CHECKPOINTS)]
    assert len({*everywhere}) == len(everywhere)


def test_every_option_of_run_is_in_the_table():
    options = {option: param.name for param in run.params for option in param.opts if option.startswith("--")}
    assert options == {each.option: each.name for each in OPTIONS}


def repeats(path, pattern, text):
    """Compare what is between two marks in a file, or write it."""
    said = path.read_text()
    [(start, stop)] = [found.span(1) for found in re.finditer(pattern, said, re.DOTALL)]
    if REWRITE:
        path.write_text(said[:start] + text + said[stop:])
    else:
        assert said[start:stop] == text


def test_the_docstring_of_trainer_is_that_of_the_table():
    pattern = r"\n    Args:\n(        model: .*?)    Raises: ScaleOutFailed"
    repeats(ROOT / "chaosnet" / "trainer.py", pattern, described(ARGUMENTS))


@pytest.mark.parametrize("group", BY_GROUP)
def test_the_docstring_of_a_group_is_that_of_the_table(group):
    pattern = rf"class {group.__name__}:[^@]*?\n    Attributes:\n([^@]*?)    \"\"\"\n"
    repeats(ROOT / "chaosnet" / "settings" / "groups.py", pattern, described(BY_GROUP[group]))


def described(settings):
    """Lines of a docstring."""
    lines = [
        textwrap.fill(f"{each.name}: {each.help}", 110, initial_indent=8 * " ", subsequent_indent=12 * " ",
                      break_long_words=False, break_on_hyphens=False)
        for each in settings
    ]  # fmt: skip
    return "".join(f"{line}\n" for line in lines)


TABLES = {
    "step": ("docs/trainer.md", "Trainer", ARGUMENTS, False),
    "node": ("docs/trainer.md", "Cluster", NODE, True),
    "checkpoints": ("docs/checkpoints.md", "Checkpoints", CHECKPOINTS, True),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_docs_are_those_of_the_table(name):
    file, where, settings, three_ways = TABLES[name]
    heads = [f"`{where}(...)`", *(["`chaosnet run`", "environment"] if three_ways else []), "default", ""]
    rows = [heads, ["---"] * len(heads), *(row(each, three_ways) for each in settings)]
    text = "".join("|" + "|".join(f" {cell} " if cell else " " for cell in each) + "|\n" for each in rows)
    text = text.replace("| --- ", "|---").replace("|--- ", "|---")
    repeats(ROOT / file, rf"<!-- settings: {name} -->\n(.*?)<!-- end of settings -->", text)


def row(setting, three_ways):
    """Cells of Markdown."""
    said = f"{setting.help} {setting.more}".strip().removesuffix(".")
    assert "|" not in said + setting.shown_default
    option = code(setting.option) + ", repeated" * (setting.name == "links")
    default = setting.shown_default
    if not setting.default_text and isinstance(setting.default, str):
        default = code(default if three_ways else f'"{default}"')
    argument = code(setting.name if setting.annotation else "")
    return [argument, *([option, code(setting.variable)] if three_ways else []), default, said]


def code(text):
    return f"`{text}`" if text else ""


# --- what is taken ---


def test_what_the_table_repeats_to_be_imported_quickly_is_what_there_is():
    assert {*POLICIES} == {*PLANS}
    assert get_args(Kind) == PROBES
    assert COMPRESSIONS == ENCODINGS


def test_with_nothing_said_the_defaults_hold():
    for setting in SETTINGS.values():
        assert setting.of(setting.signature_default) == setting.default
    assert checkpoint_settings() is None
    assert node_settings().name != node_settings().name


SAID = {  # On the command line, as the Trainer then has it.
    "listen": ("127.0.0.1:7", "127.0.0.1:7"),
    "join": ("10.0.0.2:5555,10.0.0.3:5555", "10.0.0.2:5555,10.0.0.3:5555"),
    "cluster_name": ("lab-1", "lab-1"),
    "found": (None, True),
    "new": (None, True),
    "rejoin": (None, False),
    "name": ("n1", "n1"),
    "neighbors": ("3", 3),
    "links": ("n2", ("n2",)),
    "blocking": (None, True),
    "sync_policy": ("fapt", "fapt"),
    "compression": ("int8", "int8"),
    "probe": ("iperf3", "iperf3"),
    "key": ("file", "file"),
    "allowed_keys": ("file", "file"),
    "insecure": (None, True),
    "dashboard": ("8080", "127.0.0.1:8080"),
    "directory": ("folder", Path("folder")),
    "log_format": ("json", "json"),
    "every": ("7", 7),
    "copies": ("whole", "whole"),
    "resume": (None, True),
    "resume_from": ("0", 0),
}


@pytest.mark.parametrize("setting", OPTIONS, ids=lambda setting: setting.name)
def test_an_option_reaches_the_trainer_by_the_environment_and_the_script_wins(setting, tmp_path):
    (tmp_path / "train.py").touch()
    text, value = SAID[setting.name]
    words = [setting.option] if text is None else [setting.option, text]
    given = dict(run.make_context("run", [*words, "train.py"]).params)
    del given["script"], given["args"], given["module"]
    into_environment(given)
    assert setting.of(None) == value != setting.default
    own = setting.default if setting.default is not None else type(value)(value)
    assert setting.of(own) == own


def test_several_links_reach_the_trainer():
    into_environment({"links": ("n1", "10.0.0.2:5555")})
    assert node_settings(Cluster(insecure=True)).links == ("n1", "10.0.0.2:5555")


@pytest.mark.parametrize(
    ("variable", "text"),
    [("LISTEN", ":5555"), ("JOIN", "h"), ("JOIN_PATIENCE_S", "long"), ("FOUND", "yes"), ("CLUSTER", "our lab"),
     ("REJOIN", "no"), ("NAME", "a,b"), ("NEIGHBORS", "65"), ("NEIGHBORS", "2.5"), ("POLICY", "best"),
     ("COMPRESSION", "zip"),
     ("PROBE", "ping"), ("INSECURE", "yes"), ("PEERS_AT", "n1"), ("EVERY", "0"),
     ("CHECKPOINT_COPIES", "two"), ("CHECKPOINTS_KEPT", "-1"), ("RESUME", "2"), ("RESUME_FROM", "last")],
)  # fmt: skip
def test_an_environment_that_cannot_be_is_refused_by_the_name_of_the_variable(monkeypatch, variable, text):
    monkeypatch.setenv(f"CHAOSNET_{variable}", text)
    with pytest.raises(ConfigError, match=rf"CHAOSNET_{variable}: '{text}' .*\(expected "):
        node_settings()
        checkpoint_settings()


@pytest.mark.parametrize(("option", "field"), [("NAME", "name"), ("LINKS", "links")])
def test_a_name_that_is_no_text_by_the_locale_is_refused(monkeypatch, option, field):
    """Python keeps its bytes as surrogates: no checkpoint with it could be written, no message with it be sent."""
    monkeypatch.setenv(f"CHAOSNET_{option}", "J\udcfcrgen")
    with pytest.raises(ConfigError, match=rf"CHAOSNET_{option}: 'J.*rgen' is n"):
        node_settings()
    monkeypatch.setenv(f"CHAOSNET_{option}", "Jürgen")
    assert "Jürgen" in getattr(node_settings(Cluster(insecure=True)), field)


def test_an_address_that_cannot_be_is_named(monkeypatch):
    monkeypatch.setenv("CHAOSNET_PEERS_AT", "n2=,n1=10.0.0.2")
    with pytest.raises(
        ConfigError, match=r"CHAOSNET_PEERS_AT: '10\.0\.0\.2' has no port \(expected HOST:PORT"
    ):
        node_settings()
    monkeypatch.setenv("CHAOSNET_PEERS_AT", "n2=,n1=10.0.0.2:5555")
    assert node_settings(Cluster(insecure=True)).peers_at == {"n2": "", "n1": "10.0.0.2:5555"}


def test_a_whole_number_that_no_float_holds_is_out_of_range():
    with pytest.raises(ConfigError, match=r"chunk_bytes: .*out of range"):
        Trainer(cluster=Cluster(chunk_bytes=10**400))


@pytest.mark.parametrize(
    ("name", "value"),
    [("guard", "trust"), ("guard_factor", 1.0), ("guard_factor", float("nan")), ("on_divergence", "go"),
     ("lr_scheduler_every", 0), ("lr_scheduler_every", True), ("lr_scheduler_every", 2.5),
     ("seed", 0.5), ("same_rng", "no"), ("quiet", 2)],
)  # fmt: skip
def test_what_only_a_script_says_is_checked(name, value):
    with pytest.raises(ConfigError, match=rf"{name}: {value!r} .*\(expected "):
        step_settings(**{name: value})


@pytest.mark.parametrize(
    ("name", "value"), [("cluster", {"join": "h:1"}), ("cluster", Checkpoints()), ("checkpoints", "folder")]
)
def test_a_group_that_is_none_is_named(name, value):
    expected = re.escape(f"{name}: {value!r} (expected chaosnet.{name.capitalize()}(...))")
    with pytest.raises(ConfigError, match=expected):
        Trainer(**{name: value})


def test_an_invite_is_not_shown_with_the_rest_of_its_group():
    assert "secret" not in repr(Cluster(join="chaosnet-invite-secret"))


def test_a_script_may_join_nobody_whatever_the_environment_says(monkeypatch):
    monkeypatch.setenv("CHAOSNET_JOIN", "10.0.0.2:5555")
    assert node_settings().join == ("10.0.0.2:5555",)
    assert node_settings(Cluster(join="")).join == ()


def test_a_whole_number_may_come_as_a_float_and_a_policy_as_a_function():
    assert checkpoint_settings(Checkpoints("d", every=1e3)).every == 1000
    assert node_settings(Cluster(sync_policy=len)).sync_policy is len


def test_a_whole_number_may_be_of_numpys():
    """As counted by it, or drawn: they have no trunc()."""
    for number in (np.int64(3), np.int32(3), np.float32(3)):
        told = step_settings(seed=number, lr_scheduler_every=number)
        assert (told.seed, told.lr_scheduler_every) == (3, 3) and type(told.lr_scheduler_every) is int
        assert node_settings(Cluster(neighbors=number)).neighbors == 3


def test_a_command_that_only_asks_opens_no_port_and_does_not_say_that_it_does():
    """The same option means another thing to a node."""
    texts = [
        next(each.help for each in command.params if each.name == "insecure") for command in (status, run)
    ]
    assert "Ask without a key" in texts[0] and "everybody who reaches the port can join" in texts[1]
