"""Whether another plan is worth a change of view, now that links carry more or less than when this was made.

That is other trees, or messages of another size. A change costs training nothing (it travels with a step), but it
costs everybody a view, and rates are noisy.
So the all-reduce has to become shorter by a share of its own time and of a whole step's, and twice in a row.
Where rates change all the time, as between processes that share processors, no plan is right for long: a plan that
did not last is followed by a longer pause.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import networkx as nx

from ..protocols.errors import PlanInfeasible
from ..protocols.messages import Link, View
from .sync_plan import SyncPolicy
from .sync_time import SyncTime
from .trees import SpanningTree

LOOK_EVERY_S = 2.0  # Rates are reported every second.
SETTLE_S = 4.0  # After a change of view: what was measured before it says little of what it loads.
# A plan that did not last for so many times the pause after it is followed by twice that pause, up to the longest.
LASTING, MOST_SETTLE_S = 4.0, 60.0
GAIN = 0.15  # Of the all-reduce's time, at least.
GAIN_OF_STEP = 0.03
SAME = 0.1  # Rates that differ by less since the last look are not looked at again.


@dataclass(slots=True)
class Replanning:
    """One scheduler's looks at its plan."""

    look_at_s: float = 0.0
    seen_bps: Mapping[Link, float] = field(default_factory=dict)  # When nothing better was found.
    worth: str = ""  # What the last look has found.
    planned_s: float = -math.inf  # When another plan was in force last, and the pause after it.
    pause_s: float = SETTLE_S

    def entered(self, now_s: float, is_replanned: bool = False) -> None:
        """Another view is in force, with trees of its own. `is_replanned`: for their sake alone."""
        pause_s = SETTLE_S
        if is_replanned:
            lasted = now_s - self.planned_s > LASTING * self.pause_s
            pause_s = SETTLE_S if lasted else min(2 * self.pause_s, MOST_SETTLE_S)
            self.planned_s, self.pause_s = now_s, pause_s
        self.look_at_s, self.seen_bps, self.worth = now_s + pause_s, {}, ""

    def look(
        self, view: View, graph_now: Callable[[], nx.Graph], policy: SyncPolicy, result_bytes: int, step_s: float,
        now_s: float,
    ) -> str:  # fmt: skip
        """What another plan would bring, for people; "" if that is not worth it, or not sure yet.

        Args:
            graph_now: Gives the members' overlay with its present rates, and "result" (sync_plan.packed). Of 300
                nodes that takes milliseconds, and each of them reports once a second: it is asked for a look only.
            step_s: What a step usually takes.
        """
        if now_s < self.look_at_s or view.observers or view.joining or len(view.members) < 2:
            return ""
        self.look_at_s, graph = now_s + LOOK_EVERY_S, graph_now()
        rates_bps = {(u, v): rate_bps for u, v, rate_bps in graph.edges(data="rate_bps", default=0.0)}
        if not self.worth and self._is_like(rates_bps):
            return ""
        before, self.worth = self.worth, _gain(view, graph, policy, result_bytes, step_s)
        self.seen_bps = {} if self.worth else rates_bps
        return self.worth if before else ""

    def _is_like(self, rates_bps: Mapping[Link, float]) -> bool:
        seen = self.seen_bps
        return rates_bps.keys() == seen.keys() and all(
            abs(rate_bps - seen[each]) <= SAME * seen[each] for each, rate_bps in rates_bps.items()
        )


def _gain(view: View, graph: nx.Graph, policy: SyncPolicy, result_bytes: int, step_s: float) -> str:
    chunks = graph.graph["result"][1]
    present = [SpanningTree(tree.root, tree.parent, tree.share) for tree in view.trees]
    now_s = SyncTime(present, graph).expected_s(result_bytes, math.ceil(chunks / view.bundle))
    if now_s <= GAIN_OF_STEP * step_s:
        return ""
    try:
        trees = policy(graph)
    except PlanInfeasible:
        return ""  # A user's policy, that cannot do with what links carry now.
    then_s, _ = SyncTime(trees, graph).best_bundle(result_bytes, chunks)
    if now_s - then_s <= max(GAIN * now_s, GAIN_OF_STEP * step_s):
        return ""
    how = "in messages of another size" if trees == present else "over other links"
    return f"sums {how} are to take {then_s:.2g} s instead of {now_s:.2g} s"
