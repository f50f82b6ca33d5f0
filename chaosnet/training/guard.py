"""The guard against a faulty member: a node judges its gradient before it counts. No tensor, no I/O.

It sits in three places, because what travels are sums (docs/guard.md):

    own part      before it leaves: finite? not far above what is usual here?       this module
    child's part  as it arrives at a parent: finite? else it counts as zeros        node/sums/all_reduce.py
    result        before the optimizer steps: finite? All members see the same bits, so all refuse it, or none

Of buffers the own part only: one may hold infinity on purpose, and zeros would pull averages towards zero.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass
from typing import Literal

MEMORY = 50  # Norms that "usual" is the median of.
LEARNS_FROM = 10  # With fewer of them, only what is not finite is faulty.
EVICT_AFTER = 3  # Faulty gradients in a row.


@dataclass(frozen=True, slots=True)
class Verdict:
    """What happens with a gradient. `scale`: its factor; `reason`: for people, "" if it is fine."""

    action: Literal["pass", "skip", "clip", "evict"]
    scale: float = 1.0
    reason: str = ""


class Guard:
    """Judges the norms of one node's gradients, step after step.

    Args:
        policy: "skip": a faulty gradient does not count. "clip": it is scaled down to the limit, or does not
            count if it is not finite. "evict": it does not count, and the third in a row puts this node out.
        factor: The limit is this many times the median of this node's last 50 norms.
    """

    def __init__(self, policy: str, factor: float) -> None:
        self.policy, self.factor = policy, factor
        self.norms: deque[float] = deque(maxlen=MEMORY)
        self.in_a_row = 0
        self._named: dict[str, Guard] = {}

    def of(self, name: str) -> Guard:
        """The guard of the updates of that name: a critic and its generator have different usual norms."""
        return self._named.setdefault(name, Guard(self.policy, self.factor)) if name else self

    @property
    def limit(self) -> float:
        if len(self.norms) < LEARNS_FROM:
            return math.inf
        return self.factor * statistics.median(self.norms) or math.inf  # All were zero: nothing is usual yet.

    def judge(self, norm: float) -> Verdict:
        """What to do with a gradient of that norm; remembers it."""
        limit = self.limit
        if math.isfinite(norm):
            self.norms.append(min(norm, limit))  # So that what grows for good becomes usual in time.
        if math.isfinite(norm) and norm <= limit:
            self.in_a_row = 0
            return Verdict("pass")
        if not math.isfinite(norm):
            return self.refuse("its gradient is not finite")
        reason = f"its gradient has norm {norm:.3g} (limit {limit:.3g})"
        if self.policy != "clip":
            return self.refuse(reason)
        self.in_a_row += 1
        return Verdict("clip", limit / norm, reason)

    def refuse(self, reason: str) -> Verdict:
        """The verdict on a contribution that must not count, for that reason."""
        self.in_a_row += 1
        if self.policy == "evict" and self.in_a_row >= EVICT_AFTER:
            return Verdict("evict", reason=f"{reason}, the {EVICT_AFTER}rd time in a row")
        return Verdict("skip", reason=reason)
