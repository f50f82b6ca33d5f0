"""Whom to ask next for a cluster's status, while nodes come and go; pure."""

from __future__ import annotations

import math

from ..protocols.errors import PeerUnreachable
from ..protocols.status import Status


class Known:
    """Addresses of a cluster's nodes, the one to ask first in the list. It is asked until it does not answer."""

    def __init__(self, address: str, patience_s: float) -> None:
        self.given = address  # The user's, which no member may know (that of a tunnel, say).
        self.addresses = [address]
        self.patience_s = patience_s
        self._silent_from_s = math.inf  # When the first unanswered question was asked.
        self._silences = 0  # Unanswered questions since the last answer.

    def answered(self, status: Status) -> None:
        """The node has answered. If it falls silent, the active members that it named are asked."""
        told = (address for row in status.active for address in row.addresses)
        self.addresses = list(dict.fromkeys([self.addresses[0], *told, self.given]))
        self._silent_from_s, self._silences = math.inf, 0

    def silent(self, error: PeerUnreachable, asked_s: float, now_s: float) -> None:
        """The node did not answer what was asked at `asked_s`: the next one is to be asked.

        Raises: PeerUnreachable if all have been asked, and none has answered for `patience_s`.
        """
        self._silent_from_s = min(self._silent_from_s, asked_s)
        self._silences += 1
        silent_s = now_s - self._silent_from_s
        if silent_s >= self.patience_s and self._silences >= len(self.addresses):
            names = ", ".join(self.addresses)
            raise PeerUnreachable(
                f"the cluster has not answered for {silent_s:.0f} s (asked: {names}); at last: {error}"
            ) from error
        self.addresses = [*self.addresses[1:], self.addresses[0]]
