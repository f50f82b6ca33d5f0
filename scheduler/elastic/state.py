"""Where training stands: pipelines as they were laid out, and who has gone since."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from .plan import Pipeline, Plan, without

Cuts = tuple[int, ...]
"""As of `plan.Pipeline`."""


@dataclass(frozen=True)
class State:
    """Where training stands (Chameleon, Definition 1).

    Pipeline i runs `counts[i]` micro-batches of `samples`; `lost` are those of its workers that are gone, whose
    work peers have taken over: by micro-batches, or by parts of them (`resized`). `idle` workers are there and
    have no role. `clocks`: by worker, what its clock is raised by, if it is.
    """

    pipelines: tuple[Pipeline, ...]
    counts: tuple[int, ...]
    samples: int
    lost: frozenset[str] = frozenset()
    resized: bool = False
    idle: frozenset[str] = frozenset()
    clocks: Mapping[str, float] = field(default_factory=dict)

    @property
    def batch(self) -> int:
        """Samples of a step."""
        return sum(self.counts) * self.samples

    @cached_property
    def plan(self) -> Plan:
        """Raises: PlanInfeasible where nobody is left that holds a layer."""
        return without(self.pipelines, self.counts, self.samples, self.lost, self.resized)

    @cached_property
    def held(self) -> dict[str, range]:
        """Layers of everybody who is there; range(0) of those without a role."""
        found = {
            hop.worker: range(hop.start, hop.stop)
            for pipeline in self.pipelines
            for hop in pipeline.stages
            if hop.worker not in self.lost
        }
        return found | dict.fromkeys(sorted(self.idle), range(0))

    def after(self, gone: Collection[str], come: Collection[str]) -> State:
        """As it is found when it happens, before anybody has decided anything."""
        everybody = {worker for pipeline in self.pipelines for worker in pipeline.workers}
        lost = self.lost | (everybody & {*gone})
        back = {*come} & lost  # Its role is taken over, so it has to be given it again.
        return replace(self, lost=lost, idle=(self.idle | back | ({*come} - everybody)) - {*gone})
