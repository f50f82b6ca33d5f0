"""Routed: scale-out (Fig. 4a)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from .fields import Address, Addresses, Bytes, Count, Id, Message, Text
from .probes import LinkReading
from .views import Member, View


class ScaleOutRequest(Message, frozen=True, kw_only=True):
    """Joiner to scheduler: let me in, with these neighbours (ids or addresses) or `degree` of your choice.

    `linked`: whom I have a link to, members or other joiners. `stuck`: I could reach none of those whom you chose.
    `unanswered`: you did not answer when I asked before, so members may tell me whether the cluster goes on.
    """

    node: Id
    life: Count = 0
    addresses: Addresses = ()
    neighbors: Annotated[tuple[Address, ...], Meta(max_length=64)] = ()
    degree: Annotated[int, Meta(ge=1, le=64)] = 2
    linked: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    stuck: bool = False
    digest: Annotated[str, Meta(max_length=64)] = ""  # Of the model's manifest.
    blocking: bool = False  # Else as suits the links.
    again: bool = False  # Wanted neighbours that are gone meanwhile are replaced, not complained about.
    founds: bool = False  # Unless a member answers, it will found a cluster.
    unanswered: bool = False
    place: Count = 0  # Of its own address among those that it asks, from 1; 0: it is not there.


class ScaleOutRefused(Message, frozen=True, kw_only=True):
    """Scheduler to joiner: no, for this reason. `spec`: the model that the cluster trains, if that is why."""

    reason: Text
    spec: Bytes = b""


class NegotiationPlan(Message, frozen=True, kw_only=True):
    """Scheduler to joiner: open links to these neighbours, measure them, and report."""

    neighbors: Annotated[tuple[Member, ...], Meta(max_length=64)]


class NeighborsReady(Message, frozen=True, kw_only=True):
    """Joiner to scheduler: these links are open; `failed` could not be (address: reason).

    `addresses`: where others may dial me, () if my neighbours could not.
    """

    node: Id
    addresses: Addresses = ()
    links: dict[Id, LinkReading]
    failed: dict[Id, Text] = {}


class ReplicationPlan(Message, frozen=True, kw_only=True):
    """Scheduler to joiner: you are in `view` from `step` on; fetch this many shards from each source.

    `fellows` join in the same view and fetch the same: you serve each other. `turn`: which you are, of how many, so
    that not all begin with the same bytes. `flushed` (term, number): this flush is over, and so are all before it,
    should you still hear of one. `step_s`: what a step takes; 0 if nobody knows yet.
    """

    view: View
    step: Count
    step_s: Annotated[float, Meta(ge=0)] = 0.0
    flushed: tuple[Count, Count] = (0, 0)
    shard_bytes: Annotated[int, Meta(ge=1)]
    shards_by_source: dict[Id, Count]
    fellows: Annotated[tuple[Id, ...], Meta(max_length=64)] = ()
    turn: tuple[Count, Annotated[int, Meta(ge=1)]] = (0, 1)


class ScaleOutReady(Message, frozen=True, kw_only=True):
    """Joiner to scheduler: my state is whole, or will be `in_s` from now; make me a member.

    `unanswered`: as of ScaleOutRequest.
    """

    node: Id
    in_s: Annotated[float, Meta(ge=0)] = 0.0
    unanswered: bool = False
