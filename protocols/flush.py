"""A flush, as a member sees it: stop, say where we are, and go on in the view that is installed.

    acting --FLUSH--> frozen --INSTALL--> acting

Flushes are numbered by their scheduler, within its term. A later one replaces the one under way; one from before the
last that has ended came late.
"""

from __future__ import annotations

from .effects import Effect
from .messages import Flush, FlushOk, Install, View
from .relay import Relay
from .step_sync import StepSync

FROZEN_PATIENCE_S = 1.0  # Without an install.


class FlushFollower:
    """What node `me` does in a flush."""

    def __init__(self, me: str, sync: StepSync, relay: Relay) -> None:
        self.me, self.sync, self.relay = me, sync, relay
        self.flush: Flush | None = None  # The one under way.
        self.ended = (0, 0)  # Term and number of the last that has ended.
        self.answered_at_s = 0.0

    @property
    def wake_at_s(self) -> float | None:
        return self.answered_at_s + FROZEN_PATIENCE_S if self.flush else None

    def is_over(self, flush: Flush) -> bool:
        """Has this flush ended, or a later one begun?"""
        number = (flush.term, flush.number)
        newest = max(self.ended, (self.flush.term, self.flush.number) if self.flush else (0, 0))
        return number < newest or number == self.ended

    def follow(self, flush: Flush, now_s: float) -> list[Effect]:
        """Freeze, and say where this node is. A repeated FLUSH is answered again."""
        if self.flush != flush:
            self.flush, self.answered_at_s = flush, now_s
        return self.sync.freeze() + self._answer(flush)

    def stop(self) -> None:
        """Follow no flush any more: another view is active, or the cluster has dropped this node."""
        self.flush = None

    def note_ended(self, flushed: tuple[int, int]) -> None:
        """Note that flushes up to this one, by term and number, were over before this node came."""
        self.ended = max(self.ended, flushed)

    def is_due(self, now_s: float) -> bool:
        """Has nothing been installed for long? The answer, or the INSTALL, may be lost."""
        return self.wake_at_s is not None and now_s >= self.wake_at_s

    def repeat(self, now_s: float) -> list[Effect]:
        """Say again where we are."""
        assert self.flush is not None
        self.answered_at_s = now_s
        return self._answer(self.flush)

    def _answer(self, flush: Flush) -> list[Effect]:
        sync = self.sync
        assert sync.view is not None
        newer_view, newer_step = sync.view.key > flush.key, sync.step > flush.step
        answer = FlushOk(
            term=flush.term,
            number=flush.number,
            node=self.me,
            key=sync.view.key,
            step=sync.step,
            began_here=sync.began_here,
            view=sync.view if newer_view else None,
            priors=sync.priors if newer_view else (),
            commit=sync.last_commit if newer_step else None,
            deal=sync.deal if newer_step else (),
            kept=len(sync.kept),
        )
        return self.relay.send(flush.scheduler, answer)

    def is_ended_by(self, install: Install) -> bool:
        """Does this INSTALL end the flush under way?"""
        flush = self.flush
        return flush is not None and (install.term, install.number) == (flush.term, flush.number)

    def end(self, install: Install, view: View) -> list[Effect]:
        """Go on in `view`, the one that `install` tells."""
        self.flush, self.ended = None, (install.term, install.number)
        return self.sync.start_installed(install, view)
