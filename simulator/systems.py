"""The papers' systems, as choices among the recoveries of `scheduler.elastic`; ours has them all.

    name         families                                                        chooses by
    fault-free   nothing ever happens                                            -
    chaosnet     all                                                             Eq. 8, and copies that are left
    chameleon    reroute, layout                                                 Eq. 8
    elaswave     resize, layers, clocks; drop where a stage is lost              step time
    recycle      reroute; drop                                                   step time
    oobleck      pipelines shrink within their templates, borrow, merge          -
    torchft      drop                                                            -
    varuna       symmetric layouts, from the last checkpoint                     -

Everybody has `checkpoint` for what cannot be recovered otherwise, and takes workers back (`fill`, and `layout`
where it has that). Overheads are the same for all, unless a scenario says what a system needs beside them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..protocols.errors import PlanInfeasible
from ..scheduler.elastic.cluster import Worker
from ..scheduler.elastic.estimator import Estimate, Execution
from ..scheduler.elastic.layouts import Layout
from ..scheduler.elastic.pipeline_time import (
    one_f_one_b,
    peak_bytes,
    rerouted_step_after_failures_s,
    symmetric_step_s,
)  # fmt: skip
from ..scheduler.elastic.plan import Pipeline, cuts_of, even
from ..scheduler.elastic.policy import FaultClock, choose, renamed
from ..scheduler.elastic.recoveries import FAMILIES, Recoveries, Recovery, Refusal
from ..scheduler.elastic.state import State
from .training import Decision, Incident

FAMILIES_OF = {
    "chaosnet": FAMILIES,
    "chameleon": ("stay", "fill", "reroute", "layout", "checkpoint"),
    "elaswave": ("stay", "fill", "resize", "layers", "clocks", "drop", "checkpoint"),
    "recycle": ("stay", "fill", "reroute", "drop", "checkpoint"),
    "oobleck": ("stay", "shrink", "checkpoint"),
    "torchft": ("stay", "fill", "drop", "checkpoint"),
    "varuna": ("stay", "checkpoint"),
}
CHOOSES_BY = {"chaosnet": "score", "chameleon": "eq8"}  # The others by "step".
SYSTEMS = ("fault-free", *FAMILIES_OF)


class FaultFree:
    """A system to which nothing happens."""

    name = "fault-free"

    def __init__(self, recoveries: Recoveries, state: State) -> None:
        self.decision = _began(recoveries, state)

    def began(self) -> Decision:
        return self.decision

    def met(self, event: Incident) -> Decision:
        return self.decision


@dataclass
class Memory:
    """Proposes recoveries, and remembers all that it has proposed, by `canonical` state."""

    recoveries: Recoveries
    proposed: dict[object, list[Recovery | Refusal]] = field(default_factory=dict)


class Choosing:
    """A system that has some families, and chooses among what they propose.

    Args:
        more_s: what it needs for every transition beside the overheads of all.
        by: "score" (see `Recovery.score`), "eq8" or "step" time alone.
    """

    def __init__(
        self,
        name: str,
        memory: Memory,
        state: State,
        faults: FaultClock,
        more_s: float = 0.0,
        by: str = "score",
    ) -> None:
        self.name, self.memory, self.state, self.faults = name, memory, state, faults
        self.more_s, self.by = more_s, by
        self.speeds: dict[str, Worker] = dict(memory.recoveries.cluster.workers)
        self.last_s = 0.0

    def began(self) -> Decision:
        return _began(self.memory.recoveries, self.state)

    def met(self, event: Incident) -> Decision:
        self.faults.watched(event.at_s - self.last_s, len(event.gone))
        self.last_s = event.at_s
        for worker, speed in event.slow:
            self.speeds[worker] = replace(self.speeds[worker], speed=speed)
        self.state = self.state.after(event.gone, event.come)
        try:
            recovery = self._chosen()
        except PlanInfeasible:
            return Decision(0.0, 0.0, "none")
        self.state = recovery.state
        transition_s = recovery.transition_s + (self.more_s if recovery.family != "stay" else 0.0)
        return Decision(self.state.batch / recovery.step_s, transition_s, recovery.family)

    def _chosen(self) -> Recovery:
        """Choose a recovery; states that differ in names only are looked into once."""
        names, key = canonical(self.state, self.speeds)
        back = {new: old for old, new in names.items()}
        proposed = self.memory.proposed.get(key)
        if proposed is None:
            workers = {new: self.speeds[old] for new, old in back.items()}
            recoveries = self.memory.recoveries.on(replace(self.memory.recoveries.cluster, workers=workers))
            proposed = self.memory.proposed[key] = recoveries.of(renamed(self.state, names))
        if self.by == "step":
            proposed = self._fastest(proposed)
        together = self.faults.together if self.by == "score" else 0
        best = choose(proposed, self.faults.between_s, together).recovery
        return replace(best, state=renamed(best.state, back))

    def _fastest(self, proposed: Sequence[Recovery | Refusal]) -> list[Recovery | Refusal]:
        """Without a look ahead a checkpoint is the last resort, and what steps fastest the first."""
        found = [each for each in proposed if isinstance(each, Recovery) and each.family != "checkpoint"]
        return [min(found, key=lambda each: (each.step_s, each.transition_s))] if found else list(proposed)


def _began(recoveries: Recoveries, state: State) -> Decision:
    (stay,) = Recoveries.stay(recoveries, state)
    return Decision(state.batch / stay.step_s, 0.0, "stay")


def canonical(state: State, workers: Mapping[str, Worker]) -> tuple[dict[str, str], object]:
    """New names that equal states share, by the old ones; and what makes states equal."""

    def looks(number: int) -> tuple[object, ...]:
        each = state.pipelines[number]
        of = [(workers[w].speed, w in state.lost, state.clocks.get(w, 1.0)) for w in each.workers]
        return each.cuts, state.counts[number], tuple(of)

    order = sorted(range(len(state.pipelines)), key=looks)
    names = {
        worker: f"p{place}s{stage}"
        for place, number in enumerate(order)
        for stage, worker in enumerate(state.pipelines[number].workers)
    }
    idle = sorted(state.idle, key=lambda worker: (workers[worker].speed, worker))
    names |= {worker: f"idle{number}" for number, worker in enumerate(idle)}
    return names, (tuple(map(looks, order)), state.resized, tuple(workers[each].speed for each in idle))


# --- what only one system does ---


class Oobleck(Recoveries):
    """Pipelines as long as one of the templates: `fewest` to `most` stages, each with its layers split evenly.

    One that has lost somebody takes the next shorter template. With none so short it borrows from the longest; if
    that has none to give, two become one; what is left over is idle. Whoever comes goes to the shortest.
    """

    def __init__(self, *args: object, fewest: int = 2, most: int = 16, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.fewest, self.most = fewest, most

    def _shrink(self, state: State) -> list[Recovery]:
        if not state.lost and not state.idle:
            raise PlanInfeasible("nobody is lost and nobody has come")
        groups = [[w for w in each.workers if w not in state.lost] for each in state.pipelines]
        waiting = sorted(state.idle)
        while (
            waiting
            and (short := min((g for g in groups if len(g) < self.most), key=len, default=None)) is not None
        ):
            short.append(waiting.pop())
        while len(waiting) >= self.fewest:
            groups.append([waiting.pop() for _ in range(min(len(waiting), self.most))])
        groups = self._mended([each for each in groups if each])
        layers = len(self.profile.layers)
        pipelines = tuple(Pipeline(tuple(each), cuts_of(even(layers, len(each)))) for each in groups)
        return [self._new("shrink", state, (pipelines, self.balance.shares(pipelines, state)))]

    def _mended(self, groups: list[list[str]]) -> list[list[str]]:
        while short := next((each for each in groups if len(each) < self.fewest), None):
            others = [each for each in groups if each is not short]
            longest = max(others, key=len, default=[])
            if len(longest) > self.fewest:
                short.append(longest.pop())
                continue
            fitting = [each for each in others if len(each) + len(short) <= self.most]
            if fitting:
                min(fitting, key=len).extend(short)
            groups = others
        if not groups:
            raise PlanInfeasible(f"no template has fewer than {self.fewest} stages")
        return groups


class Varuna(Recoveries):
    """Pipelines of one length, as many as there are workers for; others are idle."""

    def _layouts(self, state: State) -> list[Layout]:
        return [each for each in super()._layouts(state) if len(each.groups) == 1]


class ByEquations(Recoveries):
    """Step times as Chameleon's own simulation must have had them: its equations, nothing else.

    Eq. 13 after losses, with its last term times `bubble`: 1 as printed; less, if ReCycle hides rerouted work in
    bubbles, which the text says and the equation does not have. Eq. 10 and 11 otherwise, Eq. 14 for memory. No
    transfers of activations, no sums of gradients.
    """

    bubble = 1.0

    def _estimate(self, state: State) -> Estimate:
        assert state.plan  # Or it says that nobody is left that holds a layer.
        clocked = self.on(self.cluster.clocked(state.clocks))
        times = [clocked.balance.stage_times(each, state.samples) for each in state.pipelines]
        step_s = max(float(one_f_one_b(f, b, m)) for (f, b), m in zip(times, state.counts, strict=True))
        if state.lost:
            step_s = self._rerouted_s(state, times, step_s)
        peaks = {
            worker: float(peak)
            for each, count in zip(state.pipelines, state.counts, strict=True)
            for worker, peak in zip(
                each.workers, peak_bytes(self.profile, _sizes(each), state.samples, count), strict=True
            )
            if worker not in state.lost
        }
        return Estimate(step_s, peaks, Execution())

    def _sums_s(self, layout: Layout) -> float:
        return 0.0

    def _rerouted_s(self, state: State, times: list[tuple[list[float], list[float]]], step_s: float) -> float:
        """Eq. 13; where pipelines differ, with the longest and the slowest stage of all."""
        stages, pipelines = max(len(each.workers) for each in state.pipelines), len(state.pipelines)
        lost = [0] * stages
        for each in state.pipelines:
            for stage, worker in enumerate(each.workers):
                lost[stage] += worker in state.lost
        micro_batches = sum(state.counts) // pipelines
        slowest_s = max(f + b for of in times for f, b in zip(*of, strict=True))
        printed_s = rerouted_step_after_failures_s(lost, micro_batches, pipelines, slowest_s, 0.0)
        return step_s + self.bubble * (printed_s - symmetric_step_s(stages, micro_batches, slowest_s, 0.0))


def _sizes(pipeline: Pipeline) -> list[int]:
    return [hop.stop - hop.start for hop in pipeline.stages]
