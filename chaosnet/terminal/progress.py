"""Shows progress of long work: a bar on a terminal, a line now and then in a pipe, nothing for short work."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

Item = TypeVar("Item")
FIRST_S = 2.0  # Work that takes less shows nothing.
EVERY_S = 10.0  # From one line to the next, in a pipe.


def line(what: str, done: int, total: int, seconds: float) -> str:
    """The line for a pipe; the time left is guessed from the items that are done."""
    left = f", about {seconds / done * (total - done):,.0f} s left" if done else ""
    return f"{done:,} of {total:,} {what} in {seconds:,.0f} s{left}"


def followed(
    items: Iterable[Item],
    total: int,
    what: str,
    console: Console | None = None,
    first_s: float = FIRST_S,
    in_pipe: bool = True,
) -> Iterator[Item]:
    """The `items`, as they come. From `first_s` on, stderr (or `console`) shows how many have come.

    Args:
        what: What they are, for people: "runs".
        in_pipe: Print lines if it is no terminal? Else nothing is shown there.
    """
    shown, count, ended = console or Console(stderr=True, highlight=False), [0], threading.Event()
    began_s = time.monotonic()

    def in_lines() -> None:
        wait_s = first_s
        while not ended.wait(wait_s):
            text = line(what, count[0], total, time.monotonic() - began_s)
            shown.print(text, soft_wrap=True)
            wait_s = EVERY_S

    def as_bar() -> None:
        if ended.wait(first_s):
            return
        columns = (
            TextColumn(what),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=shown, transient=True) as bar:
            task = bar.add_task(what, total=total)
            while not ended.wait(0.1):
                bar.update(task, completed=count[0])

    if not (shown.is_terminal or in_pipe):
        yield from items
        return
    target = as_bar if shown.is_terminal else in_lines
    teller = threading.Thread(target=target, name="chaosnet-progress", daemon=True)
    teller.start()
    try:
        for item in items:
            count[0] += 1
            yield item
    finally:
        ended.set()
        teller.join()


@contextmanager
def going_on(what: str, console: Console | None = None, first_s: float = FIRST_S) -> Iterator[None]:
    """From `first_s` on, a terminal shows, below all other output, that `what` goes on, and for how long."""
    shown, ended = console or Console(highlight=False), threading.Event()
    # rich prints what goes to stdout and stderr to its own console meanwhile: a file would get nothing of it.
    if not (console or (shown.is_terminal and sys.stderr.isatty())):
        yield
        return

    def show() -> None:
        if ended.wait(first_s):
            return
        columns = SpinnerColumn(), TextColumn(what, markup=False), TimeElapsedColumn()
        with Progress(*columns, console=shown, transient=True) as progress:
            progress.add_task(what, total=None)
            ended.wait()

    teller = threading.Thread(target=show, name="chaosnet-progress", daemon=True)
    teller.start()
    try:
        yield
    finally:
        ended.set()
        teller.join()
