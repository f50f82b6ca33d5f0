"""Invites: a token lets one node in, once, for some minutes.

The token is one string: where members are, with their keys, and the secret key of the invite. Its holder connects
with that key, introduces a key of its own, and from then on connects with the latter.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from dataclasses import dataclass

import msgpack

from . import client
from .identity import completed, identity, is_loopback
from .node.endpoint import Endpoint
from .node.keys import KeyPair, key_bytes, key_text
from .node.transport.greeting import guest_name
from .protocols.errors import ConfigError, PeerUnreachable, ScaleOutFailed
from .protocols.messages import Introduction, StatusRequest

MARK = "chaosnet-invite-"
MAX_SEEDS = 4
MAX_CHARACTERS = 4000


@dataclass(frozen=True, slots=True)
class Token:
    """`seeds`: addresses of members, with keys."""

    keys: KeyPair
    seeds: tuple[str, ...]

    def encode(self) -> str:
        """The string to give to who is invited, and to nobody else."""
        places = [Endpoint.parse(seed) for seed in self.seeds[:MAX_SEEDS]]
        body = msgpack.packb([self.keys.secret, [[key_bytes(each.key), each.place] for each in places]])
        packed = body + zlib.crc32(body).to_bytes(4, "big")
        return MARK + base64.urlsafe_b64encode(packed).decode().rstrip("=")

    @classmethod
    def parse(cls, text: str) -> Token:
        """Raises: ConfigError, which does not repeat the token."""
        coded = text.strip().removeprefix(MARK)
        try:
            packed = base64.b64decode(coded + "=" * (-len(coded) % 4), altchars=b"-_", validate=True)
            if len(text) > MAX_CHARACTERS or zlib.crc32(packed[:-4]) != int.from_bytes(packed[-4:], "big"):
                raise ValueError
            secret, places = msgpack.unpackb(packed[:-4])
            seeds = tuple(str(Endpoint.parse(place).of(key_text(key))) for key, place in places)
            return cls(KeyPair.of(secret), seeds)
        except (ValueError, TypeError, binascii.Error, msgpack.UnpackException, ConfigError):
            reason = "join: this invite is damaged or not complete (expected all that `chaosnet invite` has printed)"
            raise ConfigError(reason) from None


def is_token(text: str) -> bool:
    """Does it look like one?"""
    return text.strip().startswith(MARK)


def make(address: str, seconds: float, at: str | None = None) -> str:
    """A new token, known to the cluster of the node at `address` and good for `seconds`.

    Args:
        at: Where its holder is to look for the cluster, if not where members say that they are.
    Raises: PeerUnreachable, or ConfigError if the cluster or this user has no keys.
    """
    own = identity()
    if own is None:
        raise ConfigError(
            "invite: this user has no key (expected the one that the cluster knows: --key FILE)"
        )
    asked, pair = completed(address, own), KeyPair.new()
    answer = client.command_key(asked, "invite", pair.public, seconds)
    if not answer.ok:
        raise ConfigError(f"invite: {answer.text}")
    seeds = (completed(at, own),) if at else _seeds(asked)
    return Token(pair, seeds).encode()


def _seeds(asked: str) -> tuple[str, ...]:
    """Where members say that they are, that at `asked` first. Loopback only if nobody is anywhere else."""
    members = [row.addresses for row in client.status(asked).active]
    members.sort(key=lambda addresses: asked not in addresses)
    told = dict.fromkeys([asked, *(address for addresses in members for address in addresses)])
    remote = [address for address in told if not is_loopback(Endpoint.parse(address).host)]
    return tuple(remote or told)[:MAX_SEEDS]


def introduce(token: Token, keys: KeyPair) -> None:
    """Have the cluster let `keys` in for the token. Returns at once if it has done so before.

    Raises: ScaleOutFailed if it refuses, or nobody is there.
    """
    name = guest_name(token.keys.public)
    reasons, refused = [], False
    for seed in token.seeds:
        try:
            answer = client.ask(
                seed,
                lambda me, node: Introduction(invite=token.keys.public, key=keys.public, asker=me),
                keys=token.keys,
                name=name,
            )
        except PeerUnreachable as error:
            reasons.append(str(error))
            if _knows(seed, keys):
                return
            continue
        if getattr(answer, "ok", False):
            return
        reasons.append(getattr(answer, "text", ""))
        refused = True
        break
    raise ScaleOutFailed(f"the invite does not let this node in: {'; '.join(reasons)}", refused)


def _knows(seed: str, keys: KeyPair) -> bool:
    """Does the cluster let us in without an invite? So a node can be started again with the same token."""
    try:
        client.ask(seed, lambda me, node: StatusRequest(asker=me), keys=keys)
    except PeerUnreachable:
        return False
    return True
