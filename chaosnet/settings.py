"""How a node is started: arguments of Trainer, else what `chaosnet run` puts into the environment."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar, get_args

from .protocols.errors import ConfigError
from .protocols.probing import Kind
from .scheduler.sync_plan import POLICIES

DEFAULT_LISTEN = "127.0.0.1:0"
DEFAULT_NEIGHBORS = 2  # Any one node or link may fail.
JOIN_PATIENCE_S = 10.0

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node's place in the world.

    Attributes:
        name: Unique in the cluster.
        listen: "HOST:PORT" to be reached at; port 0: any free one; host 0.0.0.0: all interfaces.
        join: Addresses of members; empty: found a cluster.
        neighbors: Number of links to ask for, if `links` names none.
        links: Ids or addresses of the members to link to.
        blocking: Join as the paper does, with sources that wait (DESIGN, section 5).
        join_patience_s: How long to knock where nobody answers (yet).
        policy: Sync plan: "single", "ring", "fapt".
        probe: How new links are measured: "in-band", "iperf3".
        found: With `join`: if none of these addresses leads into a cluster within `join_patience_s`, found one.
            For one node of a deployment only: two would found two clusters.
        rejoin: Come back by itself when the cluster has gone on without this node; else update() raises Expelled.
        peers_at: Where this node reaches others, by their names, if not where they say (a forwarded port);
            "" for nowhere.
    """

    name: str
    listen: str
    join: tuple[str, ...] = ()
    neighbors: int = DEFAULT_NEIGHBORS
    links: tuple[str, ...] = ()
    blocking: bool = False
    join_patience_s: float = JOIN_PATIENCE_S
    policy: str = "fapt"
    probe: Kind = "in-band"
    found: bool = False
    rejoin: bool = True
    peers_at: Mapping[str, str] = field(default_factory=dict)


def node_settings(
    join: str | None = None,
    listen: str | None = None,
    name: str | None = None,
    neighbors: int | None = None,
    links: tuple[str, ...] | None = None,
    blocking: bool | None = None,
    join_patience_s: float | None = None,
    policy: str | None = None,
    probe: str | None = None,
    found: bool | None = None,
    rejoin: bool | None = None,
) -> NodeSettings:
    """Merge arguments and environment. Raises: ConfigError that names the setting and its value."""
    return NodeSettings(
        name=_name(
            name or os.environ.get("CHAOSNET_NAME") or f"{platform.node()[:40]}-{secrets.token_hex(3)}"
        ),
        listen=_address("listen", listen or os.environ.get("CHAOSNET_LISTEN") or DEFAULT_LISTEN),
        join=_addresses("join", join if join is not None else os.environ.get("CHAOSNET_JOIN", "")),
        neighbors=_number("neighbors", neighbors, "CHAOSNET_NEIGHBORS", DEFAULT_NEIGHBORS, int, least=1),
        links=links if links is not None else _split(os.environ.get("CHAOSNET_LINKS", "")),
        blocking=_switch(blocking, "CHAOSNET_BLOCKING"),
        join_patience_s=_number(
            "join_patience_s", join_patience_s, "CHAOSNET_JOIN_PATIENCE_S", JOIN_PATIENCE_S, float, least=0
        ),
        policy=_choice("policy", policy or os.environ.get("CHAOSNET_POLICY") or "fapt", tuple(POLICIES)),
        probe=_choice("probe", probe or os.environ.get("CHAOSNET_PROBE") or "in-band", get_args(Kind)),
        found=_switch(found, "CHAOSNET_FOUND"),
        rejoin=_switch(rejoin, "CHAOSNET_REJOIN", default=True),
        peers_at=_peers_at(os.environ.get("CHAOSNET_PEERS_AT", "")),
    )


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _addresses(what: str, text: str) -> tuple[str, ...]:
    return tuple(_address(what, part) for part in _split(text))


def _peers_at(text: str) -> dict[str, str]:
    found = {}
    for part in _split(text):
        name, equals, address = part.rpartition("=")
        if not equals or not name:
            raise ConfigError(f"CHAOSNET_PEERS_AT: {part!r} (expected NAME=HOST:PORT, or NAME= for nowhere)")
        found[name] = _address("CHAOSNET_PEERS_AT", address) if address else ""
    return found


def _address(what: str, text: str) -> str:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdigit() or int(port) > 65535:
        problem = "has no port" if not colon else "is no address"
        raise ConfigError(f"{what}: {text!r} {problem} (expected HOST:PORT, e.g. 10.0.0.2:5555)")
    return text


def _name(text: str) -> str:
    if not 0 < len(text) <= 64 or "," in text or text == "*":
        raise ConfigError(f"name: {text!r} (expected 1 to 64 characters without a comma, not '*')")
    return text


def _number(
    what: str, given: float | None, variable: str, default: Number, kind: type[Number], least: Number
) -> Number:
    text = given if given is not None else os.environ.get(variable, default)
    try:
        value = kind(text)
    except ValueError:
        value = None
    if value is None or value < least:
        raise ConfigError(f"{what}: {text!r} (expected a number of at least {least})")
    return value


def _switch(given: bool | None, variable: str, default: bool = False) -> bool:
    if given is not None:
        return given
    text = os.environ.get(variable, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{variable}: {text!r} (expected 0 or 1)")
    return text == "1" if text else default


def _choice(what: str, text: str, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"{what}: {text!r} (expected one of {', '.join(choices)})")
