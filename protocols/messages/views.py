"""What the cluster agrees on: who is in, over which links, and the plan."""

from __future__ import annotations

from collections.abc import Mapping, Set
from functools import cached_property
from typing import Annotated

import msgspec
from msgspec import Meta

from .fields import MAX_NODES, Addresses, Bundle, Count, Id, Link, ViewKey, link


class Member(msgspec.Struct, frozen=True, kw_only=True):
    """One node of a view; `members` of a view are in order of seniority."""

    id: Id
    addresses: Addresses = ()  # Where it may be dialled: one a network it is in; none if it cannot be.
    joined_step: Count = 0  # The step of the cluster from which on it is in the view.
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

    def reached(self, node: str) -> frozenset[str]:
        """`node`, and all whom results reach through it."""
        found = [node]
        for each in found:
            found += self.children.get(each, ())
        return frozenset(found)

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


class Entering(msgspec.Struct, frozen=True, kw_only=True):
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
    joining: Annotated[tuple[Entering, ...], Meta(max_length=64)] = ()

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
    def voteless_ids(self) -> tuple[str, ...]:
        """Members that have no vote yet."""
        return tuple(member.id for member in self.members if member.id not in self.voter_ids)

    @property
    def electorate(self) -> Electorate:
        return Electorate(key=self.key, members=self.voter_ids)

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

    @cached_property
    def trees_by_link(self) -> Mapping[Link, tuple[int, ...]]:
        """Places in `trees` of those that lead over each link."""
        found: dict[Link, list[int]] = {each: [] for each in self.links}
        for place, tree in enumerate(self.trees):
            for child, parent in tree.parent.items():
                found[link(child, parent)].append(place)
        return {each: tuple(places) for each, places in found.items()}

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
    joining: Annotated[tuple[Entering, ...], Meta(max_length=64)] = ()

    @property
    def key(self) -> ViewKey:
        return (self.term, self.seq)


class Electorate(msgspec.Struct, frozen=True, kw_only=True):
    """The voters of a view that some node may still be active in (election.py)."""

    key: ViewKey
    members: tuple[Id, ...]


Deal = tuple[tuple[Id, Count], ...]  # (member, batch size): who gets samples for a step, in order.
