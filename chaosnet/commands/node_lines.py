"""The output of processes on several nodes, on one screen: each line after its node's name, an event of all once."""

from __future__ import annotations

import json
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import IO, TextIO

NOTICE = re.compile(
    r"\[chaosnet\] step \d+: "
)  # As chaosnet/script/teller.py prints what happens in the cluster.
EVENT = {"step": int, "event": str, "subject": str, "detail": str}  # What a notice has as JSON.
EVENTS_KEPT = 1_000
LAST_WORDS_S = 2.0  # What a node has started may hold its pipe for longer than it lives.


class NodeLines:
    """From several threads.

    Args:
        nodes: all that there are.
        on_closed: called when nobody reads any more what is shown (`| head`), or it cannot be written.
    """

    def __init__(self, nodes: Iterable[str], on_closed: Callable[[OSError], None] = lambda _: None) -> None:
        self._on_closed = on_closed
        self._width = max(map(len, nodes), default=0)
        self._told: OrderedDict[object, None] = OrderedDict()
        self._turn = threading.Lock()
        self._readers: list[threading.Thread] = []

    def read(self, node: str, pipe: IO[bytes], to: TextIO) -> None:
        """Pass on what comes, until it ends."""
        reader = threading.Thread(
            target=self._pass_on, args=(node, pipe, to), name=f"lines-{node}", daemon=True
        )
        self._readers.append(reader)
        reader.start()

    def close(self) -> None:
        """Once the processes have ended."""
        for reader in self._readers:
            reader.join(LAST_WORDS_S)

    def line(self, node: str, line: str) -> str:
        """As it is shown; "" for an event that another node has told of."""
        event = event_of(line)
        if event is not None:
            if event in self._told:
                return ""
            self._told[event] = None
            if len(self._told) > EVENTS_KEPT:
                self._told.popitem(last=False)
        return f"{node:<{self._width}} | {line.rstrip()}\n"

    def tell(self, node: str, line: bytes, to: TextIO) -> None:
        """Pass on one line."""
        with self._turn:
            to.write(self.line(node, line.decode(errors="replace")))
            to.flush()

    def _pass_on(self, node: str, pipe: IO[bytes], to: TextIO) -> None:
        with pipe:
            for line in pipe:  # To the end, or the node would get stuck at its full pipe.
                try:
                    self.tell(node, line, to)
                except OSError as error:
                    with open(os.devnull, "wb") as nowhere:
                        os.dup2(nowhere.fileno(), to.fileno())
                    self._on_closed(error)


def event_of(line: str) -> object | None:
    """What all nodes tell alike: the line of a notice, or its fields in a line of JSON; None for other lines."""
    if NOTICE.match(line):
        return line.rstrip()
    if not line.startswith("{"):
        return None
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        return None
    # Scripts print JSON, too: it may have some of these words, and anything behind them.
    event = tuple(found.get(name) for name in EVENT)
    return event if all(map(isinstance, event, EVENT.values())) else None
