"""`chaosnet testbed`: overlays of shaped links on this machine, and programs on their nodes."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import click
from rich.table import Table

from ..extras import demand
from ..netem import LinkSpec, TestbedError, Topology, Trace, commands, store
from ..netem.backend import Backend, check_name
from ..netem.docker import Docker
from ..netem.measure import measure, summary
from ..netem.netns import Netns
from ..netem.relay import RelayTestbed
from ..netem.topology import FAST, line, link_name, mesh, random_overlay, ring, star, two_sites
from ..netem.trace import CUT, MAX_PERIODS, PAPER_PERIOD_S, specs_after
from ..protocols.errors import ConfigError
from ..settings.options import Amount, Whole
from ..terminal.console import console
from ..terminal.outputs import PictureFile, json_option, write_json
from ..trials.node_processes import sigterm_as_ctrl_c
from .node_lines import NodeLines

NAME = "default"
BACKENDS: dict[str, type[Netns] | type[RelayTestbed] | type[Docker]] = {
    "netns": Netns,
    "relay": RelayTestbed,
    "docker": Docker,
}
OWN = (Netns, RelayTestbed)  # Back ends that make the nodes, too; Docker finds them running.
OWN_HELP = "netns: network namespaces (root); relay: a process that relays, without root"
DRY_RUN = "dry-run"
POLL_S = 0.05
MAX_NEW = 1000  # A mesh of them has half a million links, a text of 18 MB.
ENDINGS = (signal.SIGTERM, signal.SIGHUP)  # Told to end, or the terminal is closed.
LEAVE_S = 5.0  # For programs to leave after Ctrl+C; then we say how to kill those that stay.
SHAPES: dict[str, Callable[..., Topology]] = {
    "ring": ring,
    "line": line,
    "star": star,
    "mesh": mesh,
    "two-sites": two_sites,
}


@contextmanager
def _plain_errors() -> Iterator[None]:
    """Raise a TestbedError of the block as a ConfigError, which the command line prints without a traceback."""
    try:
        yield
    except TestbedError as error:
        raise ConfigError(f"testbed: {error}") from None


class _Group(click.Group):
    def invoke(self, ctx: click.Context) -> Any:
        with _plain_errors():
            return super().invoke(ctx)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"]})
def testbed() -> None:
    """Links like the edge's, on this machine: made, changed, cut, measured."""


named = click.option("--name", default=NAME, show_default=True, help="Of the testbed.")
backend_option = partial(
    click.option,
    "--backend",
    default=Netns.kind,
    show_default=True,
    help=f"{OWN_HELP}; docker: the containers of the Compose project --name (root).",
)
routes_option = click.option(
    "--routes/--no-routes",
    default=True,
    show_default=True,
    help="Reach nodes that are no neighbours through others. Without, a cluster's overlay is that of the testbed.",
)
a_file = click.Path(exists=True, dir_okay=False, path_type=Path)


@testbed.command()
@click.argument("shape", type=click.Choice([*SHAPES, "random"]))
@click.argument("nodes", type=Whole(2, MAX_NEW))
@click.option("--rate", type=float, help="Of links, Mbit/s; not of random ones. Default: 1000.")
@click.option("--delay", type=float, help="Of links, ms one way; not of random ones. Default: 0.")
@click.option("--links", type=int, help="How many, if random. Default: as the paper's, two to four a node.")
@click.option("--seed", type=int, help="Of a random one. Default: 0.")
def new(
    shape: str, nodes: int, rate: float | None, delay: float | None, links: int | None, seed: int | None
) -> None:
    """Print an overlay as YAML: new random 8 > overlay.yaml.

    Random ones have links of 100 to 1000 Mbit/s. The two links between two-sites have 100 Mbit/s and 20 ms, whatever
    --rate and --delay say of the others.
    """
    idle = {"--rate": rate, "--delay": delay} if shape == "random" else {"--links": links, "--seed": seed}
    for option, value in idle.items():
        if value is not None:
            raise click.BadOptionUsage(option, f"{value:g} means nothing with {shape} (expected no {option})")
    spec = FAST.with_value("rate_mbit", 1000.0 if rate is None else rate).with_value("delay_ms", delay or 0.0)
    made = random_overlay(nodes, seed or 0, links) if shape == "random" else SHAPES[shape](nodes, spec)
    click.echo(made.to_text(), nl=False)


@testbed.command()
@click.argument("topology", type=a_file)
@click.option("--seed", default=0, show_default=True)
@click.option("--every", default=PAPER_PERIOD_S, show_default=True, help="Seconds.")
@click.option("--for", "until", default=10 * PAPER_PERIOD_S, show_default=True, help="Seconds.")
def rates(topology: Path, seed: int, every: float, until: float) -> None:
    """Print a trace as CSV: every link gets another rate of 100 to 1000 Mbit/s, again and again."""
    if not 0 < every <= until < MAX_PERIODS * every:
        raise TestbedError(
            f"--every {every:g} --for {until:g} (expected 0 < EVERY <= FOR < {MAX_PERIODS} * EVERY)"
        )
    click.echo(Trace.random_rates(Topology.read(topology), seed, until, every).to_text(), nl=False)


@testbed.command()
@click.argument("topology", type=a_file)
@named
@backend_option(type=click.Choice([*BACKENDS, DRY_RUN]))
@routes_option
def up(topology: Path, name: str, backend: str, routes: bool) -> None:
    """Make the overlay that a YAML file describes; one of the same name is replaced."""
    wanted = Topology.read(topology)
    if backend == DRY_RUN:
        check_name(name)
        netem = commands.needs_netem(wanted.links.values())
        for command in commands.up(name, wanted, routes, netem):
            click.echo(" ".join(command))
        return
    began_s = time.monotonic()
    with store.alone(name):
        _up(backend, name, wanted, routes)
    took_s = time.monotonic() - began_s
    click.echo(f"{name} is up: {len(wanted.nodes)} nodes, {len(wanted.links)} links, in {took_s:.2f} s")


def _up(backend: str, name: str, topology: Topology, routes: bool = True) -> Backend:
    """Make a testbed. One of this name is removed first, once it is certain that this one can be made.

    The caller holds `store.alone(name)`.
    """
    made = BACKENDS[backend](name, topology, routes)
    made.check(topology)
    store.make_folder()
    there = _opened(name) if name in store.saved() else made
    # Before its programs end: the run that has made it would take down, at its end, what is made now.
    store.forget(name)
    if there.kind != made.kind:
        there.down()
    store.save(made)  # First: what is not saved stays for good, if this process is killed meanwhile.
    try:
        made.up(topology)
    except BaseException:
        made.down()
        store.forget(name)
        raise
    return made


def _opened(name: str) -> Backend:
    """A testbed that is up, as it was saved. Raises: TestbedError."""
    saved, topology = store.load(name)
    made = BACKENDS[saved.backend](name, topology, saved.routes)
    made.cuts |= set(saved.cuts)
    made.id = saved.id
    return made


@contextmanager
def _changing(name: str) -> Iterator[Backend]:
    """A testbed that is up, to be changed inside the block, and saved. Of two commands at once, one waits."""
    with store.alone(name):
        made = _opened(name)
        yield made
        store.save(made)


def _down(name: str) -> int:
    """Remove a testbed, also one that a crashed run has left with no record, or none that can be read.

    The caller holds `store.alone(name)`. Returns: how many nodes were removed.
    """
    left: list[Backend] = []
    try:
        left.append(_opened(name))
    except TestbedError:
        left += [kind(name, Topology({})) for kind in OWN]
    removed = sum(each.down() for each in left)
    store.forget(name)
    return removed


@testbed.command()
def ls() -> None:
    """Which testbeds are up."""
    for name in store.saved():
        try:
            made = _opened(name)
        except TestbedError as error:  # The others are listed all the same.
            click.echo(f"{name}: {error}")
            continue
        nodes, alive = len(made.topology.nodes), made.alive()
        gone = "" if alive == nodes else f", of which {alive} are there"
        click.echo(f"{name} ({made.kind}): {nodes} nodes{gone}, {len(made.topology.links)} links")


@testbed.command()
@named
@click.option("--json", "as_json", is_flag=True)
def show(name: str, as_json: bool) -> None:
    """What is set on every link, read back from where it is in force."""
    rows = _opened(name).in_force()
    if as_json:
        click.echo(json.dumps(rows, indent=2))
        return
    table = Table("from", "to", "Mbit/s", "delay ms", "jitter ms", "loss %", "state")
    for row in rows:
        to = row["link"][1] if row["from"] == row["link"][0] else row["link"][0]
        figures = (f"{row[name]:g}" for name in ("rate_mbit", "delay_ms", "jitter_ms", "loss_pct"))
        table.add_row(row["from"], to, *figures, "cut" if row["cut"] else "up")
    console().print(table)


@testbed.command("exec", context_settings={"ignore_unknown_options": True})
@click.argument("node")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@named
def exec_(node: str, command: tuple[str, ...], name: str) -> None:
    """Run COMMAND on NODE."""
    process = _opened(name).start(node, command)
    raise SystemExit(_exit_code(_wait([process])))


@testbed.command("run", context_settings={"ignore_unknown_options": True})
@click.argument("topology", type=a_file)
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
@named
@backend_option(type=click.Choice([kind.kind for kind in OWN]), help=f"{OWN_HELP}.")
@routes_option
def run_(topology: Path, command: tuple[str, ...], name: str, backend: str, routes: bool) -> None:
    """Make the overlay, run COMMAND on every node, remove the overlay.

    The environment has all that `chaosnet run train.py` needs (CHAOSNET_NAME, _LISTEN, _JOIN of all but the first
    node, _NEIGHBORS, _PEERS_AT, _INSECURE), and for programs of your own CHAOSNET_NODES and
    CHAOSNET_NEIGHBORS_AT (NODE=HOST:PORT,...). Lines come after the name of their node; what happens in the
    cluster, which all nodes tell, once.
    """
    wanted, lost, codes = Topology.read(topology), list[OSError](), [0]

    def nobody_reads(error: OSError) -> None:
        """End as by SIGTERM if nobody reads the output any more (`| head`): programs get time to leave."""
        lost.append(error)
        if error.errno != errno.EIO:  # EIO: the terminal is gone, and SIGHUP has told the programs.
            os.kill(os.getpid(), signal.SIGTERM)

    with sigterm_as_ctrl_c(signal.SIGHUP):
        with store.alone(name):
            _check_free(name)
            made = _up(backend, name, wanted, routes)
        try:
            lines = NodeLines(made.topology.nodes, nobody_reads)
            codes = _wait([_started(made, node, command, lines) for node in made.topology.nodes])
        except KeyboardInterrupt:  # Not all had been started yet.
            if not lost:
                raise
        finally:
            # If somebody has taken the testbed down, the name may be another run's by now.
            with _undisturbed(), store.alone(name):
                if name in store.saved() and _opened(name).id == made.id:
                    _down(name)
    lines.close()
    if lost and not isinstance(lost[0], BrokenPipeError):
        raise TestbedError(f"what the programs print cannot be shown: {lost[0].strerror}")
    raise SystemExit(0 if lost else _exit_code(codes))


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Ignore Ctrl+C and signals to end inside the block: half a removal would leave nodes behind.

    A removal takes seconds at most. Processes that are started meanwhile ignore them, too.
    """
    before = {number: signal.signal(number, signal.SIG_IGN) for number in (signal.SIGINT, *ENDINGS)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _check_free(name: str) -> None:
    """Raises TestbedError if a testbed is up under this name: to replace it would end what runs on it."""
    if name in store.saved() and (there := _opened(name)).alive():
        raise TestbedError(
            f"{name!r} is up ({there.kind}, {len(there.topology.nodes)} nodes), and may be in use (expected "
            f"another name, by --name; or take it down: chaosnet testbed down --name {name})"
        )


def _started(made: Backend, node: str, command: Sequence[str], lines: NodeLines) -> subprocess.Popen[bytes]:
    """Start `command` on a node, and show its lines; Python's at once, as it would write to a pipe in blocks."""
    process = made.start(
        node, command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={"PYTHONUNBUFFERED": "1"}
    )
    assert process.stdout is not None and process.stderr is not None
    lines.read(node, process.stdout, sys.stdout)
    lines.read(node, process.stderr, sys.stderr)
    return process


def _wait(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Wait until all have ended. Returns: their exit codes.

    Ctrl+C reaches them by itself, and other signals to end are handed on: so all get time to leave.
    """

    def hand_on(number: int, frame: FrameType | None) -> None:
        for each in processes:
            each.send_signal(number)

    for number in ENDINGS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # nohup has them ignored.
            signal.signal(number, hand_on)
    try:
        return _codes(processes)
    except KeyboardInterrupt:
        deadline_s = time.monotonic() + LEAVE_S
        with suppress(subprocess.TimeoutExpired):
            return [process.wait(max(0.0, deadline_s - time.monotonic())) for process in processes]
        click.echo("not all programs have ended yet (Ctrl+C again: they are killed)", err=True)
        return _codes(processes)


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> list[int]:
    """Exit codes, once all have ended.

    Polled: of a signal that comes just before a call that waits, Python would hear only when that call returns.
    """
    while any(process.poll() is None for process in processes):
        time.sleep(POLL_S)
    return [process.returncode for process in processes]


def _exit_code(codes: Sequence[int]) -> int:
    """The largest; that of a program which a signal has ended is what a shell makes of it: 137 for SIGKILL."""
    return max(128 - code if code < 0 else code for code in codes)


@testbed.command()
@click.argument("a")
@click.argument("b")
@click.argument("values", nargs=-1, required=True, metavar="FIELD=VALUE...")
@named
def change(a: str, b: str, values: tuple[str, ...], name: str) -> None:
    """Change the link A B, e.g. rate_mbit=50 delay_ms=20. rate_mbit is that from A to B."""
    with _changing(name) as made:
        spec = made.topology.spec_from(a, b)
        for value in values:
            spec = _changed(spec, value)
        made.change({link_name(a, b): spec if a < b else spec.reversed()})


def _changed(spec: LinkSpec, text: str) -> LinkSpec:
    field, _, value = text.partition("=")
    try:
        return spec.with_value(field, float(value))
    except ValueError:
        raise TestbedError(f"{text!r} is no change (expected FIELD=NUMBER, e.g. rate_mbit=50)") from None


@testbed.command()
@click.argument("a")
@click.argument("b")
@named
def cut(a: str, b: str, name: str) -> None:
    """Nothing passes over the link A B any more, and nobody is told."""
    with _changing(name) as made:
        made.cut(link_name(a, b))


@testbed.command()
@click.argument("a")
@click.argument("b")
@named
def heal(a: str, b: str, name: str) -> None:
    """Undo `cut`."""
    with _changing(name) as made:
        made.heal(link_name(a, b))


@testbed.command()
@click.argument("file", type=a_file)
@named
def trace(file: Path, name: str) -> None:
    """Change links over time, as a CSV file says (time_s,a,b,field,value)."""
    started_s = time.monotonic()
    for due_s, changes in Trace.read(file, _opened(name).topology).moments():
        time.sleep(max(0.0, started_s + due_s - time.monotonic()))
        with _changing(name) as made:  # Anew each time: others may have changed it meanwhile.
            began_s = time.monotonic()
            for each in changes:
                if each.field == CUT:
                    (made.cut if each.value else made.heal)(each.link)
            made.change(specs_after(made.topology, changes))
            took_ms = (time.monotonic() - began_s) * 1e3
        click.echo(f"{due_s:g} s: {len(changes)} changes in {took_ms:.0f} ms")


@testbed.command("measure")
@named
@click.option(
    "--seconds", type=Amount(0.05, 3600.0), default=1.0, show_default=True, help="Per link and direction."
)
@json_option
def measure_(name: str, seconds: float, json_file: Path | None) -> None:
    """Every link's real rate and round trip, beside what is set; one link after the other."""
    made = _opened(name)
    rows: list[dict[str, Any]] = []
    click.echo("from         to           set Mbit/s   goodput   error   set ms   rtt ms")
    try:
        for row in measure(made, made.topology, seconds):
            rows.append(row)
            click.echo(_measured(row))
    finally:  # What was measured is kept where a later link fails.
        found = summary(rows)
        write_json(json_file, {"links": rows, **found})
    if found:
        kinds = {row["congestion_control"] for row in rows if "error" in row}
        click.echo(
            f"error of the goodput against 0.956 of the set rate: median {found['median_error']:.2%}, "
            f"worst {found['worst_error']:.2%} ({', '.join(sorted(kinds))})"
        )


def _measured(row: dict[str, Any]) -> str:
    ends = f"{row['from']:<12} {row['to']:<12} {row['set_mbit']:>10g}"
    if row["cut"]:
        return f"{ends}       cut"
    return f"{ends} {row['mbit']:>9.1f} {row['error']:>7.2%} {row['set_rtt_ms']:>8.1f} {row['rtt_ms']:>8.2f}"


@testbed.command()
@click.argument("topology", type=a_file)
@click.argument("picture", type=PictureFile())
def plot(topology: Path, picture: Path) -> None:
    """Draw the overlay of a YAML file: the wider a link, the faster."""
    demand("plot", "chaosnet testbed plot")
    from ..netem.plot import draw

    draw(Topology.read(topology), picture)
    click.echo(f"written: {picture}")


@testbed.command()
@named
@click.option(
    "--all", "everything", is_flag=True, help="All testbeds of yours, also what a crashed run has left."
)
def down(name: str, everything: bool) -> None:
    """Remove the overlay, and end what runs on its nodes. Containers stay; only their rates go."""
    names = {*store.saved(), *RelayTestbed.names()} if everything else {name}
    removed = 0
    for each in sorted(names):
        with store.alone(each):
            removed += _down(each)
    click.echo(f"{removed} nodes down")
