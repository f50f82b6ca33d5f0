"""Addresses that name a host: looked up beside the links, which go on meanwhile."""

from __future__ import annotations

import asyncio
import re
import socket
import sys
import time
from typing import Any

import pytest
from test_transport import link, nodes

from chaosnet.node.transport.dialer import NOT_THERE

pytestmark = pytest.mark.realtime


def test_links_go_on_while_a_name_is_looked_up() -> None:
    async def scenario() -> None:
        async with nodes("a", "b", "c") as [a, b, c]:
            await link(a, b)
            found, loop = asyncio.Event(), asyncio.get_running_loop()

            async def slow(host: str, port: int, **_: Any) -> list[Any]:
                assert host == "slow.example"
                await found.wait()
                six = (socket.AF_INET6, 0, 0, "", ("::1", port, 0, 0))
                return [six, (socket.AF_INET, 0, 0, "", ("127.0.0.1", port))]

            loop.getaddrinfo = slow  # type: ignore[method-assign, assignment]
            address = c[0].address.replace("127.0.0.1", "slow.example")
            a[0].dial(address)
            b[1].answer = b[0]
            for turn in range(1, 20):
                a[0].send("b", b"ping")
                await a[1].until("control", times=turn)
            assert a[1].count("opened") == 1
            found.set()
            assert await a[1].until("opened", times=2) == ("opened", "c", address, True, False)

    asyncio.run(scenario())


def test_a_name_that_comes_too_late_or_is_none_fails() -> None:
    async def scenario() -> None:
        async with nodes("a", dial_timeout_s=0.2) as [a]:

            async def never(*_: Any, **__: Any) -> list[Any]:
                await asyncio.Event().wait()
                return []

            lookup = asyncio.get_running_loop().getaddrinfo
            asyncio.get_running_loop().getaddrinfo = never  # type: ignore[method-assign, assignment]
            began_s = time.monotonic()
            a[0].dial("slow.example:5555")
            assert "no answer in 0.2 s" in (await a[1].until("dial_failed"))[2]
            assert time.monotonic() - began_s >= 0.2
            asyncio.get_running_loop().getaddrinfo = lookup  # type: ignore[method-assign]
            for count, name in enumerate(("a..b:5555", "x" * 64 + ":5555", "nowhere.invalid:5555"), start=2):
                a[0].dial(name)
                why = (await a[1].until("dial_failed", times=count))[2]
                assert re.fullmatch(r"its name does not resolve \(.+\)", why), (
                    "it was told as: refused, or ..."
                )

            async def unknown(*_: Any, **__: Any) -> list[Any]:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")

            asyncio.get_running_loop().getaddrinfo = unknown  # type: ignore[method-assign, assignment]
            a[0].dial("typo.example:5555")
            why = (await a[1].until("dial_failed", times=5))[2]
            assert why == "its name does not resolve (Name or service not known)"

    asyncio.run(scenario())


def named(*hosts: str) -> Any:
    """A look-up that finds these addresses."""

    async def found(host: str, port: int, **_: Any) -> list[Any]:
        return [(socket.AF_INET6 if ":" in at else socket.AF_INET, 0, 0, "", (at, port)) for at in hosts]

    return found


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine's")
@pytest.mark.parametrize("check", [False, True], ids=["dial", "check"])
def test_of_several_addresses_of_a_name_the_one_that_answers_is_found(check: bool) -> None:
    """Those of a machine in several networks, or in two families: only the first was tried, again and again."""

    async def scenario() -> None:
        async with nodes("a", "b") as [a, b]:
            port = int(b[0].address.rpartition(":")[2])
            with socket.socket() as silent, socket.socket() as waits:
                silent.bind(("127.0.0.8", port))
                silent.listen(0)
                waits.connect(silent.getsockname())  # Nobody accepts it, and there is room for no other.
                asyncio.get_running_loop().getaddrinfo = named(  # type: ignore[method-assign]
                    "127.0.0.9", "127.0.0.8", "127.0.0.1"
                )
                address = f"some.example:{port}"
                (a[0].check if check else a[0].dial)(address)
                heard = await a[1].until("checked" if check else "opened")
                assert heard[1:3] == ((address, "b") if check else ("b", address))
                assert a[0].links.peers.keys() == (set() if check else {"b"})
                assert a[1].count("dial_failed") == 0
                await asyncio.sleep(0.2)
                assert len(a[0].sockets.open) == (1 if check else 3), "sockets of the others are left"

    asyncio.run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="all of 127.0.0.0/8 is this machine's")
def test_a_name_none_of_whose_addresses_answers_fails_once() -> None:
    async def scenario() -> None:
        async with nodes("a") as [a]:
            asyncio.get_running_loop().getaddrinfo = named("::1", "127.0.0.9")  # type: ignore[method-assign]
            a[0].dial("some.example:1")
            assert (await a[1].until("dial_failed"))[2] == NOT_THERE
            await asyncio.sleep(0.2)
            assert a[1].count("dial_failed") == 1
            assert len(a[0].sockets.open) == 1

    asyncio.run(scenario())
