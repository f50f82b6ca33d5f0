"""Messages that are ahead of this node: kept for a moment, until it has come there, too.

What is dropped never comes again, so whoever falls too far behind has to begin anew.
"""

from __future__ import annotations

from collections import Counter

from .events import Received
from .messages import Commit, Down, Ready, Up, ViewKey

# What is kept of one peer. In chunks a neighbour can be one step ahead.
EARLY_STEPS = 4
# Commits come to an observer over a slow link long before the results, which wait in memory of whoever sends them. An
# observer that is further behind begins anew, and then the cluster waits for it.
EARLY_COMMITS = 8, 1024
EARLY_RESULTS_BYTES = 1 << 30


class Early:
    """Messages of later steps, with `chunks` chunks each and results of `result_bytes` (0 if that is not known)."""

    def __init__(self, chunks: int, result_bytes: int) -> None:
        self.most_bulk = EARLY_STEPS * 2 * chunks
        self.result_bytes = result_bytes
        self.events: list[Received] = []
        self.count: Counter[tuple[str, bool]] = Counter()  # By peer, and whether it has a payload.

    @property
    def most_commits(self) -> int:
        """How many commits are kept."""
        least, most = EARLY_COMMITS
        return max(min(EARLY_RESULTS_BYTES // max(self.result_bytes, 1), most), least)

    @property
    def steps(self) -> int:
        """How many later steps are known to be committed."""
        return len({event.message.step for event in self.events if isinstance(event.message, Commit)})

    def keep(self, event: Received) -> bool:
        """Keep a message until `take`. Returns: False if its sender is too far ahead, so that some are dropped.

        The sender's messages of the oldest view are dropped: a joiner that asks anew still hears of the view it was
        in, and must not lose what it hears of its next one.
        """
        self.events.append(event)
        self.count[_kind(event)] += 1
        if self.count[_kind(event)] <= (self.most_bulk if _kind(event)[1] else self.most_commits):
            return True
        oldest = min(_key(each) for each in self.events if _kind(each) == _kind(event))
        self.events = [each for each in self.events if _key(each) > oldest]
        self.count = Counter(map(_kind, self.events))
        return False

    def take(self) -> list[Received]:
        """All of them, in the order in which they came."""
        events, self.events = self.events, []
        self.count.clear()
        return events

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert self.count == Counter(map(_kind, self.events))
        assert max(self.count.values(), default=0) <= max(self.most_commits, self.most_bulk)


def _kind(event: Received) -> tuple[str, bool]:
    return event.peer, isinstance(event.message, Up | Down)


def _key(event: Received) -> ViewKey:
    assert isinstance(event.message, Up | Down | Ready | Commit)
    return event.message.key
