"""Pure steps from one view to the next. A change is applied to the view that is active at its turn.

All members take part in the step whose vote leads to the next view, so in that view each of them has a vote. Only
nodes that come in with a view have no vote in it; and a view that a flush installs gives nobody a vote.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Set
from dataclasses import dataclass, replace

import msgspec
import networkx as nx

from ..protocols.errors import PlanInfeasible
from ..protocols.messages import Entering, Link, Member, Tree, View, link
from ..protocols.messages.fields import MOST_BUNDLED
from . import link_plan, sync_plan
from .trees import SpanningTree, validate

MAX_JOINING = 64  # Named in one view (messages.View): those that come in, and those that have no vote yet.


@dataclass(frozen=True, slots=True)
class Change:
    """Parent of all. `asker`: who wants an Answer, "" for nobody."""

    asker: str = ""


@dataclass(frozen=True, slots=True)
class Entrant:
    """A joiner that can enter. `neighbors`: members or other joiners to which its links are open.

    It listens to results, or (blocking) is a member at once.
    """

    node: str
    addresses: tuple[str, ...] = ()
    neighbors: tuple[str, ...] = ()
    blocking: bool = False
    life: int = 0
    why: str = ""  # The cluster waits for it, for people.


@dataclass(frozen=True, slots=True)
class AddJoiners(Change):
    """Scale-out, first half, of all joiners that can be let in together."""

    joiners: tuple[Entrant, ...] = ()


@dataclass(frozen=True, slots=True)
class Promote(Change):
    """Scale-out, second half: an observer becomes a member.

    `early`: its state is not whole yet, so it has no vote until it has taken part in a step.
    """

    node: str = ""
    early: bool = False


@dataclass(frozen=True, slots=True)
class Votes(Change):
    """Nothing else: members that have no vote yet get it, as by any other change."""


@dataclass(frozen=True, slots=True)
class Remove(Change):
    """Scale-in, or the end of an observer."""

    node: str = ""


@dataclass(frozen=True, slots=True)
class AddLink(Change):
    """Connect-link."""

    link: Link = ("", "")


@dataclass(frozen=True, slots=True)
class Repair(Change):
    """Add the links that the overlay lacks after a loss; which they are is decided when the change has its turn."""

    links: tuple[Link, ...] = ()


@dataclass(frozen=True, slots=True)
class RemoveLink(Change):
    """Disconnect-link. `lost`: it failed, so it goes whatever becomes of the overlay."""

    link: Link = ("", "")
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Replan(Change):
    """The same nodes and links, with trees for what the links carry now. `why`: for people."""

    why: str = ""


class Nothing(Exception):
    """The change has nothing to change any more; the text says why."""


def apply_change(
    view: View, change: Change, key: tuple[int, int], step: int, impossible: Container[Link] = ()
) -> View:
    """The view after `change`, without trees, named `key` (term, seq); no link of its own is an `impossible` one.

    Raises: Nothing if the change is void in `view`; PlanInfeasible if it would cut the overlay.
    """
    match change:
        case AddJoiners():
            return _add_joiners(view, change, key, step)
        case Promote(node=node, early=early):
            return _promote(view, node, early, key, step)
        case Remove(node=node):
            return _remove(view, node, key, impossible)
        case AddLink(link=each):
            if each in view.links:
                raise Nothing(f"the link {each[0]} - {each[1]} exists already")
            if not {*each} <= {*view.node_ids} or each[0] == each[1]:
                raise Nothing(f"the link {each[0]} - {each[1]} has no two ends that are members")
            return _next(view, key, links=(*view.links, each))
        case Repair(links=links):
            if not links:
                raise Nothing("no link is missing")
            return _next(view, key, links=(*view.links, *links))
        case RemoveLink(link=each, lost=lost):
            if each not in view.links:
                raise Nothing(f"there is no link {each[0]} - {each[1]}")
            left = tuple(other for other in view.links if other != each)
            if not lost and not is_connected(view.node_ids, left):
                raise PlanInfeasible(
                    f"without the link {each[0]} - {each[1]} the overlay falls into two parts"
                )
            return _next(view, key, links=left)
        case Votes():
            if not view.voteless_ids:
                raise Nothing("all members have a vote")
            return _next(view, key, view.links)
        case Replan():
            return _next(view, key, view.links)
    raise TypeError(f"nobody applies {change!r}")


def survivors(
    base: View, alive: set[str], live_links: set[Link], key: tuple[int, int], scheduler: str
) -> View:
    """The view that a flush installs: `base` without the lost nodes, over live links, connected if possible."""
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
    lacking = [node for node in base.voteless_ids if node in voters]
    joining = tuple(map(_voteless, lacking))
    return View(
        term=key[0],
        seq=key[1],
        scheduler=scheduler,
        members=members,
        observers=observers,
        links=tuple(sorted(links)),
        joining=joining if len(joining) < len(members) else (),  # The last that had a vote is gone.
    )


def with_trees(
    view: View, graph: nx.Graph, policy: sync_plan.SyncPolicy, bundler: sync_plan.Bundler = sync_plan.bundle
) -> View:
    """The view with its sync plan: trees over the members, observers hung on as leaves; messages of a suitable size.

    `graph`: the members' part of the overlay, edges with `rate_bps` and `rtt_s` as far as they are known.
    """
    trees = policy(graph) if len(view.members) > 1 else [SpanningTree(view.members[0].id, {}, 1.0)]
    validate(trees, graph)
    if len(view.node_ids) == 1:  # Nothing travels.
        bundle = min(max(graph.graph.get("result", (0, 1))[1], 1), MOST_BUNDLED)
    else:
        bundle = bundler(trees, graph)
    members = set(view.member_ids)
    for observer in view.observer_ids:
        hosts = [each for each in view.neighbors(observer) if each in members]
        if not hosts:
            raise PlanInfeasible(f"the observer {observer} has no link to a member")
        trees = sync_plan.attach_leaf(trees, observer, hosts)
    wire = tuple(Tree(root=tree.root, parent=dict(tree.parent), share=tree.share) for tree in trees)
    return msgspec.structs.replace(view, trees=wire, bundle=bundle)


def parts(nodes: Set[str], links: Iterable[Link]) -> list[set[str]]:
    """`nodes` in parts: the nodes of a part reach each other over `links` and `nodes` alone. The largest first."""
    graph = nx.Graph(each for each in links if nodes >= {*each})
    graph.add_nodes_from(nodes)
    return sorted(nx.connected_components(graph), key=lambda part: (-len(part), min(part)))


def is_connected(nodes: Iterable[str], links: Iterable[Link]) -> bool:
    """Is there a path of `links` between any two of `nodes`?"""
    return len(parts({*nodes}, links)) <= 1


def admissible(view: View, wanting: Iterable[Entrant]) -> tuple[Entrant, ...]:
    """The joiners that can be let in together, each with the neighbours that it then has.

    A blocking one may have links to other blocking ones only, which pass the state on. One that listens needs a
    link to a member.
    """
    by_name = {each.node: each for each in wanting if each.node not in view.member_set}
    around = {name: {*each.neighbors} for name, each in by_name.items()}
    for name, each in by_name.items():
        for peer in each.neighbors:
            if peer in around:
                around[peer].add(name)
    inside, found = {*view.member_ids}, dict[str, Entrant]()
    while fresh := [name for name in by_name if name not in found and around[name] & inside][
        : MAX_JOINING - len(found)
    ]:
        found |= {name: by_name[name] for name in fresh}
        inside |= {name for name in fresh if by_name[name].blocking}
    return tuple(
        replace(each, neighbors=tuple(sorted(around[name] & (inside - {name}))))
        for name, each in found.items()
    )


def _add_joiners(view: View, change: AddJoiners, key: tuple[int, int], step: int) -> View:
    new = admissible(view, change.joiners)
    if not new:
        raise Nothing("nobody who wants in has a link to a member any more")
    names = {each.node for each in new}
    links = {each for each in view.links if not names & {*each}}
    links |= {link(each.node, peer) for each in new for peer in each.neighbors}
    nodes = {
        each.node: Member(id=each.node, addresses=each.addresses, joined_step=step, life=each.life)
        for each in new
    }
    joining = (Entering(node=each.node, sources=each.neighbors, blocking=each.blocking) for each in new)
    observers = [each for each in view.observers if each.id not in names]
    return _next(
        view,
        key,
        tuple(links),
        members=(*view.members, *(nodes[each.node] for each in new if each.blocking)),
        observers=(*observers, *(nodes[each.node] for each in new if not each.blocking)),
        joining=tuple(joining),
    )


def new_voters(before: View, view: View) -> tuple[str, ...]:
    """Who has got a vote between these two."""
    old = {*before.voter_ids}
    return tuple(node for node in view.voter_ids if node not in old)


def _voteless(node: str) -> Entering:
    """A member that has no vote yet, and is sent nothing."""
    return Entering(node=node, sources=(), blocking=True)


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
    added = link_plan.repair_links(ids, inside, min_degree, impossible)
    heard = {node for each in links for node in each if {*each} & {*ids}}
    return added + [link(observer.id, ids[0]) for observer in observers if observer.id not in heard]


def _among(members: Iterable[Member], links: Iterable[Link]) -> list[Link]:
    ids = {member.id for member in members}
    return [each for each in links if {*each} <= ids]


def _promote(view: View, node: str, early: bool, key: tuple[int, int], step: int) -> View:
    observer = next((each for each in view.observers if each.id == node), None)
    if observer is None:
        raise Nothing(f"{node} is no observer")
    member = msgspec.structs.replace(observer, joined_step=step)
    observers = tuple(each for each in view.observers if each.id != node)
    joining = (_voteless(node),) if early else ()
    return _next(view, key, view.links, members=(*view.members, member), observers=observers, joining=joining)


def _remove(view: View, node: str, key: tuple[int, int], impossible: Container[Link]) -> View:
    """The view without `node`, with new links that keep the rest connected.

    If possible they are none of the `impossible` ones; else those are worth a try.
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
    joining: tuple[Entering, ...] = (),
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
