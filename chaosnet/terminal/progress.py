"""Progress of long work: a bar on a terminal, a line now and then in a pipe, nothing for short work."""

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
FIRST_S = 2.0
EVERY_S = 10.0  # From one line to the next, where it is no terminal.


def line(what: str, done: int, total: int, seconds: float) -> str:
    """For a pipe. What is left is guessed from what is done."""
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
    """The `items` as they come. People read on stderr how many have, from `first_s` on.

    Args:
        what: They are, for people: "runs".
        in_pipe: Are there lines, where it is no terminal?
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
    """On a terminal people see, from `first_s` on, that `what` goes on, and since when, below what it prints."""
    shown, ended = console or Console(highlight=False), threading.Event()
    # Else what is printed would change places.
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
