"""The nodes of a cluster find each other by its name, on networks that reach them by multicast (mDNS, DNS-SD).

What a node hears is a hint and gives nobody a right: it dials who has the same name and a key that it knows, as if
the user had named that address, and the rule of `found` decides who founds (protocols/asking.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ..node.endpoint import KEY, Endpoint

if TYPE_CHECKING:
    from zeroconf import Zeroconf

SERVICE = "_chaosnet._tcp.local."
VERSION = "1"  # Of what is announced.
MAX_HEARD = 256  # Announcements that are looked at: anybody on the network can make them.
MAX_APART = 8  # Other clusters of which people are told.
RESOLVE_S = 3.0
MAX_NODE_BYTES = 250  # DNS has 255 for the property; 64 characters of a node's name may take more.


@dataclass(frozen=True, slots=True)
class Announced:
    """What a node tells everybody on its networks.

    Attributes:
        key: Its public key; "" if it uses none.
        places: "HOST:PORT", where it listens.
        id: Of the cluster that it is in, as clusters of one name differ by it; "" before.
    """

    cluster: str
    node: str
    key: str
    places: tuple[str, ...]
    id: str = ""

    @classmethod
    def of(cls, cluster: str, node: str, addresses: Iterable[str], id: str = "") -> Announced:
        """`addresses`: those that others may dial, with the node's key."""
        ends = [Endpoint.parse(each) for each in addresses]
        return cls(cluster, node, ends[0].key, tuple(end.place for end in ends), id)

    def properties(self) -> dict[str, str]:
        """But for the places, which the service has."""
        short = self.node.encode()[:MAX_NODE_BYTES].decode(errors="ignore")
        told = {"version": VERSION, "cluster": self.cluster, "node": short, "key": self.key}
        return {**told, "id": self.id} if self.id else told

    @classmethod
    def heard(
        cls, properties: Mapping[bytes, bytes | None], hosts: Iterable[str], port: int
    ) -> Announced | None:
        """None for what no node of ours says."""
        try:
            told = {name.decode(): (value or b"").decode() for name, value in properties.items()}
            key = told.get("key", "")
            if told.get("version") != VERSION or (key and not KEY.fullmatch(key)) or not port:
                return None
            if not (told["node"].isprintable() and told["cluster"].isprintable()):
                return None  # It would be told to a terminal.
            places = tuple(Endpoint(host, port).place for host in hosts)
            if not places:
                return None
            return cls(told["cluster"], told["node"][:64], key, places, told.get("id", ""))
        except (UnicodeDecodeError, KeyError):
            return None


class Acquaintance:
    """Who of those that are heard of is to be asked; pure.

    Args:
        mine: What this node announces.
        known_keys: Whose holders may be members.
        apart: Ids of other clusters of the name of which people know; they are told of further ones.
    """

    def __init__(self, mine: Announced, known_keys: Iterable[str], apart: set[str] | None = None) -> None:
        self.mine, self._known = mine, {mine.key, *known_keys}
        self._heard: set[Announced] = set()
        self._apart = set() if apart is None else apart

    def meet(self, other: Announced) -> tuple[tuple[str, ...], str]:
        """Returns: its addresses, if they are new and to be dialled; else (), and why not, if people should know."""
        mine = self.mine
        if other.cluster != mine.cluster or other in self._heard or len(self._heard) >= MAX_HEARD:
            return (), ""
        self._heard.add(other)
        # Also where networks of two machines have the same addresses, as those of containers may.
        places = [place for place in other.places if place not in mine.places]
        if not places:
            return (), ""
        if other.key not in self._known:
            return (
                (),
                f"{other.node} at {places[0]} says that it is in {mine.cluster!r}, too, {self._why_not(other)}",
            )
        return tuple(str(Endpoint.parse(place).of(other.key)) for place in places), self._news_of(
            other, places[0]
        )

    def _news_of(self, other: Announced, place: str) -> str:
        """Of another cluster of this name, as where machines did not hear each other when they were started."""
        mine = self.mine
        if not (mine.id and other.id) or other.id in (mine.id, *self._apart) or len(self._apart) >= MAX_APART:
            return ""
        self._apart.add(other.id)
        return (
            f"{other.node} at {place} says that it is in another cluster named {mine.cluster!r}: the two train apart "
            "(to make them one, stop the nodes of one, and start them again)"
        )

    def _why_not(self, other: Announced) -> str:
        if not other.key:
            return "but has no key, and this node has one: it is not asked"
        if not self.mine.key:
            return "but has a key, and this node has none: it is not asked"
        return (
            f"but its key is none that this node knows, {other.key}: it is not asked (copy one key to all your "
            "machines, or name that of others in --allowed-keys)"
        )


class Lan:
    """Announces a node, that of `acquaintance`, and tells of others, from `start` to `stop`.

    Args:
        found: Is given addresses to ask; from a thread of this class.
        say: A line for the user.
    """

    def __init__(
        self,
        acquaintance: Acquaintance,
        found: Callable[[tuple[str, ...]], None],
        say: Callable[[str], None],
    ) -> None:
        self._acquaintance, self._found, self._say = acquaintance, found, say
        self._zeroconf: Zeroconf | None = None

    def start(self) -> None:
        """Returns at once. Where there is no such network, that is said, and nobody is found."""
        from zeroconf import ServiceBrowser, Zeroconf

        mine = self._acquaintance.mine
        hosts = [Endpoint.parse(place).host for place in mine.places]
        try:
            # Where a loop runs (a notebook), it would depend on that one.
            with ThreadPoolExecutor(1) as another:
                self._zeroconf = zeroconf = another.submit(Zeroconf, interfaces=hosts).result()
        except OSError as error:
            self._say(f"nobody can be found by the name {mine.cluster!r} from {', '.join(hosts)}: {error}")
            return
        ServiceBrowser(zeroconf, SERVICE, handlers=[self._on_change])
        self._on_loop(self._announce(hosts, Endpoint.parse(mine.places[0]).port))

    def stop(self) -> None:
        """Take the announcement back. Also if nothing was started."""
        zeroconf, self._zeroconf = self._zeroconf, None
        if zeroconf is not None:
            with contextlib.suppress(OSError, TimeoutError, CancelledError):
                zeroconf.close()

    def _on_loop(self, work: Any) -> None:
        zeroconf = self._zeroconf
        loop = zeroconf.loop if zeroconf else None
        if loop is None or loop.is_closed():
            work.close()
            return
        asyncio.run_coroutine_threadsafe(work, loop).add_done_callback(self._on_done)

    def _on_done(self, done: Future[None]) -> None:
        if not done.cancelled() and (error := done.exception()) is not None and self._zeroconf is not None:
            self._say(f"by the name {self._acquaintance.mine.cluster!r}: {error}")

    async def _announce(self, hosts: list[str], port: int) -> None:
        from zeroconf import ServiceInfo

        name = secrets.token_hex(8)  # Nobody else has it, so nobody is asked whether it is free.
        info = ServiceInfo(
            SERVICE, f"{name}.{SERVICE}", port, properties=self._acquaintance.mine.properties(),
            server=f"{name}.local.", parsed_addresses=hosts,
        )  # fmt: skip
        assert self._zeroconf is not None
        await self._zeroconf.async_register_service(info, cooperating_responders=True)

    def _on_change(self, zeroconf: Zeroconf, service_type: str, name: str, state_change: Any) -> None:
        """Of zeroconf's browser: a service has come, changed or gone."""
        if state_change.name != "Removed":
            self._on_loop(self._resolve(zeroconf, name))

    async def _resolve(self, zeroconf: Zeroconf, name: str) -> None:
        from zeroconf.asyncio import AsyncServiceInfo

        info = AsyncServiceInfo(SERVICE, name)
        if not await info.async_request(zeroconf, 1000 * RESOLVE_S):
            return
        other = Announced.heard(info.properties, info.parsed_addresses(), info.port or 0)
        if other is None:
            return
        addresses, news = self._acquaintance.meet(other)
        if addresses:
            self._found(addresses)
        if news:
            self._say(news)
