"""Who can still be reached: the overlay of the view, less what was lost, plus what was found.

Node failure, link failure and partition are one thing here. Ends of a link report it lost; a node is
*reachable* if a path of live links leads to it. A node that died has lost all its links, so it is not
reachable; a node that lost one link still is. Members that are not reachable are what a flush leaves out.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import networkx as nx

from .messages import Electorate, Link, LinkNews, View, ViewKey, link

MAX_STRANGERS = 1024  # Nodes of no view, and links of theirs, that something is remembered of.


class LinkState(enum.Enum):
    """What one end says of a link."""

    OPEN = "open"
    SILENT = "silent"  # Nothing was heard; the other end may be alive.
    CLOSED = "closed"  # The connection was closed: the process at the other end died.


@dataclass(frozen=True, slots=True)
class News:
    """The newest that one end has said of its link to the other."""

    version: int
    state: LinkState
    peer_life: int  # Which life of the other end it spoke of.


def has_quorum(electorate: Electorate, alive: set[str], crashed: set[str]) -> bool:
    """May `alive` go on for the whole electorate? (DESIGN, section 6.)

    A majority may. An exact half may if it holds the most senior member, or if all others are known to
    have crashed, which a closed connection proves and silence does not. So two halves of a partition
    never both go on, and two nodes survive the crash of either.
    """
    voters = electorate.members
    missing = [voter for voter in voters if voter not in alive]
    present = len(voters) - len(missing)
    if 2 * present != len(voters):
        return 2 * present > len(voters)
    return voters[0] in alive or all(voter in crashed for voter in missing)


def lacking(electorates: list[Electorate], alive: set[str], crashed: set[str]) -> Electorate | None:
    """The first electorate without whose quorum `alive` may not go on; None if it may.

    The first is that of the present view and needs a quorum. The others are of views that some of their
    members may still act in; a view all of whose other members have crashed is nobody's any more.
    """
    present, *priors = electorates
    if not has_quorum(present, alive, crashed):
        return present
    for prior in priors:
        if not has_quorum(prior, alive, crashed) and not alive | crashed >= set(prior.members):
            return prior
    return None


class Overlay:
    """What node `me` knows of the links of its view, and of others that happen to be open.

    News of a link comes from its two ends, numbered by the reporter, and may arrive out of order. A link of
    the view lives until one end has lost it; any other connection is found when one end says so and the
    other does not deny it. A process that was started again under the id of a member is not that member: it
    lives in a later `life`, which proves that the member has died.
    """

    def __init__(self, me: str) -> None:
        self.me = me
        self.graph = nx.Graph()
        self.observers: set[str] = set()
        self.news: dict[tuple[str, str], News] = {}  # (reporter, peer)
        self.key: ViewKey = (0, 0)
        self.left: dict[str, tuple[int, ViewKey]] = {}  # Who said farewell: the life, and its last view.
        self.life: dict[str, int] = {}  # Of each node that is, or was, in a view.
        self.latest_life: dict[str, int] = {}  # Of each node that was heard of.
        self.departed: set[str] = set()  # Nodes of earlier views.
        self.reachable: set[str] = {me}

    def enter(self, view: View) -> None:
        """Take over the links of a new view; news about them stays, for it may be newer than the view."""
        self.departed = (self.departed | {*self.graph}) - {*view.node_ids}
        self.graph = nx.Graph(view.links)
        self.graph.add_nodes_from(view.node_ids)
        self.observers, self.key = set(view.observer_ids), view.key
        self.life |= {member.id: member.life for member in (*view.members, *view.observers)}
        self._update()

    def settled(self) -> None:
        """Nobody acts in an older view any more: what is known of nodes that have gone can go."""
        back = self.reborn
        gone, self.departed = self.departed - back, self.departed & back
        self.news = {ends: news for ends, news in self.news.items() if not gone & {*ends}}
        for node in gone:
            self.left.pop(node, None)
            self.life.pop(node, None)
            self.latest_life.pop(node, None)

    def heard(self, told: LinkNews) -> bool:
        """One end tells of a link; True if that changes anything."""
        ends, before = (told.reporter, told.peer), self.news.get((told.reporter, told.peer))
        if before is not None and before.version >= told.version:
            return False
        old = (self.reachable, self.live_links(), self.crashed)
        self.news.pop(ends, None)  # The newest come last.
        self.news[ends] = News(told.version, LinkState(told.state), told.peer_life)
        self.latest_life[told.reporter] = max(told.life, self.latest_life.pop(told.reporter, 0))
        self._forget_strangers()
        self._update()
        return old != (self.reachable, self.live_links(), self.crashed)

    def farewell(self, node: str, life: int, key: ViewKey) -> None:
        """A node has left for good; `key`: of the last view that it acted in."""
        self.left[node] = max((life, key), self.left.pop(node, (0, (0, 0))))
        self._forget_strangers()

    def _forget_strangers(self) -> None:
        """Who is in no view, and may never be, was heard of by others; there is no end to names."""
        most = 2 * MAX_STRANGERS
        if len(self.news) > most and len(self.news) > most + 2 * self.graph.number_of_edges():
            odd = [ends for ends in self.news if not self.life.keys() >= {*ends}]
            for ends in odd[:-MAX_STRANGERS]:
                del self.news[ends]
        for known in (self.left, self.latest_life):
            if len(known) > most + len(self.life):
                odd_names = [node for node in known if node not in self.life]
                for node in odd_names[:-MAX_STRANGERS]:
                    del known[node]

    @property
    def lost(self) -> set[Link]:
        """Links of the view that one end has lost."""
        return {link(a, b) for a, b in self.graph.edges if self.denied(a, b)}

    @property
    def crashed(self) -> set[str]:
        """Nodes that act no more, and have not gone on without us before they ended.

        They are out of reach, and were seen dying by a node in reach, or have said farewell in our view or an
        older one. That a node lives again is no proof: its earlier life may have gone on in newer views.
        """
        died = {
            peer
            for (by, peer), news in self.news.items()
            if news.state is LinkState.CLOSED
            and by in self.reachable
            and self._is_current(peer, news.peer_life)
        }
        left = {
            node
            for node, (life, key) in self.left.items()
            if self._is_current(node, life) and key <= self.key
        }
        return (died | left) - self.reachable

    def live_links(self) -> set[Link]:
        """Links between nodes in reach: of the view and not lost, or found."""
        live = {link(a, b) for a, b in self.graph.edges} - self.lost | self._found()
        return {each for each in live if self.reachable.issuperset(each)}

    def _is_current(self, node: str, life: int) -> bool:
        return life >= self.life.get(node, 0)

    @property
    def reborn(self) -> set[str]:
        """Nodes of the view, or an earlier one, whose name a later process has."""
        return {node for node, life in self.life.items() if self.latest_life.get(node, 0) > life}

    def denied(self, a: str, b: str) -> bool:
        """Does one end say that the link is lost?"""
        both = (self.news.get((a, b)), self.news.get((b, a)))
        return any(news is not None and news.state is not LinkState.OPEN for news in both)

    def _found(self) -> set[Link]:
        return {
            link(a, b)
            for (a, b), news in self.news.items()
            if news.state is LinkState.OPEN and a in self.graph and b in self.graph and not self.denied(a, b)
        }

    def _update(self) -> None:
        """Observers are at the edge: they can be reached, but no path leads through them."""
        live = self.graph.copy()
        live.remove_edges_from(self.lost)
        live.add_edges_from(self._found())
        live.remove_nodes_from(self.reborn)
        live.add_node(self.me)
        heard = {observer: set(live[observer]) for observer in self.observers if observer in live}
        live.remove_nodes_from(self.observers - {self.me})
        self.reachable = set(nx.node_connected_component(live, self.me))
        self.reachable |= {observer for observer, members in heard.items() if members & self.reachable}
