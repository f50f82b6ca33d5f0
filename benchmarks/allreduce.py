"""Our all-reduce against Gloo's, of one vector, among processes on this machine, in the same run.

Measured is the time from "every process has its vector" to "every process has the mean", the median of the rounds,
which alternate between the two so that both see the same machine. Ours does what a training step does: votes,
commit, and a result that may be sent again if somebody dies; Gloo's sums in place. Both are as they come: between
processes of one machine ours hands large payloads over in shared memory, and Gloo through TCP on loopback.
"""

from __future__ import annotations

import math
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import click
import networkx as nx
import numpy as np
import torch
import torch.distributed as dist

from ..node.agent.core import Agent, CoreSettings
from ..node.keys import KeyPair
from ..node.loop import NodeLoop
from ..node.outcomes import Admitted, Ended, StepOutcome
from ..node.sums.compression import Encoding, Exact
from ..node.sums.lanes import chunk_bytes_of
from ..node.transport.transport import Transport
from ..node.transport.turns import Sink
from ..protocols.events import Contributed, LocalReady
from ..protocols.keyring import Keyring
from ..protocols.messages import Contribution, Member, View, link
from ..scheduler.sync_plan import POLICIES
from ..scheduler.views import with_trees
from ..settings.options import Several, Whole
from ..terminal.outputs import json_option, write_json
from .processes import Pipe, Workers

WARM_UP, ROUNDS = 6, 10
LOOPBACK = {"rate_bps": 1e10, "rtt_s": 5e-4}  # As a Trainer's nodes measure it on two shared cores.


@dataclass(frozen=True, slots=True)
class _Place:
    lane: int
    start: int
    stop: int


@dataclass(slots=True)
class _Lane:
    dtype: torch.dtype = torch.float32
    op: str = "mean"


class Vector:
    """A bare vector in chunks, as the all-reduce wants it (node/sums/all_reduce.py, ChunkStore).

    `own`: its memory, which several may share that take turns.
    """

    stays = False

    def __init__(self, elements: int, chunk_bytes: int, own: torch.Tensor | None = None) -> None:
        size = chunk_bytes // 4
        self.lanes = [_Lane()]
        self.chunks = [_Place(0, at, min(at + size, elements)) for at in range(0, elements, size)]
        self.own = torch.zeros(elements) if own is None else own

    def contribution(self, chunks: range) -> torch.Tensor:
        return self.own[self.chunks[chunks[0]].start : self.chunks[chunks[-1]].stop]

    def encoding(self, chunk: int) -> Encoding:
        return Exact(np.dtype(np.float32))


class Ours:
    """One member of a chaosnet cluster that reduces a Vector. `keys`: that of all members, if they use one."""

    def __init__(
        self, name: str, vector: Vector, listen: str = "127.0.0.1:0", keys: KeyPair | None = None
    ) -> None:
        self.vector, self.name = vector, name
        settings = CoreSettings(chunks=len(vector.chunks))

        def make_agent(addresses: tuple[str, ...], life: int) -> Agent:
            settings.addresses = addresses
            return Agent(name, settings, random.Random(name))

        keyring = Keyring(keys.public) if keys else None

        def make_transport(sink: Sink) -> Transport:
            return Transport(name, listen, sink, keys=keys, keyring=keyring)

        self.loop = NodeLoop(make_agent, make_transport, vector)
        self.address = self.loop.start()[0]

    def connect(self, neighbors: Mapping[str, str], view: View) -> None:
        """Link up with these, which are to do the same, by their addresses, and start in `view`."""
        for name, address in neighbors.items():
            if name > self.name:
                self.loop.ask(partial(self.loop.transport.dial, address))
        while len(self.loop.ask(lambda: self.loop.agent.relay.peers)) < len(neighbors):
            time.sleep(0.01)
        self.loop.found(view)
        self._wait(Admitted)

    def _wait(self, kind: type) -> Any:
        while True:
            outcome = self.loop.outcomes.get()
            if isinstance(outcome, kind):
                return outcome
            if isinstance(outcome, Ended):
                raise RuntimeError(f"{self.name} is out: {outcome.reason}")

    def reduce(self) -> list[torch.Tensor]:
        """One step. Returns: the mean, in chunks."""
        chunks = tuple(range(len(self.vector.chunks)))
        self.loop.post(Contributed(chunks, 1.0))
        self.loop.post(LocalReady(Contribution(weight=1.0)))
        return self._wait(StepOutcome).results


def loopback(names: Sequence[str], elements: int, chunk_bytes: int) -> nx.Graph:
    """The overlay of processes on one machine, as the scheduler tells its policy."""
    graph = nx.complete_graph(names)
    for name, value in LOOPBACK.items():
        nx.set_edge_attributes(graph, value, name)
    graph.graph["result"] = 4 * elements, math.ceil(4 * elements / chunk_bytes)
    return graph


def first_view(addresses: Mapping[str, str], overlay: nx.Graph, policy: str) -> View:
    """Of a cluster that begins with all of these nodes, and the links and rates of `overlay`."""
    members = tuple(Member(id=name, addresses=(at,)) for name, at in addresses.items())
    links = tuple(sorted(link(*each) for each in overlay.edges))
    view = View(term=1, seq=1, scheduler=members[0].id, members=members, links=links)
    return with_trees(view, overlay, POLICIES[policy])


def _worker(
    pipe: Pipe,
    rank: int,
    nodes: int,
    elements: int,
    chunk_bytes: int,
    store: str,
    policy: str,
    threads: int,
    keys: KeyPair | None,
) -> dict[str, Any]:
    torch.set_num_threads(threads)
    names = [f"n{index}" for index in range(nodes)]
    clusters = {"ours": Ours(names[rank], Vector(elements, chunk_bytes))}
    if keys:
        clusters["keyed"] = Ours(names[rank], Vector(elements, chunk_bytes), keys=keys)
    for ours in clusters.values():
        pipe.send(ours.address)
        addresses = dict(zip(names, pipe.receive(), strict=True))
        others = {name: address for name, address in addresses.items() if name != ours.name}
        ours.connect(others, first_view(addresses, loopback(names, elements, chunk_bytes), policy))
    times: dict[str, list[float]] = {"gloo": [], **{name: [] for name in clusters}}
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=nodes)
    values = torch.full((elements,), float(rank + 1))
    for round_number in range(WARM_UP + ROUNDS):
        gloo, took_s = values.clone(), {}
        dist.barrier()
        started = time.perf_counter()
        dist.all_reduce(gloo)
        took_s["gloo"] = time.perf_counter() - started
        for name, ours in clusters.items():
            ours.vector.own.copy_(values)
            dist.barrier()
            started = time.perf_counter()
            mean = ours.reduce()
            took_s[name] = time.perf_counter() - started
            assert torch.equal(torch.cat(mean) * nodes, gloo), "the two disagree"
        for name, each_s in took_s.items() if round_number >= WARM_UP else ():
            times[name].append(each_s)
    dist.destroy_process_group()
    return times


def measure(
    size_bytes: int, nodes: int, chunk_bytes: int, policy: str, threads: int, out: Path, keys: bool = False
) -> dict[str, float]:
    """Compare among `nodes` processes. A round takes as long as its slowest process.

    `keys`: also with encryption, as `keyed_s`, and the time it takes relative to none as `keyed_ratio`.
    """
    pair = KeyPair.new() if keys else None
    store = out / f"gloo-{nodes}-{time.time_ns()}"
    with Workers() as workers:
        for rank in range(nodes):
            args = (rank, nodes, size_bytes // 4, chunk_bytes, str(store), policy, threads, pair)
            workers.start(f"n{rank}", _worker, *args)
        for _ in range(1 + keys):
            addresses = [workers.receive(f"n{rank}") for rank in range(nodes)]
            for rank in range(nodes):
                workers.tell(f"n{rank}", addresses)
        results = [workers.receive(f"n{rank}") for rank in range(nodes)]
    rounds = {name: [max(r[name][i] for r in results) for i in range(ROUNDS)] for name in results[0]}
    ours_s, gloo_s = statistics.median(rounds["ours"]), statistics.median(rounds["gloo"])
    keyed_s = statistics.median(rounds["keyed"]) if keys else 0.0
    return {
        **({"keyed_s": keyed_s, "keyed_ratio": keyed_s / ours_s} if keys else {}),
        "ours_s": ours_s,
        "gloo_s": gloo_s,
        "ratio": gloo_s / ours_s,
        "ours_best_s": min(rounds["ours"]),
        "gloo_best_s": min(rounds["gloo"]),
    }


@click.command("allreduce")
@click.option(
    "--bytes",
    "size_bytes",
    type=Whole(4, 10**11),
    default=104_857_600,
    show_default=True,
    help="Size of the vector.",
)
@click.option(
    "--nodes",
    type=Several(Whole(2, 64)),
    default="2,4",
    show_default=True,
    help="Numbers of processes to try.",
)
@click.option("--chunk-bytes", type=Whole(4, 10**9), help="Default: as of the Trainer, by the size.")
@click.option("--policy", type=click.Choice(sorted(POLICIES)), default="packed", show_default=True)
@click.option("--threads", type=Whole(1, 1024), default=1, show_default=True, help="Of torch, per process.")
@click.option("--keys", is_flag=True, help="Also with encryption.")
@json_option
def allreduce_command(
    size_bytes: int,
    nodes: tuple[int, ...],
    chunk_bytes: int | None,
    policy: str,
    threads: int,
    keys: bool,
    json_file: Path | None,
) -> None:
    """All-reduce against Gloo in the same run."""
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in nodes:
            size = chunk_bytes or chunk_bytes_of(size_bytes)
            figures[str(count)] = measure(size_bytes, count, size, policy, threads, Path(folder), keys)
            f = figures[str(count)]
            click.echo(
                f"{count} nodes, {size_bytes / 1e6:.0f} MB: ours {f['ours_s'] * 1e3:.0f} ms, "
                f"gloo {f['gloo_s'] * 1e3:.0f} ms, ratio {f['ratio']:.2f}"
                + (
                    f", with keys {f['keyed_s'] * 1e3:.0f} ms ({f['keyed_ratio']:.2f} times as long)"
                    if keys
                    else ""
                )
            )
    write_json(json_file, figures)
