"""What experiments of Chameleon and of ElasWave share: pipelines that are alike, and what follows a loss."""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.elastic.cluster import alike
from ..scheduler.elastic.plan import Pipeline, cuts_of, even
from ..scheduler.elastic.profile import Profile
from ..scheduler.elastic.recoveries import Recoveries, Recovery
from ..scheduler.elastic.state import State


def began(
    profile: Profile, stages: int, pipelines: int, micro_batches: int, samples: int = 1,
    memory_gib: float = float("inf"),
) -> tuple[Recoveries, State]:  # fmt: skip
    """Pipelines alike on workers p0s0, p0s1...; and what proposes recoveries, of all families."""
    names = [[f"p{i}s{s}" for s in range(stages)] for i in range(pipelines)]
    cuts = cuts_of(even(len(profile.layers), stages))
    cluster = alike([name for each in names for name in each], memory_gib * 2**30)
    state = State(
        tuple(Pipeline(tuple(each), cuts) for each in names), even(micro_batches, pipelines), samples
    )
    return Recoveries(profile, cluster), state


def step_s(recoveries: Recoveries, state: State) -> float:
    """Of a state as it is."""
    return recoveries.estimator.on(recoveries.cluster).estimate(state.plan).step_s


def fastest(
    recoveries: Recoveries, state: State, families: Sequence[str] | None = None
) -> dict[str, Recovery]:
    """By family, its fastest proposal; families that have none are not there."""
    found: dict[str, Recovery] = {}
    for each in recoveries.of(state):
        if isinstance(each, Recovery) and (families is None or each.family in families):
            best = found.get(each.family)
            if best is None or each.step_s < best.step_s:
                found[each.family] = each
    return found
