"""The identity of this machine's user in a cluster: the key file that the user's nodes and clients share."""

from __future__ import annotations

import os
from pathlib import Path

import click

from .node.endpoint import Endpoint
from .node.keys import KeyPair, is_there, load
from .node.keys import make as make_key
from .protocols import addresses
from .protocols.errors import ConfigError


def default_file() -> Path:
    """Where `chaosnet keygen` puts the key, and where it is looked for."""
    return Path(click.get_app_dir("chaosnet")) / "key"


def insecure_wanted() -> bool:
    """Does the environment say to do without keys?"""
    return os.environ.get("CHAOSNET_INSECURE", "") == "1"


def identity(key: str | None = None, insecure: bool | None = None, make: bool = False) -> KeyPair | None:
    """The key pair to use: that of the file `key` or CHAOSNET_KEY, else the user's own, if there is one.

    Args:
        insecure: Use none, whatever files there are. Default: CHAOSNET_INSECURE.
        make: If there is no file, make one.
    Raises: ConfigError for a file that cannot be used.
    """
    named = key or os.environ.get("CHAOSNET_KEY")
    insecure = insecure_wanted() if insecure is None else insecure
    if insecure and named:
        raise ConfigError(f"key: {named!r} beside --insecure, which uses none (expected one of them)")
    if insecure:
        return None
    file = Path(named) if named else default_file()
    if make:
        make_key(file)
    return load(file) if named or is_there(file) else None


def completed(address: str, keys: KeyPair | None) -> str:
    """An address without a key is one of this user's own nodes: it holds the same key, or is not connected to."""
    if keys is None or not address or Endpoint.parse(address).key:
        return address
    return str(Endpoint.parse(address).of(keys.public))


def completed_peer(peer: str, keys: KeyPair | None) -> str:
    """The same for what may be a node's name instead: that stays as it is."""
    try:
        return completed(peer, keys)
    except ConfigError:
        return peer


def is_loopback(host: str) -> bool:
    """Can only this machine reach it?"""
    return host == "localhost" or addresses.is_loopback(host)
