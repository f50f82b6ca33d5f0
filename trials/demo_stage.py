"""The demo's processes and its screen: starts the nodes, watches them, ends them, and tells what happens."""

from __future__ import annotations

import contextlib
import itertools
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from .. import client
from ..protocols.errors import ChaosnetError, PeerUnreachable
from ..protocols.status import MemberRow, Status
from ..terminal.console import console
from .demo_report import Deed, NodeLog
from .node_processes import NodeProcess, end_all, lines_of, run_command, wait_until

FOUNDERS = 4
MIN_STEPS = 600  # At least, and until all has happened.
PAUSE_S = 0.02  # Per step, so that a person can watch.
CALM_STEPS = 20  # Steps that all nodes make in peace before the next thing happens,
CALM_S = 1.8  # and at least this long, so that it can be seen.
PATIENCE_S = 45.0  # For each thing to be over; a demo that hangs is worse than one that fails.
POLL_EVERY_S = 0.25


class DemoFailed(ChaosnetError):
    """A promise was broken, or a node did what it should not."""


class DemoNode(NodeProcess):
    """One process, and what it writes down."""

    def __init__(self, name: str, address: str, out: Path, command: list[str]) -> None:
        self.name, self.address = name, address
        self.log = NodeLog(name)
        self.fate = ""  # What the demo did to it; "" for a survivor.
        super().__init__(name, out, self.log.add, command)

    @property
    def step(self) -> int:
        return self.log.steps[-1].step if self.log.steps else 0


STYLE_BY_STATE = {"active": "green", "standby": "yellow", "failed": "red", "left": "dim"}


class DemoStage:
    """The processes and the screen. `tick` keeps both up to date; leaving the block ends every process."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        self.nodes: dict[str, DemoNode] = {}
        self.happenings: list[Deed] = []
        self.lines: list[tuple[float, str]] = []
        self.newest: Status | None = None
        self.status_s = 0.0  # When it was asked for.
        self.handling_ms: dict[str, list[float]] = {}
        self.addresses = [f"127.0.0.1:{port}" for port in free_ports(FOUNDERS + 1)]
        self.recovery_s: dict[str, float] = {}  # By kind of happening.
        self.started_s = time.time()
        self._asked_s = 0.0
        self._turn = itertools.count()
        self.console = console()
        self.live: Live | None = None

    def __enter__(self) -> DemoStage:
        if self.console.is_terminal:
            self.live = Live(self._table(), console=self.console, auto_refresh=False)
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        if self.live:
            self.live.update(self._table(), refresh=True)
            self.live.stop()
        ended = end_all(self.nodes.values())
        if ended and kind is not None:
            self.console.print(f"ended {len(ended)} node processes: {', '.join(map(str, ended))}")

    # --- processes ---

    def start(self, index: int, join: list[str]) -> DemoNode:
        """Start a node as a user would: `chaosnet run --listen ... --join ... demo_digits.py`."""
        name, address = f"node-{index + 1}", self.addresses[index]
        options = ["--name", name, "--listen", address, *(["--join", ",".join(join)] if join else [])]
        command = run_command(Path(__file__).with_name("demo_digits.py"), *options)
        command += ["--log", str(lines_of(self.out, name)), "--until", str(self.enough)]
        command += ["--steps", str(MIN_STEPS), "--pause", str(PAUSE_S), "--seed", str(self.seed)]
        node = self.nodes[name] = DemoNode(name, address, self.out, command)
        return node

    @property
    def enough(self) -> Path:
        return self.out / "enough"

    def alive(self) -> list[DemoNode]:
        """The nodes that the demo has done nothing to."""
        return [node for node in self.nodes.values() if not node.fate]

    def logs(self) -> list[NodeLog]:
        return [node.log for node in self.nodes.values()]

    # --- time passes ---

    def tick(self) -> None:
        """Read what the nodes wrote, ask the cluster, draw."""
        for node in self.nodes.values():
            node.read()
            code = node.process.poll()
            if code is not None and not node.fate and not node.log.final:
                raise DemoFailed(f"{node.name} ended with exit code {code}: {node.last_words()}")
        if time.time() - self._asked_s >= POLL_EVERY_S:
            self.poll()
            if self.live:
                self.live.update(self._table(), refresh=True)
        time.sleep(0.02)

    def poll(self) -> bool:
        """Ask one node for the cluster's status; while a scheduler is being elected there is none."""
        asked = [node for node in self.alive() if node.log.steps and not node.log.final]
        self._asked_s = asked_s = time.time()
        if not asked:
            return False
        try:
            address = asked[next(self._turn) % len(asked)].address
            self.newest = found = client.status(address, deadline_s=0.6, history=True)
        except PeerUnreachable:
            return False
        self.status_s = asked_s
        for name, values in found.handling_ms.items():
            if len(values) >= len(self.handling_ms.get(name, [])):
                self.handling_ms[name] = list(values)
        return True

    @property
    def status(self) -> Status:
        """The newest. Only once a node has told one."""
        assert self.newest is not None
        return self.newest

    def wait(self, until: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Let time pass. Raises: DemoFailed if it takes too long."""
        wait_until(until, what, patience_s, self.tick, DemoFailed)

    def wait_until_calm(self) -> None:
        """Exactly the right members, and all of them have made a few steps since now."""
        since_s, goal = time.time(), max(node.step for node in self.alive()) + CALM_STEPS

        def calm() -> bool:
            names = {node.name for node in self.alive()}
            rows = self.newest.members if self.newest else ()
            active = {row.node for row in rows if row.state == "active"}
            standby = any(row.state == "standby" for row in rows)
            stepped = all(node.step >= goal for node in self.alive())
            late = time.time() - since_s >= CALM_S
            return self.status_s > since_s and active == names and not standby and stepped and late

        names = ", ".join(node.name for node in self.alive())
        self.wait(calm, f"{names} train in peace")

    # --- telling ---

    def happens(self, kind: str, node: str, text: str, time_s: float | None = None) -> Deed:
        """Note one of the six."""
        happening = Deed(kind, node, time.time() if time_s is None else time_s)
        self.happenings.append(happening)
        self.say(f"{len(self.happenings)}. {text}", happening.time_s)
        return happening

    def say(self, text: str, time_s: float | None = None) -> None:
        """A line below the table, or just a line."""
        since_s = (time.time() if time_s is None else time_s) - self.started_s
        self.lines.append((since_s, text))
        if self.live:
            self.live.update(self._table(), refresh=True)
        else:
            self.console.print(f"{since_s:5.1f} s  {text}", soft_wrap=True)

    def _table(self) -> Group:
        scheduler = self.newest.scheduler if self.newest else ""
        rows = {row.node: row for row in self.newest.members} if self.newest else {}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name, width in {"node": 6, "role": 9, "state": 8}.items():  # It should not jump about,
            table.add_column(name, min_width=width)
        for name, width in {"step": 5, "loss": 6, "samples/s": 9}.items():  # nor exceed 80 columns.
            table.add_column(name, justify="right", min_width=width)
        table.add_column("neighbours")
        for node in self.nodes.values():
            table.add_row(*_cells(node, rows.get(node.name), scheduler))
        lines = [Text.assemble((f"{since_s:6.1f} s  ", "dim"), text) for since_s, text in self.lines]
        head = (
            f"{len(self.alive())} nodes learn to read digits on this machine "
            f"(with a pause of {PAUSE_S * 1000:.0f} ms per step)"
        )
        return Group(Text(head, style="bold"), Text(), table, Text(), *lines)


def _cells(node: DemoNode, row: MemberRow | None, scheduler: str) -> list[Text | str]:
    state = row.state if row else ""
    style = STYLE_BY_STATE.get(state, "")
    if node.fate:
        state, style = node.fate, "red" if "kill" in node.fate else "magenta"
    elif not state or not node.log.joined:
        state, style = ("starting" if not state else "joining"), "yellow"
    role = "scheduler" if node.name == scheduler and not node.fate else "worker"
    steps, rate = node.log.steps, row.samples_per_s if row else 0.0
    return [
        Text(node.name, style="dim" if node.fate else "bold"),
        Text("" if node.fate else role, style="bold cyan" if role == "scheduler" else ""),
        Text(state, style=style),
        f"{node.step:,}" if steps else "",
        f"{steps[-1].loss:.4f}" if steps else "",
        f"{rate:,.0f}" if rate and not node.fate else "",
        "" if node.fate else ", ".join(row.neighbors if row else ()),
    ]


def free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
