"""`chaosnet top`."""

from __future__ import annotations

import sys

import click

from ..extras import demand
from ..protocols.errors import PeerUnreachable
from .addresses import of_cluster
from .node_options import keyed


@click.command(short_help="Watch a running cluster.")
@of_cluster
@keyed
def top(address: str) -> None:
    """Watch the cluster that the node at ADDRESS belongs to: members, links, whom all wait for, metrics, events.

    Default: one of yours that runs on this machine. It goes on when that node dies, with another one. The key
    ? shows what keys do, q quits.
    """
    demand("top", "chaosnet top")
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise click.UsageError("this is no terminal (expected one; chaosnet status prints the same once)")
    from .. import client

    first = client.status(address, history=True)
    from ..terminal.top_app import TERMINATED, Top

    app = Top(first, lambda hear: client.watch(address, on_silence=hear))
    reason = app.run()
    if app.return_code == TERMINATED:
        sys.exit(TERMINATED)
    if app.return_code:
        raise PeerUnreachable(reason or "the screen was closed")
