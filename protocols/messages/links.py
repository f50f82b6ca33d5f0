"""Links: how they begin, whether they carry, what becomes of them, and who asks for one (Fig. 4c and d)."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .fields import MAX_NODES, Address, Addresses, Bytes, Count, Id, Message, Positive, Real, Text, ViewKey

# --- link-local: handshake ---


class Hello(Message, frozen=True, kw_only=True):
    """Dialer to acceptor and back: this is who I am."""

    node: Id
    address: Address
    incarnation: Annotated[str, Meta(max_length=64)]
    cluster: Annotated[str, Meta(max_length=64)] = ""
    client: bool = False
    check: bool = False  # Only to see who answers here: no link follows.
    # Equal on one machine (and in one network namespace) only.
    machine: Annotated[str, Meta(max_length=64)] = ""
    # So that it takes packets of full size: where only small ones get through, no link opens.
    padding: Annotated[bytes, Meta(max_length=3072)] = b""


class Bye(Message, frozen=True, kw_only=True):
    """To a peer: I close this connection on purpose; it is no failure.

    `final`: nor will I take another. `spare`: we have another, which goes on.
    """

    reason: Text = ""
    final: bool = False
    spare: bool = False


class Lend(Message, frozen=True, kw_only=True):
    """To a peer on this machine: map this memory of mine (shared_memory.py); I will lay payloads in it."""

    descriptor: Count


class Mapped(Message, frozen=True, kw_only=True):
    """And back: I have it."""


class Laid(Message, frozen=True, kw_only=True):
    """To that peer, in place of a bulk item: its header, and where its payload lies."""

    header: Bytes
    first: Count  # Block.
    size: Count


# --- link-local: liveness ---


class Ping(Message, frozen=True, kw_only=True):
    """To a peer: are you there? `stall_s`: how long my loop was recently held up; be patient that much."""

    sent_s: Real
    stall_s: Positive = 0.0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to a Ping, with its time stamp."""

    sent_s: Real
    stall_s: Positive = 0.0


# --- link-local: can a joiner be dialled? ---


class DialBack(Message, frozen=True, kw_only=True):
    """Joiner to a neighbour: can you reach me at any of these?"""

    addresses: Addresses


class DialBackReply(Message, frozen=True, kw_only=True):
    """Neighbour to joiner: at this one, or ("") at none, for this reason."""

    reached: Address
    reason: Text = ""


# --- routed, but for Losses: what becomes of links ---


class LinkNews(Message, frozen=True, kw_only=True):
    """Either end to all: the connection to `peer` is open, silent or closed. `version` counts up per reporter.

    `key`: the view that the reporter is a member of, (0, 0) if of none or if somebody repeats its news.
    `life` and `peer_life` tell a node from an earlier one of the same id; 0: not known.
    """

    reporter: Id
    peer: Id
    version: Count
    state: Literal["open", "silent", "closed"]
    key: ViewKey = (0, 0)
    life: Count = 0
    peer_life: Count = 0


class Losses(Message, frozen=True, kw_only=True):
    """Link-local, when a link opens, and in answer: news that you may have missed while we were apart.

    `left`: who has said farewell, in which life, the last view that it acted in, and whether its script had failed.
    """

    news: Annotated[tuple[LinkNews, ...], Meta(max_length=5 * MAX_NODES)]
    left: Annotated[tuple[tuple[Id, Count, ViewKey, bool], ...], Meta(max_length=MAX_NODES)] = ()


class Echo(Message, frozen=True, kw_only=True):
    """Around a silent link to its other end: are you alive? `asked_s`: the asker's clock."""

    node: Id
    asked_s: Real


class EchoReply(Message, frozen=True, kw_only=True):
    """Around the link as well: I am, so it is the link that is dead."""

    node: Id
    asked_s: Real


# --- routed: connect-link, disconnect-link (Fig. 4c and d) ---


class ConnectLinkRequest(Message, frozen=True, kw_only=True):
    """To the scheduler: open a link between `a` and `b` (ids or addresses).

    `healed`: it was lost, and the asker, one of its ends, reaches the other again.
    """

    a: Address
    b: Address
    asker: Id
    healed: bool = False


class DisconnectLinkRequest(Message, frozen=True, kw_only=True):
    """To the scheduler: close the link between `a` and `b` (ids or addresses)."""

    a: Address
    b: Address
    asker: Id
