"""How a node of this process is found, as long as it lives: by commands on this machine, by name on the network."""

from __future__ import annotations

import contextlib
import threading

from ..node import interfaces
from ..node.endpoint import Endpoint
from ..node.session import Session
from ..protocols.events import SeedsFound
from .lan import Acquaintance, Announced, Lan
from .local_nodes import LocalFile

LOOK_EVERY_S = 5.0  # Is what a node announces still so?


class Presence:
    """Of the node of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file = LocalFile(session.name, session.settings.listen)
        self._announced: Announced | None = None
        self._lan: Lan | None = None
        self._apart: set[str] = set()  # See `Acquaintance`.
        self._over = threading.Event()

    def begin(self) -> None:
        """It listens, and is about to enter a cluster."""
        self._file.write(self._session.addresses)
        if self._session.settings.cluster_name:
            self._announce(self._mine(self._session.addresses))
            with contextlib.suppress(RuntimeError):  # There are as many threads as may be.
                threading.Thread(target=self._watch, name="chaosnet-moves", daemon=True).start()

    def entered(self) -> None:
        """It is in one."""
        self._file.write(self._session.addresses, self._session.status().cluster)

    def end(self) -> None:
        """It is out for good."""
        self._file.remove()
        self._over.set()
        if self._lan is not None:
            self._lan.stop()

    def _mine(self, addresses: tuple[str, ...]) -> Announced:
        session = self._session
        return Announced.of(
            session.settings.cluster_name, session.name, addresses, session.loop.transport.cluster
        )

    def _announce(self, mine: Announced) -> None:
        known = Acquaintance(mine, self._session.settings.allowed_keys, self._apart)
        self._announced, self._lan = mine, Lan(known, self._found, self._session.say)
        self._lan.start()

    def _watch(self) -> None:
        """Announce the node anew where it has come into another network, or into a cluster.

        Who looks for it there would found a cluster; and of two clusters of one name nobody would know.
        """
        session = self._session
        host = Endpoint.parse(session.settings.listen).host
        listens = str(Endpoint.parse(session.addresses[0]).at(host))
        addresses = session.addresses
        while not self._over.wait(LOOK_EVERY_S):
            addresses = interfaces.reached_at(listens) or addresses
            mine = self._mine(addresses)
            if mine == self._announced:
                continue
            assert self._lan is not None
            self._lan.stop()
            self._announce(mine)
            if self._over.is_set():
                self._lan.stop()

    def _found(self, addresses: tuple[str, ...]) -> None:
        self._session.post(SeedsFound(addresses))
