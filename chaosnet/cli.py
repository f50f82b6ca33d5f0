"""`chaosnet`: run a script as a node, look at a cluster, change it.

Nothing here imports torch before a script does. Errors are one line: exit code 2 for wrong usage, 1 for what
failed, 130 for Ctrl+C.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any, Literal, NoReturn

import click

from .node.endpoint import shown
from .options import (
    Address,
    Addresses,
    Amount,
    Expecting,
    Folder,
    Name,
    NodeRange,
    OneOf,
    Peer,
    PerSecond,
    PublicKey,
    Script,
    Whole,
)
from .outputs import OutputFile, json_option
from .protocols.errors import ChaosnetError, ConfigError, PeerUnreachable

# As in scheduler/sync_plan.py, whose import takes longer than --help may.
POLICIES = ("packed", "fapt", "single", "ring")
PROBES = ("in-band", "iperf3")  # As in protocols/probing.py.
COPIES = ("shard", "whole")  # As in settings.py.
COMPRESSIONS = ("none", "bf16", "int8")  # As in node/compression.py.
MAX_CRASH_NODES = 5  # As in simulator/crash_points.py: there are tens of thousands of points for more.
WATCH_EVERY_S = 0.5
BENCHMARKS = {
    "join": "Join a large state over loopback: how long, how close to the bound, who waits.",
    "start": "Machines that are started together, with states of real size: when all are in (root).",
    "allreduce": "All-reduce over loopback, beside Gloo.",
    "overlay": "All-reduce over an overlay of shaped links, beside the bound that no plan can beat (root).",
    "replan": "Training while the rates of all links change, beside plans that knew them (root).",
    "step": "Steps of training, beside DistributedDataParallel over Gloo.",
    "checkpoint": "Steps with and without a checkpoint, in one run.",
    "agreement": "Steps that compare the replicas, and steps that do not, in one run.",
    "strangers": "Steps while strangers try to get in, and while they do not.",
    "probe": "Rates of shaped links as the monitor sees them, beside iperf3 (root).",
    "peers": "Joins and deaths, beside torchft and hivemind (root, or --loopback).",
    "policy": "Recoveries of 256 workers: worked out beforehand, then looked up.",
    "chaos-fig1": "Chaos, Fig. 1: its example: a state from one node, from many, from neighbours.",
    "chaos-fig3": "Chaos, Fig. 3: how long each part of a state takes over one link (root).",
    "chaos-fig7": "Chaos, Fig. 7: what a scale-out takes, by system (root).",
    "chaos-fig8": "Chaos, Fig. 8: what it takes with GPT-2 (root).",
    "chaos-fig9": "Chaos, Fig. 9: what opening a link takes, by the size of the cluster (root).",
    "chaos-table1": "Chaos, Table I: what scaling and changing links takes (root).",
    "chaos-fig10": "Chaos, Fig. 10: how long all nodes are idle in a scale-out, by system (root).",
    "chaos-fig11": "Chaos, Fig. 11: accuracy on pictures with a node that joins.",
    "chaos-fig12": "Chaos, Fig. 12: accuracy on pictures with a node that leaves.",
    "chaos-fig13": "Chaos, Fig. 13: fine-tuning on text with a node that joins.",
    "chaos-fig14": "Chaos, Fig. 14: fine-tuning on text with a node that leaves.",
    "chaos-fig15": "Chaos, Fig. 15: a state from one node, from all nodes, from neighbours (root).",
    "chaos-fig16": "Chaos, Fig. 16: how neighbours share a state: equally, greedily, optimally (root).",
    "chameleon-fig6": "Chameleon, Fig. 6: throughput after a loss, as a share of what it was.",
    "chameleon-fig7": "Chameleon, Fig. 7: workers that are left over 9 hours of failures.",
    "chameleon-fig8": "Chameleon, Fig. 8: throughput over 9 hours of failures, beside Oobleck and ReCycle.",
    "chameleon-fig9": "Chameleon, Fig. 9: the estimator beside a simulation that shares no code with it.",
    "chameleon-fig10": "Chameleon, Fig. 10: moving weights, with and without choosing who moves what.",
    "chameleon-fig11": "Chameleon, Fig. 11: sums of gradients in rounds, and one after another.",
    "chameleon-fig12": "Chameleon, Fig. 12: memory of each worker before and after a loss.",
    "chameleon-search-time": "Chameleon, Sec. V-F: how long the search for a plan takes.",
    "elaswave-fig11": "ElasWave, Fig. 11: throughput after nodes are lost, by system.",
    "elaswave-fig12a": "ElasWave, Fig. 12a: linear scaling efficiency, by technique.",
    "elaswave-fig14": "ElasWave, Fig. 14: throughput on traces of spot instances.",
    "elaswave-fig15a": "ElasWave, Fig. 15a: one slow worker.",
}
# What `chaosnet simulate` can run, and what may be said with it.
SIMULATED = {
    "--schedules": ("--from", "--nodes", "--hard", "--rates", "--json"),
    "--seed": ("--nodes", "--hard", "--rates", "--trace"),
    "--crash-points": ("--nodes", "--seeds", "--restart", "--json"),
    "--crash-point": ("--trace",),
    "--mutants": ("--json",),
    "--churn": ("--nodes", "--hours", "--from", "--json"),
}
COMMON = {"help_option_names": ["-h", "--help"]}


def main() -> NoReturn:
    """Entry point of the `chaosnet` command."""
    try:
        cli.main(prog_name="chaosnet", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.ctx.get_help() if error.ctx else error.format_message())
        sys.exit(2)
    except click.UsageError as error:
        _fail(_usage_line(error), 2)
    except click.ClickException as error:
        _fail(error.format_message(), 1)
    except ChaosnetError as error:
        _fail(str(error), 1)
    except click.exceptions.Exit as ending:
        sys.exit(ending.exit_code)
    except (click.Abort, KeyboardInterrupt):
        _fail("interrupted", 130)
    sys.exit(0)


def _fail(line: str, code: int) -> NoReturn:
    click.echo(f"error: {line}", err=True)
    sys.exit(code)


def _usage_line(error: click.UsageError) -> str:
    """Name the option, the value given, what was expected."""
    match error:
        case click.MissingParameter(param=click.Parameter() as param):
            return f"{_name_of(param)}: missing (expected {_expected(param)})"
        case click.BadParameter(param=click.Parameter() as param):
            return f"{_name_of(param)}: {error.message}"
        case click.NoSuchOption():
            return f"{error.option_name}: no such option{_did_you_mean(error)}"
        case click.BadOptionUsage():
            return f"{error.option_name}: {_without_name(error)}"
    where = f"{error.ctx.command_path}: " if error.ctx else ""
    return f"{where}{error.format_message().rstrip('.')}"


def _without_name(error: click.BadOptionUsage) -> str:
    """Click's own text repeats the option."""
    return error.message.replace(f"Option {error.option_name!r} ", "").rstrip(".")


def _name_of(param: click.Parameter) -> str:
    return (
        max(param.opts, key=len) if isinstance(param, click.Option) else str(param.make_metavar(_context()))
    )


def _expected(param: click.Parameter) -> str:
    kind = param.type
    return kind.expected if isinstance(kind, Expecting) else kind.name


def _did_you_mean(error: click.NoSuchOption) -> str:
    return f" (did you mean {', '.join(sorted(error.possibilities))}?)" if error.possibilities else ""


def _context() -> click.Context:
    return click.get_current_context(silent=True) or click.Context(cli)


def _keyed(command: Callable[..., None]) -> Callable[..., None]:
    """Adds the options that say which key to show; they reach nodes and clients through the environment."""

    def into_environment(ctx: click.Context, param: click.Parameter, value: Any) -> None:
        if value:
            os.environ[f"CHAOSNET_{str(param.name).upper()}"] = "1" if value is True else str(value)

    command = click.option(
        "--insecure",
        is_flag=True,
        expose_value=False,
        callback=into_environment,
        help="Use no key: everybody who reaches the port can join.",
    )(command)
    return click.option(
        "--key",
        metavar="FILE",
        expose_value=False,
        callback=into_environment,
        help="Key of this node or user. Default: that of `chaosnet keygen`, if there is one.",
    )(command)


class Unsorted(click.Group):
    """Lists commands in the order in which one meets them."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


class Benchmarks(click.Group):
    """Imports a benchmark (and torch) only when it is to run.

    `chameleon-fig8` is `fig8_command` of the module `chameleon`; `join` is `join_command` of its own, or `command`.
    """

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(BENCHMARKS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in BENCHMARKS:
            raise click.UsageError(f"{cmd_name!r} is no benchmark (expected one of {', '.join(BENCHMARKS)})")
        name, _, part = cmd_name.partition("-")
        try:
            module = importlib.import_module(f".benchmarks.{name}", __package__)
        except ModuleNotFoundError as error:
            raise click.ClickException(f"bench {cmd_name}: {error} in this installation") from None
        command = getattr(module, f"{(part or name).replace('-', '_')}_command", None) or module.command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Benchmarks"):
            formatter.write_dl(list(BENCHMARKS.items()))


@click.group(cls=Unsorted, context_settings=COMMON)
@click.version_option(metadata.version("chaosnet"), "-V", "--version", message="%(prog)s %(version)s")
def cli() -> None:
    """Train a PyTorch model on machines that come and go.

    \b
    chaosnet demo                                                       see it work, here and now
    chaosnet keygen                                                     once; copy its file to the others
    chaosnet run --listen 10.0.0.1:5555 train.py                        first node: starts a cluster
    chaosnet run --listen 10.0.0.2:5555 --join 10.0.0.1:5555 train.py   every other node, at any time
    chaosnet status 10.0.0.1:5555                                       ask any node
    """


@cli.command(context_settings={"allow_interspersed_args": False}, short_help="Run a script as a node.")
@click.option(
    "--listen",
    type=Address(any_port=True),
    help="Where this node can be reached. Default: 127.0.0.1, any port.",
)
@click.option(
    "--join", type=Addresses(), help="Members of the cluster to join, or an invite. Default: start one."
)
@click.option("--name", type=Name(), help="Unique in the cluster. Default: from the host's name.")
@click.option("--neighbors", type=Whole(1, 64), metavar="K", help="Number of links to ask for. Default: 2.")
@click.option(
    "--link", "links", type=Peer(), multiple=True, help="A member to link to; may be repeated. Instead of K."
)
@click.option(
    "--blocking",
    is_flag=True,
    help="Neighbours wait until they have sent the state, whatever suits the links.",
)
@click.option("--found", is_flag=True, help="Start a cluster if --join leads to none; all nodes may say so.")
@click.option("--new", is_flag=True, help="Start a cluster, even if this node was in one that may live.")
@click.option("--no-rejoin", is_flag=True, help="End with an error when the cluster has gone on without it.")
@click.option("--probe", type=OneOf(PROBES), help="Measures new links: in-band (default), iperf3.")
@_keyed
@click.option("--allowed-keys", metavar="FILE", help="Public keys of others that may join, one a line.")
@click.option(
    "--policy", type=OneOf(POLICIES), help="Trees of the all-reduce: packed (default), fapt, single, ring."
)
@click.option(
    "--compression", type=OneOf(COMPRESSIONS), help="Of gradients on the wire: none (default), bf16, int8."
)
@click.option("--checkpoint-dir", type=Folder(), help="Write the state there. Default: nowhere.")
@click.option(
    "--every", type=Whole(1, 10**9), metavar="STEPS", help="From one checkpoint to the next. Default: 100."
)
@click.option(
    "--checkpoint-copies", type=OneOf(COPIES),
    help="shard (default): each node writes a part, to a folder that all share; whole: each writes all of it.",
)  # fmt: skip
@click.option("--resume", is_flag=True, help="Start the cluster with the newest checkpoint, if there is one.")
@click.option("--resume-from", type=Whole(0, 10**12), metavar="STEP", help="Or with that of this step.")
@click.argument("script", type=Script())
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def run(
    listen: str | None,
    join: str | None,
    name: str | None,
    neighbors: int | None,
    probe: str | None,
    links: tuple[str, ...],
    blocking: bool,
    found: bool,
    new: bool,
    no_rejoin: bool,
    policy: str | None,
    compression: str | None,
    checkpoint_dir: Path | None,
    every: int | None,
    checkpoint_copies: str | None,
    resume: bool,
    resume_from: int | None,
    allowed_keys: str | None,
    script: Path,
    args: tuple[str, ...],
) -> None:
    """Run SCRIPT as a node of a cluster: its Trainer takes these options where it is not given its own."""
    from .preflight import check_environment
    from .script import run_script

    if links and neighbors is not None:
        raise click.BadOptionUsage(
            "--link", f"{links[0]!r} beside --neighbors {neighbors} (expected one of them)"
        )
    if (resume or resume_from is not None) and not (
        checkpoint_dir or os.environ.get("CHAOSNET_CHECKPOINT_DIR")
    ):
        raise click.BadOptionUsage(
            "--resume" if resume else "--resume-from",
            "without --checkpoint-dir (expected the folder to resume from)",
        )
    if links and not join:
        raise click.BadOptionUsage(
            "--link", f"{links[0]!r} without --join (a node that joins nobody has no links)"
        )
    if new and join:
        raise click.BadOptionUsage("--new", f"beside --join {shown(join)} (expected one of them)")
    options = {
        "LISTEN": listen,
        "JOIN": join,
        "NAME": name,
        "NEIGHBORS": neighbors,
        "PROBE": probe,
        "LINKS": ",".join(links),
        "BLOCKING": "1" if blocking else None,
        "FOUND": "1" if found else None,
        "NEW": "1" if new else None,
        "REJOIN": "0" if no_rejoin else None,
        "POLICY": policy,
        "COMPRESSION": compression,
        "CHECKPOINT_DIR": checkpoint_dir,
        "EVERY": every,
        "CHECKPOINT_COPIES": checkpoint_copies,
        "RESUME": "1" if resume else None,
        "RESUME_FROM": resume_from,
        "ALLOWED_KEYS": allowed_keys,
    }
    for option, value in options.items():
        if value not in (None, ""):
            os.environ[f"CHAOSNET_{option}"] = str(value)
    check_environment()
    run_script(script, args)


@cli.command(short_help="Show a running cluster.")
@click.argument("address", type=Address())
@_keyed
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
@click.option("--watch", is_flag=True, help="Go on until Ctrl+C.")
def status(address: str, as_json: bool, watch: bool) -> None:
    """Show members, links, step and recent events of the cluster that the node at HOST:PORT belongs to."""
    from . import client

    if not watch:
        found = client.status(address)
        click.echo(json.dumps(found, indent=2)) if as_json else _show(found)
        return
    try:
        _watch_json(address) if as_json else _watch(address)
    except KeyboardInterrupt:
        return  # That is how watching ends.


def _show(found: dict[str, Any]) -> None:
    from . import dashboard
    from .console import console

    console().print(dashboard.cluster(found))


def _watch_json(address: str) -> None:
    from . import client

    while True:
        click.echo(json.dumps(client.status(address)))
        time.sleep(WATCH_EVERY_S)


def _watch(address: str) -> None:
    """Keep asking; if the node asked goes away, ask the members it told us of."""
    from rich.console import Group
    from rich.live import Live
    from rich.text import Text

    from . import client, dashboard

    found = client.status(address)
    addresses, failed = [address], 0
    with Live(dashboard.cluster(found), screen=True, auto_refresh=False) as live:
        while True:
            try:
                found = client.status(addresses[0], deadline_s=2.0)
                active = [row for row in found["members"] if row["state"] == "active"]
                known = [each for row in active for each in row["addresses"]]
                addresses = [addresses[0], *(each for each in known if each != addresses[0])]
                live.update(dashboard.cluster(found), refresh=True)
                failed = 0
            except PeerUnreachable as error:
                failed += 1
                if failed == len(addresses):
                    raise
                addresses = [*addresses[1:], addresses[0]]
                live.update(Group(Text(str(error), style="red"), dashboard.cluster(found)), refresh=True)
            time.sleep(WATCH_EVERY_S)


@cli.command(short_help="Have a node leave; the others go on.")
@click.argument("address", type=Address())
@_keyed
def leave(address: str) -> None:
    """Have the node at HOST:PORT finish its step and leave; the others go on."""
    from . import client

    click.echo(client.leave(address).text)


@cli.command("go-on", short_help="Have a node that waits go on without those it lost.")
@click.argument("address", type=Address())
@_keyed
def go_on(address: str) -> None:
    """Tell the node at HOST:PORT, which waits, that the members it cannot reach are gone for good.

    It goes on without them, with those it can reach. Be sure that they are dead, or that they wait, too: if they
    train on, one of the two parts is undone when they meet. Say it in one part of the cluster only.
    """
    from . import client

    answer = client.go_on(address)
    click.echo(answer.text, err=not answer.ok)
    if not answer.ok:
        sys.exit(1)


@cli.group(cls=Unsorted, short_help="Add or remove a link between two nodes.")
def link() -> None:
    """Add or remove a link between two members, while they train."""


@link.command("add", short_help="Open a link.")
@click.argument("a", type=Address(), metavar="A")
@click.argument("b", type=Peer(), metavar="B")
@_keyed
def link_add(a: str, b: str) -> None:
    """Open a link between the node at A (HOST:PORT) and B (HOST:PORT or name)."""
    _change_link(a, b, connect=True)


@link.command("remove", short_help="Close a link.")
@click.argument("a", type=Address(), metavar="A")
@click.argument("b", type=Peer(), metavar="B")
@_keyed
def link_remove(a: str, b: str) -> None:
    """Close the link between the node at A (HOST:PORT) and B (HOST:PORT or name)."""
    _change_link(a, b, connect=False)


def _change_link(a: str, b: str, connect: bool) -> None:
    from . import client

    answer = client.change_link(a, b, connect)
    if not answer.ok:
        raise ConfigError(f"link {'add' if connect else 'remove'} {a} {b}: {answer.text}")
    click.echo(answer.text)


@cli.command(short_help="List the checkpoints in a folder.")
@click.argument("folder", type=Folder(), metavar="DIR")
@click.option("--verify", is_flag=True, help="Read all of them and compare every tensor with its hash.")
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def checkpoints(folder: Path, verify: bool, as_json: bool) -> None:
    """List the checkpoints in DIR: which are complete, and what the others lack. Exit code 1 if one is damaged."""
    from . import checkpoint_list

    rows = checkpoint_list.rows(folder, verify)
    click.echo(json.dumps(rows, indent=2)) if as_json else checkpoint_list.show(folder, rows)
    if any(row["problem"] for row in rows if row["complete"]):
        sys.exit(1)


@cli.command(short_help="Make a key for this machine's nodes.")
@click.option(
    "--out", type=click.Path(dir_okay=False, path_type=Path), help="Default: the user's own key file."
)
@click.option("--force", is_flag=True, help="Replace a key that is there.")
def keygen(out: Path | None, force: bool) -> None:
    """Make a key pair, keep it in a file that only this user can read, and print the public key."""
    from .identity import default_file
    from .node.keys import KeyPair, save

    pair, file = KeyPair.new(), out or default_file()
    save(pair, file, force)
    click.echo(f"kept in {file}; its public key:", err=True)
    click.echo(pair.public)


@cli.command(short_help="Let one more node in, once.")
@click.argument("address", type=Address())
@click.option("--minutes", type=Whole(1, 7 * 24 * 60), default=10, show_default=True, help="Then it expires.")
@click.option(
    "--at", type=Address(), help="Where the node is to look for the cluster. Default: as members say."
)
@_keyed
def invite(address: str, minutes: int, at: str | None) -> None:
    """Print a token that lets one node into the cluster of the node at ADDRESS:

    \b
    chaosnet run --listen 0.0.0.0:5555 --join TOKEN train.py
    """
    from .invite import make

    token = make(address, minutes * 60.0, at)
    use = "chaosnet run --listen HOST:PORT --join TOKEN SCRIPT"
    click.echo(f"good for one node, for {minutes} minutes: {use}", err=True)
    click.echo(token)


@cli.command(short_help="Let a key in.")
@click.argument("address", type=Address())
@click.argument("public", type=PublicKey(), metavar="KEY")
@_keyed
def allow(address: str, public: str) -> None:
    """Let the holder of KEY, a public one, into the cluster of the node at ADDRESS."""
    _command_key(address, "allow", public)


@cli.command(short_help="Throw a key out, for good.")
@click.argument("address", type=Address())
@click.argument("public", type=PublicKey(), metavar="KEY")
@_keyed
def revoke(address: str, public: str) -> None:
    """Shut KEY out of the cluster of the node at ADDRESS; a member that uses it is expelled."""
    _command_key(address, "revoke", public)


def _command_key(address: str, verb: Literal["allow", "revoke"], key: str) -> None:
    from . import client

    answer = client.command_key(address, verb, key)
    if not answer.ok:
        raise ConfigError(f"{verb} {key}: {answer.text}")
    click.echo(answer.text)


@cli.command(short_help="See it work on this machine (half a minute).")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/demo"), show_default=True,
    help="Folder for the summary, the picture and the nodes' logs.",
)  # fmt: skip
@click.option(
    "--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Of the model and the data split."
)
def demo(out: Path, seed: int) -> None:
    """Train on this machine with nodes that join, leave and are killed. Takes half a minute."""
    from .demo import run_demo

    run_demo(out, seed)


@cli.command(short_help="Harm a cluster on this machine for a long time, and check that nothing is lost.")
@click.option("--minutes", type=Amount(0.1, 10_000), default=60.0, show_default=True, metavar="M")
@click.option(
    "--every", type=Amount(0.1, 600), default=5.0, show_default=True, metavar="SECONDS",
    help="Between two faults, on average.",
)  # fmt: skip
@click.option(
    "--kill-scheduler", "kills", type=Whole(1, 100_000), metavar="N",
    help="Nothing but kill -9 of whoever is the scheduler, N times, as fast as the cluster recovers.",
)  # fmt: skip
@click.option("--seed", type=Whole(0, 2**31), default=0, show_default=True, help="Of the choice of faults.")
@click.option(
    "--out", type=click.Path(file_okay=False, path_type=Path), default=Path("runs/soak"), show_default=True,
    help="Folder for the summary, the picture and the nodes' logs.",
)  # fmt: skip
def soak(minutes: float, every: float, kills: int | None, seed: int, out: Path) -> None:
    """Train on six processes that are killed, stopped, cut off, that leave and join, every few seconds.

    Exit code 1 if a step was lost, states differ, memory grew, or a new scheduler took too long.
    """
    from .soak import run_soak

    run_soak(minutes, 0.0 if kills else every, seed, out, kills)


@cli.command(
    short_help="Make links like the edge's on this machine.",
    add_help_option=False,
    context_settings={"ignore_unknown_options": True},
)
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def testbed(args: tuple[str, ...]) -> None:
    """Overlays of shaped links on this machine; see `chaosnet testbed --help`."""
    from .testbed import testbed as group  # Imports what --help need not wait for.

    group.main(list(args), prog_name="chaosnet testbed", standalone_mode=False)


@cli.group(cls=Benchmarks)
def bench() -> None:
    """Measure, and compare with others."""


@cli.command(short_help="What a cluster of pipelines would do after a loss, and why.")
@click.argument(
    "cluster", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="CLUSTER.yaml"
)
@click.argument("profile", metavar="PROFILE")
@click.option(
    "--fail", "failed", multiple=True, required=True, metavar="NODE", help="Who is lost; may be repeated."
)
@click.option("--json", "as_json", is_flag=True, help="As JSON.")
def plan(cluster: Path, profile: str, failed: tuple[str, ...], as_json: bool) -> None:
    """Compare every recovery that could follow the loss of NODE in the cluster of CLUSTER.yaml.

    PROFILE is a file with what each layer costs, or a made-up one: llama2-7b, llama2-13b, llama2-34b.
    """
    from .plan import explain

    explain(cluster, profile, [name for each in failed for name in each.split(",")], as_json)


@cli.command(short_help="Simulate training under failures, with the recoveries of several systems.")
@click.argument(
    "scenario", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="SCENARIO.yaml"
)
@click.option("--seeds", type=Whole(1, 100_000), help="How many runs. Default: as the scenario says.")
@json_option
@click.option("--plot", "picture", type=OutputFile(), help="Write a PNG of the first run.")
def simulate_training(
    scenario: Path, seeds: int | None, json_file: Path | None, picture: Path | None
) -> None:
    """Train on a virtual cluster that loses workers, once with each system's way to recover, and compare."""
    from .simulate_training import run_scenario

    run_scenario(scenario, seeds, json_file, picture)


def _check_simulated(ctx: click.Context) -> None:
    """One thing to run, and nothing that does not belong to it."""
    given = [
        _name_of(param)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is click.core.ParameterSource.COMMANDLINE
    ]
    chosen = [option for option in given if option in SIMULATED]
    if len(chosen) != 1:
        raise click.UsageError(
            f"{len(chosen)} things to run (expected exactly one of {', '.join(SIMULATED)})"
        )
    fitting = SIMULATED[chosen[0]]
    for option in given:
        if option not in (*chosen, *fitting):
            raise click.BadOptionUsage(
                option, f"means nothing with {chosen[0]} (expected {' or '.join(fitting)})"
            )


@cli.command(short_help="Run the protocol on a virtual network that fails.")
@click.option("--schedules", type=Whole(1, 10**9), metavar="N", help="How many random lives.")
@click.option(
    "--from", "first", type=Whole(0, 10**12), default=0, metavar="SEED", help="Seed of the first. Default: 0."
)
@click.option(
    "--nodes", type=NodeRange(), help="How many nodes a life begins with. Default: 2..7; crash points: 2..4."
)
@click.option("--hard", is_flag=True, help="Random lives with more faults: 12 to 24 each.")
@click.option("--rates", is_flag=True, help="Bytes take time in all random lives, not in some.")
@click.option("--seed", type=Whole(0, 10**12), metavar="SEED", help="Replay the life of one seed.")
@click.option("--crash-points", is_flag=True, help="Crash everybody at every message of every negotiation.")
@click.option(
    "--seeds", type=Whole(1, 1000), default=1, metavar="N", help="Networks per crash point. Default: 1."
)
@click.option(
    "--restart", is_flag=True, help="Who crashes at a crash point is started again half a second later."
)
@click.option("--crash-point", metavar="POINT", help="Replay one crash point.")
@click.option("--mutants", is_flag=True, help="Break the cores on purpose: is it noticed?")
@click.option("--trace", type=OutputFile(), help="Write the story of what is replayed.")
@click.option(
    "--churn", type=PerSecond(), help="Measure what events cost in one cluster of --nodes, so many of them."
)
@click.option(
    "--hours",
    type=Amount(0.0001, 1000),
    default=1.0,
    metavar="H",
    help="Of virtual time, with --churn. Default: 1.",
)
@json_option
def simulate(
    schedules: int | None, first: int, nodes: tuple[int, int] | None, hard: bool, rates: bool,
    seed: int | None, crash_points: bool, seeds: int, restart: bool, crash_point: str | None, mutants: bool,
    churn: float | None, hours: float, trace: Path | None, json_file: Path | None,
) -> None:  # fmt: skip
    """Run the real protocol on a virtual network with random crashes, joins, leaves and cut links.

    Exactly one of --schedules, --seed, --crash-points, --crash-point, --mutants and --churn says what to run.
    --churn is for large clusters: what each event costs, e.g. --nodes 1000 --churn 1/s --hours 0.01.
    """
    _check_simulated(click.get_current_context())
    if churn is not None:
        if nodes is None or nodes[0] != nodes[1] or nodes[0] < 10:
            raise click.UsageError(
                "--churn: expected one number of --nodes from 10 on with it, e.g. --nodes 1000"
            )
        from .simulate_scale import run_scale

        run_scale(nodes[0], churn, hours, first, json_file)
        return
    from . import simulate as simulation

    if schedules is not None:
        simulation.run_seeds(first, schedules, nodes or (2, 7), json_file, hard, rates)
    elif seed is not None:
        simulation.replay_seed(seed, nodes or (2, 7), trace, hard, rates)
    elif crash_points:
        if nodes is not None and nodes[1] > MAX_CRASH_NODES:
            raise click.BadOptionUsage(
                "--nodes", f"{nodes[0]}..{nodes[1]} with --crash-points (expected at most {MAX_CRASH_NODES})"
            )
        simulation.run_crash_points(nodes or (2, 4), seeds, restart, json_file)
    elif crash_point is not None:
        simulation.replay_point(crash_point, trace)
    else:
        simulation.run_mutants(json_file)
