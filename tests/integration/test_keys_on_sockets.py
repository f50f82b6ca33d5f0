"""CURVE, the keyring and the limits on strangers over real sockets: who gets in, who is told why not."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import ExitStack, asynccontextmanager
from typing import Any

import pytest
import zmq
from test_transport import Ear, Node, link, nodes, raw_dealer, real

from chaosnet.node.endpoint import Endpoint
from chaosnet.node.keys import KeyPair
from chaosnet.node.transport import curve, links, strangers
from chaosnet.node.transport.greeting import guest_name
from chaosnet.node.transport.sockets import MAX_FRAME_BYTES
from chaosnet.node.transport.transport import Transport
from chaosnet.protocols.codec import encode
from chaosnet.protocols.errors import ConfigError
from chaosnet.protocols.keyring import Keyring
from chaosnet.protocols.messages import Envelope, Hello, Introduction, KeyringNews, LeaveCommand

pytestmark = pytest.mark.realtime


@asynccontextmanager
async def keyed(*names: str) -> AsyncIterator[list[Node]]:
    """Nodes with a key each, that know each other's."""
    pairs = [KeyPair.new() for _ in names]
    made: list[Node] = []
    try:
        for name, pair in zip(names, pairs, strict=True):
            ring, ear = Keyring(pair.public, [each.public for each in pairs]), Ear()
            made.append((Transport(name, "127.0.0.1:0", ear, keys=pair, keyring=ring), ear))
            await made[-1][0].start()
        yield made
    finally:
        for transport, _ in made:
            transport.close(linger_s=0.1)


@asynccontextmanager
async def client(pair: KeyPair | None, name: str = "looker") -> AsyncIterator[Node]:
    made = Transport(name, "", ear := Ear(), client=True, keys=pair)
    await made.start()
    try:
        yield made, ear
    finally:
        made.close(linger_s=0.1)


def ring_of(node: Node) -> Keyring:
    assert node[0].identity.keyring
    return node[0].identity.keyring


NO_KEY = ("no key", "hung up or silent")  # Of two that do not fit, the first to notice hangs up.


async def refusals(
    node: Node, reasons: str | tuple[str, ...], count: int = 1, timeout_s: float = 5.0
) -> None:
    """Wait until so many are counted."""
    deadline_s = time.monotonic() + timeout_s
    wanted = (reasons,) if isinstance(reasons, str) else reasons
    while sum(node[0].refused[reason] for reason in wanted) < count:
        assert time.monotonic() < deadline_s, f"{node[0].refused}, not {count} of {wanted}"
        await asyncio.sleep(0.01)


async def failed_dial(node: Node, address: str) -> str:
    """Why it fails."""
    before = node[1].count("dial_failed")
    node[0].dial(address)
    return str((await node[1].until("dial_failed", times=before + 1))[2])


# --- who gets in ----------------------------------------------------------------------------------------


@real
async def test_nodes_with_keys_that_know_each_other_talk_and_their_addresses_carry_the_keys() -> None:
    async with keyed("a", "b") as [a, b]:
        await link(a, b)
        assert Endpoint.parse(b[0].address).key == ring_of(b).own
        assert a[1].last("opened") == ("opened", "b", b[0].address, True, False)
        assert b[1].last("opened") == ("opened", "a", a[0].address, False, False)
        payload = os.urandom(3_000_000)
        assert a[0].send("b", b"control") and a[0].send_bulk("b", b"header", payload)
        await b[1].until("bulk")
        assert b[1].last("control") == ("control", "a", b"control")
        [frame] = b[1].payloads
        assert frame is not None and bytes(frame.buffer) == payload and not frame.buffer.readonly
        assert not a[0].refused and not b[0].refused


@real
async def test_without_a_key_nobody_gets_in_and_both_ends_say_why() -> None:
    async with keyed("a") as [a]:
        async with client(None) as stranger:
            assert "it wants to see a key" in await failed_dial(stranger, Endpoint.parse(a[0].address).place)
        await refusals(a, NO_KEY, 2)
        assert not a[1].count("opened")


@real
async def test_a_key_that_nobody_allowed_does_not_get_in_until_it_is() -> None:
    async with keyed("a") as [a], client(KeyPair.new()) as stranger:
        assert stranger[0].keys
        assert "does not know this node's key" in await failed_dial(stranger, a[0].address)
        await refusals(a, "unknown key", 2)
        ring_of(a).merge(KeyringNews(allowed=(stranger[0].keys.public,)), 0.0)
        stranger[0].dial(a[0].address)
        await stranger[1].until("opened")


@real
async def test_who_listens_under_another_key_than_its_address_says_is_not_talked_to() -> None:
    """A man in the middle, or a port that somebody else has taken."""
    async with keyed("a", "b") as [a, b]:
        wrong = str(Endpoint.parse(b[0].address).of(ring_of(a).own))
        assert "does not hold the key of this address" in await failed_dial(a, wrong)
        await refusals(b, ("looked for another key", "hung up or silent"), 2)  # The dialer may hang up first.


@real
async def test_with_keys_an_address_without_one_is_not_dialled_nor_one_whose_key_is_not_allowed() -> None:
    async with keyed("a", "b") as [a, b]:
        there = Endpoint.parse(b[0].address)
        assert "names no key" in await failed_dial(a, there.place)
        assert "unknown key" in await failed_dial(a, str(there.of(KeyPair.new().public)))
        ring_of(a).merge(KeyringNews(revoked=(there.key,)), 0.0)
        assert "revoked key" in await failed_dial(a, b[0].address)
        assert not b[0].refused, "nothing has reached it"


@real
async def test_a_node_with_keys_does_not_talk_to_one_without() -> None:
    async with keyed("a") as [a], nodes("plain") as [plain]:
        address = str(Endpoint.parse(plain[0].address).of(ring_of(a).own))
        assert "uses no keys" in await failed_dial(a, address)
        await refusals(plain, ("a key where none is used", "hung up or silent"), 2)
        assert "this node has none" in await failed_dial(plain, a[0].address)


@real
async def test_a_peer_is_known_at_the_key_that_it_has_proved_whatever_it_says() -> None:
    async with keyed("a", "liar") as [a, liar]:
        liar[0].identity.address = str(Endpoint("127.0.0.1", 5555, ring_of(a).own))
        liar[0].dial(a[0].address)
        assert (await a[1].until("opened"))[2] == f"{ring_of(liar).own}@127.0.0.1:5555"


# --- revoked --------------------------------------------------------------------------------------------


@real
async def test_a_revoked_key_loses_its_links_whoever_dialled_and_does_not_get_back() -> None:
    for dialler_is_revoked in (True, False):
        async with keyed("a", "b") as [a, b]:
            await link(*((b, a) if dialler_is_revoked else (a, b)))
            ring_of(a).merge(KeyringNews(revoked=(ring_of(b).own,)), 0.0)
            a[0].enforce_keys()
            assert await a[1].until("closed") == ("closed", "b", True)
            await b[1].until("closed")
            assert "has revoked it" in await failed_dial(b, a[0].address)
            await refusals(a, "revoked key")


@real
async def test_a_key_that_is_revoked_while_its_holder_is_dialled_gets_no_link() -> None:
    async with keyed("a", "b") as [a, b]:
        acceptor, answered = b[0].acceptor, asyncio.Event()
        answer = acceptor._answer

        def late(*args: Any) -> None:
            asyncio.get_running_loop().call_later(0.3, answer, *args)
            answered.set()

        acceptor._answer = late  # type: ignore[method-assign]
        a[0].dial(b[0].address)
        await answered.wait()
        ring_of(a).merge(KeyringNews(revoked=(ring_of(b).own,)), 0.0)
        a[0].enforce_keys()
        assert "revoked" in (await a[1].until("dial_failed"))[2]
        assert not a[1].count("opened")


@real
async def test_one_that_was_shut_out_and_does_not_go_is_hung_up_on() -> None:
    async with keyed("a") as [a]:
        pair = KeyPair.new()
        ring_of(a).merge(KeyringNews(allowed=(pair.public,)), 0.0)
        with zmq.Context() as context, ExitStack() as open_sockets:
            sockets = []
            for kind in (b"c", b"b"):
                each = open_sockets.enter_context(context.socket(zmq.DEALER))
                each.linger, each.routing_id = 0, kind + b"stays"
                curve.dial(each, pair, ring_of(a).own)
                each.connect(f"tcp://{Endpoint.parse(a[0].address).place}")
                each.send_multipart([b"", encode(Hello(node="stays", address="", incarnation="1"))])
                sockets.append(each)
            await a[1].until("opened")
            ring_of(a).merge(KeyringNews(revoked=(pair.public,)), 0.0)
            a[0].enforce_keys()
            await a[1].until("closed")
            async with asyncio.timeout(5 * links.LINGER_S):
                while a[0].sockets.door.by_fd:
                    await asyncio.sleep(0.05)


# --- invites --------------------------------------------------------------------------------------------


def invited(node: Node, seconds: float = 60.0) -> KeyPair:
    pair = KeyPair.new()
    ring_of(node).merge(KeyringNews(invites=((pair.public, seconds),)), time.monotonic())
    return pair


def said_by(pair: KeyPair, body: Introduction | LeaveCommand) -> bytes:
    return encode(Envelope(source=guest_name(pair.public), target="*", serial=1, body=body))


@real
async def test_an_invites_holder_can_introduce_somebody_and_say_nothing_else() -> None:
    async with keyed("a") as [a]:
        pair = invited(a)
        name = guest_name(pair.public)
        introduction = said_by(pair, Introduction(invite=pair.public, key=ring_of(a).own, asker=name))
        async with client(pair, name) as guest:
            guest[0].dial(a[0].address)
            await guest[1].until("opened")
            guest[0].send("a", said_by(pair, LeaveCommand(asker=name)))
            other = KeyPair.new().public
            guest[0].send("a", said_by(pair, Introduction(invite=other, key=other, asker=name)))
            guest[0].send_bulk("a", introduction)
            guest[0].send("a", b"garbage")
            await a[1].until("foreign", times=4)
            guest[0].send("a", introduction)
            assert await a[1].until("control") == ("control", name, introduction)
            assert not a[1].count("bulk")


@real
async def test_an_invites_holder_cannot_pass_for_anybody_else() -> None:
    async with keyed("a") as [a]:
        pair = invited(a)
        async with client(pair, "scheduler") as guest:
            guest[0].dial(a[0].address)
            await refusals(a, "does not fit")
            assert not a[1].count("opened")


@real
async def test_an_invite_that_is_used_or_expired_opens_nothing_and_its_holder_is_told_so() -> None:
    async with keyed("a") as [a]:
        used, expired = invited(a), invited(a, 0.01)
        assert ring_of(a).admit(used.public, KeyPair.new().public, time.monotonic()) == ""
        await asyncio.sleep(0.05)
        for pair, reason in ((used, "used invite"), (expired, "expired invite")):
            async with client(pair, guest_name(pair.public)) as guest:
                assert "used already or has expired" in await failed_dial(guest, a[0].address)
            await refusals(a, reason)


@real
async def test_an_invites_connection_ends_by_itself() -> None:
    before, links.INTRODUCTION_S = links.INTRODUCTION_S, 0.2
    try:
        async with keyed("a") as [a]:
            pair = invited(a)
            async with client(pair, guest_name(pair.public)) as guest:
                guest[0].dial(a[0].address)
                await guest[1].until("opened")
                assert await guest[1].until("closed") == ("closed", "a", True)
    finally:
        links.INTRODUCTION_S = before


# --- strangers ------------------------------------------------------------------------------------------


@real
async def test_a_frame_too_large_is_refused_before_and_after_the_handshake_and_counted() -> None:
    async with keyed("a", "b") as [a, b]:
        with zmq.Context() as context, context.socket(zmq.DEALER) as dealer:
            dealer.linger, dealer.routing_id = 0, b"clarge"
            pair = KeyPair.new()
            ring_of(a).merge(KeyringNews(allowed=(pair.public,)), 0.0)
            curve.dial(dealer, pair, ring_of(a).own)
            dealer.connect(f"tcp://{Endpoint.parse(a[0].address).place}")
            dealer.send(bytes(MAX_FRAME_BYTES + 1), copy=False)
            await refusals(a, curve.MALFORMED)
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)
        with socket.create_connection(("127.0.0.1", Endpoint.parse(a[0].address).port)) as raw:
            raw.sendall(greeting + b"\x06" + (1 << 40).to_bytes(8, "big") + bytes(100))
            await refusals(a, curve.MALFORMED, 2)
        await link(a, b)


@real
async def test_a_stranger_that_says_nothing_is_hung_up_on_in_time_with_and_without_keys() -> None:
    before, strangers.HELLO_S = strangers.HELLO_S, 0.3
    try:
        async with keyed("a") as [a], nodes("plain") as [plain]:
            for node in (a, plain):
                with socket.create_connection(("127.0.0.1", Endpoint.parse(node[0].address).port)) as raw:
                    raw.settimeout(5)
                    await refusals(node, "no Hello in time")
                    while await asyncio.to_thread(raw.recv, 64):  # libzmq has greeted.
                        pass
            with raw_dealer(plain[0].address):  # It speaks ZMTP, and then nothing.
                await refusals(plain, "no Hello in time", 2)
                assert not plain[0].sockets.door.by_fd or await until_none(plain)
    finally:
        strangers.HELLO_S = before


async def until_none(node: Node) -> bool:
    async with asyncio.timeout(5):
        while node[0].sockets.door.by_fd:
            await asyncio.sleep(0.02)
    return True


@real
async def test_of_a_thousand_half_open_connections_few_stay_and_who_has_a_key_still_gets_in() -> None:
    async with keyed("a", "b") as [a, b]:
        port = Endpoint.parse(a[0].address).port
        with ExitStack() as flood:
            for number in range(1000):
                flood.enter_context(socket.create_connection(("127.0.0.1", port)))
                if number % 50 == 0:
                    await asyncio.sleep(0.01)
            refused = a[0].refused
            async with asyncio.timeout(10):
                while refused.total() < 1000 - strangers.MAX_STRANGERS_PER_HOST:
                    await asyncio.sleep(0.02)
            assert refused["too many at once"] >= strangers.FAILURE_BURST and refused["too often"]
            assert len(a[0].sockets.door.strangers) <= strangers.MAX_STRANGERS_PER_HOST
            # From the flood's own host: a chance FAILURES_PER_S times a second.
            async with asyncio.timeout(15):
                while not b[1].count("opened"):
                    b[0].dial(a[0].address)
                    await asyncio.sleep(0.1)
        await asyncio.sleep(0.1)
        assert a[0].send("b", b"still there") and await b[1].until("control")


def test_out_of_descriptors_a_node_goes_on_and_accepts_again_when_there_are_some() -> None:
    """In a process of its own, with a hard limit that a flood can reach."""
    done = subprocess.run(
        [sys.executable, __file__, "few-descriptors"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exhausted", "alive", "accepts"]


async def few_descriptors() -> None:
    import resource

    limit = 200
    async with nodes("a", "b", "c") as [a, b, c]:
        await link(a, b)
        for _ in range(3):
            used = len(os.listdir("/proc/self/fd"))
        resource.setrlimit(resource.RLIMIT_NOFILE, (used + 30, limit))
        flood = subprocess.Popen(
            [sys.executable, "-c", FLOOD, str(Endpoint.parse(a[0].address).port)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        assert flood.stdin and flood.stdout
        await asyncio.to_thread(flood.stdout.readline)
        await asyncio.sleep(0.3)
        print(
            "exhausted" if len(a[0].sockets.door.by_fd) < 100 else f"{len(a[0].sockets.door.by_fd)} accepted"
        )
        a[0].send("b", b"x")
        await b[1].until("control")
        print("alive")
        flood.stdin.close()
        flood.wait()
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
        async with asyncio.timeout(20):
            while not c[1].count("opened"):
                c[0].dial(a[0].address)
                await asyncio.sleep(0.2)
        print("accepts")


FLOOD = """
import socket, sys
kept = [socket.create_connection(("127.0.0.1", int(sys.argv[1]))) for _ in range(100)]
print("open", flush=True)
sys.stdin.read()
"""


def test_who_listens_with_a_key_must_know_whom_to_let_in() -> None:
    with pytest.raises(AssertionError):
        Transport("a", "127.0.0.1:0", Ear(), keys=KeyPair.new())


def test_an_address_with_something_else_than_a_key_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match="is no key"):
        Endpoint.parse("me@10.0.0.2:5555")


if __name__ == "__main__":
    asyncio.run(few_descriptors())
