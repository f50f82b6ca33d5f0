"""How a node of this process is found, as long as it lives: by commands on this machine, by name on the network."""

from __future__ import annotations

import contextlib
import threading

from ..node import interfaces
from ..node.endpoint import Endpoint
from ..node.session import Session
from ..protocols.events import SeedsFound
from .lan import Announced, Lan
from .local_nodes import LocalFile

LOOK_EVERY_S = 5.0  # Are the addresses that a node announces still its own?


class Presence:
    """Of the node of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file = LocalFile(session.name, session.settings.listen)
        self._announced: tuple[str, ...] = ()
        self._lan: Lan | None = None
        self._over = threading.Event()

    def begin(self) -> None:
        """It listens, and is about to enter a cluster."""
        self._file.write(self._session.addresses)
        if self._session.settings.cluster_name:
            self._announce(self._session.addresses)
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

    def _announce(self, addresses: tuple[str, ...]) -> None:
        session, settings = self._session, self._session.settings
        mine = Announced.of(settings.cluster_name, session.name, addresses)
        self._announced = addresses
        self._lan = Lan(mine, settings.allowed_keys, self._found, session.say)
        self._lan.start()

    def _watch(self) -> None:
        """Announce the node anew where it has come into another network: who looks for it there would found a
        cluster."""
        host = Endpoint.parse(self._session.settings.listen).host
        listens = str(Endpoint.parse(self._announced[0]).at(host))
        while not self._over.wait(LOOK_EVERY_S):
            now = interfaces.reached_at(listens)
            if not now or now == self._announced:
                continue
            assert self._lan is not None
            self._lan.stop()
            self._announce(now)
            if self._over.is_set():
                self._lan.stop()

    def _found(self, addresses: tuple[str, ...]) -> None:
        self._session.post(SeedsFound(addresses))
