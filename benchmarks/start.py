"""`chaosnet bench start`: machines that are started together, with states of real size (Linux, root).

Each node is a plain script: so many MB of parameters, all trained with Adam, so the state is three times that; a
sleep is the forward pass. Its model is there before it calls Trainer(). Measured is the time from the last of these
calls until the last node is a member.

The state has to get from the first node to all others, who can pass it on. Nothing does that faster than the least
maximum flow from the first node to any other (Edmonds), which is the bound; over loopback there is none. All nodes
are to be in within three times that and three steps, and within half a minute.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Any, NamedTuple

import click
import networkx as nx
import torch
from torch import nn

from ..netem.topology import GOODPUT, LinkSpec, Topology, mesh, random_overlay
from ..protocols.errors import ConfigError
from ..scheduler.sync_plan import POLICIES, SyncPolicy
from ..scheduler.trees import SpanningTree
from ..settings.groups import Cluster
from ..settings.options import OneOf, Several, Whole
from ..terminal.outputs import json_option, write_json
from ..trainer import Trainer
from .figures import table
from .machines import free_port
from .overlay import PATIENCE_S, Host, PlacedNode, namespaces, need_root, scaled
from .overlay import measured as rates

LIMIT_S = 30.0
TIMES_BOUND, STEPS = 3, 3
AFTER_STEPS = 6  # That the first node makes once all are in: what a step takes.
ADAM = 3  # Bytes of state to one of parameters.
LAYERS = 8
OF_FILE = ("overlay", "routes", "quarter")
CASES = ("mesh", "mesh-slow", *OF_FILE, "twelve", "loopback")


class StartCase(NamedTuple):
    """Machines and when they are started."""

    told: str
    mb: float  # Of parameters.
    pause_s: float  # Of a forward pass.
    topology: Topology | None = None  # None: all on loopback.
    routes: bool = True
    nodes: int = 0  # That are started; 0: all.
    apart_s: float = 0.0
    knows: bool = False  # Trees are planned for the rates that are set, and not for those that are measured.


@dataclass(slots=True)
class Found:
    """One start."""

    took_s: float
    bound_s: float
    step_s: float
    joins_s: dict[str, float]  # Of each node, from its own call.

    @property
    def limit_s(self) -> float:
        return min(TIMES_BOUND * self.bound_s + STEPS * self.step_s, LIMIT_S) if self.bound_s else LIMIT_S


def cases(file: Path | None) -> dict[str, StartCase]:
    """With the overlay of this file; without one, those that need none. Raises: TestbedError if it is none."""
    fast = mesh(4, LinkSpec(rate_mbit=1000.0))
    found = {
        "mesh": StartCase("3 of a mesh of 4 at 1 Gbit/s, 1 s apart", 45, 0.05, fast, nodes=3, apart_s=1.0),
        "mesh-slow": StartCase("the same, with longer steps", 45, 0.3, fast, nodes=3, apart_s=1.0),
    }
    if file is not None:
        overlay, name = Topology.read(file), file.name
        quarter = f"{name} at a quarter without routes, 0.5 s apart"
        found |= {
            "overlay": StartCase(f"{name} without routes, at once", 45, 0.3, overlay, routes=False),
            "routes": StartCase(f"{name}, at once", 45, 0.3, overlay),
            "quarter": StartCase(quarter, 20, 0.8, scaled(overlay, 0.25), routes=False, apart_s=0.5),
        }
    return found | {
        "twelve": StartCase("a random overlay of 12, at once", 45, 0.3, random_overlay(12, 0)),
        "loopback": StartCase("loopback, 8 at once", 45, 0.3, nodes=8),
    }


# --- machines ---


class OneMachine:
    """No links: loopback."""

    def __init__(self) -> None:
        self.first = f"127.0.0.1:{free_port()}"

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        """All but n0 join it."""
        env = {"CHAOSNET_NAME": node, "CHAOSNET_INSECURE": "1", **options.pop("env", {})}
        env |= {"CHAOSNET_LISTEN": self.first} if node == "n0" else {"CHAOSNET_JOIN": self.first}
        return subprocess.Popen(command, env={**os.environ, **env}, **options)


@contextmanager
def machines(case: StartCase) -> Iterator[tuple[Host, list[str]]]:
    """And the names of those that are started, the first that founds the cluster."""
    if case.topology is None:
        yield OneMachine(), [f"n{index}" for index in range(case.nodes)]
        return
    with namespaces(case.topology, routes=case.routes) as testbed:
        yield testbed, case.topology.nodes[: case.nodes or None]


def bound_s(case: StartCase) -> float:
    """For the state of the first to be with all that are started; 0 on loopback."""
    if case.topology is None:
        return 0.0
    started = case.topology.nodes[: case.nodes or None]
    flows = nx.DiGraph()
    for (a, b), spec in case.topology.links.items():
        if a in started and b in started:
            flows.add_edge(a, b, capacity=GOODPUT * spec.rate_from(True) * 1e6)
            flows.add_edge(b, a, capacity=GOODPUT * spec.rate_from(False) * 1e6)
    first, *others = started
    least_bps = min(nx.maximum_flow_value(flows, first, each) for each in others)
    return 8e6 * ADAM * case.mb / least_bps


@contextmanager
def quiet() -> Iterator[tuple[dict[str, str], IO[bytes]]]:
    """Nodes that know nothing of an earlier start, and whose notices are shown if this one fails."""
    with TemporaryDirectory(prefix="chaosnet-start-") as folder, TemporaryFile() as said:
        try:
            yield {"CHAOSNET_STATE_DIR": folder}, said
        except ConfigError:
            said.seek(0)
            click.echo(said.read().decode(errors="replace"), err=True)
            raise


# --- one start ---


@contextmanager
def started(case: StartCase) -> Iterator[tuple[Any, list[PlacedNode], dict[str, dict[str, float]]]]:
    """Where they are, the nodes, and of each when it called Trainer() and was a member.

    Raises: ConfigError if a node ends, or is in no cluster in time.
    """
    with machines(case) as (place, names), quiet() as (env, said), ExitStack() as stack:
        nodes = [PlacedNode(place, name, "start", stderr=said, env=env) for name in names]
        for node in nodes:
            stack.callback(node.kill)
            node.tell({"mb": case.mb, "pause_s": case.pause_s, "rates_bps": _rates_bps(case)})
        for node in nodes:
            node.hear(PATIENCE_S)
        for index, node in enumerate(nodes):
            time.sleep(case.apart_s if index else 0.0)
            node.tell({})
        yield place, nodes, {node.name: node.hear(PATIENCE_S) for node in nodes}


def _rates_bps(case: StartCase) -> list[tuple[str, str, float]]:
    """Of the slower direction of each link, if nodes are to know that."""
    if case.topology is None or not case.knows:
        return []
    return [(a, b, rate_bps) for a, b, rate_bps in rates(case.topology).edges(data="rate_bps")]


def measure(case: StartCase, steps: int = AFTER_STEPS) -> Found:
    """One start. `steps`: of all together, before the last of which are timed. Raises: ConfigError as `started`."""
    with started(case) as (_, nodes, joins):
        times_s = steps_of(nodes[0], len(nodes), steps)
    took_s = max(each["member_s"] for each in joins.values()) - max(
        each["called_s"] for each in joins.values()
    )
    step_s = statistics.median(b - a for a, b in pairwise(times_s[-AFTER_STEPS - 1 :]))
    each_s = {name: each["member_s"] - each["called_s"] for name, each in joins.items()}
    return Found(took_s, bound_s(case), step_s, each_s)


def steps_of(first: PlacedNode, members: int, least: int = AFTER_STEPS) -> list[float]:
    """When the first node has completed its last steps with all of them, so many or more."""
    end_s = time.monotonic() + PATIENCE_S
    while time.monotonic() < end_s:
        first.tell({})
        told = first.hear(PATIENCE_S)
        if len(told["times_s"]) > least and told["members"] == members:
            times_s: list[float] = told["times_s"]
            return times_s
        time.sleep(0.2)
    raise ConfigError(f"bench start: no {least} steps of {members} members in {PATIENCE_S:.0f} s")


# --- a node ---


def _serve() -> None:
    """A script as people write them, but that it waits for a word before it begins, and tells when it was in."""
    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    outputs = max(1, int(told["mb"] * 1e6 / 4 / LAYERS / 2))
    model = nn.ModuleList(nn.Linear(1, outputs) for _ in range(LAYERS))
    optimizer = torch.optim.Adam(model.parameters(), 1e-4)
    print("{}", flush=True)
    sys.stdin.readline()
    called_s = time.monotonic()
    trainer = Trainer(model, optimizer, cluster=Cluster(sync_policy=_knowing(told["rates_bps"])))
    print(json.dumps({"called_s": called_s, "member_s": time.monotonic()}), flush=True)
    times_s: list[float] = []  # Of the last steps in a row with as many members.
    members = 0
    threading.Thread(
        target=lambda: _answer(lambda: {"times_s": times_s[:], "members": members}), daemon=True
    ).start()
    x = torch.ones(1, 1)
    while True:
        time.sleep(told["pause_s"])
        sum(layer(x).square().mean() for layer in model).backward()
        before = trainer.samples
        trainer.update(samples=1)
        trainer.check_state_replication()
        now = round(trainer.samples - before)
        if now != members:
            times_s, members = [], now
        times_s.append(time.monotonic())


def _knowing(rates_bps: list[tuple[str, str, float]]) -> SyncPolicy | None:
    """The usual trees for links with these rates; None: for links as they are measured."""

    def plan(graph: nx.Graph) -> list[SpanningTree]:
        known = graph.copy()
        known.add_weighted_edges_from(
            [each for each in rates_bps if known.has_edge(*each[:2])], weight="rate_bps"
        )
        return POLICIES["packed"](known)

    return plan if rates_bps else None


def _answer(what: Any) -> None:
    for _ in sys.stdin:
        print(json.dumps(what()), flush=True)
    os._exit(0)  # The parent is gone.


# --- the command ---


@click.command("start")
@click.option("--cases", "chosen", type=Several(OneOf(CASES)), default=",".join(CASES), show_default=True)
@click.option("--repeat", type=Whole(1, 100), default=1, show_default=True, help="Rounds; cases take turns.")
@click.option(
    "--topology", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE.yaml",
    default=Path("examples", "overlay.yaml"), show_default=True, help=f"Of {', '.join(OF_FILE)}.",
)  # fmt: skip
@json_option
def start_command(chosen: tuple[str, ...], repeat: int, topology: Path, json_file: Path | None) -> None:
    """Machines that are started together, with states of real size: when all are in."""
    if set(chosen) != {"loopback"}:
        need_root("start", " (or --cases loopback)")
    found: dict[str, list[Found]] = {name: [] for name in chosen}
    known = cases(topology if {*OF_FILE} & {*chosen} else None)
    for number in range(repeat):
        for name in chosen:
            found[name].append(measure(known[name]))
            click.echo(f"round {number + 1} of {repeat}, {_line(name, found[name][-1])}", err=True)
    table(
        ["case", "", "all are in, s", "longest, s", "bound, s", "step, s", "allowed, s"],
        [_row(name, known[name].told, starts) for name, starts in found.items()],
    )
    write_json(
        json_file,
        {
            name: [asdict(each) | {"limit_s": each.limit_s} for each in starts]
            for name, starts in found.items()
        },
    )


def _line(name: str, each: Found) -> str:
    return f"{name}: all {len(each.joins_s)} are in after {each.took_s:.1f} s (allowed {each.limit_s:.1f} s)"


def _row(name: str, told: str, starts: Sequence[Found]) -> list[Any]:
    """Medians."""
    took = [each.took_s for each in starts]
    step_s, limit_s = (
        statistics.median(values) for values in ([e.step_s for e in starts], [e.limit_s for e in starts])
    )
    return [name, told, statistics.median(took), max(took), starts[0].bound_s or None, step_s, limit_s]


if __name__ == "__main__":
    _serve()
