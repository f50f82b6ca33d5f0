"""What the page costs the node that serves it: processor time and time of a step, without and with one viewer.

Some processes train, and one of them serves the page (`Trainer(dashboard=...)`). Blocks without and with a viewer
take turns. The viewer is in this process, and reads as a browser does; what a browser draws is not in it.

    cost    processor time of the serving node's process a second, with a viewer less without: medians of blocks
    ratio   mean time of a step in a block with the viewer by that in the block before it; median over all turns
"""

from __future__ import annotations

import contextlib
import http.client
import statistics
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import click
import psutil

from ..extras import demand
from ..settings.options import Amount, Whole
from ..terminal.outputs import json_option, write_json
from .processes import Pipe, Workers, how_far, stop, train_until_stopped

PAUSE_S = 0.05


def _node(pipe: Pipe, name: str, join: str, serves: bool) -> None:
    """A member that trains until it is told "stop"."""
    from chaosnet.settings.groups import Cluster

    cluster = Cluster(join=join, name=name, insecure=True)
    train_until_stopped(pipe, cluster, PAUSE_S, dashboard=0 if serves else None)


@contextlib.contextmanager
def viewer(page: str) -> Iterator[http.client.HTTPResponse]:
    """A stream of news, as a browser opens it."""
    at = urlsplit(page)
    connection = http.client.HTTPConnection(at.hostname or "", at.port, timeout=10.0)
    connection.request("GET", "/events", headers={"Accept-Encoding": "gzip"})
    try:
        yield connection.getresponse()
    finally:
        connection.close()


def block(workers: Workers, pid: int, page: str, seconds: float) -> tuple[float, float]:
    """Let so much time pass, with a viewer of `page`, if any. Returns: time of a step, processor time a second."""
    with contextlib.ExitStack() as stack:
        stream = stack.enter_context(viewer(page)) if page else None
        process = psutil.Process(pid)

        def now() -> tuple[int, float, float]:
            step, at_s = how_far(workers, "node0")
            spent = process.cpu_times()
            return step, at_s, spent.user + spent.system

        first, began_s, before_s = now()
        until_s = time.monotonic() + seconds
        while (left_s := until_s - time.monotonic()) > 0:
            if stream is None:
                time.sleep(left_s)
            else:
                stream.read1(1 << 16)  # The next news, every second or two.
        last, ended_s, after_s = now()
    return (ended_s - began_s) / (last - first), (after_s - before_s) / (ended_s - began_s)


def measure(nodes: int, seconds: float, rounds: int) -> dict[str, Any]:
    """Blocks without and with a viewer. Times in s."""
    found: dict[str, list[float]] = {key: [] for key in ("without_s", "with_s", "without_cpu", "with_cpu")}
    with Workers() as workers:
        names = [f"node{index}" for index in range(nodes)]
        join, page, pid = "", "", 0
        for name in names:
            workers.start(name, _node, name, join, name == "node0")
            if name == "node0":
                join, page, pid = workers.receive(name)
        for name in names[1:]:
            workers.receive(name)
        block(workers, pid, page, seconds)  # To warm up.
        for _ in range(rounds):
            for key, seen in (("without", ""), ("with", page)):
                step_s, cpu = block(workers, pid, seen, seconds)
                found[f"{key}_s"].append(step_s)
                found[f"{key}_cpu"].append(cpu)
        stop(workers, names)
    cost = statistics.median(found["with_cpu"]) - statistics.median(found["without_cpu"])
    pairs = zip(found["without_s"], found["with_s"], strict=True)
    ratio = statistics.median(with_s / without_s for without_s, with_s in pairs)
    return {"nodes": nodes, "seconds": seconds, **found, "cost": cost, "ratio": ratio}


@click.command("page")
@click.option("--nodes", type=Whole(1, 64), default=8, show_default=True, help="Processes that train.")
@click.option("--seconds", type=Amount(0.5, 3600.0), default=10.0, show_default=True, help="Of a block.")
@click.option("--rounds", type=Whole(1, 100), default=3, show_default=True, help="Blocks with and without.")
@json_option
def page_command(nodes: int, seconds: float, rounds: int, json_file: Any) -> None:
    """What the page costs the node that serves it, with one viewer."""
    demand("dashboard", "chaosnet bench page")
    found = measure(nodes, seconds, rounds)
    without, with_ = (statistics.median(found[key]) for key in ("without_cpu", "with_cpu"))
    click.echo(
        f"{nodes} nodes, one viewer: {1e3 * without:.1f} ms of processor time a second without, "
        f"{1e3 * with_:.1f} ms with: the page costs {found['cost']:.2%} of a core; "
        f"a step takes {found['ratio']:.3f} times as long"
    )
    write_json(json_file, found)
