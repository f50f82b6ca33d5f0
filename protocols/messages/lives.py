"""Routed: who leaves (scale-in, Fig. 4b), who is gone, what is left of a life, and what people tell a node."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .fields import MAX_REASON, Count, Id, Layout, Message, Range, Text, ViewKey


class ScaleInRequest(Message, frozen=True, kw_only=True):
    """Member to scheduler: I want to leave."""

    node: Id


class LeaveCommand(Message, frozen=True, kw_only=True):
    """Client to a node: leave the cluster, as if by Ctrl+C."""

    asker: Id


class GoOnCommand(Message, frozen=True, kw_only=True):
    """Client to a node that waits: a person says that the members which it cannot reach are dead. Go on."""

    asker: Id


class RelayoutCommand(Message, frozen=True, kw_only=True):
    """Client to a node that trains in pipelines: these are wanted ("2+2"), or the fastest ("auto")."""

    asker: Id
    layout: Layout


class DeclaredDead(Message, frozen=True, kw_only=True):
    """A node that was told so to all in reach: these lives of members count as crashed."""

    lives: tuple[tuple[Id, Count], ...]


class Farewell(Message, frozen=True, kw_only=True):
    """Node to all: I have left, and act in no view any more. `key`: the last in which I did.

    `error`: my script ended with one, which `reason` tells people. `ranges`: samples of `epoch` that I had in hand.
    """

    node: Id
    life: Count = 0
    key: ViewKey = (0, 0)
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    ranges: tuple[Range, ...] = ()
    error: bool = False
    epoch: Count = 0


class Expelled(Message, frozen=True, kw_only=True):
    """To a node: the cluster went on without you, in the view `key`. Who acts in a later one is not meant."""

    node: Id
    reason: Text
    key: ViewKey = (0, 0)


class Outlived(Message, frozen=True, kw_only=True):
    """Any node to one whose clock was set back: what your name has told in an earlier life is newer than you.

    `life`: yours. Who asks to join takes one that exceeds `later`; who is in a view by it keeps it, and outdoes
    `later`.
    """

    life: Count
    later: Count
