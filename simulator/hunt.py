"""Looks for a life in which a broken rule is noticed.

`hunt` plays every negotiation once, and every death of one of two members (pairs.py), then what a joiner has from an
earlier membership (lagging.py), stories (stories.py), seeds that have caught a mutant, joiners that lag (lagging.py),
every so many of the crash points (crash_points.py), then random lives, seed after seed, until an invariant breaks; a
mutant that breaks none within its budget has survived. What has no effect but a hang is caught because all must come
to rest.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any
from unittest import mock

from ..protocols.errors import ConfigError
from . import (  # noqa: F401  All but one register mutants.
    flush_mutants,
    join_mutants,
    network,
    parts_mutants,
    tensor_mutants,
)
from .crash_points import play, point_named, points
from .lagging import LOSSES, MEMBERSHIPS
from .lagging import play as play_loss
from .many_runs import in_processes
from .mutants import MUTANTS
from .negotiations import NEGOTIATIONS
from .pairs import DEATHS
from .pairs import play as play_death
from .random_run import run
from .stories import STORIES

EVERY = 30  # Of the crash points of three nodes.
SEEDS = 1000  # The budget of random lives of each.
# Seeds that have caught one before.
KNOWN = (0, 6, 13, 27, 28, 56, 131, 174, 195, 244, 283, 327, 423, 427, 514, 586, 30960)
# The same, of lives in which bytes take time.
KNOWN_WITH_RATES = (6, 14, 17, 21, 28, 37, 60, 107, 247, 921, 1937)
KNOWN_LARGER = 30946, 179836  # With rates as well, and up to seven nodes at first.
# The same, of crash points.
KNOWN_POINTS = "rejoin/3/0/99/sender-before/restart", "parts-join/3/0/103/sender-before"
KNOWN_FAR = 5, 27  # The same, of lives with far links.
KNOWN_WITH_TENSORS = 0, 2, 3, 15, 56, 61, 143  # The same, of lives in which nodes need each other's tensors.
# The same, of lives in which nodes keep parts of the state.
KNOWN_WITH_PARTS = 1, 2, 5, 24, 52, 94, 134, 361, 602, 626, 1177
KNOWN_HARD = (900293,)  # The same, with many faults, and up to seven nodes at first.
TRIED_FIRST = {  # What is likely to catch a mutant that many lives come before: it only saves time.
    "whoever-leaves-takes-its-parts-along": "seed 602 --parts",
    "joiners-do-not-know-who-leaves": "seed 361 --parts",
    "late-parts-count": "seed 602 --parts",
    "parts-outlive-their-attempt": "seed 94 --parts",
    "a-change-of-any-view": "seed 13",
    "early-tensors-are-lost": "seed 3 --tensors",
    "lost-tensors-tear-nothing": "seed 143 --tensors",
    "proofs-are-wiped-out": "crash point rejoin/3/0/99/sender-before/restart",
    "ready-before-it-is-summed": "crash point parts-join/3/0/103/sender-before",
    "results-are-not-passed-through": "seed 5 --parts",
    "earlier-results-are-not-passed-on": "loss n1 is cut off at 2 steps",
    "tensors-are-not-passed-on": "seed 2 --tensors",
    "older-news-counts": "seed 514",
    "recovered-results-keep-their-bundles": "seed 131",
    "completed-steps-are-done-over": "seed 14 --rates",
    "whoever-is-behind-is-taken": "loss n3 dies at 6 steps",
    "earlier-results-are-not-served": "loss n1 is cut off at 2 steps",
    "earlier-results-are-given-up": "loss n1 is cut off at 2 steps",
    "members-say-nothing": "seed 30946 --rates --nodes 2..7",
    "control-waits-behind-bulk": "seed 28 --rates",
    "install-without-its-flush": "seed 247 --rates",
    "rounds-know-no-distance": "seed 27 --far --nodes 2..7",
    "revoked-chunks-are-sent": "seed 14 --rates",
    "parts-taken-back-are-mixed": "seed 56",
    "a-flush-drops-sums": "seed 602 --parts",
}
NODES = 2, 4  # Small clusters lose their quorum more often, and live faster.
ACTIONS = 300_000  # A life of a minute takes some 30,000; a flood is to be noticed soon.


Ground = tuple[str, Callable[[], Any]]
"""A life by its name; a call plays it."""


@dataclass(frozen=True, slots=True)
class Hunt:
    """How a mutant was caught: after so many lives; `by` "" if it was not."""

    mutant: str
    lives: int
    by: str
    why: str


def hunt(name: str, seeds: Iterable[int] = range(SEEDS)) -> Hunt:
    """Look for a life in which the mutant breaks an invariant."""
    with MUTANTS[name].alive(), mock.patch.object(network, "MAX_ACTIONS", ACTIONS):
        for lives, (ground, play_it) in enumerate(chain(_first(name), _grounds(seeds)), 1):
            try:
                play_it()
            except Exception as error:
                return Hunt(name, lives, ground, _first_line(error))
    return Hunt(name, lives, "", "")


def _first(name: str) -> Iterator[Ground]:
    """What is likely to catch that mutant, if that is known."""
    return (ground for ground in _known() if ground[0] == TRIED_FIRST.get(name))


def _grounds(seeds: Iterable[int]) -> Iterator[Ground]:
    """Lives to look at, the short ones first."""
    recorded = []
    for each in NEGOTIATIONS.values():
        yield f"negotiation {each.name}", lambda each=each: recorded.append(list(points(each, 3, 0)))  # type: ignore[misc]
    yield from _known()
    for found in recorded:
        for point in found[::EVERY]:
            yield f"crash point {point.name}", functools.partial(play, point)
    for seed in seeds:
        yield f"seed {seed}", functools.partial(run, seed, nodes=NODES)
        yield f"seed {seed} --rates", functools.partial(run, seed, nodes=NODES, rates=True)


def _known() -> Iterator[Ground]:
    """Those that are the same each time: small plays, and seeds that have caught one."""
    for death in DEATHS.values():
        yield f"death {death.name}", functools.partial(play_death, death)
    yield from MEMBERSHIPS.items()
    for title, story in STORIES.items():
        yield f"story {title}", story
    for seed in KNOWN:
        yield f"seed {seed}", functools.partial(run, seed, nodes=NODES)
    for seed in KNOWN_WITH_RATES:
        yield f"seed {seed} --rates", functools.partial(run, seed, nodes=NODES, rates=True)
    for seed in KNOWN_FAR:
        yield f"seed {seed} --far --nodes 2..7", functools.partial(run, seed, far=True)
    for seed in KNOWN_WITH_TENSORS:
        yield f"seed {seed} --tensors", functools.partial(run, seed, nodes=NODES, tensors=True)
    for seed in KNOWN_WITH_PARTS:
        yield f"seed {seed} --parts", functools.partial(run, seed, nodes=(2, 5), parts=True)
    for seed in KNOWN_LARGER:
        yield f"seed {seed} --rates --nodes 2..7", functools.partial(run, seed, rates=True)
    for seed in KNOWN_HARD:
        yield f"seed {seed} --hard --nodes 2..7", functools.partial(run, seed, hard=True)
    for loss in LOSSES.values():
        yield f"loss {loss.name}", functools.partial(play_loss, loss)
    for name in KNOWN_POINTS:
        yield f"crash point {name}", functools.partial(_play_named, name)


def _play_named(name: str) -> None:
    with contextlib.suppress(ConfigError):  # Where a rule is broken, there may be fewer messages.
        play(point_named(name))


def hunt_all() -> Iterator[Hunt]:
    """Hunt all mutants, over several processes."""
    return in_processes(hunt, list(MUTANTS))


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).split("\n")[0]
