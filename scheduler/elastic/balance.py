"""Who gets how much to do: layers, micro-batches and clocks, by workers' speeds and the remaining stages."""

from __future__ import annotations

import heapq
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...protocols.errors import PlanInfeasible
from .cluster import Cluster
from .partition import mini_step_sums, minimax
from .pipeline_time import in_flight, one_f_one_b
from .plan import Pipeline, cuts_of
from .profile import Profile
from .state import State


@dataclass(frozen=True)
class Balance:
    """Of a model on a cluster."""

    profile: Profile
    cluster: Cluster

    def fitted(
        self, groups: Sequence[tuple[str, ...]], state: State
    ) -> tuple[tuple[Pipeline, ...], tuple[int, ...]]:
        """Pipelines of these workers, in their order; layers as fast as they are, then micro-batches."""
        pipelines = []
        for workers in groups:
            speeds = [self.cluster.workers[worker].speed for worker in workers]
            samples = np.full(len(workers), float(state.samples))
            pipelines.append(Pipeline(workers, self._cuts(workers, samples, speeds)))
        return tuple(pipelines), self.shares(pipelines, state)

    def _cuts(self, workers: Sequence[str], samples: np.ndarray, speeds: Sequence[float]) -> tuple[int, ...]:
        """Layers to stages by ElasWave, Algorithm 1; `workers`: of each stage, the one with the least memory."""
        kept = in_flight(len(workers)) * samples
        static, activations = np.array(self.profile.static_bytes), np.array(self.profile.activation_bytes)
        found = minimax(
            mini_step_sums(self.profile, [float(size) for size in samples], speeds),
            len(workers),
            memory_sums=static + kept[:, None] * activations,
            memory_limits=[self.cluster.workers[worker].memory_bytes for worker in workers],
        )
        return cuts_of(found.sizes)

    def shares(self, pipelines: Sequence[Pipeline], state: State) -> tuple[int, ...]:
        """All micro-batches, each to the pipeline that ends it first: no other shares have an earlier end.

        As the time of a pipeline grows with its micro-batches, whoever has one more than here ends later.
        """
        total = sum(state.counts)
        if not pipelines:
            raise PlanInfeasible("nobody is left")
        if total < len(pipelines):
            raise PlanInfeasible(
                f"micro-batches: {total} for {len(pipelines)} pipelines (expected one for each)"
            )
        times = [self.stage_times(each, state.samples) for each in pipelines]
        counts = [1] * len(pipelines)  # One that has none would not be there.
        heap = [(float(one_f_one_b(f, b, 2)), i) for i, (f, b) in enumerate(times)]
        heapq.heapify(heap)
        for _ in range(total - len(pipelines)):
            _, i = heap[0]
            counts[i] += 1
            heapq.heapreplace(heap, (float(one_f_one_b(*times[i], counts[i] + 1)), i))
        return tuple(counts)

    def stage_times(self, pipeline: Pipeline, samples: int) -> tuple[list[float], list[float]]:
        both = [
            np.array(self.profile.seconds(hop.start, hop.stop, samples))
            / self.cluster.workers[hop.worker].speed
            for hop in pipeline.stages
        ]
        return [float(f) for f, _ in both], [float(b) for _, b in both]

    def cut_anew(self, state: State) -> State:
        """Stages of all pipelines cut anew, for what each has left (ElasWave, Sec. 4.2)."""
        stages = self._stages(state)
        samples = np.array([len(state.pipelines) * state.samples / len(each) for each in stages])
        speeds = [min(self.cluster.workers[worker].speed for worker in each) for each in stages]
        smallest = [
            min(each, key=lambda worker: self.cluster.workers[worker].memory_bytes) for each in stages
        ]
        cuts = self._cuts(smallest, samples, speeds)
        pipelines = tuple(Pipeline(each.workers, cuts) for each in state.pipelines)
        return replace(state, pipelines=pipelines, resized=True, clocks={})

    def _stages(self, state: State) -> list[list[str]]:
        """Who is left of each stage, where all pipelines have the same."""
        if len({each.cuts for each in state.pipelines}) > 1:
            raise PlanInfeasible("pipelines: their stages differ (expected the same layers in each)")
        stages = [
            [worker for worker in each if worker not in state.lost]
            for each in zip(*(each.workers for each in state.pipelines), strict=True)
        ]
        for number, each in enumerate(stages):
            if not each:
                raise PlanInfeasible(f"stage {number}: nobody is left of {len(state.pipelines)}")
        return stages

    def clocks_of_stages(self, state: State, most: float) -> dict[str, float]:
        """By worker, the least raise that takes slow stages to what the unhurt ones need, if that can be reached.

        What ElasWave's Algorithm 2 finds by measuring (`clocks`), if time goes as one over the clock.
        Args:
            most: how far a clock can be raised.
        Raises: PlanInfeasible if no stage is slower than the others.
        """
        stages, cuts = self._stages(state), state.pipelines[0].cuts
        took_s = []
        for number, workers in enumerate(stages):
            samples = len(state.pipelines) * state.samples / len(workers)
            speed = min(self.cluster.workers[worker].speed for worker in workers)
            took_s.append(sum(self.profile.seconds(cuts[number], cuts[number + 1], samples)) / speed)
        unhurt = [s for s, each in zip(took_s, stages, strict=True) if len(each) == len(state.pipelines)]
        target_s = max(max(took_s) / most, max(unhurt, default=min(took_s)))
        raised = {
            worker: s / target_s
            for s, each in zip(took_s, stages, strict=True)
            if s > target_s
            for worker in each
        }
        if not raised:
            raise PlanInfeasible("no stage is slower than the others")
        return raised

    def clocks_of_workers(self, state: State, most: float) -> dict[str, float]:
        """By worker, what takes those who need longest in a step to what half of all need, if that can be reached."""
        took_s = {
            worker: count * (forward_s + backward_s)
            for each, count in zip(state.pipelines, state.counts, strict=True)
            for worker, forward_s, backward_s in zip(
                each.workers, *self.stage_times(each, state.samples), strict=True
            )
        }
        target_s = max(max(took_s.values()) / most, statistics.median_low(took_s.values()))
        return {worker: s / target_s for worker, s in took_s.items() if s > target_s}
