"""What asks the cluster for the page: whose keys it shows, when it asks no more, and what it outlives."""

import json
import socket
import threading
import time
import urllib.error
import urllib.request

import msgspec
import pytest
from statuses import STATUS

from chaosnet import client
from chaosnet.page.feed import Feed
from chaosnet.page.picture import Picture
from chaosnet.page.server import PageServer
from chaosnet.protocols.errors import PeerUnreachable

pytestmark = pytest.mark.realtime


def until(true, patience_s=10.0):
    deadline_s = time.monotonic() + patience_s
    while not true():
        assert time.monotonic() < deadline_s
        time.sleep(0.01)


def test_a_node_without_keys_is_asked_without_those_that_its_user_has(monkeypatch):
    monkeypatch.setattr(client, "identity", lambda: pytest.fail("the user's key was loaded"))
    with pytest.raises(PeerUnreachable):
        client.status("127.0.0.1:1", 0.3, keys=None)


def test_an_error_of_this_machine_is_told_and_the_cluster_asked_again():
    asked = []

    def ask(on_silence):
        asked.append(1)
        if len(asked) < 3:
            raise OSError(24, "Too many open files")
        yield STATUS

    feed = Feed(Picture(), ask, pace_s=0.0)
    feed.start()
    troubles = []
    with feed.listening(lambda: troubles.append(feed.picture.trouble)):
        until(lambda: feed.picture.status is not None)
    feed.close()
    assert any("Too many open files" in each for each in troubles)


def test_a_cluster_that_is_gone_is_not_asked_for_nobody():
    asked = threading.Semaphore(0)

    def ask(on_silence):
        yield STATUS
        while True:
            asked.release()
            time.sleep(0.01)
            on_silence(PeerUnreachable("nobody answers"))

    feed = Feed(Picture(), ask, pace_s=0.0)
    feed.start()
    with feed.listening(lambda: None):
        for _ in range(3):
            assert asked.acquire(timeout=10.0)
    time.sleep(0.1)
    while asked.acquire(blocking=False):
        pass
    assert not asked.acquire(timeout=0.3)
    with feed.listening(lambda: None):
        assert asked.acquire(timeout=10.0)
    feed.close()


def test_a_scrape_waits_past_a_member_that_has_just_died():
    """The next one answers a moment later: the cluster is up."""

    def ask(on_silence):
        yield STATUS
        while True:
            on_silence(PeerUnreachable("the member asked has died"))
            time.sleep(0.1)
            yield msgspec.structs.replace(STATUS, step=STATUS.step + 1)

    server = PageServer(Feed(Picture(), ask, pace_s=0.6), "127.0.0.1", 0, "--listen")
    server.start()
    try:
        for _ in range(3):
            with urllib.request.urlopen(f"{server.url()}/metrics", timeout=10.0) as answer:
                assert b"\nchaosnet_up 1.0" in answer.read()
    finally:
        server.stop()


def test_the_status_of_a_cluster_that_does_not_answer_is_an_error_and_else_has_all_that_is_known():
    is_silent = threading.Event()

    def ask(on_silence):
        while True:
            if is_silent.is_set():
                on_silence(PeerUnreachable("nobody answers at n1"))
                time.sleep(0.05)
            else:
                yield STATUS

    server = PageServer(Feed(Picture(), ask, pace_s=0.0), "127.0.0.1", 0, "--listen")
    server.start()
    try:
        with urllib.request.urlopen(f"{server.url()}/status.json", timeout=10.0) as answer:
            assert len(json.load(answer)["events"]) == len(STATUS.events)
        is_silent.set()
        with pytest.raises(urllib.error.HTTPError, match="503"):
            urllib.request.urlopen(f"{server.url()}/status.json", timeout=10.0)
    finally:
        server.stop()


def test_strangers_do_not_write_into_the_log_of_a_node(caplog):
    """Each request that was none was a line there: port scanners, TLS, or too many at once."""
    server = PageServer(Feed(Picture(), None), "127.0.0.1", 0, "--listen")
    server.start()
    try:
        for _ in range(20):
            with socket.create_connection(("127.0.0.1", server.port), timeout=10.0) as stranger:
                stranger.sendall(b"\x16\x03\x01 no request\r\n\r\n")
                assert stranger.recv(1000)
    finally:
        server.stop()
    assert not caplog.records


def test_a_page_that_was_never_served_leaves_its_port():
    first = PageServer(Feed(Picture(), None), "127.0.0.1", 0, "--listen")
    port = first.port
    first.stop()
    PageServer(Feed(Picture(), None), "127.0.0.1", port, "--listen").stop()
