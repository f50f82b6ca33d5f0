"""Pipelines that somebody asks for: the script, or a client (`chaosnet relayout`).

A wish travels with this node's part of a step, and holds for all once that is committed, until another takes its
place. It outlives members: while there are too few of them, the fastest pipelines run instead.
"""

from __future__ import annotations

from ..node.session import Session
from ..protocols.errors import ConfigError
from ..protocols.events import LayoutAnswered
from ..protocols.messages import FASTEST
from ..protocols.sentences import counted
from ..scheduler.elastic.running import Running, check_wish, suits
from .step_costs import Predicted


def check_layout(stages: int, layout: str, layers: int, micro_batches: int) -> None:
    """Raises: ConfigError for stages, or a layout, that no number of members could run."""
    if stages > layers:
        has = counted(layers, "layer")
        raise ConfigError(f"stages: {stages} (expected at most {layers}, as the model has {has})")
    if layout:
        check_wish(layout, layers, micro_batches)


class LayoutWishes:
    """The wishes that one node has heard. `agreed` is equal on all members.

    Args:
        layout: The layout that the script gives.
        layers, micro_batches: Of the model, and of a step.
    Attributes:
        own: What this node asks for with its next part of a step; "": nothing.
        agreed: The wish that holds; "": nobody has asked for anything yet.
    """

    def __init__(self, session: Session, layout: str, layers: int, micro_batches: int) -> None:
        self._session, self.layout = session, layout
        self._layers, self._micro_batches = layers, micro_batches
        self.own = self.agreed = ""
        self._asking: dict[str, str] = {}  # A client that has no answer yet: its wish.

    @property
    def holds(self) -> str:
        """The layout to run; "": the fastest."""
        wish = self.agreed or self.layout
        return "" if wish == FASTEST else wish

    def ask(self, layout: str, members: int) -> None:
        """Ask for a layout, from the next step but one on. Raises: ConfigError if so many members cannot run it."""
        check_wish(layout, self._layers, self._micro_batches, members)
        self.own = layout
        for asker, other in list(self._asking.items()):
            if other != layout:
                del self._asking[asker]
                self._answer(asker, False, f"{layout} was asked for meanwhile")

    def hear(self, members: int) -> None:
        """Take in what clients have asked for. `members`: how many there are."""
        asked = self._session.loop.asked
        while not asked.empty():
            each = asked.get()
            try:
                self.ask(each.layout, members)
                self._asking[each.asker] = each.layout
            except ConfigError as error:
                self._answer(each.asker, False, str(error))

    def agree(self, wish: str) -> None:
        """A step was committed, with this wish ("": none)."""
        if wish:
            self.agreed = wish
            self.own = "" if self.own == wish else self.own

    def answer(self, running: Running | None, predicted: Predicted | None, step: int) -> None:
        """Answer the clients, as step `step` is about to be computed by these pipelines (None: it trains nothing)."""
        if self.own:
            return  # It has yet to be agreed on.
        for asker, layout in self._asking.items():
            self._answer(asker, True, self._answer_of(layout, running, predicted, step))
        self._asking.clear()

    def _answer(self, asker: str, ok: bool, text: str) -> None:
        self._session.post(LayoutAnswered(asker, ok, text))

    def _answer_of(self, layout: str, running: Running | None, predicted: Predicted | None, step: int) -> str:
        if running is None:
            return f"{layout} is noted: it runs when training goes on"
        if layout != FASTEST and not suits(running.laid, layout):
            return f"{layout} is noted, for when it can run; now it is {running.laid}"
        return f"from step {step} on: {running.laid}; {predicted}"
