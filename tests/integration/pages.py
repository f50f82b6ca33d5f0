"""What a page of docs/ tells its reader to save, to type and to expect, and terminals in which it is typed.

A comment before a block says what the block is:

    <!-- file train.py -->                  saved under that name
    <!-- terminal 1 -->                     typed there; each command ends well
    <!-- terminal 1, goes on -->            typed there; the last command goes on
    <!-- shows in terminal 1 -->            these lines come there, in this order; numbers with a point, those after
                                            "step", and "..." may be others
    <!-- terminal 1: Ctrl+C -->             without a block
    <!-- install -->                        not typed here: how these tests were installed
    <!-- diff ONE OTHER -->                 what differs between two files of the repository

Terminals whose names begin with a letter are on machines of their own, as far as keys go.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
ENTRY = re.compile(r"<!-- ([^\n]*?) -->\n(?:```(\w+)\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FENCE = re.compile(r"^```(\w+)\n", re.MULTILINE)
KINDS = {"file", "terminal", "shows", "install", "diff"}  # Other comments are for those who write the page.
PATIENCE_S = 90.0  # A start on a busy machine; what comes sooner is taken sooner.


@dataclass(frozen=True)
class Block:
    """A comment's words, and the block that follows it, if one does."""

    says: str
    language: str
    text: str


def blocks(page: str) -> list[Block]:
    """Of a page, in order."""
    text = (ROOT / "docs" / page).read_text()
    found = [Block(match[1], match[2] or "", match[3] or "") for match in ENTRY.finditer(text)]
    return [block for block in found if block.says.partition(" ")[0] in KINDS]


def without_comment(page: str, languages: set[str]) -> int:
    """How many blocks in these languages no comment tells of."""
    text = (ROOT / "docs" / page).read_text()
    told = sum(block.language in languages for block in blocks(page))
    return sum(match[1] in languages for match in FENCE.finditer(text)) - told


def expected(line: str) -> re.Pattern[str]:
    """What such a line may look like."""
    parts = re.split(r"((?<=step )[\d,]+|[\d,]*\d\.\d+|\.\.\.)", line)
    return re.compile("".join(".*" if number % 2 else re.escape(part) for number, part in enumerate(parts)))


def difference(one: str, other: str) -> str:
    """Between two files of the repository, with all lines that are the same; without the docstrings at their tops."""
    texts = [(ROOT / each).read_text().split('"""\n', 2)[-1].strip().splitlines() for each in (one, other)]
    lines = list(difflib.unified_diff(*texts, one, other, n=1000, lineterm=""))
    return "\n".join([*lines[:2], *lines[3:]]) + "\n"


class Terminal:
    """A shell whose screen is a file. `inside`: the command that starts it elsewhere."""

    def __init__(self, name: str, folder: Path, env: dict[str, str], inside: Sequence[str] = ()) -> None:
        self.name, self.screen = name, folder / f"terminal-{name}.txt"
        self.seen = 0  # Up to here it has been read.
        with self.screen.open("w") as out:
            self.shell = subprocess.Popen(
                [*inside, "bash"],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=out,
                cwd=folder,
                env=env,
                start_new_session=True,
            )

    def show(self) -> str:
        return self.screen.read_text(errors="replace")

    def write(self, text: str) -> None:
        assert self.shell.stdin is not None
        self.shell.stdin.write(text.encode())
        self.shell.stdin.flush()

    def interrupt(self) -> None:
        """Ctrl+C: to all that run in it. The shell hears it, too, when what it waits for has ended."""
        os.killpg(self.shell.pid, signal.SIGINT)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.shell.pid, signal.SIGKILL)
        self.shell.wait()


class Reader:
    """Does what a page says. `instead`: what it would type, and what is typed here. `inside`: the command that
    starts a shell on a machine, by its letter."""

    def __init__(
        self, folder: Path, instead: dict[str, str], inside: Callable[[str], Sequence[str]] = lambda _: ()
    ) -> None:
        self.folder, self.instead, self.inside = folder, instead, inside
        self.terminals: dict[str, Terminal] = {}
        self.token = ""

    def read(self, page: str) -> None:
        """And do all that it says."""
        for block in blocks(page):
            self.follow(block)

    def until(self, terminal: str, text: str, again: bool = False) -> None:
        """Wait for words that the page does not tell of. `again`: since something was typed last."""
        self.terminals[terminal].seen = self.terminals[terminal].seen if again else 0
        self._wait(self.terminals[terminal], [text])

    def follow(self, block: Block) -> None:
        """One block. Raises: AssertionError if it ends otherwise than the page says."""
        kind, _, rest = block.says.partition(" ")
        if kind == "file":
            (self.folder / rest).write_text(self._here(block.text))
        elif kind == "diff":
            assert block.text == difference(*rest.split()), f"{rest}: the page shows another difference"
        elif kind == "shows":
            self._wait(self._terminal(rest.split()[-1]), block.text.splitlines())
        elif kind == "terminal" and rest.endswith(": Ctrl+C"):
            self._mark()
            self.terminals[rest.partition(":")[0]].interrupt()
        elif kind == "terminal":
            self.type(rest.partition(",")[0], block.text, goes_on=rest.endswith("goes on"))
        else:
            assert kind == "install"

    def close(self) -> None:
        for terminal in self.terminals.values():
            terminal.close()

    def _terminal(self, name: str) -> Terminal:
        known = self.terminals.get(name)
        if known is None or known.shell.poll() is not None:
            machine = name[0] if name[0].isalpha() else "here"
            env = {key: value for key, value in os.environ.items() if not key.startswith("CHAOSNET_")}
            env["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{env['PATH']}"
            env["XDG_CONFIG_HOME"] = env["CHAOSNET_STATE_DIR"] = str(self.folder / f"machine-{machine}")
            env["OMP_NUM_THREADS"] = "1"
            self.terminals[name] = Terminal(name, self.folder, env, self.inside(machine))
        return self.terminals[name]

    def _mark(self) -> None:
        """What is expected from here on comes after this."""
        for each in self.terminals.values():
            each.seen = len(each.show())

    def type(self, name: str, text: str, goes_on: bool = False) -> str:
        """In the terminal of that name. Returns: what it shows then, of a command that does not go on.

        Raises: AssertionError if such a command ends badly."""
        terminal = self._terminal(name)
        self._mark()
        terminal.write(self._here(text))
        if goes_on:
            return ""
        began = terminal.seen
        terminal.write("echo ended with $?.\n")
        self._wait(terminal, ["ended with ..."])
        terminal.seen = began
        shown = terminal.show()
        assert "ended with 0." in shown[-20:], f"terminal {terminal.name}: {text}{shown}"
        tokens = re.findall(r"^chaosnet-invite-\S+", shown, re.MULTILINE)
        self.token = tokens[-1] if tokens else self.token
        return shown[began:]

    def _here(self, text: str) -> str:
        for there, here in {**self.instead, "TOKEN": self.token}.items():
            text = text.replace(there, here)
        return text

    def _wait(self, terminal: Terminal, lines: list[str]) -> None:
        until_s = time.monotonic() + PATIENCE_S
        for line in lines:
            pattern = expected(self._here(line))
            while not (found := pattern.search(terminal.show(), terminal.seen)):
                assert time.monotonic() < until_s, (
                    f"terminal {terminal.name} does not show {line!r}\n{self.story()}"
                )
                time.sleep(0.05)
            terminal.seen = found.end()

    def story(self) -> str:
        """All screens."""
        return "\n".join(f"--- terminal {name}\n{each.show()}" for name, each in self.terminals.items())
