"""Scripts as users write them, in processes of their own, and what they print."""

from __future__ import annotations

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

ZYGOTE = Path(__file__).parent / "zygote.py"
PATIENCE_S = 30.0


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
    """All of a test. `env` is for all; the first that was started founds, the others join it."""

    def __init__(self, folder: Path, **env: str) -> None:
        self.folder, self.env = folder, env
        self.started: list[Script] = []
        self._by_pid: dict[int, Script] = {}
        self._zygote = subprocess.Popen(
            [sys.executable, "-P", str(ZYGOTE)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=folder
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(
        self, name: str, text: str, *args: str, by_command: bool = False, join: bool = True, **env: str
    ) -> Script:
        """As `python SCRIPT`, or as `chaosnet run SCRIPT`."""
        script = Script(self, name)
        env = {"CHAOSNET_NAME": name, "OMP_NUM_THREADS": "1", **self.env, **env}
        if self.started and join:
            env["CHAOSNET_JOIN"] = self.started[0].address()
        path = self.folder / f"{name}.py"
        path.write_text(text)
        self.started.append(script)
        order = {"name": name, "script": str(path), "args": args, "env": env, "log": str(script.log),
                 "by_command": by_command}  # fmt: skip
        assert self._zygote.stdin is not None
        self._zygote.stdin.write(json.dumps(order).encode() + b"\n")
        self._zygote.stdin.flush()
        self.until(lambda: script.pid, f"{name} is started")
        return script

    def until(self, happened: Callable[[], object], what: str) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        while not happened():
            assert time.monotonic() < deadline_s, f"not in {PATIENCE_S:g} s: {what}\n{self.story()}"
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
        assert self._zygote.stdin is not None
        self._zygote.stdin.close()
        self._zygote.wait(PATIENCE_S)
        self._reader.join(PATIENCE_S)

    def _read(self) -> None:
        assert self._zygote.stdout is not None
        for line in self._zygote.stdout:
            told = json.loads(line)
            if "name" in told:
                script = next(each for each in self.started if each.name == told["name"])
                self._by_pid[told["pid"]] = script
                script.pid = told["pid"]
            else:
                self._by_pid[told["pid"]].code = told["code"]


@contextmanager
def scripts_in(folder: Path, **env: str) -> Iterator[Scripts]:
    """All processes are gone at the end, whatever happens."""
    scripts = Scripts(folder, **env)
    try:
        yield scripts
    finally:
        scripts.close()
