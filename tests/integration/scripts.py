"""Scripts as users write them, in processes of their own, and what they print."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ZYGOTE = Path(__file__).parent / "zygote.py"
PATIENCE_S = 30.0
START_PATIENCE_S = 180.0  # Importing torch takes long on a busy machine.


class Zygote:
    """The one process that all are forked from. It ends with the tests, and they with it.

    Args:
        preload: A package that all of them import, and that takes seconds.
    """

    def __init__(self, preload: str) -> None:
        command = [sys.executable, "-P", str(ZYGOTE), preload]
        # Unbuffered, print() writes word by word, and a notice of another thread gets in between.
        env = {key: value for key, value in os.environ.items() if key != "PYTHONUNBUFFERED"}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env)
        self._named: dict[str, Script] = {}
        self._by_pid: dict[int, Script] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(self, script: Script, order: dict[str, Any]) -> None:
        self._named[order["id"]] = script
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(order).encode() + b"\n")
        self.process.stdin.flush()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            told = json.loads(line)
            if "id" in told:
                script = self._named.pop(told["id"])
                self._by_pid[told["pid"]] = script
                script.pid = told["pid"]
            else:
                self._by_pid.pop(told["pid"]).code = told["code"]


zygote = functools.cache(Zygote)


class Script:
    """One that was started. It tells by printing lines."""

    def __init__(self, scripts: Scripts, name: str) -> None:
        self.scripts, self.name = scripts, name
        self.log = scripts.folder / f"{name}.log"
        self.pid = 0
        self.code: int | None = None

    def text(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def lines(self, word: str) -> list[list[str]]:
        """The lines that begin with `word`, without it, whole ones only."""
        lines = [line.split() for line in self.text().splitlines(keepends=True) if line.endswith("\n")]
        return [line[1:] for line in lines if line and line[0] == word]

    def says(self, part: str) -> str:
        """Wait until it has printed that. Returns: all that it has printed."""
        self.scripts.until(lambda: part in self.text(), f"{self.name} says {part!r}")
        return self.text()

    def address(self) -> str:
        """Where this founder can be joined."""
        return self.says("CHAOSNET_JOIN=").split("CHAOSNET_JOIN=")[1].split()[0]

    def ended_at_s(self, step: int) -> float:
        """Wait until it has ended that step or a later one, by its `step N AT_S ...` lines. Returns: when."""

        def later() -> list[float]:
            return [float(line[1]) for line in self.lines("step") if int(line[0]) >= step]

        self.scripts.until(later, f"{self.name} ends step {step}")
        return later()[0]

    def advance(self, steps: int = 3) -> None:
        count = len(self.lines("step")) + steps
        self.scripts.until(lambda: len(self.lines("step")) >= count, f"{self.name} does {steps} steps")

    def signal(self, number: signal.Signals, group: bool = False) -> float:
        """Returns: the time just before."""
        at_s = time.monotonic()
        (os.killpg if group else os.kill)(self.pid, number)
        return at_s

    def exit_code(self) -> int:
        self.scripts.until(lambda: self.code is not None, f"{self.name} ends")
        assert self.code is not None
        return self.code


class Scripts:
    """All of a test. `env` is for all; the first that was started founds, the others join it.

    Args:
        preload: See `Zygote`.
    """

    def __init__(self, folder: Path, preload: str = "", **env: str) -> None:
        self.folder, self.preload, self.env = folder, preload, env
        self.started: list[Script] = []

    def start(
        self,
        name: str,
        text: str,
        *args: str,
        by_command: bool = False,
        join: bool = True,
        log: str = "",
        **env: str,
    ) -> Script:
        """As `python SCRIPT`, or as `chaosnet run SCRIPT`. `log`: a file or terminal to print to."""
        script = Script(self, name)
        env = {"CHAOSNET_NAME": name, "OMP_NUM_THREADS": "1", **self.env, **env}
        if self.started and join:
            env["CHAOSNET_JOIN"] = self.started[0].address()
        path = self.folder / f"{name}.py"
        path.write_text(text)
        self.started.append(script)
        order = {"id": str(script.log), "script": str(path), "args": args, "env": env, "cwd": str(self.folder),
                 "log": log or str(script.log), "by_command": by_command}  # fmt: skip
        zygote(self.preload).start(script, order)
        self.until(lambda: script.pid, f"{name} is started", START_PATIENCE_S)
        return script

    def until(self, happened: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not happened():
            assert time.monotonic() < deadline_s, f"not in {patience_s:g} s: {what}\n{self.story()}"
            time.sleep(0.01)

    def story(self) -> str:
        return "\n".join(
            "\n".join([f"--- {each.name}: exit code {each.code}", *each.text().splitlines()[-25:]])
            for each in self.started
        )

    def close(self) -> None:
        """Kill what still runs."""
        for script in self.started:
            if script.pid and script.code is None:
                os.killpg(script.pid, signal.SIGKILL)


@contextmanager
def scripts_in(folder: Path, preload: str = "", **env: str) -> Iterator[Scripts]:
    """All processes are gone at the end, whatever happens."""
    scripts = Scripts(folder, preload, **env)
    try:
        yield scripts
    finally:
        scripts.close()
