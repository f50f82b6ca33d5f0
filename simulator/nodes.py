"""One virtual machine of a simulated cluster: its core, its clock, its training thread and its memory."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from ..node.agent.core import Agent
from ..protocols import effects as fx
from ..protocols import events as ev
from ..protocols.data_cursor import DataCursor
from ..protocols.messages import View, ViewKey
from .network import Machine

TAKEN_BACK = "'"  # Behind the name of a part's node, once for each time that the part has changed.
DATASET = 997  # Samples of an epoch; prime, so that the last step of an epoch is never whole.


@dataclass(frozen=True, slots=True)
class SimResult:
    """The mean of a chunk: the contributions in it, and its step.

    `in_place`: it is this node's own part, and nobody has asked for it: the optimizer uses it where it lies.
    """

    step: int
    who: frozenset[str]
    in_place: bool = False


def whose(parts: Iterable[str]) -> set[str]:
    """The nodes that these parts are of."""
    return {part.rstrip(TAKEN_BACK) for part in parts}


@dataclass(frozen=True, slots=True)
class Clock:
    """A machine's monotonic clock: it began at a time of its own, and may be fast or slow."""

    offset_s: float = 0.0
    rate: float = 1.0

    def reads(self, now_s: float) -> float:
        """What the clock shows at that time."""
        return self.offset_s + self.rate * now_s

    def at(self, reading_s: float) -> float:
        """The time at which the clock shows `reading_s`."""
        return (reading_s - self.offset_s) / self.rate


@dataclass(frozen=True, slots=True)
class Applied:
    """A step, as one node has applied it."""

    who: frozenset[str]
    ranges: tuple[tuple[int, int], ...]
    state: int  # Hash of all that was applied so far; it stands for parameters and optimizer.


class SimNode(Machine):
    """One machine: its core, its training thread and its memory."""

    def __init__(self, name: str, agent: Agent, batch: int) -> None:
        super().__init__(name)
        self.agent, self.batch = agent, batch
        self.clock, self.slowness = Clock(), 1.0
        self.deferred: list[ev.Event] = []
        self.log: list[Applied] = []  # One entry a step.
        self.cursor = DataCursor(DATASET, seed=0)
        self.samples = 0  # In the steps of the log.
        self.loaded = False
        self.training = False
        self.admitted = 0  # The first step that it contributes to as a member.
        self.step = 0
        self.taken_back = 0  # How often its part of that step has changed.
        # Results that came before the state did.
        self.backlog: list[tuple[fx.StepCompleted, frozenset[str]]] = []
        self.results: dict[int, dict[int, SimResult]] = {}  # Step: chunk: result.
        self.sums: dict[range, frozenset[str]] = {}
        self.contributed: set[tuple[int, int]] = set()  # Step and chunk, of the step under way.
        self.completed = range(0)  # The last steps that are, and whose results are kept.
        self.snapshots: dict[int, tuple[list[Any], Any, Any]] = {}
        self.arrived: Any = None
        self.damaged = 0  # Pieces of what has arrived that are not what was sent.
        self.stored: set[tuple[int, int]] = set()  # Of the state that is arriving.
        self.last_progress_s = 0.0
        self.redone = 0  # Steps that it had completed when it died, and others do again.
        self.tick_at_s: float | None = None
        self.strays = 0  # Steps completed while left behind.
        self.goes_on_s = 0.0  # Since then no step has taken too long.
        self.was_away_s = 0.0  # When it was started, or last stopped.
        self.refused = False  # By a message that says why.
        self.installed: ViewKey = (0, 0)  # The view of the last flush that it took part in.
        self.ways: tuple[str, ...] = ()  # Where it asks to be let in.

    def store(self, chunks: range, result: SimResult) -> None:
        """Keep the result of these chunks."""
        self.results.setdefault(result.step, {}).update(dict.fromkeys(chunks, result))

    def kept(self, step: int, chunks: range) -> SimResult:
        """The kept result of these chunks, to be sent to others."""
        kept = {self.results[step][chunk] for chunk in chunks}
        assert len(kept) == 1, f"chunks of one message differ in who contributed: {kept}"
        result = replace(kept.pop(), in_place=False)
        self.store(chunks, result)
        return result

    def adopts(self, step: int, kept: int) -> None:
        """As AllReduce.completed: a result in place cannot be sent any more, unless it is among those kept."""
        results = self.results[step]
        if kept == 1 and all(result.in_place for result in results.values()):
            del self.results[step]
        else:
            self.results[step] = {chunk: replace(each, in_place=False) for chunk, each in results.items()}

    def let_results_go(self) -> None:
        """Forget results of a step that is not complete, or that was long ago."""
        self.results = {step: each for step, each in self.results.items() if step in self.completed}

    @property
    def part(self) -> str:
        """The node's contribution to a step, as it is by now."""
        return self.name + TAKEN_BACK * self.taken_back

    @property
    def was_let_go(self) -> bool:
        """Has the node left by a vote, or was it put out when it wanted to leave anyway?"""
        view = self.agent.sync.view
        return self.done == "Left" and view is not None and view.find(self.name) is None

    @property
    def life(self) -> int:
        return self.agent.life

    @property
    def view(self) -> View:
        """The view in which the node acts; only members are sure to have one."""
        assert self.agent.sync.view is not None
        return self.agent.sync.view
