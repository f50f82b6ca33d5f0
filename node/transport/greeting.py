"""The first words on a link: what a node says of itself, and whether the other end fits."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

import zmq

from ...protocols.codec import decode
from ...protocols.errors import MalformedMessage, VersionMismatch
from ...protocols.events import ITSELF
from ...protocols.keyring import Keyring, KeyVerdict
from ...protocols.messages import Envelope, Hello, Introduction
from .. import clock
from ..endpoint import ANY_HOST, Endpoint
from ..keys import KeyPair
from .link import Conn
from .local import this_machine

MAX_WORDS_BYTES = 4096
"""Of a Hello or an introduction: to unpack what a stranger sends takes many times its size in memory."""


PADDING = bytes(3000)  # Two packets of Ethernet's 1500 bytes.


def new_incarnation() -> str:
    return secrets.token_hex(8)


@dataclass(eq=False, slots=True)
class Identity:
    """What this node says of itself, and whom it lets have a link."""

    node: str
    client: bool
    keys: KeyPair | None
    keyring: Keyring | None
    cluster: str = ""  # Its name, once known: nodes of two named clusters refuse each other.
    address: str = ""  # Where we can be dialled.
    # Tells a restarted process from the one before it.
    incarnation: str = field(default_factory=new_incarnation)
    machine: str = field(default_factory=this_machine)
    is_guest: bool = False  # `cluster` is one that this node has dialled, and was not let into yet.

    def hello(self, check: bool = False) -> Hello:
        return Hello(
            node=self.node,
            address=self.address,
            incarnation=self.incarnation,
            cluster=self.cluster,
            client=self.client,
            check=check,
            machine=self.machine,
            padding=PADDING,
        )

    def refusal(self, hello: Hello) -> str:
        """Why this node and that of `hello` cannot have a link, "" if they can. Both ends find the same."""
        if hello.incarnation == self.incarnation:
            return ITSELF
        if hello.node == self.node:
            return f"another node is called {self.node!r} too"
        if hello.cluster and self.cluster and hello.cluster != self.cluster:
            return f"it belongs to cluster {hello.cluster!r}, this node to {self.cluster!r}"
        return ""

    def verdict(self, key: str) -> KeyVerdict:
        """What the keyring says of `key` now. There must be one."""
        assert self.keyring
        return self.keyring.verdict(key, clock.now_s())

    def invited(self, key: str) -> bool:
        """Is `key`, of a connection that was let in, an invite's? It is if it is no member's. "" is nobody's."""
        return bool(key) and self.verdict(key) is not KeyVerdict.MEMBER

    def uninvited(self, hello: Hello, key: str) -> str:
        """What is wrong with a Hello that shows an invite's key; "" for nothing. Its name must be `guest_name`."""
        if not self.invited(key) or (hello.client and hello.node == guest_name(key)):
            return ""
        return "an invite's holder can only introduce itself"


def advertised(address: str, seen: str, key: str) -> str:
    """Where a dialer can be dialled: `address`, as it says, with the key that it has proved to hold.

    seen: The host that its connection comes from, for an address that names none.
    """
    if not address:
        return ""
    named = Endpoint.parse(address).of(key)
    return str(named.at(seen.removeprefix("::ffff:")) if named.host in ANY_HOST else named)


def guest_name(invite: str) -> str:
    """What the holder of an invite calls itself."""
    return f"invite-{invite[:20]}"


def introduces(conn: Conn, body: bytes) -> bool:
    """Is this the one message that the holder of an invite may send: an Introduction, over control, of itself?"""
    if len(body) > MAX_WORDS_BYTES:
        return False
    try:
        envelope = decode(body)
    except (MalformedMessage, VersionMismatch):
        return False
    guest = guest_name(conn.link.key)
    match envelope:
        case Envelope(source=source, body=Introduction(invite=conn.link.key, asker=asker)) if not conn.bulk:
            return source == asker == guest
    return False


def parse_hello(frames: list[zmq.Frame]) -> Hello:
    """The first item of a connection. Raises: MalformedMessage if it is no Hello, VersionMismatch."""
    if len(frames) != 2 or len(frames[0]):
        raise MalformedMessage("the first item is no Hello")
    if len(frames[1]) > MAX_WORDS_BYTES:
        raise MalformedMessage(
            f"the first item has {len(frames[1])} bytes (at most {MAX_WORDS_BYTES} expected)"
        )
    message = decode(frames[1].buffer)
    if not isinstance(message, Hello):
        raise MalformedMessage(f"the first item is a {type(message).__name__}, no Hello")
    return message
