"""A way to a peer dies without a word, and another opens before both ends have noticed: which do they use?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path

import pytest
from test_transport import nodes, real, way_to

from chaosnet.node.endpoint import Endpoint
from chaosnet.node.transport import links, local
from chaosnet.node.transport.descriptors import borrowed
from chaosnet.node.transport.dialer import hangs
from chaosnet.node.transport.sockets import UNACKNOWLEDGED_MS

pytestmark = pytest.mark.realtime

CROSSING_S = 0.3


class Router:
    """Forwards connections until it has forgotten them: then what they carry is gone, and their ends hear nothing."""

    def __init__(self, port: int) -> None:
        self.port, self.known = port, asyncio.Event()
        self.writers: list[asyncio.StreamWriter] = []
        self.pumps: list[asyncio.Task[None]] = []

    async def accepts(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, to_there = await asyncio.open_connection("127.0.0.1", self.port)
        self.writers += [writer, to_there]
        known = self.known
        self.pumps += [
            asyncio.create_task(pump(reader, to_there, known)),
            asyncio.create_task(pump(there, writer, known)),
        ]

    def forget(self) -> None:
        """All that are open now; new ones are forwarded."""
        self.known.set()
        self.known = asyncio.Event()


async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, forgotten: asyncio.Event) -> None:
    while data := await reader.read(1 << 16):
        if not forgotten.is_set():
            writer.write(data)


@asynccontextmanager
async def behind_a_router(address: str) -> AsyncIterator[tuple[Router, str]]:
    router = Router(Endpoint.parse(address).port)
    server = await asyncio.start_server(router.accepts, "127.0.0.1", 0)
    try:
        yield router, f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        for task in router.pumps:
            task.cancel()
        for writer in router.writers:
            writer.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "CROSSING_S", CROSSING_S)


@real
async def test_who_still_holds_a_dead_link_answers_over_the_one_that_its_peer_has_opened_since() -> None:
    """It took words over the new one for signs of life, and answered over the old, for a quarter of an hour.

    Of two members, one had another address, and had given the link up a second before the other would have.
    """
    async with nodes("a", "b") as [a, b], behind_a_router(a[0].address) as (router, address):
        b[0].dial(address)
        await b[1].until("opened")
        await a[1].until("opened")
        await asyncio.sleep(CROSSING_S)
        router.forget()
        b[0].close_peer("a", "nothing was heard from you")
        b[0].dial(address)
        await b[1].until("opened", times=2)
        a[1].answer = a[0]
        assert b[0].send("a", b"are you there?")
        assert await b[1].until("control", timeout_s=2) == ("control", "a", b"are you there?")
        # What was sent over the old one is lost, so its end is told before anything that has come since.
        assert [each[0] for each in a[1].heard] == ["opened", "closed", "opened", "control"]
        assert len(a[0].links.peers["b"].links) == 1
        b[0].send_bulk("a", b"more", b"bytes")
        assert await b[1].until("bulk") == ("bulk", "a", b"more")
        await asyncio.sleep(links.LINGER_S + 0.2)
        assert len(a[0].acceptor.conns) == 2, "the dead connections are still held"


def small_packets_only(address: str, back: bool) -> AbstractAsyncContextManager[str]:
    """A way to `address` over which large packets get lost; `back`: only those that come from there."""

    async def small(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while 0 < len(data := await reader.read(1 << 16)) <= 1200:
            writer.write(data)

    async def all_of_it(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)

    return way_to(address, all_of_it, small) if back else way_to(address, small, all_of_it)


@real
async def test_where_only_small_packets_get_through_no_link_opens() -> None:
    """It opened, was chosen for sums, and held each step up until TCP gave up (25 s), again and again."""
    for back in (False, True):
        async with (
            nodes("a", "b", dial_timeout_s=0.5) as [a, b],
            small_packets_only(a[0].address, back) as way,
        ):
            b[0].dial(way)
            assert (await b[1].until("dial_failed"))[2] == hangs(0.5)
            assert b[1].count("opened") == 0


@real
async def test_two_links_that_have_opened_at_once_both_stay_whichever_is_used() -> None:
    async with nodes("a", "b") as [a, b]:
        a[0].dial(b[0].address)
        b[0].dial(a[0].address)
        await asyncio.sleep(2 * CROSSING_S)
        assert len(a[0].links.peers["b"].links) == len(b[0].links.peers["a"].links) == 2
        b[0].links.peers["a"].links.reverse()  # As if they had opened in another order there.
        for turn in range(1, 4):
            a[0].send("b", b"x")
            b[0].send("a", b"y")
            await a[1].until("control", times=turn)
            await b[1].until("control", times=turn)
        assert [ear.count("closed") for _, ear in (a, b)] == [0, 0]
        assert len(a[0].links.peers["b"].links) == len(b[0].links.peers["a"].links) == 2


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="an option of Linux")
def test_tcp_does_not_try_for_a_quarter_of_an_hour(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bulk connection died alone, in both directions: heartbeats went on, and a step waited until TCP gave up."""
    monkeypatch.setattr(local, "LISTED", Path("/nowhere"))  # Bulk goes over TCP, as between machines.

    async def scenario() -> None:
        async with nodes("a", "b") as [a, b]:
            a[0].dial(b[0].address)
            await a[1].until("opened")
            await b[1].until("opened")
            for here, peer in ((a, "b"), (b, "a")):
                (link,) = here[0].links.peers[peer].links
                for conn in link.conns():
                    here[0].sockets.read_monitor(conn.port)
                    with borrowed(conn.fd) as ours:
                        option = ours.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
                    assert option == UNACKNOWLEDGED_MS, (peer, conn.bulk)

    asyncio.run(scenario())
