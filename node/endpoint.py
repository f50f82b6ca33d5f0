"""Where somebody listens, as people and messages write it: "[KEY@]HOST:PORT"."""

from __future__ import annotations

import asyncio
import ipaddress
import re
from dataclasses import dataclass, replace

from ..protocols.errors import ConfigError

ANY_HOST = ("", "*", "0.0.0.0", "::")
KEY = re.compile(r"[a-z2-7]{51}[aq]")  # 32 bytes in base32; as messages.Key.


SECRET = re.compile(r"[\w-]{80,}")  # No address or key has so many characters in a row; an invite has.


def shown(text: str) -> str:
    """The text as an error may repeat it: what may be an invite is left out, as anybody can join with it."""
    return repr(SECRET.sub("...", text))


@dataclass(frozen=True, slots=True)
class Endpoint:
    """`host` has no brackets. `key`: the public key of who listens there, "" if it uses none."""

    host: str
    port: int
    key: str = ""

    @classmethod
    def parse(cls, text: str) -> Endpoint:
        """The endpoint that `text` names. Raises: ConfigError for what is no address."""
        key, at, place = text.rpartition("@")
        host, colon, port = place.rpartition(":")
        bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
        if (
            not colon
            or not port.isascii()
            or not port.isdigit()
            or int(port) > 65535
            or (":" in host) != (bare != host)
        ):
            raise ConfigError(f"{shown(text)} is no address (expected HOST:PORT, e.g. 10.0.0.2:5555)")
        if at and not KEY.fullmatch(key):
            raise ConfigError(
                f"{shown(text)}: {shown(key)} is no key (expected KEY@HOST:PORT, KEY of 52 letters and digits)"
            )
        return cls(bare, int(port), key)

    @property
    def place(self) -> str:
        """Without the key: "HOST:PORT"."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.key}@{self.place}" if self.key else self.place

    def at(self, host: str) -> Endpoint:
        """The same port on another host."""
        return replace(self, host=host)

    def of(self, key: str) -> Endpoint:
        """The same address, held by `key`."""
        return replace(self, key=key)

    @property
    def dialable(self) -> bool:
        """Can this address be dialled?"""
        return bool(self.host and self.port)


def is_numeric(host: str) -> bool:
    """Is the host an address, and no name that has to be looked up?"""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


async def refuses(address: str, patience_s: float) -> bool:
    """Is the machine there, but refuses at `address`? libzmq does not tell why it could not connect."""
    try:
        end = Endpoint.parse(address)
        _, writer = await asyncio.wait_for(asyncio.open_connection(end.host, end.port), patience_s)
    except ConnectionRefusedError:
        return True
    except (ConfigError, OSError, TimeoutError, ValueError):  # ValueError: of a name that cannot be one.
        return False
    writer.close()
    return False
