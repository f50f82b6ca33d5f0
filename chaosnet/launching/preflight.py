"""Checks of a node before its script, and with it torch, is loaded, which takes seconds."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from pathlib import Path

from ..extras import demand
from ..identity import identity
from ..node.endpoint import ANY_HOST, Endpoint
from ..node.keys import load_allowed
from ..node.state.checkpoint import check_writable
from ..protocols.errors import CannotListen


def check_environment() -> None:
    """Look at the files and the port that a Trainer without settings of its own takes. Raises: ConfigError.

    That a node which others reach has no key is left to the Trainer: the script may give it one.
    """
    identity()
    if cluster := os.environ.get("CHAOSNET_CLUSTER"):
        demand("lan", f"--cluster: to look for {cluster!r} on the local network")
    if allowed := os.environ.get("CHAOSNET_ALLOWED_KEYS"):
        load_allowed(Path(allowed))
    if folder := os.environ.get("CHAOSNET_CHECKPOINT_DIR"):
        check_writable(Path(folder))
    if listen := os.environ.get("CHAOSNET_LISTEN"):
        check_port(listen)


def check_port(listen: str) -> None:
    """Raises: CannotListen if nobody can listen there just now. Names are left to the node itself."""
    here = Endpoint.parse(listen)
    host = {"localhost": "127.0.0.1"}.get(here.host, here.host)
    host = "0.0.0.0" if host in ANY_HOST and host != "::" else host
    with contextlib.suppress(ValueError):
        family = socket.AF_INET6 if ipaddress.ip_address(host).version == 6 else socket.AF_INET
        with socket.socket(family) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # As the node will.
            try:
                trial.bind((host, here.port))
            except OSError as error:
                raise CannotListen(
                    f"--listen: cannot listen on {listen!r}: {error.strerror} (expected an address of this machine "
                    "with a free port; port 0 takes any)"
                ) from None
