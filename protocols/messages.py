"""Every message chaosnet puts on the wire; nothing else declares one.

Two kinds. *Link-local* messages go over one open link. *Routed* messages travel inside an `Envelope`
over the overlay, hop by hop, so two nodes can negotiate without a direct connection (relay.py).
Field types and bounds are checked by msgspec on arrival (codec.py); past it, code trusts them.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

PROTOCOL_VERSION = 6  # Bump when a field is removed or changes meaning.

EVERYONE = "*"  # Destination of an envelope that all nodes take and pass on.

REFUSED = "refused: "  # Counters of a Report that begin with it are shown by their sum over all nodes.

MAX_NODES = 20_000
MAX_REASON = 300  # Characters of what a script ended with.
MAX_KEYS = 2 * MAX_NODES  # Room for every node to change its key once.

Id = Annotated[str, Meta(min_length=1, max_length=64)]
Address = Annotated[str, Meta(max_length=255)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=16)]
Text = Annotated[str, Meta(max_length=4000)]
ItemText = Annotated[str, Meta(max_length=255)]
Bundle = Annotated[int, Meta(ge=1, le=1 << 20)]  # So many neighbouring chunks travel as one message.
Count = Annotated[int, Meta(ge=0, le=1 << 62)]  # So that the sum of two still fits into 64 bits.
Real = Annotated[float, Meta(ge=-1e18, le=1e18)]  # No NaN, and nothing that sums up to infinity.
Positive = Annotated[float, Meta(ge=0, le=1e18)]
Bytes = Annotated[bytes, Meta(max_length=4 << 20)]
# How a link's rate was found; "": not at all.
RateSource = Literal["", "probe", "iperf3", "replication", "traffic"]
Key = Annotated[str, Meta(pattern="^[a-z2-7]{51}[aq]$")]  # A public key: 32 bytes in base32.
Link = tuple[Id, Id]  # Two node ids, sorted.
ViewKey = tuple[Count, Count]  # (term, seq): views are ordered by it.
Range = tuple[Count, Count]  # [start, stop).


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Parent of all; the class name is the type on the wire."""


# --- what the cluster agrees on ---


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a view; `members` of a view are in order of seniority."""

    id: Id
    addresses: Addresses = ()  # Where it may be dialled: one a network it is in; none if it cannot be.
    joined_step: Count = 0
    life: Count = 0  # Grows from one start of the process to the next.


class Tree(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Gradients go up to `root` and results come down; carries `share` of all chunks."""

    root: Id
    parent: dict[Id, Id]
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0

    @cached_property
    def children(self) -> Mapping[str, tuple[str, ...]]:
        """Of each node that has any, sorted."""
        found: dict[str, list[str]] = {}
        for child in sorted(self.parent):
            found.setdefault(self.parent[child], []).append(child)
        return {parent: tuple(children) for parent, children in found.items()}

    def flaw(self, nodes: Set[str], members: Set[str], links: Set[Link]) -> str:
        """As that of the view whose `nodes`, `members` and `links` these are."""
        if self.root not in members or self.parent.keys() != nodes - {self.root}:
            return f"the tree of {self.root!r} does not reach all nodes from a member"
        if any(link(*each) not in links for each in self.parent.items()):
            return f"the tree of {self.root!r} leads over what is no link"
        joined = {self.root}
        for node in self.parent:
            path = []
            while node not in joined:
                path.append(node)
                joined.add(node)
                node = self.parent[node]
            if node in path:
                return f"the tree of {self.root!r} has a circle"
        return ""


class Joining(msgspec.Struct, frozen=True, kw_only=True):
    """A node that enters with this view, and the neighbours that serve it the state."""

    node: Id
    sources: tuple[Id, ...]
    blocking: bool = False


class View(msgspec.Struct, frozen=True, kw_only=True, dict=True, tag=True):
    """Everything the cluster agrees on: who is in, over which links, and the plan.

    `members` contribute and vote. `observers` (joiners catching up) only listen to results: they are
    leaves of the trees. `scheduler` is "" when the role is vacant. A blocking joiner contributes to the view that it
    enters with, and votes from the next one on.
    """

    term: Count
    seq: Count
    scheduler: Annotated[str, Meta(max_length=64)]
    members: Annotated[tuple[Member, ...], Meta(min_length=1, max_length=MAX_NODES)]
    observers: Annotated[tuple[Member, ...], Meta(max_length=MAX_NODES)] = ()
    links: Annotated[tuple[Link, ...], Meta(max_length=10 * MAX_NODES)] = ()
    trees: Annotated[tuple[Tree, ...], Meta(max_length=64)] = ()  # None while it is being planned.
    bundle: Bundle = 1
    joining: Annotated[tuple[Joining, ...], Meta(max_length=64)] = ()

    @property
    def key(self) -> ViewKey:
        return (self.term, self.seq)

    @cached_property
    def member_ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.members)

    @cached_property
    def observer_ids(self) -> tuple[str, ...]:
        return tuple(member.id for member in self.observers)

    @cached_property
    def voter_ids(self) -> tuple[str, ...]:
        """Members without those who enter with this view: they may not know of it yet, and could not vote."""
        new = {joining.node for joining in self.joining}
        return tuple(member.id for member in self.members if member.id not in new)

    @cached_property
    def node_ids(self) -> tuple[str, ...]:
        return self.member_ids + self.observer_ids

    @cached_property
    def member_set(self) -> frozenset[str]:
        return frozenset(self.member_ids)

    @cached_property
    def observer_set(self) -> frozenset[str]:
        return frozenset(self.observer_ids)

    @cached_property
    def lives(self) -> frozenset[tuple[str, int]]:
        return frozenset((each.id, each.life) for each in (*self.members, *self.observers))

    @cached_property
    def standings(self) -> frozenset[tuple[str, int, int, str]]:
        """Of each node: its id and life, since which step, and as what ("active" or "standby")."""
        return frozenset(
            (each.id, each.life, each.joined_step, state)
            for state, nodes in (("standby", self.observers), ("active", self.members))
            for each in nodes
        )

    @cached_property
    def is_whole(self) -> bool:
        """Is there a way from each node to each other that leads through members only?"""
        found = {*self.member_ids[:1]}
        edge = list(found)
        while edge:
            around = set(self.neighbors(edge.pop())) - found
            found |= around
            edge.extend(around & self.member_set)
        return found >= self.node_set

    @cached_property
    def node_set(self) -> frozenset[str]:
        return frozenset(self.node_ids)

    @cached_property
    def link_set(self) -> frozenset[Link]:
        return frozenset(self.links)

    @cached_property
    def _by_id(self) -> Mapping[str, Member]:
        return {each.id: each for each in (*self.observers, *self.members)}

    @cached_property
    def _around(self) -> Mapping[str, tuple[str, ...]]:
        around: dict[str, set[str]] = {}
        for a, b in self.links:
            around.setdefault(a, set()).add(b)
            around.setdefault(b, set()).add(a)
        return {node: tuple(sorted(peers)) for node, peers in around.items()}

    @cached_property
    def _to_scheduler(self) -> Mapping[str, str]:
        """Of each node that has one, the neighbour that is next on a shortest way through members."""
        nearer: dict[str, str] = {}
        edge = [self.scheduler]
        for node in edge:
            beyond = [peer for peer in self.neighbors(node) if peer not in nearer and peer != self.scheduler]
            nearer |= dict.fromkeys(beyond, node)
            edge += [peer for peer in beyond if peer in self.member_set]
        return nearer

    def to_scheduler(self, node: str) -> str:
        """The neighbour of `node` that is next on a shortest way to the scheduler; "" if there is none."""
        return self._to_scheduler.get(node, "")

    def find(self, node: str) -> Member | None:
        """The member or observer of that id."""
        return self._by_id.get(node)

    def neighbors(self, node: str) -> tuple[str, ...]:
        """Ids at the other ends of the links of `node`, sorted."""
        return self._around.get(node, ())

    def flaw(self) -> str:
        """What no scheduler would propose, for it is no view that a step could run in; "" if there is nothing."""
        nodes, members, links = self.node_set, self.member_set, self.link_set
        if max(len(self.members), len(self.observers), len(self.links) / 10) > MAX_NODES:
            return (
                f"it is larger than any that is taken ({MAX_NODES} members, observers, and 10 links for each)"
            )
        if not members:
            return "it has no members"
        if len(nodes) != len(self.members) + len(self.observers):
            return "it names a node twice"
        if self.scheduler and self.scheduler not in members:
            return f"its scheduler {self.scheduler!r} is no member"
        if any(a >= b or a not in nodes or b not in nodes for a, b in links):
            return "a link has an end that is no node, or its ends are not in order"
        if any(not {each.node, *each.sources} <= nodes for each in self.joining):
            return "somebody who joins, or a source, is no node"
        return next((flaw for tree in self.trees if (flaw := tree.flaw(nodes, members, links))), "")


class TreeChange(msgspec.Struct, frozen=True, kw_only=True):
    """A tree, told against the one in its place before: the parents that are new, and who has none any more."""

    root: Id
    share: Annotated[float, Meta(gt=0, le=1)] = 1.0
    parent: dict[Id, Id] = {}
    gone: Annotated[tuple[Id, ...], Meta(max_length=2 * MAX_NODES)] = ()


class ViewChange(msgspec.Struct, frozen=True, kw_only=True, dict=True, tag=True):
    """A view, told against an older one, `base`, that its receivers know (view_change.py).

    A view names everybody, a change only what is new. Nodes that are named here and in `base` are replaced, and
    come last: that is the order of seniority.
    """

    base: ViewKey
    term: Count
    seq: Count
    scheduler: Annotated[str, Meta(max_length=64)]
    members: Annotated[tuple[Member, ...], Meta(max_length=MAX_NODES)] = ()
    observers: Annotated[tuple[Member, ...], Meta(max_length=MAX_NODES)] = ()
    gone: Annotated[tuple[Id, ...], Meta(max_length=2 * MAX_NODES)] = ()
    links: Annotated[tuple[Link, ...], Meta(max_length=10 * MAX_NODES)] = ()
    links_gone: Annotated[tuple[Link, ...], Meta(max_length=10 * MAX_NODES)] = ()
    trees: Annotated[tuple[TreeChange, ...], Meta(min_length=1, max_length=64)]
    bundle: Bundle = 1
    joining: Annotated[tuple[Joining, ...], Meta(max_length=64)] = ()

    @property
    def key(self) -> ViewKey:
        return (self.term, self.seq)


class Electorate(msgspec.Struct, frozen=True, kw_only=True):
    """The voters of a view that some node may still be active in (election.py)."""

    key: ViewKey
    members: tuple[Id, ...]


Deal = tuple[tuple[Id, Count], ...]  # (member, batch size): who gets samples for a step, in order.

# --- link-local: handshake and liveness ---


class Hello(Message, frozen=True, kw_only=True):
    """Dialer to acceptor and back: this is who I am."""

    node: Id
    address: Address
    incarnation: Annotated[str, Meta(max_length=64)]
    cluster: Annotated[str, Meta(max_length=64)] = ""
    client: bool = False
    check: bool = False  # Only to see who answers here: no link follows.


class Bye(Message, frozen=True, kw_only=True):
    """To a peer: I close this connection on purpose; it is no failure.

    `final`: nor will I take another. `spare`: we have another, which goes on.
    """

    reason: Text = ""
    final: bool = False
    spare: bool = False


class Lend(Message, frozen=True, kw_only=True):
    """To a peer on this machine: map this memory of mine (node/shared_memory.py); I will lay payloads in it."""

    descriptor: Count


class Mapped(Message, frozen=True, kw_only=True):
    """And back: I have it."""


class Laid(Message, frozen=True, kw_only=True):
    """To that peer, in place of a bulk item: its header, and where its payload lies."""

    header: Bytes
    first: Count  # Block.
    size: Count


class Ping(Message, frozen=True, kw_only=True):
    """To a peer: are you there? `stall_s`: how long my loop was recently held up; be patient that much."""

    sent_s: Real
    stall_s: Positive = 0.0


class Pong(Message, frozen=True, kw_only=True):
    """Answer to a Ping, with its time stamp."""

    sent_s: Real
    stall_s: Positive = 0.0


# --- link-local: one step of training ---


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
    strikes: tuple[Strike, ...] = ()  # Of nodes that are gone.
    update: Annotated[str, Meta(max_length=64)] = ""  # Name of the update() behind it, if they have names.


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


# --- link-local: state replication ---


class ManifestRequest(Message, frozen=True, kw_only=True):
    """Joiner to source: send me the manifest of the state at `step`."""

    step: Count


class ManifestReply(Message, frozen=True, kw_only=True):
    """Source to joiner, bulk: the payload is the manifest."""

    step: Count
    digest: Bytes


class NoSnapshot(Message, frozen=True, kw_only=True):
    """Source to joiner: I have no copy of the state at `step` for you."""

    step: Count


class ShardRequest(Message, frozen=True, kw_only=True):
    """Joiner to source: send me these bytes of the state at `step`."""

    step: Count
    start: Count
    stop: Count


class Shard(Message, frozen=True, kw_only=True):
    """Source to joiner, bulk: the payload is bytes [start, stop) of the state at `step`."""

    step: Count
    start: Count
    stop: Count
    digest: Bytes  # Of the layout of the sender's state, and of these bytes.


class Have(Message, frozen=True, kw_only=True):
    """Joiner to one that joins with it: of the state at `step` I can send these pieces, a bit each, or all of it."""

    step: Count
    pieces: Annotated[bytes, Meta(max_length=1 << 20)] = b""
    whole: bool = False


class ReplicationDone(Message, frozen=True, kw_only=True):
    """Joiner to source: I have all of the state; drop your copy."""

    step: Count


class DialBack(Message, frozen=True, kw_only=True):
    """Joiner to a neighbour: can you reach me at any of these?"""

    addresses: Addresses


class DialBackReply(Message, frozen=True, kw_only=True):
    """Neighbour to joiner: at this one, or ("") at none, for this reason."""

    reached: Address
    reason: Text = ""


class ProbeRequest(Message, frozen=True, kw_only=True):
    """To a peer: measure our link with me."""

    kind: Literal["in-band", "iperf3"] = "in-band"


class Iperf3Ready(Message, frozen=True, kw_only=True):
    """Answer to a ProbeRequest for iperf3: I serve at this port."""

    port: Annotated[int, Meta(gt=0, lt=65536)]


class Probe(Message, frozen=True, kw_only=True):
    """To a peer, bulk: part `index` of `count` of a bandwidth probe; the payload is padding."""

    index: Count
    count: Annotated[int, Meta(ge=2, le=64)]


class ProbeResult(Message, frozen=True, kw_only=True):
    """Receiver of a probe to its sender: the rate I saw."""

    rate_bps: Annotated[float, Meta(gt=0, le=1e15)]


# --- routed: scale-out (Fig. 4a) ---


class ScaleOutRequest(Message, frozen=True, kw_only=True):
    """Joiner to scheduler: let me in, with these neighbours (ids or addresses) or `degree` of your choice.

    `linked`: whom I have a link to, members or other joiners. `stuck`: I could reach none of those whom you chose.
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
    place: Count = 0  # Of its own address among those that it asks, from 1; 0: it is not there.


class ScaleOutRefused(Message, frozen=True, kw_only=True):
    """Scheduler to joiner: no, for this reason. `spec`: the model that the cluster trains, if that is why."""

    reason: Text
    spec: Bytes = b""


class Outlived(Message, frozen=True, kw_only=True):
    """Any node to one whose clock was set back: what your name has told in an earlier life is newer than you.

    `life`: yours. Who asks to join takes one that exceeds `later`; who is in a view by it keeps it, and outdoes
    `later`.
    """

    life: Count
    later: Count


class NegotiationPlan(Message, frozen=True, kw_only=True):
    """Scheduler to joiner: open links to these neighbours, measure them, and report."""

    neighbors: Annotated[tuple[Member, ...], Meta(max_length=64)]


class LinkReading(msgspec.Struct, frozen=True, kw_only=True):
    """What one end knows of a link: the rate of what comes to it, and of what it sends. 0 = not measured."""

    rtt_min_s: Positive = 0.0
    rtt_median_s: Positive = 0.0
    rate_bps: Positive = 0.0
    rate_age_s: Positive = 0.0
    rate_source: RateSource = ""
    sent_bps: Positive = 0.0
    sent_age_s: Positive = 0.0


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
    """Joiner to scheduler: my state is whole, or will be `in_s` from now; make me a member."""

    node: Id
    in_s: Annotated[float, Meta(ge=0)] = 0.0


# --- routed: scale-in, connect-link, disconnect-link (Fig. 4b to d) ---


class ScaleInRequest(Message, frozen=True, kw_only=True):
    """Member to scheduler: I want to leave."""

    node: Id


class ConnectLinkRequest(Message, frozen=True, kw_only=True):
    """To the scheduler: open a link between `a` and `b` (ids or addresses).

    `healed`: it was lost, and the asker, one of its ends, reaches the other again.
    """

    a: Address
    b: Address
    asker: Id
    healed: bool = False


class DisconnectLinkRequest(Message, frozen=True, kw_only=True):
    """To the scheduler: close the link between `a` and `b` (ids or addresses)."""

    a: Address
    b: Address
    asker: Id


class Answer(Message, frozen=True, kw_only=True):
    """Scheduler, or the node asked, to the asker: done, or why not."""

    ok: bool
    text: Text


class LeaveCommand(Message, frozen=True, kw_only=True):
    """Client to a node: leave the cluster, as if by Ctrl+C."""

    asker: Id


class GoOnCommand(Message, frozen=True, kw_only=True):
    """Client to a node that waits: a person says that the members which it cannot reach are dead. Go on."""

    asker: Id


class DeclaredDead(Message, frozen=True, kw_only=True):
    """A node that was told so to all in reach: these lives of members count as crashed."""

    lives: tuple[tuple[Id, Count], ...]


# --- routed: views ---


class Prepare(Message, frozen=True, kw_only=True):
    """Scheduler to all: open what `view` needs and vote for it in the steps to come."""

    view: View | ViewChange


class PrepareFailed(Message, frozen=True, kw_only=True):
    """Node to scheduler: I cannot have this link; propose something else."""

    key: ViewKey
    node: Id
    link: Link
    reason: Text


class LinkNews(Message, frozen=True, kw_only=True):
    """Either end to all: the connection to `peer` is open, silent or closed. `version` counts up per reporter.

    `key`: the view that the reporter is a member of, (0, 0) if of none or if somebody repeats its news.
    `life` and `peer_life` tell a node from an earlier one of the same id; 0: not known.
    """

    reporter: Id
    peer: Id
    version: Count
    state: Literal["open", "silent", "closed"]
    key: ViewKey = (0, 0)
    life: Count = 0
    peer_life: Count = 0


class Losses(Message, frozen=True, kw_only=True):
    """Link-local, when a link opens, and in answer: news that you may have missed while we were apart."""

    news: Annotated[tuple[LinkNews, ...], Meta(max_length=5 * MAX_NODES)]


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


class AbortRequest(Message, frozen=True, kw_only=True):
    """Member to scheduler: the attempt of this step must be started again.

    `without_me`: I am a member, but no source is left that would send me the state.
    """

    node: Id
    key: ViewKey
    step: Count
    reason: Text
    without_me: bool = False


class Flush(Message, frozen=True, kw_only=True):
    """Scheduler to all: stop the attempt under way and tell me where you are.

    I am at `key` and have all that came before `step`: what is news to me comes with the answer.
    """

    term: Count
    number: Count
    scheduler: Id
    key: ViewKey
    step: Count


class FlushOk(Message, frozen=True, kw_only=True):
    """Node to scheduler: I stopped at `step` in view `key`; the rest is given where it is news to you.

    `began_here`: it was told to begin with `step`, and has no result of the one before.
    """

    term: Count
    number: Count
    node: Id
    key: ViewKey
    step: Count
    began_here: bool = False
    view: View | None = None
    priors: tuple[Electorate, ...] = ()
    commit: Commit | None = None
    deal: Deal = ()


class Install(Message, frozen=True, kw_only=True):
    """Scheduler to all: go on in `view` with `step`. Who lacks the step before adopts it from `holder`."""

    term: Count
    number: Count
    view: View | ViewChange
    priors: tuple[Electorate, ...]
    step: Count
    deal: Deal
    holder: Annotated[str, Meta(max_length=64)] = ""
    commit: Commit | None = None


class Expelled(Message, frozen=True, kw_only=True):
    """To a node: the cluster went on without you, in the view `key`. Who acts in a later one is not meant."""

    node: Id
    reason: Text
    key: ViewKey = (0, 0)


# --- routed: election ---


class VoteRequest(Message, frozen=True, kw_only=True):
    """Candidate to voter: may I be the scheduler of `term`? `trial`: would you say yes (pre-vote)?"""

    term: Count
    candidate: Id
    key: ViewKey
    trial: bool


class VoteReply(Message, frozen=True, kw_only=True):
    """Voter to candidate. A refusal carries the voter's own, perhaps higher, term."""

    term: Count
    voter: Id
    granted: bool
    trial: bool


# --- routed: keys ---


class KeyringNews(Message, frozen=True, kw_only=True):
    """Member to all: this is new about keys. Or (`whole`) to whom it has just met: all that I know of them.

    `used`: an invite, and the key that it has let in. `invites`: open ones, and for how many seconds.
    """

    allowed: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    revoked: Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)] = ()
    used: Annotated[tuple[tuple[Key, Key], ...], Meta(max_length=MAX_KEYS)] = ()
    invites: Annotated[
        tuple[tuple[Key, Annotated[float, Meta(gt=0, le=1e18)]], ...], Meta(max_length=MAX_KEYS)
    ] = ()
    whole: bool = False


class KeyCommand(Message, frozen=True, kw_only=True):
    """Client to a node: let this key in, throw it out, or let in whom `key`, an invite's, introduces."""

    verb: Literal["allow", "revoke", "invite"]
    key: Key
    asker: Id
    seconds: Positive = 0.0  # That an invite is good for.


class Introduction(Message, frozen=True, kw_only=True):
    """Holder of an invite to the scheduler: let `key` in for it."""

    invite: Key
    key: Key
    asker: Id


# --- routed: monitoring ---


class Echo(Message, frozen=True, kw_only=True):
    """Around a silent link to its other end: are you alive? `asked_s`: the asker's clock."""

    node: Id
    asked_s: Real


class EchoReply(Message, frozen=True, kw_only=True):
    """Around the link as well: I am, so it is the link that is dead."""

    node: Id
    asked_s: Real


class Lack(msgspec.Struct, frozen=True, kw_only=True):
    """What a node has of a step from `peer`: `came` of `of` chunks. `up`: parts of the sum, else its results."""

    peer: Id
    came: Count
    of: Count
    up: bool


class Report(Message, frozen=True, kw_only=True):
    """Node to scheduler, about once a second: how I am.

    `idle_s`: since my step began, if my script has not called update() yet; `waits_s`: since it has. `pulls_state`:
    it cannot yet. `lacks`: what has not come, once I have waited for long.
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
    lacks: Annotated[tuple[Lack, ...], Meta(max_length=128)] = ()


class Notice(Message, frozen=True, kw_only=True):
    """Scheduler to all: this happened, for people to read."""

    kind: Annotated[str, Meta(max_length=32)]
    node: Annotated[str, Meta(max_length=200)]
    detail: Text
    step: Count
    time_s: Real  # Wall clock of the scheduler.
    handling_ms: Real = 0.0  # Time the scheduler's core took.


class StatusRequest(Message, frozen=True, kw_only=True):
    """Client to any node, which passes it on to the scheduler.

    `history`: with all events and steps that the scheduler has kept (status.py).
    """

    asker: Id
    history: bool = False


class StatusReply(Message, frozen=True, kw_only=True):
    """The cluster's status as JSON, whose schema has a version of its own (status.py)."""

    status: Bytes


Routed = (
    ScaleOutRequest
    | ScaleOutRefused
    | Outlived
    | NegotiationPlan
    | NeighborsReady
    | ReplicationPlan
    | ScaleOutReady
    | ScaleInRequest
    | ConnectLinkRequest
    | DisconnectLinkRequest
    | Answer
    | LeaveCommand
    | GoOnCommand
    | DeclaredDead
    | Prepare
    | PrepareFailed
    | LinkNews
    | Farewell
    | AbortRequest
    | Flush
    | FlushOk
    | Install
    | Expelled
    | VoteRequest
    | VoteReply
    | Echo
    | EchoReply
    | KeyringNews
    | KeyCommand
    | Introduction
    | Report
    | Notice
    | StatusRequest
    | StatusReply
)


class Envelope(Message, frozen=True, kw_only=True):
    """Hop to hop: `body` is on its way from `source` to `target`, or EVERYONE. `serial` is the source's."""

    source: Id
    target: Id
    serial: Count
    body: Routed


WireMessage = (
    Envelope
    | Hello
    | Bye
    | Lend
    | Mapped
    | Laid
    | Losses
    | Ping
    | Pong
    | Up
    | Down
    | Ready
    | Commit
    | ManifestRequest
    | ManifestReply
    | ShardRequest
    | Shard
    | Have
    | ReplicationDone
    | NoSnapshot
    | DialBack
    | DialBackReply
    | ProbeRequest
    | Iperf3Ready
    | Probe
    | ProbeResult
)


def link(a: str, b: str) -> Link:
    """The link between two nodes, however they are named."""
    return (a, b) if a < b else (b, a)
