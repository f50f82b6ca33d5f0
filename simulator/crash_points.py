"""Crash at every message: each negotiation, each message that it sends, each node that takes part in it.

A negotiation is played once without faults, and its messages are numbered, hop by hop. Then it is played
again for each of them and each participant, who crashes there: the sender just before and just after it sends, the
receiver just before and just after the message reaches its core, the scheduler, and whom it is about (the joiner or
leaver). The cluster must come to rest: all who live are active in one view, have left, or, as joiners, have given up
and get in when they ask again; and no rule is broken on the way (cluster.py).

Another seed is another network: other delays, so another order of messages, with points of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from ..node.agent.core import Phase
from ..protocols.errors import ConfigError
from .many_runs import in_processes
from .negotiations import NEGOTIATIONS, QUIET_S, Negotiation, PlayedNegotiation, Point, Sent, When
from .nodes import SimNode
from .random_run import Violation

MAX_NODES = 5
SETTLED_WITHIN_S = 80.0  # A joiner that is left alone asks for 24 s and knocks for 20 s, perhaps twice.
PARKED_S = 6.0  # Who is parked dials once a second, and waits for as long.


def record(negotiation: Negotiation, nodes: int, seed: int) -> tuple[list[Sent], str]:
    """The messages of the negotiation when nobody crashes, and the node that it is about."""
    stage = PlayedNegotiation(seed)
    stage.grow(nodes - negotiation.joiners, negotiation.tensors, negotiation.parts)
    over = negotiation.play(stage)
    stage.until(lambda: over() and stage.rests())
    stage.watching = False
    return stage.sent, stage.subject


def points(negotiation: Negotiation, nodes: int, seed: int, restart: bool = False) -> Iterator[Point]:
    """Every crash of every participant at every message; the same crash is not named twice."""
    sent, subject = record(negotiation, nodes, seed)
    for index, each in enumerate(sent):
        for when in When:
            ends = (each.sender, each.receiver)
            if when is When.SCHEDULER and each.scheduler in ("", *ends):
                continue
            if when is When.SUBJECT and subject in ("", *ends, each.scheduler):
                continue
            yield Point(negotiation.name, nodes, seed, index, when, each, restart)


def point_named(name: str) -> Point:
    """The point of that name. Raises: ConfigError if there is none."""
    parts = name.removesuffix("/restart").split("/")
    if len(parts) == 5 and parts[0] in NEGOTIATIONS and all(part.isdigit() for part in parts[1:4]):
        negotiation, nodes, seed = NEGOTIATIONS[parts[0]], int(parts[1]), int(parts[2])
        if negotiation.least <= nodes <= MAX_NODES:
            found = points(negotiation, nodes, seed, name.endswith("/restart"))
            if point := next((each for each in found if each.name == name), None):
                return point
    raise ConfigError(f"--crash-point: {name!r} is none (expected NEGOTIATION/NODES/SEED/INDEX/WHEN)")


def play(
    point: Point, on_stage: Callable[[PlayedNegotiation], None] = lambda stage: None, record: bool = False
) -> PlayedNegotiation:
    """One life with one crash, until all have come to rest. Raises: Violation with the story.

    `on_stage` gets the stage before anything happens; `record` keeps its whole story.
    """
    stage = PlayedNegotiation(point.seed, point, record)
    on_stage(stage)
    try:
        _play(stage, NEGOTIATIONS[point.negotiation], point.nodes)
    except Exception as error:
        text = f"{point.name} ({_describe(point)}): {type(error).__name__}: {error}"
        raise Violation(f"{text}\n{stage.story()}") from error
    return stage


def _play(stage: PlayedNegotiation, negotiation: Negotiation, nodes: int) -> None:
    stage.grow(nodes - negotiation.joiners, negotiation.tensors, negotiation.parts)
    negotiation.play(stage)
    settled_by_s = stage.now_s + SETTLED_WITHIN_S
    _rest(stage, settled_by_s)
    _check(stage)
    for name in sorted(stage.expected):  # Whoever gave up may ask again, once all is quiet.
        if stage.nodes[name].done == "JoinFailed" and stage.active():
            stage.add(name, seeds=[node.name for node in stage.active()], degree=2)
            _rest(stage, stage.now_s + SETTLED_WITHIN_S)
            _check(stage)


def _rest(stage: PlayedNegotiation, settled_by_s: float) -> None:
    """Run until nothing but training has gone on for a while, or all have been parked for longer."""
    restless_s = parked_s = stage.now_s
    while stage.now_s < settled_by_s:
        stage.run(stage.now_s + QUIET_S / 4)
        if not stage.rests() or stage.cuts:
            restless_s = stage.now_s
        if not all(node.agent.parked for node in stage.living()) or stage.cuts:
            parked_s = stage.now_s
        if stage.now_s >= min(restless_s + QUIET_S, parked_s + PARKED_S):
            return


def _check(stage: PlayedNegotiation) -> None:
    complaints = stage.unsettled(stage.now_s - QUIET_S)
    assert not complaints, "; ".join(complaints)
    parked = [node for node in stage.living() if node.agent.parked and node.agent.phase is not Phase.JOINING]
    for node in parked:
        assert _too_few_live(stage, node), f"{node.name} is parked ({node.agent.parked})"
    assert parked or not stage.living() or stage.rests(), "not all are in one view"


def _too_few_live(stage: PlayedNegotiation, node: SimNode) -> bool:
    """Do too few members live of the node's view, or of one in which others may still act, to go on?

    Half is enough (docs/design.md, "Quorums"): nobody is silent, so all deaths are seen.
    """
    live = {member.id for member in node.view.members if stage.lives(member)}
    return any(
        2 * len(live.intersection(each.members)) < len(each.members) for each in node.agent.sync.electorates()
    )


def _describe(point: Point) -> str:
    sent = point.sent
    return f"{sent.kind} from {sent.sender} to {sent.receiver}, crash: {point.when.value}"


# --- running them all ---


@dataclass(slots=True)
class Played:
    """What came of the points of one negotiation, or of all."""

    points: int = 0
    # Points whose message was never delivered, or whose sender had left: nobody crashed there.
    not_reached: list[str] = field(default_factory=list)
    by_kind: Counter[str] = field(default_factory=Counter)
    violations: dict[str, str] = field(default_factory=dict)  # Point: which rule broke, and the story.


def enumerate_points(nodes: Iterable[int], seeds: Iterable[int], restart: bool = False) -> list[Point]:
    """All points of all negotiations, in clusters of these sizes."""
    seeds = list(seeds)
    return [
        point
        for negotiation in NEGOTIATIONS.values()
        for size in nodes
        if size >= negotiation.least
        for seed in seeds
        for point in points(negotiation, size, seed, restart)
    ]


def play_all(
    chosen: Sequence[Point],
    processes: int | None = None,
    on_progress: Callable[[dict[str, Played]], None] | None = None,
) -> dict[str, Played]:
    """Play each point once. Returns: what came of them, by negotiation."""
    played = {point.negotiation: Played() for point in chosen}
    for point, reached, violation in in_processes(_outcome, chosen, processes):
        of = played[point.negotiation]
        of.points += 1
        if not reached:
            of.not_reached.append(point.name)
        of.by_kind[point.sent.kind] += 1
        if violation:
            of.violations[point.name] = violation
        if on_progress is not None:
            on_progress(played)
    return played


def _outcome(point: Point) -> tuple[Point, bool, str]:
    try:
        return point, bool(play(point).victims), ""
    except Violation as violation:
        return point, True, str(violation)
