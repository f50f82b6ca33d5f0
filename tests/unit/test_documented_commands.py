"""Every `chaosnet ...` of a page is a command that exists, with options and values that it takes. Nothing is run."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import click
import pytest

from chaosnet.cli import cli

ROOT = Path(__file__).parent.parent.parent
PAGES = sorted(chain(ROOT.glob("*.md"), ROOT.glob("docs/**/*.md"), ROOT.glob("examples/*.md")))
# On a line of its own; a sentence may begin a line with the name, too.
TYPED = re.compile(r"^(?:    )?(?:[A-Z_]+=\S+ )*chaosnet (?!needs)(\S.*)$", re.MULTILINE)
NAMED = re.compile(r"`(?:[A-Z_]+=\S+ )*chaosnet ([a-z][^`\n]*)`")  # In a sentence.
NOT_OURS = re.compile(r"\s+(#|\||&|>).*$|\)$")  # What follows is the shell's, or the reader's.

KEY = "a" * 52
# What readers put in themselves.
FOR = {
    "ADDRESS": "10.0.0.2:5555", "ADDRESS-OF-THE-NODE": "10.0.0.2:5555", "HOST:PORT": "10.0.0.2:5555",
    "SELF": "10.0.0.2:5555", "A": "10.0.0.2:5555", "TOKEN": "10.0.0.2:5555", "…": "10.0.0.2:5555",
    "OTHER@10.0.0.2:5555": "10.0.0.2:5555", "KEY": KEY, "NEW": KEY, "OLD": KEY, "N": "1", "SEED": "1",
    "...": "train.py",
}  # fmt: skip
ASKS_THIS_MACHINE = "no address, and no node of yours runs on this machine"
INCOMPLETE = "Missing argument", "no address", "KEY: missing", "B: missing", "Option '--"


def commands(pattern: re.Pattern[str], page: Path) -> Iterator[list[str]]:
    """Their arguments."""
    for line in pattern.findall(page.read_text()):
        yield [FOR.get(word, word) for word in shlex.split(NOT_OURS.sub("", line))]


def complaint(arguments: list[str]) -> str:
    """What the command line says of it; "" if it would run."""
    command: click.Command = cli
    context, rest = click.Context(cli, info_name="chaosnet"), arguments
    while isinstance(command, click.Group) and rest:
        found = command.get_command(context, rest[0])
        if found is None:
            return f"no command {rest[0]!r}"
        command, rest = found, rest[1:]
        context = click.Context(command, info_name=arguments[0], parent=context)
    try:
        if not isinstance(command, click.Group):
            command.make_context(arguments[0], rest, parent=context)
    except click.exceptions.Exit:  # --help
        pass
    except click.ClickException as error:
        return error.format_message()
    return ""


@pytest.fixture(autouse=True)
def reader(tmp_path, monkeypatch) -> None:
    """A folder with the files of which pages speak."""
    for name in ("train.py", "hosts.txt"):
        (tmp_path / name).write_text("")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_one_types_is_taken(page):
    said = {shlex.join(each): complaint(each) for each in commands(TYPED, page)}
    assert not {line: why for line, why in said.items() if why and ASKS_THIS_MACHINE not in why}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_what_a_sentence_names_exists(page):
    said = {shlex.join(each): complaint(each) for each in commands(NAMED, page)}
    assert not {line: why for line, why in said.items() if why and not why.startswith(INCOMPLETE)}


def test_commands_are_found_and_mistakes_in_them(tmp_path):
    found = sum(len(list(commands(pattern, page))) for pattern in (TYPED, NAMED) for page in PAGES)
    assert found > 350
    page = tmp_path / "page.md"
    page.write_text(
        "    chaosnet run --lisen 127.0.0.1:1 train.py\nchaosnet sttus   # live\n    chaosnet leave nowhere\n"
    )
    told = [complaint(each) for each in commands(TYPED, page)]
    assert "--lisen" in told[0] and told[1] == "no command 'sttus'" and "has no port" in told[2]
