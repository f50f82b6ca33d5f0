"""How a node of this process is found, as long as it lives: by commands on this machine, by name on the network."""

from __future__ import annotations

from ..node.session import Session
from ..protocols.events import SeedsFound
from .lan import Announced, Lan
from .local_nodes import LocalFile


class Presence:
    """Of the node of a session."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._file = LocalFile(session.name, session.settings.listen)
        self._lan: Lan | None = None

    def begin(self) -> None:
        """It listens, and is about to enter a cluster."""
        session, settings = self._session, self._session.settings
        self._file.write(session.addresses)
        if settings.cluster_name:
            mine = Announced.of(settings.cluster_name, session.name, session.addresses)
            self._lan = Lan(mine, settings.allowed_keys, self._found, session.say)
            self._lan.start()

    def entered(self) -> None:
        """It is in one."""
        self._file.write(self._session.addresses, self._session.status().cluster)

    def end(self) -> None:
        """It is out for good."""
        self._file.remove()
        if self._lan is not None:
            self._lan.stop()

    def _found(self, addresses: tuple[str, ...]) -> None:
        self._session.post(SeedsFound(addresses))
