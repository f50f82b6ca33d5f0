"""What a node tells its user: lines on stderr, and callbacks."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any

from .callbacks import Callbacks
from .protocols.errors import describe
from .protocols.messages import Notice
from .protocols.sentences import sentence


class Teller:
    """From any thread."""

    def __init__(self, quiet: bool, callbacks: Callbacks) -> None:
        self._quiet, self._callbacks = quiet, callbacks

    def say(self, text: str) -> None:
        """One line, unless the user wants none."""
        if not self._quiet:
            line = f"[chaosnet] {text}\n"  # In one piece, as other threads print, too.
            with contextlib.suppress(OSError, ValueError):  # Its reader may have gone: no reason to go, too.
                print(line, end="", file=sys.stderr, flush=True)

    def notice(self, notice: Notice) -> None:
        """Something happened in the cluster."""
        when = f"step {notice.step}: " if notice.step else ""  # Who joins does not know it yet.
        self.say(f"{when}{sentence(notice)}")
        self._call("on_notice", self._callbacks.on_notice, notice)

    def parked(self, reason: str | None) -> None:
        """Training waits, or goes on."""
        self.say(f"waiting: {reason}" if reason else "going on")
        self._call("on_parked", self._callbacks.on_parked, reason)

    def _call(self, name: str, callback: Callable[[Any], None], event: object) -> None:
        """On the thread that serves the links, which must not end by an error of the script's."""
        try:
            callback(event)
        except Exception as error:
            self.say(f"{name} of the script failed: {describe(error)}")
