"""What strangers cost a cluster that trains: the time of its steps without and with each kind, in one run.

Three processes with keys train. An attacker, at addresses of its own on loopback (127.0.0.2 and on, which Linux
has), opens connections to the one that holds the scheduler, so many a second, and keeps the last 1,000 open.
Blocks without and with an attack take turns:

    ratio    mean time of a step in a block with the attack by that in the block before it; median over all turns
    noise    the same of a block without an attack, by the block before it
    refused  what `chaosnet status` counted in the meantime, by reason

All share the cores of one machine. So that the attacker's own work counts for little, it runs at nice 19, and nodes
spend most of a step asleep, as they would spend it computing.
"""

from __future__ import annotations

import os
import socket
import statistics
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import click
import zmq

from chaosnet import client
from chaosnet.invite import Token, introduce

from ..node.endpoint import Endpoint
from ..node.keys import KeyPair, save
from ..node.transport import curve
from ..protocols.codec import encode
from ..protocols.messages import Hello
from ..settings.options import Amount, Whole
from ..terminal.outputs import json_option, write_json
from .processes import Pipe, Workers, how_far, stop, train_until_stopped

NODES = 3
KEPT = 1000  # Connections of an attack that are open at once, unless the node ends them.
KEPT_SOCKETS = 100  # Of those that speak ZMTP: libzmq has a limit of 1,023, and they are refused at once.
PAUSE_S = 0.02
MAX_READINGS = 8  # Of a count that should come to rest.
REPORT_S = 1.5  # Until all nodes have told the scheduler what they refused.
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"CURVE".ljust(20, b"\0") + bytes(32)  # ZMTP 3.0
LARGE_COMMAND = b"\x06" + (1 << 40).to_bytes(8, "big")  # And its announced size, in bytes.


class Closable(Protocol):
    """A connection of an attacker."""

    def close(self) -> None: ...


class Attack:
    """Connections of one kind to `target` from the local address `source`. `used`: an invite that was used."""

    def __init__(self, target: Endpoint, source: str, used: KeyPair) -> None:
        self.target, self.source = target, source
        self.own, self.used = KeyPair.new(), used
        self.opened = 0
        self._kept: deque[Closable] = deque()
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def go_on(self, kind: str, rate: float, seconds: float) -> None:
        """Open `rate` connections a second for so long."""
        began_s, first = time.monotonic(), self.opened
        while (now_s := time.monotonic()) < began_s + seconds:
            while self.opened - first < rate * (now_s - began_s):
                self._kept.append(KINDS[kind](self))
                self.opened += 1
                if len(self._kept) > (KEPT if kind in RAW else KEPT_SOCKETS):
                    self._kept.popleft().close()
            time.sleep(0.005)

    def stop(self) -> None:
        """Close what is open."""
        while self._kept:
            self._kept.popleft().close()

    def no_key(self) -> Closable:
        """ZMTP without encryption, and a Hello as nodes without keys say it."""
        return self._speak(None)

    def wrong_key(self) -> Closable:
        """CURVE, with a key that nobody allowed."""
        return self._speak(self.own)

    def replayed_invite(self) -> Closable:
        """CURVE, with the key of an invite that has let somebody in."""
        return self._speak(self.used)

    def oversized_frame(self) -> Closable:
        """A greeting as CURVE's, then a handshake command of 2^40 bytes."""
        connection = self.half_open()
        with suppress(OSError):  # Hung up on already.
            connection.sendall(GREETING + LARGE_COMMAND + bytes(100))
        return connection

    def half_open(self) -> socket.socket:
        """A TCP connection, and no word over it."""
        connection = socket.create_connection((self.target.host, self.target.port), 5.0, (self.source, 0))
        connection.setblocking(False)
        return connection

    def _speak(self, keys: KeyPair | None) -> Closable:
        dealer = self._context.socket(zmq.DEALER)
        dealer.linger, dealer.routing_id = 0, b"c" + os.urandom(8)
        dealer.set(zmq.RECONNECT_IVL, -1)
        if keys:
            curve.dial(dealer, keys, self.target.key)
        dealer.connect(f"tcp://{self.source}:0;{self.target.place}")
        with suppress(zmq.Again):  # Hung up on already.
            hello = encode(Hello(node="stranger", address="", incarnation="1"))
            dealer.send_multipart([b"", hello], zmq.NOBLOCK)
        return dealer


KINDS: dict[str, Callable[[Attack], Closable]] = {
    "no key": Attack.no_key,
    "wrong key": Attack.wrong_key,
    "replayed invite": Attack.replayed_invite,
    "oversized frame": Attack.oversized_frame,
    "half-open": Attack.half_open,
}
RAW = ("oversized frame", "half-open")  # Plain TCP connections.


def used_invite(address: str, keys: KeyPair) -> KeyPair:
    """One that the cluster at `address` has let somebody in for. `keys`: a member's."""
    invite = KeyPair.new()
    answer = client.command_key(address, "invite", invite.public, 600.0, keys=keys)
    assert answer.ok, answer.text
    introduce(Token(invite, (address,)), KeyPair.new())
    return invite


def _node(pipe: Pipe, name: str, join: str, key: str, allowed: str) -> None:
    """A member that trains until it is told "stop"."""
    from chaosnet.settings.groups import Cluster

    cluster = Cluster(join=join, name=name, key=key, allowed_keys=allowed)
    train_until_stopped(pipe, cluster, PAUSE_S)


def _attacker(pipe: Pipe, rate: float, seconds: float) -> None:
    """Carries out one attack after another: told which and on whom, until it is told None."""
    os.nice(19)
    while order := pipe.receive():
        kind, target, source, used = order
        attack = Attack(target, source, used)
        attack.go_on(kind, rate, seconds)
        pipe.send(attack.opened)
        attack.stop()


class _Training:
    """The cluster, and the attacker."""

    def __init__(self, workers: Workers, folder: Path, rate: float, seconds: float) -> None:
        self.workers, self.seconds = workers, seconds
        self.names = [f"node{index}" for index in range(NODES)]
        pairs = {name: KeyPair.new() for name in self.names}
        for name, pair in pairs.items():
            save(pair, folder / name)
        (folder / "allowed").write_text("".join(f"{pair.public}\n" for pair in pairs.values()))
        self.addresses: list[str] = []
        for name in self.names:
            join = ",".join(self.addresses[:1])
            workers.start(name, _node, name, join, str(folder / name), str(folder / "allowed"))
            self.addresses.append(workers.receive(name)[0])
        self.keys = pairs[self.names[0]]
        self.used = used_invite(self.addresses[0], self.keys)
        workers.start("attacker", _attacker, rate, seconds)

    def refused(self) -> Counter[str]:
        """So far. Nodes that are busy tell it late: once it grows no more."""
        told: list[Counter[str]] = []
        while len(told) < MAX_READINGS and (len(told) < 2 or told[-1] != told[-2]):
            time.sleep(REPORT_S)
            told.append(Counter(client.status(self.addresses[1], keys=self.keys).strangers_refused))
        return told[-1]

    def block(self, kind: str = "", source: str = "") -> tuple[float, int]:
        """Let so much time pass, under attack or not. Returns: mean time of a step, connections opened."""
        target = Endpoint.parse(self.addresses[0])
        opened, (first, began_s) = 0, how_far(self.workers, self.names[0])
        if kind:
            self.workers.tell("attacker", (kind, target, source, self.used))
            opened = self.workers.receive("attacker")
        else:
            time.sleep(self.seconds)
        last, ended_s = how_far(self.workers, self.names[0])
        return (ended_s - began_s) / (last - first), opened

    def stop(self) -> None:
        self.workers.tell("attacker", None)
        self.workers.receive("attacker")
        stop(self.workers, self.names)


def measure(rate: float, seconds: float, rounds: int) -> dict[str, Any]:
    """`rounds` turns of each kind of attack. Times in s."""
    found: dict[str, dict[str, Any]] = {
        kind: {"without_s": [], "with_s": [], "opened": 0, "refused": Counter()} for kind in ("none", *KINDS)
    }
    with tempfile.TemporaryDirectory() as folder, Workers() as workers:
        training = _Training(workers, Path(folder), rate, seconds)
        training.block()  # To warm up.
        before = training.refused()
        for turn in range(rounds):
            for number, (kind, row) in enumerate(found.items()):
                row["without_s"].append(training.block()[0])
                source = f"127.0.0.{2 + turn * len(found) + number}"
                with_s, opened = training.block("" if kind == "none" else kind, source)
                row["with_s"].append(with_s)
                row["opened"] += opened
                after = training.refused()
                row["refused"] += after - before
                before = after
        training.stop()
    for row in found.values():
        row["ratio"] = statistics.median(b / a for a, b in zip(row["without_s"], row["with_s"], strict=True))
    noise = found.pop("none")
    return {"rate_per_s": rate, "seconds": seconds, "noise": noise, "attacks": found}


@click.command("strangers")
@click.option(
    "--rate", type=Amount(1, 10_000), default=250.0, show_default=True, help="Connections a second."
)
@click.option("--seconds", type=Amount(0.5, 3600), default=4.0, show_default=True, help="Of a block.")
@click.option(
    "--rounds", type=Whole(1, 40), default=5, show_default=True, help="Blocks with each kind of attack."
)
@json_option
def strangers_command(rate: float, seconds: float, rounds: int, json_file: Path | None) -> None:
    """Steps of a cluster that trains with and without strangers at its door, in one run."""
    found = measure(rate, seconds, rounds)
    for kind, row in [("nobody (noise)", found["noise"]), *found["attacks"].items()]:
        without_ms, with_ms = (1e3 * statistics.median(row[key]) for key in ("without_s", "with_s"))
        pairs = [b / a for a, b in zip(row["without_s"], row["with_s"], strict=True)]
        click.echo(
            f"{kind:16}{without_ms:6.1f} ms a step without, {with_ms:6.1f} ms with: {row['ratio']:.3f} "
            f"({min(pairs):.3f} to {max(pairs):.3f}); {row['opened']} opened"
            + "".join(f", {count} {reason}" for reason, count in row["refused"].most_common())
        )
    write_json(json_file, found)
