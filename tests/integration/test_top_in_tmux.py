"""`chaosnet top` in a real terminal, on a real cluster: `make dashboard-test` installs the tmux that it takes."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import cluster_of

pytestmark = [
    pytest.mark.realtime,
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("tmux"), reason="no tmux here (make dashboard-test installs it)"),
]

PATIENCE_S = 60.0
SMALL, LARGE = (80, 24), (200, 60)


class Terminal:
    """A shell in a tmux of its own."""

    def __init__(self, folder: Path) -> None:
        self._tmux = ["tmux", "-S", str(folder / "tmux"), "-f", "/dev/null"]

    def open(self, size: tuple[int, int]) -> None:
        wide, tall = map(str, size)
        self._run("new-session", "-d", "-x", wide, "-y", tall, "env -u COLUMNS -u LINES PS1='$ ' sh")

    def resize(self, size: tuple[int, int]) -> None:
        wide, tall = map(str, size)
        self._run("resize-window", "-x", wide, "-y", tall)

    def type(self, *keys: str) -> None:
        self._run("send-keys", *keys)

    def lines(self) -> list[str]:
        return self._run("capture-pane", "-p").splitlines()

    def shows(self, *parts: str, without: str = "\0") -> str:
        """Waits for all of that text, and for the end of what it is to be without."""

        def screen() -> str:
            return "\n".join(self.lines())

        self.until(lambda: all(part in screen() for part in parts) and without not in screen(), parts)
        return screen()

    def until(self, happened: Callable[[], object], what: object) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"not on the screen: {what}\n" + "\n".join(self.lines())
            time.sleep(0.1)

    def close(self) -> None:
        subprocess.run([*self._tmux, "kill-server"], check=False)

    def _run(self, *words: str) -> str:
        return subprocess.run([*self._tmux, *words], check=True, capture_output=True, text=True).stdout


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Terminal]:
    terminal = Terminal(tmp_path)
    yield terminal
    terminal.close()


def step_of(screen: str) -> int:
    found = re.search(r"  step ([\d,]+)  ", screen)
    return int(found[1].replace(",", "")) if found else 0


@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["80x24", "200x60"])
def test_it_goes_on_when_the_node_that_it_asks_is_killed_and_leaves_the_terminal_as_it_was(
    tmp_path, terminal, size
):
    with cluster_of(3, tmp_path, pause_s=0.02) as cluster:
        terminal.open(size)
        address = cluster.nodes[2].last("joined")["address"]
        terminal.type(f"{sys.executable} -m chaosnet top {address}; echo ended with $?", "Enter")
        screen = terminal.shows("3 members", "recent events", "a     scheduler", "q quit")
        assert ("a - b" in screen) == (size is LARGE), "a large one has room for the links, too"
        terminal.type("l")
        terminal.shows("a - b")
        terminal.type("l")
        cluster.nodes[2].kill()
        before = step_of(terminal.shows("2 members", "c is lost"))
        terminal.until(lambda: step_of("\n".join(terminal.lines())) > before, "further steps")
        terminal.type("?")
        terminal.shows("any key closes it")
        terminal.type("x")
        terminal.shows("q quit", without="any key closes it")
        terminal.type("q")
        terminal.shows("ended with 0", f"top {address}", without="recent events")


def test_it_fits_whatever_size_its_terminal_gets(tmp_path, terminal):
    with cluster_of(2, tmp_path, pause_s=0.02) as cluster:
        terminal.open(SMALL)
        address = cluster.nodes[0].last("joined")["address"]
        terminal.type(f"{sys.executable} -m chaosnet top {address}", "Enter")
        terminal.shows("2 members", "q quit", without="a - b")
        terminal.resize(LARGE)
        terminal.shows("2 members", "q quit", "a - b", "recent events")
        terminal.resize(SMALL)
        terminal.shows("2 members", "q quit", "recent events", without="a - b")
        assert terminal.lines()[-1].lstrip().startswith("q quit"), "its last line is the last of the terminal"
