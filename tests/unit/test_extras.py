"""What needs a package of an extra says so before it begins, and nothing else imports one."""

import ast
import configparser
from importlib.util import find_spec
from pathlib import Path

import pytest

from chaosnet import extras
from chaosnet.cli import cli
from chaosnet.protocols.errors import ConfigError
from chaosnet.settings.groups import Cluster
from chaosnet.settings.resolved import node_settings

ROOT = Path(__file__).parent.parent.parent
FOLDERS = ("chaosnet", "node", "protocols", "scheduler", "netem", "simulator", "benchmarks", "trials")
USES_THE_PLANNER = ("scheduler/elastic/roles.py", "scheduler/elastic/transfers.py", "simulator/scenario.py")
USES_THE_PAGE = (
    "chaosnet/page/",
    "chaosnet/terminal/tables.py",
    "chaosnet/terminal/top_app.py",
    "chaosnet/discovery/lan.py",
)

COMMANDS = {
    "demo": ("demo",),
    "demo --pipeline": ("plot",),
    "soak": ("demo",),
    "plan {topology} llama2-7b --fail a": ("planner",),
    "simulate-training {topology}": ("planner",),
    "simulate-training {topology} --plot {picture}": ("plot",),
    "bench chameleon-fig6": ("planner",),
    "bench probe": ("iperf3",),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_names_the_extra_that_it_needs(monkeypatch, tmp_path, command):
    (topology := tmp_path / "topology.yaml").write_text("{}")
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    if command.startswith("bench cham"):
        monkeypatch.setattr("importlib.import_module", _without_scipy)
    args = command.format(topology=topology, picture=tmp_path / "a.png").split()
    (extra,) = COMMANDS[command]
    with pytest.raises(
        ConfigError, match=rf"which (is|are) not installed \(pip install 'chaosnet\[{extra}\]'\)"
    ):
        cli.main(args, standalone_mode=False)


def test_what_is_missing_is_said_in_one_sentence_of_the_command(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ConfigError) as told:
        cli.main(["dashboard"], standalone_mode=False)
    assert str(told.value) == (
        "chaosnet dashboard needs prometheus_client, starlette and uvicorn, which are not installed "
        "(pip install 'chaosnet[dashboard]')"
    )


def _without_scipy(name):
    raise ModuleNotFoundError("No module named 'scipy'", name="scipy")


def test_a_probe_by_iperf3_asks_for_its_package(monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=r"probe: 'iperf3' needs iperf3.*chaosnet\[iperf3\]"):
        node_settings(Cluster(probe="iperf3"))


def _imported(tree: ast.Module) -> set[str]:
    """First parts of what a module imports when it is imported itself."""
    found = set()
    for each in tree.body:
        if isinstance(each, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in each.names}
        elif isinstance(each, ast.ImportFrom) and not each.level:
            found.add((each.module or "").partition(".")[0])
    return found


def test_only_what_is_asked_for_by_name_imports_a_package_of_an_extra():
    optional = {module for modules in extras.MODULES.values() for module in modules}
    for folder in FOLDERS:
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name.startswith(
                (*USES_THE_PLANNER, *USES_THE_PAGE, "trials/demo_digits.py", "chaosnet/integrations/")
            ):
                continue
            assert not _imported(ast.parse(path.read_text())) & optional, name


def test_each_extra_of_setup_cfg_that_brings_something_is_known():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = set(config["options.extras_require"]) - {"dev", "docs"}
    assert declared == set(extras.MODULES)
    assert all(
        find_spec(module) for modules in extras.MODULES.values() for module in modules
    )  # `dev` has all.
