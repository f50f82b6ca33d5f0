"""Messages that are ahead of this node: kept for a moment, until it has come there, too.

What is dropped never comes again, so whoever falls too far behind has to begin anew.
"""

from __future__ import annotations

from collections import Counter

from .events import Received
from .messages import Commit, Down, Up

# What is kept of one peer. In chunks a neighbour can be one step ahead.
EARLY_STEPS = 4
# Commits come to an observer over a slow link long before the results, which wait in memory of whoever sends them. An
# observer that is further behind begins anew, and then the cluster waits for it.
EARLY_COMMITS = 8, 1024
EARLY_RESULTS_BYTES = 1 << 30


class Early:
    """Those of steps with so many chunks, and results of so many bytes (0 if that is not known)."""

    def __init__(self, chunks: int, result_bytes: int) -> None:
        self.most_bulk = EARLY_STEPS * 2 * chunks
        self.result_bytes = result_bytes
        self.events: list[Received] = []
        self.count: Counter[tuple[str, bool]] = Counter()  # By peer, and whether it has a payload.

    @property
    def most_commits(self) -> int:
        """So many are kept."""
        least, most = EARLY_COMMITS
        return max(min(EARLY_RESULTS_BYTES // max(self.result_bytes, 1), most), least)

    @property
    def steps(self) -> int:
        """So many have been committed since, as far as it has come through."""
        return len({event.message.step for event in self.events if isinstance(event.message, Commit)})

    def keep(self, event: Received) -> bool:
        """Until `take`. If its sender is too far ahead, all are dropped. Returns whether it was kept."""
        is_bulk = isinstance(event.message, Up | Down)
        self.count[event.peer, is_bulk] += 1
        self.events.append(event)
        if self.count[event.peer, is_bulk] <= (self.most_bulk if is_bulk else self.most_commits):
            return True
        self.take()
        return False

    def take(self) -> list[Received]:
        """All of them, in the order in which they came."""
        events, self.events = self.events, []
        self.count.clear()
        return events

    def check_invariants(self) -> None:
        """What holds between any two events."""
        assert len(self.events) <= len(self.count) * max(self.most_commits, self.most_bulk)
