"""A worker on each node of a testbed, and what they print: for tests over links that are shaped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from chaosnet.netem.backend import Backend
from chaosnet.netem.netns import Netns
from chaosnet.netem.relay import RelayTestbed
from chaosnet.netem.topology import Topology

HAS_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None
NAMESPACES = pytest.param(
    Netns, marks=pytest.mark.skipif(not HAS_NAMESPACES, reason="namespaces need root and iproute2")
)
both_backends = pytest.mark.parametrize(
    "backend", [RelayTestbed, NAMESPACES], ids=lambda backend: backend.kind
)


class Run:
    """Each worker tells JSON, a line a record; what else it says is kept for the story of a failure."""

    def __init__(self, testbed: Backend, folder: Path) -> None:
        self.testbed, self.folder = testbed, folder
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, node: str, worker: Path, **env: str) -> None:
        with (self.folder / f"{node}.out").open("wb") as out, (self.folder / f"{node}.err").open("wb") as err:
            self.processes[node] = self.testbed.start(
                node,
                [sys.executable, str(worker)],
                env={"OMP_NUM_THREADS": "1", **env},
                stdout=out,
                stderr=err,
            )

    def told(self, node: str) -> list[dict[str, Any]]:
        lines = (self.folder / f"{node}.out").read_text().splitlines(keepends=True)
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def until(self, condition: Callable[[], bool], what: str, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
        while not condition():
            assert time.monotonic() < deadline_s, f"not in {patience_s:g} s: {what}\n{self.story()}"
            time.sleep(0.05)

    def until_told(self, count: int, nodes: Sequence[str], patience_s: float) -> None:
        """Until each of them has told so many records."""

        def told_enough() -> bool:
            return all(len(self.told(node)) >= count for node in nodes)

        self.until(told_enough, f"{count} records of {', '.join(nodes)}", patience_s)

    def stop(self) -> None:
        """As by Ctrl+C on each; all end well."""
        for process in self.processes.values():
            process.send_signal(signal.SIGINT)
        codes = {node: process.wait(60) for node, process in self.processes.items()}
        assert set(codes.values()) == {0}, f"{codes}\n{self.story()}"

    def hashes(self) -> list[set[str]]:
        """Of the states after the same step, for each step in which several nodes told one."""
        found: dict[int, list[str]] = {}
        for node in self.processes:
            for record in self.told(node):
                if "hash" in record:
                    found.setdefault(record["step"], []).append(record["hash"])
        return [set(each) for each in found.values() if len(each) > 1]

    def story(self) -> str:
        return "\n".join(
            f"--- {node}\n{(self.folder / f'{node}.err').read_text()[-3000:]}" for node in self.processes
        )


@contextmanager
def overlay(
    backend: Callable[..., Backend],
    topology: Topology,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> Iterator[Run]:
    """A testbed of this test's own in `folder`, which workers have as their working directory."""
    monkeypatch.setenv("CHAOSNET_TESTBEDS", str(folder / "up"))
    monkeypatch.setenv("CHAOSNET_STATE_DIR", str(folder / "state"))
    monkeypatch.chdir(folder)
    testbed = backend(f"t{os.getpid()}", topology, **options)
    testbed.up(topology)
    try:
        yield Run(testbed, folder)
    finally:
        testbed.down()
