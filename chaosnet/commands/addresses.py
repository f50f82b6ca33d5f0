"""Which node a command is for: the one at the given address, else this user's node on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from ..protocols.errors import ConfigError
from ..settings.options import Address, Expecting

if TYPE_CHECKING:
    from ..discovery.local_nodes import LocalNode

Command = Callable[..., None]


def of_node(command: Command) -> Command:
    """Adds the argument ADDRESS, which may be left out where one node runs here."""
    return _argument(of_this_machine)(command)


def of_cluster(command: Command) -> Command:
    """Adds the argument ADDRESS, which may be left out where the nodes that run here are of one cluster."""
    return _argument(member_here)(command)


def _argument(here: Callable[[click.Context], str]) -> Callable[[Command], Command]:
    def found(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
        return value or here(ctx)

    return click.argument("address", required=False, type=Address(), callback=found)


def of_node_and(name: str, kind: Expecting, node: str = "ADDRESS") -> Callable[[Command], Command]:
    """Adds two arguments as one, `both`: the address of a node, which may be left out, and another.

    Args:
        name: What help and errors call the other argument.
        node: What they call the node's. "ADDRESS" means its cluster, so that by default any member here will do.
    """

    def found(ctx: click.Context, param: click.Parameter, values: tuple[str, ...]) -> tuple[str, Any]:
        if not values:
            raise click.UsageError(f"{name}: missing (expected {kind.expected})", ctx)
        if len(values) > 2:
            raise click.UsageError(f"{values[2]!r} is one too many (expected [{node}] {name})", ctx)
        try:
            other = kind.convert(values[-1], None, ctx)
            address = Address().convert(values[0], None, ctx) if len(values) == 2 else ""
        except click.BadParameter as error:
            raise click.UsageError(error.message, ctx) from None
        here = member_here if node == "ADDRESS" else of_this_machine
        return address or here(ctx), other

    return click.argument("both", nargs=-1, metavar=f"[{node}] {name}", callback=found)


def of_this_machine(ctx: click.Context) -> str:
    """The node that runs here. Raises: click.UsageError if none does, or several do."""
    from ..discovery.local_nodes import the_local_node

    return _address(ctx, the_local_node)


def member_here(ctx: click.Context) -> str:
    """A member of the cluster that nodes here are in. Raises: click.UsageError if there is none, or several."""
    from ..discovery.local_nodes import a_local_member

    return _address(ctx, a_local_member)


def _address(ctx: click.Context, found: Callable[[], LocalNode]) -> str:
    if ctx.resilient_parsing:
        return ""
    try:
        return found().address
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from None
