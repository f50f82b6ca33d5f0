"""`chaosnet demo`: a cluster on this machine that loses and gains nodes and links while it trains.

Starts four nodes as processes of their own (demo_digits.py, on the stage of demo_stage.py), and does six things to
them, one after the other. What it reports is computed from what the nodes wrote down about each step
(demo_report.py).
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import signal
import statistics
import time
from pathlib import Path
from typing import Any

import networkx as nx
from rich.console import Console
from rich.table import Table
from rich.text import Text

from .. import client
from ..terminal import tables
from . import demo_report as report
from .demo_picture import draw
from .demo_report import Deed
from .demo_stage import FOUNDERS, MIN_STEPS, PAUSE_S, DemoFailed, DemoNode, DemoStage
from .node_processes import run_folder, sigterm_as_ctrl_c

LAST_EPOCHS_S = 2.0


# --- the six things ---


def play(stage: DemoStage) -> dict[str, Any]:
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


def _start_four(stage: DemoStage) -> None:
    stage.say(f"{FOUNDERS} nodes start, each a process that pauses {PAUSE_S * 1e3:.0f} ms per step, to watch")
    for index in range(FOUNDERS):
        stage.start(index, join=stage.addresses[:1] if index else [])
    stage.wait(lambda: all(node.log.steps for node in stage.alive()), "all nodes have joined")
    stage.say(f"all {FOUNDERS} are members and train")
    stage.wait_until_calm()


def _scale_out(stage: DemoStage) -> dict[str, Any]:
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
        f"{node.name} joins: {joined['seconds']:.2f} s, {tables.size(received)} of state "
        f"from {' and '.join(sorted(joined['bytes_by_source']))}",
        asked_s,
    )
    stage.wait_until_calm()
    row = next(row for row in stage.status.members if row.node == node.name)
    bound_s = report.join_bound_s(row.state_bytes, stage.status.links, node.name)
    gap_s = report.longest_gap_s(stage.logs(), old, asked_s, joined["time_s"])
    return {
        "seconds": joined["seconds"],
        "bytes": received,
        "sources": joined["bytes_by_source"],
        "bound_seconds": bound_s,
        "ratio_to_bound": joined["seconds"] / bound_s if bound_s else None,
        "survivor_longest_gap_seconds": gap_s,
    }


def _disconnect_link(stage: DemoStage) -> tuple[str, str]:
    """A link whose end the overlay survives, between the nodes that have most."""
    graph = _overlay(stage)
    bridges = {frozenset(bridge) for bridge in nx.bridges(graph)}
    spare = [edge for edge in graph.edges if frozenset(edge) not in bridges]
    a, b = sorted(max(spare, key=lambda edge: (sum(graph.degree(node) for node in edge), sorted(edge))))
    happening = stage.happens("disconnect-link", f"{a} - {b}", f"the link {a} - {b} is to go")
    _change_link(stage, a, b, connect=False, happening=happening)
    return a, b


def _connect_link(stage: DemoStage, removed: tuple[str, str]) -> None:
    graph = _overlay(stage)
    absent = [edge for edge in nx.non_edges(graph) if set(edge) != set(removed)] or [removed]
    a, b = sorted(min(absent, key=lambda edge: (sum(graph.degree(node) for node in edge), sorted(edge))))
    happening = stage.happens("connect-link", f"{a} - {b}", f"a link {a} - {b} is to come")
    _change_link(stage, a, b, connect=True, happening=happening)


def _change_link(stage: DemoStage, a: str, b: str, connect: bool, happening: Deed) -> None:
    answer = client.change_link(stage.nodes[a].address, b, connect)
    if not answer.ok:
        raise DemoFailed(f"{happening.kind} {a} - {b}: {answer.text}")
    stage.say(f"   {answer.text}, {1e3 * (time.time() - happening.time_s):.0f} ms later")
    stage.wait_until_calm()


def _scale_in(stage: DemoStage) -> None:
    node = _worker(stage)
    stage.happens("scale-in", node.name, f"Ctrl+C for {node.name}")
    node.fate = "left"
    node.process.send_signal(signal.SIGINT)
    stage.wait(lambda: node.process.poll() is not None, f"{node.name} has left")
    said = node.last_words(f"{node.name} left after").removeprefix("[chaosnet] ")
    stage.say(f"   {said}; exit code {node.process.returncode}")
    stage.wait_until_calm()


def _kill(stage: DemoStage) -> None:
    node = _worker(stage)
    stage.happens("kill", node.name, f"kill -9 for {node.name}")
    _kill_and_tell(stage, node)


def _kill_scheduler(stage: DemoStage) -> None:
    stage.wait(stage.poll, "the scheduler says who it is")
    node = stage.nodes[stage.status.scheduler]
    stage.happens("kill-scheduler", node.name, f"kill -9 for {node.name}, which is the scheduler")
    _kill_and_tell(stage, node)
    stage.say(f"   {stage.status.scheduler} was elected scheduler")


def _kill_and_tell(stage: DemoStage, node: DemoNode) -> None:
    happening, node.fate = stage.happenings[-1], "killed"
    node.process.kill()
    stage.wait_until_calm()
    others = [each.name for each in stage.alive()]
    took_s = stage.recovery_s[happening.kind] = report.recovery_s(stage.logs(), others, happening.time_s)
    stage.say(f"   the others' next common step came {took_s:.2f} s later")


def _finish(stage: DemoStage) -> None:
    left = max(MIN_STEPS - max(node.step for node in stage.alive()), 0)
    names = " and ".join(node.name for node in stage.alive())
    stage.say(f"{names} train on" + (f" to step {MIN_STEPS}" if left else ""))
    until_s = time.time() + LAST_EPOCHS_S
    stage.wait(lambda: time.time() > until_s, "the last epochs are done")
    stage.enough.touch()
    stage.wait(lambda: all(node.process.poll() is not None for node in stage.alive()), "all have finished")
    for node in stage.nodes.values():
        node.read()


def _worker(stage: DemoStage) -> DemoNode:
    """The second oldest that lives: no scheduler."""
    return next(node for node in stage.alive()[1:] if node.name != stage.status.scheduler)


def _overlay(stage: DemoStage) -> nx.Graph:
    stage.wait(stage.poll, "the scheduler shows the links")
    graph = nx.Graph()
    graph.add_edges_from((row.node, other) for row in stage.status.active for other in row.neighbors)
    return graph


# --- the summary ---


def summarize(stage: DemoStage, join: dict[str, Any]) -> dict[str, Any]:
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


def _handling_ms(stage: DemoStage) -> dict[str, float | None]:
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
        notices = [each.handling_ms for each in stage.status.events if each.kind == name]
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
        "join": f"{join['seconds']:.2f} s for {tables.size(join['bytes'])}; meanwhile the others' "
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
    with sigterm_as_ctrl_c(), DemoStage(out, seed) as stage:
        join = play(stage)
        summary = summarize(stage, join)
    stage.enough.unlink(missing_ok=True)
    (out / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    title = "One model, nodes that come and go: chaosnet demo"
    draw(out / "demo.png", stage.logs(), stage.happenings, title)
    _show_summary(stage.console, summary, out)
    if broken := report.broken_promises(summary):
        raise DemoFailed(f"demo: {'; '.join(broken)} (the nodes' logs are in {out})")
