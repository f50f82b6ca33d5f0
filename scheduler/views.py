"""Pure steps from one view to the next. A change is applied to the view that is active at its turn."""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass

import msgspec
import networkx as nx

from ..protocols.errors import PlanInfeasible
from ..protocols.messages import Electorate, Joining, Link, Member, View, link
from ..protocols.messages import Tree as WireTree
from . import sync_plan


@dataclass(frozen=True, slots=True)
class Change:
    """Parent of all. `asker`: who wants an Answer, "" for nobody."""

    asker: str = ""


@dataclass(frozen=True, slots=True)
class AddJoiner(Change):
    """Scale-out, first half: listens to results, or (blocking) is a member at once."""

    node: str = ""
    addresses: tuple[str, ...] = ()
    neighbors: tuple[str, ...] = ()
    blocking: bool = False
    life: int = 0


@dataclass(frozen=True, slots=True)
class Promote(Change):
    """Scale-out, second half: the observer has caught up and becomes a member; who is one already may vote."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class Remove(Change):
    """Scale-in, or the end of an observer."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class AddLink(Change):
    """Connect-link. `repair`: our own idea, so nobody is told if it fails."""

    link: Link = ("", "")
    repair: bool = False


@dataclass(frozen=True, slots=True)
class RemoveLink(Change):
    """Disconnect-link. `lost`: it failed, so it goes whatever becomes of the overlay."""

    link: Link = ("", "")
    lost: bool = False


class Nothing(Exception):
    """The change has nothing to change any more; the text says why."""


def apply_change(
    view: View, change: Change, key: tuple[int, int], step: int, impossible: Container[Link] = ()
) -> View:
    """The view after `change`, without trees, named `key` (term, seq); no link of its own is an `impossible` one.

    Raises: Nothing if the change is void in `view`; PlanInfeasible if it would cut the overlay.
    """
    match change:
        case AddJoiner():
            return _add_joiner(view, change, key, step)
        case Promote(node=node):
            return _promote(view, node, key, step)
        case Remove(node=node):
            return _remove(view, node, key, impossible)
        case AddLink(link=each):
            if each in view.links or not {*each} <= {*view.node_ids} or each[0] == each[1]:
                raise Nothing(
                    f"the link {each[0]} - {each[1]} exists already or one of its ends is no member"
                )
            return _next(view, key, links=(*view.links, each))
        case RemoveLink(link=each, lost=lost):
            if each not in view.links:
                raise Nothing(f"there is no link {each[0]} - {each[1]}")
            left = tuple(other for other in view.links if other != each)
            if not lost and not is_connected(view.node_ids, left):
                raise PlanInfeasible(
                    f"without the link {each[0]} - {each[1]} the overlay falls into two parts"
                )
            return _next(view, key, links=left)
    raise TypeError(f"nobody applies {change!r}")


def survivors(
    base: View, alive: set[str], live_links: set[Link], key: tuple[int, int], scheduler: str
) -> View:
    """What a flush installs: `base` without whom it lost, over links that live, connected if possible."""
    members = tuple(member for member in base.members if member.id in alive)
    voters = {member.id for member in members}
    nodes = voters | {member.id for member in base.observers} & alive
    inside = sorted(each for each in live_links if nodes.issuperset(each))
    links, heard = [], set[str]()  # Observers with a link to a voter.
    parts = nx.utils.UnionFind(voters)
    # Links that were found come last, and only where somebody would be cut off without.
    for each in sorted(inside, key=lambda each: each not in base.link_set):
        near = [end for end in each if end in voters]
        cut_off = len(near) == 2 and parts[each[0]] != parts[each[1]]
        deaf = {*each} - voters - heard if len(near) == 1 else set()
        if each in base.link_set or cut_off or deaf:
            links.append(each)
            parts.union(*near)
            heard |= deaf
    observers = tuple(member for member in base.observers if member.id in alive & heard)
    nodes = voters | {member.id for member in observers}
    links = [each for each in links if nodes.issuperset(each)]
    return View(
        term=key[0],
        seq=key[1],
        scheduler=scheduler,
        members=members,
        observers=observers,
        links=tuple(sorted(links)),
    )


def with_trees(view: View, graph: nx.Graph, policy: sync_plan.Policy) -> View:
    """The view with its sync plan: trees over the members, observers hung on as leaves.

    `graph`: the members' part of the overlay, edges with `rate_bps` and `rtt_s` as far as they are known.
    """
    trees = policy(graph) if len(view.members) > 1 else [sync_plan.Tree(view.members[0].id, {}, 1.0)]
    sync_plan.validate(trees, graph)
    members = set(view.member_ids)
    for observer in view.observer_ids:
        hosts = [each for each in view.neighbors(observer) if each in members]
        if not hosts:
            raise PlanInfeasible(f"the observer {observer} has no link to a member")
        trees = sync_plan.attach_leaf(trees, observer, hosts)
    wire = tuple(WireTree(root=tree.root, parent=dict(tree.parent), share=tree.share) for tree in trees)
    return msgspec.structs.replace(view, trees=wire)


def electorate(view: View) -> Electorate:
    """Who votes in `view`."""
    return Electorate(key=view.key, members=view.voter_ids)


def parts(nodes: Set[str], links: Iterable[Link]) -> list[set[str]]:
    """`nodes` by who reaches whom over `links` and `nodes` alone, the largest first."""
    graph = nx.Graph(each for each in links if nodes >= {*each})
    graph.add_nodes_from(nodes)
    return sorted(nx.connected_components(graph), key=lambda part: (-len(part), min(part)))


def is_connected(nodes: Iterable[str], links: Iterable[Link]) -> bool:
    """Is there a path of `links` between any two of `nodes`?"""
    return len(parts({*nodes}, links)) <= 1


def _add_joiner(view: View, change: AddJoiner, key: tuple[int, int], step: int) -> View:
    node = change.node
    if node in view.member_ids:
        raise Nothing(f"{node} is a member already")
    sources = tuple(sorted(set(change.neighbors) & set(view.member_ids)))
    if not sources:
        raise Nothing(f"none of the neighbours of {node} is a member any more")
    others = [each for each in view.links if node not in each]
    links = (*others, *(link(node, source) for source in sources))
    observers = tuple(each for each in view.observers if each.id != node)
    joining = (Joining(node=node, sources=sources, blocking=change.blocking),)
    member = Member(id=node, addresses=change.addresses, joined_step=step, life=change.life)
    if change.blocking:
        return _next(view, key, links, members=(*view.members, member), observers=observers, joining=joining)
    return _next(view, key, links, observers=(*observers, member), joining=joining)


def missing_links(
    members: Iterable[Member],
    observers: Iterable[Member],
    links: Iterable[Link],
    min_degree: int,
    impossible: Container[Link] = (),
) -> list[Link]:
    """Links to add so that the members are connected among themselves and each observer hears one of them."""
    ids = [member.id for member in members]
    inside = [each for each in links if {*each} <= {*ids}]
    added = sync_plan.repair_links(ids, inside, min_degree, impossible)
    heard = {node for each in links for node in each if {*each} & {*ids}}
    return added + [link(observer.id, ids[0]) for observer in observers if observer.id not in heard]


def _among(members: Iterable[Member], links: Iterable[Link]) -> list[Link]:
    ids = {member.id for member in members}
    return [each for each in links if {*each} <= ids]


def _promote(view: View, node: str, key: tuple[int, int], step: int) -> View:
    if node in {*view.member_ids} - {*view.voter_ids}:
        return _next(view, key, view.links)
    observer = next((each for each in view.observers if each.id == node), None)
    if observer is None:
        raise Nothing(f"{node} is no observer")
    member = msgspec.structs.replace(observer, joined_step=step)
    observers = tuple(each for each in view.observers if each.id != node)
    return _next(view, key, view.links, members=(*view.members, member), observers=observers)


def _remove(view: View, node: str, key: tuple[int, int], impossible: Container[Link]) -> View:
    """Without the node; links that keep the rest connected come with it.

    Possible ones if there are enough of them; else it is worth a try.
    """
    if node not in view.node_ids:
        raise Nothing(f"{node} is not in the cluster")
    members = tuple(each for each in view.members if each.id != node)
    observers = tuple(each for each in view.observers if each.id != node)
    if not members:
        raise Nothing(f"{node} is the last member")
    links = [each for each in view.links if node not in each]
    added = missing_links(members, observers, links, 1, impossible)
    if not is_connected([member.id for member in members], _among(members, [*links, *added])):
        added = missing_links(members, observers, links, 1)
    links += added
    scheduler = "" if view.scheduler == node else view.scheduler
    return _next(view, key, tuple(sorted(links)), members=members, observers=observers, scheduler=scheduler)


def _next(
    view: View,
    key: tuple[int, int],
    links: tuple[Link, ...],
    members: tuple[Member, ...] | None = None,
    observers: tuple[Member, ...] | None = None,
    joining: tuple[Joining, ...] = (),
    scheduler: str | None = None,
) -> View:
    return View(
        term=key[0],
        seq=key[1],
        scheduler=view.scheduler if scheduler is None else scheduler,
        members=view.members if members is None else members,
        observers=view.observers if observers is None else observers,
        links=tuple(sorted(links)),
        joining=joining,
    )
