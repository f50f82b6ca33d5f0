"""Clusters of real processes with keys: who joins, who is refused and told why, and what a flood changes."""

from __future__ import annotations

import itertools
import json
import statistics
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from cluster import Cluster, Node

from chaosnet import client
from chaosnet.benchmarks.strangers import REPORT_S, Attack, used_invite
from chaosnet.invite import Token, make
from chaosnet.node.endpoint import Endpoint
from chaosnet.node.keys import KeyPair, load, save
from chaosnet.node.transport import strangers
from chaosnet.node.transport.curve import MALFORMED

pytestmark = pytest.mark.realtime

QUIET_S = 4.0  # Of steps whose median is taken.
NOISE = 1.5  # By which medians of one run differ on a machine that others use as well.
Main = Callable[..., tuple[int, str, str]]
RATE = 250.0  # Connections a second.
REFUSED_AS = {  # Besides "too often". Of two that do not fit, the first to notice hangs up.
    "no key": ("no key", "hung up or silent"),
    "wrong key": ("unknown key",),
    "replayed invite": ("used invite",),
    "oversized frame": (MALFORMED,),
    "half-open": ("too many at once", "hung up or silent"),
}


class Keyed(Cluster):
    """Each node has a key of its own; the first allows those of the next two. We hold the first one's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder, samples=960, pause_s=0.01)
        public = [self.new_key(name) for name in "abc"]
        (folder / "allowed").write_text(
            "".join(f"{key}  # {name}\n" for key, name in zip(public, "abc", strict=True))
        )

    def new_key(self, name: str) -> str:
        save(pair := KeyPair.new(), self.folder / f"{name}.key")
        return pair.public

    def public(self, name: str) -> str:
        return load(self.folder / f"{name}.key").public

    def train(self) -> list[Node]:
        self.start(key=str(self.folder / "a.key"), allowed_keys=str(self.folder / "allowed")).last("joined")
        for name in "bc":
            self.start(key=str(self.folder / f"{name}.key")).last("joined")
        self.nodes[0].advance(5)
        return self.nodes

    def join(self, token: str, key: str) -> Node:
        """One more node, that comes with an invite; its key file need not be there."""
        return self.start(key=str(self.folder / f"{key}.key"), join=token, join_patience_s=5.0)

    @property
    def address(self) -> str:
        return str(self.nodes[0].last("joined")["address"])


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Keyed]:
    monkeypatch.setenv("CHAOSNET_KEY", str(tmp_path / "a.key"))
    cluster = Keyed(tmp_path)
    yield cluster
    cluster.close()


def test_three_nodes_with_keys_train_and_a_fourth_joins_by_an_invite_that_then_is_used_up(
    cluster: Keyed,
) -> None:
    cluster.train()
    token = make(cluster.address, 60.0)
    d = cluster.join(token, "d")
    d.last("joined")
    d.advance(5)
    assert (cluster.folder / "d.key").stat().st_mode & 0o777 == 0o600
    replayed = cluster.join(token, "e").ended()
    assert replayed["how"] == "ScaleOutFailed" and "used already or has expired" in replayed["reason"]
    refused = client.status(cluster.address).strangers_refused
    cluster.until(
        lambda: client.status(cluster.address).strangers_refused.get("used invite"), f"counted: {refused}"
    )
    for node in cluster.nodes:
        for secret in (token, token[16:60], *(_secret(file) for file in cluster.folder.glob("*.key"))):
            assert secret not in node.log.read_text(), "a secret in a log"
    cluster.finish()


def _secret(file: Path) -> str:
    return file.read_text().splitlines()[-1]


def test_who_was_let_in_by_an_invite_comes_back_with_the_same_token(cluster: Keyed) -> None:
    cluster.train()
    token = make(cluster.address, 60.0)
    first = cluster.join(token, "d")
    first.last("joined")
    first.kill()
    cluster.without("d", time.monotonic())
    cluster.join(token, "d").last("joined")
    cluster.finish()


def test_an_invite_survives_the_scheduler_and_is_known_to_who_joined_after_it_was_made(
    cluster: Keyed,
) -> None:
    a, b, _ = cluster.train()
    addresses = [str(node.last("joined")["address"]) for node in cluster.nodes]
    tokens = [make(address, 60.0) for address in addresses[:2]]
    d = cluster.join(tokens[0], "d")
    d.last("joined")
    a.kill()
    cluster.without("a", time.monotonic())
    at_d = Token(Token.parse(tokens[1]).keys, (str(d.last("joined")["address"]),)).encode()
    cluster.join(at_d, "e").last("joined")
    b.advance(5)
    cluster.finish()


def test_an_expired_invite_lets_nobody_in(cluster: Keyed) -> None:
    cluster.train()
    token = make(cluster.address, 1.0)
    time.sleep(1.2)
    ended = cluster.join(token, "d").ended()
    assert ended["how"] == "ScaleOutFailed" and "used already or has expired" in ended["reason"]
    cluster.finish()


@pytest.mark.slow
def test_a_node_with_a_key_that_nobody_allowed_is_refused_and_told_so(cluster: Keyed) -> None:
    cluster.train()
    cluster.new_key("d")
    ended = cluster.join(cluster.address, "d").ended()
    assert ended["how"] == "ScaleOutFailed" and "does not know this node's key" in ended["reason"]
    cluster.finish()


@pytest.mark.slow
def test_a_revoked_member_is_expelled_and_does_not_come_back(cluster: Keyed) -> None:
    _, b, c = cluster.train()
    at_s = time.monotonic()
    assert client.command_key(cluster.address, "revoke", cluster.public("c")).ok
    cluster.without("c", at_s)
    assert c.ended()["how"] == "NodeExpelled" and "revoked" in c.ended()["reason"]
    again = cluster.join(cluster.address, "c").ended()
    assert again["how"] == "ScaleOutFailed" and "revoked" in again["reason"]
    b.advance(5)
    cluster.finish()


@pytest.mark.slow
def test_a_key_is_rotated_as_docs_security_md_says(cluster: Keyed) -> None:
    """keygen, allow, restart with the new one, revoke the old one."""
    a, _, c = cluster.train()
    old, new = cluster.public("c"), cluster.new_key("c2")
    assert client.command_key(cluster.address, "allow", new).ok
    c.order(leave=True)
    assert c.exit_code() == 0
    cluster.join(cluster.address, "c2").last("joined")
    assert client.command_key(cluster.address, "revoke", old).ok
    a.advance(10)
    assert cluster.join(cluster.address, "c").ended()["how"] == "ScaleOutFailed"
    assert "revoked" in client.command_key(cluster.address, "allow", old).text
    cluster.finish()


def test_links_between_nodes_that_share_a_key_are_named_by_host_and_port(cluster: Keyed) -> None:
    cluster.grow(3, key=str(cluster.folder / "a.key"))
    rows = {row.node: row for row in client.status(cluster.address).members}
    a, b = (Endpoint.parse(rows[name].addresses[0]).place for name in "ab")
    assert client.change_link(a, b, connect=False).text == "the link a - b is closed"
    assert client.change_link(a, b, connect=True).text == "the link a - b is open"
    cluster.finish()


def test_who_holds_no_key_gets_no_status(cluster: Keyed, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster.train()
    monkeypatch.delenv("CHAOSNET_KEY")
    with pytest.raises(client.PeerUnreachable, match="wants to see a key"):
        client.status(Endpoint.parse(cluster.address).place, deadline_s=3.0)
    cluster.new_key("stranger")
    monkeypatch.setenv("CHAOSNET_KEY", str(cluster.folder / "stranger.key"))
    with pytest.raises(client.PeerUnreachable, match="does not know this node's key"):
        client.status(cluster.address, deadline_s=3.0)
    cluster.finish()


@pytest.mark.slow
def test_strangers_of_every_kind_are_refused_and_counted_and_leave_the_step_time_alone(
    cluster: Keyed,
) -> None:
    """250 connections a second for each kind: a thousand half-open ones are open at once."""
    a, b, _ = cluster.train()
    there, seen_at = Endpoint.parse(cluster.address), str(b.last("joined")["address"])
    used = used_invite(cluster.address, load(cluster.folder / "a.key"))
    quiet, counted = [median_step_s(a)], refused(seen_at)
    for number, (kind, reasons) in enumerate(REFUSED_AS.items()):
        attack = Attack(there, f"127.0.0.{2 + number}", used)
        attacking = threading.Thread(target=attack.go_on, args=(kind, RATE, QUIET_S))
        attacking.start()
        attacked = median_step_s(a)
        attacking.join()
        before, counted = counted, refused(seen_at)
        attack.stop()
        quiet.append(median_step_s(a))
        told = {"kind": kind, "quiet_s": quiet, "attacked_s": attacked, "refused": counted - before}
        print(json.dumps(told))
        assert attack.opened > 0.9 * RATE * QUIET_S, told
        assert sum((counted - before)[reason] for reason in reasons) >= strangers.FAILURE_BURST, told
        assert (counted - before).total() > 0.8 * attack.opened, told
        assert attacked < NOISE * max(quiet[-2:]), told
    assert not cluster.notices("node-failure", "link-failure", "expelled")
    cluster.leave()
    cluster.check_steps()


def refused(address: str) -> Counter[str]:
    """By all nodes, when all have told."""
    time.sleep(REPORT_S)
    return Counter(client.status(address).strangers_refused)


def median_step_s(node: Node) -> float:
    """Over the next seconds."""
    since_s = time.monotonic()
    time.sleep(QUIET_S)
    times = [record["at_s"] for record in node.told("step") if record["at_s"] >= since_s]
    return statistics.median(b - a for a, b in itertools.pairwise(times))


# --- the commands -----------------------------------------------------------------------------------------


def test_the_commands_invite_allow_and_revoke(
    cluster: Keyed, chaosnet: Callable[..., tuple[int, str, str]]
) -> None:
    cluster.train()
    code, token, err = chaosnet("invite", cluster.address, "--minutes", "2")
    assert code == 0 and "for 2 minutes" in err and len(Token.parse(token).seeds) == 3
    key = KeyPair.new().public
    assert chaosnet("allow", cluster.address, key)[:2] == (0, "this key may connect to every member\n")
    assert chaosnet("revoke", cluster.address, key)[0] == 0
    code, _, err = chaosnet("allow", cluster.address, key)
    assert code == 1 and "was revoked, which is for ever" in err
    code, _, err = chaosnet("allow", cluster.address, "letmein")
    assert code == 2 and "'letmein' is no key (expected a public key of 52" in err
    cluster.finish()
