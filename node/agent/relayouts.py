"""Clients that ask for other pipelines: `chaosnet relayout`.

    RelayoutCommand --LayoutAsked--> training thread --LayoutAnswered--> Answer to the client

A client asks again and again until it hears: a question that is known is no new one.
"""

from __future__ import annotations

from ...protocols.effects import Effect, LayoutAsked
from ...protocols.events import LayoutAnswered, Received
from ...protocols.messages import MAX_TEXT, Answer, RelayoutCommand, shortened
from .node import Node, Phase
from .routes import Routes

MOST_ASKERS = 64  # Whose answers are kept.


class Relayouts:
    """Takes a client's wish to the training thread, and the answer back."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.answers: dict[str, Answer | None] = {}  # By client; None: not known yet.

    def routes(self) -> Routes:
        return Routes(
            events={LayoutAnswered: self.on_answered},
            routed={RelayoutCommand: self.on_command},
        )

    def on_command(self, event: Received, now_s: float) -> list[Effect]:
        """A client asks for other pipelines."""
        node, asked = self.node, event.message
        assert isinstance(asked, RelayoutCommand)
        if asked.asker in self.answers:
            answer = self.answers[asked.asker]
            return node.relay.send(asked.asker, answer) if answer else []
        if not node.settings.recomputes:
            return self._answer(asked.asker, False, f"{node.me} does not train in pipelines")
        if node.phase is not Phase.MEMBER:
            return self._answer(asked.asker, False, f"{node.me} is no member yet")
        self._remember(asked.asker, None)
        return [LayoutAsked(asked.asker, asked.layout)]

    def on_answered(self, event: LayoutAnswered, now_s: float) -> list[Effect]:
        """The training thread has an answer."""
        return self._answer(event.asker, event.ok, event.text)

    def _answer(self, asker: str, ok: bool, text: str) -> list[Effect]:
        answer = Answer(ok=ok, text=shortened(text, MAX_TEXT))
        self._remember(asker, answer)
        return self.node.relay.send(asker, answer)

    def _remember(self, asker: str, answer: Answer | None) -> None:
        self.answers.pop(asker, None)
        self.answers[asker] = answer
        while len(self.answers) > MOST_ASKERS:
            del self.answers[next(iter(self.answers))]
