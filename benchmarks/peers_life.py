"""One cluster of `chaosnet bench peers`: its processes, what is done to it, and how long the others take to go on."""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import click

from .join import extra_gap
from .machines import Machines, free_port
from .peers_systems import LOG_LINES, PeerSystem

WORKERS = Path(__file__).parent / "peers_workers"
START_PATIENCE_S = 180.0  # Until all members train with each other.
STEPS_BEFORE = 5  # That each has made with others before anything is measured.
LINE_LETTERS = 240  # Of a line of a log, shown.
LIGHTHOUSE_PORT = 29510
COORDINATOR = "coordinator"  # A machine beside the members'.


@dataclass(frozen=True)
class LifeSettings:
    """Of all lives."""

    mb: float  # Of parameters.
    pause_s: float  # Of a forward pass.
    members: int  # Before a join.
    patience_s: float


class TimeOrWhy(NamedTuple):
    """Seconds; or None, and why there is no number, in a word or two."""

    seconds: float | None
    why: str = ""


class Unsettled(Exception):
    """A cluster that does not begin to train, or a worker that ends; the text has the last lines of its log."""


class WorkerStep(NamedTuple):
    """One that a worker has completed."""

    number: int
    at_s: float
    members: int  # Whose gradients were in it.


class WorkerProgram:
    """A program on a machine; what it says is kept."""

    def __init__(
        self, machines: Machines, name: str, command: Sequence[str], folder: Path, heard: threading.Condition
    ) -> None:
        self.name, self._heard = name, heard
        self.log = folder / f"{name}.log"
        self.said: dict[str, Any] = {}
        self.steps: list[WorkerStep] = []
        env = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHFT_LIGHTHOUSE": "", **machines.variables(name)}
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                [*machines.prefix(name), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log,
                env=env, start_new_session=True, cwd=folder,
            )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with suppress(json.JSONDecodeError), self._heard:
                self._take(json.loads(line))
        self._process.wait()
        with self._heard:
            self._heard.notify_all()

    def _take(self, what: dict[str, Any]) -> None:
        if "step" in what:
            self.steps.append(WorkerStep(what["step"], what["at_s"], what["members"]))
        else:
            self.said |= what
        self._heard.notify_all()

    def begin(self, join: Any) -> None:
        """Tell it to join, or with None to be the first."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # Who waits for it sees that it has ended.
            self._process.stdin.write(json.dumps({"join": join}).encode() + b"\n")
            self._process.stdin.flush()

    @property
    def ended(self) -> bool:
        return self._process.poll() is not None

    def signal(self, number: signal.Signals) -> None:
        """To it and all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def kill(self) -> None:
        """Now, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self._process.wait()

    def last_words(self) -> str:
        """The end of its log."""
        lines = self.log.read_text(errors="replace").strip().splitlines()[-LOG_LINES:]
        return "\n".join(f"    {line[:LINE_LETTERS]}" for line in lines) or "    (its log is empty)"


class SystemLife:
    """One cluster of one system, from its start until it is killed."""

    def __init__(
        self, system: PeerSystem, python: Path, machines: Machines, settings: LifeSettings, folder: Path
    ) -> None:
        self.system, self.python, self.machines, self.settings, self.folder = (
            system,
            python,
            machines,
            settings,
            folder,
        )
        self.heard = threading.Condition()
        self.workers: dict[str, WorkerProgram] = {}
        self.lighthouse: WorkerProgram | None = None

    # --- the beginning ---

    def begin(self) -> None:
        """Until all members have made some steps together. Raises: Unsettled."""
        join: Any = None
        if self.system.lighthouse:
            join = self._start_lighthouse()
        for name in members(self.settings.members):
            self.start(name)
        first, *others = self.workers.values()
        self.until(lambda: "ready" in first.said, START_PATIENCE_S, "to load")
        first.begin(join)
        self.until(lambda: "address" in first.said, START_PATIENCE_S, "the first to begin")
        for each in others:
            self.until(lambda each=each: "ready" in each.said, START_PATIENCE_S, "to load")  # type: ignore[misc]
            each.begin(first.said["address"])
        self.until(self._together, START_PATIENCE_S, "all to train together")

    def start(self, name: str) -> WorkerProgram:
        """A worker, which waits once it has loaded."""
        told = {
            "name": name, "address": self.machines.address(name), "mb": self.settings.mb,
            "pause_s": self.settings.pause_s, "members": self.settings.members,
        }  # fmt: skip
        command = [str(self.python), str(WORKERS / f"with_{self.system.name}.py"), json.dumps(told)]
        self.workers[name] = WorkerProgram(self.machines, name, command, self.folder, self.heard)
        return self.workers[name]

    def _start_lighthouse(self) -> str:
        program, *arguments = self.system.lighthouse
        address = self.machines.address(COORDINATOR)
        at = f"{address}:{LIGHTHOUSE_PORT if self.machines.prefix(COORDINATOR) else free_port()}"
        command = [str(self.python.parent / program), *arguments, "--bind", at]
        self.lighthouse = WorkerProgram(self.machines, COORDINATOR, command, self.folder, self.heard)
        return f"http://{at}"

    def _together(self) -> bool:
        """All have made some steps with others, and the last ones were of all."""
        return all(
            len(shared(each.steps)) >= STEPS_BEFORE and each.steps[-1].members == len(self.workers)
            for each in self.workers.values()
        )

    # --- what happens to it ---

    def join(self) -> tuple[TimeOrWhy, TimeOrWhy]:
        """One more. Returns: the join, and the gap of the others."""
        joiner = self.start("joiner")
        old = [each for each in self.workers.values() if each is not joiner]
        self.until(lambda: "ready" in joiner.said, START_PATIENCE_S, "to load")
        self._after_a_step(old[0])
        self.workers.pop("joiner")
        joiner.begin(old[0].said["address"])
        try:
            in_time = self._wait(lambda: joiner.ended or bool(shared(joiner.steps)), self.settings.patience_s)
            if joiner.ended or not in_time:
                self._show(joiner)
                why = TimeOrWhy(None, "ended" if joiner.ended else self._beyond)
                return why, why
            called_s, first_s = joiner.said["called_s"], shared(joiner.steps)[0].at_s
            if not self._wait(
                lambda: all(each.steps[-1].at_s >= first_s for each in old), self.settings.patience_s
            ):
                return TimeOrWhy(first_s - called_s), TimeOrWhy(None, self._beyond)
            gaps = [extra_gap([step.at_s for step in each.steps], called_s, first_s)[0] for each in old]
            return TimeOrWhy(first_s - called_s), TimeOrWhy(max(gaps))
        finally:
            self.workers["joiner"] = joiner

    def fault(self, event: str) -> TimeOrWhy:
        """Something happens to one of them right after a step. Returns: when the others had made the next one."""
        victim = self._victim(event)
        survivors = [each for each in self.workers.values() if each is not victim and not each.ended]
        last = self._after_a_step(survivors[0])
        at_s = time.monotonic()
        victim.signal(signal.SIGSTOP if event == "stop" else signal.SIGKILL)

        def next_steps() -> list[float]:
            found = [
                [step.at_s for step in shared(each.steps) if step.number > last.number] for each in survivors
            ]
            return [steps[0] for steps in found if steps]

        def over() -> bool:
            return len(next_steps()) == len(survivors) or any(each.ended for each in survivors)

        in_time = self._wait(over, self.settings.patience_s)
        for each in survivors:
            if each.ended:
                self._show(each)
                return TimeOrWhy(None, "ended")
        return TimeOrWhy(max(next_steps()) - at_s) if in_time else TimeOrWhy(None, self._beyond)

    def _victim(self, event: str) -> WorkerProgram:
        if event == "coordinator":
            leads = [each for each in self.workers.values() if each.said.get("leads")]
            return self.lighthouse or leads[0]
        return next(
            each for name, each in self.workers.items() if name != "joiner" and not each.said.get("leads")
        )

    @property
    def _beyond(self) -> str:
        return f"> {self.settings.patience_s:g}"

    # --- waiting ---

    def until(self, true: Callable[[], bool], patience_s: float, what: str) -> None:
        """Raises: Unsettled if that takes too long, or a worker has ended."""
        ended = lambda: [each for each in self.workers.values() if each.ended]  # noqa: E731
        in_time = self._wait(lambda: true() or bool(ended()), patience_s)
        if each := next(iter(ended()), None):
            raise Unsettled(f"{self.system.name}: {each.name} has ended:\n{each.last_words()}")
        if not in_time:
            words = "\n".join(f"{each.name}:\n{each.last_words()}" for each in self.workers.values())
            raise Unsettled(f"{self.system.name}: {patience_s:g} s were not enough for {what}\n{words}")

    def _wait(self, true: Callable[[], bool], patience_s: float) -> bool:
        """Who ends says nothing, so it is looked at twice a second."""
        until_s = time.monotonic() + patience_s
        with self.heard:
            while not true():
                if time.monotonic() >= until_s:
                    return False
                self.heard.wait(0.5)
        return True

    def _after_a_step(self, of: WorkerProgram) -> WorkerStep:
        """Wait for the next that it completes, with others."""
        done = len(shared(of.steps))
        self.until(lambda: len(shared(of.steps)) > done, START_PATIENCE_S, "the next step")
        return shared(of.steps)[-1]

    def usual_s(self) -> float:
        """The median time from one step of the first member to the next."""
        first = next(iter(self.workers.values()))
        return statistics.median(b.at_s - a.at_s for a, b in pairwise(first.steps[-STEPS_BEFORE:]))

    def _show(self, each: WorkerProgram) -> None:
        click.echo(f"{self.system.name}: {each.name} says last:\n{each.last_words()}", err=True)

    def kill(self) -> None:
        """All of it."""
        for each in [*self.workers.values(), *([self.lighthouse] if self.lighthouse else [])]:
            each.kill()


def members(count: int) -> list[str]:
    """Their names."""
    return [f"n{index}" for index in range(count)]


def shared(steps: Sequence[WorkerStep]) -> list[WorkerStep]:
    """Those that were not made alone."""
    return [step for step in steps if step.members > 1]
