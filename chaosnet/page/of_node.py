"""The page that a node's process serves beside training: `Trainer(..., dashboard=PORT)`."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from ..extras import demand
from ..identity import is_loopback
from ..node.endpoint import ANY_HOST, Endpoint
from ..node.session import Session

if TYPE_CHECKING:
    from .feed import Feed
    from .server import PageServer


def server_of(feed: Feed, host: str, port: int, what: str, with_actions: bool = False) -> PageServer:
    """See `PageServer`. Raises: ConfigError if it cannot listen there, or what the extra brings is missing."""
    demand("dashboard", f"{what}: the page")
    from .server import PageServer

    return PageServer(feed, host, port, what, with_actions)


def opened_to(place: Endpoint) -> str:
    """What serving the page there means, for people; "" on loopback."""
    if is_loopback(place.host):
        return ""
    return (
        f"whoever reaches {place.place} can read the cluster's page and metrics without a key: names, addresses, "
        "rates, losses, events; nobody can change anything there"
    )


class NodePage:
    """Listens as soon as it is made, so that a port that is taken is told before the node is in a cluster.

    Args:
        where: "HOST:PORT"; None: there is no page.
    Raises: ConfigError, as `server_of`.
    """

    def __init__(self, where: str | None) -> None:
        self._server: PageServer | None = None
        if where is None:
            return
        from .feed import PACE_BESIDE_TRAINING_S, of_cluster

        self._place = Endpoint.parse(where)
        self._feed = of_cluster(
            lambda: self._session.addresses[0], lambda: self._session.settings.keys, PACE_BESIDE_TRAINING_S
        )
        self._server = server_of(self._feed, self._place.host, self._place.port, "dashboard")

    @contextmanager
    def unless_opened(self) -> Iterator[None]:
        """Closes it if the block fails: the script may try again."""
        try:
            yield
        except BaseException:
            self.stop()
            raise

    def start(self, session: Session) -> None:
        """Serve the cluster of that session, which listens already."""
        if self._server is None:
            return
        self._session = session
        at = Endpoint.parse(session.addresses[0])
        session.rates.page = self._server.url(at.host if self._place.host in ANY_HOST else "")
        self._server.start()
        session.say(f"{session.name} shows the cluster at {session.rates.page}")
        if warning := opened_to(self._place):
            session.say(warning)

    def stop(self) -> None:
        """Close it; also if it never was."""
        if self._server is not None:
            self._server.stop()
