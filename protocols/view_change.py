"""A view told by what is new in it. Pure.

A view names every node, link and tree: sent whole to everybody, one join costs O(n) bytes a node, and O(n^2) in
all (docs/scale.md). Its change against the view in force is about as large as what has happened.
"""

from __future__ import annotations

from .errors import RemoteProtocolError
from .messages import Tree, TreeChange, View, ViewChange

_NO_TREE = Tree(root="none", parent={})


def told_against(base: View, view: View) -> View | ViewChange:
    """`view` as a change of `base`; itself, if that would not lead back to it."""
    known_members, known_observers = {*base.members}, {*base.observers}
    change = ViewChange(
        base=base.key,
        term=view.term,
        seq=view.seq,
        scheduler=view.scheduler,
        members=tuple(each for each in view.members if each not in known_members),
        observers=tuple(each for each in view.observers if each not in known_observers),
        gone=tuple(sorted(base.node_set - view.node_set)),
        links=tuple(sorted(view.link_set - base.link_set)),
        links_gone=tuple(sorted(base.link_set - view.link_set)),
        trees=tuple(map(_tree_change, _trees(base, len(view.trees)), view.trees)),
        bundle=view.bundle,
        joining=view.joining,
    )
    return change if _applied(base, change) == view else view


def applied(base: View, change: ViewChange) -> View:
    """The view that `change` tells, given its base.

    Who shares both, as the nodes of a simulation do, gets the same view.
    Raises: RemoteProtocolError if it is none that a step could run in.
    """
    known: tuple[View, View] | None = change.__dict__.get("applied")
    if known is not None and known[0] is base:
        return known[1]
    if base.key != change.base:
        raise RemoteProtocolError(f"the view {change.key} is told against {change.base}, not {base.key}")
    view = _applied(base, change)
    if flaw := view.flaw():
        raise RemoteProtocolError(f"a change to a bad view {change.key}: {flaw}")
    change.__dict__["applied"] = (base, view)
    return view


def _applied(base: View, change: ViewChange) -> View:
    away = {*change.gone, *(each.id for each in (*change.members, *change.observers))}
    links = (base.link_set - {*change.links_gone}) | {*change.links}
    return View(
        term=change.term,
        seq=change.seq,
        scheduler=change.scheduler,
        members=(*(each for each in base.members if each.id not in away), *change.members),
        observers=(*(each for each in base.observers if each.id not in away), *change.observers),
        links=tuple(sorted(links)),
        trees=tuple(map(_tree, _trees(base, len(change.trees)), change.trees)),
        bundle=change.bundle,
        joining=change.joining,
    )


def _trees(base: View, count: int) -> tuple[Tree, ...]:
    """The first `count` of the base; where it has fewer, empty ones."""
    return (*base.trees[:count], *(count - len(base.trees)) * (_NO_TREE,))


def _tree_change(before: Tree, tree: Tree) -> TreeChange:
    known = before.parent
    return TreeChange(
        root=tree.root,
        share=tree.share,
        parent={node: parent for node, parent in tree.parent.items() if known.get(node) != parent},
        gone=tuple(sorted(known.keys() - tree.parent.keys())),
    )


def _tree(before: Tree, change: TreeChange) -> Tree:
    parent = before.parent | change.parent
    for node in change.gone:
        parent.pop(node, None)
    return Tree(root=change.root, parent=parent, share=change.share)
