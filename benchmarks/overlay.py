"""`chaosnet bench overlay`: our all-reduce over shaped overlays of network namespaces, beside what they allow.

No set of spanning trees can be faster than `trees.packing_bound`. What a plan loses to it is a matter of the
policy (`promised`); what is lost from there to the time measured is a matter of chunks, protocol, transport and
processor. Policies and sizes of chunks take turns, round by round, so that all see the same machine. Rates for
planning are those that were set: how well they are measured is `chaosnet bench probe`'s to say.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import select
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import click
import msgspec
import networkx as nx
import psutil
import torch
import xxhash

from ..netem.netns import PORT, Netns
from ..netem.topology import GOODPUT, LinkSpec, Topology, random_overlay
from ..node.keys import KeyPair
from ..node.sums.lanes import MAX_CHUNK_BYTES, chunk_bytes_of
from ..protocols.errors import ConfigError
from ..protocols.messages import View
from ..scheduler.sync_plan import POLICIES
from ..scheduler.trees import MAX_PACKING_NODES, packing_bound, throughput_bps
from ..settings.options import Amount, OneOf, Several, Whole
from ..terminal.outputs import json_option, write_json
from .allreduce import Ours, Vector, first_view

WARM_UP = 2
PATIENCE_S = 120.0  # Until all workers have loaded torch, on a busy machine.
RESTARTS = 3  # Of the workers for one size, because a cluster has changed its view.
SECRET = bytes(range(32))  # Of all workers, in networks that nobody else is in.
PERIOD = 1009  # Of what is summed: a prime, so that no chunk is like another. Small, so that sums are exact.


class ViewChanged(Exception):
    """A cluster has changed its view, as one does whose nodes were not heard on a busy machine; so its trees, too."""


class Round(NamedTuple):
    """One all-reduce: how long it took, and as shares of all processors' time, what the workers and anybody used."""

    took_s: float
    ours: float
    busy: float


class Variant(NamedTuple):
    """What takes turns."""

    policy: str
    chunk_bytes: int  # 0: what suits the size.
    keys: bool = False  # Encrypted.


@dataclass(slots=True)
class Row:
    """What was found of one overlay, size and variant."""

    overlay: str
    mb: float
    policy: str
    chunk_bytes: int
    keys: bool
    bound_s: float
    promised: float  # The plan's throughput, as a share of the bound.
    rounds_s: list[float]
    ours: float = 0.0  # Of all processors' time, what the workers used; median of the rounds.
    busy: float = 0.0  # And what anybody used.

    @property
    def median_s(self) -> float:
        return statistics.median(self.rounds_s)

    @property
    def reached(self) -> float:
        """The throughput measured, as a share of the bound."""
        return self.bound_s / self.median_s

    @property
    def variant(self) -> Variant:
        return Variant(self.policy, self.chunk_bytes, self.keys)


# --- plans and bounds ---


def scaled(topology: Topology, scale: float) -> Topology:
    """With all rates times `scale`. Raises: TestbedError for rates that cannot be."""

    def spec_of(spec: LinkSpec) -> LinkSpec:
        if spec.rate_back_mbit is not None:
            spec = spec.with_value("rate_back_mbit", scale * spec.rate_back_mbit)
        return spec.with_value("rate_mbit", scale * spec.rate_mbit)

    return Topology({link: spec_of(spec) for link, spec in topology.links.items()}, topology.nodes)


def measured(topology: Topology) -> nx.Graph:
    """The overlay as a perfect monitor would know it; a link counts with the slower of its directions."""
    graph = nx.Graph()
    graph.add_nodes_from(topology.nodes)
    for (a, b), spec in topology.links.items():
        rate_mbit = min(spec.rate_from(first) for first in (True, False))
        graph.add_edge(a, b, rate_bps=GOODPUT * rate_mbit * 1e6, rtt_s=2 * spec.delay_ms / 1e3)
    return graph


# --- the parent ---


class Host(Protocol):
    """Where programs are started, such as a testbed."""

    def start(self, node: str, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]: ...


class PlacedNode:
    """A worker in its place, which answers each line that it is told with one. `options`: of its process."""

    def __init__(self, place: Host, name: str, module: str = "overlay", **options: Any) -> None:
        self.name, self.module = name, module
        command = [sys.executable, "-m", f"chaosnet.benchmarks.{module}", name]
        self._process = place.start(
            name,
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={"OMP_NUM_THREADS": "1", **options.pop("env", {})},
            start_new_session=True,  # Ctrl+C is for the parent, which ends them.
            **options,
        )

    def tell(self, what: dict[str, Any]) -> None:
        """A command (`_Worker.obey`)."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(what).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._ended() from None

    def hear(self, patience_s: float) -> dict[str, Any]:
        """Its answer."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], patience_s)[0]:
            raise ConfigError(f"bench {self.module}: {self.name} said nothing in {patience_s:.0f} s")
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _ended(self) -> ConfigError:
        return ConfigError(f"bench {self.module}: the worker on {self.name} ended (its error is above)")

    def kill(self) -> None:
        """Now."""
        self._process.kill()
        self._process.communicate()


class OverlayWorkers:
    """One worker per node, with a vector of its own that each variant sums."""

    def __init__(self, nodes: list[PlacedNode]) -> None:
        self.nodes = nodes

    def ask(self, patience_s: float = PATIENCE_S, **command: Any) -> list[dict[str, Any]]:
        """Tell all, then hear all."""
        for node in self.nodes:
            node.tell(command)
        return [node.hear(patience_s) for node in self.nodes]

    def round(self, variant: int, number: int, patience_s: float) -> Round:
        """One round of one variant, checked."""
        self.ask(do="prepare", number=number)
        before = psutil.cpu_times()
        stamps = self.ask(patience_s, do="reduce", variant=variant)
        after = psutil.cpu_times()
        found = self.ask(do="check", number=number)
        for node, answer in zip(self.nodes, found, strict=True):
            if answer["changed"]:
                raise ViewChanged(f"{node.name}: {answer['changed']}")
            if answer["flaw"]:
                raise ConfigError(f"bench overlay: {node.name}: {answer['flaw']}")
        if len({answer["digest"] for answer in found}) > 1:
            raise ConfigError("bench overlay: the nodes have different results")
        took_s = max(stamp["done_s"] for stamp in stamps) - max(stamp["started_s"] for stamp in stamps)
        ours = sum(stamp["cpu_s"] for stamp in stamps) / took_s / psutil.cpu_count()
        idle = after.idle - before.idle
        return Round(took_s, ours, 1 - idle / max(idle, sum(after) - sum(before), 1e-3))


def need_root(bench: str, otherwise: str = "") -> None:
    """Raises: ConfigError if this is not root. `otherwise`: what can be done without."""
    if os.geteuid() != 0:
        raise ConfigError(f"bench {bench}: network namespaces need root{otherwise}")


@contextmanager
def namespaces(topology: Topology, routes: bool = False) -> Iterator[Netns]:
    """The overlay, as long as it is needed. Without `routes`, who is no neighbour cannot be reached."""
    testbed = Netns(f"overlay{os.getpid()}", topology, routes)
    testbed.check(topology)
    try:
        testbed.up(topology)
        yield testbed
    finally:
        testbed.down()


@contextmanager
def cluster(
    testbed: Netns, graph: nx.Graph, elements: int, variants: Sequence[Variant]
) -> Iterator[OverlayWorkers]:
    """Workers with a cluster of its own for each variant, linked up and in its first view."""
    with ExitStack() as stack:
        nodes = []
        for name in graph:
            nodes.append(PlacedNode(testbed, name))
            stack.callback(nodes[-1].kill)
        for rank, node in enumerate(nodes):
            told = [
                _told(testbed, _with_size(graph, elements, each), node.name, PORT + i, each)
                for i, each in enumerate(variants)
            ]
            factors = [1 + other**2 for other in range(len(nodes))]
            node.tell(
                {
                    "elements": elements,
                    "factor": factors[rank],
                    "mean_factor": sum(factors) / len(factors),
                    "variants": told,
                }
            )
        for node in nodes:
            node.hear(PATIENCE_S)  # It listens.
        made = OverlayWorkers(nodes)
        made.ask(do="connect")
        yield made


def _told(testbed: Netns, graph: nx.Graph, node: str, port: int, variant: Variant) -> dict[str, Any]:
    """What the worker on `node` needs to know of a variant."""
    addresses = {each: testbed.endpoints(next(iter(graph[each])), each, port)[0] for each in graph}
    view = first_view(addresses, graph, variant.policy)
    key = f"{KeyPair.of(SECRET).public}@" if variant.keys else ""
    return {
        "listen": addresses[node],
        "neighbors": {peer: key + testbed.endpoints(node, peer, port)[1] for peer in graph[node]},
        "view": msgspec.to_builtins(view),
        "chunk_bytes": variant.chunk_bytes,
        "keys": variant.keys,
    }


def measure(
    name: str, topology: Topology, sizes_mb: Sequence[float], variants: Sequence[Variant], rounds: int
) -> Iterator[Row]:
    """One row a size and variant."""
    graph = measured(topology)
    bound_bps = packing_bound(graph)
    with namespaces(topology) as testbed:
        for mb in sizes_mb:
            elements = int(mb * 1e6 / 4)
            bound_s = 8 * 4 * elements / bound_bps
            sized = [
                each._replace(chunk_bytes=each.chunk_bytes or chunk_bytes_of(4 * elements))
                for each in variants
            ]
            promised = [_promised(graph, elements, each) for each in sized]
            rows = [
                Row(name, mb, *each, bound_s, share, []) for each, share in zip(sized, promised, strict=True)
            ]
            patience_s = PATIENCE_S + 10 * bound_s / min(promised)
            done = _rounds(testbed, graph, elements, sized, rounds, patience_s)
            for row, found_in in zip(rows, done, strict=True):
                row.rounds_s = [each.took_s for each in found_in]
                row.ours = statistics.median(each.ours for each in found_in)
                row.busy = statistics.median(each.busy for each in found_in)
            yield from rows


def _promised(graph: nx.Graph, elements: int, variant: Variant) -> float:
    known = _with_size(graph, elements, variant)
    return throughput_bps(POLICIES[variant.policy](known), known) / packing_bound(known)


def _with_size(graph: nx.Graph, elements: int, variant: Variant) -> nx.Graph:
    """As the scheduler tells its policy."""
    known = graph.copy()
    known.graph["result"] = 4 * elements, math.ceil(4 * elements / variant.chunk_bytes)
    return known


def _rounds(
    testbed: Netns,
    graph: nx.Graph,
    elements: int,
    variants: Sequence[Variant],
    rounds: int,
    patience_s: float,
) -> list[list[Round]]:
    """By variant. They take turns; workers whose views do not stay as they were are replaced."""
    done: list[list[Round]] = [[] for _ in variants]
    for _ in range(1 + RESTARTS):
        with cluster(testbed, graph, elements, variants) as workers:
            numbers = itertools.count()
            try:
                for turn in range(WARM_UP + rounds - len(done[0])):
                    found = [
                        workers.round(index, next(numbers), patience_s) for index in range(len(variants))
                    ]
                    for rounds_of, each in zip(done, found, strict=True):
                        rounds_of += [each] if turn >= WARM_UP else []
                return done
            except ViewChanged as reason:
                click.echo(f"once more, because of {reason}", err=True)
    raise ConfigError(
        f"bench overlay: views change again and again (tried {1 + RESTARTS} times; is --scale too high?)"
    )


def summary(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Median and worst over the overlays, by size and variant."""
    found = []
    for mb, variant in dict.fromkeys((row.mb, row.variant) for row in rows):
        same = [row for row in rows if (row.mb, row.variant) == (mb, variant)]
        found.append(
            {
                "mb": mb,
                **variant._asdict(),
                "overlays": len(same),
                "promised_median": statistics.median(row.promised for row in same),
                "promised_worst": min(row.promised for row in same),
                "reached_median": statistics.median(row.reached for row in same),
                "reached_worst": min(row.reached for row in same),
            }
        )
    return found


# --- the workers ---


class _Worker:
    """One node."""

    def __init__(self, name: str, told: dict[str, Any]) -> None:
        self.name, self.told = name, told
        self.own = torch.empty(told["elements"])
        for start in range(0, len(self.own), MAX_CHUNK_BYTES):
            part = self.own[start : start + MAX_CHUNK_BYTES]
            part.copy_(_pattern(start, start + len(part)) * told["factor"])
        self.clusters = [
            Ours(
                name,
                Vector(len(self.own), each["chunk_bytes"], self.own),
                each["listen"],
                KeyPair.of(SECRET) if each["keys"] else None,
            )
            for each in told["variants"]
        ]
        self.views = [msgspec.convert(each["view"], View) for each in told["variants"]]
        self.latest = self.clusters[0]
        self.results: list[torch.Tensor] = []

    def obey(self, command: dict[str, Any]) -> dict[str, Any]:
        """Returns: what to answer."""
        match command:
            case {"do": "connect"}:
                for ours, each, view in zip(self.clusters, self.told["variants"], self.views, strict=True):
                    ours.connect(each["neighbors"], view)
            case {"do": "prepare", "number": number}:
                self.results = []
                self.own += 1 if number else 0
            case {"do": "reduce", "variant": variant}:
                self.latest = self.clusters[variant]
                started_s, used_s = time.monotonic(), time.process_time()
                self.results = self.latest.reduce()
                done_s = time.monotonic()
                return {"started_s": started_s, "done_s": done_s, "cpu_s": time.process_time() - used_s}
            case {"do": "check", "number": number}:
                return {
                    "changed": self._changed(),
                    "flaw": self._flaw(number),
                    "digest": self._digest(),
                }
        return {}

    def _changed(self) -> str:
        """What has become of the first view, or "" if it still holds."""
        view = self.latest.loop.ask(lambda: self.latest.loop.agent.sync.view)
        first = self.views[self.clusters.index(self.latest)]
        if view.key == first.key:
            return ""
        left = sorted({*first.member_ids} - {*view.member_ids})
        gone, new = sorted({*first.links} - {*view.links}), sorted({*view.links} - {*first.links})
        return f"view {view.key}, without {left} and links {gone}, with {new}"

    def _flaw(self, number: int) -> str:
        """What is wrong with the results, or "". Each round adds one to the values of all nodes."""
        places = self.latest.vector.chunks
        if len(self.results) != len(places):
            return f"{len(self.results)} of {len(places)} chunks"
        for place, result in zip(places, self.results, strict=True):
            mean = _pattern(place.start, place.stop) * self.told["mean_factor"] + number
            if not torch.allclose(result, mean, rtol=1e-6):
                return f"round {number}: elements {place.start} to {place.stop} are not the mean"
        return ""

    def _digest(self) -> str:
        digest = xxhash.xxh3_128()
        for result in self.results:
            digest.update(result.numpy().data)
        return digest.hexdigest()


def _pattern(start: int, stop: int) -> torch.Tensor:
    return torch.arange(start, stop).remainder_(PERIOD).float()


def _serve(name: str) -> None:
    """Until the parent closes the pipe, or is gone."""
    torch.set_num_threads(1)
    worker = _Worker(name, json.loads(sys.stdin.readline()))
    print("{}", flush=True)
    for line in sys.stdin:
        print(json.dumps(worker.obey(json.loads(line))), flush=True)
    os._exit(0)  # The loops' threads have nobody to say goodbye to.


# --- the command ---


@click.command("overlay")
@click.option(
    "--topology", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.yaml",
    help="As of `chaosnet testbed`, e.g. examples/overlay.yaml.",
)  # fmt: skip
@click.option(
    "--random", "count", type=Whole(1, 1000), help="Or so many random ones, links of 100 to 1000 Mbit/s."
)
@click.option(
    "--nodes", type=Whole(2, MAX_PACKING_NODES), default=8, show_default=True, help="Of a random one."
)
@click.option(
    "--links", type=Whole(1, 28), help="Of a random one. Default: as the paper's, two to four a node."
)
@click.option("--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Of the first random one.")
@click.option(
    "--scale", type=Amount(0.001, 100), default=1.0, show_default=True,
    help="Times all rates, so that links and not processors are the limit.",
)  # fmt: skip
@click.option(
    "--mb", "sizes_mb", type=Several(Amount(0.001, 10_000)), default="20,100", show_default=True,
    help="Of the vector.",
)  # fmt: skip
@click.option(
    "--policies", type=Several(OneOf(tuple(POLICIES))), default="packed,fapt,single", show_default=True
)
@click.option(
    "--chunk-bytes", type=Several(Whole(1024, MAX_CHUNK_BYTES)), help="Default: as of the Trainer, by the size.",
)  # fmt: skip
@click.option("--keys", is_flag=True, help="Also with encryption.")
@click.option("--rounds", type=Whole(1, 1000), default=5, show_default=True, help=f"After {WARM_UP} more.")
@json_option
def overlay_command(
    topology: Path | None, count: int | None, nodes: int, links: int | None, seed: int, scale: float,
    sizes_mb: tuple[float, ...], policies: tuple[str, ...], chunk_bytes: tuple[int, ...] | None, keys: bool,
    rounds: int, json_file: Path | None,
) -> None:  # fmt: skip
    """All-reduce over an overlay of shaped links, beside the bound that no plan can beat."""
    if (topology is None) == (count is None):
        raise click.UsageError("expected one of --topology and --random")
    need_root("overlay")
    variants = [
        Variant(policy, size, keyed)
        for policy in policies
        for size in chunk_bytes or (0,)
        for keyed in (False, True)[: 1 + keys]
    ]
    overlays = {
        name: scaled(each, scale) for name, each in _overlays(topology, count, nodes, links, seed).items()
    }
    for each in overlays.values():  # What cannot be planned is told before anything begins.
        packing_bound(measured(each))
        for policy in policies:
            POLICIES[policy](measured(each))
    rows = _run(overlays, sizes_mb, variants, rounds)
    found = summary(rows)
    if len(overlays) > 1:
        click.echo(f"over {len(overlays)} overlays:  promised: median, worst   reached: median, worst")
        for line in found:
            click.echo(
                f"{line['mb']:>7g} MB {line['policy']:>7}{'+keys' * line['keys']:<5}"
                f" {line['chunk_bytes'] / 1024:>8g} KiB"
                f" {line['promised_median']:>10.3f} {line['promised_worst']:>7.3f}"
                f" {line['reached_median']:>14.3f} {line['reached_worst']:>7.3f}"
            )
    write_json(
        json_file,
        {
            "scale": scale,
            "cores": psutil.cpu_count(),
            "rows": [asdict(row) | {"median_s": row.median_s, "reached": row.reached} for row in rows],
            "summary": found,
        },
    )


def _overlays(
    file: Path | None, count: int | None, nodes: int, links: int | None, seed: int
) -> dict[str, Topology]:
    """By what they are called."""
    if file is not None:
        return {file.stem: Topology.read(file)}
    seeds = range(seed, seed + (count or 0))
    return {f"seed {each}": random_overlay(nodes, each, links) for each in seeds}


def _run(
    overlays: dict[str, Topology], sizes_mb: Sequence[float], variants: Sequence[Variant], rounds: int
) -> list[Row]:
    """Measure, and print what is found as it is."""
    wide = max(len(name) for name in ("overlay", *overlays))
    click.echo(
        f"{'overlay':<{wide}}      MB  policy       chunk KiB  bound s  promised  median s  reached  cpu: ours   all"
    )
    rows = []
    for name, topology in overlays.items():
        for row in measure(name, topology, sizes_mb, variants, rounds):
            rows.append(row)
            click.echo(
                f"{name:<{wide}} {row.mb:>7g} {row.policy:>7}{'+keys' * row.keys:<5} {row.chunk_bytes / 1024:>10g}"
                f" {row.bound_s:>8.3f}"
                f" {row.promised:>9.3f} {row.median_s:>9.3f} {row.reached:>8.3f} {row.ours:>10.2f} {row.busy:>5.2f}"
            )
    return rows


if __name__ == "__main__":
    _serve(sys.argv[1])
