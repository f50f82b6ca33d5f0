"""Shows the output of several nodes on one screen: each line after its node's name, an event that all print once."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import IO, TextIO

# How chaosnet/script/teller.py prints what happens in the cluster; and the fields, if it prints JSON.
NOTICE = re.compile(r"\[chaosnet\] step \d+: ")
EVENT = {"step": int, "event": str, "subject": str, "detail": str}
EVENTS_KEPT = 1_000
LAST_WORDS_S = 2.0  # What a node has started may hold the node's pipe for longer than the node lives.


class NodeLines:
    """Shows lines of several nodes; may be called from several threads.

    Args:
        nodes: The names of all.
        on_closed: Called when what is shown cannot be written, or nobody reads it any more (`| head`).
    """

    def __init__(self, nodes: Iterable[str], on_closed: Callable[[OSError], None] = lambda _: None) -> None:
        self._on_closed = on_closed
        self._width = max(map(len, nodes), default=0)
        self._told: OrderedDict[object, None] = OrderedDict()
        self._turn = threading.Lock()
        self._readers: list[threading.Thread] = []

    def read(self, node: str, pipe: IO[bytes], to: TextIO) -> None:
        """Show the lines of a pipe until it ends, in a thread of its own."""
        reader = threading.Thread(
            target=self._pass_on, args=(node, pipe, to), name=f"lines-{node}", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def close(self) -> None:
        """Wait for the last lines; to be called once the processes have ended."""
        for reader in self._readers:
            reader.join(LAST_WORDS_S)

    def line(self, node: str, line: str) -> str:
        """The line as it is shown; "" for an event that another node has printed already."""
        event = event_of(line)
        if event is not None:
            if event in self._told:
                return ""
            self._told[event] = None
            if len(self._told) > EVENTS_KEPT:
                self._told.popitem(last=False)
        return f"{node:<{self._width}} | {line.rstrip()}\n"

    def tell(self, node: str, line: bytes, to: TextIO) -> None:
        """Show one line."""
        with self._turn:
            to.write(self.line(node, line.decode(errors="replace")))
            to.flush()

    def _pass_on(self, node: str, pipe: IO[bytes], to: TextIO) -> None:
        with pipe:
            for line in pipe:  # Also when nothing can be shown: the node would wait at a full pipe.
                try:
                    self.tell(node, line, to)
                except OSError as error:
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), to.fileno())
                    self._on_closed(error)


def event_of(line: str) -> object | None:
    """What is equal for an event on all nodes: the line, or its fields if it is JSON; None if it is no event."""
    if NOTICE.match(line):
        return line.rstrip()
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # Scripts print JSON, too, which may have some of these fields, with values of any type.
    event = tuple(found.get(name) for name in EVENT)
    return event if all(map(isinstance, event, EVENT.values())) else None
