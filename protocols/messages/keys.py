"""Routed: whose keys may connect."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta

from .fields import MAX_NODES, Id, Message, Positive

MAX_KEYS = 2 * MAX_NODES  # Room for every node to change its key once.
Key = Annotated[str, Meta(pattern="^[a-z2-7]{51}[aq]$")]  # A public key: 32 bytes in base32.


class KeyringNews(Message, frozen=True, kw_only=True):
    """Member to all: this is new about keys. Or (`whole`) to whom it has just met: all that I know of them.

    `used`: an invite, and the key that it has let in. `invites`: open ones, and for how many seconds.
    """

    allowed: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    revoked: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    used: Annotated[tuple[tuple[Key, Key], ...], Meta(max_length=MAX_KEYS)] = ()
    invites: Annotated[
        tuple[tuple[Key, Annotated[float, Meta(gt=0, le=1e18)]], ...], Meta(max_length=MAX_KEYS)
    ] = ()
    whole: bool = False


class KeyCommand(Message, frozen=True, kw_only=True):
    """Client to a node: let this key in, throw it out, or let in whom `key`, an invite's, introduces."""

    verb: Literal["allow", "revoke", "invite"]
    key: Key
    asker: Id
    seconds: Positive = 0.0  # That an invite is good for.


class Introduction(Message, frozen=True, kw_only=True):
    """Holder of an invite to the scheduler: let `key` in for it."""

    invite: Key
    key: Key
    asker: Id
