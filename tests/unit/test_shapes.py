"""How large files, classes and functions may be, and the shape that cores have in common.

Lines of a file are all of them. Those of a function go from its `def` to its end, docstring and signature included:
they are read, too. Decorators do not count (options of a command are a table). Methods of a class are those that
it defines itself, properties included.
"""

import ast
import configparser
import inspect
import random
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from chaosnet.node.agent.core import Agent, CoreSettings

ROOT = Path(__file__).parent.parent.parent
LINES_OF_A_FILE, LINES_OF_A_FUNCTION, METHODS = 600, 60, 30
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Cores whose `handle` is not (event, now_s) -> effects, and what it is.
OTHER_HANDLES = {
    "sync": "(event) -> list[Effect]",
    "dial_backs": "(event, silent) -> list[Effect]",
    "deaths": "(event, now_s) -> dict[str, int | None]",
    "keys": "(message, now_s, scheduling) -> list[Effect]",
}


@cache
def sources() -> dict[str, str]:
    """Of the packages that setup.cfg names: by path."""
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = config["options"]["package_dir"].strip().splitlines()
    folders = {line.partition("=")[2].strip().partition("/")[0] for line in lines}
    files = [file for folder in sorted(folders) for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


def found_too_large() -> Iterator[tuple[str, str, int, str]]:
    """File, name, how much, of what."""
    for file, text in sources().items():
        if (count := len(text.splitlines())) > LINES_OF_A_FILE:
            yield file, "", count, f"lines (expected at most {LINES_OF_A_FILE})"
        for each in ast.walk(ast.parse(text)):
            if isinstance(each, FUNCTIONS):
                assert each.end_lineno is not None
                if (count := each.end_lineno - each.lineno + 1) > LINES_OF_A_FUNCTION:
                    yield file, each.name, count, f"lines (expected at most {LINES_OF_A_FUNCTION})"
            if isinstance(each, ast.ClassDef) and not file.startswith("simulator/"):
                count = sum(isinstance(part, FUNCTIONS) for part in each.body)
                if count > METHODS:
                    yield file, each.name, count, f"methods (expected at most {METHODS})"


def test_nothing_is_too_large():
    assert not [
        f"{file}: {name or 'the file'} has {count} {of}" for file, name, count, of in found_too_large()
    ]


# --- names ---

# The planner of pipelines has words of its own (docs/glossary.md); integrations are named as what they stand for.
OTHER_WORDS = ("scheduler/elastic/", "chaosnet/integrations/")


def test_a_public_class_has_a_name_of_its_own():
    places: dict[str, list[str]] = {}
    for file, text in sources().items():
        if file.startswith(OTHER_WORDS):
            continue
        for each in ast.parse(text).body:
            if isinstance(each, ast.ClassDef) and not each.name.startswith("_"):
                places.setdefault(each.name, []).append(file)
    assert not {name: files for name, files in places.items() if len(files) > 1}


# --- cores ---


@pytest.fixture
def agent():
    return Agent("n1", CoreSettings(addresses=("n1:1",)), random.Random(1))


def those_with(agent, name):
    """Names of what the agent is made of that has it."""
    return {each for each, part in vars(agent).items() if hasattr(part, name) and is_ours(part)}


def is_ours(part):
    return type(part).__module__.startswith("chaosnet.")


def attributes_in(file, function):
    """Attributes of `self` that a function names."""
    tree = ast.parse(sources()[file])
    found = next(each for each in ast.walk(tree) if isinstance(each, FUNCTIONS) and each.name == function)
    return {
        each.attr
        for each in ast.walk(found)
        if isinstance(each, ast.Attribute) and isinstance(each.value, ast.Name) and each.value.id == "self"
    }


def test_a_core_handles_an_event_at_a_time_and_gives_effects(agent):
    others = {}
    for name in those_with(agent, "handle"):
        handle = type(getattr(agent, name)).handle
        _, *parameters = inspect.signature(handle).parameters
        shape = f"({', '.join(parameters)}) -> {handle.__annotations__['return']}"
        if shape != "(event, now_s) -> list[Effect]":
            others[name] = shape
    assert others == OTHER_HANDLES, "a core's handle is (event, now_s) -> list[Effect]"


def test_every_core_is_woken_when_it_wants_to_be(agent):
    missing = those_with(agent, "wake_at_s") - attributes_in("node/agent/core.py", "wake_at_s")
    assert not missing, f"Agent.wake_at_s in node/agent/core.py does not ask {sorted(missing)}"


def test_the_invariants_of_every_core_are_checked(agent):
    missing = those_with(agent, "check_invariants") - attributes_in("node/agent/node.py", "check_invariants")
    assert not missing, (
        f"Node.check_invariants in node/agent/node.py does not call those of {sorted(missing)}"
    )
