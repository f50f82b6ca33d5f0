"""Which recovery, when something happens: the one with the best prospect, found beforehand (Chameleon, Eq. 8).

What is best after a loss depends on the roles that are lost, not on who had them. So recoveries are worked out for
every set of roles up to k workers, while nothing is wrong, and a fault looks its own up and exchanges names.
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from ...protocols.errors import PlanInfeasible
from .plan import Pipeline
from .recoveries import Recoveries, Recovery, Refusal
from .state import State

Place = tuple[int, int]
"""A pipeline and a stage."""


class FaultClock:
    """Expected seconds between faults, from those seen so far.

    The mean of so much time, and so many faults in it, and one more of each that stands for what was expected before
    anything was seen. (The mean of a Gamma distribution of rates, with exponential times between faults.)
    """

    def __init__(self, expected_s: float = 3600.0) -> None:
        if not expected_s > 0:
            raise PlanInfeasible(f"seconds between faults: {expected_s:g} (expected > 0)")
        self.expected_s, self.watched_s, self.faults, self.lost = expected_s, 0.0, 0, 0

    def watched(self, seconds: float, lost: int = 0) -> None:
        """So much time went by, and then so many workers were lost at once, if any."""
        self.watched_s += seconds
        self.faults += lost > 0
        self.lost += lost

    @property
    def together(self) -> int:
        """Workers that go at once: the mean so far, rounded up."""
        return max(1, -(-self.lost // max(self.faults, 1)))

    @property
    def between_s(self) -> float:
        return (self.expected_s + self.watched_s) / (1 + self.faults)


@dataclass(frozen=True)
class Choice:
    """All that was proposed, the best first. `names`: who is who, where a plan was made for others."""

    ranking: tuple[Recovery, ...]
    refusals: tuple[Refusal, ...]
    between_s: float
    together: int
    names: Mapping[str, str] = field(default_factory=dict)

    @property
    def recovery(self) -> Recovery:
        """The one that was chosen."""
        best = self.ranking[0]
        return replace(best, state=renamed(best.state, self.names)) if self.names else best

    def explain(self) -> list[dict[str, object]]:
        """One row per candidate, the best first: its figures, or what kept it out."""
        rows: list[dict[str, object]] = [
            {
                "family": each.family,
                "step_s": each.step_s,
                "samples_per_s": each.state.batch / each.step_s,
                "transition_s": each.transition_s,
                "bytes_moved": each.bytes_moved,
                "memory_share": each.memory_share,
                "workers": sum(map(bool, each.state.held.values())),
                "fatal_share": each.fatal_share(self.together),
                "score": each.score(self.between_s, self.together),
            }
            for each in self.ranking
        ]
        return rows + [{"family": each.family, "reason": self._said(each.reason)} for each in self.refusals]

    def _said(self, reason: str) -> str:
        return re.sub(r"\w+", lambda word: self.names.get(word[0], word[0]), reason)


def choose(
    proposed: Sequence[Recovery | Refusal],
    between_s: float,
    together: int = 0,
    names: Mapping[str, str] | None = None,
) -> Choice:
    """The best by `Recovery.score`; of equally good ones that with the shorter transition.

    Raises: PlanInfeasible with all the reasons if there is none.
    """
    recoveries = [each for each in proposed if isinstance(each, Recovery)]
    refusals = tuple(each for each in proposed if isinstance(each, Refusal))
    if not recoveries:
        reasons = "; ".join(f"{each.family}: {each.reason}" for each in refusals)
        raise PlanInfeasible(f"no way to go on: {reasons}")
    recoveries.sort(key=lambda each: (-each.score(between_s, together), each.transition_s))
    return Choice(tuple(recoveries), refusals, between_s, together, names or {})


class RecoveryPolicy:
    """Recoveries from one state, ready for the loss of any of its workers.

    `prepare` is a generator, to be run in the background; what it has not come to is worked out when asked for.
    """

    def __init__(self, recoveries: Recoveries, state: State, faults: FaultClock | None = None) -> None:
        self.recoveries, self.state, self.faults = recoveries, state, faults or FaultClock()
        self._place_of: dict[str, Place] = {
            worker: (i, s) for i, each in enumerate(state.pipelines) for s, worker in enumerate(each.workers)
        }
        # By what they are; those that are alike in one.
        self._idle: dict[object, list[str]] = defaultdict(list)
        for worker in sorted(state.idle):
            self._idle[self._likeness(worker)].append(worker)
        self._class_of = self._classes()
        self._members: dict[int, list[int]] = defaultdict(list)
        for number, kind in enumerate(self._class_of):
            self._members[kind].append(number)
        self._known: dict[frozenset[str], list[Recovery | Refusal]] = {}

    def _likeness(self, worker: str) -> object:
        """Equal for idle workers that could change places; measured links make each one different."""
        cluster = self.recoveries.cluster
        return worker if cluster.rates_bps else cluster.workers[worker]

    def _classes(self) -> list[int]:
        """By pipeline, the first that it could change places with; measured links make each one different."""
        cluster, state = self.recoveries.cluster, self.state
        first: dict[object, int] = {}
        found = []
        for number, (each, count) in enumerate(zip(state.pipelines, state.counts, strict=True)):
            workers = tuple(
                (cluster.workers[worker], worker in state.lost, state.clocks.get(worker))
                for worker in each.workers
            )
            key = number if cluster.rates_bps else (each.cuts, count, workers)
            found.append(first.setdefault(key, number))
        return found

    # --- ahead of time ---

    def prepare(self, losses: int = 1) -> Iterator[int]:
        """Work out recoveries for every loss of 1 to `losses` workers. Yields: how many are known, after each."""
        for lost in self._kinds(losses):
            self._proposed(lost)
            yield len(self._known)

    def _proposed(self, lost: frozenset[str]) -> list[Recovery | Refusal]:
        if lost not in self._known:
            found = self._known[lost] = self.recoveries.of(self.state.after(lost, ()))
            for each in found:
                if isinstance(each, Recovery):
                    each.fatal_share(1)  # Counts copies, and keeps the count: now, not when it happens.
        return self._known[lost]

    def _kinds(self, losses: int) -> Iterator[frozenset[str]]:
        """One set of workers for each kind of loss: among pipelines that are alike, the first ones."""
        workers = [each for alike in self._idle.values() for each in alike[:losses]]
        for members in self._members.values():
            for number in members[:losses]:
                workers += [
                    each for each in self.state.pipelines[number].workers if each not in self.state.lost
                ]
        seen = set()
        for size in range(1, losses + 1):
            for chosen in itertools.combinations(workers, size):
                kind, _ = self._kind(chosen)
                if kind not in seen:
                    seen.add(kind)
                    yield kind

    def _kind(self, lost: Iterable[str]) -> tuple[frozenset[str], dict[str, str]]:
        """The loss of the same roles by the first who could have them, and who is who then."""
        stages: dict[int, list[int]] = defaultdict(list)
        idle: dict[object, list[str]] = defaultdict(list)
        for worker in lost:
            if worker in self._place_of:
                number, stage = self._place_of[worker]
                stages[number].append(stage)
            else:
                idle[self._likeness(worker)].append(worker)
        hit: dict[int, list[tuple[list[int], int]]] = defaultdict(list)
        for number, of in stages.items():
            hit[self._class_of[number]].append((sorted(of), number))
        workers, names = list[str](), dict[str, str]()
        for alike, gone in idle.items():
            first = self._idle[alike][: len(gone)]
            workers += first
            names.update(_exchange(first, sorted(gone)))
        for kind, found in hit.items():
            found.sort()
            stand_ins = self._members[kind][: len(found)]
            for stand_in, (of, _) in zip(stand_ins, found, strict=True):
                workers += [self.state.pipelines[stand_in].workers[stage] for stage in of]
            for stand_in, number in _exchange(stand_ins, [number for _, number in found]):
                both = (self.state.pipelines[each].workers for each in (stand_in, number))
                names.update(zip(*both, strict=True))
        return frozenset(workers), names

    # --- when it happens ---

    def lost(self, *workers: str) -> Choice:
        """What to do after the loss of these, all at once.

        Raises: PlanInfeasible if there is no way to go on, or a worker is unknown.
        """
        for worker in workers:
            if (worker not in self._place_of and worker not in self.state.idle) or worker in self.state.lost:
                raise PlanInfeasible(f"worker {worker!r}: not there (expected one that is)")
        kind, names = self._kind(workers)
        return choose(self._proposed(kind), self.faults.between_s, self.faults.together, names)

    def came(self, *workers: str) -> Choice:
        """What to do with workers that have come, or come back."""
        proposed = self.recoveries.of(self.state.after((), workers))
        return choose(proposed, self.faults.between_s, self.faults.together)


Item = TypeVar("Item")


def _exchange(first: Sequence[Item], second: Sequence[Item]) -> Iterator[tuple[Item, Item]]:
    """`first` to `second`, one by one, and who of them has lost a place to who has one left."""
    yield from zip(first, second, strict=True)
    yield from zip(
        [each for each in second if each not in first],
        [each for each in first if each not in second],
        strict=True,
    )


def renamed(state: State, names: Mapping[str, str]) -> State:
    """With workers exchanged."""

    def of(worker: str) -> str:
        return names.get(worker, worker)

    return replace(
        state,
        pipelines=tuple(Pipeline(tuple(map(of, each.workers)), each.cuts) for each in state.pipelines),
        lost=frozenset(map(of, state.lost)),
        idle=frozenset(map(of, state.idle)),
        clocks={of(worker): by for worker, by in state.clocks.items()},
    )
