"""The transport over real sockets on loopback: what it delivers and refuses, how soon it sees a death."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
import zmq

from chaosnet.node.endpoint import Endpoint
from chaosnet.node.transport import descriptors, local
from chaosnet.node.transport.descriptors import borrowed
from chaosnet.node.transport.dialer import CHECK_S, hangs
from chaosnet.node.transport.link import PeerLink
from chaosnet.node.transport.links import LINGER_S, RIVAL_S
from chaosnet.node.transport.sender import LAID_PER_TURN
from chaosnet.node.transport.shared_memory import LEAST_BYTES, Payload
from chaosnet.node.transport.sockets import MAX_FRAME_BYTES
from chaosnet.node.transport.transport import Transport
from chaosnet.protocols.codec import decode, encode
from chaosnet.protocols.errors import ConfigError, LocalProtocolError
from chaosnet.protocols.messages import Hello, Laid, Lend

pytestmark = pytest.mark.realtime
LINUX = sys.platform == "linux"
memory = pytest.mark.skipif(not LINUX, reason="memfd_create")


class Ear:
    """A sink that writes down what it hears, as (what, ...) tuples."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []
        self.changed = asyncio.Event()
        self.payloads: list[Any] = []
        self.answer: Transport | None = None  # Send everything back over it.

    def note(self, *what: Any) -> None:
        self.heard.append(what)
        self.changed.set()

    def opened(self, peer: str, address: str, dialled: bool, client: bool, at: str) -> None:
        self.note("opened", peer, address, dialled, client)

    def closed(self, peer: str, clean: bool) -> None:
        self.note("closed", peer, clean)

    def checked(self, address: str, peer: str, reason: str, at: str) -> None:
        self.note("checked", address, peer, reason)

    def dial_failed(self, address: str, reason: str, final: bool) -> None:
        self.note("dial_failed", address, reason, final)

    def control(self, peer: str, body: bytes) -> None:
        self.note("control", peer, body)
        if self.answer:
            self.answer.send(peer, body)

    def bulk(self, peer: str, header: bytes, payload: zmq.Frame | None) -> None:
        self.payloads.append(payload)
        self.note("bulk", peer, header)
        if self.answer:
            self.answer.send_bulk(peer, header, payload)

    def foreign(self, where: str, reason: str) -> None:
        self.note("foreign", where, reason)

    def count(self, what: str) -> int:
        return sum(event[0] == what for event in self.heard)

    def last(self, what: str) -> tuple[Any, ...]:
        return next(event for event in reversed(self.heard) if event[0] == what)

    async def until(self, what: str, times: int = 1, timeout_s: float = 5.0) -> tuple[Any, ...]:
        async with asyncio.timeout(timeout_s):
            while self.count(what) < times:
                self.changed.clear()
                await self.changed.wait()
        return self.last(what)


Node = tuple[Transport, Ear]


@asynccontextmanager
async def nodes(*names: str, listen: str = "127.0.0.1:0", **settings: Any) -> AsyncIterator[list[Node]]:
    """Transports that listen, on loopback; all closed at the end."""
    made: list[Node] = []
    try:
        for name in names:
            ear = Ear()
            made.append((Transport(name, listen, ear, **settings), ear))
            await made[-1][0].start()
        yield made
    finally:
        for transport, _ in made:
            transport.close(linger_s=0.1)


async def link(a: Node, b: Node) -> None:
    a[0].dial(b[0].address)
    await a[1].until("opened")
    await b[1].until("opened")


def real(scenario: Callable[..., Awaitable[None]]) -> Callable[..., None]:
    """A test that runs `scenario` on the loop of asyncio and on uvloop's."""

    @pytest.mark.parametrize(
        "new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"]
    )
    def test(new_loop: Callable[[], asyncio.AbstractEventLoop]) -> None:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            runner.run(scenario())  # type: ignore[arg-type]

    test.__name__ = scenario.__name__
    return test


@contextmanager
def other_process(name: str, dial: str = "") -> Any:
    """A node in a process of its own that sends everything back; yields (process, its address)."""
    command = [sys.executable, __file__, name, dial]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        try:
            yield process, process.stdout.readline().strip()
        finally:
            process.kill()


async def echo_forever(name: str, dial: str) -> None:
    ear = Ear()
    ear.answer = Transport(name, "127.0.0.1:0", ear)
    await ear.answer.start()
    if dial:
        ear.answer.dial(dial)
    print(ear.answer.address, flush=True)
    await asyncio.Event().wait()


@contextmanager
def raw_dealer(address: str, routing_id: bytes = b"") -> Any:
    with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
        dealer.linger = 0
        if routing_id:
            dealer.routing_id = routing_id
        dealer.connect(f"tcp://{address}")
        yield dealer


# --- opening ------------------------------------------------------------------------------------------


@real
async def test_a_check_says_who_answers_and_leaves_no_link() -> None:
    async with nodes("a", "b") as (a, b):
        a[0].check(b[0].address)
        assert await a[1].until("checked") == ("checked", b[0].address, "b", "")
        a[0].check("127.0.0.1:1")
        _, address, peer, reason = await a[1].until("checked", times=2)
        assert (address, peer) == ("127.0.0.1:1", "") and "does not accept" in reason
        assert not a[1].count("opened") and not b[1].count("opened") and not b[1].count("foreign")
        await link(a, b)
        a[0].check(b[0].address)
        await a[1].until("checked", times=3)
        assert not a[1].count("closed") and not b[1].count("closed")


Carry = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[None, None, None]]


@asynccontextmanager
async def way_to(address: str, there: Carry, back: Carry) -> AsyncIterator[str]:
    """Where connections lead to an address. `there` and `back` carry the bytes of each direction."""
    tasks: list[asyncio.Task[None]] = []
    writers: list[asyncio.StreamWriter] = []

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", Endpoint.parse(address).port)
        writers.extend((writer, far_writer))
        for carries in (there(reader, far_writer), back(far_reader, writer)):
            tasks.append(asyncio.create_task(carries))

    door = socket.create_server(("127.0.0.1", 0))
    door.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # Those that it accepts have it, too.
    server = await asyncio.start_server(accept, sock=door)
    try:
        yield f"127.0.0.1:{door.getsockname()[1]}"
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        for writer in writers:
            writer.close()


def far_from(address: str, way_s: float) -> AbstractAsyncContextManager[str]:
    """Where connections to an address arrive at once, and bytes take so long, each way."""
    loop = asyncio.get_running_loop()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            loop.call_later(way_s, writer.write, data)
        loop.call_later(way_s, writer.close)

    return way_to(address, carry, carry)


@real
async def test_a_check_waits_for_who_accepts_and_is_far_away() -> None:
    async with nodes("a", "b") as (a, b), far_from(b[0].address, way_s=0.35) as address:
        began_s = time.monotonic()
        a[0].check(address)
        assert await a[1].until("checked") == ("checked", address, "b", "")
        assert time.monotonic() - began_s > CHECK_S, "else it shows nothing"


@real
async def test_both_ends_learn_who_the_other_is_and_where_it_can_be_dialled() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        assert a[1].heard == [("opened", "b", b[0].address, True, False)]
        assert b[1].heard == [("opened", "a", a[0].address, False, False)]


@real
async def test_a_client_that_does_not_listen_is_known_as_one() -> None:
    async with nodes("a") as [a]:
        ear = Ear()
        client = Transport("looker", "", ear, client=True)
        await client.start()
        client.dial(a[0].address)
        assert await a[1].until("opened") == ("opened", "looker", "", False, True)
        await ear.until("opened")
        client.close()
        assert await a[1].until("closed") == ("closed", "looker", True)


@real
async def test_a_node_that_listens_everywhere_is_dialled_where_it_was_seen() -> None:
    async with nodes("a") as [a]:
        b = Transport("b", ":0", ear := Ear())
        await b.start()
        assert Endpoint.parse(b.address).host == "0.0.0.0"
        b.dial(a[0].address)
        port = Endpoint.parse(b.address).port
        assert (await a[1].until("opened"))[2] == f"127.0.0.1:{port}"
        await ear.until("opened")
        b.close()


@real
async def test_two_that_dial_each_other_at_once_open_once_and_close_once() -> None:
    async with nodes("a", "b") as [a, b]:
        a[0].dial(b[0].address)
        b[0].dial(a[0].address)
        await asyncio.sleep(0.2)
        assert [a[1].count("opened"), b[1].count("opened")] == [1, 1]
        assert len(a[0].links.peers["b"].links) == 2
        a[0].send("b", b"x")
        b[0].send("a", b"y")
        assert await b[1].until("control") == ("control", "a", b"x")
        assert await a[1].until("control") == ("control", "b", b"y")
        a[0].close_peer("b", "enough")
        await b[1].until("closed")
        await asyncio.sleep(0.2)
        assert [ear.heard[-1] for _, ear in (a, b)] == [("closed", "b", True), ("closed", "a", True)]
        assert [ear.count("closed") for _, ear in (a, b)] == [1, 1]


@real
async def test_a_second_dial_of_a_connected_peer_is_hung_up_and_changes_nothing() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        a[0].dial(b[0].address)
        await asyncio.sleep(0.2)
        assert [len(a[1].heard), len(b[1].heard)] == [1, 1]
        assert len(a[0].links.peers["b"].links) == len(b[0].links.peers["a"].links) == 1


@real
async def test_nothing_is_lost_over_the_link_that_is_given_up_if_a_node_is_dialled_at_two_addresses() -> None:
    """Which of the two they keep the dialer decides, after the other end may have sent something over either."""
    for _ in range(12):
        async with nodes("a", "b", listen="0.0.0.0:0") as [(a, ear_a), (b, ear_b)]:
            say_at_once(b, ear_b)
            port = b.address.rpartition(":")[2]
            for host in ("127.0.0.1", "127.0.0.2", "127.0.0.3"):
                a.dial(f"{host}:{port}")
            await ear_a.until("control", 20)
            await ear_a.until("bulk", 20)
            said = [each[2] for each in ear_a.heard if each[0] == "control"]
            assert sorted(said, key=int) == [b"%d" % index for index in range(20)]
            assert (ear_a.count("opened"), ear_a.count("closed")) == (1, 0)


def say_at_once(node: Transport, ear: Ear) -> None:
    """20 messages of both kinds, as soon as there is a link."""
    note = ear.note

    def answer(*what: Any) -> None:
        note(*what)
        if what[0] == "opened":
            for index in range(20):
                node.send(what[1], b"%d" % index)
                node.send_bulk(what[1], b"%d" % index, b"payload")

    ear.note = answer  # type: ignore[method-assign]


@real
async def test_a_restarted_node_is_closed_and_opened_again() -> None:
    async with nodes("a", "b", "b") as [a, b, again]:
        await link(b, a)
        b[0].close()
        await a[1].until("closed")
        again[0].dial(a[0].address)
        await a[1].until("opened", times=2)
        assert [event[:2] for event in a[1].heard] == [("opened", "b"), ("closed", "b"), ("opened", "b")]
        assert a[0].send("b", b"x")
        assert await again[1].until("control") == ("control", "a", b"x")


@real
async def test_a_namesake_is_refused_while_the_first_is_connected() -> None:
    """Not for good at first: it may be the same node, started again, before its end was seen."""
    async with nodes("a", "b", "b") as [a, b, namesake]:
        await link(b, a)
        said = await be_refused(namesake, a, speaker=b)
        assert b[0].send("a", b"still there")
        assert await a[1].until("control", times=said + 1) == ("control", "b", b"still there")


@real
async def test_a_namesake_that_was_dialled_is_refused_too() -> None:
    async with nodes("a", "b", "b") as [a, b, namesake]:
        await link(b, a)
        said = await be_refused(a, namesake, speaker=b)
        assert b[0].send("a", b"still there")
        assert await a[1].until("control", times=said + 1) == ("control", "b", b"still there")


@real
async def test_a_namesake_is_not_refused_for_good_while_the_first_is_silent() -> None:
    """It may be the same node, started again after it was held up: the end of that shows late."""
    async with nodes("a", "b", "b") as [a, b, namesake]:
        await link(b, a)
        with pytest.raises(AssertionError, match="never refused for good"):
            await be_refused(namesake, a, tries=int(1.2 * RIVAL_S / 0.1))


async def be_refused(one: Node, other: Node, speaker: Node | None = None, tries: int = 50) -> int:
    """One dials the other as long as it takes to be told that it need not try again.

    `speaker`: says something to "a" each time. Returns: how often.
    """
    for times in range(1, tries):
        if speaker:
            assert speaker[0].send("a", b"heartbeat")
        one[0].dial(other[0].address)
        *_, reason, final = await one[1].until("dial_failed", times=times)
        assert "a node named 'b' is in the cluster already" in reason
        assert times > 1 or not final
        if final:
            return times
        await asyncio.sleep(0.1)
    raise AssertionError("never refused for good")


# --- dials that fail ------------------------------------------------------------------------------------


@real
async def test_a_refused_dial_fails_at_once() -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        async with nodes("a") as [a]:
            a[0].dial(address)
            failed = await a[1].until("dial_failed", timeout_s=0.5)
            assert failed[1] == address and "refused" in failed[2]


@real
async def test_a_dial_fails_when_nobody_answers_in_time() -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        async with nodes("a", dial_timeout_s=0.2) as [a]:
            a[0].dial(f"127.0.0.1:{silent.getsockname()[1]}")
            assert (await a[1].until("dial_failed", timeout_s=1))[2] == hangs(0.2)


@real
async def test_dialling_oneself_or_no_address_fails_with_the_reason() -> None:
    async with nodes("a") as [a]:
        a[0].dial(a[0].address)
        assert (await a[1].until("dial_failed"))[2] == "that is this node itself"
        a[0].dial("10.0.0.2")
        assert "expected HOST:PORT" in (await a[1].until("dial_failed", times=2))[2]
        assert a[1].count("foreign") == 0


@real
async def test_nodes_of_two_clusters_refuse_each_other_by_name() -> None:
    async with nodes("a", "b") as [a, b]:
        a[0].identity.cluster, b[0].identity.cluster = "red", "blue"
        a[0].dial(b[0].address)
        failed = await a[1].until("dial_failed")
        assert "'red'" in failed[2] and "'blue'" in failed[2]
        await b[1].until("foreign")
        assert b[1].count("opened") == 0


@real
async def test_a_guest_of_a_cluster_that_is_gone_may_dial_another_and_a_member_may_not() -> None:
    for is_member in (False, True):
        async with nodes("a", "b", "c") as [(a, ear_a), (b, _), (c, _)]:
            b.found()
            c.found()
            a.dial(b.address)
            await ear_a.until("opened")
            if is_member:
                a.belongs()
            b.close_peer("a", "the end")
            await ear_a.until("closed")
            a.dial(c.address)
            if is_member:
                assert "it belongs to cluster" in (await ear_a.until("dial_failed"))[2]
            else:
                await ear_a.until("opened", 2)
                assert a.cluster == c.cluster


@real
async def test_the_dialer_names_both_versions_when_the_acceptor_speaks_another() -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as old:
        port = old.bind_to_random_port("tcp://127.0.0.1")
        async with nodes("a") as [a]:
            a[0].dial(f"127.0.0.1:{port}")
            while not old.poll(0):
                await asyncio.sleep(0.01)
            route, _, hello = old.recv_multipart()
            old.send_multipart([route, b"", another_version(hello)])
            reason = (await a[1].until("dial_failed"))[2]
            assert f"version {hello[2] + 1}" in reason and f"this node {hello[2]}" in reason
        old.linger = 0


@real
async def test_the_acceptor_answers_another_version_with_its_own_hello() -> None:
    async with nodes("a") as [a]:
        hello = encode(Hello(node="new", address="", incarnation="1"))
        with raw_dealer(a[0].address, b"c-new") as dealer:
            dealer.send_multipart([b"", another_version(hello)])
            assert "version" in (await a[1].until("foreign"))[2]
            _, answer = dealer.recv_multipart()
            assert decode(answer).node == "a"  # type: ignore[union-attr]
        assert a[1].count("opened") == 0


def another_version(frame: bytes) -> bytes:
    return frame[:2] + bytes([frame[2] + 1]) + frame[3:]


def test_an_address_that_cannot_be_bound_is_a_config_error() -> None:
    async def scenario() -> None:
        async with nodes("a") as [a]:
            with pytest.raises(ConfigError, match=a[0].address):
                await Transport("b", a[0].address, Ear()).start()

    asyncio.run(scenario())


@pytest.mark.parametrize("address", ["", "host", "host:", "host:x", "::1:5000", "host:70000", "host:²"])
def test_what_is_no_address_is_a_config_error(address: str) -> None:
    with pytest.raises(ConfigError, match="expected HOST:PORT"):
        Endpoint.parse(address)


# --- carrying -------------------------------------------------------------------------------------------


@real
async def test_control_and_bulk_come_back_as_they_were_sent() -> None:
    with other_process("b") as (_, address):
        async with nodes("a") as [a]:
            a[0].dial(address)
            await a[1].until("opened")
            sizes = [0, 1, 100, 8192, 1 << 20, 20_000_000]
            sent = [os.urandom(size) for size in sizes]
            for size, payload in zip(sizes, sent, strict=True):
                assert a[0].send_bulk("b", b"size %d" % size, payload)
                assert a[0].send("b", b"control %d" % size)
            assert a[0].send_bulk("b", b"nothing")
            await a[1].until("bulk", times=len(sizes) + 1)
            await a[1].until("control", times=len(sizes))
            assert [event[2] for event in a[1].heard if event[0] == "bulk"] == [
                *(b"size %d" % size for size in sizes),
                b"nothing",
            ]
            *frames, nothing = a[1].payloads
            assert nothing is None
            assert [bytes(frame.buffer) for frame in frames if frame is not None] == sent
            for frame in frames[1:]:
                assert frame is not None
                assert not frame.buffer.readonly
                frame.buffer[0] ^= 0xFF
            assert a[0].moved_bytes[1] > sum(sizes)


@real
async def test_a_payload_of_any_shape_of_buffer_is_sent() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        words = memoryview(bytearray(400_000)).cast("f", [100, 1000])
        a[0].send_bulk("b", b"h", words)
        await b[1].until("bulk")
        assert [len(frame) for frame in b[1].payloads if frame is not None] == [400_000]


@real
async def test_nothing_is_sent_to_a_stranger_or_in_a_frame_too_large() -> None:
    async with nodes("a", "b") as [a, b]:
        assert not a[0].send("b", b"x") and not a[0].send_bulk("b", b"x", b"y")
        await link(a, b)
        with pytest.raises(LocalProtocolError):
            a[0].send_bulk("b", b"x", bytearray(MAX_FRAME_BYTES + 1))


@real
async def test_control_overtakes_bulk_that_the_sink_takes_slowly() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)

        def bulk(peer: str, header: bytes, payload: zmq.Frame | None) -> None:
            time.sleep(0.01)
            b[1].note("bulk", peer, header)

        b[1].bulk = bulk  # type: ignore[method-assign]
        for _ in range(50):
            a[0].send_bulk("b", b"h", b"x" * 1000)
        await b[1].until("bulk")
        a[0].send("b", b"urgent")
        await b[1].until("control")
        assert b[1].count("bulk") < 25
        await b[1].until("bulk", times=50)


@real
async def test_a_sink_that_raises_misses_nothing_after() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: None)

        def control(peer: str, body: bytes) -> None:
            b[1].note("control", peer, body)
            raise ValueError(body)

        b[1].control = control  # type: ignore[method-assign]
        for _ in range(10):
            a[0].send("b", b"x")
        await b[1].until("control", times=10)


# --- closing --------------------------------------------------------------------------------------------


@real
async def test_a_killed_process_is_noticed_by_the_dialer() -> None:
    with other_process("b") as (process, address):
        async with nodes("a") as [a]:
            a[0].dial(address)
            await a[1].until("opened")
            process.send_signal(signal.SIGKILL)
            assert await a[1].until("closed", timeout_s=0.5) == ("closed", "b", False)
            assert not a[0].send("b", b"x")


@real
async def test_a_killed_process_is_noticed_by_the_acceptor() -> None:
    async with nodes("a") as [a]:
        with other_process("b", a[0].address) as (process, _):
            await a[1].until("opened")
            process.send_signal(signal.SIGKILL)
            assert await a[1].until("closed", timeout_s=0.5) == ("closed", "b", False)
            assert not a[0].send("b", b"x")


@real
async def test_closing_a_peer_is_clean_for_both_whoever_dialled_and_all_that_was_sent_comes_first() -> None:
    for dialer_closes in (True, False):
        async with nodes("a", "b") as [a, b]:
            await link(a, b)
            closer, other = (a, b) if dialer_closes else (b, a)
            peer = other[0].identity.node
            for _ in range(100):
                closer[0].send_bulk(peer, b"h", b"x" * 200_000)
                closer[0].send(peer, b"c")
            closer[0].close_peer(peer, "enough")
            assert not closer[0].send(peer, b"x")
            assert await closer[1].until("closed") == ("closed", peer, True)
            assert await other[1].until("closed") == ("closed", closer[0].identity.node, True)
            assert [other[1].count("bulk"), other[1].count("control")] == [100, 100]
            assert other[1].heard[-1][0] == "closed"
            await asyncio.sleep(0.05)
            assert [len(t.sockets.open) for t, _ in (a, b)] == [1, 1], "the dialer's sockets are closed"
            assert not b[0].acceptor.conns and not b[0].sockets.door.by_fd
            a[0].dial(b[0].address)
            await b[1].until("opened", times=2)


@real
async def test_a_link_that_is_opened_before_the_end_of_the_last_one_is_heard_is_a_new_one() -> None:
    """Who was stopped may read the new link's Hello before the old one's Bye: to its core nothing had happened."""
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        turns, receiver = b[0].turns, b[0].receiver
        serve, turns.serve = turns.serve, lambda port: None  # Stopped: what comes is not read.
        a[0].close_peer("b", "nothing was heard from you")
        a[0].dial(b[0].address)
        await asyncio.sleep(0.2)
        received = receiver.received
        held: list[tuple[Any, list[zmq.Frame]]] = []

        def hellos_first(port: Any, frames: list[zmq.Frame]) -> None:
            is_bye = b"Bye" in b"".join(frame.bytes for frame in frames)
            (held.append if is_bye else lambda item: received(*item))((port, frames))

        receiver.received = hellos_first  # type: ignore[method-assign]
        turns.serve = serve
        await a[1].until("opened", times=2)
        assert b[1].count("opened") == 1
        receiver.received = received  # type: ignore[method-assign]
        for item in held:
            received(*item)
        await b[1].until("opened", times=2)
        assert [each[0] for each in b[1].heard] == ["opened", "closed", "opened"]


@real
async def test_closing_under_a_stream_from_the_other_side_is_clean() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        for _ in range(200):
            b[0].send_bulk("a", b"h", b"x" * 500_000)
        await a[1].until("bulk", times=3)
        a[0].close_peer("b", "enough")
        assert await b[1].until("closed") == ("closed", "a", True)


@real
async def test_closing_a_node_is_clean_for_its_peers() -> None:
    async with nodes("a", "b", "c") as [a, b, c]:
        await link(b, a)
        a[0].dial(c[0].address)
        await c[1].until("opened")
        a[0].close()
        assert await b[1].until("closed") == ("closed", "a", True)
        assert await c[1].until("closed") == ("closed", "a", True)


@real
async def test_a_node_that_hangs_up_before_it_closes_takes_nothing_back() -> None:
    """With `close` alone, the other end now and then misses some of what was sent last."""
    for _ in range(10):
        async with nodes("a", "b") as [a, b]:
            await link(a, b)
            for _ in range(60):
                b[0].send_bulk("a", b"h", b"x" * 500_000)
            await asyncio.sleep(0.005)
            for _ in range(20):
                a[0].send_bulk("b", b"h", b"y" * 100_000)
            answered = a[0].hang_up("enough")
            async with asyncio.timeout(5.0):
                while not answered():
                    await asyncio.sleep(0.005)
            a[0].close()
            assert await b[1].until("closed") == ("closed", "a", True)
            assert b[1].count("bulk") == 20


@real
async def test_what_a_dead_peer_sent_comes_before_the_news_of_its_death() -> None:
    for dialler_dies in (True, False):
        async with nodes("a", "b") as [a, b]:
            await link(a, b)
            dying, other = (a, b) if dialler_dies else (b, a)
            for _ in range(300):
                dying[0].send_bulk(other[0].identity.node, b"h", b"x" * 20_000)
                dying[0].send(other[0].identity.node, b"c")
            # Its sockets end without a Bye; what is queued leaves first, as it would from a kernel.
            dying[0].links.sender.flush_all(time.monotonic() + 1)
            for port in list(dying[0].sockets.open):
                dying[0].sockets.shut(port, 1)
            time.sleep(0.3)  # Data and disconnections all wait when the other's loop goes on.
            assert await other[1].until("closed") == ("closed", dying[0].identity.node, False)
            assert [other[1].count("bulk"), other[1].count("control")] == [300, 300]
            assert other[1].heard[-1][0] == "closed"


def narrow_way_to(address: str, bytes_per_s: float) -> AbstractAsyncContextManager[str]:
    """Where connections lead to an address, and carry no more than that, each way."""

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 16):
            writer.write(data)
            await asyncio.sleep(len(data) / bytes_per_s)
        writer.close()

    return way_to(address, carry, carry)


@real
async def test_what_is_queued_arrives_before_a_bye_however_long_the_link_takes() -> None:
    async with nodes("a", "b") as [a, b], narrow_way_to(b[0].address, 4e6) as address:
        a[0].dial(address)
        await a[1].until("opened")
        await b[1].until("opened")
        for number in range(48):
            a[0].send_bulk("b", b"%d" % number, bytes(1 << 18))
        hung_up, began_s = a[0].hang_up("enough"), time.monotonic()
        await b[1].until("closed", timeout_s=30)
        assert b[1].count("bulk") == 48
        assert time.monotonic() - began_s > 2 * LINGER_S, "else it shows nothing"
        async with asyncio.timeout(2 * LINGER_S):
            while not hung_up():
                await asyncio.sleep(0.01)


@real
async def test_one_lost_connection_ends_the_whole_link_on_both_sides() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        half = a[0].links.peers["b"].links[0].bulk
        assert half
        half.port.socket.disconnect(half.port.socket.getsockopt_string(zmq.LAST_ENDPOINT))
        assert await b[1].until("closed", timeout_s=0.5) == ("closed", "a", False)
        await a[1].until("closed", timeout_s=2 * LINGER_S)
        await asyncio.sleep(0.05)
        assert not b[0].acceptor.conns


# --- on one machine ---


def family(conn: Any) -> socket.AddressFamily:
    with borrowed(conn.fd) as connection:
        return connection.family


@real
async def test_bulk_goes_over_a_unix_socket_and_control_by_the_address_that_was_dialled() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        for here, there in ((a, b), (b, a)):
            [half] = here[0].links.peers[there[0].identity.node].links
            families = [family(conn) for conn in (half.control, half.bulk)]
            assert families == ([socket.AF_INET, socket.AF_UNIX] if LINUX else 2 * [socket.AF_INET])
        assert b[1].last("opened") == ("opened", "a", a[0].address, False, False)
        a[0].send_bulk("b", b"header", b"payload" * 1000)
        await b[1].until("bulk")
        a[0].close_peer("b", "enough")
        assert await b[1].until("closed") == ("closed", "a", True)


@real
async def test_bulk_goes_over_tcp_where_the_sockets_of_this_machine_cannot_be_listed() -> None:
    async with nodes("a", "b") as [a, b]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(local, "LISTED", Path("/nowhere"))
            await link(a, b)
        [half] = a[0].links.peers["b"].links
        assert family(half.bulk) == socket.AF_INET


@pytest.mark.skipif(not LINUX, reason="abstract sockets")
@real
async def test_strangers_at_the_unix_socket_are_refused_as_those_at_the_port_are() -> None:
    async with nodes("b") as [b]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
            stranger.linger = 0
            stranger.connect(local.meeting_place(Endpoint.parse(b[0].address)))
            stranger.send(b"garbage")
            await b[1].until("foreign")
            [accepted] = b[0].sockets.door.by_fd.values()
            assert accepted.peer == ("localhost", os.getpid())
            b[0].sockets.door.hang_up(accepted)
            async with asyncio.timeout(1):
                while b[0].sockets.door.by_fd:
                    await asyncio.sleep(0.01)
        assert b[0].foreign.by_place == {"localhost": 1}


@asynccontextmanager
async def sharing() -> AsyncIterator[list[Node]]:
    """Two nodes whose link has memory in both directions."""
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        await mapped(a[0], "b")
        await mapped(b[0], "a")
        yield [a, b]


@memory
@real
async def test_large_payloads_lie_in_memory_that_both_ends_share_and_small_ones_do_not() -> None:
    async with sharing() as [a, b]:
        large, small = os.urandom(LEAST_BYTES), os.urandom(LEAST_BYTES - 1)
        b[1].answer = b[0]
        for payload in (large, small):
            a[0].send_bulk("b", b"header", payload)
        for ear in (b[1], a[1]):
            assert await ear.until("bulk", times=2) == ("bulk", "a" if ear is b[1] else "b", b"header")
            assert [type(each) for each in ear.payloads] == [Payload, zmq.Frame]
            assert [bytes(each.buffer) for each in ear.payloads] == [large, small]
        sent = [here[0].moved_bytes[0] for here in (a, b)]
        assert sent == 2 * [len(large + small) + 2 * len(b"header")]


@memory
@real
async def test_memory_is_shared_though_an_answer_is_read_before_the_monitor_of_its_connection() -> None:
    """A loop that was held up finds both, in any order; the monitor tells which descriptor it came over."""
    async with nodes("a", "b") as [a, b]:
        with pytest.MonkeyPatch.context() as patched:
            open_link = a[0].links.open

            def read_as_ever(link: PeerLink, hello: Hello) -> None:
                patched.undo()
                open_link(link, hello)

            patched.setattr(a[0].sockets, "read_monitor", lambda port: None)
            patched.setattr(a[0].links, "open", read_as_ever)
            await link(a, b)
        await mapped(a[0], "b")
        await mapped(b[0], "a")


@memory
@real
async def test_a_turn_of_the_loop_copies_so_much_and_no_more_and_the_rest_can_be_taken_back() -> None:
    """It may be less: libzmq takes a few words at a time, and its thread may have other work."""
    async with sharing() as [a, b]:
        for number in range(40):
            a[0].send_bulk("b", b"%d" % number, bytes(1 << 20), tag="even" if number % 2 == 0 else None)
        unsent = sum(len(conn.queue) for each in a[0].links.peers["b"].links for conn in each.conns())
        assert 40 - LAID_PER_TURN // (1 << 20) <= unsent < 40
        even = [number for number in range(40 - unsent, 40) if number % 2 == 0]
        assert a[0].forget_bulk(lambda tag: tag == "even") == len(even)
        await b[1].until("bulk", times=40 - len(even))
        came = [int(event[2]) for event in b[1].heard if event[0] == "bulk"]
        assert came == [number for number in range(40) if number not in even]


@real
async def test_payloads_go_over_the_socket_where_memory_cannot_be_shared() -> None:
    async with nodes("a", "b") as [a, b]:
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(descriptors, "process_at_the_end_of", lambda fd: 0)
            await link(a, b)
        payload = os.urandom(LEAST_BYTES)
        a[0].send_bulk("b", b"header", payload)
        await b[1].until("bulk")
        assert type(b[1].payloads[0]) is zmq.Frame
        assert bytes(b[1].payloads[0].buffer) == payload


@memory
@real
async def test_memory_that_is_none_is_not_mapped_and_places_outside_it_are_dropped() -> None:
    async with sharing() as [a, b]:
        conn, at_b = a[0].links.peers["b"].links[0].bulk, b[0].links.peers["a"].links[0].bulk
        assert conn and at_b
        before = at_b.borrowed
        with Path("/dev/null").open() as nothing:
            for word in (Lend(descriptor=nothing.fileno()), Laid(header=b"x", first=1 << 60, size=1)):
                conn.port.socket.send_multipart([b"", encode(word)])
            await b[1].until("foreign")
        assert at_b.borrowed is before is not None
        control = a[0].links.peers["b"].links[0].control
        assert control
        control.port.socket.send_multipart([b"", encode(Lend(descriptor=0))])
        await b[1].until("foreign", times=2)
        assert b[0].foreign.by_place == {"a": 2}
        a[0].send_bulk("b", b"header", bytes(LEAST_BYTES))
        await b[1].until("bulk")


async def mapped(transport: Transport, peer: str) -> None:
    """Until that peer has mapped the memory that it was lent."""
    async with asyncio.timeout(5):
        while not transport.shares_memory(peer):
            await asyncio.sleep(0.01)


# --- strangers ------------------------------------------------------------------------------------------


@real
async def test_garbage_is_dropped_and_counted_and_the_node_goes_on() -> None:
    async with nodes("a", "b") as [a, b]:
        for garbage in ([b"garbage"], [b"", b"CN"], [b"", b"CN\x01\x80"], [b"", b"x", b"y"], [b"x"] * 9):
            before = b[1].count("foreign")
            with raw_dealer(b[0].address) as dealer:
                dealer.send_multipart(garbage)
                await b[1].until("foreign", times=before + 1)
        assert b[0].foreign.by_place.total() == b[1].count("foreign") == 5
        assert b[0].foreign.by_place == {"127.0.0.1": 5}
        await link(a, b)


@real
async def test_bytes_that_pass_for_those_of_an_old_libzmq_are_dropped() -> None:
    async with nodes("b") as [b]:
        failed: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda _, context: failed.append(context))
        there = Endpoint.parse(b[0].address)
        with socket.create_connection((there.host, there.port)) as connection:
            connection.sendall(b"\x01\x00" * 9)
            await b[1].until("foreign")
        assert not failed and b[0].foreign.by_place.keys() == {"?"}


@real
async def test_garbage_of_no_zmq_at_all_is_dropped_and_counted_and_the_node_goes_on() -> None:
    async with nodes("a", "b") as [a, b]:
        there = Endpoint.parse(b[0].address)
        for garbage in (b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), b"\xff" * 64, b"\x01\x00" * 9):
            before = b[1].count("foreign")
            with socket.create_connection((there.host, there.port)) as raw:
                raw.sendall(garbage)
                await asyncio.sleep(0.02)
            await b[1].until("foreign", times=before + 1)
        assert b[0].foreign.by_place.total() >= 5
        await link(a, b)


@real
async def test_a_frame_too_large_ends_its_connection_unread() -> None:
    async with nodes("a", "b") as [a, b]:
        with raw_dealer(b[0].address) as dealer:
            dealer.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
            await b[1].until("foreign")
        await link(a, b)


@real
async def test_words_out_of_place_on_an_open_link_are_dropped_and_counted() -> None:
    async with nodes("a", "b") as [a, b]:
        await link(a, b)
        conn = a[0].links.peers["b"].links[0].control
        assert conn
        conn.port.socket.send_multipart([b"", encode(Hello(node="a", address="", incarnation="1"))])
        conn.port.socket.send_multipart([b"", b"garbage"])
        conn.port.socket.send_multipart([b"x", b"y"])
        conn.port.socket.send_multipart([b"x", b"y", b"z"])
        await b[1].until("foreign", times=4)
        assert b[0].foreign.by_place == {"a": 4}
        a[0].send("b", b"fine")
        assert await b[1].until("control") == ("control", "a", b"fine")


if __name__ == "__main__":
    uvloop.run(echo_forever(*sys.argv[1:3]))
