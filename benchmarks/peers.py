"""`chaosnet bench peers`: chaosnet beside torchft and hivemind, with one state, on one machine, in turns.

Members train (parameters with Adam's moments, so the state is three times as large; a sleep per step is the forward
pass). Then, in lives of their own,

    join          one more is started and, once its model is there, told to join: from the call of its system to its
                  first completed step
    gap           the longest time between two steps of a member that touches the join, less their median before
    kill          a member is killed (SIGKILL, the whole process group) right after a step: until all others have
                  completed the next step with gradients of at least two members
    stop          the same after a SIGSTOP, as of a machine that hangs
    coordinator   the same after SIGKILL of what coordinates: the scheduler's node; the lighthouse; the first DHT peer

Workers are scripts of `peers_workers`, as each system's documentation has them, in an environment of their own that
is made here by pip, from wherever pip is configured to take packages. torch is that of this installation.

Machines are network namespaces with one link each, to a switch; or (`--loopback`) none at all.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any

import click
import torch

from ..protocols.errors import ConfigError
from ..settings.options import Amount, Folder, OneOf, Several, Whole
from ..terminal.outputs import write_json
from .figures import bars, legend_below, outputs, picture, table
from .machines import Loopback, Machines, switched
from .overlay import need_root
from .peers_life import COORDINATOR, LifeSettings, SystemLife, TimeOrWhy, Unsettled, members
from .peers_systems import SYSTEMS, PeerSystem, default_folder, environment, version_of

EVENTS = {  # What is measured, and what its column is called.
    "join": "a node joins, s",
    "gap": "gap of the others, s",
    "kill": "kill -9, s",
    "stop": "SIGSTOP, s",
    "coordinator": "coordinator dies, s",
}
LIVES = (("join", "kill"), ("stop",), ("coordinator",))
"""What happens in one life of a cluster, in order: after a member that hangs, others are not as they were."""


Found = dict[str, dict[str, list[TimeOrWhy]]]
"""By system and event, one outcome a round; `step` is the usual step before each event."""


def measure(
    pythons: Mapping[str, Path],
    events: Sequence[str],
    machines: Machines,
    settings: LifeSettings,
    repeat: int,
) -> Found:
    """Systems take turns, life by life."""
    found: Found = {name: {event: [] for event in ("step", *EVENTS)} for name in pythons}
    for number in range(repeat):
        for wanted in lives(events):
            for name, python in pythons.items():
                done = live(SYSTEMS[name], python, wanted, machines, settings)
                for event, outcome in done:
                    found[name][event].append(outcome)
                shown = ", ".join(f"{event} {cell(outcome)}" for event, outcome in done)
                click.echo(f"round {number + 1} of {repeat}, {name}: {shown}", err=True)
    return found


def lives(events: Sequence[str]) -> list[tuple[str, ...]]:
    """Those of LIVES that are wanted; the gap is that of the join."""
    wanted = {"join" if each == "gap" else each for each in events}
    return [some for life in LIVES if (some := tuple(each for each in life if each in wanted))]


def live(
    system: PeerSystem, python: Path, events: Sequence[str], machines: Machines, settings: LifeSettings
) -> list[tuple[str, TimeOrWhy]]:
    """One cluster, and what happens to it. What does not begin to train is shown, and gives no number."""
    done: list[tuple[str, TimeOrWhy]] = []
    with tempfile.TemporaryDirectory(prefix="chaosnet-peers-") as folder, ExitStack() as stack:
        life = SystemLife(system, python, machines, settings, Path(folder))
        stack.callback(life.kill)
        try:
            life.begin()
            done.append(("step", TimeOrWhy(life.usual_s())))
            for event in events:
                if event == "join":
                    done += zip(("join", "gap"), life.join(), strict=True)
                else:
                    done.append((event, life.fault(event)))
        except Unsettled as error:
            click.echo(str(error), err=True)
            seen = {event for event, _ in done}
            done += [(each, TimeOrWhy(None, "no start")) for each in events if each not in seen]
    return done


def median(outcomes: Sequence[TimeOrWhy]) -> TimeOrWhy:
    """Who has no number is slower than all who have. Of an even count the slower of the two in the middle."""
    if not outcomes:
        return TimeOrWhy(None, "")
    ranked = sorted(outcomes, key=lambda each: float("inf") if each.seconds is None else each.seconds)
    return ranked[len(ranked) // 2]


def cell(outcome: TimeOrWhy) -> str:
    """For the table."""
    return outcome.why or "-" if outcome.seconds is None else f"{outcome.seconds:.2f}"


# --- the command ---


@click.command("peers")
@click.option("--systems", type=Several(OneOf(tuple(SYSTEMS))), default=",".join(SYSTEMS), show_default=True)
@click.option("--events", type=Several(OneOf(tuple(EVENTS))), default=",".join(EVENTS), show_default=True)
@click.option(
    "--mb", type=Amount(0.001, 10_000), default=45.0, show_default=True,
    help="Of parameters; with Adam's moments the state is three times that.",
)  # fmt: skip
@click.option(
    "--pause", "pause_s", type=Amount(0, 60), default=0.3, show_default=True, help="Sleep a step, s."
)
@click.option("--members", "count", type=Whole(3, 16), default=3, show_default=True, help="Before a join.")
@click.option(
    "--rate",
    type=Amount(1, 100_000),
    default=1000.0,
    show_default=True,
    help="Of each machine's link, Mbit/s.",
)
@click.option("--loopback", is_flag=True, help="No namespaces: no root, and no limit to a link.")
@click.option(
    "--patience", "patience_s", type=Amount(1, 3600), default=60.0, show_default=True, help="Of an event, s."
)
@click.option("--repeat", type=Whole(0, 100), default=5, show_default=True, help="Rounds.")
@click.option(
    "--onto", type=click.Path(exists=True, dir_okay=False, path_type=Path), metavar="FILE.json",
    help="Of an earlier run: its rounds count, too.",
)  # fmt: skip
@click.option(
    "--environments",
    type=Folder(),
    help="Where torchft and hivemind are installed. Default: the user's cache.",
)
@outputs
def peers_command(
    systems: tuple[str, ...], events: tuple[str, ...], mb: float, pause_s: float, count: int, rate: float,
    loopback: bool, patience_s: float, repeat: int, environments: Path | None, onto: Path | None,
    json_file: Path | None, plot_file: Path | None,
) -> None:  # fmt: skip
    """chaosnet beside torchft and hivemind: joins and deaths, with one trained state, in turns."""
    if not repeat and onto is None:
        raise click.UsageError("--repeat 0 measures nothing (expected 1 or more, or --onto FILE)")
    if repeat and not loopback:
        need_root("peers", " (or --loopback)")
    pythons, versions = _installed(systems, environments or default_folder())
    result: dict[str, Any] = {
        "mb": mb, "state_mb": 3 * mb, "pause_s": pause_s, "members": count, "patience_s": patience_s,
        "rate_mbit": None if loopback else rate, "cores": os.cpu_count(), "torch": str(torch.__version__),
        "versions": versions,
    }  # fmt: skip
    found = earlier(onto, result) if onto else {}
    names = [*members(count), "joiner", COORDINATOR]
    with ExitStack() as stack:
        machines = Loopback() if loopback or not repeat else stack.enter_context(switched(names, rate))
        settings = LifeSettings(mb, pause_s, count, patience_s)
        for name, rows in measure(pythons, events, machines, settings, repeat).items():
            for event, outcomes in rows.items():
                found.setdefault(name, {}).setdefault(event, []).extend(outcomes)
    medians = {name: {event: median(outcomes) for event, outcomes in found[name].items()} for name in systems}
    table(
        ["", "usual step, s", *EVENTS.values()],
        [[f"{name} {versions[name]}", *map(cell, medians[name].values())] for name in systems],
    )
    for name in systems:
        counts = {len(found[name][event]) for event in EVENTS if found[name][event]}
        click.echo(f"{name}: {SYSTEMS[name].configured}. Coordinator: {SYSTEMS[name].coordinator}.")
        click.echo(f"    medians of {' or '.join(map(str, sorted(counts))) or 0}")
    result["medians"] = _plain(medians, TimeOrWhy._asdict)
    result["rounds"] = _plain(found, lambda outcomes: [each._asdict() for each in outcomes])
    write_json(json_file, result)
    if plot_file is not None:
        picture(result, plot_file, _draw)


def earlier(file: Path, settings: Mapping[str, Any]) -> Found:
    """The rounds that --json has written. Raises ConfigError if they are of other settings or versions."""
    try:
        told = json.loads(file.read_text())
        rounds = {
            name: {event: [TimeOrWhy(**each) for each in rows[event]] for event in ("step", *EVENTS)}
            for name, rows in told["rounds"].items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"--onto: {str(file)!r} is none of bench peers' files ({error!r})") from None
    for key, value in settings.items():
        before = told.get(key)
        if key == "versions":  # Of the systems that both have.
            value, before = ({name: of[name] for name in value if name in before} for of in (value, before))
        if before != value:
            raise ConfigError(
                f"--onto: {str(file)!r} was measured with {key} {before!r} (expected {value!r})"
            )
    return rounds


def _plain(rows: Mapping[str, Mapping[str, Any]], of: Callable[[Any], Any]) -> dict[str, dict[str, Any]]:
    """For JSON: by system and event."""
    return {name: {event: of(each) for event, each in row.items()} for name, row in rows.items()}


def _installed(systems: Sequence[str], folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Interpreters and versions, by system."""
    pythons, versions = {}, {}
    for name in systems:
        package = SYSTEMS[name].package
        pythons[name] = Path(sys.executable) if package is None else environment(package, folder)
        versions[name] = metadata.version(name) if package is None else version_of(package, pythons[name])
    return pythons, versions


def _draw(figure: Any, found: dict[str, Any]) -> None:
    axes = figure.subplots()
    rows = found["medians"]
    events = list(next(iter(rows.values())))
    bars(axes, events, {name: [row[event]["seconds"] for event in events] for name, row in rows.items()})
    axes.set_yscale("log")
    axes.set_ylabel("seconds (no bar: not in time, or not at all)")
    axes.set_title(f"{found['members']} members, a state of {found['state_mb']:g} MB")
    legend_below(figure, axes)
