"""What changes a running cluster: `chaosnet leave`, `go-on`, `relayout`, `link`."""

from __future__ import annotations

import sys

import click

from ..protocols.errors import ConfigError
from ..protocols.messages import FASTEST
from ..settings.options import Address, PeerName
from .addresses import member_here, of_node, of_node_and
from .groups import Unsorted
from .node_options import keyed


@click.command(short_help="Have a node leave; the others go on.")
@of_node
@keyed
def leave(address: str) -> None:
    """Have the node at ADDRESS finish its step and leave; the others go on.

    Default: the node of yours that runs on this machine.
    """
    from .. import client

    click.echo(client.leave(address).text)


@click.command("go-on", short_help="Have a node that waits go on without those it lost.")
@of_node
@keyed
def go_on(address: str) -> None:
    """Tell the node at ADDRESS, which waits, that the members it cannot reach are gone for good.

    Default: the node of yours that runs on this machine.

    It goes on without them, with those it can reach. Be sure that they are dead, or that they wait, too: if they
    train on, one of the two parts is undone when they meet. Say it in one part of the cluster only.
    """
    from .. import client

    answer = client.go_on(address)
    click.echo(answer.text, err=not answer.ok)
    if not answer.ok:
        sys.exit(1)


@click.command(short_help="Have a cluster train in other pipelines.")
@click.argument("words", nargs=-1, metavar="[ADDRESS] LAYOUT")
@click.option(
    "--auto", is_flag=True, help="The fastest ones, in place of LAYOUT: what was asked for is taken back."
)
@keyed
@click.pass_context
def relayout(ctx: click.Context, words: tuple[str, ...], auto: bool) -> None:
    """Have the cluster of the node at ADDRESS (default: that of this machine) train in the pipelines LAYOUT.

    LAYOUT says how many stages each pipeline has: 3+1 (one of three, one of one), 4+2+1, 2x3 (two of three). It
    holds as long as there are members enough, and again when there are. Says who computes which layers, and from
    which step on.
    """
    from .. import client

    # An address has a colon, stages have none.
    given, layouts = [word for word in words if ":" in word], [word for word in words if ":" not in word]
    if auto == bool(layouts):
        raise click.UsageError("LAYOUT: expected stages of each pipeline, e.g. 2+2, or --auto, and not both")
    if len(given) > 1 or len(layouts) > 1:
        raise click.UsageError(f"{words[-1]!r} is one too many (expected [ADDRESS] LAYOUT)")
    try:
        address = Address().convert(given[0], None, ctx) if given else member_here(ctx)
    except click.BadParameter as error:
        raise click.UsageError(error.message, ctx) from None
    answer = client.relayout(address, FASTEST if auto else layouts[0])
    if not answer.ok:
        raise ConfigError(f"relayout {address}: {answer.text}")
    click.echo(answer.text)


@click.group(cls=Unsorted, short_help="Add or remove a link between two nodes.")
def link() -> None:
    """Add or remove a link between two members, while they train."""


@link.command("add", short_help="Open a link.")
@of_node_and("B", PeerName(), node="A")
@keyed
def link_add(both: tuple[str, str]) -> None:
    """Open a link between the node at A (HOST:PORT; default: that of this machine) and B (HOST:PORT or name)."""
    _change_link(*both, connect=True)


@link.command("remove", short_help="Close a link.")
@of_node_and("B", PeerName(), node="A")
@keyed
def link_remove(both: tuple[str, str]) -> None:
    """Close the link between the node at A (HOST:PORT; default: that of this machine) and B (HOST:PORT or name)."""
    _change_link(*both, connect=False)


def _change_link(a: str, b: str, connect: bool) -> None:
    from .. import client

    answer = client.change_link(a, b, connect)
    if not answer.ok:
        raise ConfigError(f"link {'add' if connect else 'remove'} {a} {b}: {answer.text}")
    click.echo(answer.text)
