"""Where tables go."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 160  # Of tables that go to a file or a pipe: nothing is cut off.


def console() -> Console:
    """Standard output, as wide as the terminal, if it is one."""
    # Names of nodes, folders and files may have what rich takes for markup, or for an emoji.
    found = Console(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found
