"""Nodes as processes of their own that write JSON lines: started, read and ended by `chaosnet demo` and `soak`."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TextIO

from ..protocols.errors import ConfigError

JOIN_PATIENCE_S = 60.0  # Whom they join may still be importing torch.


class NodeProcess:
    """One process. What it writes down goes to `OUT/LABEL.jsonl`, what it prints to `OUT/LABEL.log`."""

    def __init__(
        self, label: str, out: Path, take: Callable[[str], None], command: list[str],
        start: Callable[..., subprocess.Popen[bytes]] = subprocess.Popen, **env: str,
    ) -> None:  # fmt: skip
        self.label, self._take = label, take
        self._lines, self._printed = lines_of(out, label), out / f"{label}.log"
        self._text: TextIO | None = None
        self._rest = ""
        environment = {
            "OMP_NUM_THREADS": "1",
            "CHAOSNET_JOIN_PATIENCE_S": f"{JOIN_PATIENCE_S:g}",
            "CHAOSNET_STATE_DIR": str(out / "members"),  # Of this run only.
            **env,
        }
        with self._printed.open("wb") as text:
            self.process = start(
                command,
                stdin=subprocess.PIPE,  # Its end tells the node that we are gone, however that came about.
                stdout=text,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                start_new_session=True,  # Ctrl+C in this terminal is for us, who end them.
            )

    def read(self) -> None:
        """Take in what was written since the last time."""
        if self._text is None and self._lines.exists():
            self._text = self._lines.open()
        if self._text is None:
            return
        *lines, self._rest = (self._rest + self._text.read()).split("\n")
        for line in lines:
            self._take(line)

    def close(self) -> None:
        """After the process has ended: read the rest, and let go of files."""
        self.read()
        for each in (self._text, self.process.stdin):
            if each is not None:
                each.close()
        self._text = None

    @property
    def runs(self) -> bool:
        return self.process.poll() is None

    def has_said(self, text: str) -> bool:
        """Has it printed that?"""
        return text in self._printed.read_text(errors="replace")

    def last_words(self, about: str = "") -> str:
        """The last line that it printed; `about`: of those with this in them."""
        lines = self._printed.read_text(errors="replace").strip().splitlines()
        return next((line for line in reversed(lines) if about in line), "it wrote nothing")


def run_folder(out: Path) -> None:
    """Make `out` an empty folder for a run. What an earlier run left there goes; of anything else, ConfigError."""
    mark = out / ".chaosnet-run"
    try:
        if out.exists() and not mark.exists() and any(out.iterdir()):
            raise ConfigError(
                f"--out: {str(out)!r} holds something else (expected a new folder, or one of an earlier run)"
            )
        if out.exists():
            shutil.rmtree(out)
        out.mkdir(parents=True)
        mark.touch()
    except OSError as error:
        raise ConfigError(f"--out: {str(out)!r} cannot be written: {error.strerror}") from None


def lines_of(out: Path, label: str) -> Path:
    """Where a node writes its lines."""
    return out / f"{label}.jsonl"


def run_command(script: Path, *options: str) -> list[str]:
    """As a user would start a node: `chaosnet run OPTIONS SCRIPT`."""
    return [sys.executable, "-m", "chaosnet", "run", *options, str(script)]


def wait_until(
    until: Callable[[], bool], what: str, patience_s: float, tick: Callable[[], None], failed: type[Exception]
) -> None:
    """Call `tick` until that is so. Raises: `failed`, with `what` was waited for, if it takes too long."""
    deadline_s = time.monotonic() + patience_s
    while not until():
        if time.monotonic() > deadline_s:
            raise failed(f"gave up after {patience_s:g} s of waiting until {what}")
        tick()


def end_all(nodes: Iterable[NodeProcess]) -> list[int]:
    """Kill what still runs. Returns: the process ids."""
    running = [node.process for node in nodes if node.runs]
    for process in running:
        process.kill()
    for process in running:
        process.wait()
    return [process.pid for process in running]


@contextlib.contextmanager
def sigterm_as_ctrl_c(*also: signal.Signals) -> Iterator[None]:
    """So that one who is told to end takes its nodes along. `also`: signals that say so, too, unless ignored."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    heard = (signal.SIGTERM, *(each for each in also if signal.getsignal(each) is not signal.SIG_IGN))
    before: dict[signal.Signals, Any] = {each: signal.signal(each, interrupt) for each in heard}
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)
