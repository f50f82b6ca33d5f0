"""Which links a thin overlay is repaired with, and which no plan of a view may count on."""

from __future__ import annotations

from collections.abc import Iterable, Set
from dataclasses import dataclass

from ..protocols.messages import Link, View
from . import views
from .tenure import Tenure
from .views import Repair

MIN_DEGREE = 2  # Below it the overlay is repaired: any one node or link may fail.


@dataclass(frozen=True, slots=True)
class Impossible:
    """The set of links that no plan may count on: the named ones, and those between two nodes that can only dial."""

    links: Set[Link]
    silent: frozenset[str]  # Nodes that nobody can dial.

    def __contains__(self, each: object) -> bool:
        return each in self.links or (isinstance(each, tuple) and self.silent.issuperset(each))


class Repairs:
    """What one scheduler has learned about links that are not there."""

    def __init__(self, tenure: Tenure) -> None:
        self.tenure = tenure
        self.unwanted: set[Link] = set()  # Links that somebody had removed: no repair brings them back.
        self.out_of_reach: set[Link] = set()  # Nodes that could not open one: no repair tries it again.

    def entered(self, view: View, known: set[str]) -> None:
        """A view is in force.

        A link in it is wanted again; links of nodes that are not `known` any more are forgotten.
        """
        self.unwanted -= view.link_set
        self.out_of_reach = {each for each in self.out_of_reach if known.issuperset(each)}

    def opened(self, opened: Link) -> None:
        """A link is open, as somebody had asked."""
        self.unwanted.discard(opened)
        self.out_of_reach.discard(opened)

    def removed(self, removed: Link) -> None:
        """A link is closed, as somebody had asked."""
        self.unwanted.add(removed)

    def failed(self, failed: Link) -> None:
        """A link cannot be opened."""
        self.out_of_reach.add(failed)

    def tried(self, node: str, failed: Iterable[Link]) -> None:
        """Joiner `node` has tried its links anew, and could not open these."""
        self.out_of_reach = {each for each in self.out_of_reach if node not in each} | {*failed}

    def missing(self, view: View) -> tuple[Link, ...]:
        """Links that would make the overlay of `view` thick enough."""
        impossible = self.impossible(view)
        return tuple(views.missing_links(view.members, view.observers, view.links, MIN_DEGREE, impossible))

    def untried(self, repair: Repair) -> tuple[Link, ...]:
        """The links of `repair` that may still be opened: one node that can open none must not hold up the rest."""
        view, impossible = self.tenure.view, self.impossible(self.tenure.view)
        return tuple(
            each
            for each in repair.links
            if each not in view.link_set and each not in impossible and view.node_set.issuperset(each)
        )

    def impossible(self, view: View) -> Impossible:
        """Links that somebody has removed, that are dead or could not be opened, or whose ends can only dial."""
        silent = frozenset(member.id for member in view.members if not member.addresses)
        return Impossible(self.unwanted | self.out_of_reach | self.tenure.overlay.denials, silent)
