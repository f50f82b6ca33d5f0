"""What the nodes of a pipeline agree on: who computes, who keeps, and how both change. Pure.

Who computes and who keeps are two tables. A *route* says, for one grain of the batch, which node computes each layer;
the holders of a layer are the nodes on its routes. A layer's state is cut into *chunks*; the *keepers* of a chunk
have its optimizer state, and the first of them is its *root*, where its gradients are summed. Neither table follows
from the other, so data parallelism, a sharded optimizer, a spare copy and a layer that has moved are all the same.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection
from dataclasses import dataclass

Key = tuple[int, int]  # Rank of the scheduler that made the view, and a number that grows.
Copy = tuple[int, str]  # Of this chunk, at that node.
Keepers = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class View:
    """Everything that the nodes agree on."""

    key: Key
    nodes: tuple[str, ...]  # The most senior first; the first one alive is the scheduler.
    routes: tuple[tuple[str, ...], ...]  # By grain, by layer.
    keepers: Keepers  # By chunk, the root first.
    coming: frozenset[Copy] = frozenset()  # Keepers-to-be: they pull the state, and listen to its sums.

    @property
    def parts(self) -> int:
        """Chunks of a layer."""
        return len(self.keepers) // len(self.routes[0])

    def chunks(self, layer: int) -> range:
        """Of this layer."""
        return range(layer * self.parts, (layer + 1) * self.parts)

    def holders(self, layer: int) -> set[str]:
        """Who computes it for some grain, and therefore contributes to its gradient."""
        return {route[layer] for route in self.routes}

    def control_tree(self, me: str) -> tuple[str | None, tuple[str, ...]]:
        """Parent and children on the way of Ready and Commit, which goes through all nodes."""
        root = self.routes[0][0]
        order = [root, *(node for node in self.nodes if node != root)]
        at = order.index(me)
        return order[(at - 1) // 2] if at else None, tuple(order[2 * at + 1 : 2 * at + 3])

    def has_role(self, node: str) -> bool:
        """Would anything be missing without it?"""
        tables = (*self.routes, *self.keepers, [each for _, each in self.coming])
        return any(node in table for table in tables)


def instant_plan(base: View, alive: Collection[str], full: Collection[Copy], key: Key) -> View | list[int]:
    """How to go on at once without the dead. Any node would find the same.

    The next keeper is root. Layers of the dead go to another holder or, for odd grains, to a neighbour on the route:
    it holds nothing of them yet, which GATHER will mend.
    Args:
        full: copies that are complete; who keeps a chunk but lacks its last sum is no copy.
    Returns: the view, or the chunks that nobody has any more.
    """
    keepers = tuple(
        tuple(node for node in nodes if node in alive and (chunk, node) in full)
        for chunk, nodes in enumerate(base.keepers)
    )
    if lost := [chunk for chunk, nodes in enumerate(keepers) if not nodes]:
        return lost
    routes = []
    for grain, route in enumerate(base.routes):
        live = [node for node in route if node in alive] or [node for node in base.nodes if node in alive]
        whole: list[str] = []
        for layer, node in enumerate(route):
            others = sorted(base.holders(layer).intersection(alive))
            neighbor = whole[-1] if whole else live[0]
            whole.append(node if node in alive else others[0] if others and not grain % 2 else neighbor)
        routes.append(tuple(whole))
    nodes = tuple(node for node in base.nodes if node in alive)
    coming = frozenset(each for each in base.coming if each[1] in alive)
    return View(key, nodes, tuple(routes), keepers, coming)


Regroup = Callable[[tuple[str, ...], str], tuple[str, ...]]


def grown(keepers: tuple[str, ...], node: str) -> tuple[str, ...]:
    """One more keeper. Those that it makes superfluous go in a later view, once a step was committed in this one.

    Its last sum may still be on the way when the view is entered, and then it is no copy.
    """
    return (*keepers, node)


@dataclass
class Policy:
    """Stands for the planner: it wants other tables after some of the steps, at random."""

    rng: random.Random
    copies: int
    restless: float  # How often anything is moved that need not be.
    leaver: str = ""
    grow: Regroup = grown

    def propose(self, view: View, caught: Collection[Copy], key: Key) -> View | None:
        """The view to follow `view`, if any; `caught`: keepers-to-be that have the state."""
        rng, coming, table = self.rng, set(view.coming), []
        staying = [node for node in view.nodes if node != self.leaver]
        for chunk, keepers in enumerate(view.keepers):
            ready = sorted(node for each, node in coming.intersection(caught) if each == chunk)
            unused = keepers[-1] if self.leaver not in keepers else self.leaver
            wanted = self.copies + (self.leaver in keepers) + (rng.random() < self.restless)
            others = [node for node in staying if node not in keepers]
            if ready:
                keepers = self.grow(keepers, ready[0])
                coming.discard((chunk, ready[0]))
            elif len(keepers) > max(self.copies, 1):
                keepers = tuple(node for node in keepers if node != unused)
            elif len(keepers) < wanted and others and not any(each == chunk for each, _ in coming):
                coming.add((chunk, rng.choice(others)))
            elif rng.random() < self.restless:  # Another root: both have everything.
                keepers = (*keepers[1:], keepers[0])
            table.append(keepers)
        coming = {each for each in coming if each[1] != self.leaver}
        routes = tuple(self._moved(route, staying) for route in view.routes)
        found = View(key, view.nodes, routes, tuple(table), frozenset(coming))
        if self.leaver in view.nodes and not view.has_role(self.leaver) and not found.has_role(self.leaver):
            found = View(key, tuple(staying), routes, tuple(table), frozenset(coming))
        return None if found == View(key, view.nodes, view.routes, view.keepers, view.coming) else found

    def _moved(self, route: tuple[str, ...], staying: list[str]) -> tuple[str, ...]:
        rng = self.rng
        if rng.random() < self.restless:
            start = rng.randrange(len(route))
            stop = rng.randint(start + 1, len(route))
            route = (*route[:start], *[rng.choice(staying)] * (stop - start), *route[stop:])
        return tuple(node if node in staying else rng.choice(staying) for node in route)
