"""`chaosnet.node.link_tests`: each test ends in an event."""

import asyncio
from queue import SimpleQueue
from types import SimpleNamespace

import pytest

from chaosnet.node import iperf3_probe, link_tests
from chaosnet.node.link_tests import LinkTests
from chaosnet.protocols.events import Iperf3Done, Iperf3Serving, NotReached
from chaosnet.protocols.probing import PROBE_BYTES


def test_both_ends_of_an_iperf3_tell_the_core(monkeypatch):
    monkeypatch.setattr(iperf3_probe, "serve", lambda on_port: on_port(5201))
    monkeypatch.setattr(iperf3_probe, "run", lambda address: iperf3_probe.IperfResult(1e6, 2e6))
    posted = SimpleQueue()
    tests = LinkTests(None, posted.put, None)
    tests.serve_iperf3("b")
    assert posted.get(timeout=5.0) == Iperf3Serving("b", 5201)
    tests.run_iperf3("b", "h:5201")
    assert posted.get(timeout=5.0) == Iperf3Done("b", 1e6, 2e6, "")


@pytest.mark.parametrize("refused", [True, False])
def test_who_could_not_be_reached_is_told_with_whether_its_machine_refuses(refused, monkeypatch):
    async def refuses(address, patience_s):
        return refused

    monkeypatch.setattr(link_tests, "refuses", refuses)
    posted = []

    async def look():
        LinkTests(None, None, posted.append).look("h:1", "no answer")
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(look())
    assert posted == [NotReached("h:1", "no answer", refused)]


def test_an_iperf3_whose_process_does_not_start_is_told_too(monkeypatch):
    def fails(*arguments, **how):
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(iperf3_probe.subprocess, "Popen", fails)
    ports = []
    iperf3_probe.serve(ports.append)
    assert ports == [0]


@pytest.mark.parametrize("shared, parts", [(False, 64), (True, 16)])
def test_a_probe_is_in_fewer_and_larger_parts_where_memory_is_shared(shared, parts):
    sent = []
    transport = SimpleNamespace(
        shares_memory=lambda peer: shared, send_bulk=lambda peer, header, body: sent.append(len(body))
    )
    LinkTests(transport, None, None).send_probe("b")
    assert len(sent) == parts and (shared or sum(sent) == PROBE_BYTES)
