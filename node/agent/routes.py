"""Who handles what: the registry that an agent's routing comes from.

Each part of an agent declares what it handles in `routes()`, by type: events, messages of a neighbour,
messages that came over the overlay, and effects of one core that mean something to others. Every handler has
one shape, that of a core's `handle`: what has happened, and when, give effects. A message comes to its
handler as the `Received` that brought it; `peer` is then its neighbour, or, of one that came over the
overlay, its source.

Several parts may handle one type. They do so in the order in which the registry was given them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from ...protocols.effects import Effect

Handler = Callable[[Any, float], list[Effect]]
Table = Mapping[type, Handler]


@dataclass(frozen=True, slots=True)
class Routes:
    """What one part handles."""

    events: Table = field(default_factory=dict)
    messages: Table = field(default_factory=dict)  # From a neighbour, for this node alone.
    routed: Table = field(default_factory=dict)  # From anywhere, over the overlay.
    effects: Table = field(default_factory=dict)  # Of another core.


class Part(Protocol):
    """One part of an agent."""

    def routes(self) -> Routes: ...


def all_to(handler: Handler, *kinds: type) -> dict[type, Handler]:
    """A table in which all these types go to one handler."""
    return dict.fromkeys(kinds, handler)


def merged(tables: Iterable[Table]) -> dict[type, Handler]:
    """One table of several; what more than one part handles goes to each of them in turn."""
    handlers: dict[type, list[Handler]] = {}
    for table in tables:
        for kind, handler in table.items():
            handlers.setdefault(kind, []).append(handler)
    return {kind: each[0] if len(each) == 1 else _InTurn(each) for kind, each in handlers.items()}


@dataclass(frozen=True, slots=True)
class _InTurn:
    """Calls several handlers, one after the other.

    It is no closure, so that a copy of an agent has handlers of its own parts.
    """

    handlers: list[Handler]

    def __call__(self, what: Any, now_s: float) -> list[Effect]:
        return [effect for handler in self.handlers for effect in handler(what, now_s)]


def ignored(what: object, now_s: float) -> list[Effect]:
    """The handler of what needs no answer."""
    return []
