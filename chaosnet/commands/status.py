"""`chaosnet status`."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from .addresses import of_cluster
from .node_options import keyed

if TYPE_CHECKING:
    from ..protocols.status import Status


@click.command(short_help="Show a running cluster.")
@of_cluster
@keyed
@click.option("--json", "as_json", is_flag=True, help="As JSON; its schema is protocols/status.py.")
@click.option("--history", is_flag=True, help="With all events and steps that the scheduler has kept.")
@click.option(
    "--wide", is_flag=True, help="Wider than the terminal, if need be: with addresses and neighbours."
)
@click.option(
    "--watch", is_flag=True, help="With --json: a line twice a second; if the node dies, from another one."
)
def status(address: str, as_json: bool, history: bool, wide: bool, watch: bool) -> None:
    """Show members, links, step and recent events of the cluster that the node at ADDRESS belongs to.

    Default: one of yours that runs on this machine.
    """
    from .. import client

    if watch and not as_json:
        raise click.BadOptionUsage(
            "--watch", "without --json (expected both, or `chaosnet top`, which is for people)"
        )
    if not watch:
        found = client.status(address, history=history)
        click.echo(_json(found, indent=2)) if as_json else _show(found, wide)
        return
    try:
        _watch_json(address, history)
    except KeyboardInterrupt:
        return  # That is how watching ends.


def _json(found: Status, indent: int) -> str:
    """The status as JSON text. `indent`: spaces; -1: all on one line."""
    import msgspec

    from ..protocols.status import to_json

    return msgspec.json.format(to_json(found), indent=indent).decode()


def _show(found: Status, wide: bool) -> None:
    from ..terminal import tables
    from ..terminal.console import console

    where = console()
    if wide:
        where.width = tables.UNBOUNDED
    where.print(tables.cluster(found, wide))


def _watch_json(address: str, history: bool) -> None:
    from .. import client

    for found in client.watch(address, history=history):
        click.echo(_json(found, indent=-1))
