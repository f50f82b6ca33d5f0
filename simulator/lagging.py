"""A joiner that is several steps behind when it loses the link, or the source, that was to bring it their results.

A small cluster whose links have rates: pieces of state overtake results, so whoever pulls is behind. What the
others have kept it gets from them; if that is not enough it pulls the state once more.

And a joiner for which the cluster waits, so that it is a member before it has the state: what belongs to an earlier
membership must not count.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass

from ..node.agent.core import Phase
from ..protocols.asking import JoinState
from ..protocols.events import Event
from ..protocols.messages import Contribution
from .cluster import SimCluster
from .nodes import SimNode
from .rates import LinkRates
from .training_thread import train

MEMBERS, JOINER = ("n1", "n2", "n3"), "n4"
STATE_BYTES = 132_000_000
COMPUTE_S = 0.8
STEP_S, LONGEST_S = 0.01, 40.0


@dataclass(frozen=True, slots=True)
class Lost:
    """`source` is cut off from the joiner, or dies (`dies`), once that lacks the results of `lacks` steps.

    `result_bytes`: of a step. `pull_s`: how long the links of all members take for the state.
    """

    source: str
    lacks: int
    dies: bool = False
    result_bytes: int = STATE_BYTES // 10
    pull_s: float = 2.0
    pulls: int = 1  # So often it pulls the state in all.

    @property
    def name(self) -> str:
        return f"{self.source} {'dies' if self.dies else 'is cut off'} at {self.lacks} steps"


LOSSES = {
    each.name: each
    for each in (
        *(Lost(source, 2) for source in MEMBERS),
        *(Lost(source, 2, dies=True) for source in MEMBERS),
        # Nobody keeps so many.
        Lost("n3", 6, dies=True, result_bytes=STATE_BYTES // 30, pull_s=6.0, pulls=2),
    )
}


def play(lost: Lost, cluster: SimCluster | None = None) -> SimCluster:
    """Raises: AssertionError if a rule is broken, or the joiner does not come in, or pulls more or less often."""
    cluster = cluster or SimCluster(1, record=True)
    _found(cluster, lost)
    joiner = cluster.add(JOINER, seeds=MEMBERS[:1], degree=len(MEMBERS))
    asks = joiner.agent.joiner
    assert asks is not None
    _until(cluster, lambda: asks.state is JoinState.FETCHING)
    first = cluster.nodes[MEMBERS[0]].agent
    _until(cluster, lambda: first.sync.step - joiner.agent.sync.step == lost.lacks)
    if lost.dies:
        cluster.crash(lost.source)
    else:
        cluster.cut(lost.source, JOINER)
    _until(cluster, lambda: joiner.training and joiner.loaded)
    cluster.run(cluster.now_s + 3 * COMPUTE_S)
    assert not cluster.unsettled(cluster.now_s - 2 * COMPUTE_S), cluster.unsettled(
        cluster.now_s - 2 * COMPUTE_S
    )
    assert asks.attempts == lost.pulls, f"{JOINER} pulled the state {asks.attempts} times, where {lost.name}"
    return cluster


def _found_with_a_joiner(seed: int = 1) -> tuple[SimCluster, SimNode]:
    """A cluster with a joiner that is a member, but has no state yet."""
    cluster = SimCluster(seed, record=True)
    _found(cluster, next(iter(LOSSES.values())))
    joiner = cluster.add(JOINER, seeds=MEMBERS[:1], degree=len(MEMBERS), blocking=True)
    _until(cluster, lambda: joiner.agent.phase is Phase.MEMBER)
    assert not joiner.loaded
    return cluster, joiner


def _comes_in(cluster: SimCluster, joiner: SimNode) -> None:
    first = cluster.nodes[MEMBERS[0]]
    _until(cluster, lambda: joiner.training and joiner.loaded and JOINER in first.view.member_set)
    cluster.run(cluster.now_s + 3 * COMPUTE_S)
    assert not cluster.unsettled(cluster.now_s - 2 * COMPUTE_S)


def play_script() -> None:
    """The joiner's script brings a step that it computed with a state that is void by now.

    In random lives it can do so only in the moment between the state's arrival and the joiner's word of it.
    """
    cluster, joiner = _found_with_a_joiner()
    joiner.step = joiner.agent.sync.step
    part = Contribution(weight=1.0, ranges=((5, 6),), shares={JOINER: 1})

    def tell(node: SimNode, event: Event) -> None:
        cluster.tell(node.name, event)

    train(cluster, tell, joiner, joiner.step, part, 0.0, cluster.chunks)
    _comes_in(cluster, joiner)


def play_parts() -> None:
    """The joiner is cut off, and put out, while it has parts of the step that all wait for; then it comes back."""
    cluster, joiner = _found_with_a_joiner(seed=6)  # Parts come to it before all of the state does.
    _until(cluster, lambda: bool(joiner.sums))
    for member in MEMBERS:
        cluster.cut(member, JOINER)
    members = [cluster.nodes[name] for name in MEMBERS]
    _until(cluster, lambda: all(node.view.find(JOINER) is None for node in members))
    assert joiner.sums and not joiner.loaded
    for member in MEMBERS:
        cluster.heal(member, JOINER)
    _comes_in(cluster, joiner)


MEMBERSHIPS = {"a script that is behind": play_script, "parts of an earlier membership": play_parts}


def _found(cluster: SimCluster, lost: Lost) -> None:
    """Members that have joined long ago, and know how long steps take."""
    cluster.max_delay_s = cluster.max_bulk_delay_s = 0.002
    cluster.chunks, cluster.compute_s, cluster.retract_odds = 12, COMPUTE_S, 0.0
    cluster.state_bytes, cluster.result_bytes = STATE_BYTES, lost.result_bytes
    cluster.rates = rates = LinkRates(random.Random(1))
    rates.result_bytes, rates.ahead_bytes, rates.shows_s = lost.result_bytes, 2 << 20, 0.0
    for way in itertools.permutations((*MEMBERS, JOINER), 2):
        rates.by_way[way] = STATE_BYTES / len(MEMBERS) / lost.pull_s
    cluster.add(MEMBERS[0])
    for name in MEMBERS[1:]:
        node = cluster.add(name, seeds=MEMBERS[:1], degree=len(MEMBERS))
        _until(cluster, lambda node=node: node.loaded)  # type: ignore[misc]
    cluster.run(cluster.now_s + 8 * COMPUTE_S)


def _until(cluster: SimCluster, is_so: Callable[[], bool]) -> None:
    until_s = cluster.now_s + LONGEST_S
    while not is_so():
        assert cluster.now_s < until_s, f"what was waited for did not come\n{cluster.story()}"
        cluster.run(cluster.now_s + STEP_S)
