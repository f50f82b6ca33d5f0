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
DEFAULT_EVERY = 100
DEFAULT_CHECKPOINTS_KEPT = 2  # If the newest turns out to be damaged, there is another.
COPIES = ("shard", "whole")

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
    peers_at: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class CheckpointSettings:
    """Where and when the state goes to disk.

    Attributes:
        directory: One that all nodes share, or (with "whole") one of each node's own.
        every: Steps from one checkpoint to the next.
        copies: "shard": each node writes a part. "whole": each node writes all of it.
        kept: Complete checkpoints that are not removed.
        resume: Found the cluster with the newest complete checkpoint, if there is any.
        resume_from: Or with that of this step.
    """

    directory: str
    every: int = DEFAULT_EVERY
    copies: str = "shard"
    kept: int = DEFAULT_CHECKPOINTS_KEPT
    resume: bool = False
    resume_from: int | None = None


def checkpoint_settings(
    directory: str | os.PathLike[str] | None = None,
    every: int | None = None,
    copies: str | None = None,
    kept: int | None = None,
    resume: bool | None = None,
    resume_from: int | None = None,
) -> CheckpointSettings | None:
    """Merge arguments and environment; None for no checkpoints. Raises: ConfigError as `node_settings`."""
    folder = os.fspath(directory or os.environ.get("CHAOSNET_CHECKPOINT_DIR", ""))
    step = _number("resume_from", resume_from, "CHAOSNET_RESUME_FROM", -1, int, least=-1)
    resuming = resume if resume is not None else os.environ.get("CHAOSNET_RESUME", "") == "1"
    if not folder:
        if resuming or step >= 0:
            raise ConfigError("resume: no checkpoint_dir (expected the folder that the checkpoints are in)")
        return None
    return CheckpointSettings(
        directory=folder,
        every=_number("every", every, "CHAOSNET_EVERY", DEFAULT_EVERY, int, least=1),
        copies=_choice(
            "checkpoint_copies", copies or os.environ.get("CHAOSNET_CHECKPOINT_COPIES") or "shard", COPIES
        ),
        kept=_number(
            "checkpoints_kept", kept, "CHAOSNET_CHECKPOINTS_KEPT", DEFAULT_CHECKPOINTS_KEPT, int, least=1
        ),
        resume=resuming or step >= 0,
        resume_from=step if step >= 0 else None,
    )


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
        blocking=blocking if blocking is not None else os.environ.get("CHAOSNET_BLOCKING", "") == "1",
        join_patience_s=_number(
            "join_patience_s", join_patience_s, "CHAOSNET_JOIN_PATIENCE_S", JOIN_PATIENCE_S, float, least=0
        ),
        policy=_choice("policy", policy or os.environ.get("CHAOSNET_POLICY") or "fapt", tuple(POLICIES)),
        probe=_choice("probe", probe or os.environ.get("CHAOSNET_PROBE") or "in-band", get_args(Kind)),
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


def _choice(what: str, text: str, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"{what}: {text!r} (expected one of {', '.join(choices)})")
