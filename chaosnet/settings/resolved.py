"""How a node is started: arguments of Trainer, else what `chaosnet run` puts into the environment."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from ..callbacks import Callbacks
from ..discovery.remembered import recall
from ..extras import demand
from ..identity import completed, completed_peer, identity, is_loopback
from ..invite import Token, introduce, is_token
from ..node.endpoint import SECRET, Endpoint
from ..node.keys import KeyPair, load_allowed
from ..node.node_settings import NodeSettings
from ..protocols.errors import ConfigError
from .groups import Checkpoints, Cluster, said
from .table import CHECKPOINTS, MAX_LINKS, NODE, SETTINGS, STEP, Setting

DEFAULTS: dict[str, Any] = {"listen": "127.0.0.1:0", "join_patience_s": 10.0}
LAN_DEFAULTS: dict[str, Any] = {"listen": "0.0.0.0:0", "join_patience_s": 5.0}
"""With a cluster's name: others reach this node, and who is there is heard of within a second or two."""


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
    every: int = 100
    copies: str = "shard"
    kept: int = 3
    resume: bool = False
    resume_from: int | None = None


@dataclass(frozen=True, slots=True)
class StepSettings:
    """What only the script says: how the model is trained. The fields are those of the table (STEP)."""

    updates: tuple[str, ...] | None
    lr_scheduler_every: str | int
    max_grad_norm: float | None
    after_step: Callable[[], None] | None
    callbacks: Callbacks | None
    on_divergence: str
    seed: int
    same_rng: bool
    guard: str | None
    guard_factor: float
    quiet: bool
    log_format: str
    summary: bool


def step_settings(**given: Any) -> StepSettings:
    """Raises: ConfigError as `node_settings`."""
    return StepSettings(**_merged(STEP, given))


def checkpoint_settings(given: Checkpoints | None = None) -> CheckpointSettings | None:
    """None for no checkpoints. Raises: ConfigError as `node_settings`."""
    found = _merged(CHECKPOINTS, said(SETTINGS["checkpoints"].of(given) or Checkpoints()))
    folder, step = found["directory"], found["resume_from"]
    resuming = found["resume"] or step is not None
    if folder is None:
        if resuming:
            raise ConfigError("resume: no directory (expected the one that the checkpoints are in)")
        return None
    return CheckpointSettings(
        directory=os.fspath(folder),
        every=found["every"],
        copies=found["copies"],
        kept=found["kept"],
        resume=resuming,
        resume_from=step,
    )


def node_settings(given: Cluster | None = None) -> NodeSettings:
    """Merge what the script says with the environment. Raises: ConfigError that names the setting and its value.

    One who comes with an invite and has no key gets one.
    """
    found = _merged(NODE, said(SETTINGS["cluster"].of(given) or Cluster()))
    joined, new, insecure = found.pop("join"), found["new"], found.pop("insecure")
    found["cluster_name"] = found["cluster_name"] or ""
    for name, value in (LAN_DEFAULTS if found["cluster_name"] else DEFAULTS).items():
        found[name] = value if found[name] is None else found[name]
    key, allowed = found.pop("key"), found.pop("allowed_keys")
    if new and joined:
        raise ConfigError("new: beside join, which names a cluster to join (expected one of them)")
    invite = Token.parse(joined) if is_token(joined) else None
    keys = identity(key, insecure, make=invite is not None)
    seeds = invite.seeds if invite else tuple(completed(each, keys) for each in joined.split(",") if each)
    settings = NodeSettings(
        **found
        | {
            "name": found["name"] or f"{platform.node()[:40]}-{secrets.token_hex(3)}",
            "links": tuple(completed_peer(each, keys) for each in found["links"]),
            "peers_at": {name: completed(at, keys) for name, at in found["peers_at"].items()},
        },
        join=seeds,
        remembered=() if joined or new else _usable(recall(found["listen"]), keys),
        keys=keys,
        allowed_keys=load_allowed(Path(allowed)) if allowed else (),
        introduce=partial(introduce, invite, keys) if invite and keys else None,
    )
    _check_together(settings, insecure)
    return settings


def _merged(settings: tuple[Setting, ...], given: Mapping[str, Any]) -> dict[str, Any]:
    """What holds of these."""
    assert given.keys() <= {each.name for each in settings}, given.keys()
    return {each.name: each.of(given.get(each.name, each.signature_default)) for each in settings}


def _check_together(found: NodeSettings, insecure: bool) -> None:
    """Raises: ConfigError for what makes no sense together."""
    if found.cluster_name:
        demand("lan", f"cluster_name: to look for {found.cluster_name!r} on the local network")
    if not (found.keys or insecure or is_loopback(Endpoint.parse(found.listen).host)):
        named = "cluster_name, " if found.cluster_name else ""
        raise ConfigError(
            f"{named}listen: {found.listen!r} can be reached from other machines, and this node has no key, so "
            "whoever reaches it could join (make one with `chaosnet keygen`; or --insecure, on a network that you "
            "trust)"
        )
    if found.keys and found.probe == "iperf3":
        raise ConfigError(
            "probe: 'iperf3' opens a port to everybody while it measures, and this node has a key "
            "(expected 'in-band', or --insecure)"
        )
    if found.probe == "iperf3":
        demand("iperf3", "probe: 'iperf3'")
    if len(found.links) > MAX_LINKS:
        raise ConfigError(f"links: {len(found.links)} names (expected at most {MAX_LINKS})")
    if found.allowed_keys and not found.keys:
        raise ConfigError("allowed_keys: this node has no key of its own (make one with `chaosnet keygen`)")


def expect(holds: bool, what: str, value: object, expected: str) -> None:
    """Raises: ConfigError that names a setting which cannot work. It repeats no invite: who reads one can join."""
    if not holds:
        raise ConfigError(f"{what}: {SECRET.sub('...', repr(value))} (expected {expected})")


def _usable(addresses: tuple[str, ...], keys: KeyPair | None) -> tuple[str, ...]:
    """Those that this node can dial: with keys those that name one, without those that do not."""
    return tuple(each for each in addresses if bool(Endpoint.parse(each).key) == bool(keys))
