"""The systems that the Chaos paper compares (Sec. VI-A), as ways to add a node to a cluster that trains.

All are ours underneath: the same transport, sums, probes and testbed, so what differs is what the paper says of each.

    Pollux         all stop, one writes a checkpoint to the disk, all are started again with one more, and load it
    EDL+           everything from the one neighbour that is fastest, behind a barrier: nobody trains meanwhile
    Autoscaling    equal parts from all nodes, along the paths with the fewest links; who sends waits
    Chaos          parts by Algorithms 1 and 2 from all neighbours; who sends waits (Sec. IV-B)
    chaosnet       the same parts, who is done early sends for others; nobody waits unless links are too slow for that
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..protocols.errors import ConfigError
from .chaos_stage import Case, Pull, ScaleOutTimes, Stage, Work, stage, usual_s
from .overlay import PATIENCE_S, PlacedNode


class ScaleOutSystem(Protocol):
    """A way to scale out."""

    @property
    def on_disk(self) -> bool:
        """Is the state loaded from a checkpoint by every node for itself?"""

    def scale_out(self, on: Stage) -> ScaleOutTimes:
        """Add the case's joiner, and let it leave again."""


@dataclass(frozen=True, slots=True)
class StopFree:
    """The new node pulls the state from nodes that run."""

    pull: Pull
    barrier: bool = False
    on_disk: bool = False

    def scale_out(self, on: Stage) -> ScaleOutTimes:
        """As of ScaleOutSystem."""
        return on.join(self.pull, self.barrier)


@dataclass(frozen=True, slots=True)
class StopResume:
    """Pollux. The disk is this machine's, for all nodes; the checkpoint is read from there, and not from a cache."""

    on_disk: bool = True

    def scale_out(self, on: Stage) -> ScaleOutTimes:
        """As of ScaleOutSystem. From the word to stop until all nodes, the new one too, can train again."""
        on.warm_up()
        file = on.folder / "checkpoint.pt"
        began_s = time.monotonic()
        times = _stop(on, file)
        joiner, again_s = _restart(on, file)
        delay_s = max(again_s.values()) - began_s
        idle = {name: again_s[name] - max(each) for name, each in times.items()}
        joiner.tell({"do": "leave"})
        joiner.hear(PATIENCE_S)
        joiner.kill()
        step_s = statistics.median(usual_s(each, began_s) for each in times.values())
        return ScaleOutTimes(delay_s, idle, file.stat().st_size, {}, step_s)


def _stop(on: Stage, file: Path) -> dict[str, list[float]]:
    """All of them, once the first has written. Returns: when each had completed its steps."""
    first = on.case.members[0]
    on.members[first].tell({"do": "save", "file": str(file)})
    times: dict[str, list[float]] = {first: on.members[first].hear(PATIENCE_S)["times_s"]}
    for name, answer in on.ask_members(do="leave").items():
        times[name] = answer["times_s"]
    on.kill()
    return times


def _restart(on: Stage, file: Path) -> tuple[PlacedNode, dict[str, float]]:
    """All, and one more. Returns: the new one, and when each could train.

    Who names neighbours is refused until they are members, so nodes come in as many turns as that takes.
    """
    order = [*on.case.members, on.case.joiner]
    nodes: dict[str, PlacedNode] = {}
    turns: dict[str, int] = {}
    for place, name in enumerate(order):
        links = [peer for peer in order[:place] if on.case.topology.graph.has_edge(name, peer)]
        turns[name] = 1 + max((turns[peer] for peer in links), default=-1)
        nodes[name] = on.start(name, links, Pull(), checkpoint=str(file), outside=True)
    for node in nodes.values():
        node.hear(PATIENCE_S)
    again_s: dict[str, float] = {}
    for turn in range(1 + max(turns.values())):
        some = [name for name in order if turns[name] == turn]
        for name in some:
            nodes[name].tell({})
        again_s |= {name: nodes[name].hear(PATIENCE_S)["member_s"] for name in some}
    joiner = nodes.pop(on.case.joiner)
    on.members.update(nodes)
    return joiner, again_s


SYSTEMS: dict[str, ScaleOutSystem] = {
    "Pollux": StopResume(),
    "EDL+": StopFree(Pull("single", steals=False, blocking=True), barrier=True),
    "Autoscaling": StopFree(Pull("even", from_all=True, steals=False, blocking=True)),
    "Chaos": StopFree(Pull("adaptive", steals=False, blocking=True)),
    "chaosnet": StopFree(Pull()),
}
FIG15: dict[str, ScaleOutSystem] = {
    "single source": StopFree(Pull("single", steals=False)),
    "multi-source": StopFree(Pull("even", from_all=True, steals=False)),
    "multi-neighbour": StopFree(Pull("even", steals=False)),
    "chaosnet": StopFree(Pull()),
}
FIG16: dict[str, ScaleOutSystem] = {
    "even": StopFree(Pull("even", steals=False)),
    "greedy": StopFree(Pull("greedy", steals=False)),
    "optimal": StopFree(Pull("optimal", steals=False)),
    "chaosnet": StopFree(Pull()),
}


def measure(
    case: Case, work: Work, systems: Mapping[str, ScaleOutSystem], repeat: int
) -> dict[str, list[ScaleOutTimes]]:
    """So many scale-outs by each. Those that need no restart take turns; the others come after them."""
    took: dict[str, list[ScaleOutTimes]] = {name: [] for name in systems}
    for on_disk in (False, True):
        some = {name: each for name, each in systems.items() if each.on_disk == on_disk}
        if some and on_disk and work.trained_bytes:
            raise ConfigError(
                f"{', '.join(some)}: every node loads a state that is not trained (expected --trained-mb 0)"
            )
        if not some:
            continue
        with stage(case, work) as on:
            on.start_members(outside=on_disk)
            for _ in range(repeat):
                for name, system in some.items():
                    took[name].append(system.scale_out(on))
    return took


def plain(took: Mapping[str, list[ScaleOutTimes]]) -> dict[str, Any]:
    """For JSON: delays, idle times and bytes, by system."""
    return {
        "delay_s": {name: [each.delay_s for each in joins] for name, joins in took.items()},
        "idle_s": {name: [each.idle_s for each in joins] for name, joins in took.items()},
        "idle_by_member_s": {name: [each.idle_by_member for each in joins] for name, joins in took.items()},
        "bytes": {name: [each.bytes for each in joins] for name, joins in took.items()},
        "member_step_s": {name: [each.step_s for each in joins] for name, joins in took.items()},
        "phases_s": {name: [each.phases_s for each in joins] for name, joins in took.items()},
    }
