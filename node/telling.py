"""What people, and the script, hear of the cluster while a node's loop runs."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

from ..protocols.messages import Notice, View

WAIT_TOLD_S = 0.3  # A wait that lasts longer is told.


@dataclass(eq=False, slots=True)
class Telling:
    """Listeners are called on the loop's thread.

    Attributes:
        parked: Hears why this node waits, and None when it goes on.
        why: Says why it still waits, if the core knows that better by now.
    """

    notice: Callable[[Notice], None]
    on_parked: Callable[[str | None], None]
    view: Callable[[View], None]
    progress: Callable[[str], None]
    why: Callable[[], str | None]
    _later: asyncio.TimerHandle | None = field(default=None, init=False)  # Then it is told that we wait.
    _told_parked: bool = field(default=False, init=False)

    def parked(self, reason: str | None) -> None:
        """Tell of a wait, or that it is over. A wait that is over in a moment, as while others leave, is not told."""
        self.forget()
        if reason is not None:
            self._later = asyncio.get_running_loop().call_later(WAIT_TOLD_S, self._tell_parked, reason)
        elif self._told_parked:
            self._told_parked = False
            self.on_parked(None)

    def forget(self) -> None:
        """A life is over: a wait that is not told yet has no meaning any more."""
        if self._later is not None:
            self._later.cancel()
            self._later = None

    def _tell_parked(self, reason: str) -> None:
        self._later, self._told_parked = None, True
        self.on_parked(self.why() or reason)
