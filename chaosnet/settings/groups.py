"""Settings that belong together: `Trainer(model, optimizer, cluster=Cluster(...), checkpoints=Checkpoints(...))`.

What is not said here may be said by `chaosnet run` or the environment. The fields are those of the table
(table.py), which checks what they are given when a Trainer is made.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # `chaosnet run` has the table before it loads a planner.
    from ..scheduler.sync_plan import SyncPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """How a node meets the others, and what goes over its links.

    Attributes:
        listen: Where others reach this node. Port 0: any free one; host 0.0.0.0: all interfaces.
        join: Addresses of members of the cluster to join, or an invite.
        join_patience_s: How long to try addresses where nobody answers yet.
        cluster_name: Join the nodes of the local network that have the same cluster name; start a cluster if
            nobody answers within `join_patience_s`. Give it to all nodes, in any order.
        found: Start a cluster if none of the addresses of `join` leads into one within `join_patience_s`. All
            nodes may have it, and the same `join` with all their addresses: of the nodes that reach each
            other, the one named first founds the cluster.
        new: Start a new cluster, even if the one in which this node last ran at its port may still live.
        rejoin: Come back when the cluster has gone on without this node; else `update()` raises
            `NodeExpelled`.
        name: Unique in the cluster.
        neighbors: Number of links to ask for, up to 64.
        links: Members to link to instead: names or addresses.
        blocking: Join as in the Chaos paper: neighbours wait until they have sent the state. Else they train
            on meanwhile, unless most of the state is trained and it is there in less than a step (with many
            members, in less than a part of one), or results of their steps would take more than half of this
            node's links.
        sync_policy: Trees of the all-reduce, while this node is the scheduler: "packed", "fapt", "single",
            "ring"; in a script also a callable from the overlay (a networkx graph, edges with `rate_bps` and
            `rtt_s` where known) to trees (scheduler/sync_plan.py).
        compression: Encoding of float32 gradients on the wire: "none" (as they are), "bf16" (half the bytes)
            or "int8" (a quarter). The same on all nodes.
        chunk_bytes: Size of the smallest piece of the gradients that travels by itself. The same on all
            nodes.
        probe: How new links are measured: "in-band", "iperf3".
        key: File with the key of this node or user.
        allowed_keys: File with public keys of others that may join, one a line.
        insecure: Use no key: everybody who reaches the port can join.
    """

    listen: str | None = None
    join: str | None = field(default=None, repr=False)  # May be an invite: who reads it can join.
    join_patience_s: float | None = None
    cluster_name: str | None = None
    found: bool | None = None
    new: bool | None = None
    rejoin: bool | None = None
    name: str | None = None
    neighbors: int | None = None
    links: tuple[str, ...] | None = None
    blocking: bool | None = None
    sync_policy: str | SyncPolicy | None = None
    compression: str | None = None
    chunk_bytes: int | None = None
    probe: str | None = None
    key: str | None = None
    allowed_keys: str | None = None
    insecure: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoints:
    """Where and when the training state goes to disk, and whether training goes on from there.

    Attributes:
        directory: Write the state there, so that training survives the death of all nodes.
        every: Steps from one checkpoint to the next.
        copies: "shard": each node writes a part, into one folder that all share. "whole": each node writes
            all of the state, to a disk of its own.
        kept: Number of complete checkpoints to keep.
        resume: Start the cluster with the newest complete checkpoint, if there is any. A joiner gets the
            state from the cluster.
        resume_from: Start with the checkpoint of this step instead.
    """

    directory: str | os.PathLike[str] | None = field(default=None, kw_only=False)
    every: int | None = None
    copies: str | None = None
    kept: int | None = None
    resume: bool | None = None
    resume_from: int | None = None


def said(group: Cluster | Checkpoints) -> dict[str, Any]:
    """By the names of settings."""
    return {each.name: getattr(group, each.name) for each in fields(group)}
