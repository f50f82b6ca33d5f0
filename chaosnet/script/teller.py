"""What a node tells its user: lines on stderr, for people or as JSON, and callbacks."""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from ..callbacks import Callbacks
from ..protocols.errors import describe
from ..protocols.messages import Notice
from ..protocols.sentences import counted, printable, sentence
from .run_summary import BLOCKS, PLAIN_BLOCKS, RunRecord, RunSummary, lines

SAID = "said"  # The event of a line that is no notice.
CLEARED = "\r\x1b[K"  # The line of a terminal in which the cursor is.
READER_PATIENCE_MS = 200  # Less than after what others take a node for dead.


def log_line(text: str, log_format: str, node: str = "", event: str = SAID, **fields: Any) -> str:
    """A line of the log, with its line break. As JSON it is one object, whose `text` is what people read."""
    if log_format != "json":
        return f"[chaosnet] {printable(text)}\n"
    at = datetime.fromtimestamp(time.time(), UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": at, "node": node, "event": event, **fields, "text": text}) + "\n"


class Teller:
    """Prints and calls back, from any thread. `log_format`: "text" or "json". `record`: figures of the node's run."""

    def __init__(
        self,
        quiet: bool,
        callbacks: Callbacks,
        node: str = "",
        log_format: str = "text",
        sums_up: bool = True,
    ) -> None:
        self._quiet, self._callbacks = quiet, callbacks
        self._node, self._log_format, self._sums_up = node, log_format, sums_up
        self._left_out = 0  # Lines, since somebody read the last one.
        self.record = RunRecord(node)

    def say(self, text: str, event: str = SAID, **fields: Any) -> None:
        """Print one line, unless the user wants none.

        A terminal that was stopped (Ctrl+S), or a pipe that nobody empties, holds up the script that prints there,
        but no other thread: links would not be served.
        """
        if self._quiet or sys.stderr is None:  # If that was closed at the start, print() would take stdout.
            return
        in_script = threading.current_thread() is threading.main_thread()
        if not in_script and not _takes_more(0 if self._left_out else READER_PATIENCE_MS):
            self._left_out += 1
            return
        line = log_line(text, self._log_format, self._node, event, **fields)
        if self._left_out:
            told = f"{counted(self._left_out, 'line')} left out here: nobody was reading"
            line, self._left_out = log_line(told, self._log_format, self._node) + line, 0
        # In one piece, as other threads print, too.
        line = _behind_a_bar() + line
        with contextlib.suppress(OSError, ValueError):  # Its reader may have gone: no reason to go, too.
            print(line, end="", file=sys.stderr, flush=True)

    def summary(self, summary: RunSummary) -> None:
        """Print what the run has come to, unless the user does not want it."""
        if not self._sums_up:
            return
        told = lines(summary, BLOCKS if _can_print(BLOCKS) else PLAIN_BLOCKS)
        if self._log_format == "json":
            self.say("\n".join(told), "summary", **summary.fields())
            return
        for line in told:
            self.say(line)

    def notice(self, notice: Notice) -> None:
        """Tell of an event of the cluster."""
        self.record.heard(notice)
        told = sentence(notice)
        if self._log_format != "json" and notice.step:  # Who joins does not know it yet.
            told = f"step {notice.step}: {told}"
        self.say(told, notice.kind, step=notice.step, subject=notice.node, detail=notice.detail)
        self._call("on_notice", self._callbacks.on_notice, notice)

    def parked(self, reason: str | None) -> None:
        """Tell that training waits, for that reason, or (None) that it goes on."""
        self.record.parked(bool(reason), time.monotonic())
        if reason:
            self.say(f"waiting: {reason}", "waiting", detail=reason)
        else:
            self.say("going on", "going on")
        self._call("on_parked", self._callbacks.on_parked, reason)

    def _call(self, name: str, callback: Callable[[Any], None], event: object) -> None:
        """Call the script's function. Its error is printed: the thread that serves the links must not end by it."""
        try:
            callback(event)
        except Exception as error:
            self.say(f"{name} of the script failed: {describe(error)}")


def _takes_more(patience_ms: int) -> bool:
    """Does stderr take a line at once, or in a moment?"""
    with contextlib.suppress(OSError, ValueError, AttributeError):  # No file, or the system cannot tell.
        poll = select.poll()
        poll.register(sys.stderr.fileno(), select.POLLOUT)
        return bool(poll.poll(patience_ms))
    return True


def _behind_a_bar() -> str:
    """What clears a line in which tqdm draws a bar: the bar has no line break, and is drawn anew below ours."""
    if "tqdm" not in sys.modules or sys.stderr is None or os.environ.get("TERM") == "dumb":
        return ""
    with contextlib.suppress(ValueError):  # It is closed.
        return CLEARED if sys.stderr.isatty() else ""
    return ""


def _can_print(text: str) -> bool:
    """Has the encoding of stderr these characters?"""
    try:
        text.encode(getattr(sys.stderr, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True
