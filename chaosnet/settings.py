"""How a node is started: arguments of Trainer, else what `chaosnet run` puts into the environment."""

from __future__ import annotations

import os
import platform
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar, get_args

from .identity import completed, completed_peer, identity, insecure_wanted, is_loopback
from .invite import Token, is_token
from .node.compression import COMPRESSIONS, Compression
from .node.endpoint import SECRET, Endpoint, shown
from .node.keys import KeyPair, load_allowed
from .protocols.errors import ConfigError
from .protocols.keyring import Keyring
from .protocols.probing import Kind
from .remembered import recall
from .scheduler.sync_plan import POLICIES

DEFAULT_LISTEN = "127.0.0.1:0"
DEFAULT_NEIGHBORS = 2  # Any one node or link may fail.
JOIN_PATIENCE_S = 10.0
DEFAULT_EVERY = 100
DEFAULT_CHECKPOINTS_KEPT = 2  # If the newest turns out to be damaged, there is another.
COPIES = ("shard", "whole")
MAX_LINKS = 64  # That a joiner may ask for (ScaleOutRequest).
PATH = "the path of a file or folder"

Number = TypeVar("Number", int, float)
Choice = TypeVar("Choice", bound=str)


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """One node's place in the world.

    Attributes:
        name: Unique in the cluster.
        listen: "HOST:PORT" to be reached at; port 0: any free one; host 0.0.0.0: all interfaces.
        join: Addresses of members; empty: found a cluster. May be given as an invite's token.
        neighbors: Number of links to ask for, if `links` names none.
        links: Ids or addresses of the members to link to.
        blocking: Join as the paper does, with sources that wait. Else they do if that suits the links.
        join_patience_s: How long to knock where nobody answers (yet).
        policy: Sync plan: "packed", "fapt", "single", "ring".
        probe: How new links are measured: "in-band", "iperf3".
        compression: Of gradients on the wire: "none", "bf16", "int8"; the same on all nodes.
        found: With `join`: if none of these addresses leads into a cluster within `join_patience_s`, found one. All
            nodes may be given it, and the same `join`, their own addresses among them: of those that reach each
            other one founds, the one that is named first.
        remembered: Without `join`: members of the cluster in which a node at `listen` was last. They are asked first.
        rejoin: Come back by itself when the cluster has gone on without this node; else update() raises Expelled.
        peers_at: Where this node reaches others, by their names, if not where they say (a forwarded port);
            "" for nowhere.
        keys: This node's key pair; None: no encryption, and everybody who reaches the port can join.
        allowed_keys: Public keys of others that may join, beside those that the cluster lets in.
        invite: The token that lets this node in.
    """

    name: str
    listen: str
    join: tuple[str, ...] = ()
    neighbors: int = DEFAULT_NEIGHBORS
    links: tuple[str, ...] = ()
    blocking: bool = False
    join_patience_s: float = JOIN_PATIENCE_S
    policy: str = "packed"
    probe: Kind = "in-band"
    compression: Compression = "none"
    found: bool = False
    remembered: tuple[str, ...] = ()
    rejoin: bool = True
    peers_at: Mapping[str, str] = field(default_factory=dict)
    keys: KeyPair | None = None
    allowed_keys: tuple[str, ...] = ()
    invite: Token | None = None

    @property
    def seeds(self) -> tuple[str, ...]:
        """Whom to ask for a cluster; nobody: found one."""
        return self.join or self.remembered

    def keyring(self) -> Keyring | None:
        """What this node knows of keys at its start."""
        named = (Endpoint.parse(address).key for address in (*self.seeds, *self.peers_at.values()) if address)
        return Keyring(self.keys.public, self.allowed_keys, filter(None, named)) if self.keys else None


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
    folder = _said(directory, "CHAOSNET_CHECKPOINT_DIR", "")
    expect(isinstance(folder, str | os.PathLike), "checkpoint_dir", folder, PATH)
    step = None
    if resume_from is not None or "CHAOSNET_RESUME_FROM" in os.environ:
        step = _number("resume_from", resume_from, "CHAOSNET_RESUME_FROM", 0, int)
    resuming = _switch(resume, "CHAOSNET_RESUME") or step is not None
    if not folder:
        if resuming:
            raise ConfigError("resume: no checkpoint_dir (expected the folder that the checkpoints are in)")
        return None
    return CheckpointSettings(
        directory=os.fspath(folder),
        every=_number("every", every, "CHAOSNET_EVERY", DEFAULT_EVERY, int, 1),
        copies=_choice("checkpoint_copies", _said(copies, "CHAOSNET_CHECKPOINT_COPIES", "shard"), COPIES),
        kept=_number("checkpoints_kept", kept, "CHAOSNET_CHECKPOINTS_KEPT", DEFAULT_CHECKPOINTS_KEPT, int, 1),
        resume=resuming,
        resume_from=step,
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
    found: bool | None = None,
    rejoin: bool | None = None,
    key: str | None = None,
    allowed_keys: str | None = None,
    insecure: bool | None = None,
    new: bool | None = None,
    compression: str | None = None,
) -> NodeSettings:
    """Merge arguments and environment. Raises: ConfigError that names the setting and its value.

    `key` and `allowed_keys` are files. Without `key` that of `chaosnet keygen` is taken, if there is one; one who
    comes with an invite and has none gets one. `insecure`: use no key, and listen wherever that is wanted. `new`:
    found a cluster, whatever is remembered of one.
    """
    some = links is None or (isinstance(links, tuple | list) and all(isinstance(each, str) for each in links))
    expect(some, "links", links, "names or addresses, e.g. ('n1', '10.0.0.2:5555')")
    expect(isinstance(join, str | None), "join", join, "addresses in one text, '10.0.0.2:5555,10.0.0.3:5555'")
    expect(insecure in (None, True, False), "insecure", insecure, "True or False")
    for what, file in (("key", key), ("allowed_keys", allowed_keys)):
        expect(isinstance(file, str | os.PathLike | None), what, file, PATH)
    joined = join if join is not None else os.environ.get("CHAOSNET_JOIN", "")
    invite = Token.parse(joined) if is_token(joined) else None
    keys = identity(key, insecure, make=invite is not None)
    named = links if links is not None else _split(os.environ.get("CHAOSNET_LINKS", ""))
    allowed = allowed_keys or os.environ.get("CHAOSNET_ALLOWED_KEYS")
    at = _address("listen", _said(listen, "CHAOSNET_LISTEN", DEFAULT_LISTEN))
    anew = _switch(new, "CHAOSNET_NEW")
    if anew and joined:
        raise ConfigError("new: beside join, which names a cluster to join (expected one of them)")
    return _checked(
        NodeSettings(
            name=_name(_said(name, "CHAOSNET_NAME", f"{platform.node()[:40]}-{secrets.token_hex(3)}")),
            listen=at,
            join=invite.seeds if invite else _completed(_addresses("join", joined), keys),
            neighbors=_number(
                "neighbors", neighbors, "CHAOSNET_NEIGHBORS", DEFAULT_NEIGHBORS, int, 1, MAX_LINKS
            ),
            links=tuple(completed_peer(each, keys) for each in named),
            blocking=_switch(blocking, "CHAOSNET_BLOCKING"),
            join_patience_s=_number(
                "join_patience_s", join_patience_s, "CHAOSNET_JOIN_PATIENCE_S", JOIN_PATIENCE_S, float
            ),
            policy=_choice("sync_policy", _said(policy, "CHAOSNET_POLICY", "packed"), tuple(POLICIES)),
            probe=_choice("probe", _said(probe, "CHAOSNET_PROBE", "in-band"), get_args(Kind)),
            compression=_choice(
                "compression", _said(compression, "CHAOSNET_COMPRESSION", "none"), COMPRESSIONS
            ),
            found=_switch(found, "CHAOSNET_FOUND"),
            remembered=() if joined or anew else _usable(recall(at), keys),
            rejoin=_switch(rejoin, "CHAOSNET_REJOIN", default=True),
            peers_at={
                name: completed(address, keys)
                for name, address in _peers_at(os.environ.get("CHAOSNET_PEERS_AT", "")).items()
            },
            keys=keys,
            allowed_keys=load_allowed(Path(allowed)) if allowed else (),
            invite=invite,
        ),
        bool(insecure) or insecure_wanted(),
    )


def check_step_settings(
    seed: object, chunk_bytes: object, max_grad_norm: object, after_step: object, guard_factor: object,
    same_rng: object,
) -> None:  # fmt: skip
    """What only the script says. Raises: ConfigError as `node_settings`."""
    expect(isinstance(seed, Integral), "seed", seed, "a whole number")
    counted = chunk_bytes is None or isinstance(chunk_bytes, Integral)
    expect(counted, "chunk_bytes", chunk_bytes, "a whole number")
    expect(isinstance(guard_factor, Real), "guard_factor", guard_factor, "a number above 1")
    clips = max_grad_norm is None or (isinstance(max_grad_norm, int | float) and max_grad_norm > 0)
    expect(clips, "max_grad_norm", max_grad_norm, "a number above 0")
    called = after_step is None or callable(after_step)
    expect(called, "after_step", after_step, "a function without arguments")
    expect(same_rng in (True, False), "same_rng", same_rng, "True or False")


def _checked(found: NodeSettings, insecure: bool) -> NodeSettings:
    """What only makes sense together."""
    if not (found.keys or insecure or is_loopback(Endpoint.parse(found.listen).host)):
        raise ConfigError(
            f"listen: {found.listen!r} can be reached from other machines, and this node has no key, so whoever "
            "reaches it could join (make one with `chaosnet keygen`; or --insecure, on a network that you trust)"
        )
    if found.keys and found.probe == "iperf3":
        raise ConfigError(
            "probe: 'iperf3' opens a port to everybody while it measures, and this node has a key "
            "(expected 'in-band', or --insecure)"
        )
    if len(found.links) > MAX_LINKS:
        raise ConfigError(f"links: {len(found.links)} names (expected at most {MAX_LINKS})")
    if found.allowed_keys and not found.keys:
        raise ConfigError("allowed_keys: this node has no key of its own (make one with `chaosnet keygen`)")
    return found


def expect(holds: bool, what: str, value: object, expected: str) -> None:
    """Raises: ConfigError that names a setting which cannot work. It repeats no invite: who reads one can join."""
    if not holds:
        raise ConfigError(f"{what}: {SECRET.sub('...', repr(value))} (expected {expected})")


def _said(given: object, variable: str, default: str) -> Any:
    """By the script, else by the environment."""
    return (os.environ.get(variable) or default) if given in (None, "") else given


def _split(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(",") if part.strip())


def _addresses(what: str, text: str) -> tuple[str, ...]:
    return tuple(_address(what, part) for part in _split(text))


def _completed(addresses: tuple[str, ...], keys: KeyPair | None) -> tuple[str, ...]:
    return tuple(completed(each, keys) for each in addresses)


def _usable(addresses: tuple[str, ...], keys: KeyPair | None) -> tuple[str, ...]:
    """Those that this node can dial: with keys those that name one, without those that do not."""
    return tuple(each for each in addresses if bool(Endpoint.parse(each).key) == bool(keys))


def _peers_at(text: str) -> dict[str, str]:
    found = {}
    for part in _split(text):
        name, equals, address = part.rpartition("=")
        if not equals or not name:
            raise ConfigError(f"CHAOSNET_PEERS_AT: {part!r} (expected NAME=HOST:PORT, or NAME= for nowhere)")
        found[name] = _address("CHAOSNET_PEERS_AT", address) if address else ""
    return found


def _address(what: str, text: str) -> str:
    expect(isinstance(text, str), what, text, "HOST:PORT, e.g. 10.0.0.2:5555")
    try:
        endpoint = Endpoint.parse(text)
    except ConfigError as error:
        raise ConfigError(f"{what}: {error}") from None
    if not endpoint.host:
        raise ConfigError(f"{what}: {shown(text)} has no host (expected HOST:PORT, e.g. 10.0.0.2:5555)")
    return text


def _name(text: str) -> str:
    fits = isinstance(text, str) and 0 < len(text) <= 64 and "," not in text and text != "*"
    expect(fits, "name", text, "1 to 64 characters without a comma, not '*'")
    return text


def _number(
    what: str, given: float | None, variable: str, default: Number, kind: type[Number],
    least: int = 0, most: int = 10**9,
) -> Number:  # fmt: skip
    text = given if given is not None else os.environ.get(variable, default)
    try:
        value = kind(text)
        fits = least <= value <= most and (given is None or value == given)
    except (TypeError, ValueError, OverflowError):
        fits = False
    expect(fits, what, text, f"a {'whole ' if kind is int else ''}number from {least} to {most}")
    return value


def _switch(given: bool | None, variable: str, default: bool = False) -> bool:
    if given is not None:
        expect(given in (True, False), variable.removeprefix("CHAOSNET_").lower(), given, "True or False")
        return given
    text = os.environ.get(variable, "")
    expect(text in ("", "0", "1"), variable, text, "0 or 1")
    return text == "1" if text else default


def _choice(what: str, text: str, choices: tuple[Choice, ...]) -> Choice:
    for choice in choices:
        if text == choice:
            return choice
    raise ConfigError(f"{what}: {text!r} (expected one of {', '.join(choices)})")
