"""Link-local: one step of training."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from .fields import MAX_REASON, Bundle, Bytes, Count, Id, ItemText, Layout, Message, Positive, Range, ViewKey


class Up(Message, frozen=True, kw_only=True):
    """Child to parent, bulk: my subtree's weighted sum of `count` chunks from `chunk` on. Weight 0: no payload."""

    key: ViewKey
    step: Count
    chunk: Count
    count: Bundle = 1
    weight: Positive


class Down(Message, frozen=True, kw_only=True):
    """Along a tree away from the root, bulk: the mean of `count` chunks from `chunk` on. Weight 0: of nobody."""

    key: ViewKey
    step: Count
    chunk: Count
    count: Bundle = 1
    weight: Positive


class Side(msgspec.Struct, frozen=True, kw_only=True):
    """Nodes whose state hashes to the same: how many, and the first few of their names.

    `items`: what the hash is made of, as (name, value) for a person to read; told only where hashes differed.
    """

    nodes: Count
    names: Annotated[tuple[Id, ...], Meta(max_length=8)] = ()
    items: Annotated[tuple[tuple[ItemText, ItemText], ...], Meta(max_length=1025)] = ()


# By what was compared: by its hash, who has it. All nodes that agree are one entry.
Sides = dict[Annotated[str, Meta(max_length=64)], dict[Annotated[str, Meta(max_length=32)], Side]]


class Strike(msgspec.Struct, frozen=True, kw_only=True):
    """The script of this life of a node ended with an error while it had these samples of the epoch in hand."""

    node: Id
    life: Count
    ranges: tuple[Range, ...]
    reason: Annotated[str, Meta(max_length=MAX_REASON)] = ""
    epoch: Count = 0


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """What one node, or a subtree, brings to a step besides the gradient."""

    weight: Positive = 0.0  # Samples.
    ranges: tuple[Range, ...] = ()  # Positions of the epoch's permutation that were used.
    shares: dict[Id, Count] = {}  # Batch size that each member wants from the next step on.
    # Name: (weighted sum, weight).
    metrics: dict[Annotated[str, Meta(max_length=64)], tuple[float, float]] = {}
    present: Bytes = b""  # Bit i: parameter i has a gradient.
    dataset: Count = 0  # Samples in the data set that is dealt out; 0: everybody uses data of its own.
    leaving: bool = False  # All of them have nothing more to train.
    digests: Sides = {}  # What is to be equal on all nodes before this step is applied.
    accounts: Sides = {}  # What was behind those digests of the step before that differed.
    min_samples: Count = 0  # How `dataset` is dealt out: no fewer than this to a node,
    drop_last: bool = False  # and not the rest of an epoch that is less than all take in a step.
    in_order: bool = False  # Not shuffled.
    global_batch: Count = 0  # Samples of all in a step; 0: as many as they take.
    strikes: tuple[Strike, ...] = ()  # Of nodes that are gone.
    evaluation: Count = 0  # Samples of the data set that is to be evaluated; 0: none.
    evaluates: dict[Id, Count] = {}  # How many samples each member takes that does.
    evaluated: tuple[Range, ...] = ()  # What was, as the data set numbers it.
    update: Annotated[str, Meta(max_length=64)] = ""  # Name of the update() behind it, if they have names.
    # Of pipelines: which ran, if those of the step before did not; those that somebody asks for; and what
    # computations took, as (sum, number) by name.
    pipelines: Bytes = b""
    wish: Layout = ""
    timings: dict[Annotated[str, Meta(max_length=72)], tuple[float, float]] = {}
    # Where members keep parts of the state, what the first keeper of a group of parameters says of its summed
    # gradient: number of the group, largest value, sum of squares.
    norms: tuple[tuple[Count, float, float], ...] = ()
    keepers: Bytes = b""  # Who keeps what from this step on, if that is new.
    checkpoints: dict[Id, Count] = {}  # Layers are lost: by member, the newest step that it can go back to.


class Ready(Message, frozen=True, kw_only=True):
    """Child to parent: my subtree has computed the step. `vote` (term, highest prepared seq) or None."""

    key: ViewKey
    step: Count
    vote: ViewKey | None
    contribution: Contribution


class Commit(Message, frozen=True, kw_only=True):
    """Along the first tree away from its root: the step is decided; the next one runs in view `switch`."""

    key: ViewKey
    step: Count
    switch: ViewKey | None
    total: Contribution
