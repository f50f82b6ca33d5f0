"""One node's settings, as its user has given them: addresses, links, keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..protocols.keyring import Keyring
from ..protocols.probing import Kind
from .endpoint import Endpoint
from .keys import KeyPair

if TYPE_CHECKING:  # `chaosnet run` reads the settings before it loads torch.
    from ..scheduler.sync_plan import SyncPolicy
    from .sums.compression import Compression


@dataclass(frozen=True, slots=True)
class NodeSettings:
    """How a node is reached, and whom it joins. The settings of a user (chaosnet/settings/table.py, NODE), checked.

    Attributes:
        join: Addresses of members; empty: found a cluster, unless there is a `cluster_name`.
        cluster_name: Its nodes are looked for on the local network, and asked, too; "": nobody is looked for.
        new: Found one at once.
        remembered: Without `join`: members of the cluster in which a node at `listen` was last. They are asked first.
        keys: This node's key pair; None: no encryption, and everybody who reaches the port can join.
        allowed_keys: Public keys of others that may join, beside those that the cluster lets in.
        introduce: Has a member let this node's key in, if it comes with an invite. Raises: ScaleOutFailed.
    """

    name: str
    listen: str
    join: tuple[str, ...]
    join_patience_s: float
    cluster_name: str
    new: bool
    found: bool
    rejoin: bool
    neighbors: int
    links: tuple[str, ...]
    blocking: bool
    sync_policy: str | SyncPolicy
    compression: Compression
    chunk_bytes: int | None
    probe: Kind
    peers_at: Mapping[str, str]
    remembered: tuple[str, ...]
    keys: KeyPair | None
    allowed_keys: tuple[str, ...]
    introduce: Callable[[], None] | None

    @property
    def seeds(self) -> tuple[str, ...]:
        """The addresses at which to ask for a cluster."""
        return self.join or self.remembered

    @property
    def founds(self) -> bool:
        """Does this node found a cluster at once, as there is nobody to ask or to look for?"""
        return not self.seeds and (self.new or not self.cluster_name)

    @property
    def may_found(self) -> bool:
        """May this node found a cluster, perhaps after nobody has answered?"""
        return self.found or not self.join

    def keyring(self) -> Keyring | None:
        """The keyring with which this node starts."""
        named = (Endpoint.parse(address).key for address in (*self.seeds, *self.peers_at.values()) if address)
        return Keyring(self.keys.public, self.allowed_keys, filter(None, named)) if self.keys else None
