"""Whom to ask next for a cluster's status, while nodes come and go; pure."""

from __future__ import annotations

import math

from ..protocols.errors import PeerUnreachable
from ..protocols.status import Status


class Known:
    """Addresses of a cluster's nodes, the one to ask first. Each is asked until it does not answer."""

    def __init__(self, address: str, patience_s: float) -> None:
        self.given = address  # Where it all began: perhaps one that no member knows.
        self.addresses = [address]
        self.patience_s = patience_s
        self._silent_from_s = math.inf  # The first question since the last answer.
        self._silences = 0  # Since then.

    def answered(self, status: Status) -> None:
        """Its active members are those to ask if this node falls silent."""
        told = (address for row in status.active for address in row.addresses)
        self.addresses = list(dict.fromkeys([self.addresses[0], *told, self.given]))
        self._silent_from_s, self._silences = math.inf, 0

    def silent(self, error: PeerUnreachable, asked_s: float, now_s: float) -> None:
        """Asked at `asked_s`, it has not answered: the next is. Raises: PeerUnreachable if none has for too long."""
        self._silent_from_s = min(self._silent_from_s, asked_s)
        self._silences += 1
        silent_s = now_s - self._silent_from_s
        if silent_s >= self.patience_s and self._silences >= len(self.addresses):
            names = ", ".join(self.addresses)
            raise PeerUnreachable(
                f"the cluster has not answered for {silent_s:.0f} s (asked: {names}); at last: {error}"
            ) from error
        self.addresses = [*self.addresses[1:], self.addresses[0]]
