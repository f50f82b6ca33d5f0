"""The screen of `chaosnet top`; needs the extra `top` (textual)."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import msgspec
from rich.console import RenderableType
from rich.text import Text
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Container, Horizontal, VerticalScroll
from textual.message import Message
from textual.screen import ModalScreen
from textual.widgets import Footer, Sparkline, Static

from ..protocols.errors import ChaosnetError, PeerUnreachable
from ..protocols.sentences import printable
from ..protocols.status import Status
from . import tables
from .top_story import RATE, Story

WIDE = 130  # Columns from which on members, links and events are side by side.
TERMINATED = 128 + signal.SIGTERM
STOP_PATIENCE_S = 3.0  # A question to a node takes 2 s at most.
Watch = Callable[[Callable[[PeerUnreachable], None]], Iterator[Status]]  # Takes what to call on silence.

KEYS = """\
[b]q[/b]          quit
[b]l[/b]          links in place of events, and back (in a narrow terminal)
[b]m[/b]          the curve of the next metric, or of samples/s
[b]p[/b]          pause: what is shown stays
[b]tab[/b] [b]↑[/b] [b]↓[/b]    to the next part of the screen, and scroll in it
[b]?[/b]          this help; any key closes it

[b]step[/b]       the one that the node is in
[b]sync[/b]       so long its last step has waited for the all-reduce
[b]cpu[/b]        of one core, so it may be above 100 %
[b]sent, got[/b]  by the process over its links, since it began
[b]rate, back[/b] measured, from the first node to the second and back

The node that answers may die: another one is asked then."""


class Help(ModalScreen[None]):
    """What keys do and columns mean."""

    def compose(self) -> ComposeResult:
        yield Static(KEYS, id="keys")

    def on_key(self) -> None:
        self.dismiss()


class Top(App[str]):
    """Ends with a text, and code 1, if the cluster does not answer any more; by SIGTERM with code TERMINATED.

    Args:
        first: The cluster's status, with the history.
        watch: Yields newer ones.
    """

    ENABLE_COMMAND_PALETTE = False
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (WIDE, "-wide")]  # noqa: RUF012 - textual declares it.
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "quit"),
        Binding("l", "links", "links/events"),
        Binding("m", "curve", "next curve"),
        Binding("p", "pause", "pause"),
        Binding("question_mark,h", "help", "help", key_display="?"),
    ]
    CSS = """
    Screen { layout: vertical; }
    #head, #said { height: auto; }
    #said { color: $text-error; display: none; }
    #said.shown { display: block; }
    #curve { height: 1; }
    #name { width: auto; padding-right: 1; }
    Sparkline { width: 1fr; height: 1; }
    #body { height: 1fr; }
    #body VerticalScroll { height: 1fr; }
    #body VerticalScroll:focus { background: $surface; }
    .-narrow #members { height: auto; max-height: 60%; }
    .-narrow #links, .-narrow.links #events { display: none; }
    .-narrow.links #links { display: block; }
    .-wide #curve, .-wide Sparkline { height: 3; }
    .-wide #body { layout: grid; grid-size: 2 2; grid-columns: 92 1fr; grid-gutter: 1 3; }
    .-wide #events { row-span: 2; }
    Help { align: center middle; }
    #keys { width: 74; height: auto; padding: 1 2; background: $panel; }
    """

    class Heard(Message):
        """A newer status; None if no node has answered, as `silence` says."""

        def __init__(self, status: Status | None, silence: str) -> None:
            super().__init__()
            self.status, self.silence = status, silence

    class Over(Message):
        """The watch has ended, for this reason."""

        def __init__(self, reason: str) -> None:
            super().__init__()
            self.reason = reason

    def __init__(self, first: Status, watch: Watch) -> None:
        super().__init__()
        self.newest, self.story = first, Story()
        self.story.hear(first)
        self.shown_curve = self.story.names[0]
        self.paused = False
        self._watch, self._over = watch, threading.Event()
        self._thread = threading.Thread(target=self._listen, name="chaosnet-top", daemon=True)

    def compose(self) -> ComposeResult:
        yield Static(id="head")
        yield Static(id="said", markup=False)
        with Horizontal(id="curve"):
            yield Static(id="name", markup=False)
            yield Sparkline(id="line", summary_function=lambda values: sum(values) / len(values))
        with Container(id="body"):  # In this order a grid puts events beside the other two.
            for name in ("members", "events", "links"):
                with VerticalScroll(id=name):
                    yield Static(id=f"{name}-shown")
        yield Footer()

    def on_mount(self) -> None:
        with contextlib.suppress(NotImplementedError):  # Windows has no signal handlers for loops.
            loop = asyncio.get_running_loop()
            # Without it, SIGTERM leaves the terminal as the screen needs it: no echo, and a mouse that types.
            loop.add_signal_handler(signal.SIGTERM, lambda: self.exit(return_code=TERMINATED))
        self._show()
        self._thread.start()

    def on_unmount(self) -> None:
        self._over.set()
        self._thread.join(STOP_PATIENCE_S)

    # --- on the thread that asks the cluster ---

    def _listen(self) -> None:
        try:
            for status in self._watch(lambda error: self._hear(None, str(error))):
                if self._over.is_set():
                    return
                self._hear(status, "")
        except ChaosnetError as error:
            self.post_message(self.Over(str(error)))

    def _hear(self, status: Status | None, silence: str) -> None:
        self.post_message(self.Heard(status, silence))

    # --- on the screen's thread ---

    def on_top_heard(self, told: Heard) -> None:
        said = self.query_one("#said", Static)
        said.set_class(bool(told.silence), "shown")
        said.update(printable(told.silence))
        if told.status is not None and not self.paused:
            self.newest = told.status
            self.story.hear(told.status)
            self._show()

    def on_top_over(self, told: Over) -> None:
        self.exit(told.reason, return_code=1)

    def _show(self) -> None:
        status = self.newest
        self._put(
            "head",
            Text("paused  ", style="reverse") + tables.headline(status)
            if self.paused
            else tables.headline(status),
        )
        self._put("members-shown", tables.members(status))
        self._put("links-shown", tables.links(status))
        newest_first = tuple(reversed(self.story.events))
        self._put("events-shown", tables.events(msgspec.structs.replace(status, events=newest_first)))
        self._show_curve()

    def _show_curve(self) -> None:
        if self.shown_curve not in self.story.curves:  # Another cluster's script averages other metrics.
            self.shown_curve = self.story.names[0]
        values = [*self.story.curves[self.shown_curve]]
        last = f"{values[-1]:,.0f}" if self.shown_curve == RATE else tables.figure(values[-1])
        self._put("name", f"{self.shown_curve} {last}")
        self.query_one("#line", Sparkline).data = values

    def _put(self, where: str, what: RenderableType) -> None:
        shown = printable(what) if isinstance(what, str) else tables.Printable(what)
        self.query_one(f"#{where}", Static).update(shown)

    # --- keys ---

    def action_links(self) -> None:
        """Show links in place of events, or events again, where there is no room for both."""
        self.screen.toggle_class("links")

    def action_curve(self) -> None:
        """Show the next curve."""
        names = self.story.names
        self.shown_curve = names[(names.index(self.shown_curve) + 1) % len(names)]
        self._show_curve()

    def action_pause(self) -> None:
        """Freeze what is shown, or go on."""
        self.paused = not self.paused
        self._show()

    def action_help(self) -> None:
        """Show what keys do, and what columns mean."""
        self.push_screen(Help())
