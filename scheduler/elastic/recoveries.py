"""Ways to go on after workers went or came, of every kind that the papers know: each one a plan, with its costs.

    family      after                                   what it does
    stay        ours                                    nothing: nobody with a role is concerned
    fill        ours                                    idle workers take the places of lost ones
    reroute     ReCycle; Chameleon, Sec. IV-A           whole micro-batches of the lost go to peers
    resize      ElasWave, Sec. 4.1                      each micro-batch of the lost is cut up among peers
    layers      ElasWave, Sec. 4.2                      that, and the stages cut anew
    clocks      ElasWave, Sec. 4.3                      that, and the slowest stages clocked up
    shrink      Oobleck                                 pipelines go on without those they lost
    layout      Chameleon, Algorithm 1                  all pipelines anew, of any lengths
    drop        TorchFT                                 pipelines that lost somebody go idle
    checkpoint  Varuna                                  pipelines anew, from the last checkpoint

All are compared under the same overheads. A family that cannot go on says why (`Refusal`).
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from ...protocols.errors import PlanInfeasible
from . import migration, roles
from .balance import Balance
from .cluster import Cluster, Worker
from .estimator import Estimate, Estimator, Execution, ProfiledCosts, check_memory, excess_bytes
from .layouts import Group, Layout, best_layout
from .plan import Pipeline, Plan, cuts_of
from .profile import Profile, check
from .splits import PipelineTimes
from .state import Cuts, State
from .sync_rounds import rounds
from .transfers import plan_transfers


@dataclass(frozen=True)
class Overheads:
    """Seconds that a recovery takes beside its transfers, the same whoever proposes it.

    `edit_s`: connections opened and closed (ElasWave, Sec. 7.4: 0.15 to 0.37 s). `restart_s`: a new layout starts
    (Chameleon, Sec. V-C: 11.2 s in all and 8.2 s with transfers 32.35 % shorter leave 1.9 s). `checkpoint_s`: reading
    the last checkpoint, and `redo_s` the steps since. `hidden`: layers move beside training (ElasWave, Sec. 6.2) and
    whoever joins pulls its state beside it (Chaos); else training stands still meanwhile.
    """

    edit_s: float = 0.37
    restart_s: float = 1.9
    checkpoint_s: float = 60.0
    redo_s: float = 300.0
    hidden: bool = True

    @property
    def last_resort_s(self) -> float:
        """Of a recovery from a checkpoint."""
        return self.restart_s + self.checkpoint_s + self.redo_s


@dataclass(frozen=True)
class Recovery:
    """A way to go on.

    `memory_share`: of the worker that is fullest, its peak over what it has. `last_resort_s`: what it takes to
    recover, from a checkpoint, what nobody holds any more.
    """

    family: str
    state: State
    step_s: float
    transition_s: float
    bytes_moved: float
    memory_share: float
    execution: Execution
    last_resort_s: float

    @property
    def plan(self) -> Plan:
        return self.state.plan

    def score(self, between_s: float, together: int = 0) -> float:
        """Samples a second until the next fault, `between_s` after this one, is over (Chameleon, Eq. 8, and more).

        B / t_step * t_state / (t_transition + t_state), where the sum of the latter two is `between_s`. Eq. 8 looks
        no further: a plan that keeps one copy of a layer is as good to it as one that keeps three. Here the next
        fault takes `together` workers, and counts with what it then costs: as often as it takes the last copies
        of a layer, a checkpoint. With 0, Eq. 8 as printed.
        """
        lasts_s = between_s + self.fatal_share(together) * self.last_resort_s
        return self.state.batch / self.step_s * max(between_s - self.transition_s, 0.0) / lasts_s

    def fatal_share(self, together: int) -> float:
        """How many of all losses of so many workers take all that hold some layers; two of these count twice."""
        workers = len(self.state.held)
        together = min(together, workers)
        fatal = sum(
            sets * math.comb(workers - size, together - size)
            for size, sets in self._copies.items()
            if size <= together
        )
        return min(fatal / math.comb(workers, together), 1.0)

    @cached_property
    def _copies(self) -> Counter[int]:
        """By how many workers hold the same layers, how often so many do."""
        return Counter(map(len, {*self.plan.holders}))


@dataclass(frozen=True)
class Refusal:
    """Why a family has no recovery."""

    family: str
    reason: str


FAMILIES = (
    "stay", "fill", "reroute", "resize", "layers", "clocks", "shrink", "layout", "drop", "checkpoint",
)  # fmt: skip

MOST_STAGES = 16  # Of a pipeline of a layout (Chameleon's R_pp).
SPREAD = 2  # Layouts have as many pipelines as there were, give or take so many (R_dp; Chameleon, Sec. IV-A).
# Of a plan; the last three are what ReCycle adds.
EXECUTIONS = (Execution(), Execution(True), Execution(True, 1), Execution(True, 2))

NEW_PIPELINES = ("shrink", "layout")
"""Families whose pipelines may differ: `clocks` is proposed on top of them, too, beyond ElasWave."""


class Recoveries:
    """Proposes recoveries of a model on a cluster.

    Args:
        families: those to propose, of `FAMILIES`.
        most_clock: how far a clock can be raised (ElasWave: 1650 / 1400 MHz).
    """

    def __init__(
        self,
        profile: Profile,
        cluster: Cluster,
        overheads: Overheads | None = None,
        families: Sequence[str] = FAMILIES,
        most_clock: float = 1650 / 1400,
    ) -> None:
        check(profile)
        self.profile, self.cluster, self.families = profile, cluster, tuple(families)
        self.overheads, self.most_clock = overheads or Overheads(), most_clock
        self.estimator = Estimator(ProfiledCosts(profile, cluster), executions=EXECUTIONS)
        self._times_by: dict[tuple[int, float], PipelineTimes] = {}
        self._group_times: dict[tuple[object, ...], float] = {}
        self._sum_times: dict[tuple[Group, ...], float] = {}

    @property
    def balance(self) -> Balance:
        """For the cluster as it is."""
        return Balance(self.profile, self.cluster)

    def on(self, cluster: Cluster) -> Recoveries:
        """The same for a cluster that has changed; what was worked out stays known."""
        other = copy.copy(self)
        other.cluster, other.estimator = cluster, self.estimator.on(cluster)
        return other

    def of(self, state: State) -> list[Recovery | Refusal]:
        """What each family proposes for a state as `State.after` leaves it.

        Raises: PlanInfeasible if the state is of another model.
        """
        layers = {each.cuts[-1] for each in state.pipelines}
        if layers != {len(self.profile.layers)}:
            raise PlanInfeasible(
                f"profile {self.profile.model}: {len(self.profile.layers)} layers"
                f" (expected {', '.join(map(str, sorted(layers)))}, those of the plan)"
            )
        if not state.held:
            return [Refusal("all", "nobody is left")]
        proposed: list[Recovery | Refusal] = []
        for family in self.families:
            try:
                proposed += _BY_FAMILY[family](self, state)
            except PlanInfeasible as reason:
                proposed.append(Refusal(family, str(reason)))
        if "clocks" in self.families:
            anew = [each for each in proposed if isinstance(each, Recovery) and each.family in NEW_PIPELINES]
            proposed += [found for each in anew for found in self._clocked(each)]
        return proposed

    # --- families ---

    def stay(self, state: State) -> list[Recovery]:
        if state.lost:
            raise PlanInfeasible(f"{_names(state.lost)} lost (expected nobody)")
        return [self._judged("stay", state, state, overhead_s=0.0)]

    def _fill(self, state: State) -> list[Recovery]:
        if not state.lost or not state.idle:
            raise PlanInfeasible(f"{len(state.idle)} idle workers for {len(state.lost)} empty places")
        back = state.lost & state.idle  # Each to its own place; then the others, as far as they go.
        others = zip(sorted(state.lost - back), sorted(state.idle - back), strict=False)
        taken = {each: each for each in sorted(back)} | dict(others)
        pipelines = tuple(
            Pipeline(tuple(taken.get(worker, worker) for worker in each.workers), each.cuts)
            for each in state.pipelines
        )
        lost, idle = state.lost - taken.keys(), state.idle - {*taken.values()}
        filled = replace(state, pipelines=pipelines, lost=lost, idle=idle, resized=True, clocks={})
        return [self._judged("fill", state, filled)]

    def _reroute(self, state: State) -> list[Recovery]:
        return [self._judged("reroute", state, replace(_with_losses(state), resized=False, clocks={}))]

    def _resize(self, state: State) -> list[Recovery]:
        return [self._judged("resize", state, replace(_with_losses(state), resized=True, clocks={}))]

    def _layers(self, state: State) -> list[Recovery]:
        return [self._judged("layers", state, self.balance.cut_anew(self._to_rebalance(state)))]

    def _raise_clocks(self, state: State) -> list[Recovery]:
        cut = self.balance.cut_anew(self._to_rebalance(state))
        clocks = self.balance.clocks_of_stages(cut, self.most_clock)
        return [self._judged("clocks", state, replace(cut, clocks=clocks))]

    def _shrink(self, state: State) -> list[Recovery]:
        concerned = self._to_rebalance(state)
        left = [tuple(w for w in each.workers if w not in state.lost) for each in concerned.pipelines]
        return [self._new("shrink", state, self.balance.fitted([each for each in left if each], state))]

    def _layout(self, state: State) -> list[Recovery]:
        """The fastest, with the fewest bytes to move; where workers differ, the fast ones by themselves, too."""
        cuts, counts = self.best_cuts(state)
        staffed = roles.staff(cuts, state.held, self.profile.state_bytes, state.pipelines)
        if not self._speeds_differ(state):
            return [self._new("layout", state, (staffed, counts))]
        by_speed = sorted(state.held, key=lambda worker: (-self.cluster.workers[worker].speed, worker))
        names = iter(by_speed)
        grouped = [tuple(next(names) for _ in each[1:]) for each in cuts]
        both = [[each.workers for each in staffed], grouped]
        return [self._new("layout", state, self.balance.fitted(each, state)) for each in both]

    def _drop(self, state: State) -> list[Recovery]:
        whole = [each for each in _with_losses(state).pipelines if state.lost.isdisjoint(each.workers)]
        if not whole:
            raise PlanInfeasible("every pipeline has lost somebody")
        return [self._new("drop", state, (tuple(whole), self.balance.shares(whole, state)), restarts=False)]

    def _checkpoint(self, state: State) -> list[Recovery]:
        cuts, counts = self.best_cuts(state)
        names = iter(sorted(state.held))
        pipelines = tuple(Pipeline(tuple(next(names) for _ in each[1:]), each) for each in cuts)
        return [self._new("checkpoint", state, (pipelines, counts), overhead_s=self.overheads.last_resort_s)]

    # --- what they share ---

    def _layouts(self, state: State) -> list[Layout]:
        """The fastest for each number of pipelines nearby, all workers taken to be alike, by the times of plain 1F1B.

        And the fastest that are all of one length, for every length: these keep more alike than the former, and
        are what other ways to execute a plan may make the most of.
        """
        workers, before, total = len(state.held), len(state.pipelines), sum(state.counts)
        times, lengths = self._times(state), self._lengths(workers)
        near = before + SPREAD + len(state.idle)
        found: list[Layout] = []
        refused = PlanInfeasible(f"workers: {workers} (expected at least 1)")
        alike = [([min(workers // length, total)], [length]) for length in lengths]
        for counts, stages in [
            *(([count], lengths) for count in range(max(1, before - SPREAD - len(state.lost)), near + 1)),
            *alike,
        ]:
            try:
                found.append(best_layout(times, workers, counts, stages, total))
            except PlanInfeasible as reason:
                refused = reason
        if not found:
            raise refused
        return found

    def _lengths(self, workers: int) -> range:
        """Of pipelines, as far as there are workers and layers."""
        return range(1, max(1, min(MOST_STAGES, len(self.profile.layers), workers)) + 1)

    def _times(self, state: State) -> PipelineTimes:
        key = state.samples, self._least_memory_bytes(state)
        if key not in self._times_by:
            self._times_by[key] = PipelineTimes(self.profile, *key)
        return self._times_by[key]

    def _least_memory_bytes(self, state: State) -> float:
        return min(self.cluster.workers[worker].memory_bytes for worker in state.held)

    def best_cuts(self, state: State) -> tuple[list[Cuts], tuple[int, ...]]:
        """Cuts and micro-batches of each pipeline of the layout whose slowest is fastest, as it would be executed.

        Of equally fast ones that which leaves most pipelines as they are.
        Raises: PlanInfeasible that says which constraint no layout satisfies.
        """
        known = Counter(each.cuts for each in state.pipelines)
        memory_bytes = self._least_memory_bytes(state)

        def rank(layout: Layout) -> tuple[float, int]:
            computed_s = max(self._group_s(group, state.samples, memory_bytes) for group in layout.groups)
            step_s = computed_s + self._sums_s(layout)
            kept = sum(min(known[cuts_of(group.sizes)], group.count) for group in layout.groups)
            return step_s, -kept

        best = min(self._layouts(state), key=rank)
        cuts = [cuts_of(group.sizes) for group in best.groups for _ in range(group.count)]
        return cuts, tuple(group.micro_batches for group in best.groups for _ in range(group.count))

    def _sums_s(self, layout: Layout) -> float:
        """Seconds of its sums of gradients, over links without a measurement."""
        if layout.groups not in self._sum_times:
            names = [f"{number}" for number in range(layout.workers)]
            pipelines, _ = layout.pipelines(names)
            placement = {hop.worker: range(hop.start, hop.stop) for each in pipelines for hop in each.stages}
            costs = replace(self.estimator.costs, cluster=replace(self.cluster, rates_bps={}))
            found = rounds(placement, len(self.profile.layers))
            self._sum_times[layout.groups] = sum(max(map(costs.reduce_s, each)) for each in found)
        return self._sum_times[layout.groups]

    def _group_s(self, group: Group, samples: int, memory_bytes: float) -> float:
        """Seconds of one of its pipelines, on workers of speed 1; infinite if it does not fit memory."""
        key = group.sizes, group.micro_batches, samples, memory_bytes
        if key not in self._group_times:
            names = tuple(map(str, range(len(group.sizes))))
            alike = self.on(
                replace(self.cluster, workers=dict.fromkeys(names, Worker(1.0, memory_bytes)), rates_bps={})
            )
            one = State((Pipeline(names, cuts_of(group.sizes)),), (group.micro_batches,), samples)
            estimate = alike._estimate(one)
            fits = not excess_bytes(estimate.peak_bytes, alike.cluster)
            self._group_times[key] = estimate.step_s if fits else math.inf
        return self._group_times[key]

    def _clocked(self, found: Recovery) -> list[Recovery]:
        """`found` with its slowest workers clocked up, as far as half of all workers are without it, at most."""
        raised = self.balance.clocks_of_workers(found.state, self.most_clock)
        if not raised:
            return []
        try:
            clocked = self._judged("clocks", None, replace(found.state, clocks=raised), found.transition_s)
        except PlanInfeasible:  # Another order of execution may be the fastest, and need more memory.
            return []
        return [replace(clocked, bytes_moved=found.bytes_moved)]

    def _to_rebalance(self, state: State) -> State:
        """`state`. Raises: PlanInfeasible if all workers are as fast and nobody is lost: it is balanced already."""
        return state if self._speeds_differ(state) else _with_losses(state)

    def _speeds_differ(self, state: State) -> bool:
        return len({self.cluster.workers[worker].speed for worker in state.held}) > 1

    def _new(
        self,
        family: str,
        state: State,
        found: tuple[tuple[Pipeline, ...], tuple[int, ...]],
        restarts: bool = True,
        overhead_s: float | None = None,
    ) -> Recovery:
        """Other pipelines; whoever is in none of them is idle."""
        pipelines, counts = found
        busy = {worker for each in pipelines for worker in each.workers}
        idle = frozenset(state.held) - busy
        after = State(pipelines, counts, state.samples, idle=idle)
        if overhead_s is not None:
            return self._judged(family, None, after, overhead_s=overhead_s)
        overhead_s = self.overheads.edit_s + (self.overheads.restart_s if restarts else 0.0)
        return self._judged(family, state, after, overhead_s=overhead_s, blocking=restarts)

    def _judged(
        self,
        family: str,
        before: State | None,
        after: State,
        overhead_s: float | None = None,
        blocking: bool = False,
    ) -> Recovery:
        """With its costs. `before`: None if all that is needed has been read already.

        Raises: PlanInfeasible if it does not fit memory, or nobody holds what somebody needs.
        """
        estimate = self._estimate(after)
        check_memory(estimate.peak_bytes, self.cluster)
        share = max(size / self.cluster.workers[w].memory_bytes for w, size in estimate.peak_bytes.items())
        overhead_s = self.overheads.edit_s if overhead_s is None else overhead_s
        stands_s, moved = self._moves(before, after, estimate.step_s, blocking) if before else (0.0, 0.0)
        took_s, resort_s = overhead_s + stands_s, self.overheads.last_resort_s
        return Recovery(family, after, estimate.step_s, took_s, moved, share, estimate.execution, resort_s)

    def _estimate(self, state: State) -> Estimate:
        return self.estimator.on(self.cluster.clocked(state.clocks)).estimate(state.plan)

    def _moves(self, before: State, after: State, step_s: float, blocking: bool) -> tuple[float, float]:
        """Seconds that training stands still for bytes to move, and bytes."""
        wanted = {worker: held for worker, held in after.held.items() if held}
        moved = plan_transfers(before.held, wanted, self.profile.state_bytes, self.cluster)
        if not moved.moves or blocking or not self.overheads.hidden:
            return moved.time_s, moved.bytes_total
        layers = {(each.destination, each.layer) for each in moved.moves}
        gradient_bytes = sum(self.profile.layers[layer].gradient_bytes for _, layer in layers)
        payback_s = moved.time_s * gradient_bytes / max(moved.bytes_total, 1)
        mini_step_s = step_s / max(after.counts)
        while_moving = max(max(after.counts), math.ceil(moved.time_s / mini_step_s) + 1)
        hidden = migration.of(moved.time_s, mini_step_s, while_moving, gradient_bytes, payback_s)
        return hidden.added_s, moved.bytes_total


def _with_losses(state: State) -> State:
    """`state`. Raises: PlanInfeasible if nobody with a role is lost."""
    if not state.lost:
        raise PlanInfeasible("nobody with a role is lost")
    return state


def _names(workers: Collection[str]) -> str:
    names = sorted(workers)
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


_BY_FAMILY: dict[str, Callable[[Recoveries, State], list[Recovery]]] = {
    "stay": Recoveries.stay,
    "fill": Recoveries._fill,
    "reroute": Recoveries._reroute,
    "resize": Recoveries._resize,
    "layers": Recoveries._layers,
    "clocks": Recoveries._raise_clocks,
    "shrink": Recoveries._shrink,
    "layout": Recoveries._layout,
    "drop": Recoveries._drop,
    "checkpoint": Recoveries._checkpoint,
}
