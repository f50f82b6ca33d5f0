"""Which node a command is for: that at the address given, else the one of this user that runs on this machine."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from ..options import Address, Expecting
from ..protocols.errors import ConfigError

Command = Callable[..., None]


def of_node(command: Command) -> Command:
    """Adds the argument ADDRESS, which may be left out."""

    def found(ctx: click.Context, param: click.Parameter, value: str | None) -> str:
        return value or of_this_machine(ctx)

    return click.argument("address", required=False, type=Address(), callback=found)(command)


def of_node_and(name: str, kind: Expecting, node: str = "ADDRESS") -> Callable[[Command], Command]:
    """Adds two arguments as one, `both`: the address of a node, which may be left out, and another.

    Args:
        name, node: What people call the other one, and the node's address.
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
        return address or of_this_machine(ctx), other

    return click.argument("both", nargs=-1, metavar=f"[{node}] {name}", callback=found)


def of_this_machine(ctx: click.Context) -> str:
    """Raises: click.UsageError if none runs here, or several do."""
    if ctx.resilient_parsing:
        return ""
    from ..local_nodes import the_local_node

    try:
        return the_local_node().address
    except ConfigError as error:
        raise click.UsageError(str(error), ctx) from None
