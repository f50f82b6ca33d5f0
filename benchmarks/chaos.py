"""The Chaos paper's ablation studies (Sec. VI-F, Fig. 15 and 16), with real bytes over shaped links.

An overlay of network namespaces, links of 100 to 1000 Mbit/s. All nodes but one train; that one joins, and leaves
again, once with each scheme in turn. Measured is the time from its call of Trainer() to its membership. The state is
a matrix of the model's size that is not trained, so that steps are short and links carry the state alone: the paper
studies replication here, and so do we.
"""

from __future__ import annotations

import itertools
import json
import os
import select
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import networkx as nx
import torch
from torch import nn

from ..netem.backend import TestbedError
from ..netem.netns import PORT, Netns
from ..netem.topology import GOODPUT, Topology, random_overlay
from ..node.core import Agent
from ..options import Amount, OneOf, Several, Whole
from ..protocols.errors import ConfigError
from ..scheduler.shard_plan import Source, water_filling_bound
from ..trainer import Trainer
from .figures import bars, legend_below, outputs, publish, table
from .join import FineTuned
from .overlay import PATIENCE_S, Node, namespaces, scaled

MB = {"LoRA": 1.7 * 1.048576, "ResNet101": 178.2, "AlexNet": 244.4, "VGG11": 531.5}
"""Of models in the paper, in float32: 44.5, 61.1 and 132.9 million parameters; LoRA as the paper says."""


class Scheme(NamedTuple):
    """How a state is pulled."""

    strategy: str  # Of shard_plan.STRATEGIES.
    from_all: bool = False  # Also from who is several links away, along the paths with the fewest links.
    steals: bool = False


FIG15 = {
    "single source": Scheme("single"),
    "multi-source": Scheme("even", from_all=True),
    "multi-neighbour": Scheme("even"),
    "chaosnet": Scheme("adaptive", steals=True),
}
FIG16 = {
    "even": Scheme("even"),
    "greedy": Scheme("greedy"),
    "optimal": Scheme("optimal"),
    "chaosnet": Scheme("adaptive", steals=True),
}


class Case(NamedTuple):
    """One overlay, and who joins."""

    name: str
    topology: Topology
    joiner: str


# --- the parent ---


def cases(members: int, overlays: int, seed: int, scale: float) -> list[Case]:
    """Random overlays of so many nodes and a joiner: it has three links or more, and connects nobody else."""
    found: list[Case] = []
    while len(found) < overlays:
        topology = random_overlay(members + 1, seed)
        joiner = _able_to_join(topology)
        if joiner:
            found.append(Case(f"seed {seed}", scaled(topology, scale), joiner))
        seed += 1
    return found


def _able_to_join(topology: Topology) -> str | None:
    for node in topology.nodes[1:]:
        rest = topology.graph.subgraph(set(topology.nodes) - {node})
        if topology.graph.degree[node] >= 3 and nx.is_connected(rest):
            return node
    return None


def bound_s(case: Case, size_bytes: int) -> float:
    """No scheme can be faster over the joiner's links, whose rates are those that were set."""
    around = case.topology.graph[case.joiner]
    rates = {peer: GOODPUT * case.topology.spec_from(peer, case.joiner).rate_mbit * 1e6 for peer in around}
    return water_filling_bound(size_bytes, {peer: Source(0.0, 8 / rate) for peer, rate in rates.items()})


def measure(
    case: Case, size_bytes: int, schemes: Mapping[str, Scheme], repeat: int
) -> dict[str, list[float]]:
    """Seconds of each join, by scheme; they take turns."""
    took: dict[str, list[float]] = {name: [] for name in schemes}
    with namespaces(case.topology, routes=True) as testbed, ExitStack() as stack:
        members = list(_members(case, testbed, size_bytes, stack))
        for _ in range(repeat):
            for name, scheme in schemes.items():
                for node in members:
                    node.tell({"strategy": scheme.strategy})
                    node.hear(PATIENCE_S)
                took[name].append(_join(case, testbed, size_bytes, scheme))
    return took


def _members(case: Case, testbed: Netns, size_bytes: int, stack: ExitStack) -> Iterator[Node]:
    """One after the other, each linked to those before it that are its neighbours."""
    graph = case.topology.graph.subgraph(set(case.topology.nodes) - {case.joiner})
    order = [case.topology.nodes[0], *(node for _, node in nx.bfs_edges(graph, case.topology.nodes[0]))]
    for place, name in enumerate(order):
        node = Node(testbed, name, "chaos")
        stack.callback(node.kill)
        links = [peer for peer in order[:place] if graph.has_edge(name, peer)]
        node.tell(_told(testbed, case, name, size_bytes, links, Scheme("adaptive")))
        node.hear(PATIENCE_S)
        node.tell({})
        node.hear(PATIENCE_S)
        yield node


def _join(case: Case, testbed: Netns, size_bytes: int, scheme: Scheme) -> float:
    node = Node(testbed, case.joiner, "chaos")
    try:
        near = case.topology.graph[case.joiner]
        links = [
            each for each in case.topology.nodes if each != case.joiner and (scheme.from_all or each in near)
        ]
        node.tell(_told(testbed, case, case.joiner, size_bytes, links, scheme))
        node.hear(PATIENCE_S)
        node.tell({})
        joined = node.hear(PATIENCE_S)
        node.tell({"leave": True})
        node.hear(PATIENCE_S)
    finally:
        node.kill()
    if joined["bytes"] < size_bytes:
        raise ConfigError(f"bench chaos: {joined['bytes']} bytes came (expected {size_bytes} or more)")
    return float(joined["took_s"])


def _told(
    testbed: Netns, case: Case, name: str, size_bytes: int, links: list[str], scheme: Scheme
) -> dict[str, Any]:
    first = testbed.endpoints(name, case.topology.nodes[0], PORT)[1]
    return {"bytes": size_bytes, "links": links, "join": first if links else "", **scheme._asdict()}


# --- the workers ---


class _Planned(Trainer):
    """Whose agent plans, and pulls, by a scheme."""

    def __init__(self, told: Mapping[str, Any], *args: Any, **kwargs: Any) -> None:
        self._told = told
        super().__init__(*args, **kwargs)

    def _make_agent(self, addresses: tuple[str, ...], least_life: int) -> Agent:
        agent = super()._make_agent(addresses, least_life)
        agent.settings.strategy, agent.settings.steals = self._told["strategy"], self._told["steals"]
        return agent

    def plan_by(self, strategy: str) -> None:
        """From now on, if this node is the scheduler, or becomes it."""
        loop = self._running()

        def change() -> None:
            loop.agent.settings.strategy = strategy
            if loop.agent.scheduler:
                loop.agent.scheduler.strategy = strategy

        loop.ask(change)


def _serve() -> None:
    torch.set_num_threads(1)
    told = json.loads(sys.stdin.readline())
    model = FineTuned(told["bytes"], trained=False)
    nn.init.constant_(model.base, 0.5 if told["join"] else 1.5)  # Memory that is really there.
    optimizer = torch.optim.Adam(model.head.parameters(), 1e-3)
    x, y = torch.randn(64, 256), torch.randn(64, 64)
    print("{}", flush=True)
    sys.stdin.readline()
    called_s = time.monotonic()
    trainer = _Planned(told, model, optimizer, join=told["join"], links=tuple(told["links"]), quiet=True)
    took = {
        "took_s": time.monotonic() - called_s,
        "bytes": sum(trainer.join_bytes_by_source.values()),
    }
    print(json.dumps(took), flush=True)
    while True:
        nn.functional.mse_loss(model(x), y).backward()
        trainer.update()
        time.sleep(0.02)
        if not select.select([sys.stdin], [], [], 0)[0]:
            continue
        line = sys.stdin.readline()
        command: dict[str, Any] = json.loads(line) if line else {"leave": True}
        if "leave" in command:
            trainer.close()
        else:
            trainer.plan_by(command["strategy"])
        print("{}", flush=True)
        if "leave" in command:
            return


# --- commands ---


def _figure(
    number: int, schemes: Mapping[str, Scheme], members: Sequence[int], models: Sequence[str], overlays: int,
    repeat: int, seed: int, scale: float, json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    if os.geteuid() != 0:
        raise ConfigError(f"bench chaos-fig{number}: network namespaces need root")
    rows: list[dict[str, Any]] = []
    try:
        for model, count in itertools.product(models, members):
            for case in cases(count, overlays, seed, scale):
                rows.append(_row(model, count, case, schemes, repeat))
                click.echo(_line(rows[-1]), err=True)
    except TestbedError as error:
        raise ConfigError(f"bench chaos-fig{number}: {error}") from None
    shown = _medians(rows, list(schemes))
    seconds, ratios = [f"{name} s" for name in schemes], [f"{name} / bound" for name in schemes]
    table(["", *seconds, "bound s", *ratios], shown)
    found = {
        "rows": rows,
        "open": "where links are, and how many a new node has: three or four here, random; what its disks and "
        "processes cost beside the links: a state that is not trained here, and loopback's processors",
    }
    publish(found, json_file, plot_file, lambda figure, _: _draw(figure, number, list(schemes), shown))


def _row(model: str, members: int, case: Case, schemes: Mapping[str, Scheme], repeat: int) -> dict[str, Any]:
    size_bytes = int(MB[model] * 1e6)
    took_s = measure(case, size_bytes, schemes, repeat)
    bound = bound_s(case, size_bytes)
    return {"model": model, "members": members, "overlay": case.name, "took_s": took_s, "bound_s": bound}


def _medians(rows: Sequence[Mapping[str, Any]], schemes: Sequence[str]) -> list[list[Any]]:
    """By model and size of the cluster: what it is, seconds by scheme, the bound's, and ratios by scheme."""
    found: list[list[Any]] = []
    for model, members in dict.fromkeys((row["model"], row["members"]) for row in rows):
        same = [row for row in rows if (row["model"], row["members"]) == (model, members)]
        seconds = [statistics.median(s for row in same for s in row["took_s"][name]) for name in schemes]
        ratios = [
            statistics.median(statistics.median(row["took_s"][name]) / row["bound_s"] for row in same)
            for name in schemes
        ]
        bound = statistics.median(row["bound_s"] for row in same)
        found.append([f"{model}, {members} to {members + 1}", *seconds, bound, *ratios])
    return found


def _line(row: Mapping[str, Any]) -> str:
    took = ", ".join(f"{name} {statistics.median(each):.2f} s" for name, each in row["took_s"].items())
    return f"{row['model']}, {row['members']} members, {row['overlay']}: {took}, bound {row['bound_s']:.2f} s"


def _draw(figure: Any, number: int, schemes: Sequence[str], shown: Sequence[Sequence[Any]]) -> None:
    axes = figure.subplots()
    series = {name: [row[1 + place] for row in shown] for place, name in enumerate([*schemes, "bound"])}
    bars(axes, [row[0] for row in shown], series)
    axes.set_ylabel("scale-out delay (s)")
    axes.set_title(f"Chaos, Fig. {number}")
    legend_below(figure, axes)


def _options(command: Any) -> Any:
    shown = partial(click.option, show_default=True)
    for option in reversed(
        (
            shown("--members", type=Several(Whole(3, 15)), default="6", help="Before the join."),
            shown("--models", type=Several(OneOf(tuple(MB))), default="ResNet101"),
            shown("--overlays", type=Whole(1, 100), default=3, help="Random ones."),
            shown("--repeat", type=Whole(1, 100), default=3, help="Joins by each scheme on each overlay."),
            shown("--seed", type=Whole(0, 2**31), default=0, help="Of the first overlay."),
            shown("--scale", type=Amount(0.001, 100), default=1.0, help="Times all rates."),
        )
    ):  # fmt: skip
        command = option(command)
    return outputs(command)


@click.command("chaos-fig15")
@_options
def fig15_command(**options: Any) -> None:
    """Chaos, Fig. 15: a state from one neighbour, from several nodes over several links each, from all neighbours."""
    _figure(15, FIG15, **options)


@click.command("chaos-fig16")
@_options
def fig16_command(**options: Any) -> None:
    """Chaos, Fig. 16: equal, greedy and optimal shares of neighbours."""
    _figure(16, FIG16, **options)


if __name__ == "__main__":
    _serve()
