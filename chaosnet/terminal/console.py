"""The console that tables are printed to."""

from __future__ import annotations

from rich.console import Console

PLAIN_WIDTH = 160  # Of tables that go to a file or a pipe: nothing is cut off.


def console() -> Console:
    """Standard output, as wide as its terminal; PLAIN_WIDTH if it is none."""
    # Names of nodes, folders and files may contain what rich takes for markup, or for an emoji.
    found = Console(highlight=False, markup=False, emoji=False)
    if not found.is_terminal:
        found.width = PLAIN_WIDTH
    return found
