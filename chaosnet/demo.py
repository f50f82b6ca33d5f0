"""`chaosnet demo`: a cluster on this machine that loses and gains nodes and links while it trains.

Starts four nodes as processes of their own (demo_digits.py), and does six things to them, one after the
other. What it reports is computed from what the nodes wrote down about each step (demo_report.py).
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import itertools
import json
import platform
import signal
import socket
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import networkx as nx
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from . import client, dashboard
from . import demo_report as report
from .demo_report import Happening, NodeLog
from .node_processes import NodeProcess, end_all, lines_of, run_command, run_folder, sigterm_as_ctrl_c
from .protocols.errors import ChaosnetError, PeerUnreachable

FOUNDERS = 4
MIN_STEPS = 600  # At least, and until all has happened.
PAUSE_S = 0.02  # Per step, so that a person can watch.
CALM_STEPS = 20  # Steps that all nodes make in peace before the next thing happens,
CALM_S = 1.8  # and at least this long, so that it can be seen.
PATIENCE_S = 45.0  # For each thing to be over; a demo that hangs is worse than one that fails.
POLL_EVERY_S = 0.25
LAST_EPOCHS_S = 2.0
PLAIN_WIDTH = 110  # Of what goes to a file or a pipe.


class DemoFailed(ChaosnetError):
    """A promise was broken, or a node did what it should not."""


class Node(NodeProcess):
    """One process, and what it writes down."""

    def __init__(self, name: str, address: str, out: Path, command: list[str]) -> None:
        self.name, self.address = name, address
        self.log = NodeLog(name)
        self.fate = ""  # What the demo did to it; "" for a survivor.
        super().__init__(name, out, self.log.add, command)

    @property
    def step(self) -> int:
        return self.log.steps[-1].step if self.log.steps else 0


class Stage:
    """The processes and the screen. `tick` keeps both up to date; leaving the block ends every process."""

    def __init__(self, out: Path, seed: int) -> None:
        self.out, self.seed = out, seed
        self.nodes: dict[str, Node] = {}
        self.happenings: list[Happening] = []
        self.lines: list[tuple[float, str]] = []
        self.status: dict[str, Any] = {}
        self.status_s = 0.0  # When it was asked for.
        self.handling_ms: dict[str, list[float]] = {}
        self.addresses = [f"127.0.0.1:{port}" for port in _free_ports(FOUNDERS + 1)]
        self.recovery_s: dict[str, float] = {}  # By kind of happening.
        self.started_s = time.time()
        self._asked_s = 0.0
        self._turn = itertools.count()
        self.console = Console(highlight=False)
        if not self.console.is_terminal:
            self.console.width = PLAIN_WIDTH
        self.live: Live | None = None

    def __enter__(self) -> Stage:
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

    def start(self, index: int, join: list[str]) -> Node:
        """Start a node as a user would: `chaosnet run --listen ... --join ... demo_digits.py`."""
        name, address = f"node-{index + 1}", self.addresses[index]
        options = ["--name", name, "--listen", address, *(["--join", ",".join(join)] if join else [])]
        command = run_command(Path(__file__).with_name("demo_digits.py"), *options)
        command += ["--log", str(lines_of(self.out, name)), "--until", str(self.enough)]
        command += ["--steps", str(MIN_STEPS), "--pause", str(PAUSE_S), "--seed", str(self.seed)]
        node = self.nodes[name] = Node(name, address, self.out, command)
        return node

    @property
    def enough(self) -> Path:
        return self.out / "enough"

    def alive(self) -> list[Node]:
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
            self.status = client.status(asked[next(self._turn) % len(asked)].address, deadline_s=0.6)
        except PeerUnreachable:
            return False
        self.status_s = asked_s
        for name, values in self.status["handling_ms"].items():
            if len(values) >= len(self.handling_ms.get(name, [])):
                self.handling_ms[name] = values
        return True

    def wait(self, until: Callable[[], bool], what: str, patience_s: float = PATIENCE_S) -> None:
        """Let time pass. Raises: DemoFailed if it takes too long."""
        deadline_s = time.time() + patience_s
        while not until():
            if time.time() > deadline_s:
                raise DemoFailed(f"gave up after {patience_s:g} s of waiting until {what}")
            self.tick()

    def wait_until_calm(self) -> None:
        """Exactly the right members, and all of them have made a few steps since now."""
        since_s, goal = time.time(), max(node.step for node in self.alive()) + CALM_STEPS

        def calm() -> bool:
            names = {node.name for node in self.alive()}
            rows = self.status.get("members", [])
            active = {row["node"] for row in rows if row["state"] == "active"}
            standby = any(row["state"] == "standby" for row in rows)
            stepped = all(node.step >= goal for node in self.alive())
            late = time.time() - since_s >= CALM_S
            return self.status_s > since_s and active == names and not standby and stepped and late

        names = ", ".join(node.name for node in self.alive())
        self.wait(calm, f"{names} train in peace")

    # --- telling ---

    def happens(self, kind: str, node: str, text: str, time_s: float | None = None) -> Happening:
        """Note one of the six."""
        happening = Happening(kind, node, time.time() if time_s is None else time_s)
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
        scheduler = self.status.get("scheduler", "")
        rows = {row["node"]: row for row in self.status.get("members", [])}
        table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
        for name, width in {"node": 6, "role": 9, "state": 8}.items():  # It should not jump about,
            table.add_column(name, min_width=width)
        for name, width in {"step": 5, "loss": 6, "samples/s": 9}.items():  # nor exceed 80 columns.
            table.add_column(name, justify="right", min_width=width)
        table.add_column("neighbours")
        for node in self.nodes.values():
            table.add_row(*_cells(node, rows.get(node.name, {}), scheduler))
        lines = [Text.assemble((f"{since_s:6.1f} s  ", "dim"), text) for since_s, text in self.lines]
        head = (
            f"{len(self.alive())} nodes learn to read digits on this machine "
            f"(with a pause of {PAUSE_S * 1000:.0f} ms per step)"
        )
        return Group(Text(head, style="bold"), Text(), table, Text(), *lines)


def _cells(node: Node, row: dict[str, Any], scheduler: str) -> list[Text | str]:
    state, style = row.get("state", ""), dashboard.STYLE_BY_STATE.get(row.get("state", ""), "")
    if node.fate:
        state, style = node.fate, "red" if "kill" in node.fate else "magenta"
    elif not state or not node.log.joined:
        state, style = ("starting" if not state else "joining"), "yellow"
    role = "scheduler" if node.name == scheduler and not node.fate else "worker"
    steps, rate = node.log.steps, row.get("samples_per_s")
    return [
        Text(node.name, style="dim" if node.fate else "bold"),
        Text("" if node.fate else role, style="bold cyan" if role == "scheduler" else ""),
        Text(state, style=style),
        f"{node.step:,}" if steps else "",
        f"{steps[-1].loss:.4f}" if steps else "",
        f"{rate:,.0f}" if rate and not node.fate else "",
        "" if node.fate else ", ".join(row.get("neighbors", ())),
    ]


# --- the six things ---


def play(stage: Stage) -> dict[str, Any]:
    """All that happens. Returns: what is known of the join."""
    _start_four(stage)
    join = _scale_out(stage)
    removed = _disconnect_link(stage)
    _connect_link(stage, removed)
    _scale_in(stage)
    _kill(stage)
    _kill_scheduler(stage)
    _finish(stage)
    return join


def _start_four(stage: Stage) -> None:
    stage.say(f"{FOUNDERS} nodes start, each a process that pauses {PAUSE_S * 1e3:.0f} ms per step, to watch")
    for index in range(FOUNDERS):
        stage.start(index, join=stage.addresses[:1] if index else [])
    stage.wait(lambda: all(node.log.steps for node in stage.alive()), "all nodes have joined")
    stage.say(f"all {FOUNDERS} are members and train")
    stage.wait_until_calm()


def _scale_out(stage: Stage) -> dict[str, Any]:
    seeds = [node.address for node in stage.alive()][:2]
    old = [node.name for node in stage.alive()]
    node = stage.start(FOUNDERS, join=seeds)
    stage.say(f"{node.name} starts (Python and torch take a moment)")
    stage.wait(lambda: node.log.joined is not None and bool(node.log.steps), f"{node.name} has joined")
    joined = node.log.joined
    assert joined is not None
    asked_s = joined["time_s"] - joined["seconds"]
    received = sum(joined["bytes_by_source"].values())
    stage.happens(
        "scale-out",
        node.name,
        f"{node.name} joins: {joined['seconds']:.2f} s, {dashboard.size(received)} of state "
        f"from {' and '.join(sorted(joined['bytes_by_source']))}",
        asked_s,
    )
    stage.wait_until_calm()
    row = next(row for row in stage.status["members"] if row["node"] == node.name)
    bound_s = report.join_bound_s(row["state_bytes"], stage.status["links"], node.name)
    gap_s = report.longest_gap_s(stage.logs(), old, asked_s, joined["time_s"])
    return {
        "seconds": joined["seconds"],
        "bytes": received,
        "sources": joined["bytes_by_source"],
        "bound_seconds": bound_s,
        "ratio_to_bound": joined["seconds"] / bound_s if bound_s else None,
        "survivor_longest_gap_seconds": gap_s,
    }


def _disconnect_link(stage: Stage) -> tuple[str, str]:
    """A link whose end the overlay survives, between the nodes that have most."""
    graph = _overlay(stage)
    bridges = {frozenset(bridge) for bridge in nx.bridges(graph)}
    spare = [edge for edge in graph.edges if frozenset(edge) not in bridges]
    a, b = sorted(max(spare, key=lambda edge: (sum(graph.degree(node) for node in edge), sorted(edge))))
    happening = stage.happens("disconnect-link", f"{a} - {b}", f"the link {a} - {b} is to go")
    _change_link(stage, a, b, connect=False, happening=happening)
    return a, b


def _connect_link(stage: Stage, removed: tuple[str, str]) -> None:
    graph = _overlay(stage)
    absent = [edge for edge in nx.non_edges(graph) if set(edge) != set(removed)] or [removed]
    a, b = sorted(min(absent, key=lambda edge: (sum(graph.degree(node) for node in edge), sorted(edge))))
    happening = stage.happens("connect-link", f"{a} - {b}", f"a link {a} - {b} is to come")
    _change_link(stage, a, b, connect=True, happening=happening)


def _change_link(stage: Stage, a: str, b: str, connect: bool, happening: Happening) -> None:
    answer = client.change_link(stage.nodes[a].address, b, connect)
    if not answer.ok:
        raise DemoFailed(f"{happening.kind} {a} - {b}: {answer.text}")
    stage.say(f"   {answer.text}, {1e3 * (time.time() - happening.time_s):.0f} ms later")
    stage.wait_until_calm()


def _scale_in(stage: Stage) -> None:
    node = _worker(stage)
    stage.happens("scale-in", node.name, f"Ctrl+C for {node.name}")
    node.fate = "left"
    node.process.send_signal(signal.SIGINT)
    stage.wait(lambda: node.process.poll() is not None, f"{node.name} has left")
    said = node.last_words().removeprefix("[chaosnet] ")
    stage.say(f"   {said.split(' steps with')[0]} steps; exit code {node.process.returncode}")
    stage.wait_until_calm()


def _kill(stage: Stage) -> None:
    node = _worker(stage)
    stage.happens("kill", node.name, f"kill -9 for {node.name}")
    _kill_and_tell(stage, node)


def _kill_scheduler(stage: Stage) -> None:
    stage.wait(stage.poll, "the scheduler says who it is")
    node = stage.nodes[stage.status["scheduler"]]
    stage.happens("kill-scheduler", node.name, f"kill -9 for {node.name}, which is the scheduler")
    _kill_and_tell(stage, node)
    stage.say(f"   {stage.status['scheduler']} was elected scheduler")


def _kill_and_tell(stage: Stage, node: Node) -> None:
    happening, node.fate = stage.happenings[-1], "killed"
    node.process.kill()
    stage.wait_until_calm()
    others = [each.name for each in stage.alive()]
    took_s = stage.recovery_s[happening.kind] = report.recovery_s(stage.logs(), others, happening.time_s)
    stage.say(f"   the others' next common step came {took_s:.2f} s later")


def _finish(stage: Stage) -> None:
    left = max(MIN_STEPS - max(node.step for node in stage.alive()), 0)
    names = " and ".join(node.name for node in stage.alive())
    stage.say(f"{names} train on" + (f" to step {MIN_STEPS}" if left else ""))
    until_s = time.time() + LAST_EPOCHS_S
    stage.wait(lambda: time.time() > until_s, "the last epochs are done")
    stage.enough.touch()
    stage.wait(lambda: all(node.process.poll() is not None for node in stage.alive()), "all have finished")
    for node in stage.nodes.values():
        node.read()


def _worker(stage: Stage) -> Node:
    """The second oldest that lives: no scheduler."""
    return next(node for node in stage.alive()[1:] if node.name != stage.status["scheduler"])


def _overlay(stage: Stage) -> nx.Graph:
    stage.wait(stage.poll, "the scheduler shows the links")
    active = [row for row in stage.status["members"] if row["state"] == "active"]
    graph = nx.Graph()
    graph.add_edges_from((row["node"], other) for row in active for other in row["neighbors"])
    return graph


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


# --- the summary ---


def summarize(stage: Stage, join: dict[str, Any]) -> dict[str, Any]:
    """What summary.json holds: all that was measured, and what follows from it."""
    survivors, logs = stage.alive(), stage.logs()
    found = report.audit(logs, killed=[node.name for node in stage.nodes.values() if "kill" in node.fate])
    accuracies = {node.name: node.log.final["accuracy"] for node in survivors if node.log.final}
    first_s = min(log.steps[0].time_s for log in logs if log.steps)
    names = [node.name for node in survivors]
    return {
        "accuracy": min(accuracies.values(), default=0.0) if len(accuracies) == len(survivors) else 0.0,
        "accuracy_by_node": accuracies,
        "events": [
            {"kind": each.kind, "node": each.node, "time_s": round(each.time_s - first_s, 3)}
            for each in stage.happenings
        ],
        "steps": found.last,
        "steps_lost": len(found.missing),
        "steps_applied_twice": len(found.repeated),
        "steps_disagreeing": len(found.disagreeing),
        "replicas_identical": report.replicas_identical(node.log for node in survivors),
        "state_hash_by_node": {node.name: node.log.final["hash"] for node in survivors if node.log.final},
        "join": join,
        "recovery_seconds": {
            "kill": stage.recovery_s["kill"],
            "scheduler": stage.recovery_s["kill-scheduler"],
        },
        "longest_gap_seconds": {
            each.kind: report.longest_gap_s(logs, names, each.time_s, each.time_s + report.GAP_WINDOW_S)
            for each in stage.happenings
        },
        "event_handling_ms": _handling_ms(stage),
        "exit_codes": {n.name: n.process.returncode for n in stage.nodes.values() if "kill" not in n.fate},
        "pause_seconds_per_step": PAUSE_S,
        "seconds": round(time.time() - stage.started_s, 1),
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in ("chaosnet", "torch", "pyzmq")},
        },
        "seed": stage.seed,
    }


def _handling_ms(stage: Stage) -> dict[str, float | None]:
    """Median time that the scheduler's core took, by the paper's names (Table I).

    Its notices have the time of the very message that started the negotiation; `handling_ms` also has those
    of repetitions, and is used only if a notice was lost.
    """
    names = {
        "scale-in": "ScaleInRequest",
        "connect-link": "ConnectLinkRequest",
        "disconnect-link": "DisconnectLinkRequest",
    }
    medians: dict[str, float | None] = {}
    for name, message in names.items():
        notices = [each["handling_ms"] for each in stage.status["events"] if each["kind"] == name]
        values = notices or stage.handling_ms.get(message, [])
        medians[name] = statistics.median(values) if values else None
    return medians


def _show_summary(console: Console, summary: dict[str, Any], out: Path) -> None:
    join, handling = summary["join"], summary["event_handling_ms"]
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    rows = {
        "held-out accuracy": f"{summary['accuracy']:.2%} (the lowest of the survivors)",
        "steps": f"{summary['steps']}: {summary['steps_lost']} lost, {summary['steps_applied_twice']} twice",
        "survivors' states": "identical to the bit" if summary["replicas_identical"] else "DIFFERENT",
        "join": f"{join['seconds']:.2f} s for {dashboard.size(join['bytes'])}; meanwhile the others' "
        f"longest gap between two steps was {join['survivor_longest_gap_seconds']:.2f} s",
        "kill -9 to next step": f"{summary['recovery_seconds']['kill']:.2f} s",
        "same, of the scheduler": f"{summary['recovery_seconds']['scheduler']:.2f} s",
        "scheduler's time per event": ", ".join(
            f"{name} {value:.2f} ms" for name, value in handling.items() if value is not None
        ),
        "took": f"{summary['seconds']:.0f} s",
        "written": f"{out / 'summary.json'}, {out / 'demo.png'}, and a log of each node",
    }
    for name, value in rows.items():
        table.add_row(Text(name, style="bold"), value)
    console.print()
    console.print(table)


def run_demo(out: Path, seed: int) -> None:
    """Play, sum up, draw. Raises: DemoFailed if a promise was broken."""
    run_folder(out)
    with sigterm_as_ctrl_c(), Stage(out, seed) as stage:
        join = play(stage)
        summary = summarize(stage, join)
    stage.enough.unlink(missing_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = "One model, nodes that come and go: chaosnet demo"
    report.draw(out / "demo.png", stage.logs(), stage.happenings, title)
    _show_summary(stage.console, summary, out)
    if broken := report.broken_promises(summary):
        raise DemoFailed(f"demo: {'; '.join(broken)} (the nodes' logs are in {out})")
