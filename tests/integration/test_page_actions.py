"""What the page may change in a cluster, and who may not: `chaosnet dashboard --allow-actions`."""

from __future__ import annotations

import http.client
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cluster import cluster_of

from chaosnet import client
from chaosnet.invite import is_token
from chaosnet.node.keys import KeyPair, save
from chaosnet.page.actions import MAX_BYTES
from chaosnet.page.feed import of_cluster, of_status
from chaosnet.page.server import PageServer
from chaosnet.protocols.errors import ConfigError, PeerUnreachable
from chaosnet.protocols.messages import Answer

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from many_nodes import cluster as simulated

pytestmark = pytest.mark.realtime

PATIENCE_S = 30.0
LEAVE = {"type": "leave", "node": "n1"}


@contextmanager
def served(feed: Any, with_actions: bool = True) -> Iterator[PageServer]:
    server = PageServer(feed, "127.0.0.1", 0, "--listen", with_actions)
    server.start()
    yield server
    server.stop()


def post(server: PageServer, body: Any, **headers: str | None) -> tuple[int, str]:
    """As the page does it, but for these headers; None leaves one out. Returns: HTTP's code, and what was said."""
    token = server.url_with_token.partition("token=")[2]
    usual = {"Origin": server.url(), "Authorization": f"Bearer {token}", "Content-Type": "application/json"}
    sent = {name: value for name, value in {**usual, **headers}.items() if value is not None}
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
    connection.request("POST", "/actions", body if isinstance(body, bytes) else json.dumps(body), sent)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, json.loads(text)["text"] if text.startswith("{") else text


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the cluster is asked, which it is not in these tests."""
    found: list[Any] = []
    for name in ("leave", "change_link"):
        monkeypatch.setattr(client, name, lambda *what: found.append(what) or Answer(ok=True, text="done"))
    return found


def test_a_page_without_the_option_changes_nothing(asked):
    with served(of_status(simulated(3), "run.json"), with_actions=False) as server:
        assert "token" not in server.url_with_token
        assert (post(server, LEAVE)[0], asked) == (404, [])


@pytest.mark.parametrize(
    ("headers", "code", "why"),
    [
        ({"Authorization": None}, 403, "the token is wrong"),
        ({"Authorization": "Bearer "}, 403, "the token is wrong"),
        ({"Authorization": "Bearer \xe9"}, 403, "the token is wrong"),
        ({"Origin": None}, 403, "from 'nowhere'"),
        ({"Origin": "http://evil.example"}, 403, "from 'http://evil.example' (expected the page itself)"),
        ({"Origin": "null"}, 403, "from 'null'"),
        ({"Host": "evil.example", "Origin": "http://evil.example"}, 400, "Invalid host header"),
        ({"Content-Type": "text/plain"}, 415, "expected JSON"),
        ({"Content-Type": None}, 415, "expected JSON"),
    ],
)
def test_who_is_not_the_page_with_the_token_is_refused(asked, headers, code, why):
    """Each of these, had it one thing right that it has wrong, would be heard: see the last line."""
    with served(of_status(simulated(3), "run.json")) as server:
        found, said = post(server, LEAVE, **headers)
        assert (found, asked) == (code, []) and why in said
        assert post(server, LEAVE) == (200, "done") and len(asked) == 1


@pytest.mark.parametrize(
    ("body", "code", "why"),
    [
        (b"{", 400, "no action"),
        ({"type": "shutdown"}, 400, "Invalid value 'shutdown'"),
        ({**LEAVE, "address": "10.0.0.1:5555"}, 400, "unknown field"),
        ({"type": "leave", "node": 3}, 400, "Expected `str`"),
        ({**LEAVE, "node": "n" * MAX_BYTES}, 413, "more than"),
        ({"type": "leave", "node": "n-lost"}, 200, "'n-lost' is no member now"),
        ({"type": "link", "a": "n1", "b": "n1", "connect": True}, 200, "from n1 to itself"),
        ({"type": "link", "a": "n1", "b": "x", "connect": True}, 200, "'x' is no member now"),
    ],
)
def test_what_cannot_be_done_is_said_and_nobody_is_asked(asked, body, code, why):
    with served(of_status(simulated(3), "run.json")) as server:
        found, said = post(server, body)
        assert (found, asked) == (code, []) and why in said


def test_a_token_is_of_one_run_and_is_in_no_page(asked):
    with served(of_status(simulated(3), "a")) as one, served(of_status(simulated(3), "b")) as other:
        theirs = other.url_with_token.partition("token=")[2]
        assert theirs and post(one, LEAVE, Authorization=f"Bearer {theirs}")[0] == 403
        connection = http.client.HTTPConnection("127.0.0.1", other.port, timeout=PATIENCE_S)
        for path in ("/", "/status.json", "/metrics", "/static/actions.js"):
            connection.request("GET", path)
            assert theirs not in connection.getresponse().read().decode()
    assert asked == []


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::"])
def test_actions_are_for_this_machine_only(host):
    with pytest.raises(ConfigError, match=r"beside --allow-actions.*expected a place of this machine alone"):
        PageServer(of_status(simulated(3), "run.json"), host, 0, "--listen", with_actions=True)


def test_nodes_leave_and_links_open_and_close_and_what_the_cluster_refuses_is_said(tmp_path):
    with cluster_of(3, tmp_path, pause_s=0.02) as cluster:
        address = cluster.nodes[0].last("joined")["address"]

        def linked() -> bool:
            return any((row.a, row.b) == ("b", "c") for row in client.status(address).links)

        with served(of_cluster(lambda: address)) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            connection.request("GET", "/status.json")  # It has heard of all then.
            assert len(json.loads(connection.getresponse().read())["members"]) == 3
            change = {"type": "link", "a": "b", "b": "c"}
            before = linked()
            assert post(server, {**change, "connect": not before})[0] == 200
            assert linked() is not before
            post(server, {**change, "connect": before})
            assert linked() is before
            assert "key" in post(server, {"type": "invite"})[1], "this cluster has none"
            code, said = post(server, {"type": "leave", "node": "c"})
            assert (code, "c" in said) == (200, True)
            assert cluster.nodes[2].exit_code() == 0
        cluster.nodes[0].advance(5)


@pytest.mark.parametrize(
    ("body", "call"),
    [(LEAVE, "leave"), ({"type": "link", "a": "n1", "b": "n2", "connect": True}, "change_link")],
)
def test_a_member_is_asked_at_each_of_its_addresses_until_one_answers(body, call, monkeypatch):
    places = ("10.255.0.1:1", "10.255.0.2:2", "10.255.0.3:3")
    status = simulated(3)
    rows = tuple(msgspec.structs.replace(row, addresses=places) for row in status.members)
    silent, tried = {places[0]}, []

    def ask(address: str, *what: Any) -> Answer:
        tried.append(address)
        if address in silent:
            raise PeerUnreachable(f"{address} does not answer")
        return Answer(ok=True, text="done")

    monkeypatch.setattr(client, call, ask)
    with served(of_status(msgspec.structs.replace(status, members=rows), "run.json")) as server:
        assert (post(server, body), tried) == ((200, "done"), list(places[:2]))
        silent |= set(places)
        assert post(server, body) == (200, f"{places[2]} does not answer")


def test_an_invite_from_the_page_lets_one_node_in(tmp_path, monkeypatch):
    monkeypatch.setenv("CHAOSNET_KEY", str(tmp_path / "a.key"))
    save(KeyPair.new(), tmp_path / "a.key")
    with cluster_of(0, tmp_path, pause_s=0.02) as cluster:
        first = cluster.start(key=str(tmp_path / "a.key"))
        address = first.last("joined")["address"]
        with served(of_cluster(lambda: address)) as server:
            connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=PATIENCE_S)
            connection.request("GET", "/status.json")  # It has heard of the node then.
            assert len(json.loads(connection.getresponse().read())["members"]) == 1
            code, token = post(server, {"type": "invite"})
        assert (code, is_token(token)) == (200, True), token
        cluster.start(key=str(tmp_path / "b.key"), join=token).last("joined")
        late = cluster.start(key=str(tmp_path / "c.key"), join=token, join_patience_s=5.0)
        assert "used already or has expired" in late.ended()["reason"]
        first.advance(5)


@pytest.mark.slow
def test_the_command_prints_the_address_with_its_token_and_keeps_it_on_this_machine(tmp_path):
    with cluster_of(1, tmp_path, pause_s=0.02) as cluster:
        address = cluster.nodes[0].last("joined")["address"]
        command = [sys.executable, "-m", "chaosnet", "dashboard", address, "--allow-actions", "--listen"]
        refused = subprocess.run([*command, "0.0.0.0:0"], capture_output=True, text=True, check=False)
        assert (refused.returncode, "'0.0.0.0' beside --allow-actions" in refused.stderr) == (1, True)
        with subprocess.Popen([*command, "127.0.0.1:0"], stdout=subprocess.PIPE, text=True) as process:
            assert process.stdout is not None
            line, note = process.stdout.readline(), process.stdout.readline()
            assert "/#token=" in line and "whoever has this address" in note
            process.send_signal(signal.SIGINT)
            assert process.wait(PATIENCE_S) == 0
