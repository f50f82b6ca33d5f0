"""How commands are listed."""

from __future__ import annotations

import click


class Unsorted(click.Group):
    """Lists commands in the order in which they were added, not by name."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)
