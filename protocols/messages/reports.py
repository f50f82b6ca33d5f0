"""Routed: how nodes are, what happened, and answers to people."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .fields import Bytes, Count, Id, Message, Names, Positive, Real, Text
from .probes import LinkReading

REFUSED = "refused: "  # Counters of a Report that begin with it are shown by their sum over all nodes.


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of a step from `peer`: `came` of `of` chunks. `up`: parts of the sum, else its results."""

    peer: Id
    came: Count
    of: Count
    up: bool


class Report(Message, frozen=True, kw_only=True):
    """Node to scheduler, about once a second: how I am.

    `idle_s`: since my step began, if my script has not called update() yet; `waits_s`: since it has. `pulls_state`:
    it cannot yet; then `pulled` are the bytes of the state that are here by source, of `pulls_bytes` in all. `lacks`:
    what has not come, once I have waited for long.
    """

    node: Id
    step: Count = 0
    readings: dict[Id, LinkReading] = {}
    samples_per_s: Real = 0.0
    sync_delay_s: Real = 0.0
    state_bytes: Count = 0
    layer_bytes: tuple[Count, Count] = (0, 0)  # Smallest and largest tensor.
    cpu_pct: Real = 0.0
    memory_bytes: Count = 0
    battery_pct: Real = -1.0  # -1: has none.
    nic_sent_bytes: Count = 0  # By all interfaces of the machine but loopback, since it was started.
    nic_received_bytes: Count = 0
    counters: Annotated[  # REFUSED + reason: strangers' connections.
        dict[Annotated[str, Meta(max_length=64)], Count], Meta(max_length=256)
    ] = {}
    idle_s: Positive = 0.0
    waits_s: Positive = 0.0
    pulls_state: bool = False
    pulls_bytes: Count = 0
    pulled: Annotated[dict[Id, Count], Meta(max_length=256)] = {}
    page: Annotated[str, Meta(max_length=200)] = ""  # Where it serves the cluster's page; "": nowhere.
    lacks: Annotated[tuple[Lack, ...], Meta(max_length=128)] = ()
    sent_bytes: Count = 0  # By this process over its links, since it began.
    received_bytes: Count = 0


class Notice(Message, frozen=True, kw_only=True):
    """Scheduler to all: this happened, for people to read."""

    kind: Annotated[str, Meta(max_length=32)]
    node: Names
    detail: Text
    step: Count
    time_s: Real  # Wall clock of the scheduler.
    handling_ms: Real = 0.0  # Time the scheduler's core took.


class StatusRequest(Message, frozen=True, kw_only=True):
    """Client to any node, which passes it on to the scheduler.

    `history`: with all events and steps that the scheduler has kept (status.py), from step `since` on.
    """

    asker: Id
    history: bool = False
    since: Count = 0


class StatusReply(Message, frozen=True, kw_only=True):
    """The cluster's status as JSON, whose schema has a version of its own (status.py)."""

    status: Bytes


class Answer(Message, frozen=True, kw_only=True):
    """Scheduler, or the node asked, to the asker: done, or why not."""

    ok: bool
    text: Text
