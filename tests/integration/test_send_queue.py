"""What waits to be sent over real sockets: its order, its bounds, and what becomes of it at the end of a link."""

from __future__ import annotations

import asyncio
import fcntl
import random
import socket
import struct
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from unittest.mock import patch

import pytest
from test_transport import Node, link, nodes, real

from chaosnet.node.endpoint import Endpoint
from chaosnet.node.transport import descriptors, sender
from chaosnet.node.transport.link import Conn
from chaosnet.node.transport.outgoing import Item, Rank
from chaosnet.node.transport.sockets import SEND_AHEAD

pytestmark = pytest.mark.realtime
linux = pytest.mark.skipif(
    sys.platform != "linux", reason="what a kernel holds and tells is asked of Linux's"
)

MIB = 1 << 20
OUT_OF_REACH = SEND_AHEAD + 1  # Items that libzmq has: waiting, and the one that it is sending.
SIOCOUTQNSD = 0x894B  # linux/sockios.h: bytes of a socket that have not been sent.


class Path:
    """A way to an address, over which nothing goes while it is blocked, and which holds little itself."""

    def __init__(self, target: str) -> None:
        self.target = Endpoint.parse(target)
        self.free = asyncio.Event()
        self.free.set()
        self.tasks: list[asyncio.Task[None]] = []
        self.bytes = 0  # That have come through, both ways.

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = self.narrow()
        await asyncio.get_running_loop().sock_connect(there, (self.target.host, self.target.port))
        back, out = await asyncio.open_connection(sock=there)
        self.tasks += [
            asyncio.create_task(self.pump(reader, out)),
            asyncio.create_task(self.pump(back, writer)),
        ]

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                await self.free.wait()
                self.bytes += len(data)
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            pass
        finally:
            writer.close()

    def narrow(self) -> socket.socket:
        made = socket.socket()
        made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        made.setblocking(False)
        return made


@asynccontextmanager
async def blocked_path(sender: Node, receiver: Node, sender_dials: bool) -> AsyncIterator[Path]:
    """The two are linked, whoever dialled, and nothing goes between them."""
    dialler, acceptor = (sender, receiver) if sender_dials else (receiver, sender)
    path = Path(acceptor[0].address)
    listening = path.narrow()
    listening.bind(("127.0.0.1", 0))
    server = await asyncio.start_server(path.serve, sock=listening)
    try:
        dialler[0].dial(f"127.0.0.1:{listening.getsockname()[1]}")
        await dialler[1].until("opened")
        await acceptor[1].until("opened")
        path.free.clear()
        yield path
    finally:
        path.free.set()
        server.close()
        for task in path.tasks:
            task.cancel()


def headers(node: Node) -> list[bytes]:
    return [event[2] for event in node[1].heard if event[0] == "bulk"]


def unsent(node: Node, peer: str) -> int:
    return sum(len(conn.queue) for each in node[0].links.peers[peer].links for conn in each.conns())


def bulk_of(node: Node, peer: str) -> Conn:
    found = node[0].links.peers[peer].links[0].bulk
    assert found
    return found


# --- order ----------------------------------------------------------------------------------------------


@real
async def test_earlier_chunks_overtake_later_ones_on_a_slow_link_and_the_state_overtakes_all() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for number in range(10, 30):
                a[0].send_bulk("b", b"%d" % number, bytes(MIB), rank=Rank.CHUNK, turn=(7, number))
            await asyncio.sleep(0.1)
            for turn in (7, 3), (8, 0), (7, 2), (6, 5):
                a[0].send_bulk("b", b"%d of %d" % turn[::-1], bytes(1000), rank=Rank.CHUNK, turn=turn)
            a[0].send_bulk("b", b"piece", bytes(1000))
            path.free.set()
            await b[1].until("bulk", times=25)
            came, chunks = headers(b), [b"%d" % number for number in range(10, 30)]
            first = came.index(b"piece")
            assert first <= OUT_OF_REACH
            assert came[first : first + 4] == [b"piece", b"5 of 6", b"2 of 7", b"3 of 7"]
            assert came[:first] + came[first + 4 :] == [*chunks, b"0 of 8"]


@real
async def test_under_load_both_ways_nothing_is_lost_and_the_order_within_a_rank_is_kept() -> None:
    rng = random.Random(3)
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        ways, sizes = ((a, "b"), (b, "a")), (None, 0, 1, 5000, 300_000)
        sent: dict[str, list[tuple[Rank, bytes]]] = {"a": [], "b": []}
        for number in range(800):
            for (transport, _), peer in ways:
                rank, size = rng.choice([Rank.STATE, Rank.CHUNK]), rng.choice(sizes)
                header = b"%d %d" % (rank, number)
                assert transport.send_bulk(peer, header, None if size is None else bytes(size), rank=rank)
                assert transport.send(peer, header)
                sent[peer].append((rank, header))
            if number % 50 == 0:
                await asyncio.sleep(0)
        for node in (a, b):
            await node[1].until("bulk", times=800, timeout_s=30)
            await node[1].until("control", times=800, timeout_s=30)
            expected = sent[node[0].identity.node]
            assert [event[2] for event in node[1].heard if event[0] == "control"] == [
                each for _, each in expected
            ]
            for rank in Rank:
                mark = b"%d " % rank
                came = [header for header in headers(node) if header.startswith(mark)]
                assert came == [header for of, header in expected if of is rank]
        assert unsent(a, "b") == unsent(b, "a") == 0


# --- bounds ---------------------------------------------------------------------------------------------


@real
async def test_libzmq_has_few_items_of_a_connection_that_is_blocked() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for _ in range(30):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.2)
            assert unsent(a, "b") >= 30 - OUT_OF_REACH
            assert a[0].send("b", b"urgent"), "control has a connection of its own"
            path.free.set()
            await b[1].until("control")
            await b[1].until("bulk", times=30)


@linux
@real
async def test_the_kernel_has_little_that_is_not_on_its_way() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for _ in range(30):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.2)
            with descriptors.borrowed(bulk_of(a, "b").fd) as connection:
                held = fcntl.ioctl(connection, SIOCOUTQNSD, bytes(4))
            assert 0 < struct.unpack("i", held)[0] < 2 * descriptors.UNSENT_BYTES
            path.free.set()
            await b[1].until("bulk", times=30)


@linux
@real
async def test_the_kernel_has_as_much_as_suits_the_rate_of_a_link() -> None:
    held = []
    for rate_bps in (1e6, 200e6, 1e11):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, True) as path:
            a[0].bound_unsent("b", rate_bps)
            a[0].bound_unsent("a node that is gone", rate_bps)
            for _ in range(30):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.2)
            with descriptors.borrowed(bulk_of(a, "b").fd) as connection:
                held.append(struct.unpack("i", fcntl.ioctl(connection, SIOCOUTQNSD, bytes(4)))[0])
            path.free.set()
            await b[1].until("bulk", times=30)
    # 10 ms of each rate within bounds: 64 KiB, 250 kB, 4 MiB. Linux asks before it takes more, not before it is over.
    assert held[0] < 2 * 65_536 < held[1] < 2 * 250_000 < 1_000_000 < held[2] < 2 * (4 << 20)


@real
async def test_a_void_attempt_is_taken_back_but_for_what_libzmq_has() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for number in range(20):
                a[0].send_bulk("b", b"void %d" % number, bytes(MIB), tag="void")
                a[0].send_bulk("b", b"good %d" % number, bytes(1000), tag="good" if number % 2 else None)
            await asyncio.sleep(0.1)
            assert not a[0].forget_bulk(lambda tag: tag == "void", ("c",))
            taken = a[0].forget_bulk(lambda tag: tag == "void", ("b",))
            assert taken >= 20 - OUT_OF_REACH
            path.free.set()
            await b[1].until("bulk", times=40 - taken)
            came = headers(b)
            assert [each for each in came if b"good" in each] == [b"good %d" % number for number in range(20)]
            assert len(came) == 40 - taken and unsent(a, "b") == 0


@real
async def test_what_waits_goes_on_though_the_word_that_there_is_room_was_lost() -> None:
    async with nodes("a", "b") as [a, b], blocked_path(a, b, True) as path:
        for _ in range(20):
            a[0].send_bulk("b", b"h", bytes(MIB))
        await asyncio.sleep(0.1)
        asyncio.get_running_loop().remove_reader(bulk_of(a, "b").port.socket.fileno())
        path.free.set()
        await b[1].until("bulk", times=20)


@real
async def test_while_libzmq_has_no_room_further_items_wait_without_being_tried() -> None:
    tried: list[Item] = []
    hand_over = sender._hand_over

    def count(conn: Conn, item: Item) -> None:
        tried.append(item)
        hand_over(conn, item)

    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for _ in range(20):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.2)
            with patch.object(sender, "_hand_over", count):
                for _ in range(50):
                    a[0].send_bulk("b", b"h", b"")
                assert not tried
                await asyncio.sleep(10 * sender.RETRY_S)
                assert len(tried) <= 10, "it asks now and then, in case libzmq's word was lost"
            tried.clear()
            path.free.set()
            await b[1].until("bulk", times=70)


# --- ends -----------------------------------------------------------------------------------------------


@real
async def test_a_bye_comes_after_a_full_queue() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for _ in range(20):
                a[0].send_bulk("b", b"h", bytes(MIB), rank=Rank.CHUNK)
            await asyncio.sleep(0.1)
            assert unsent(a, "b")
            a[0].close_peer("b", "enough")
            path.free.set()
            assert await b[1].until("closed") == ("closed", "a", True)
            assert b[1].count("bulk") == 20 and b[1].heard[-1][0] == "closed"


@real
async def test_closing_at_once_sends_all_that_is_queued() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b]:
            await (link(a, b) if sender_dials else link(b, a))
            for _ in range(100):
                a[0].send_bulk("b", b"h", bytes(200_000))
                a[0].send("b", b"c")
            assert unsent(a, "b")
            a[0].close(linger_s=5.0)
            assert await b[1].until("closed") == ("closed", "a", True)
            assert [b[1].count("bulk"), b[1].count("control")] == [100, 100]


@real
async def test_who_hears_a_bye_answers_before_what_nobody_would_hear() -> None:
    errors: list[object] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            for _ in range(20):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.1)
            answered = b[0].hang_up("enough")
            path.free.set()
            assert await a[1].until("closed") == ("closed", "b", True)
            async with asyncio.timeout(5.0):
                while not answered():
                    await asyncio.sleep(0.005)
            # Items that libzmq and the kernel had, each with its header; not the rest.
            assert path.bytes // MIB <= OUT_OF_REACH + 2
    assert not errors


@real
async def test_nothing_is_kept_for_a_connection_that_was_lost() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            conn = bulk_of(a, "b")
            for _ in range(20):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.1)
            assert len(conn.queue)
            for task in path.tasks:
                task.cancel()
            assert await a[1].until("closed") == ("closed", "b", False)
            assert not len(conn.queue) and not conn.port.blocked
            assert not a[0].send_bulk("b", b"h", b"x")


# --- what was carried -----------------------------------------------------------------------------------


@real
async def test_both_ends_time_what_their_link_carries_while_more_waits() -> None:
    for sender_dials in (True, False):
        async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials) as path:
            assert a[0].carried() == {"b": (0, 0.0)}
            for _ in range(20):
                a[0].send_bulk("b", b"h", bytes(MIB))
            await asyncio.sleep(0.2)
            stuck, _ = a[0].carried()["b"]
            path.free.set()
            await b[1].until("bulk", times=20)
            carried, took_s = a[0].carried()["b"]
            assert stuck < 10 * MIB < carried < 20 * MIB
            assert took_s > 0.19  # All the while that nothing passed.
            a[0].send_bulk("b", b"h", bytes(MIB))
            await b[1].until("bulk", times=21)
            assert a[0].carried()["b"] == (carried, took_s)  # There was room for it at once.
            assert b[0].carried()["a"] == (0, 0.0)


@real
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts it")
async def test_the_kernel_counts_what_has_arrived_and_for_how_long_it_was_on_its_way() -> None:
    async with nodes("a", "b") as [a, b], blocked_path(a, b, sender_dials=True) as path:
        for _ in range(20):
            a[0].send_bulk("b", b"h", bytes(MIB))
        await asyncio.sleep(0.2)
        path.free.set()
        await b[1].until("bulk", times=20)
        arrived, took_s = a[0].acknowledged()["b"]
        assert arrived > 20 * MIB
        assert took_s > 0
        await asyncio.sleep(0.2)
        later, idle_s = a[0].acknowledged()["b"]
        assert later < arrived + MIB
        assert idle_s < took_s + 0.2, "nothing was on its way"
