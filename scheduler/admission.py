"""Joiners: when they are let in together, and whether the cluster waits for them.

Let S be the state, G what a step sums, T what it takes, R the rates of a joiner's links to members. Results of the
steps that go on while it fetches the state share these links with it: they take G / (R T) of them. Beyond a half the
state is there sooner if the cluster waits. If most of the state is trained, and fetching it takes less than a step,
waiting can cost less than it saves. It costs each member S / R. It saves a copy of the state at each source, and
results that are sent and steps that are done over: two steps of each joiner, 0.3 of each member (`chaosnet bench
peers`: with three members and S / R of a step, joins took 2 s longer where these trained on, of steps of 1 s, and
their longest gaps 0.3 to 0.4 s). So the more members there are, the sooner they go on.

Who joins in the same view fetches the same state, so they pass it on to each other (protocols/replication.py).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, replace

from ..protocols.messages import LinkReading, View
from . import views
from .trees import DEFAULT_RATE_BPS
from .views import Entrant

# Of several that ask at once, those who are quick with their links wait for the others: together they fetch faster.
# So long at least, also from when the last has asked, and at most; and this share of the time in which the slowest
# would fetch the state alone.
GATHER_S, GATHER_SHARE = (1.0, 4.0), 0.3
FRESH_S = 6.0  # Who has not asked for so long may be gone: a joiner asks every 3 s.
STATE_OF_RESULTS = 3  # Bytes of state to one of results: parameters, and two moments of Adam.
# Of one joiner's links; and of each of several, which pass the state on to each other only while the others wait.
MAX_RESULTS_SHARE = 0.5, 0.1
# A state that is soon there is waited for if it is no larger than so many times the results.
MOST_OF_RESULTS = 2 * STATE_OF_RESULTS
JOIN_S = 0.05  # Of a join that is waited for, besides the bytes: 0.03 s on loopback.
JOINER_SAVES, MEMBER_SAVES = 2.0, 0.3  # Steps, if the cluster waits, see above.

Costs = Callable[[], tuple[int, float | None]]
"""Bytes that a step sums, and the seconds that it takes usually, if that is known."""


@dataclass(frozen=True, slots=True)
class Wanting:
    """A joiner that can be let in. The monitor forgets links that are not in the next view."""

    joiner: Entrant
    blocking: bool  # Its user's wish.
    measured_s: float
    links: Mapping[str, LinkReading]


class Admission:
    """Joiners that have asked, and those of them whose links are open."""

    def __init__(self, costs: Costs, state_bytes: Callable[[], int]) -> None:
        self.costs, self.state_bytes = costs, state_bytes
        self.asked_s: dict[str, float] = {}
        self.wanting: dict[str, Wanting] = {}
        self.since_s: float | None = None  # When the first of those that are not let in yet was there.

    def asks(self, node: str, now_s: float) -> None:
        """Joiner `node` asks to be let in."""
        self.asked_s.pop(node, None)
        self.asked_s[node] = now_s  # The last to ask comes last.

    def fresh(self, now_s: float) -> list[str]:
        """The joiners that have asked lately, the last one first."""
        return [node for node, at_s in reversed(self.asked_s.items()) if now_s - at_s <= FRESH_S]

    def is_complete(self, now_s: float) -> bool:
        """Have all that asked lately opened their links?"""
        return self.wanting.keys() >= {*self.fresh(now_s)}

    def opened(self, wanting: Wanting) -> None:
        """The links of one more joiner are open."""
        self.wanting[wanting.joiner.node] = wanting
        if self.since_s is None:
            self.since_s = wanting.measured_s

    def forget(self, nodes: Set[str]) -> None:
        """Forget joiners that are in, or that ask anew."""
        for node in nodes:
            self.wanting.pop(node, None)
            self.asked_s.pop(node, None)

    def knows(self, node: str, life: int, linked: Set[str]) -> bool:
        """Has this life of `node` opened its links, and are all of them still open (`linked`)?"""
        wanting = self.wanting.get(node)
        return wanting is not None and wanting.joiner.life == life and {*wanting.links} <= linked

    def at_s(self, view: View) -> float | None:
        """When to let in those that wait: until then others may ask, or open their links. None if nobody waits."""
        if self.since_s is None:
            return None
        result_bytes, step_s = self.costs()
        rates_bps = [_rate_bps(each, view) for each in self.wanting.values()]
        alone_s = [8 * STATE_OF_RESULTS * result_bytes / rate_bps for rate_bps in rates_bps if rate_bps]
        if not self.is_complete(self.since_s):
            last_s = max(self.asked_s.values()) - self.since_s  # It has just begun to open its links.
            waits_s = max(GATHER_SHARE * max(alone_s, default=0.0), GATHER_S[0], last_s + GATHER_S[0])
        elif len(view.members) == 1:
            # All there are so far are there. At the beginning of a run others are about to ask: machines are started
            # together, and who comes later waits for the end of this join, a transfer and a step.
            fetch_s = statistics.median(alone_s) if alone_s else 0.0  # Rates of new links may be wrong.
            waits_s = fetch_s + min(step_s or 0.0, fetch_s)
        else:
            waits_s = 0.0
        return self.since_s + min(waits_s, GATHER_S[1])

    def admissible(self, view: View) -> tuple[Entrant, ...]:
        """The joiners that can be let in now. If the cluster has to wait for one of them, it waits for all.

        A joiner that cannot be let in even if all wait may be dead, so it does not decide about the others.
        """
        if_all_wait = (replace(each.joiner, blocking=True) for each in self.wanting.values())
        near = [self.wanting[each.node] for each in views.admissible(view, if_all_wait)]
        shares = [self._share_of_results(each, view) for each in near]
        most = MAX_RESULTS_SHARE[len(near) > 1]
        worth = JOINER_SAVES * len(near) / len(view.members) + MEMBER_SAVES
        are_soon_in = bool(near) and all(self._is_soon_in(each, view, min(worth, 1.0)) for each in near)
        waits = are_soon_in or any(share > most for share in shares) or any(each.blocking for each in near)
        wanting = (
            replace(each.joiner, blocking=waits, why=_why_it_waits(share, are_soon_in) if waits else "")
            for each, share in zip(near, shares, strict=True)
        )
        return views.admissible(view, wanting)

    def _share_of_results(self, wanting: Wanting, view: View) -> float:
        """G / (R T), see above; infinite before the first step, as nobody knows T."""
        result_bytes, step_s = self.costs()
        if not result_bytes:
            return 0.0
        rate_bps = _rate_bps(wanting, view)
        return 8 * result_bytes / (rate_bps * step_s) if rate_bps and step_s else math.inf

    def _is_soon_in(self, wanting: Wanting, view: View, steps: float) -> bool:
        """Is the state at the joiner within so much of a step that it is not worth it to train meanwhile?"""
        (result_bytes, step_s), state_bytes = self.costs(), self.state_bytes()
        rate_bps = _rate_bps(wanting, view)
        if not state_bytes or not step_s or not rate_bps or state_bytes > MOST_OF_RESULTS * result_bytes:
            return False
        return 8 * state_bytes / rate_bps + JOIN_S <= steps * step_s

    def why_not_yet(self, node: str, view: View) -> str:
        """What a joiner whose links are open waits for."""
        pulling = [each.node for each in view.joining if each.sources]
        if pulling:
            return (
                f"waits for {', '.join(pulling)}, which {'pulls' if len(pulling) == 1 else 'pull'} the state"
            )
        around = sorted(self.wanting[node].links)
        if view.member_set & {*around}:
            return "waits for the end of the step under way"
        return f"waits for {', '.join(around)} to be let in"


def mode(joiner: Entrant) -> str:
    """In which mode it joins, and why, for people."""
    if not joiner.blocking:
        return "streaming"
    return joiner.why or "blocking"


def _why_it_waits(share: float, are_soon_in: bool) -> str:
    """`share`: of the joiner's links, that results of steps would take."""
    if are_soon_in:
        return "blocking, for the state is there in less than a step"
    if MAX_RESULTS_SHARE[1] < share < math.inf:
        return f"blocking, for results of steps would take {share:.0%} of its links"
    return ""


def _rate_bps(wanting: Wanting, view: View) -> float:
    """R, see above: the rate of a joiner's links to members."""
    links = ((peer, reading) for peer, reading in wanting.links.items() if peer in view.member_set)
    return sum(reading.rate_bps or DEFAULT_RATE_BPS for _, reading in links)
