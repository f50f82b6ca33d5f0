"""What a joiner prints of its progress: less and less often, until it is a member."""

from __future__ import annotations

import math

from .asking import ASK_EVERY_S, MAX_UNANSWERED, Asking, JoinState, Otherwise
from .effects import Effect, Progress
from .scale_out import Joiner

FIRST_S = (2.0, 5.0, 10.0)  # Then each time after twice as long, ...
MOST_APART_S = 300.0  # ... but at least so often.


class JoinNews:
    """The progress of one join, which begins now. `tick` may be called as seldom as once a second.

    Attributes:
        took_s: How long it has been in each state of protocols/scale_out.py that it has left, by name.
    """

    def __init__(self, joiner: Joiner, now_s: float) -> None:
        self.joiner, self.began_s = joiner, now_s
        self.took_s: dict[str, float] = {}
        self._state, self._since_s = joiner.state, now_s
        self._next_s = FIRST_S[0]
        # When it was told last, or began to pull; of which attempt, and how many bytes were here.
        self._before = (now_s, 0, 0)

    def note(self, now_s: float) -> None:
        """The joiner may have come into another state."""
        if self.joiner.state is not self._state:
            name = self._state.value
            self.took_s[name] = self.took_s.get(name, 0.0) + now_s - self._since_s
            self._state, self._since_s = self.joiner.state, now_s
            if self._state is JoinState.FETCHING:
                self._before = (now_s, 0, 0)

    def tick(self, now_s: float) -> list[Effect]:
        """A line, if one is due."""
        took_s = now_s - self.began_s
        if self.joiner.state in (JoinState.JOINED, JoinState.FAILED) or took_s < self._next_s:
            return []
        later = [each for each in FIRST_S if each > took_s]
        self._next_s = later[0] if later else took_s + min(took_s, MOST_APART_S)
        return [Progress(self._doing(now_s))]

    def _doing(self, now_s: float) -> str:
        joiner, asking = self.joiner, self.joiner.asking
        match joiner.state:
            case JoinState.KNOCKING:
                said = "; ".join(
                    f"{seed} ({asking.refusals.get(seed, 'no answer')})"
                    for seed in asking.seeds
                    if seed not in asking.mine
                )
                if not asking.seeds:
                    return f"has heard of nobody; {self._otherwise(now_s)}"
                return f"still knocking at {said or 'nobody but itself'}; {self._otherwise(now_s)}"
            case JoinState.ASKED if not asking.scheduler:
                reached = ", ".join(sorted(asking.relay.peers - asking.relay.leaves)) or "nobody any more"
                return f"asks to be let in, and no scheduler answers (reaches {reached}); {self._otherwise(now_s)}"
            case JoinState.ASKED:
                return f"asks {asking.scheduler} again to be let in{_because(asking.vain.last_end)}"
            case JoinState.LINKING:
                return f"opens and measures the links to {', '.join(sorted(joiner.links.open))}"
            case JoinState.WAITING:
                return f"waits for {asking.scheduler} to plan how it gets the state"
            case JoinState.FETCHING:
                return self._pulling(now_s)
            case JoinState.LOADING:
                return "has the state, and catches up with the steps since"
        return "has the state, and becomes a member after the step under way"

    def _otherwise(self, now_s: float) -> str:
        asking = self.joiner.asking
        if asking.otherwise is Otherwise.KEEP_TRYING:
            return "goes on trying"
        if asking.otherwise is Otherwise.FOUND and (earlier := asking.waits_for(now_s)):
            return f"waits for {earlier} to found the cluster"
        return f"{'founds a cluster' if asking.may_found else 'gives up'} in {left_s(asking, now_s):.0f} s"

    def _pulling(self, now_s: float) -> str:
        pull = self.joiner.replication
        if pull is None or pull.total_bytes is None:
            return (
                f"asks for the list of what belongs to the state{_because(self.joiner.asking.vain.last_end)}"
            )
        before_s, attempt, before = self._before
        came = pull.stored_bytes - (before if attempt == pull.attempt else 0)
        rate = came / max(now_s - before_s, 1e-3)
        self._before = (now_s, pull.attempt, pull.stored_bytes)
        again = (
            f" (attempt {self.joiner.attempts}{_because(self.joiner.asking.vain.last_end)})"
            if self.joiner.asking.vain.last_end
            else ""
        )
        left_s = (pull.total_bytes - pull.stored_bytes) / rate if came > 0 else math.inf
        left = f", about {left_s:,.0f} s left" if left_s < math.inf else ""
        return (
            f"pulls the state: {pull.stored_bytes / 1e6:,.0f} of {pull.total_bytes / 1e6:,.0f} MB, "
            f"{rate / 1e6:.1f} MB/s from {', '.join(pull.sources)}{left}{again}"
        )


def left_s(asking: Asking, now_s: float) -> float:
    """So long the joiner goes on, if nothing else comes, until it gives up or founds."""
    left = (now_s if asking.give_up_at_s is None else asking.give_up_at_s) - now_s
    if asking.standing.state is JoinState.ASKED and not asking.may_found:  # Somebody is there: it asks on.
        rest_s = (MAX_UNANSWERED - asking.unanswered) * ASK_EVERY_S
        left = max(left, asking.ask_again_at_s - now_s + rest_s)
    return max(left, 0.0)


def _because(reason: str) -> str:
    return f", as the last attempt ended: {reason}" if reason else ""
